"""What ranks do together: restoring from one read, state in its parameters' layout, copies that differ, resharders that misbehave."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import syckpt
from syckpt.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("together")

RANKS = Path(__file__).parent / "together_ranks.py"
ONCE = 4 * 512 * 512


def job(function: str, folder: Path, world_size: int) -> list[Any]:
    return [result.value for result in run_ranks(RANKS, function, str(folder), world_size=world_size, timeout_s=400)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A single process saves; four ranks, then two, read and save; a single process reads what they saved."""
    folder = tmp_path_factory.mktemp("together")
    sys.path.insert(0, str(RANKS.parent))
    try:
        import together_ranks as script
    finally:
        sys.path.remove(str(RANKS.parent))
    torch.manual_seed(0)
    single = script.odd(f"{folder}/odd", ["compiled"], [], "single")
    four, two = job("on_four", folder, 4), job("on_two", folder, 2)
    back = script.odd(f"{folder}/odd", ["plain"], ["four-hsdp-commit", "two-tp-commit", "two-ddp-of-compiled-commit"], "back")
    return {"folder": folder, "single": single, "four": four, "two": two, "back": back}


def test_an_uncommon_model_is_the_same_under_every_kind_of_parallelism_and_wrapper(ran: dict[str, Any]) -> None:
    expected = ran["single"]["compiled saved"]
    assert len(expected) == 14 + 3 * 8 + 2
    assert expected["up.weight"].startswith("torch.bfloat16")
    assert expected["up.weight exp_avg"].startswith("torch.float32")
    assert expected["head.weight"] == expected["embedding.weight"]
    assert not any(name.startswith(("never ", "frozen ")) for name in expected)
    assert (expected["scheduler"], expected["scaler"]) == ([1, [0.01, 0.001]], 512.0)
    for each in (ran["single"], ran["back"], *(rank["odd"] for rank in (*ran["four"], *ran["two"]))):
        for name, state in each.items():
            assert state == expected, name


def test_state_of_a_fresh_optimizer_comes_in_the_layout_of_its_parameters(ran: dict[str, Any]) -> None:
    for each in ran["two"]:
        found = each["templates"]
        saved = found["saved"]
        assert {kinds["exp_avg"][0] for kinds in saved.values()} == {"(Shard(dim=0),)"}
        assert {kinds["step"][0] for kinds in saved.values()} == {"plain"}
        for name in ("ranged", "broadcast", "taken", "unregistered", "without a manager"):
            assert found[name] == saved, name
        assert list(found["by name"].values()) == list(found["model only"].values()) == list(saved.values())
        assert (found["not wanted"], found["dry"]) == ({}, {})
        assert found["a part"] == {"3": {"exp_avg": saved["3"]["exp_avg"]}}
        assert [[kinds["exp_avg"][0], kinds["exp_avg"][2]] for kinds in found["plain"].values()] == [
            ["plain", kinds["exp_avg"][2]] for kinds in saved.values()
        ]


def test_copies_of_sharded_tensors_that_differ_are_told_by_path_and_cost_no_round_where_they_do_not(ran: dict[str, Any]) -> None:
    four = [each["copies"] for each in ran["four"]]
    for rank, each in enumerate(four):
        assert each["rounds"] == [1, 2]
        assert len(each["warned"]) == (rank == 0)
        assert each["last"] in (39999.0, -1.0)
        assert each["first"] in ([0.0, 1.0, 2.0], [7.0, 7.0, 7.0])
        assert (each["last"], each["first"]) == (four[0]["last"], four[0]["first"])
    assert "2 sharded tensors have copies that differ" in four[0]["warned"][0]
    assert "state/hsdp (ranks 1, 3)" in four[0]["warned"][0]
    assert "state/all (ranks 0, 1, 2, 3)" in four[0]["warned"][0]


