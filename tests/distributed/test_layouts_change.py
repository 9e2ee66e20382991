"""One state under every kind of parallelism, in all directions; stages, diverged replicas and reads for all ranks together."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import syckpt
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("layouts_change")

RANKS = Path(__file__).parent / "layouts_ranks.py"


def job(function: str, *args: Any, world_size: int) -> list[Any]:
    return [result.value for result in run_ranks(RANKS, function, *args, world_size=world_size, timeout_s=300)]


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location(RANKS.stem, RANKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[RANKS.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A single process saves, four ranks and then two read and save, a single process reads what they saved."""
    folder = tmp_path_factory.mktemp("layouts")
    script = load_script()
    single = script.layouts(f"{folder}/m", ["plain"], [], "single")
    four = job("on_four", str(folder), world_size=4)
    two = job("on_two", str(folder), world_size=2)
    kinds = [f"four-{kind}-commit" for kind in ("ddp", "fsdp", "tp", "hsdp")] + [f"two-{kind}-commit" for kind in ("fsdp", "tp", "ddp")]
    back = script.layouts(f"{folder}/m", ["plain"], kinds, "back")
    one = script.stages(f"{folder}/pp", 0, 1, seed=2)
    return {"folder": folder, "single": single, "four": four, "two": two, "back": back, "one": one}


def test_each_kind_of_parallelism_reads_what_each_other_saved(ran: dict[str, Any]) -> None:
    expected = ran["single"]["plain"]
    assert len(expected) == 20  # five parameters, and step and two moments of each
    found = [ran["single"], ran["back"], *(each["layouts"] for each in (*ran["four"], *ran["two"]))]
    assert [len(each) for each in found] == [1 + 1, 1 + 8] + [4 + 4 * 5] * 4 + [3 + 3 * 6] * 2
    for each in found:
        for name, state in each.items():
            assert state == expected, name


def test_dictionaries_of_torchs_state_dict_helper_go_from_hsdp_to_tp_fsdp_and_ddp(ran: dict[str, Any]) -> None:
    expected = ran["four"][0]["dcp"]
    assert len(expected) == 20
    assert all(each["dcp"] == expected for each in ran["four"])
    assert all(found == expected for each in ran["two"] for found in each["dcp"])


def test_fsdp1_goes_from_four_ranks_to_two_and_into_fsdp2(ran: dict[str, Any]) -> None:
    four, two = [each["fsdp1"] for each in ran["four"]], [each["fsdp1"] for each in ran["two"]]
    expected = four[0]["whole"]
    assert len(expected) == 5
    assert len(four[0]["moments"]) == 15
    assert [each["resumed"] for each in four + two] == [False] * 4 + [True] * 2
    for each in four + two:
        assert set(each["kinds"].values()) == {"ShardedTensor"}
        assert each["whole"] == each["other"] == expected
        assert each["moments"] == four[0]["moments"]
        assert each["refused"][0] == "StateError"
        assert "FSDP.optim_state_dict" in each["refused"][1]
    plain = syckpt.load(ran["folder"] / "f1", "fsdp1")["model"]
    assert {name: load_script().digest(value) for name, value in plain.items()} == expected


def test_pipeline_stages_go_to_fewer_stages_and_to_one_process(ran: dict[str, Any]) -> None:
    everything = {}
    for each in ran["four"]:
        assert not everything.keys() & each["stages"]["digests"].keys()
        everything |= each["stages"]["digests"]
    assert len(everything) == 16 * 4
    halves = [each["stages"] for each in ran["two"]]
    assert halves[0]["digests"] | halves[1]["digests"] == everything
    assert [len(half["digests"]) for half in halves] == [32, 32]
    note = "optimizer: 8 parameters, which this rank does not have, are left to other ranks"
    assert [half["notes"] for half in halves] == [[note], [note]]
    assert ran["one"] == {"digests": everything, "notes": [], "lr": 0.01}


