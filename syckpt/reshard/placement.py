"""Who stores what of a job's state, once for as long as its structure stays; and the table of layouts that says so. Pure.

One copy of each tensor is stored: by one rank a plain one, by the ranks of one copy of its layout a sharded one; where several meshes hold
it, by those of one of them. What is chosen follows from the ranks' structures alone: whoever knows these chooses the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

from blake3 import blake3

from syckpt.objects.box import Box
from syckpt.objects.dtypes import dtype
from syckpt.objects.layouts import LayoutTable, Parts, TensorLayout
from syckpt.objects.nodes import KeyPath, format_path
from syckpt.reshard.keeping import layout_of_row, split_of
from syckpt.reshard.layout import Layout, copies, copy_of, keepers, local_shape
from syckpt.reshard.owners import Copied, choose, spread

_Options: TypeAlias = "list[tuple[tuple[str | None, int], tuple[int, ...]]]"  # what is stored, and by which ranks

__all__ = ["Declaration", "Placement", "Structure", "Tensor", "key_of", "place", "table"]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a rank's structure; `layout` None: the rank has all of it, or what its resharder declares."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None

    @cached_property
    def text(self) -> str:
        return format_path(self.path)


@dataclass(frozen=True)
class Structure:
    """The tensors that a rank may share with others. Many ranks have the same one."""

    tensors: tuple[Tensor, ...] = ()

    def to_body(self, *, world_size: int) -> dict[str, Any]:
        """Return it for another rank: a table of layouts that tells nothing of who stores what."""
        return _table([(tensor, 0) for tensor in self.tensors], world_size=world_size).to_body()

    @staticmethod
    def from_body(body: dict[str, Any]) -> Structure:
        """Invert `to_body`. Raises: IntegrityError, FormatError."""
        found = LayoutTable.from_body(body, where="the structure of a rank")
        known: dict[tuple[int | None, tuple[int, ...]], Layout | None] = {}
        tensors = []
        for row in found.tensors:
            key = row.layout, row.shape
            if key not in known:
                known[key] = layout_of_row(found, row)
            tensors.append(Tensor(row.path, row.dtype, row.shape, known[key]))
        return Structure(tuple(tensors))


@dataclass(frozen=True)
class Placement:
    """Which copy of each tensor is stored, by path text: the text of a layout and a copy of it, or (None) a rank. `key` names it."""

    key: str
    copies: Mapping[str, tuple[str | None, int]]

    def is_stored_by(self, rank: int, path: str, layout: Layout | None) -> bool:
        """Whether a rank that holds a tensor in a layout stores what it holds."""
        stored, copy = self.copies[path]
        if layout is None:
            return stored is None and copy == rank
        return stored == layout.text and copy_of(layout, rank) == copy

    def to_body(self) -> dict[str, Any]:
        layouts: dict[str | None, int] = {}
        rows = {path: [layouts.setdefault(layout, len(layouts)), copy] for path, (layout, copy) in self.copies.items()}
        return {"key": self.key, "layouts": list(layouts), "tensors": rows}

    @staticmethod
    def from_body(body: dict[str, Any]) -> Placement:
        return Placement(body["key"], {path: (body["layouts"][layout], copy) for path, (layout, copy) in body["tensors"].items()})


@dataclass(frozen=True)
class Declaration:
    """A tensor that resharders declare on all ranks: its global shape, and which rank stores which box."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[int, Box], ...]


def key_of(schemas: Sequence[str]) -> str:
    """Return what names the placement of a job whose ranks have structures with these digests."""
    return blake3("\n".join(schemas).encode()).hexdigest(length=16)


def place(structures: Mapping[str, Structure], schemas: Sequence[str]) -> dict[str, tuple[str | None, int]]:
    """Return `Placement.copies`. `schemas[rank]` is the digest of a rank's structure, by which `structures` has it."""
    ranks: dict[str, list[int]] = {}
    for rank, schema in enumerate(schemas):
        ranks.setdefault(schema, []).append(rank)
    tensors: dict[str, Tensor] = {}
    holding: dict[str, list[int]] = {}
    layouts: dict[str, dict[Layout, None]] = {}
    for schema, mine in ranks.items():
        for tensor in structures[schema].tensors:
            tensors.setdefault(tensor.text, tensor)
            holding.setdefault(tensor.text, []).extend(mine)
            if tensor.layout is not None:
                layouts.setdefault(tensor.text, {})[tensor.layout] = None
    known: dict[Any, _Options] = {}
    meant, items = [], []
    for text, tensor in tensors.items():
        lies, ranks_of = tuple(layouts.get(text, ())), tuple(sorted(holding[text]))
        key = lies or ranks_of
        if key not in known:
            known[key] = _of_layouts(lies) if lies else _of_ranks(ranks_of)
        sizes = tensor.shape if tensor.layout is None else local_shape(tensor.layout, (0,) * len(tensor.layout.mesh_shape))
        meant.append([meaning for meaning, _ in known[key]])
        copied = tuple((number, storing) for number, (_, storing) in enumerate(known[key]))
        items.append(Copied(text, prod(sizes) * dtype(tensor.dtype).itemsize, copied))
    chosen = choose(items, len(schemas))
    return {item.key: meaning[number] for item, meaning, number in zip(items, meant, chosen, strict=True)}


def _of_layouts(layouts: Sequence[Layout]) -> _Options:
    every = [(layout, copy) for layout in layouts for copy in range(copies(layout))]
    return [((layout.text, copy), tuple(sorted(keepers(layout, copy)))) for layout, copy in map(every.__getitem__, spread(len(every)))]


def _of_ranks(ranks: Sequence[int]) -> _Options:
    return [((None, rank), (rank,)) for rank in map(ranks.__getitem__, spread(len(ranks)))]


def table(structures: Iterable[Structure], placement: Placement, declared: Sequence[Declaration], *, world_size: int) -> LayoutTable:
    """Return the table of layouts of a commit; it names no items."""
    rows: dict[str, tuple[Tensor, int]] = {}
    for structure in structures:
        for tensor in structure.tensors:
            layout, copy = placement.copies[tensor.text]
            if layout == (None if tensor.layout is None else tensor.layout.text):
                rows.setdefault(tensor.text, (tensor, copy))
    return _table(list(rows.values()), declared, world_size=world_size)


def _table(tensors: Sequence[tuple[Tensor, int]], declared: Sequence[Declaration] = (), *, world_size: int) -> LayoutTable:
    meshes: dict[Any, int] = {}
    layouts: dict[Any, int] = {}
    rows = []
    for tensor, copy in tensors:
        number = None
        if tensor.layout is not None:
            mesh = meshes.setdefault((tensor.layout.mesh_shape, tensor.layout.ranks), len(meshes))
            number = layouts.setdefault((mesh, tuple(map(split_of, tensor.layout.placements))), len(layouts))
        rows.append(TensorLayout(tensor.path, tensor.dtype, tensor.shape, number, copy))
    for each in declared:
        number = layouts.setdefault(Parts(each.boxes), len(layouts))
        rows.append(TensorLayout(each.path, each.dtype, each.shape, number, 0))
    return LayoutTable(world_size, {}, tuple(meshes), tuple(layouts), tuple(rows))
