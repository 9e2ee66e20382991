"""Who stores what: the parts of a job's state that this rank hands to its writer.

A sharded tensor is stored box by box, by ranks that hold them; a replicated one once. Owners are balanced by bytes, and every rank
computes the same ones from the structure that all have. Where ranks have different keys (pipeline or expert parallelism), the owner
follows from path and box alone. Replicas are compared by digests that travel with the save; a tensor that differs between ranks is stored
by each. The digests see all of a tensor up to 64 KiB and a sample of a larger one: a difference outside of the sample is not seen.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from syckpt.dist.coordinator import Coordinator
from syckpt.errors import StateError
from syckpt.objects import canonical
from syckpt.objects.box import Box
from syckpt.objects.dtypes import dtype
from syckpt.objects.nodes import format_path
from syckpt.reshard.layout import Layout, holders
from syckpt.reshard.owners import Piece, assign
from syckpt.reshard.tensors import layout_of, local_boxes
from syckpt.state.flatten import Flat, Leaf
from syckpt.state.staging import Part

__all__ = ["Facts", "Sharing", "whole"]

_log = logging.getLogger("syckpt")
_WHOLE_NBYTES = 64 << 10
_SAMPLE_NBYTES = 4 << 10


@dataclass(frozen=True)
class Facts:
    """One rank's structure: each leaf's path text and layout, and digests that are compared with the other ranks'."""

    paths: list[str]
    layouts: list[Layout | None]
    schema: str


class Sharing:
    """Decides shares, save after save; remembers owners while the structure stays."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._schema = ""
        self._owners: dict[tuple[str, Box], int] = {}

    def facts(self, flat: Flat, own: str) -> Facts:
        """Return this rank's structure. Leaves of the item `own` are never shared. Raises: StateError (a layout that cannot be stored)."""
        paths = [format_path(leaf.path) for leaf in flat.leaves]
        layouts = [None if leaf.path[0] == own else _layout(leaf, path) for leaf, path in zip(flat.leaves, paths, strict=True)]
        rows = [
            [path, leaf.dtype, list(leaf.shape), _layout_text(layout)]
            for path, leaf, layout in zip(paths, flat.leaves, layouts, strict=True)
            if leaf.path[0] != own
        ]
        return Facts(paths, layouts, blake3(canonical.dumps(rows)).hexdigest())

    def replicas(self, flat: Flat, facts: Facts, own: str) -> str:
        """Return one digest of all tensors that should be the same on all ranks."""
        plain = [leaf for leaf, layout in zip(flat.leaves, facts.layouts, strict=True) if layout is None and leaf.path[0] != own]
        return blake3("".join(map(replica_digest, plain)).encode()).hexdigest(length=16)

    def share(self, flat: Flat, facts: Facts, *, own: str, same_schema: bool, same_replicas: bool, at: str) -> list[Part]:
        """Return this rank's parts, the first ones aligned with the leaves.

        Collective when ranks differ: then one more agreement tells where. Raises: as `Coordinator.agree`.
        """
        candidates: Mapping[str, Sequence[int]] = {}
        diverged: set[str] = set()
        everyone = range(self._coordinator.world_size)
        if not (same_schema and same_replicas):
            digests: dict[str, str] = {}
            sharded: dict[str, list[Any]] = {}
            for leaf, path, layout in zip(flat.leaves, facts.paths, facts.layouts, strict=True):
                if layout is not None:
                    sharded[path] = self._told(leaf, path, layout)
                elif leaf.path[0] != own:
                    digests[path] = replica_digest(leaf)
            verdict = self._coordinator.agree("replicas", {"digests": digests, "sharded": sharded}, _compare, at=at)
            candidates, diverged = verdict["ranks"], set(verdict["diverged"])
        if same_schema and facts.schema != self._schema:
            self._schema, self._owners = facts.schema, self._balance(flat, facts, own)
        first: list[Part] = []
        further: list[Part] = []
        for leaf, path, layout in zip(flat.leaves, facts.paths, facts.layouts, strict=True):
            if leaf.path[0] == own or path in diverged:
                first.append(Part(leaf.path, leaf.dtype, leaf.shape, None, leaf.array, local=True))
                continue
            mine = [
                (box, view)
                for box, view, ranks in _held(leaf, path, layout, candidates.get(path, everyone))
                if (self._owners[path, box] if same_schema else _by_name(path, box, ranks)) == self._coordinator.rank
            ]
            parts = [Part(leaf.path, leaf.dtype, leaf.shape, None if layout is None else box, view) for box, view in mine]
            first.append(parts[0] if parts else Part(leaf.path, leaf.dtype, leaf.shape, None, None))
            further += parts[1:]
        if diverged and self._coordinator.rank == 0:
            _log.warning("%d tensors differ between ranks and are kept by each: %s", len(diverged), ", ".join(sorted(diverged)[:5]))
        return first + further

    def _told(self, leaf: Leaf, path: str, layout: Layout) -> list[Any]:
        """Return what other ranks must know of a sharded tensor: its form, this rank's position in the mesh, a digest of its part."""
        form = f"{leaf.dtype} {leaf.shape} {layout.mesh_shape} {layout.placements}"
        if self._coordinator.rank not in layout.ranks:
            return [form, None, ""]
        views = [Leaf(leaf.path, view, leaf.dtype, box.sizes) for box, view in local_boxes(leaf.array, path=path)]
        return [form, layout.ranks.index(self._coordinator.rank), "".join(map(replica_digest, views))]

    def _balance(self, flat: Flat, facts: Facts, own: str) -> dict[tuple[str, Box], int]:
        everyone = tuple(range(self._coordinator.world_size))
        pieces = []
        for leaf, path, layout in zip(flat.leaves, facts.paths, facts.layouts, strict=True):
            if leaf.path[0] == own:
                continue
            itemsize = dtype(leaf.dtype).itemsize
            boxes = {_whole(leaf): everyone} if layout is None else holders(layout)
            pieces += [Piece(path, box, box.elements * itemsize, ranks) for box, ranks in boxes.items()]
        return {(piece.key, piece.box): owner for piece, owner in zip(pieces, assign(pieces, len(everyone)), strict=True)}


