"""What a save of thousands of ranks costs, step by step: CPU seconds, memory, bytes. The bar: 5 s a merge of 1,024 ranks, 40 s of 8,192.

    python tests/benchmarks/merge.py [--ranks 1024 8192] [--tensors 1000] [--saved ddp fsdp hsdp pp]

* The agreement: one rank (and rank 0) of a job whose process group is fake, with DTensors of its own; the others say the same, of a
  pipeline those of their stage, in a rendezvous store that counts bytes. `saved` layouts: ddp, fsdp, hsdp, pp (4 stages x fsdp).
* The merge: rank 0's real writer on a local store, in this process; the other ranks' receipts and blobs are made beforehand. A first
  save, and one whose tensors lead into two older commits: a frozen backbone, and deltas against a keyframe.

Memory is the most that Python had allocated in a step, by a second run of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from scale import mesh_of, state, targets
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from syckpt.checkpoint import writer
from syckpt.checkpoint.saves import Saves
from syckpt.checkpoint.share import Facts, Replicas, Sharing
from syckpt.dist.coordinator import StoreCoordinator
from syckpt.errors import RankFailure
from syckpt.hyperparams.config import HyperConfig
from syckpt.objects import canonical
from syckpt.objects.commit import Commit
from syckpt.repo import owner
from syckpt.repo.keys import blob_key, commit_key, layouts_key, receipt_key
from syckpt.repo.receipts import Desk
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold, Transaction, open_branch
from syckpt.reshard.layout import Layout, Shard
from syckpt.state.flatten import Flat, flatten
from syckpt.stores.base import StoreSpec
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id
from syckpt.testing.simulation import Tensor

STAGES = 4
MEGA = 1e6


def line(what: str, ranks: int, cpu_s: float | None = None, peak: int | None = None, more: str = "") -> None:
    figures = [f"{cpu_s:8.3f} s CPU" if cpu_s is not None else "", f"{peak / MEGA:7.1f} MB" if peak is not None else "", more]
    print(f"{ranks:6} ranks  {what:58} {'  '.join(filter(None, figures))}", flush=True)


def measured(work: Callable[[], Any]) -> tuple[Any, float, int]:
    """Return what `work` returns, its CPU seconds, and, by a second run, the most memory that it took."""
    gc.collect()
    began = time.process_time()
    result = work()
    cpu_s = time.process_time() - began
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, cpu_s, peak


# -- the agreement -----------------------------------------------------------------------------------------------------


class CountingStore:
    """A rendezvous store of one process. Counts the bytes of values that are set, and of keys asked for. `keeps`: nothing is deleted."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.sent = self.asked = 0
        self.keeps = False

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()
        self.sent += len(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.asked += sum(map(len, keys))
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, _: str, value: str) -> bytes:
        self.sent += len(value)
        return self.values.setdefault(key, value.encode())

    def delete_key(self, key: str) -> None:
        if not self.keeps:
            self.values.pop(key, None)

    def has_extended_api(self) -> bool:
        return True


Answer = Callable[[str, dict[str, Any], Any], dict[str, Any]]


class Told(Exception):
    """What a rank tells in an agreement, which is not made."""


