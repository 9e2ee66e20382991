"""Formats: an item's value as a file of its own. What people see of it; how its tensors are stored does not depend on it.

A format says what it can carry, and that is looked at when the item is saved: no file turns out impossible years later. The four formats
here are known to syckpt, and items of theirs stay tensors and typed values inside. `SerializationFormat` is open: any subclass with a name
of its own works, its bytes are opaque, and only a caller who names that format again gets the value back.

Nothing here runs code of a checkpoint, but `unpickle`, and that only for a caller whose own spec says
`TorchSerialization(weights_only=False)`. torch is imported by the methods that need it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import json
import math
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from syckpt.errors import FormatError, IntegrityError, StateError
from syckpt.objects import nodes
from syckpt.objects.nodes import KeyPath, Node, format_path, split

__all__ = [
    "BYTES",
    "PICKLED",
    "JsonSerialization",
    "RawSerialization",
    "SafetensorsSerialization",
    "SerializationFormat",
    "TorchSerialization",
    "check_format",
    "configuration",
    "json_node",
    "json_text",
    "known_format",
    "pickled",
    "rebuild",
    "require_trust",
    "tensor_names",
    "unpickle",
]

BYTES = "raw"
"""Form of an encoded node that is its bytes."""
PICKLED = "pickle"
"""Form of an encoded node that only `TorchSerialization(weights_only=False)` reads."""

# Python's own limit is 4300 digits, of 3.3 bits each.
_JSON_BITS = 14_000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


class SerializationFormat(ABC):
    """How a value becomes a file. Subclass it for a format of your own: a `name`, `encode` and `decode`.

    `encode` is called once a save, on the caller's thread, and must neither change nor keep what it is given. Equal values should give
    equal bytes: then an unchanged item costs nothing.
    """

    name: str
    """What the format is called in commits; it is read back under that name."""

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """Return the value's file."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value of a file."""


@dataclass(frozen=True)
class TorchSerialization(SerializationFormat):
    """A file of `torch.save`.

    By default one that `torch.load(weights_only=True)` reads. In it, types that this does not know stand as their nearest plain ones (numpy
    arrays as tensors, namedtuples as tuples, dataclasses as dicts); loading the item itself gives back what was saved.
    `weights_only=False` also takes values that syckpt cannot carry: each is pickled, and unpickled only for a caller who says so again.
    """

    name: ClassVar[str] = "torch"  # type: ignore[misc]
    weights_only: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.weights_only, bool):
            raise StateError(f"TorchSerialization(weights_only={self.weights_only!r}): expected True or False")

    def encode(self, value: Any) -> bytes:
        """Return what `torch.save` writes. Raises: StateError for what it cannot write."""
        return pickled(value, ())

    def decode(self, data: bytes) -> Any:
        """Return the value, tensors on the CPU. Raises: IntegrityError."""
        import torch

        if not self.weights_only:
            return unpickle(data, self, ())
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as exc:
            raise IntegrityError(f"not a file that torch.load(weights_only=True) reads: {exc}") from exc


@dataclass(frozen=True)
class JsonSerialization(SerializationFormat):
    """JSON for people: sorted keys, indented. Takes what JSON can say and nothing else: None, booleans, finite numbers, texts, lists, dicts
    with texts as keys.

    With `cls` the value is one of that class (a dataclass, or an object that keeps its values in `__dict__`); a load whose spec names a
    class rebuilds that one, without calling its constructor. What class was saved is never looked up.
    """

    name: ClassVar[str] = "json"  # type: ignore[misc]
    cls: type | None = None

    def __post_init__(self) -> None:
        if self.cls is not None and not isinstance(self.cls, type):
            raise StateError(f"JsonSerialization(cls={self.cls!r}): expected a class or None")

    def encode(self, value: Any) -> bytes:
        """Return the text. Raises: StateError for what JSON cannot say, with its path."""
        return json_text(nodes.decode(json_node(self, value, ())))

    def decode(self, data: bytes) -> Any:
        """Return the value. Raises: IntegrityError for what is not JSON, StateError for what is not the class."""

        def refuse(text: str) -> Any:
            raise ValueError(f"{text} is no JSON")

        try:
            value = json.loads(data, parse_constant=refuse)
        except (ValueError, RecursionError) as exc:
            raise IntegrityError(f"not a JSON text: {exc}") from exc
        return rebuild(self, value, ())


