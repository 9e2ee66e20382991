"""Resharders: how an item that one layout saved goes back into another one; and what a load tells about that.

A tensor that is a DTensor, or that a resharder declares as a box of a global one, is resharded by its boxes without further ado. A
`Resharder` of the user's is for everything else: loader progress, tables that are split by key. It runs on a load whose layout is not the
one that saved; what it does not handle goes the default way.

* A path (`NestedPath`) is the tuple of keys below the item, as the item's own containers have them: `("shards", 0, "consumed")`.
* `extract_sharding_metadata` is called on each rank at every save, and with the target at every load; it must not communicate.
* `load` gets a target whose containers are copies and whose tensors are the live ones. It fills or replaces what it handles, and returns
  those paths. It must not communicate either: where an item is restored when it is registered, ranks do not come to it together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from syckpt.errors import IntegrityError, StateError
from syckpt.objects import canonical, nodes
from syckpt.objects.box import Box
from syckpt.objects.nodes import KeyPath, Node
from syckpt.reshard.tensors import is_dtensor, local_boxes
from syckpt.state.flatten import dtype_name, plain_leaf, unflatten

__all__ = [
    "DTensorResharder",
    "DistributedItemMetadata",
    "LoadPlan",
    "LoadSlice",
    "NestedPath",
    "Resharder",
    "ReshardingInfo",
    "ShardingMetadata",
    "Storage",
    "decode_sharding",
    "encode_sharding",
    "is_custom",
    "key_path",
    "leaves_of",
]

NestedPath: TypeAlias = "tuple[Any, ...]"
"""Keys below an item."""


@dataclass(frozen=True)
class ShardingMetadata:
    """What one rank has at one path: these boxes (each `Box` or `(offsets, sizes)`) of a tensor of that global shape.

    `dtype` is torch's or its name, or None for what is no tensor; `extra` is whatever the resharder wants to find again, without tensors.
    """

    global_shape: tuple[int, ...]
    dtype: torch.dtype | str | None
    boxes: tuple[Box, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        try:
            shape = tuple(int(size) for size in self.global_shape)
            boxes = tuple(_box(box) for box in self.boxes)
        except (TypeError, ValueError) as exc:
            raise StateError(
                f"ShardingMetadata(global_shape={self.global_shape!r}, boxes={self.boxes!r}): expected sizes, and boxes as (offsets, sizes)"
            ) from exc
        if any(size < 0 for size in shape) or not all(box.within(shape) for box in boxes):
            raise StateError(f"ShardingMetadata: boxes {[str(box) for box in boxes]} are not all within the global shape {list(shape)}")
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype | str)):
            raise StateError(f"ShardingMetadata: dtype={self.dtype!r}: expected torch's, its name, or None")
        if not isinstance(self.extra, Mapping):
            raise StateError(f"ShardingMetadata: extra={self.extra!r}: expected a mapping")
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "boxes", boxes)

    @property
    def dtype_name(self) -> str | None:
        """torch's name of the dtype."""
        return dtype_name(self.dtype) if isinstance(self.dtype, torch.dtype) else self.dtype


def _box(value: Any) -> Box:
    if isinstance(value, Box):
        return value
    offsets, sizes = value
    return Box(tuple(int(offset) for offset in offsets), tuple(int(size) for size in sizes))


@dataclass(frozen=True)
class DistributedItemMetadata:
    """What all ranks that saved an item had: `by_rank[rank][path]`. Of an item saved without a resharder: its tensors, with the boxes that
    each rank stored."""

    world_size: int
    by_rank: Mapping[int, Mapping[NestedPath, ShardingMetadata]]


