"""Python and torch values <-> nodes and leaves: the structure apart from the bytes.

`flatten` walks the values and copies nothing that it can point to: a leaf's `array` shares memory with the state, so whoever stages
it must copy before the caller may train on. The only copies are conjugate and negative views, which have to be resolved, and
non-contiguous numpy arrays of a dtype that torch does not have.

* One region of memory, reached twice, is one leaf (a tie): same device, address, shape, strides and dtype. Two empty tensors are
  one leaf only if they are one object. Other overlaps (slices of one buffer) are stored as separate tensors, each whole.
* Parameters and subclasses without a `__torch_dispatch__` of their own are tensors here: class, attributes and whether a gradient is
  required are properties of the live object that they are loaded into.
* numpy arrays: a dtype that torch has, little-endian, is stored as that; "F" (Fortran- and not C-contiguous) is stored as its
  transpose. Any other dtype (structured, datetime, text, big-endian, long double) is stored as its bytes: uint8, with the
  size of an element as the last dimension, and the real dtype in the node. Scalars of C types that are the same dtype (`longlong`)
  come back as numpy's own (`int64`).
* Generators: `["torch", {"device", "state"}]`; `[name of the bit generator, {"state", "seed_seq"}]` for `np.random.Generator`
  (`seed_seq` is what `spawn` needs); `["RandomState", state]` for the legacy class.

`unflatten` inverts it and trusts nothing in the node: what does not fit is an IntegrityError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from syckpt.errors import IntegrityError, StateError
from syckpt.objects import address, canonical, nodes
from syckpt.objects.dtypes import DTYPES
from syckpt.objects.nodes import KeyPath, Node
from syckpt.state.formats import (
    PICKLED,
    JsonSerialization,
    RawSerialization,
    SafetensorsSerialization,
    SerializationFormat,
    TorchSerialization,
    json_node,
    known_format,
    pickled,
    tensor_names,
)
from syckpt.state.shards import as_dtensor

__all__ = [
    "Flat",
    "Leaf",
    "dtype_name",
    "flatten",
    "numpy_dtype",
    "numpy_of",
    "plain_leaf",
    "is_sharded",
    "refuse_tensor",
    "stored_array",
    "tie_key",
    "torch_name",
    "unflatten",
]

_TORCH_NAMES = {
    "|b1": "bool",
    "|i1": "int8",
    "<i2": "int16",
    "<i4": "int32",
    "<i8": "int64",
    "|u1": "uint8",
    "<u2": "uint16",
    "<u4": "uint32",
    "<u8": "uint64",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<c8": "complex64",
    "<c16": "complex128",
}
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


@dataclass(frozen=True, eq=False)
class Leaf:
    """One entry: `array` has exactly `dtype` (torch's name) and `shape`, maybe strided, maybe on another device.

    `trainable`: one of the tensors that it stands for required a gradient.
    """

    path: KeyPath
    array: Any
    dtype: str
    shape: tuple[int, ...]
    trainable: bool = False


@dataclass(frozen=True, eq=False)
class Flat:
    """A node for each item, and the leaves that their `{"tensor":i}` and `{"ndarray":[i,..]}` count."""

    nodes: dict[str, Node]
    leaves: list[Leaf]


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, as in the manifest."""
    return str(dtype).removeprefix("torch.")


def torch_name(dtype: Any) -> str | None:
    """Return torch's name of a numpy dtype that it can hold as it is, None for any other."""
    return _TORCH_NAMES.get(dtype.str)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this rank holds a part."""
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)


def tie_key(tensor: torch.Tensor) -> Any:
    """Return what two tensors have in common if they are one region of memory: then they are one leaf, or one target."""
    if is_sharded(tensor):
        live: Any = tensor
        local = live._local_tensor
        layout = (tuple(tensor.shape), str(live.placements), id(live.device_mesh))
        return (tie_key(local), layout) if local.numel() else id(tensor)
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def refuse_tensor(tensor: torch.Tensor) -> str | None:
    """Return why a tensor's bits cannot be carried, and what to do, or None if they can."""
    kind = type(tensor)
    if is_sharded(tensor):
        return None  # Its placements are looked at where its boxes are.
    if kind.__name__ == "ShardedTensor":  # It refuses most questions itself.
        return "a ShardedTensor that is not split by rows as FSDP1 does; give FSDP a device_mesh, then its state dicts hold DTensors"
    if torch.nn.parameter.is_lazy(tensor):
        return "an uninitialized lazy parameter has no values yet; run a forward pass first"
    if tensor.is_nested:
        return "nested tensors cannot be carried; save `list(tensor.unbind())`"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"the tensor subclass {kind.__qualname__} keeps its data elsewhere; save the plain tensors that it is made of"
    if tensor.layout is not torch.strided:
        return f"tensors of layout {tensor.layout} cannot be carried; save `tensor.to_dense()` or its indices and values"
    if tensor.is_quantized:
        return "quantized tensors cannot be carried; save `tensor.int_repr()` with its scale and zero point"
    if tensor.is_meta:
        return "a meta tensor has no values; materialize it (`module.to_empty(device=...)`) before saving"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"dtype {tensor.dtype} cannot be carried; view it as uint8"
    return None


# --- numpy ---------------------------------------------------------------------------------------------------------------------


def _field_tuples(descr: Any) -> Any:
    """Return a descr read from JSON with the tuples that numpy asks for."""
    if isinstance(descr, str):
        # numpy parses much more than that, some of it with warnings or at great cost.
        if not re.fullmatch(r"[<>|][biufcmMSUV][0-9]+(\[[0-9a-zA-Z/]+\])?", descr):
            raise ValueError(f"unknown numpy dtype {descr[:40]!r}")
        return descr
    fields = []
    for name, inner, *shape in descr:
        fields.append((tuple(name) if isinstance(name, list) else name, _field_tuples(inner), *map(tuple, shape)))
    return fields


def numpy_dtype(descr: Any) -> Any:
    """Return the numpy dtype of a node's descr. Raises: IntegrityError."""
    try:
        dtype = np.lib.format.descr_to_dtype(_field_tuples(descr))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError) as exc:
        raise IntegrityError(f"malformed numpy dtype {str(descr)[:80]}: {exc}; run `syckpt verify`") from exc
    return dtype


