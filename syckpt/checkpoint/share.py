"""Who stores what: the parts of a job's state that this rank hands to its writer.

A sharded tensor is stored box by box, by ranks that hold them; a replicated one once. Owners are balanced by bytes, and every rank
computes the same ones from the structure that all have. Where ranks have different keys (pipeline or expert parallelism), the owner
follows from path and box alone. Replicas are compared by digests that travel with the save; a tensor that differs between ranks is stored
by each. The digests see all of a tensor up to 64 KiB and a sample of a larger one: a difference outside of the sample is not seen, unless
all bytes are compared (`check_replicas="full"`). A plain tensor that a resharder declares as a box of a global one is no replica: it is
stored as that box, by one of the ranks that declare the same one.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from syckpt.checkpoint.paths import claim as files_claimed
from syckpt.checkpoint.paths import refuse_differing
from syckpt.checkpoint.sharding import Declared, part_of
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import StateError
from syckpt.objects import canonical
from syckpt.objects.box import Box
from syckpt.objects.dtypes import dtype
from syckpt.objects.nodes import format_path
from syckpt.reshard.layout import Layout, holders
from syckpt.reshard.owners import Piece, assign
from syckpt.reshard.plan import plan
from syckpt.reshard.tensors import layout_of, local_boxes
from syckpt.state.flatten import Flat, Leaf
from syckpt.state.staging import Part

__all__ = ["Facts", "Sharing", "whole"]

_log = logging.getLogger("syckpt")
_WHOLE_NBYTES = 64 << 10
_SAMPLE_NBYTES = 4 << 10
_CHUNK_NBYTES = 64 << 20


@dataclass(frozen=True)
class _Claim:
    """What a resharder declares a plain tensor to be: a box of a global tensor of that shape, or (None) something of this rank's own."""

    shape: tuple[int, ...]
    box: Box | None

    def form(self, leaf: Leaf) -> str:
        """Return what has to be the same on all ranks."""
        return "its own" if self.box is None else f"{leaf.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Facts:
    """One rank's structure: each leaf's path text, layout and claim, and a digest that is compared with the other ranks'."""

    paths: list[str]
    layouts: list[Layout | None]
    schema: str
    claims: list[_Claim | None] = field(default_factory=list)


