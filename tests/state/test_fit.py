"""fit plans a load: what fills what in place, what comes as new, and everything that does not fit, before anything is touched."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from syckpt.errors import IntegrityError
from syckpt.objects import canonical
from syckpt.state.fit import Fitted, Options, fit, matching
from syckpt.state.flatten import flatten, unflatten


class Saved:
    """A value as a commit holds it: a node, and entries with their own bytes."""

    def __init__(self, value: Any) -> None:
        flat = flatten({"item": value})
        self.node = canonical.loads(canonical.dumps(flat.nodes["item"]))
        self.entries = flat.leaves
        self.tensors = [torch.as_tensor(leaf.array).clone() for leaf in flat.leaves]
        self.asked: list[int] = []

    def fit(self, template: Any, **options: Any) -> Fitted:
        return fit(self.node, template, path=("item",), entries=self.entries, options=Options(**options))

    def take(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return self.tensors[index]

    def load(self, template: Any, **options: Any) -> Any:
        self.asked = []
        plan = self.fit(template, **options)
        with torch.no_grad():
            for index, target in plan.fills:
                target.copy_(self.tensors[index])
        result = plan.build(self.take)
        assert sorted(self.asked) == sorted(plan.fresh)
        return result


Pair = namedtuple("Pair", ["a", "b"])


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    weight: torch.Tensor
    rate: float = 0.5


def test_tensors_are_filled_in_place_and_stand_in_the_result() -> None:
    parameter, buffer, array = nn.Parameter(torch.zeros(2, 3)), torch.zeros(3, dtype=torch.int64), np.zeros(4)
    saved = Saved({"p": torch.ones(2, 3), "b": torch.arange(3), "a": np.arange(4.0), "n": 7})
    result = saved.load({"p": parameter, "b": buffer, "a": array, "n": 1})
    assert result["p"] is parameter
    assert result["b"] is buffer
    assert result["a"] is array
    assert (parameter.tolist(), buffer.tolist(), array.tolist(), result["n"]) == ([[1.0] * 3] * 2, [0, 1, 2], [0.0, 1.0, 2.0, 3.0], 7)
    assert saved.asked == []


def test_planning_touches_nothing() -> None:
    target = torch.zeros(3)
    plan = Saved({"t": torch.ones(3)}).fit({"t": target})
    assert [(index, tensor is target) for index, tensor in plan.fills] == [(0, True)]
    assert target.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("saved", "target", "text"),
    [
        (torch.ones(1), torch.zeros(3), "item/t: expected float32 [3], found float32 [1]"),
        (torch.ones(6), torch.zeros(4), "item/t: expected float32 [4], found float32 [6]"),
        (torch.ones(2, 3), torch.zeros(3, 2), "item/t: expected float32 [3, 2], found float32 [2, 3]"),
        (torch.tensor(1.0), torch.zeros(1), "item/t: expected float32 [1], found float32 []"),
        (torch.ones(2), torch.zeros(2).bfloat16(), "item/t: expected bfloat16 [2], found float32 [2] (cast=True would convert it)"),
        (torch.ones(2), torch.zeros(2).int(), "item/t: expected int32 [2], found float32 [2]"),
        (torch.ones(2), [1.0, 2.0], "item/t: expected a list of 2, found float32 [2]"),
        (3, torch.zeros(2), "item/t: expected float32 [2], found int"),
        (None, torch.zeros(2), "item/t: expected float32 [2], found None"),
        ({"x": 1}, torch.zeros(2), "item/t: expected float32 [2], found a dict of 1"),
        ([torch.ones(1)], [torch.zeros(1)] * 2, "item/t: expected a list of 2, found a list of 1"),
        ([torch.ones(1)], [], "item/t: expected a list of 0, found a list of 1"),
        ([], [torch.ones(1)], "item/t: expected a list of 1, found a list of 0"),
        ([torch.ones(1)], {"x": 1}, "item/t: expected a dict of 1, found a list of 1"),
        (torch.ones(3), np.zeros(3), "item/t: expected numpy float64 [3], found float32 [3]"),
        (np.ones(3), torch.zeros(3), "item/t: expected float32 [3], found numpy float64 [3]"),
        (np.ones((2, 3)), np.zeros((3, 2)), "item/t: expected numpy float64 [3, 2], found numpy float64 [2, 3]"),
        (np.array([1], ">i4"), np.array([1], "<i4"), "item/t: expected numpy int32 [1], found numpy >i4 [1]"),
        (np.array([1], "<i4"), np.array([1], ">i4"), "item/t: expected numpy >i4 [1], found numpy int32 [1]"),
        (np.array(["ab"]), np.array(["abc"]), "item/t: expected numpy <U3 [1], found numpy <U2 [1]"),
        (torch.ones(3), torch.zeros(1).expand(3), "item/t: the target cannot be filled: it overlaps itself; clone it"),
        (torch.ones(2, 2), torch.eye(2).to_sparse(), "item/t: the target cannot be filled: tensors of layout torch.sparse_coo"),
        (torch.ones(3), torch.empty(3, device="meta"), "item/t: the target cannot be filled: a meta tensor"),
        (Color.RED, enum.Enum("Other", {"X": 5}).X, "item/t: expected a member of Other, found Color.RED"),  # type: ignore[attr-defined]
    ],
)
def test_what_does_not_fit_is_told_and_keeps_the_template(saved: Any, target: Any, text: str) -> None:
    commit = Saved({"t": saved, "other": torch.ones(1)})
    other = torch.zeros(1)
    plan = commit.fit({"t": target, "other": other})
    assert len(plan.mismatched) == 1
    assert plan.mismatched[0].startswith(text)
    assert plan.problems == plan.mismatched
    result = commit.load({"t": target, "other": other})
    assert result["t"] is target
    assert other.item() == 1


def test_inference_tensors_are_no_targets() -> None:
    with torch.inference_mode():
        target = torch.zeros(1)
    assert "inference mode" in Saved(torch.ones(1)).fit(target).problems[0]


def test_cast_converts_upwards_only_and_is_recorded() -> None:
    wide, narrow, integer = torch.zeros(2, dtype=torch.float64), torch.zeros(2).bfloat16(), torch.zeros(2).int()
    saved = Saved([torch.tensor([1.5, 2]), torch.tensor([1.0, 3]), torch.ones(2), np.ones(2, "<f4")])
    template = [wide, narrow, integer, np.zeros(2)]
    plan = saved.fit(template, cast=True)
    assert plan.cast == ["item/0: float32 to float64", "item/1: float32 to bfloat16", "item/3: float32 to float64"]
    assert plan.mismatched == ["item/2: expected int32 [2], found float32 [2]"]
    saved.load(template, cast=True)
    assert (wide.tolist(), narrow.tolist(), template[3].tolist()) == ([1.5, 2.0], [1.0, 3.0], [1.0, 1.0])


def test_missing_and_unexpected_keys_are_all_listed_by_typed_key() -> None:
    saved = Saved({1: torch.ones(1), "1": torch.ones(1), "a.b": 0, "deep": {"x": torch.ones(1), "y": 1}})
    plan = saved.fit({True: torch.zeros(1), "1": torch.zeros(1), "a": {"b": 0}, "deep": {"x": torch.zeros(1), "z": 1}})
    assert plan.missing == ["item/deep/z", "item/(true)", "item/a"]
    assert plan.unexpected == ["item/1", "item/a.b", "item/deep/y"]
    assert plan.problems[0] == "item/deep/z: in the target, not in the commit"
    assert plan.problems[3] == "item/1: in the commit, not in the target"
    assert len(plan.fills) == 2


def test_without_strictness_missing_keeps_the_template_and_unexpected_is_left_out() -> None:
    kept = torch.zeros(1)
    saved = Saved({"x": 1, "extra": torch.ones(1)})
    assert saved.load({"x": 0, "kept": kept}) == {"x": 1, "kept": kept}
    assert saved.asked == []


def test_plain_values_come_from_the_commit_whatever_the_template_holds() -> None:
    saved = Saved({"n": 5, "list": [1, 2, 3], "s": {1}, "d": {"a": 1}, "none": None, "t": (1,), "np": np.float32(2)})
    template = {"n": 0, "list": [0, 0], "s": 3, "d": {"a": 2}, "none": 4, "t": [], "np": 1.0}
    result = saved.load(template)
    assert saved.fit(template).problems == []
    assert result == {"n": 5, "list": [1, 2, 3], "s": {1}, "d": {"a": 1}, "none": None, "t": (1,), "np": 2.0}
    assert type(result["np"]) is np.float32


@pytest.mark.parametrize("template", [None, 0, "text", object()])
def test_a_template_that_shows_nothing_takes_everything_as_new(template: Any) -> None:
    saved = Saved({"w": [torch.ones(2)], "g": np.random.default_rng(3), "a": np.arange(3)})
    result = saved.load(template)
    assert saved.fit(template).problems == []
    assert result["w"][0] is saved.tensors[0]
    assert result["a"].tolist() == [0, 1, 2]
    assert result["g"].random() == np.random.default_rng(3).random()


def test_types_of_the_template_are_rebuilt() -> None:
    weight = torch.zeros(2)
    saved = Saved(
        {
            "pair": Pair(torch.ones(2), [1]),
            "settings": Settings(torch.ones(2), 0.25),
            "color": Color.BLUE,
            "default": defaultdict(list, {"k": [1]}),
            Color.RED: 1,
            "deque": deque([torch.ones(1)], 3),
            "counter": Counter("aab"),
            "plain": (Pair(1, 2),),
        }
    )
    template = {
        "pair": Pair(weight, []),
        "settings": Settings(torch.zeros(2)),
        "color": Color.RED,
        "default": defaultdict(list, {"k": []}),
        Color.RED: 0,
        "deque": deque([torch.zeros(1)]),
        "counter": Counter("ab"),
        "plain": (Pair(0, 0),),
    }
    assert saved.fit(template).problems == []
    result = saved.load(template)
    assert isinstance(result["pair"], Pair)
    assert result["pair"].a is weight
    assert result["pair"].b == [1]
    assert type(result["settings"]) is Settings
    assert result["settings"].weight is template["settings"].weight
    assert (result["settings"].rate, template["settings"].rate) == (0.25, 0.5)
    assert result["color"] is Color.BLUE
    assert result["default"]["new"] == []
    assert result[Color.RED] == 1
    assert (result["deque"].maxlen, result["deque"][0].item()) == (3, 1.0)
    assert result["counter"] == Counter("aab")
    assert result["plain"] == (Pair(1, 2),)
    assert isinstance(result["plain"][0], Pair)


def test_a_saved_dataclass_fits_a_mapping_of_its_fields() -> None:
    weight = torch.zeros(2)
    result = Saved(Settings(torch.ones(2), 0.25)).load({"weight": weight, "rate": 0})
    assert result == {"weight": weight, "rate": 0.25}
    assert weight.tolist() == [1, 1]


def test_fields_of_a_changed_namedtuple_do_not_fit() -> None:
    Other = namedtuple("Other", ["a", "c"])
    assert Saved(Pair(torch.ones(1), 2)).fit(Other(torch.zeros(1), 2)).mismatched == [
        "item: expected a Other of 2, found a namedtuple of 2"
    ]


def test_state_dicts_of_modules_are_filled_and_keep_their_metadata() -> None:
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    with torch.no_grad():
        source.weight.fill_(2)
    source(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    template = target.state_dict()
    result = Saved(source.state_dict()).load(template)
    assert isinstance(result, OrderedDict)
    assert result._metadata == template._metadata  # type: ignore[attr-defined]
    assert target.weight.tolist() == [2, 2, 2]
    assert target.num_batches_tracked.item() == 1
    assert target.load_state_dict(result).missing_keys == []


def test_in_place_fills_keep_ties_and_fill_once() -> None:
    saved_tensor, live = torch.ones(2), torch.zeros(2)
    saved = Saved({"a": saved_tensor, "b": saved_tensor, "best": saved_tensor})
    plan = saved.fit({"a": live, "b": live, "best": None})
    assert (len(plan.fills), plan.fresh) == (1, set())
    result = saved.load({"a": live, "b": live, "best": None})
    assert result["a"] is result["b"] is result["best"] is live


def test_one_saved_tensor_may_fill_two_live_ones() -> None:
    shared = torch.ones(2)
    a, b = torch.zeros(2), torch.zeros(2)
    Saved([shared, shared]).load([a, b])
    assert (a.tolist(), b.tolist()) == ([1, 1], [1, 1])


def test_two_saved_tensors_cannot_fill_one_unless_they_are_equal() -> None:
    live = torch.zeros(2)
    saved = Saved({"a": torch.ones(2), "b": torch.ones(2)})
    plan = saved.fit({"a": live, "b": live})
    assert plan.mismatched == ["item/b: in the target one tensor with item/a, in the commit another one; untie them"]

    @dataclasses.dataclass
    class Addressed:
        dtype: str
        shape: tuple[int, ...]
        address: str

    entries = [Addressed("float32", (2,), "x"), Addressed("float32", (2,), "x")]
    plan = fit(saved.node, {"a": live, "b": live}, path=("item",), entries=entries)
    assert (plan.problems, len(plan.fills)) == ([], 1)


def adam_after(steps: int) -> tuple[nn.Linear, torch.optim.Adam]:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(steps):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return module, optimizer


def test_a_fresh_optimizer_takes_its_state_from_the_commit() -> None:
    saved = Saved(adam_after(2)[1].state_dict())
    module, fresh = adam_after(0)
    plan = saved.fit(fresh.state_dict())
    assert plan.problems == []
    assert plan.fresh == set(range(6))
    fresh.load_state_dict(saved.load(fresh.state_dict()))
    assert fresh.state[module.weight]["step"].item() == 2


def test_optimizer_state_is_filled_in_place_where_it_exists() -> None:
    saved = Saved(adam_after(2)[1].state_dict())
    module, live = adam_after(1)
    moment = live.state[module.weight]["exp_avg"]
    plan = saved.fit(live.state_dict())
    assert (plan.problems, plan.fresh, len(plan.fills)) == ([], set(), 6)
    assert saved.load(live.state_dict())["state"][0]["exp_avg"] is moment
    assert torch.equal(moment, saved.tensors[1])


def test_going_back_before_the_first_step_empties_the_state() -> None:
    saved = Saved(adam_after(0)[1].state_dict())
    live = adam_after(1)[1].state_dict()
    assert saved.fit(live).problems == []
    assert saved.load(live)["state"] == {}


def test_hyper_parameters_that_a_scheduler_added_are_taken() -> None:
    _, optimizer = adam_after(0)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    saved = Saved(optimizer.state_dict())
    live = adam_after(0)[1].state_dict()
    assert saved.fit(live).problems == []
    assert saved.load(live)["param_groups"][0]["initial_lr"] == 0.1


def test_an_optimizer_moment_of_another_shape_or_a_missing_one_is_a_problem() -> None:
    template = {"state": {0: {"m": torch.zeros(3), "v": torch.zeros(2)}}, "param_groups": []}
    plan = Saved({"state": {0: {"m": torch.ones(2), "new": 1}, 1: {"m": torch.ones(1)}}, "param_groups": []}).fit(template)
    assert plan.missing == ["item/state/0/v"]
    assert plan.mismatched == ["item/state/0/m: expected float32 [3], found float32 [2]"]
    assert plan.unexpected == []
    assert plan.fresh == {1}


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array(3.5),
    np.array(["ab", "c"]),
    np.asfortranarray(np.arange(6).reshape(2, 3).astype(">i2")),
    np.array([(1, 2.5)], dtype=[("x", "<i4"), ("y", "<f8")]),
    np.array(["2020-01-01"], "M8[D]"),
    np.zeros((0, 3)),
    np.array([], ">i4"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}-{array.ndim}")
def test_numpy_arrays_are_filled_in_place(array: Any) -> None:
    for live in (np.zeros_like(array, order="K"), np.zeros(array.shape, array.dtype)):
        result = Saved([array]).load([live])[0]
        assert result.dtype == array.dtype
        assert result.tolist() == array.tolist()
        assert result is live or not (live.flags.c_contiguous and array.flags.c_contiguous)


def test_numpy_arrays_that_torch_cannot_write_to_are_filled_all_the_same_but_read_only_ones_come_as_new() -> None:
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    packed = np.zeros(3, [("a", "i1"), ("b", "<f4"), ("c", ">f4")])
    live = [frozen, np.zeros(3, int)[::-1], packed["b"], packed["c"]]
    result = Saved([np.arange(3.0), np.arange(3), np.arange(3, dtype="<f4"), np.arange(3, 6, dtype=">f4")]).load(live)
    assert [array is target for array, target in zip(result, live, strict=True)] == [False, True, True, True]
    assert [array.tolist() for array in result] == [[0.0, 1.0, 2.0], [0, 1, 2], [0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert packed.tolist() == [(0, 0.0, 3.0), (0, 1.0, 4.0), (0, 2.0, 5.0)]
    plan = Saved(np.arange(3)).fit(np.zeros(3, np.int32)[::-1])
    assert plan.mismatched == ["item: expected numpy int32 [3], found numpy int64 [3]"]


def test_a_selection_fills_only_what_it_names() -> None:
    template = {"model.encoder.w": torch.zeros(1), "model.decoder.w": torch.zeros(1), "gone.w": torch.zeros(1), "n": 0}
    saved = Saved({"model.encoder.w": torch.ones(1), "model.decoder.w": torch.ones(1), "extra": 1, "n": 5})
    select = matching(["item.model.encoder.*"])
    plan = saved.fit(template, select=select)
    assert (plan.problems, [index for index, _ in plan.fills]) == ([], [0])
    result = saved.load(template, select=select)
    assert {key: float(value) for key, value in result.items()} == {"model.encoder.w": 1, "model.decoder.w": 0, "gone.w": 0, "n": 0}


def test_a_selection_still_reports_what_it_names_and_does_not_fit() -> None:
    saved = Saved({"a": {"x": torch.ones(1), "more": 1}, "b": torch.ones(1)})
    plan = saved.fit({"a": {"x": torch.zeros(2), "gone": 1}, "c": 3}, select=matching(["item/a"]))
    assert plan.missing == ["item/a/gone"]
    assert plan.unexpected == ["item/a/more"]
    assert plan.mismatched == ["item/a/x: expected float32 [2], found float32 [1]"]


def test_a_selection_without_a_template_returns_only_what_it_names() -> None:
    saved = Saved({"a": {"x": torch.ones(1), "y": torch.ones(2)}, "b": {"c": {"d": 1}}, "e": [torch.ones(3)]})
    assert saved.load(None, select=matching(["item/a/x"])) == {"a": {"x": torch.ones(1)}}
    assert saved.fit(None, select=matching(["item/a/x"])).fresh == {0}
    assert saved.fit(None, select=matching(["item/e/0"])).fresh == {2}
    assert saved.load(None, select=matching(["nothing"])) is None
    assert saved.load(7, select=matching(["nothing"])) == 7


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("model.encoder.*", "model/encoder.0.weight", True),
        ("model.encoder.*", "model/encoder/0", True),
        ("model/encoder", "model/encoder.weight", True),
        ("model/encoder", "model/encoder2.weight", False),
        ("model", "model/w", True),
        ("*.bias", "model/0.bias", True),
        ("MODEL.*", "model/w", False),
    ],
)
def test_patterns(pattern: str, text: str, expected: bool) -> None:
    assert matching([pattern])(text) is expected


@pytest.mark.parametrize(
    ("node", "template"),
    [
        ({"tensor": 5}, torch.zeros(1)),
        ({"tensor": 5}, None),
        ({"ndarray": [5, "<f4", "C"]}, np.zeros(1)),
        ({"ndarray": [0, "<f8", "C"]}, np.zeros(1)),
        ({"ndarray": [0, "nonsense", "C"]}, np.zeros(1)),
        ({"dict": [["a", 1], ["a", 2]]}, {"a": 1}),
        ({"unknown": 1}, None),
    ],
)
def test_malformed_nodes_are_integrity_errors(node: Any, template: Any) -> None:
    with pytest.raises(IntegrityError):
        fit(node, template, path=("item",), entries=Saved([torch.ones(1)]).entries)


def test_fitting_a_value_to_itself_changes_nothing() -> None:
    value = {"m": nn.Linear(2, 2).state_dict(), 3: [np.arange(3), {"x": (torch.ones(1), None)}], "g": torch.Generator().manual_seed(1)}
    saved = Saved(value)
    assert saved.fit(value).problems == []
    result = saved.load(value)
    assert result["m"]["weight"] is value["m"]["weight"]  # type: ignore[index]
    assert canonical.dumps(flatten({"item": result}).nodes) == canonical.dumps(flatten({"item": value}).nodes)
    assert unflatten(saved.node, saved.tensors.__getitem__)[3][1]["x"][1] is None


class Shade(enum.Enum):
    DARK = 1


def test_a_member_of_another_enum_with_the_same_value_does_not_fit_but_a_renamed_enum_or_member_does() -> None:
    assert Saved(Color.RED).fit(Shade.DARK).mismatched == ["item: expected a member of Shade, found Color.RED"]
    renamed = enum.Enum("Hue", {"RED": 1})
    assert Saved(Color.RED).load(renamed.RED) is renamed.RED
    assert Saved(Color.RED).load(enum.Enum("Color", {"CRIMSON": 1}).CRIMSON).name == "CRIMSON"


def test_what_is_read_as_a_plainer_value_is_told_by_path_also_inside_of_keys_and_sets() -> None:
    value = {
        "pairs": [Pair(1, Color.RED)],
        "keys": {Color.BLUE: 1, (Pair(1, 2), 3): 2},
        "set": frozenset({Color.RED}),
        "default": defaultdict(list, a=[1]),
        "plain": (1, {2}),
    }
    assert Saved(value).fit(None).plainer == {
        "namedtuple Pair, read as a tuple": ["item/pairs/0", "item/keys/0"],
        "member of the enum Color, read as its value": ["item/pairs/0/b", "item/keys", "item/set"],
        "defaultdict, read without its factory": ["item/default"],
    }
    assert Saved(value).fit({**value, "keys": {}, "set": None}, select=lambda path: "pairs" in path).plainer == {}


def test_as_saved_the_template_shows_types_and_the_rest_is_the_commits() -> None:
    shared = torch.ones(2)
    value = {"a": Pair(shared, Color.RED), "b": [Settings(shared), Settings(torch.zeros(3), 0.25)], "new": defaultdict(int, n=1), "n": 5}
    live = torch.full((2,), 7.0)
    template = {"a": Pair(live, Color.BLUE), "b": [Settings(live)], "gone": 1, "n": torch.zeros(1)}
    saved = Saved(value)
    result = saved.load(template, as_saved=True)
    assert list(result) == ["a", "b", "new", "n"]
    assert (type(result["a"]), result["a"].b, type(result["b"][0]), result["n"]) == (Pair, Color.RED, Settings, 5)
    # New tensors, tied as they were; of the list's second element no type is shown.
    assert result["a"].a is result["b"][0].weight
    assert result["a"].a is not live
    assert live.tolist() == [7.0, 7.0]
    assert result["b"][1]["rate"] == 0.25
    plan = saved.fit(template, as_saved=True)
    assert plan.problems == []
    assert plan.fills == []
    assert plan.plainer == {"dataclass Settings, read as a dict": ["item/b/1"], "defaultdict, read without its factory": ["item/new"]}
    # Another form altogether, and fields that the class has no more.
    assert Saved({"x": (1, 2)}).load({"x": {"y": 1}}, as_saved=True) == {"x": (1, 2)}
    other = dataclasses.make_dataclass("Settings", ["weight", "extra"])
    assert Saved(Settings(shared)).load(other(1, 2), as_saved=True)["rate"] == 0.5


def test_names_that_differ_by_wrappers_fit_a_state_dict_and_are_told() -> None:
    saved = Saved({"module.w": torch.ones(2), "module.n": 3})
    target = {"w": torch.zeros(2), "n": 0}
    result = saved.load(target)
    assert list(result) == ["w", "n"]
    assert (target["w"].tolist(), result["n"]) == ([1.0, 1.0], 3)
    assert saved.fit(target).renamed == [("item/w", "item/module.w"), ("item/n", "item/module.n")]
    assert saved.fit({"w": 0, "n": 0}).unexpected == ["item/module.w", "item/module.n"]
    assert saved.fit({"w": torch.zeros(3), "n": 0}).mismatched == ["item/module.w: expected float32 [3], found float32 [2]"]


def test_extra_state_of_a_module_is_taken_in_the_form_that_it_has() -> None:
    saved = Saved({"w": torch.ones(1), "a._extra_state": {"amax": [torch.ones(2)], "pair": Pair(1, 2)}})
    target = {"w": torch.zeros(1), "a._extra_state": {"amax": [], "pair": Pair(0, 0), "old": 1}}
    extra = saved.load(target)["a._extra_state"]
    assert (list(extra), extra["amax"][0].tolist(), extra["pair"]) == (["amax", "pair"], [1.0, 1.0], Pair(1, 2))
    assert saved.fit({"w": torch.zeros(1)}).unexpected == ["item/a._extra_state"]


def test_what_a_dataclass_had_computed_is_not_kept() -> None:
    @dataclasses.dataclass
    class Sized:
        items: list[int]

        @functools.cached_property
        def size(self) -> int:
            return len(self.items)

    target = Sized([1])
    assert target.size == 1
    assert Saved(Sized([1, 2, 3])).load(target).size == 3
