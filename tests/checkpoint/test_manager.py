"""What a training script sees: registering, resuming, saving, leaving."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syckpt
from syckpt import CheckpointManager
from syckpt.dataloader import StatefulRandomSampler


def stored(root: Path) -> list[str]:
    """Names of all files of a repository, leases apart: they come and go."""
    base = root / ".syckpt"
    return sorted(str(p.relative_to(base)) for p in base.rglob("*") if p.is_file() and p.relative_to(base).parts[0] != "leases")


def layers(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(5, next(model.parameters()).shape[1])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Crash(Exception):
    pass


def quickstart(root: Path, *, epochs: int, crash_at: int | None = None) -> tuple[list[float], list[str | None]]:
    """S0's 3-step integration, nearly verbatim; dies by an exception before step `crash_at` is counted."""
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    X = torch.randn(50, 12)
    y = torch.randint(0, 4, (50,))
    dataset = TensorDataset(X, y)

    sampler = StatefulRandomSampler(dataset, batch_size=8)
    dataloader = DataLoader(dataset, batch_size=8, sampler=sampler)

    losses, hashes = [], []
    with CheckpointManager(root, max_to_keep=5) as ckpt:
        ckpt.model = model
        ckpt.optimizer = optimizer
        ckpt.sampler = sampler
        ckpt.config = {"lr": 1e-3, "batch_size": 8, "architecture": "MLP"}

        for epoch in ckpt.loop(epochs=epochs):
            for batch_x, batch_y in dataloader:
                logits = model(batch_x)
                loss = nn.functional.cross_entropy(logits, batch_y)

                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                losses.append(loss.item())
                if ckpt.step == crash_at:
                    raise Crash
                ckpt.step_up()
                if ckpt.step % 3 == 0:
                    ckpt.save()

            ckpt.save(metric=loss.item(), message=f"epoch-{epoch}")
            hashes.append(ckpt.hash)
    return losses, hashes


def test_the_quickstart_resumes_behind_a_crash_with_the_losses_of_an_uninterrupted_run(tmp_path):
    whole, hashes = quickstart(tmp_path / "whole", epochs=3)
    assert len(whole) == 21
    assert len(set(hashes)) == 3

    for crash_at in (5, 10):
        with pytest.raises(Crash):
            quickstart(tmp_path / "cut", epochs=3, crash_at=crash_at)
    rest, _ = quickstart(tmp_path / "cut", epochs=3)
    # The last commit before the crash at step 10 is that of step 9.
    assert rest == whole[9:]
    assert quickstart(tmp_path / "cut", epochs=3) == ([], [])

    log = [(c.step, c.epoch, c.batch_idx, c.message, c.epoch_done) for c in CheckpointManager(tmp_path / "cut").log()]
    assert log[:4] == [(21, 2, 7, "epoch-2", True), (21, 2, 7, "", True), (18, 2, 4, "", False), (15, 2, 1, "", False)]
    assert [entry[0] for entry in log] == [21, 21, 18, 15, 14, 12, 9, 7, 6, 3]


