"""The table of layouts: which ranks of a commit store which boxes, by arithmetic (FORMAT.md, section 6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from syckpt.objects.box import Box
from syckpt.objects.checks import Fields
from syckpt.objects.dtypes import dtype
from syckpt.objects.manifest import read_path, read_shape

__all__ = ["LayoutTable", "Mesh", "Parts", "Split", "Splits", "TensorLayout", "groups_of"]

_MAX_RANKS = 100_000  # as many as keys have numbers for
Mesh = tuple[tuple[int, ...], tuple[int, ...]]  # shape, ranks in row-major order
Split = tuple[int, ...] | None  # of a mesh dimension: (dim,), (dim, factor), or None where it splits nothing
Splits = tuple[int, tuple[Split, ...]]  # the number of a mesh, and a split for each of its dimensions


@dataclass(frozen=True)
class Parts:
    """Ranks, and the boxes that each stores, which follow no rule."""

    boxes: tuple[tuple[int, Box], ...]


@dataclass(frozen=True)
class TensorLayout:
    """A tensor, the number of its layout (None: one rank stores all of it), and that rank, or which of its copies is stored."""

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    layout: int | None
    copy: int


@dataclass(frozen=True)
class LayoutTable:
    """What `world_size` ranks saved. `items`: by name, groups of ranks that have the same structure there."""

    world_size: int
    items: dict[str, tuple[tuple[int, ...], ...]] = field(hash=False)
    meshes: tuple[Mesh, ...]
    layouts: tuple[Splits | Parts, ...]
    tensors: tuple[TensorLayout, ...] = field(repr=False)

    def to_body(self) -> dict[str, Any]:
        return {
            "kind": "layouts",
            "version": 1,
            "world_size": self.world_size,
            "items": {name: [_runs(group) for group in groups] for name, groups in self.items.items()},
            "meshes": [[list(shape), _runs(ranks)] for shape, ranks in self.meshes],
            "layouts": list(map(_layout_body, self.layouts)),
            "tensors": {
                "path": [list(t.path) for t in self.tensors],
                "dtype": [t.dtype for t in self.tensors],
                "shape": [list(t.shape) for t in self.tensors],
                "layout": [t.layout for t in self.tensors],
                "copy": [t.copy for t in self.tensors],
            },
        }

    @staticmethod
    def from_body(body: dict[str, Any], *, where: str) -> LayoutTable:
        """Read a table; every number is checked here. Raises: IntegrityError, FormatError (an unknown dtype)."""
        fields = Fields(body, where=where)
        world_size = fields.integer("world_size", least=1)
        if world_size > _MAX_RANKS:
            fields.fail(f"{world_size} ranks")
        names = fields.mapping("items")
        items = fields.parse("items", lambda _: {name: _groups(groups, world_size) for name, groups in names.items()})
        meshes = fields.parse("meshes", lambda rows: tuple(_mesh(row, world_size) for row in rows))
        layouts = fields.parse("layouts", lambda rows: tuple(_layout(row, meshes, world_size) for row in rows))
        columns = fields.columns("tensors", "path", "dtype", "shape", "layout", "copy")
        try:
            tensors = tuple(_tensor(row, meshes, layouts, world_size) for row in zip(*columns, strict=True))
        except (ValueError, TypeError) as exc:
            fields.fail(f"tensors: {exc}")
        return LayoutTable(world_size, items, meshes, layouts, tensors)


def groups_of(structures: Iterable[Mapping[str, str]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return a table's `items`, given digests of each item's structure (`Manifest.structures`) of rank 0, 1 and so on."""
    groups: dict[str, dict[str, list[int]]] = {}
    for rank, told in enumerate(structures):
        for name, structure in told.items():
            groups.setdefault(name, {}).setdefault(structure, []).append(rank)
    return {name: tuple(map(tuple, found.values())) for name, found in sorted(groups.items())}


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as runs of first, count and step."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs:
            first, count, step = runs[-1]
            if count == 1 or rank == first + count * step:
                runs[-1] = [first, count + 1, rank - first if count == 1 else step]
                continue
        runs.append([rank, 1, 1])
    return runs


