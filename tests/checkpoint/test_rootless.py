"""Managers without a root: a checkpoint is a path DIR/NAME."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import syckpt
from syckpt import CheckpointManager


def test_paths_are_saved_to_and_loaded_from_in_place(tmp_path):
    target = {"weight": torch.zeros(3), "bias": torch.zeros(1)}
    weight = target["weight"]
    with CheckpointManager(CheckpointManager.Config(compression="none")) as manager:
        for step in (1, 2):
            manager.save(
                tmp_path / "exp" / f"step-{step}", {"model": {"weight": torch.full((3,), float(step)), "bias": torch.ones(1)}, "n": step}
            )
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


def test_a_directory_is_one_however_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    with CheckpointManager() as manager:
        names = ["real/a", "./real/b/", "link/c", tmp_path / "real" / "d", f"{tmp_path}/link/../real//e"]
        for number, name in enumerate(names):
            manager.save(name, {"n": number}, wait=True)
        manager.save("here", {"n": 9})
        for number, name in enumerate(names):
            assert manager.load(name) == {"n": number}
        assert manager.load(Path("link") / "b") == {"n": 1}
        monkeypatch.chdir("real")  # A relative path means what it says when it is given.
        assert manager.load("../here/") == {"n": 9}
        assert manager.load("e") == {"n": 4}
        assert manager.verify("../link/a")
        manager.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".syckpt", "link", "real"]
    assert [c.name for c in CheckpointManager(tmp_path / "real").log()] == ["e", "d", "c", "b", "a"]


def test_names_that_could_mean_something_else_are_refused_and_any_revision_is_read(tmp_path):
    with CheckpointManager() as manager:
        for name in ("a~1", "a@{1}", "HEAD", "latest", "best", "a b", "x.lock", ".hidden", "0badc0de-0123456789abcdef"):
            with pytest.raises(syckpt.StateError, match="cannot be the name of a commit"):
                manager.save(tmp_path / name, {"n": 0})
        for path in ("", "/", ".", "..", tmp_path / "..", b"x/y", 5, None):
            with pytest.raises(syckpt.StateError, match="DIR/NAME"):
                manager.save(path, {"n": 0})
        assert list(tmp_path.iterdir()) == []
        manager.save(tmp_path / "one", {"n": 1}, tags=["tagged"], metric=0.5)
        second = manager.save(tmp_path / "two", {"n": 2})
        # The name of the branch that everything is on would come to mean its newest commit.
        with pytest.raises(syckpt.ConflictError, match="'main' is a branch"):
            manager.save(tmp_path / "main", {"n": 0})
        found = [
            manager.load(tmp_path / rev)["n"]
            for rev in ("HEAD", "HEAD~1", "two~1", "main", "HEAD@{1}", "tagged", "best", "latest", second.id)
        ]
        assert found == [2, 1, 1, 2, 1, 1, 1, 2, 2]
        with pytest.raises(syckpt.NotFoundError, match="no commit 'three'"):
            manager.load(tmp_path / "three")


def test_managers_of_one_directory_read_at_once_and_save_one_after_the_other(tmp_path):
    with CheckpointManager() as first, CheckpointManager() as second:
        first.save(tmp_path / "a", {"n": 1}, wait=True)
        assert second.load(tmp_path / "a") == {"n": 1}
        with pytest.raises(syckpt.ConflictError, match="another manager of this process"):
            second.save(tmp_path / "b", {"n": 2})
        first.save(tmp_path / "b", {"n": 2})
        first.close()
        # What it saw when it read is not where its own save begins.
        third = second.save(tmp_path / "c", {"n": 3}).result()
        assert [c.name for c in CheckpointManager(tmp_path).log()] == ["c", "b", "a"]
        assert third.parents == (syckpt.CheckpointManager(tmp_path).log()[1].id,)
    with CheckpointManager(tmp_path) as rooted:
        rooted.n = 0
        assert (rooted.n, rooted.resumed.name) == (3, "c")


def test_live_state_dicts_are_saved_and_filled_in_place(tmp_path):
    torch.manual_seed(0)

    def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        return [parameter.sum().item() for parameter in model.parameters()]

    model, optimizer = training()
    train(model, optimizer)
    path = tmp_path / "step-2"
    CheckpointManager(CheckpointManager.Config()).save(
        path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "misc": {"step": 2}}, wait=True
    )
    expected = train(model, optimizer)
    other, fresh = training()
    manager = CheckpointManager(CheckpointManager.Config())
    restored = manager.load(path, into={"model": other.state_dict(), "optimizer": fresh.state_dict(), "misc": {"step": 0}})
    fresh.load_state_dict(restored["optimizer"])
    assert restored["misc"] == {"step": 2}
    assert train(other, fresh) == expected
    manager.close()


def test_one_directory_is_one_manager_by_whatever_path_and_files_of_a_repository_are_its_own(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "exp")
    with CheckpointManager() as manager:
        manager.save(tmp_path / "exp" / "a", {"n": 1})
        manager.save(tmp_path / "link" / "b", {"n": 2})
        last = manager.save(f"{tmp_path}/exp/.syckpt/c", {"n": 3})
        for call in (lambda path: manager.save(path, {"n": 4}), manager.load):
            with pytest.raises(syckpt.StateError, match="inside of a repository"):
                call(tmp_path / "exp/.syckpt/objects/x")
        manager.save(tmp_path / "other" / "a", {"n": 5})
        assert manager.load(tmp_path / "exp" / "c") == {"n": 3}
        assert manager.hash not in (None, last.id)
        manager.prewarm({"n": torch.ones(5)})
    assert [commit.name for commit in CheckpointManager(tmp_path / "exp").log()] == ["c", "b", "a"]


def test_a_load_does_not_change_which_save_is_the_newest(tmp_path):
    with CheckpointManager() as manager:
        manager.save(tmp_path / "a" / "one", {"n": 1})
        newest = manager.save(tmp_path / "b" / "two", {"n": 2})
        manager.load(tmp_path / "a" / "one", into={"n": 0, "m": 0}, strict=False)
        assert (manager.hash, manager.last_report.missing) == (newest.id, ["m"])
