"""Layouts: how a global tensor lies on a mesh of ranks, as boxes. Pure arithmetic, no torch.

* A shard of a dimension is one of `torch.chunk`'s: all of `ceil(size / parts)` elements, the last ones shorter or empty.
* Several mesh dimensions may shard one tensor dimension: from left to right, each splits what the ones before it left.
* `StridedShard(dim, f)` is torch's `_StridedShard`. Where `f` is the number of shards that placements to its right make of that
  dimension (tensor parallelism under FSDP2), it says that those come first: the rank's part is one interval. Otherwise (a flattened
  view of a sharded tensor) the dimension is cut into `f` runs, each of them is split, and a rank holds its part of every run.
* The boxes of a rank tile its local tensor. Boxes of two ranks are either the same one or disjoint.
* A tensor without elements has one box, the whole, held by every rank, so that it has an entry. Otherwise boxes are never empty.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TypeAlias

from blake3 import blake3

from syckpt.errors import StateError
from syckpt.objects.box import Box

__all__ = [
    "Layout",
    "LocalBox",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "boxes_at",
    "copies",
    "copy_of",
    "holders",
    "keepers",
    "local_shape",
    "shard_placements",
]


@dataclass(frozen=True)
class Shard:
    """Split along tensor dimension `dim` over a mesh dimension."""

    dim: int


@dataclass(frozen=True)
class StridedShard:
    """Split along `dim`, as if it already were in `split_factor` equal parts."""

    dim: int
    split_factor: int


@dataclass(frozen=True)
class Replicate:
    """The same values along a mesh dimension."""


Placement: TypeAlias = "Shard | StridedShard | Replicate"
_Run: TypeAlias = "tuple[int, int]"  # offset in the global dimension, size


@dataclass(frozen=True)
class Layout:
    """A tensor's shape, the mesh's, its global ranks in row-major order, and a placement for each mesh dimension."""

    global_shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        fits = len(self.placements) == len(self.mesh_shape) and prod(self.mesh_shape) == len(set(self.ranks)) == len(self.ranks)
        for placement in self.placements:
            fits &= isinstance(placement, Replicate) or 0 <= placement.dim < len(self.global_shape)
            fits &= not isinstance(placement, StridedShard) or placement.split_factor >= 1
        if not fits:
            raise StateError(f"not a layout: shape {self.global_shape}, mesh {self.mesh_shape}, {len(self.ranks)} ranks, {self.placements}")

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return a rank's place in the mesh; None if it is not in it."""
        if rank not in self.ranks:
            return None
        index, reverse = self.ranks.index(rank), []
        for size in reversed(self.mesh_shape):
            index, last = divmod(index, size)
            reverse.append(last)
        return tuple(reversed(reverse))

    @cached_property
    def text(self) -> str:
        """A short text that other placements, or ranks, do not have."""
        return f"{self.mesh_shape} {blake3(str(self.ranks).encode()).hexdigest()} {self.placements}"

    @cached_property
    def effort(self) -> int:
        """About how many steps it takes to say who holds a box: few, but for factors that mean no order of mesh dimensions."""
        slow = [sharding.splits for sharding in self._sharding if not sharding.is_simple]
        return sum(prod(parts for _, parts, _ in splits) * sum(factor for _, _, factor in splits) for splits in slow)

    @cached_property
    def copying(self) -> tuple[int, ...]:
        """The mesh dimensions that split nothing: along them lie copies."""
        if 0 in self.global_shape:
            return tuple(range(len(self.mesh_shape)))
        split = {axis for sharding in self._sharding for axis, _, _ in sharding.splits}
        return tuple(axis for axis in range(len(self.mesh_shape)) if axis not in split)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """How many positions apart neighbours along each mesh dimension are."""
        return tuple(prod(self.mesh_shape[axis + 1 :]) for axis in range(len(self.mesh_shape)))

    @cached_property
    def _sharding(self) -> tuple[_Sharding, ...]:
        return tuple(_Sharding.of(self, dim) for dim in range(len(self.global_shape)))


