"""The caller's thread passes over the data once: `save()` copies each byte into the slot, and nothing else touches more than a little.

Counted, not timed. Every torch operation in the caller's thread is seen by a dispatch mode; numpy's copies into the slot are seen where
they are made.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import syckpt
from syckpt.state.staging import Slot

LITTLE = 8192
# Operations that make or rename a tensor without touching its elements.
VIEWS = ("detach", "view", "slice", "select", "alias", "as_strided", "reshape", "transpose", "t", "empty", "unsqueeze", "expand")


class Count(TorchDispatchMode):
    """Adds up the bytes that operations write or read."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0
        self.others: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name == "copy_":
            self.copied += args[0].nbytes
        elif name not in VIEWS:
            touched = max((leaf.nbytes for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)), default=0)
            self.others[name] = max(self.others.get(name, 0), touched)
        return result


@pytest.fixture
def state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 200, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "tied": model[0].weight.detach(),
        "strided": torch.arange(60_000.0).view(200, 300).t(),
        "array": np.arange(50_000.0),
    }


def distinct_nbytes(state: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the state's tensors, ties counted once, and of its arrays."""
    tensors = [*state["model"].parameters(), state["strided"]]
    tensors += [value for values in state["optimizer"].state.values() for value in values.values()]
    return sum(tensor.nbytes for tensor in tensors), state["array"].nbytes


@pytest.mark.parametrize("warm", [False, True])
def test_save_copies_every_byte_once_and_touches_no_large_tensor_otherwise(
    tmp_path: Path, state: dict[str, Any], warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays: list[int] = []
    copy_array = Slot._copy_array
    monkeypatch.setattr(Slot, "_copy_array", lambda slot, array, *place: (arrays.append(array.nbytes), copy_array(slot, array, *place))[1])
    with syckpt.CheckpointManager(tmp_path, rng=False, save_on_exit=False) as ckpt:
        for name, item in state.items():
            ckpt.register(name, item)
        if warm:
            for _ in range(2):
                ckpt.save(wait=True)
            arrays.clear()
        with Count() as count:
            pending = ckpt.save()
        assert pending is not None
        staged = pending.result().stats["staged_bytes"]
    tensors_nbytes, arrays_nbytes = distinct_nbytes(state)
    assert tensors_nbytes == 3_124_816  # 3 x (210,300 fp32 + 60,200 bf16), 4 step counts, 60,000 fp32 and nothing for the tie
    assert count.copied == tensors_nbytes
    assert sum(arrays) == arrays_nbytes == 400_000
    assert staged == tensors_nbytes + arrays_nbytes
    assert all(nbytes <= LITTLE for nbytes in count.others.values()), count.others


def test_a_warm_save_allocates_no_copy_of_what_it_saves(tmp_path: Path, state: dict[str, Any]) -> None:
    with syckpt.CheckpointManager(tmp_path, rng=False, save_on_exit=False) as ckpt:
        for name, item in state.items():
            ckpt.register(name, item)
        for _ in range(2):
            ckpt.save(wait=True)
        tracemalloc.start()  # sees Python's and numpy's allocations
        try:
            ckpt.save()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 200_000


def test_the_random_streams_add_a_few_kilobytes(tmp_path: Path) -> None:
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt, Count() as count:
        ckpt.save()
    assert 5_000 < count.copied < 10_000
    assert all(nbytes <= LITTLE for nbytes in count.others.values()), count.others
