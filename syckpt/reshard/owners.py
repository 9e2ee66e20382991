"""Who writes what: one owner for each piece among the ranks that hold it, balanced by bytes. Pure; the same answer on every rank.

`assign` decides piece by piece. `choose` decides for whole tensors which of their copies is stored, so that a number tells who stores what,
and takes a few copies only: whoever reads a tensor needs the manifests of those who store it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any

import numpy as np

from syckpt.errors import StateError
from syckpt.objects.box import Box

__all__ = ["Copied", "Piece", "assign", "choose", "spread"]

MAX_COPIES = 16


@dataclass(frozen=True)
class Piece:
    """One box of one tensor (`key`: its path as text), and the ranks that hold it."""

    key: str
    box: Box
    nbytes: int
    candidates: tuple[int, ...]


def assign(items: Sequence[Piece], world_size: int) -> list[int]:
    """Return the owner of each piece.

    Pieces that only one rank holds go first, then the largest ones, each to the candidate with the fewest bytes so far and of
    those to the lowest rank. The answer does not depend on the order of `items`. Raises: StateError for a piece that nobody holds.
    """
    for item in items:
        if not item.candidates or not 0 <= min(item.candidates) <= max(item.candidates) < world_size:
            raise StateError(f"{item.key}: {item.box} is held by ranks {item.candidates}; expected some of 0 to {world_size - 1}")
    owners = [min(item.candidates) for item in items]
    loads = [0] * world_size
    free = []
    for index, item in enumerate(items):
        if len(item.candidates) == 1:
            loads[owners[index]] += item.nbytes
        else:
            free.append(index)
    free.sort(key=lambda i: (-items[i].nbytes, items[i].key, items[i].box.offsets, items[i].box.sizes, items[i].candidates))
    # Loads only grow, so a heap's stale entry stands too high, never too low: it is put right when it comes to the top.
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for index in free:
        item = items[index]
        heap = heaps.get(item.candidates)
        if heap is None:
            heap = heaps[item.candidates] = [(loads[rank], rank) for rank in item.candidates]
            heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:
            heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        owner = owners[index] = heap[0][1]
        loads[owner] += item.nbytes
        heapreplace(heap, (loads[owner], owner))
    return owners


@dataclass(frozen=True)
class Copied:
    """A tensor (`key`: its path as text), the bytes that a rank of a copy holds, and the copies that come into question: number, ranks."""

    key: str
    nbytes: int
    copies: tuple[tuple[int, tuple[int, ...]], ...]


def spread(count: int) -> list[int]:
    """Return the numbers of the copies, of so many, that come into question: evenly spaced, so that they are on several nodes."""
    few = min(count, MAX_COPIES)
    return [number * count // few for number in range(few)]


def choose(items: Sequence[Copied], world_size: int) -> list[int]:
    """Return the number of the copy of each tensor that is stored.

    Tensors with one copy go first, then the largest ones, each to the copy whose busiest rank has the fewest bytes so far, of those to the
    first. The answer does not depend on the order of `items`.
    """
    loads: Any = np.zeros(world_size, np.int64)
    known: dict[tuple[int, ...], Any] = {}

    def of(ranks: tuple[int, ...]) -> Any:
        return known.setdefault(ranks, np.array(ranks, np.int64)) if ranks not in known else known[ranks]

    chosen = [item.copies[0][0] for item in items]
    free = []
    for index, item in enumerate(items):
        if len(item.copies) == 1:
            loads[of(item.copies[0][1])] += item.nbytes
        else:
            free.append(index)
    for index in sorted(free, key=lambda i: (-items[i].nbytes, items[i].key)):
        busiest = [int(loads[of(ranks)].max()) for _, ranks in items[index].copies]
        chosen[index], ranks = items[index].copies[busiest.index(min(busiest))]
        loads[of(ranks)] += items[index].nbytes
    return chosen
