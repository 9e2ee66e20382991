"""The small print of one process: what a script may do to a manager between its calls, and what it is told."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import syckpt
from syckpt import CheckpointManager, StatefulRandomSampler
from syckpt.checkpoint import progress
from syckpt.repo.repository import Repository
from syckpt.stores.base import StoreSpec, parse_root
from syckpt.stores.faults import FaultPlan, faulty

# From Python 3.12 on, forking loader workers in a process with threads (pytest-xdist has some) warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def loader_of(samples: int, batch_size: int, **options: Any) -> tuple[StatefulRandomSampler, DataLoader]:
    data = torch.arange(samples)
    sampler = StatefulRandomSampler(data, batch_size=batch_size)
    return sampler, DataLoader(data, batch_size=batch_size, sampler=sampler, **options)


def history(root: Path, branch: str = "main") -> list[tuple[int, str]]:
    """Return (step, message) of all commits, oldest first."""
    return [(c.step, c.message) for c in reversed(CheckpointManager(root, branch=branch).log())]


# -- loop and batches ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", ["3", -1, 2.0, True])
def test_loop_takes_a_natural_number(tmp_path: Path, epochs: Any) -> None:
    ckpt = CheckpointManager(tmp_path)
    with pytest.raises(syckpt.StateError, match="expected a number of epochs"):
        next(ckpt.loop(epochs))
    assert list(ckpt.loop(0)) == []
    ckpt.close()


def test_two_loops_one_after_the_other_and_a_return_out_of_the_first(tmp_path: Path) -> None:
    def warm_up(ckpt: CheckpointManager) -> int:
        for epoch in ckpt.loop(5):
            ckpt.step_up()
            if epoch == 1:
                return epoch
        raise AssertionError

    with CheckpointManager(tmp_path) as ckpt:
        assert warm_up(ckpt) == 1
        # The body was left in its middle: the epoch is entered again.
        assert [(epoch, ckpt.step_up()) for epoch in ckpt.loop(3)] == [(1, None), (2, None)]
        assert list(ckpt.loop(3)) == []
    assert [(c.step, c.epoch) for c in CheckpointManager(tmp_path).log()] == [(4, 2)]


def test_continue_and_an_exception_that_is_caught_inside_leave_the_count_right(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        seen = []
        for epoch in ckpt.loop(4):
            seen.append(epoch)
            ckpt.step_up()
            if epoch == 0:
                continue
            with contextlib.suppress(ZeroDivisionError):
                ckpt.step_up(1 // 0)

        def break_off() -> None:
            for epoch in ckpt.loop(6):
                seen.append(epoch)
                ckpt.step_up(1 // 0)

        with pytest.raises(ZeroDivisionError):
            break_off()
        assert seen == [0, 1, 2, 3, 4]
        assert list(itertools.islice(ckpt.loop(6), 2)) == [4, 5]


@pytest.mark.parametrize("move", ["goto", "checkout_branch", "create_branch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_of_batches_ends_where_the_body_goes_to_another_commit(tmp_path: Path, move: str, workers: int) -> None:
    sampler, loader = loader_of(24, 4, num_workers=workers)
    whole: dict[tuple[int, int], list[int]] = {}
    seen: list[tuple[int, int]] = []
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.sampler = sampler
        moved = False
        for epoch in ckpt.loop(2):
            for batch in ckpt.batches(loader):
                place = (epoch, ckpt.batch_idx)
                assert whole.setdefault(place, batch.tolist()) == batch.tolist()
                seen.append(place)
                if place == (0, 2):
                    ckpt.save(tags=() if moved else ("early",))
                if place == (1, 3) and not moved:
                    moved = True
                    if move == "goto":
                        ckpt.goto("early")
                    elif move == "create_branch":
                        ckpt.create_branch("other", at="early")
                    else:
                        ckpt.checkout_branch("main")
                        assert (ckpt.epoch, ckpt.batch_idx) == (1, 3)
    back = {
        "goto": [(0, n) for n in range(3, 7)] + [(1, n) for n in range(1, 7)],
        "checkout_branch": [(1, 4), (1, 5), (1, 6)],
        # Its loop counts two epochs from the fork.
        "create_branch": [(0, n) for n in range(3, 7)] + [(1, n) for n in range(1, 7)],
    }[move]
    assert seen == [(0, n) for n in range(1, 7)] + [(1, 1), (1, 2), (1, 3)] + back


def test_save_every_misses_no_multiple_where_the_iteration_is_left_behind_a_step(tmp_path: Path) -> None:
    _, loader = loader_of(20, 2)
    with CheckpointManager(tmp_path, save_every=3, save_on_exit=False) as ckpt:
        for _ in ckpt.loop(2):
            for _ in itertools.islice(ckpt.batches(loader), 3):
                pass
        for _ in zip(range(4), ckpt.batches(loader), strict=False):
            break
        next(iter(ckpt.batches(loader)))
    assert [(c.step, c.epoch, c.epoch_done) for c in reversed(CheckpointManager(tmp_path).log())] == [(3, 0, True), (6, 1, True)]


@pytest.mark.parametrize("by_batches", [False, True])
def test_save_every_by_the_clock_saves_at_steps_only_also_with_accumulation(
    tmp_path: Path, by_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    sampler, loader = loader_of(16, 2)
    with CheckpointManager(tmp_path, save_every="10m", save_on_exit=False) as ckpt:
        ckpt.sampler = sampler
        batches = ckpt.batches(loader, accumulate=2) if by_batches else loader
        for number, _ in enumerate(batches, start=1):
            now += 200  # due in the third batch, in the middle of the second step
            if not by_batches and number % 2 == 0:
                ckpt.step_up(batches=2)
    assert [(c.step, c.batch_idx) for c in reversed(CheckpointManager(tmp_path).log())] == [(2, 4), (4, 8)]


# -- registering ---------------------------------------------------------------------------------------------------------------------


def test_an_item_registered_again_is_restored_before_the_first_step_and_not_after_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x, ckpt.y = 1, 1
        ckpt.step_up()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = ckpt.y = 0
        del ckpt.x
        ckpt.x = 5
        assert ckpt.x == 1
        ckpt.restore()
        ckpt.step_up()
        del ckpt.x
        ckpt.x = 6  # what training made of it, not what the resumed commit had
        assert (ckpt.x, ckpt.y) == (6, 1)
        ckpt.z = 7
    assert syckpt.load(tmp_path) == {"x": 6, "y": 1, "z": 7}


def test_a_sampler_that_takes_anothers_place_is_the_one_that_counts(tmp_path: Path) -> None:
    """In mid-epoch the random streams come back when the sampler is iterated: so the manager has to hear of that one."""

    def draws(ckpt: CheckpointManager, loader: DataLoader, *, stop: int) -> list[float]:
        drawn = []
        for _ in ckpt.loop(1):
            for _ in loader:
                drawn.append(torch.rand(()).item())
                ckpt.step_up()
                if ckpt.step == stop:
                    ckpt.save()
        return drawn

    for seed in (1, 2):
        torch.manual_seed(seed)
        old, _ = loader_of(8, 2)
        sampler, loader = loader_of(8, 2)
        with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
            ckpt.sampler = old
            ckpt.sampler = sampler
            assert old.on_first_index is None
            if ckpt.resumed is not None:
                sampler.load_state_dict(ckpt.load()["sampler"])  # assigned again: only the first one was restored
            found = draws(ckpt, loader, stop=2)
            ckpt.unregister("sampler")
            assert sampler.on_first_index is None
        if seed == 1:
            whole = found
    assert found == whole[2:]


def test_a_second_sampler_is_kept_and_the_log_says_which_one_the_steps_advance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, loader = loader_of(8, 2)
    validation, other = loader_of(4, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.train = train
        ckpt.validation = validation
        assert "steps advance the sampler 'train', which was registered first; 'validation' is saved as it stands" in caplog.text
        for _ in ckpt.loop(1):
            for _ in loader:
                ckpt.step_up()
                assert [len(batch) for batch in other] == [2, 2]
        ckpt.save(wait=True)
        del ckpt.train
        assert validation.on_first_index is not None
    assert [syckpt.load(tmp_path)[name]["consumed"] for name in ("train", "validation")] == [8, 0]


def test_a_manager_is_not_copied_or_pickled_and_has_no_attributes_that_it_lacks(tmp_path: Path) -> None:
    ckpt = CheckpointManager(tmp_path)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(syckpt.StateError, match="cannot be copied or pickled"):
            call(ckpt)
    assert not hasattr(ckpt, "_nothing")
    assert not hasattr(CheckpointManager.__new__(CheckpointManager, tmp_path), "_items")
    assert not hasattr(ckpt, "nothing")
    ckpt.close()


def test_configurations_change_between_saves_and_are_frozen_by_them(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.config = {"lr": 0.1, "model": {"layers": 2}}
        ckpt.config["lr"] = 0.2
        ckpt.save()
        with pytest.raises(syckpt.StateError, match="frozen"):
            ckpt.config["lr"] = 0.3
        changed = ckpt.config.copy()
        changed["model.layers"] = 3
        ckpt.config = changed
        ckpt.save()
        for bad in ([1], "lr", 3):
            with pytest.raises(syckpt.StateError):
                ckpt.config = bad
        assert [c.config for c in ckpt.log()] == [{"lr": 0.2, "model": {"layers": 3}}, {"lr": 0.2, "model": {"layers": 2}}]
        difference = ckpt.diff("HEAD~1", "HEAD")
        assert difference.config.changed == {"model.layers": (2, 3)}
        ckpt.create_branch("near")
        ckpt.config = {"lr": 0.21, "model": {"layers": 3}}
        ckpt.save()
        found = ckpt.similar(k=2)
        assert [one.commit.config["lr"] for one in found] == [0.21, 0.2]
        assert [one.commit.branch for one in ckpt.similar({"lr": 0.2, "model": {"layers": 2}}, k=1)] == ["main"]


# -- saves ---------------------------------------------------------------------------------------------------------------------------


def test_metrics_are_numbers_of_any_kind(tmp_path: Path) -> None:
    given = [
        torch.tensor(1.5),
        torch.tensor([2.5], requires_grad=True),
        torch.tensor(1, dtype=torch.bfloat16),
        7,
        float("inf"),
        float("-inf"),
    ]
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.save(metric=float("nan"), wait=True)
        assert repr(ckpt.log()[0].metric) == "nan"
        for metric in given:
            ckpt.save(metric=metric)
            ckpt.save()
            assert ckpt.metric == float(getattr(metric, "data", metric))
        for bad in (torch.ones(2), torch.ones(1, device="meta"), torch.tensor(True), "1", 1j, 10**400):
            with pytest.raises(syckpt.StateError, match="expected a number"):
                ckpt.save(metric=bad)
        metrics = [c.metric for c in ckpt.log()]
        assert metrics[1:-1:2] == [float(getattr(metric, "data", metric)) for metric in reversed(given)]
        assert metrics[:-1:2] == [None] * len(given)


def test_names_are_taken_from_any_iterable_or_path_and_never_hide_or_are_hidden(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        commit = ckpt.save(Path("step-1"), tags=(tag for tag in ("a", "b", "a")), wait=True).result()
        assert (commit.name, commit.tags) == ("step-1", ("a", "b"))
        ckpt.create_branch("other")
        ckpt.checkout_branch("main")
        for names in ({"checkpoint_id": "main"}, {"checkpoint_id": "other"}, {"tags": ["fine", "other"]}):
            with pytest.raises(syckpt.ConflictError, match="is a branch, which a revision of that name means"):
                ckpt.save(**names)
        for name, what in (("step-1", "commit"), ("a", "tag")):
            with pytest.raises(syckpt.ConflictError, match=f"'{name}' is a {what}, which a branch of that name would hide"):
                ckpt.create_branch(name)
        for bad in ({"checkpoint_id": 1}, {"checkpoint_id": object()}, {"tags": [1]}, {"tags": [["a"]]}, {"tags": None}, {"tags": 5}):
            with pytest.raises(syckpt.StateError):
                ckpt.save(**bad)
        assert ckpt.branch == "main"
        assert [c.id for c in ckpt.log()] == [commit.id]
        assert ckpt.list_branches() == ["main", "other"]


def test_a_save_or_its_commit_is_a_revision_and_other_objects_are_not(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        first = ckpt.save()
        ckpt.x = 2
        second = ckpt.save()
        assert (str(first), f"{first}", repr(first).split()[1]) == (first.id, first.id, first.id)
        assert ckpt.load(first) == {"x": 1}
        assert first.done()
        assert first.result(0) is first.result()
        ckpt.goto(second.result())
        ckpt.tag("t", first)
        ckpt.export_ckpt(first, tmp_path / "a" / "b" / "first.ckpt")
        assert torch.load(tmp_path / "a" / "b" / "first.ckpt", weights_only=True)["x"] == 1
        ckpt.create_branch("b", at=first)
        assert (ckpt.x, ckpt.verify(second).ok) == (1, True)
        assert (ckpt.diff(first, second).a, ckpt.diff(first, second).b) == (first.id, second.id)
        for bad in (None, 1, b"HEAD", ["HEAD"]):
            for call in (ckpt.load, ckpt.goto, ckpt.verify, lambda rev: ckpt.tag("u", rev), lambda rev: ckpt.create_branch("c", at=rev)):
                with pytest.raises(syckpt.StateError, match="is not a revision"):
                    call(bad)
        assert ckpt.list_branches() == ["b", "main"]


@pytest.mark.parametrize(
    "rev", ["HEAD", "main", "named", "tagged", "latest", "best", "main~1", "HEAD~2", "HEAD@{1}", "main@{2}", "id", "part"]
)
def test_every_kind_of_revision_works_everywhere_in_a_manager(three: tuple[CheckpointManager, list[str]], rev: str) -> None:
    ckpt, saved = three
    expected = {"main~1": 1, "HEAD~2": 0, "HEAD@{1}": 1, "main@{2}": 0, "named": 0, "tagged": 1, "best": 1, "id": 1, "part": 0}.get(rev, 2)
    text = {"id": saved[1], "part": saved[0].partition("-")[2][:12]}.get(rev, rev)
    ckpt.goto(text)
    assert ckpt.x == expected == ckpt.load(text)["x"]
    assert ckpt.diff(text, saved[expected]).config.changed == {}
    assert ckpt.verify(text)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CheckpointManager, list[str]]]:
    with CheckpointManager(tmp_path_factory.mktemp("three"), save_on_exit=False) as ckpt:
        saved = []
        for number, how in enumerate(({"checkpoint_id": "named"}, {"tags": ["tagged"], "metric": 0.5}, {"metric": 0.75})):
            ckpt.x = number
            saved.append(str(ckpt.save(**how)))
        yield ckpt, saved


# -- parents and failures ------------------------------------------------------------------------------------------------------------


class Disk:
    """A repository whose writers fail at the n-th file that they create (the first of a save is its intent) after `break_at(n)`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.arm = root.parent / f"{root.name}.arm"
        plan = FaultPlan(action="enospc", arm=str(self.arm), only="link", spare=os.getpid())
        self.spec: StoreSpec = faulty(root / ".syckpt", plan)

    def break_at(self, number: int) -> None:
        half = self.arm.with_suffix(".half")
        half.write_text(str(number))
        half.rename(self.arm)


