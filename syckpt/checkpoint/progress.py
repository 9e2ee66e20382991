"""Counters of a run: steps, epochs, batches, and where in an epoch a save stands."""

from __future__ import annotations

import time
from typing import Literal

from syckpt.dataloader import StatefulSampler
from syckpt.errors import StateError
from syckpt.objects.commit import Commit
from syckpt.objects.text import seconds_of

__all__ = ["Interval", "Progress"]


class Progress:
    """Where the run is. With a sampler, epoch and batch follow it."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.batch_idx = 0
        self.metric: float | None = None
        self.entered = False
        """Whether iterating the epoch has begun: its DataLoader iterator exists, and has drawn its seed."""
        self.at_resume = False
        """Whether nothing was iterated since the resume."""
        self.first_epoch = 0
        """Where `loop` counts its epochs from: the fork's, on a branch that was made by `create_branch`."""
        self.moves = 0
        """How many times the position was set to a commit's."""
        self.unseen = 0
        """Steps made since `save_every` was last looked at."""
        self._closed = False
        self._counter: str | None = None
        self._last_saved: tuple[int, int, int, bool] = (0, 0, 0, False)

    def resume(self, commit: Commit) -> None:
        """Go on behind a commit."""
        self.step, self.metric = commit.step, commit.metric
        self.epoch, self.batch_idx = (commit.epoch + 1, 0) if commit.epoch_done else (commit.epoch, commit.batch_idx)
        self.entered, self.at_resume, self._closed = commit.entered, True, False
        self.moves += 1
        self.unseen = 0
        self._last_saved = self._position(False)

    @property
    def next_epoch(self) -> int:
        """The epoch that `loop` yields next: the one under way unless it was finished."""
        return self.epoch + 1 if self._closed else self.epoch

    def enter(self, epoch: int, sampler: StatefulSampler | None) -> None:
        """`loop` begins an epoch, or enters the resumed one again."""
        if epoch != self.epoch or self._closed:
            self.epoch, self.batch_idx, self.entered, self.at_resume = epoch, 0, False, False
        self._closed = False
        if sampler is not None:
            sampler.set_epoch(epoch)
            self.batch_idx = sampler.batch_idx

    def leave(self) -> None:
        """The body of `loop` has ended: the epoch is done."""
        self._closed = True
        self.entered = False

    @property
    def counts_batches(self) -> bool:
        """Whether `batches` counts the steps."""
        return self._counter == "batches"

    def count_by(self, counter: Literal["step_up", "batches"]) -> None:
        """Raises: StateError when steps are counted both ways."""
        if self._counter not in (None, counter):
            raise StateError(f"steps are counted by {self._counter} already, and {counter} would count them twice: use one of the two")
        self._counter = counter

    def advance(self, steps: int, batches: int, sampler: StatefulSampler | None) -> None:
        """Steps were made, and batches consumed."""
        if type(steps) is not int or type(batches) is not int or steps < 0 or batches < 0:
            raise StateError(f"step_up({steps!r}, batches={batches!r}): expected natural numbers")
        self.step += steps
        self.unseen += steps
        self.at_resume = False
        if sampler is None:
            self.batch_idx += batches
            return
        sampler.advance(batches)
        self.epoch, self.batch_idx = sampler.epoch, sampler.batch_idx
        if batches and sampler.exhausted:
            self.entered = False

    def take_unseen(self) -> int:
        """Return the steps made since this was last asked."""
        unseen, self.unseen = self.unseen, 0
        return unseen

    def epoch_done(self, sampler: StatefulSampler | None, epoch_end: bool | None) -> bool:
        """Whether a save now counts the epoch as finished."""
        if epoch_end is not None:
            return epoch_end
        if self._closed:
            return True
        if sampler is not None:
            # After a resume behind an epoch, the sampler still stands at that one's end.
            return sampler.exhausted and sampler.epoch == self.epoch
        # A fresh state, saved before anything was done, has finished nothing.
        return self.step > 0 and not self.at_resume

    def saved(self, *, done: bool, metric: float | None) -> None:
        """A save was handed over."""
        self.metric = metric
        self._last_saved = self._position(done)

    def advanced(self, sampler: StatefulSampler | None) -> bool:
        """Whether there is anything that the last save does not have."""
        *counters, done = self._position(self.epoch_done(sampler, None))
        *saved, saved_done = self._last_saved
        return counters != saved or (done and not saved_done)

    def _position(self, done: bool) -> tuple[int, int, int, bool]:
        return self.step, self.epoch, self.batch_idx, done


class Interval:
    """When `save_every` is due: `1000` (steps) or `"10m"` (s, m, h, d)."""

    def __init__(self, every: int | str | None) -> None:
        self._steps: int | None = None
        self._seconds: float | None = None
        if isinstance(every, str):
            self._seconds = seconds_of(every)
        elif type(every) is int and every > 0:
            self._steps = every
        if every is not None and self._seconds is None and self._steps is None:
            raise StateError(f'save_every={every!r}: expected a number of steps, or a time like "10m", "30s", "1h"')
        if self._seconds == 0:
            raise StateError(f"save_every={every!r}: expected a time above zero")
        self._looked_at = time.monotonic()
        self._due_at = self._looked_at + (self._seconds or 0.0)

    @property
    def by_clock(self) -> bool:
        """Whether it is a time, which every rank's clock would call at another step."""
        return self._seconds is not None

    def steps_to_wait(self, steps: int) -> int:
        """Return after how many further steps to look again, `steps` after the last time: at half of the time that is left.

        So a few looks in each interval find the step at which a save is due, whatever steps take.
        """
        now = time.monotonic()
        took, self._looked_at = now - self._looked_at, now
        return max(1, int(max(0.0, self._due_at - now) * steps / (2 * took))) if took > 0 else 1

    def is_due(self, step: int, steps: int) -> bool:
        """Whether a save is due, now that `steps` steps have led to `step`; by the clock, says so once."""
        if self._steps is not None:
            return step // self._steps > (step - steps) // self._steps
        if self._seconds is not None and time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + self._seconds
            return True
        return False
