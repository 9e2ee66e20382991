"""The parts of test_layouts_change.py that run in each rank (and, for a single process, in the test's own)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from syckpt import CheckpointManager, ItemSpec


def manager(root: str, config: Any = None, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, config, timeout_s=90, save_on_exit=False, **options)


def outcome(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - compared by the test
        return [type(exc).__name__, str(exc)]
    return ["", ""]


def digest(tensor: Any) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# --- one model under every kind of parallelism, each into each ------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 14), nn.Linear(14, 5), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).sum() * self.scale.sum()


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a fresh model of random values, and its fresh optimizer."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = Net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "fsdp":
        fully_shard(model.up, mesh=mesh_of((world_size,)))
        fully_shard(model, mesh=mesh_of((world_size,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=mesh_of((2, world_size // 2), ("replicate", "shard")))
    elif kind == "tp":
        parallelize_module(model, mesh_of((world_size,)), plan)
    elif kind == "ddp":
        DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {name: digest(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": digest(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def layouts(root: str, kinds: Sequence[str], earlier: Sequence[str], prefix: str) -> dict[str, Any]:
    """Save the same state under every kind, then read each commit, and the earlier ones, under every kind."""
    found: dict[str, Any] = {}
    first = earlier[0] if earlier else None
    for kind in kinds:
        model, optimizer = build(kind)
        with manager(root, auto_resume=False, branch=f"{prefix}-{kind}") as ckpt:
            if first is None:
                torch.manual_seed(5)
                for parameter in model.parameters():
                    with torch.no_grad():
                        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).uniform_()
                    parameter.grad = parameter.detach() * 0.1
                optimizer.step()
                first = f"{prefix}-{kind}-commit"
            ckpt.model, ckpt.optimizer = model, optimizer
            if first != f"{prefix}-{kind}-commit":
                ckpt.goto(first)
            found[kind] = digests(model, optimizer)
            ckpt.save(f"{prefix}-{kind}-commit", wait=True)
    commits = [*earlier, *(f"{prefix}-{kind}-commit" for kind in kinds)]
    for kind in kinds:
        for commit in commits:
            model, optimizer = build(kind)
            with manager(root, auto_resume=False, branch=f"{prefix}-{kind}") as ckpt:
                ckpt.model, ckpt.optimizer = model, optimizer
                ckpt.goto(commit)
                found[f"{commit} under {kind}"] = digests(model, optimizer)
    return found


# --- dictionaries of torch.distributed.checkpoint.state_dict ---------------------------------------------------------------------------


def state_dicts(root: str, kind: str, *, save: bool) -> dict[str, str]:
    """Save, or load, a model and its optimizer through what torch's own helper makes of them: state by parameter name."""
    torch.manual_seed(int(save))
    model, optimizer = build(kind)
    with manager(root, auto_resume=False, branch=f"dcp-{kind}") as ckpt:
        if save:
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.1
            optimizer.step()
            payload = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            ckpt.save("dcp", payload, wait=True)
        else:
            into = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            loaded = ckpt.load("dcp", into=into)
            set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    return digests(model, optimizer)


# --- FSDP1 ------------------------------------------------------------------------------------------------------------------------------


