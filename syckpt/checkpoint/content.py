"""What a commit holds, whatever ranks saved it: one set of tensors, and each rank's structure around them. Torch-free.

A tensor is a path with boxes that ranks stored; a target is filled box by box, each of its elements exactly once. Manifests are read when
they are asked for: a rank needs its own, and those of the ranks that store what it reads, which the commit's table of layouts tells. What
the table says is held against what manifests say. Without one, whatever this rank's manifest does not answer is answered by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from syckpt.errors import IntegrityError, StateError
from syckpt.objects import nodes
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.dtypes import dtype
from syckpt.objects.entries import renumber
from syckpt.objects.manifest import Alike, Entry, Manifest
from syckpt.objects.nodes import KeyPath, Node
from syckpt.repo.reader import Place, Reader
from syckpt.repo.repository import dropped_error
from syckpt.reshard.keeping import Keeping
from syckpt.reshard.merge import merge, own_paths, unite_groups
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
    filled: set[tuple[Box, ...]] = field(default_factory=set, repr=False)
    """Boxes (of the global tensor) that `near` is known to fill; there it only gets more."""
    window: Box | None = None

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of `near`."""
        return tuple([box for box, _, _ in self.near])

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
        self._said: tuple[tuple[list[Any], ...], dict[int, int]] = (), {}
        """What a manifest said of its tensors, and which ones they are."""
        self._alike = Alike()
        self._filling: dict[tuple[tuple[Box, ...], ...], bool] = {}
        """Whether boxes fill others, each element once: thousands of tensors have a few dozen shapes."""
        self._items: dict[int, dict[str, Node]] = {}
        reader.check_signed(commit)
        table = reader.repository.read_layouts(commit) if self._world_size > 1 else None
        self._keeping = None if table is None else Keeping(table, where=f"objects/{commit.id}/layouts")
        self.items: Mapping[int, dict[str, Node]] = _ByRank(self._world_size, self._items_of)
        """Each rank's own structure."""
        self.rng: Mapping[int, Node] = _ByRank(self._world_size, self._rng_of)
        self.sent: Mapping[int, dict[str, list[str]]] = _ByRank(self._world_size, lambda rank: self._manifest(rank).sent)
        """What of each item's tensors rank 0's replace before their next use, by what each rank knew."""
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
            return set(self._keeping.groups)
        return {name for rank in range(self._world_size) for name in self._manifest(rank).items}

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Return the ranks that have an item, in groups of which it is known that they have the same structure there."""
        if self._keeping is not None:
            return list(self._keeping.groups.get(name, ()))
        return [(rank,) for rank, mine in self.items.items() if name in mine]

    def is_common(self, name: str) -> bool:
        """Whether it is known that all ranks have an item, with one and the same structure."""
        return [len(group) for group in self.groups(name)] == [self._world_size]

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
        snapshot = self.reader.snapshot(self.commit, rank, self._alike)
        manifest = snapshot.manifest
        if self._keeping is not None:
            self._keeping.check_items(manifest)
        numbers = self._numbers_of(manifest)
        for index, (entry, place) in enumerate(zip(manifest.entries, snapshot.places, strict=True)):
            if place is not None:
                stored = self.entries[numbers[index]]
                # With the path of the first: of hundreds of ranks, the texts are a fifth of the memory.
                entry = entry if entry.path is stored.path else Entry(stored.path, *entry[1:])
                stored.near.append((entry.box or whole(entry.shape), entry, place))
                stored.near_ranks.append(rank)
        self._numbers[rank] = numbers
        self._manifests[rank] = manifest = replace(manifest, entries=())
        return manifest

    def _numbers_of(self, manifest: Manifest) -> dict[int, int]:
        """Return which of the commit's tensors the entries of a manifest are. Raises: IntegrityError where manifests disagree."""
        if manifest.local:
            return self._numbered(manifest)
        # Most ranks say of all tensors what the one before them said: then there is nothing new to find, or to check.
        entries = manifest.entries
        said = [entry.path for entry in entries], [entry.dtype for entry in entries], [entry.shape for entry in entries]
        if said != self._said[0]:
            self._said = said, self._numbered(manifest)
        return self._said[1]

    def _numbered(self, manifest: Manifest) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for index, entry in enumerate(manifest.entries):
            is_local = self._world_size > 1 and index in manifest.local
            # Without several ranks every entry is a tensor of its own, also where two paths have the same text.
            key: Any = index
            if self._world_size > 1:
                path = nodes.format_path(entry.path)
                key = path, manifest.rank if is_local else None
                if self._keeping is not None and not is_local:
                    self._keeping.check_entry(path, entry, manifest.rank)
            number = self._known.setdefault(key, len(self.entries))
            if is_local:
                self.local.add(number)
            if number == len(self.entries):
                self.entries.append(Stored(entry.path, entry.dtype, entry.shape, self._complete, is_local))
            stored = self.entries[number]
            if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                raise IntegrityError(
                    f"commit {self.commit.id}: rank {manifest.rank} saved {nodes.format_path(entry.path)} as {entry.dtype}"
                    f" {list(entry.shape)}, another one as {stored.dtype} {list(stored.shape)}"
                )
            numbers[index] = number
        return numbers

    def locate(self, stored: Stored, boxes: Sequence[Box]) -> None:
        """See to it that those stored boxes which fill these (of the global tensor) are among the tensor's `near`.

        Where nothing fills them, all that there is has been read.
        """
        wanted = tuple(boxes)
        if stored.is_local or self.is_complete or self._fills(stored, wanted):
            return
        for rank in sorted(self._keeping.ranks(stored.path, boxes)) if self._keeping is not None else ():
            self._manifest(rank)
        if not self._fills(stored, wanted):
            self._complete()

    def _fills(self, stored: Stored, boxes: tuple[Box, ...]) -> bool:
        """Whether the boxes that are known fill others."""
        if boxes not in stored.filled:
            near = stored.boxes
            # Nothing fills an empty box, and yet somebody has it.
            if not set(boxes) <= set(near) and not (all(box.elements for box in boxes) and self._cover(near, boxes)):
                return False
            stored.filled.add(boxes)
        return True

    def _cover(self, near: tuple[Box, ...], boxes: tuple[Box, ...]) -> bool:
        """Whether boxes can be read from others: each element is in one of these, or in several that are the same."""
        if (near, boxes) not in self._filling:
            try:
                plan(near, boxes)
                self._filling[near, boxes] = True
            except StateError:
                self._filling[near, boxes] = False
        return self._filling[near, boxes]

    def check(self, stored: Stored, boxes: Sequence[Box], *, reader: int = 0) -> None:
        """Check that those of a tensor's boxes that are known fill these, each element once. Raises: StateError, as `tasks`."""
        near, wanted = stored.boxes, tuple(boxes)
        if near != wanted and not self._cover(near, wanted):
            plan(near, wanted, path=nodes.format_path(stored.path), reader=reader)

    def merged(self, *, choose: int | None) -> tuple[dict[str, Node], list[str]]:
        """Return the items as one structure, and the paths at which ranks differ: there rank `choose` is taken, with None all are kept."""
        if len(self.items) == 1:
            return dict(next(iter(self.items.values()))), []
        found: dict[str, Node] = {}
        differing: list[str] = []
        for name in sorted(self.names):
            found[name], paths = self.merged_item(name, choose=choose)
            differing += paths
        return found, differing

    def merged_item(self, name: str, *, choose: int | None) -> tuple[Node, list[str]]:
        """Do as `merged` for one item; with a rank to choose, out of one manifest of each group of ranks."""
        groups = self.groups(name)
        if choose is None and not (self.is_common(name) and not own_paths(self.items[groups[0][0]][name], self.local)):
            groups = [(rank,) for rank in sorted(rank for group in groups for rank in group)]
        ranks = [choose if choose is not None and choose in group else group[0] for group in groups]
        parts = {rank: self.items[rank][name] for rank in ranks}
        node, paths = parts[ranks[0]], list[KeyPath]()
        if len(parts) > 1:
            node, paths = merge(unite_groups(parts), choose=choose, path=(name,))
        for rank, group in zip(ranks, groups, strict=True):
            # One rank speaks for the group, but not with the tensors that each kept for itself.
            paths += [path for path in own_paths(parts[rank], self.local, (name,)) if len(group) > 1 and path not in paths]
        return node, [nodes.format_path(path) for path in paths]

    def tasks(self, stored: Stored, targets: Sequence[tuple[Box, Any]], *, reader: int = 0) -> list[Callable[[], None]]:
        """Return the tasks, one a block, that bring a tensor's stored boxes into target boxes, given as arrays of unsigned integers (or
        whatever has the size of an element). `reader` is the rank that reads, for errors.

        Raises: StateError for boxes that do not cover a target.
        """
        itemsize = dtype(stored.dtype).itemsize
        path = nodes.format_path(stored.path)
        self.locate(stored, [box for box, _ in targets])
        regions = plan(stored.boxes, [box for box, _ in targets], path=path, reader=reader)
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


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))
