"""The parts of test_reshard.py that run in each rank. Every rank makes the same calls, so that their collectives match."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from syckpt.checkpoint.manager import CheckpointManager

NONE = CheckpointManager.Config(compression="none")
BIG = (33280, 1024)  # 130 MiB of float32: 65 blocks a shard on two ranks
SHAPES = ((), (1,), (3,), (0, 4), (8, 5), (7, 1, 3), (64, 33), (300, 1201))  # the last one has two blocks
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.uint8)


def manager(root: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, timeout_s=90, save_on_exit=False, **options)


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


# --- tensors in random layouts --------------------------------------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    """Return the same values on every rank of every job: random bits, so that a wrong place shows."""
    found = {}
    for number, shape in enumerate(SHAPES):
        for dtype in DTYPES[number % 2 :: 2]:
            name = f"{'x'.join(map(str, shape))}_{str(dtype)[6:]}"
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            nbytes = math.prod(shape) * dtype.itemsize
            found[name] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    return found


def laid_out(values: dict[str, torch.Tensor], *, seed: int, empty: bool = False) -> dict[str, torch.Tensor]:
    """Return the values, or zeros, each in a random layout: plain, or a mesh of one or two dimensions with any placements."""
    choose = random.Random(seed)
    world_size = dist.get_world_size()
    shapes = [(world_size,), *((n, world_size // n) for n in range(1, world_size + 1) if world_size % n == 0)]
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        source = torch.zeros_like(value) if empty else value.clone()
        shape = choose.choice(shapes)
        kinds: list[Any] = [Replicate(), *(Shard(dim) for dim in range(value.ndim))] * 2
        placements = choose.choices(kinds, k=len(shape))
        # Each rank cuts out its own part: scattering sends no bits of some dtypes.
        found[name] = source if choose.random() < 0.1 else distribute_tensor(source, mesh_of(shape), placements, src_data_rank=None)
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, tensor in found.items():
        a, b = local(tensor), local(expected[name])
        assert a.shape == b.shape, (what, name)
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), (what, name)


def load_everywhere(ckpt: CheckpointManager, rev: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        targets = laid_out(tensors(), seed=seed, empty=True)
        loaded = ckpt.load(rev, into={"t": targets})["t"]
        assert all(loaded[name] is targets[name] for name in targets)
        assert_same(targets, laid_out(tensors(), seed=seed), f"{rev} into layout {seed}")


def tensors_job(root: str, revs: Sequence[str], save_as: str, seed: int) -> None:
    with manager(root, auto_resume=False) as ckpt:
        for rev in revs:
            load_everywhere(ckpt, rev, (seed,))
        # A -> B -> A within the job.
        for number in range(2):
            targets = laid_out(tensors(), seed=seed + number)
            ckpt.save(f"{save_as}-{number}", {"t": targets}, wait=True)
            other = laid_out(tensors(), seed=seed + 50 + number, empty=True)
            ckpt.load(f"{save_as}-{number}", into={"t": other})
            ckpt.save(f"{save_as}-{number}-b", {"t": other}, wait=True)
            back = laid_out(tensors(), seed=seed + number, empty=True)
            ckpt.load(f"{save_as}-{number}-b", into={"t": back})
            assert_same(back, targets, f"A -> B -> A, layout {seed + number}")


# --- models under every parallelism ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(10, 22), nn.Linear(22, 6), nn.Parameter(torch.ones(3))


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a fresh model of random values, and its fresh optimizer."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = Net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        return model, torch.optim.AdamW(wrapped.parameters(), lr=1e-2, foreach=False)
    if kind == "fsdp":
        fully_shard(model.up, mesh=mesh_of((world_size,)))
        fully_shard(model, mesh=mesh_of((world_size,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=mesh_of((2, world_size // 2), ("replicate", "shard")))
    elif kind == "tp":
        parallelize_module(model, mesh_of((world_size,)), plan)
    elif kind == "tp_fsdp":
        mesh = mesh_of((2, world_size // 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {name: digest(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": digest(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def models_job(root: str, kinds: Sequence[str]) -> list[dict[str, str]]:
    """Resume under each kind of parallelism what the one before it saved; the very first one makes a step."""
    found = []
    for kind in kinds:
        model, optimizer = build(kind)
        with manager(root) as ckpt:
            if ckpt.resumed is None:
                for parameter in model.parameters():
                    parameter.grad = parameter.detach() * 0.1
                optimizer.step()
            ckpt.optimizer = optimizer  # waits for the model
            ckpt.model = model
            found.append(digests(model, optimizer))
            ckpt.save(wait=True)
    return found


# --- bytes --------------------------------------------------------------------------------------------------------------------------


def big(placement: Any, *, empty: bool = False) -> DTensor:
    mesh = mesh_of((dist.get_world_size(),))
    values = torch.zeros(BIG) if empty else torch.arange(math.prod(BIG), dtype=torch.float32).reshape(BIG)
    return distribute_tensor(values, mesh, [placement], src_data_rank=None)


def save_big(root: str) -> None:
    with manager(root, config=NONE, rng=False) as ckpt:
        ckpt.save(None, {"w": big(Shard(0)), "small": big(Shard(0))[:4096].redistribute(placements=[Shard(0)])}, wait=True)


def count_bytes(root: str) -> dict[str, Any]:
    """Load one tensor of 130 MiB by rows, another of 16 MiB by columns; return what was asked of the byte store."""
    found = {}
    with manager(root, auto_resume=False) as ckpt:
        store = ckpt._repository.store
        readinto = store.readinto
        asked: list[tuple[str, int, int]] = []

        def counting(key: str, buffer: Any, *, offset: int = 0) -> Any:
            asked.append((key, offset, len(buffer)))
            return readinto(key, buffer, offset=offset)

        store.readinto = counting  # type: ignore[method-assign]
        mesh = mesh_of((dist.get_world_size(),))
        for name, rows, placement in (("w", BIG[0], Shard(0)), ("small", 4096, Shard(1))):
            target = distribute_tensor(torch.zeros(rows, BIG[1]), mesh, [placement], src_data_rank=None)
            asked.clear()
            ckpt.load("HEAD", into={name: target}, partial=[name])
            expected = torch.arange(rows * BIG[1], dtype=torch.float32).reshape(rows, BIG[1])
            assert torch.equal(target.to_local(), distribute_tensor(expected, mesh, [placement], src_data_rank=None).to_local())
            blocks = [(key, offset, size) for key, offset, size in asked if key.endswith(".safetensors")]
            found[name] = {
                "needed": target.to_local().nbytes,
                "counted": ckpt.last_report.bytes_read,
                "asked": sum(size for _, _, size in blocks),
                "twice": len(blocks) - len({(key, offset) for key, offset, _ in blocks}),
                "resharded": ckpt.last_report.resharded,
            }
    return found


# --- what cannot be saved -------------------------------------------------------------------------------------------------------------


def refusals(root: str, rank: int) -> dict[str, list[str]]:
    """Save what has no meaning, on all ranks or on one; the next save succeeds."""
    world_size = dist.get_world_size()
    mesh = mesh_of((world_size,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    whole = distribute_tensor(torch.ones(world_size * 2), mesh, [Shard(0)], src_data_rank=None)
    with manager(root) as ckpt:
        found = {
            "partial": outcome(lambda: ckpt.save(None, {"t": {"w": partial}}, wait=True)),
            "partial_on_one": outcome(lambda: ckpt.save(None, {"t": {"w": partial if rank == 1 else whole}}, wait=True)),
            "mixed": outcome(lambda: ckpt.save(None, {"t": {"w": whole if rank == 0 else torch.ones(2)}}, wait=True)),
            "good": outcome(lambda: ckpt.save(None, {"t": {"w": whole}}, wait=True)),
        }
    return found


# --- jobs -------------------------------------------------------------------------------------------------------------------------------


def on_two(rank: int, folder: str) -> dict[str, Any]:
    tensors_job(f"{folder}/t", [], "two", 100)
    save_big(f"{folder}/big")
    return {"models": models_job(f"{folder}/m", ["ddp", "fsdp", "tp"])}


def on_four(rank: int, folder: str) -> dict[str, Any]:
    tensors_job(f"{folder}/t", ["two-0", "two-1-b"], "four", 200)
    return {
        "models": models_job(f"{folder}/m", ["tp_fsdp", "hsdp", "ddp"]),
        "bytes": count_bytes(f"{folder}/big"),
        "refusals": refusals(f"{folder}/r", rank),
    }


def on_three(rank: int, folder: str) -> dict[str, Any]:
    tensors_job(f"{folder}/t", ["two-1", "four-0"], "three", 300)
    return {"models": models_job(f"{folder}/m", ["fsdp"])}


def back_on_two(rank: int, folder: str) -> dict[str, Any]:
    with manager(f"{folder}/t", auto_resume=False) as ckpt:
        for rev in ("two-0", "three-1", "four-1", "one"):
            load_everywhere(ckpt, rev, (100,))
    return {"models": models_job(f"{folder}/m", ["fsdp"])}


# --- shares: who stores what, save after save --------------------------------------------------------------------------------------------


class Part:
    """A stateful object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def deep() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return twenty layers of which the optimizer has two moments each: sixty tensors, all of one size, and small ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(20)))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return model, optimizer


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def share(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer = deep()
    wrapped = DistributedDataParallel(model)
    make_step(model, optimizer)
    found: dict[str, Any] = {"nbytes": sum(p.nbytes for p in model.parameters())}
    found["nbytes"] += sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    with manager(f"{folder}/none", config=NONE) as ckpt:
        ckpt.model, ckpt.optimizer = wrapped, optimizer
        found["none"] = ckpt.save().result().id

    group = dist.group.WORLD
    assert group is not None
    with manager(f"{folder}/fast") as ckpt:
        ckpt.model, ckpt.optimizer = wrapped, optimizer
        commits, agreements = [], []
        before = group._get_sequence_number_for_group()
        for _ in range(3):
            count = ckpt._coordinator.agreements
            pending = ckpt.save()
            agreements.append(ckpt._coordinator.agreements - count)
            commits.append(pending.result().id)
            make_step(model, optimizer)
        ckpt.load("HEAD")
        ckpt.wait()
        found["collectives"] = group._get_sequence_number_for_group() - before
        dist.barrier()
        found["sees_collectives"] = group._get_sequence_number_for_group() - before
        found |= {"commits": commits, "agreements": agreements}

    texts = Warnings()
    logging.getLogger("syckpt").addHandler(texts)
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(float(rank))
    with manager(f"{folder}/own") as ckpt:
        ckpt.norm = norm
        ckpt.note = {"rank": rank, "same": 7}
        ckpt.part = {"a": torch.ones(2)} if rank == 0 else {"b": torch.full((2,), 2.0)}
        ckpt.stage = Part(rank)
        found["own"] = ckpt.save().result().id
    found["warnings"] = texts.texts
    again = nn.BatchNorm1d(3)
    with manager(f"{folder}/own") as ckpt:
        ckpt.norm, ckpt.stage, ckpt.note, ckpt.part = again, (stage := Part(None)), None, None
        found["restored"] = [again.running_mean.tolist(), stage.value, ckpt.note, {k: v.tolist() for k, v in ckpt.part.items()}]
    return found


def share_on_two(rank: int, folder: str) -> dict[str, Any]:
    with manager(f"{folder}/own") as ckpt:
        ckpt.note, ckpt.part = None, None
        stage = outcome(lambda: ckpt.register("stage", Part(None)))
        norm = outcome(lambda: ckpt.register("norm", nn.BatchNorm1d(3)))
        part = {key: value.tolist() for key, value in ckpt.part.items()}
        return {"note": ckpt.note, "part": part, "stage": stage, "norm": norm, "per_rank": ckpt.last_report.per_rank}
