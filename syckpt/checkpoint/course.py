"""The course of training: epochs, batches and steps as the script makes them, and when `save_every` asks for a save.

`begin()` and `save()` are the manager's; they are given with each call, since nothing here may keep a manager alive.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from syckpt.checkpoint.items import Items
from syckpt.checkpoint.progress import Interval, Progress
from syckpt.checkpoint.resumption import Resumption
from syckpt.checkpoint.saver import Saver
from syckpt.dataloader import StatefulSampler
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import StateError

__all__ = ["Course"]

_log = logging.getLogger("syckpt")


class Course:
    """Counts what the script does in `progress`, and restores the random streams where they have to be."""

    def __init__(
        self, coordinator: Coordinator, items: Items, progress: Progress, resumption: Resumption, saver: Saver, *, interval: Interval
    ) -> None:
        self._coordinator = coordinator
        self._items = items
        self._progress = progress
        self._resumption = resumption
        self._saver = saver
        self._interval = interval
        self._since_look, self._next_look = 0, 1
        self._followed: tuple[StatefulSampler | None, Callable[[], None] | None] = (None, None)

    def loop(self, epochs: int | None, *, begin: Callable[[], None], save: Callable[[], object]) -> Iterator[int]:
        """Yield the epochs still to do. See `CheckpointManager.loop`."""
        if epochs is not None and (type(epochs) is not int or epochs < 0):
            raise StateError(f"loop({epochs!r}): expected a number of epochs, or None for no end")
        while True:
            begin()  # Again each time: the body may have gone to another branch.
            epoch = self._progress.next_epoch
            if epochs is not None and epoch >= self._progress.first_epoch + epochs:
                return
            self._progress.enter(epoch, self._items.sampler)
            self._resumption.begin_epoch()
            moves = self._progress.moves
            yield epoch
            if moves == self._progress.moves:
                self._progress.leave()
                if self._progress.unseen:  # The body left an iteration of `batches` behind a step.
                    self._after_step(save)

    def step_up(self, n: int, batches: int | None, *, save: Callable[[], object]) -> None:
        """Count steps and batches. See `CheckpointManager.step_up`."""
        self._progress.count_by("step_up")
        if self._resumption.streams_pending:
            raise StateError(
                "a step was made before the random streams of the resumed commit were restored: iterate with ckpt.loop() or"
                " ckpt.batches(), or call ckpt.restore() before the first draw"
            )
        self._progress.advance(n, n if batches is None else batches, self._items.sampler)
        self._after_step(save)

    def batches(self, loader: Any, accumulate: int, *, begin: Callable[[], None], save: Callable[[], object]) -> Iterator[Any]:
        """Iterate a loader. See `CheckpointManager.batches`."""
        begin()
        self._progress.count_by("batches")
        if type(accumulate) is not int or accumulate < 1:
            raise StateError(f"accumulate={accumulate!r}: expected a number of batches, at least 1")
        # An epoch that is entered again makes its steps where they would have been.
        done = self._progress.batch_idx if self._progress.at_resume else 0
        iterator = self._resumption.iterate(loader)
        self._progress.entered = True
        moves = self._progress.moves
        for number, batch in enumerate(iterator, start=done + 1):
            at_boundary = number % accumulate == 0
            self._progress.advance(1 if at_boundary else 0, 1, self._items.sampler)
            yield batch
            if moves != self._progress.moves:
                return
            if at_boundary:
                self._after_step(save)
        self._progress.entered = False

    def _after_step(self, save: Callable[[], object]) -> None:
        self._saver.pump()
        if self._is_due(self._progress.take_unseen()):
            save()

    def _is_due(self, steps: int) -> bool:
        """Whether `save_every` asks for a save now; by time, rank 0's clock says so for all, at steps that it has announced."""
        interval, coordinator = self._interval, self._coordinator
        if coordinator.world_size == 1 or not interval.by_clock:
            return interval.is_due(self._progress.step, steps)
        self._since_look += steps
        if self._since_look < self._next_look:
            return False
        mine: dict[str, Any] = {}
        if coordinator.rank == 0:
            mine = {"due": interval.is_due(self._progress.step, steps), "wait": interval.steps_to_wait(self._since_look)}
        told = coordinator.broadcast("save_every", mine, at=f"step {self._progress.step}")
        self._since_look, self._next_look = 0, told["wait"]
        return bool(told["due"])

    def follow_sampler(self, name: str | None = None) -> None:
        """Hear of the iterations of the sampler that steps advance, and of no other one's; `name` was just registered."""
        sampler, (before, hook) = self._items.sampler, self._followed
        if sampler is not before:
            if before is not None and before.on_first_index is hook:
                before.on_first_index = None
            # A weak reference: the sampler may outlive the manager, and must not keep what belongs to it.
            hook = _weakly(self._resumption.first_index)
            if sampler is not None:
                sampler.on_first_index = hook
            self._followed = sampler, hook
        if name is not None and isinstance(self._items[name], StatefulSampler) and self._items[name] is not sampler:
            first = next(other for other in self._items.names() if self._items[other] is sampler)
            _log.warning(
                "steps advance the sampler %r, which was registered first; %r is saved as it stands. Register the training one first",
                first,
                name,
            )


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    reference = weakref.WeakMethod(method)

    def call() -> None:
        live = reference()
        if live is not None:
            live()

    return call
