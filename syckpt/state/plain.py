"""Saved values as the nearest that `torch.load(weights_only=True)` reads: for files that live without syckpt.

It reads tensors, None, booleans, numbers, texts, bytes, lists, tuples, sets, dicts, OrderedDicts, Counters, sizes, dtypes and devices.
What it does not is turned into one of these, and told.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from syckpt.objects import nodes
from syckpt.objects.nodes import KeyPath, Node, format_path, split
from syckpt.state.bits import SUB_BYTE
from syckpt.state.flatten import dtype_name, numpy_dtype, numpy_of, torch_name, unflatten
from syckpt.state.formats import BYTES

__all__ = ["plain"]

# Longer ones are pickled by an operation that torch's reader lacks.
_MAX_BITS = 8 * 255 - 1

_SCALARS = (bool, int, float, complex, str, bytes)


def plain(node: Node, tensor: Callable[[int], torch.Tensor], *, path: KeyPath) -> tuple[Any, list[str]]:
    """Return a node's value in plain types, and what had to be turned into others: sentences that begin with a path.

    `tensor(i)` returns entry i; it is asked once an entry. Raises: IntegrityError for a malformed node.
    """
    nodes.decode(node)
    maker = _Maker(tensor)
    return maker.value(node, path), maker.converted


class _Maker:
    def __init__(self, tensor: Callable[[int], torch.Tensor]) -> None:
        self._tensor = tensor
        self._found: dict[int, torch.Tensor] = {}
        self.converted: list[str] = []

    def _entry(self, index: int) -> torch.Tensor:
        if index not in self._found:
            self._found[index] = self._tensor(index)
        return self._found[index]

    def _note(self, path: KeyPath, was: str, now: str) -> None:
        self.converted.append(f"{format_path(path)}: {was} as {now}")

    def value(self, node: Node, path: KeyPath) -> Any:
        kind, payload = split(node)
        special = getattr(self, f"_of_{kind}", None)
        if special is not None:
            return special(payload, path)
        if kind in nodes.MAPPING_KINDS:
            return self._mapping(kind, payload, path)
        found = unflatten(node, self._entry)
        if type(found) is int and found.bit_length() > _MAX_BITS:
            self._note(path, f"integer of {found.bit_length()} bits", "its hexadecimal text")
            return hex(found)
        return found

    def _items(self, payload: list[Node], path: KeyPath) -> list[Any]:
        return [self.value(child, (*path, index)) for index, child in enumerate(payload)]

    def _mapping(self, kind: str, payload: list[Any], path: KeyPath) -> Any:
        pairs = [(self.value(key, path), self.value(child, (*path, nodes.node_key(key)))) for key, child in payload]
        if kind == "ordereddict":
            return OrderedDict(pairs)
        if kind == "counter":
            counted: Counter[Any] = Counter()
            dict.update(counted, pairs)
            return counted
        if kind == "defaultdict":
            self._note(path, "defaultdict", "dict")
        return dict(pairs)

    def _of_list(self, payload: Any, path: KeyPath) -> Any:
        return self._items(payload, path)

    def _of_tuple(self, payload: Any, path: KeyPath) -> Any:
        return tuple(self._items(payload, path))

    def _of_deque(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, "deque", "list")
        return self._items(payload[1], path)

    def _of_set(self, payload: Any, path: KeyPath) -> Any:
        return {self.value(member, path) for member in payload}

    def _of_frozenset(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, "frozenset", "tuple")
        return tuple(self.value(member, path) for member in payload)

    def _of_namedtuple(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, f"namedtuple {payload[0]}", "tuple")
        return tuple(self.value(child, (*path, name)) for name, child in payload[1])

    def _of_dataclass(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, f"dataclass {payload[0]}", "dict")
        return {name: self.value(child, (*path, name)) for name, child in payload[1]}

    def _of_enum(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, f"member of the enum {payload[0]}", "its value")
        return self.value(payload[2], path)

    def _of_range(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, "range", "tuple (start, stop, step)")
        return tuple(self.value(part, path) for part in payload)

    def _of_slice(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, "slice", "tuple (start, stop, step)")
        return tuple(self.value(part, path) for part in payload)

    def _of_path(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, "path", "text")
        return self.value(payload, path)

    def _of_purepath(self, payload: Any, path: KeyPath) -> Any:
        return self._of_path(payload, path)

    def _of_tensor(self, payload: Any, path: KeyPath) -> Any:
        entry = self._entry(payload)
        if entry.dtype not in SUB_BYTE:
            return entry
        self._note(path, dtype_name(entry.dtype), "uint8")
        return entry.view(torch.uint8)

    def _of_ndarray(self, payload: Any, path: KeyPath) -> Any:
        index, descr, order = payload
        dtype = numpy_dtype(descr)
        if torch_name(dtype) is None:
            self._note(path, f"numpy array of dtype {dtype}", "tensor of its bytes")
            return self._entry(index)
        self._note(path, "numpy array", "tensor")
        return torch.from_numpy(np.ascontiguousarray(numpy_of(self._entry(index), descr, order)))

    def _of_npscalar(self, payload: Any, path: KeyPath) -> Any:
        scalar = unflatten({"npscalar": payload}, self._entry)
        value = scalar.item()
        if type(value) not in _SCALARS:
            value = scalar.tobytes()
        self._note(path, f"numpy {scalar.dtype}", type(value).__name__)
        return value

    def _of_generator(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, f"{payload[0]} generator", "dict of its state")
        return self.value(payload[1], path)

    def _of_encoded(self, payload: Any, path: KeyPath) -> Any:
        if payload[0] != BYTES:
            self._note(path, f"value in the format {payload[0]}", "bytes")
        return unflatten({"encoded": payload}, self._entry)

    def _of_perrank(self, payload: Any, path: KeyPath) -> Any:
        self._note(path, "value that differs between ranks", "dict by rank")
        return {rank: self.value(child, (*path, rank)) for rank, child in payload}
