"""Formats of items: what each can say, what it refuses at save and how, and who may read what was pickled."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from syckpt import (
    FormatError,
    IntegrityError,
    JsonSerialization,
    LayoutInfo,
    RawSerialization,
    SafetensorsSerialization,
    SerializationFormat,
    StateError,
    TorchSerialization,
)
from syckpt.objects import nodes
from syckpt.state.flatten import flatten, unflatten
from syckpt.state.formats import check_format, configuration, known_format, rebuild, require_trust, tensor_names, unpickle
from syckpt.state.plain import plain


@dataclasses.dataclass
class Inner:
    low: float


@dataclasses.dataclass
class Progress:
    step: int
    inner: Inner | None = None
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    step: int


class Plain:
    def __init__(self, step: int) -> None:
        self.step = step
        self.made = True


class Odd:
    """Nothing that nodes can carry."""

    def __init__(self, value: int) -> None:
        self.value = value


EXPLODED: list[bool] = []


def explode() -> None:
    EXPLODED.append(True)


class Bomb:
    """Tells when it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


class Reversed(SerializationFormat):
    name = "reversed"

    def encode(self, value: Any) -> bytes:
        return bytes(value)[::-1]

    def decode(self, data: bytes) -> Any:
        return data[::-1]


def kept(form: SerializationFormat, value: Any) -> tuple[Any, list[Any]]:
    """Return the node of an item `x` in that format, and its leaves' arrays."""
    flat = flatten({"x": value}, formats={"x": form})
    return flat.nodes["x"], [leaf.array for leaf in flat.leaves]


def read(form: SerializationFormat, value: Any) -> Any:
    node, arrays = kept(form, value)
    return unflatten(node, lambda index: arrays[index])


# --- formats as values -------------------------------------------------------------------------------------------------------------


def test_formats_are_values() -> None:
    assert TorchSerialization() == TorchSerialization(weights_only=True) != TorchSerialization(weights_only=False)
    assert JsonSerialization(Progress) == JsonSerialization(cls=Progress) != JsonSerialization()
    assert SafetensorsSerialization({"a": "b"}) == SafetensorsSerialization(metadata={"a": "b"}) != SafetensorsSerialization()
    assert len({RawSerialization(), RawSerialization(), TorchSerialization(), SafetensorsSerialization({"a": "b"})}) == 3


def test_metadata_of_a_format_does_not_follow_the_callers_dict() -> None:
    metadata = {"a": "b"}
    form = SafetensorsSerialization(metadata)
    metadata["a"] = "c"
    assert form.metadata == {"a": "b"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: TorchSerialization(weights_only=1),  # type: ignore[arg-type]
        lambda: JsonSerialization(cls="Progress"),  # type: ignore[arg-type]
        lambda: SafetensorsSerialization({"a": 1}),  # type: ignore[dict-item]
        lambda: SafetensorsSerialization(["a"]),  # type: ignore[arg-type]
        lambda: LayoutInfo("x.pt", "torch"),  # type: ignore[arg-type]
        lambda: LayoutInfo("x.pt", TorchSerialization),  # type: ignore[arg-type]
        lambda: LayoutInfo("../x.pt", TorchSerialization()),
        lambda: LayoutInfo("/x.pt", TorchSerialization()),
        lambda: LayoutInfo("a//x.pt", TorchSerialization()),
        lambda: LayoutInfo("a\nb.pt", TorchSerialization()),
        lambda: LayoutInfo("{key}_{rank}.pt", TorchSerialization()),
    ],
)
def test_what_cannot_be_a_format_or_a_layout_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(StateError):
        make()


def test_a_format_needs_a_name_and_one_of_its_own() -> None:
    class Nameless(Reversed):
        name = ""

    class Thief(Reversed):
        name = "torch"

    class Heir(TorchSerialization):
        pass

    for form in (Nameless(), Thief(), Heir()):
        with pytest.raises(StateError, match="name"):
            check_format(form, where="here")
    check_format(Reversed(), where="here")
    assert not known_format(Reversed())


