"""Two ranks move through a history together: from commit to commit, from branch to branch, with a fault on one of them at each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import syckpt
from syckpt.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("moves")

RANKS = Path(__file__).parent / "moves_ranks.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moves")


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[str, Any]]:
    return [result.value for result in run_ranks(RANKS, "two", str(folder), world_size=2, timeout_s=300)]


def everywhere(both: list[dict[str, Any]], name: str) -> Any:
    assert both[0][name] == both[1][name]
    return both[0][name]


def test_all_ranks_go_to_one_commit_and_one_branch(both: list[dict[str, Any]]) -> None:
    assert everywhere(both, "goto") == [1.0, 1, 1.0, 1, "main"]
    assert everywhere(both, "created") == [2.0, 2, 2.0, 2, "exp"]
    assert everywhere(both, "checked out") == [2.0, 2, 2.0, 2, "main"]
    assert everywhere(both, "unsaved") == [4.0, 4, 4.0, 3, "exp"]


def test_ranks_that_ask_for_different_things_are_told_of_both_and_nothing_moves(both: list[dict[str, Any]]) -> None:
    asked = {
        "goto": ("a", "b"),
        "load": ("a", "b"),
        "load into": ("a", "a into targets"),
        "create_branch": ("x at HEAD", "y at HEAD"),
        "create_branch at": ("x at a", "x at b"),
        "checkout_branch": ("exp", "main"),
        "delete_branch": ("exp", "other"),
        "tag": ("t1 at a", "t2 at a"),
        "tag rev": ("t1 at a", "t1 at b"),
        "export_ckpt": ("a", "b"),
    }
    for each in both:
        for name, (first, second) in asked.items():
            kind, text = each["arguments"][name]
            assert kind == "CoordinationError", name
            assert f"(rank 0: {first!r}, rank 1: {second!r})" in text
        assert each["made"][0] == "CoordinationError"
        assert "read='broadcast'" in each["made"][1]
        kind, text = each["arguments"]["save"]
        assert kind == "CoordinationError"
        assert "rank 0: ['p'], rank 1: ['q']" in text
        # What is no argument at all is itself on its rank, and told elsewhere.
        for name in ("wrong", "no text"):
            assert each["arguments"][name][0] == "StateError", name
        assert each["still"] == [[2.0, 2, 2.0, 2, "main"], ["exp", "main", "other"]]
    assert "rank(s) 1" in both[0]["arguments"]["wrong"][1]
    assert "rank(s) 1" in both[0]["arguments"]["no text"][1]


def test_what_one_rank_could_not_restore_is_raised_on_all_and_never_saved(both: list[dict[str, Any]]) -> None:
    assert both[0]["refused"] == ["RankFailure", "rank(s) 1 failed in 'goto('b')' (restore): rank 1: ValueError: my own refusal"]
    assert both[1]["refused"] == ["ValueError", "my own refusal"]
    for kind, text in [*everywhere(both, "torn"), everywhere(both, "torn branch")]:
        assert kind == "StateError"
        assert "failed, which left the registered items half restored" in text
    assert [each["refused branch"][0] for each in both] == ["RankFailure", "ValueError"]
    assert everywhere(both, "whole again") == [[2.0, 2, 2.0, 2, "main"], ["", ""]]


def test_what_does_not_fit_one_rank_touches_none(both: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(both):
        *failed, value, branch = each["misfit"]
        for kind, text in failed:
            assert kind == "StateError"
            assert "model/weight: expected float32 [4, 3], found float32 [3, 3]" in text
            assert ("rank(s) 1" in text) == (rank == 0)
        assert (value, branch) == (2, "main")


def test_a_branch_is_not_left_while_one_rank_cannot_save(both: list[dict[str, Any]]) -> None:
    assert [each["unsavable"][0][0] for each in both] == ["RankFailure", "KeyError"]
    assert [each["unsavable"][1] for each in both] == [[5.0, 5, 5.0, 3, "main"]] * 2
    assert everywhere(both, "saved after all") == [5.0, 5, 5.0, 3, "main"]


def test_damage_that_one_rank_reads_stops_all_and_they_go_on_from_another_commit(both: list[dict[str, Any]]) -> None:
    for each in both:
        (kind, text), (after, _) = each["damaged"]
        assert (kind, after) == ("IntegrityError", "StateError")
        assert "r00001.safetensors" in text
    assert "rank(s) 1" in both[0]["damaged"][0][1]
    assert everywhere(both, "before the damage") == [[5.0, 5, 5.0, 3, "main"], ["", ""]]


def test_everything_else_of_a_history_works_on_all_ranks(both: list[dict[str, Any]], folder: Path) -> None:
    for each in both:
        assert each["tag again"][0] == "ConflictError"
        assert [kind for kind, _ in each["missing"]] == ["NotFoundError", "ConflictError"]
        assert each["export"][0] == "StoreError"
        assert each["diff"] == ["model/weight", "own/weight (rank 0)", "own/weight (rank 1)"]
        assert each["similar"] == 2
        assert each["swept"][1][0] == "StateError"
    assert [each["swept"][0] for each in both] == [True, False]
    exported = torch.load(folder / "out/deep/a.pt", weights_only=True)
    assert exported["model"]["weight"].unique().tolist() == [1.0]
    assert exported["syckpt"]["world_size"] == 2


def test_a_new_branch_begins_with_warm_weights_and_keeps_what_its_rule_says(both: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(both):
        state, planned, dropped = each["forked"]
        assert state == [5.0, 5, 5.0, 0, "main-2"]
        assert planned == (rank == 0)
        assert dropped == [False, False, True, True]


def test_without_a_root_ranks_that_name_different_directories_are_told_and_go_on(both: list[dict[str, Any]], folder: Path) -> None:
    for rank, each in enumerate(both):
        for name in ("known", "unknown", "new"):
            assert each["paths"][name][0] == "CoordinationError", name
        assert str(folder / "paths") in each["paths"]["known"][1]
        assert str(folder / "more") in each["paths"]["known"][1]
        assert each["paths"]["rank"] == rank
    assert syckpt.load(folder / "paths", "two")["rank"] == {0: 0, 1: 1}
