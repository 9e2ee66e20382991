"""Managers without a root: a checkpoint is a path DIR/NAME."""

from __future__ import annotations

import pytest
import torch

import syckpt
from syckpt import CheckpointManager


def test_paths_are_saved_to_and_loaded_from_in_place(tmp_path):
    target = {"weight": torch.zeros(3), "bias": torch.zeros(1)}
    weight = target["weight"]
    with CheckpointManager(CheckpointManager.Config(compression="none")) as manager:
        for step in (1, 2):
            manager.save(tmp_path / "exp" / f"step-{step}", {"model": {"weight": torch.full((3,), float(step)), "bias": torch.ones(1)}, "n": step})
        assert manager.save(str(tmp_path / "other" / "start"), {"n": 0}).result().name == "start"
        restored = manager.load(tmp_path / "exp" / "step-1", into={"model": target, "n": 0})
        assert restored["n"] == 1
        assert restored["model"]["weight"] is weight
        assert weight.tolist() == [1, 1, 1]
        with pytest.raises(syckpt.ConflictError, match="step-2"):
            manager.save(tmp_path / "exp" / "step-2", {"n": 3})
    assert syckpt.load(tmp_path / "exp", "step-2")["n"] == 2
    assert [(c.name, len(c.parents)) for c in CheckpointManager(tmp_path / "exp").log()] == [("step-2", 1), ("step-1", 0)]


def test_a_later_process_saves_on_top_of_what_is_there(tmp_path):
    for step in (1, 2):
        with CheckpointManager() as manager:
            manager.save(tmp_path / f"step-{step}", {"n": torch.full((100_000,), 7.0)}, wait=True)
    second = CheckpointManager(tmp_path).log()[0]
    assert (second.name, second.stats["written_bytes"] < 20_000) == ("step-2", True)


def test_registered_items_are_saved_where_there_is_no_payload(tmp_path):
    with CheckpointManager() as manager:
        manager.model, manager.note = torch.nn.Linear(1, 1, bias=False), "a"
        manager.config = {"lr": 0.1}
        first = manager.save(tmp_path / "a" / "one")
        manager.note = "b"
        manager.save(tmp_path / "b" / "two")
        assert manager.hash != first.id
    assert syckpt.load(tmp_path / "a", "one")["note"] == "a"
    assert syckpt.load(tmp_path / "b", "two")["note"] == "b"
    assert CheckpointManager(tmp_path / "b").log()[0].config == {"lr": 0.1}


def test_what_needs_one_experiment_says_so_and_reading_makes_no_repository(tmp_path):
    manager = CheckpointManager(CheckpointManager.Config())
    for name in ("loop", "goto", "create_branch", "step", "log"):
        with pytest.raises(syckpt.StateError, match=f"{name} belongs to one experiment: make the manager with root="):
            getattr(manager, name)
    with pytest.raises(syckpt.NotFoundError, match="no syckpt repository"):
        manager.load(tmp_path / "nothing")
    with pytest.raises(syckpt.NotFoundError):
        manager.load(tmp_path / "nothing" / "here")
    with pytest.raises(syckpt.StateError, match="DIR/NAME"):
        manager.save(payload={"x": 1})
    with pytest.raises(syckpt.StateError, match=r"branch.*give it root="):
        CheckpointManager(branch="main")
    with pytest.raises(syckpt.StateError, match="name of CheckpointManager"):
        manager.save = 1
    manager.close()
    manager.close()
    with pytest.raises(syckpt.StateError, match="closed"):
        manager.save(tmp_path / "x", {"x": 1})
    assert list(tmp_path.iterdir()) == []