def test_the_configuration_is_what_the_file_is_made_by() -> None:
    assert configuration(TorchSerialization()) == {}
    assert configuration(TorchSerialization(weights_only=False)) == {"weights_only": False}
    assert configuration(JsonSerialization(Progress)) == {"class": "Progress"}
    assert configuration(SafetensorsSerialization({"a": "b"})) == {"metadata": {"a": "b"}}
    assert configuration(RawSerialization()) == configuration(Reversed()) == {}


# --- raw and custom ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\0\xff{"])
def test_raw_bytes_are_one_entry_and_come_back(data: bytes) -> None:
    node, arrays = kept(RawSerialization(), data)
    assert node == {"encoded": ["raw", 0]}
    assert arrays[0].tobytes() == data
    assert read(RawSerialization(), data) == data


@pytest.mark.parametrize("value", ["text", bytearray(b"x"), {"a": b"x"}, None])
def test_raw_takes_bytes_and_names_the_item_otherwise(value: Any) -> None:
    with pytest.raises(StateError, match=r"^x: RawSerialization takes bytes, not"):
        kept(RawSerialization(), value)


def test_a_format_of_ones_own_is_asked_once_and_its_bytes_are_one_entry() -> None:
    calls: list[Any] = []

    class Counting(Reversed):
        name = "counting"

        def encode(self, value: Any) -> bytes:
            calls.append(value)
            return super().encode(value)

    node, arrays = kept(Counting(), b"abc")
    assert (node, arrays[0].tobytes(), calls) == ({"encoded": ["counting", 0]}, b"cba", [b"abc"])


def test_what_a_format_raises_or_returns_wrongly_names_the_item() -> None:
    class Broken(Reversed):
        name = "broken"

        def encode(self, value: Any) -> bytes:
            raise KeyError("nothing there")

    class Texts(Reversed):
        name = "texts"

        def encode(self, value: Any) -> Any:
            return "text"

    with pytest.raises(StateError, match="x: Broken cannot encode it: 'nothing there'"):
        kept(Broken(), 1)
    with pytest.raises(StateError, match=r"x: Texts\.encode returned str"):
        kept(Texts(), 1)


# --- JSON ------------------------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_what_json_can_say_comes_back_and_its_file_says_the_same(value: Any) -> None:
    form = JsonSerialization()
    assert repr(read(form, value)) == repr(value)
    assert form.decode(form.encode(value)) == value
    assert json.loads(form.encode(value)) == value