def failed(pending: Any) -> bool:
    try:
        pending.result()
    except syckpt.StoreError:
        return True
    return False


def test_parents_are_right_when_one_save_of_several_fails_also_behind_a_goto_and_on_another_branch(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "run")
    with CheckpointManager(disk.spec, on_error="warn", save_on_exit=False) as ckpt:
        ckpt.x = 0

        def save(value: int) -> Any:
            ckpt.x = value
            ckpt.step_up()
            return ckpt.save()

        first = save(1)
        first.result()
        # Three in a row, of which the first fails: the next ones follow what is there.
        disk.break_at(2)
        lost, second, third = save(2), save(3), save(4)
        assert ckpt.hash == third.id
        assert [failed(one) for one in (lost, second, third)] == [True, False, False]
        assert second.result().parents == (first.id,)
        assert third.result().parents == (second.id,)
        assert ckpt.hash == third.id

        ckpt.goto(first)
        assert ckpt.hash == third.id  # the newest save, wherever the state stands
        disk.break_at(2)
        lost, fourth = save(5), save(6)
        assert [failed(one) for one in (lost, fourth)] == [True, False]
        assert fourth.result().parents == (first.id,)

        ckpt.create_branch("other")
        disk.break_at(1)
        lost = save(7)
        assert failed(lost)
        assert ckpt.hash == fourth.id
        assert save(8).result().parents == (fourth.id,)
        ckpt.checkout_branch("main")
        assert ckpt.x == 6
        assert save(9).result().parents == (fourth.id,)
    assert [c.step for c in CheckpointManager(tmp_path / "run").log()] == [4, 3, 1]
    assert not list((tmp_path / "run/.syckpt/intents").glob("*"))


