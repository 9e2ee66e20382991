"""The parts of test_moves.py that run in each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syckpt import CheckpointManager, Retention


def outcome(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - compared by the test
        return [type(exc).__name__, str(exc)]
    return ["", ""]


def manager(root: str, config: Any = None, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, config, **{"timeout_s": 90, "save_on_exit": False, **options})


class Refusing:
    """A stateful object that refuses to be saved or restored on demand."""

    def __init__(self) -> None:
        self.value, self.saves, self.loads = 0, True, True

    def state_dict(self) -> dict[str, int]:
        if not self.saves:
            raise KeyError("cannot be saved")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.loads:
            raise ValueError("my own refusal")
        self.value = state["value"]


class Run:
    """A manager with a replicated model, a thing of its own, and a tensor that each rank has for itself."""

    def __init__(self, rank: int, root: str, **options: Any) -> None:
        self.rank, self.root = rank, root
        self.ckpt = manager(root, **options)
        self.model, self.thing, self.own = nn.Linear(3, 3), Refusing(), nn.Linear(2, 2, bias=False)
        self.ckpt.model, self.ckpt.thing, self.ckpt.own = self.model, self.thing, self.own

    def step(self, value: int) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)
            self.own.weight.fill_(value + 100 * self.rank)
        self.thing.value = value
        self.ckpt.step_up()

    def state(self) -> list[Any]:
        """Return the values that were set, which agree, as they were on rank 0; and step and branch."""
        weight, own = self.model.weight.unique().tolist(), self.own.weight.unique().tolist()
        return [*weight, self.thing.value, *(value - 100 * self.rank for value in own), self.ckpt.step, self.ckpt.branch]


def mine(rank: int, first: Any, second: Any) -> Any:
    return first if rank == 0 else second


def flip(root: str, commit: str, rank: int) -> None:
    """Damage the last tensor that a rank stored."""
    blob = Path(root) / f".syckpt/objects/{commit}/r{rank:05d}.safetensors"
    with blob.open("r+b") as file:
        file.seek(blob.stat().st_size - 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def other_arguments(rank: int, ckpt: CheckpointManager, root: str) -> dict[str, list[str]]:
    """Call everything that takes an argument with one that differs between the ranks."""
    return {
        "goto": outcome(lambda: ckpt.goto(mine(rank, "a", "b"))),
        "load": outcome(lambda: ckpt.load(mine(rank, "a", "b"))),
        "load into": outcome(lambda: ckpt.load("a", into=mine(rank, None, {}))),
        "create_branch": outcome(lambda: ckpt.create_branch(mine(rank, "x", "y"))),
        "create_branch at": outcome(lambda: ckpt.create_branch("x", at=mine(rank, "a", "b"))),
        "checkout_branch": outcome(lambda: ckpt.checkout_branch(mine(rank, "exp", "main"))),
        "delete_branch": outcome(lambda: ckpt.delete_branch(mine(rank, "exp", "other"))),
        "tag": outcome(lambda: ckpt.tag(mine(rank, "t1", "t2"), "a")),
        "tag rev": outcome(lambda: ckpt.tag("t1", mine(rank, "a", "b"))),
        "export_ckpt": outcome(lambda: ckpt.export_ckpt(mine(rank, "a", "b"), f"{root}/e.pt")),
        "save": outcome(lambda: ckpt.save(mine(rank, "p", "q"))),
        "wrong": outcome(lambda: ckpt.create_branch(mine(rank, "x", "a name with spaces"))),
        "no text": outcome(lambda: ckpt.goto(mine(rank, "a", 3))),
    }


def two(rank: int, folder: str) -> dict[str, Any]:
    root = f"{folder}/run"
    run = Run(rank, root)
    ckpt, found = run.ckpt, dict[str, Any]()
    ckpt.prewarm()
    for value, name in ((1, "a"), (2, "b")):
        run.step(value)
        ckpt.save(name, wait=True)
    run.step(3)
    ckpt.goto("a")
    found["goto"] = run.state()
    ckpt.create_branch("exp", at="b")
    found["created"] = run.state()
    run.step(4)
    ckpt.checkout_branch("main")
    found["checked out"] = run.state()
    ckpt.checkout_branch("exp")
    found["unsaved"] = run.state()
    ckpt.create_branch("other")
    ckpt.checkout_branch("main")

    found["arguments"] = other_arguments(rank, ckpt, folder)
    found["still"] = [run.state(), ckpt.list_branches()]

    # One rank's object refuses: half restored, so nothing is saved, until a goto is whole.
    run.thing.loads = rank == 0
    found["refused"] = outcome(lambda: ckpt.goto("b"))
    found["torn"] = [outcome(ckpt.save), outcome(lambda: ckpt.step_up()), outcome(lambda: ckpt.create_branch("never"))]
    run.thing.loads = True
    ckpt.goto("b")
    run.thing.loads = rank == 0
    found["refused branch"] = outcome(lambda: ckpt.create_branch("torn", at="a"))
    found["torn branch"] = outcome(ckpt.save)
    run.thing.loads = True
    ckpt.checkout_branch("main")
    found["whole again"] = [run.state(), outcome(lambda: ckpt.save(wait=True))]
    ckpt.delete_branch("torn")

    # One rank's model does not fit: nothing is touched on either.
    if rank == 1:
        ckpt.model = nn.Linear(3, 4)
    found["misfit"] = [outcome(lambda: ckpt.goto("a")), outcome(lambda: ckpt.checkout_branch("exp")), run.thing.value, ckpt.branch]
    ckpt.model = run.model

    # One rank cannot save what is unsaved: the branch stays.
    run.step(5)
    run.thing.saves = rank == 0
    found["unsavable"] = [outcome(lambda: ckpt.checkout_branch("exp")), run.state()]
    run.thing.saves = True
    ckpt.checkout_branch("exp")
    ckpt.checkout_branch("main")
    found["saved after all"] = run.state()

    # Bytes that rank 1 alone reads are damaged.
    run.step(6)
    ckpt.save("damaged", wait=True)
    if rank == 0:
        flip(root, str(ckpt.hash), 1)
    dist.barrier()
    found["damaged"] = [outcome(lambda: ckpt.goto("damaged")), outcome(ckpt.save)]
    ckpt.goto("damaged~1")
    found["before the damage"] = [run.state(), outcome(lambda: ckpt.save("after", wait=True))]

    ckpt.tag("good", "a")
    found["tag again"] = outcome(lambda: ckpt.tag("good", "b"))
    found["missing"] = [outcome(lambda: ckpt.goto("nowhere")), outcome(lambda: ckpt.delete_branch("main"))]
    ckpt.export_ckpt("a", f"{folder}/out/deep/a.pt")
    found["export"] = outcome(lambda: ckpt.export_ckpt("a", "/proc/none/a.pt"))
    found["diff"] = sorted(ckpt.diff("a", "b").tensors.changed)
    found["similar"] = len(ckpt.similar(k=2))
    ckpt.print_tree()
    found["swept"] = [ckpt.gc() is not None, outcome(ckpt.retain)]
    ckpt.close()
    found["made"] = outcome(lambda: manager(root, CheckpointManager.Config(read=mine(rank, "ranged", "broadcast"))))
    return found | {"forked": forked(rank, root), "paths": paths(rank, folder)}


def forked(rank: int, root: str) -> list[Any]:
    run = Run(rank, root, run_mode="new_branch", keep=Retention(last=2))
    run.ckpt.restore()
    found = [run.state()]
    for value in range(4):
        run.step(value)
        run.ckpt.save(wait=True)
    kept = run.ckpt.retain(dry_run=True)
    found += [kept is not None, [commit.dropped for commit in run.ckpt.log(4)]]
    run.ckpt.close()
    return found


def paths(rank: int, folder: str) -> dict[str, Any]:
    """Without a root; ranks that turn to different directories are told at once, and go on."""
    value = {"m": torch.full((3,), 2.0), "rank": rank}
    with CheckpointManager(CheckpointManager.Config(), timeout_s=90) as ckpt:
        ckpt.save(f"{folder}/paths/one", value, wait=True)
        ckpt.save(f"{folder}/more/one", value, wait=True)
        found: dict[str, Any] = {
            "known": outcome(lambda: ckpt.save(f"{folder}/{mine(rank, 'paths', 'more')}/two", value)),
            "unknown": outcome(lambda: ckpt.load(f"{folder}/{mine(rank, 'paths', 'nowhere')}/one")),
            "new": outcome(lambda: ckpt.save(f"{folder}/new{rank}/one", value)),
        }
        found["rank"] = ckpt.load(f"{folder}/paths/one")["rank"]
        ckpt.save(f"{folder}/paths/two", value, wait=True)
    return found
