"""Ranks work out, save after save, who hands which part to its writer; threads of this process play them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syckpt.checkpoint.saves import _sameness
from syckpt.checkpoint.share import Sharing
from syckpt.dist.coordinator import StoreCoordinator
from syckpt.state.flatten import flatten
from syckpt.state.staging import Part

LIMIT_S = 60.0


class Heard(StoreCoordinator):
    """Keeps what its rank brings to the agreements in which replicas are compared, and their verdicts."""

    def __init__(self, store: Any, *, rank: int, world_size: int) -> None:
        super().__init__(store, rank=rank, world_size=world_size, session="s", timeout_s=LIMIT_S)
        self.brought: list[dict[str, Any]] = []
        self.verdicts: list[dict[str, Any]] = []

    def agree(self, topic: str, mine: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().agree(topic, mine, *args, **kwargs)
        if topic == "replicas":
            self.brought.append(mine)
            self.verdicts.append(found)
        return found


class Job:
    """Ranks, and how they hand over."""

    def __init__(self, world_size: int) -> None:
        store = dist.HashStore()
        self.ranks = [Heard(store, rank=rank, world_size=world_size) for rank in range(world_size)]
        self.sharing = [Sharing(rank) for rank in self.ranks]
        self._pool = ThreadPoolExecutor(world_size)

    def save(self, *states: dict[str, Any]) -> list[dict[str, str]]:
        """Save; return what becomes of each rank's tensors: `stored`, `local`, or `left` to another one."""
        made = list(self._pool.map(self._save, self.ranks, self.sharing, states))
        return [
            {str(part.path[1]): "local" if part.local else "left" if part.array is None else "stored" for part in mine} for mine in made
        ]

    @staticmethod
    def _save(rank: Heard, sharing: Sharing, state: dict[str, Any]) -> list[Part]:
        flat = flatten({"m": state})
        facts = sharing.facts(flat, "<rng>")
        replicas = sharing.replicas(flat, facts, "<rng>")
        same = rank.agree("save", {"items": ["m"], "schema": facts.schema, "replicas": replicas.summary}, _sameness)
        return sharing.share(flat, facts, replicas, own="<rng>", at="", **same)

    def owners(self) -> dict[str, int]:
        """Return what the table says of plain tensors."""
        table = self.sharing[0].table
        assert table is not None
        return dict(zip((path[1] for path in table["tensors"]["path"]), table["tensors"]["copy"], strict=True))


def ones(*names: str, value: float = 1.0, size: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), value) for name in names}


def test_ranks_with_one_structure_agree_on_nothing_more() -> None:
    job = Job(2)
    assert job.save(ones("a", "b"), ones("a", "b")) == [{"a": "stored", "b": "left"}, {"a": "left", "b": "stored"}]
    table = job.sharing[0].table
    assert job.owners() == {"a": 0, "b": 1}
    assert job.save(ones("a", "b", value=2.0), ones("a", "b", value=2.0)) == [{"a": "stored", "b": "left"}, {"a": "left", "b": "stored"}]
    assert job.sharing[0].table is table
    assert [rank.brought for rank in job.ranks] == [[], []]
    assert job.sharing[1].table is None


