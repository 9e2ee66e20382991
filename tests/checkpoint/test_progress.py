"""Counters, `loop`, `step_up` and `batches`: where a run stands, and where it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import syckpt
from syckpt import CheckpointManager
from syckpt.checkpoint import progress
from syckpt.checkpoint.progress import Interval
from syckpt.dataloader import StatefulRandomSampler


def commits(root: Path) -> list[tuple[int, int, int, bool]]:
    """Return (step, epoch, batch_idx, epoch_done) of all commits, oldest first."""
    return [(c.step, c.epoch, c.batch_idx, c.epoch_done) for c in reversed(CheckpointManager(root).log())]


def loader_of(samples: int, batch_size: int, **options: Any) -> tuple[StatefulRandomSampler, DataLoader]:
    data = torch.arange(samples)
    sampler = StatefulRandomSampler(data, batch_size=batch_size)
    return sampler, DataLoader(data, batch_size=batch_size, sampler=sampler, **options)


def run(
    root: Path, *, epochs: int | None, steps: int, samples: int = 10, batch_size: int = 3, save_each: bool = False, **options: Any
) -> list:
    """Train for at most `steps` steps; return (epoch, batch_idx, samples) of each."""
    sampler, loader = loader_of(samples, batch_size, **options)
    seen = []
    with CheckpointManager(root) as ckpt:
        ckpt.sampler = sampler
        for epoch in ckpt.loop(epochs):
            for batch in loader:
                ckpt.step_up()
                seen.append((epoch, ckpt.batch_idx, batch.tolist()))
                assert ckpt.epoch == epoch
                if save_each:
                    ckpt.save()
                if len(seen) == steps:
                    return seen
    return seen


def test_loop_yields_the_epochs_still_to_do_and_enters_a_broken_one_again(tmp_path):
    whole = run(tmp_path / "whole", epochs=3, steps=99)
    assert [(epoch, batch) for epoch, batch, _ in whole] == [(e, b) for e in range(3) for b in (1, 2, 3, 4)]

    parts = [run(tmp_path / "parts", epochs=3, steps=n) for n in (2, 3, 3, 99, 99)]
    assert [len(part) for part in parts] == [2, 3, 3, 4, 0]
    assert [step for part in parts for step in part] == whole
    # 2 steps: inside epoch 0; 5 steps: inside epoch 1; 8 steps: exactly at the end of epoch 1.
    assert commits(tmp_path / "parts") == [(2, 0, 2, False), (5, 1, 1, False), (8, 1, 4, True), (12, 2, 4, True)]
    assert commits(tmp_path / "whole") == [(12, 2, 4, True)]


def test_running_a_finished_script_again_changes_nothing_and_more_epochs_go_on_where_it_ended(tmp_path):
    whole = run(tmp_path / "whole", epochs=3, steps=99)
    first = run(tmp_path / "more", epochs=2, steps=99)
    assert run(tmp_path / "more", epochs=2, steps=99) == []
    assert commits(tmp_path / "more") == [(8, 1, 4, True)]
    assert first + run(tmp_path / "more", epochs=3, steps=99) == whole


def test_a_save_right_behind_a_resume_at_an_epochs_end_finishes_no_further_epoch(tmp_path):
    run(tmp_path, epochs=1, steps=99)
    sampler, _ = loader_of(10, 3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.sampler = sampler
        assert (ckpt.step, ckpt.epoch, ckpt.batch_idx) == (4, 1, 0)
        ckpt.save()
    assert commits(tmp_path) == [(4, 0, 4, True), (4, 1, 0, False)]
    assert [epoch for epoch, _, _ in run(tmp_path, epochs=2, steps=99)] == [1, 1, 1, 1]


def test_loop_without_a_number_goes_on_for_ever(tmp_path):
    assert [(epoch, batch) for epoch, batch, _ in run(tmp_path, epochs=None, steps=9)][-1] == (2, 1)
    assert [(epoch, batch) for epoch, batch, _ in run(tmp_path, epochs=None, steps=4)] == [(2, 2), (2, 3), (2, 4), (3, 1)]


def test_loop_works_inside_the_users_own_loops(tmp_path):
    seen = []
    with CheckpointManager(tmp_path) as ckpt:
        for phase in range(3):
            for epoch in ckpt.loop(2 * (phase + 1)):
                for _ in range(2):
                    ckpt.step_up()
                seen.append((phase, epoch))
    assert seen == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert commits(tmp_path) == [(12, 5, 2, True)]


def test_breaking_out_of_loop_and_coming_back_continues_the_epoch(tmp_path):
    sampler, loader = loader_of(10, 3)
    seen = []
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.sampler = sampler
        for _ in range(4):
            for epoch in ckpt.loop(2):
                for _ in loader:
                    ckpt.step_up()
                    seen.append((epoch, ckpt.batch_idx))
                    if len(seen) in (2, 5):
                        break
                if len(seen) in (2, 5):
                    break
    assert seen == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2), (1, 3), (1, 4)]


def test_without_a_sampler_a_save_finishes_the_epoch_unless_told_otherwise(tmp_path):
    def epochs(root: Path, epoch_end: bool | None, steps: int = 3) -> list[int]:
        seen = []
        with CheckpointManager(root, save_on_exit=False) as ckpt:
            for epoch in ckpt.loop(4):
                seen.append((epoch, ckpt.batch_idx))
                for _ in range(steps):
                    ckpt.step_up()
                ckpt.save(epoch_end=epoch_end)
                if len(seen) == 2:
                    break
        return seen

    assert epochs(tmp_path / "default", None) == [(0, 0), (1, 0)]
    assert epochs(tmp_path / "default", None) == [(2, 0), (3, 0)]
    assert epochs(tmp_path / "true", True) == [(0, 0), (1, 0)]
    assert epochs(tmp_path / "true", True) == [(2, 0), (3, 0)]
    assert epochs(tmp_path / "false", False) == [(0, 0), (1, 0)]
    # Entered again where it was.
    assert epochs(tmp_path / "false", False) == [(1, 3), (2, 0)]
    assert commits(tmp_path / "false") == [(3, 0, 3, False), (6, 1, 3, False), (9, 1, 6, False), (12, 2, 3, False)]


def test_a_fresh_state_has_finished_no_epoch(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.save()
    assert commits(tmp_path) == [(0, 0, 0, False)]
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        assert next(ckpt.loop(1)) == 0


def test_epoch_end_overrides_what_the_sampler_says(tmp_path):
    for root, epoch_end, expected in (("early", True, [1]), ("late", False, [0])):
        sampler, loader = loader_of(10, 3)
        with CheckpointManager(tmp_path / root, save_on_exit=False) as ckpt:
            ckpt.sampler = sampler
            for _ in ckpt.loop(2):
                for number, _ in enumerate(loader, start=1):
                    ckpt.step_up()
                    if epoch_end and number == 2:
                        break
                ckpt.save(epoch_end=epoch_end)
                break
        sampler, _ = loader_of(10, 3)
        with CheckpointManager(tmp_path / root, save_on_exit=False) as ckpt:
            ckpt.sampler = sampler
            assert [next(ckpt.loop(2))] == expected


@pytest.mark.parametrize("batches_to_do", [3, 2])
def test_an_epoch_of_a_loader_that_drops_the_last_batch_is_done_without_it(tmp_path, batches_to_do):
    sampler, loader = loader_of(11, 3, drop_last=True)
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.sampler = sampler
        for _ in ckpt.loop(1):
            for _ in zip(loader, range(batches_to_do), strict=False):
                ckpt.step_up()
            ckpt.save()
    assert commits(tmp_path) == [(batches_to_do, 0, batches_to_do, batches_to_do == 3)]
    rest = run(tmp_path, epochs=2, steps=99, samples=11, drop_last=True)
    assert [(epoch, batch) for epoch, batch, _ in rest] == ([] if batches_to_do == 3 else [(0, 3)]) + [(1, 1), (1, 2), (1, 3)]


def test_steps_and_micro_batches_are_counted_apart(tmp_path):
    sampler, loader = loader_of(12, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.sampler = sampler
        for _ in ckpt.loop(1):
            for number, _ in enumerate(loader, start=1):
                if number % 3 == 0:
                    ckpt.step_up(batches=3)
                    ckpt.save()
    assert commits(tmp_path) == [(1, 0, 3, False), (2, 0, 6, True)]


@pytest.mark.parametrize(("n", "batches"), [(-1, None), (1.0, None), (True, None), (1, -1), (1, 0.5)])
def test_step_up_takes_natural_numbers(tmp_path, n, batches):
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(syckpt.StateError, match="expected natural numbers"):
        ckpt.step_up(n, batches=batches)
    assert commits(tmp_path) == []


def test_a_batch_size_that_is_not_the_loaders_is_found_by_the_first_batch(tmp_path):
    data = torch.arange(10)
    sampler = StatefulRandomSampler(data, batch_size=2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.sampler = sampler
        with pytest.raises(syckpt.StateError, match="batch_size=5"):
            next(ckpt.batches(DataLoader(data, batch_size=5, sampler=sampler)))
    assert commits(tmp_path) == []


# -- batches ---------------------------------------------------------------------------------------------------------------------


def test_batches_counts_a_batch_when_its_body_begins_so_a_save_in_the_body_includes_it(tmp_path):
    sampler, loader = loader_of(10, 3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.sampler = sampler
        for _ in ckpt.loop(1):
            for number, _ in enumerate(ckpt.batches(loader), start=1):
                assert (ckpt.step, ckpt.batch_idx) == (number, number)
                ckpt.save()
    assert commits(tmp_path) == [(1, 0, 1, False), (2, 0, 2, False), (3, 0, 3, False), (4, 0, 4, True)]


def test_batches_makes_a_step_of_every_accumulate_batches_also_behind_a_resume(tmp_path):
    def go(stop: int) -> list[tuple[int, int]]:
        sampler, loader = loader_of(16, 2)
        seen = []
        with CheckpointManager(tmp_path) as ckpt:
            ckpt.sampler = sampler
            for _ in ckpt.loop(1):
                for _ in ckpt.batches(loader, accumulate=4):
                    seen.append((ckpt.batch_idx, ckpt.step))
                    if len(seen) == stop:
                        return seen
        return seen

    assert go(2) == [(1, 0), (2, 0)]
    assert go(99) == [(3, 0), (4, 1), (5, 1), (6, 1), (7, 1), (8, 2)]


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True])
def test_accumulate_is_a_number_of_batches(tmp_path, accumulate):
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(syckpt.StateError, match="at least 1"):
        next(ckpt.batches([1], accumulate=accumulate))


def test_counting_by_step_up_and_batches_is_an_error(tmp_path):
    with CheckpointManager(tmp_path / "1", save_on_exit=False) as ckpt:
        ckpt.step_up()
        with pytest.raises(syckpt.StateError, match="use one of the two"):
            next(ckpt.batches([1, 2]))
    with CheckpointManager(tmp_path / "2", save_on_exit=False) as ckpt:
        for _ in ckpt.batches([1, 2]):
            with pytest.raises(syckpt.StateError, match="use one of the two"):
                ckpt.step_up()
        assert (ckpt.step, ckpt.batch_idx) == (2, 2)


# -- save_every ------------------------------------------------------------------------------------------------------------------


def test_save_every_saves_by_itself_at_multiples_of_steps_also_behind_a_resume(tmp_path):
    for _ in range(2):
        with CheckpointManager(tmp_path, save_every=3, save_on_exit=False) as ckpt:
            ckpt.sampler, _ = loader_of(100, 1)
            ckpt.restore()
            for _ in range(5):
                ckpt.step_up()
    # The first run ends at step 5 and was saved at 3; the second one goes on there.
    assert commits(tmp_path) == [(3, 0, 3, False), (6, 0, 6, False)]


def test_save_every_misses_no_multiple_that_several_steps_at_once_pass(tmp_path):
    with CheckpointManager(tmp_path, save_every=3, save_on_exit=False) as ckpt:
        ckpt.sampler, _ = loader_of(100, 1)
        for n in (4, 1, 1, 7, 0, 2):
            ckpt.step_up(n)
    assert [step for step, *_ in commits(tmp_path)] == [4, 6, 13, 15]


def test_save_every_works_with_batches(tmp_path):
    with CheckpointManager(tmp_path, save_every=2, save_on_exit=False) as ckpt:
        sampler, loader = loader_of(12, 2)
        ckpt.sampler = sampler
        for _ in ckpt.batches(loader, accumulate=2):
            pass
    assert commits(tmp_path) == [(2, 0, 4, False)]


def test_save_every_a_time_is_due_once_it_has_passed(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    for text, seconds in (("10m", 600), ("30s", 30), ("1.5h", 5400), ("2 m", 120), ("1d", 86400)):
        interval = Interval(text)
        due = []
        for now in (1000.0, 1000.0 + seconds - 1, 1000.0 + seconds, 1000.0 + seconds + 1, 1000.0 + 2 * seconds):  # noqa: B007 - read by the clock
            due.append(interval.is_due(1, 1))
        assert due == [False, False, True, False, True], text
        now = 1000.0
    for text in ("10", "m", "-1s", "1w", 1.5):
        with pytest.raises(syckpt.StateError, match="expected a number of steps"):
            Interval(text)
