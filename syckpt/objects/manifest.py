"""Manifests: what one rank saved, by content alone (FORMAT.md, section 6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from syckpt.objects import address as addresses
from syckpt.objects import canonical
from syckpt.objects.box import Box
from syckpt.objects.checks import Fields
from syckpt.objects.dtypes import DTYPES, Dtype, dtype
from syckpt.objects.ids import is_file_path
from syckpt.objects.nodes import PER_RANK

__all__ = ["Entry", "Manifest", "read_path", "read_shape"]

PathKey = Any  # a string, an integer, or {"key": text}


@dataclass(frozen=True)
class Entry:
    """One box's values: path, element type, global shape, box (None: the whole tensor), content address.

    The address has 32 bytes; it is empty where this rank has the tensor in its structure but other ranks store its values.
    """

    path: tuple[PathKey, ...]
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    address: bytes

    @property
    def kind(self) -> Dtype:
        return dtype(self.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the values that are stored, in elements."""
        return self.shape if self.box is None else self.box.sizes

    @property
    def nbytes(self) -> int:
        """Raw bytes of those values."""
        return prod(self.sizes) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """One rank's entries, and the structure around them as nodes: `items` by item name, and the `rng` streams."""

    rank: int
    world_size: int
    entries: tuple[Entry, ...]
    items: dict[str, Any] = field(hash=False)
    rng: Any = field(hash=False)
    local: frozenset[int] = frozenset()
    """Entries whose values are this rank's alone: tensors that differed between ranks."""
    layouts: dict[str, Any] = field(default_factory=dict, hash=False)
    """Of items that are shown as a file of their own choice: `[file path, format, the format's configuration]`."""
    sharding: dict[str, Any] = field(default_factory=dict, hash=False)
    """What resharders declared on this rank, by item: `[path, shape, dtype, boxes, extra]` a tensor or value."""

    def distinct(self) -> list[bytes]:
        """Addresses in order of first appearance; `Locations.at` is aligned with it."""
        return list(dict.fromkeys(entry.address for entry in self.entries if entry.address))

    def structures(self) -> dict[str, str | None]:
        """Return what another rank that saved the same says too: a digest of each item's structure and of all tensors it may count.

        None where something is this rank's alone: a tensor that differed, a box that a resharder declared.
        """
        first: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.path[0] != _STREAMS:
                first.setdefault(repr(entry.path), entry)
        shared = canonical.dumps([[list(e.path), e.dtype, list(e.shape)] for e in first.values()])
        own = {index for index in self.local if self.entries[index].path[0] != _STREAMS}
        found: dict[str, str | None] = {}
        for name, node in self.items.items():
            is_own = name in self.sharding or (own and not own.isdisjoint(entries_in([node])))
            told = shared + canonical.dumps([node, self.layouts.get(name)])
            found[name] = None if is_own else canonical.digest_of(told)
        return found

    def to_body(self) -> dict[str, Any]:
        return {
            "kind": "manifest",
            "version": 1,
            "rank": self.rank,
            "world_size": self.world_size,
            "tensors": {
                "path": [list(e.path) for e in self.entries],
                "dtype": [e.dtype for e in self.entries],
                "shape": [list(e.shape) for e in self.entries],
                "box": [None if e.box is None else [list(e.box.offsets), list(e.box.sizes)] for e in self.entries],
                "address": [addresses.to_text(e.address) or None for e in self.entries],
                **({"local": sorted(self.local)} if self.local else {}),
            },
            "items": self.items,
            "rng": self.rng,
            **({"layouts": self.layouts} if self.layouts else {}),
            **({"sharding": self.sharding} if self.sharding else {}),
        }

    @staticmethod
    def from_body(body: dict[str, Any], *, where: str) -> Manifest:
        """Read a manifest's body. Raises: IntegrityError, FormatError (an unknown dtype)."""
        fields = Fields(body, where=where)
        columns = fields.columns("tensors", "path", "dtype", "shape", "box", "address")
        entries = tuple(_entry(fields, *row) for row in zip(*columns, strict=True))
        _check_paths(fields, entries)
        _check_nodes(fields, (*fields.mapping("items").values(), fields.raw("rng")), len(entries))
        local = fields.mapping("tensors").get("local", [])
        if not isinstance(local, list) or any(type(index) is not int or not 0 <= index < len(entries) for index in local):
            fields.fail("'local' is not a list of entries")
        return Manifest(
            rank=fields.integer("rank"),
            world_size=fields.integer("world_size", least=1),
            entries=entries,
            items=fields.mapping("items"),
            rng=fields.raw("rng"),
            local=frozenset(local),
            layouts=_layouts(fields, body.get("layouts", {})),
            sharding=_sharding(fields, body.get("sharding", {})),
        )


