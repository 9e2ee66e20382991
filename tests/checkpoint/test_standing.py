"""Moving: goto, branches made and changed to, and forks by run_mode; one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import syckpt
from syckpt import CheckpointManager, StatefulRandomSampler
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root

BATCH = 4


class Run:
    """A small training run: a model, its optimizer and sampler, dropout from torch's stream."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        data = torch.arange(24 * 3, dtype=torch.float32).reshape(24, 3) / 72
        self.dataset = TensorDataset(data, data.sum(1, keepdim=True))
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.sampler = StatefulRandomSampler(self.dataset, BATCH, seed=7)
        self.loader = DataLoader(self.dataset, batch_size=BATCH, sampler=self.sampler)

    def register(self, ckpt: CheckpointManager) -> None:
        ckpt.model, ckpt.optimizer, ckpt.sampler = self.model, self.optimizer, self.sampler

    def epoch(self, ckpt: CheckpointManager) -> list[float]:
        losses = []
        for x, y in self.loader:
            loss = torch.nn.functional.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            ckpt.step_up()
        return losses

    def train(self, ckpt: CheckpointManager, epochs: int) -> list[list[float]]:
        losses = []
        for epoch in ckpt.loop(epochs=epochs):
            losses.append(self.epoch(ckpt))
            ckpt.save(metric=losses[-1][-1], message=f"epoch {epoch}")
        return losses


def weights(root: Path, rev: str) -> list[float]:
    return syckpt.load(root, rev)["model"]["0.weight"].flatten().tolist()


def test_goto_repeats_what_followed_a_commit_bit_for_bit_and_keeps_what_it_left_in_the_reflog(tmp_path):
    run = Run()
    with CheckpointManager(tmp_path) as ckpt:
        run.register(ckpt)
        losses = run.train(ckpt, 3)
        commits = [c.id for c in ckpt.log()]
        newest = ckpt.hash
        ckpt.goto("HEAD~2")
        assert (ckpt.step, ckpt.epoch, ckpt.hash) == (6, 1, newest)
        assert run.train(ckpt, 3) == losses[1:]
        again = [c.id for c in ckpt.log()]
        assert again[-1] == commits[-1]
        assert not set(again[:-1]) & set(commits)
        assert weights(tmp_path, "HEAD") == weights(tmp_path, newest)
        refs = Repository.open(parse_root(tmp_path)).refs
        reasons = [refs.read("heads/main", number).reason for number in refs.numbers("heads/main")]
        assert reasons == ["open", "save", "save", "save", "reset", "save"]
        assert ckpt.log()[1].parents == (commits[-1],)


def test_goto_inside_a_loop_goes_on_with_the_epoch_that_it_leads_to(tmp_path):
    run, seen, back = Run(), [], True
    with CheckpointManager(tmp_path) as ckpt:
        run.register(ckpt)
        for epoch in ckpt.loop(epochs=3):
            seen.append(epoch)
            run.epoch(ckpt)
            if epoch == 1 and back:
                back = False
                ckpt.goto("latest")  # as after a spike of the loss
                continue
            ckpt.save()
    assert seen == [0, 1, 1, 2]


def test_goto_to_a_missing_revision_changes_nothing(tmp_path):
    run = Run()
    with CheckpointManager(tmp_path) as ckpt:
        run.register(ckpt)
        run.train(ckpt, 1)
        before = (run.sampler.state_dict(), run.model[0].weight.tolist(), ckpt.hash, ckpt.step)
        for missing in ("nowhere", "HEAD~5", "../main"):
            with pytest.raises(syckpt.NotFoundError):
                ckpt.goto(missing)
        assert (run.sampler.state_dict(), run.model[0].weight.tolist(), ckpt.hash, ckpt.step) == before


def test_goto_to_a_state_that_does_not_fit_is_refused_whole(tmp_path):
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.weights, ckpt.note = torch.zeros(3), "first"
        first = ckpt.save(wait=True)
        ckpt.weights, ckpt.note = torch.ones(4), "second"
        ckpt.step_up()
        with pytest.raises(syckpt.StateError, match=r"weights.*\[4\].*\[3\]|weights.*\[3\].*\[4\]"):
            ckpt.goto(first.id)
        assert (ckpt.weights.tolist(), ckpt.note, ckpt.step) == ([1, 1, 1, 1], "second", 1)
        ckpt.save(wait=True)


def test_a_goto_that_breaks_off_is_damage_never_a_fall_back_and_nothing_half_restored_is_saved(tmp_path):
    with CheckpointManager(tmp_path, CheckpointManager.Config(compression="none"), save_on_exit=False, rng=False) as ckpt:
        ckpt.a, ckpt.b = torch.zeros(2), torch.zeros(50_000)
        first = ckpt.save(wait=True)
        ckpt.a, ckpt.b = torch.ones(2), torch.ones(50_000)
        second = ckpt.save(wait=True)
        blob = tmp_path / ".syckpt" / "objects" / first.id / "r00000.safetensors"
        damaged = bytearray(blob.read_bytes())
        damaged[-1] ^= 1
        blob.write_bytes(bytes(damaged))
        with pytest.raises(syckpt.IntegrityError, match="b, block 0"):
            ckpt.goto(first.id)
        with pytest.raises(syckpt.StateError, match=r"goto\(.*half restored.*goto\(\) a commit that is whole"):
            ckpt.save()
        ckpt.goto(second.id)
        assert ckpt.b[0] == 1
        ckpt.save(wait=True)


