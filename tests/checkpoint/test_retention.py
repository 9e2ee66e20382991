"""Retention in the writer process: behind the announcement of a save, never in its way."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

import syckpt
from syckpt import CheckpointManager, Retention
from syckpt.repo import history
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.stores.faults import FaultPlan, faulty
from syckpt.testing.scenes import register, same, state_at, stranger


def save(ckpt: CheckpointManager, step: int, name: str | None = None, **facts: Any) -> str:
    register(ckpt, state_at(step))
    return str(ckpt.save(name, wait=True, **facts))


def there(ckpt: CheckpointManager) -> list[str]:
    """Return the commits of the branch that are there, oldest first, once retention has been behind the newest save."""
    return [commit.id for commit in reversed(ckpt.log()) if not commit.dropped]


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


def test_every_rule_and_every_protection_through_the_manager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held: dict[str, int] = {}

    def exact(ckpt: CheckpointManager) -> bool:
        found = there(ckpt)
        return all(same(ckpt.load(commit), state_at(held[commit])) for commit in found)

    with CheckpointManager(tmp_path, rng=False, save_on_exit=False, keep=Retention(last=2, best=1), maximize=True) as ckpt:
        metrics = [5.0, math.nan, 7.0, 7.0, None, 1.0, 1.0]
        saved = [
            save(ckpt, n, "first" if n == 0 else None, metric=metric, tags=["v1"] if n == 1 else []) for n, metric in enumerate(metrics)
        ]
        held |= {commit: step for step, commit in enumerate(saved)}
        # The tagged one, the newest of the two best, and the last two.
        assert there(ckpt) == [saved[1], saved[3], saved[5], saved[6]]
        assert ckpt.load("best")["notes"]["count"] == 3
        for rev in ("first", saved[0], "HEAD~6"):
            with pytest.raises(syckpt.NotFoundError, match=f"{saved[0]} was dropped by retention; its record stays in the log"):
                ckpt.load(rev)
        for call in (ckpt.goto, ckpt.diff, ckpt.verify, lambda rev: ckpt.tag("x", rev), lambda rev: ckpt.create_branch("x", at=rev)):
            with pytest.raises(syckpt.NotFoundError, match="was dropped by retention"):
                call(saved[0])
        with pytest.raises(syckpt.NotFoundError, match="was dropped by retention"):
            ckpt.export_ckpt(saved[0], tmp_path / "out.pt")
        assert not (tmp_path / "out.pt").exists()
        # Its name is free, and taken again.
        held[save(ckpt, 7, "first", metric=0.0)] = 7
        with pytest.raises(syckpt.ConflictError):
            save(ckpt, 8, "first")
        ckpt.tag("v2", saved[6])
        # Back to a kept one, whose cycle has long been dropped, and on from there.
        ckpt.goto("v1")
        assert same(ckpt.notes, state_at(1)["notes"])
        for step in (11, 12, 13):
            held[save(ckpt, step)] = step
        assert exact(ckpt)
        assert {saved[1], saved[3], saved[6]} <= {commit for commit in held if not ckpt._repository.read_commit(commit).dropped}
        ckpt.create_branch("wide")
        fork = ckpt.hash
        for step in (21, 22, 23, 24):
            held[save(ckpt, step)] = step
        assert exact(ckpt)
        wide = there(ckpt)
        assert [held[commit] for commit in wide] == [1, 12, 13, 23, 24]
        ckpt.print_tree()
        assert capsys.readouterr().out.count("[dropped]") == 7
        assert {found.commit.dropped for found in ckpt.similar(k=20)} == {False}
        assert ckpt.retain(dry_run=True).dropped == ()
        assert ckpt.gc().freed_nbytes == 0
    assert fork is not None
    # A run that keeps less than the age of its keyframe, several times resumed.
    for step in (31, 32, 33):
        with CheckpointManager(tmp_path, rng=False, save_on_exit=False, branch="main", max_to_keep=1) as ckpt:
            register(ckpt, stranger())
            assert same(ckpt.notes, state_at(ckpt.resumed and held[ckpt.resumed.id])["notes"])
            held[save(ckpt, step)] = step
            ckpt.wait()
            assert exact(ckpt)
            assert fork in there(ckpt)
    assert verify(Repository.open(parse_root(tmp_path))).errors == []
