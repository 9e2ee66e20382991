"""Training on several ranks that is cut off and goes on: the parts of test_resume.py that run in each rank."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import syckpt
from syckpt.dataloader import StatefulDistributedSampler

BATCH = 4
INPUTS = torch.randn(97, 16, generator=torch.Generator().manual_seed(1))
DATASET = TensorDataset(INPUTS, torch.arange(97))


def sharded(model: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
    """Shard over all ranks with FSDP2; a single process keeps plain tensors."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


class Run:
    """A model with dropout, an optimizer of two groups, a scheduler, a sampler. Everything but the data depends on `seed`."""

    def __init__(self, *, seed: int, rank: int) -> None:
        torch.manual_seed(seed)
        first, last = nn.Linear(16, 33), nn.Linear(33, 7)
        self.model = sharded(nn.Sequential(first, nn.ReLU(), nn.Dropout(0.2), last), (first, last))
        groups = [{"params": list(first.parameters())}, {"params": list(last.parameters()), "lr": 3e-3, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.sampler = StatefulDistributedSampler(DATASET, batch_size=BATCH)
        torch.manual_seed(1000 * seed + rank)

    def register(self, ckpt: syckpt.CheckpointManager) -> None:
        ckpt.model, ckpt.optimizer, ckpt.scheduler, ckpt.sampler = self.model, self.optimizer, self.scheduler, self.sampler

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.cross_entropy(self.model(x), y % 7)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def digests(self) -> dict[str, str]:
        """Return digests of all full parameters and moments, the same on any number of ranks. Collective."""
        found = {name: digest(value) for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name} {key}"] = digest(value)
        return found

    def settings(self) -> Any:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        return [groups, self.scheduler.state_dict()]


def digest(tensor: Any) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


# --- three SIGKILLs -------------------------------------------------------------------------------------------------------------


def train(rank: int, root: str, record: str, seed: int, kill_at: int) -> int:
    """Train two epochs, saving every second step, and write each loss down; a rank kills itself after step `kill_at`."""
    run = Run(seed=seed, rank=rank)
    with syckpt.CheckpointManager(root, timeout_s=60, save_on_exit=False) as ckpt, Path(f"{record}.{rank}").open("a") as lines:
        run.register(ckpt)
        for _ in ckpt.loop(epochs=2):
            for x, y in DataLoader(DATASET, batch_size=BATCH, sampler=run.sampler):
                loss = run.step(x, y)
                ckpt.step_up()
                print(ckpt.step, loss.hex(), file=lines, flush=True)
                if ckpt.step % 2 == 0:
                    ckpt.save()
                if ckpt.step == kill_at:
                    with suppress(RuntimeError):  # the other one is dead already
                        dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
        return ckpt.step


def train_to_the_end_and_again(rank: int, root: str, record: str, other_root: str, reference: str) -> list[int]:
    """Finish what was killed, then make the whole run without an interruption."""
    return [train(rank, root, record, 9, 0), train(rank, other_root, reference, 3, 0)]


# --- other numbers of ranks -----------------------------------------------------------------------------------------------------


def stretch(rank: int, root: str, stop: int) -> dict[str, Any]:
    """Resume, train up to step `stop` (0: to the end of the epoch), save; return what was found, consumed and left."""
    run = Run(seed=os.getpid(), rank=0)  # the same streams on all ranks, unless they are restored
    seen: list[int] = []
    drawn = None
    with syckpt.CheckpointManager(root, timeout_s=60, save_on_exit=False) as ckpt:
        run.register(ckpt)
        found = {"state": run.digests(), "settings": run.settings(), "step": ckpt.step}
        early = None
        for _ in ckpt.loop(epochs=1):
            if ckpt.resumed is not None:
                # Before the first step: what the resumed job commits is what it found.
                early = ckpt.save(message="as found").result().id
            for x, y in DataLoader(DATASET, batch_size=BATCH, sampler=run.sampler):
                drawn = torch.rand(1).item() if drawn is None else drawn
                run.step(x, y)
                if ckpt.step == 1:
                    run.optimizer.param_groups[0]["betas"] = (0.8, 0.99)
                ckpt.step_up()
                seen += y.tolist()
                if ckpt.step == stop:
                    break
            break
        commit = ckpt.save().result()
        report = ckpt.last_report
        return {
            "found": found,
            "left": {"state": run.digests(), "settings": run.settings(), "step": ckpt.step},
            "seen": seen,
            "drawn": drawn,
            "early": early,
            "done": commit.epoch_done,
            "commit_exact": commit.rng_exact,
            "exact": report.rng_exact,
            "resharded": report.resharded,
            "read": report.bytes_read,
            "notes": report.notes,
        }


def consume(rank: int, root: str, batches: int) -> dict[str, Any]:
    """Go through the data with `batches()`: so many batches of the first epoch (0: up to the end of the one under way), then save."""
    sampler = StatefulDistributedSampler(DATASET, batch_size=BATCH)
    with syckpt.CheckpointManager(root, timeout_s=60, save_on_exit=False) as ckpt:
        ckpt.sampler = sampler
        for epoch in ckpt.loop():
            seen: list[int] = []
            for _, y in ckpt.batches(DataLoader(DATASET, batch_size=BATCH, sampler=sampler)):
                seen += y.tolist()
                if batches and ckpt.batch_idx == batches:
                    break
            commit = ckpt.save().result()
            return {"epoch": epoch, "seen": seen, "done": commit.epoch_done, "batch_idx": commit.batch_idx}
    raise AssertionError("no epoch")


def on_two(rank: int, folder: str) -> dict[str, Any]:
    return {
        "stretch": stretch(rank, f"{folder}/main", 6),
        "done": consume(rank, f"{folder}/done", 0),
        "cut": consume(rank, f"{folder}/cut", 5),
    }


def on_three(rank: int, folder: str) -> dict[str, Any]:
    return {
        "stretch": stretch(rank, f"{folder}/main", 8),
        "done": consume(rank, f"{folder}/done", 0),
        "cut": consume(rank, f"{folder}/cut", 0),
        "loads": loads(rank, f"{folder}/main"),
    }


# --- explicit loads -------------------------------------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - compared by the test
        return [type(exc).__name__, str(exc)]
    return ["", ""]


def loads(rank: int, root: str) -> dict[str, Any]:
    """Load by hand: all ranks; with a target that fits nowhere on rank 1; with a disk that gives rank 1 other bytes."""
    run = Run(seed=5, rank=rank)
    with syckpt.CheckpointManager(root, timeout_s=60, save_on_exit=False, auto_resume=False) as ckpt:
        live = run.model.state_dict()
        before = {name: value.to_local().clone() for name, value in live.items()}
        unfit = {**live, "0.bias": torch.zeros(5)} if rank == 1 else live
        mismatch = outcome(lambda: ckpt.load("HEAD", into={"model": unfit}))
        dry = outcome(lambda: ckpt.load("HEAD", into={"model": unfit}, dry_run=True))
        untouched = all(torch.equal(before[name], value.to_local()) for name, value in live.items())
        store = ckpt._repository.store
        readinto = store.readinto

        def lying(key: str, buffer: Any, *, offset: int = 0) -> Any:
            result = readinto(key, buffer, offset=offset)
            buffer[0] ^= 1
            return result

        if rank == 1:
            store.readinto = lying  # type: ignore[method-assign]
        damage = outcome(lambda: ckpt.load("HEAD", into={"model": live}))
        store.readinto = readinto  # type: ignore[method-assign]
        one = ckpt.load("HEAD", into={"model": live})["model"]
        fresh = ckpt.load(ckpt.log(1)[0].id)  # full tensors, on each rank
        return {
            "mismatch": mismatch,
            "dry": dry,
            "untouched": untouched,
            "damage": damage,
            "missing": outcome(lambda: ckpt.load("nowhere")),
            "in_place": all(one[name] is live[name] for name in live),
            "filled": {name: digest(value) for name, value in live.items()},
            "full": {name: digest(value) for name, value in fresh["model"].items()},
        }
