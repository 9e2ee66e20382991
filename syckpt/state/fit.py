"""Fitting what was saved to what is live, as a plan: nothing is touched until everything is known to fit.

`fit` compares a saved node with a live template and returns which entry fills which live tensor, which entries are needed as new
tensors, what does not fit, and how to build the result. It reads no bytes and changes nothing.

* A tensor fills a tensor of the same shape and dtype, an array an array; with `cast`, another dtype of no lesser kind. Never
  broadcast, never truncated. What does not fit is listed, and the template's value stands in its place in the result.
* Mappings are compared key by typed key (1 is not True and not "1"), dataclasses and namedtuples by field. A key of the template
  that was not saved is missing, a saved one that the template lacks is unexpected.
* Sequences with tensors on either side must be of one length. Values without tensors are those of the commit.
* None or another plain value in the template asks for nothing: what was saved there is taken as new.
* Optimizer state (a mapping with "state" and "param_groups") comes and goes: whatever these hold that the template lacks is taken as
  new (a scheduler adds hyper-parameters), and a parameter without saved state has none afterwards.
* Namedtuples, dataclasses, enum members, factories of defaultdicts and the `_metadata` of state dicts are the template's. Where the
  template shows no such type, a plainer value is read, and told.
* Keys of a state dict that differ by what wrappers insert (`_orig_mod.`, `module.`) are one where nothing else could be meant, and told.
* A module's `_extra_state` is taken as it was saved.
* `as_saved`: the template shows types, and the layouts of DTensors, and nothing else. Values, keys, lengths and ties are the commit's,
  tensors new.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from syckpt.errors import IntegrityError
from syckpt.objects import canonical, nodes
from syckpt.objects.nodes import KeyPath, Node, format_path, split
from syckpt.state.bits import can_cast
from syckpt.state.flatten import dtype_name, numpy_dtype, plain_leaf, refuse_tensor, stored_array, tie_key, torch_name, unflatten
from syckpt.state.shards import as_dtensor, is_dtensor
from syckpt.state.wrappers import match

__all__ = ["Fitted", "Options", "fit", "kept", "matching"]

Take = Callable[[int], torch.Tensor]
Maker = Callable[[Take], Any]


@dataclass(frozen=True)
class Options:
    """`select` tells by a leaf's path text whether it is wanted at all; what is not keeps the template's value, without a problem.
    `encoded(form, data)` reads what a format made bytes of."""

    cast: bool = False
    select: Callable[[str], bool] | None = None
    as_saved: bool = False
    encoded: Callable[[str, bytes], Any] | None = None


@dataclass(frozen=True, eq=False)
class Fitted:
    """A plan. Copy every entry of `fills` into its tensor under `torch.no_grad()`, then `build` with those of `fresh`.

    `missing` and `unexpected` are path texts, `mismatched` and `cast` sentences that begin with one. `plainer` lists path texts by what
    stood there and is read as a plainer value; `renamed` the names of the target and of the commit that differ by wrappers, as pairs.
    """

    fills: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    plainer: dict[str, list[str]] = field(default_factory=dict)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    _make: list[Maker] = field(default_factory=list)
    _filled: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """Everything that a strict load refuses, a sentence each."""
        missing = [f"{path}: in the target, not in the commit" for path in self.missing]
        unexpected = [f"{path}: in the commit, not in the target" for path in self.unexpected]
        return missing + unexpected + self.mismatched

    def build(self, tensor: Take) -> Any:
        """Return the result: live objects where they were filled, the commit's values elsewhere.

        `tensor(i)` is asked once for each entry of `fresh`; an entry tied to a filled one is the live tensor.
        """
        found: dict[int, torch.Tensor] = dict(self._filled)

        def take(index: int) -> torch.Tensor:
            if index not in found:
                found[index] = tensor(index)
            return found[index]

        return self._make[0](take)


def matching(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a `select` for shell patterns over path texts; `/` and `.` are one, and a pattern takes all that is below it."""
    plain = [pattern.replace("/", ".") for pattern in patterns]

    def select(text: str) -> bool:
        dotted = text.replace("/", ".")
        return any(fnmatchcase(dotted, pattern) or fnmatchcase(dotted, f"{pattern}.*") for pattern in plain)

    return select


# --- templates -----------------------------------------------------------------------------------------------------------------

_ABSENT: Any = object()


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _pairs_of(template: Any) -> list[tuple[Any, Any]]:
    """Return the keys or fields of a mapping or dataclass."""
    if isinstance(template, Mapping):
        return list(template.items())
    return [(item.name, getattr(template, item.name)) for item in dataclasses.fields(template) if hasattr(template, item.name)]