class Sharing:
    """Decides shares, save after save; remembers owners while the structure stays. `full`: replicas are compared by all of their bytes."""

    def __init__(self, coordinator: Coordinator, *, full: bool = False, one_file: Callable[[str], str | None] = lambda name: None) -> None:
        """`one_file(item)`: the file of the commit's tree that all ranks share for an item, by its layout."""
        self._coordinator = coordinator
        self._full = full
        self._one_file = one_file
        self._schema = ""
        self._owners: dict[tuple[str, Box], int] = {}

    def facts(self, flat: Flat, own: str, declared: Declared | None = None) -> Facts:
        """Return this rank's structure. Leaves of the item `own` are never shared.

        Raises: StateError (a layout that cannot be stored, a tensor that is not what its resharder declared).
        """
        paths = [format_path(leaf.path) for leaf in flat.leaves]
        layouts = [None if leaf.path[0] == own else _layout(leaf, path) for leaf, path in zip(flat.leaves, paths, strict=True)]
        claims = [_claim(leaf, path, layout, declared) for leaf, path, layout in zip(flat.leaves, paths, layouts, strict=True)]
        rows = [
            [path, leaf.dtype, list(leaf.shape), _layout_text(layout)] if claim is None else [path, claim.form(leaf)]
            for path, leaf, layout, claim in zip(paths, flat.leaves, layouts, claims, strict=True)
            if leaf.path[0] != own
        ]
        return Facts(paths, layouts, blake3(canonical.dumps(rows)).hexdigest(), claims)

    def replicas(self, flat: Flat, facts: Facts, own: str) -> str:
        """Return one digest of all tensors that should be the same on all ranks; claims to other boxes make it another one."""
        texts = [canonical.dumps(files_claimed(flat.nodes, self._one_file)).decode()]
        for leaf, layout, claim in zip(flat.leaves, facts.layouts, facts.claims, strict=True):
            if layout is None and leaf.path[0] != own and (claim is None or claim.box is not None):
                texts.append(replica_digest(leaf, full=self._full) + ("" if claim is None else str(claim.box)))
        return blake3("".join(texts).encode()).hexdigest(length=16)

    def share(self, flat: Flat, facts: Facts, *, own: str, same_schema: bool, same_replicas: bool, at: str) -> list[Part]:
        """Return this rank's parts, the first ones aligned with the leaves.

        Collective when ranks differ: then one more agreement tells where. Raises: as `Coordinator.agree`.
        """
        candidates: Mapping[str, Sequence[int]] = {}
        diverged: set[str] = set()
        copies: Mapping[str, Sequence[int]] | None = None
        everyone = range(self._coordinator.world_size)
        if not (same_schema and same_replicas):
            digests: dict[str, str] = {}
            sharded: dict[str, list[Any]] = {}
            claimed: dict[str, list[Any]] = {}
            for leaf, path, layout, claim in zip(flat.leaves, facts.paths, facts.layouts, facts.claims, strict=True):
                if layout is not None:
                    sharded[path] = self._told(leaf, path, layout)
                elif claim is not None:
                    box = None if claim.box is None else [list(claim.box.offsets), list(claim.box.sizes)]
                    claimed[path] = [claim.form(leaf), list(claim.shape), box, replica_digest(leaf, full=self._full) if box else ""]
                elif leaf.path[0] != own:
                    digests[path] = replica_digest(leaf, full=self._full)
            told = {"digests": digests, "sharded": sharded, "claimed": claimed, "files": files_claimed(flat.nodes, self._one_file)}
            verdict = self._coordinator.agree("replicas", told, _compare, at=at)
            candidates, diverged, copies = verdict["ranks"], set(verdict["diverged"]), verdict["copies"]
        if same_schema and facts.schema != self._schema:
            self._schema, self._owners = facts.schema, self._balance(flat, facts, own)
        first: list[Part] = []
        further: list[Part] = []
        for leaf, path, layout, claim in zip(flat.leaves, facts.paths, facts.layouts, facts.claims, strict=True):
            if leaf.path[0] == own or path in diverged or (claim is not None and claim.box is None):
                first.append(Part(leaf.path, leaf.dtype, leaf.shape, None, leaf.array, local=True, trainable=leaf.trainable))
                continue
            if claim is not None and claim.box is not None:
                holding = everyone if copies is None else copies.get(_box_text(path, claim.box), (self._coordinator.rank,))
                first.append(_box_part(leaf, claim.shape, claim.box, owned=_by_name(path, claim.box, holding) == self._coordinator.rank))
                continue
            mine = [
                (box, view)
                for box, view, ranks in _held(leaf, path, layout, candidates.get(path, everyone))
                if (self._owners[path, box] if same_schema else _by_name(path, box, ranks)) == self._coordinator.rank
            ]
            parts = [
                Part(leaf.path, leaf.dtype, leaf.shape, None if layout is None else box, view, trainable=leaf.trainable)
                for box, view in mine
            ]
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
        return [form, layout.ranks.index(self._coordinator.rank), "".join(replica_digest(view, full=self._full) for view in views)]

    def _balance(self, flat: Flat, facts: Facts, own: str) -> dict[tuple[str, Box], int]:
        everyone = tuple(range(self._coordinator.world_size))
        pieces = []
        for leaf, path, layout, claim in zip(flat.leaves, facts.paths, facts.layouts, facts.claims, strict=True):
            if leaf.path[0] == own or claim is not None:
                continue
            itemsize = dtype(leaf.dtype).itemsize
            boxes = {_whole(leaf): everyone} if layout is None else holders(layout)
            pieces += [Piece(path, box, box.elements * itemsize, ranks) for box, ranks in boxes.items()]
        return {(piece.key, piece.box): owner for piece, owner in zip(pieces, assign(pieces, len(everyone)), strict=True)}


def whole(flat: Flat, declared: Declared | None = None) -> list[Part]:
    """Return the parts of a job of one process: everything. Raises: StateError (a declared box that is not all of its tensor)."""
    for leaf in flat.leaves if declared is not None and declared.tensors else ():
        claim = _claim(leaf, format_path(leaf.path), None, declared)
        if claim is not None and claim.box is not None:
            _check_partition(format_path(leaf.path), claim.shape, [claim.box])
    return [Part(leaf.path, leaf.dtype, leaf.shape, None, leaf.array, trainable=leaf.trainable) for leaf in flat.leaves]