def test_a_branch_made_at_head_keeps_the_state_and_its_loop_counts_from_the_fork(tmp_path):
    run = Run()
    with CheckpointManager(tmp_path) as ckpt:
        run.register(ckpt)
        run.train(ckpt, 2)
        fork = ckpt.hash
        ckpt.create_branch("sweep/high")
        assert (ckpt.branch, ckpt.step) == ("sweep/high", 12)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.5
        epochs = []
        for epoch in ckpt.loop(epochs=2):
            epochs.append(epoch)
            run.epoch(ckpt)
            ckpt.save()
        assert epochs == [2, 3]
        ckpt.checkout_branch("main")
        assert (ckpt.branch, ckpt.step, run.optimizer.param_groups[0]["lr"]) == ("main", 12, 0.01)
        assert ckpt.list_branches() == ["main", "sweep/high"]
        assert len(run.train(ckpt, 3)) == 1
        ckpt.wait()
        main, sweep = syckpt_log(tmp_path, "main"), syckpt_log(tmp_path, "sweep/high")
        assert main[1:] == sweep[2:]
        assert main[1] == fork
    assert CheckpointManager(tmp_path).branch == "main"


def syckpt_log(root: Path, branch: str) -> list[str]:
    return [c.id for c in CheckpointManager(root, branch=branch).log()]


def test_a_script_that_makes_a_branch_and_runs_again_goes_on_with_it(tmp_path):
    def script(stop_after: int | None) -> list[int]:
        run, epochs = Run(), []
        with CheckpointManager(tmp_path) as ckpt:
            run.register(ckpt)
            ckpt.create_branch("sweep")
            for epoch in ckpt.loop(epochs=4):
                epochs.append(epoch)
                run.epoch(ckpt)
                ckpt.save()
                if stop_after is not None and len(epochs) == stop_after:
                    break
        return epochs

    assert script(1) == [0]
    assert script(None) == [1, 2, 3]
    assert script(None) == []
    assert [c.step for c in CheckpointManager(tmp_path, branch="sweep").log()] == [24, 18, 12, 6, 0]
    # The registered state was committed first, and counts no epoch as done.
    assert [(c.step, c.epoch_done) for c in CheckpointManager(tmp_path).log()] == [(0, False)]


def test_two_branches_of_a_sweep_are_as_if_each_had_run_alone(tmp_path):
    def sweep(root: Path, names: list[str]) -> dict[str, list[list[float]]]:
        run, losses = Run(), {}
        with CheckpointManager(root) as ckpt:
            run.register(ckpt)
            run.train(ckpt, 1)
            for number, name in enumerate(names):
                ckpt.checkout_branch("main")
                ckpt.create_branch(name)
                for group in run.optimizer.param_groups:
                    group["lr"] = 0.1 * (int(name[-1]) + 1)
                losses[name] = run.train(ckpt, 2)
                assert len(losses[name]) == 2, number
        return losses

    both = sweep(tmp_path / "both", ["lr0", "lr1"])
    assert sweep(tmp_path / "alone", ["lr1"])["lr1"] == both["lr1"]