def _descr(dtype: Any, path: KeyPath) -> Any:
    """Return the JSON form of a numpy dtype. Raises: StateError for one that it cannot bring back."""
    if torch_name(dtype) is not None:
        return dtype.str
    fix = "convert it to a plain dtype or to lists"
    if dtype.hasobject:
        raise StateError(f"{nodes.format_path(path)}: numpy dtype {dtype} holds Python objects, which cannot be carried; {fix}")
    try:
        descr = canonical.loads(canonical.dumps(dtype.descr if dtype.names is not None else dtype.str))
        found = numpy_dtype(descr)
    except (ValueError, IntegrityError) as exc:
        raise StateError(f"{nodes.format_path(path)}: numpy dtype {dtype} cannot be carried ({exc}); {fix}") from exc
    if found != dtype or (dtype.kind == "V" and found.type is not dtype.type):
        raise StateError(f"{nodes.format_path(path)}: numpy dtype {dtype} would come back as {found}; {fix}")
    return descr


def stored_array(array: Any, *, order: str) -> Any:
    """Return a numpy array as its entry holds it: transposed for order "F", bytes for a dtype unknown to torch.

    Shares memory with `array` where it can; a contiguous array always does.
    """
    base = array.T if order == "F" else array
    if torch_name(base.dtype) is not None:
        # torch does not know `ulonglong`, which is the same dtype.
        return base.view(base.dtype.str)
    shape = (*base.shape, base.dtype.itemsize)
    if 0 in shape:
        return np.empty(shape, np.uint8)
    return np.ascontiguousarray(base).view(np.uint8).reshape(shape)


