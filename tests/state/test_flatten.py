"""flatten and unflatten: the structure apart from the bytes, and together again."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syckpt.errors import IntegrityError, StateError
from syckpt.objects import canonical, nodes
from syckpt.objects.dtypes import DTYPES
from syckpt.state.flatten import Flat, Leaf, flatten, unflatten


def raw(array: Any) -> bytes:
    """The bytes of a tensor or array in C order."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    return bytes(array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def from_raw(data: bytes, leaf: Leaf) -> torch.Tensor:
    dtype = getattr(torch, leaf.dtype)
    if not data:
        return torch.empty(leaf.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(leaf.shape)


def carried(value: Any) -> Any:
    """Through nodes as text and leaves as bytes."""
    flat = flatten({"item": value})
    for leaf in flat.leaves:
        assert tuple(leaf.array.shape) == leaf.shape
        assert str(leaf.array.dtype).removeprefix("torch.") == leaf.dtype
        assert len(raw(leaf.array)) == DTYPES[leaf.dtype].itemsize * int(np.prod(leaf.shape, dtype=np.int64))
    node = canonical.loads(canonical.dumps(flat.nodes["item"]))
    return unflatten(node, [from_raw(raw(leaf.array), leaf) for leaf in flat.leaves].__getitem__)


def same(a: Any, b: Any) -> bool:
    """Equality of type and bits, as `test_nodes` has it, for tensors and arrays too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.str_ | np.bytes_):
        return list(a) == list(b)
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))
    return bool(a == b)


with warnings.catch_warnings():
    # torch says once a process that complex32 is experimental.
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)

TENSOR_DTYPES = [name for name in DTYPES if hasattr(torch, name)]


def bits_as(dtype: str, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype))


KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=3),
    st.sampled_from(["", ".", "a.b", "a/b", "tensor", "__tensor__", "0", torch.float32, torch.Size([2]), np.int64(3)]),
    st.tuples(st.integers(), st.text(max_size=1)),
)
SCALARS = [torch.device("cuda:1"), torch.bfloat16, torch.Size([1, 0]), np.float32(1.5), np.str_("a\0"), np.bool_(True), Path("a")]


@st.composite
def leaves(draw: Any) -> Any:
    kind = draw(st.sampled_from(["tensor", "array", "key", "float", "scalar"]))
    if kind == "tensor":
        name = draw(st.sampled_from([name for name in TENSOR_DTYPES if name != "bool"]))
        count = 16 * draw(st.integers(0, 3))
        return bits_as(name, draw(st.binary(min_size=count, max_size=count))) if count else torch.empty(0, 2, dtype=getattr(torch, name))
    if kind == "array":
        shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
        name = draw(st.sampled_from(["<f4", ">i4", "<f2", "<c16", "?", "<M8[ns]", "<U5", "S3", "<u8"]))
        return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape).astype(name)
    return draw({"key": KEYS, "float": st.floats(allow_nan=False), "scalar": st.sampled_from(SCALARS)}[kind])


# A composite, not st.recursive: its repr would be so long that hypothesis warns.
@st.composite
def values(draw: Any, depth: int = 3) -> Any:
    kind = draw(st.sampled_from(["leaf", "list", "tuple", "deque", "dict", "marker", "ordered", "default", "counter"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves())
    if kind == "counter":
        return Counter(draw(st.lists(KEYS, max_size=4)))
    if kind in ("list", "tuple", "deque"):
        items = draw(st.lists(values(depth - 1), max_size=4))
        return {"list": list, "tuple": tuple, "deque": deque}[kind](items)
    keys = st.sampled_from(["tensor", "list"]) if kind == "marker" else KEYS
    pairs = draw(st.dictionaries(keys, values(depth - 1), max_size=3))
    return {"ordered": OrderedDict, "default": lambda found: defaultdict(None, found)}.get(kind, dict)(pairs)


@given(values())
@settings(max_examples=120, deadline=None)
def test_any_nesting_of_tensors_and_values_comes_back_the_same(value: Any) -> None:
    assert same(carried(value), value)


@pytest.mark.parametrize("name", TENSOR_DTYPES)
def test_every_dtype_keeps_its_bits(name: str) -> None:
    data = bytes([0, 1] * 16) if name == "bool" else bytes(range(224, 256))
    tensor = bits_as(name, data)
    assert same(carried(tensor), tensor)
    assert raw(carried(tensor)) == data
    assert flatten({"item": tensor}).leaves[0].dtype == name


def test_nan_payloads_and_negative_zero_keep_their_bits() -> None:
    tensor = torch.tensor([0x7FC00001, 0xFFC0DEAD, 0x7F800001, 0x80000000], dtype=torch.uint32).view(torch.float32)
    assert raw(carried(tensor)) == raw(tensor)


BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int8),
        BASE.T,
        BASE[1:3, ::2],
        BASE[:, :1].expand(4, 5),
        torch.as_strided(BASE, (3, 3), (1, 1)),
        torch.view_as_complex(BASE.reshape(4, 3, 2)).conj(),
        torch.view_as_complex(BASE.reshape(4, 3, 2)).conj().imag,
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        nn.Parameter(torch.ones(2)).data,
    ],
    ids=["0-d", "empty", "empty-3d", "transposed", "sliced", "expanded", "overlapping", "conj", "neg", "channels_last", "data"],
)
def test_views_are_stored_as_their_values(tensor: torch.Tensor) -> None:
    back = carried({"t": tensor})["t"]
    assert back.shape == tensor.shape
    assert back.tolist() == tensor.tolist()


def test_a_conjugate_view_is_no_tie_of_its_base() -> None:
    base = torch.tensor([1 + 2j])
    assert [leaf.array.tolist() for leaf in flatten({"item": [base, base.conj()]}).leaves] == [[1 + 2j], [1 - 2j]]


def test_leaves_share_memory_with_the_state() -> None:
    tensor, array = torch.zeros(3), np.zeros((2, 3), order="F")
    leaves = flatten({"item": [tensor, array]}).leaves
    assert leaves[0].array.data_ptr() == tensor.data_ptr()
    assert np.shares_memory(leaves[1].array, array)


class Plain(torch.Tensor):
    pass


def test_parameters_buffers_and_plain_subclasses_are_stored_as_detached_tensors() -> None:
    values = [nn.Parameter(torch.ones(2)), torch.ones(3).as_subclass(Plain), (torch.ones(4, requires_grad=True) * 2)]
    leaves = flatten({"item": values}).leaves
    assert [type(leaf.array) for leaf in leaves] == [torch.Tensor] * 3
    assert [leaf.array.requires_grad for leaf in leaves] == [False] * 3


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_one_leaf_and_come_back_tied() -> None:
    module = Tied()
    flat = flatten({"model": module.state_dict(), "copy": module.embed.weight})
    assert [leaf.path for leaf in flat.leaves] == [("model", "embed.weight")]
    assert flat.nodes == {
        "model": {"ordereddict": [["embed.weight", {"tensor": 0}], ["head.weight", {"tensor": 0}]]},
        "copy": {"tensor": 0},
    }
    back = carried(module.state_dict())
    assert back["embed.weight"] is back["head.weight"]


def test_ties_need_the_same_region() -> None:
    base = torch.arange(6.0)
    values = [base, base[:], base[1:], base.view(2, 3), base.view(torch.int32), base.clone()]
    assert flatten({"item": values}).nodes["item"] == {"list": [{"tensor": i} for i in (0, 0, 1, 2, 3, 4)]}


def test_empty_tensors_are_tied_by_identity_only() -> None:
    empty = torch.empty(0)
    assert flatten({"item": [empty, torch.empty(0), empty]}).nodes["item"] == {"list": [{"tensor": 0}, {"tensor": 1}, {"tensor": 0}]}


def test_numpy_ties_come_back_as_one_array() -> None:
    array = np.arange(3)
    back = carried([array, array, array[1:]])
    assert back[0] is back[1]
    assert back[2] is not back[1]


class Lending(Mapping[int, torch.Tensor]):
    """A mapping that makes its values when asked for, so that their memory may be reused."""

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        return iter(range(50))

    def __getitem__(self, key: int) -> torch.Tensor:
        return torch.full((4,), key) if key % 2 else torch.view_as_complex(torch.full((2, 2), float(key))).conj()


def test_ties_are_not_made_up_from_freed_memory() -> None:
    flat = flatten({"item": Lending()})
    assert [leaf.array[0].real.item() for leaf in flat.leaves] == list(range(50))


def padded() -> Any:
    return np.dtype([("a", "u1"), ("b", "<f8"), ("c", [("d", "<i2")], (2,))], align=True)


@pytest.mark.parametrize(
    ("array", "dtype", "shape", "descr", "order"),
    [
        (np.arange(6, dtype="<f4").reshape(2, 3), "float32", (2, 3), "<f4", "C"),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), "int64", (3, 2), "<i8", "F"),
        (np.arange(12).reshape(3, 4)[:, ::2], "int64", (3, 2), "<i8", "C"),
        (np.arange(4)[::-1], "int64", (4,), "<i8", "C"),
        (np.array(2.5), "float64", (), "<f8", "C"),
        (np.array([True, False]), "bool", (2,), "|b1", "C"),
        (np.zeros((0, 2), "<u2"), "uint16", (0, 2), "<u2", "C"),
        (np.array([1, 2], ">i4"), "uint8", (2, 4), ">i4", "C"),
        (np.asfortranarray(np.arange(6).reshape(2, 3).astype(">i2")), "uint8", (3, 2, 2), ">i2", "F"),
        (np.array(["ab", "ü"]), "uint8", (2, 8), "<U2", "C"),
        (np.array("ab"), "uint8", (8,), "<U2", "C"),
        (np.array(["", ""]), "uint8", (2, 4), "<U1", "C"),
        (np.array([b"x\0y"]), "uint8", (1, 3), "|S3", "C"),
        (np.array(["2020-01-01", "NaT"], "M8[D]"), "uint8", (2, 8), "<M8[D]", "C"),
        (np.array([3], "m8[25us]"), "uint8", (1, 8), "<m8[25us]", "C"),
        (np.zeros((2, 0), padded()), "uint8", (2, 0, 24), None, "C"),
        (np.ones(3, padded()), "uint8", (3, 24), None, "C"),
        (np.ones(3, [("x", "<f4"), ("y", ">i8")])[::2], "uint8", (2, 12), [["x", "<f4"], ["y", ">i8"]], "C"),
        (np.array([1.5], np.longdouble), "uint8", (1, 16), "<f16", "C"),
        (np.zeros(2, "V3"), "uint8", (2, 3), "|V3", "C"),
    ],
)
def test_numpy_arrays_of_any_plain_dtype_come_back(array: Any, dtype: str, shape: tuple[int, ...], descr: Any, order: str) -> None:
    flat = flatten({"item": array})
    assert (flat.leaves[0].dtype, flat.leaves[0].shape) == (dtype, shape)
    assert flat.nodes["item"]["ndarray"][::2] == [0, order]
    assert descr is None or flat.nodes["item"]["ndarray"][1] == descr
    back = carried(array)
    assert same(back, array)
    assert back.dtype.str == array.dtype.str
    assert back.flags.f_contiguous == array.flags.f_contiguous or not array.flags.c_contiguous


NUMPY_SCALARS = [np.float32(1.5), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(False), np.complex64(1j), np.float16(2)]
NUMPY_SCALARS += [
    np.str_("a\0"),
    np.str_("a\0\ud800"),
    np.str_(""),
    np.bytes_(b"a\0"),
    np.bytes_(b""),
    np.datetime64("2020-01-01", "ns"),
    np.timedelta64(3, "25s"),
]
NUMPY_SCALARS += [
    np.longdouble(1.25),
    np.ones(1, [("x", "<i4"), ("y", "S2")])[0],
    np.frombuffer(b"\xff\xf8\xad\xde\xef\xbe\xf8\x7f", "<f8")[0],
]


@pytest.mark.parametrize("value", NUMPY_SCALARS, ids=lambda value: type(value).__name__)
def test_numpy_scalars_come_back_with_type_and_bits(value: Any) -> None:
    back = carried([value])[0]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert bytes(back) == bytes(value) if isinstance(value, np.bytes_) else back.tobytes() == value.tobytes()
    assert not isinstance(value, np.str_) or list(back) == list(value)


def test_torch_sizes_dtypes_and_devices_come_back() -> None:
    value = {torch.float8_e4m3fn: torch.Size([2, 0]), torch.Size([1]): torch.device("cuda", 3), "q": torch.qint8}
    assert same(carried(value), value)
    assert (
        repr(nodes.decode(flatten({"item": value}).nodes["item"]))
        == "{<dtype float8_e4m3fn>: <size [2, 0]>, <size [1]>: <device cuda:3>, 'q': <dtype qint8>}"
    )


@pytest.mark.parametrize("make", [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64])
def test_numpy_generators_go_on_where_they_were(make: Any) -> None:
    live = np.random.Generator(make(5))
    live.integers(0, 9, 7, dtype=np.uint32)
    live.spawn(2)
    back = carried({"g": live})["g"]
    assert type(back.bit_generator) is make
    assert back.integers(0, 99, 9).tolist() == live.integers(0, 99, 9).tolist()
    assert back.spawn(1)[0].random() == live.spawn(1)[0].random()


@pytest.mark.parametrize("live", [np.random.RandomState(3), np.random.RandomState(np.random.PCG64(3))], ids=["MT19937", "PCG64"])
def test_legacy_numpy_generators_go_on_where_they_were(live: Any) -> None:
    live.standard_normal(3)
    back = carried(live)
    assert back.standard_normal(5).tolist() == live.standard_normal(5).tolist()


def test_torch_generators_go_on_where_they_were() -> None:
    live = torch.Generator().manual_seed(7)
    torch.randn(3, generator=live)
    before = live.get_state()
    back = carried(live)
    assert torch.equal(live.get_state(), before)
    assert torch.randn(5, generator=back).tolist() == torch.randn(5, generator=live).tolist()


def test_a_generator_of_an_absent_device_can_still_be_read() -> None:
    flat = flatten({"item": torch.Generator()})
    node = flat.nodes["item"]
    node["generator"][1]["dict"][0][1] = {"device": "cuda:9"}
    back = unflatten(node, lambda i: flat.leaves[i].array)
    assert back.kind == "generator"
    assert back.payload["device"] == torch.device("cuda:9")


def test_leaves_stand_in_the_order_of_first_reach() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), np.zeros(3)
    flat = flatten({"x": {"p": b, 2: [a, b]}, "y": (c, a)})
    assert [leaf.path for leaf in flat.leaves] == [("x", "p"), ("x", 2, 0), ("y", 0)]
    assert [nodes.format_path(leaf.path) for leaf in flat.leaves] == ["x/p", "x/2/0", "y/0"]


@dataclasses.dataclass
class Holder:
    weight: torch.Tensor


def test_tensors_in_a_dataclass_and_under_any_key_have_paths() -> None:
    flat = flatten({"x": {(1, None): Holder(torch.zeros(1)), "a/b": torch.zeros(2)}})
    assert [nodes.format_path(leaf.path) for leaf in flat.leaves] == ['x/({"tuple":[1,null]})/weight', 'x/"a/b"']


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def nested_tensor() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (quantized, "int_repr"),
        (nested_tensor, "unbind"),
        (lambda: torch.empty(2, device="meta"), "to_empty"),
        (Wrapper, "Wrapper"),
        (lambda: nn.parameter.UninitializedParameter(), "forward pass"),
        (lambda: np.array([object()]), "Python objects"),
        (lambda: np.zeros(1, [("a", "O")]), "Python objects"),
        (lambda: np.ma.masked_array([1]), "MaskedArray"),
        (lambda: np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 2]})), "cannot be carried"),
        (lambda: np.rec.array([(1,)], dtype=[("a", "<i4")])[0], "would come back as"),
        (lambda: {torch.ones(1): 1}, "cannot be a key"),
        (lambda: {torch.Generator()}, "cannot be a key"),
        (lambda: nn.Linear(1, 1), "state_dict/load_state_dict"),
        (lambda: random.Random(1), "state_dict/load_state_dict"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_carried_is_named(make: Any, words: str) -> None:
    with pytest.raises(StateError) as caught:
        flatten({"item": {"deep": [make()]}})
    assert "item/deep/0: " in str(caught.value)
    assert words in str(caught.value)


def test_flattening_moves_no_random_stream() -> None:
    before = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist(), torch.get_rng_state().tolist()
    carried([torch.Generator(), np.random.default_rng(), np.random.RandomState(1), torch.rand(2)])
    state = torch.get_rng_state()
    torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))
    torch.rand(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()) == before[:2]


@pytest.mark.parametrize(
    "node",
    [
        {"dtype": "nonsense"},
        {"dtype": "nn"},
        {"device": "nonsense:1"},
        {"npscalar": ["<f4", "AA"]},
        {"npscalar": ["|O8", "AAAAAAAAAAA"]},
        {"npscalar": ["<f4", "*"]},
        {"npscalar": ["<U1", "____"]},
        {"npscalar": [[["a"]], ""]},
        {"ndarray": [0, "<f8", "C"]},
        {"ndarray": [0, ">f4", "C"]},
        {"ndarray": [0, "(9999999999,)f4", "C"]},
        {"ndarray": [0, [3], "C"]},
        {"ndarray": [0, [["a", "<f4", 5]], "C"]},
        {"generator": ["torch", 3]},
        {"generator": ["torch", {"tensor": 0}]},
        {"generator": ["torch", {"dict": [["device", {"device": "cpu"}], ["state", {"tensor": 0}]]}]},
        {"generator": ["os", {"dict": []}]},
        {"generator": ["PCG64", {"dict": [["state", {"dict": []}], ["seed_seq", None]]}]},
        {"generator": ["PCG64", {"dict": [["state", None], ["seed_seq", {"dict": [["evil", 1]]}]]}]},
        {"generator": ["RandomState", {"dict": [["bit_generator", "os"]]}]},
    ],
)
def test_malformed_foreign_nodes_are_integrity_errors(node: Any) -> None:
    with pytest.raises(IntegrityError):
        unflatten(node, lambda index: torch.zeros(2))


@st.composite
def junk(draw: Any, depth: int = 4) -> Any:
    kind = draw(st.sampled_from(["list", "dict", "foreign", "generator", "ndarray", "npscalar"])) if depth else ""
    if not kind:
        return draw(st.sampled_from([None, 0, 1, 2**31, "<f4", "<U1", "", "C", "cpu", "torch", "PCG64", "MT19937", "state", "AAAA"]))
    if kind == "list":
        return draw(st.lists(junk(depth - 1), max_size=3))
    if kind == "dict":
        names = st.sampled_from(["state", "device", "seed_seq", "bit_generator", "has_gauss"])
        return {"dict": [list(pair) for pair in draw(st.dictionaries(names, junk(depth - 1))).items()]}
    inner = draw(junk(depth - 1))
    return {
        "foreign": lambda: {draw(st.sampled_from(sorted(nodes.FOREIGN_KINDS))): inner},
        "generator": lambda: {"generator": [draw(st.sampled_from(["torch", "PCG64", "RandomState"])), inner]},
        "ndarray": lambda: {"ndarray": [0, inner, "F"]},
        "npscalar": lambda: {"npscalar": [inner, draw(st.sampled_from(["", "AAAA", "AAAAAA"]))]},
    }[kind]()


@given(junk())
@settings(max_examples=200, deadline=None)
def test_unflattening_anything_raises_nothing_but_integrity_errors(node: Any) -> None:
    try:
        unflatten(node, lambda index: torch.zeros(4, dtype=torch.uint8))
    except IntegrityError:
        pass


def test_two_flattenings_of_one_state_have_one_text() -> None:
    def text(flat: Flat) -> bytes:
        return canonical.dumps([flat.nodes, [leaf.path for leaf in flat.leaves]])

    state = {"m": nn.Linear(2, 2).state_dict(), "s": {"b", "a"}}
    assert text(flatten(state)) == text(flatten(state))
