"""Nodes carry Python values through canonical JSON, types and bits included."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
import struct
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syckpt.errors import IntegrityError, StateError
from syckpt.objects import canonical, nodes

Point = namedtuple("Point", ["x", "y"])


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 3


class Word(str, enum.Enum):
    YES = "yes"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Config:
    lr: float
    layers: list[int]


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int


def carried(value: Any) -> Any:
    """Through a node and its text."""
    return nodes.decode(canonical.loads(canonical.dumps(nodes.encode(value))))


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


def same(a: Any, b: Any) -> bool:
    """Equality of type, bits and order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bits(a) == bits(b)
    if isinstance(a, complex):
        return bits(a.real) == bits(b.real) and bits(a.imag) == bits(b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, set | frozenset):
        return sorted(map(canonical.dumps, map(nodes.encode, a))) == sorted(map(canonical.dumps, map(nodes.encode, b)))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


TEXTS = ["", "a.b", "a/b", "tensor", "__tensor__", "0", "-1", "\ud800", "\ud83d\ude00", "dict", "int"]
PLAIN_KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.sampled_from(TEXTS), st.binary(max_size=4)
)
KEYS = st.one_of(PLAIN_KEYS, st.lists(PLAIN_KEYS, max_size=3).map(tuple), st.frozensets(PLAIN_KEYS, max_size=3))
ATOMS = st.one_of(
    KEYS,
    st.integers(min_value=-(2**80), max_value=2**80),
    st.complex_numbers(),
    st.binary(max_size=5).map(bytearray),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.sampled_from([pathlib.Path("a/b"), pathlib.Path("/")]),
)


# Composites, not st.recursive: its repr would be so long that hypothesis warns.
@st.composite
def values(draw: Any, depth: int = 3) -> Any:
    kinds = ["atom", "set", "list", "tuple", "deque", "dict", "marker", "ordered", "default", "counter"]
    kind = draw(st.sampled_from(kinds)) if depth else "atom"
    if kind == "atom":
        return draw(ATOMS)
    if kind in ("set", "counter"):
        return {"set": set, "counter": Counter}[kind](draw(st.lists(KEYS, max_size=4)))
    if kind in ("list", "tuple", "deque"):
        items = draw(st.lists(values(depth - 1), max_size=4))
        return {"list": list, "tuple": tuple, "deque": lambda found: deque(found, 5)}[kind](items)
    pairs = draw(st.dictionaries(st.sampled_from(["tensor", "list"]) if kind == "marker" else KEYS, values(depth - 1), max_size=3))
    return {"ordered": OrderedDict, "default": lambda found: defaultdict(None, found)}.get(kind, dict)(pairs)


@given(values())
@settings(max_examples=150, deadline=None)
def test_every_value_comes_back_with_its_types_bits_and_order(value: Any) -> None:
    assert same(carried(value), value)


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (None, None),
        (True, True),
        (1, 1),
        (2**53 - 1, 2**53 - 1),
        (2**53, {"int": "9007199254740992"}),
        (-(2**64), {"int": "-18446744073709551616"}),
        (-0.0, -0.0),
        (math.inf, {"float": "7ff0000000000000"}),
        (1j, {"complex": ["0000000000000000", "3ff0000000000000"]}),
        ("tensor", "tensor"),
        (b"\xff", {"bytes": "_w"}),
        ([1, (2,)], {"list": [1, {"tuple": [2]}]}),
        ({3, 1, 2}, {"set": [1, 2, 3]}),
        (deque([1], 2), {"deque": [2, [1]]}),
        ({"tensor": 0}, {"dict": [["tensor", 0]]}),
        ({1: "a", "1": "b"}, {"dict": [[1, "a"], ["1", "b"]]}),
        (Point(1, [2]), {"namedtuple": ["Point", [["x", 1], ["y", {"list": [2]}]]]}),
        (Config(0.5, [1]), {"dataclass": ["Config", [["lr", 0.5], ["layers", {"list": [1]}]]]}),
        (Color.RED, {"enum": ["Color", "RED", 1]}),
        (range(1, 9, 2), {"range": [1, 9, 2]}),
        (slice(None, 5), {"slice": [None, 5, None]}),
        (pathlib.Path("a/b"), {"path": "a/b"}),
        (types.MappingProxyType({"a": 1}), {"dict": [["a", 1]]}),
        (UserDict({"a": 1}), {"dict": [["a", 1]]}),
    ],
)
def test_nodes_have_the_form_of_the_specification(value: Any, node: Any) -> None:
    assert nodes.encode(value) == node
    assert canonical.loads(canonical.dumps(node)) == node


