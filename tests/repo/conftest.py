"""A repository in memory, and saves into it without a trainer or a writer process. Torch-free."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from syckpt.objects import ids, nodes
from syckpt.objects.commit import Commit
from syckpt.objects.refs import Owner
from syckpt.repo.packing import Packed, Packer, Staged
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold, Transaction, open_branch
from syckpt.stores.memory import MemoryStore

NOBODY = Owner("nowhere", "", "", 1, 1)
TORCH_NAMES = {"float32": "float32", "float64": "float64", "uint8": "uint8", "int16": "int16", "int64": "int64", "bool": "bool"}


class Desk:
    """One writer's place at a repository; several desks may stand at one store."""

    def __init__(
        self, store: Any = None, *, repository_id: str = "00ff", run: str = "run", compression: str = "fast", cycle: int = 8
    ) -> None:
        self.store = MemoryStore() if store is None else store
        self.repository = Repository(self.store, repository_id)
        self.run = run
        self.reader = Reader(self.repository, threads=1)
        self.packer = Packer(self.reader, rank=0, world_size=1, compression=compression, keyframe_every=cycle, threads=1)
        self.hold: Hold | None = None
        self.newest: Commit | None = None
        self._sequence = 0

    def open(self, branch: str = "main", *, start: Commit | None = None) -> Hold:
        """Take a branch as it is now."""
        head = self.repository.refs.head(f"heads/{branch}")
        tip = None if head is None else head.commit
        self.hold = open_branch(self.repository, branch, run=self.run, expected=tip, start=start)
        self.newest = None if self.hold.tip is None else self.repository.read_commit(self.hold.tip)
        return self.hold

    def begin(self, *, uses: tuple[str, ...] = ()) -> tuple[str, Transaction]:
        """Begin a save: its intent is there."""
        assert self.hold is not None
        commit = ids.new_commit_id(
            fingerprint="0badc0de",
            repository=self.repository.id,
            run=self.run,
            generation=self.hold.generation,
            sequence=self._sequence,
            nonce=secrets.token_bytes(16),
        )
        self._sequence += 1
        return commit, Transaction(self.repository, commit, self.hold, uses=uses, owner=NOBODY)

    def pack(self, commit: str, arrays: dict[str, Any], *, parent: Commit | None, rng: Any = None) -> Packed:
        """Write what a save of these arrays holds."""
        staged, memory = [], bytearray()
        for name, array in arrays.items():
            memory += bytes(-len(memory) % 64)
            staged.append(Staged(("model", name), TORCH_NAMES[array.dtype.name], array.shape, None, len(memory)))
            memory += array.tobytes()
        items = {"model": {"dict": [[name, {"tensor": i}] for i, name in enumerate(arrays)]}}
        return self.packer.pack(commit, parent=parent, staged=staged, memory=memoryview(bytes(memory)), items=items, rng=rng)

    def describe(self, commit: str, packed: Packed, *, parent: Commit | None, step: int = 0, **facts: Any) -> Commit:
        assert self.hold is not None
        body = {
            "kind": "commit",
            "version": 1,
            "id": commit,
            "parents": [] if parent is None else [[parent.id, parent.seal]],
            "manifests": [[0, packed.manifest_seal]],
            "world_size": 1,
            "branch": self.hold.branch,
            "name": None,
            "step": step,
            "epoch": 0,
            "batch_idx": 0,
            "epoch_done": False,
            "entered": False,
            "metric": nodes.encode(facts.pop("metric", None)),
            "message": "",
            "tags": [],
            "config": {"dict": []},
            "fingerprint": "0badc0de",
            "created_ns": str(1_700_000_000_000_000_000 + self._sequence),
            "writer": "test",
            "run": [self.run, self.hold.generation, self._sequence],
            "rng_exact": True,
            "stats": {},
            **facts,
        }
        return Commit.from_body(body, seal="", where=commit)

    def save(self, arrays: dict[str, Any] | None = None, *, parent: Any = "newest", **facts: Any) -> Commit:
        """Make a whole save, and return its commit."""
        assert self.hold is not None
        behind = self.newest if parent == "newest" else parent
        commit, transaction = self.begin()
        arrays = {"x": np.arange(4, dtype=np.float32)} if arrays is None else arrays
        try:
            packed = self.pack(commit, arrays, parent=behind)
            made = self.describe(commit, packed, parent=behind, **facts)
            self.hold, published = transaction.publish(made, hold=self.hold, reader=self.reader, locations=[packed.locations])
        except BaseException:
            self.packer.failed()
            transaction.abort()
            raise
        self.packer.published()
        self.newest = published
        return published

    def load(self, commit: Commit) -> dict[str, bytes]:
        """Return the verified bytes of a commit's tensors, by a reader that has seen nothing yet."""
        reader = Reader(self.repository, threads=1)
        snapshot = reader.snapshot(commit)
        out = {entry.path[1]: bytearray(entry.nbytes) for entry in snapshot.manifest.entries}
        reader.read([(e, p, memoryview(out[e.path[1]])) for e, p in zip(snapshot.manifest.entries, snapshot.places, strict=True)])
        return {name: bytes(data) for name, data in out.items()}


@pytest.fixture
def make_desk() -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(*arguments: Any, **options: Any) -> Desk:
        desks.append(Desk(*arguments, **options))
        return desks[-1]

    yield make
    for desk in desks:
        desk.packer.close()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk()