def numpy_of(entry: Any, descr: Any, order: str) -> Any:
    """Invert `stored_array` over an entry's tensor or array; shares its memory. Raises: IntegrityError."""
    dtype = numpy_dtype(descr)
    data = entry.detach().cpu().numpy() if isinstance(entry, torch.Tensor) else entry
    native = torch_name(dtype) is not None
    raw = data.dtype == np.uint8 and data.ndim > 0 and data.shape[-1] == dtype.itemsize
    fits = data.dtype == dtype if native else raw
    if not fits:
        raise IntegrityError(f"a numpy array of dtype {dtype} cannot be {data.dtype} of shape {data.shape}; run `syckpt verify`")
    if not native:
        shape = data.shape[:-1]
        data = np.empty(shape, dtype) if data.size == 0 else np.ascontiguousarray(data).view(dtype).reshape(shape)
    return data.T if order == "F" else data


def _scalar_bytes(value: Any) -> bytes:
    # numpy drops trailing NULs of texts wherever an array is involved, and in str(value).
    if isinstance(value, np.str_):
        return bytes(value.encode("utf-32-le", "surrogatepass"))
    return bytes(value) if isinstance(value, np.bytes_) else value.tobytes()


def _read_scalar(descr: Any, text: str) -> Any:
    dtype = numpy_dtype(descr)
    try:
        data = address.from_text(text)
        if dtype.kind in "US":
            return np.str_(data.decode("utf-32-le", "surrogatepass")) if dtype.kind == "U" else np.bytes_(data)
        if len(data) != dtype.itemsize:
            raise ValueError(f"{len(data)} bytes")
        return np.zeros((), dtype)[()] if not data else np.frombuffer(data, dtype)[0].copy()
    except ValueError as exc:
        raise IntegrityError(f"malformed numpy scalar of dtype {dtype}: {exc}; run `syckpt verify`") from exc


def plain_leaf(value: Any, path: KeyPath) -> Node | None:
    """Return the node of a torch or numpy value that needs no entry, None for any other: the hook for keys."""
    if isinstance(value, torch.Size):
        return {"size": [int(size) for size in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, np.generic) and type(value) is value.dtype.type:
        return {"npscalar": [_descr(value.dtype, path), address.to_text(_scalar_bytes(value))]}
    return None


# --- generators ----------------------------------------------------------------------------------------------------------------


def _generator_state(value: Any, path: KeyPath) -> tuple[str, Any] | None:
    if isinstance(value, torch.Generator):
        return "torch", {"device": value.device, "state": value.get_state()}
    if isinstance(value, np.random.RandomState):
        return "RandomState", value.get_state(legacy=False)
    if not isinstance(value, np.random.Generator):
        return None
    bits = value.bit_generator
    name = type(bits).__name__
    if name not in _BIT_GENERATORS:
        raise StateError(f"{nodes.format_path(path)}: bit generator {name} cannot be carried; use one of {', '.join(_BIT_GENERATORS)}")
    seeds = bits.seed_seq if isinstance(bits.seed_seq, np.random.SeedSequence) else None
    return name, {"state": bits.state, "seed_seq": None if seeds is None else seeds.state}


def _read_generator(kind: str, state: Any) -> Any:
    try:
        if not isinstance(state, dict):
            raise ValueError(f"{type(state).__name__} instead of a dict")
        if kind == "torch":
            try:
                generator = torch.Generator(device=state["device"])
            except RuntimeError:
                # A machine without that device can still read the rest of the commit.
                return nodes.Opaque("generator", state)
            generator.set_state(state["state"])
            return generator
        legacy = kind == "RandomState"
        name = state["bit_generator"] if legacy else kind
        if name not in _BIT_GENERATORS:
            raise ValueError(f"unknown bit generator {name!r}")
        make = getattr(np.random, name)
        if legacy:
            found = np.random.RandomState(make(0))
            found.set_state(state)
            return found
        seeds = state["seed_seq"]
        bits = make(0 if seeds is None else np.random.SeedSequence(**seeds))
        bits.state = state["state"]
        return np.random.Generator(bits)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RuntimeError) as exc:
        raise IntegrityError(f"malformed state of a {kind} generator: {exc}; run `syckpt verify`") from exc