class Listener:
    """A coordinator of one rank without others: `answer` makes the verdict of what it tells."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.agreements = rank, world_size, 0
        self.answer: Answer = self._refuse

    def agree(self, topic: str, mine: dict[str, Any], decide: Any, **_: Any) -> dict[str, Any]:
        return self.answer(topic, mine, decide)

    @staticmethod
    def _refuse(topic: str, mine: dict[str, Any], decide: Any) -> dict[str, Any]:
        raise Told(mine)


def gathered(topic: str, tell: Callable[[int], dict[str, Any]], decide: Any, world_size: int, label: str) -> dict[str, Any]:
    """Make an agreement of all ranks, of which rank 0 is measured; print what it costs, and return the verdict."""
    store = CountingStore()
    others = StoreCoordinator(store, rank=1, world_size=world_size, session="s", timeout_s=600)
    store.keeps = True
    for rank in range(1, world_size):
        # Each is told at once that there is nothing to wait for.
        store.set("syckpt/s/0/verdict", '{"by":1,"value":{}}')
        others.rank, others.agreements = rank, 0
        others.agree(topic, tell(rank), decide)
    del store.values["syckpt/s/0/verdict"]
    each = store.sent / (world_size - 1) - len('{"by":1,"value":{}}')
    mine = tell(0)

    def lead() -> dict[str, Any]:
        store.sent = store.asked = 0
        store.values.pop("syckpt/s/0/verdict", None)
        return StoreCoordinator(store, rank=0, world_size=world_size, session="s", timeout_s=600).agree(topic, mine, decide)

    verdict, cpu_s, peak = measured(lead)
    verdict_nbytes = sum(len(value) for key, value in store.values.items() if key.startswith("syckpt/s/0/verdict"))
    total = each * (world_size - 1) + verdict_nbytes * world_size
    bytes_ = f"a rank sends {each:.0f} B, rank 0 {verdict_nbytes} B; {total / MEGA:.1f} MB in all; a look asks for {store.asked} B"
    line(f"{label}: rank 0 gathers '{topic}'", world_size, cpu_s, peak, bytes_)
    return verdict


def stage_tensors(count: int, ranks: int, stage: int) -> list[Tensor]:
    """Return the tensors of a pipeline's stage, sharded over its ranks; every tenth is a small one that all of these have."""
    mesh = tuple(range(stage * ranks // STAGES, (stage + 1) * ranks // STAGES))
    tensors = []
    for number in range(count // STAGES):
        name = ("model", f"stages.{stage}.layers.{number // 10}.weight{number % 10}")
        shape = [(2 * len(mesh), 4096), (len(mesh) + len(mesh) // 3, 1024), (4096,), (len(mesh) * 3 + 1, 512)][number % 4]
        layout = Layout(shape, (len(mesh),), mesh, (Shard(0),))
        tensors.append(Tensor(name, "bfloat16", shape, layout) if number % 10 else Tensor(name, "float32", (64,), None))
    return tensors


@contextmanager
def rank_of(saved: str, ranks: int, count: int, rank: int) -> Iterator[Flat]:
    """Provide the state of one rank, whose process group is there meanwhile."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        shape = (STAGES, ranks // STAGES) if saved == "pp" else mesh_of(saved, ranks)
        # To torch, which remembers meshes, those of two ranks are one unless their names differ.
        names = tuple(f"dim{dim}of{rank}" for dim in range(len(shape)))
        mesh = DeviceMesh("cpu", torch.arange(ranks).reshape(shape), mesh_dim_names=names)
        coordinate = (rank // shape[1], rank % shape[1]) if len(shape) == 2 else (rank,)
        if saved == "pp":
            mesh, coordinate, tensors = mesh[names[1]], coordinate[1:], stage_tensors(count, ranks, coordinate[0])
        else:
            tensors = state(saved, ranks, count)
        yield flatten({"model": targets(tensors, mesh, coordinate)})
    finally:
        dist.destroy_process_group()


class Member:
    """What one rank does in an agreement."""

    def __init__(self, saved: str, ranks: int, count: int, rank: int) -> None:
        self.listener: Any = Listener(rank, ranks)
        self.sharing = Sharing(self.listener)
        self._what = saved, ranks, count, rank

    def share(self, answer: Answer, *, label: str | None, same: bool = False) -> tuple[Facts, Replicas]:
        """Decide what the rank stores; `label`: print what it costs."""
        saved, ranks, count, rank = self._what
        self.listener.answer = answer
        with rank_of(saved, ranks, count, rank) as flat:
            times = [time.process_time()]
            facts = self.sharing.facts(flat, "<rng>")
            times.append(time.process_time())
            replicas = self.sharing.replicas(flat, facts, "<rng>")
            times.append(time.process_time())
            how: dict[str, Any] = {"same_schema": same, "same_replicas": same, "tellers": [] if same else [rank]}
            parts = self.sharing.share(flat, facts, replicas, own="<rng>", at="", **how)
            times.append(time.process_time())
        if label is not None:
            stored = sum(part.array is not None for part in parts)
            whats = (("structure", ""), ("digests of replicas", ""), ("share", f"{stored} of {len(parts)} parts"))
            for (what, more), begun, ended in zip(whats, times, times[1:], strict=False):
                line(f"{saved}: a rank's {what}, {label}", ranks, ended - begun, more=more)
        return facts, replicas

    def tell(self) -> dict[str, Any]:
        """Return what the rank brings where ranks differ."""
        try:
            self.share(Listener._refuse, label=None)
        except Told as told:
            mine: dict[str, Any] = told.args[0]
            return mine
        raise AssertionError("ranks that differ make one more agreement")


def agreement(saved: str, ranks: int, count: int) -> dict[str, Any]:
    """Measure the agreement on who stores what; return the table of layouts."""
    if saved == "pp":
        return pipeline(saved, ranks, count)
    member = Member(saved, ranks, count, ranks // 3)
    for label in ("first save", "next save"):
        facts, replicas = member.share(Listener._refuse, label=label, same=True)
    whether(saved, ranks, facts, replicas)
    return tabled(Member(saved, ranks, count, 0), Listener._refuse, same=True)


def tabled(leader: Member, answer: Answer, *, same: bool) -> dict[str, Any]:
    """Return the table that rank 0 makes."""
    leader.share(answer, label=None, same=same)
    assert leader.sharing.table is not None
    return leader.sharing.table


def whether(saved: str, ranks: int, facts: Facts, replicas: Replicas) -> None:
    """Measure the round that every save has."""
    hyper = HyperConfig()
    mine = {"step": 1, "busy": False, "schema": facts.schema, "replicas": replicas.summary, "names": [None], "config": hyper.hash()}
    mine |= {"layouts": {"model": ["model", "tree"]}, "failed": {}, "items": ["model"], "left": [], "damage": False}
    saves: Any = SimpleNamespace(_when_busy="wait", _check_names=lambda *_, **__: None, _sequence=1, _run="run")
    saves._saver = SimpleNamespace(hold=Hold("main", "run", 1, 1, None), pending=())
    saves._repository = SimpleNamespace(id="0" * 32)
    gathered("save()", lambda _: mine, lambda values: Saves._decide(saves, values, name=None, tags=(), hyper=hyper), ranks, saved)


def pipeline(saved: str, ranks: int, count: int) -> dict[str, Any]:
    """Measure ranks with different keys, which have a third round: one rank of each stage tells for all of it."""
    leader, *members = [Member(saved, ranks, count, rank) for rank in (0, ranks // 3, 2 * ranks // 3, ranks - 1)]
    told: list[dict[str, Any]] = []
    verdict: dict[str, Any] = {}
    label = ""

    def tells(rank: int) -> dict[str, Any]:
        stage = rank * STAGES // ranks
        return told[stage] if rank == stage * ranks // STAGES else {**told[stage], "structure": None}

    def lead(topic: str, mine: dict[str, Any], decide: Any) -> dict[str, Any]:
        verdict.update(gathered(topic, tells, decide, ranks, f"{saved}, {label}"))
        return verdict

    table: dict[str, Any] = {}
    for label in ("first save", "next save"):
        told[:] = [member.tell() for member in (leader, *members)]
        table = tabled(leader, lead, same=False)
        for member in members:
            facts, replicas = member.share(lambda *_: verdict, label=label if member is members[0] else None)
    whether(saved, ranks, facts, replicas)
    return table


# -- the merge ---------------------------------------------------------------------------------------------------------


class Steps:
    """Measures methods while they run inside of others: CPU seconds, or, while memory is traced, the most memory."""

    METHODS = (
        ("waiting for and reading the receipts", Desk, "collect"),
        ("looking for the other ranks' blobs", Desk, "lacking"),
        ("describing the commit", writer._Writer, "_describe"),
        ("table of layouts", writer._Writer, "_write_layouts"),
        ("commit document and ref record", Transaction, "publish"),
    )

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.peak: dict[str, int] = {}
        for what, kind, name in self.METHODS:
            setattr(kind, name, self._around(what, getattr(kind, name)))

    def _around(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak() if tracemalloc.is_tracing() else None
            began = time.process_time()
            try:
                return method(*arguments, **options)
            finally:
                if tracemalloc.is_tracing():
                    self.peak[what] = tracemalloc.get_traced_memory()[1] - before
                else:
                    self.cpu_s[what] = time.process_time() - began

        return run


class Channel:
    """Takes what the writer tells its trainer."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def send(self, event: dict[str, Any]) -> None:
        self.events.append(json.dumps(event))


def _seal(number: int) -> str:
    return blake3(b"%d" % number).hexdigest()


class Merge:
    """Rank 0's writer and its repository."""

    STATS = ("staged_bytes", "deduplicated_bytes", "encoded_bytes", "written_bytes", "trainable", "unchanged_trainable")

    def __init__(self, root: Path, ranks: int, count: int, table: dict[str, Any]) -> None:
        self.ranks, self.count = ranks, count
        self.root = root
        spec = StoreSpec("local", str(root))
        self.repository = Repository.open_or_create(spec)
        hold = open_branch(self.repository, "main", run="run", expected=None)
        self.channel: Any = Channel()
        start = {
            "store": spec.to_wire(),
            "branch": "main",
            "run": "run",
            "generation": hold.generation,
            "number": hold.number,
            "tip": None,
            "rank": 0,
            "world_size": ranks,
            "timeout_s": 600.0,
            "signer": None,
            "retention": None,
            "trainer": vars(owner.this_process()),
            "token": "token",
            "compression": "none",
            "keyframe_every": 8,
            "threads": 1,
        }
        self.writer = writer._Writer(self.channel, start)
        self.writer.handle(writer._Mail({"op": "table", "table": table}, None))
        self.memory = mmap.mmap(-1, 256 * count)
        self.memory[:] = os.urandom(256 * count)
        self.writer._slots[0] = self.memory
        self.made: list[str] = []

    def prepare(self, leads_to: int) -> str:
        """Make the other ranks' receipts and blobs of a next save, which lead to so many older ones; return its id."""
        commit = commit_id(len(self.made) + 1)
        blobs = [commit, *self.made[-leads_to:]] if leads_to else [commit]
        for rank in range(1, self.ranks):
            sizes = {blob_key(other, rank): 1000 for other in blobs}
            body = {"kind": "receipt", "version": 1, "commit": commit, "rank": rank, "manifest": _seal(rank), "error": None}
            stats = dict.fromkeys(self.STATS, 123_456_789) | {"ratio": 1.23, "keyframe": False, "hash_s": 0.123456, "encode_s": 0.123456}
            body |= {"stats": stats, "blobs": sizes, "items": dict.fromkeys(("loader", "model", "optimizer"), _seal(0))}
            self._put(receipt_key("main", commit, rank), canonical.seal(body)[0])
            self._put(blob_key(commit, rank), bytes(1000))
        return commit

    def _put(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def save(self, commit: str) -> None:
        """Let the writer make a save of small tensors, of which every second one stays as it is."""
        number = len(self.made)
        for index in range(0, self.count, 2):
            self.memory[256 * index] = number
        paths = [["model", f"layers.{index // 10}.weight{index % 10}"] for index in range(self.count)]
        meta = {"step": number, "epoch": 0, "batch_idx": 0, "epoch_done": False, "entered": False, "metric": None, "message": ""}
        meta |= {
            "tags": [],
            "name": None,
            "config": {"dict": []},
            "fingerprint": "00000000",
            "rng_exact": True,
            "sequence": number,
            "stats": {},
        }
        meta |= {"created_ns": str(MIDNIGHT_NS), "writer": "benchmark"}
        tensors = {
            "path": paths,
            "dtype": ["float32"] * self.count,
            "shape": [[64]] * self.count,
            "box": [None] * self.count,
            "offset": [256 * index for index in range(self.count)],
            "local": [False] * self.count,
        }
        items = {"model": {"dict": [[path[1], {"tensor": index}] for index, path in enumerate(paths)]}, "loader": 1, "optimizer": 2}
        message = {"op": "save", "id": commit, "slot": 0, "after": self.made[-1] if self.made else None, "tensors": tensors, "items": items}
        message |= {"trainable": [], "rng": None, "layouts": {}, "sharding": {}, "sent": {}, "has_table": True, "afresh": False}
        message["meta"] = meta
        self.channel.events.clear()
        self.writer.handle(writer._Mail(message, None))
        told = next(event for event in map(json.loads, self.channel.events) if event["event"] in ("published", "failed"))
        if told["event"] == "failed":
            raise SystemExit(f"the save failed: {told['error']}")
        self.made.append(commit)
        for rank in range(1, self.ranks):  # what their writers do when they hear of the verdict
            os.unlink(self.root / receipt_key("main", commit, rank))


def merge(ranks: int, count: int, table: dict[str, Any], steps: Steps) -> None:
    """Measure rank 0's writer."""
    root = Path(tempfile.mkdtemp(prefix="syckpt-merge-")) / ".syckpt"
    try:
        made = Merge(root, ranks, count, table)
        for label, leads_to in (("first save", 0), ("next save", 0), ("frozen backbone and deltas", 2)):
            commit = made.prepare(leads_to)
            _look(made, commit, label)
            gc.collect()
            began = time.process_time()
            made.save(commit)
            whole_s = time.process_time() - began
            cpu_s = dict(steps.cpu_s)
            commit = made.prepare(leads_to)
            tracemalloc.start()
            made.save(commit)
            tracemalloc.stop()
            for what, spent_s in cpu_s.items():
                line(f"{label}: {what}", ranks, spent_s, steps.peak[what])
            line(f"{label}: all that rank 0's writer does", ranks, whole_s, more=f"the merge is {sum(cpu_s.values()):.3f} s of it")
        _others(made)
        made.writer.close()
    finally:
        shutil.rmtree(root.parent)


def _look(made: Merge, commit: str, label: str) -> None:
    """Measure one look for parts of which every second one is there and read already."""
    missing = range(2, made.ranks, 2)
    keys = [made.root / receipt_key("main", commit, rank) for rank in missing]
    for key in keys:
        key.rename(made.root / key.name)
    began = time.process_time()
    with suppress(RankFailure):  # There is no intent yet.
        Desk(made.repository, "main", commit, timeout_s=0.0).collect(missing)
    line(f"{label}: one look for missing receipts", made.ranks, time.process_time() - began)
    for key in keys:
        (made.root / key.name).rename(key)


def _others(made: Merge) -> None:
    """Measure what every other rank does with a published commit, and print how large the documents are."""
    store, commit = made.repository.store, made.made[-1]
    _, cpu_s, peak = measured(lambda: made.repository.read_commit(commit))
    size = store.size(commit_key(commit)) or 0
    line("each rank's writer reads the commit", made.ranks, cpu_s, peak, f"{size} B, by all ranks {size * made.ranks / MEGA:.1f} MB")
    text = next(text for text in made.channel.events if '"published"' in text[:30])

    def hear() -> Commit:
        event = json.loads(text)
        return Commit.from_body(event["body"], seal=event["seal"], where=event["id"])

    _, cpu_s, peak = measured(hear)
    line("each trainer hears of it", made.ranks, cpu_s, peak, f"a message of {len(text)} B")
    waits = max(len(text) for text in made.channel.events if '"waits"' in text[:30])
    line("rank 0's trainer hears what its writer waits for", made.ranks, more=f"a message of {waits} B")
    line("the table of layouts", made.ranks, more=f"{store.size(layouts_key(commit))} B stored")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--saved", nargs="+", choices=["ddp", "fsdp", "hsdp", "pp"], default=["ddp", "fsdp", "hsdp", "pp"])
    arguments = parser.parse_args()
    logging.getLogger("syckpt").setLevel(logging.ERROR)
    steps = Steps()
    for ranks in arguments.ranks:
        for saved in arguments.saved:
            table = agreement(saved, ranks, arguments.tensors)
        merge(ranks, arguments.tensors, table, steps)


if __name__ == "__main__":
    main()
