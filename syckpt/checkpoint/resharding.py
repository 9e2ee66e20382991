"""Resharders of the user's at work: when one runs, what it reads from, and what becomes of what it handled."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from syckpt.checkpoint.content import Stored
from syckpt.checkpoint.sharding import extract
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.specs import ItemSpec
from syckpt.errors import NotFoundError, StateError
from syckpt.objects import nodes
from syckpt.objects.box import Box
from syckpt.objects.nodes import KeyPath, Node, format_path
from syckpt.reshard.resharder import DistributedItemMetadata, NestedPath, Resharder, ShardingMetadata, decode_sharding, key_path
from syckpt.state.bits import copy_tensor
from syckpt.state.fit import fit
from syckpt.state.wrappers import unwrapped

__all__ = ["Resharded", "changes", "prepare", "settle"]


@dataclass(frozen=True)
class Resharded:
    """An item after its resharder ran: the target as it was filled, and the paths that were handled, as given and as texts."""

    target: Any
    paths: tuple[NestedPath, ...]
    texts: frozenset[str]

    def handles(self, text: str) -> bool:
        """Whether a path, given as text, is at or below a handled one."""
        return any(text == handled or text.startswith(f"{handled}/") for handled in self.texts)

    def put_into(self, result: Any) -> Any:
        """Return a loaded value with what was handled in its place."""
        for path in self.paths:
            result = _put(result, path, _at(self.target, path))
        return result


def prepare(
    source: Source,
    name: str,
    resharder: Resharder,
    target: Any,
    notes: list[str],
    *,
    dry_run: bool = False,
    touch: Callable[[], None] = lambda: None,
) -> Resharded | None:
    """See an item as its resharder's target is laid out, and run the resharder if that is not how it was saved.

    Returns None where the item is to be loaded the default way: nothing changed, or nothing was handled, which is added to `notes`. A
    `dry_run` takes it that everything will be handled. `touch()` is called before the resharder, which may write into live tensors.
    Raises: StateError for what a resharder may not return; whatever it raises.
    """
    wanted = extract(resharder, name, target)
    source.window(name, {format_path(key_path(name, path)): metadata for path, metadata in wanted.items()})
    if not changes(source, name, wanted):
        return None
    source.handled[name] = []
    if dry_run:
        return Resharded(target, ((),), frozenset([format_path((name,))]))
    storage = _CommitStorage(source, name)
    filled = _containers_copied(target)
    touch()
    told: Any = resharder.load(Path(source.commit.name or source.commit.id) / name, name, wanted, storage.metadata, filled, storage)
    if not told:
        notes.append(f"{name}: its resharder handled nothing; it was loaded the default way")
        return None
    kind = type(resharder).__name__
    if not isinstance(told, list | tuple | set) or not all(isinstance(path, tuple) for path in told):
        raise StateError(f"item {name!r}: {kind}.load returned {told!r}; expected a list of paths (tuples of keys), or None")
    paths = tuple(dict.fromkeys(told))
    for path in paths:
        try:
            value = _at(filled, path)
        except (LookupError, TypeError, AttributeError) as exc:
            raise StateError(f"item {name!r}: {kind}.load says that it handled {path!r}, and the target has nothing there") from exc
        _refuse_other_shape(name, path, wanted.get(path), value, kind)
        filled = _put(filled, path, _in_place(_at(target, path, None), value))
    source.handled[name] = sorted(format_path(key_path(name, path)) for path in paths)
    return Resharded(filled, paths, frozenset(source.handled[name]))


def _refuse_other_shape(name: str, path: NestedPath, declared: ShardingMetadata | None, value: Any, kind: str) -> None:
    """What a resharder puts where it declares one box of a tensor has to be that box."""
    if declared is None or declared.dtype is None or len(declared.boxes) != 1 or not isinstance(value, torch.Tensor):
        return
    if tuple(value.shape) != declared.boxes[0].sizes:
        raise StateError(
            f"item {name!r}: {kind}.load put a tensor of shape {list(value.shape)} at {path!r}, and declares a box of sizes"
            f" {list(declared.boxes[0].sizes)} there"
        )


def settle(source: Source, name: str, spec: ItemSpec, done: Resharded | None, item: Any = None, *, is_object: bool = False) -> list[str]:
    """Decide what another number of ranks makes of values that each rank had for itself, unless a resharder did; return notes.

    Plain values are those of rank r modulo the old size. An object's state is not cut apart so: only its spec's `on_world_change` may say
    what becomes of it, or, for buffers of a DistributedDataParallel that broadcasts them, that module
    itself, in the run that saved them or in this one. Raises: StateError.
    """
    paths = [path for path in source.differing(name) if done is None or not done.handles(path)]
    policy = spec.on_world_change
    if not paths or (policy is None and not is_object):
        return []
    count = "1 value" if len(paths) == 1 else f"{len(paths)} values"
    what = f"{name}: {count} differed between the {source.commit.world_size} ranks that saved it ({_some(paths)})"
    if policy in ("rank0", "mod"):
        rank = 0 if policy == "rank0" else source.rank % source.commit.world_size
        source.take_rank(name, rank)
        return [f"{what}; rank {rank}'s are taken (on_world_change={policy!r})"]
    if policy is None and _are_sent(source, item, name, paths):
        source.take_rank(name, 0)
        return [f"{what}; rank 0's are taken, as DistributedDataParallel does before its next forward"]
    raise StateError(
        f"item {name!r} differed between the {source.commit.world_size} ranks that saved it ({_some(paths)}), and this job has another"
        " number of ranks: nothing says which of them belongs here. Give it a resharder or ItemSpec(on_world_change='mod' or 'rank0'),"
        " resume on as many ranks, or leave it out"
    )


def sent_buffers(item: Any) -> list[str]:
    """Return those buffers, named as in a module's state, that a DistributedDataParallel sends from rank 0 before each forward: it may be
    the item, or one that it wraps or has as a part."""
    found: list[str] = []
    for prefix, module in item.named_modules() if isinstance(item, torch.nn.Module) else ():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and module.broadcast_buffers:
            buffers = [buffer for buffer, _ in module.module.named_buffers() if buffer not in module.parameters_to_ignore]
            found += [f"{prefix}.module.{buffer}".lstrip(".") for buffer in buffers]
    return found


def _are_sent(source: Source, item: Any, name: str, paths: Sequence[str]) -> bool:
    """Whether rank 0's values replace all of these before their next use: in the run that saved them, or in this one."""
    here = {unwrapped(buffer) for buffer in sent_buffers(item)}
    # The two runs may have other wrappers.
    return (
        set(paths) <= set(source.content.sent[0].get(name, ()))
        or {unwrapped(path.removeprefix(f"{format_path((name,))}/")) for path in paths} <= here
    )


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


