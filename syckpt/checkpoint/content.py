"""What a commit holds, whatever ranks saved it: one set of tensors, and each rank's structure around them. Torch-free.

A tensor is a path with boxes that ranks stored; a target is filled box by box, each of its elements exactly once. Manifests are read when
they are asked for: a rank needs its own, and those of the ranks that store what it reads, which the commit's table of layouts tells. What
the table says is held against what manifests say. Without one, whatever this rank's manifest does not answer is answered by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from syckpt.errors import IntegrityError, StateError
from syckpt.objects import nodes
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.dtypes import dtype
from syckpt.objects.manifest import Entry, Manifest
from syckpt.objects.nodes import KeyPath, Node
from syckpt.repo.reader import Place, Reader
from syckpt.repo.repository import dropped_error
from syckpt.reshard.keeping import Keeping
from syckpt.reshard.merge import merge, renumber, unite_groups
from syckpt.reshard.plan import Region, block_schedule, copy_block, plan

__all__ = ["Content", "Stored", "whole"]

T = TypeVar("T")


@dataclass
class Stored:
    """A tensor of the commit: what nodes count.

    `near` are those of its boxes that manifests which were read so far have, `near_ranks` says, piece by piece, of which rank. `is_local`:
    one rank of several kept it for itself. `window` is the box of the global tensor that this one is, where it is not all of it; `shape` is
    the window's then.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    complete: Callable[[], None] = field(repr=False)
    """Reads whatever manifests are left."""
    is_local: bool = False
    near: list[tuple[Box, Entry, Place]] = field(default_factory=list)
    near_ranks: list[int] = field(default_factory=list)
    window: Box | None = None

    @property
    def pieces(self) -> list[tuple[Box, Entry, Place]]:
        """All boxes that ranks stored; for those that fill a target, use `Content.locate` and `near`."""
        if not self.is_local:
            self.complete()
        return self.near

    @property
    def ranks(self) -> list[int]:
        """The ranks of `pieces`."""
        if not self.is_local:
            self.complete()
        return self.near_ranks

    @property
    def address(self) -> bytes | None:
        """The content address of a tensor that is stored as a whole; None for one in parts."""
        is_whole = len(self.pieces) == 1 and self.pieces[0][1].box is None and self.window is None
        return self.pieces[0][1].address if is_whole else None


class _ByRank(Mapping[int, T]):
    """Something that each rank's manifest has, read when it is asked for."""

    def __init__(self, world_size: int, get: Callable[[int], T]) -> None:
        self._world_size = world_size
        self._get = get

    def __getitem__(self, rank: int) -> T:
        if not 0 <= rank < self._world_size:
            raise KeyError(rank)
        return self._get(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._world_size))

    def __len__(self) -> int:
        return self._world_size


