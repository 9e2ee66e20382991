"""Builds the golden repository of format version 1: `python tests/golden/make.py DIRECTORY`.

The result lies in `v1/`, and is never built again: it shows that what was written once is read for ever. No value here depends on
rounding, on the version of torch or numpy, or on the machine, so that `test_golden.py` can also repeat the saves.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from syckpt import CheckpointManager

# Those of torch 2.6.
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("complex32", "complex64", "complex128", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
CONFIG = {"lr": 0.5, "batch_size": 64, "architecture": {"name": "golden", "layers": [3, 2]}, "warmup": None}


class Momentum(torch.optim.Optimizer):
    """Its groups and state are this file's own, not those of a version of torch."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"steps": 1, "momentum": torch.full_like(parameter, 0.25)}


def bits_of(name: str) -> torch.Tensor:
    """Return 48 bytes of any bits as a tensor: NaN payloads, infinities, denormals, -0.0."""
    raw = torch.tensor([(37 * i + 11) % 256 for i in range(48)], dtype=torch.uint8)
    return (raw % 2 if name == "bool" else raw).view(getattr(torch, name))


def moving(step: int) -> torch.Tensor:
    return ((torch.arange(2048, dtype=torch.int64) * 7919 % 1000 + step).to(torch.float32) / 8).reshape(32, 64)


def table(step: int) -> torch.Tensor:
    """Two blocks, almost all zeros; a few elements move."""
    values = torch.zeros(300_000, dtype=torch.int32)
    values[::10_000] = torch.arange(30, dtype=torch.int32)
    values[:step] = -7
    values[-step:] = 5
    return values


def nested() -> dict[Any, Any]:
    """Return a value of every kind that nodes carry."""
    tied = torch.tensor([1.5, -0.0, float("inf")])
    return {
        "plain": [None, True, False, 0, -1, 2**53 - 1, 0.1, -0.0, 1e-300, "", "grüße\n", "\ud800"],
        "beyond": [2**70, -(2**53), float("inf"), float("-inf"), complex(1.5, -0.0), b"\x00\xff", bytearray(b"ab")],
        "containers": ((1, [2, (3,)]), {"b", "a"}, frozenset({1, 2}), deque([1, 2], maxlen=3), OrderedDict(z=1, a=2), Counter("aab")),
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), tied, {"tied": tied}, torch.tensor(7), torch.empty(0, 3)],
        "numpy": [
            np.float32(0.5),
            np.int8(-3),
            np.arange(6, dtype=np.int16).reshape(2, 3),
            np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
            np.array([(1, 2.5), (3, -4.5)], dtype=[("id", "<i4"), ("score", "<f8")]),
            np.array([1, 2], dtype=">u2"),
        ],
        "ranges": [range(1, 10, 3), slice(None, 5, 2)],
        "path": Path("/data/set"),
        3: "an integer key",
        (1, "a"): "a tuple as key",
        "generators": [torch.Generator().manual_seed(5), np.random.Generator(np.random.PCG64(7))],
    }


def parts(step: int) -> dict[str, Any]:
    """Return the items, live, as they are at a step."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape) + number + step / 8)
    model[0].weight.requires_grad_(False)
    optimizer = Momentum([{"params": [model[1].weight]}, {"params": [model[0].bias], "lr": 0.125}], lr=0.5)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "moving": moving(step),
        "table": table(2 if step == 2 else 1),
        "dtypes": {name: bits_of(name) for name in DTYPES},
        "nested": nested(),
    }


def save(ckpt: CheckpointManager, step: int, **facts: Any) -> str:
    """Put the items of a step in place of what is there, and commit them with known random streams."""
    for name, value in parts(step).items():
        ckpt.register(name, value)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    pending = ckpt.save(wait=True, **facts)
    assert pending is not None
    return pending.id


def register_and_restore(ckpt: CheckpointManager) -> None:
    for name, value in parts(99).items():
        ckpt.register(name, value)
    ckpt.restore()


def build(root: Path) -> list[str]:
    """Three commits: a keyframe; deltas and pointers behind it; on a branch of its own, an uncompressed one. Return their ids."""
    with CheckpointManager(root, save_on_exit=False) as ckpt:
        ckpt.config = CONFIG
        ckpt.step_up()
        first = save(ckpt, 1, checkpoint_id="start", tags=["v1.0", "release/first"], metric=0.5, message="the keyframe: grüße")
        ckpt.step_up(2, batches=3)
        second = save(ckpt, 2, metric=float("nan"), epoch_end=False)
    with CheckpointManager(
        root, CheckpointManager.Config(compression="none"), branch="team/side", base="start", save_on_exit=False
    ) as ckpt:
        ckpt.config = {**CONFIG, "lr": 0.25}
        register_and_restore(ckpt)
        ckpt.step_up()
        third = save(ckpt, 3, metric=0.25, message="uncompressed")
    return [first, second, third]


if __name__ == "__main__":
    print("\n".join(build(Path(sys.argv[1]))))