def whole(flat: Flat) -> list[Part]:
    """Return the parts of a job of one process: everything."""
    return [Part(leaf.path, leaf.dtype, leaf.shape, None, leaf.array) for leaf in flat.leaves]


def _layout(leaf: Leaf, path: str) -> Layout | None:
    return layout_of(leaf.array, path=path) if isinstance(leaf.array, torch.Tensor) else None


def _layout_text(layout: Layout | None) -> str | None:
    return None if layout is None else f"{layout.mesh_shape} {layout.ranks} {layout.placements}"


def _whole(leaf: Leaf) -> Box:
    return Box((0,) * len(leaf.shape), leaf.shape)


def _held(leaf: Leaf, path: str, layout: Layout | None, ranks: Iterable[int]) -> list[tuple[Box, Any, tuple[int, ...]]]:
    """Return the boxes that this rank holds, their values, and who else holds them."""
    if layout is None:
        return [(_whole(leaf), leaf.array, tuple(ranks))]
    everywhere = holders(layout)
    return [(box, view, everywhere[box]) for box, view in local_boxes(leaf.array, path=path)]


def _by_name(path: str, box: Box, ranks: Sequence[int]) -> int:
    return ranks[zlib.crc32(f"{path} {box.offsets}".encode()) % len(ranks)]


def _compare(told: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Rank 0: which ranks have which plain tensors, and which of them differ. Raises: StateError."""
    _refuse_other_tensors(told)
    ranks: dict[str, list[int]] = {}
    values: dict[str, set[str]] = {}
    for rank, mine in enumerate(told):
        for path, digest in mine["digests"].items():
            ranks.setdefault(path, []).append(rank)
            values.setdefault(path, set()).add(digest)
    everyone = list(range(len(told)))
    return {
        "ranks": {path: held for path, held in ranks.items() if held != everyone},
        "diverged": [path for path, found in values.items() if len(found) > 1],
    }


def _refuse_other_tensors(told: list[dict[str, dict[str, Any]]]) -> None:
    """Refuse sharded tensors that have one path and are not one tensor: their boxes would be taken for parts or copies of each other.

    Several meshes may hold copies of it (tensor parallelism under DDP): then each part must be the same on all of them.
    """
    first: dict[str, tuple[int, str]] = {}
    parts: dict[tuple[str, int], tuple[int, str]] = {}
    for rank, mine in enumerate(told):
        for path, (form, position, digest) in mine["sharded"].items():
            other, known = first.setdefault(path, (rank, form))
            if form == known and position is not None:
                other, known = parts.setdefault((path, position), (rank, digest))
                form = digest
            if form != known:
                raise _not_one(path, other, rank)
    for rank, mine in enumerate(told):
        for path in first.keys() & mine["digests"].keys():
            raise _not_one(path, first[path][0], rank)


def _not_one(path: str, first: int, second: int) -> StateError:
    return StateError(
        f"{path}: the sharded tensor on rank {first} and the one on rank {second} are not one: shard it alike, or save it under two names"
        " (an optimizer is saved by parameter name where its model is registered too)"
    )


def replica_digest(leaf: Leaf) -> str:
    """Return a digest of dtype, shape and values: all of them up to 64 KiB, else a strided sample of 4 KiB and both ends."""
    array = leaf.array
    if isinstance(array, np.ndarray):
        array = torch.from_numpy(np.ascontiguousarray(array))
    flat = array.detach().reshape(-1)
    nbytes = prod(leaf.shape) * dtype(leaf.dtype).itemsize
    if nbytes > _WHOLE_NBYTES:
        count = _SAMPLE_NBYTES // dtype(leaf.dtype).itemsize
        step = max(1, flat.numel() // count)
        flat = torch.cat([flat[::step][:count], flat[-1:]])
    data = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if nbytes else b""
    return blake3(canonical.dumps([leaf.dtype, list(leaf.shape)]) + data).hexdigest(length=16)
