"""Nodes: Python values as JSON, faithful to type (FORMAT.md, section 6). Pure Python; no torch, no numpy.

`decode(encode(v))` is `v`, types and bits included (NaN payloads, -0.0, lone surrogates, order of keys), except for what no
file should bring back: a namedtuple decodes as a tuple, a dataclass as a dict, an enum member as its value, a defaultdict without
its factory (`plainer` finds these); any other mapping than a dict as a dict. Two names of one list become two lists.
Whatever cannot be carried is a StateError that names its path; nothing is dropped or guessed.

Tensors and their like are the business of hooks. `leaf(value, path)` of `encode` returns their node, or None for what it does not
know; `otherwise(value, path)` is asked for what would be refused (not for cycles and depth). `leaf(kind, payload)` of `decode` returns
the value of the kinds in `FOREIGN_KINDS`; without it they become `Opaque`.
`decode` trusts nothing: a malformed node is an IntegrityError, whatever is wrong with it. What takes nodes apart without decoding them
(`split`, `children`, `walk`, `plainer`) trusts their form, which `check` looks at once, when a document is read.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from typing import Any

from syckpt.errors import IntegrityError, StateError
from syckpt.objects import address, canonical
from syckpt.objects.entries import ENTRY_AT

__all__ = [
    "FOREIGN_KINDS",
    "MAPPING_KINDS",
    "KeyPath",
    "Node",
    "Opaque",
    "PER_RANK",
    "PerRank",
    "check",
    "children",
    "decode",
    "encode",
    "format_path",
    "node_key",
    "path_key",
    "plainer",
    "plainer_type",
    "split",
    "walk",
]

Node = Any
"""A JSON value of the forms in FORMAT.md, section 6."""
PathKey = str | int | dict[str, str]
KeyPath = tuple[PathKey, ...]
EncodeLeaf = Callable[[Any, KeyPath], Node | None]
DecodeLeaf = Callable[[str, Any], Any]

FOREIGN_KINDS = frozenset({"tensor", "ndarray", "npscalar", "size", "dtype", "device", "generator", "encoded"})
MAPPING_KINDS = frozenset({"dict", "ordereddict", "defaultdict", "counter"})
PER_RANK = "perrank"
"""The kind of a value that ranks saved differently, `[[rank, node], ...]`: made when several ranks are read as one, never stored."""
_REFERENCE_KINDS = frozenset({*ENTRY_AT, "generator"})

_PLAINER = {
    "namedtuple": "namedtuple {}, read as a tuple",
    "dataclass": "dataclass {}, read as a dict",
    "enum": "member of the enum {}, read as its value",
    "defaultdict": "defaultdict, read without its factory",
}

_MAX_DEPTH = 200
_STATE_DEPTH = 8  # of a generator, which is a leaf for whoever saves it
# A reader refuses JSON nested deeper than 512 (FORMAT.md, section 3); a level of a dict takes three brackets. The rest is for
# the document around the node and for what a hook makes of a leaf.
_MAX_NESTING = 480

_FIX = "register an object with state_dict/load_state_dict, or convert it to numbers, strings, lists, dicts, arrays or tensors"


@dataclasses.dataclass(frozen=True, repr=False)
class Opaque:
    """Stands for a value of a kind that the decoder was given no hook for."""

    kind: str
    payload: Any

    def __repr__(self) -> str:
        return f"<{self.kind} {self.payload}>"

    def __hash__(self) -> int:
        # Payloads are JSON lists; a dict may have dtypes or numpy scalars as keys.
        return hash((self.kind, repr(self.payload)))


# --- paths ---------------------------------------------------------------------------------------------------------------------

_PLAIN = re.compile(r"[\w.:+-]+")
_DIGITS = re.compile(r"-?[0-9]+")


def node_key(node: Node) -> PathKey:
    """Return the path key of a key's node."""
    if type(node) in (str, int):
        return node  # type: ignore[no-any-return]
    return {"key": canonical.dumps(node).decode("ascii")}