class Content:
    """An open commit. Raises, when made and whenever it reads more: NotFoundError for a dropped one, IntegrityError, FormatError."""

    def __init__(self, reader: Reader, commit: Commit) -> None:
        if commit.dropped:
            raise dropped_error(commit.id)
        self.commit = commit
        self.reader = reader
        self.entries: list[Stored] = []
        """The tensors of the manifests read so far; nodes count them."""
        self.local: set[int] = set()
        """Those that one rank of several kept for itself."""
        self._world_size = len(commit.manifests)
        self._known: dict[Any, int] = {}
        self._manifests: dict[int, Manifest] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        self._items: dict[int, dict[str, Node]] = {}
        reader.check_signed(commit)
        table = reader.repository.read_layouts(commit) if self._world_size > 1 else None
        self._keeping = None if table is None else Keeping(table, where=f"objects/{commit.id}/layouts")
        self.items: Mapping[int, dict[str, Node]] = _ByRank(self._world_size, self._items_of)
        """Each rank's own structure."""
        self.rng: Mapping[int, Node] = _ByRank(self._world_size, self._rng_of)
        self.sharding: Mapping[int, dict[str, list[Any]]] = _ByRank(self._world_size, lambda rank: self._manifest(rank).sharding)
        """What resharders declared on each rank, as it is stored."""

    @property
    def is_complete(self) -> bool:
        """Whether all manifests were read."""
        return len(self._manifests) == self._world_size

    @property
    def manifests_read(self) -> int:
        """How many ranks' manifests were read so far."""
        return len(self._manifests)

    @cached_property
    def layouts(self) -> dict[str, list[Any]]:
        """By item, what its layout was when it was saved: path, format, the format's configuration."""
        found: dict[str, list[Any]] = {}
        for rank in range(self._world_size):
            for name, layout in self._manifest(rank).layouts.items():
                found.setdefault(name, layout)
        return found

    @property
    def names(self) -> set[str]:
        """Names of the items that any rank has."""
        if self._keeping is not None:
            return set(self._keeping.items)
        return {name for rank in range(self._world_size) for name in self._manifest(rank).items}

    def is_common(self, name: str) -> bool:
        """Whether it is known that all ranks have an item, with one and the same structure."""
        return self._keeping is not None and self._keeping.items.get(name, False)

    def common(self, name: str, rank: int) -> Node:
        """Return the structure that all ranks have of an item, out of a rank's manifest. Raises: IntegrityError."""
        try:
            return self.items[rank][name]
        except KeyError:
            raise IntegrityError(
                f"objects/{self.commit.id}/layouts: says that rank {rank} has an item {name!r}, which it has not"
            ) from None

    # -- manifests -------------------------------------------------------------------------------------------------------

    def _manifest(self, rank: int) -> Manifest:
        found = self._manifests.get(rank)
        return self._open(rank) if found is None else found

    def _items_of(self, rank: int) -> dict[str, Node]:
        if rank not in self._items:
            manifest = self._manifest(rank)
            self._items[rank] = {name: renumber(node, self._numbers[rank]) for name, node in manifest.items.items()}
        return self._items[rank]

    def _rng_of(self, rank: int) -> Node:
        manifest = self._manifest(rank)
        return renumber(manifest.rng, self._numbers[rank])

    def _complete(self) -> None:
        if not self.is_complete:
            for rank in range(self._world_size):
                self._manifest(rank)

    def _open(self, rank: int) -> Manifest:
        """Read a rank's manifest and gather its tensors."""
        snapshot = self.reader.snapshot(self.commit, rank)
        manifest = snapshot.manifest
        if self._keeping is not None:
            self._keeping.check_items(manifest)
        numbers: dict[int, int] = {}
        for index, (entry, place) in enumerate(zip(manifest.entries, snapshot.places, strict=True)):
            is_local = self._world_size > 1 and index in manifest.local
            # Without several ranks every entry is a tensor of its own, also where two paths have the same text.
            key: Any = index
            if self._world_size > 1:
                path = nodes.format_path(entry.path)
                key = path, rank if is_local else None
                if self._keeping is not None and not is_local:
                    self._keeping.check_entry(path, entry, rank)
            number = self._known.setdefault(key, len(self.entries))
            if is_local:
                self.local.add(number)
            if number == len(self.entries):
                self.entries.append(Stored(entry.path, entry.dtype, entry.shape, self._complete, is_local))
            stored = self.entries[number]
            if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                raise IntegrityError(
                    f"commit {self.commit.id}: rank {rank} saved {nodes.format_path(entry.path)} as {entry.dtype} {list(entry.shape)},"
                    f" another one as {stored.dtype} {list(stored.shape)}"
                )
            if place is not None:
                stored.near.append((entry.box or whole(entry.shape), entry, place))
                stored.near_ranks.append(rank)
            numbers[index] = number
        self._numbers[rank] = numbers
        self._manifests[rank] = manifest
        return manifest

    def locate(self, stored: Stored, boxes: Sequence[Box]) -> None:
        """See to it that those stored boxes which fill these (of the global tensor) are among the tensor's `near`.

        Where nothing fills them, all that there is has been read.
        """
        if stored.is_local or self.is_complete or _fills(stored, boxes):
            return
        for rank in sorted(self._keeping.ranks(stored.path, boxes)) if self._keeping is not None else ():
            self._manifest(rank)
        if not _fills(stored, boxes):
            self._complete()

    def merged(self, *, choose: int | None, partial: list[KeyPath] | None = None) -> tuple[dict[str, Node], list[str]]:
        """Return the items as one structure, and the paths at which ranks differ: there rank `choose` is taken, with None all are kept.

        Paths that only some ranks have are added to `partial`.
        """
        if len(self.items) == 1:
            return dict(next(iter(self.items.values()))), []
        found: dict[str, Node] = {}
        differing: list[str] = []
        for name in sorted(self.names):
            found[name], paths = self.merged_item(name, choose=choose, partial=partial)
            differing += paths
        return found, differing

    def merged_item(self, name: str, *, choose: int | None, partial: list[KeyPath] | None = None) -> tuple[Node, list[str]]:
        """Do as `merged` for one item."""
        if self.is_common(name):
            return self.common(name, min(self._manifests, default=0) if choose is None else choose), []
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
        self.locate(stored, [box for box, _ in targets])
        regions = plan([box for box, _, _ in stored.near], [box for box, _ in targets], path=path, reader=reader)
        by_piece: dict[int, list[Region]] = {}
        for region in regions:
            by_piece.setdefault(region.source, []).append(region)
        work: list[Callable[[], None]] = []
        for source, mine in by_piece.items():
            box, entry, place = stored.near[source]
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


def _fills(stored: Stored, boxes: Sequence[Box]) -> bool:
    """Whether the boxes that are known fill others."""
    near = [box for box, _, _ in stored.near]
    if set(boxes) <= set(near):
        return True
    if not all(box.elements for box in boxes):
        return False  # Nothing fills it, and yet somebody has it.
    try:
        plan(near, boxes)
    except StateError:
        return False
    return True


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))
