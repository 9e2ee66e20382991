"""What a commit holds, whatever ranks saved it: one set of tensors, and each rank's structure around them. Torch-free.

A tensor is a path with boxes that ranks stored; a target is filled box by box, each of its elements exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syckpt.errors import IntegrityError, NotFoundError
from syckpt.objects import nodes
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.dtypes import dtype
from syckpt.objects.manifest import Entry
from syckpt.objects.nodes import KeyPath, Node
from syckpt.repo.reader import Place, Reader, Snapshot
from syckpt.reshard.merge import merge, renumber, unite_groups
from syckpt.reshard.plan import Region, block_schedule, copy_block, plan

__all__ = ["Content", "Stored", "whole"]


@dataclass
class Stored:
    """A tensor of the commit: what nodes count. `pieces` are the boxes that ranks stored; `ranks` says, piece by piece, which rank.

    `window` is the box of the global tensor that this one is, where it is not all of it; `shape` is the window's then.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Box, Entry, Place]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    window: Box | None = None

    @property
    def address(self) -> bytes | None:
        """The content address of a tensor that is stored as a whole; None for one in parts."""
        is_whole = len(self.pieces) == 1 and self.pieces[0][1].box is None and self.window is None
        return self.pieces[0][1].address if is_whole else None


class Content:
    """An open commit. Raises, when made: NotFoundError for a dropped one, IntegrityError, FormatError."""

    def __init__(self, reader: Reader, commit: Commit) -> None:
        if commit.dropped:
            raise NotFoundError(f"commit {commit.id} was dropped by retention; its record stays in the log, its tensors are gone")
        self.commit = commit
        self.reader = reader
        self.entries: list[Stored] = []
        """The tensors; nodes count them."""
        self.local: set[int] = set()
        """Those that one rank of several kept for itself."""
        snapshots = {number: reader.snapshot(commit, number) for number, _ in commit.manifests}
        numbers = self._collect(snapshots)
        self.rng: dict[int, Node] = {rank: renumber(snapshot.manifest.rng, numbers[rank]) for rank, snapshot in snapshots.items()}
        self.items: dict[int, dict[str, Node]] = {
            rank: {name: renumber(node, numbers[rank]) for name, node in snapshot.manifest.items.items()}
            for rank, snapshot in snapshots.items()
        }
        """Each rank's own structure."""
        self.sharding: dict[int, dict[str, list[Any]]] = {rank: snapshot.manifest.sharding for rank, snapshot in snapshots.items()}
        """What resharders declared on each rank, as it is stored."""
        self.layouts: dict[str, list[Any]] = {}
        """By item, what its layout was when it was saved: path, format, the format's configuration."""
        for snapshot in snapshots.values():
            for name, layout in snapshot.manifest.layouts.items():
                self.layouts.setdefault(name, layout)

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
                if index in local and len(snapshots) > 1:
                    self.local.add(number)
                if number == len(self.entries):
                    self.entries.append(Stored(entry.path, entry.dtype, entry.shape))
                stored = self.entries[number]
                if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                    raise IntegrityError(
                        f"commit {self.commit.id}: rank {rank} saved {nodes.format_path(entry.path)} as {entry.dtype} {list(entry.shape)},"
                        f" another one as {stored.dtype} {list(stored.shape)}"
                    )
                if place is not None:
                    stored.pieces.append((entry.box or whole(entry.shape), entry, place))
                    stored.ranks.append(rank)
                numbers[rank][index] = number
        return numbers

    def merged(self, *, choose: int | None, partial: list[KeyPath] | None = None) -> tuple[dict[str, Node], list[str]]:
        """Return the items as one structure, and the paths at which ranks differ: there rank `choose` is taken, with None all are kept.

        Paths that only some ranks have are added to `partial`.
        """
        if len(self.items) == 1:
            return dict(next(iter(self.items.values()))), []
        found: dict[str, Node] = {}
        differing: list[str] = []
        for name in dict.fromkeys(name for mine in self.items.values() for name in mine):
            found[name], paths = self.merged_item(name, choose=choose, partial=partial)
            differing += paths
        return found, differing

    def merged_item(self, name: str, *, choose: int | None, partial: list[KeyPath] | None = None) -> tuple[Node, list[str]]:
        """Do as `merged` for one item."""
        parts = {rank: mine[name] for rank, mine in self.items.items() if name in mine}
        if partial is not None and len(parts) < len(self.items):
            partial.append((name,))
        node, paths = merge(unite_groups(parts), choose=choose, path=(name,), partial=partial)
        return node, [nodes.format_path(path) for path in paths]

    def tasks(self, stored: Stored, targets: Sequence[tuple[Box, Any]], *, reader: int = 0) -> list[Callable[[], None]]:
        """Return the tasks, one a block, that bring a tensor's stored boxes into target boxes, given as arrays of unsigned integers (or
        whatever has the size of an element). `reader` is the rank that reads, for errors.

        Raises: StateError for boxes that do not cover a target.
        """
        itemsize = dtype(stored.dtype).itemsize
        path = nodes.format_path(stored.path)
        regions = plan([box for box, _, _ in stored.pieces], [box for box, _ in targets], path=path, reader=reader)
        by_piece: dict[int, list[Region]] = {}
        for region in regions:
            by_piece.setdefault(region.source, []).append(region)
        work: list[Callable[[], None]] = []
        for source, mine in by_piece.items():
            box, entry, place = stored.pieces[source]
            self.reader.check_leaves(entry, place)
            for block, positions in block_schedule(box.sizes, mine, itemsize=itemsize):
                takers = [(mine[position], targets[mine[position].target][1]) for position in positions]
                work.append(self._task(entry, place, block, box.sizes, takers, itemsize))
        return work

    def _task(
        self, entry: Entry, place: Place, block: int, sizes: tuple[int, ...], takers: Sequence[tuple[Region, Any]], itemsize: int
    ) -> Callable[[], None]:
        def run() -> None:
            data = self.reader.read_block(entry, place, block)
            for region, array in takers:
                # With the ellipsis a scalar stays a view.
                where = (..., *(slice(o, o + n) for o, n in zip(region.target_offsets, region.sizes, strict=True)))
                copy_block(data, block * BLOCK_NBYTES // itemsize, sizes, region.source_offsets, region.sizes, out=array[where])

        return run


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))
