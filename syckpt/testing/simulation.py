"""A commit of thousands of ranks, simulated: documents as their writers would make them, each made when it is read, and no bytes.

    simulated = simulate([Tensor(("model", "w"), "bfloat16", (4096, 1024), layout)], world_size=1024)
    Content(Reader(simulated.repository), simulated.commit)

For how many documents, how much time and how much memory a reader needs; reading a tensor itself finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from blake3 import blake3

from syckpt.errors import StateError
from syckpt.objects import canonical
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.dtypes import dtype
from syckpt.objects.layouts import LayoutTable, TensorLayout
from syckpt.objects.locations import BlobRecord, Locations, Row
from syckpt.objects.manifest import Entry, Manifest
from syckpt.repo import documents
from syckpt.repo.keys import blob_key, layouts_key, locations_key, manifest_key
from syckpt.repo.repository import Repository
from syckpt.reshard.keeping import split_of
from syckpt.reshard.layout import Layout, copies, holders, keepers, local_shape
from syckpt.reshard.owners import Copied, choose, spread
from syckpt.stores.memory import MemoryStore
from syckpt.testing.repositories import MIDNIGHT_NS

__all__ = ["Simulated", "Tensor", "simulate"]

_BLOB_NBYTES = 1 << 40


@dataclass(frozen=True)
class Tensor:
    """A tensor of the state, below the key of its item, and how it lies; `layout` None: every rank has all of it."""

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

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
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
        return super().get(key, offset=offset, length=length)

    def size(self, key: str) -> int | None:
        return _BLOB_NBYTES if key.endswith(".safetensors") else super().size(key)

    def list(self, prefix: str = "", *, deep: bool = True) -> list[str]:
        return [*self._names, *super().list(prefix)] if prefix == f"objects/{self._state.id}/" else super().list(prefix, deep=deep)


class _State:
    """What each rank saved."""

    def __init__(self, tensors: Sequence[Tensor], world_size: int, items: dict[str, Any]) -> None:
        self.id = "51d0c0de-5eedfacecafebeef"  # Not sixteen digits in a row, which real ids do not have: they take a second look.
        self.world_size = world_size
        self._tensors = tensors
        self._items = items
        self.copies = _chosen(tensors, world_size)
        self._seals: dict[int, str] = {}
        known: dict[Any, dict[int, list[Box]]] = {}
        self._stored: list[dict[int, list[Box]]] = []
        """Of each tensor, the boxes that a rank stores."""
        for tensor, copy in zip(tensors, self.copies, strict=True):
            key = (tensor.shape, tensor.layout, copy)
            if key not in known:
                known[key] = _stored(tensor, copy)
            self._stored.append(known[key])

    def manifest(self, rank: int) -> Manifest:
        first, further = [], []
        for number, (tensor, stored) in enumerate(zip(self._tensors, self._stored, strict=True)):
            boxes = stored.get(rank, ())
            entries = [
                Entry(tensor.path, tensor.dtype, tensor.shape, None if tensor.layout is None else box, _address(rank, number, index))
                for index, box in enumerate(boxes)
            ] or [Entry(tensor.path, tensor.dtype, tensor.shape, None, b"")]
            first.append(entries[0])
            further += entries[1:]
        return Manifest(rank, self.world_size, (*first, *further), self._items, None)

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
        meshes: dict[Any, int] = {}
        layouts: dict[Any, int] = {}
        rows = []
        for tensor, copy in zip(self._tensors, self.copies, strict=True):
            number = None
            if tensor.layout is not None:
                mesh = meshes.setdefault((tensor.layout.mesh_shape, tensor.layout.ranks), len(meshes))
                number = layouts.setdefault((mesh, tuple(map(split_of, tensor.layout.placements))), len(layouts))
            rows.append(TensorLayout(tensor.path, tensor.dtype, tensor.shape, number, copy))
        return LayoutTable(self.world_size, dict.fromkeys(self._items, True), tuple(meshes), tuple(layouts), tuple(rows))


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


def _chosen(tensors: Sequence[Tensor], world_size: int) -> list[int]:
    known: dict[Layout | None, Any] = {None: tuple((rank, (rank,)) for rank in spread(world_size))}
    items = []
    for tensor in tensors:
        layout = tensor.layout
        if layout is not None and layout not in known:
            known[layout] = tuple((copy, tuple(sorted(keepers(layout, copy)))) for copy in spread(copies(layout)))
        sizes = tensor.shape if layout is None else local_shape(layout, (0,) * len(layout.mesh_shape))
        items.append(Copied("/".join(tensor.path), prod(sizes) * dtype(tensor.dtype).itemsize, known[layout]))
    return choose(items, world_size)


def simulate(tensors: Sequence[Tensor], *, world_size: int, table: bool = True) -> Simulated:
    """Return a commit of so many ranks that hold these tensors, with a table of layouts or without."""
    items: dict[str, Any] = {}
    for number, tensor in enumerate(tensors):
        items.setdefault(tensor.path[0], {"dict": []})["dict"].append([tensor.path[1], {"tensor": number}])
    state = _State(tensors, world_size, dict(sorted(items.items())))
    store = _Store(state)
    repository = Repository(store, "0" * 32)
    nbytes, layouts = 0, None
    if table:
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
