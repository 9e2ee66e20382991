"""A run that was killed and resumed makes the same losses, bit for bit, as one that never was.

Real deaths, by SIGKILL in processes of their own, are few and dear: the quickstart. Every rule of when the random streams come back has a
cheap case instead, in which a run "dies" by an exception and everything is built again from other seeds.
"""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import syckpt
from syckpt.dataloader import StatefulRandomSampler, seeded

# From Python 3.12 on, forking loader workers in a process with threads (pytest-xdist has some) warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "01_quickstart.py"

# The example as it is, on the same text and with dropout, but narrow, so that a process spends its time in starting up.
SMALL_EXAMPLE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("quickstart", sys.argv.pop(1))
quickstart = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quickstart)
quickstart.WIDTH, quickstart.HEADS, quickstart.LAYERS, quickstart.SEQUENCES = 32, 2, 2, 14 * quickstart.BATCH
quickstart.main()
"""
STEPS = 42  # 3 epochs of 14
# In the middle of epochs 0, 1 and 2; saves are at 5, 10, ... and the ends of epochs, so the second dies with a save in hand.
KILLS = (9, 20, 38)


def quickstart(folder: Path, name: str, *, workers: int, kill_at: int | None = None) -> None:
    command = [sys.executable, "-c", SMALL_EXAMPLE, str(EXAMPLE), "--dir", str(folder / name), "--losses", str(folder / f"{name}.losses")]
    command += ["--save-every", "5", "--workers", str(workers)]
    if kill_at is not None:
        command += ["--kill-at", str(kill_at)]
    errors = folder / f"{name}.errors"
    # No pipe: that would wait for the loader's workers, which outlive a killed trainer for some seconds.
    with errors.open("a") as file:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=file, timeout=120, check=False)
    assert done.returncode == (0 if kill_at is None else -signal.SIGKILL), errors.read_text()


def losses_of(folder: Path, name: str) -> dict[int, list[str]]:
    """Map each step to its losses in hexadecimal: several if it was made again."""
    steps: dict[int, list[str]] = defaultdict(list)
    for line in (folder / f"{name}.losses").read_text().splitlines():
        step, loss = line.split()
        steps[int(step)].append(loss)
    return dict(steps)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    folder = tmp_path_factory.mktemp("never-killed")
    quickstart(folder, "run", workers=0)
    losses = losses_of(folder, "run")
    assert [len(losses[step]) for step in range(1, STEPS + 1)] == [1] * STEPS
    assert len({loss for (loss,) in losses.values()}) == STEPS
    return losses


@pytest.mark.xdist_group("quickstart")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_quickstart_killed_three_times_in_a_row_makes_the_losses_of_a_run_never_killed(
    tmp_path: Path, never_killed: dict[int, list[str]], workers: int
) -> None:
    for kill_at in KILLS:
        quickstart(tmp_path, "run", workers=workers, kill_at=kill_at)
    quickstart(tmp_path, "run", workers=workers)
    losses = losses_of(tmp_path, "run")
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert {step: set(made) for step, made in losses.items()} == {step: set(made) for step, made in never_killed.items()}
    # Steps after the last durable save were made again: 6 to 9 for certain, and 36 to 38.
    assert [len(losses[step]) for step in (6, 9, 36, 38)] == [2, 2, 2, 2]


# -- the same rules in one process -----------------------------------------------------------------------------------------------------

SAMPLES, BATCH, EPOCHS = 24, 4, 3
BATCHES = SAMPLES // BATCH


class Death(Exception):
    """The run ends here; everything that it had in memory is lost."""


class Numbers(Dataset[torch.Tensor]):
    """With `draws`, an augmentation from all three streams."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws
        self.values = torch.linspace(-1, 1, SAMPLES * 8).view(SAMPLES, 8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.random() + torch.rand(()).item() if self.draws else 0.0
        return self.values[index] + noise


@dataclass
class Run:
    """One training script; `hook(point, ckpt)` is called at every point at which it might save or die."""

    root: Path
    hook: Callable[[str, syckpt.CheckpointManager], None]
    workers: int = 0
    persistent: bool = False
    draws: bool = False
    keyed: bool = False
    by_batches: bool = False
    accumulate: int = 1
    early: Callable[[syckpt.CheckpointManager], None] = lambda ckpt: None
    """Called between the registrations and the loop."""
    trail: list[tuple[Any, ...]] = field(default_factory=list)
    """For every batch: where it is, its loss, and what the three streams gave."""
    report: syckpt.LoadReport | None = None

    def go(self, seed: int) -> Run:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        dataset: Any = seeded(Numbers(draws=self.draws)) if self.keyed else Numbers(draws=self.draws)
        sampler = StatefulRandomSampler(dataset, batch_size=BATCH)
        loader = DataLoader(
            dataset, batch_size=BATCH, sampler=sampler, num_workers=self.workers, persistent_workers=self.persistent and self.workers > 0
        )
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with syckpt.CheckpointManager(self.root, save_on_exit=False) as ckpt:
            ckpt.model, ckpt.optimizer, ckpt.sampler = model, optimizer, sampler
            self.early(ckpt)
            for epoch in ckpt.loop(epochs=EPOCHS):
                self.hook(f"{epoch} begins", ckpt)
                batches = ckpt.batches(loader, self.accumulate) if self.by_batches else loader
                for x in batches:
                    before = ckpt.step, sampler.batch_idx
                    self.hook(f"{epoch} body at {before[1]}", ckpt)
                    loss = model(x).square().mean()
                    loss.backward()
                    if not self.by_batches or ckpt.batch_idx % self.accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    if not self.by_batches:
                        ckpt.step_up()
                    self.trail.append(
                        (
                            f"epoch {epoch} batch {ckpt.batch_idx} step {ckpt.step}",
                            loss.item().hex(),
                            random.random(),
                            np.random.random(),
                            torch.rand(()).item(),
                        )
                    )
                    self.hook(f"{epoch} after {ckpt.batch_idx}", ckpt)
                self.hook(f"{epoch} ends", ckpt)
            self.report = ckpt.last_report
        return self


def nothing(point: str, ckpt: syckpt.CheckpointManager) -> None:
    pass


def dying(*, save: str, die: str) -> Callable[[str, syckpt.CheckpointManager], None]:
    def hook(point: str, ckpt: syckpt.CheckpointManager) -> None:
        if point == save:
            ckpt.save()
        if point == die:
            raise Death

    return hook


_undisturbed: dict[str, list[tuple[Any, ...]]] = {}


def undisturbed(**how: Any) -> list[tuple[Any, ...]]:
    """Return the trail of a run that neither saved nor died."""
    key = repr(sorted(how.items()))
    if key not in _undisturbed:
        with tempfile.TemporaryDirectory() as folder:
            _undisturbed[key] = Run(Path(folder), nothing, **how).go(seed=1).trail
        assert len(_undisturbed[key]) == EPOCHS * BATCHES
    return _undisturbed[key]


def die_and_resume(
    tmp_path: Path, *, save: str, die: str, early: Callable[[syckpt.CheckpointManager], None] | None = None, **how: Any
) -> Run:
    """Check that a run which saved at one point and died at another goes on like one that did neither, and return the resumed one."""
    expected = undisturbed(**how)
    killed = Run(tmp_path, dying(save=save, die=die), **how)
    with pytest.raises(Death):
        killed.go(seed=1)
    assert killed.trail == expected[: len(killed.trail)]
    resumed = Run(tmp_path, nothing, **how, **({"early": early} if early else {})).go(seed=999)
    assert 0 < len(resumed.trail) <= len(expected)
    assert resumed.trail == expected[-len(resumed.trail) :]
    return resumed


POINTS = {
    "before-the-inner-loop": ("1 begins", "1 after 2"),
    "at-a-body's-beginning-before-the-first-step": ("1 body at 0", "1 after 2"),
    "in-the-middle-of-an-epoch": ("1 after 3", "1 after 5"),
    "after-the-first-step": ("0 after 1", "0 after 1"),
    "in-the-body-of-the-last-batch": (f"1 after {BATCHES}", "2 after 1"),
    "at-the-end-of-an-epoch": ("1 ends", "2 after 1"),
    "before-anything": ("0 begins", "0 after 3"),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_save_anywhere_in_a_plain_loop_resumes_exactly(tmp_path: Path, point: str, workers: int) -> None:
    save, die = POINTS[point]
    resumed = die_and_resume(tmp_path, save=save, die=die, workers=workers)
    assert resumed.report is not None
    mid_epoch = point in ("at-a-body's-beginning-before-the-first-step", "in-the-middle-of-an-epoch", "after-the-first-step")
    assert resumed.report.rng_exact is not (mid_epoch and workers > 0)


@pytest.mark.parametrize("point", [p for p in POINTS if "before-the-first-step" not in p])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_save_anywhere_in_a_loop_over_batches_resumes_exactly(tmp_path: Path, point: str, workers: int) -> None:
    save, die = POINTS[point]
    die_and_resume(tmp_path, save=save, die=die, workers=workers, by_batches=True, keyed=True, draws=True)


@pytest.mark.parametrize("point", [p for p in POINTS if "before-the-first-step" not in p])
def test_persistent_workers_resume_exactly_with_batches(tmp_path: Path, point: str) -> None:
    save, die = POINTS[point]
    resumed = die_and_resume(tmp_path, save=save, die=die, workers=1, persistent=True, by_batches=True, keyed=True, draws=True)
    assert resumed.report is not None
    assert resumed.report.rng_exact


@pytest.mark.parametrize("save", ["1 after 3", "1 ends"])
def test_persistent_workers_in_a_plain_loop_are_reported_as_inexact(tmp_path: Path, save: str, caplog: pytest.LogCaptureFixture) -> None:
    how = {"workers": 1, "persistent": True, "keyed": True}
    killed = Run(tmp_path, dying(save=save, die=save), **how)
    with pytest.raises(Death):
        killed.go(seed=1)
    with caplog.at_level(logging.WARNING, logger="syckpt"):
        resumed = Run(tmp_path, nothing, **how).go(seed=2)
    assert resumed.report is not None
    assert not resumed.report.rng_exact
    assert "ckpt.batches(loader)" in caplog.text
    assert "ckpt.batches(loader)" in resumed.report.notes[0]


@pytest.mark.parametrize("by_batches", [False, True])
def test_drawing_in_the_training_process_is_exact_without_seeded(tmp_path: Path, by_batches: bool) -> None:
    resumed = die_and_resume(tmp_path, save="1 after 3", die="1 after 5", draws=True, by_batches=by_batches)
    assert resumed.report is not None
    assert resumed.report.rng_exact


@pytest.mark.parametrize("by_batches", [False, True])
def test_drawing_workers_are_exact_with_seeded(tmp_path: Path, by_batches: bool) -> None:
    resumed = die_and_resume(tmp_path, save="1 after 3", die="1 after 5", workers=2, draws=True, keyed=True, by_batches=by_batches)
    assert resumed.report is not None
    assert resumed.report.rng_exact


@pytest.mark.parametrize("by_batches", [False, True])
def test_drawing_workers_without_seeded_are_reported_as_inexact(tmp_path: Path, by_batches: bool, caplog: pytest.LogCaptureFixture) -> None:
    killed = Run(tmp_path, dying(save="1 after 3", die="1 after 3"), workers=2, draws=True, by_batches=by_batches)
    with pytest.raises(Death):
        killed.go(seed=1)
    resumed = Run(tmp_path, nothing, workers=2, draws=True, by_batches=by_batches).go(seed=2)
    assert resumed.report is not None
    assert not resumed.report.rng_exact
    assert "syckpt.dataloader.seeded()" in caplog.text


def test_drawing_workers_that_begin_an_epoch_anew_are_exact_without_seeded(tmp_path: Path) -> None:
    resumed = die_and_resume(tmp_path, save="1 ends", die="2 after 1", workers=2, draws=True)
    assert resumed.report is not None
    assert resumed.report.rng_exact


def test_drawing_workers_that_would_have_lived_on_are_reported_as_inexact_also_at_an_epochs_beginning(tmp_path: Path) -> None:
    how = {"workers": 1, "persistent": True, "draws": True, "by_batches": True}
    with pytest.raises(Death):
        Run(tmp_path, dying(save="1 ends", die="1 ends"), **how).go(seed=1)
    resumed = Run(tmp_path, nothing, **how).go(seed=2)
    assert resumed.report is not None
    assert not resumed.report.rng_exact


def test_an_inexact_resume_is_marked_in_the_commits_that_follow_it(tmp_path: Path) -> None:
    with pytest.raises(Death):
        Run(tmp_path, dying(save="1 after 3", die="1 after 3"), workers=1, draws=True).go(seed=1)
    Run(tmp_path, dying(save="2 ends", die=""), workers=1, draws=True).go(seed=2)
    repository = syckpt.CheckpointManager(tmp_path)
    after, before = repository.log()
    assert (before.rng_exact, after.rng_exact) == (True, False)


def test_a_load_in_between_does_not_hide_that_the_resume_was_inexact(tmp_path: Path) -> None:
    def load_then_save(point: str, ckpt: syckpt.CheckpointManager) -> None:
        if point == "2 ends":
            ckpt.load()
            ckpt.save()

    with pytest.raises(Death):
        Run(tmp_path, dying(save="1 after 3", die="1 after 3"), workers=1, draws=True).go(seed=1)
    Run(tmp_path, load_then_save, workers=1, draws=True).go(seed=2)
    with syckpt.CheckpointManager(tmp_path) as ckpt:
        assert ckpt.resumed is not None
        assert ckpt.resumed.rng_exact is False


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_gradient_accumulation_resumes_exactly_at_a_step(tmp_path: Path, accumulate: int, workers: int) -> None:
    at = 2 * accumulate if accumulate == 2 else accumulate
    die_and_resume(tmp_path, save=f"1 after {at}", die=f"1 after {at + 1}", by_batches=True, accumulate=accumulate, workers=workers)


def test_steps_of_accumulation_stay_where_they_were_after_a_save_between_two(tmp_path: Path) -> None:
    how = {"by_batches": True, "accumulate": 3}
    with pytest.raises(Death):
        Run(tmp_path, dying(save="1 after 2", die="1 after 2"), **how).go(seed=1)
    resumed = Run(tmp_path, nothing, **how).go(seed=2)
    assert [where for where, *_ in resumed.trail] == [where for where, *_ in undisturbed(**how)[-len(resumed.trail) :]]


@pytest.mark.parametrize("by_batches", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_of_a_resume_is_exact(tmp_path: Path, workers: int, by_batches: bool) -> None:
    how = {"workers": workers, "by_batches": by_batches, "keyed": True, "draws": True}
    lives = []
    deaths = [("0 after 2", "0 after 4"), ("0 after 5", "1 begins"), ("1 begins", "1 body at 1"), ("1 after 1", "1 after 2"), ("", "")]
    for seed, (save, die) in enumerate(deaths, start=1):
        run = Run(tmp_path, dying(save=save, die=die), **how)
        if die:
            with pytest.raises(Death):
                run.go(seed)
        else:
            run.go(seed)
        lives.append(run.trail)
    expected = {where: rest for where, *rest in undisturbed(**how)}
    for where, *rest in (batch for life in lives for batch in life):
        assert rest == expected[where], where
    assert {where for life in lives for where, *_ in life} == set(expected)


@pytest.mark.parametrize("save", ["1 begins", "1 after 3", "1 ends"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("by_batches", [False, True])
def test_a_save_right_after_a_resume_moves_nothing(tmp_path: Path, save: str, workers: int, by_batches: bool) -> None:
    die_and_resume(
        tmp_path, save=save, die="2 after 1", early=lambda ckpt: ckpt.save(), workers=workers, keyed=True, draws=True, by_batches=by_batches
    )


@pytest.mark.parametrize("save", ["1 begins", "1 after 3", "1 ends"])
def test_draws_between_restore_and_the_loop_move_nothing(tmp_path: Path, save: str) -> None:
    def restore_and_draw(ckpt: syckpt.CheckpointManager) -> None:
        assert ckpt.restore().rng_exact
        nn.Linear(100, 100)

    die_and_resume(tmp_path, save=save, die="2 after 1", early=restore_and_draw)


def test_a_save_right_after_a_resume_can_be_resumed_in_its_turn(tmp_path: Path) -> None:
    with pytest.raises(Death):
        Run(tmp_path, dying(save="1 after 3", die="1 after 3")).go(seed=1)

    def save_and_die(ckpt: syckpt.CheckpointManager) -> None:
        ckpt.save()
        raise Death

    with pytest.raises(Death):
        Run(tmp_path, nothing, early=save_and_die).go(seed=2)
    resumed = Run(tmp_path, nothing).go(seed=3)
    assert len(resumed.trail) == BATCHES + 3
    assert resumed.trail == undisturbed()[-len(resumed.trail) :]


def test_all_three_streams_are_those_of_the_moment_of_the_save_after_restore(tmp_path: Path) -> None:
    def draw() -> tuple[float, ...]:
        # gauss and standard_normal keep a second value back, which is part of a stream's state.
        return random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal(), torch.rand(()).item()

    def seed_all(seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    seed_all(1)
    draw()
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.save()
        expected = [draw() for _ in range(3)]
    seed_all(2)
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        report = ckpt.restore()
        assert [draw() for _ in range(3)] == expected
        assert report.rng_exact
        assert report is ckpt.last_report


def test_a_step_before_the_random_streams_are_restored_is_refused_and_names_restore(tmp_path: Path) -> None:
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.step_up()
        ckpt.save()
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        with pytest.raises(syckpt.StateError, match=r"ckpt\.restore\(\)"):
            ckpt.step_up()
        assert ckpt.step == 1
        ckpt.restore()
        ckpt.step_up()
        assert ckpt.step == 2


def test_a_resume_from_a_commit_without_random_streams_is_not_called_exact(tmp_path: Path) -> None:
    with syckpt.CheckpointManager(tmp_path, rng=False, save_on_exit=False) as ckpt:
        ckpt.step_up()
        ckpt.save()
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        assert not ckpt.restore().rng_exact
        ckpt.step_up()  # there is nothing to restore, so nothing to wait for
        commit = ckpt.save(wait=True)
        assert commit is not None
        assert commit.result().rng_exact is False


@contextmanager
def streams_left_alone() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    after = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    assert after[0] == before[0]
    assert str(after[1]) == str(before[1])
    assert (after[1]["state"]["key"] == before[1]["state"]["key"]).all()
    assert torch.equal(after[2], before[2])


def test_no_call_of_a_fresh_manager_moves_a_random_stream(tmp_path: Path) -> None:
    with streams_left_alone():
        ckpt = syckpt.CheckpointManager(tmp_path)
        ckpt.model = {"weight": torch.ones(3)}
    with streams_left_alone():
        first = ckpt.save()
        assert first is not None
        first.result()
    with streams_left_alone():
        ckpt.save("name", tags=["tag"], wait=True)
    with streams_left_alone(), pytest.raises(syckpt.StateError):
        ckpt.save(payload={"model": object()})
    with streams_left_alone():
        ckpt.step_up()
        ckpt.load()
        ckpt.verify()
        ckpt.log()
        ckpt.close()


def test_resuming_moves_no_stream_before_the_loop(tmp_path: Path) -> None:
    with syckpt.CheckpointManager(tmp_path) as ckpt:
        ckpt.model = torch.nn.Linear(2, 2)
        ckpt.step_up()
    model = torch.nn.Linear(2, 2)
    with streams_left_alone():
        ckpt = syckpt.CheckpointManager(tmp_path)
        ckpt.model = model
    ckpt.close()
