"""Manifests: what one rank saved, by content alone (FORMAT.md, section 6)."""

from __future__ import annotations

import base64
import marshal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from syckpt.errors import FormatError, IntegrityError
from syckpt.objects import address as addresses
from syckpt.objects import canonical, nodes
from syckpt.objects.box import Box
from syckpt.objects.checks import Fields
from syckpt.objects.dtypes import DTYPES, Dtype, dtype
from syckpt.objects.entries import entries_in, renumber
from syckpt.objects.ids import is_file_path

__all__ = ["Entry", "Manifest", "read_path", "read_shape"]

PathKey = Any  # a string, an integer, or {"key": text}


class Entry(NamedTuple):
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

    def structures(self) -> dict[str, str]:
        """Return a digest of each item's structure, and of the tensors that it names: ranks that say the same of it have the same one."""
        found: dict[str, str] = {}
        for name, node in self.items.items():
            mine = sorted(entries_in([node]))
            tensors = [[list(e.path), e.dtype, list(e.shape), i in self.local] for i, e in ((i, self.entries[i]) for i in mine)]
            own = renumber(node, {index: place for place, index in enumerate(mine)})
            found[name] = canonical.digest_of(canonical.dumps([own, self.layouts.get(name), tensors]))
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
        entries = _entries(fields, columns)
        _check_paths(fields, entries)
        _check_nodes(fields, fields.mapping("items"), fields.raw("rng"), len(entries))
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
_sound = ""
"""What `_check_nodes` found whole last, as a digest: thousands of ranks say the same of their items."""


def _check_nodes(fields: Fields, items: dict[str, Any], rng: Any, entries: int) -> None:
    """Check the form of all nodes, before anything takes one apart or looks an entry up."""
    global _sound
    # As bytes, since to Python 1, 1.0 and True are equal; version 2 writes equal values alike.
    told = canonical.digest_of(marshal.dumps([entries, items], 2))
    try:
        for node in [rng] if told == _sound else [rng, *items.values()]:
            nodes.check(node, entries=entries)
    except IntegrityError as exc:
        raise IntegrityError(f"{fields.where}: {exc}") from exc
    _sound = told


def _check_paths(fields: Fields, entries: Sequence[Entry]) -> None:
    """Check that entries under one path are boxes of one tensor."""
    paths = [tuple([(key["key"],) if isinstance(key, dict) else key for key in entry.path]) for entry in entries]
    if len(set(paths)) == len(paths):
        return
    first: dict[Any, Entry] = {}
    for path, entry in zip(paths, entries, strict=True):
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


def _entries(fields: Fields, columns: Sequence[Sequence[Any]]) -> tuple[Entry, ...]:
    try:
        return _plain_entries(*columns)
    except (ValueError, TypeError, FormatError):
        # Row by row: what is rare, and to say what is wrong.
        return tuple(_entry(fields, *row) for row in zip(*columns, strict=True))


def _plain_entries(paths: Any, names: Any, shapes: Any, boxes: Any, texts: Any) -> tuple[Entry, ...]:
    """Do as `_entry` for all rows at once, which is several times as fast: a manifest of 10,000 tensors repeats a few shapes and boxes.

    Raises: ValueError, TypeError, FormatError for whatever `_entry` refuses, and for paths with other keys than strings and integers.
    """
    parts = [box for box in boxes if box is not None]
    corners = list(chain.from_iterable(parts))
    _require({list}, chain(paths, shapes, parts, corners))
    _require({int}, chain.from_iterable(chain(shapes, corners)))
    _require({str, int}, chain.from_iterable(paths))
    if not all(paths) or any(text is None and box is not None for text, box in zip(texts, boxes, strict=True)):
        raise ValueError("no path, or a box without an address")
    kinds = {name: dtype(name).name for name in set(names)}
    sizes = list(map(tuple, shapes))
    wholes = {whole: read_shape(list(whole)) for whole in set(sizes)}
    pairs = list(zip((None if box is None else tuple(map(tuple, box)) for box in boxes), sizes, strict=True))
    known = {(box, whole): _box(None if box is None else list(map(list, box)), whole) for box, whole in set(pairs)}
    digests = _addresses(texts)
    columns = (map(tuple, paths), map(kinds.__getitem__, names), map(wholes.__getitem__, sizes), map(known.__getitem__, pairs), digests)
    return tuple(map(Entry._make, zip(*columns, strict=True)))


def _require(types: set[type], values: Iterable[Any]) -> None:
    if not set(map(type, values)) <= types:
        raise ValueError(f"something else than {', '.join(kind.__name__ for kind in types)}")


def _addresses(texts: Sequence[str | None]) -> list[bytes]:
    """Do as `_address` for a column, decoded as one text. Raises: ValueError, TypeError."""
    stored = [text for text in texts if text is not None]
    # With one more digit, a zero, each is as long as 33 bytes: no padding, and any text but that of these bytes is another one.
    joined = "A".join((*stored, "")).encode("ascii")
    data = base64.urlsafe_b64decode(joined)
    if not set(map(len, stored)) <= {43} or base64.urlsafe_b64encode(data) != joined or any(data[32::33]):
        raise ValueError("not addresses")
    digests = (data[begin : begin + 32] for begin in range(0, len(data), 33))
    return [b"" if text is None else next(digests) for text in texts]


def _entry(fields: Fields, path: Any, name: Any, shape: Any, box: Any, digest: Any) -> Entry:
    try:
        whole = read_shape(shape)
        entry = Entry(read_path(path), dtype(name).name, whole, _box(box, whole), _address(digest))
        if entry.box is not None and not entry.address:
            raise ValueError("a box without an address")
        return entry
    except (ValueError, TypeError, AttributeError) as exc:
        return fields.fail(f"tensor {str(path)[:80]}: {exc}")  # type: ignore[no-any-return]
