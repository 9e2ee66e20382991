"""A random sampler that resumes at what was consumed.

Contract: the order of an epoch depends on (length of the dataset, seed, epoch) alone, and the saved position is the number of samples of
it that were *consumed* (`advance`, which the manager calls for every step), not the number that was yielded: a DataLoader's workers and
prefetching run ahead of training by any number of batches, and those are drawn again after a resume. A seek costs the same at any
position and length.

An iteration yields the rest of the epoch from the consumed position. Once an epoch is exhausted, the next iteration yields the following
epoch, but the state moves there only when the first batch of it is consumed; until then a save says "this epoch is done". So begin a new
iteration only after the last batch's step. Moving the position (`set_epoch`, `load_state_dict`) makes iterators that are under way
useless: their next draw raises.

The position counts samples of one order that all ranks would share; one process takes all of it. What differs with several ranks is how
many samples a step consumes (`_stride`) and which positions of the order a process draws (`_positions`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, SupportsIndex

import numpy as np
import torch.distributed
from torch.utils.data import Sampler

from syckpt.dataloader.loader import LoaderFacts, observe
from syckpt.dataloader.permutation import Permutation
from syckpt.dataloader.seeded import announce_epoch
from syckpt.errors import FormatError, StateError

__all__ = ["StatefulRandomSampler"]

_log = logging.getLogger(__name__)
_VERSION = 1
# Chunks grow, so that a resume evaluates few positions before its first batch and a long run pays little for each.
_FIRST_CHUNK = 256
_MAX_CHUNK = 8192


class StatefulRandomSampler(Sampler[int]):  # type: ignore[misc]
    """Indices of `data_source` in a new order every epoch, resumable at any batch: `DataLoader(ds, batch_size=B, sampler=s)`.

    `batch_size` must be the loader's (checked when it asks for the first index). With `drop_last` an epoch has whole batches only.
    The length of `data_source` is taken once, here.
    """

    on_first_index: Callable[[], None] | None
    """Called right before each iteration's first index is yielded: the DataLoader's iterator exists by then and has drawn its base seed."""
    loader: LoaderFacts | None
    """What was found out about the loader that iterated last; None if none did."""

    def __init__(self, data_source: Sized, batch_size: int, *, seed: int = 42, shuffle: bool = True, drop_last: bool = False) -> None:
        super().__init__()
        self._require_sole_process()
        try:
            self._length = len(data_source)
        except TypeError:
            raise StateError(f"the sampler's data_source needs a length; {type(data_source).__name__} has none") from None
        self.data_source = data_source
        self.batch_size = _checked_int(batch_size, "batch_size", low=1, high=2**63 - 1)
        self.seed = _checked_int(seed, "seed", low=-(2**63), high=2**63 - 1)
        self.shuffle = _checked_bool(shuffle, "shuffle")
        self.drop_last = _checked_bool(drop_last, "drop_last")
        self.on_first_index = None
        self.loader = None
        self._loader_drops_last = False
        self._epoch = 0
        self._consumed = 0
        self._next_epoch_began = False
        self._moves = 0

    @property
    def epoch(self) -> int:
        """The epoch that the position is in."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that were consumed."""
        return self._consumed

    @property
    def batch_idx(self) -> int:
        """Batches of this epoch that were consumed; a partial one, as after a change of batch size, counts."""
        return -(-self._consumed // self._stride)

    @property
    def exhausted(self) -> bool:
        """Whether this epoch holds no further batch; a loader that drops the last one counts once it was seen, here or before the save."""
        return self._consumed >= self._end(drop_last=self.drop_last or self._loader_drops_last)

    def __len__(self) -> int:
        """Return the number of samples of a whole epoch, wherever the position is."""
        return self._length - (self._length % self._stride if self.drop_last else 0)

    def advance(self, batches: int) -> None:
        """Count batches as consumed, at most to the end of the epoch; the first one of a newly begun epoch moves there."""
        batches = _checked_int(batches, "batches", low=0, high=2**63 - 1)
        if batches == 0:
            return
        if self._next_epoch_began:
            self._epoch, self._consumed, self._next_epoch_began = self._epoch + 1, 0, False
        end = self._end(drop_last=self.drop_last or self._loader_drops_last)
        self._consumed = min(self._consumed + batches * self._stride, end)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; stay where the position is if it is inside of that one already, as after a resume.

        An epoch that is exhausted starts anew: naming it asks for it. A hand-written loop after a resume therefore starts at
        `sampler.epoch + sampler.exhausted`; `CheckpointManager.loop` does.
        """
        epoch = _checked_int(epoch, "epoch", low=0, high=2**63 - 1)
        if self._next_epoch_began and epoch == self._epoch + 1:
            self._epoch, self._consumed, self._next_epoch_began = epoch, 0, False
        elif epoch != self._epoch or self.exhausted:
            if epoch == self._epoch and self._consumed:
                _log.info("epoch %d was finished; set_epoch(%d) starts it again", epoch, epoch)
            self._move(epoch=epoch, consumed=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it refers to: integers and booleans only."""
        return {
            "version": _VERSION,
            "seed": self.seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
            "length": self._length,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "loader_drop_last": self._loader_drops_last,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position. The order is the saved one (the state's seed and `shuffle` win, with a log line), not the batch size.

        Raises: StateError when the dataset has another length or the state is not a sampler's, FormatError when a newer syckpt wrote it.
        Nothing is changed then.
        """
        version = state_dict.get("version", _VERSION)
        if version != _VERSION:
            raise FormatError(f"sampler state of version {version!r}; this syckpt reads version {_VERSION}: upgrade it")
        missing = sorted(self.state_dict().keys() - state_dict.keys())
        if missing:
            raise StateError(f"not a sampler's state: {', '.join(missing)} missing; found {sorted(state_dict)}")
        length = state_dict["length"]
        if length != self._length:
            raise StateError(
                f"the sampler's position is in a dataset of {length} samples, found one of {self._length}: its order and position mean "
                f"nothing here; resume with the same data, or leave the sampler out of the restored items and start a new epoch"
            )
        seed = _checked_int(state_dict["seed"], "seed", low=-(2**63), high=2**63 - 1)
        shuffle = _checked_bool(state_dict["shuffle"], "shuffle")
        epoch = _checked_int(state_dict["epoch"], "epoch", low=0, high=2**63 - 1)
        consumed = _checked_int(state_dict["consumed"], "consumed", low=0, high=self._length)
        loader_drops_last = _checked_bool(state_dict["loader_drop_last"], "loader_drop_last")
        if (seed, shuffle) != (self.seed, self.shuffle):
            _log.warning(
                "the saved order is kept: seed=%d, shuffle=%s (this sampler was made with seed=%d, shuffle=%s)",
                seed,
                shuffle,
                self.seed,
                self.shuffle,
            )
        self.seed, self.shuffle, self._loader_drops_last = seed, shuffle, loader_drops_last
        self._move(epoch=epoch, consumed=consumed)

    def __iter__(self) -> Iterator[int]:
        """Yield the rest of the epoch, or the next one if this is exhausted. Nothing happens before the first index is asked for."""
        self._require_sole_process()
        self._observe_loader()
        began_next = self.exhausted
        epoch, start = (self._epoch + 1, 0) if began_next else (self._epoch, self._consumed)
        end = self._end(drop_last=self.drop_last, start=start)
        if start >= end:
            return
        self._next_epoch_began = began_next
        moves = self._moves
        for dataset in (self.data_source, self.loader.dataset if self.loader else None):
            announce_epoch(dataset, seed=self.seed, epoch=epoch)
        order = Permutation(self._length, seed=self.seed, epoch=epoch) if self.shuffle else None
        if self.on_first_index is not None:
            self.on_first_index()
        for positions in self._positions(start, end):
            indices = positions if order is None else order.at(positions)
            for index in indices.tolist():
                if moves != self._moves:
                    raise StateError("the sampler's position was moved during this iteration; start a new one: iterate the loader again")
                yield index

    @property
    def _stride(self) -> int:
        """Samples of the shared order that one batch of every rank consumes."""
        return self.batch_size

    def _positions(self, start: int, end: int) -> Iterator[Any]:
        """Yield this process's positions of the shared order between two of them, in chunks (int64 arrays)."""
        size = _FIRST_CHUNK
        while start < end:
            stop = min(start + size, end)
            yield np.arange(start, stop, dtype=np.int64)
            start, size = stop, min(2 * size, _MAX_CHUNK)

    def _end(self, *, drop_last: bool, start: int | None = None) -> int:
        """Return where the epoch ends for whoever is at `start`, by default the consumed position."""
        if not drop_last:
            return self._length
        # Whole batches from here, not from 0: after a change of batch size the position need not be a multiple of it.
        rest = self._length - (self._consumed if start is None else start)
        return self._length - rest % self._stride

    def _move(self, *, epoch: int, consumed: int) -> None:
        self._epoch, self._consumed, self._next_epoch_began = epoch, consumed, False
        self._moves += 1

    def _observe_loader(self) -> None:
        facts = observe(self)
        if facts is None:
            return
        if facts.batch_size not in (None, self.batch_size):
            raise StateError(
                f"the DataLoader has batch_size={facts.batch_size}, its sampler batch_size={self.batch_size}: positions would be wrong; "
                f"make the sampler with batch_size={facts.batch_size}"
            )
        if not facts.in_order and facts.num_workers > 1:
            raise StateError(
                "the DataLoader has in_order=False: batches come in any order, so a count of them is no position; use in_order=True"
            )
        self.loader, self._loader_drops_last = facts, facts.drop_last

    def _require_sole_process(self) -> None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise StateError(
                f"StatefulRandomSampler in a process group of {distributed.get_world_size()} ranks: each would draw the same samples; "
                f"use StatefulDistributedSampler"
            )


def _checked_int(value: SupportsIndex, name: str, *, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise StateError(f"{name}: expected an integer, found {value!r}") from None
    if isinstance(value, bool) or not low <= number <= high:
        raise StateError(f"{name}: expected an integer of {low} to {high}, found {value!r}")
    return number


def _checked_bool(value: bool, name: str) -> bool:
    if not isinstance(value, bool):
        raise StateError(f"{name}: expected True or False, found {value!r}")
    return value