def test_on_error_warn_lets_a_waiting_save_and_a_synchronous_manager_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(tmp_path / "run")
    with CheckpointManager(disk.spec, on_error="warn", async_save=False) as ckpt:
        ckpt.x = 1
        ckpt.step_up()
        disk.break_at(1)
        lost = ckpt.save()
        assert lost is not None
        assert lost.failed
        assert f"save {lost.id} failed" in caplog.text
        assert ckpt.hash is None
        with pytest.raises(syckpt.StoreError):
            lost.result()
        disk.break_at(1)
        with pytest.raises(syckpt.StoreError):
            ckpt.create_branch("b")  # there is nothing to begin it at
        assert (ckpt.branch, ckpt.list_branches()) == ("main", [])
        ckpt.create_branch("b")
        ckpt.x = 2
        ckpt.step_up()
        disk.break_at(1)
        with pytest.raises(syckpt.StoreError):
            ckpt.checkout_branch("main")  # would replace what no commit has
        assert (ckpt.branch, ckpt.x, ckpt.step) == ("b", 2, 2)
        ckpt.checkout_branch("main")
        assert (ckpt.branch, ckpt.x, ckpt.step) == ("main", 1, 1)
    assert history(tmp_path / "run", "b") == [(1, "start of main"), (2, "before main")]


