"""Receipts and the verdict: how ranks' writers agree on a save by what lies in the store."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from syckpt.errors import ConflictError, IntegrityError, RankFailure, RankTimeout, StoreError
from syckpt.repo import documents
from syckpt.repo.receipts import Desk, Receipt

SEAL = "5" * 64


def receipts(desk: Any, commit: str, *, timeout_s: float = 0.0) -> Desk:
    return Desk(desk.repository, "main", commit, timeout_s=timeout_s)


@pytest.fixture
def begun(desk: Any) -> Any:
    """A desk at which a save has begun, and the save's id."""
    desk.open()
    commit, transaction = desk.begin()
    return desk, commit, transaction


def test_parts_come_back_as_they_were_handed_in_whoever_was_first(begun: Any) -> None:
    desk, commit, _ = begun
    two = Receipt(2, SEAL, {"staged_bytes": 7}, {f"objects/{commit}/r00002.safetensors": 100})
    one = Receipt(1, SEAL, {"staged_bytes": 5})
    assert receipts(desk, commit).hand_in(two) is True
    assert receipts(desk, commit).hand_in(one) is True
    assert receipts(desk, commit).hand_in(Receipt(1, "6" * 64, {})) is False
    assert receipts(desk, commit).fail(2, StoreError("full")) is False
    assert receipts(desk, commit).collect([1, 2]) == [one, two]


def test_every_rank_that_failed_is_named_and_the_class_is_the_first_ones(begun: Any) -> None:
    desk, commit, _ = begun
    receipts(desk, commit).fail(1, StoreError("the disk is full"))
    receipts(desk, commit).fail(3, IntegrityError("odd bytes"))
    with pytest.raises(StoreError, match=r"failed on rank\(s\) 1, 3: rank 1: the disk is full; rank 3: odd bytes"):
        receipts(desk, commit).collect([1, 2, 3])


def test_a_rank_that_waits_no_longer_decides_in_rank_0s_place(begun: Any) -> None:
    desk, commit, _ = begun
    receipts(desk, commit).hand_in(Receipt(1, SEAL, {}))
    late = receipts(desk, commit)
    with pytest.raises(RankTimeout, match=r"rank\(s\) 0 did not decide it"):
        late.await_verdict(1)
    assert not late.is_settled  # rank 0 may be about to publish it: the part stays
    for call in (lambda d: d.require_undecided(), lambda d: d.collect([1]), lambda d: d.await_verdict(2)):
        with pytest.raises(RankTimeout, match=r"rank\(s\) 0 did not decide it"):
            call(receipts(desk, commit))
    with pytest.raises(ConflictError):
        receipts(desk, commit).decide(SEAL)


def test_rank_0s_verdict_is_final_and_a_second_one_changes_nothing(begun: Any) -> None:
    desk, commit, _ = begun
    receipts(desk, commit).decide(None, StoreError("no space"))
    for rank in (1, 2):
        heard = receipts(desk, commit)
        with pytest.raises(StoreError, match="no space"):
            heard.await_verdict(rank)
        assert heard.is_settled


def test_a_save_that_rank_0_was_publishing_when_a_rank_gave_it_up_is_a_success_to_who_looks_then(begun: Any) -> None:
    desk, commit, transaction = begun
    packed = desk.pack(commit, {"x": np.arange(4, dtype=np.float32)}, parent=None)
    receipts(desk, commit).decide(None, RankTimeout("rank(s) 0 did not decide it"), rank=2)
    made = desk.describe(commit, packed, parent=None)
    _, published = transaction.publish(made, hold=desk.hold, reader=desk.reader, locations=[packed.locations])
    assert receipts(desk, commit).await_verdict(1) == published.seal


def test_a_published_save_whose_verdict_is_lost_is_found_in_the_records(desk: Any) -> None:
    desk.open()
    commit = desk.save()
    assert receipts(desk, commit.id).await_verdict(1) == commit.seal


def test_a_save_whose_intent_is_gone_is_not_waited_for(begun: Any) -> None:
    desk, commit, transaction = begun
    transaction.abort()
    with pytest.raises(RankFailure, match="another incarnation of the job cleared it"):
        receipts(desk, commit, timeout_s=3600).collect([1])
    heard = receipts(desk, commit, timeout_s=3600)
    with pytest.raises(RankFailure, match=r"rank\(s\) 0 gave it up, or another incarnation of the job cleared it"):
        heard.await_verdict(1)
    assert heard.is_settled


@pytest.mark.parametrize("told", [{}, {"rank": 0, "seal": None, "error": {"class": "StoreError"}}, {"rank": 0, "seal": 3, "error": None}])
def test_a_malformed_verdict_is_an_integrity_error(begun: Any, told: dict[str, Any]) -> None:
    desk, commit, _ = begun
    heard = receipts(desk, commit)
    key = f"receipts/main/{commit}/verdict.json"
    documents.write(desk.store, key, {"kind": "verdict", "version": 1, "commit": commit, **told})
    with pytest.raises(IntegrityError, match=key):
        heard.await_verdict(1)


def test_a_receipt_with_odd_sizes_is_refused(begun: Any) -> None:
    desk, commit, _ = begun
    body = {"kind": "receipt", "version": 1, "commit": commit, "rank": 1, "manifest": SEAL, "stats": {}, "blobs": {"a": "1"}, "error": None}
    documents.write(desk.store, f"receipts/main/{commit}/r00001.json", body)
    with pytest.raises(IntegrityError, match="'blobs' is not one of keys to sizes"):
        receipts(desk, commit).collect([1])


@pytest.mark.parametrize(
    ("ranks", "most_s", "most_nbytes"), [(1024, 5.0, 8 << 20), pytest.param(8192, 40.0, 64 << 20, marks=pytest.mark.slow)]
)
def test_the_parts_of_a_thousand_ranks_are_collected_in_time_and_memory_that_grow_with_their_number(
    begun: Any, ranks: int, most_s: float, most_nbytes: int
) -> None:
    """Each rank leads to its own bytes, and to those of the saves of a cycle before."""
    desk, commit, _ = begun
    for rank in range(1, ranks):
        blobs = {f"objects/0badc0de-{age:016x}/r{rank:05d}.safetensors": 1000 + age for age in range(8)}
        receipts(desk, commit).hand_in(Receipt(rank, SEAL, {"staged_bytes": 1}, blobs))
    tracemalloc.start()
    begins = time.process_time()
    found = receipts(desk, commit, timeout_s=3600).collect(range(1, ranks))
    took_s, (_, peak) = time.process_time() - begins, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [part.rank for part in found] == list(range(1, ranks))
    assert took_s < most_s
    assert peak < most_nbytes
