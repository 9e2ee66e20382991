"""Branches on two ranks: made, cut off, gone on with and left by all of them together, or by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syckpt import CheckpointManager
from syckpt.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("standing")

RANKS = Path(__file__).parent / "standing_ranks.py"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("played")
    return root, [result.value for result in run_ranks(RANKS, "play", str(root), world_size=2, timeout_s=300)]


def test_ranks_make_branches_go_on_with_them_and_leave_them_together(played: tuple[Path, list[Any]]) -> None:
    root, results = played[0], [told[:3] for told in played[1]]
    for rank, (cut, rest, other) in enumerate(results):
        assert cut["found"] == ["one", 0, rank, [0, 0, 0, 0]]
        assert rest["found"] == ["one", 6, rank, [6, 6, 6, 6]]
        assert rest["main"] == other["main"] == ["main", 0, rank, [0, 0, 0, 0]]
        assert other["found"] == ["two", 0, rank, [0, 0, 0, 0]]
        assert other["refused"] == [["StateError", "two"]] * 2
        assert (rest["branches"], other["branches"]) == (["main", "one"], ["main", "one", "two"])
        # Two epochs of eight samples a rank, each as the uninterrupted trial has them.
        assert cut["seen"] + rest["seen"] == other["seen"]
    epochs = [samples for cut, rest, _ in results for samples in (cut["seen"] + rest["seen"],)]
    assert sorted(epochs[0][:8] + epochs[1][:8]) == sorted(epochs[0][8:] + epochs[1][8:]) == list(range(16))
    assert results[0][1]["hash"] == results[1][1]["hash"]
    for name in ("one", "two"):
        assert [c.step for c in CheckpointManager(root, branch=name).log()] == [8, 8, 6, 4, 2, 0]


def test_a_save_every_some_minutes_is_due_by_rank_0s_clock_and_ranks_talk_of_it_now_and_then(played: tuple[Path, list[Any]]) -> None:
    root, (first, second) = played[0], [told[3] for told in played[1]]
    steps = [c.step for c in reversed(CheckpointManager(root / "clock").log())]
    assert len(steps) == 4
    assert all(0 <= step - 10 * number <= 2 for number, step in enumerate(steps, start=1)), steps
    assert first == second
    assert sum(talked > 0 for talked in first) <= 24