@dataclass(frozen=True)
class RawSerialization(SerializationFormat):
    """The bytes themselves."""

    name: ClassVar[str] = BYTES  # type: ignore[misc]

    def encode(self, value: Any) -> bytes:
        """Return `value`. Raises: StateError unless it is bytes."""
        if type(value) is not bytes:
            raise StateError(f"RawSerialization takes bytes, not {type(value).__name__}: convert it, or use another format")
        return value

    def decode(self, data: bytes) -> bytes:
        """Return `data`."""
        return data


@dataclass(frozen=True)
class SafetensorsSerialization(SerializationFormat):
    """A safetensors file: tensors only. Nested dicts, lists and tuples stand as names joined by dots; loading the item gives them back.

    `metadata`: texts for the file's header.
    """

    name: ClassVar[str] = "safetensors"  # type: ignore[misc]
    metadata: Mapping[str, str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.metadata is None:
            return
        if not isinstance(self.metadata, Mapping) or not all(type(text) is str for pair in self.metadata.items() for text in pair):
            raise StateError(f"SafetensorsSerialization(metadata={self.metadata!r}): expected a mapping of texts to texts")
        object.__setattr__(self, "metadata", dict(self.metadata))

    def encode(self, value: Any) -> bytes:
        """Return the file of a tensor or of nested dicts and lists of tensors; of a DTensor this rank's part. Raises: StateError."""
        import torch
        from safetensors.torch import save

        found: list[torch.Tensor] = []

        def leaf(value: Any, path: KeyPath) -> Node | None:
            if not isinstance(value, torch.Tensor):
                return None
            live: Any = value
            found.append(live.to_local() if hasattr(live, "to_local") else live)
            return {"tensor": len(found) - 1}

        names = tensor_names(nodes.encode(value, leaf=leaf, path=("tensors",)), ("tensors",))
        # Copies: the library refuses views and ties.
        tensors = {name: found[index].detach().cpu().contiguous().clone() for name, index in names.items()}
        return bytes(save(tensors, metadata=None if self.metadata is None else dict(self.metadata)))

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the tensors by their joined names. Raises: IntegrityError; FormatError for a dtype that cannot be read here."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return dict(load(data))
        except SafetensorError as exc:
            raise IntegrityError(f"not a safetensors file: {exc}") from exc
        except KeyError as exc:  # a dtype of the format that the package has no torch dtype for
            raise FormatError(
                f"a safetensors file with {exc.args[0]}, which the package safetensors does not read for torch: upgrade it"
            ) from exc


_KNOWN: dict[str, type[SerializationFormat]] = {
    kind.name: kind for kind in (TorchSerialization, JsonSerialization, RawSerialization, SafetensorsSerialization)
}


def known_format(form: SerializationFormat | None) -> bool:
    """Whether a format is one of those that syckpt knows, so that its items stay tensors and values; a subclass of one is not."""
    return type(form) in _KNOWN.values()


def check_format(form: Any, *, where: str) -> None:
    """Check what a caller gives as a format. Raises: StateError."""
    if isinstance(form, type) or not all(callable(getattr(form, name, None)) for name in ("encode", "decode")):
        raise StateError(f"{where}: {form!r} is not a SerializationFormat such as TorchSerialization()")
    name = getattr(form, "name", None)
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise StateError(f"{where}: a format needs a name of letters, digits and . _ + -, set in its class; found {name!r}")
    if not known_format(form) and (name in _KNOWN or name == PICKLED):
        raise StateError(f"{where}: {type(form).__name__} calls itself {name!r}, as another format does: give it a name of its own")


def configuration(form: SerializationFormat) -> dict[str, Any]:
    """Return how a format was configured, for the commit: what its file is made by later."""
    if type(form) is TorchSerialization:
        return {} if form.weights_only else {"weights_only": False}
    if type(form) is JsonSerialization:
        return {} if form.cls is None else {"class": form.cls.__qualname__}
    if type(form) is SafetensorsSerialization:
        return {} if form.metadata is None else {"metadata": dict(form.metadata)}
    return {}


# --- torch -----------------------------------------------------------------------------------------------------------------------


def pickled(value: Any, path: KeyPath) -> bytes:
    """Return what `torch.save` writes of a value. Raises: StateError naming `path`."""
    import torch

    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as exc:
        raise StateError(f"{format_path(path) or 'the value'}: {type(value).__name__} cannot be pickled: {exc}") from exc
    return file.getvalue()


def require_trust(form: SerializationFormat | None, path: KeyPath) -> None:
    """Raises: StateError naming path and fix, unless the caller's own format is `TorchSerialization(weights_only=False)`."""
    if type(form) is not TorchSerialization or form.weights_only:
        item = str(path[0]) if path else "..."
        raise StateError(
            f"{format_path(path) or 'the value'}: was pickled, and unpickling runs code of the commit. If you trust it, say so in your own"
            f" config: items={{{item!r}: ItemSpec(layout=LayoutInfo(..., TorchSerialization(weights_only=False)))}}"
        )


def unpickle(data: bytes, form: SerializationFormat | None, path: KeyPath) -> Any:
    """Return a value that was pickled, for a caller who trusts the commit: its bytes say what code is run.

    `form` is the caller's own. Raises: StateError as `require_trust`, or if the value cannot be made here.
    """
    import torch

    require_trust(form, path)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as exc:
        raise StateError(f"{format_path(path) or 'the value'}: cannot be unpickled here: {exc}") from exc


# --- JSON ------------------------------------------------------------------------------------------------------------------------


def json_text(value: Any) -> bytes:
    """Return a value that JSON can say as its file."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def json_node(form: JsonSerialization, value: Any, path: KeyPath) -> Node:
    """Return the node of what a JSON file is to hold. Raises: StateError naming the path of what JSON cannot say, and the fix."""
    cls = form.cls
    if cls is None:
        _check_json(value, path)
        return nodes.encode(value, path=path)
    if not isinstance(value, cls):
        raise _no_json(path, f"JsonSerialization(cls={cls.__qualname__}) takes objects of that class, found {type(value).__name__}")
    if not _is_object(value):
        return json_node(JsonSerialization(), value, path)
    if type(value) is not cls:
        why = f"a load would make a {cls.__qualname__} of this {type(value).__qualname__}: name that class"
        raise _no_json(path, f"JsonSerialization(cls={cls.__qualname__}): {why}")
    return _object_node(value, path)


def _no_json(path: KeyPath, why: str) -> StateError:
    return StateError(f"{format_path(path) or 'the value'}: {why}")


def _check_json(value: Any, path: KeyPath, open_: frozenset[int] = frozenset()) -> None:
    kind = type(value)
    if kind is int and value.bit_length() > _JSON_BITS:
        raise _no_json(path, f"readers of JSON refuse an integer of {value.bit_length()} bits: store hex(...), or use TorchSerialization()")
    if kind in (type(None), bool, int, str) or (kind is float and math.isfinite(value)):
        return
    if kind is float:
        raise _no_json(path, f"JSON cannot say {value}: store None or a text, or use TorchSerialization()")
    if id(value) in open_ or len(path) > 200:
        raise _no_json(path, "contains itself, or is nested too deep for a file: flatten it")
    inside = open_ | {id(value)}
    if kind is list:
        for index, item in enumerate(value):
            _check_json(item, (*path, index), inside)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise _no_json(path, f"JSON's keys are texts, and {key!r} is not: use str(key), or TorchSerialization()")
            _check_json(item, (*path, key), inside)
    else:
        sequence = kind in (tuple, set, frozenset)
        fix = "list(...)" if sequence else "dict(...)" if isinstance(value, Mapping) else "a number, text, list or dict"
        raise _no_json(path, f"JSON cannot say a value of type {kind.__name__}: convert it to {fix}, or use TorchSerialization()")


def _is_object(value: Any) -> bool:
    if isinstance(value, dict | list | tuple | str | bytes | int | float | enum.Enum | type) or value is None:
        return False
    return dataclasses.is_dataclass(value) or hasattr(value, "__dict__")


def _fields(value: Any, path: KeyPath) -> dict[str, Any]:
    """Return what a load makes the object of. Raises: StateError if that would not be all of it."""
    kind = type(value)
    slots = [name for base in kind.__mro__ for name in _slots_of(base) if hasattr(value, name)]
    if dataclasses.is_dataclass(value):
        declared = [item.name for item in dataclasses.fields(value)]
        cached = [name for name in vars(kind) if isinstance(getattr(kind, name, None), functools.cached_property)]
        extra = [name for name in (*getattr(value, "__dict__", {}), *slots) if name not in declared and name not in cached]
        unset = [name for name in declared if not hasattr(value, name)]
        if extra or unset:
            what = f"attributes that are no fields: {', '.join(extra)}" if extra else f"fields without a value: {', '.join(unset)}"
            raise _no_json(path, f"this {kind.__qualname__} has {what}; a load could not bring it back")
        return {name: getattr(value, name) for name in declared}
    if slots:
        raise _no_json(path, f"this {kind.__qualname__} keeps {', '.join(slots)} in __slots__, which is not read: make it a dataclass")
    return dict(vars(value))


def _slots_of(kind: type) -> list[str]:
    """Return the names of a class's own slots, as it stores them."""
    return [name for name, member in vars(kind).items() if isinstance(member, types.MemberDescriptorType)]


def _object_node(value: Any, path: KeyPath) -> Node:
    """Return the node of an object's fields. One that is a dataclass must be declared as that: only the declaration leads back to it."""
    declared = _declared(type(value))
    pairs = []
    for name, item in _fields(value, path).items():
        below = (*path, name)
        if _is_object(item) and type(item) is declared.get(name):
            pairs.append([name, _object_node(item, below)])
        else:
            _check_json(item, below)
            pairs.append([name, nodes.encode(item, path=below)])
    return {"dataclass": [type(value).__name__, pairs]}


def _declared(cls: type) -> dict[str, type]:
    """Return the dataclasses that a class declares its fields to be (also where None is allowed)."""
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError):
        return {}  # Names that do not exist at run time.
    found: dict[str, type] = {}
    for name, hint in hints.items():
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        classes = [option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)]
        if len(classes) == 1:
            found[name] = classes[0]
    return found


