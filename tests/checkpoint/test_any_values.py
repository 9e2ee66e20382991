"""Any value that a script holds, through a real manager: types come back as they went in, or the save refuses it by its path and a fix."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cached_property
from typing import Any, NamedTuple

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import syckpt
from syckpt import CheckpointManager


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Recipe:
    lr: Any
    layers: Any = None

    @cached_property
    def text(self) -> str:
        return f"lr={self.lr}"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Phase(enum.Enum):
    WARM = 1
    COLD = "cold"


class Shape(enum.Enum):
    CIRCLE = 1


class Level(enum.IntEnum):
    LOW = 3


class Word(enum.StrEnum):
    YES = "yes"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with CheckpointManager(tmp_path_factory.mktemp("values"), save_on_exit=False) as manager:
        yield manager


def saved(ckpt: CheckpointManager, value: Any) -> str:
    pending = ckpt.save(payload={"x": value})
    assert pending is not None
    return pending.id


def same(a: Any, b: Any) -> bool:
    """Equal in type, bits and order, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for t in (a, b)]
        return (a.dtype, a.shape, raw[0]) == (b.dtype, b.shape, raw[1])
    if isinstance(a, np.ndarray | np.generic):
        same_order = not isinstance(a, np.ndarray) or a.flags.fnc == b.flags.fnc
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) and same_order and a.dtype.str == b.dtype.str
    if isinstance(a, torch.Generator):
        return a.get_state().tolist() == b.get_state().tolist()
    if isinstance(a, np.random.Generator):
        return type(a.bit_generator) is type(b.bit_generator) and repr(a.bit_generator.state) == repr(b.bit_generator.state)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(*keys) and same(a[keys[0]], b[keys[1]]) for keys in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        return a == b and Counter(map(type, a)) == Counter(map(type, b))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, item.name), getattr(b, item.name)) for item in dataclasses.fields(a))
    return bool(a == b)


# --- what comes back as it went in, without a target -------------------------------------------------------------------------------

