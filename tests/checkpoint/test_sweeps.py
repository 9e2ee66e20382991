"""Sweeps over branches: a script that dies anywhere and runs again ends as if it never had; many at once on one root do not collide.

Every death is that of a process: a fork that ends by `os._exit`, with whatever it had in hand.
"""

from __future__ import annotations

import os
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import syckpt
from syckpt import CheckpointManager, StatefulRandomSampler

# From Python 3.12 on, forking in a process with threads (pytest-xdist has some) warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

BATCH = 4
Hook = Callable[[str], None]


class Training:
    """A model with dropout, its optimizer and sampler; every step's loss is noted in a file, by branch and step."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        data = torch.arange(16 * 3, dtype=torch.float32).reshape(16, 3) / 48
        dataset = TensorDataset(data, data.sum(1, keepdim=True))
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.sampler = StatefulRandomSampler(dataset, BATCH, seed=7)
        self.loader = DataLoader(dataset, batch_size=BATCH, sampler=self.sampler)
        self.notes = root.with_suffix(".losses")

    def register(self, ckpt: CheckpointManager) -> None:
        ckpt.model, ckpt.optimizer, ckpt.sampler = self.model, self.optimizer, self.sampler

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def train(self, ckpt: CheckpointManager, epochs: int, at: Hook, *, save: bool = True) -> None:
        for epoch in ckpt.loop(epochs=epochs):
            for x, y in self.loader:
                loss = torch.nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                ckpt.step_up()
                with self.notes.open("a") as file:
                    file.write(f"{ckpt.branch} {ckpt.step} {loss.item().hex()}\n")
                at(f"{ckpt.branch} step {ckpt.step}")
                if save and ckpt.step % 3 == 0:
                    ckpt.save()
                    at(f"{ckpt.branch} saved at {ckpt.step}")
            if save:
                ckpt.save(message=f"epoch {epoch}")
            at(f"{ckpt.branch} epoch {epoch}")

    def losses(self) -> dict[str, set[str]]:
        """Map branch and step to the losses that were made there."""
        found: dict[str, set[str]] = defaultdict(set)
        for line in self.notes.read_text().splitlines():
            where, _, loss = line.rpartition(" ")
            found[where].add(loss)
        return dict(found)


def go_on(label: str) -> None:
    pass


def sweep(root: Path, at: Hook) -> None:
    run = Training(root)
    with CheckpointManager(root) as ckpt:
        run.register(ckpt)
        run.train(ckpt, 1, at)
        for name, lr in (("low", 0.02), ("high", 0.2)):
            ckpt.checkout_branch("main")
            at(f"{name}: back on main")
            run.set_lr(lr)
            ckpt.create_branch(name)
            at(f"{name}: made")
            run.train(ckpt, 1, at)
        ckpt.checkout_branch("main")
        at("end")


def sweep_of_what_was_not_saved(root: Path, at: Hook) -> None:
    """The base is trained and never saved by the script."""
    run = Training(root)
    with CheckpointManager(root) as ckpt:
        run.register(ckpt)
        run.train(ckpt, 1, at, save=False)
        ckpt.create_branch("first")
        at("first: made")
        run.train(ckpt, 1, at)
        ckpt.checkout_branch("main")
        run.train(ckpt, 2, at, save=False)
        run.set_lr(0.3)
        ckpt.create_branch("second")
        at("second: made")
        run.train(ckpt, 1, at)


def in_a_fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - shown, and told by the status
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(label: str) -> Hook:
    def at(now: str) -> None:
        if now == label:
            os._exit(9)

    return at


SWEEP = {
    "some": ["main step 2", "low: made", "low saved at 6", "high: back on main", "high step 8", "end"],
    "all": [
        *("main step 1", "main step 2", "main step 3", "main saved at 3", "main step 4", "main epoch 0"),
        *("low: back on main", "low: made", "low step 5", "low step 6", "low saved at 6"),
        *("low step 7", "low step 8", "low epoch 1", "high: back on main", "high: made", "high step 5", "high saved at 6"),
        *("high step 8", "high epoch 1", "end"),
    ],
}
UNSAVED = ["first: made", "first step 7", "main step 6", "second: made", "second saved at 12"]


def run_dying_at(script: Callable[[Path, Hook], None], labels: list[str], folder: Path) -> None:
    """Run a script again and again on one root, dying a little later each time, then to its end; it must end like one that never died."""
    whole, often = folder / "whole", folder / "often"
    assert status_of(in_a_fork(lambda: script(whole, go_on))) == 0
    for label in labels:
        assert status_of(in_a_fork(lambda label=label: script(often, die_at(label)))) == 9, label
    assert status_of(in_a_fork(lambda: script(often, go_on))) == 0
    assert Training(often).losses() == Training(whole).losses()
    branches = CheckpointManager(whole).list_branches()
    assert CheckpointManager(often).list_branches() == branches
    for branch in branches:
        ended, never = ([(c.step, c.epoch, c.epoch_done) for c in CheckpointManager(root, branch=branch).log()] for root in (often, whole))
        assert ended[0] == never[0]
        for item in ("model", "optimizer", "sampler"):
            assert repr(syckpt.load(often, branch)[item]) == repr(syckpt.load(whole, branch)[item]), (branch, item)


@pytest.mark.parametrize("points", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_a_sweep_that_dies_at_each_of_these_points_ends_like_one_that_never_died(tmp_path: Path, points: str) -> None:
    run_dying_at(sweep, SWEEP[points], tmp_path)


def test_a_branch_made_from_progress_that_was_not_saved_is_begun_again_as_it_was(tmp_path: Path) -> None:
    run_dying_at(sweep_of_what_was_not_saved, UNSAVED, tmp_path)


def test_scripts_of_a_sweep_that_begin_at_once_on_an_empty_root_do_not_collide(tmp_path: Path) -> None:
    root, names = tmp_path / "run", [f"trial/{number}" for number in range(4)]
    ready, go = os.pipe(), os.pipe()

    def trial(name: str) -> None:
        run = Training(root)
        run.notes = root.with_suffix("." + name[-1])
        run.set_lr(0.01 * (int(name[-1]) + 1))
        with CheckpointManager(root) as ckpt:
            run.register(ckpt)
            os.write(ready[1], b"r")
            os.read(go[0], 1)
            ckpt.create_branch(name)
            run.train(ckpt, 2, go_on)
            assert ckpt.branch == name

    children = [in_a_fork(lambda name=name: trial(name)) for name in names]
    seen = b""
    while len(seen) < len(names):
        seen += os.read(ready[0], len(names))
    os.write(go[1], b"g" * len(names))
    assert [status_of(child) for child in children] == [0] * len(names)
    for descriptor in (*ready, *go):
        os.close(descriptor)

    reader = CheckpointManager(root)
    assert reader.list_branches() == ["main", *names]
    assert (reader.branch, [(c.step, c.epoch_done) for c in reader.log()]) == ("main", [(0, False)])
    for name in names:
        assert [c.step for c in CheckpointManager(root, branch=name).log()][:4] == [8, 6, 4, 3]
        assert syckpt.load(root, name)["optimizer"]["param_groups"][0]["lr"] == 0.01 * (int(name[-1]) + 1)
    # Once more, one after the other: each finds its own branch, whoever had made main's commit.
    for name in names[:2]:
        with CheckpointManager(root) as ckpt:
            run = Training(root)
            run.register(ckpt)
            ckpt.create_branch(name)
            assert (ckpt.step, run.optimizer.param_groups[0]["lr"], list(ckpt.loop(2))) == (8, 0.01 * (int(name[-1]) + 1), [])


def test_a_branch_made_in_the_middle_of_an_epoch_goes_on_with_its_next_batch_and_so_does_the_one_that_was_left(tmp_path: Path) -> None:
    def epoch(run: Training, ckpt: CheckpointManager, at: Hook) -> list[str]:
        losses: list[str] = []
        run.train(ckpt, 1, lambda label: (losses.append(label), at(label)), save=False)  # type: ignore[func-returns-value]
        return losses

    whole = Training(tmp_path / "whole")
    with CheckpointManager(tmp_path / "whole", save_on_exit=False) as ckpt:
        whole.register(ckpt)
        epoch(whole, ckpt, go_on)
    parts = Training(tmp_path / "parts")
    with CheckpointManager(tmp_path / "parts", save_on_exit=False) as ckpt:
        parts.register(ckpt)

        def at(label: str) -> None:
            if label == "main step 2":
                ckpt.create_branch("other")  # commits the two steps first, on main

        assert epoch(parts, ckpt, at) == ["main step 1", "main step 2", "other step 3", "other step 4", "other epoch 0"]
        ckpt.save()
        ckpt.checkout_branch("main")
        assert (ckpt.step, ckpt.epoch, ckpt.batch_idx, parts.sampler.consumed) == (2, 0, 2, 2 * BATCH)
        assert epoch(parts, ckpt, go_on) == ["main step 3", "main step 4", "main epoch 0"]
    losses = {where.split()[1]: found for where, found in whole.losses().items()}
    assert all(len(found) == 1 for found in losses.values())
    assert {where.split()[1]: found for where, found in parts.losses().items() if "main" in where} == losses
    assert parts.losses()["other 4"] == losses["4"]