# -- registering -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "without"])
def test_items_are_restored_when_registered_before_or_after_enter_or_without_a_with_block(tmp_path, when):
    saved = layers(3, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.model = saved
        ckpt.step_up()
    fresh = layers(3, 2, seed=1)
    ckpt = CheckpointManager(tmp_path)
    if when == "before":
        ckpt.model = fresh
        assert all_equal(weights(fresh), weights(saved))
        with ckpt:
            pass
    elif when == "after":
        with ckpt:
            assert not all_equal(weights(fresh), weights(saved))
            ckpt.model = fresh
            assert all_equal(weights(fresh), weights(saved))
    else:
        ckpt.model = fresh
        ckpt.close()
    assert all_equal(weights(fresh), weights(saved))
    assert ckpt.model is fresh
    assert (ckpt.step, ckpt.resumed.step) == (1, 1)


def test_plain_values_are_overwritten_by_the_restored_ones_and_can_be_assigned_again(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.number, ckpt.ratio, ckpt.text = 7, 0.5, "seven"
        ckpt.values, ckpt.table, ckpt.nothing = [1, (2, "x")], {"a": {1: True}}, None
        ckpt.tensor, ckpt.array = torch.tensor([1.0, 2.0]), np.array([[1, 2], [3, 4]], dtype=np.int16)
        ckpt.number = 8
        ckpt.step_up()

    tensor, array = torch.zeros(2), np.zeros((2, 2), dtype=np.int16)
    ckpt = CheckpointManager(tmp_path)
    ckpt.number, ckpt.ratio, ckpt.text = 0, 0.0, ""
    ckpt.values, ckpt.table, ckpt.nothing = [], {}, "something"
    ckpt.tensor, ckpt.array = tensor, array
    assert (ckpt.number, ckpt.ratio, ckpt.text) == (8, 0.5, "seven")
    assert (ckpt.values, ckpt.table, ckpt.nothing) == ([1, (2, "x")], {"a": {1: True}}, None)
    assert ckpt.tensor is tensor
    assert tensor.tolist() == [1.0, 2.0]
    assert ckpt.array is array
    assert array.tolist() == [[1, 2], [3, 4]]
    ckpt.number = 9
    assert ckpt.number == 9
    ckpt.close()


@pytest.mark.parametrize(
    "name",
    [
        *["save", "load", "step", "epoch", "batch_idx", "metric", "branch", "hash", "loop", "batches", "resumed", "log", "restore"],
        *["last_report", "Config", "goto", "create_branch", "checkout_branch", "tag", "diff", "retain", "gc", "export_ckpt", "prewarm"],
    ],
)
def test_names_of_the_api_cannot_be_items(tmp_path, name):
    ckpt = CheckpointManager(tmp_path)
    with pytest.raises(syckpt.StateError, match=f"'{name}' is a name of CheckpointManager itself"):
        setattr(ckpt, name, 1)
    with pytest.raises(syckpt.StateError, match="register the item under another one"):
        ckpt.register(name, 1)


@pytest.mark.parametrize("name", ["a.b", "a/b", "", "<rng>", "ä", 3])
def test_an_item_needs_a_plain_name(tmp_path, name):
    with pytest.raises(syckpt.StateError, match="cannot be an item's name"):
        CheckpointManager(tmp_path).register(name, 1)


def test_register_and_unregister_do_what_assigning_and_deleting_do(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.register("kept-item", 1)
        ckpt.register("dropped", 2)
        ckpt.also_dropped = 3
        ckpt.unregister("dropped")
        del ckpt.also_dropped
        with pytest.raises(syckpt.StateError, match="no item 'dropped' is registered; registered: kept-item"):
            ckpt.unregister("dropped")
        with pytest.raises(AttributeError, match="no item 'dropped'"):
            _ = ckpt.dropped
        ckpt.step_up()
    assert syckpt.load(tmp_path) == {"kept-item": 1}


def test_arguments_that_cannot_be_meant_are_refused_and_say_so(tmp_path):
    for arguments, text in [
        ({"run_mode": "other"}, "run_mode='other': expected one of 'append', 'new_branch', 'overwrite'"),
        ({"when_busy": "no"}, "when_busy='no': expected"),
        ({"on_error": "no"}, "on_error='no': expected"),
        ({"save_every": "soon"}, "save_every='soon': expected"),
        ({"save_every": 0}, "save_every=0: expected"),
        ({"save_every": True}, "save_every=True: expected"),
        ({"branch": "a..lock"}, "cannot be the name of a branch"),
        ({"branch": "HEAD"}, "cannot be the name of a branch"),
    ]:
        with pytest.raises(syckpt.StateError, match=text):
            CheckpointManager(tmp_path, **arguments)
    for arguments in (
        {"compression": "gzip"},
        {"keyframe_every": 0},
        {"read": "twice"},
        {"check_replicas": "no"},
        {"items": {"a.b": syckpt.ItemSpec()}},
        {"items": {"a": None}},
        {"default": 1},
    ):
        with pytest.raises(syckpt.StateError, match=r"expected|not an item's name"):
            CheckpointManager.Config(**arguments)


def test_retention_keeps_what_its_rule_says_and_the_log_shows_what_was_dropped(tmp_path):
    with CheckpointManager(tmp_path, max_to_keep=2) as ckpt:
        ckpt.x = torch.zeros(1000)
        for step in range(1, 6):
            ckpt.x = torch.full((1000,), float(step))
            ckpt.step_up()
            ckpt.save(tags=["kept"] if step == 2 else ())
        log = ckpt.log()
        assert [(c.step, c.dropped) for c in log] == [(5, False), (4, False), (3, True), (2, False), (1, True)]
        assert ckpt.load("kept")["x"][0] == 2
        with pytest.raises(syckpt.NotFoundError, match="dropped by retention"):
            ckpt.load(log[2].id)
        planned = ckpt.retain(dry_run=True)
        assert (planned.dropped, planned.dry_run) == ((), True)
        assert ckpt.gc(dry_run=True).freed_nbytes == 0
        assert all(ckpt.verify(c.id) for c in log if not c.dropped)


def test_rules_of_retention_that_mean_nothing_are_refused(tmp_path):
    for arguments, text in [
        ({"max_to_keep": 0}, "last=0"),
        ({"keep": 5}, "keep=5: expected syckpt.Retention"),
        ({"keep": syckpt.Retention(last=1), "max_to_keep": 1}, "give one of the two"),
    ]:
        with pytest.raises(syckpt.StateError, match=text):
            CheckpointManager(tmp_path, **arguments)
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(syckpt.StateError, match=r"keep=Retention"):
        ckpt.retain()


# -- optimizers ------------------------------------------------------------------------------------------------------------------


def adam_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    return [optimizer.state[parameter][key].clone() for key in ("step", "exp_avg", "exp_avg_sq")]


def test_an_optimizer_that_is_registered_before_its_model_waits_for_it(tmp_path):
    model = layers(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.optimizer, ckpt.model = optimizer, model
        train_step(model, optimizer)
        ckpt.step_up()

    fresh = layers(4, 3, seed=5)
    fresh_optimizer = torch.optim.Adam(fresh.parameters(), lr=0.5)
    ckpt = CheckpointManager(tmp_path)
    ckpt.optimizer = fresh_optimizer
    assert fresh_optimizer.state == {}
    ckpt.model = fresh
    assert fresh_optimizer.param_groups[0]["lr"] == 0.01
    for mine, saved in zip(fresh.parameters(), model.parameters(), strict=True):
        assert all_equal(adam_state(fresh_optimizer, mine), adam_state(optimizer, saved))

    # Restored once: nothing that comes later puts the old state back.
    ckpt.restore()
    fresh_optimizer.param_groups[0]["lr"] = 0.25
    train_step(fresh, fresh_optimizer)
    ckpt.step_up()
    ckpt.step_up()
    assert fresh_optimizer.param_groups[0]["lr"] == 0.25
    assert fresh_optimizer.state[fresh[0].weight]["step"] == 2
    ckpt.close()


def test_an_optimizer_whose_model_never_comes_is_an_error_that_names_the_fix(tmp_path):
    model = layers(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.model, ckpt.optimizer = model, optimizer
        ckpt.step_up()
    ckpt = CheckpointManager(tmp_path)
    ckpt.optimizer = torch.optim.Adam(layers(4, 3).parameters())
    for _ in range(2):
        with pytest.raises(syckpt.StateError, match="register the model too"):
            ckpt.step_up()
    ckpt.unregister("optimizer")
    ckpt.restore()
    ckpt.close()


def test_moments_follow_their_parameters_into_another_order_and_grouping(tmp_path):
    model = layers(4, 4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.model, ckpt.optimizer = model, optimizer
        train_step(model, optimizer)
        ckpt.step_up()
    fresh = layers(4, 4, 4, seed=9)
    groups = [{"params": [fresh[1].bias, fresh[0].weight]}, {"params": [fresh[1].weight, fresh[0].bias]}]
    regrouped = torch.optim.Adam(groups, lr=0.3)
    ckpt = CheckpointManager(tmp_path)
    ckpt.model, ckpt.optimizer = fresh, regrouped
    for mine, saved in zip(fresh.parameters(), model.parameters(), strict=True):
        assert all_equal(adam_state(regrouped, mine), adam_state(optimizer, saved))
    assert [group["lr"] for group in regrouped.param_groups] == [0.01, 0.01]
    ckpt.close()


def test_an_optimizer_with_an_empty_first_group_and_no_registered_model_is_restored_by_number(tmp_path):
    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": []}, {"params": [nn.Parameter(torch.ones(2))]}], lr=0.1, momentum=0.9)

    saved = make()
    saved.param_groups[1]["params"][0].grad = torch.tensor([3.0, 4.0])
    saved.step()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.optimizer = saved
        ckpt.step_up()
    ckpt = CheckpointManager(tmp_path)
    ckpt.optimizer = fresh = make()
    assert fresh.state[fresh.param_groups[1]["params"][0]]["momentum_buffer"].tolist() == [3.0, 4.0]
    ckpt.close()


def test_a_scheduler_and_any_object_with_a_state_dict_come_back(tmp_path):
    class History:
        """Its state grows, so a fresh one has another structure."""

        def __init__(self) -> None:
            self.best: dict[str, float] = {}
            self.means: list[torch.Tensor] = []

        def state_dict(self):
            return {"best": self.best, "means": self.means, **({"extra": 1} if self.best else {})}

        def load_state_dict(self, state):
            self.best, self.means = state["best"], state["means"]

    model = layers(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    history = History()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.model, ckpt.optimizer, ckpt.scheduler, ckpt.history = model, optimizer, scheduler, history
        train_step(model, optimizer)
        scheduler.step()
        history.best["loss"] = 0.25
        history.means += [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        ckpt.step_up()

    model = layers(2, 2, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    history = History()
    ckpt = CheckpointManager(tmp_path)
    ckpt.model, ckpt.optimizer, ckpt.scheduler, ckpt.history = model, optimizer, scheduler, history
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (1, [0.5])
    assert history.best == {"loss": 0.25}
    assert [mean.tolist() for mean in history.means] == [[1.0, 2.0], [3.0]]
    ckpt.close()


# -- what does not fit -----------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_refused_with_all_problems_at_once_and_left_alone(tmp_path):
    saved = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2), "gone": nn.Linear(1, 1)})
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.model = saved
        ckpt.step_up()
    other = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(2, 2).double(), "new": nn.Linear(1, 1)})
    before = weights(other)
    ckpt = CheckpointManager(tmp_path)
    with pytest.raises(syckpt.StateError) as caught:
        ckpt.model = other
    text = str(caught.value)
    assert "nothing was changed" in text
    for problem in (
        "2 missing from the commit: model/new.weight; model/new.bias",
        "2 unexpected in the commit: model/gone.weight; model/gone.bias",
        "model/a.weight: expected float32 [2, 4], found float32 [2, 3]",
        "model/b.weight: expected float64 [2, 2], found float32 [2, 2]",
        "model/b.bias: expected float64 [2], found float32 [2]",
    ):
        assert problem in text
    assert all_equal(weights(other), before)
    # The failed one is not registered: the right one is restored, not taken for a re-assignment.
    right = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2), "gone": nn.Linear(1, 1)})
    ckpt.model = right
    assert all_equal(weights(right), weights(saved))
    ckpt.close()


def test_items_that_the_script_does_not_register_are_reported_and_new_ones_start_as_they_are(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="syckpt")
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.old, ckpt.older, ckpt.both = 1, 2, 3
        ckpt.step_up()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.both, ckpt.new = 0, 9
        report = ckpt.restore()
        assert (ckpt.both, ckpt.new) == (3, 9)
        assert report.unexpected == ["old", "older"]
        assert report.commit == ckpt.resumed.id
        assert ckpt.last_report is report
    messages = [record.getMessage() for record in caplog.records]
    unused = f"commit {ckpt.resumed.id} also has old, older, which this script does not register: the commits to come are without"
    assert unused in messages
    assert any(m.startswith(f"commit {ckpt.resumed.id} has no item 'new': it starts as it is") for m in messages)


def test_what_cannot_be_carried_is_named_by_its_path_and_leaves_nothing_behind(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.save(wait=True)
        before = stored(tmp_path)
        ckpt.state = {"a": [1, lambda: None]}
        with pytest.raises(syckpt.StateError, match=r"state/a/1: .*state_dict/load_state_dict"):
            ckpt.save()
        assert stored(tmp_path) == before
        ckpt.state = {"a": [1]}
        ckpt.save(wait=True)


# -- configuration ---------------------------------------------------------------------------------------------------------------


def test_a_configuration_is_never_overwritten_by_a_resume_and_a_difference_is_logged(tmp_path, caplog):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.config = {"lr": 0.1, "net": {"depth": 2}}
        assert isinstance(ckpt.config, syckpt.HyperConfig)
        assert ckpt.config.net.depth == 2
        ckpt.config["lr"] = 0.2
        ckpt.step_up()
        ckpt.save()
        with pytest.raises(syckpt.StateError, match="frozen"):
            ckpt.config["lr"] = 0.3
    assert not [r for r in caplog.records if "configuration differs" in r.message]

    with CheckpointManager(tmp_path) as ckpt:
        assert ckpt.config.to_dict() == {"lr": 0.2, "net": {"depth": 2}}
        assert ckpt.resumed.config == {"lr": 0.2, "net": {"depth": 2}}

    with CheckpointManager(tmp_path) as ckpt:
        ckpt.config = {"lr": 0.4, "net": {"depth": 2}}
        ckpt.x = 1
        assert ckpt.config.lr == 0.4
        ckpt.restore()
        assert ckpt.config.lr == 0.4
        ckpt.save()
    (line,) = [r.getMessage() for r in caplog.records if "configuration differs" in r.message]
    assert "~ lr: 0.2 -> 0.4" in line
    assert [c.config["lr"] for c in CheckpointManager(tmp_path).log()] == [0.4, 0.2]


def test_the_id_begins_with_the_fingerprint_of_the_configuration(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.config = {"lr": 0.001, "batch_size": 64, "architecture": "MLP"}
        first, second = ckpt.save(), ckpt.save()
        assert str(first) == first.id == f"{first}"
        commit = first.result()
    assert commit.fingerprint == first.id[:8] == second.id[:8] == "bbc4374f"
    assert first.id != second.id


# -- saving ----------------------------------------------------------------------------------------------------------------------


def test_a_commit_records_what_it_was_given(tmp_path):
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        ckpt.step_up(3)
        first = ckpt.save(wait=True).result()
        pending = ckpt.save("best-so-far", metric=torch.tensor(0.25), message="ä\n2", tags=("v1", "a/b"), wait=True)
        commit = pending.result()
        assert pending.done()
        assert ckpt.metric == 0.25
    assert (commit.id, commit.parents, commit.branch, commit.name) == (pending.id, (first.id,), "main", "best-so-far")
    assert (commit.step, commit.epoch, commit.batch_idx, commit.epoch_done) == (3, 0, 3, True)
    assert (commit.metric, commit.message, commit.tags, commit.world_size) == (0.25, "ä\n2", ("v1", "a/b"), 1)
    assert (commit.dropped, commit.damaged, commit.preempted) == (False, False, False)
    assert first.parents == ()
    assert first.metric is None
    assert commit.created.tzinfo is not None
    for key in ("stall_s", "staged_bytes", "deduplicated_bytes", "encoded_bytes", "written_bytes", "ratio", "durable_s"):
        assert key in commit.stats
    for rev in ("best-so-far", "v1", "a/b", "HEAD", "main", pending.id):
        assert syckpt.load(tmp_path, rev) == {"x": 1}


def test_a_payload_is_saved_exactly_instead_of_the_items(tmp_path):
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        ckpt.save("payload", {"a": torch.arange(3), "b": {"c": "d"}})
        ckpt.save()
        with pytest.raises(syckpt.StateError, match="cannot be an item's name"):
            ckpt.save(payload={"a.b": 1})
        loaded = ckpt.load("payload")
        assert ckpt.load() == {"x": 1}
    assert set(loaded) == {"a", "b"}
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["b"] == {"c": "d"}


@pytest.mark.parametrize("metric", ["0.5", True, torch.ones(2), 1j, 10**400])
def test_a_metric_is_a_number(tmp_path, metric):
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(syckpt.StateError, match="expected a number"):
        ckpt.save(metric=metric)
    assert not (tmp_path / ".syckpt/objects").exists()


def test_names_and_tags_are_checked_before_anything_is_written(tmp_path):
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        ckpt.save("one", tags=["t1"], wait=True)
        before = stored(tmp_path)
        with pytest.raises(syckpt.ConflictError, match=r"the commit 'one' exists already.*choose another"):
            ckpt.save("one")
        with pytest.raises(syckpt.ConflictError, match="the tag 't1' exists already"):
            ckpt.save("two", tags=["t2", "t1"])
        for name in (
            "",
            "a//b",
            ".hidden",
            "x.lock",
            "HEAD",
            "latest",
            "best",
            "a b",
            "0badc0de-0123456789abcdef",
            "a" * 201,
            "a/" * 99 + "a",
        ):
            with pytest.raises(syckpt.StateError, match="cannot be the name of a commit"):
                ckpt.save(name)
        with pytest.raises(syckpt.StateError, match="expected a sequence of names"):
            ckpt.save(tags="t3")
        assert stored(tmp_path) == before

        ckpt.save("three", tags=["t3"])
        with pytest.raises(syckpt.ConflictError, match="'three'"):
            ckpt.save("three")
        with pytest.raises(syckpt.ConflictError, match="'t3'"):
            ckpt.save(tags=["t3"])
        ckpt.save("t3", tags=["one"])  # Names and tags are apart.
    assert [c.name for c in CheckpointManager(tmp_path).log()] == ["t3", "three", "one"]


def test_saving_moves_no_random_stream(tmp_path):
    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def run(save: bool) -> list[float]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        if save:
            with CheckpointManager(tmp_path) as ckpt:
                ckpt.x = torch.ones(3)
                ckpt.save()
        return draws()

    assert run(True) == run(False)


def test_the_state_is_copied_when_save_returns(tmp_path):
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x, ckpt.table = torch.arange(100_000.0), {"a": [1]}
        pending = ckpt.save()
        ckpt.x.zero_()
        ckpt.table["a"].append(2)
        loaded = ckpt.load(pending.id)
    assert torch.equal(loaded["x"], torch.arange(100_000.0))
    assert loaded["table"] == {"a": [1]}


def test_the_manifest_does_not_depend_on_the_order_of_registration(tmp_path):
    seals = []
    for names in (("a", "b", "c"), ("c", "a", "b")):
        with CheckpointManager(tmp_path / names[0], rng=False, save_on_exit=False) as ckpt:
            for name in names:
                ckpt.register(name, {"t": torch.full((3,), float(ord(name)))})
            seals.append(ckpt.save().result().manifests)
    assert seals[0] == seals[1]


def test_statistics_are_handed_out_and_each_save_leaves_one_line_in_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="syckpt")
    seen: list[dict] = []
    with CheckpointManager(tmp_path, CheckpointManager.Config(on_stats=seen.append), save_on_exit=False) as ckpt:
        ckpt.x = torch.ones(1000)
        commit = ckpt.save(wait=True).result()
    assert [stats["staged_bytes"] >= 4000 for stats in seen] == [True]
    assert len([r for r in caplog.records if r.getMessage().startswith(f"saved {commit.id} step 0: stall")]) == 1


# -- leaving ---------------------------------------------------------------------------------------------------------------------


def test_a_clean_exit_saves_what_advanced_once_and_nothing_otherwise(tmp_path):
    def steps_saved() -> list[int]:
        return [c.step for c in CheckpointManager(tmp_path).log()]

    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
    assert steps_saved() == []
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.step_up()
        ckpt.save()
    assert steps_saved() == [1]
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.restore()
    assert steps_saved() == [1]
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.restore()
        ckpt.step_up()
        ckpt.step_up()
    assert steps_saved() == [3, 1]
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        ckpt.restore()
        ckpt.step_up()
    assert steps_saved() == [3, 1]


def test_an_epoch_that_was_declared_done_is_not_taken_back_by_the_exit(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.sampler = StatefulRandomSampler(range(10), batch_size=2)
        for _ in ckpt.loop():
            ckpt.step_up()
            ckpt.save(epoch_end=True)
            break
    assert [(c.step, c.epoch_done) for c in CheckpointManager(tmp_path).log()] == [(1, True)]


@pytest.mark.parametrize("error", [Crash, KeyboardInterrupt, SystemExit])
def test_an_exit_by_exception_flushes_what_was_handed_over_and_saves_nothing_more(tmp_path, error):
    ckpt = CheckpointManager(tmp_path)

    def leave() -> None:
        with ckpt:
            ckpt.x = torch.ones(200_000)
            ckpt.step_up()
            pendings.append(ckpt.save())
            ckpt.step_up()
            raise error

    pendings: list[syckpt.PendingCommit] = []
    with pytest.raises(error):
        leave()
    (pending,) = pendings
    commit = pending.result()
    assert commit.step == 1
    assert [c.id for c in CheckpointManager(tmp_path).log()] == [pending.id]
    assert not list((tmp_path / ".syckpt").glob("intents/*"))
    assert not list((tmp_path / ".syckpt").glob("leases/*"))


def test_a_closed_manager_refuses_to_save_but_can_be_closed_again_and_read(tmp_path):
    ckpt = CheckpointManager(tmp_path)
    ckpt.x = 1
    pending = ckpt.save()
    ckpt.close()
    ckpt.close()
    assert pending.result().id == ckpt.hash
    assert ckpt.load() == {"x": 1}
    with pytest.raises(syckpt.StateError, match="closed"):
        ckpt.save()
    with pytest.raises(syckpt.StateError, match="closed"):
        ckpt.step_up()


# -- failures --------------------------------------------------------------------------------------------------------------------


def break_next_save(ckpt: CheckpointManager, root: Path) -> None:
    """Bytes that the next save has to point to are gone: its publication is refused, in the writer."""
    (blob,) = (root / ".syckpt/objects" / str(ckpt.hash)).glob("*.safetensors")
    blob.rename(blob.with_name("hidden"))


def mend(root: Path) -> None:
    for hidden in (root / ".syckpt/objects").glob("*/hidden"):
        hidden.rename(hidden.with_name("r00000.safetensors"))


def test_a_background_failure_is_raised_once_by_the_next_save_and_the_one_after_works(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = torch.ones(10)
        good = ckpt.save(wait=True)
        break_next_save(ckpt, tmp_path)
        lost = ckpt.save()
        assert ckpt.hash == lost.id
        with pytest.raises(syckpt.IntegrityError, match="missing"):
            lost.result()
        assert ckpt.hash == good.id
        ckpt.step_up()
        with pytest.raises(syckpt.IntegrityError, match="missing"):
            ckpt.save()
        mend(tmp_path)
        assert ckpt.save(wait=True).result().parents == (good.id,)
        ckpt.wait()
    assert len(CheckpointManager(tmp_path).log()) == 2


def test_a_failure_that_a_waiting_save_raised_itself_does_not_fail_the_next_one(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = torch.ones(10)
        good = ckpt.save(wait=True)
        break_next_save(ckpt, tmp_path)
        with pytest.raises(syckpt.IntegrityError, match="missing"):
            ckpt.save("name", wait=True)
        mend(tmp_path)
        assert ckpt.save("name", wait=True).result().parents == (good.id,)


def test_on_error_warn_logs_counts_and_the_exit_saves_what_was_lost(tmp_path, caplog):
    with CheckpointManager(tmp_path, on_error="warn") as ckpt:
        ckpt.x = torch.ones(10)
        ckpt.step_up()
        good = ckpt.save(wait=True)
        break_next_save(ckpt, tmp_path)
        ckpt.step_up()
        lost = ckpt.save()
        ckpt.wait()
        assert ckpt.hash == good.id
        with pytest.raises(syckpt.IntegrityError):
            lost.result()
        assert [r.levelname for r in caplog.records if f"save {lost.id} failed" in r.getMessage()] == ["ERROR"]
        mend(tmp_path)
    assert [(c.step, c.message) for c in CheckpointManager(tmp_path).log()] == [(2, "exit"), (1, "")]


def test_an_earlier_failure_does_not_prevent_the_final_save_and_is_raised_behind_it(tmp_path):
    def leave() -> None:
        with CheckpointManager(tmp_path) as ckpt:
            ckpt.x = torch.ones(10)
            ckpt.save(wait=True)
            break_next_save(ckpt, tmp_path)
            pending = ckpt.save()
            while not pending.done():
                pass
            mend(tmp_path)
            ckpt.step_up()

    with pytest.raises(syckpt.IntegrityError, match="missing"):
        leave()
    assert [(c.step, c.message) for c in CheckpointManager(tmp_path).log()] == [(1, "exit"), (0, "")]
    assert not list((tmp_path / ".syckpt").glob("leases/*"))


def test_when_busy_skips_or_raises_while_two_saves_are_in_hand(tmp_path, monkeypatch):
    from syckpt.checkpoint.saver import Saver

    for when_busy in ("skip", "raise"):
        with CheckpointManager(tmp_path / when_busy, when_busy=when_busy) as ckpt:
            ckpt.x = 1
            ckpt.save(wait=True)
            with monkeypatch.context() as patch:
                patch.setattr(Saver, "busy", lambda self: True)
                if when_busy == "skip":
                    assert ckpt.save("skipped") is None
                else:
                    with pytest.raises(syckpt.ConflictError, match="when_busy='raise'"):
                        ckpt.save("skipped")
            ckpt.save("skipped", wait=True)


# -- hash ------------------------------------------------------------------------------------------------------------------------


def test_hash_is_the_newest_save_or_what_was_resumed(tmp_path):
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        assert ckpt.hash is None
        assert ckpt.resumed is None
        ckpt.x = 1
        first = ckpt.save()
        assert ckpt.hash == first.id
        second = ckpt.save()
        assert ckpt.hash == second.id
        ckpt.wait()
        assert ckpt.hash == second.id
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        assert ckpt.hash == ckpt.resumed.id == second.id
        ckpt.x = 1
        assert ckpt.save().id == ckpt.hash != second.id


# -- random streams --------------------------------------------------------------------------------------------------------------


def test_stepping_on_before_the_streams_are_restored_is_an_error_that_names_restore(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.step_up()
        ckpt.save()
        expected = torch.rand(3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        with pytest.raises(syckpt.StateError, match=r"ckpt\.restore\(\)"):
            ckpt.step_up()
        report = ckpt.restore()
        assert torch.equal(torch.rand(3), expected)
        assert report.rng_exact
        ckpt.step_up()


def test_without_saved_streams_a_resume_says_that_it_is_not_exact(tmp_path):
    with CheckpointManager(tmp_path, rng=False) as ckpt:
        ckpt.x = 1
        ckpt.step_up()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        report = ckpt.restore()
        assert not report.rng_exact
        assert report.notes == ["the commit holds no random streams: it was saved with rng=False"]
        ckpt.load()
        assert ckpt.last_report.rng_exact
        ckpt.step_up()
        assert not ckpt.save(wait=True).result().rng_exact


# -- the environment -------------------------------------------------------------------------------------------------------------


def test_several_processes_without_a_process_group_are_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(syckpt.CoordinationError, match=r"WORLD_SIZE is 2, .*init_process_group"):
        CheckpointManager(tmp_path)
    assert not (tmp_path / ".syckpt").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "version 2.*upgrade"),
        ({"required": ["sharded-refs"]}, "sharded-refs.*upgrade"),
        ({"digest": "sha3"}, "sha3.*upgrade"),
    ],
)
def test_a_repository_of_a_later_version_or_with_an_unknown_feature_is_a_format_error(tmp_path, change, text):
    from syckpt.objects import canonical

    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.save()
    file = tmp_path / ".syckpt/format.json"
    body, _ = canonical.unseal(file.read_bytes(), key="format.json", kind="repository")
    file.write_bytes(canonical.seal({**body, **change})[0])
    for use in (lambda: CheckpointManager(tmp_path), lambda: syckpt.load(tmp_path)):
        with pytest.raises(syckpt.FormatError, match=text):
            use()


def test_a_save_of_a_payload_leaves_the_registered_items_to_be_saved(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.model = nn.Linear(2, 2)
        for _ in ckpt.loop(epochs=1):
            ckpt.step_up()
            ckpt.save(payload={"scores": [1.0]})
    assert set(syckpt.load(tmp_path)) == {"model"}


def test_an_item_that_the_commit_lacks_is_reported_and_logged_loudly(tmp_path, caplog):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.model = nn.Linear(2, 2)
        ckpt.save()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.net = nn.Linear(2, 2)
        assert ckpt.last_report.missing == ["net"]
    assert [r.levelname for r in caplog.records if "has no item 'net'" in r.getMessage()] == ["WARNING"]


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.model, ckpt.optimizer = model, torch.optim.AdamW(model.parameters())
        ckpt.save()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model = model
        with pytest.raises(syckpt.StateError, match=r"'optimizer' is a SGD with .*momentum.* of another kind"):
            ckpt.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
