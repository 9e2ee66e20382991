"""What the ranks of test_peers_faults.py do: a job of four ranks, and the one of two that goes on from it. Many checks in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from syckpt import CheckpointManager


def manager(folder: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, timeout_s=120, save_on_exit=False, **options)


def outcome(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - compared by the test
        return [type(exc).__name__, str(exc)]
    return ["", ""]


def laid_out(value: torch.Tensor, placement: Any) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(value, mesh, [placement], src_data_rank=None)


# -- saving ------------------------------------------------------------------------------------------------------------


def values(step: int) -> dict[str, torch.Tensor]:
    """Return the state of a step, whole, on every rank and in the test: what deltas by subtraction, or flat keys, would break."""
    made = torch.Generator().manual_seed(step)
    wide = torch.randn(10, 6, generator=made)
    wide[3] = torch.tensor([1e10, -0.0, float("inf"), float("nan"), 1e-3, -1e-38])[torch.randperm(6, generator=made)]
    return {
        "w": wide,
        "half": torch.randn(5, 3, generator=made).to(torch.bfloat16),
        "flags": torch.randint(0, 2, (9,), generator=made).bool(),
        "eighth": torch.randint(0, 250, (8, 2), generator=made, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "turned": torch.randn(6, 4, generator=made).t(),
        "plain": torch.randn(7, generator=made),
    }


def state(step: int) -> dict[str, Any]:
    """The same on ranks: sharded, by rows or columns, replicated, or plain; the same names at two depths."""
    whole = values(step)
    # Bits travel, whatever the dtype: each rank cuts its own part out.
    sharded = {name: laid_out(value, Shard(0)) for name, value in whole.items() if name not in ("turned", "plain")}
    return {
        **sharded,
        "turned": laid_out(whole["turned"], Shard(1)),
        "a.b": laid_out(whole["w"], Replicate()),
        "a": {"b": laid_out(whole["w"] + 1, Shard(0)), 1: laid_out(whole["plain"], Shard(0)), "1": whole["plain"]},
        "plain": whole["plain"],
    }


def overwrite(value: Any) -> None:
    """Fill every tensor with other bits, in place, as an optimizer would."""
    if isinstance(value, dict):
        for part in value.values():
            overwrite(part)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        local.view(torch.uint8).fill_(0x11) if local.is_contiguous() and local.numel() else None
        local.t().view(torch.uint8).fill_(0x11) if local.ndim == 2 and not local.is_contiguous() else None


class Net(nn.Module):
    """Two layers, one of which never takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 5)
        self.idle = nn.Linear(5, 3)
        self.head = nn.Linear(5, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.used(x))  # type: ignore[no-any-return]


def made_net(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    for layer in (net.used, net.idle, net.head):
        fully_shard(layer)
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01 * (seed + 1))