_MAX_ELEMENTS = 1 << 50
_MAX_DEPTH = 200
_STREAMS = "<rng>"  # how the paths of the random streams begin
_ENTRY_AT = {"tensor": None, "ndarray": 0, "encoded": 1}  # where a node names an entry


def entries_in(roots: Iterable[Any]) -> set[int]:
    """Return the entries that well-formed nodes name."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            for kind, payload in node.items():
                if kind in _ENTRY_AT:
                    at = _ENTRY_AT[kind]
                    found.add(payload if at is None else payload[at])
                elif isinstance(payload, dict | list):
                    waiting.append(payload)
    return found


def _check_nodes(fields: Fields, roots: Iterable[Any], entries: int) -> None:
    """Check depth and entries of nodes, before anything recurses into them or looks an entry up."""
    waiting = [(root, 0) for root in roots]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, list):
            waiting += [(child, depth) for child in node if isinstance(child, dict | list)]
        elif isinstance(node, dict):
            if depth > _MAX_DEPTH:
                fields.fail(f"nodes nested deeper than {_MAX_DEPTH}")
            for kind, payload in node.items():
                if kind == PER_RANK:
                    fields.fail("a node has values of several ranks, and a manifest is of one")
                if kind in _ENTRY_AT:
                    at = _ENTRY_AT[kind]
                    index = payload if at is None else payload[at] if isinstance(payload, list) and len(payload) > at else None
                    if type(index) is not int or not 0 <= index < entries:
                        fields.fail(f"a node names entry {str(index)[:40]} of {entries}")
                waiting.append((payload, depth + 1))


def _check_paths(fields: Fields, entries: Sequence[Entry]) -> None:
    """Check that entries under one path are boxes of one tensor."""
    first: dict[Any, Entry] = {}
    for entry in entries:
        path = tuple((key["key"],) if isinstance(key, dict) else key for key in entry.path)
        other = first.setdefault(path, entry)
        if other is not entry and (None in (entry.box, other.box) or (entry.dtype, entry.shape) != (other.dtype, other.shape)):
            fields.fail(f"several tensors at {str(entry.path)[:80]}")


def _layouts(fields: Fields, value: Any) -> dict[str, Any]:
    def good(layout: Any) -> bool:
        return isinstance(layout, list) and [type(part) for part in layout] == [str, str, dict] and is_file_path(layout[0])

    if not isinstance(value, dict) or not all(map(good, value.values())):
        return fields.fail("'layouts' is not one of items to [file path, format, configuration]")  # type: ignore[no-any-return]
    return value


def _sharding(fields: Fields, value: Any) -> dict[str, Any]:
    def good(declared: Any) -> bool:
        return isinstance(declared, list) and all(isinstance(row, list) and len(row) == 5 for row in declared)

    if not isinstance(value, dict) or not all(map(good, value.values())):
        fields.fail("'sharding' is not one of items to lists of [path, shape, dtype, boxes, extra]")
    found: dict[str, Any] = value
    return found


def read_shape(value: Any) -> tuple[int, ...]:
    """Return a shape as it stands in a document. Raises: ValueError."""
    if not isinstance(value, list) or len(value) > 64 or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"not a shape: {str(value)[:60]}")
    if prod(max(1, size) for size in value) > _MAX_ELEMENTS:
        raise ValueError(f"absurd shape {str(value)[:60]}")
    return tuple(value)


def read_path(value: Any) -> tuple[PathKey, ...]:
    """Return a path as it stands in a document. Raises: ValueError."""

    def good(key: Any) -> bool:
        return isinstance(key, str) or type(key) is int or (isinstance(key, dict) and list(key) == ["key"] and isinstance(key["key"], str))

    if not isinstance(value, list) or not value or not all(good(key) for key in value):
        raise ValueError(f"not a path: {str(value)[:60]}")
    return tuple(value)


def _box(value: Any, shape: tuple[int, ...]) -> Box | None:
    if value is None:
        return None
    offsets, sizes = value
    box = Box(read_shape(offsets), read_shape(sizes))
    if not box.within(shape):
        raise ValueError(f"box {value} is not within {shape}")
    return box


def _address(text: Any) -> bytes:
    if text is None:
        return b""
    digest = addresses.from_text(text)
    if len(digest) != 32:
        raise ValueError(f"not an address: {str(text)[:60]}")
    return digest


def _entry(fields: Fields, path: Any, name: Any, shape: Any, box: Any, digest: Any) -> Entry:
    # Interned columns: a manifest of 10,000 tensors repeats a few dtypes; dtype() raises FormatError for unknown ones.
    try:
        whole = read_shape(shape)
        entry = Entry(read_path(path), dtype(name).name, whole, _box(box, whole), _address(digest))
        if entry.box is not None and not entry.address:
            raise ValueError("a box without an address")
        return entry
    except (ValueError, TypeError, AttributeError) as exc:
        return fields.fail(f"tensor {str(path)[:80]}: {exc}")  # type: ignore[no-any-return]
