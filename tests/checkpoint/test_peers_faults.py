"""Faults that were measured in other libraries, of one process: none of them is here. Each test is named after what has to happen."""

from __future__ import annotations

import importlib.metadata
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import syckpt
from syckpt import CheckpointManager


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def ckpt(root: Path) -> Any:
    """One manager for all tests that need no repository of their own: starts cost most."""
    with CheckpointManager(root, save_on_exit=False) as manager:
        yield manager


def commit(ckpt: CheckpointManager, name: str | None = None, **payload: Any) -> str:
    pending = ckpt.save(name, payload)
    assert pending is not None
    return pending.id


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def blobs(root: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_size for path in root.glob(".syckpt/objects/*/*.safetensors")}


# --- deltas --------------------------------------------------------------------------------------------------------------------


def test_the_third_of_three_deltas_is_restored_bit_for_bit(ckpt: CheckpointManager) -> None:
    weights = [torch.randn(500, generator=torch.Generator().manual_seed(0))]
    for number in range(1, 12):
        weights.append(weights[-1] + 1e-3 * torch.randn(500, generator=torch.Generator().manual_seed(number)))
    commits = [commit(ckpt, model={"w": weight}) for weight in weights]
    for found, weight in zip(commits, weights, strict=True):
        assert bits(ckpt.load(found)["model"]["w"]) == bits(weight)


def test_the_same_state_saved_twice_costs_nothing_and_both_commits_stay_whole(ckpt: CheckpointManager, root: Path) -> None:
    state = {"model.0.weight": torch.randn(50, 50)}
    first, second = commit(ckpt, model=state), commit(ckpt, model=state)
    ckpt.wait()
    assert first in blobs(root)
    assert second not in blobs(root)
    assert [bits(ckpt.load(found)["model"]["model.0.weight"]) for found in (first, second)] == [bits(state["model.0.weight"])] * 2
    assert ckpt.verify(first).ok
    assert ckpt.verify(second).ok


def test_infinities_cancellation_and_booleans_survive_a_delta(ckpt: CheckpointManager) -> None:
    before = {"x": torch.tensor([1.0, math.inf, 1e10, math.nan]), "mask": torch.tensor([True, False, True]), "n": torch.tensor([2**63 - 1])}
    after = {
        "x": torch.tensor([math.inf, -math.inf, 1e-3, -0.0]),
        "mask": torch.tensor([False, False, True]),
        "n": torch.tensor([-(2**63)]),
    }
    first, second = commit(ckpt, s=before), commit(ckpt, s=after)
    for found, state in ((first, before), (second, after)):
        loaded = ckpt.load(found)["s"]
        assert {name: bits(value) for name, value in loaded.items()} == {name: bits(value) for name, value in state.items()}


def test_a_frozen_layer_costs_no_bytes_at_any_later_save(ckpt: CheckpointManager, root: Path) -> None:
    frozen = torch.randn(100_000)
    commits = [commit(ckpt, m={"frozen": frozen, "head": torch.full((10,), float(step))}) for step in range(10)]
    ckpt.wait()
    sizes = blobs(root)
    assert sizes[commits[0]] > 300_000
    assert max(sizes[found] for found in commits[1:]) < 1000


# --- dtypes and values -----------------------------------------------------------------------------------------------------------


def test_bfloat16_and_float8_models_are_saved(ckpt: CheckpointManager) -> None:
    model = nn.Linear(4, 4).bfloat16()
    state = {**model.state_dict(), "fp8": torch.randn(8).to(torch.float8_e4m3fn)}
    loaded = ckpt.load(commit(ckpt, model=state))["model"]
    assert [(value.dtype, bits(value)) for value in loaded.values()] == [(value.dtype, bits(value)) for value in state.values()]


def test_a_parameter_that_is_not_contiguous_is_saved_and_filled(ckpt: CheckpointManager) -> None:
    model, target = nn.Linear(3, 2), nn.Linear(3, 2)
    model.weight, target.weight = nn.Parameter(torch.randn(3, 2).t()), nn.Parameter(torch.zeros(3, 2).t())
    ckpt.load(commit(ckpt, model=model.state_dict()), into={"model": target.state_dict()})
    assert target.weight.tolist() == model.weight.tolist()
    assert target.weight.stride() == (1, 2)


