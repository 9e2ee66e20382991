"""Many processes at one repository at once: nothing is lost, nothing is wrong, and nothing is left over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import syckpt
from syckpt.errors import NotFoundError
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root

CROWD = Path(__file__).with_name("crowd.py")
STOPPED = Path(__file__).with_name("stopped.py")


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


# -- a writer that is stopped ------------------------------------------------------------------------------------------------------


def stop(directory: Path, *, first: int, step: int) -> list[dict[str, Any]]:
    """Stop a save before mutations `first`, `first + step`, ...; see `stopped.py`."""
    done = subprocess.run(
        [sys.executable, str(STOPPED), str(directory), str(first), str(step)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_harmless(found: list[dict[str, Any]]) -> None:
    for scene in found:
        assert (scene["wrong"], scene["left"]) == ([], []), scene
        assert "saved" in scene["told"] or scene["told"]["error"] == "ConflictError", scene
    # Before its record it has lost, behind it the save is there.
    published = [scene["published"] for scene in found]
    assert published == sorted(published)
    assert (published[0], published[-1]) == (False, True)
    assert all(scene["published"] for scene in found if "saved" in scene["told"])


def test_a_writer_stopped_and_continued_after_a_newer_incarnation_has_cleaned_harms_nothing(tmp_path: Path) -> None:
    found = stop(tmp_path, first=1, step=16)
    assert len(found) >= 5
    assert_harmless(found)


@pytest.mark.slow
def test_a_writer_stopped_before_any_mutation_of_a_save_harms_nothing(tmp_path: Path) -> None:
    found = stop(tmp_path, first=1, step=1)
    assert len(found) >= 60
    assert_harmless(found)


# -- real managers -----------------------------------------------------------------------------------------------------------------

TRAINER = """
import os, sys, torch
from syckpt import CheckpointManager
root, number, steps, kill_at = sys.argv[1], *map(int, sys.argv[2:])
generator = torch.Generator().manual_seed(number)
frozen = torch.randn(5000, generator=torch.Generator().manual_seed(99))
with CheckpointManager(root, branch=f"m{number}", max_to_keep=3, save_on_exit=False) as ckpt:
    ckpt.state = {"frozen": frozen, "x": torch.zeros(3000), "step": 0}
    ckpt.restore()
    state = ckpt.state
    while state["step"] < steps:
        state = {"frozen": frozen, "x": state["x"] + torch.full((3000,), 0.5 + number), "step": state["step"] + 1}
        ckpt.state = state
        ckpt.step_up()
        ckpt.save(wait=True)
        print("saved", state["step"], flush=True)
        if state["step"] == kill_at:
            os.kill(os.getpid(), 9)
"""

CLEANER = """
import sys, os
from syckpt.repo import collection
from syckpt.repo.repacking import repack
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
collection.REFLOG_S = 0.0
while not os.path.exists(sys.argv[2]):
    repository = Repository.open(parse_root(sys.argv[1]))
    collection.collect(repository)
    repack(repository, dead_share=0.0)
    report = verify(repository)
    assert report.ok, report.errors
    print("cleaned", flush=True)
"""


@pytest.mark.slow
def test_three_managers_that_are_killed_and_run_again_beside_cleaning_lose_nothing(tmp_path: Path) -> None:
    root, over = tmp_path / "run", tmp_path / "over"
    with syckpt.CheckpointManager(root, save_on_exit=False) as ckpt:
        ckpt.state = {"frozen": torch.zeros(1), "x": torch.zeros(3000), "step": 0}
        ckpt.save(wait=True)

    def start(number: int, kill_at: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TRAINER, str(root), str(number), "12", str(kill_at)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    cleaner = subprocess.Popen(
        [sys.executable, "-c", CLEANER, str(root), str(over)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for kill_at in (3, 7, 0):
            trainers = [start(number, kill_at + (number if kill_at else 0)) for number in range(3)]
            for trainer in trainers:
                _, errors = trainer.communicate(timeout=300)
                assert trainer.returncode == (-9 if kill_at else 0), errors
    finally:
        over.touch()
        cleaned, errors = cleaner.communicate(timeout=300)
    assert cleaner.returncode == 0, errors
    assert "cleaned" in cleaned
    for number in range(3):
        for back in range(3):
            state = syckpt.load(root, f"m{number}~{back}")["state"]
            step = 12 - back
            assert state["step"] == step
            assert torch.equal(state["x"], torch.full((3000,), step * (0.5 + number)))
            assert torch.equal(state["frozen"], torch.randn(5000, generator=torch.Generator().manual_seed(99)))
        with pytest.raises(NotFoundError, match="dropped"):
            syckpt.load(root, f"m{number}~4")
    repository = Repository.open(parse_root(root))
    assert verify(repository).errors == []
    assert repository.store.list("intents/") == []