class Fsdp1Optimizer:
    """An FSDP1 model's optimizer as a component: its state by parameter name, whole."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
            return FSDP.optim_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
            self.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self.model, self.optimizer, state))


def fsdp1(root: str) -> dict[str, Any]:
    """Save, or resume, an FSDP1 model whose state is in ShardedTensors; read it as FSDP2, and whole, too."""
    torch.manual_seed(dist.get_world_size())
    model = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    component = Fsdp1Optimizer(model, optimizer)
    with manager(root) as ckpt:
        resumed = ckpt.resumed is not None
        if not resumed:
            model(torch.ones(2, 6)).backward()
            optimizer.step()
        ckpt.model, ckpt.optimizer = model, component
        sharded = {name: type(value).__name__ for name, value in model.state_dict().items()}
        ckpt.save("fsdp1", wait=True) if not resumed else ckpt.save(wait=True)
        again = build("fsdp")[0]
        ckpt.load("fsdp1", into={"model": again.state_dict()})
        other = {name: digest(value) for name, value in again.state_dict().items()}
    with manager(root, branch="refused", auto_resume=False) as ckpt:
        ckpt.model, ckpt.optimizer = model, optimizer
        refused = outcome(lambda: ckpt.save(wait=True))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = {name: digest(value) for name, value in model.state_dict().items()}
    state = component.state_dict()["state"]
    moments = {f"{name} {key}": digest(value) for name, values in state.items() for key, value in values.items()}
    return {"resumed": resumed, "kinds": sharded, "whole": whole, "other": other, "moments": moments, "refused": refused}


# --- pipeline stages ------------------------------------------------------------------------------------------------------------------


def stage(rank: int, world_size: int, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the layers of this rank's stage out of eight, under the names that they have in the whole model."""
    torch.manual_seed(seed)
    each = 8 // world_size
    whole = {f"layer{number}": nn.Linear(3, 3) for number in range(8)}
    model = nn.ModuleDict({name: layer for number, (name, layer) in enumerate(whole.items()) if number // each == rank})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def stages(root: str, rank: int, world_size: int, *, seed: int) -> dict[str, Any]:
    model, optimizer = stage(rank, world_size, seed=seed)
    with manager(root) as ckpt:
        if ckpt.resumed is None:
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.1
            optimizer.step()
        ckpt.model, ckpt.optimizer = model, optimizer
        found = digests(model, optimizer)
        notes = [note for note in ckpt.last_report.notes if note.startswith("optimizer")]
        ckpt.save(wait=True)
        optimizer.step()
    return {"digests": found, "notes": notes, "lr": optimizer.param_groups[0]["lr"]}


# --- replicas that are none -------------------------------------------------------------------------------------------------------------


class Own:
    """A stateful object whose state is each rank's own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def norm(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    torch.manual_seed(1)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(3, 3))
        model[1].running_mean.fill_(float(rank))
    return model


def diverged(root: str, rank: int) -> dict[str, Any]:
    big = torch.zeros(1 << 16)
    big[12345] = float(rank == 1)  # not among the elements that are sampled
    model = DistributedDataParallel(norm(rank))
    model.module[1].running_mean.fill_(float(rank))  # wrapping made it rank 0's
    with manager(root) as ckpt:
        ckpt.model, ckpt.own, ckpt.other, ckpt.strict = model, Own(rank), Own(rank), Own(rank)
        ckpt.save("run", wait=True)
    config = CheckpointManager.Config(check_replicas="full")
    with manager(root, config, auto_resume=False) as ckpt:
        ckpt.save("full", {"big": big}, wait=True)
    with manager(root, auto_resume=False) as ckpt:
        ckpt.save("sampled", {"big": big}, wait=True)
        full, sampled = ckpt.load("full")["big"], ckpt.load("sampled")["big"]
    with manager(root, auto_resume=False) as ckpt:
        ckpt.model = nn.ModuleDict({"part": model, "other": nn.Linear(2, 2)})
        ckpt.save("parts", wait=True)
    alone = DistributedDataParallel(norm(rank), broadcast_buffers=False)
    with manager(root, auto_resume=False) as ckpt:
        ckpt.model = alone
        alone.module[1].running_mean.fill_(float(rank))
        ckpt.save("alone", wait=True)
    model = DistributedDataParallel(norm(9))
    with manager(root, branch="again", base="run") as ckpt:
        ckpt.model = model
    return {
        "mean": model.module[1].running_mean.tolist(),
        "full": full[12345].item(),
        "sampled": sampled[12345].item(),
    }


def diverged_on_two(root: str, rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(norm(9))
    items = {
        "other": ItemSpec(on_world_change="rank0"),
        "own": ItemSpec(on_world_change="mod"),
        "strict": ItemSpec(on_world_change="raise"),
    }
    own, other = Own(None), Own(None)
    with manager(root, CheckpointManager.Config(items=items), branch="two", base="run") as ckpt:
        ckpt.model, ckpt.own, ckpt.other = model, own, other
        found = {
            "mean": model.module[1].running_mean.tolist(),
            "own": own.value,
            "other": other.value,
            "notes": [note for note in ckpt.last_report.notes if "differed" in note],
            "strict": outcome(lambda: ckpt.register("strict", Own(None))),
        }
    compiled = torch.compile(DistributedDataParallel(norm(9)), backend="eager")
    with manager(root, branch="two-compiled", base="run") as ckpt:
        ckpt.model = compiled
        found["compiled"] = [compiled.module[1].running_mean.tolist(), [note for note in ckpt.last_report.notes if "differed" in note]]
    plain = nn.ModuleDict({"module": norm(9)})
    with manager(root, branch="two-unwrapped", base="run") as ckpt:
        ckpt.model = plain
        found["unwrapped"] = plain["module"][1].running_mean.tolist()
    silent = DistributedDataParallel(norm(9), broadcast_buffers=False)
    with manager(root, branch="two-silent", base="alone") as ckpt:
        found["silent"] = outcome(lambda: ckpt.register("model", silent))
    ignoring = norm(9)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["1.running_mean"])
    with manager(root, branch="two-ignoring", base="alone") as ckpt:
        found["ignored"] = outcome(lambda: ckpt.register("model", DistributedDataParallel(ignoring)))
    part = nn.ModuleDict({"part": DistributedDataParallel(norm(9)), "other": nn.Linear(2, 2)})
    with manager(root, branch="two-part", base="parts") as ckpt:
        ckpt.model = part
        found["part"] = part["part"].module[1].running_mean.tolist()
    with manager(root, branch="two-plain", base="alone") as ckpt:
        found["plain"] = outcome(lambda: ckpt.register("model", nn.ModuleDict({"module": norm(9)})))
    with manager(root, branch="two-unsaid", base="run") as ckpt:
        found["unsaid"] = outcome(lambda: ckpt.register("own", Own(None)))
    with manager(
        root, CheckpointManager.Config(items={"note": ItemSpec(on_world_change="raise")}), auto_resume=False, branch="two"
    ) as ckpt:
        found["payload"] = outcome(lambda: ckpt.load("payload", into={"note": {"rank": -1}}))
    return found


# --- one read for all -------------------------------------------------------------------------------------------------------------------


def wide(rank: int) -> dict[str, torch.Tensor]:
    """Twelve tensors of 3 MiB, one of 40, and small ones: more than a round."""
    generator = torch.Generator().manual_seed(3)
    found = {f"w{number}": torch.randn(3 << 18, generator=generator) for number in range(12)}
    return found | {"large": torch.randn(40, 1 << 18, generator=generator), "scalar": torch.tensor(7), "empty": torch.empty(0, 3)}


def broadcast(root: str, rank: int) -> dict[str, Any]:
    values = wide(rank)
    config = CheckpointManager.Config(compression="none", read="broadcast")
    sharded = build("fsdp")[0].state_dict()
    with manager(root, config, rng=False) as ckpt:
        ckpt.save("wide", {"wide": values, "net": sharded, "mine": torch.full((4,), float(rank))}, wait=True)
        target = {name: torch.zeros_like(value) for name, value in values.items()}
        target["w1"] = torch.zeros(3 << 18, dtype=torch.float64)
        net = {name: torch.zeros_like(value) for name, value in sharded.items()}
        into = {"wide": target, "net": net, "mine": torch.zeros(4)}
        ckpt.load("wide", into=into, cast=True)
        found = {
            "equal": all(torch.equal(target[name], value.to(target[name].dtype)) for name, value in values.items()),
            "net": {name: digest(value) for name, value in net.items()} == {name: digest(value) for name, value in sharded.items()},
            "mine": into["mine"].tolist(),
            "bytes": ckpt.last_report.bytes_read,
        }
        fresh = ckpt.load("wide")["wide"]
        found["fresh"] = all(torch.equal(fresh[name], value) for name, value in values.items())
        # Sharded when it was saved, whole on every rank now.
        full = {name: torch.zeros(value.shape) for name, value in sharded.items()}
        ckpt.load("wide", into={"net": full}, partial=["net"])
        found["gathered"] = {name: digest(value) for name, value in full.items()} == {
            name: digest(value) for name, value in sharded.items()
        }
        found["misfit"] = outcome(lambda: ckpt.load("wide", into={"wide": {**target, "scalar": torch.zeros(2 if rank == 1 else ())}}))
        if rank == 0:
            flip(Path(root), ckpt.resumed.id if ckpt.resumed else str(ckpt.hash))
        dist.barrier()
        found["damaged"] = outcome(lambda: ckpt.load("wide", into=into, cast=True))
        found["again"] = outcome(lambda: ckpt.load("wide", into={"net": net}, partial=["net"]))
    return found


def flip(root: Path, commit: str) -> None:
    """Damage one rank's blob in its middle."""
    blob = root / f".syckpt/objects/{commit}/r00001.safetensors"
    with blob.open("r+b") as file:
        file.seek(blob.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


# --- jobs -------------------------------------------------------------------------------------------------------------------------------


def on_four(rank: int, folder: str) -> dict[str, Any]:
    found = {
        "layouts": layouts(f"{folder}/m", ["ddp", "fsdp", "tp", "hsdp"], ["single-plain-commit"], "four"),
        "dcp": state_dicts(f"{folder}/dcp", "hsdp", save=True),
        "fsdp1": fsdp1(f"{folder}/f1"),
        "stages": stages(f"{folder}/pp", rank, 4, seed=0),
        "diverged": diverged(f"{folder}/d", rank),
        "broadcast": broadcast(f"{folder}/b", rank),
    }
    with manager(f"{folder}/d", auto_resume=False, branch="notes") as ckpt:
        ckpt.save("payload", {"note": {"rank": rank}}, wait=True)
    return found


def on_two(rank: int, folder: str) -> dict[str, Any]:
    return {
        "layouts": layouts(f"{folder}/m", ["fsdp", "tp", "ddp"], ["single-plain-commit", "four-tp-commit", "four-hsdp-commit"], "two"),
        "dcp": [state_dicts(f"{folder}/dcp", kind, save=False) for kind in ("tp", "fsdp", "ddp")],
        "fsdp1": fsdp1(f"{folder}/f1"),
        "stages": stages(f"{folder}/pp", rank, 2, seed=1),
        "diverged": diverged_on_two(f"{folder}/d", rank),
    }
