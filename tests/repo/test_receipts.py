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


def test_of_thousands_of_ranks_that_failed_every_rank_is_told_of_a_few(begun: Any) -> None:
    desk, commit, _ = begun
    for rank in range(1, 1001):
        receipts(desk, commit).fail(rank, StoreError("the disk is full"))
    with pytest.raises(StoreError, match=r"failed on rank\(s\) 1, 2, .*, 16 and 984 more: rank 1: the disk is full; ") as failed:
        receipts(desk, commit).collect(range(1, 1001))
    assert str(failed.value).count("the disk is full") == 16


def test_of_thousands_of_ranks_that_are_missing_a_few_are_named(begun: Any) -> None:
    desk, commit, _ = begun
    receipts(desk, commit).hand_in(Receipt(2, SEAL, {}))
    with pytest.raises(RankTimeout, match=r"rank\(s\) 1, 3, 4, .*, 17 and 983 more did not complete their part"):
        receipts(desk, commit).collect(range(1, 1001))


def test_a_look_for_missing_parts_is_one_listing_however_many_are_missing(begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, commit, _ = begun
    asked: list[str] = []
    listing, size = desk.store.list, desk.store.size
    monkeypatch.setattr(desk.store, "list", lambda prefix, **options: asked.append(prefix) or listing(prefix, **options))
    monkeypatch.setattr(desk.store, "size", lambda key: asked.append(key) or size(key))
    with pytest.raises(RankTimeout):
        receipts(desk, commit).collect(range(1, 8192))
    assert asked == [f"receipts/main/{commit}/", f"receipts/main/{commit}/verdict.json", f"intents/{commit}.json"]


class Clock:
    """Time that passes in pauses only."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


@pytest.mark.parametrize(("world_size", "longest_s", "looks"), [(2, 0.05, 1208), (512, 0.0512, 1180), (8192, 0.8192, 88)])
def test_the_more_ranks_look_the_longer_each_pauses(
    begun: Any, monkeypatch: pytest.MonkeyPatch, world_size: int, longest_s: float, looks: int
) -> None:
    """So that the store has ten thousand looks a second to answer, at most."""
    desk, commit, _ = begun
    clock = Clock()
    monkeypatch.setattr("syckpt.repo.receipts.time", clock)
    with pytest.raises(RankTimeout, match="did not complete their part within 60 s"):
        Desk(desk.repository, "main", commit, timeout_s=60.0, world_size=world_size).collect([1])
    assert max(clock.pauses) == pytest.approx(longest_s)
    assert len(clock.pauses) == looks


def test_parts_that_name_a_blob_which_is_not_there_in_its_size_are_lacking(begun: Any) -> None:
    desk, commit, _ = begun
    desk.store.create("objects/whole", bytes(3))
    desk.store.create("objects/short", bytes(2))
    good, cut, lost = (
        Receipt(rank, SEAL, {}, {"objects/whole": 3, **more})
        for rank, more in enumerate([{}, {"objects/short": 3}, {"objects/lost": 1}], start=1)
    )
    assert receipts(desk, commit).lacking([good, cut, lost]) == [cut, lost]


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
