"""Random samplers that resume at what was consumed, on one rank or many.

Contract: the order of an epoch depends on (length of the dataset, seed, epoch) alone, and the saved position is the number of samples of
it that were *consumed* (`advance`, which the manager calls for every step), not the number that was yielded: a DataLoader's workers and
prefetching run ahead of training by any number of batches, and those are drawn again after a resume. A seek costs the same at any
position and length.

An iteration yields the rest of the epoch from the consumed position. Once an epoch is exhausted, the next iteration yields the following
epoch, but the state moves there only when the first batch of it is consumed; until then a save says "this epoch is done". So begin a new
iteration only after the last batch's step. Moving the position (`set_epoch`, `load_state_dict`) makes iterators that are under way
useless: their next draw raises.

Ranks: all share one order and one position, which counts samples of all of them. A *global batch* is the next batch_size * num_replicas
samples from the position; rank r takes the r-th run of batch_size samples of it. If fewer are left, they are split as evenly as possible,
the first ranks taking one more, so every rank has the same number of batches; only if fewer are left than there are ranks do the other
ranks repeat them, one sample each. `drop_last` drops such an incomplete global batch instead. The state names no number of ranks: any
number goes on from it, and either class loads the other's.

Global batches are counted from the position. So a tail that was dropped is taken up again after a resume with smaller global batches that
fit into it, unless `set_epoch` (as `CheckpointManager.loop` does) goes on to the next epoch.
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

__all__ = ["StatefulDistributedSampler", "StatefulRandomSampler", "StatefulSampler"]

_log = logging.getLogger(__name__)
_VERSION = 1
# Chunks grow, so that a resume evaluates few positions before its first batch and a long run pays little for each.
_FIRST_CHUNK = 256
_MAX_CHUNK = 8192
_MAX_INT64 = 2**63 - 1


class StatefulSampler(Sampler[int]):  # type: ignore[misc]
    """What both samplers are: rank `rank`'s part, of `num_replicas`, of one order."""

    on_first_index: Callable[[], None] | None
    """Called right before each iteration's first index is yielded: the DataLoader's iterator exists by then and has drawn its base seed."""
    loader: LoaderFacts | None
    """What was found out about the loader that iterated last; None if none did."""

    def __init__(
        self, data_source: Sized, batch_size: int, *, num_replicas: int, rank: int, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        super().__init__()
        try:
            self._length = len(data_source)
        except TypeError:
            raise StateError(f"the sampler's data_source needs a length; {type(data_source).__name__} has none") from None
        self.data_source = data_source
        self.num_replicas = _checked_int(num_replicas, "num_replicas", low=1, high=_MAX_INT64)
        self.rank = _checked_int(rank, "rank", low=0, high=self.num_replicas - 1)
        self.batch_size = _checked_int(batch_size, "batch_size", low=1, high=_MAX_INT64 // self.num_replicas)
        self.seed = _checked_int(seed, "seed", low=-(2**63), high=_MAX_INT64)
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
        """Samples of this epoch that were consumed, by all ranks together."""
        return self._consumed

    @property
    def batch_idx(self) -> int:
        """Batches of this epoch that were consumed; a partial one, as after a change of batch size, counts."""
        return -(-self._consumed // self._stride)

    @property
    def exhausted(self) -> bool:
        """Whether this epoch holds no further batch; a loader that drops the last one counts once it was seen, here or before the save."""
        return self._consumed >= self._end(self._consumed, loader_drops_last=self._loader_drops_last)

    def __len__(self) -> int:
        """Return the number of samples that this rank draws in a whole epoch, wherever the position is."""
        whole, rest = divmod(self._end(0), self._stride)
        return whole * self.batch_size + self._share(rest, self.rank)[1]

    def advance(self, batches: int) -> None:
        """Count batches, of every rank, as consumed, at most to the end of the epoch; the first one of a newly begun epoch moves there."""
        batches = _checked_int(batches, "batches", low=0, high=_MAX_INT64)
        if batches == 0:
            return
        if self._next_epoch_began:
            self._epoch, self._consumed, self._next_epoch_began = self._epoch + 1, 0, False
        end = self._end(self._consumed, loader_drops_last=self._loader_drops_last)
        self._consumed = min(self._consumed + batches * self._stride, end)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; stay where the position is if it is inside of that one already, as after a resume.

        An epoch that is exhausted starts anew: naming it asks for it. A hand-written loop after a resume therefore starts at
        `sampler.epoch + sampler.exhausted`; `CheckpointManager.loop` does.
        """
        epoch = _checked_int(epoch, "epoch", low=0, high=_MAX_INT64)
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
        """Go to a saved position. The order is the saved one (the state's seed and `shuffle` win, with a log line), not the batch
        size or the number of ranks.

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
        seed = _checked_int(state_dict["seed"], "seed", low=-(2**63), high=_MAX_INT64)
        shuffle = _checked_bool(state_dict["shuffle"], "shuffle")
        epoch = _checked_int(state_dict["epoch"], "epoch", low=0, high=_MAX_INT64)
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
        self._check_process_group()
        loader = self._observe_loader()
        began_next = self.exhausted
        epoch, start = (self._epoch + 1, 0) if began_next else (self._epoch, self._consumed)
        end = self._end(start)
        if start >= end:
            return
        if loader is not None and loader.drop_last:
            self._check_all_shares_are_dropped_or_none((end - start) % self._stride)
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

    def _check_process_group(self) -> None:
        """Raises: StateError when this process group is not the one that the sampler is for."""
        raise NotImplementedError

    @property
    def _stride(self) -> int:
        """Samples of a global batch."""
        return self.batch_size * self.num_replicas

    def _share(self, rest: int, rank: int) -> tuple[int, int]:
        """Return where a rank's share of an incomplete global batch of `rest` samples begins, and its size."""
        if 0 < rest < self.num_replicas:
            return rank % rest, 1
        size, larger = divmod(rest, self.num_replicas)
        return rank * size + min(rank, larger), size + (rank < larger)

    def _end(self, start: int, *, loader_drops_last: bool = False) -> int:
        """Return where the epoch ends for whoever is at `start`: behind its last sample, or before an incomplete global batch to drop."""
        # Whole batches from here, not from 0: after a change of their size the position need not be a multiple of it.
        rest = (self._length - start) % self._stride
        # A loader counts samples: with one repeated for every rank, a batch of 1 is whole. Rank 0 has the largest share.
        dropped = self.drop_last or (loader_drops_last and self._share(rest, 0)[1] < self.batch_size)
        return self._length - (rest if dropped else 0)

    def _positions(self, start: int, end: int) -> Iterator[Any]:
        """Yield this rank's positions of the order between two of them, in chunks (int64 arrays)."""
        whole, rest = divmod(end - start, self._stride)
        first, size = self._share(rest, self.rank)
        parts = ((start + self.rank * self.batch_size, whole * self.batch_size), (end - rest + first, size))
        for origin, count in parts:
            low, chunk = 0, _FIRST_CHUNK
            while low < count:
                high = min(low + chunk, count)
                own: Any = np.arange(low, high, dtype=np.int64)
                # The other ranks' samples lie between two batches of this one.
                yield origin + own + own // self.batch_size * (self._stride - self.batch_size)
                low, chunk = high, min(2 * chunk, _MAX_CHUNK)

    def _move(self, *, epoch: int, consumed: int) -> None:
        self._epoch, self._consumed, self._next_epoch_began = epoch, consumed, False
        self._moves += 1

    def _observe_loader(self) -> LoaderFacts | None:
        facts = observe(self)
        if facts is None:
            return None
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
        return facts

    def _check_all_shares_are_dropped_or_none(self, rest: int) -> None:
        largest, smallest = (self._share(rest, rank)[1] for rank in (0, self.num_replicas - 1))
        if smallest < self.batch_size <= largest:
            raise StateError(
                f"the DataLoader has drop_last=True and this epoch's last {rest} samples make {largest} a rank, but {smallest} on the last"
                f" ranks: with batch_size={self.batch_size} only those would drop theirs, and ranks would make different numbers of steps;"
                f" make the sampler with drop_last=True"
            )


class StatefulRandomSampler(StatefulSampler):
    """Indices of `data_source` in a new order every epoch, resumable at any batch: `DataLoader(ds, batch_size=B, sampler=s)`.

    `batch_size` must be the loader's (checked when it asks for the first index). With `drop_last` an epoch has whole batches only.
    The length of `data_source` is taken once, here. For one process; several ranks use `StatefulDistributedSampler`.
    """

    def __init__(self, data_source: Sized, batch_size: int, *, seed: int = 42, shuffle: bool = True, drop_last: bool = False) -> None:
        self._check_process_group()
        super().__init__(data_source, batch_size, num_replicas=1, rank=0, seed=seed, shuffle=shuffle, drop_last=drop_last)

    def _check_process_group(self) -> None:
        size = _process_group_size()
        if size > 1:
            raise StateError(
                f"StatefulRandomSampler in a process group of {size} ranks: each would draw the same samples;"
                f" use StatefulDistributedSampler"
            )


class StatefulDistributedSampler(StatefulSampler):
    """This rank's indices of `data_source`, of one order for all ranks, resumable at any batch on any number of ranks.

    `batch_size` is one rank's and must be the loader's. `num_replicas` and `rank` are the process group's unless given, as for model
    parallelism, where several ranks read the same data. With `drop_last` an epoch has whole global batches only.
    Every rank must make its sampler alike, and advance it by the same batches.
    """

    def __init__(
        self,
        data_source: Sized,
        batch_size: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 42,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        size = _process_group_size()
        self._expected_group_size = size if num_replicas is None or rank is None else None
        if num_replicas is None:
            num_replicas = size
        if rank is None:
            if num_replicas != size:
                raise StateError(f"num_replicas={num_replicas!r} with {_described(size)}: which of them is this process? Pass rank=, too")
            rank = torch.distributed.get_rank() if size > 1 else 0
        super().__init__(data_source, batch_size, num_replicas=num_replicas, rank=rank, seed=seed, shuffle=shuffle, drop_last=drop_last)

    def _check_process_group(self) -> None:
        size, expected = _process_group_size(), self._expected_group_size
        if expected is not None and expected != size:
            raise StateError(
                f"the sampler was made with {_described(expected)}, and iterates with {_described(size)}: make it after"
                f" init_process_group, or pass num_replicas= and rank="
            )


def _process_group_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _described(size: int) -> str:
    return "no process group" if size == 1 else f"a process group of {size} ranks"


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
