"""Many processes at one repository at once: nothing is lost, nothing is wrong, and nothing is left over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CROWD = Path(__file__).with_name("crowd.py")


def play(directory: Path, **settings: Any) -> dict[str, Any]:
    """Let a crowd work in a directory, and return its summary, without problems."""
    done = subprocess.run(
        [sys.executable, str(CROWD), str(directory), json.dumps(settings)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    print(summary)
    assert summary["problems"] == [], "\n\n".join(summary["problems"])
    return summary


def test_a_few_that_are_killed_and_begun_again_beside_every_kind_of_cleaning_lose_nothing(tmp_path: Path) -> None:
    summary = play(tmp_path, seed=1, committers=5, commits=6, kills=4)
    # Two of `main`, six each, and one more each afterwards.
    assert summary["commits"] >= 2 + 5 * 7
    assert summary["kills"] >= 2
    assert summary["dropped"] >= 5
    assert {"check", "fork", "gc", "read", "repack", "retain"} <= set(summary["done"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_that_are_killed_and_begun_again_beside_every_kind_of_cleaning_lose_nothing(tmp_path: Path, seed: int) -> None:
    summary = play(tmp_path, seed=seed, committers=20, commits=12, kills=30, cleaners=2, limit_s=800)
    assert summary["commits"] >= 2 + 20 * 13
    assert summary["kills"] >= 15
    assert summary["dropped"] >= 7 * 8
