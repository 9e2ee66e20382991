"""Retention in the writer process: behind the announcement of a save, never in its way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import syckpt
from syckpt import CheckpointManager
from syckpt.repo import history
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.stores.faults import FaultPlan, faulty
from syckpt.testing.scenes import register, same, state_at


def save(ckpt: CheckpointManager, step: int) -> str:
    register(ckpt, state_at(step))
    return str(ckpt.save(wait=True))


def test_the_writer_keeps_what_the_rule_says_and_every_save_goes_on(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, rng=False, save_on_exit=False, max_to_keep=2) as ckpt:
        saved = [save(ckpt, step) for step in range(5)]
        ckpt.wait()
        repository = Repository.open(parse_root(tmp_path))
        assert [commit.dropped for commit in history.log(repository)] == [False, False, True, True, True]
        saved += [save(ckpt, step) for step in range(5, 7)]
    assert [commit.dropped for commit in history.log(repository)] == [False, False, True, True, True, True, True]
    for step in (5, 6):
        assert same(syckpt.load(tmp_path, saved[step]), state_at(step))
    with pytest.raises(syckpt.NotFoundError, match="dropped by retention"):
        syckpt.load(tmp_path, saved[0])
    assert verify(repository).errors == []


def test_a_retention_that_fails_fails_no_save(tmp_path: Path) -> None:
    trace, arm = tmp_path / "trace", tmp_path / "arm"
    plan = FaultPlan(action="error", arm=str(arm), trace=str(trace), spare=os.getpid(), lasting=True)
    with CheckpointManager(faulty(tmp_path / "run" / ".syckpt", plan), rng=False, save_on_exit=False, max_to_keep=2) as ckpt:
        for step in range(3):
            save(ckpt, step)
            ckpt.wait()
        lines = [line.partition(" ")[2] for line in trace.read_text().splitlines()]
        first_mark = max(index for index, line in enumerate(lines) if line.startswith("link") and line.endswith(".dropped"))
        save_begins = max(index for index, line in enumerate(lines[:first_mark]) if line.startswith("link intents/"))
        # In the save to come, at the mark that its retention makes: from there on the disk is broken.
        (tmp_path / "new").write_text(str(first_mark - save_begins))
        (tmp_path / "new").rename(arm)
        fourth = save(ckpt, 3)
        ckpt.wait()
        repository = Repository.open(parse_root(tmp_path / "run"))
        assert [commit.dropped for commit in history.log(repository)] == [False, False, False, True]
        (tmp_path / "new").write_text("0")
        (tmp_path / "new").rename(arm)
        fifth = save(ckpt, 4)
    for commit, step in ((fourth, 3), (fifth, 4)):
        assert same(syckpt.load(tmp_path / "run", commit), state_at(step))
    assert [commit.dropped for commit in history.log(repository)] == [False, False, True, True, True]
    assert verify(repository).errors == []