KEYS = {
    "ints": {0: "a", -1: "b", 2**70: "c"},
    "number or text": {1: "int", "1": "text", 1.5: "float", "1.5": "text", b"1": "bytes"},
    "true and false": {True: 1, False: 0},
    "none": {None: 0, "None": 1},
    "tuples": {(1, "a"): 1, (1, ("b", None)): 2, (): 3},
    "dots": {"a.b": 1, "a": {"b": 2}},
    "slashes": {"a/b": 1, "a": {"b": 2}},
    "empty": {"": 1, "a": {"": {"": 2}}},
    "odd": {"\ud800": 1, "\x00": 2, "\n": 3, "é\u0301": 4, " ": 5, "..": 6},
    "like our own markers": {
        "tensor": 0,
        "dict": {"list": [{"tuple": [1]}]},
        "int": "5",
        "tuple": {"tensor": 0},
        "__tensor__": "x",
        "__tuple__": [1],
        "enum": ["Color", "RED", 1],
        "ndarray": [0, "<f4", "C"],
        "<rng>": 1,
    },
    "one marker alone": [{"tensor": 0}, {"set": [1]}, {"namedtuple": ["P", [["x", 1]]]}, {"key": "text"}],
    "other": {frozenset({1, 2}): 1, np.int32(3): 2, torch.float16: 3, torch.device("cpu"): 4, torch.Size([1]): 5, pathlib.Path("a"): 6},
    "infinite": {math.inf: 1, -math.inf: 2},
}
CONTAINERS = [
    (1, (2,), ()),
    [[], [[]]],
    {1, "a", None, (1, 2), 2.5},
    frozenset({frozenset({1}), b"x"}),
    set(),
    OrderedDict([("b", 1), ("a", 2)]),
    {"b": 1, "a": 2},
    Counter({5: 1, "x": -2, (1,): 0}),
    deque([1, 2, 3], maxlen=5),
    deque(),
    defaultdict(None, {"a": [1]}),
]
SCALARS = [
    None, True, False, 0, -1, 2**53, -(2**53) - 1, 2**64, -(10**40), 0.0, -0.0, 1e-320, 0.1, math.inf, -math.inf, math.nan,
    struct.unpack("<d", struct.pack("<Q", 0xFFF8DEADBEEF0001))[0],
    1j, complex(-0.0, math.nan), complex(math.inf, -0.0), "", "text", "\ud83d\ude00", "😀", b"", b"\x00\xff", bytearray(b"ab"),
    range(3), range(10, 0, -3), slice(None, 3, None), slice("a", (1,), 2.5),
    pathlib.Path("a/b"), pathlib.PurePosixPath("/c"), pathlib.Path(),
    torch.Size([2, 3]), torch.Size([]), torch.float32, torch.float8_e4m3fn, torch.uint7, torch.quint8,
    torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"),
]  # fmt: skip
STRUCTURED = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", [("d", "S3"), ("e", "<U2")])])
ALIGNED = np.dtype([("a", "i1"), ("b", "<f8")], align=True)
CODES = [
    "?",
    "b",
    "h",
    "i",
    "l",
    "q",
    "B",
    "H",
    "I",
    "L",
    "Q",
    "e",
    "f",
    "d",
    "g",
    "F",
    "D",
    "G",
    "S5",
    "U3",
    "M8[ns]",
    "m8[us]",
    "M8[D]",
    "V4",
]
ARRAYS = [np.arange(6).reshape(2, 3).astype(np.dtype(code)) for code in CODES if code[0] not in "VM"]
ARRAYS += [np.arange(6).reshape(2, 3).astype("M8[ns]"), np.array(["2020-01-01", "NaT"], "M8[D]"), np.array([b"abcd", b"\0\1"], "V4")]
ARRAYS += [array.astype(array.dtype.newbyteorder(">")) for array in ARRAYS if array.dtype.itemsize > 1 and array.dtype.kind not in "SV"]
ARRAYS += [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.asfortranarray(np.arange(6).reshape(2, 3).astype(">i2"))]
ARRAYS += [
    np.zeros((2,), STRUCTURED),
    np.zeros((1, 2), ALIGNED),
    np.array(2.5),
    np.array(7, ">u2"),
    np.zeros((0, 3)),
    np.array("text"),
    np.zeros(3, "S0"),
]
ARRAYS += [np.arange(10)[::2], np.arange(10)[::-1], np.arange(6).reshape(2, 3)[:, 1:], np.broadcast_to(np.float32(1), (2, 3))]
NUMPY_SCALARS = [array.reshape(-1)[0] for array in ARRAYS if array.size and array.dtype.char not in "VqQ"]
NUMPY_SCALARS += [
    np.datetime64("NaT"),
    np.float32("nan"),
    np.float64("-0.0"),
    np.zeros(1, STRUCTURED)[0],
    np.str_("a\0"),
    np.bytes_(b"a\0"),
]


def test_keys_of_every_kind_come_back_as_they_went_in(ckpt: CheckpointManager) -> None:
    commit = saved(
        ckpt,
        {
            name: {**keys, "tensors": {key: torch.ones(1) for key in keys}} if isinstance(keys, dict) else keys
            for name, keys in KEYS.items()
        },
    )
    loaded = ckpt.load(commit)["x"]
    for name, keys in KEYS.items():
        if isinstance(keys, dict):
            tensors = loaded[name].pop("tensors")
            assert same(list(tensors), list(keys)), name
            assert all(tensor.tolist() == [1.0] for tensor in tensors.values())
        assert same(loaded[name], keys), name
    target = {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}, 1: torch.zeros(1), "1": torch.zeros(1)}
    values = {"a.b": torch.full((1,), 1.0), "a": {"b": torch.full((1,), 2.0)}, 1: torch.full((1,), 3.0), "1": torch.full((1,), 4.0)}
    ckpt.load(saved(ckpt, values), into={"x": target})
    assert [target["a.b"].item(), target["a"]["b"].item(), target[1].item(), target["1"].item()] == [1.0, 2.0, 3.0, 4.0]