def test_classes_decode_as_plain_values() -> None:
    assert same(carried(Point(1, 2)), (1, 2))
    assert same(carried(Config(0.5, [1])), {"lr": 0.5, "layers": [1]})
    assert same(carried(Slotted(7)), {"x": 7})
    assert same(carried([Color.RED, Level.LOW, Word.YES, Right.READ | Right.WRITE]), [1, 3, "yes", 3])
    assert same(carried(pathlib.PurePosixPath("a")), pathlib.PurePosixPath("a"))
    assert carried(defaultdict(list, a=[1])).default_factory is None


@pytest.mark.parametrize("pattern", [0x7FF8000000000001, 0xFFF8DEADBEEF0000, 0x7FF0000000000001, 0xFFF0000000000000])
def test_bits_of_nan_and_infinity_survive(pattern: int) -> None:
    data = pattern.to_bytes(8, "big")
    assert bits(carried(struct.unpack(">d", data)[0])) == data


def test_integers_beyond_the_limit_of_decimal_conversion_survive() -> None:
    assert carried(-(10**6000) - 7) == -(10**6000) - 7


def test_side_by_side_surrogates_do_not_become_one_character() -> None:
    value = {"\ud83d\ude00": "\ud83d\ude00", "\U0001f600": "\ude00\ud83d"}
    assert same(carried(value), value)


def test_sets_have_one_text_whatever_their_order() -> None:
    names = [f"k{i}" for i in range(50)]
    backwards = set()
    for name in reversed(names):
        backwards.add(name)
    assert canonical.dumps(nodes.encode(set(names))) == canonical.dumps(nodes.encode(backwards))


def test_counters_keep_values_that_are_no_integers() -> None:
    counter: Counter[str] = Counter()
    counter["a"] = 0
    counter["b"] = -1.5  # type: ignore[assignment]
    assert same(carried(counter), counter)


class MyInt(int):
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


def cyclic() -> list[Any]:
    value: list[Any] = [1]
    value.append({"back": value})
    return value


def extended() -> Config:
    config = Config(1.0, [])
    config.note = "x"  # type: ignore[attr-defined]
    return config


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), ["item/a/0: a value of type object", "state_dict"]),
        (lambda: 0, ["item/a/0", "function"]),
        (MyInt(3), ["item/a/0", "MyInt", "int(...)"]),
        (MyDict(), ["item/a/0", "MyDict", "dict(...)"]),
        (pathlib.PureWindowsPath("a"), ["item/a/0", "PureWindowsPath"]),
        (cyclic(), ["item/a/0/1/back", "contains itself"]),
        (extended(), ["item/a/0", "note"]),
        ({Color.RED: 0, 1: 1}, ["item/a/0", "told apart by their class only"]),
        ({Frozen(1): 0}, ["item/a/0", "told apart by their class only"]),
        (2 + 3j, []),
    ],
)
def test_what_cannot_be_carried_is_named_with_its_path_and_the_fix(value: Any, words: list[str]) -> None:
    if not words:
        nodes.encode({"a": [value]}, path=("item",))
        return
    with pytest.raises(StateError) as caught:
        nodes.encode({"a": [value]}, path=("item",))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def nested(levels: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("wrap", "most"),
    [
        (lambda value: [value], 200),
        (lambda value: (value,), 200),
        (lambda value: {"k": value}, 161),
        (lambda value: deque([value]), 161),
        (lambda value: Point(value, 0), 121),
    ],
)
def test_depth_is_bounded_so_that_every_reader_accepts_the_text(wrap: Any, most: int) -> None:
    body = {"body": {"items": {"item": nodes.encode(nested(most, wrap))}}}
    nodes.decode(canonical.loads(canonical.dumps(body))["body"]["items"]["item"])
    with pytest.raises(StateError, match="nested"):
        nodes.encode(nested(most + 1, wrap))
    with pytest.raises(StateError, match="nested"):
        nodes.encode(nested(5000, wrap))


def test_the_same_list_twice_is_no_cycle() -> None:
    shared = [1]
    assert carried([shared, shared]) == [[1], [1]]


def test_a_cached_property_is_not_state() -> None:
    @dataclasses.dataclass
    class Lazy:
        x: int

        @cached_property
        def twice(self) -> int:
            return 2 * self.x

    lazy = Lazy(2)
    assert lazy.twice == 4
    assert carried(lazy) == {"x": 2}