def test_the_file_is_sorted_and_indented() -> None:
    assert JsonSerialization().encode({"step": 3, "best": None}) == b'{\n  "best": null,\n  "step": 3\n}\n'


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {3: 1}}, r"x/a: JSON's keys are texts, and 3 is not: use str\(key\)"),
        ({"a": [1, (2,)]}, r"x/a/1: JSON cannot say a value of type tuple: convert it to list\(...\)"),
        ({"a": float("nan")}, r"x/a: JSON cannot say nan: store None or a text"),
        ({"a": float("-inf")}, r"x/a: JSON cannot say -inf"),
        ({"a": {1, 2}}, r"x/a: JSON cannot say a value of type set: convert it to list\(...\)"),
        ({"a": b"x"}, r"x/a: JSON cannot say a value of type bytes"),
        ({"a": torch.ones(1)}, r"x/a: JSON cannot say a value of type Tensor"),
        ({"a": np.float32(1)}, r"x/a: JSON cannot say a value of type float32"),
        (OrderedDict(a=1), r"x: JSON cannot say a value of type OrderedDict"),
        (Progress(1), r"x: JSON cannot say a value of type Progress"),
    ],
)
def test_what_json_cannot_say_is_refused_at_save_with_its_path_and_the_fix(value: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        kept(JsonSerialization(), value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(StateError, match="x/0: contains itself"):
        kept(JsonSerialization(), value)


@pytest.mark.parametrize("data", [b"{", b"NaN", b"\xff"])
def test_a_text_that_is_no_json_is_told(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="not a JSON text"):
        JsonSerialization().decode(data)


@pytest.mark.parametrize("value", [Progress(3, Inner(0.5), ["a"]), Progress(4), Frozen(2)])
def test_an_object_comes_back_as_the_class_that_the_caller_names(value: Any) -> None:
    form = JsonSerialization(type(value))
    assert rebuild(form, read(form, value), ("x",)) == value
    assert form.decode(form.encode(value)) == value


def test_without_the_class_the_fields_come_back_as_a_dict() -> None:
    assert read(JsonSerialization(Progress), Progress(3, Inner(0.5))) == {"step": 3, "inner": {"low": 0.5}, "names": []}


def test_an_object_with_a_dict_is_rebuilt_without_its_constructor() -> None:
    form = JsonSerialization(Plain)
    value = Plain(5)
    value.made = False
    found = rebuild(form, read(form, value), ("x",))
    assert (type(found), vars(found)) == (Plain, {"step": 5, "made": False})


def test_another_class_than_was_saved_is_built_if_its_fields_fit() -> None:
    assert rebuild(JsonSerialization(Frozen), {"step": 3}, ("x",)) == Frozen(3)
    # A class that has grown since takes its defaults.
    assert rebuild(JsonSerialization(Progress), {"step": 3}, ("x",)) == Progress(3, None, [])


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"steps": 3}, "x: does not fit Progress: steps is not a field of it; step was not saved"),
        ([3], "x: a list was saved, from which no Progress can be made"),
        ({3: 1}, "x: a dict was saved, from which no Progress can be made"),
        ({"step": 1, "inner": {"high": 2.0}}, "x/inner: does not fit Inner"),
    ],
)
def test_fields_that_do_not_fit_the_class_are_all_told(saved: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        rebuild(JsonSerialization(Progress), saved, ("x",))


def test_an_object_of_another_class_is_refused_at_save() -> None:
    with pytest.raises(StateError, match=r"x: JsonSerialization\(cls=Progress\) takes objects of that class, found dict"):
        kept(JsonSerialization(Progress), {"step": 3})


def test_a_field_that_no_declaration_leads_back_to_is_refused_at_save() -> None:
    @dataclasses.dataclass
    class Loose:
        inner: Any

    with pytest.raises(StateError, match="x/inner: JSON cannot say a value of type Inner"):
        kept(JsonSerialization(Loose), Loose(Inner(1.0)))


# --- safetensors -----------------------------------------------------------------------------------------------------------------------


def test_nested_tensors_are_joined_by_dots_in_the_file_and_nested_where_they_are_loaded() -> None:
    form = SafetensorsSerialization({"format_version": "1"})
    value = {
        "net": {"w": torch.arange(6).reshape(2, 3).t(), "b": torch.ones(2)},
        "moments": [torch.zeros(1), (torch.ones(1),)],
        3: torch.ones(()),
    }
    found = load_safetensors(form.encode(value))
    assert sorted(found) == ["3", "moments.0", "moments.1.0", "net.b", "net.w"]
    assert torch.equal(found["net.w"], value["net"]["w"])  # type: ignore[index,call-overload]
    again = read(form, value)
    assert list(again) == ["net", "moments", 3]
    assert type(again["moments"][1]) is tuple


def safetensors_file(dtype: str, shape: list[int], nbytes: int) -> bytes:
    header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(nbytes)


@pytest.mark.parametrize(("dtype", "shape"), [("F8_E8M0", [2]), ("F4", [4])])
def test_a_dtype_that_the_library_does_not_give_to_torch_is_a_format_error_that_names_it(dtype: str, shape: list[int]) -> None:
    with pytest.raises(FormatError, match=f"^a safetensors file with {dtype}, which the package safetensors does not read for torch"):
        SafetensorsSerialization().decode(safetensors_file(dtype, shape, 2))


@pytest.mark.parametrize("data", [b"", b"x" * 20, safetensors_file("F32", [2], 8)[:-1], safetensors_file("Q7", [2], 8)])
def test_what_is_no_safetensors_file_is_an_integrity_error(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"^not a safetensors file: "):
        SafetensorsSerialization().decode(data)


def test_ties_and_views_can_be_written() -> None:
    base = torch.arange(4.0)
    found = load_safetensors(SafetensorsSerialization().encode({"a": base, "b": base, "c": base[::2]}))
    assert {name: value.tolist() for name, value in found.items()} == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "c": [0, 2]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lr": 0.1}, "x/lr: a safetensors file holds tensors only, found float"),
        ({"a": {"b": None}}, "x/a/b: a safetensors file holds tensors only, found NoneType"),
        ({"a": np.ones(1)}, "x/a: a safetensors file holds tensors only, found ndarray: convert it to a tensor"),
        ({"a": {torch.ones(1)}}, "x"),
        ({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "x/a.b and x/a/b are both 'a.b' in a safetensors file"),
        ({1: torch.ones(1), "1": torch.zeros(1)}, "x/1 and x/\"1\" are both '1'"),
        ({None: torch.ones(1)}, "names in a safetensors file are texts"),
        ({"__metadata__": torch.ones(1)}, "x/__metadata__: this name is taken"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "x/a: safetensors has no dtype complex128"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused_at_save_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        kept(SafetensorsSerialization(), value)


def test_an_item_that_is_one_tensor_has_the_items_name() -> None:
    node, _ = kept(SafetensorsSerialization(), torch.ones(2))
    assert tensor_names(node, ("x",)) == {"x": 0}


def test_a_file_that_is_no_safetensors_is_told() -> None:
    with pytest.raises(IntegrityError, match="not a safetensors file"):
        SafetensorsSerialization().decode(b"nothing")


# --- torch -----------------------------------------------------------------------------------------------------------------------------


def test_by_default_tensors_and_values_stay_what_they_are() -> None:
    value = {"w": torch.ones(2), "n": np.arange(3), "t": (1, None)}
    assert kept(TorchSerialization(), value)[0] == flatten({"x": value}).nodes["x"]


def test_what_nodes_cannot_carry_is_refused_by_default_and_pickled_alone_on_request() -> None:
    value = {"w": torch.ones(2), "odd": Odd(7), "sparse": torch.eye(2).to_sparse()}
    with pytest.raises(StateError, match=r"x/odd: a value of type .*Odd cannot be carried.*TorchSerialization\(weights_only=False\)"):
        kept(TorchSerialization(), value)
    node, arrays = kept(TorchSerialization(weights_only=False), value)
    assert node == {"dict": [["w", {"tensor": 0}], ["odd", {"encoded": ["pickle", 1]}], ["sparse", {"encoded": ["pickle", 2]}]]}
    trusted = TorchSerialization(weights_only=False)
    assert unpickle(arrays[1].tobytes(), trusted, ("x", "odd")).value == 7
    assert torch.equal(unpickle(arrays[2].tobytes(), trusted, ("x",)).to_dense(), torch.eye(2))


def test_encoded_bytes_that_are_no_bytes_are_damage() -> None:
    for entry in (torch.ones(2), torch.ones(2, 2, dtype=torch.uint8), np.ones(3, np.int8)):
        with pytest.raises(IntegrityError, match="encoded bytes cannot be"):
            unflatten({"encoded": ["raw", 0]}, lambda index, entry=entry: entry)  # type: ignore[misc]


def test_equal_objects_pickle_to_equal_bytes() -> None:
    first, second = (kept(TorchSerialization(weights_only=False), Odd(7))[1][0].tobytes() for _ in range(2))
    assert first == second


def test_what_cannot_be_pickled_either_is_refused_at_save() -> None:
    with pytest.raises(StateError, match="x/f: function cannot be pickled"):
        kept(TorchSerialization(weights_only=False), {"f": lambda: 1})


@pytest.mark.parametrize("form", [None, TorchSerialization(), JsonSerialization(), RawSerialization(), Reversed()])
def test_pickled_bytes_are_read_for_no_one_who_does_not_ask(form: SerializationFormat | None) -> None:
    bomb = pickle.dumps(Bomb())
    for check in (lambda: require_trust(form, ("x", "odd")), lambda: unpickle(bomb, form, ("x", "odd"))):
        with pytest.raises(StateError, match=r"x/odd: was pickled.*TorchSerialization\(weights_only=False\)"):
            check()
    assert EXPLODED == []


def test_a_torch_file_is_read_with_weights_only() -> None:
    form = TorchSerialization()
    value = {"w": torch.ones(2), "lr": 0.1}
    assert torch.load(io.BytesIO(form.encode(value)), weights_only=True)["lr"] == 0.1
    with pytest.raises(IntegrityError, match=r"not a file that torch\.load"):
        form.decode(TorchSerialization(weights_only=False).encode(Odd(1)))
    assert TorchSerialization(weights_only=False).decode(form.encode(Odd(1))).value == 1


# --- plain values ----------------------------------------------------------------------------------------------------------------------


def plainly(value: Any) -> tuple[Any, list[str]]:
    flat = flatten({"x": value})
    return plain(flat.nodes["x"], lambda index: torch.as_tensor(flat.leaves[index].array), path=("x",))


STATES: Mapping[str, Any] = {
    "tuple": (1, [2.5, None], "a", 2**80, float("inf"), 1j, b"x", bytearray(b"y"), {3}),
    "ordered": OrderedDict([((1, 2), {"a": torch.Size([1])}), (None, torch.float32), (True, torch.device("cpu"))]),
    "nothing": {},
}


@pytest.mark.parametrize("name", STATES)
def test_what_weights_only_reads_stays_as_it_is(name: str) -> None:
    found, converted = plainly(STATES[name])
    assert (repr(found), converted) == (repr(STATES[name]), [])
    assert repr(torch.load(io.BytesIO(TorchSerialization().encode(found)), weights_only=True)) == repr(found)


def test_all_else_becomes_the_nearest_plain_value_and_is_told() -> None:
    from collections import Counter, defaultdict, deque, namedtuple
    from enum import Enum
    from pathlib import Path

    colour = Enum("Colour", {"RED": 4})
    point = namedtuple("point", "a b")
    value = {
        "array": np.asfortranarray(np.arange(4).reshape(2, 2)),
        "times": np.array(["2026-01-01"], "datetime64[D]"),
        "scalar": np.float32(0.5),
        "when": np.datetime64("2026-01-01"),
        "named": point(1, 2),
        "data": Frozen(3),
        "enum": colour.RED,
        "queue": deque([1], maxlen=2),
        "default": defaultdict(int, a=1),
        "counts": Counter("aa"),
        "frozen": frozenset({1}),
        "range": range(1, 9, 2),
        "slice": slice(None, 3),
        "path": Path("a/b"),
        "generator": torch.Generator().manual_seed(1),
    }
    found, converted = plainly(value)
    assert [text.partition(":")[0] for text in converted if "/generator/" not in text] == [
        f"x/{name}" for name in value if name != "counts"
    ]
    assert converted[0] == "x/array: numpy array as tensor"
    assert found["array"].tolist() == [[0, 1], [2, 3]]
    assert found["times"].tolist() == [list(value["times"].tobytes())]  # type: ignore[attr-defined]
    plain_ones = {name: found[name] for name in ("scalar", "named", "data", "enum", "queue", "default", "frozen", "range", "slice", "path")}
    assert plain_ones == {
        "scalar": 0.5,
        "named": (1, 2),
        "data": {"step": 3},
        "enum": 4,
        "queue": [1],
        "default": {"a": 1},
        "frozen": (1,),
        "range": (1, 9, 2),
        "slice": (None, 3, None),
        "path": "a/b",
    }
    assert torch.load(io.BytesIO(TorchSerialization().encode(found)), weights_only=True).keys() == value.keys()


def test_values_that_differ_between_ranks_are_a_dict_by_rank() -> None:
    found, converted = plain({nodes.PER_RANK: [[0, 1], [1, {"tuple": [2]}]]}, lambda index: torch.empty(0), path=("x",))
    assert found == {0: 1, 1: (2,)}
    assert converted == ["x: value that differs between ranks as dict by rank"]


# --- objects that a commit, or a script, made unlike the class --------------------------------------------------------------


class Guarded:
    @property
    def step(self) -> int:
        return 0

    @step.setter
    def step(self, value: int) -> None:
        raise AssertionError("a commit reached a property")


class Slotted:
    __slots__ = ("hidden",)


class Half(Slotted):
    pass


def test_names_that_a_commit_chose_reach_no_property_and_no_class() -> None:
    saved = {"step": 1, "__class__": "os.system", "__dict__": {"x": 1}}
    made = rebuild(JsonSerialization(Guarded), saved, ("x",))
    assert (type(made), made.step, vars(made)) == (Guarded, 0, saved)


@pytest.mark.parametrize("cls", [int, list, Slotted])
def test_a_class_without_plain_attributes_is_an_error_that_says_so(cls: type) -> None:
    with pytest.raises(StateError, match=rf"^x: {cls.__name__} is no class of plain attributes: name a dataclass"):
        rebuild(JsonSerialization(cls), {"a": 1}, ("x",))


def test_what_a_load_could_not_bring_back_is_refused_at_save() -> None:
    half, unset, more = Half(), Progress(3), Progress(3)
    half.hidden = 1  # type: ignore[attr-defined]
    del unset.step
    more.seen = 4  # type: ignore[attr-defined]

    class Later(Progress):
        pass

    for cls, value, message in (
        (Half, half, "keeps hidden in __slots__"),
        (Progress, unset, "has fields without a value: step"),
        (Progress, more, "has attributes that are no fields: seen"),
        (Progress, Later(3), "a load would make a Progress of this"),
        (dict, {"n": 10**5000}, "readers of JSON refuse an integer of 16610 bits"),
    ):
        with pytest.raises(StateError, match=f"^x.*{message}"):
            flatten({"x": value}, formats={"x": JsonSerialization(cls)})


def test_integers_that_torch_cannot_unpickle_are_texts_in_its_files() -> None:
    limit = 1 << (8 * 255 - 1)
    value = {"fits": limit - 1, "low": -limit + 1, "large": limit, -limit: 0}
    node = flatten({"x": value}).nodes["x"]
    found, told = plain(node, lambda index: torch.empty(0), path=("x",))
    assert found == {"fits": limit - 1, "low": -limit + 1, "large": hex(limit), hex(-limit): 0}
    assert len(told) == 2
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == found


_SHARED = np.arange(5.0)


class _Odd(np.random.RandomState):
    """A generator whose state holds an array of the script's own, and what no node carries."""

    def get_state(self, legacy: bool = True) -> dict[str, Any]:
        return {"shared": _SHARED, "bad": object()}


def test_a_value_that_is_pickled_after_all_leaves_nothing_behind_that_others_are_tied_to() -> None:
    flat = flatten({"x": {"odd": _Odd(0), "mine": _SHARED}}, formats={"x": TorchSerialization(weights_only=False)})
    assert flat.nodes["x"] == {"dict": [["odd", {"encoded": ["pickle", 0]}], ["mine", {"ndarray": [1, "<f8", "C"]}]]}
    assert [leaf.dtype for leaf in flat.leaves] == ["uint8", "float64"]
