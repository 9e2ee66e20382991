"""What the ranks of test_standing_ranks.py do, two of them: one sweep script, run three times in one process group."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import syckpt
from syckpt import CheckpointManager, StatefulDistributedSampler
from syckpt.checkpoint import progress


def trial(root: str, name: str, *, stop_at: int | None = None) -> dict[str, Any]:
    """Make a branch of what there is and train two epochs on it; what is left at `stop_at` is as after a crash."""
    rank = dist.get_rank()
    sampler = StatefulDistributedSampler(range(16), 2, seed=3)
    seen: list[int] = []
    told: dict[str, Any] = {"seen": seen}
    with CheckpointManager(root, timeout_s=90, save_on_exit=False) as ckpt:
        ckpt.w, ckpt.own, ckpt.sampler = torch.zeros(4), rank, sampler
        ckpt.create_branch(name)
        told["found"] = (ckpt.branch, ckpt.step, ckpt.own, ckpt.w.tolist())
        for _ in ckpt.loop(2):
            for batch in torch.utils.data.DataLoader(range(16), batch_size=2, sampler=sampler):
                ckpt.w += 1
                ckpt.step_up()
                seen.extend(batch.tolist())
                if ckpt.step % 2 == 0:
                    ckpt.save()
                if ckpt.step == stop_at:
                    ckpt.wait()
                    return told
        ckpt.save(epoch_end=True)
        if name == "two":
            ckpt.w = torch.zeros(4 + rank)  # Fits on one rank only.
            told["refused"] = []
            for move in (lambda: ckpt.checkout_branch("main"), lambda: ckpt.create_branch("three", at="main")):
                try:
                    move()
                except syckpt.SyckptError as exc:
                    told["refused"].append((type(exc).__name__, ckpt.branch))
            ckpt.w = torch.full((4,), 9.0)
        ckpt.checkout_branch("main")
        told["main"] = (ckpt.branch, ckpt.step, ckpt.own, ckpt.w.tolist())
        told["branches"] = ckpt.list_branches()
        told["hash"] = ckpt.hash
    return told


def by_the_clock(root: str) -> list[int]:
    """Save every ten minutes by rank 0's clock, on which a step takes one; rank 1's stands still. Return how often the ranks had talked."""
    now = 0.0
    progress.time = SimpleNamespace(monotonic=lambda: now)  # type: ignore[attr-defined]
    talked = []
    try:
        with CheckpointManager(root, timeout_s=90, save_on_exit=False, save_every="10m") as ckpt:
            ckpt.x = 1
            for _ in range(45):
                now += 60 * (dist.get_rank() == 0)
                before = ckpt._coordinator.agreements
                ckpt.step_up()
                talked.append(ckpt._coordinator.agreements - before)
    finally:
        progress.time = time  # type: ignore[attr-defined]
    return talked


def play(rank: int, root: str) -> list[Any]:
    """Run the script: cut off in mid-epoch, to its end, and another trial; then save by the clock."""
    return [trial(root, "one", stop_at=6), trial(root, "one"), trial(root, "two"), by_the_clock(root + "/clock")]
