"""What resharders declare of the items of a save: plain tensors that are boxes of global ones, and whatever they want to find again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from syckpt.checkpoint.specs import Config
from syckpt.errors import StateError
from syckpt.objects.box import Box
from syckpt.objects.nodes import format_path
from syckpt.reshard.resharder import NestedPath, ShardingMetadata, encode_sharding, is_custom, key_path

__all__ = ["Declared", "declare", "extract", "part_of"]


@dataclass(frozen=True)
class Declared:
    """What this rank declares: by item for its manifest, and by path text."""

    rows: dict[str, list[Any]] = field(default_factory=dict)
    tensors: dict[str, ShardingMetadata] = field(default_factory=dict)


def declare(config: Config, values: Mapping[str, Any]) -> Declared:
    """Ask the resharders of the items that are about to be saved. Raises: StateError; what a resharder raises."""
    declared = Declared()
    for name, value in values.items():
        resharder = config.spec(name).resharder
        if resharder is not None and is_custom(resharder):
            found = extract(resharder, name, value)
            declared.rows[name] = encode_sharding(name, found)
            declared.tensors.update((format_path(key_path(name, path)), metadata) for path, metadata in found.items())
    return declared


def extract(resharder: Any, name: str, value: Any) -> dict[NestedPath, ShardingMetadata]:
    """Return what a resharder of the user's says of a value; None is nothing. Raises: StateError for what is no such mapping."""
    found = resharder.extract_sharding_metadata(name, value)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise StateError(
            f"item {name!r}: {type(resharder).__name__}.extract_sharding_metadata returned {type(found).__name__}; expected a dict of paths"
            " (tuples of keys) to ShardingMetadata"
        )
    return dict(found)


def part_of(metadata: ShardingMetadata, *, path: str, dtype: str, sizes: tuple[int, ...]) -> Box | None:
    """Return the box of the global tensor that a plain tensor is; None where it is declared as anything else than one box.

    Raises: StateError for a tensor that is not what was declared of it.
    """
    if metadata.dtype is None or not metadata.boxes:
        return None
    if metadata.dtype_name != dtype:
        raise StateError(f"{path}: its resharder declared dtype {metadata.dtype_name}, the tensor has {dtype}")
    if len(metadata.boxes) > 1:
        return None
    if metadata.boxes[0].sizes != sizes:
        raise StateError(
            f"{path}: its resharder declared a box of sizes {list(metadata.boxes[0].sizes)}, the tensor has shape {list(sizes)}: where a"
            " tensor is one box of a global one, their shapes are the same"
        )
    return metadata.boxes[0]