def changes(source: Source, name: str, wanted: Mapping[NestedPath, ShardingMetadata]) -> bool:
    """Whether a target is laid out in another way than this rank's part of the commit: then its resharder runs."""
    if not source.same_size:
        return True
    mine = source.declared(name, source.rank)
    here = {format_path(key_path(name, path)): metadata for path, metadata in wanted.items()}
    return {path: (m.global_shape, m.boxes) for path, m in mine.items()} != {path: (m.global_shape, m.boxes) for path, m in here.items()}


# --- what a resharder reads from ---------------------------------------------------------------------------------------------------


class _CommitStorage:
    """An item of a commit, as `Storage`."""

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self._name = name
        self._parts = {rank: mine[name] for rank, mine in source.content.items.items() if name in mine}
        self._declared: dict[int, dict[str, ShardingMetadata]] = {}
        self.metadata = DistributedItemMetadata(source.commit.world_size, {rank: self._metadata(rank) for rank in self._parts})

    def _metadata(self, rank: int) -> dict[NestedPath, ShardingMetadata]:
        rows = self._source.content.sharding[rank].get(self._name)
        if rows is not None:
            return decode_sharding(rows, where=f"commit {self._source.commit.id}, rank {rank}, item {self._name!r}")
        found: dict[NestedPath, ShardingMetadata] = {}
        for path, leaf in _python_leaves(self._parts[rank]):
            kind, payload = nodes.split(leaf)
            if kind == "tensor":
                stored = self._source.entries[payload]
                boxes = [box for (box, _, _), owner in zip(stored.pieces, stored.ranks, strict=True) if owner == rank]
                whole = Box((0,) * len(stored.shape), stored.shape)
                if any(box == whole for box, _, _ in stored.pieces):
                    boxes = [whole]  # Stored once, held by every rank that has it.
                found[path] = ShardingMetadata(stored.shape, stored.dtype, tuple(boxes))
        return found

    def read_value(self, source_metadata: DistributedItemMetadata, rank: int, path: NestedPath) -> Any:
        where = key_path(self._name, path)
        if rank not in self._parts:
            raise NotFoundError(
                f"{format_path(where)}: commit {self._source.commit.id} has the item of ranks {_listed(self._parts)}, not of {rank}"
            )
        if rank not in self._declared:
            self._declared[rank] = self._source.declared(self._name, rank)
        node = self._source.windowed(self._node(rank, where), where, self._declared[rank])
        planned = fit(node, None, path=where, entries=self._source.entries)
        return planned.build(self._source.fetch(dict.fromkeys(planned.fresh)).__getitem__)

    def read_box(
        self, source_metadata: DistributedItemMetadata, path: NestedPath, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        where = key_path(self._name, path)
        box = Box(tuple(int(offset) for offset in offsets), tuple(int(size) for size in sizes))
        stored = self._tensor(where)
        if not box.within(stored.shape):
            raise StateError(f"{format_path(where)}: {box} is not within the global shape {list(stored.shape)}")
        return self._source.read_window(stored, box)

    def _node(self, rank: int, where: KeyPath) -> Node:
        node = self._parts[rank]
        for depth, key in enumerate(where[1:], start=2):
            below = dict(_keyed(node))
            if _hashable(key) not in below:
                there = ", ".join(str(key) for key in list(below)[:10]) or "nothing"
                raise NotFoundError(f"{format_path(where[:depth])}: rank {rank} saved no such value; there: {there}")
            node = below[_hashable(key)]
        return node

    def _tensor(self, where: KeyPath) -> Stored:
        """Return the global tensor at a path, of whichever rank has it."""
        missing: NotFoundError | None = None
        for rank in self._parts:
            try:
                kind, payload = nodes.split(self._node(rank, where))
            except NotFoundError as exc:
                missing = exc
                continue
            if kind != "tensor":
                raise StateError(f"{format_path(where)}: rank {rank} saved no tensor there; read_value reads other values")
            if payload in self._source.content.local:
                raise StateError(f"{format_path(where)}: each rank saved a tensor of its own there; read_value(..., rank, ...) reads them")
            stored: Stored = self._source.entries[payload]
            return stored
        assert missing is not None
        raise missing


def _listed(ranks: Mapping[int, Any]) -> str:
    return ", ".join(map(str, ranks))


def _hashable(key: Any) -> Any:
    return ("key", key["key"]) if isinstance(key, dict) else key


def _keyed(node: Node) -> list[tuple[Any, Node]]:
    return [(_hashable(key), child) for key, child in nodes.children(node) or ()]


def _python_leaves(node: Node, path: NestedPath = ()) -> Any:
    """Yield leaves with the keys that Python has for them."""
    kind, payload = nodes.split(node)
    if kind in nodes.MAPPING_KINDS:
        for key, child in payload:
            yield from _python_leaves(child, (*path, nodes.decode(key)))
        return
    below = nodes.children(node)
    if below is None:
        yield path, node
    for key, child in below or ():
        yield from _python_leaves(child, (*path, key))


# --- what it fills -----------------------------------------------------------------------------------------------------------------


def _containers_copied(value: Any) -> Any:
    """Return a value whose containers are new and whose leaves are the same objects."""
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, child in value.items():
            made[key] = _containers_copied(child)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_containers_copied, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_containers_copied, value))
    if isinstance(value, deque):
        return deque(map(_containers_copied, value), value.maxlen)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown: Any = copy.copy(value)
        for item in dataclasses.fields(value):
            object.__setattr__(shown, item.name, _containers_copied(getattr(value, item.name)))
        return shown
    return value


_REQUIRED: Any = object()


def _at(value: Any, path: NestedPath, default: Any = _REQUIRED) -> Any:
    for key in path:
        try:
            value = value[key] if isinstance(value, Mapping | list | tuple | deque) else getattr(value, key)
        except (LookupError, TypeError, AttributeError):
            if default is _REQUIRED:
                raise
            return default
    return value


def _in_place(live: Any, value: Any) -> Any:
    """Return the live tensor, filled, where a new one of its form was put in its place."""
    both = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live is not value
    if both and live.shape == value.shape and live.dtype == value.dtype:
        with torch.no_grad():
            copy_tensor(live.detach(), value)
        return live
    return value


def _put(value: Any, path: NestedPath, what: Any) -> Any:
    """Return a value with another one at a path; containers that allow it are changed in place."""
    if not path:
        return what
    key, *rest = path
    if isinstance(value, dict):
        value[key] = _put(value.get(key), tuple(rest), what)
    elif isinstance(value, list | deque):
        value[key] = _put(value[key], tuple(rest), what)
    elif isinstance(value, tuple):
        parts = list(value)
        parts[key] = _put(value[key], tuple(rest), what)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    else:
        object.__setattr__(value, key, _put(getattr(value, key), tuple(rest), what))
    return value
