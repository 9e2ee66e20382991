"""A commit, open for reading: one structure and one set of tensors, whatever ranks saved it, for whoever reads it.

A tensor is a path with boxes that ranks stored; a target is filled box by box, each of its elements exactly once. A rank of a job of the
same size reads its own structure, and where that lacks what a target has, as on another size and in a plain process, those of all ranks
merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from syckpt.checkpoint.content import Content, Stored, whole
from syckpt.checkpoint.specs import Config
from syckpt.errors import NotFoundError, StateError
from syckpt.objects import nodes
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.dtypes import dtype
from syckpt.objects.nodes import KeyPath, Node
from syckpt.repo.reader import Reader
from syckpt.reshard.merge import swap_tensors
from syckpt.reshard.plan import plan
from syckpt.reshard.resharder import LoadPlan, LoadSlice, ReshardingInfo, ShardingMetadata, decode_sharding, key_path
from syckpt.reshard.tensors import is_dtensor, local_boxes
from syckpt.state.bits import CARRIERS, copy_tensor
from syckpt.state.fit import fit

__all__ = ["Source", "Stored", "prefixes"]

_BETWEEN_NBYTES = 256 << 20  # on the way to other devices and dtypes


class Source:
    """An open commit. `rank` and `world_size` are the reader's; a `world_size` of None is a plain process, which sees all ranks.

    `config` is the reader's own: it says which formats are read, and what may be missing.
    """

    def __init__(
        self, reader: Reader, commit: Commit, *, rank: int = 0, world_size: int | None = None, config: Config | None = None
    ) -> None:
        self.content = Content(reader, commit)
        self.commit = commit
        self.config = config or Config()
        self._reader = reader
        self.rank = rank
        self.same_size = world_size == commit.world_size
        """Whether the reader is a rank of a job of the size that saved: then what ranks kept for themselves is exactly theirs."""
        self.has_others = (world_size or 1) > 1
        """Whether there are ranks that may have what this one has not."""
        self.entries = self.content.entries
        """The tensors; nodes count them."""
        self._differing: list[str] = []
        self._choose = None if world_size is None else rank % commit.world_size
        self._bases: dict[str, Node] = {}
        """Items as this reader sees them, but for its windows."""
        self._items: dict[str, Node] = {}
        self._shown: set[str] = set()
        """Items that are seen in another way than at first."""
        self._windows: dict[str, Mapping[str, ShardingMetadata]] = {}
        # Whatever is wrong with the first manifest is told now.
        _ = self.content.items[self.rank if self.same_size else (self._choose or 0)]
        self.handled: dict[str, list[str]] = {}
        """By item, the path texts that a resharder of the reader's handled."""
        self._streams: Any = None
        self._resharded: dict[str, tuple[Stored, tuple[Box, ...]]] = {}

    @property
    def _has_own(self) -> bool:
        """Whether this reader takes the structure, and the streams, that its own rank saved."""
        return self.same_size or self.commit.world_size == 1

    def _structure(self, name: str) -> Node:
        """Return an item as this reader sees it, with whole tensors."""
        if self._has_own:
            return self.content.items[self.rank if self.same_size else 0][name]
        node, differing = self.content.merged_item(name, choose=self._choose)
        self._differing += differing
        return node

    def declared(self, name: str, rank: int) -> dict[str, ShardingMetadata]:
        """Return what a rank's resharder declared of an item when it was saved, by path text. Raises: IntegrityError."""
        rows = self.content.sharding[rank].get(name, [])
        found = decode_sharding(rows, where=f"commit {self.commit.id}, rank {rank}, item {name!r}")
        return {nodes.format_path(key_path(name, path)): metadata for path, metadata in found.items()}

    @property
    def names(self) -> set[str]:
        """Names of the items in the commit, as far as this reader sees them."""
        if self._has_own:
            return set(self.content.items[self.rank if self.same_size else 0])
        return self.content.names

    @property
    def has_rng(self) -> bool:
        """Whether random streams were saved."""
        return self.content.rng[self._streams_of] is not None

    @property
    def per_rank(self) -> list[str]:
        """Paths at which ranks differ where that is not settled by rank, of all items as far as no more manifests need be read for it."""
        if not self._has_own and self.content.is_complete:
            for name in sorted(self.names):
                self.node(name)
        return list(self._differing)

    @property
    def _streams_of(self) -> int:
        """Whose random streams this reader takes."""
        return self.rank if self.same_size else 0

    @property
    def bytes_read(self) -> int:
        """Stored bytes that the reader has read so far, for all its sources."""
        return self._reader.bytes_read

    def node(self, name: str) -> Node:
        """Return an item's structure. Raises: NotFoundError."""
        if name not in self._items:
            if name not in self.names:
                raise NotFoundError(f"commit {self.commit.id} has no item {name!r}; it has {', '.join(sorted(self.names)) or 'none'}")
            if name not in self._bases:
                self._bases[name] = self._structure(name)
            # What this rank declared as boxes of global tensors comes back as these boxes.
            own = self.declared(name, self.rank) if self.same_size and self.commit.world_size > 1 else {}
            self._items[name] = self.windowed(self._bases[name], (name,), self._windows.get(name, own))
        return self._items[name]

    def differing(self, name: str) -> list[str]:
        """Return the paths of an item at which ranks differ, where that is not settled by rank."""
        if name in self.names:
            self.node(name)
        return [path for path in self._differing if path == name or path.startswith(f"{name}/")]

    def show(self, name: str, node: Node) -> None:
        """See an item in another way from here on."""
        self._shown.add(name)
        self._bases[name] = node
        self._items.pop(name, None)

    def see_anew(self, name: str) -> None:
        """See an item as at first, whatever was shown for another target: but for its windows."""
        if name in self._shown:
            self._shown.discard(name)
            del self._bases[name]
            self._items.pop(name, None)
            self._differing = [path for path in self._differing if path != name and not path.startswith(f"{name}/")]

    def take_rank(self, name: str, rank: int) -> None:
        """See an item as that rank saved it wherever ranks differ."""
        self.show(name, self.content.merged_item(name, choose=rank)[0])

    def window(self, name: str, declared: Mapping[str, ShardingMetadata]) -> None:
        """See those tensors of an item that the reader's own resharder declares as boxes of global ones as these boxes."""
        self._windows[name] = declared
        self._items.pop(name, None)

    def can_unite(self, name: str) -> bool:
        """Whether other ranks may have saved parts of an item that this reader does not see; all ranks say the same."""
        return self.same_size and self.commit.world_size > 1 and name in self.names and not self.content.is_common(name)

    def unite(self, name: str, helps: Callable[[Node], bool]) -> None:
        """See what all ranks saved of an item together, and of what they differ in what this rank has, if that structure `helps`."""
        node, differing = self.content.merged_item(name, choose=self.rank)
        if not helps(node):
            return
        mine = {text for path, _ in nodes.walk(self.content.items[self.rank][name], (name,)) for text in prefixes(path)}
        self._differing += [path for path in differing if path not in mine and path not in self._differing]
        self.show(name, node)

    def locate(self, wanted: Mapping[int, torch.Tensor | None]) -> None:
        """Read the manifests that `fetch` needs: what fills the targets is then among `near` of each entry. Raises: IntegrityError."""
        for number, target in wanted.items():
            stored = self.entries[number]
            self.content.locate(stored, [_whole(stored)] if target is None else [box for box, _ in _boxes(stored, target)])

    def windowed(self, node: Node, path: KeyPath, declared: Mapping[str, ShardingMetadata]) -> Node:
        """Return a node, at that path, whose tensors are only the one box each that is declared of them, by path text."""
        if not any(metadata.dtype is not None and len(metadata.boxes) == 1 for metadata in declared.values()):
            return node
        known: dict[tuple[int, Box], int] = {}

        def swap(where: KeyPath, number: int) -> int:
            metadata, stored = declared.get(nodes.format_path(where)), self.entries[number]
            if metadata is None or metadata.dtype is None or len(metadata.boxes) != 1 or metadata.global_shape != stored.shape:
                return number
            box = metadata.boxes[0]
            if box.sizes == stored.shape or stored.window is not None:
                return number
            if (number, box) not in known:
                known[number, box] = len(self.entries)
                self.entries.append(replace(stored, shape=box.sizes, window=box))
            return known[number, box]

        return swap_tensors(node, swap, path)

    def rng(self) -> Any:
        """Return this rank's saved random streams, as `state.rng.capture` made them; read and verified once."""
        if self._streams is None:
            planned = fit(self.content.rng[self._streams_of], None, path=("rng",), entries=self.entries)
            self._streams = planned.build(self.fetch(dict.fromkeys(planned.fresh)).__getitem__)
        return self._streams

    def fits(self, name: str, template: Any) -> bool:
        """Whether an item's structure is the template's."""
        return not fit(self.node(name), template, path=(name,), entries=self.entries).problems

    # -- resharding ----------------------------------------------------------------------------------------------------

    @property
    def resharded(self) -> list[str]:
        """Paths whose stored boxes were not the reader's."""
        return list(self._resharded)

    def resharding(self) -> ReshardingInfo:
        """Return what went from one layout to another so far; the regions are worked out when they are asked for."""
        asked = dict(self._resharded)
        return ReshardingInfo(lambda: {path: self._plan(*what) for path, what in asked.items()}, dict(self.handled))

    def plan(self, wanted: Mapping[int, torch.Tensor | None], *, check: bool = True) -> None:
        """Report what `fetch` is going to be asked for, and check that it is there, without reading it. Raises: StateError."""
        for number, target in wanted.items():
            stored = self.entries[number]
            boxes = [_whole(stored)] if target is None else [box for box, _ in _boxes(stored, target)]
            self.content.locate(stored, boxes)
            self._note(stored, boxes)
            if check:
                self.content.check(stored, boxes, reader=self.rank)

    def _note(self, stored: Stored, boxes: Sequence[Box]) -> None:
        if not set(boxes) <= set(stored.boxes):
            self._resharded[nodes.format_path(stored.path)] = stored, tuple(boxes)

    def _plan(self, stored: Stored, boxes: tuple[Box, ...]) -> LoadPlan:
        path = nodes.format_path(stored.path)
        slices = []
        self.content.locate(stored, boxes)
        for region in plan(stored.boxes, boxes, path=path, reader=self.rank):
            offsets = zip(boxes[region.target].offsets, region.target_offsets, strict=True)
            slices.append(LoadSlice(stored.near_ranks[region.source], Box(tuple(a + b for a, b in offsets), region.sizes)))
        shape = stored.near[0][1].shape if stored.near else stored.shape
        return LoadPlan(shape, stored.dtype, boxes, tuple(slices))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def fetch(self, wanted: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Return verified tensors by number: the given ones filled in place (a DTensor: this rank's part), new CPU tensors for None.

        Raises: StateError (boxes that do not cover a target), IntegrityError; a target then holds old or exact values.
        """
        found: dict[int, torch.Tensor] = {}
        work: list[Callable[[], None]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        between, planned = 0, False
        for number, target in wanted.items():
            stored = self.entries[number]
            found[number] = _new(stored) if target is None else target
            targets = []
            for box, view in _boxes(stored, found[number]):
                direct = view if _is_host_memory(view) and str(view.dtype) == f"torch.{stored.dtype}" else _new(stored, box.sizes)
                if direct is not view:
                    copies.append((view, direct))
                    between += direct.nbytes
                targets.append((box, direct))
            self.content.locate(stored, [box for box, _ in targets])
            self._note(stored, [box for box, _ in targets])
            work += self._tasks(stored, targets)
            if between > _BETWEEN_NBYTES:
                if not planned:
                    self.plan(wanted)  # What is not there is found before the first target is touched.
                self._run(work, copies)
                work, copies, between, planned = [], [], 0, True
        self._run(work, copies)
        return found

    def _run(self, work: Sequence[Callable[[], None]], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self._reader.reading(self.commit):
            self._reader.run(work)
        with torch.no_grad():
            for target, value in copies:
                copy_tensor(target, value)

    def read_into(self, stored: Stored, box: Box, target: torch.Tensor) -> None:
        """Fill a CPU tensor of the stored dtype with any box of the global tensor. Raises: as `read_window`."""
        with self._reader.reading(self.commit):
            self._reader.run(self._tasks(stored, [(box, target)]))

    def new(self, number: int) -> torch.Tensor:
        """Return an empty CPU tensor for an entry. Raises: StateError."""
        return _new(self.entries[number])

    def read_window(self, stored: Stored, box: Box) -> torch.Tensor:
        """Return any box of a tensor as a new one. Raises: StateError (nothing stored covers it), IntegrityError."""
        made = _new(stored, box.sizes)
        self.read_into(stored, box, made)
        return made

    def _tasks(self, stored: Stored, targets: Sequence[tuple[Box, torch.Tensor]]) -> list[Callable[[], None]]:
        """Return the tasks, one a block, that bring a tensor's stored boxes into target boxes (contiguous or strided CPU memory)."""
        self.content.locate(stored, [box for box, _ in targets])
        if len(stored.near) == 1 and len(targets) == 1 and stored.near[0][0] == targets[0][0] and targets[0][1].is_contiguous():
            _, entry, place = stored.near[0]
            return self._reader.tasks(entry, place, _memory(targets[0][1]))
        itemsize = dtype(stored.dtype).itemsize
        return self.content.tasks(stored, [(box, _bits(tensor, itemsize)) for box, tensor in targets], reader=self.rank)


def prefixes(path: KeyPath) -> list[str]:
    """Return the texts of a path and of all that lead to it, from the item on."""
    return [nodes.format_path(path[:length]) for length in range(1, len(path) + 1)]


def _whole(stored: Stored) -> Box:
    return stored.window or whole(stored.shape)


def _boxes(stored: Stored, target: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of the global tensor that this rank's target holds, with views of them."""
    boxes = local_boxes(target, path=nodes.format_path(stored.path))
    if stored.window is None:
        return boxes
    return [(Box(tuple(a + b for a, b in zip(stored.window.offsets, box.offsets, strict=True)), box.sizes), view) for box, view in boxes]


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
    return tensor.detach().view(CARRIERS[itemsize]).numpy()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, writable."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