def test_nothing_is_called_durable_before_another_reader_finds_it(tmp_path: Path) -> None:
    found = []
    config = CheckpointManager.Config(finalize_callback=lambda commit: found.append((commit.id, syckpt.load(tmp_path, commit.id)["x"])))
    with CheckpointManager(tmp_path, config, save_on_exit=False) as ckpt:
        ckpt.x = torch.zeros(200_000)
        pending = [ckpt.save()]
        while not pending[0].done():
            assert not found
        assert [commit for commit, _ in found] == [pending[0].id]
        assert syckpt.load(tmp_path, "HEAD")["x"].shape == (200_000,)
        pending.append(ckpt.save())
        with contextlib.suppress(TimeoutError):
            pending[1].result(timeout=0)
        pending[1].result(timeout=60)
        assert len(found) == 2


def test_a_restore_that_is_interrupted_is_half_done_and_never_saved(tmp_path: Path) -> None:
    class Slow:
        stop = False

        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.stop:
                raise KeyboardInterrupt

    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.a, ckpt.slow = torch.zeros(1), Slow()
        ckpt.save(wait=True)
        ckpt.a.fill_(1)
        ckpt.slow.stop = True
        with pytest.raises(KeyboardInterrupt):
            ckpt.goto("HEAD")
        with pytest.raises(syckpt.StateError, match=r"goto\('HEAD'\) failed, which left the registered items half restored"):
            ckpt.save()
        ckpt.slow.stop = False
        ckpt.goto("HEAD")
        ckpt.save(wait=True)