class Storage(Protocol):
    """What a resharder reads from; every byte is verified."""

    def read_value(self, source_metadata: DistributedItemMetadata, rank: int, path: NestedPath) -> Any:
        """Return what a rank had at a path: a plain value, a container, or a new CPU tensor (of a declared box, that box; of a DTensor,
        the global one). Raises: NotFoundError naming rank and path; IntegrityError."""

    def read_box(
        self, source_metadata: DistributedItemMetadata, path: NestedPath, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """Return any region of a global tensor, whoever stored its parts, as a new CPU tensor of these sizes.

        Raises: NotFoundError; StateError for a region outside of it, or that no saved box covers; IntegrityError.
        """


class Resharder(ABC):
    """Maps an item saved under one layout onto this rank's target; see the module's contract."""

    @abstractmethod
    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]:
        """Return what this rank has of the item's sharded tensors and values, by path."""

    @abstractmethod
    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[NestedPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[NestedPath] | None:
        """Fill `target` and return the paths that were handled; None for none. `source_path` names the commit and the item, not a file.

        An exception is raised by the load, on all ranks.
        """


class DTensorResharder(Resharder):
    """Names the default: DTensors go into any layout by their boxes."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]:
        """Return the boxes that this rank holds of every DTensor."""
        return {
            path: ShardingMetadata(tuple(leaf.shape), leaf.dtype, tuple(box for box, _ in local_boxes(leaf, path=item_key)))
            for path, leaf in leaves_of(item_value)
            if is_dtensor(leaf)
        }

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[NestedPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[NestedPath] | None:
        """Leave everything to the default, which reads each tensor box by box."""
        return None


def is_custom(resharder: Resharder | None) -> bool:
    """Whether a resharder is one of the user's, not the default by its name."""
    return resharder is not None and type(resharder) is not DTensorResharder


def leaves_of(value: Any, path: NestedPath = ()) -> Iterator[tuple[NestedPath, Any]]:
    """Yield what is in nested mappings, lists and tuples, with its path."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from leaves_of(child, (*path, key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from leaves_of(child, (*path, index))
    else:
        yield path, value


# --- what a load tells -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadSlice:
    """A region of a global tensor, and the rank of the saving job whose part it is read from."""

    rank: int
    box: Box


@dataclass(frozen=True)
class LoadPlan:
    """How one tensor of this rank is filled: the boxes of the global tensor that it takes, and the slices that they come from."""

    global_shape: tuple[int, ...]
    dtype: str
    targets: tuple[Box, ...]
    slices: tuple[LoadSlice, ...]


@dataclass(eq=False)
class ReshardingInfo:
    """What of a load went, or (`dry_run`) would go, from one layout to another."""

    _plans: Callable[[], dict[str, LoadPlan]] = field(default=dict, repr=False)
    handled: dict[str, list[str]] = field(default_factory=dict)
    """By item whose resharder of the user's ran: the path texts that it handled (in a `dry_run`, none yet)."""

    @cached_property
    def plans(self) -> dict[str, LoadPlan]:
        """By path text: the tensors whose stored boxes are not this rank's. Worked out when it is first asked for."""
        return self._plans()


# --- on disk (FORMAT.md, section 6) ------------------------------------------------------------------------------------------------


def key_path(item: str, path: NestedPath) -> KeyPath:
    """Return a nested path as nodes write it, item first. Raises: StateError for a key that nodes cannot carry."""
    return (item, *(nodes.path_key(key, leaf=plain_leaf) for key in path))


def encode_sharding(item: str, declared: Mapping[NestedPath, ShardingMetadata]) -> list[Any]:
    """Return what a rank declared of an item, for its manifest. Raises: StateError for what cannot be carried."""
    rows = []
    for path, metadata in declared.items():
        if not isinstance(path, tuple) or not isinstance(metadata, ShardingMetadata):
            raise StateError(f"item {item!r}: its resharder declared {path!r}: {metadata!r}; expected tuples of keys and ShardingMetadata")
        where = key_path(item, path)
        boxes = [[list(box.offsets), list(box.sizes)] for box in metadata.boxes]
        keys = [nodes.encode(key, leaf=plain_leaf, path=where) for key in path]
        dtype = nodes.encode(metadata.dtype, leaf=plain_leaf, path=where)
        rows.append([keys, list(metadata.global_shape), dtype, boxes, nodes.encode(dict(metadata.extra), leaf=plain_leaf, path=where)])
    return sorted(rows, key=lambda row: canonical.dumps(row[0]))


def decode_sharding(rows: Iterable[Any], *, where: str) -> dict[NestedPath, ShardingMetadata]:
    """Invert `encode_sharding`. Raises: IntegrityError naming `where`."""

    def value(node: Node) -> Any:
        return unflatten(node, _no_tensor)

    found: dict[NestedPath, ShardingMetadata] = {}
    for row in rows:
        try:
            keys, shape, dtype, boxes, extra = row
            found[tuple(value(key) for key in keys)] = ShardingMetadata(tuple(shape), value(dtype), tuple(map(_box, boxes)), value(extra))
        except (TypeError, ValueError) as exc:  # StateError is one
            raise IntegrityError(f"{where}: malformed sharding {str(row)[:80]}: {exc}; run `syckpt verify`") from exc
    return found


def _no_tensor(index: int) -> Any:
    raise ValueError(f"entry {index} where none can be")
