"""HyperConfig: a nested mapping of hyperparameters, read and written by item, dotted path or attribute.

Contract:

* Keys are strings; values are None, bool, int, float, str, bytes, lists and tuples of values, and mappings, which become HyperConfigs.
Subclasses of these and numpy scalars are stored as the plain Python value; everything else is refused when it is set, with its path.
Containers are copied in. * `c["a"]["b"]`, `c["a.b"]` and `c.a.b` are the same value. A key that holds a dot itself (only a mapping that
is converted can bring one) is found by its exact text, which goes before the path of that spelling. A key named like a method (`items`)
is reached by item only. * Equality is typed and by content: 1, 1.0 and True differ, NaN equals NaN, the order of keys does not count. So
two configurations are equal if and only if `diff` is empty, and then their hashes and fingerprints are equal. * `freeze()` is for good: a
commit names its configuration by value, and a later change would make it a lie. Lists read from a frozen one are copies. Only a frozen
configuration has a hash; it is the same in every process.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from blake3 import blake3

from syckpt.errors import StateError
from syckpt.objects.canonical import MAX_SAFE_INT, dumps

__all__ = ["ConfigDiff", "HyperConfig", "leaf_node"]

_MAX_DEPTH = 100
_SCALARS: tuple[type, ...] = (str, bytes, int, float)


@dataclasses.dataclass(frozen=True)
class ConfigDiff:
    """What leads from one configuration to another, by dotted path. True if there is anything; `str()` has a line for each."""

    added: dict[str, Any]
    removed: dict[str, Any]
    changed: dict[str, tuple[Any, Any]]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        lines = {path: f"+ {path}: {value!r}" for path, value in self.added.items()}
        lines |= {path: f"- {path}: {value!r}" for path, value in self.removed.items()}
        lines |= {path: f"~ {path}: {old!r} -> {new!r}" for path, (old, new) in self.changed.items()}
        return "\n".join(lines[path] for path in sorted(lines))


class HyperConfig(MutableMapping[str, Any]):
    """A nested mapping of hyperparameters; from a mapping, an `argparse.Namespace` or a dataclass instance."""

    __slots__ = ("_frozen", "_values")
    _frozen: bool
    _values: dict[str, Any]

    def __init__(self, source: object = None, /) -> None:
        object.__setattr__(self, "_frozen", False)
        object.__setattr__(self, "_values", {})
        if source is None:
            return
        mapping = _as_mapping(source)
        if mapping is None:
            raise StateError(
                f"a HyperConfig is made from a mapping, an argparse.Namespace or a dataclass instance, found {type(source).__name__}"
            )
        self._fill(mapping, ())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HyperConfig:
        """Return a configuration with these values; keys are taken literally."""
        return cls(values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested dicts, lists and tuples that share nothing with this."""
        return {key: _plain(value) for key, value in self._values.items()}

    def copy(self) -> HyperConfig:
        """Return a deep copy, which is not frozen."""
        return HyperConfig(self)

    def freeze(self) -> HyperConfig:
        """Refuse every later change, here and in all sections; return this."""
        for key, value in self._values.items():
            if isinstance(value, (list, tuple)):
                # Whoever read a list may have put anything into it since.
                self._values[key] = _checked(value, (key,))
        for section in _sections(list(self._values.values())):
            section.freeze()
        object.__setattr__(self, "_frozen", True)
        return self

    @property
    def frozen(self) -> bool:
        return self._frozen

    def flatten(self) -> dict[str, Any]:
        """Return `{"a.b": value}`; lists and tuples are values, and so are empty sections (as `{}`).

        If two paths have one dotted spelling, both are written as JSON lists of their keys instead.
        """
        leaves = dict(self._leaves(()))
        names = _names(leaves)
        return {names[path]: _plain(value) for path, value in leaves.items()}

    def diff(self, other: Mapping[str, Any]) -> ConfigDiff:
        """Return the changes that lead from this to another configuration."""
        ours = dict(self._leaves(()))
        theirs = dict(_as_config(other)._leaves(()))
        names = _names(ours | theirs)
        return ConfigDiff(
            added={names[path]: _plain(value) for path, value in theirs.items() if path not in ours},
            removed={names[path]: _plain(value) for path, value in ours.items() if path not in theirs},
            changed={
                names[path]: (_plain(value), _plain(theirs[path]))
                for path, value in ours.items()
                if path in theirs and _text(value) != _text(theirs[path])
            },
        )

    def hash(self) -> str:
        """Return a digest of the typed content, 32 hex digits: equal configurations have equal ones, in every process."""
        return blake3(b"syckpt config v1\n" + _text(self)).hexdigest()[:32]

    def __hash__(self) -> int:
        if not self._frozen:
            raise TypeError("a HyperConfig that may still change has no hash: freeze() it")
        return int(self.hash()[:15], 16)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        try:
            return _text(self) == _text(_as_config(other))
        except StateError:
            return False  # it holds what no configuration can

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def __getitem__(self, key: str) -> Any:
        found = self._find(key) if isinstance(key, str) else None
        if found is None:
            raise KeyError(key)
        section, name = found
        value = section._values[name]
        return _relisted(value) if section._frozen else value

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise _key_refusal(key, ())
        self._set(str.__str__(key), _checked(value, (key,)))

    def __delitem__(self, key: str) -> None:
        found = self._find(key) if isinstance(key, str) else None
        if found is None:
            raise KeyError(key)
        section, name = found
        section._refuse_if_frozen()
        del section._values[name]

    def __getattr__(self, name: str) -> Any:
        # Underscored names are Python's own protocols (copy, pickle), asked before there are any values.
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no hyperparameter {name!r}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_if_reserved(name)
        self._set(name, _checked(value, (name,)))

    def __delattr__(self, name: str) -> None:
        self._refuse_if_reserved(name)
        self._refuse_if_frozen()
        if name not in self._values:
            raise AttributeError(f"no hyperparameter {name!r}")
        del self._values[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return f"HyperConfig({self.to_dict()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.to_dict(), self._frozen)

    def _fill(self, mapping: Mapping[Any, Any], path: tuple[str, ...]) -> None:
        for key, value in mapping.items():
            if not isinstance(key, str):
                raise _key_refusal(key, path)
            self._values[str.__str__(key)] = _checked(value, (*path, key))

    def _find(self, key: str) -> tuple[HyperConfig, str] | None:
        """Return the section and the exact key that an item access means: the exact text first, then shorter heads."""
        if key in self._values:
            return self, key
        dot = key.find(".")
        while dot >= 0:
            inner = self._values.get(key[:dot])
            if isinstance(inner, HyperConfig) and (found := inner._find(key[dot + 1 :])) is not None:
                return found
            dot = key.find(".", dot + 1)
        return None

    def _set(self, path: str, value: Any) -> None:
        """Set what `path` finds, or else follow its dots, making the sections that are missing."""
        found = self._find(path)
        if found is None and "." in path:
            head, _, rest = path.partition(".")
            if not head or not rest:
                raise StateError(f"{path!r}: a dotted path has a name on both sides of a dot")
            inner = self._values.get(head)
            if head in self._values and not isinstance(inner, HyperConfig):
                raise StateError(f"{path!r}: {head!r} is a {type(inner).__name__}, not a section; delete it first, or use another name")
            section = HyperConfig() if inner is None else inner
            section._set(rest, value)
            if inner is None:
                self._refuse_if_frozen()
                self._values[head] = section
            return
        section, name = found or (self, path)
        section._refuse_if_frozen()
        section._values[name] = value

    def _leaves(self, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for key, value in self._values.items():
            if isinstance(value, HyperConfig) and value._values:
                yield from value._leaves((*path, key))
            else:
                yield (*path, key), value

    def _refuse_if_frozen(self) -> None:
        if self._frozen:
            raise StateError("this HyperConfig is frozen once saved: change a copy() of it")

    def _refuse_if_reserved(self, name: str) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise StateError(f"{name!r} is no hyperparameter by attribute: a HyperConfig has that itself; use config[{name!r}]")


def leaf_node(value: Any) -> Any:
    """Return the node (FORMAT.md, section 6) of a value that is no list, tuple or mapping."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, int) and abs(value) > MAX_SAFE_INT:
        return {"int": _decimal(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.urlsafe_b64encode(value).rstrip(b"=").decode("ascii")}
    return value


def _decimal(value: int) -> str:
    # Python refuses decimal conversions of very long integers; none of those is a hyperparameter.
    try:
        return str(value)
    except ValueError as exc:
        raise StateError(f"an integer of {value.bit_length()} bits: {exc}; store it as a string") from exc


def _text(value: Any) -> bytes:
    """Return canonical, typed text: equal for equal values only."""
    return dumps(_node(value))


def _node(value: Any) -> Any:
    if isinstance(value, HyperConfig):
        # Sorted, unlike a node of the format: the order of keys is no part of a configuration.
        return {"dict": [[key, _node(value._values[key])] for key in sorted(value._values)]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_node(item) for item in value]}
    if isinstance(value, dict):
        return _node(HyperConfig(value))  # put into a list after that was set
    return leaf_node(value)


def _as_mapping(source: object) -> Mapping[Any, Any] | None:
    if isinstance(source, HyperConfig):
        return source._values
    if isinstance(source, Mapping):
        return source
    if isinstance(source, argparse.Namespace):
        return vars(source)
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        return {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    return None


def _as_config(source: Mapping[str, Any]) -> HyperConfig:
    return source if isinstance(source, HyperConfig) else HyperConfig(source)


def _checked(value: Any, path: tuple[str, ...]) -> Any:
    """Return the value as it is stored: plain, validated, sharing no container with the caller."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) in _SCALARS:
        return value
    if len(path) > _MAX_DEPTH:
        raise StateError(f"{'.'.join(path[:4])}...: nested deeper than {_MAX_DEPTH}; does it hold itself?")
    if isinstance(value, (list, tuple)):
        items = [_checked(item, (*path, str(index))) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    mapping = _as_mapping(value)
    if mapping is not None:
        section = HyperConfig()
        section._fill(mapping, path)
        return section
    return _plain_scalar(value, path)


def _plain_scalar(value: Any, path: tuple[str, ...]) -> Any:
    # By name, so that a configuration without numpy scalars does not import numpy.
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        value = value.item()
        if value is None or isinstance(value, bool) or type(value) in _SCALARS:
            return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise _refusal(value, path)


def _key_refusal(key: object, path: tuple[str, ...]) -> StateError:
    where = f"{'.'.join(path)}: " if path else ""
    return StateError(f"{where}the keys of a HyperConfig are strings, found {key!r}: use {str(key)!r}")


def _refusal(value: Any, path: tuple[str, ...]) -> StateError:
    return StateError(
        f"{'.'.join(path)}: a {type(value).__name__} cannot be a hyperparameter; store what it says as a string, number, list or dict, "
        f"for example str(value)"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, HyperConfig):
        return value.to_dict()
    if isinstance(value, dict):
        return HyperConfig(value).to_dict()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value


def _relisted(value: Any) -> Any:
    """Return the value with new lists around the same sections."""
    if isinstance(value, list):
        return [_relisted(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_relisted(item) for item in value)
    return value


def _sections(values: list[Any]) -> Iterator[HyperConfig]:
    for value in values:
        if isinstance(value, HyperConfig):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _sections(list(value))


def _names(paths: Mapping[tuple[str, ...], Any]) -> dict[tuple[str, ...], str]:
    dotted = {path: ".".join(path) for path in paths}
    uses = Counter(dotted.values())
    return {path: name if uses[name] == 1 else dumps(list(path)).decode("ascii") for path, name in dotted.items()}


def _restored(values: dict[str, Any], frozen: bool) -> HyperConfig:
    config = HyperConfig(values)
    return config.freeze() if frozen else config
