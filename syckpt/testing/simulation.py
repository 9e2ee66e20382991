"""A commit of thousands of ranks, simulated: documents as their writers would make them, each made when it is read, and no bytes.

    simulated = simulate([Tensor(("model", "w"), "bfloat16", (4096, 1024), layout)], world_size=1024)
    Content(Reader(simulated.repository), simulated.commit)

For how many documents, how much time and how much memory a reader needs; reading a tensor itself finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from syckpt.errors import StateError
from syckpt.objects import canonical
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.layouts import LayoutTable, groups_of
from syckpt.objects.locations import BlobRecord, Locations, Row
from syckpt.objects.manifest import Entry, Manifest
from syckpt.objects.nodes import format_path
from syckpt.repo import documents
from syckpt.repo.keys import blob_key, layouts_key, locations_key, manifest_key
from syckpt.repo.repository import Repository
from syckpt.reshard import placement
from syckpt.reshard.layout import Layout, holders, keepers
from syckpt.reshard.placement import Placement, Structure, place, table
from syckpt.stores.memory import MemoryStore
from syckpt.testing.repositories import MIDNIGHT_NS

__all__ = ["Simulated", "Tensor", "simulate"]

_BLOB_NBYTES = 1 << 40


@dataclass(frozen=True)
class Tensor:
    """A tensor of the state, below the key of its item, and how it lies on the ranks that have it; `layout` None: all have all of it."""

    path: tuple[str, str]
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None


@dataclass(frozen=True)
class Simulated:
    """`table_nbytes` is the size of the table of layouts, as it is stored."""

    repository: Repository
    commit: Commit
    table_nbytes: int
    _store: _Store

    @property
    def reads(self) -> dict[str, int]:
        """How often documents were read, by kind."""
        return self._store.reads

    @property
    def made_s(self) -> float:
        """CPU seconds that went into making them, which a reader of real ones does not have."""
        return self._store.made_s


class _Store(MemoryStore):
    """Makes manifests and locations when they are asked for."""

    def __init__(self, state: _State) -> None:
        super().__init__()
        self.reads: dict[str, int] = {}
        self.made_s = 0.0
        self._state = state
        self._names = sorted(
            key
            for rank in range(state.world_size)
            for key in (manifest_key(state.id, rank), locations_key(state.id, rank, 1), blob_key(state.id, rank))
        )

    def get(self, key: str, *, offset: int = 0, length: int | None = None, limit: int | None = None) -> bytes:
        name = key.rpartition("/")[2]
        kind = name.split(".")[1] if "." in name else name
        if key.startswith("objects/"):
            self.reads[kind] = self.reads.get(kind, 0) + 1
        if kind in ("manifest", "locations"):
            began = time.process_time()
            made: Manifest | Locations = (self._state.manifest if kind == "manifest" else self._state.locations)(int(name[1:6]))
            data, _ = canonical.seal(made.to_body())
            self.made_s += time.process_time() - began
            return data
        return super().get(key, offset=offset, length=length, limit=limit)

    def size(self, key: str) -> int | None:
        return _BLOB_NBYTES if key.endswith(".safetensors") else super().size(key)

    def list(self, prefix: str = "", *, deep: bool = True) -> list[str]:
        return [*self._names, *super().list(prefix)] if prefix == f"objects/{self._state.id}/" else super().list(prefix, deep=deep)


class _State:
    """What each rank saved. A rank has the plain tensors, and those on whose mesh it is."""

    def __init__(self, tensors: Sequence[Tensor], world_size: int) -> None:
        self.id = "51d0c0de-5eedfacecafebeef"  # Not sixteen digits in a row, which real ids do not have: they take a second look.
        self.world_size = world_size
        self._tensors = tensors
        meshes = {tensor.layout.ranks: frozenset(tensor.layout.ranks) for tensor in tensors if tensor.layout is not None}
        self._kinds: list[str] = []
        """By rank, what names its structure; ranks of one pipeline stage have the same one."""
        self._numbers: dict[str, list[int]] = {}
        """The tensors of a structure."""
        for rank in range(world_size):
            on = {ranks for ranks, members in meshes.items() if rank in members}
            kind = str([ranks in on for ranks in meshes])
            self._kinds.append(kind)
            if kind not in self._numbers:
                self._numbers[kind] = [number for number, t in enumerate(tensors) if t.layout is None or t.layout.ranks in on]
        self._structures = {kind: Structure(tuple(map(_as_placed, self._of(numbers)))) for kind, numbers in self._numbers.items()}
        self._placement = Placement("", place(self._structures, self._kinds))
        self._seals: dict[int, str] = {}
        known: dict[Any, dict[int, list[Box]]] = {}
        self._stored: list[dict[int, list[Box]]] = []
        """Of each tensor, the boxes that a rank stores."""
        for tensor in tensors:
            copy = self._placement.copies[format_path(tensor.path)][1]
            key = (tensor.shape, tensor.layout, copy)
            if key not in known:
                known[key] = _stored(tensor, copy)
            self._stored.append(known[key])

    def _of(self, numbers: Sequence[int]) -> list[Tensor]:
        return [self._tensors[number] for number in numbers]

    def manifest(self, rank: int) -> Manifest:
        first, further = [], []
        items: dict[str, Any] = {}
        for index, number in enumerate(self._numbers[self._kinds[rank]]):
            tensor = self._tensors[number]
            items.setdefault(tensor.path[0], {"dict": []})["dict"].append([tensor.path[1], {"tensor": index}])
            boxes = self._stored[number].get(rank, ())
            entries = [
                Entry(tensor.path, tensor.dtype, tensor.shape, None if tensor.layout is None else box, _address(rank, number, part))
                for part, box in enumerate(boxes)
            ] or [Entry(tensor.path, tensor.dtype, tensor.shape, None, b"")]
            first.append(entries[0])
            further += entries[1:]
        return Manifest(rank, self.world_size, (*first, *further), dict(sorted(items.items())), None)

    def seal(self, rank: int) -> str:
        if rank not in self._seals:
            self._seals[rank] = canonical.seal(self.manifest(rank).to_body())[1]
        return self._seals[rank]

    def locations(self, rank: int) -> Locations:
        stored = [entry for entry in self.manifest(rank).entries if entry.address]
        rows, offset = [], 4096
        for entry in stored:
            if entry.nbytes > BLOCK_NBYTES:
                raise StateError(f"{entry.path}: a part of {entry.nbytes} bytes; simulated ones have one block, {BLOCK_NBYTES}, at most")
            rows.append(Row(0, offset, entry.nbytes, entry.nbytes, entry.kind.width, False, (), b"", None))
            offset += entry.nbytes
        blob = BlobRecord(blob_key(self.id, rank), _BLOB_NBYTES, 4096, bytes(16))
        at = tuple((0, number) for number in range(len(rows)))
        return Locations(self.id, rank, 1, self.seal(rank), (self.id, 0), (blob,), (), at, tuple(rows))

    def table(self) -> LayoutTable:
        told = {kind: self.manifest(self._kinds.index(kind)).structures() for kind in self._numbers}
        made = table(self._structures.values(), self._placement, (), world_size=self.world_size)
        return replace(made, items=groups_of([told[kind] for kind in self._kinds]))


def _as_placed(tensor: Tensor) -> placement.Tensor:
    return placement.Tensor(tensor.path, tensor.dtype, tensor.shape, tensor.layout)


def _stored(tensor: Tensor, copy: int) -> dict[int, list[Box]]:
    if tensor.layout is None:
        return {copy: [Box((0,) * len(tensor.shape), tensor.shape)]}
    storing = keepers(tensor.layout, copy)
    found: dict[int, list[Box]] = {}
    for box, ranks in holders(tensor.layout).items():
        (owner,) = storing.intersection(ranks)
        found.setdefault(owner, []).append(box)
    return found


def _address(rank: int, number: int, index: int) -> bytes:
    return blake3(b"%d %d %d" % (rank, number, index)).digest()


def simulate(tensors: Sequence[Tensor], *, world_size: int, has_table: bool = True) -> Simulated:
    """Return a commit of so many ranks that hold these tensors, with a table of layouts or without."""
    state = _State(tensors, world_size)
    store = _Store(state)
    repository = Repository(store, "0" * 32)
    nbytes, layouts = 0, None
    if has_table:
        layouts = documents.write(store, layouts_key(state.id), state.table().to_body())
        nbytes = store.size(layouts_key(state.id)) or 0
    manifests = tuple((rank, state.seal(rank)) for rank in range(world_size))
    commit = Commit(
        id=state.id,
        parents=(),
        branch="main",
        step=1,
        epoch=0,
        batch_idx=0,
        epoch_done=True,
        entered=False,
        metric=None,
        message="",
        config={},
        created_ns=MIDNIGHT_NS,
        world_size=world_size,
        tags=(),
        name=None,
        fingerprint="00000000",
        writer="syckpt.testing",
        run_id="testing",
        generation=1,
        sequence=1,
        rng_exact=True,
        stats={},
        parent_seals=(),
        manifests=manifests,
        layouts=layouts,
    )
    return Simulated(repository, commit, nbytes, store)