@pytest.mark.parametrize("read", ["ranged", "broadcast"])
def test_goto_and_a_resume_from_an_older_commit_restore_every_rank(ran: dict[str, Any], read: str) -> None:
    both = [each["restored"][read] for each in ran["two"]]
    for each in both:
        assert each["goto"] == [1.0, 1.0]
        assert each["again"] == [2.0, 2.0]
        assert each["misfit"][0] == "StateError"
        assert each["left"][0] == [1.0, 1.0]
        assert each["fallen back"] == [[1.0, 1.0], 1]
        assert each["saved"] == ["", ""]
        assert each["other items"][0] == "CoordinationError"
        assert "'own' is not on rank(s) 1" in each["other items"][1]
    left = "extra was left as it is: extra/weight: expected float32 [2, 4], found float32 [2, 3] (not required)"
    assert [each["left"][1] for each in both] == [[], [left]]
    total = sum(each["bytes"] for each in both)
    assert ONCE * (1 if read == "broadcast" else 2) <= total < ONCE * (1 if read == "broadcast" else 2) + (64 << 10)


@pytest.mark.parametrize("read", ["ranged", "broadcast"])
def test_an_older_commit_that_does_not_fit_one_rank_is_raised_on_all_and_nothing_is_saved(ran: dict[str, Any], read: str) -> None:
    for rank, each in enumerate(ran["two"]):
        (kind, text), (after, why) = each["misfit"][read]
        assert (kind, after) == ("StateError", "StateError")
        assert "own/weight: expected float32 [2, 3], found float32 [2, 4]" in text
        assert ("rank(s) 1" in text) == (rank == 0)
        assert "half restored" in why


def test_a_resharder_that_misbehaves_is_an_error_on_all_ranks_before_anything_is_filled(ran: dict[str, Any]) -> None:
    told = {
        "path that is not there": ("StateError", "has nothing there"),
        "texts": ("StateError", "expected a list of paths"),
        "fails": ("KeyError", "1"),
        "outside": ("StateError", "is not within the global shape [12, 3]"),
        "negative": ("StateError", "not a box"),
        "dimensions": ("StateError", "is not within the global shape"),
        "unknown path": ("NotFoundError", "table/nope"),
        "no tensor": ("StateError", "read_value reads other values"),
        "unknown rank": ("NotFoundError", "not of 9"),
        "other shape": ("StateError", "declares a box of sizes [6, 3]"),
        "extract fails": ("KeyError", "my own mistake"),
    }
    for rank, each in enumerate(ran["two"]):
        for how, (kind, text) in told.items():
            name, message, kept, mine, then = each["tables"][how]
            assert name == ("RankFailure" if kind == "KeyError" and rank == 0 else kind), how
            assert text in message
            assert (set(kept), mine, then) == ({-1.0}, -1, 1), how
        expected = [float(value) for value in range(rank * 18, rank * 18 + 18)]
        assert each["tables"]["everything"] == ["", "", expected, 3, 1]
        assert each["tables"]["nothing"] == ["", "", expected, rank, 1]
    for rank, each in enumerate(ran["four"]):
        assert each["tables"]["extract fails"][0] == ("KeyError" if rank == 1 else "RankFailure")
        assert each["tables"]["extract differs"][0] == "StateError"
        assert "declares it on rank 0 and not on rank 1" in each["tables"]["extract differs"][1]
        assert each["tables"]["extract fails, then"] == each["tables"]["extract differs, then"] == ["", ""]


def test_plain_values_of_each_rank_go_to_two_ranks_and_to_one_process(ran: dict[str, Any]) -> None:
    def of(rank: int) -> dict[str, Any]:
        return {"a": rank, "b": [rank, {"c": rank}], "same": 1}

    assert [each["tables"]["plain"] for each in ran["two"]] == [of(0), of(1)]
    assert [each["tables"]["per rank"] for each in ran["two"]] == [["plain/a", "plain/b/0", "plain/b/1/c"]] * 2
    plain = syckpt.load(ran["folder"] / "tables", "four")["plain"]
    assert plain == {"a": {0: 0, 1: 1, 2: 2, 3: 3}, "b": [{0: 0, 1: 1, 2: 2, 3: 3}, {"c": {0: 0, 1: 1, 2: 2, 3: 3}}], "same": 1}