def _claim(leaf: Leaf, path: str, layout: Layout | None, declared: Declared | None) -> _Claim | None:
    metadata = None if declared is None or layout is not None else declared.tensors.get(path)
    if metadata is None or metadata.dtype is None or not metadata.boxes:
        return None
    if not isinstance(leaf.array, torch.Tensor):
        return _Claim(leaf.shape, None)  # The array around an entry has an order of its own.
    return _Claim(metadata.global_shape, part_of(metadata, path=path, dtype=leaf.dtype, sizes=leaf.shape))


def _box_part(leaf: Leaf, shape: tuple[int, ...], box: Box, *, owned: bool) -> Part:
    if not owned:
        return Part(leaf.path, leaf.dtype, shape, None, None)
    return Part(leaf.path, leaf.dtype, shape, None if box.sizes == shape else box, leaf.array, trainable=leaf.trainable)


def _box_text(path: str, box: Box) -> str:
    return f"{path} {box.offsets} {box.sizes}"


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
    refuse_differing([mine["files"] for mine in told], [mine["digests"] for mine in told])
    copies = _copies(told)
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
        "copies": copies,
    }


def _copies(told: list[dict[str, dict[str, Any]]]) -> dict[str, list[int]]:
    """Return which ranks claim one box of one tensor, where there are several. Raises: StateError for claims that make no tensor."""
    forms: dict[str, tuple[int, str]] = {}
    shapes: dict[str, list[int]] = {}
    tensors: dict[str, dict[Box, list[tuple[int, str]]]] = {}
    for rank, mine in enumerate(told):
        for path, (form, shape, box, digest) in mine["claimed"].items():
            other, known = forms.setdefault(path, (rank, form))
            if form != known:
                raise StateError(
                    f"{path}: its resharder declares {known} on rank {other} and {form} on rank {rank}: declare one tensor alike"
                )
            if box is not None:
                shapes[path] = shape
                tensors.setdefault(path, {}).setdefault(Box(tuple(box[0]), tuple(box[1])), []).append((rank, digest))
    for rank, mine in enumerate(told):
        for path in forms.keys() & (mine["digests"].keys() | mine["sharded"].keys()):
            raise StateError(f"{path}: its resharder declares it on rank {forms[path][0]} and not on rank {rank}: declare it on all ranks")
    found: dict[str, list[int]] = {}
    for path, boxes in tensors.items():
        _check_partition(path, shapes[path], list(boxes))
        for box, holding in boxes.items():
            ranks = [rank for rank, _ in holding]
            if len({digest for _, digest in holding}) > 1:
                raise StateError(
                    f"{path}: ranks {ranks} declare one box, {box}, with values that differ: make them equal, or do not declare it"
                )
            if len(ranks) > 1:
                found[_box_text(path, box)] = ranks
    return found


def _check_partition(path: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    try:
        plan(boxes, [Box((0,) * len(shape), tuple(shape))], path=path)
    except StateError as exc:
        raise StateError(
            f"{path}: the boxes that its resharder declares on all ranks do not make the global tensor of shape {list(shape)}, each element"
            f" once ({exc}). A tensor that is not declared is kept by each rank for itself"
        ) from exc


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


def replica_digest(leaf: Leaf, *, full: bool = False) -> str:
    """Return a digest of dtype, shape and values: all of them up to 64 KiB or with `full`, else a strided sample of 4 KiB and both ends."""
    array = leaf.array
    if isinstance(array, np.ndarray):
        array = torch.from_numpy(np.ascontiguousarray(array))
    flat = array.detach().reshape(-1)
    itemsize = dtype(leaf.dtype).itemsize
    nbytes = prod(leaf.shape) * itemsize
    if nbytes > _WHOLE_NBYTES and not full:
        count = _SAMPLE_NBYTES // itemsize
        step = max(1, flat.numel() // count)
        flat = torch.cat([flat[::step][:count], flat[-1:]])
    hasher = blake3(canonical.dumps([leaf.dtype, list(leaf.shape)]))
    if nbytes:
        for chunk in flat.split(_CHUNK_NBYTES // itemsize):
            hasher.update(chunk.cpu().contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest(length=16)