def path_key(value: Any, *, leaf: EncodeLeaf | None = None) -> PathKey:
    """Return the path key of a dict's key or a sequence's index. Raises: StateError for a key that nodes cannot carry."""
    return node_key(encode(value, leaf=leaf))


def _format_key(key: PathKey) -> str:
    if isinstance(key, dict):
        return f"({key['key']})"
    if isinstance(key, int):
        return str(key)
    if _PLAIN.fullmatch(key) and not _DIGITS.fullmatch(key):
        return key
    return json.dumps(key)


def format_path(path: KeyPath) -> str:
    """Return a path as text: keys joined by `/`, as in `model/net.0.weight` and `optimizer/state/0/exp_avg`.

    Distinct paths have distinct texts: an integer stands bare, a string that could be mistaken for something else is quoted as
    JSON (`"0"`, `"a/b"`, `""`), any other key is the text of its node in parentheses (`(null)`, `({"tuple":[1,2]})`).
    """
    return "/".join(_format_key(key) for key in path)


# --- encoding ------------------------------------------------------------------------------------------------------------------

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def _text(value: str) -> Node:
    # JSON would read a high and a low surrogate that stand side by side as one character.
    return {"str": address.to_text(value.encode("utf-8", "surrogatepass"))} if _PAIR.search(value) else value


_MAX_DIGITS = 10_000  # converting them takes time that grows with the square of their number


def _integer(value: int) -> Node:
    if abs(value).bit_length() > 3 * _MAX_DIGITS:  # a digit has 3.3 bits
        raise StateError(f"an integer of {value.bit_length()} bits cannot be carried, at most {3 * _MAX_DIGITS}; store its bytes")
    # By way of Decimal: int's own conversion refuses more than 4300 digits.
    return value if -canonical.MAX_SAFE_INT <= value <= canonical.MAX_SAFE_INT else {"int": format(Decimal(value), "f")}


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float(value: float) -> Node:
    return value if math.isfinite(value) else {"float": _bits(value)}


_ATOMS: dict[type, Callable[[Any], Node]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: _text,
    int: _integer,
    float: _float,
    complex: lambda value: {"complex": [_bits(value.real), _bits(value.imag)]},
    bytes: lambda value: {"bytes": address.to_text(value)},
    bytearray: lambda value: {"bytearray": address.to_text(value)},
    range: lambda value: {"range": [_integer(value.start), _integer(value.stop), _integer(value.step)]},
    PosixPath: lambda value: {"path": _text(str(value))},
    PurePosixPath: lambda value: {"purepath": _text(str(value))},
}

_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordereddict", defaultdict: "defaultdict", Counter: "counter"}
_CONTAINERS = frozenset({*_SEQUENCES, *_SETS, *_MAPPINGS, deque, slice})


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refusal(path: KeyPath, why: str) -> StateError:
    return StateError(f"{format_path(path) or 'the value'}: {why}")


def _dataclass_fields(value: Any, path: KeyPath) -> list[tuple[str, Any]]:
    names = [field.name for field in dataclasses.fields(value)]
    extra = [
        name
        for name in getattr(value, "__dict__", {})
        if name not in names and not isinstance(getattr(type(value), name, None), cached_property)
    ]
    if extra:
        raise _refusal(path, f"the dataclass {_type_name(value)} has attributes that are no fields: {', '.join(extra)}; {_FIX}")
    unset = [name for name in names if not hasattr(value, name)]
    if unset:
        raise _refusal(path, f"the dataclass {_type_name(value)} has fields without a value: {', '.join(unset)}; set them")
    return [(name, getattr(value, name)) for name in names]


_MOST_ALIKE = 100


def _are_too_alike(keys: Iterable[Any]) -> bool:
    """Whether so many have one hash that a dict or set of them would take quadratic time: by chance, a few have. Raises: TypeError."""
    return max(Counter(map(hash, keys)).values(), default=0) > _MOST_ALIKE