# --- values to leaves ------------------------------------------------------------------------------------------------------------


class _Flattener:
    def __init__(self, formats: Mapping[str, SerializationFormat]) -> None:
        self._formats = formats
        self.leaves: list[Leaf] = []
        # What an index stands for is kept alive with it: a freed object's address could be taken by another one.
        self._seen: dict[Any, tuple[int, Any]] = {}

    def leaf(self, value: Any, path: KeyPath) -> Node | None:
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if isinstance(value, np.ndarray):
            return self._ndarray(value, path)
        generator = _generator_state(value, path)
        if generator is not None:
            kind, state = generator
            return {"generator": [kind, nodes.encode(state, leaf=self.leaf, path=path)]}
        return plain_leaf(value, path)

    def item(self, name: str, value: Any) -> Node:
        """Return an item's node, after a look at whether its format can carry it. Raises: StateError."""
        form, path = self._formats.get(name), (name,)
        if isinstance(form, JsonSerialization) and known_format(form):
            return json_node(form, value, path)
        if form is not None and (isinstance(form, RawSerialization) or not known_format(form)):
            return self._encoded(form.name, _encode(form, value, path), path)
        if isinstance(form, TorchSerialization) and not form.weights_only:
            return nodes.encode(value, leaf=self._leaf_or_pickle, otherwise=self._pickle, path=path)
        try:
            node = nodes.encode(value, leaf=self.leaf, path=path)
        except StateError as exc:
            if isinstance(form, TorchSerialization):
                raise StateError(f"{exc} (TorchSerialization(weights_only=False) pickles what cannot be carried otherwise)") from exc
            raise
        if isinstance(form, SafetensorsSerialization):
            for index in tensor_names(node, path).values():
                found = self.leaves[index]
                if DTYPES[found.dtype].safetensors is None:
                    raise StateError(f"{nodes.format_path(found.path)}: safetensors has no dtype {found.dtype}: view it as uint8")
        return node

    def _leaf_or_pickle(self, value: Any, path: KeyPath) -> Node | None:
        count = len(self.leaves)
        try:
            return self.leaf(value, path)
        except StateError:
            del self.leaves[count:]
            # What is known may not point to them: their numbers are given anew.
            self._seen = {key: known for key, known in self._seen.items() if known[0] < count}
            return self._pickle(value, path)

    def _pickle(self, value: Any, path: KeyPath) -> Node:
        return self._encoded(PICKLED, pickled(value, path), path)

    def _encoded(self, form: str, data: bytes, path: KeyPath) -> Node:
        array = np.frombuffer(bytearray(data), np.uint8)
        self.leaves.append(Leaf(path, array, "uint8", array.shape))
        return {"encoded": [form, len(self.leaves) - 1]}

    def _tensor(self, value: torch.Tensor, path: KeyPath) -> int:
        value = as_dtensor(value)
        why = refuse_tensor(value)
        if why is not None:
            raise StateError(f"{nodes.format_path(path)}: {why}")
        if is_sharded(value):
            plain = value.detach()
        else:
            with torch._C.DisableTorchFunctionSubclass():
                plain = value.detach().as_subclass(torch.Tensor)
        key = id(value) if plain.numel() == 0 else tie_key(plain)
        if key not in self._seen:
            dtype, shape = dtype_name(plain.dtype), tuple(int(size) for size in plain.shape)
            self._seen[key] = len(self.leaves), value
            resolved = plain if is_sharded(plain) else plain.resolve_conj().resolve_neg()
            self.leaves.append(Leaf(path, resolved, dtype, shape, value.requires_grad))
        index = self._seen[key][0]
        if value.requires_grad and not self.leaves[index].trainable:
            self.leaves[index] = replace(self.leaves[index], trainable=True)
        return index

    def _ndarray(self, value: Any, path: KeyPath) -> Node:
        if type(value) is not np.ndarray:
            raise StateError(f"{nodes.format_path(path)}: {type(value).__qualname__} cannot be carried; convert it with np.array(...)")
        descr = _descr(value.dtype, path)
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        key: Any = ("numpy", value.__array_interface__["data"][0], value.shape, value.strides, str(value.dtype.descr))
        if value.nbytes == 0:
            key = id(value)
        if key not in self._seen:
            array = stored_array(value, order=order)
            self._seen[key] = len(self.leaves), value
            self.leaves.append(Leaf(path, array, torch_name(array.dtype) or "uint8", array.shape))
        return {"ndarray": [self._seen[key][0], descr, order]}