def test_diverged_replicas_are_kept_by_rank_and_settled_by_policy_on_another_number(ran: dict[str, Any]) -> None:
    four, two = [each["diverged"] for each in ran["four"]], [each["diverged"] for each in ran["two"]]
    assert [each["mean"] for each in four] == [[float(rank)] * 3 for rank in range(4)]
    for rank, each in enumerate(two):
        assert each["mean"] == [0.0] * 3
        assert (each["own"], each["other"]) == (rank, 0)
        said = "value differed between the 4 ranks that saved it"
        model = (
            f"model: 1 {said} (model/module.1.running_mean); rank 0's are taken, as DistributedDataParallel does before its next forward"
        )
        assert each["compiled"] == [[0.0] * 3, [model]]
        assert each["unwrapped"] == [0.0] * 3
        assert each["part"] == [0.0] * 3
        assert each["notes"] == [
            model,
            f"own: 1 {said} (own/value); rank {rank}'s are taken (on_world_change='mod')",
            f"other: 1 {said} (other/value); rank 0's are taken (on_world_change='rank0')",
        ]
        for name, path in (
            ("strict", "strict/value"),
            ("plain", "model/module.1.running_mean"),
            ("silent", "model/module.1.running_mean"),
            ("ignored", "model/module.1.running_mean"),
            ("unsaid", "own/value"),
            ("payload", "note"),
        ):
            assert each[name][0] == "StateError", name
            assert path in each[name][1]
            assert "on_world_change" in each[name][1]


def test_a_plain_process_goes_on_with_rank_0s_buffers_of_a_ddp_run(ran: dict[str, Any]) -> None:
    script = load_script()
    model = script.norm(9)
    with script.manager(f"{ran['folder']}/d", branch="at-home", base="run") as ckpt:
        ckpt.model = model
        assert model[1].running_mean.tolist() == [0.0] * 3
        (note,) = [note for note in ckpt.last_report.notes if "differed" in note]
        assert note.startswith(
            "model: 1 value differed between the 4 ranks that saved it (model/module.1.running_mean); rank 0's are taken"
        )


def test_replicas_are_compared_by_all_of_their_bytes_on_request(ran: dict[str, Any]) -> None:
    four = [each["diverged"] for each in ran["four"]]
    assert [each["full"] for each in four] == [0.0, 1.0, 0.0, 0.0]
    assert len({each["sampled"] for each in four}) == 1  # the difference was not seen: all have one rank's
    full = syckpt.load(ran["folder"] / "d", "full")["big"]
    assert {rank: value[12345].item() for rank, value in full.items()} == {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}


def test_what_all_ranks_need_alike_is_read_once_and_sent_to_all(ran: dict[str, Any]) -> None:
    found = [each["broadcast"] for each in ran["four"]]
    once = 12 * (3 << 20) + (40 << 20) + 8
    shards = sum(value.nbytes for value in load_script().Net().state_dict().values())
    for rank, each in enumerate(found):
        assert each["equal"]
        assert each["fresh"]
        assert each["net"]
        assert each["gathered"]
        assert each["mine"] == [float(rank)] * 4
        # Balanced, and nothing twice: a quarter, within a unit of 16 MiB.
        assert once / 4 - (16 << 20) <= each["bytes"] <= once / 4 + (16 << 20)
        assert each["misfit"][0] == "StateError"
        assert "wide/scalar" in each["misfit"][1]
        assert each["damaged"][0] == "IntegrityError"
        assert "r00001.safetensors" in each["damaged"][1]
        assert each["again"] == ["", ""]
    assert once + shards <= sum(each["bytes"] for each in found) <= once + shards + 4 * 16 + (4 << 20)


def test_what_was_saved_is_whole(ran: dict[str, Any]) -> None:
    for name in ("m", "dcp", "pp", "d"):
        assert verify(Repository.open(parse_root(ran["folder"] / name))).ok
    assert torch.equal(
        syckpt.load(ran["folder"] / "pp")["model"]["layer7.bias"], syckpt.load(ran["folder"] / "pp", "HEAD~1")["model"]["layer7.bias"]
    )