def test_the_hook_is_asked_with_paths_and_its_kinds_come_back() -> None:
    asked = []

    def leaf(value: Any, path: nodes.KeyPath) -> Any:
        asked.append(path)
        return {"tensor": len(asked) - 1} if isinstance(value, range_like) else None

    class range_like:
        pass

    node = nodes.encode({"a": [range_like(), Color.RED], 3: range_like(), (1, 2): Point(range_like(), 0)}, leaf=leaf, path=("item",))
    assert asked == [
        ("item", "a", 0),
        ("item", "a", 1),
        ("item", 3),
        ("item", {"key": '{"tuple":[1,2]}'}),
        ("item", {"key": '{"tuple":[1,2]}'}, "x"),
    ]
    assert nodes.decode(node, leaf=lambda kind, payload: f"{kind}{payload}")[3] == "tensor2"
    assert nodes.decode(node)["a"] == [nodes.Opaque("tensor", 0), 1]
    assert repr(nodes.decode({"dtype": "float32"})) == "<dtype float32>"


def test_what_would_be_refused_is_offered_to_the_other_hook_with_its_path() -> None:
    asked: list[Any] = []

    def otherwise(value: Any, path: nodes.KeyPath) -> Any:
        asked.append((type(value).__name__, path))
        return {"encoded": ["mine", len(asked)]}

    class Text(str):
        pass

    value = {"a": [object(), 1], "b": Text("x"), "c": (2.5, None)}
    node = nodes.encode(value, otherwise=otherwise, path=("item",))
    assert node == {
        "dict": [["a", {"list": [{"encoded": ["mine", 1]}, 1]}], ["b", {"encoded": ["mine", 2]}], ["c", {"tuple": [2.5, None]}]]
    }
    assert asked == [("object", ("item", "a", 0)), ("Text", ("item", "b"))]
    assert nodes.decode(node)["b"] == nodes.Opaque("encoded", ["mine", 2])
    with pytest.raises(StateError, match="cannot be carried"):
        nodes.encode(value, otherwise=lambda value, path: None)
    with pytest.raises(StateError, match="cannot be a key"):
        nodes.encode({object(): 1}, otherwise=otherwise)


@pytest.mark.parametrize("payload", [3, ["mine"], ["mine", -1], [3, 3], ["mine", True]])
def test_a_malformed_encoded_node_is_an_integrity_error(payload: Any) -> None:
    with pytest.raises(IntegrityError):
        nodes.decode({"encoded": payload})


@pytest.mark.parametrize("hold", [lambda x: {x}, lambda x: {x: 1}, lambda x: {(1, x): 1}, lambda x: slice(x)])
def test_a_tensor_is_no_key_and_no_member(hold: Any) -> None:
    with pytest.raises(StateError, match=r"item.*cannot be a key"):
        nodes.encode(hold(object()), leaf=lambda value, path: {"tensor": 0} if type(value) is object else None, path=("item",))


def test_foreign_scalars_may_be_keys() -> None:
    class Dtype:
        pass

    node = nodes.encode({Dtype(): 1}, leaf=lambda value, path: {"npscalar": ["<f4", "AAAA"]})
    assert nodes.decode(node) == {nodes.Opaque("npscalar", ["<f4", "AAAA"]): 1}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("model", "net.0.weight"), "model/net.0.weight"),
        (("model", "0.weight"), "model/0.weight"),
        (("optimizer", "state", 0, "exp_avg"), "optimizer/state/0/exp_avg"),
        (("item", "0"), 'item/"0"'),
        (("item", "a/b"), 'item/"a/b"'),
        (("item", ""), 'item/""'),
        (("item", "(null)"), 'item/"(null)"'),
        (("item", {"key": "null"}), "item/(null)"),
        (("item", "größe"), "item/größe"),
        ((), ""),
    ],
)
def test_paths_read_well(path: nodes.KeyPath, text: str) -> None:
    assert nodes.format_path(path) == text