def rebuild(form: SerializationFormat | None, value: Any, path: KeyPath) -> Any:
    """Return what was read as the class that the caller's `JsonSerialization(cls)` names; anything else as it is. Raises: StateError."""
    cls = form.cls if type(form) is JsonSerialization else None
    return value if cls is None else _rebuilt(cls, value, path)


def _rebuilt(cls: type, value: Any, path: KeyPath) -> Any:
    if isinstance(value, cls):
        return value
    saved = _fields(value, path) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    if not isinstance(saved, dict) or not all(isinstance(name, str) for name in saved):
        raise _no_json(path, f"a {type(value).__name__} was saved, from which no {cls.__qualname__} can be made")
    try:
        made = cls.__new__(cls)  # type: ignore[call-overload]
    except TypeError as exc:
        raise _no_json(path, f"{cls.__qualname__} cannot be made without arguments ({exc}): name a dataclass") from exc
    if not _is_object(made):
        raise _no_json(path, f"{cls.__qualname__} is no class of plain attributes: name a dataclass")
    declared = _declared(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else None
    problems = [] if fields is None else [f"{name} is not a field of it" for name in saved if name not in fields]
    for name, item in (fields or {}).items():
        if name in saved:
            continue
        if item.default is not dataclasses.MISSING:
            saved = {**saved, name: item.default}
        elif item.default_factory is not dataclasses.MISSING:
            saved = {**saved, name: item.default_factory()}
        else:
            problems.append(f"{name} was not saved")
    if problems:
        raise _no_json(path, f"does not fit {cls.__qualname__}: {'; '.join(problems)}")
    for name, item in saved.items():
        inner = declared.get(name)
        made_of = _rebuilt(inner, item, (*path, name)) if inner is not None and isinstance(item, dict) else item
        if fields is None:
            # Where it was read from: a name that the commit chose reaches no property, and no `__class__`.
            vars(made)[name] = made_of
        else:
            # Frozen dataclasses refuse their own setattr.
            object.__setattr__(made, name, made_of)
    return made


# --- safetensors -----------------------------------------------------------------------------------------------------------------


def tensor_names(node: Node, path: KeyPath) -> dict[str, int]:
    """Return the entries of nested dicts, lists and tuples of tensors by their joined names; the tensor of an item that is one has the
    item's name.

    Raises: StateError naming the path of what is no tensor, and both paths of two that have one name.
    """
    names: dict[str, int] = {}
    paths: dict[str, KeyPath] = {}
    for below, leaf in _tensors(node, path):
        keys = below[1:] or below
        if not all(isinstance(key, str | int) for key in keys):
            raise StateError(f"{format_path(below)}: names in a safetensors file are texts: use texts or integers as keys")
        name = ".".join(map(str, keys))
        if name in names:
            raise StateError(f"{format_path(paths[name])} and {format_path(below)} are both {name!r} in a safetensors file: rename one")
        if name == "__metadata__":
            raise StateError(f"{format_path(below)}: this name is taken by the safetensors format: rename it")
        names[name], paths[name] = leaf, below
    return names


def _tensors(node: Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    kind, payload = split(node)
    if kind == "tensor":
        yield path, payload
        return
    if kind not in ("dict", "ordereddict", "list", "tuple"):
        found = kind or type(payload).__name__
        raise StateError(
            f"{format_path(path)}: a safetensors file holds tensors only, found {found}: convert it to a tensor, leave it out, or use"
            " TorchSerialization() or no layout"
        )
    for key, child in nodes.children(node) or ():
        yield from _tensors(child, (*path, key))
