"""What a script's callbacks see, and what becomes of saves when they raise: no other save is lost by it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from syckpt import CheckpointManager, StateError


class Faulty:
    """Hears of saves; raises at the given calls."""

    def __init__(self, *raises_at: int) -> None:
        self.raises_at = raises_at
        self.heard: list[Any] = []

    def __call__(self, what: Any) -> None:
        self.heard.append(what)
        if len(self.heard) in self.raises_at:
            raise RuntimeError(f"call {len(self.heard)}")


def manager(root: Path, *, on_error: Any = "raise", **callbacks: Any) -> CheckpointManager:
    return CheckpointManager(root, CheckpointManager.Config(**callbacks), on_error=on_error, save_on_exit=False)


def ids(root: Path) -> list[str]:
    with CheckpointManager(root, save_on_exit=False) as ckpt:
        return [commit.id for commit in reversed(ckpt.log())]


@pytest.mark.parametrize("name", ["pre_finalize_callback", "finalize_callback", "on_stats"])
def test_what_cannot_be_called_is_refused_at_once(name: str) -> None:
    with pytest.raises(StateError, match=f"{name}=3: expected a function"):
        CheckpointManager.Config(**{name: 3})


def test_a_save_whose_callback_raises_before_it_is_given_up_and_the_next_one_is_made(tmp_path: Path) -> None:
    before = Faulty(1)
    with manager(tmp_path, pre_finalize_callback=before) as ckpt:
        ckpt.w = torch.ones(3)
        with pytest.raises(RuntimeError, match="call 1"):
            ckpt.save("first")
        assert ckpt.hash is None
        made = ckpt.save("first", wait=True)
    assert (ids(tmp_path), before.heard[1]) == ([made.id], made.id)


@pytest.mark.parametrize("name", ["finalize_callback", "on_stats"])
def test_what_is_raised_after_a_save_is_raised_once_and_costs_no_other_save(name: str, tmp_path: Path) -> None:
    callback = Faulty(1)
    with manager(tmp_path, **{name: callback}) as ckpt:
        ckpt.w = torch.ones(3)
        first = ckpt.save()
        second = ckpt.save()
        assert (first.result().id, second.result().id) == (first.id, second.id)
        with pytest.raises(RuntimeError, match="call 1"):
            ckpt.wait()
        ckpt.wait()
        third = ckpt.save(wait=True)
    assert ids(tmp_path) == [first.id, second.id, third.id]
    assert len(callback.heard) == 3


def test_a_save_that_is_waited_for_raises_what_its_callback_raised_and_is_durable(tmp_path: Path) -> None:
    with manager(tmp_path, finalize_callback=Faulty(1)) as ckpt:
        ckpt.w = torch.ones(3)
        with pytest.raises(RuntimeError, match="call 1"):
            ckpt.save(wait=True)
        ckpt.save(wait=True)
    assert len(ids(tmp_path)) == 2


def test_closing_ends_all_saves_in_hand_and_gives_the_branch_back_whatever_callbacks_raise(tmp_path: Path) -> None:
    callback = Faulty(1, 2)
    ckpt = manager(tmp_path, finalize_callback=callback)
    ckpt.w = torch.ones(3)
    made = [ckpt.save().id, ckpt.save().id]
    with pytest.raises(RuntimeError, match="call 1"):
        ckpt.close()
    ckpt.close()
    assert [commit.id for commit in callback.heard] == made == ids(tmp_path)
    with manager(tmp_path) as other:
        other.w = torch.zeros(3)
        other.save(wait=True)


def test_what_the_script_leaves_by_is_not_replaced(tmp_path: Path) -> None:
    def script() -> None:
        with manager(tmp_path, finalize_callback=Faulty(1)) as ckpt:
            ckpt.w = torch.ones(3)
            ckpt.save()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        script()
    assert len(ids(tmp_path)) == 1


def test_the_last_save_of_a_run_is_made_although_a_callback_raised(tmp_path: Path) -> None:
    def script() -> None:
        with CheckpointManager(tmp_path, CheckpointManager.Config(finalize_callback=Faulty(1))) as ckpt:
            ckpt.w = torch.ones(3)
            ckpt.save().result()
            ckpt.step_up()

    with pytest.raises(RuntimeError, match="call 1"):
        script()
    assert len(ids(tmp_path)) == 2


def test_with_warnings_only_it_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "syckpt"), manager(tmp_path, on_error="warn", finalize_callback=Faulty(1)) as ckpt:
        ckpt.w = torch.ones(3)
        made = ckpt.save(wait=True)
        ckpt.wait()
    assert [record.message for record in caplog.records] == [f"finalize_callback raised for {made.id}, which is durable"]


def test_memory_and_writer_can_be_made_ready_at_any_time(tmp_path: Path) -> None:
    with manager(tmp_path) as ckpt:
        ckpt.prewarm()
        ckpt.prewarm({"other": {"w": torch.ones(1000), "n": 1}})
        with pytest.raises(StateError, match=r"^x: a value of type function"):
            ckpt.prewarm({"x": lambda: 1})
        ckpt.w = torch.ones(3)
        ckpt.prewarm()
        ckpt.prewarm()
        made = ckpt.save(wait=True)
    assert ids(tmp_path) == [made.id]