@given(st.lists(st.lists(KEYS, min_size=1, max_size=3), min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_distinct_paths_have_distinct_texts(keys: list[list[Any]]) -> None:
    a, b = (tuple(nodes.path_key(key) for key in path) for path in keys)
    assert (a == b) == (nodes.format_path(a) == nodes.format_path(b))


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"list": [], "tuple": []},
        {"unknown": 1},
        {1: 1},
        [],
        [1],
        (1,),
        2**53,
        math.nan,
        math.inf,
        b"",
        {"list": {}},
        {"list": None},
        {"int": "5"},
        {"int": "1e999999999"},
        {"int": 2**60},
        {"int": "00000000000000000000000000001"},
        {"float": "3ff0000000000000"},
        {"float": "xyz"},
        {"float": 1.0},
        {"complex": ["0000000000000000"]},
        {"complex": 1},
        {"bytes": "A"},
        {"bytes": "_x"},
        {"bytes": "+w"},
        {"bytes": "ü"},
        {"bytes": 3},
        {"str": "YQ"},
        {"str": "_w"},
        {"set": [{"list": []}]},
        {"set": [1, 1]},
        {"set": [1, True]},
        {"frozenset": [{"dict": []}]},
        {"deque": [1, [1, 2]]},
        {"deque": [-1, []]},
        {"deque": [True, [1]]},
        {"deque": [{"int": "99999999999999999999"}, []]},
        {"dict": [[1]]},
        {"dict": [[1, 2, 3]]},
        {"dict": [[{"list": []}, 1]]},
        {"dict": [[1, 1], [True, 1]]},
        {"dict": [["a", 1], ["a", 2]]},
        {"namedtuple": ["P", [[1, 2]]]},
        {"namedtuple": [1, []]},
        {"dataclass": ["P", [["a", 1], ["a", 2]]]},
        {"enum": ["C", 1, 1]},
        {"enum": ["C"]},
        {"range": [0, 1, 0]},
        {"range": [0, 1, True]},
        {"range": [0, 1]},
        {"slice": [0, 1]},
        {"path": 1},
        {"perrank": 1},
        {"perrank": [[-1, 0]]},
        {"perrank": [[{"list": []}, 0]]},
        {"perrank": [[0, 1], [0, 2]]},
        {"tensor": -1},
        {"tensor": True},
        {"tensor": "0"},
        {"ndarray": [0, "<f4", "X"]},
        {"ndarray": [0, "<f4"]},
        {"npscalar": ["<f4"]},
        {"size": [-1]},
        {"size": 3},
        {"dtype": 3},
        {"device": None},
        {"generator": ["torch", {"list": 3}]},
        {"generator": [3, 3]},
        nested(5000, lambda node: {"list": [node]}),
    ],
)
def test_malformed_nodes_are_integrity_errors(node: Any) -> None:
    with pytest.raises(IntegrityError):
        nodes.decode(node)


TENSOR = {"tensor": 0}


@pytest.mark.parametrize("leaf", [TENSOR, {"ndarray": [0, "<f4", "C"]}, {"encoded": ["raw", 0]}, {"generator": ["torch", {"dict": []}]}])
@pytest.mark.parametrize(
    "around",
    [
        lambda leaf: {"dict": [[leaf, 1]]},
        lambda leaf: {"counter": [["a", 1], [{"tuple": [leaf]}, 1]]},
        lambda leaf: {"set": [leaf]},
        lambda leaf: {"frozenset": [{"tuple": [1, leaf]}]},
        lambda leaf: {"slice": [leaf, None, None]},
        lambda leaf: {"enum": ["Color", "RED", {"list": [leaf]}]},
        lambda leaf: {"list": [{"dict": [["a", {"enum": ["Color", None, leaf]}]]}]},
    ],
)
def test_what_has_to_be_complete_holds_no_tensor(leaf: Any, around: Callable[[Any], Any]) -> None:
    with pytest.raises(IntegrityError, match=r"in a key, a member of a set, a part of a slice or an enum"):
        nodes.decode(around(leaf))
    with pytest.raises(IntegrityError, match=r"in a key, a member of a set, a part of a slice or an enum"):
        nodes.check(around(leaf), entries=1)


