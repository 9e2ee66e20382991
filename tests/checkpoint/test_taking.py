"""Which structure a rank sees of an item, at what price, and what ranks tell each other of it. Several ranks: tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syckpt.checkpoint.source import Source
from syckpt.checkpoint.taking import Taking, names_in, refuse_other_items, refuse_untaken, suit, suit_parameters
from syckpt.dist.coordinator import SingleProcess
from syckpt.errors import CoordinationError, StateError
from syckpt.objects import nodes
from syckpt.repo.reader import Reader
from syckpt.reshard.layout import Layout, Shard
from syckpt.testing.simulation import Simulated, Tensor, simulate

RANKS, STAGES = 1024, 16
EACH = RANKS // STAGES


def pipeline() -> Simulated:
    """A pipeline of 16 stages, each sharded over 64 ranks, and a scale that all ranks have."""
    meshes = [tuple(range(stage * EACH, (stage + 1) * EACH)) for stage in range(STAGES)]
    made = [
        Tensor(("model", f"s{stage}"), "float32", (EACH, 4), Layout((EACH, 4), (EACH,), ranks, (Shard(0),)))
        for stage, ranks in enumerate(meshes)
    ]
    return simulate([*made, Tensor(("model", "scale"), "float32", (64,), None)], world_size=RANKS)


def source_of(simulated: Simulated, rank: int) -> Source:
    return Source(Reader(simulated.repository), simulated.commit, rank=rank, world_size=RANKS)


def target(*stages: int) -> dict[str, Any]:
    return {**{f"s{stage}": torch.empty(EACH, 4) for stage in stages}, "scale": torch.empty(64)}


def keys(source: Source) -> list[str]:
    return [key for key, _ in source.node("model")["dict"]]


def test_a_rank_whose_target_has_what_it_saved_reads_one_manifest() -> None:
    source = source_of(pipeline(), 700)
    suit(source, "model", lambda: target(10))
    assert keys(source) == ["s10", "scale"]
    assert source.content.manifests_read == 1


def test_a_rank_whose_target_has_more_sees_all_stages_by_one_manifest_each() -> None:
    source = source_of(pipeline(), 700)
    suit(source, "model", lambda: target(9, 10))
    assert sorted(keys(source)) == sorted([*(f"s{stage}" for stage in range(STAGES)), "scale"])
    assert source.content.manifests_read == STAGES


def test_what_no_rank_saved_leaves_a_rank_with_its_own() -> None:
    source = source_of(pipeline(), 700)
    suit(source, "model", lambda: {**target(10), "new": torch.empty(1)})
    assert keys(source) == ["s10", "scale"]


def test_where_ranks_saved_the_same_a_target_is_not_even_asked_for() -> None:
    simulated = simulate([Tensor(("model", "scale"), "float32", (64,), None)], world_size=RANKS)
    suit(source_of(simulated, 700), "model", lambda: pytest.fail("asked for"))


class Shown:
    """Stands for a source: an item, seen by a rank among others."""

    def __init__(self, value: Any) -> None:
        self.commit = type("Commit", (), {"id": "c"})
        self.has_others = True
        self._node = nodes.encode(value)

    def node(self, name: str) -> Any:
        return self._node

    def show(self, name: str, node: Any) -> None:
        self._node = node

    def can_unite(self, name: str) -> bool:
        return False


def taking(value: Any, left: list[str]) -> Taking:
    found = Taking(Shown(value))  # type: ignore[arg-type]
    found.add("m", left)
    return found


def test_a_rank_takes_what_it_sees_of_a_path_and_does_not_leave() -> None:
    mine = taking({"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 4}}, ["m/b/c", "m/e"])
    assert mine.left == ["m/b/c", "m/e"]
    assert mine.takes(["m/a", "m/b", "m/b/c", "m/b/d", "m/e", "m/e/f", "m/g", "other"]) == f"{0b1011:x}"
    mine.drop("m")
    assert (mine.left, mine.takes(["m/a"])) == ([], "0")


OPTIMIZER = {"state": {"x": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["x", "frozen", "y"]}]}


def test_an_optimizer_leaves_parameters_by_name_and_takes_those_without_state_too() -> None:
    shown = Shown(OPTIMIZER)
    assert suit_parameters(shown, "m", ["x", "frozen"]) == ["m/state/y"]  # type: ignore[arg-type]
    assert nodes.decode(shown.node("m")) == {"state": {"x": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["x", "frozen"]}]}
    mine = Taking(shown)  # type: ignore[arg-type]
    mine.add("m", ["m/state/y"])
    assert mine.takes(["m/state/frozen", "m/state/x", "m/state/y"]) == f"{0b011:x}"


def test_an_optimizer_of_other_names_altogether_is_left_as_it_is() -> None:
    shown = Shown(OPTIMIZER)
    assert suit_parameters(shown, "m", ["z"]) == []  # type: ignore[arg-type]
    assert nodes.decode(shown.node("m")) == OPTIMIZER


def test_names_are_those_of_a_state_dict_that_counts_by_name() -> None:
    assert names_in(OPTIMIZER) == ["x", "frozen", "y"]
    model = torch.nn.Linear(1, 1)
    for other in (torch.optim.SGD(model.parameters()).state_dict(), model.state_dict(), {"param_groups": [1]}, None, [OPTIMIZER]):
        assert names_in(other) is None


def test_an_error_shows_some_of_thousands_of_paths() -> None:
    left = [f"m/p{number:05}" for number in range(10_000)]
    with pytest.raises(StateError, match=r"10000 unexpected in the commit, .*: m/p00000, .*, m/p00019 and 9980 more\. ") as caught:
        refuse_untaken(SingleProcess(), "goto()", taking({}, []), left, at="check")
    assert len(str(caught.value)) < 1000


def test_an_error_shows_some_of_thousands_of_items_and_ranks() -> None:
    refuse_other_items([["a", "b"]] * 8192)
    with pytest.raises(CoordinationError, match=r"'b' is not on rank\(s\) 1, 2, .*, 20 and 8171 more\. ") as caught:
        refuse_other_items([["a", "b"], *[["a"]] * 8191])
    assert len(str(caught.value)) < 1000
    with pytest.raises(CoordinationError, match=r"'i00019' is not on rank\(s\) 1 and 9980 more\. "):
        refuse_other_items([[f"i{number:05}" for number in range(10_000)], []])
