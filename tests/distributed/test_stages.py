"""State that ranks have in parts (stages, experts, one rank's dictionary), on as many ranks as saved it and on others; what nobody takes.

Jobs of one, eight and two ranks play all of it; each test looks at what its own scenario found (stages_ranks.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import syckpt
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root

pytestmark = pytest.mark.xdist_group("stages")

RANKS = Path(__file__).parent / "stages_ranks.py"
ALL = {"l0", "l1", "l2", "l3"}
HALVES = ({"l0", "l1"}, {"l2", "l3"})
ODD = ({"l0", "l2"}, {"l1", "l3"})
THREE = ({"l0"}, {"l1", "l2", "l3"})


@pytest.fixture(scope="module")
def jobs(play_jobs: Any) -> Any:
    return play_jobs(RANKS, {"alone": 1, "on_eight": 8, "on_two": 2})


@pytest.fixture(scope="module")
def whole(jobs: Any) -> Any:
    """The layers and their moments after a step, as every process makes them."""
    (found,) = jobs.found("alone", "saved_alone")
    assert len(found) == 8
    assert all(len(digests) == 4 for digests in found.values())  # the parameter, two moments, a count of steps
    return found


def of(whole: dict[str, Any], layers: set[str]) -> dict[str, Any]:
    return {name: digests for name, digests in whole.items() if name.partition(".")[0] in layers}


def paths(layers: set[str]) -> list[str]:
    """Return the paths of these layers in a model and in its optimizer."""
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    return sorted([f"model/{name}" for name in names] + [f"optimizer/state/model.{name}" for name in names])


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "stages"), [("same", HALVES), ("odd", ODD), ("odd for all", ODD), ("whole", (ALL, ALL)), ("three", THREE)])
def test_stages_are_cut_anew_on_as_many_ranks(jobs: Any, whole: dict[str, Any], cut: str, stages: tuple[set[str], set[str]]) -> None:
    for rank, each in enumerate(jobs.found("on_two", "stages_cut_anew")):
        for found in (cut,) if cut == "odd for all" else (cut, f"{cut} by goto"):
            assert each[found] == of(whole, stages[rank])


def test_a_report_says_what_each_rank_left_to_others_and_not_what_it_never_saw(jobs: Any) -> None:
    for rank, each in enumerate(jobs.found("on_two", "stages_cut_anew")):
        note = "optimizer: {} parameters, which this rank does not have, are left to other ranks"
        for cut, left, notes in (
            ("same", [set(), set()], []),
            ("odd", [ODD[1], ODD[0]], [note.format(4)]),
            ("whole", [set(), set()], []),
            ("three", [{"l1"}, {"l0"}], [note.format(2)]),
        ):
            missing, unexpected, told, per_rank = each[f"{cut} report"]
            assert (missing, sorted(unexpected), told, per_rank) == ([], paths(left[rank]), notes, [])


def test_a_layer_that_every_rank_drops_is_refused_on_all_of_them_before_anything_is_touched(jobs: Any) -> None:
    for each in jobs.found("on_two", "stages_cut_anew"):
        error, untouched = each["lost"]
        assert error.startswith("StateError: commit ")
        assert "4 unexpected in the commit, which no rank has a use for: " + ", ".join(paths({"l1"})) in error
        assert untouched


def test_stages_go_into_targets_with_the_moments_of_a_registered_and_of_a_named_optimizer(jobs: Any, whole: dict[str, Any]) -> None:
    for rank, each in enumerate(jobs.found("on_two", "stages_into_targets")):
        assert each["registered"] == each["named"] == of(whole, ODD[rank])
        assert each["moments"] == sorted(of(whole, ODD[rank]))
        assert each["notes"] == ["optimizer: 4 parameters, which this rank does not have, are left to other ranks"]


def test_without_targets_each_rank_gets_what_it_saved(jobs: Any, whole: dict[str, Any]) -> None:
    for rank, each in enumerate(jobs.found("on_two", "stages_into_targets")):
        mine = sorted(of(whole, HALVES[rank]))
        assert each["own"] == [mine, [f"model.{name}" for name in mine]]


def test_a_load_refuses_what_no_target_of_any_rank_takes_unless_it_is_not_strict(jobs: Any) -> None:
    for rank, each in enumerate(jobs.found("on_two", "stages_into_targets")):
        for call in ("lost", "dry"):
            assert "2 unexpected in the commit, which no rank has a use for: model/l2.weight, model/l3.weight. " in each[call]
            assert each[call].startswith("StateError: ")
        mine = {"model/l2.weight", *(path for path in paths(ODD[1]) if path.startswith("model"))}
        others = {"model/l3.weight", *(path for path in paths(ODD[0]) if path.startswith("model"))}
        assert set(each["unexpected"]) == (others if rank else mine)
        assert each["anyhow"] == ""


def test_stages_go_to_shards_of_the_whole_model_on_as_many_ranks(jobs: Any, whole: dict[str, Any]) -> None:
    assert jobs.alike("on_two", "stages_sharded") == whole


def test_what_one_process_or_every_rank_had_whole_goes_into_stages(jobs: Any, whole: dict[str, Any]) -> None:
    for rank, each in enumerate(jobs.found("on_two", "whole_into_stages")):
        for root in ("single", "whole"):
            assert each[root] == each[f"{root} by goto"] == of(whole, HALVES[rank])
            assert each[f"{root} report"] == paths(HALVES[1 - rank])
            assert each[f"{root} saved"] == ""
        mine, notes = each["optional"]
        assert {name: digests[:1] for name, digests in mine.items()} == {
            name: digests[:1] for name, digests in of(whole, HALVES[rank]).items()
        }
        assert [note.partition(": ")[2].partition(" (")[0] for note in notes] == ["4 paths of the commit are not in it"]


def test_what_no_rank_has_a_use_for_is_refused_by_the_next_call_in_which_ranks_agree(jobs: Any, whole: dict[str, Any]) -> None:
    for rank, each in enumerate(jobs.found("on_two", "nobodys")):
        model = "2 unexpected in the commit, which no rank has a use for: model/l3.bias, model/l3.weight. "
        for call in ("restore", "save", "late"):
            assert each[call].startswith("StateError: ")
            assert model in each[call]
        error, untouched = each["goto"]
        assert ", ".join(paths({"l3"})) in error
        assert untouched
        assert {"model/l3.bias", "model/l3.weight"} <= set(each["unexpected"])
        assert each["put right"] == ""
        assert "1 unexpected in the commit, which no rank has a use for: optimizer/state/model.l3.bias. " in each["moments"]
        assert each["moments put right"] == ["", of(whole, HALVES[rank])]


# -- names of items ----------------------------------------------------------------------------------------------------


def test_items_that_only_some_ranks_have_are_refused_by_name_wherever_ranks_agree_on_items(jobs: Any) -> None:
    for each in jobs.found("on_two", "other_items"):
        both = "CoordinationError: items have to have the same names on all 2 ranks: 'b' is not on rank(s) 0, 'c' is not on rank(s) 1. "
        for call, text in {
            "save": both,
            "prewarm": both,
            "load": both.replace("0, 'c' is not on rank(s) ", ""),
            "partial": both.replace("0, 'c' is not on rank(s) ", ""),
            "step": both.replace(", 'c' is not on rank(s) 1", ""),
            "goto": both.replace("0, 'c' is not on rank(s) ", ""),
        }.items():
            assert each[call].startswith(text), call
        assert each["empty"] == each["put right"] == ""


# -- one rank's dictionary, and torch's helper ---------------------------------------------------------------------------


def test_a_dictionary_that_rank_0_alone_has_becomes_shards_on_as_many_ranks(jobs: Any) -> None:
    zero, one = jobs.found("on_two", "whole_on_rank_0")
    assert (zero["keys"], one["keys"]) == (4, 0)
    assert len(zero["saved"]) == 4 + 3 * 4
    for each in (zero, one):
        assert each["saved"] == each["sharded"] == zero["saved"]
    assert zero["rank 0"] == {name: digest for name, digest in zero["saved"].items() if " " not in name}
    assert one["rank 0"] == {}


def test_dictionaries_of_torchs_helper_go_into_each_other_under_all_of_its_options(jobs: Any) -> None:
    found = jobs.alike("on_two", "helper_dictionaries")
    saved = found.pop("saved")
    assert [len(digests) for digests in saved.values()] == [4, 4, 4, 4]
    assert found == dict.fromkeys(
        (
            "sharded as sharded",
            "sharded as full",
            "full as sharded",
            "full as full",
            "full on rank 0 as sharded",
            "full on rank 0 as full",
            "flat as flat",
            "full and flat as flat",
        ),
        saved,
    )


# -- experts, and a mesh of three dimensions -----------------------------------------------------------------------------


def test_experts_are_dealt_to_fewer_ranks_and_anew_to_as_many(jobs: Any) -> None:
    saved: dict[str, Any] = {}
    for rank, each in enumerate(jobs.found("on_eight", "experts_dealt")):
        assert sorted(each["held"]) == sorted(f"{part}.{kind}" for part in (f"e{rank}", "gate") for kind in ("bias", "weight"))
        saved |= each["held"]
    assert len(saved) == 18
    for scenario, dealt in (
        ("experts_dealt", [{"e0", "e2", "e4", "e6"}, {"e1", "e3", "e5", "e7"}]),
        ("experts_dealt_anew", [{"e0", "e1", "e2", "e3"}, {"e4", "e5", "e6", "e7"}]),
    ):
        for rank, each in enumerate(jobs.found("on_two", scenario)):
            assert each["held"] == of(saved, dealt[rank] | {"gate"})
            assert each["notes"] == ["optimizer: 8 parameters, which this rank does not have, are left to other ranks"]
    plain = syckpt.load(jobs.folder / "experts")
    assert {name: jobs.script.digest(value) for name, value in plain["model"].items()} == {
        name: digests[0] for name, digests in saved.items()
    }


def test_a_mesh_of_replicas_shards_and_tensor_parallelism_goes_to_one_dimension_and_back(jobs: Any) -> None:
    found = jobs.alike("on_eight", "cube")
    assert found.pop("placements") == [
        "(Replicate(), _StridedShard(dim=0, sf=2), Shard(dim=0))",
        "(Replicate(), _StridedShard(dim=0, sf=2), Shard(dim=0))",
        "(Replicate(), Shard(dim=0), Shard(dim=1))",
        "(Replicate(), Shard(dim=0), Replicate())",
    ]
    saved = found.pop("saved")
    assert [len(digests) for digests in saved.values()] == [4, 4, 4, 4]
    assert found == dict.fromkeys(("cube as fsdp", "cube as hsdp x tp", "fsdp as hsdp x tp"), saved)
    assert jobs.alike("on_two", "cube_on_two") == {"fsdp": saved, "tp": saved}
    plain = syckpt.load(jobs.folder / "cube", "cube")["model"]
    assert {name: jobs.script.digest(value) for name, value in plain.items()} == {name: digests[0] for name, digests in saved.items()}


def test_what_was_saved_in_parts_is_whole(jobs: Any, whole: dict[str, Any]) -> None:
    for name in ("stages", "whole", "experts", "cube"):
        assert verify(Repository.open(parse_root(jobs.folder / name))).ok
    assert jobs.script.read_alone(str(jobs.folder / "stages"), "halves") == whole
