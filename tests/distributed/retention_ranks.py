"""Retention behind the saves of several ranks: the parts of test_retention.py that run in each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_ranks import digest, sharded
from torch import nn

import syckpt
from syckpt.repo import branches
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Retention, retain
from syckpt.stores.base import parse_root


class Run:
    """A sharded model of which only the last layer is trained."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        backbone, head = nn.Linear(64, 96), nn.Linear(96, 32)
        for parameter in backbone.parameters():
            parameter.requires_grad_(False)
        self.model = sharded(nn.Sequential(backbone, head), (backbone, head))
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)

    def register(self, ckpt: syckpt.CheckpointManager) -> None:
        ckpt.model, ckpt.optimizer = self.model, self.optimizer

    def step(self, seed: int) -> None:
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def digests(self) -> dict[str, str]:
        found = {name: digest(value) for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name} {key}": digest(value) for key, value in self.optimizer.state.get(parameter, {}).items()}
        return found


def stored(root: str) -> dict[str, int]:
    """Return the files of commits with their sizes."""
    folder = Path(root, ".syckpt/objects")
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.glob("*/*")}


def train(rank: int, root: str, saves: int) -> dict[str, Any]:
    """Save each step, keeping two commits and a tagged one; then go back to that, let it be dropped, and save behind it."""
    run = Run(seed=1)
    states, saved, files = [], [], []
    with syckpt.CheckpointManager(root, timeout_s=60, save_on_exit=False, max_to_keep=2) as ckpt:
        run.register(ckpt)
        for step in range(saves):
            run.step(step)
            ckpt.step_up()
            pending = ckpt.save(tags=["old"] if step == 1 else [], wait=True)
            ckpt.wait()
            dist.barrier()
            saved.append(str(pending))
            states.append(run.digests())
            files.append(stored(root))
            dist.barrier()
        ckpt.goto("old")
        back = run.digests()
        if rank == 0:
            repository = Repository.open(parse_root(root))
            branches.delete_tag(repository, "old", run="test")
            gone = [commit.id for commit in retain(repository, "main", Retention(last=1)).dropped]
            assert saved[1] in gone
        dist.barrier()
        run.step(99)
        ckpt.step_up()
        last = str(ckpt.save(wait=True))
        return {"states": states, "saved": saved, "files": files, "back": back, "last": last, "left": run.digests()}


def resume(rank: int, root: str) -> dict[str, Any]:
    """Resume into another state, and save once more."""
    run = Run(seed=os.getpid())
    with syckpt.CheckpointManager(root, timeout_s=60, save_on_exit=False, max_to_keep=1) as ckpt:
        run.register(ckpt)
        ckpt.restore()
        found = run.digests()
        run.step(7)
        ckpt.step_up()
        ckpt.save(wait=True)
        return {"found": found, "step": ckpt.step - 1, "left": run.digests()}