def test_values_come_back_with_their_types_and_bits_with_a_target_and_without(ckpt: CheckpointManager) -> None:
    value = {"containers": CONTAINERS, "scalars": SCALARS, "arrays": ARRAYS, "numpy": NUMPY_SCALARS}
    commit = saved(ckpt, value)
    for loaded in (ckpt.load(commit)["x"], ckpt.load(commit, into={"x": None})["x"]):
        for name, items in value.items():
            assert len(loaded[name]) == len(items)
            for found, item in zip(loaded[name], items, strict=True):
                assert same(found, item), (name, item, found)
    loaded = ckpt.load(commit, into={"x": {**value, "arrays": [np.zeros_like(array) for array in ARRAYS]}})["x"]
    assert all(map(same, loaded["scalars"], SCALARS))
    assert all(map(same, loaded["containers"], CONTAINERS))
    # An array that is laid out in another way stays so: it is the target's.
    assert all((a.dtype, a.tobytes()) == (b.dtype, b.tobytes()) for a, b in zip(loaded["arrays"], ARRAYS, strict=True))


def test_generators_go_on_where_they_were(ckpt: CheckpointManager) -> None:
    ours = {
        "torch": torch.Generator().manual_seed(3),
        "numpy": np.random.default_rng(3),
        "philox": np.random.Generator(np.random.Philox(3)),
        "legacy": np.random.RandomState(3),
    }
    torch.rand(3, generator=ours["torch"])
    ours["numpy"].random(3, np.float32)
    ours["legacy"].normal()
    commit = saved(ckpt, ours)
    loaded = ckpt.load(commit)["x"]
    assert [type(value) for value in loaded.values()] == [type(value) for value in ours.values()]
    for draw in (
        lambda g: torch.rand(4, generator=g["torch"]).tolist(),
        lambda g: g["numpy"].random(4, np.float32).tolist(),
        lambda g: g["numpy"].spawn(1)[0].random(2).tolist(),
        lambda g: g["philox"].integers(9, size=4).tolist(),
        lambda g: g["legacy"].normal(size=3).tolist(),
    ):
        assert draw(loaded) == draw(ours)


# --- types that only a target can bring back -----------------------------------------------------------------------------------

TYPED = {
    "point": Point(1, [2.5]),
    "recipe": Recipe(0.1, [Frozen(3), Point(torch.ones(2), None)]),
    "phase": Phase.COLD,
    "level": Level.LOW,
    "word": Word.YES,
    "right": Right.READ | Right.WRITE,
    "counts": defaultdict(int, {"a": 1}),
    "by phase": {Phase.WARM: 1, Level.LOW: 2},
}
PLAIN = {
    "point": (1, [2.5]),
    "phase": "cold",
    "level": 3,
    "word": "yes",
    "right": 3,
    "counts": {"a": 1},
    "by phase": {1: 1, 3: 2},
}


def test_without_a_target_classes_read_as_plain_values_and_the_report_says_so(ckpt: CheckpointManager) -> None:
    commit = saved(ckpt, TYPED)
    loaded = ckpt.load(commit)["x"]
    assert {name: loaded[name] for name in PLAIN} == PLAIN
    assert [type(loaded[name]) for name in ("point", "phase", "level", "word", "right")] == [tuple, str, int, str, int]
    assert (loaded["recipe"]["lr"], loaded["recipe"]["layers"][0], loaded["recipe"]["layers"][1][0].tolist()) == (
        0.1,
        {"value": 3},
        [1.0, 1.0],
    )
    with pytest.raises(KeyError):
        loaded["counts"]["b"]
    why = "since no target shows the type"
    assert sorted(ckpt.last_report.notes) == sorted(
        [
            f"x/point, x/recipe/layers/1: namedtuple Point, read as a tuple, {why}",
            f"x/recipe: dataclass Recipe, read as a dict, {why}",
            f"x/recipe/layers/0: dataclass Frozen, read as a dict, {why}",
            f'x/phase, x/"by phase": member of the enum Phase, read as its value, {why}',
            f'x/level, x/"by phase": member of the enum Level, read as its value, {why}',
            f"x/word: member of the enum Word, read as its value, {why}",
            f"x/right: member of the enum Right, read as its value, {why}",
            f"x/counts: defaultdict, read without its factory, {why}",
        ]
    )
    ckpt.load(saved(ckpt, {"plain": [1, {"a": (2,)}]}))
    assert ckpt.last_report.notes == []