def test_sets_are_carried_and_what_is_not_fails_in_the_call_and_leaves_no_id_behind(ckpt: CheckpointManager) -> None:
    good = commit(ckpt, s={"set": {1, 2}, "scalar": np.float32(0.1)})
    assert ckpt.load(good)["s"] == {"set": {1, 2}, "scalar": np.float32(0.1)}
    with pytest.raises(syckpt.StateError, match=r"^s/bad: "):
        ckpt.save(payload={"s": {"bad": object()}})
    assert ckpt.hash == good
    assert commit(ckpt, s=1) != good
    assert ckpt.log()[0].parents == (good,)


def test_a_numpy_scalar_in_the_configuration_does_not_fail_behind_the_scripts_back(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.config = {"lr": np.float32(0.5)}
        ckpt.x = 1
        pending = ckpt.save(wait=True)
        assert pending is not None
        assert pending.result().config == {"lr": 0.5}


def test_dotted_keys_and_keys_like_markers_do_not_collapse(ckpt: CheckpointManager) -> None:
    state = {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}, "__tensor__": {"__tuple__": [1]}, "tensor": 0, 1: {"1": 2, 1: 3}}
    found = commit(ckpt, s=state)
    for loaded in (ckpt.load(found)["s"], ckpt.load(found, into={"s": {**state, "a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}})["s"]):
        assert (loaded["a.b"].item(), loaded["a"]["b"].item()) == (1.0, 2.0)
        assert (loaded["__tensor__"], loaded["tensor"], loaded[1]) == ({"__tuple__": [1]}, 0, {"1": 2, 1: 3})


def test_mixed_keys_tuples_and_nan_are_no_trouble(ckpt: CheckpointManager) -> None:
    loaded = ckpt.load(commit(ckpt, s={1: 2, "t": (1, 2), "nan": math.nan}))["s"]
    assert (list(loaded), loaded["t"], math.isnan(loaded["nan"])) == ([1, "t", "nan"], (1, 2), True)


def test_a_metric_that_is_no_number_is_never_the_best_and_breaks_no_file(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        for metric in (math.nan, 0.5, math.inf, math.nan):
            ckpt.save(metric=metric)
        assert [found.metric for found in ckpt.log()][1:3] == [math.inf, 0.5]
        assert syckpt.load(tmp_path, "best") == {"x": 1}
        assert ckpt.verify().ok
    # The best is found in the records: an opener knows it that has never seen the run.
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 2
        ckpt.restore()
        ckpt.x = 2
        ckpt.save(metric=99.0)
        assert syckpt.load(tmp_path, "best") == {"x": 1}


# --- training ------------------------------------------------------------------------------------------------------------------


def test_moments_are_restored_and_the_second_step_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def parts() -> tuple[nn.Linear, torch.optim.Adam, Any]:
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        return net, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], 0.1)

    def train(net: nn.Linear, optimizer: Any, schedule: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = net(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    whole = parts()
    expected = train(*whole, range(6))
    assert whole[1].param_groups[0]["lr"] == pytest.approx(0.001)
    first = parts()
    train(*first, range(2))
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model, ckpt.optimizer, ckpt.schedule = first
        ckpt.save()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model, ckpt.optimizer, ckpt.schedule = second = parts()
        assert train(*second, range(2, 6)) == expected[2:]
        assert second[1].param_groups[0]["lr"] == whole[1].param_groups[0]["lr"]


def test_saving_does_not_touch_numpys_stream(ckpt: CheckpointManager) -> None:
    np.random.seed(7)
    commit(ckpt, x=1)
    ckpt.wait()
    assert np.random.rand() == np.random.RandomState(7).rand()


def test_changing_everything_right_after_save_tears_nothing(ckpt: CheckpointManager) -> None:
    weight = torch.zeros(500_000)
    commits = []
    for _ in range(5):
        commits.append(commit(ckpt, m={"w": weight}))
        weight += 1
    for number, found in enumerate(commits):
        loaded = ckpt.load(found)["m"]["w"]
        assert (loaded.min().item(), loaded.max().item()) == (number, number)


# --- history -------------------------------------------------------------------------------------------------------------------


def test_saves_without_waiting_have_the_right_parents(ckpt: CheckpointManager) -> None:
    ids = [commit(ckpt, s=number) for number in range(6)]
    ckpt.wait()
    found = ckpt.log(6)[::-1]
    assert [each.id for each in found] == ids
    assert [each.parents for each in found[1:]] == [(each,) for each in ids[:-1]]


def test_a_name_that_exists_is_refused_before_anything_is_written(ckpt: CheckpointManager, root: Path) -> None:
    commit(ckpt, "step_1", s=torch.ones(2))
    ckpt.wait()
    before = sorted(path for path in root.rglob("*") if path.is_file())
    with pytest.raises(syckpt.ConflictError, match="step_1"):
        ckpt.save("step_1", {"s": torch.zeros(2)})
    assert sorted(path for path in root.rglob("*") if path.is_file()) == before
    assert ckpt.load("step_1")["s"].tolist() == [1.0, 1.0]


def test_the_structure_may_change_between_saves(ckpt: CheckpointManager) -> None:
    first, second = commit(ckpt, s={"a": torch.ones(2)}), commit(ckpt, s={"b": [torch.zeros(3), "new"]})
    assert ckpt.load(first)["s"]["a"].tolist() == [1.0, 1.0]
    assert ckpt.load(second)["s"]["b"][1] == "new"


def test_files_that_a_killed_save_left_behind_are_in_no_later_commit(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        commit(ckpt, "one", s={"a": torch.ones(2)})
    for junk in ("staging/tmp_step_2/x_9.pt", "objects/00000000-0123456789abcdef/r00000.safetensors", "objects/tmp_two/x_9.pt"):
        (tmp_path / ".syckpt" / junk).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".syckpt" / junk).write_bytes(b"junk")
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        commit(ckpt, "two", s={"a": torch.zeros(2)})
        assert ckpt.load("two")["s"].keys() == {"a"}
        assert [found.name for found in ckpt.log()] == ["two", "one"]
        assert ckpt.verify("two").ok


def test_a_branch_can_be_exported_checked_out_and_left_as_soon_as_it_is_made(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", save_on_exit=False) as ckpt:
        ckpt.model = model = nn.Linear(2, 2)
        ckpt.save(wait=True)
        before = model.weight.tolist()
        ckpt.create_branch("exp")
        ckpt.export_ckpt("exp", tmp_path / "exp.pt")
        with torch.no_grad():
            model.weight.zero_()
        ckpt.step_up()
        ckpt.save()
        ckpt.checkout_branch("main")
        assert (ckpt.branch, model.weight.tolist()) == ("main", before)
        ckpt.goto("exp")
        assert model.weight.eq(0).all()
    assert torch.load(tmp_path / "exp.pt", weights_only=True)["model"]["weight"].tolist() == before


# --- damage --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_a_damaged_blob_is_never_loaded(tmp_path: Path, how: str) -> None:
    with CheckpointManager(tmp_path, rng=False, save_on_exit=False) as ckpt:
        found = commit(ckpt, s={"w": torch.randn(1000)})
    blob = tmp_path / f".syckpt/objects/{found}/r00000.safetensors"
    data = bytearray(blob.read_bytes())
    data[-50] ^= 4
    blob.write_bytes(data if how == "flip" else data[:-50])
    target = torch.zeros(1000)
    with pytest.raises(syckpt.IntegrityError, match=r"r00000.safetensors"):
        syckpt.load(tmp_path, into={"s": {"w": target}})
    assert target.eq(0).all()
    assert not CheckpointManager(tmp_path, auto_resume=False).verify().ok


# --- loading -------------------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


def test_what_is_no_tensor_is_restored_beside_tensors(ckpt: CheckpointManager) -> None:
    assert ckpt.load(commit(ckpt, s={"a": torch.ones(4), "n": 1}), into={"s": {"a": torch.zeros(4), "n": 0}})["s"]["n"] == 1


def test_tuples_namedtuples_and_lists_of_another_length_come_back_as_they_were(ckpt: CheckpointManager) -> None:
    found = commit(ckpt, s={"pair": Pair(1, (2,)), "list": [1, 2, 3], "dict": {"k": 1}, "tensors": [torch.ones(1)] * 2})
    loaded = ckpt.load(found, into={"s": {"pair": Pair(0, ()), "list": [0, 0], "dict": None, "tensors": [torch.zeros(1), torch.zeros(1)]}})[
        "s"
    ]
    assert (type(loaded["pair"]), loaded["pair"], loaded["list"], loaded["dict"]) == (Pair, Pair(1, (2,)), [1, 2, 3], {"k": 1})
    # A mapping that shows other keys is an error, and never drops data in silence.
    with pytest.raises(syckpt.StateError, match="unexpected in the commit: s/dict/k"):
        ckpt.load(found, into={"s": {"pair": None, "list": None, "dict": {}, "tensors": None}})


@pytest.mark.parametrize(
    "target", [torch.zeros(6), torch.zeros(2), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bfloat16)]
)
def test_another_shape_or_dtype_is_neither_broadcast_nor_truncated_nor_cast(ckpt: CheckpointManager, target: torch.Tensor) -> None:
    first = torch.zeros(2)
    found = commit(ckpt, s={"first": torch.ones(2), "w": torch.ones(4)})
    with pytest.raises(syckpt.StateError, match=r"s/w: expected .*, found float32"):
        ckpt.load(found, into={"s": {"first": first, "w": target}})
    with pytest.raises(syckpt.StateError, match="s/one: expected float32"):
        ckpt.load(commit(ckpt, s={"first": torch.ones(2), "one": torch.ones(1)}), into={"s": {"first": first, "one": torch.zeros(3)}})
    assert first.eq(0).all()
    assert target.eq(0).all()


def test_keys_that_are_missing_on_either_side_are_errors(ckpt: CheckpointManager) -> None:
    target = {"a": torch.zeros(1), "c": torch.zeros(1)}
    with pytest.raises(syckpt.StateError, match=r"1 missing from the commit: s/c\n.*1 unexpected in the commit: s/b\n"):
        ckpt.load(commit(ckpt, s={"a": torch.ones(1), "b": torch.ones(1)}), into={"s": target})
    assert target["a"].item() == 0.0


def test_tied_tensors_and_values_beside_tensors_are_stored_once_and_without_trouble(ckpt: CheckpointManager, root: Path) -> None:
    weight = torch.randn(1000, 100)
    found = commit(ckpt, s={"embed": weight, "head": weight, "step": 3, "name": "x"})
    ckpt.wait()
    assert blobs(root)[found] < 1.02 * 400_000
    loaded = ckpt.load(found)["s"]
    assert loaded["embed"] is loaded["head"]


# --- processes and code --------------------------------------------------------------------------------------------------------


def test_another_process_reads_while_a_training_is_in_its_with_block(ckpt: CheckpointManager, root: Path) -> None:
    commit(ckpt, "read", x=[1, 2])
    ckpt.wait()
    code = "import sys, syckpt; print(syckpt.load(sys.argv[1], 'read'), syckpt.CheckpointManager(sys.argv[1]).log(1)[0].name)"
    found = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    assert found.stdout == "{'x': [1, 2]} read\n"
    commit(ckpt, "after", x=2)
    ckpt.wait()


def test_nothing_is_unpickled_to_load_a_commit(ckpt: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commit(ckpt, model=nn.Linear(2, 2).state_dict(), s={"a": {1}, "g": np.random.default_rng(0), "t": torch.Generator()})
    ckpt.wait()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert set(ckpt.load(found)) == {"model", "s"}


def test_no_save_forks_the_training_process(ckpt: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("forked")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(multiprocessing.Process, "start", refuse)
    assert ckpt.load(commit(ckpt, x=1)) == {"x": 1}


def test_the_resharder_that_the_documents_name_can_be_imported() -> None:
    assert isinstance(syckpt.DTensorResharder(), syckpt.Resharder)


def test_the_version_is_that_of_the_distribution() -> None:
    assert syckpt.__version__ == importlib.metadata.version("syckpt")
