"""The tables of faults in the docs are made by running them, and say that syckpt loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import syckpt
from syckpt.testing.injection import no_mounts, no_strace

DOCS = Path(syckpt.__file__).parent / "docs/faults.md"


README = Path(__file__).parents[2] / "README.md"


def tried(page: str) -> int:
    """Return how many faults syckpt met, by the last lines of the two tables; none was lost."""
    saves, cleanings = [line.strip("| ").split(" | ")[1:] for line in page.splitlines() if line.startswith("| **all** |")]
    assert (len(saves), len(cleanings)) == (4, 3)
    ours = [saves[0], *cleanings]
    assert [cell.rpartition(", ")[2] for cell in ours] == ["**lost: 0**"] * 4
    return sum(int(cell.split()[0]) for cell in ours)


def test_the_page_says_that_syckpt_loses_nothing_and_the_readme_how_many_faults_were_tried() -> None:
    count = tried(DOCS.read_text())
    assert count > 200
    assert f"[{count} faults tried, none lost]" in README.read_text()


@pytest.mark.slow
@pytest.mark.skipif(bool(no_strace() or no_mounts()), reason=str(no_strace() or no_mounts()))
def test_the_tables_can_be_made() -> None:
    script = Path(__file__).with_name("table.py")
    done = subprocess.run([sys.executable, str(script), "--most", "1"], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert tried(done.stdout) > 30