def fresh_target() -> dict[str, Any]:
    return {
        "point": Point(0, []),
        "recipe": Recipe(0.0, [Frozen(0), Point(torch.zeros(2), 1)]),
        "phase": Phase.WARM,
        "level": Level.LOW,
        "word": Word.YES,
        "right": Right.READ,
        "counts": defaultdict(int, {"a": 0}),
        "by phase": {Phase.WARM: 0, Level.LOW: 0},
    }


def test_a_target_that_shows_classes_gets_them_back(ckpt: CheckpointManager) -> None:
    commit = saved(ckpt, TYPED)
    target = fresh_target()
    assert target["recipe"].text == "lr=0.0"
    loaded = ckpt.load(commit, into={"x": target})["x"]
    assert same(loaded, TYPED)
    assert ckpt.last_report.notes == []
    assert loaded["recipe"].layers[1].x is target["recipe"].layers[1].x
    # What the target had computed from its own values is not kept.
    assert loaded["recipe"].text == "lr=0.1"
    assert loaded["counts"]["new"] == 0
    assert target["recipe"].lr == 0.0


def test_a_target_of_another_class_is_told_what_it_gets(ckpt: CheckpointManager) -> None:
    commit = saved(ckpt, {"phase": Phase.WARM, "point": Point(1, 2), "recipe": Recipe(1), "counts": defaultdict(list, a=[1])})
    with pytest.raises(syckpt.StateError, match=r"x/phase: expected a member of Shape, found Phase.WARM"):
        ckpt.load(commit, into={"x": {"phase": Shape.CIRCLE, "point": (0, 0), "recipe": {"lr": 0, "layers": 0}, "counts": {"a": []}}})
    loaded = ckpt.load(
        commit, into={"x": {"phase": 0, "point": (torch.zeros(1), 0), "recipe": {"lr": 0, "layers": 0}, "counts": {"a": []}}}, strict=False
    )
    assert same(loaded["x"]["recipe"], {"lr": 1, "layers": None})
    assert ckpt.last_report.mismatched == ["x/point/x: expected float32 [1], found int"]
    assert sorted(note.partition(",")[0] for note in ckpt.last_report.notes) == [
        "x/counts: defaultdict",
        "x/phase: member of the enum Phase",
        "x/point: namedtuple Point",
        "x/recipe: dataclass Recipe",
    ]


