"""Read plans: which part of which stored piece goes where, and which blocks of it have to be decoded. Pure; numpy, no torch, no I/O.

    regions = plan(sources, targets, path="model/w")            # boxes of one tensor, stored and wanted
    # for each source, with the regions that take from it:
    for block, takers in block_schedule(source.sizes, regions, itemsize=4):
        raw = ...                                               # decoded and verified, once
        for i in takers:
            copy_block(raw, block * BLOCK_NBYTES // 4, source.sizes, regions[i].source_offsets, regions[i].sizes, out=outs[i])

* `plan` covers every element of every target exactly once, or raises before anything is read.
* A piece is stored in C order without padding and cut into blocks; `out` is any strided view of a region's shape, so nothing larger
  than a block is ever held. A block without elements of a region is never asked for, a block with some exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import numpy as np

from syckpt.errors import StateError
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.objects.box import Box

__all__ = ["Region", "block_schedule", "copy_block", "plan", "touched_blocks"]

Array: TypeAlias = "np.ndarray[Any, Any]"

_FEW = 4  # targets: looking at every source costs less than sorting them


@dataclass(frozen=True)
class Region:
    """What source and target (by index) share: `sizes` elements, at these offsets within the source box and within the target box."""

    source: int
    target: int
    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def plan(sources: Sequence[Box], targets: Sequence[Box], *, path: str = "tensor", reader: int = 0) -> list[Region]:
    """Return the regions that fill the targets, by target, then by source.

    Several sources with one box are copies of each other: reader number r takes copy r modulo their count, so that readers spread.
    Raises: StateError naming `path` and a box of the global tensor that no source covers, or that different ones do.
    """
    index = _Index(sources, targets)
    regions: list[Region] = []
    for number, target in enumerate(targets):
        if target.elements == 0:
            continue
        hits, lows, highs = index.touching(number)
        copies: dict[Box, list[int]] = {}
        for position, hit in enumerate(hits):
            copies.setdefault(sources[hit], []).append(position)
        chosen = sorted(positions[reader % len(positions)] for positions in copies.values())
        _check_cover(target, lows[chosen], highs[chosen], path)
        corners, sizes = lows[chosen].tolist(), (highs[chosen] - lows[chosen]).tolist()
        for position, corner, size in zip(chosen, corners, sizes, strict=True):
            source = hits[position]
            regions.append(Region(source, number, _within(corner, sources[source].offsets), _within(corner, target.offsets), tuple(size)))
    return regions


def _within(corner: Sequence[int], offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(corner, offsets, strict=True))


class _Index:
    """Finds the sources that a target meets; for many targets, sorted along the dimension that tells sources apart best."""

    def __init__(self, sources: Sequence[Box], targets: Sequence[Box]) -> None:
        ndim = len((*sources[:1], *targets[:1], Box((), ()))[0].sizes)
        self._lows, self._highs = _corners(sources, ndim)
        self._target_lows, self._target_highs = _corners(targets, ndim)
        self._order: Array = np.arange(len(sources))
        self._first: Any = np.zeros(len(targets), np.int64)
        self._last: Any = self._first + len(sources)
        if ndim and len(targets) > _FEW:
            dim = _telling(self._lows)
            self._order = np.argsort(self._lows[:, dim], kind="stable")
            self._lows, self._highs = self._lows[self._order], self._highs[self._order]
            # Ends need not be sorted; no source before the first whose running maximum exceeds an offset reaches beyond it.
            reach = np.maximum.accumulate(self._highs[:, dim])
            self._first = np.searchsorted(reach, self._target_lows[:, dim], side="right")
            self._last = np.searchsorted(self._lows[:, dim], self._target_highs[:, dim], side="left")

    def touching(self, target: int) -> tuple[list[int], Array, Array]:
        """Return the sources that share elements with a target, ascending, and the corners of what they share."""
        near = slice(self._first[target], self._last[target])
        lows = np.maximum(self._lows[near], self._target_lows[target])
        highs = np.minimum(self._highs[near], self._target_highs[target])
        meets = np.flatnonzero((lows < highs).all(axis=1))
        sources = self._order[near][meets]
        ascending = np.argsort(sources)
        meets = meets[ascending]
        return sources[ascending].tolist(), lows[meets], highs[meets]


def _corners(boxes: Sequence[Box], ndim: int) -> tuple[Array, Array]:
    count = len(boxes) * ndim
    lows = np.fromiter(chain.from_iterable(box.offsets for box in boxes), np.int64, count).reshape(len(boxes), ndim)
    sizes = np.fromiter(chain.from_iterable(box.sizes for box in boxes), np.int64, count).reshape(len(boxes), ndim)
    return lows, lows + sizes


def _telling(lows: Array) -> int:
    """Return the dimension in which boxes begin at the most places."""
    counts = [len(set(lows[:, dim].tolist())) for dim in range(lows.shape[1])]
    return counts.index(max(counts)) if counts else 0


def _check_cover(target: Box, lows: Array, highs: Array, path: str) -> None:
    """Hold that the boxes between these corners, all within the target, are a partition of it."""
    pair = _overlap(lows, highs) if len(lows) > 1 else None
    if pair is not None:
        shared = _text(lows[list(pair)].max(axis=0).tolist(), highs[list(pair)].min(axis=0).tolist())
        raise StateError(f"{path}: {shared} is covered more than once, by pieces that differ; their boxes overlap; run `syckpt verify`")
    if int((highs - lows).prod(axis=1).sum()) != target.elements:
        missing = _text(*_uncovered(target, lows.tolist(), highs.tolist()))
        raise StateError(f"{path}: no saved piece covers {missing} of the target's {target}; expected every element once")


def _overlap(lows: Array, highs: Array) -> tuple[int, int] | None:
    """Return two boxes that share elements."""
    dim = _telling(lows)
    order = np.argsort(lows[:, dim], kind="stable")
    lows, highs = lows[order], highs[order]
    ends: Any = np.searchsorted(lows[:, dim], highs[:, dim], side="left")
    # Usually none: along the telling dimension most neighbours are already apart.
    for i in np.flatnonzero(ends > np.arange(len(order)) + 1).tolist():
        others = slice(i + 1, int(ends[i]))
        meets = np.flatnonzero((np.maximum(lows[others], lows[i]) < np.minimum(highs[others], highs[i])).all(axis=1))
        if len(meets):
            return int(order[i]), int(order[i + 1 + meets[0]])
    return None


def _uncovered(target: Box, lows: Iterable[list[int]], highs: Iterable[list[int]]) -> tuple[list[int], list[int]]:
    """Return the corners of a box of the target that is in none of the disjoint boxes, which do not fill it."""
    begin = list(target.offsets)
    rest = [(begin, [o + n for o, n in zip(begin, target.sizes, strict=True)])]
    for low, high in zip(lows, highs, strict=True):
        rest = [part for box in rest for part in _without(box, low, high)]
    return rest[0]


def _without(box: tuple[list[int], list[int]], low: list[int], high: list[int]) -> list[tuple[list[int], list[int]]]:
    begin, end = list(box[0]), list(box[1])
    if not all(max(a, c) < min(b, d) for a, b, c, d in zip(begin, end, low, high, strict=True)):
        return [box]
    parts = []
    for dim in range(len(begin)):
        if begin[dim] < low[dim]:
            parts.append((list(begin), [*end[:dim], low[dim], *end[dim + 1 :]]))
            begin[dim] = low[dim]
        if high[dim] < end[dim]:
            parts.append(([*begin[:dim], high[dim], *begin[dim + 1 :]], list(end)))
            end[dim] = high[dim]
    return parts


def _text(low: Iterable[int], high: Iterable[int]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(low, high, strict=True)) + "]"


# --- bytes ---------------------------------------------------------------------------------------------------------------------


def touched_blocks(
    piece_sizes: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], *, itemsize: int, block_nbytes: int = BLOCK_NBYTES
) -> list[int]:
    """Return the blocks of a piece's bytes that hold elements of a region, ascending."""
    if 0 in sizes:
        return []
    # From the inside out, the region is a set of spans, each of which touches every block between its first and its last byte.
    starts: Array = np.zeros(1, np.int64)
    length = stride = itemsize
    for whole, offset, size in zip(reversed(piece_sizes), reversed(offsets), reversed(sizes), strict=True):
        if len(starts) == 1 and stride - length < block_nbytes:
            # The gaps are too small for a block to lie in one.
            length += (size - 1) * stride
            starts = starts + offset * stride
        else:
            starts = ((np.arange(offset, offset + size) * stride)[:, None] + starts).ravel()
        stride *= whole
    first: Array = starts // block_nbytes
    last: Array = (starts + length - 1) // block_nbytes
    if len(starts) == 1:
        return list(range(int(first[0]), int(last[0]) + 1))
    widths = last - first + 1
    blocks: list[int] = np.unique(np.repeat(first + widths - widths.cumsum(), widths) + np.arange(widths.sum())).tolist()
    return blocks