def _layout_body(layout: Splits | Parts) -> list[Any]:
    if isinstance(layout, Parts):
        return [None, [[rank, list(box.offsets), list(box.sizes)] for rank, box in layout.boxes]]
    mesh, splits = layout
    return [mesh, [None if split is None else list(split) for split in splits]]


def _natural(value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{str(value)[:40]} is not a natural number below {below}")
    return value


def _ranks(runs: Any, world_size: int) -> tuple[int, ...]:
    """Return the ranks of runs, each once. Raises: ValueError, before there are more of them than there can be."""
    if sum(_natural(count, world_size + 1) for _, count, _ in runs) > world_size:
        raise ValueError(f"more than {world_size} ranks")
    ranks: list[int] = []
    for first, count, step in runs:
        if type(step) is not int or step == 0:
            raise ValueError(f"ranks in steps of {str(step)[:40]}")
        _natural(first, world_size)
        _natural(first + (count - 1) * step, world_size)
        ranks += range(first, first + count * step, step)
    if len(set(ranks)) != len(ranks):
        raise ValueError("a rank twice")
    return tuple(ranks)


def _groups(value: Any, world_size: int) -> tuple[tuple[int, ...], ...]:
    groups = tuple(_ranks(runs, world_size) for runs in value)
    everyone = [rank for group in groups for rank in group]
    if not all(group and list(group) == sorted(group) for group in groups) or len(set(everyone)) != len(everyone):
        raise ValueError(f"not disjoint groups of ranks: {str(value)[:60]}")
    return groups


def _mesh(value: Any, world_size: int) -> Mesh:
    shape, runs = value
    sizes = read_shape(shape)
    ranks = _ranks(runs, world_size)
    if len(ranks) != prod(sizes) or not ranks:
        raise ValueError(f"{len(ranks)} ranks on a mesh of shape {list(sizes)}")
    return sizes, ranks


def _layout(value: Any, meshes: Sequence[Mesh], world_size: int) -> Splits | Parts:
    mesh, rows = value
    if mesh is None:
        return Parts(tuple((_natural(rank, world_size), _box(offsets, sizes)) for rank, offsets, sizes in rows))
    number = _natural(mesh, len(meshes))
    if len(rows) != len(meshes[number][0]):
        raise ValueError(f"{len(rows)} placements on {len(meshes[number][0])} mesh dimensions")
    return number, tuple(None if split is None else _split(*split) for split in rows)


def _box(offsets: Any, sizes: Any) -> Box:
    if len(offsets) != len(sizes):
        raise ValueError(f"not a box: {str(offsets)[:40]}, {str(sizes)[:40]}")
    return Box(read_shape(offsets), read_shape(sizes))


def _split(dim: Any, factor: Any = None) -> tuple[int, ...]:
    if factor is None:
        return (_natural(dim, 64),)
    if _natural(factor, 1 << 53) < 1:
        raise ValueError("a split factor of 0")
    return _natural(dim, 64), factor


def _tensor(value: tuple[Any, ...], meshes: Sequence[Mesh], layouts: Sequence[Splits | Parts], world_size: int) -> TensorLayout:
    path, name, shape, layout, copy = value
    sizes = read_shape(shape)
    if layout is None:
        return TensorLayout(read_path(path), dtype(name).name, sizes, None, _natural(copy, world_size))
    lies = layouts[_natural(layout, len(layouts))]
    if isinstance(lies, Parts):
        copies, fits = 1, all(box.within(sizes) for _, box in lies.boxes)
    else:
        mesh, splits = lies
        copies = prod(n for n, split in zip(meshes[mesh][0], splits, strict=True) if split is None or 0 in sizes)
        fits = all(split is None or split[0] < len(sizes) for split in splits)
    if not fits:
        raise ValueError(f"a tensor of shape {list(sizes)} in layout {layout}")
    return TensorLayout(read_path(path), dtype(name).name, sizes, layout, _natural(copy, copies))