def test_a_branch_whose_state_does_not_fit_is_neither_gone_to_nor_made(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.w = torch.zeros(2)
        ckpt.step_up()
        ckpt.create_branch("small")
        ckpt.checkout_branch("main")
        ckpt.w = torch.ones(3)
        ckpt.step_up()
        for move in (
            lambda: ckpt.checkout_branch("small"),
            lambda: ckpt.create_branch("small"),
            lambda: ckpt.create_branch("new", at="small"),
        ):
            with pytest.raises(syckpt.StateError, match=r"w.*\[3\].*\[2\]|w.*\[2\].*\[3\]"):
                move()
        assert (ckpt.branch, ckpt.w.tolist(), ckpt.step, ckpt.list_branches()) == ("main", [1, 1, 1], 2, ["main", "small"])
    assert history(tmp_path) == [(1, "start of main"), (2, "exit")]
    assert history(tmp_path, "small") == [(1, "start of main")]


def test_progress_that_no_commit_has_is_saved_before_a_branch_takes_over(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 0

        def train(value: int) -> None:
            for _ in ckpt.loop(1):
                ckpt.x = value
                ckpt.step_up()

        train(1)
        ckpt.create_branch("b")
        train(2)
        ckpt.create_branch("c")
        train(3)
        ckpt.create_branch("b")  # there already
        assert (ckpt.x, ckpt.step, list(ckpt.loop(1))) == (2, 2, [])
    reader = CheckpointManager(tmp_path)
    assert {name: syckpt.load(tmp_path, name)["x"] for name in reader.list_branches()} == {"main": 1, "b": 2, "c": 3}
    assert [(c.step, c.branch, c.epoch_done) for c in CheckpointManager(tmp_path, branch="c").log()] == [
        (3, "c", True),
        (2, "b", True),
        (1, "main", True),
    ]


@pytest.mark.parametrize("how", [{"run_mode": "new_branch"}, {"auto_resume": False}])
def test_a_branch_made_of_a_state_that_began_afresh_counts_from_its_own_epoch(tmp_path: Path, how: dict[str, Any]) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 0
        for _ in ckpt.loop(3):
            ckpt.step_up()
    done = []
    for stop in (1, 9):
        with CheckpointManager(tmp_path, **how) as ckpt:
            ckpt.x = 0
            ckpt.create_branch("afresh")
            for epoch in ckpt.loop(2):
                done.append(epoch)
                ckpt.step_up()
                ckpt.save()
                if len(done) == stop:
                    break
    assert done == [0, 1]
    assert [(c.step, c.epoch) for c in CheckpointManager(tmp_path, branch="afresh").log()[:3]] == [(2, 1), (1, 0), (3, 2)]


def test_making_the_branch_that_is_written_commits_what_is_there_and_stays(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.create_branch("main")
        assert (ckpt.branch, ckpt.x, ckpt.step) == ("main", 1, 0)
        for epoch in ckpt.loop(2):
            ckpt.step_up()
            ckpt.x = 10 + epoch
        ckpt.create_branch("main")
        assert (ckpt.branch, ckpt.x, ckpt.step, list(ckpt.loop(2))) == ("main", 11, 2, [])
        ckpt.step_up()
    assert history(tmp_path) == [(0, "start of main"), (2, "before main"), (3, "exit")]


def test_threads_that_save_at_once_make_their_saves_one_after_the_other(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        start = threading.Barrier(3)

        def work() -> list[str]:
            start.wait()
            return [str(ckpt.save()) for _ in range(3)]

        with ThreadPoolExecutor(3) as pool:
            made = [commit for one in [pool.submit(work) for _ in range(3)] for commit in one.result()]
        log = ckpt.log()
    assert sorted(made) == sorted(c.id for c in log)
    assert [c.parents for c in log] == [*((c.id,) for c in log[1:]), ()]


# -- leaving -------------------------------------------------------------------------------------------------------------------------


def test_a_closed_manager_is_not_entered_again(tmp_path: Path) -> None:
    ckpt = CheckpointManager(tmp_path)
    ckpt.close()
    with pytest.raises(syckpt.StateError, match="closed"), ckpt:
        raise AssertionError
    for call in (lambda: ckpt.goto("HEAD"), lambda: ckpt.create_branch("b"), ckpt.restore, ckpt.prewarm, lambda: next(ckpt.loop(1))):
        with pytest.raises(syckpt.StateError, match="closed"):
            call()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_managers_inside_one_another_are_all_left_by_one_exception(tmp_path: Path, error: type[BaseException]) -> None:
    def run() -> None:
        with (
            CheckpointManager(tmp_path / "a") as outer,
            CheckpointManager(tmp_path / "b") as inner,
            CheckpointManager(tmp_path / "a", branch="x") as other,
        ):
            for ckpt in (outer, inner, other):
                ckpt.x = 1
                ckpt.step_up()
                ckpt.save(message="last")
                ckpt.step_up()
            raise error

    with pytest.raises(error):
        run()
    for root, branch in (("a", "main"), ("b", "main"), ("a", "x")):
        assert history(tmp_path / root, branch) == [(1, "last")]
    assert not list(tmp_path.glob("*/.syckpt/leases/*"))


def test_an_error_of_the_final_save_is_raised_and_hides_no_other_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(tmp_path / "run")

    def run(error: type[BaseException] | None) -> None:
        with CheckpointManager(disk.spec) as ckpt:
            ckpt.x = 0
            ckpt.restore()
            ckpt.step_up()
            disk.break_at(1)
            if error is not None:
                ckpt.save()
                raise error

    with pytest.raises(syckpt.StoreError):
        run(None)
    caplog.clear()
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError)
    assert "while leaving by ZeroDivisionError" in caplog.text
    assert CheckpointManager(disk.root).log() == []
    assert not list((tmp_path / "run/.syckpt/leases").glob("*"))


def test_a_relative_root_stays_what_it_was_when_the_script_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("./run") as ckpt:
        ckpt.x = 1
        ckpt.step_up()
        ckpt.save()
        monkeypatch.chdir("elsewhere")
        ckpt.step_up()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["elsewhere", "run"]
    assert history(tmp_path / "run") == [(1, ""), (2, "exit")]


def test_the_tree_and_the_branches_show_what_was_just_handed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        assert (ckpt.log(), ckpt.list_branches()) == ([], [])
        ckpt.print_tree()
        pending = ckpt.save(message="the only one")
        assert ckpt.list_branches() == ["main"]
        ckpt.print_tree()
        assert len(ckpt.log(5)) == 1
    shown = capsys.readouterr().out
    assert pending.id[:17] in shown
    assert "the only one" in shown


def test_an_unset_head_is_mains_however_the_first_branch_is_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As when the scripts of a sweep begin at once: this one finds `main` taken, and its state begins its own branch."""
    caplog.set_level(logging.INFO, logger="syckpt")
    holder, ckpt = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    holder.x = ckpt.x = 1
    holder.restore()
    (tmp_path / ".syckpt/HEAD").unlink()
    ckpt.create_branch("mine")
    assert "branch 'mine' begins with a commit of its own: branch 'main' is being written by another manager" in caplog.text
    assert Repository.open(parse_root(tmp_path)).head_branch() == "main"
    assert [(c.parents, c.branch) for c in ckpt.log()] == [((), "mine")]
    assert next(ckpt.loop(1)) == 0
    holder.save(wait=True)
    ckpt.checkout_branch("main")
    for manager in (ckpt, holder):
        manager.close()
    assert ckpt.list_branches() == ["main", "mine"]