def test_a_tensor_that_differs_is_kept_by_each_and_the_table_stays(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    job.save(ones("a", "b"), ones("a", "b"))
    table = job.sharing[0].table
    handed = job.save(ones("a", "b"), ones("a") | ones("b", value=2.0))
    assert handed == [{"a": "stored", "b": "local"}, {"a": "left", "b": "local"}]
    assert job.sharing[0].table is table
    assert [record.getMessage() for record in caplog.records] == ["1 tensor differs between ranks and is kept by each: m/b"]
    # Structures are the same: nobody has to tell them.
    assert [[brought["structure"] for brought in rank.brought] for rank in job.ranks] == [[None], [None]]
    # A run saves again and again: what was said is not said again, what comes to it is.
    job.save(ones("a", "b"), ones("a") | ones("b", value=3.0))
    job.save(ones("a", "b"), ones("a", "b", value=3.0))
    job.save(ones("a", "b"), ones("a", "b", value=4.0))
    told = [record.getMessage() for record in caplog.records[1:]]
    assert told == ["2 tensors differ between ranks and are kept by each: m/a, m/b"]


def test_ranks_with_other_keys_tell_them_once_and_rank_0_says_once_who_stores_what() -> None:
    job = Job(3)
    states = [ones("first", "both"), ones("both", "last"), ones("last")]
    expected = [{"first": "stored", "both": "left"}, {"both": "stored", "last": "left"}, {"last": "stored"}]
    assert job.save(*states) == expected
    table = job.sharing[0].table
    assert job.owners() == {"first": 0, "both": 1, "last": 2}
    assert job.save(*states) == expected
    assert job.sharing[0].table is table
    assert [[brought["structure"] is None for brought in rank.brought] for rank in job.ranks] == [[False, True]] * 3
    assert [[verdict["placement"] is None for verdict in rank.verdicts] for rank in job.ranks] == [[False, True]] * 3
    # Another structure of one rank: only that one tells it, and all hear who stores what now.
    assert job.save(*states[:2], ones("more")) == [
        {"first": "stored", "both": "stored"},
        {"both": "left", "last": "stored"},
        {"more": "stored"},
    ]
    assert [rank.brought[-1]["structure"] is None for rank in job.ranks] == [True, True, False]
    assert [rank.verdicts[-1]["placement"] is None for rank in job.ranks] == [False] * 3
    assert job.sharing[0].table is not table


def test_of_ranks_with_one_structure_one_tells_it() -> None:
    job = Job(4)
    stage = [ones("a"), ones("a"), ones("z"), ones("z")]
    assert job.save(*stage) == [{"a": "stored"}, {"a": "left"}, {"z": "stored"}, {"z": "left"}]
    assert [rank.brought[-1]["structure"] is None for rank in job.ranks] == [False, True, False, True]
    # Rank 2 has another one now, and rank 3, which never told it, what rank 2 had.
    assert job.save(*stage[:2], ones("a"), ones("z")) == [{"a": "stored"}, {"a": "left"}, {"a": "left"}, {"z": "stored"}]
    assert [rank.brought[-1]["structure"] is None for rank in job.ranks] == [True] * 4
    job.save(*stage[:2], ones("new"), ones("a"))
    assert [rank.brought[-1]["structure"] is None for rank in job.ranks] == [True, True, False, True]
    job.save(*stage)
    assert [rank.brought[-1]["structure"] is None for rank in job.ranks] == [True, True, False, True]
    assert job.owners() == {"a": 0, "z": 2}


def test_every_tensor_is_handed_over_once_whatever_the_structures_were_before() -> None:
    job = Job(3)
    one, other = [ones("a", "b", "c")] * 3, [ones("a", "b"), ones("b", "c"), ones("c", "a")]
    changed = [other[1], other[0], other[2]]
    for states in (one, other, one, changed, other, other, one):
        handed = job.save(*states)
        assert sorted(name for mine in handed for name, how in mine.items() if how == "stored") == ["a", "b", "c"]
        assert {name: rank for rank, mine in enumerate(handed) for name, how in mine.items() if how == "stored"} == job.owners()


def test_a_rank_that_missed_a_verdict_hears_the_next_one() -> None:
    job = Job(2)
    states = [ones("a", "b"), ones("b", "c")]
    handed = job.save(*states)
    sharing = job.sharing[1]
    before = sharing._told_schema, sharing._placement
    job.save(states[0], ones("d"))
    sharing._told_schema, sharing._placement = before
    assert job.save(*states) == handed == [{"a": "stored", "b": "stored"}, {"b": "left", "c": "stored"}]
    assert [rank.verdicts[-1]["placement"] is None for rank in job.ranks] == [False, False]
    assert [rank.brought[-1]["structure"] is None for rank in job.ranks] == [True, True]
