"""How long does `save()` hold up training? Measured next to a bare copy of the state (= 1) and `torch.save`. Not a test.

    python tests/benchmarks/stall.py [--megabytes 256] [--rounds 7] [--dir /a/disk]

The state is that of a GPT with its AdamW moments, fp32, changed between rounds. A round measures each contestant once, one after the
other; before the next begins every save is durable, so that no writer is at work while another is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import syckpt
from syckpt.testing.training import ByteGPT

BAR = 1.2


def training_state(nbytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, after one step, of at least `nbytes` together."""
    width = 512
    per_layer = 12 * width * width + 13 * width
    layers = max(1, -(-nbytes // (3 * 4 * per_layer)))
    model = ByteGPT(width=width, layers=layers, heads=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer.step()
    return model, optimizer


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [parameter.detach() for parameter in model.parameters()] + moments


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(folder: Path, *, nbytes: int, rounds: int, compression: Any) -> tuple[dict[str, list[float]], int, int]:
    """Return each contestant's seconds by round, and the bytes and tensors of the state."""
    model, optimizer = training_state(nbytes)
    tensors = tensors_of(model, optimizer)
    total = sum(tensor.nbytes for tensor in tensors)
    copies = [torch.zeros_like(tensor) for tensor in tensors]  # allocated and touched
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "syckpt stall", "  of it the copy", "torch.save", "syckpt durable")}

    def copy() -> None:
        for target, source in zip(copies, tensors, strict=True):
            target.copy_(source)

    def dump() -> None:
        with (folder / "state.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    with syckpt.CheckpointManager(folder, syckpt.CheckpointManager.Config(compression=compression), save_on_exit=False) as ckpt:
        ckpt.model, ckpt.optimizer = model, optimizer
        first = seconds(ckpt.save)
        ckpt.wait()
        ckpt.save()  # maps the second slot
        ckpt.wait()
        for _ in range(rounds):
            optimizer.step()
            times["memcpy"].append(seconds(copy))
            started = time.perf_counter()
            pending = ckpt.save()
            times["syckpt stall"].append(time.perf_counter() - started)
            assert pending is not None
            stats = pending.result().stats
            times["syckpt durable"].append(time.perf_counter() - started)
            times["  of it the copy"].append(stats["copy_s"])
            times["torch.save"].append(seconds(dump))
            os.sync()
        times["syckpt first save()"] = [first]
    return times, total, len(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compression", choices=("fast", "none"), default="fast")
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        times, total, count = measure(Path(folder), nbytes=args.megabytes * 10**6, rounds=args.rounds, compression=args.compression)
    unit = statistics.median(times["memcpy"])
    print(f"{total / 1e6:.0f} MB in {count} tensors, compression={args.compression!r}, {args.rounds} rounds, torch {torch.__version__}")
    print(f"{'':22}{'median':>10}{'best':>10}{'worst':>10}{'/ memcpy':>10}")
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:22}{middle * 1e3:7.1f} ms{min(values) * 1e3:7.1f} ms{max(values) * 1e3:7.1f} ms{middle / unit:10.2f}")
    print(f"the bar for the stall is {BAR} x memcpy")


if __name__ == "__main__":
    main()
