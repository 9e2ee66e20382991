"""The table of layouts: which ranks of a commit store which boxes, by arithmetic (FORMAT.md, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from syckpt.objects.checks import Fields
from syckpt.objects.dtypes import dtype
from syckpt.objects.manifest import read_path, read_shape

__all__ = ["LayoutTable", "Mesh", "Split", "TensorLayout"]

_MAX_RANKS = 100_000  # as many as keys have numbers for
Mesh = tuple[tuple[int, ...], tuple[int, ...]]  # shape, ranks in row-major order
Split = tuple[int, ...] | None  # of a mesh dimension: (dim,), (dim, factor), or None where it splits nothing


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
    """What `world_size` ranks saved. `items`: every name, and whether all ranks have the same structure there.

    `layouts`: the number of a mesh, and a split for each of its dimensions.
    """

    world_size: int
    items: dict[str, bool] = field(hash=False)
    meshes: tuple[Mesh, ...]
    layouts: tuple[tuple[int, tuple[Split, ...]], ...]
    tensors: tuple[TensorLayout, ...] = field(repr=False)

    def to_body(self) -> dict[str, Any]:
        return {
            "kind": "layouts",
            "version": 1,
            "world_size": self.world_size,
            "items": self.items,
            "meshes": [[list(shape), _runs(ranks)] for shape, ranks in self.meshes],
            "layouts": [[mesh, [None if split is None else list(split) for split in splits]] for mesh, splits in self.layouts],
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
        items = fields.mapping("items")
        if not all(isinstance(same, bool) for same in items.values()):
            fields.fail("'items' is not one of names to booleans")
        meshes = fields.parse("meshes", lambda rows: tuple(_mesh(row, world_size) for row in rows))
        layouts = fields.parse("layouts", lambda rows: tuple(_layout(row, meshes) for row in rows))
        columns = fields.columns("tensors", "path", "dtype", "shape", "layout", "copy")
        try:
            tensors = tuple(_tensor(row, meshes, layouts, world_size) for row in zip(*columns, strict=True))
        except (ValueError, TypeError) as exc:
            fields.fail(f"tensors: {exc}")
        return LayoutTable(world_size, items, meshes, layouts, tensors)


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


def _natural(value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{str(value)[:40]} is not a natural number below {below}")
    return value


def _mesh(value: Any, world_size: int) -> Mesh:
    shape, runs = value
    sizes = read_shape(shape)
    if not sum(_natural(count, world_size + 1) for _, count, _ in runs) == prod(sizes) <= world_size or 0 in sizes:
        raise ValueError(f"other ranks than a mesh of shape {list(sizes)} has")
    ranks: list[int] = []
    for first, count, step in runs:
        if type(step) is not int or step == 0:
            raise ValueError(f"ranks in steps of {str(step)[:40]}")
        _natural(first, world_size)
        _natural(first + (count - 1) * step, world_size)
        ranks += range(first, first + count * step, step)
    if len(set(ranks)) != len(ranks):
        raise ValueError("a rank twice in a mesh")
    return sizes, tuple(ranks)


def _layout(value: Any, meshes: Sequence[Mesh]) -> tuple[int, tuple[Split, ...]]:
    mesh, splits = value
    number = _natural(mesh, len(meshes))
    if len(splits) != len(meshes[number][0]):
        raise ValueError(f"{len(splits)} placements on {len(meshes[number][0])} mesh dimensions")
    return number, tuple(None if split is None else _split(*split) for split in splits)


def _split(dim: Any, factor: Any = None) -> tuple[int, ...]:
    if factor is None:
        return (_natural(dim, 64),)
    if _natural(factor, 1 << 53) < 1:
        raise ValueError("a split factor of 0")
    return _natural(dim, 64), factor


def _tensor(
    value: tuple[Any, ...], meshes: Sequence[Mesh], layouts: Sequence[tuple[int, tuple[Split, ...]]], world_size: int
) -> TensorLayout:
    path, name, shape, layout, copy = value
    sizes = read_shape(shape)
    if layout is None:
        return TensorLayout(read_path(path), dtype(name).name, sizes, None, _natural(copy, world_size))
    mesh, splits = layouts[_natural(layout, len(layouts))]
    if any(split is not None and split[0] >= len(sizes) for split in splits):
        raise ValueError(f"a tensor of shape {list(sizes)} in layout {layout}")
    copies = prod(n for n, split in zip(meshes[mesh][0], splits, strict=True) if split is None or 0 in sizes)
    return TensorLayout(read_path(path), dtype(name).name, sizes, layout, _natural(copy, copies))
