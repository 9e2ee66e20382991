"""Manifests: what one rank saved, by content alone (FORMAT.md, section 6)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
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

__all__ = ["Alike", "Entry", "Manifest", "read_path", "read_shape"]

PathKey = Any  # a string, an integer, or {"key": text}
_Known = tuple[Sequence[tuple[PathKey, ...]], Sequence[tuple[int, ...]]]
"""Paths and shapes of entries, checked."""


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


class Alike:
    """What the manifests of a commit have in common with the one that was read before: parsed, checked and kept once.

    Thousands of ranks say the same of their items, and of paths and shapes. Their texts are compared. For one thread at a time.
    """

    def __init__(self) -> None:
        self._head = self._tail = b""
        """The body's text up to its items, and from the column of paths on."""
        self._around: dict[str, Any] = {}
        self._columns: dict[str, Any] = {}
        self._paths: list[tuple[PathKey, ...]] = []
        self._shapes: list[tuple[int, ...]] = []

    def parse(self, text: bytes) -> Any:
        """Do as `canonical.loads_canonical` for a manifest's body; what is known comes back as the same objects."""
        begin, end = len(self._head), len(text) - len(self._tail)
        if not (self._head and begin < end and text.startswith(self._head) and text.endswith(self._tail)):
            return canonical.loads_canonical(text)
        rest = canonical.loads_canonical(b"{" + text[begin:end] + b"}}")
        columns = rest.get("tensors")
        # Keys must stand in order with those that are known, and the last brace but one be that of the columns.
        if not (isinstance(columns, dict) and columns and max(columns) < "path" and min(rest) > "items" and max(rest) == "tensors"):
            return canonical.loads_canonical(text)
        return {**self._around, **rest, "tensors": {**columns, **self._columns}}

    def known(self, items: Any, paths: Any, shapes: Any) -> _Known | None:
        """Return paths and shapes as entries have them, if these parts of a body are those of the one before."""
        around, columns = self._around, self._columns
        is_known = around and items is around["items"] and paths is columns["path"] and shapes is columns["shape"]
        return (self._paths, self._shapes) if is_known else None

    def learn(self, body: dict[str, Any], entries: Sequence[Entry]) -> None:
        """Take what there is to know from a body that was found good."""
        self._around = {name: body[name] for name in ("items", "version", "world_size")}
        self._columns = {name: body["tensors"][name] for name in ("path", "shape")}
        self._paths, self._shapes = [entry.path for entry in entries], [entry.shape for entry in entries]
        items, *last = (canonical.dumps({name: value})[1:-1] for name, value in self._around.items())
        self._head = b"{" + items + b","
        self._tail = b"," + canonical.dumps(self._columns)[1:] + b"," + b",".join(last) + b"}"


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
    sent: dict[str, list[str]] = field(default_factory=dict, hash=False)
    """By item, the paths, as texts, of tensors that rank 0's replace before their next use."""

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
            **({"sent": self.sent} if self.sent else {}),
        }

    @staticmethod
    def from_body(body: dict[str, Any], *, where: str, alike: Alike | None = None) -> Manifest:
        """Read a manifest's body; `alike` parsed it. Raises: IntegrityError, FormatError (an unknown dtype)."""
        fields = Fields(body, where=where)
        items, rng = fields.mapping("items"), fields.raw("rng")
        columns = fields.columns("tensors", "path", "dtype", "shape", "box", "address")
        known = None if alike is None else alike.known(items, columns[0], columns[2])
        entries = _entries(fields, columns, known)
        _check_paths(fields, entries)
        _check_nodes(fields, [rng] if known else [rng, *items.values()], len(entries))
        local = fields.mapping("tensors").get("local", [])
        if not isinstance(local, list) or any(type(index) is not int or not 0 <= index < len(entries) for index in local):
            fields.fail("'local' is not a list of entries")
        found = Manifest(
            rank=fields.integer("rank"),
            world_size=fields.integer("world_size", least=1),
            entries=entries,
            items=items,
            rng=rng,
            local=frozenset(local),
            layouts=_layouts(fields, body.get("layouts", {})),
            sharding=_sharding(fields, body.get("sharding", {})),
            sent=_sent(fields, body.get("sent", {})),
        )
        if alike is not None and not known:
            alike.learn(body, entries)
        return found


_MAX_ELEMENTS = 1 << 50


def _check_nodes(fields: Fields, roots: Sequence[Any], entries: int) -> None:
    """Check the form of nodes, before anything takes one apart or looks an entry up."""
    try:
        for node in roots:
            nodes.check(node, entries=entries)
    except IntegrityError as exc:
        raise IntegrityError(f"{fields.where}: {exc}") from exc


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


def _sent(fields: Fields, value: Any) -> dict[str, list[str]]:
    def good(paths: Any) -> bool:
        return isinstance(paths, list) and all(isinstance(path, str) for path in paths) and paths == sorted(set(paths))

    if not isinstance(value, dict) or not all(map(good, value.values())):
        fields.fail("'sent' is not one of items to sorted lists of paths")
    found: dict[str, list[str]] = value
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


def _entries(fields: Fields, columns: Sequence[Sequence[Any]], known: _Known | None) -> tuple[Entry, ...]:
    paths, names, shapes, boxes, texts = columns
    try:
        return _plain_entries(*(known or _plain(paths, shapes)), names, boxes, texts)
    except (ValueError, TypeError, FormatError):
        # Row by row: what is rare, and to say what is wrong.
        return tuple(_entry(fields, *row) for row in zip(*columns, strict=True))


def _plain(paths: Any, shapes: Any) -> _Known:
    """Return paths and shapes as entries have them. Raises: ValueError, TypeError; also for keys other than strings and integers."""
    _require({list}, chain(paths, shapes))
    _require({int}, chain.from_iterable(shapes))
    _require({str, int}, chain.from_iterable(paths))
    if not all(paths):
        raise ValueError("no path")
    # A manifest of 10,000 tensors repeats a few shapes.
    wholes = {whole: read_shape(list(whole)) for whole in set(map(tuple, shapes))}
    return list(map(tuple, paths)), [wholes[tuple(shape)] for shape in shapes]


def _plain_entries(paths: Any, shapes: Any, names: Any, boxes: Any, texts: Any) -> tuple[Entry, ...]:
    """Do as `_entry` for all rows at once, which is several times as fast. Paths and shapes were checked.

    Raises: ValueError, TypeError, FormatError for whatever `_entry` refuses.
    """
    parts = [box for box in boxes if box is not None]
    corners = list(chain.from_iterable(parts))
    _require({list}, chain(parts, corners))
    _require({int}, chain.from_iterable(corners))
    if any(text is None and box is not None for text, box in zip(texts, boxes, strict=True)):
        raise ValueError("a box without an address")
    kinds = {name: dtype(name).name for name in set(names)}
    found = _boxes(boxes, shapes)
    return tuple(map(Entry._make, zip(paths, map(kinds.__getitem__, names), shapes, found, _addresses(texts), strict=True)))


def _boxes(boxes: Any, shapes: Sequence[tuple[int, ...]]) -> Iterator[Box | None]:
    """Yield boxes as entries have them, equal ones as one. Raises: ValueError, TypeError."""
    known: dict[Any, Box | None] = {}
    for box, shape in zip(boxes, shapes, strict=True):
        # No list of keys: what is gone before the cyclic collector comes costs it nothing.
        key = None if box is None else (*map(tuple, box), shape)
        if key not in known:
            known[key] = _box(box, shape)
        yield known[key]


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