def _encode(form: SerializationFormat, value: Any, path: KeyPath) -> bytes:
    """Return what a format makes of an item. Raises: StateError naming it, for whatever the format raises."""
    try:
        data = form.encode(value)
    except StateError as exc:
        raise StateError(f"{nodes.format_path(path)}: {exc}") from exc
    except Exception as exc:
        raise StateError(f"{nodes.format_path(path)}: {type(form).__name__} cannot encode it: {exc}") from exc
    if not isinstance(data, bytes | bytearray | memoryview):
        raise StateError(f"{nodes.format_path(path)}: {type(form).__name__}.encode returned {type(data).__name__}: it must return bytes")
    return bytes(data)


def flatten(items: Mapping[str, Any], *, formats: Mapping[str, SerializationFormat] | None = None) -> Flat:
    """Take values apart into nodes and leaves, in the order in which the structure first reaches them.

    Leaves share memory with the values (see above). `formats`: of items that are to be files of a format, which must be able to carry them.
    Raises: StateError naming path, type and fix for what cannot be carried.
    """
    flattener = _Flattener(formats or {})
    return Flat({name: flattener.item(name, value) for name, value in items.items()}, flattener.leaves)


def _bytes_of(entry: Any) -> bytes:
    """Return the bytes in an entry. Raises: IntegrityError for one that is not made of bytes."""
    if not str(entry.dtype).endswith("uint8") or entry.ndim != 1:
        raise IntegrityError(f"encoded bytes cannot be {entry.dtype} of shape {list(entry.shape)}; run `syckpt verify`")
    array = entry.detach().cpu().numpy() if isinstance(entry, torch.Tensor) else entry
    return bytes(array.tobytes())


def unflatten(node: Node, tensor: Callable[[int], Any], *, encoded: Callable[[str, bytes], Any] | None = None) -> Any:
    """Return the value of a node; `tensor(i)` returns entry i as a torch tensor of its dtype and shape
    (a numpy array will do where the node asks for one). `encoded(form, data)` returns what a format made bytes of; without it, the bytes.

    It is asked once an entry, so ties inside the node hold; values share memory with what it returns.
    Raises: IntegrityError for a malformed node.
    """
    found: dict[int, Any] = {}
    arrays: dict[str, Any] = {}

    def entry(index: int) -> Any:
        if index not in found:
            found[index] = tensor(index)
        return found[index]

    def leaf(kind: str, payload: Any) -> Any:
        if kind == "tensor":
            return entry(payload)
        if kind == "ndarray":
            index, descr, order = payload
            key = str(payload)
            if key not in arrays:
                arrays[key] = numpy_of(entry(index), descr, order)
            return arrays[key]
        if kind == "encoded":
            form, index = payload
            data = _bytes_of(entry(index))
            return data if encoded is None else encoded(form, data)
        if kind == "npscalar":
            return _read_scalar(*payload)
        if kind == "size":
            return torch.Size(payload)
        if kind == "generator":
            return _read_generator(payload[0], nodes.decode(payload[1], leaf=leaf))
        try:
            if kind == "device":
                return torch.device(payload)
            dtype = getattr(torch, payload)
        except (RuntimeError, AttributeError) as exc:
            raise IntegrityError(f"this torch has no {kind} {payload[:40]!r}: upgrade it, or run `syckpt verify`") from exc
        if not isinstance(dtype, torch.dtype):
            raise IntegrityError(f"torch.{payload[:40]} is no dtype; run `syckpt verify`")
        return dtype

    return nodes.decode(node, leaf=leaf)
