"""Rank 0's comparison of what ranks are about to save: whether what should be the same is. Pure.

Digests of values come from every rank; what they are of, from one rank of those that have the same structure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syckpt.checkpoint.paths import refuse_differing
from syckpt.errors import StateError
from syckpt.objects.box import Box
from syckpt.objects.nodes import KeyPath, format_path
from syckpt.reshard.layout import Layout, copies
from syckpt.reshard.placement import Declaration, Structure
from syckpt.reshard.plan import plan

__all__ = ["Claim", "Compared", "Told", "alike", "box_text", "check_partition", "compare", "owner_of_box", "place_of"]


@dataclass(frozen=True)
class Claim:
    """What a resharder declares a plain tensor to be: a box of a global tensor of that shape, or (None) something of this rank's own."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    box: Box | None

    @property
    def form(self) -> str:
        """What has to be the same on all ranks."""
        return "its own" if self.box is None else f"{self.dtype} {list(self.shape)}"

    def to_body(self) -> list[Any]:
        box = None if self.box is None else [list(self.box.offsets), list(self.box.sizes)]
        return [list(self.path), self.dtype, list(self.shape), box]

    @staticmethod
    def from_body(body: list[Any]) -> Claim:
        path, dtype, shape, box = body
        return Claim(tuple(path), dtype, tuple(shape), None if box is None else Box(tuple(box[0]), tuple(box[1])))


@dataclass(frozen=True)
class Told:
    """What one rank brings. `digests`: one a tensor of the structure, in their order; `claims`, each with a digest: by path text.

    `files`: what `paths.claim` returned.
    """

    structure: Structure
    digests: Sequence[str]
    claims: Mapping[str, tuple[Claim, str]]
    files: Mapping[str, Any]

    @staticmethod
    def from_body(body: Mapping[str, Any], structure: Structure) -> Told:
        claims = {path: (Claim.from_body(claim), digest) for path, (*claim, digest) in body["claims"].items()}
        return Told(structure, body["digests"], claims, body["files"])


@dataclass(frozen=True)
class Compared:
    """`diverged`: plain tensors that differ. `unlike`: sharded ones of which copies of one part differ, with the ranks that hold these.

    `claimants`: the ranks that claim one box, by `box_text`, where there are several; `declared`: who stores which box.
    """

    diverged: list[str] = field(default_factory=list)
    unlike: dict[str, list[int]] = field(default_factory=dict)
    claimants: dict[str, Sequence[int]] = field(default_factory=dict)
    declared: list[Declaration] = field(default_factory=list)


def compare(told: Sequence[Told]) -> Compared:
    """Compare what ranks bring; `told[rank]`. Raises: StateError for tensors under one path, or claims, that are not one tensor."""
    first: dict[int, int] = {}
    for rank, mine in enumerate(told):
        first.setdefault(id(mine.structure), rank)
    several = _refuse_other_forms({rank: told[rank].structure for rank in first.values()})
    claimants, declared = _claimed(told, first.values())
    _refuse_other_files(told)
    plain: dict[str, str] = {}
    diverged: dict[str, None] = {}
    parts: dict[tuple[str, int], tuple[int, str]] = {}
    held: dict[tuple[str, str], str] = {}
    unlike: dict[str, set[str]] = {}
    sights = {key: _Sight(told[rank].structure, several) for key, rank in first.items()}
    for rank, mine in enumerate(told):
        sight, digests = sights[id(mine.structure)], mine.digests
        for index, text in sight.plain:
            if plain.setdefault(text, digests[index]) != digests[index]:
                diverged[text] = None
        for index, text, layout in sight.several:
            position = sight.positions(layout).get(rank)
            if position is not None:
                other, known = parts.setdefault((text, position), (rank, digests[index]))
                if known != digests[index]:
                    raise StateError(
                        f"{text}: ranks {other} and {rank}, on two meshes, hold the same part of it with values that differ. If it is one"
                        " tensor (tensor parallelism under DDP), its copies have drifted apart: make them equal, e.g. by broadcasting it."
                        " If these are two tensors, save them under two names"
                    )
        for index, text, layout in sight.copied:
            place = sight.place(layout, rank)
            if place is not None and held.setdefault((text, place), digests[index]) != digests[index]:
                unlike.setdefault(text, set()).add(place)
    return Compared(list(diverged), _holders(told, sights, unlike), claimants, declared)


class _Sight:
    """What is to be compared of one structure: plain tensors, sharded ones that several meshes have, and those with copies."""

    def __init__(self, structure: Structure, several: set[str]) -> None:
        self.plain = [(index, tensor.text) for index, tensor in enumerate(structure.tensors) if tensor.layout is None]
        sharded = [(index, tensor.text, tensor.layout) for index, tensor in enumerate(structure.tensors) if tensor.layout is not None]
        self.several = [row for row in sharded if row[1] in several]
        self.copied = [row for row in sharded if copies(row[2]) > 1]
        # Most tensors share a mesh, and a large one is a long list.
        self._positions: dict[int, dict[int, int]] = {}
        self._places: dict[Any, str | None] = {}

    def positions(self, layout: Layout) -> dict[int, int]:
        """Return the position of each rank in a mesh."""
        if id(layout.ranks) not in self._positions:
            self._positions[id(layout.ranks)] = {rank: position for position, rank in enumerate(layout.ranks)}
        return self._positions[id(layout.ranks)]

    def place(self, layout: Layout, rank: int) -> str | None:
        """Return `place_of`."""
        key = id(layout.ranks), layout.mesh_shape, layout.copying, rank
        if key not in self._places:
            self._places[key] = place_of(layout, rank)
        return self._places[key]


