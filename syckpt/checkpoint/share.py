"""Who stores what: the parts of a job's state that this rank hands to its writer.

A sharded tensor is stored box by box, by ranks that hold them; a replicated one once. Owners are balanced by bytes, and every rank
computes the same ones from the structure that all have: one copy of each tensor, so that rank 0 can write down who stores what. Where
ranks have different keys (pipeline or expert parallelism), the owner follows from path and box alone.
Replicas are compared by digests that travel with the save; a tensor that differs between ranks is stored by each. The digests see all of a
tensor up to 64 KiB and a sample of a larger one: a difference outside of the sample is not seen, unless all bytes are compared
(`check_replicas="full"`). Copies of a sharded tensor's parts (HSDP, tensor parallelism) are compared likewise; where they differ, one of
them is stored, and a warning says so. A plain tensor that a resharder declares as a box of a global one is no replica: it is stored as that
box, by one of the ranks that declare the same one.
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
from syckpt.objects.layouts import LayoutTable, TensorLayout
from syckpt.objects.nodes import format_path
from syckpt.reshard.keeping import split_of
from syckpt.reshard.layout import Layout, copies, copy_of, holders, keepers, local_shape
from syckpt.reshard.owners import Copied, choose, spread
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
        self._copies: dict[str, int] = {}
        self._table: dict[str, Any] | None = None
        self.table: dict[str, Any] | None = None
        """Who stores what by the last shares, as `LayoutTable.to_body` without items; None where ranks differ in structure. While the
        structure stays, it is the same object."""

    def facts(self, flat: Flat, own: str, declared: Declared | None = None) -> Facts:
        """Return this rank's structure. Leaves of the item `own` are never shared.

        Raises: StateError (a layout that cannot be stored, a tensor that is not what its resharder declared).
        """
        paths = [format_path(leaf.path) for leaf in flat.leaves]
        layouts = [None if leaf.path[0] == own else _layout(leaf, path) for leaf, path in zip(flat.leaves, paths, strict=True)]
        claims = [_claim(leaf, path, layout, declared) for leaf, path, layout in zip(flat.leaves, paths, layouts, strict=True)]
        rows = [
            [path, leaf.dtype, list(leaf.shape), None if layout is None else layout.text] if claim is None else [path, claim.form(leaf)]
            for path, leaf, layout, claim in zip(paths, flat.leaves, layouts, claims, strict=True)
            if leaf.path[0] != own
        ]
        return Facts(paths, layouts, blake3(canonical.dumps(rows)).hexdigest(), claims)

    def replicas(self, flat: Flat, facts: Facts, own: str) -> dict[str, str]:
        """Return one digest of all tensors that should be the same on all ranks; claims to other boxes make it another one.

        Beside it (under `""`) stands one of the parts of sharded tensors that other ranks have too, for each place in a mesh: those that
        share it should have the same one.
        """
        texts = {"": [canonical.dumps(files_claimed(flat.nodes, self._one_file)).decode()]}
        places: dict[Any, str | None] = {}
        for leaf, path, layout, claim in zip(flat.leaves, facts.paths, facts.layouts, facts.claims, strict=True):
            if layout is not None and copies(layout) > 1:
                # Most tensors share a mesh, and a large one is a long list.
                mesh = (id(layout.ranks), layout.mesh_shape, layout.copying)
                if mesh not in places:
                    places[mesh] = _place(layout, self._coordinator.rank)
                if (place := places[mesh]) is not None:
                    texts.setdefault(place, []).append(self._digest_of_part(leaf, path))
            elif layout is None and leaf.path[0] != own and (claim is None or claim.box is not None):
                texts[""].append(replica_digest(leaf, full=self._full) + ("" if claim is None else str(claim.box)))
        return {place: blake3("".join(found).encode()).hexdigest(length=16) for place, found in texts.items()}

    def share(self, flat: Flat, facts: Facts, *, own: str, same_schema: bool, same_replicas: bool, at: str) -> list[Part]:
        """Return this rank's parts, the first ones aligned with the leaves.

        Collective when ranks differ: then one more agreement tells where. Raises: as `Coordinator.agree`.
        """
        candidates: Mapping[str, Sequence[int]] = {}
        diverged: set[str] = set()
        claimants: Mapping[str, Sequence[int]] | None = None
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
            candidates, diverged, claimants = verdict["ranks"], set(verdict["diverged"]), verdict["copies"]
            self._warn_of_copies(verdict["unlike"])
        if same_schema and facts.schema != self._schema:
            self._schema, self._copies = facts.schema, self._choose(flat, facts, own)
            self._table = _table(flat, facts, self._copies, world_size=len(everyone)).to_body()
        self.table = self._table if same_schema else None
        first: list[Part] = []
        further: list[Part] = []
        chosen = self._copies if same_schema else {}
        for leaf, path, layout, claim in zip(flat.leaves, facts.paths, facts.layouts, facts.claims, strict=True):
            if leaf.path[0] == own or path in diverged or (claim is not None and claim.box is None):
                first.append(Part(leaf.path, leaf.dtype, leaf.shape, None, leaf.array, local=True, trainable=leaf.trainable))
                continue
            if claim is not None and claim.box is not None:
                holding = everyone if claimants is None else claimants.get(_box_text(path, claim.box), (self._coordinator.rank,))
                first.append(_box_part(leaf, claim.shape, claim.box, owned=_by_name(path, claim.box, holding) == self._coordinator.rank))
                continue
            if path not in chosen:
                held = _held(leaf, path, layout, candidates.get(path, everyone))
                mine = [(box, view) for box, view, ranks in held if _by_name(path, box, ranks) == self._coordinator.rank]
            else:
                is_mine = chosen[path] == (self._coordinator.rank if layout is None else copy_of(layout, self._coordinator.rank))
                mine = _own(leaf, path, layout) if is_mine else []
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
            return [form, None, "", None]
        place = _place(layout, self._coordinator.rank)
        return [form, layout.ranks.index(self._coordinator.rank), self._digest_of_part(leaf, path), place]

    def _digest_of_part(self, leaf: Leaf, path: str) -> str:
        views = [Leaf(leaf.path, view, leaf.dtype, box.sizes) for box, view in local_boxes(leaf.array, path=path)]
        return "".join(replica_digest(view, full=self._full) for view in views)

    def _warn_of_copies(self, unlike: Mapping[str, Sequence[int]]) -> None:
        if unlike and self._coordinator.rank == 0:
            found = ", ".join(f"{path} (ranks {', '.join(map(str, ranks))})" for path, ranks in list(unlike.items())[:5])
            _log.warning(
                "%d sharded tensors have copies that differ between ranks which should hold the same values, and the values of one of them"
                " are saved: %s. What keeps them alike in training (a gradient that is not reduced?) is broken",
                len(unlike),
                found,
            )

    def _choose(self, flat: Flat, facts: Facts, own: str) -> dict[str, int]:
        """Return which copy of each tensor is stored, by path text: a rank of a plain one, a copy of its layout of a sharded one."""
        world_size = self._coordinator.world_size
        known: dict[Layout | None, tuple[tuple[int, tuple[int, ...]], ...]] = {None: tuple((rank, (rank,)) for rank in spread(world_size))}
        items: list[Copied] = []
        for leaf, path, layout, claim in zip(flat.leaves, facts.paths, facts.layouts, facts.claims, strict=True):
            if leaf.path[0] == own or claim is not None:
                continue
            if layout not in known:
                assert layout is not None
                known[layout] = tuple((copy, tuple(sorted(keepers(layout, copy)))) for copy in spread(copies(layout)))
            sizes = leaf.shape if layout is None else local_shape(layout, (0,) * len(layout.mesh_shape))
            items.append(Copied(path, prod(sizes) * dtype(leaf.dtype).itemsize, known[layout]))
        return {item.key: copy for item, copy in zip(items, choose(items, world_size), strict=True)}


def _table(flat: Flat, facts: Facts, chosen: Mapping[str, int], *, world_size: int) -> LayoutTable:
    """Return the table of layouts of all tensors of which a copy was chosen; it names no items."""
    meshes: dict[Any, int] = {}
    layouts: dict[Any, int] = {}
    rows = []
    for leaf, path, layout in zip(flat.leaves, facts.paths, facts.layouts, strict=True):
        if path not in chosen:
            continue
        number = None
        if layout is not None:
            mesh = meshes.setdefault((layout.mesh_shape, layout.ranks), len(meshes))
            number = layouts.setdefault((mesh, tuple(map(split_of, layout.placements))), len(layouts))
        rows.append(TensorLayout(leaf.path, leaf.dtype, leaf.shape, number, chosen[path]))
    return LayoutTable(world_size, {}, tuple(meshes), tuple(layouts), tuple(rows))


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


def _place(layout: Layout, rank: int) -> str | None:
    """Return a text that those ranks have in common that hold the same part; None for a rank outside of the mesh."""
    coordinate = layout.coordinate_of(rank)
    if coordinate is None:
        return None
    where = ["*" if axis in layout.copying else index for axis, index in enumerate(coordinate)]
    return f"{zlib.crc32(str(layout.ranks).encode()):08x} {layout.mesh_shape} {where}"


def _whole(leaf: Leaf) -> Box:
    return Box((0,) * len(leaf.shape), leaf.shape)


def _own(leaf: Leaf, path: str, layout: Layout | None) -> list[tuple[Box, Any]]:
    """Return the boxes that this rank holds, and their values."""
    return [(_whole(leaf), leaf.array)] if layout is None else local_boxes(leaf.array, path=path)


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
    claimants = _claimants(told)
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
        "copies": claimants,
        "unlike": _unlike(told),
    }


def _claimants(told: list[dict[str, dict[str, Any]]]) -> dict[str, list[int]]:
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
        for path, (form, position, digest, _) in mine["sharded"].items():
            other, known = first.setdefault(path, (rank, form))
            if form == known and position is not None:
                other, known = parts.setdefault((path, position), (rank, digest))
                form = digest
            if form != known:
                raise _not_one(path, other, rank)
    for rank, mine in enumerate(told):
        for path in first.keys() & mine["digests"].keys():
            raise _not_one(path, first[path][0], rank)


def _unlike(told: list[dict[str, dict[str, Any]]]) -> dict[str, list[int]]:
    """Return the sharded tensors of which ranks that hold one part have different values, with those ranks."""
    held: dict[tuple[str, str], dict[int, str]] = {}
    for rank, mine in enumerate(told):
        for path, (_, _, digest, place) in mine["sharded"].items():
            if place is not None:
                held.setdefault((path, place), {})[rank] = digest
    found: dict[str, list[int]] = {}
    for (path, _), parts in held.items():
        if len(set(parts.values())) > 1:
            found[path] = sorted({*found.get(path, ()), *parts})
    return found


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
