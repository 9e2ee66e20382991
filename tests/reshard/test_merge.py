"""One structure out of those of several ranks, and what a rank of another job leaves to others."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from syckpt.objects import nodes
from syckpt.reshard.merge import merge, named_parameters, swap_tensors, unite_groups, without_parameters

values = st.recursive(
    st.none() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def optimizer(*groups: tuple[float, list[Any]]) -> Any:
    """Return the node of an optimizer's state: groups of learning rate and parameters, one value of state for each."""
    state = {name: {"step": len(str(name))} for _, params in groups for name in params}
    return nodes.encode({"state": state, "param_groups": [{"lr": lr, "params": params} for lr, params in groups]})


@given(values, st.integers(1, 4))
def test_what_all_ranks_have_alike_stays_as_it_is(value: Any, ranks: int) -> None:
    assert merge(dict.fromkeys(range(ranks), nodes.encode(value)), choose=None) == (nodes.encode(value), [])


def test_keys_are_united() -> None:
    parts = {0: nodes.encode({"a": 1, "deep": {"x": 1}}), 1: nodes.encode({"a": 1, "b": 2, "deep": {}})}
    merged, differing = merge(parts, choose=1, path=("item",))
    assert nodes.decode(merged) == {"a": 1, "deep": {"x": 1}, "b": 2}
    assert differing == []


def test_groups_of_stages_become_one_and_other_hyper_parameters_stay_apart() -> None:
    parts = {0: optimizer((0.1, ["a", "b"]), (0.5, ["n"])), 1: optimizer((0.1, ["c"])), 2: optimizer((0.2, ["d"]))}
    assert [named_parameters(part) for part in parts.values()] == [["a", "b", "n"], ["c"], ["d"]]
    merged, differing = merge(unite_groups(parts), choose=0)
    assert differing == []
    assert nodes.decode(merged) == {
        "state": {"a": {"step": 1}, "b": {"step": 1}, "n": {"step": 1}, "c": {"step": 1}, "d": {"step": 1}},
        "param_groups": [{"lr": 0.1, "params": ["a", "b", "c"]}, {"lr": 0.5, "params": ["n"]}, {"lr": 0.2, "params": ["d"]}],
    }
    left = without_parameters(merged, {"a", "d", "n"})
    assert nodes.decode(left) == {
        "state": {"b": {"step": 1}, "c": {"step": 1}},
        "param_groups": [{"lr": 0.1, "params": ["b", "c"]}, {"lr": 0.5, "params": []}, {"lr": 0.2, "params": []}],
    }


def test_an_optimizer_counted_by_number_and_what_is_none_are_left_alone() -> None:
    by_number = {0: optimizer((0.1, [0, 1])), 1: optimizer((0.1, [0]))}
    assert named_parameters(by_number[0]) is None
    assert unite_groups(by_number) is by_number
    for other in (1, nodes.encode({"param_groups": 3}), nodes.encode([1]), nodes.encode({})):
        assert named_parameters(other) is None
        assert unite_groups({0: other, 1: optimizer((0.1, ["a"]))}) == {0: other, 1: optimizer((0.1, ["a"]))}


def test_tensors_are_counted_anew_by_path_in_every_container() -> None:
    node = {
        "dict": [
            ["a", {"tensor": 0}],
            [1, {"list": [{"tensor": 1}, 5]}],
            ["t", {"tuple": [{"namedtuple": ["P", [["x", {"tensor": 0}]]]}]}],
            ["d", {"deque": [None, [{"tensor": 2}]]}],
            ["n", {"ndarray": [3, "<f4", "C"]}],
        ]
    }
    seen = []

    def swap(path: Any, number: int) -> int:
        seen.append((path, number))
        return number + 10

    swapped = swap_tensors(node, swap, ("item",))
    assert seen == [(("item", "a"), 0), (("item", 1, 0), 1), (("item", "t", 0, "x"), 0), (("item", "d", 0), 2)]
    assert nodes.split(swapped)[1][:2] == [["a", {"tensor": 10}], [1, {"list": [{"tensor": 11}, 5]}]]
    assert nodes.split(swapped)[1][4] == ["n", {"ndarray": [3, "<f4", "C"]}]