@dataclass(frozen=True)
class LocalBox:
    """A box of the global tensor, and where it begins in the rank's local tensor; its sizes are the same in both."""

    box: Box
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class _Sharding:
    """What happens to one tensor dimension: the splits in the order in which they apply, as (mesh dimension, parts, split factor)."""

    size: int
    splits: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(layout: Layout, dim: int) -> _Sharding:
        splits = []
        for axis, (parts, placement) in enumerate(zip(layout.mesh_shape, layout.placements, strict=True)):
            # One part is the whole, wherever it stands.
            if not isinstance(placement, Replicate) and placement.dim == dim and parts > 1:
                splits.append((axis, parts, placement.split_factor if isinstance(placement, StridedShard) else 1))
        return _Sharding(layout.global_shape[dim], _in_order(splits) or tuple(splits))

    @property
    def is_simple(self) -> bool:
        """Whether each rank holds one interval, which is found by a division."""
        return len(self.splits) == 1 and self.splits[0][2] == 1

    def runs(self, coordinate: Sequence[int]) -> list[_Run]:
        """Return the intervals that a coordinate holds, in the order of its local tensor."""
        runs: list[_Run] = [(0, self.size)]
        for axis, parts, factor in self.splits:
            size = sum(length for _, length in runs)
            taken: list[_Run] = []
            for begin, length in (_chunk(size, factor, index) for index in range(factor)):
                offset, share = _chunk(length, parts, coordinate[axis])
                taken += _cut(runs, begin + offset, share)
            runs = _joined(taken)
        return [run for run in runs if run[1]]

    def places(self, mesh_shape: Sequence[int], low: int, high: int) -> Iterator[tuple[int, ...]]:
        """Yield where on the mesh dimensions that split it, in the order of `splits`, the ranks are that hold some of `low` to `high`."""
        sizes = [parts for _, parts, _ in self.splits]
        if self.is_simple:
            # The usual case, without a look at each of thousands of ranks.
            step = -(-self.size // sizes[0])
            yield from ((index,) for index in range(low // step, -(-high // step)))
            return
        coordinate = [0] * len(mesh_shape)
        for place in product(*map(range, sizes)):
            for (axis, _, _), index in zip(self.splits, place, strict=True):
                coordinate[axis] = index
            if any(begin < high and begin + length > low for begin, length in self.runs(coordinate)):
                yield place


def _in_order(splits: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...] | None:
    """Return the splits in the order that their factors mean, with factors of 1; None if they mean none.

    From right to left, a split with factor f goes behind as many of the ones to its right as make f shards
    (`DTensorSpec._maybe_convert_StridedShard_to_shard_order` of torch).
    """
    order: list[tuple[int, int, int]] = []
    for axis, parts, factor in reversed(splits):
        behind = next((n for n in range(len(order) + 1) if prod(p for _, p, _ in order[:n]) == factor), None)
        if behind is None:
            return None
        order.insert(behind, (axis, parts, 1))
    return tuple(order)


def _chunk(size: int, parts: int, index: int) -> _Run:
    step = -(-size // parts)
    begin = min(size, step * index)
    return begin, min(size - begin, step)


def _cut(runs: Sequence[_Run], begin: int, size: int) -> Iterator[_Run]:
    """Yield elements `begin` to `begin + size` of the runs put end to end."""
    end = begin + size
    for offset, length in runs:
        low, high = max(0, begin), min(length, end)
        if low < high:
            yield offset + low, high - low
        begin, end = begin - length, end - length


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    joined: list[_Run] = []
    for offset, size in runs:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


def _whole(layout: Layout) -> Box:
    return Box((0,) * len(layout.global_shape), layout.global_shape)


def _boxes(runs: Sequence[Sequence[_Run]]) -> Iterator[Box]:
    for corner in product(*runs):
        yield Box(tuple(offset for offset, _ in corner), tuple(size for _, size in corner))


def boxes_at(layout: Layout, coordinate: Sequence[int]) -> list[LocalBox]:
    """Return the boxes that a coordinate of the mesh holds, ordered by their place in its local tensor."""
    if 0 in layout.global_shape:
        return [LocalBox(_whole(layout), (0,) * len(layout.global_shape))]
    runs = [sharding.runs(coordinate) for sharding in layout._sharding]
    begins = []
    for dim_runs in runs:
        position, places = 0, []
        for _, size in dim_runs:
            places.append(position)
            position += size
        begins.append(places)
    return [LocalBox(box, offsets) for box, offsets in zip(_boxes(runs), product(*begins), strict=True)]


def local_shape(layout: Layout, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a coordinate's local tensor."""
    return tuple(sum(size for _, size in sharding.runs(coordinate)) for sharding in layout._sharding)


def holders(layout: Layout) -> dict[Box, tuple[int, ...]]:
    """Return each distinct box with the ranks that hold it, ascending. Every rank that calls it gets the same, in the same order."""
    if 0 in layout.global_shape:
        return {_whole(layout): tuple(sorted(layout.ranks))}
    strides = layout.strides
    splitting = [[axis for axis, _, _ in sharding.splits] for sharding in layout._sharding]
    replicas = [_step(layout, copy) for copy in range(copies(layout))]
    # Mesh dimensions that split one tensor dimension say nothing about another: its parts are made once, not once a rank.
    parts: list[list[tuple[int, list[_Run]]]] = []
    coordinate = [0] * len(layout.mesh_shape)
    for sharding, axes in zip(layout._sharding, splitting, strict=True):
        found = []
        for place in product(*(range(layout.mesh_shape[axis]) for axis in axes)):
            for axis, index in zip(axes, place, strict=True):
                coordinate[axis] = index
            runs = sharding.runs(coordinate)
            if runs:
                found.append((sum(index * strides[axis] for axis, index in zip(axes, place, strict=True)), runs))
        parts.append(found)
    result: dict[Box, tuple[int, ...]] = {}
    for combination in product(*parts):
        first = sum(position for position, _ in combination)
        ranks = tuple(sorted(layout.ranks[first + step] for step in replicas))
        for box in _boxes([runs for _, runs in combination]):
            result[box] = ranks
    return result


def copies(layout: Layout) -> int:
    """Return how many ranks hold each box: as many copies are there, one for each place on the mesh dimensions that split nothing."""
    return prod(layout.mesh_shape[axis] for axis in layout.copying)


def copy_of(layout: Layout, rank: int) -> int | None:
    """Return which of the copies a rank's boxes belong to; None for a rank that is not in the mesh."""
    coordinate = layout.coordinate_of(rank)
    if coordinate is None:
        return None
    number = 0
    for axis in layout.copying:
        number = number * layout.mesh_shape[axis] + coordinate[axis]
    return number


def keepers(layout: Layout, copy: int, boxes: Sequence[Box] | None = None) -> set[int]:
    """Return the ranks of a copy that hold elements of any of the boxes (None: of the tensor)."""
    step = _step(layout, copy)
    if 0 in layout.global_shape:
        return {layout.ranks[step]}
    found: set[int] = set()
    for box in [_whole(layout)] if boxes is None else boxes:
        if box.elements == 0:
            continue
        near = []
        for sharding, low, size in zip(layout._sharding, box.offsets, box.sizes, strict=True):
            axes = [layout.strides[axis] for axis, _, _ in sharding.splits]
            places = sharding.places(layout.mesh_shape, low, low + size)
            near.append([sum(map(operator.mul, place, axes)) for place in places])
        found.update(layout.ranks[step + sum(positions)] for positions in product(*near))
    return found


def _step(layout: Layout, copy: int) -> int:
    """Return how far from the first copy's positions in the mesh those of a copy are."""
    step = 0
    for axis in reversed(layout.copying):
        copy, index = divmod(copy, layout.mesh_shape[axis])
        step += index * layout.strides[axis]
    return step


def shard_placements(placements: Sequence[Placement], mesh_shape: Sequence[int], order: Sequence[int]) -> tuple[Placement, ...]:
    """Return placements that say in themselves that `order`'s mesh dimensions, which split one tensor dimension, apply in that order."""
    result = list(placements)
    for position, axis in enumerate(order):
        placement = placements[axis]
        factor = prod(mesh_shape[other] for other in order[:position] if other > axis)
        if isinstance(placement, Shard) and factor > 1:
            result[axis] = StridedShard(placement.dim, factor)
    return tuple(result)