def net_state(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    return {
        "parameters": {name: parameter.full_tensor().tolist() for name, parameter in net.named_parameters()},
        "moments": {
            names[parameter]: {key: (value.full_tensor() if isinstance(value, DTensor) else value).tolist() for key, value in held.items()}
            for parameter, held in optimizer.state.items()
        },
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


class Stage(nn.Module):
    """Some of four layers, under the names that they have in all."""

    def __init__(self, numbers: range, *, seed: int) -> None:
        super().__init__()
        for number in numbers:
            torch.manual_seed(100 * seed + number)
            self.add_module(f"layer{number}", nn.Linear(3, 2 + number))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        sum(parameter.sum() * (1 + index) for index, parameter in enumerate(self.parameters())).backward()  # type: ignore[union-attr]
        optimizer.step()

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {
            name: [parameter.tolist(), *(value.tolist() for _, value in sorted(optimizer.state[parameter].items()))]
            for name, parameter in self.named_parameters()
        }


def on_four(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with manager(f"{folder}/state", rng=False) as ckpt:
        ckpt.values = live = state(0)
        pending = ckpt.save()
        overwrite(live)
        found["overwritten"] = pending.result().id
        found["looked"] = live["plain"].view(torch.uint8).unique().tolist()

        ckpt.values = state(1)
        found["same"] = [ckpt.save("once").result().id, ckpt.save().result().id]
        found["stored"] = [ckpt.log(2)[index].stats["encoded_bytes"] for index in (1, 0)]
        found["taken"] = outcome(lambda: ckpt.save("once", wait=True))

        chain = []
        for step in range(2, 7):
            ckpt.values = state(step)
            chain.append(ckpt.save())
        ckpt.wait()
        found["chain"] = [pending.id for pending in chain]

        ckpt.late = {"new": laid_out(torch.arange(12.0), Shard(0))}
        ckpt.values = {**state(7), "more": laid_out(torch.arange(5.0), Shard(0))}
        found["grown"] = ckpt.save().result().id

    net, optimizer = made_net(0)
    with manager(f"{folder}/net", rng=False) as ckpt:
        ckpt.net, ckpt.optimizer = net, optimizer
        torch.manual_seed(9)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
        ckpt.save(wait=True)
    found["net"] = net_state(net, optimizer)

    stage = Stage(range(rank, rank + 1), seed=1)
    own = torch.optim.Adam(stage.parameters(), lr=0.1)
    with manager(f"{folder}/stage", rng=False) as ckpt:
        ckpt.stage, ckpt.optimizer = stage, own
        stage.step(own)
        ckpt.save(wait=True)
    found["stage"] = stage.state(own)
    return found


# -- going on ----------------------------------------------------------------------------------------------------------


def on_two(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    net, optimizer = made_net(5)
    with manager(f"{folder}/net", rng=False) as ckpt:
        ckpt.net, ckpt.optimizer = net, optimizer
        ckpt.restore()
        found["net"] = net_state(net, optimizer)

    stage = Stage(range(2 * rank, 2 * rank + 2), seed=2)
    own = torch.optim.Adam(stage.parameters(), lr=7.0)
    with manager(f"{folder}/stage", rng=False) as ckpt:
        ckpt.stage, ckpt.optimizer = stage, own
        ckpt.restore()
        found["stage"] = stage.state(own)
        found["stage lr"] = own.param_groups[0]["lr"]

    with manager(f"{folder}/state", rng=False, auto_resume=False) as ckpt:
        found["loaded"] = {str(rev): same_as(ckpt, rev, step) for rev, step in (("once", 1), ("HEAD~1", 6), ("HEAD", 7))}
        found["refused"] = {name: refused(ckpt, rank, wrong) for name, wrong in WRONG.items()}
        into = {"values": {"w": laid_out(torch.zeros(10, 6), Shard(1)), "no": torch.zeros(2)}}
        found["lenient"] = outcome(lambda: ckpt.load("HEAD", into=into, strict=False))
        report = ckpt.last_report
        found["report"] = [report.missing, sorted(report.unexpected), report.mismatched]
        found["filled"] = bits(into["values"]["w"].full_tensor()) == bits(values(7)["w"])
    return found


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()  # type: ignore[no-any-return]


def same_as(ckpt: CheckpointManager, rev: str, step: int) -> bool:
    """Whether a commit fills targets that lie otherwise than what was saved, and every bit is that of the step."""
    whole = values(step)
    into = {name: laid_out(torch.zeros_like(value), Shard(value.ndim - 1)) for name, value in whole.items()}
    ckpt.load(rev, into={"values": into}, partial=[f"values/{name}" for name in into])
    boxes = {name: value.placements[0].dim for name, value in into.items()}
    return all(
        bits(into[name].to_local()) == bits(laid_out(value, Shard(boxes[name])).to_local())  # type: ignore[attr-defined]
        for name, value in whole.items()
    )


WRONG: dict[str, Callable[[], torch.Tensor]] = {
    "larger": lambda: laid_out(torch.zeros(11, 6), Shard(0)),
    "smaller": lambda: laid_out(torch.zeros(9, 6), Shard(0)),
    "of one dimension": lambda: laid_out(torch.zeros(60), Shard(0)),
    "of another dtype": lambda: laid_out(torch.zeros(10, 6, dtype=torch.int32), Shard(0)),
    "to broadcast": lambda: laid_out(torch.zeros(1, 6), Replicate()),
}


def refused(ckpt: CheckpointManager, rank: int, wrong: Callable[[], torch.Tensor]) -> list[Any]:
    """Load into targets of which one is wrong, on all ranks; return what came of it, and whether any other tensor was touched."""
    into = {"plain": torch.full((7,), 3.0), "w": wrong()}
    met = outcome(lambda: ckpt.load("HEAD", into={"values": into}, partial=["values/plain", "values/w"]))
    return [*met, into["plain"].tolist() == [3.0] * 7, not bool(into["w"].to_local().any())]  # type: ignore[attr-defined]
