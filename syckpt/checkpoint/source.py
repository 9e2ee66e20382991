"""A commit, open for reading: one structure and one set of tensors, whatever ranks saved it, for whoever reads it.

A tensor is a path with boxes that ranks stored; a target is filled box by box, each of its elements exactly once. A rank of a job of the
same size reads its own structure. On another size, and in a plain process, the structures of all ranks are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from syckpt.errors import IntegrityError, NotFoundError, StateError
from syckpt.objects import nodes
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.dtypes import dtype
from syckpt.objects.manifest import Entry
from syckpt.objects.nodes import Node
from syckpt.repo.reader import Place, Reader, Snapshot
from syckpt.reshard.merge import merge, renumber
from syckpt.reshard.plan import Region, block_schedule, copy_block, plan
from syckpt.reshard.tensors import is_dtensor, local_boxes
from syckpt.state.fit import fit

__all__ = ["Source", "Stored"]

# Bits are copied, never values: integers of the size, and for 16 bytes the only type that numpy and torch share.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass
class Stored:
    """A tensor of the commit: what nodes count. `pieces` are the boxes that ranks stored."""

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Box, Entry, Place]] = field(default_factory=list)

    @property
    def address(self) -> bytes | None:
        """The content address of a tensor that is stored as a whole; None for one in parts."""
        return self.pieces[0][1].address if len(self.pieces) == 1 and self.pieces[0][1].box is None else None


class Source:
    """An open commit. `rank` and `world_size` are the reader's; a `world_size` of None is a plain process, which sees all ranks."""

    def __init__(self, reader: Reader, commit: Commit, *, rank: int = 0, world_size: int | None = None) -> None:
        if commit.dropped:
            raise NotFoundError(f"commit {commit.id} was dropped by retention; its record stays in the log, its tensors are gone")
        self.commit = commit
        self._reader = reader
        self._rank = rank
        self.same_size = world_size == commit.world_size
        """Whether the reader is a rank of a job of the size that saved: then what ranks kept for themselves is exactly theirs."""
        self.entries: list[Stored] = []
        """The tensors; nodes count them."""
        snapshots = {number: reader.snapshot(commit, number) for number, _ in commit.manifests}
        numbers = self._collect(snapshots)
        self._rng = {number: renumber(snapshot.manifest.rng, numbers[number]) for number, snapshot in snapshots.items()}
        self._items, self.per_rank = self._structure(snapshots, numbers, choose=None if world_size is None else rank % len(snapshots))
        self._streams: Any = None
        self.resharded: list[str] = []
        """Paths whose stored boxes were not the reader's."""

    def _collect(self, snapshots: Mapping[int, Snapshot]) -> dict[int, dict[int, int]]:
        """Gather the tensors of all ranks; return, for each rank, which of them its entries are."""
        known: dict[Any, int] = {}
        numbers: dict[int, dict[int, int]] = {}
        for rank, snapshot in snapshots.items():
            numbers[rank] = {}
            local = snapshot.manifest.local
            for index, (entry, place) in enumerate(zip(snapshot.manifest.entries, snapshot.places, strict=True)):
                # Without several ranks every entry is a tensor of its own, also where two paths have the same text.
                key: Any = index if len(snapshots) == 1 else (nodes.format_path(entry.path), rank if index in local else None)
                number = known.setdefault(key, len(self.entries))
                if number == len(self.entries):
                    self.entries.append(Stored(entry.path, entry.dtype, entry.shape))
                stored = self.entries[number]
                if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                    raise IntegrityError(
                        f"commit {self.commit.id}: rank {rank} saved {nodes.format_path(entry.path)} as {entry.dtype} {list(entry.shape)},"
                        f" another one as {stored.dtype} {list(stored.shape)}"
                    )
                if place is not None:
                    stored.pieces.append((entry.box or _whole(entry.shape), entry, place))
                numbers[rank][index] = number
        return numbers

    def _structure(
        self, snapshots: Mapping[int, Snapshot], numbers: Mapping[int, Mapping[int, int]], *, choose: int | None
    ) -> tuple[dict[str, Node], list[str]]:
        """Return the items as this reader sees them, and the paths at which ranks differ and that is not settled by rank."""
        items = {
            rank: {name: renumber(node, numbers[rank]) for name, node in snapshot.manifest.items.items()}
            for rank, snapshot in snapshots.items()
        }
        if len(items) == 1 or self.same_size:
            return items[self._rank if len(items) > 1 else next(iter(items))], []
        merged: dict[str, Node] = {}
        differing: list[str] = []
        for name in dict.fromkeys(name for mine in items.values() for name in mine):
            parts = {rank: mine[name] for rank, mine in items.items() if name in mine}
            merged[name], paths = merge(parts, choose=choose, path=(name,))
            differing += [nodes.format_path(path) for path in paths]
        return merged, differing

    @property
    def names(self) -> set[str]:
        """Names of the items in the commit."""
        return set(self._items)

    @property
    def has_rng(self) -> bool:
        """Whether random streams were saved."""
        return any(node is not None for node in self._rng.values())

    @property
    def bytes_read(self) -> int:
        """Stored bytes that the reader has read so far, for all its sources."""
        return self._reader.bytes_read

    def node(self, name: str) -> Node:
        """Return an item's structure. Raises: NotFoundError."""
        try:
            return self._items[name]
        except KeyError:
            raise NotFoundError(f"commit {self.commit.id} has no item {name!r}; it has {', '.join(sorted(self.names)) or 'none'}") from None

    def rng(self) -> Any:
        """Return this rank's saved random streams, as `state.rng.capture` made them; read and verified once."""
        if self._streams is None:
            planned = fit(self._rng[self._rank if self.same_size else min(self._rng)], None, path=("rng",), entries=self.entries)
            self._streams = planned.build(self.fetch(dict.fromkeys(planned.fresh)).__getitem__)
        return self._streams

    def fits(self, name: str, template: Any) -> bool:
        """Whether an item's structure is the template's."""
        return not fit(self.node(name), template, path=(name,), entries=self.entries).problems

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def fetch(self, wanted: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Return verified tensors by number: the given ones filled in place (a DTensor: this rank's part), new CPU tensors for None.

        Raises: StateError (boxes that do not cover a target), IntegrityError; a target then holds old or exact values.
        """
        found: dict[int, torch.Tensor] = {}
        work: list[Callable[[], None]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, target in wanted.items():
            stored = self.entries[number]
            found[number] = _new(stored) if target is None else target
            boxes = local_boxes(found[number], path=nodes.format_path(stored.path))
            targets = []
            for box, view in boxes:
                direct = view if _is_host_memory(view) and str(view.dtype) == f"torch.{stored.dtype}" else _new(stored, box.sizes)
                if direct is not view:
                    copies.append((view, direct))
                targets.append((box, direct))
            work += self._tasks(stored, targets)
        self._reader.run(work)
        with torch.no_grad():
            for target, value in copies:
                target.copy_(value)
        return found

    def _tasks(self, stored: Stored, targets: Sequence[tuple[Box, torch.Tensor]]) -> list[Callable[[], None]]:
        """Return the tasks, one a block, that bring a tensor's stored boxes into target boxes (contiguous or strided CPU memory)."""
        if len(stored.pieces) == 1 and len(targets) == 1 and stored.pieces[0][0] == targets[0][0] and targets[0][1].is_contiguous():
            _, entry, place = stored.pieces[0]
            return self._reader.tasks(entry, place, _memory(targets[0][1]))
        itemsize = dtype(stored.dtype).itemsize
        path = nodes.format_path(stored.path)
        if not {box for box, _ in targets} <= {box for box, _, _ in stored.pieces}:
            self.resharded.append(path)
        arrays = [_bits(tensor, itemsize) for _, tensor in targets]
        regions = plan([box for box, _, _ in stored.pieces], [box for box, _ in targets], path=path, reader=self._rank)
        by_piece: dict[int, list[Region]] = {}
        for region in regions:
            by_piece.setdefault(region.source, []).append(region)
        work: list[Callable[[], None]] = []
        for source, mine in by_piece.items():
            box, entry, place = stored.pieces[source]
            self._reader.check_leaves(entry, place)
            for block, positions in block_schedule(box.sizes, mine, itemsize=itemsize):
                takers = [(mine[position], arrays[mine[position].target]) for position in positions]
                work.append(self._task(entry, place, block, box.sizes, takers, itemsize))
        return work

    def _task(
        self, entry: Entry, place: Place, block: int, sizes: tuple[int, ...], takers: Sequence[tuple[Region, Any]], itemsize: int
    ) -> Callable[[], None]:
        def run() -> None:
            data = self._reader.read_block(entry, place, block)
            for region, array in takers:
                # With the ellipsis a scalar stays a view.
                where = (..., *(slice(o, o + n) for o, n in zip(region.target_offsets, region.sizes, strict=True)))
                copy_block(data, block * BLOCK_NBYTES // itemsize, sizes, region.source_offsets, region.sizes, out=array[where])

        return run


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def _new(stored: Stored, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Return a fresh CPU tensor of a stored tensor's dtype. Raises: StateError."""
    kind = getattr(torch, stored.dtype, None)
    if kind is None:
        raise StateError(f"{nodes.format_path(stored.path)}: this torch has no dtype {stored.dtype}; use a newer torch")
    shape = stored.shape if sizes is None else tuple(sizes)
    nbytes = prod(shape) * dtype(stored.dtype).itemsize
    try:
        # As bytes first: not every dtype can be allocated by name without complaint.
        return torch.empty(nbytes, dtype=torch.uint8).view(kind).view(shape)
    except (RuntimeError, MemoryError) as exc:
        raise StateError(f"{nodes.format_path(stored.path)}: no memory for its {nbytes} bytes; load a part of it") from exc


def _is_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg() and not is_dtensor(tensor)


def _bits(tensor: torch.Tensor, itemsize: int) -> Any:
    """Return a CPU tensor's elements as numpy integers, in place."""
    return tensor.detach().view(_CARRIERS[itemsize]).numpy()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, writable."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