def test_check_passes_whatever_encode_makes() -> None:
    value = {"a": [1, (2.5, {3}), frozenset({(1, "x")})], Color.RED: Point(slice(1, None), deque([b"x"], 2)), 4: range(3), None: 2**70}
    node = nodes.encode([value, nested(150, lambda inner: [inner])])
    assert nodes.check(node, entries=0) is None
    generator = {"generator": ["torch", {"dict": [["device", "cpu"], ["state", {"tensor": 1}]]}]}
    assert nodes.check({"list": [TENSOR, generator, {"ndarray": [2, "<f4", "C"]}, {"encoded": ["raw", 2]}]}, entries=3) is None


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"tensor": 3}, "malformed node tensor: names entry 3 of 3"),
        ({"list": [{"ndarray": [3, "<f4", "C"]}]}, "malformed node ndarray: names entry 3 of 3"),
        ({"dict": [["a", {"encoded": ["raw", 9]}]]}, "malformed node encoded: names entry 9 of 3"),
        ({"generator": ["torch", {"dict": [["state", {"tensor": 3}]]}]}, "malformed node tensor: names entry 3 of 3"),
        ({"generator": ["torch", {"dict": 5}]}, "malformed node dict: 5"),
        ({"tuple": [{"perrank": [[0, 1]]}]}, "malformed node perrank: values of several ranks, where those of one are stored"),
        ({"dict": [["a"]]}, "malformed node dict: ['a']"),
        ({"dict": [1, 2]}, "malformed node dict: 1"),
        ({"namedtuple": ["A"]}, "malformed node namedtuple: ['A']"),
        ({"deque": []}, "malformed node deque: []"),
        ({}, "malformed node value: {}"),
        ([1], "malformed node value: [1]"),
        ({"list": [], "tuple": []}, "malformed node value: {'list': [], 'tuple': []}"),
        ({"reduce": ["os.system"]}, "unknown node 'reduce'"),
        (nested(210, lambda node: {"list": [node]}), "malformed node list: nested deeper than 200"),
        (nested(210, lambda node: {"tuple": [1, node]}), "malformed node tuple: nested deeper than 200"),
        (nested(210, lambda node: {"dict": [[{"frozenset": []}, node]]}), "malformed node frozenset: nested deeper than 200"),
        (nested(210, lambda node: {"generator": ["torch", node]}), "malformed node generator: nested deeper than 200"),
        (nested(5000, lambda node: {"list": [node]}), "malformed node list: nested deeper than 200"),
    ],
)
def test_check_says_what_is_wrong_with_a_form(node: Any, why: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        nodes.check(node, entries=3)
    assert str(caught.value) == why


KINDS = sorted(nodes.FOREIGN_KINDS | nodes.MAPPING_KINDS)
KINDS += ["str", "int", "float", "complex", "bytes", "bytearray", "list", "tuple", "set", "frozenset", "deque", "namedtuple", "dataclass"]
KINDS += ["enum", "range", "slice", "path", "nothing"]


@st.composite
def hostile(draw: Any, depth: int = 4) -> Any:
    kind = draw(st.sampled_from(["list", "pairs", "node", "node", "node", "object"])) if depth else ""
    if kind == "list":
        return draw(st.lists(hostile(depth - 1), max_size=3))
    if kind == "pairs":
        return draw(st.lists(st.lists(hostile(depth - 1), min_size=2, max_size=2), max_size=3))
    if kind == "node":
        return {draw(st.sampled_from(KINDS)): draw(hostile(depth - 1))}
    if kind == "object":
        return draw(st.dictionaries(st.sampled_from(KINDS), hostile(depth - 1), max_size=2))
    return draw(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["7ff0000000000000", "AAAA", "C", "x"])))


@given(hostile())
@settings(max_examples=300, deadline=None)
def test_decoding_anything_raises_nothing_but_integrity_errors(node: Any) -> None:
    try:
        nodes.decode(node)
    except IntegrityError:
        with pytest.raises(IntegrityError):
            nodes.check(node, entries=2)
        return
    with suppress(IntegrityError):  # of other entries, or of several ranks
        nodes.check(node, entries=2)
    assert all(isinstance(path, tuple) for path, _ in nodes.walk(node))
    assert all(isinstance(path, tuple) for path, _ in nodes.plainer(node))


def test_walk_yields_leaves_in_order_and_empty_containers() -> None:
    node = nodes.encode({"a": [1, {"b": 2}], "c": [], "d": {3}, 4: Point(5, deque([6]))}, path=())
    assert list(nodes.walk(node, ("item",))) == [
        (("item", "a", 0), 1),
        (("item", "a", 1, "b"), 2),
        (("item", "c"), {"list": []}),
        (("item", "d"), {"set": [3]}),
        (("item", 4, "x"), 5),
        (("item", 4, "y", 0), 6),
    ]


def test_an_integer_of_absurd_length_is_refused_at_the_save_and_when_read():
    with pytest.raises(StateError, match=r"a.*an integer of 66439 bits cannot be carried"):
        nodes.encode({"a": [10**20000]})
    with pytest.raises(IntegrityError, match="malformed node int"):
        nodes.decode({"int": "9" * 10_001})
    assert nodes.decode({"int": "9" * 9_000}) == 10**9000 - 1


def test_keys_that_all_hash_alike_are_refused_before_a_dict_of_them_takes_hours() -> None:
    alike = [(number << 61) - number for number in range(1, 200_001)]  # multiples of 2^61 - 1, the modulus of Python's hash
    told = [{"int": str(value)} for value in alike]
    for node in ({"set": told}, {"dict": [[key, 1] for key in told]}, {"dict": [[{"tuple": [key]}, 1] for key in told]}):
        with pytest.raises(IntegrityError, match="malformed node"):
            nodes.decode(node)
    with pytest.raises(StateError):
        nodes.encode(dict.fromkeys(alike[:101]))
    assert nodes.decode(nodes.encode(dict.fromkeys(alike[:100]))) == dict.fromkeys(alike[:100])