def block_schedule(
    piece_sizes: Sequence[int], regions: Sequence[Region], *, itemsize: int, block_nbytes: int = BLOCK_NBYTES
) -> list[tuple[int, list[int]]]:
    """Return the blocks that regions of one source need, ascending, each once, with the positions of the regions that take from it."""
    takers: dict[int, list[int]] = {}
    for position, region in enumerate(regions):
        for block in touched_blocks(piece_sizes, region.source_offsets, region.sizes, itemsize=itemsize, block_nbytes=block_nbytes):
            takers.setdefault(block, []).append(position)
    return sorted(takers.items())


def copy_block(
    block: bytes | bytearray | memoryview,
    first_element: int,
    piece_sizes: Sequence[int],
    region_offsets: Sequence[int],
    region_sizes: Sequence[int],
    *,
    out: Array,
) -> None:
    """Copy what a block has of a region into `out`, a view of the region's shape whose items have the tensor's size.

    `block` holds whole elements of the piece from `first_element` on. Use integers (or void) for `out`: bits are copied, never values.
    """
    values = np.frombuffer(block, out.dtype)
    _copy(values, first_element, tuple(piece_sizes), tuple(region_offsets), tuple(region_sizes), out)


def _copy(values: Array, first: int, sizes: tuple[int, ...], offsets: tuple[int, ...], region: tuple[int, ...], out: Array) -> None:
    """Copy elements `first` and on of an array of shape `sizes`, in C order, as far as they are in the region."""
    if not sizes:
        out[...] = values[0]
        return
    row = prod(sizes[1:])
    begin, end = max(first, offsets[0] * row), min(first + len(values), (offsets[0] + region[0]) * row)
    if begin >= end or 0 in region:
        return
    # At most two rows are in part here, the first and the last; what lies between is one strided copy.
    low, high = -(-begin // row), end // row
    if begin % row:
        stop = min(end, low * row)
        _copy(values[begin - first : stop - first], begin % row, sizes[1:], offsets[1:], region[1:], out[low - 1 - offsets[0]])
    if low < high:
        rows = values[low * row - first : high * row - first].reshape(high - low, *sizes[1:])
        wanted = (slice(None), *(slice(offset, offset + size) for offset, size in zip(offsets[1:], region[1:], strict=True)))
        out[low - offsets[0] : high - offsets[0]] = rows[wanted]
    if high >= low and end % row:
        _copy(values[high * row - first : end - first], 0, sizes[1:], offsets[1:], region[1:], out[high - offsets[0]])