@pytest.mark.parametrize("read", ["ranged", "broadcast"])
def test_strictness_is_the_same_for_shards(ran: dict[str, Any], read: str) -> None:
    values = [float(value) for value in range(15)]
    for rank, each in enumerate(ran["two"]):
        found = each["strictness"][read]
        assert found["no cast"][0] == "StateError"
        assert found["no cast"][2:] == [[True, *[0.0] * 15], [0.0] * 4, []]
        assert found["cast"] == ["", "", [True, *values], [0.0, 1.0, 2.0, 3.0], []]
        assert found["partial"] == ["", "", [False, *values], [0.0] * 4, []]
        assert found["other shape"][0] == "StateError"
        assert found["other shape"][2:] == [[False, *[0.0] * 18], [0.0] * 4, []]
        skipped = "item/w: expected float32 [6, 3], found float32 [5, 3]"
        assert found["lenient"] == ["", "", [False, *[0.0] * 18], [0.0, 1.0, 2.0, 3.0], [skipped]]
        assert found["one rank"][0] == "StateError"
        assert found["one rank"][2:4] == [[False, *[0.0] * 15], [0.0] * (4 + rank)]
        skipped = "spare/w: expected float32 [7, 3], found float32 [5, 3] (not required)"
        assert found["not required"] == ["", "", [False, *values], [0.0, 1.0, 2.0, 3.0], [skipped]]


@pytest.mark.parametrize("read", ["ranged", "broadcast"])
def test_a_load_in_place_takes_little_memory_beside_the_values(ran: dict[str, Any], read: str) -> None:
    for each in ran["two"]:
        grown, is_whole = each["memory"][read]
        assert is_whole
        assert grown < 128_000_000  # of 268 MB


def test_a_replicated_tensor_is_read_once_for_all(ran: dict[str, Any]) -> None:
    both = [each["replicated"] for each in ran["two"]]
    assert all(equal for each in both for _, equal in each.values())
    assert sum(each["whole"][0] for each in both) == 2 << 20
    assert [each["parts"][0] for each in both] == [1 << 20, 1 << 20]
    assert [each["either"][0] for each in both] == [2 << 20, 1 << 20]  # Only one of them needs all of it.


def test_what_is_restored_when_it_is_registered_is_read_by_each_rank_when_it_comes_to_it(ran: dict[str, Any]) -> None:
    both = [each["late"] for each in ran["two"]]
    assert [[each["registered"], each["value"]] for each in both] == [[ONCE, [3.0]]] * 2
    assert sum(each["goto"] for each in both) == ONCE


def test_an_older_commit_is_loaded_while_a_newer_one_is_being_written(ran: dict[str, Any]) -> None:
    for each in ran["two"]:
        assert each["beside"] == {
            "done": False,
            "older": [[1.0 + number] for number in range(8)],
            "newer": [[21.0 + number] for number in range(8)],
        }


@pytest.mark.parametrize("read", ["ranged", "broadcast"])
def test_after_damage_on_one_rank_no_rank_saves_a_mixture_or_points_to_older_bytes(ran: dict[str, Any], read: str) -> None:
    exact = [[1.0 + number] for number in range(8)]
    both = [each["after damage"][read] for each in ran["two"]]
    assert both[0]["values"] == exact  # The other rank has read all of its own by the time it hears of it.
    assert both[1]["values"][7] == [6.0]
    assert all(value in (new, [-1.0 + number]) for number, (value, new) in enumerate(zip(both[1]["values"], exact, strict=True)))
    for each in both:
        assert each["load"][0] == "IntegrityError"
        assert each["half"][0] == "StateError"
        assert "half restored (m/w0, m/w1, m/w2, m/w3, m/w4 and 3 more)" in each["half"][1]
        assert each["third"] == exact
        assert each["pointing"] == [8 << 16, 0, 8 << 16]
