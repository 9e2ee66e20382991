"""Who is iterating a sampler: facts about the DataLoader, read from the frames that are asking for an index.

Contract: `observe(sampler)` is called by the sampler while somebody waits for its index, and returns what it found, or None when the
sampler is iterated by hand. It changes nothing and never fails.

Why frames: a sampler is handed to a DataLoader, never the other way round, yet a batch size that differs, a dropped tail or workers
decide whether a resume is exact. torch's iterator asks its batch sampler, which asks the sampler, in one thread: for `num_workers=0` at
the first batch, otherwise while the iterator is being made, after its base seed was drawn. (torch/utils/data/dataloader.py:
`_BaseDataLoaderIter._next_index`.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["LoaderFacts", "observe"]

_MAX_WRAPPERS = 8


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """What a sampler's consumer does with its indices."""

    batch_size: int | None
    """Samples a batch; None if the loader's batch sampler does not say. A loader without batching has batches of 1."""
    drop_last: bool
    num_workers: int
    persistent_workers: bool
    in_order: bool
    """False if batches of several workers may come in any order."""
    dataset: Any
    """What the indices are for; None without a loader."""


def observe(sampler: object) -> LoaderFacts | None:
    """Return the facts of whoever is waiting for the sampler's next index, or None by hand."""
    batcher: BatchSampler | None = None
    frame = sys._getframe(1)
    while True:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(owner, _BaseDataLoaderIter):
            return _facts(owner, sampler)
        if batcher is None and isinstance(owner, BatchSampler) and owner.sampler is sampler:
            batcher = owner
        if frame.f_back is None:
            break
        frame = frame.f_back
    if batcher is None:
        return None
    return LoaderFacts(
        batch_size=batcher.batch_size,
        drop_last=batcher.drop_last,
        num_workers=0,
        persistent_workers=False,
        in_order=True,
        dataset=None,
    )


def _facts(iterator: Any, sampler: object) -> LoaderFacts:
    batch_size: int | None = None
    drop_last = False
    if iterator._index_sampler is sampler:
        batch_size = 1
    else:
        for holder in _holders(iterator._index_sampler, sampler):
            size = getattr(holder, "batch_size", None)
            if isinstance(size, int):
                batch_size, drop_last = size, bool(getattr(holder, "drop_last", False))
    return LoaderFacts(
        batch_size=batch_size,
        drop_last=drop_last,
        num_workers=iterator._num_workers,
        persistent_workers=iterator._persistent_workers,
        in_order=getattr(iterator, "_in_order", True),
        dataset=iterator._dataset,
    )


def _holders(outermost: Any, sampler: object) -> Iterator[Any]:
    """Yield the samplers between the loader and `sampler`, outermost first: trainers wrap batch samplers in their own."""
    holder = outermost
    for _ in range(_MAX_WRAPPERS):
        if holder is None or holder is sampler:
            return
        yield holder
        holder = getattr(holder, "sampler", None) or getattr(holder, "batch_sampler", None)