def test_a_registered_value_shows_its_own_types_on_resume_whatever_has_grown(tmp_path: pathlib.Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.phase, self.seen = Phase.WARM, [torch.zeros(1)]

        def state_dict(self) -> dict[str, Any]:
            return {"phase": self.phase, "seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.phase, self.seen = state["phase"], state["seen"]

    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        trainer = Trainer()
        ckpt.recipe = Recipe(0.5, [Frozen(1), Frozen(torch.ones(2))])
        ckpt.phase, ckpt.point, ckpt.trainer = Phase.COLD, Point(1, 2), trainer
        ckpt.table = {"a": Point(1, torch.ones(3)), "b": Phase.WARM, "new": {Phase.COLD: 1}}
        trainer.phase, trainer.seen = Phase.COLD, [torch.ones(1), torch.ones(2)]
        ckpt.save()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        held = torch.zeros(3)
        ckpt.recipe = Recipe(0.0, [Frozen(0)])
        ckpt.phase, ckpt.point, ckpt.trainer = Phase.WARM, Point(0, 0), (trainer := Trainer())
        ckpt.table = {"a": Point(0, held), "b": Phase.COLD, "gone": 1}
        assert (ckpt.phase, ckpt.point, trainer.phase) == (Phase.COLD, Point(1, 2), Phase.COLD)
        assert [t.tolist() for t in trainer.seen] == [[1.0], [1.0, 1.0]]
        # Of the list's second element no type is shown.
        assert (ckpt.recipe.lr, ckpt.recipe.layers[0], ckpt.recipe.layers[1]["value"].tolist()) == (0.5, Frozen(1), [1.0, 1.0])
        assert (type(ckpt.table["a"]), ckpt.table["a"].y.tolist(), ckpt.table["b"], ckpt.table["new"]) == (
            Point,
            [1.0] * 3,
            Phase.WARM,
            {"cold": 1},
        )
        # A plain value is replaced: what the script put there is left alone, it may be part of something else.
        assert held.tolist() == [0.0] * 3
        assert [note.partition(",")[0] for note in ckpt.last_report.notes] == [
            "recipe/layers/1: dataclass Frozen",
            "table/new: member of the enum Phase",
        ]


# --- what cannot be carried ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Unset:
    value: Any = dataclasses.field(init=False)


class Plain:
    pass


class SubDict(dict[str, int]):
    pass


def cycle() -> list[Any]:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(300):
        value = [value]
    return value


class Labelled(namedtuple("Labelled", "x")):
    """Without `__slots__`: it may be given attributes."""


def labelled() -> Labelled:
    value = Labelled(1)
    value.label = "a"  # type: ignore[attr-defined]
    return value


REFUSED = [
    (labelled(), r"the namedtuple \S+Labelled has attributes that are no fields: label; register an object"),
    (Unset(), r"the dataclass \S+Unset has fields without a value: value; set them"),
    (Plain(), r"a value of type \S+Plain cannot be carried; register an object with state_dict/load_state_dict, or convert it"),
    (lambda: 1, "a value of type function cannot be carried; register an object"),
    (object, "a value of type type cannot be carried"),
    (SubDict(a=1), r"\S+SubDict is a subclass of dict that a load could not bring back; convert it with dict\(...\)"),
    (
        np.array([1, None], object),
        "numpy dtype object holds Python objects, which cannot be carried; convert it to a plain dtype or to lists",
    ),
    (np.zeros(1, [("a", object)]), "numpy dtype .* holds Python objects"),
    (np.ma.array([1, 2], mask=[0, 1]), r"MaskedArray cannot be carried; convert it with np.array\(...\)"),
    (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), r"recarray cannot be carried; convert it with np.array\(...\)"),
    ({torch.ones(1): 1}, "a torch.Tensor cannot be a key, a member of a set or of an enum; hold it in a list or a dict"),
    ({Phase.WARM: 1, 1: 2}, "some keys or members of this dict are told apart by their class only; use plain ones"),
    (iter([1]), "a value of type list_iterator cannot be carried"),
    (open, "a value of type builtin_function_or_method cannot be carried"),
    (pathlib.PureWindowsPath("a"), r"a value of type pathlib\S*PureWindowsPath cannot be carried"),
    (collections.UserDict, "a value of type abc.ABCMeta cannot be carried"),
]


@pytest.mark.parametrize(("value", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_carried_is_refused_at_save_by_path_and_fix(ckpt: CheckpointManager, value: Any, why: str) -> None:
    before = ckpt.hash
    path = r"x/a\.b/\(null\)/0/y"
    with pytest.raises(syckpt.StateError, match=f"^{path}\\S*: {why}"):
        ckpt.save(payload={"x": {"a.b": {None: [Point(1, value)]}}})
    assert ckpt.hash == before


def test_cycles_and_bottomless_nesting_are_refused_where_they_close(ckpt: CheckpointManager) -> None:
    with pytest.raises(syckpt.StateError, match=r"^x/1/again: a list that contains itself cannot be carried; break the cycle"):
        ckpt.save(payload={"x": cycle()})
    with pytest.raises(syckpt.StateError, match=r"^x/0/0/.*: nested 200 deep, more than a manifest can carry; flatten it"):
        ckpt.save(payload={"x": deep()})


# --- the law -------------------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec=None), max_size=4) | st.sampled_from(["tensor", "dict", "a.b", "a/b", "", "0", "<rng>", "_orig_mod.w"])
FLOATS = st.floats(allow_nan=True) | st.sampled_from([-0.0, math.inf])
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | FLOATS.filter(lambda f: f == f)
    | TEXTS
    | st.binary(max_size=4)
    | st.sampled_from([torch.int8, pathlib.Path("p")]),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
TENSORS = st.builds(
    lambda name, data, shape: (
        torch.frombuffer(bytearray((data * 16)[: 4 * getattr(torch, name).itemsize]), dtype=torch.uint8)
        .view(getattr(torch, name))[: math.prod(shape)]
        .view(shape)
        .clone()
    ),
    st.sampled_from(["float32", "bfloat16", "int64", "uint8", "complex64", "float8_e5m2", "float64"]),
    st.binary(min_size=4, max_size=64),
    st.sampled_from([(), (1,), (4,), (2, 2), (0,), (3, 1), (0, 2)]),
)
NUMPY = hnp.arrays(hnp.scalar_dtypes() | st.just(STRUCTURED), hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
LEAVES = HASHABLE | FLOATS | st.complex_numbers() | st.binary(max_size=5).map(bytearray) | TENSORS | NUMPY
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 4))
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(TEXTS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(lambda pairs: defaultdict(int, pairs))
        | st.dictionaries(HASHABLE, st.integers(), max_size=3).map(Counter)
        | st.sets(HASHABLE, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Recipe, inner, inner)
        | st.builds(Frozen, inner)
        | st.sampled_from([Phase.WARM, Level.LOW, Word.YES, Right.READ | Right.WRITE])
    ),
    max_leaves=12,
)


def blank(value: Any) -> Any:
    """Return a value of the same types and shapes that holds none of the values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value, subok=False)
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {key: blank(item) for key, item in value.items()})
    if isinstance(value, Counter | OrderedDict | dict):
        return type(value)({key: blank(item) for key, item in value.items()})
    if isinstance(value, Point):
        return Point(*map(blank, value))
    if isinstance(value, deque):
        return deque(map(blank, value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(map(blank, value))
    if dataclasses.is_dataclass(value):
        return type(value)(*(blank(getattr(value, item.name)) for item in dataclasses.fields(value)))
    return next(iter(type(value))) if isinstance(value, enum.Enum) else None


def mutate(value: Any) -> None:
    """Change everything that can be changed in place."""
    if isinstance(value, torch.Tensor):
        value.view(-1).view(torch.uint8).bitwise_not_()
    elif isinstance(value, np.ndarray) and value.size:
        value.reshape(-1).view(np.uint8)[...] ^= 255
    elif isinstance(value, bytearray):
        value.extend(b"more")
    elif isinstance(value, dict):
        for item in value.values():
            mutate(item)
        value.clear()
    elif isinstance(value, set):
        value.add("more")
    elif isinstance(value, list | tuple | deque):
        for item in value:
            mutate(item)
        if not isinstance(value, tuple):
            value.clear()
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            mutate(getattr(value, item.name))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(states=st.lists(STATES, min_size=6, max_size=6))
def test_save_then_load_into_a_target_of_the_same_types_is_the_identity(ckpt: CheckpointManager, states: list[Any]) -> None:
    expected, targets = copy.deepcopy(states), [blank(state) for state in states]
    pending = ckpt.save(payload={f"s{number}": state for number, state in enumerate(states)})
    mutate(states)
    assert pending is not None
    loaded = ckpt.load(pending.id, into={f"s{number}": target for number, target in enumerate(targets)})
    for number, value in enumerate(expected):
        assert same(loaded[f"s{number}"], value)
    assert ckpt.last_report.notes == []
