"""Dropping commits of several ranks: a rank's files may be gone while another rank's rows are still needed."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from syckpt.objects.commit import Commit
from syckpt.repo.keys import mark_key
from syckpt.repo.reader import Reader
from syckpt.repo.repacking import plan_sweeps, run_sweeps
from syckpt.repo.repository import Repository
from syckpt.repo.survey import Survey, drop
from syckpt.repo.verify import verify
from syckpt.testing.commits import make_commit


def save(root: Path, kept: torch.Tensor, *, seed: int) -> tuple[Repository, Commit]:
    """Save `kept` from rank 0, and from rank 1 a tensor that no other commit has."""
    other = torch.randn(3000, generator=torch.Generator().manual_seed(seed))
    repository = make_commit(root, {"model": {"kept": kept}}, {"model": {"other": other}})
    head = repository.refs.head("heads/main")
    assert head is not None
    assert head.commit is not None
    return repository, repository.read_commit(head.commit)


def mark_long_ago(repository: Repository, commit: Commit) -> None:
    repository.mark(commit.id, "dropped", why="a test")
    os.utime(Path(repository.store.describe()) / mark_key(commit.id, "dropped"), (0, 0))


def test_a_base_stays_while_the_commit_between_is_being_dropped_by_another_process(tmp_path: Path) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    _, keyframe = save(tmp_path, values, seed=1)
    _, between = save(tmp_path, values * (1 + 2**-20), seed=2)
    repository, kept = save(tmp_path, values * (1 + 2**-20), seed=3)
    place = Reader(repository).snapshot(kept, 0).places[0]
    assert place is not None
    assert place.base is not None
    assert (place.owner, place.base.owner) == ((between.id, 0), (keyframe.id, 0))
    mark_long_ago(repository, keyframe)
    save(tmp_path, torch.randn(3000, generator=torch.Generator().manual_seed(4)), seed=5)  # A new cycle: its tip needs no older base.

    other = Survey(repository)
    assert drop(other, [between.id], why="a test", protected=lambda sight: ()) == [between.id]
    run_sweeps(repository, plan_sweeps(other))
    assert repository.store.size(f"objects/{between.id}/r00001.locations.0001") is None
    run_sweeps(repository, plan_sweeps(Survey(repository)))

    assert verify(repository, kept.id).errors == []
