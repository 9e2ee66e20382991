"""Random draws inside a dataset that depend on (seed, epoch, index) alone.

Contract: in `seeded(dataset)[i]` Python's `random`, numpy's legacy generator and torch's CPU generator start from a hash of (seed, epoch,
i), and have their former states again afterwards. So the same sample comes out in the training process or in any worker, before or after
a resume, and without workers its draws do not move the streams that dropout uses. Generators that the dataset owns, and CUDA's, are not
touched.

Seed and epoch are the sampler's; it announces them before it yields an epoch's first index. They lie in shared memory, because workers
(also persistent ones) were started before that. One memory, one epoch: samplers that iterate the same seeded dataset at the same time
disturb each other, so wrap it once for each. With a foreign sampler call `begin_epoch` yourself; until then every epoch draws alike.

Cost: about 0.1 ms a sample, most of it for numpy's state.
"""

from __future__ import annotations

import operator
import random
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from syckpt.errors import StateError
from syckpt.objects.canonical import dumps

__all__ = ["SeededDataset", "announce_epoch", "is_seeded", "seeded"]

_OWN_NAMES = frozenset({"_dataset", "_announced"})


def seeded(dataset: Any) -> SeededDataset:
    """Return a map-style dataset, wrapped so that its draws depend on (seed, epoch, index) alone; one that is wrapped already as it is.

    Raises: StateError for what has no `__getitem__` or no length of its own: an iterable dataset has no index to key the draws by.
    """
    if isinstance(dataset, SeededDataset):
        return dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise StateError(f"seeded() needs a map-style dataset (with __getitem__), found {type(dataset).__name__}")
    return SeededDataset(dataset)


def is_seeded(dataset: Any) -> bool:
    """Whether all draws of the dataset are keyed: it is `seeded`, or a Subset or ConcatDataset (which draw nothing) of such."""
    if isinstance(dataset, Subset):
        return is_seeded(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(is_seeded(part) for part in dataset.datasets)
    return isinstance(dataset, SeededDataset)


def announce_epoch(dataset: Any, *, seed: int, epoch: int) -> None:
    """Tell every seeded dataset inside `dataset` (also below Subset and ConcatDataset) which epoch begins; others are left alone."""
    if isinstance(dataset, SeededDataset):
        dataset.begin_epoch(epoch, seed=seed)
    elif isinstance(dataset, Subset):
        announce_epoch(dataset.dataset, seed=seed, epoch=epoch)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            announce_epoch(part, seed=seed, epoch=epoch)


class SeededDataset(Dataset[Any]):  # type: ignore[misc]
    """What `seeded` returns. Attributes are the wrapped dataset's, for reading and for setting."""

    _dataset: Any
    _announced: Any

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._announced = torch.zeros(2, dtype=torch.int64).share_memory_()

    def begin_epoch(self, epoch: int, *, seed: int = 0) -> None:
        """Key all draws by this seed and epoch from now on, in this process and in its workers."""
        self._announced[0] = seed
        self._announced[1] = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        seed, epoch = self._announced.tolist()
        key = blake3(b"syckpt sample v1\n" + dumps([str(seed), str(epoch), *_named(index)])).digest(72)
        python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            random.seed(int.from_bytes(key[:32], "little"))
            np.random.seed(np.frombuffer(key[32:64], dtype="<u4"))
            # Not torch.manual_seed, which would reseed the accelerators, too.
            torch.default_generator.manual_seed(int.from_bytes(key[64:], "little") >> 1)
            return self._dataset[index]
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            torch.default_generator.set_state(torch_state)

    def __getitems__(self, indices: Any) -> list[Any]:
        # A loader would otherwise find the wrapped dataset's batched access, which draws unkeyed.
        return [self[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        # While unpickling there is no wrapped dataset yet; and no protocol may bypass the wrapper.
        if name in _OWN_NAMES or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_NAMES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)

    def __getstate__(self) -> tuple[Any, Any]:
        return self._dataset, self._announced

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        # A worker's pickler hands on the shared memory itself; a file or a deep copy holds a private copy, shared anew here.
        self._dataset, self._announced = state[0], state[1].share_memory_()

    def __repr__(self) -> str:
        return f"seeded({self._dataset!r})"


def _named(index: Any) -> tuple[str, str]:
    if isinstance(index, str):
        return "str", index
    try:
        return "int", str(operator.index(index))
    except TypeError:
        raise StateError(f"a seeded dataset is indexed by integers or strings, found {type(index).__name__}") from None
