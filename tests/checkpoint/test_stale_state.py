"""A commit whose trained parameters have not moved though steps were made is said to be suspicious; nothing else is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syckpt import CheckpointManager
from syckpt.state.flatten import flatten


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def move(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.add_(1)


def save(ckpt: CheckpointManager, *, steps: int) -> dict[str, Any]:
    if steps:
        ckpt.step_up(steps)
    pending = ckpt.save(wait=True)
    assert pending is not None
    stats = pending.result().stats
    return {name: stats[name] for name in ("steps", "trainable", "unchanged_trainable")}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "stale state?" in record.getMessage()]
    caplog.clear()
    return found


def test_only_steps_after_which_no_trainable_tensor_has_moved_are_suspicious(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "syckpt")
    model = net()
    model[0].requires_grad_(False)
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model, ckpt.optimizer = model, torch.optim.AdamW(model.parameters())
        assert save(ckpt, steps=0) == {"steps": 0, "trainable": 4, "unchanged_trainable": 0}
        assert save(ckpt, steps=0) == {"steps": 0, "trainable": 4, "unchanged_trainable": 4}
        assert told(caplog) == []
        # The running statistics change, and a frozen weight: neither is what training changes.
        model[1].running_mean += 1
        move(model[0].weight)
        assert save(ckpt, steps=3) == {"steps": 3, "trainable": 4, "unchanged_trainable": 4}
        (text,) = told(caplog)
        assert text.startswith("stale state? none of the 4 trainable tensors in ")
        assert "3 steps were made" in text
        assert ckpt.hash in text
        move(model[2].bias)
        assert save(ckpt, steps=1) == {"steps": 1, "trainable": 4, "unchanged_trainable": 3}
        # Back at an older value is not what the commit before held.
        with torch.no_grad():
            model[2].bias.sub_(1)
        assert save(ckpt, steps=1)["unchanged_trainable"] == 3
        assert told(caplog) == []
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        model = net()
        model[0].requires_grad_(False)
        ckpt.model = model
        ckpt.restore()
        assert ckpt.step == 5
        # The first save of a resumed run is compared with what it resumed from.
        assert save(ckpt, steps=1) == {"steps": 1, "trainable": 4, "unchanged_trainable": 4}
        assert len(told(caplog)) == 1


def test_a_copy_of_the_model_that_is_not_trained_is_what_the_warning_is_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, stale = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model = stale
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            save(ckpt, steps=1)
    assert len(told(caplog)) == 1


def test_plain_values_and_payloads_of_state_dicts_have_nothing_trainable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.table = {"a": torch.ones(3)}
        assert [save(ckpt, steps=1)["trainable"] for _ in range(2)] == [0, 0]
        ckpt.save(payload={"model": net().state_dict()}, wait=True)
        assert ckpt.log()[0].stats["trainable"] == 0
    assert told(caplog) == []


def test_a_tie_counts_once_and_is_trainable_if_one_of_its_names_is() -> None:
    weight = nn.Parameter(torch.ones(2))
    flat = flatten({"a": {"w": weight.detach()}, "b": {"w": weight, "frozen": torch.ones(2)}})
    assert [leaf.trainable for leaf in flat.leaves] == [True, False]


def test_marking_what_is_trainable_leaves_the_modules_own_state_dict_alone(tmp_path: Path) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.kept = {"weight": self.weight.detach(), "extra": [1]}

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.kept

    model = Kept()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model = model
        assert save(ckpt, steps=0)["trainable"] == 1
    assert type(model.kept["weight"]) is torch.Tensor


def test_what_a_module_shows_under_the_name_of_a_parameter_is_what_is_saved(tmp_path: Path) -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"weight": torch.full((2,), 5.0)}

    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model = Averaged()
        assert save(ckpt, steps=0)["trainable"] == 0
        assert ckpt.load()["model"]["weight"].tolist() == [5.0, 5.0]