def test_checkout_saves_what_is_unsaved_and_refuses_what_does_not_exist(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.save(wait=True)
        ckpt.create_branch("other")
        ckpt.x = 2
        ckpt.step_up()
        with pytest.raises(syckpt.NotFoundError, match="nowhere"):
            ckpt.checkout_branch("nowhere")
        ckpt.checkout_branch("main")
        assert (ckpt.x, ckpt.step, ckpt.branch) == (1, 0, "main")
        assert syckpt.load(tmp_path, "other") == {"x": 2}
        ckpt.checkout_branch("main")
        assert (ckpt.x, ckpt.step, ckpt.branch) == (1, 0, "main")


def test_a_branch_made_at_another_revision_restores_it(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        for value in (1, 2, 3):
            ckpt.x = value
            ckpt.step_up()
            ckpt.save()
        ckpt.create_branch("past", at="HEAD~2")
        assert (ckpt.x, ckpt.step) == (1, 1)
        ckpt.x = 10
        ckpt.step_up()
    assert [c.step for c in CheckpointManager(tmp_path, branch="past").log()] == [2, 1]
    assert syckpt.load(tmp_path, "past") == {"x": 10}
    assert syckpt.load(tmp_path, "main") == {"x": 3}


def test_branches_are_deleted_and_tags_are_for_good(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.save()
        ckpt.tag("release")
        with pytest.raises(syckpt.ConflictError, match="release"):
            ckpt.tag("release")
        ckpt.create_branch("other")
        with pytest.raises(syckpt.ConflictError, match="'other' is the one that this manager writes"):
            ckpt.delete_branch("other")
        ckpt.checkout_branch("main")
        ckpt.delete_branch("other")
        assert ckpt.list_branches() == ["main"]
        with pytest.raises(syckpt.NotFoundError):
            ckpt.delete_branch("other")
        ckpt.create_branch("other")
        assert ckpt.load("release") == {"x": 1}


def test_a_new_branch_is_forked_warm_with_counters_at_zero(tmp_path):
    run = Run()
    with CheckpointManager(tmp_path) as ckpt:
        run.register(ckpt)
        run.train(ckpt, 2)
    trained = run.model[0].weight.tolist()
    other = Run(seed=1)
    with CheckpointManager(tmp_path, run_mode="new_branch") as ckpt:
        other.register(ckpt)
        assert (ckpt.branch, ckpt.step, ckpt.epoch, ckpt.batch_idx) == ("main-2", 0, 0, 0)
        assert other.model[0].weight.tolist() == trained
        assert other.optimizer.state[other.model[0].weight]["step"] == 12
        assert (other.sampler.epoch, other.sampler.consumed) == (0, 0)
        assert len(other.train(ckpt, 1)) == 1
    assert [c.step for c in CheckpointManager(tmp_path, branch="main-2").log()] == [6, 12, 6]
    with CheckpointManager(tmp_path, run_mode="new_branch") as ckpt:
        assert ckpt.branch == "main-3"
    assert CheckpointManager(tmp_path).branch == "main"


def test_a_relaunch_of_the_same_run_goes_on_with_the_new_branch_that_it_made(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.step_up()
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for value, steps in ((2, 1), (3, 2)):
        with CheckpointManager(tmp_path, run_mode="new_branch") as ckpt:
            ckpt.x = 0
            ckpt.restore()
            ckpt.x = value
            ckpt.step_up()
            assert (ckpt.branch, ckpt.step) == ("main-2", steps)
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    with CheckpointManager(tmp_path, run_mode="new_branch") as ckpt:
        assert ckpt.branch == "main-3"


def test_a_new_branch_of_an_empty_repository_is_the_branch_itself(tmp_path):
    with CheckpointManager(tmp_path, run_mode="new_branch") as ckpt:
        ckpt.x = 1
        ckpt.step_up()
        assert ckpt.branch == "main"


def test_an_item_registered_late_from_damaged_bytes_is_an_error_and_takes_nothing_back(tmp_path):
    config = CheckpointManager.Config(compression="none")
    with CheckpointManager(tmp_path, config, rng=False) as ckpt:
        ckpt.x, ckpt.y = 1, torch.zeros(50_000)
        ckpt.step_up()
        ckpt.save(wait=True)
        ckpt.x, ckpt.y = 2, torch.ones(50_000)
        ckpt.step_up()
        second = ckpt.save(wait=True)
    blob = tmp_path / ".syckpt" / "objects" / second.id / "r00000.safetensors"
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    with CheckpointManager(tmp_path, config, rng=False, save_on_exit=False) as ckpt:
        ckpt.x = 0
        ckpt.step_up()
        blob.write_bytes(bytes(damaged))
        with pytest.raises(syckpt.IntegrityError, match="y, block 0"):
            ckpt.y = torch.zeros(50_000)
        assert (ckpt.x, ckpt.step) == (2, 3)


def test_prewarm_makes_the_slot_and_the_writer_ready(tmp_path):
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = torch.zeros(1000)
        ckpt.prewarm()
        slots = [slot.nbytes for slot in ckpt._saver._slots]
        assert len(slots) == 1
        assert ckpt._saver._process.ready
        ckpt.save(wait=True)
        assert [slot.nbytes for slot in ckpt._saver._slots] == slots


def test_callbacks_see_a_save_before_it_can_be_visible_and_when_it_is_durable(tmp_path):
    seen: list[tuple[str, str]] = []

    def before(commit: str) -> None:
        assert not (tmp_path / ".syckpt" / "objects" / f"{commit}.json").exists()
        seen.append(("before", commit))
        if len(seen) == 3:
            raise RuntimeError("not this one")

    config = CheckpointManager.Config(pre_finalize_callback=before, finalize_callback=lambda commit: seen.append(("durable", commit.id)))
    with CheckpointManager(tmp_path, config, save_on_exit=False) as ckpt:
        ckpt.x = 1
        first = ckpt.save(wait=True)
        with pytest.raises(RuntimeError, match="not this one"):
            ckpt.save()
        third = ckpt.save(wait=True)
        assert [c.id for c in ckpt.log()] == [third.id, first.id]
    assert [what for what, _ in seen] == ["before", "durable", "before", "before", "durable"]
    assert seen[:2] == [("before", first.id), ("durable", first.id)]