class _Encoder:
    """One run of `encode`. `depth` counts values, `nesting` JSON brackets; `_open` holds the containers above."""

    def __init__(self, leaf: EncodeLeaf | None, otherwise: EncodeLeaf | None) -> None:
        self._leaf = leaf
        self._otherwise = otherwise
        self._open: set[int] = set()

    def node(self, value: Any, path: KeyPath, depth: int = 0, nesting: int = 0) -> Node:
        atom = _ATOMS.get(type(value))
        if atom is not None:
            try:
                return atom(value)
            except StateError as exc:
                raise _refusal(path, str(exc)) from None
        if self._leaf is not None and type(value) not in _CONTAINERS:
            node = self._leaf(value, path)
            if node is not None:
                return node
        if id(value) in self._open:
            raise _refusal(path, f"a {_type_name(value)} that contains itself cannot be carried; break the cycle")
        if depth >= _MAX_DEPTH or nesting > _MAX_NESTING:
            raise _refusal(path, f"nested {depth} deep, more than a manifest can carry; flatten it")
        self._open.add(id(value))
        try:
            return self._container(value, path, depth + 1, nesting)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: KeyPath, depth: int, nesting: int) -> Node:
        kind = type(value)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(value, path, depth, nesting + 2)}
        if kind in _MAPPINGS:
            return {_MAPPINGS[kind]: self._pairs(value, path, depth, nesting + 3)}
        if kind in _SETS:
            members = [self._member(item, path, depth, nesting + 2) for item in value]
            self._check_members(value, members, path)
            return {_SETS[kind]: sorted(members, key=canonical.dumps)}
        if kind is deque:
            maxlen = None if value.maxlen is None else _integer(value.maxlen)
            return {"deque": [maxlen, self._items(value, path, depth, nesting + 3)]}
        if kind is slice:
            return {"slice": [self._member(part, path, depth, nesting + 2) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, enum.Enum):
            return {"enum": [kind.__name__, value.name, self._member(value.value, path, depth, nesting + 2)]}
        fields = getattr(value, "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            if getattr(value, "__dict__", None):
                extra = ", ".join(vars(value))
                text = f"the namedtuple {_type_name(value)} has attributes that are no fields: {extra}; {_FIX}"
                return self._other(value, path, _refusal(path, text))
            return {"namedtuple": [kind.__name__, self._fields(zip(fields, value, strict=True), path, depth, nesting + 4)]}
        if isinstance(value, bool | int | float | complex | str | bytes | bytearray | list | tuple | set | frozenset | dict | deque):
            base = next(base for base in kind.__mro__ if base in _ATOMS or base in _CONTAINERS)
            fix = f"convert it with {base.__name__}(...)" if base in _ATOMS or base in _SEQUENCES or base is dict else _FIX
            why = _refusal(path, f"{_type_name(value)} is a subclass of {base.__name__} that a load could not bring back; {fix}")
            return self._other(value, path, why)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            try:
                named = _dataclass_fields(value, path)
            except StateError as exc:
                return self._other(value, path, exc)
            return {"dataclass": [kind.__name__, self._fields(named, path, depth, nesting + 4)]}
        if isinstance(value, Mapping):
            return {"dict": self._pairs(value, path, depth, nesting + 3)}
        return self._other(value, path, _refusal(path, f"a value of type {_type_name(value)} cannot be carried; {_FIX}"))

    def _other(self, value: Any, path: KeyPath, why: StateError) -> Node:
        """Ask the hook for what is refused otherwise."""
        node = None if self._otherwise is None else self._otherwise(value, path)
        if node is None:
            raise why
        return node

    def _items(self, values: Collection[Any], path: KeyPath, depth: int, nesting: int) -> list[Node]:
        nodes = []
        for index, item in enumerate(values):
            nodes.append(self.node(item, (*path, index), depth, nesting))
        return nodes

    def _fields(self, fields: Iterable[tuple[str, Any]], path: KeyPath, depth: int, nesting: int) -> list[Node]:
        nodes = []
        for name, item in fields:
            nodes.append([name, self.node(item, (*path, name), depth, nesting)])
        return nodes

    def _pairs(self, mapping: Mapping[Any, Any], path: KeyPath, depth: int, nesting: int) -> list[Node]:
        pairs = []
        for key, item in mapping.items():
            key_node = self._member(key, path, depth, nesting)
            pairs.append([key_node, self.node(item, (*path, node_key(key_node)), depth, nesting)])
        self._check_members(mapping, [pair[0] for pair in pairs], path)
        return pairs

    def _member(self, value: Any, path: KeyPath, depth: int, nesting: int) -> Node:
        """Encode a key, a member of a set, or another value that must be complete without tensors."""
        node = self.node(value, path, depth, nesting)
        if isinstance(node, dict) and any(split(leaf)[0] in _REFERENCE_KINDS for _, leaf in walk(node)):
            raise _refusal(path, f"a {_type_name(value)} cannot be a key, a member of a set or of an enum; hold it in a list or a dict")
        return node

    def _check_members(self, values: Collection[Any], nodes: list[Node], path: KeyPath) -> None:
        # An enum member decodes as its value, a dataclass as a dict: they must still be hashable and distinct then.
        if not any(isinstance(node, dict) for node in nodes):
            return
        try:
            decoded = [decode(node) for node in nodes]
            distinct = not _are_too_alike(decoded) and len(set(decoded)) == len(nodes)
        except TypeError:
            distinct = False
        if not distinct:
            raise _refusal(path, f"some keys or members of this {_type_name(values)} are told apart by their class only; use plain ones")


def encode(value: Any, *, leaf: EncodeLeaf | None = None, otherwise: EncodeLeaf | None = None, path: KeyPath = ()) -> Node:
    """Return the node of a value; `path` is where it stands, for errors and for the hooks.

    Raises: StateError for a cycle, more than 200 levels, and whatever nodes cannot carry.
    """
    try:
        return _Encoder(leaf, otherwise).node(value, path)
    except RecursionError as exc:
        raise _refusal(path, "nested deeper than Python's stack allows here; flatten it") from exc


# --- taking nodes apart ----------------------------------------------------------------------------------------------------------


def split(node: Node) -> tuple[str, Any]:
    """Return a node's kind and payload; the kind is "" for what stands for itself."""
    if isinstance(node, dict):
        return next(iter(node.items()))
    return "", node


def children(node: Node) -> list[tuple[PathKey, Node]] | None:
    """Return the nodes one step below a container, with their path keys; None for a leaf.

    Members of sets, parts of slices and the state of generators are inside a leaf. The node must be well formed.
    """
    kind, payload = split(node)
    if kind in ("list", "tuple"):
        return list(enumerate(payload))
    if kind == "deque":
        return list(enumerate(payload[1]))
    if kind in MAPPING_KINDS:
        return [(node_key(key), child) for key, child in payload]
    if kind in ("namedtuple", "dataclass"):
        return [(name, child) for name, child in payload[1]]
    if kind == PER_RANK:
        return [(rank, child) for rank, child in payload]
    return None


def walk(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield every leaf with its path, in order; an empty container counts as one. The node must be well formed."""
    below = children(node)
    if not below:
        yield path, node
        return
    for key, child in below:
        yield from walk(child, (*path, key))


def plainer_type(node: Node) -> str | None:
    """Return what a node holds that `decode` brings back as a plainer value, values inside of it aside; None where it does not."""
    kind, payload = split(node)
    return _PLAINER[kind].format(payload[0] if kind != "defaultdict" else "") if kind in _PLAINER else None


def plainer(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield path and description of each value that `decode` brings back as a plainer one. The node must be well formed."""
    kind, payload = split(node)
    what = plainer_type(node)
    if what is not None:
        yield path, what
    if kind in MAPPING_KINDS:
        for key, child in payload:
            yield from plainer(key, path)
            yield from plainer(child, (*path, node_key(key)))
        return
    # These are inside of a leaf.
    inside = payload if kind in ("set", "frozenset", "slice") else [payload[2]] if kind == "enum" else []
    for member in inside:
        yield from plainer(member, path)
    for key, child in children(node) or ():
        yield from plainer(child, (*path, key))


# --- decoding ------------------------------------------------------------------------------------------------------------------


def _malformed(kind: str, payload: Any) -> IntegrityError:
    text = repr(payload)
    return IntegrityError(f"malformed node {kind or 'value'}: {text[:80]}{'...' if len(text) > 80 else ''}")


def _bytes(payload: Any, kind: str) -> bytes:
    try:
        data = address.from_text(payload)
    except (ValueError, TypeError) as exc:
        raise _malformed(kind, payload) from exc
    if address.to_text(data) != payload:
        raise _malformed(kind, payload)
    return data


def _from_bits(payload: Any, kind: str) -> float:
    if not isinstance(payload, str) or not re.fullmatch("[0-9a-f]{16}", payload):
        raise _malformed(kind, payload)
    return float(struct.unpack(">d", bytes.fromhex(payload))[0])


def _list_of(payload: Any, kind: str, length: int | None = None) -> list[Any]:
    if type(payload) is not list or (length is not None and len(payload) != length):
        raise _malformed(kind, payload)
    return payload


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


class PerRank(dict[int, Any]):
    """A value that ranks saved differently: `{rank: value}`."""


class _Decoder:
    """One run of `decode`. `_depth` counts nodes above; `_inside`, those of them that have to be complete without tensors."""

    def __init__(self, leaf: DecodeLeaf | None) -> None:
        self._leaf = leaf
        self._depth = 0
        self._inside = 0

    def value(self, node: Node) -> Any:
        kind = type(node)
        if node is None or kind is bool or kind is str:
            return node
        if kind is int and -canonical.MAX_SAFE_INT <= node <= canonical.MAX_SAFE_INT:
            return node
        if kind is float and math.isfinite(node):
            return node
        if kind is not dict or len(node) != 1:
            raise _malformed("", node)
        name, payload = next(iter(node.items()))
        if self._depth > _MAX_DEPTH + _STATE_DEPTH:
            raise IntegrityError(f"malformed node {name}: nested deeper than {_MAX_DEPTH}")
        decoder = _DECODERS.get(name)
        if decoder is not None:
            self._depth += 1
            value = decoder(self, payload)
            self._depth -= 1
            return value
        if name not in FOREIGN_KINDS:
            raise IntegrityError(f"unknown node {str(name)[:40]!r}")
        if not _FOREIGN_CHECKS[name](payload):
            raise _malformed(name, payload)
        if self._inside and name in _REFERENCE_KINDS:
            raise IntegrityError(f"malformed node {name}: in a key, a member of a set, a part of a slice or an enum")
        return self.foreign(name, payload)

    def foreign(self, kind: str, payload: Any) -> Any:
        if kind == "generator":
            _Decoder(None).value(payload[1])
        return Opaque(kind, payload) if self._leaf is None else self._leaf(kind, payload)

    def complete(self, node: Node) -> Any:
        """Do as `value` for what holds no tensors: a key, a member of a set, a part of a slice, the value of an enum member."""
        self._inside += 1
        value = self.value(node)
        self._inside -= 1
        return value

    def items(self, payload: Any, kind: str) -> list[Any]:
        values = []
        for node in _list_of(payload, kind):
            values.append(self.value(node))
        return values

    def members(self, payload: Any, kind: str) -> frozenset[Any]:
        try:
            values = [self.complete(node) for node in _list_of(payload, kind)]
            if _are_too_alike(values):
                raise _malformed(kind, payload)
            found = frozenset(values)
        except TypeError as exc:
            raise _malformed(kind, payload) from exc
        if len(found) != len(payload):
            raise _malformed(kind, payload)
        return found

    def pairs(self, payload: Any, kind: str) -> dict[Any, Any]:
        keys, values = [], []
        for pair in _list_of(payload, kind):
            key_node, node = _list_of(pair, kind, 2)
            keys.append(key_node if type(key_node) is str else self.complete(key_node))
            values.append(self.value(node))
        try:
            if _are_too_alike(keys):
                raise _malformed(kind, payload)
            found = dict(zip(keys, values, strict=True))
        except TypeError as exc:
            raise _malformed(kind, payload) from exc
        if len(found) != len(payload):
            raise _malformed(kind, payload)
        return found

    def fields(self, payload: Any, kind: str) -> dict[str, Any]:
        name, fields = _list_of(payload, kind, 2)
        found = self.pairs(fields, kind)
        if type(name) is not str or any(type(field) is not str for field in found):
            raise _malformed(kind, payload)
        return found

    def decode_text(self, payload: Any) -> str:
        try:
            value = _bytes(payload, "str").decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as exc:
            raise _malformed("str", payload) from exc
        if _text(value) != {"str": payload}:
            raise _malformed("str", payload)
        return value

    def decode_integer(self, payload: Any) -> int:
        if type(payload) is not str or len(payload) > _MAX_DIGITS or not re.fullmatch("-?[1-9][0-9]{15,}", payload):
            raise _malformed("int", payload)
        value = int(Decimal(payload))
        if abs(value) <= canonical.MAX_SAFE_INT:
            raise _malformed("int", payload)
        return value

    def decode_float(self, payload: Any) -> float:
        value = _from_bits(payload, "float")
        if math.isfinite(value):
            raise _malformed("float", payload)
        return value

    def decode_complex(self, payload: Any) -> complex:
        real, imag = _list_of(payload, "complex", 2)
        return complex(_from_bits(real, "complex"), _from_bits(imag, "complex"))

    def decode_deque(self, payload: Any) -> deque[Any]:
        maxlen_node, items = _list_of(payload, "deque", 2)
        maxlen = self.value(maxlen_node)
        values = self.items(items, "deque")
        if maxlen is not None and not (type(maxlen) is int and len(values) <= maxlen <= sys.maxsize):
            raise _malformed("deque", payload)
        return deque(values, maxlen)

    def decode_counter(self, payload: Any) -> Counter[Any]:
        found: Counter[Any] = Counter()
        # Not Counter(mapping): it is a count of whatever values there were, also other than integers.
        dict.update(found, self.pairs(payload, "counter"))
        return found

    def decode_enum(self, payload: Any) -> Any:
        name, member, node = _list_of(payload, "enum", 3)
        if type(name) is not str or not (member is None or type(member) is str):
            raise _malformed("enum", payload)
        return self.complete(node)

    def decode_range(self, payload: Any) -> range:
        start, stop, step = (self.value(node) for node in _list_of(payload, "range", 3))
        if not (type(start) is type(stop) is type(step) is int) or step == 0:
            raise _malformed("range", payload)
        return range(start, stop, step)

    def decode_slice(self, payload: Any) -> slice:
        start, stop, step = (self.complete(node) for node in _list_of(payload, "slice", 3))
        return slice(start, stop, step)

    def decode_per_rank(self, payload: Any) -> PerRank:
        found = self.pairs(payload, PER_RANK)
        if not all(map(_is_index, found)):
            raise _malformed(PER_RANK, payload)
        return PerRank(found)

    def decode_path(self, payload: Any, kind: type[PurePath]) -> PurePath:
        text = self.value(payload)
        if type(text) is not str:
            raise _malformed("path", payload)
        return kind(text)


# Partial functions rather than lambdas: a frame less a level leaves more of the stack to the caller.
_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    PER_RANK: lambda decoder, payload: decoder.decode_per_rank(payload),
    "str": _Decoder.decode_text,
    "int": _Decoder.decode_integer,
    "float": _Decoder.decode_float,
    "complex": _Decoder.decode_complex,
    "bytes": lambda _, payload: _bytes(payload, "bytes"),
    "bytearray": lambda _, payload: bytearray(_bytes(payload, "bytearray")),
    "list": partial(_Decoder.items, kind="list"),
    "tuple": lambda decoder, payload: tuple(decoder.items(payload, "tuple")),
    "set": lambda decoder, payload: set(decoder.members(payload, "set")),
    "frozenset": partial(_Decoder.members, kind="frozenset"),
    "deque": _Decoder.decode_deque,
    "dict": partial(_Decoder.pairs, kind="dict"),
    "ordereddict": lambda decoder, payload: OrderedDict(decoder.pairs(payload, "ordereddict")),
    "defaultdict": lambda decoder, payload: defaultdict(None, decoder.pairs(payload, "defaultdict")),
    "counter": _Decoder.decode_counter,
    "namedtuple": lambda decoder, payload: tuple(decoder.fields(payload, "namedtuple").values()),
    "dataclass": partial(_Decoder.fields, kind="dataclass"),
    "enum": _Decoder.decode_enum,
    "range": _Decoder.decode_range,
    "slice": _Decoder.decode_slice,
    "path": partial(_Decoder.decode_path, kind=Path),
    "purepath": partial(_Decoder.decode_path, kind=PurePosixPath),
}


def _is_list(payload: Any, *checks: Callable[[Any], bool]) -> bool:
    return type(payload) is list and len(payload) == len(checks) and all(check(item) for check, item in zip(checks, payload, strict=True))


def _is_str(value: Any) -> bool:
    return type(value) is str


def _is_descr(value: Any) -> bool:
    return type(value) in (str, list)


_FOREIGN_CHECKS: dict[str, Callable[[Any], bool]] = {
    "tensor": _is_index,
    "ndarray": lambda payload: _is_list(payload, _is_index, _is_descr, lambda order: order in ("C", "F")),
    "npscalar": lambda payload: _is_list(payload, _is_descr, _is_str),
    "size": lambda payload: type(payload) is list and all(map(_is_index, payload)),
    "dtype": _is_str,
    "device": _is_str,
    "generator": lambda payload: _is_list(payload, _is_str, lambda node: True),
    "encoded": lambda payload: _is_list(payload, _is_str, _is_index),
}


def decode(node: Node, *, leaf: DecodeLeaf | None = None) -> Any:
    """Return the value of a node. Raises: IntegrityError for a malformed one (and whatever `leaf` raises)."""
    return _run(_Decoder(leaf), node)


class _Checker(_Decoder):
    """Decodes what one rank stored, for its form alone: torch and numpy have a say only when the value is made."""

    def __init__(self, entries: int) -> None:
        super().__init__(None)
        self._entries = entries

    def foreign(self, kind: str, payload: Any) -> Any:
        if kind in ENTRY_AT:
            at = ENTRY_AT[kind]
            index = payload if at is None else payload[at]
            if index >= self._entries:
                raise IntegrityError(f"malformed node {kind}: names entry {index} of {self._entries}")
            return None
        if kind == "generator":
            self._depth += 1
            self.value(payload[1])
            self._depth -= 1
        return Opaque(kind, payload)

    def decode_per_rank(self, payload: Any) -> PerRank:
        raise IntegrityError(f"malformed node {PER_RANK}: values of several ranks, where those of one are stored")


def check(node: Node, *, entries: int) -> None:
    """Check the form of a node that one rank stored, `entries` being how many entries nodes may name. Raises: IntegrityError."""
    _run(_Checker(entries), node)


def _run(decoder: _Decoder, node: Node) -> Any:
    try:
        return decoder.value(node)
    except RecursionError as exc:
        raise IntegrityError("malformed node: nested too deep") from exc
