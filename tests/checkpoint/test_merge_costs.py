"""What the writers of many ranks ask of the store in one save: as many calls more as there are ranks more, and no others."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from syckpt.checkpoint import writer
from syckpt.errors import StoreError
from syckpt.objects.layouts import LayoutTable
from syckpt.repo import owner
from syckpt.repo.receipts import Desk, Receipt
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold, open_branch
from syckpt.stores.memory import MemoryStore
from syckpt.testing.repositories import commit_id

SEAL = "5" * 64
ID, KEYFRAME = commit_id(2), commit_id(1)


class CountingStore(MemoryStore):
    """Counts calls by their name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: Counter[str] = Counter()

    def get(self, key: str, **range_: Any) -> bytes:
        self.calls["get"] += 1
        return super().get(key, **range_)

    def size(self, key: str) -> int | None:
        self.calls["size"] += 1
        return super().size(key)

    def list(self, prefix: str = "", *, deep: bool = True) -> list[str]:
        self.calls["list"] += 1
        return super().list(prefix, deep=deep)

    def sink(self, key: str) -> Any:
        self.calls["sink"] += 1
        return super().sink(key)


class Channel:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def send(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class Job:
    """The writers of a job of so many ranks, in this process, and a store in which the branch was just opened."""

    def __init__(self, world_size: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.world_size = world_size
        self.store = CountingStore(**options)
        self.repository = Repository(self.store, "00ff")
        self.hold: Hold = open_branch(self.repository, "main", run="run", expected=None)
        self.desk = Desk(self.repository, "main", ID, timeout_s=60.0)
        self._writers: list[Any] = []
        monkeypatch.setattr(Repository, "open", lambda _: self.repository)

    def hand_in(self, rank: int, commits: Sequence[str] = (ID, KEYFRAME)) -> None:
        """Leave the part of a rank that stores values here and points to some of an older commit."""
        blobs = {f"objects/{commit}/r{rank:05d}.safetensors": 100 for commit in commits}
        for key in blobs:
            self.store.create(key, bytes(100))
        stats = dict.fromkeys(
            ("staged_bytes", "deduplicated_bytes", "encoded_bytes", "written_bytes", "trainable", "unchanged_trainable"), 1
        )
        self.desk.hand_in(Receipt(rank, SEAL, stats, blobs, {"model": SEAL}))

    def save(self, rank: int) -> dict[str, Any]:
        """Let a rank's writer make its part of the save; return what it tells the trainer of the end."""
        channel: Any = Channel()
        start = {
            "store": {"kind": "memory", "path": "", "options": {}},
            "branch": "main",
            "run": "run",
            "generation": self.hold.generation,
            "number": self.hold.number,
            "tip": None,
            "rank": rank,
            "world_size": self.world_size,
            "timeout_s": 60.0,
            "signer": None,
            "retention": None,
            "trainer": vars(owner.this_process()),
            "token": "token",
            "compression": "none",
            "keyframe_every": 8,
            "threads": 1,
        }
        made: Any = writer._Writer(channel, start)
        self._writers.append(made)
        made._slots[0] = mmap.mmap(-1, 4096)
        made._table = LayoutTable(self.world_size, {}, (), (), ())
        meta = {"step": 1, "epoch": 0, "batch_idx": 0, "epoch_done": False, "entered": False, "metric": None, "message": "", "tags": []}
        meta |= {"name": None, "config": {"dict": []}, "fingerprint": "00000000", "rng_exact": True, "sequence": 1, "stats": {}}
        meta |= {"created_ns": "0", "writer": "test"}
        columns = {"path": [["model", "x"]], "dtype": ["float32"], "shape": [[64]], "box": [None], "offset": [0], "local": [False]}
        message = {"op": "save", "id": ID, "slot": 0, "after": None, "tensors": columns, "items": {"model": {"tensor": 0}}, "meta": meta}
        message |= {"trainable": [], "rng": None, "layouts": {}, "sharding": {}, "sent": {}, "has_table": True, "afresh": False}
        self.store.calls.clear()
        made.handle(writer._Mail(message, None))
        return next(event for event in channel.events if event["event"] in ("published", "failed"))

    def close(self) -> None:
        for key in self.store.list("receipts/"):
            self.store.delete(key)  # else rank 0's writer gives the others some seconds to do it
        for made in self._writers:
            made.close()


@pytest.fixture
def make_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(world_size: int, **options: Any) -> Job:
        jobs.append(Job(world_size, monkeypatch, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.mark.parametrize(("ranks", "reads", "looks"), [(200, 199 + 1, 2 * 199 + 6), (400, 399 + 1, 2 * 399 + 6)])
def test_rank_0_reads_each_receipt_once_and_looks_once_for_each_blob(make_job: Any, ranks: int, reads: int, looks: int) -> None:
    job = make_job(ranks)
    for rank in range(1, ranks):
        job.hand_in(rank)
    assert job.save(0)["event"] == "published"
    assert job.store.calls == {"get": reads, "size": looks, "list": 3, "sink": 8}


@pytest.mark.parametrize("ranks", [200, 400])
def test_another_ranks_writer_makes_as_many_calls_whatever_the_number_of_ranks(make_job: Any, ranks: int) -> None:
    job = make_job(ranks)
    job.hand_in(1, ())
    for rank in range(2, ranks):
        job.hand_in(rank)
    job.save(0)
    assert job.save(1)["event"] == "published"
    assert job.store.calls == {"get": 4, "size": 11, "sink": 4}


def test_a_rank_removes_its_part_of_a_save_that_was_given_up_and_nothing_of_others(make_job: Any) -> None:
    def give_up(operation: str, key: str) -> None:
        if (operation, key) == ("link", f"receipts/main/{ID}/r00001.json"):
            job.desk.decide(None, StoreError("no space"))

    job = make_job(3, before_mutation=give_up)
    job.hand_in(2)
    job.store.create(f"intents/{ID}.json", b"")
    others = job.store.list("objects/")
    told = job.save(1)
    assert (told["event"], told["error"]["message"]) == ("failed", "no space")
    assert job.store.list("objects/") == others
