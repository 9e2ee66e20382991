"""`load`: into live targets or as new tensors, whole or in part, with a manager or without."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import syckpt
from syckpt import CheckpointManager


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def filled(value: float) -> nn.Module:
    model = nn.Module()
    model.encoder = nn.Linear(3, 2)
    model.head = nn.Linear(2, 1)
    model.register_buffer("count", torch.tensor(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model of ones, its Adam after a step of zero, values, and a second commit of twos."""
    root = tmp_path_factory.mktemp("saved")
    model = filled(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    with CheckpointManager(root, save_on_exit=False) as ckpt:
        ckpt.model, ckpt.optimizer = model, optimizer
        ckpt.values = {"list": [1, 2.5], "array": np.arange(3), "half": torch.tensor([0.5, 1.0], dtype=torch.float16)}
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
        optimizer.step()
        optimizer.param_groups[0]["lr"] = lr
        ckpt.step_up()
        ckpt.save("ones")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        ckpt.step_up()
        ckpt.save("twos")
    return root


def test_without_a_target_everything_comes_as_new_cpu_tensors(saved):
    loaded = syckpt.load(saved, "ones")
    assert list(loaded) == ["model", "optimizer", "values"]
    assert {name: tuple(value.shape) for name, value in loaded["model"].items()} == {
        "encoder.weight": (2, 3),
        "encoder.bias": (2,),
        "head.weight": (1, 2),
        "head.bias": (1,),
        "count": (),
    }
    assert loaded["model"]["encoder.weight"].tolist() == [[1.0] * 3] * 2
    names = ["model.encoder.weight", "model.encoder.bias", "model.head.weight", "model.head.bias"]
    assert loaded["optimizer"]["param_groups"][0]["params"] == names
    assert loaded["optimizer"]["state"]["model.head.bias"]["exp_avg"].tolist() == [pytest.approx(0.2)]
    assert loaded["values"]["list"] == [1, 2.5]
    assert loaded["values"]["array"].tolist() == [0, 1, 2]
    assert loaded["values"]["half"].dtype == torch.float16
    assert syckpt.load(saved)["model"]["head.bias"].tolist() == [2.0]
    assert syckpt.load(saved, items=["values"]).keys() == {"values"}


def test_a_live_state_dict_is_filled_in_place_and_other_leaves_come_back(saved):
    model = filled(0.0)
    state = model.state_dict()
    half = torch.zeros(2, dtype=torch.float16)
    values = {"list": [], "array": np.zeros(3, dtype=np.int64), "half": half}
    loaded = syckpt.load(saved, "ones", into={"model": state, "values": values})
    assert model.encoder.weight.tolist() == [[1.0] * 3] * 2
    assert model.count.item() == 4
    assert loaded["model"]["encoder.weight"] is state["encoder.weight"]
    assert loaded["values"]["half"] is half
    assert half.tolist() == [0.5, 1.0]
    assert loaded["values"]["list"] == [1, 2.5]
    assert values["list"] == []
    assert values["array"].tolist() == [0, 1, 2]


def test_an_object_given_as_a_target_is_refused_since_it_would_not_be_filled(saved):
    with pytest.raises(syckpt.StateError, match=r"into\['model'\] is a Module: pass its state_dict\(\)"):
        syckpt.load(saved, into={"model": filled(0.0)})


def test_targets_that_are_not_contiguous_are_filled(saved):
    model = filled(0.0)
    state = model.state_dict()
    state["encoder.weight"] = torch.zeros(3, 4)[:, ::2].t()
    syckpt.load(saved, "twos", into={"model": state})
    assert state["encoder.weight"].tolist() == [[2.0] * 3] * 2


def test_one_problem_anywhere_leaves_every_target_alone_and_all_are_listed(saved):
    model = filled(0.0)
    state = dict(model.state_dict())
    state["head.weight"] = torch.zeros(2, 2)
    state["count"] = torch.zeros((), dtype=torch.int32)
    del state["head.bias"]
    state["more"] = torch.zeros(1)
    with pytest.raises(syckpt.StateError) as caught:
        syckpt.load(saved, into={"model": state, "absent": {}})
    text = str(caught.value)
    for problem in (
        "2 missing from the commit: model/more; absent",
        "1 unexpected in the commit: model/head.bias",
        "model/head.weight: expected float32 [2, 2], found float32 [1, 2]",
        "model/count: expected int32 [], found int64 []",
        "strict=False",
        "cast=True",
    ):
        assert problem in text
    assert all(tensor.eq(0).all() for name, tensor in state.items())
    assert model.encoder.weight.eq(0).all()


def test_without_strictness_what_does_not_fit_is_skipped_and_reported_never_part_filled(saved):
    model = filled(0.0)
    state = dict(model.state_dict())
    state["head.weight"], state["more"] = torch.zeros(2, 2), torch.zeros(1)
    del state["head.bias"]
    ckpt = CheckpointManager(saved)
    loaded = ckpt.load("twos", into={"model": state}, strict=False)
    assert model.encoder.weight.eq(2).all()
    assert state["head.weight"].eq(0).all()
    assert loaded["model"]["head.weight"] is state["head.weight"]
    report = ckpt.last_report
    assert report.skipped == ["model/head.weight: expected float32 [2, 2], found float32 [1, 2]"]
    assert (report.missing, report.unexpected) == (["model/more"], ["model/head.bias"])
    assert report.commit == ckpt.log()[0].id


def test_cast_converts_to_the_targets_dtype_and_says_so(saved):
    ckpt = CheckpointManager(saved)
    model = filled(0.0).double()
    ckpt.load("twos", into={"model": model.state_dict()}, cast=True)
    assert model.encoder.weight.dtype == torch.float64
    assert model.encoder.weight.eq(2).all()
    assert "model/encoder.weight: float32 to float64" in ckpt.last_report.cast
    with pytest.raises(syckpt.StateError, match="cast=True would convert it"):
        ckpt.load("twos", into={"model": model.state_dict()})


def test_a_cast_target_does_not_round_the_others_that_share_its_value(tmp_path):
    tied = torch.tensor([1 / 3])
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = {"a": tied, "b": tied}
        ckpt.save()
        for targets in (
            {"a": torch.zeros(1, dtype=torch.float16), "b": torch.zeros(1)},
            {"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float16)},
        ):
            ckpt.load(into={"x": targets}, cast=True)
            for target in targets.values():
                assert torch.equal(target, tied.to(target.dtype))


def test_a_part_is_chosen_by_patterns(saved):
    assert list(syckpt.load(saved, partial=["model.encoder.*"])) == ["model"]
    assert list(syckpt.load(saved, partial=["model.encoder.*"])["model"]) == ["encoder.weight", "encoder.bias"]
    assert list(syckpt.load(saved, partial=["model/head.bias", "values"])["model"]) == ["head.bias"]
    model = filled(0.0)
    syckpt.load(saved, "ones", into={"model": model.state_dict()}, partial=["model.head.*"])
    assert model.encoder.weight.eq(0).all()
    assert model.head.weight.eq(1).all()
    with pytest.raises(syckpt.StateError, match=r"\['modle.\*'\] takes nothing of commit"):
        syckpt.load(saved, partial=["modle.*"])
    with pytest.raises(syckpt.StateError, match="expected a sequence of patterns"):
        syckpt.load(saved, partial="model.*")


def test_a_dry_run_touches_nothing_returns_nothing_and_fills_the_report(saved):
    ckpt = CheckpointManager(saved)
    model = filled(0.0)
    assert ckpt.load(into={"model": model.state_dict()}, dry_run=True) == {}
    assert model.encoder.weight.eq(0).all()
    assert (ckpt.last_report.bytes_read, ckpt.last_report.missing) == (0, [])
    with pytest.raises(syckpt.StateError, match="absent"):
        ckpt.load(into={"absent": None}, dry_run=True)
    assert ckpt.load(into={"absent": None}, dry_run=True, strict=False) == {}
    assert ckpt.last_report.missing == ["absent"]


def test_map_location_moves_new_tensors(saved):
    loaded = syckpt.load(saved, map_location="meta", items=["model"])
    assert {tensor.device.type for tensor in loaded["model"].values()} == {"meta"}
    model = filled(0.0)
    syckpt.load(saved, into={"model": model.state_dict()}, map_location="meta")
    assert model.encoder.weight.eq(2).all()


def test_a_fresh_optimizers_empty_state_is_filled_from_the_commit(saved):
    model = filled(0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    ckpt = CheckpointManager(saved, auto_resume=False)
    ckpt.model, ckpt.optimizer = model, optimizer
    loaded = ckpt.load("ones", into={"optimizer": optimizer.state_dict()})["optimizer"]
    assert loaded["param_groups"][0]["lr"] == 0.125
    assert loaded["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert loaded["state"][3]["exp_avg"].tolist() == [pytest.approx(0.2)]
    assert optimizer.state == {}
    optimizer.load_state_dict(loaded)
    assert optimizer.state[model.head.bias]["step"] == 1


def test_loading_moves_neither_counters_nor_random_streams(saved):
    ckpt = CheckpointManager(saved)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ckpt.load("ones")
    assert torch.equal(torch.get_rng_state(), before)
    assert (ckpt.step, ckpt.resumed.name) == (2, "twos")


def test_reading_without_a_manager_takes_no_lease_and_writes_nothing(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    before = files(copy)
    for path in [copy, *copy.rglob("*")]:
        os.chmod(path, stat.S_IREAD | (stat.S_IEXEC if path.is_dir() else 0))
    try:
        assert syckpt.load(copy)["model"]["head.bias"].tolist() == [2.0]
        assert syckpt.load(copy / ".syckpt", "ones")["model"]["head.bias"].tolist() == [1.0]
        assert files(copy) == before
        assert not (copy / ".syckpt/leases").exists() or not list((copy / ".syckpt/leases").iterdir())
    finally:
        for path in [copy, *copy.rglob("*")]:
            os.chmod(path, stat.S_IRWXU)


def test_reading_works_while_a_training_holds_the_branch(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.step_up()
        ckpt.save(wait=True)
        assert syckpt.load(tmp_path) == {"x": 1}
        ckpt.x = 2
        ckpt.step_up()


def test_there_is_nothing_to_read_where_nothing_was_saved(tmp_path):
    with pytest.raises(syckpt.NotFoundError, match=r"no syckpt repository at .*CheckpointManager makes one"):
        syckpt.load(tmp_path)
    assert list(tmp_path.iterdir()) == []
    CheckpointManager(tmp_path)
    with pytest.raises(syckpt.NotFoundError, match="branch 'main' has no commit yet"):
        syckpt.load(tmp_path)
    with pytest.raises(syckpt.FormatError, match="no store for 's3://bucket'"):
        syckpt.load("s3://bucket")