def _parts(template: Any) -> list[tuple[Any, Any]] | None:
    """Return what is one step below a live container, by key, or None for a leaf."""
    if isinstance(template, Mapping) or _is_dataclass(template):
        return _pairs_of(template)
    if _is_namedtuple(template):
        return list(zip(template._fields, template, strict=True))
    return list(enumerate(template)) if isinstance(template, list | tuple | deque) else None


def _paths_of(template: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield a live value's path and those of everything below it."""
    yield path
    for key, value in _parts(template) or ():
        yield from _paths_of(value, (*path, nodes.path_key(key, leaf=plain_leaf)))


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _has_array(template: Any) -> bool:
    return _is_array(template) or any(_has_array(value) for _, value in _parts(template) or ())


def _has_dtensor(template: Any) -> bool:
    return is_dtensor(template) or any(_has_dtensor(value) for _, value in _parts(template) or ())


def _is_extra_state(key: Any) -> bool:
    return type(key) is str and key.rpartition(".")[2] == "_extra_state"


def _is_state_dict(template: Any) -> bool:
    """Whether a mapping may be a module's state, whose names change with what wraps the module."""
    return isinstance(template, Mapping) and any(isinstance(value, torch.Tensor) for value in template.values())


def _describe(template: Any) -> str:
    if isinstance(template, torch.Tensor):
        template = as_dtensor(template)
        if template.is_nested:
            return "a nested tensor"
        return f"{dtype_name(template.dtype)} {list(template.shape)}"
    if isinstance(template, np.ndarray):
        return f"numpy {template.dtype} {list(template.shape)}"
    parts = _parts(template)
    return type(template).__name__ if parts is None else f"a {type(template).__name__} of {len(parts)}"


# --- nodes ---------------------------------------------------------------------------------------------------------------------


def _entries(node: Node) -> Iterator[int]:
    for _, leaf in nodes.walk(node):
        kind, payload = split(leaf)
        if kind == "tensor":
            yield payload
        elif kind == "ndarray":
            yield payload[0]
        elif kind == "encoded":
            yield payload[1]
        elif kind == "generator":
            yield from _entries(payload[1])


def _node_paths(node: Node, path: KeyPath) -> Iterator[KeyPath]:
    """Yield a saved value's path and those of its leaves."""
    yield path
    for below, _ in nodes.walk(node, path):
        yield below


def _unflatten_key(node: Node) -> Any:
    # Keys hold no tensors: `encode` refuses them.
    return unflatten(node, lambda index: torch.empty(0))


_STRICT, _EXTRA, _STATE = range(3)
"""How keys are compared: exactly; saved ones may be new; they may be new or gone (optimizer state by parameter)."""


_OPTIMIZER = {b'"state"': _STATE, b'"param_groups"': _EXTRA}


class _Planner:
    def __init__(self, entries: Sequence[Any], options: Options) -> None:
        self.entries = entries
        self.options = options
        self.plan = Fitted()
        self._targets: dict[Any, tuple[int, KeyPath]] = {}

    # A maker builds one value of the result; None says that nothing was wanted where the template has nothing either.

    def walk(self, node: Node, template: Any, path: KeyPath, mode: int = _STRICT) -> Maker | None:
        kind = split(node)[0]
        if self.options.as_saved and not _has_dtensor(template) and next(nodes.plainer(node), None) is None:
            return self._whole(node, template, path)  # No type is missing.
        if kind in ("tensor", "ndarray"):
            return self._leaf(node, template, path)
        if kind == "encoded":
            return self._whole(node, template, path)  # Only its format knows what is inside.
        if kind == "enum" and isinstance(template, enum.Enum):
            return self._enum(node, template, path)
        is_mapping = kind in nodes.MAPPING_KINDS or kind == "dataclass"
        if not _is_array(template) and _parts(template) is None:
            # Under a selection the children decide, each by its own path.
            if is_mapping and self.options.select is not None:
                return self._mapping(node, {}, path, _EXTRA, instead=template)
            return self._whole(node, template, path)
        if is_mapping and (isinstance(template, Mapping) or (kind == "dataclass" and _is_dataclass(template))):
            return self._mapping(node, template, path, mode, instead=template)
        if kind in ("list", "tuple", "deque", "namedtuple") and isinstance(template, list | tuple | deque):
            return self._sequence(node, template, path, mode)
        return self._unlike(node, template, path)

    def _wanted(self, paths: Iterable[KeyPath]) -> bool:
        select = self.options.select
        return select is None or any(select(format_path(path)) for path in paths)

    def _keep(self, template: Any) -> Maker | None:
        return None if template is _ABSENT else lambda take: template

    def _whole(self, node: Node, template: Any, path: KeyPath) -> Maker | None:
        """Take a subtree as it was saved."""
        if not self._wanted(_node_paths(node, path)):
            return self._keep(template)
        for index in _entries(node):
            self._entry(index)
            self.plan.fresh.add(index)
        self._tell_plainer(nodes.plainer(node, path))
        return lambda take: unflatten(node, take, encoded=self.options.encoded)

    def _tell_plainer(self, found: Iterable[tuple[KeyPath, str]]) -> None:
        for path, what in found:
            self.plan.plainer.setdefault(what, []).append(format_path(path))

    def _tell_itself_plainer(self, node: Node, path: KeyPath) -> None:
        what = nodes.plainer_type(node)
        if what is not None:
            self._tell_plainer([(path, what)])

    def _unlike(self, node: Node, template: Any, path: KeyPath, found: str | None = None) -> Maker | None:
        """Handle a subtree of another form than the template's."""
        if self.options.as_saved or (not _has_array(template) and next(_entries(node), None) is None):
            return self._whole(node, template, path)
        if self._wanted(_node_paths(node, path)):
            if found is None:
                below = nodes.children(node)
                kind = split(node)[0] or ("None" if node is None else type(node).__name__)
                found = kind if below is None else f"a {kind} of {len(below)}"
            self._mismatch(path, _describe(template), found)
        return self._keep(template)

    def _mismatch(self, path: KeyPath, expected: str, found: str) -> None:
        self.plan.mismatched.append(f"{format_path(path)}: expected {expected}, found {found}")

    def _entry(self, index: int) -> Any:
        if index >= len(self.entries):
            raise IntegrityError(f"a node names entry {index} of {len(self.entries)}; run `syckpt verify`")
        return self.entries[index]

    # --- leaves

    def _laid_out(self, index: int, template: torch.Tensor, node: Node, path: KeyPath) -> Maker | None:
        """Take a tensor as a new one in the template's layout, where it is one of that shape and dtype."""
        entry = self._entry(index)
        if (entry.dtype, tuple(entry.shape)) != (dtype_name(template.dtype), tuple(template.shape)):
            return self._whole(node, template, path)
        if index not in self.plan._filled:
            self.plan._filled[index] = made = torch.empty_like(template.detach())
            self.plan.fills.append((index, made))
        return lambda take: take(index)

    def _leaf(self, node: Node, template: Any, path: KeyPath) -> Maker | None:
        kind, payload = split(node)
        if self.options.as_saved and kind == "tensor" and is_dtensor(template) and self._wanted([path]):
            return self._laid_out(payload, template, node, path)
        if self.options.as_saved or (not _is_array(template) and _parts(template) is None):
            return self._whole(node, template, path)
        if not self._wanted([path]):
            return self._keep(template)
        if kind == "tensor":
            entry = self._entry(payload)
            found = f"{entry.dtype} {list(entry.shape)}"
            target = as_dtensor(template) if isinstance(template, torch.Tensor) else None
            why = refuse_tensor(target) if target is not None else None
            if why is not None:
                return self._unfillable(template, path, why)
            if target is None or tuple(target.shape) != tuple(entry.shape):
                return self._unlike(node, template, path, found)
            return self._fill(payload, target, template, path, found)
        index, descr, order = payload
        dtype, shape = numpy_dtype(descr), tuple(self._entry(index).shape)
        name = torch_name(dtype)
        if self._entry(index).dtype != (name or "uint8") or (name is None and shape[-1:] != (dtype.itemsize,)):
            raise IntegrityError(f"{format_path(path)}: entry {index} does not hold numpy {dtype}; run `syckpt verify`")
        shape = shape if name else shape[:-1]
        shape = shape[::-1] if order == "F" else shape
        found = f"numpy {dtype} {list(shape)}"
        if type(template) is not np.ndarray or template.shape != shape:
            return self._unlike(node, template, path, found)
        if template.dtype != dtype and None in (name, torch_name(template.dtype)):
            return self._unlike(node, template, path, found)
        stored = stored_array(template, order=order)
        if (
            not template.flags.writeable
            or (template.size and not np.may_share_memory(stored, template))
            or any(stride < 0 or stride % stored.itemsize for stride in stored.strides)
        ):
            # torch cannot write to it in place.
            return self._unlike(node, template, path, found) if template.dtype != dtype else self._array(node, template, path)
        return self._fill(index, torch.from_numpy(stored), template, path, found)

    def _array(self, node: Node, template: Any, path: KeyPath) -> Maker | None:
        """Read an array as new, and copy it into the target in the end, if that can be written at all."""
        maker = self._whole(node, template, path)

        def make(take: Take) -> Any:
            assert maker is not None
            np.copyto(template, maker(take), casting="no")
            return template

        return make if template.flags.writeable else maker

    def _fill(self, index: int, target: torch.Tensor, template: Any, path: KeyPath, found: str) -> Maker | None:
        """Plan entry -> target, whose shapes agree."""
        entry, name = self._entry(index), dtype_name(target.dtype)
        if target.is_inference():
            return self._unfillable(template, path, "it was made in inference mode; clone it")
        if target.numel() and any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
            return self._unfillable(template, path, "it overlaps itself; clone it")
        if entry.dtype != name:
            source = getattr(torch, entry.dtype, None)
            can = isinstance(source, torch.dtype) and can_cast(source, target.dtype)
            if not (self.options.cast and can):
                hint = " (cast=True would convert it)" if can else ""
                self._mismatch(path, _describe(template), found + hint)
                return self._keep(template)
            self.plan.cast.append(f"{format_path(path)}: {entry.dtype} to {name}")
        region = tie_key(target) if target.numel() else id(template)
        other, first = self._targets.setdefault(region, (index, path))
        if other != index and not self._same_content(other, index):
            self.plan.mismatched.append(
                f"{format_path(path)}: in the target one tensor with {format_path(first)}, in the commit another one; untie them"
            )
            return self._keep(template)
        if first == path:
            self.plan.fills.append((index, target))
        if entry.dtype == name:
            self.plan._filled.setdefault(index, target)
        return lambda take: template

    def _unfillable(self, template: Any, path: KeyPath, why: str) -> Maker | None:
        self.plan.mismatched.append(f"{format_path(path)}: the target cannot be filled: {why}")
        return self._keep(template)

    def _same_content(self, a: int, b: int) -> bool:
        address = getattr(self.entries[a], "address", None)
        return address is not None and address == getattr(self.entries[b], "address", None)

    def _enum(self, node: Node, template: enum.Enum, path: KeyPath) -> Maker | None:
        if not self._wanted([path]):
            return self._keep(template)
        name, member, value = node["enum"]
        try:
            found = type(template)(_unflatten_key(value))
        except ValueError:
            found = None
        # Members of two enums may have one value.
        if found is None or (found.name != member and type(template).__name__ != name):
            if self.options.as_saved:
                return self._whole(node, template, path)
            self._mismatch(path, f"a member of {type(template).__name__}", f"{name}.{member}")
            return self._keep(template)
        return lambda take: found

    # --- containers

    def _mapping(self, node: Node, template: Any, path: KeyPath, mode: int, *, instead: Any) -> Maker | None:
        """Compare by key; `instead` is the result when nothing below was wanted (the template itself, if it is not a stand-in)."""
        kind, payload = split(node)
        pairs = payload[1] if kind == "dataclass" else payload
        live = {canonical.dumps(nodes.encode(key, leaf=plain_leaf, path=path)): (key, value) for key, value in _pairs_of(template)}
        saved_keys = [canonical.dumps(key) for key, _ in pairs]
        if self.options.as_saved:
            mode = _STATE
        if kind == "dataclass" and _is_dataclass(template):
            if mode and set(saved_keys) != set(live):
                return self._unlike(node, template, path)
        elif not (kind == "defaultdict" and isinstance(template, defaultdict)) and self._wanted([path]):
            self._tell_itself_plainer(node, path)
        if mode == _STRICT and _is_state_dict(template):
            for name, saved in match([key for key in template if type(key) is str], [key for key, _ in pairs if type(key) is str]).items():
                live[canonical.dumps(saved)] = live.pop(canonical.dumps(nodes.encode(name)))
                self.plan.renamed.append((format_path((*path, name)), format_path((*path, saved))))
        optimizer = all(key in live and key in saved_keys for key in _OPTIMIZER)
        made: list[tuple[Any, Maker]] = []
        for text, (key_node, child) in zip(saved_keys, pairs, strict=True):
            below = (*path, nodes.node_key(key_node))
            inner = _OPTIMIZER[text] if optimizer and text in _OPTIMIZER else _EXTRA if mode else _STRICT
            if text in live:
                key, value = live.pop(text)
                maker = self._extra_state(child, value, below) if _is_extra_state(key) else self.walk(child, value, below, inner)
            elif mode:
                self._tell_plainer(nodes.plainer(key_node, path))
                key, maker = _unflatten_key(key_node), self.walk(child, _ABSENT, below, inner)
            else:
                if self._wanted(_node_paths(child, below)):
                    self.plan.unexpected.append(format_path(below))
                continue
            if maker is not None:
                made.append((key, maker))
        for key, value in live.values():
            below = (*path, nodes.path_key(key, leaf=plain_leaf))
            wanted = self._wanted(_paths_of(value, below))
            if wanted and mode != _STATE:
                self.plan.missing.append(format_path(below))
            if not wanted or mode != _STATE:
                made.append((key, lambda take, value=value: value))  # type: ignore[misc]
        if not made and pairs and instead is not template:
            return self._keep(instead)
        if not pairs and instead is not template and not self._wanted([path]):
            return self._keep(instead)
        return lambda take: _rebuild_mapping(kind, template, [(key, maker(take)) for key, maker in made])

    def _extra_state(self, node: Node, template: Any, path: KeyPath) -> Maker | None:
        """Take what a module's `get_extra_state` returned as it was saved: its form is nobody's business but the module's."""
        options = self.options
        if not self._wanted(_node_paths(node, path)):
            return self._keep(template)
        self.options = replace(options, as_saved=True, select=None)
        try:
            return self.walk(node, template, path)
        finally:
            self.options = options

    def _sequence(self, node: Node, template: Any, path: KeyPath, mode: int) -> Maker | None:
        kind, payload = split(node)
        below = nodes.children(node) or []
        named = kind == "namedtuple" and _is_namedtuple(template)
        if self.options.as_saved and not named and not _is_namedtuple(template):
            template = [*itertools.islice(template, len(below)), *[_ABSENT] * (len(below) - len(template))]
        if len(below) != len(template) or (named and tuple(name for name, _ in below) != template._fields):
            return self._unlike(node, template, path)
        if not named and not any(isinstance(child, dict) for _, child in below) and not _has_array(template):
            # A long list of numbers needs no maker each.
            return self._whole(node, template, path)
        if not named:
            self._tell_itself_plainer(node, path)
        inner = _EXTRA if mode else _STRICT
        # Never None: the template has a value at each of these places.
        makers = [self.walk(child, value, (*path, key), inner) for (key, child), value in zip(below, template, strict=True)]

        def make(take: Take) -> Any:
            values = [maker(take) for maker in makers if maker is not None]
            if named:
                return type(template)._make(values)
            if kind == "deque":
                return deque(values, _unflatten_key(payload[0]))
            return values if kind == "list" else tuple(values)

        return make


def _rebuild_mapping(kind: str, template: Any, pairs: list[tuple[Any, Any]]) -> Any:
    if kind == "dataclass" and _is_dataclass(template):
        result = copy.copy(template)
        for name in set(getattr(result, "__dict__", ())) - {item.name for item in dataclasses.fields(template)}:
            # A cached property knows the template's values.
            del result.__dict__[name]
        for name, value in pairs:
            # Frozen dataclasses refuse their own setattr.
            object.__setattr__(result, name, value)
        return result
    if kind == "ordereddict":
        ordered: OrderedDict[Any, Any] = OrderedDict(pairs)
        if hasattr(template, "_metadata"):
            # `Module.load_state_dict` reads the versions of submodules from it.
            ordered._metadata = template._metadata  # type: ignore[attr-defined]
        return ordered
    if kind == "defaultdict":
        return defaultdict(template.default_factory if isinstance(template, defaultdict) else None, pairs)
    if kind == "counter":
        counted: Counter[Any] = Counter()
        dict.update(counted, pairs)
        return counted
    return dict(pairs)


def kept(template: Any) -> Fitted:
    """Return the plan that leaves a target as it is."""
    return Fitted(_make=[lambda take: template])


def fit(node: Node, template: Any, *, path: KeyPath, entries: Sequence[Any], options: Options | None = None) -> Fitted:
    """Plan how a saved node becomes the live `template`'s state; `entries[i]` tells `dtype` (torch's name) and `shape`.

    Where entries also have an `address`, two of them with one address may fill one tied tensor.
    Raises: IntegrityError for a malformed node. What does not fit is no error here: see `Fitted.problems`.
    """
    nodes.decode(node)
    planner = _Planner(entries, options or Options())
    maker = planner.walk(node, template, path)
    plan = planner.plan
    plan._make.append(maker or (lambda take: template))
    plan.fresh.difference_update(plan._filled)
    return plan