def place_of(layout: Layout, rank: int) -> str | None:
    """Return a text that those ranks have in common that hold the same part; None for a rank outside of the mesh."""
    coordinate = layout.coordinate_of(rank)
    if coordinate is None:
        return None
    where = ["*" if axis in layout.copying else index for axis, index in enumerate(coordinate)]
    return f"{zlib.crc32(str(layout.ranks).encode()):08x} {layout.mesh_shape} {where}"


def _refuse_other_forms(structures: Mapping[int, Structure]) -> set[str]:
    """Refuse tensors that have one path and are not one tensor: their boxes would be taken for parts or copies of each other.

    Several meshes may hold copies of one (tensor parallelism under DDP); those paths are returned. By the first rank of each structure.
    """
    seen: dict[str, tuple[int, Any, Layout | None]] = {}
    several: set[str] = set()
    for rank, structure in structures.items():
        for tensor in structure.tensors:
            layout = tensor.layout
            form = None if layout is None else (tensor.dtype, tensor.shape, layout.mesh_shape, layout.placements)
            other, known, elsewhere = seen.setdefault(tensor.text, (rank, form, layout))
            if form != known:
                raise _not_one(tensor.text, other, rank)
            if layout is not None and elsewhere is not None and layout.text != elsewhere.text:
                several.add(tensor.text)
    return several


def _refuse_other_files(told: Sequence[Told]) -> None:
    if any(mine.files for mine in told):
        plain = [
            {tensor.text: digest for tensor, digest in zip(mine.structure.tensors, mine.digests, strict=True) if tensor.layout is None}
            for mine in told
        ]
        refuse_differing([mine.files for mine in told], plain)


def _holders(told: Sequence[Told], sights: Mapping[int, _Sight], unlike: Mapping[str, set[str]]) -> dict[str, list[int]]:
    """Return who holds the parts of which copies differ."""
    found: dict[str, list[int]] = {text: [] for text in unlike}
    for rank, mine in enumerate(told) if unlike else ():
        sight = sights[id(mine.structure)]
        for _, text, layout in sight.copied:
            if text in unlike and sight.place(layout, rank) in unlike[text]:
                found[text].append(rank)
    return found


def _not_one(path: str, first: int, second: int) -> StateError:
    return StateError(
        f"{path}: the sharded tensor on rank {first} and the one on rank {second} are not one: shard it alike, or save it under two names"
        " (an optimizer is saved by parameter name where its model is registered too)"
    )


# --- what resharders declare ---------------------------------------------------------------------------------------------------


def _claimed(told: Sequence[Told], first: Iterable[int]) -> tuple[dict[str, Sequence[int]], list[Declaration]]:
    """Return who claims one box together, and who stores which. Raises: StateError for claims that make no tensor."""
    forms: dict[str, tuple[int, Claim]] = {}
    tensors: dict[str, dict[Box, list[tuple[int, str]]]] = {}
    for rank, mine in enumerate(told):
        for path, (claim, digest) in mine.claims.items():
            other, known = forms.setdefault(path, (rank, claim))
            if claim.form != known.form:
                raise StateError(
                    f"{path}: its resharder declares {known.form} on rank {other} and {claim.form} on rank {rank}: declare one tensor alike"
                )
            if claim.box is not None:
                tensors.setdefault(path, {}).setdefault(claim.box, []).append((rank, digest))
    for rank in first if forms else ():
        for tensor in told[rank].structure.tensors:
            if tensor.text in forms:
                declaring = forms[tensor.text][0]
                raise StateError(
                    f"{tensor.text}: its resharder declares it on rank {declaring} and not on rank {rank}: declare it on all ranks"
                )
    together: dict[str, Sequence[int]] = {}
    declared: list[Declaration] = []
    for path, boxes in tensors.items():
        claim = forms[path][1]
        check_partition(path, claim.shape, list(boxes))
        for box, holding in boxes.items():
            ranks = [rank for rank, _ in holding]
            if len({digest for _, digest in holding}) > 1:
                raise StateError(
                    f"{path}: ranks {ranks} declare one box, {box}, with values that differ: make them equal, or do not declare it"
                )
            if len(ranks) > 1:
                together[box_text(path, box)] = ranks
        owners = tuple((owner_of_box(path, box, [rank for rank, _ in holding]), box) for box, holding in boxes.items())
        declared.append(Declaration(claim.path, claim.dtype, claim.shape, owners))
    return together, declared


def alike(claims: Iterable[Claim | None], world_size: int) -> Compared:
    """Return what `compare` does where all ranks bring the same. Raises: StateError for claims that make no tensor."""
    compared = Compared()
    for claim in claims:
        if claim is not None and claim.box is not None:
            path, everyone = format_path(claim.path), range(world_size)
            check_partition(path, claim.shape, [claim.box])
            compared.claimants[box_text(path, claim.box)] = everyone
            boxes = ((owner_of_box(path, claim.box, everyone), claim.box),)
            compared.declared.append(Declaration(claim.path, claim.dtype, claim.shape, boxes))
    return compared


def box_text(path: str, box: Box) -> str:
    """Return what names a declared box."""
    return f"{path} {box.offsets} {box.sizes}"


def owner_of_box(path: str, box: Box, ranks: Sequence[int]) -> int:
    """Return which of the ranks that declare one box stores it."""
    return ranks[zlib.crc32(f"{path} {box.offsets}".encode()) % len(ranks)]


def check_partition(path: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Hold that declared boxes make a tensor, each element once. Raises: StateError."""
    try:
        plan(boxes, [Box((0,) * len(shape), tuple(shape))], path=path)
    except StateError as exc:
        raise StateError(
            f"{path}: the boxes that its resharder declares on all ranks do not make the global tensor of shape {list(shape)}, each element"
            f" once ({exc}). A tensor that is not declared is kept by each rank for itself"
        ) from exc
