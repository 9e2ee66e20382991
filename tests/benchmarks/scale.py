"""What a rank of a large job needs to plan its load: CPU seconds, documents and memory; the bars are 1 s for 1,024 ranks, 2 s for 8,192.

    python tests/benchmarks/scale.py [--ranks 1024] [--tensors 1000] [--saved fsdp|hsdp|ddp] [--to 8 1024 512 768]

The commit is simulated (`syckpt.testing.simulation`): its documents are made when they are read, which is not counted. The reader is one
rank of a job whose process group is fake, with DTensors of its own: it opens the commit, fits it to its targets, and plans which blocks
to read (`dry_run`). Jobs of a 128th of the ranks, of the same size, of half of it, and of three quarters (whose parts are cut elsewhere).
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from syckpt.checkpoint import loader
from syckpt.checkpoint.content import Content
from syckpt.checkpoint.source import Source
from syckpt.repo.reader import Reader
from syckpt.reshard.layout import Layout, Replicate, Shard, local_shape
from syckpt.testing.simulation import Simulated, Tensor, simulate

NODE = 8  # ranks that share one copy under hsdp


def mesh_of(saved: str, ranks: int) -> tuple[int, ...]:
    return (ranks // NODE, NODE) if saved == "hsdp" else (ranks,)


def state(saved: str, ranks: int, count: int) -> list[Tensor]:
    """Return weights, embeddings, biases and norms as of a transformer, and a tenth of small tensors that every rank has."""
    mesh = mesh_of(saved, ranks)
    placements = (Replicate(), Shard(0)) if saved == "hsdp" else (Shard(0),)
    rows = NODE if saved == "hsdp" else ranks
    tensors = []
    for number in range(count):
        layer = f"layers.{number // 10}"
        # At most a block a part.
        shape = [(2 * rows, 4096), (rows + rows // 3, 1024), (4096,), (rows * 3 + 1, 512)][number % 4]
        if number % 10 == 0 or saved == "ddp":
            tensors.append(Tensor(("model", f"{layer}.scale.{number}"), "float32", (64,), None))
        else:
            layout = Layout(shape, mesh, tuple(range(ranks)), placements)
            tensors.append(Tensor(("model", f"{layer}.linear{number % 10}.weight"), "bfloat16", shape, layout))
    return tensors


def targets(tensors: list[Tensor], mesh: DeviceMesh, coordinate: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return what the reading rank has."""
    placements = [TorchReplicate(), TorchShard(0)] if mesh.ndim == 2 else [TorchShard(0)]
    ours = (Replicate(), Shard(0)) if mesh.ndim == 2 else (Shard(0),)
    found: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        kind = getattr(torch, tensor.dtype)
        if tensor.layout is None:
            found[tensor.path[1]] = torch.zeros(tensor.shape, dtype=kind)
            continue
        layout = Layout(tensor.shape, tuple(mesh.shape), tuple(range(mesh.size())), ours)
        local = torch.zeros(local_shape(layout, coordinate), dtype=kind)
        stride = torch.empty(tensor.shape, device="meta").stride()
        found[tensor.path[1]] = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(tensor.shape), stride=stride)
    return found


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def plan(simulated: Simulated, tensors: list[Tensor], saved: str, ranks: int, world_size: int) -> str:
    """Plan a load of one rank of a job of that size; return a line of figures."""
    rank = world_size // 3
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    shape = mesh_of(saved, world_size)
    mesh = DeviceMesh("cpu", torch.arange(world_size).reshape(shape))
    coordinate = (rank // NODE, rank % NODE) if len(shape) == 2 else (rank,)
    into: dict[str, Any] = {"model": targets(tensors, mesh, coordinate)}
    simulated.reads.clear()
    gc.collect()
    before, made, began = resident(), simulated.made_s, time.process_time()
    source = Source(Reader(simulated.repository), simulated.commit, rank=rank, world_size=world_size)
    opened = time.process_time() - began - (simulated.made_s - made)
    loader.read(source, into, dry_run=True)
    total = time.process_time() - began - (simulated.made_s - made)
    grown = resident() - before
    dist.destroy_process_group()
    return (
        f"{saved}, {ranks} -> {world_size} ranks: {total:.2f} s CPU (opened after {opened:.2f}), {simulated.reads['manifest']} manifests,"
        f" {grown / 1e6:.0f} MB"
    )


def each(simulated: Simulated, *, count: int = 32) -> float:
    """Return how many milliseconds of CPU opening one more manifest takes, with its locations, when one was opened before."""
    content = Content(Reader(simulated.repository), simulated.commit)
    assert content.sharding[0] == {}
    gc.collect()
    made, began = simulated.made_s, time.process_time()
    for rank in range(1, count + 1):
        assert content.sharding[rank] == {}
    return (time.process_time() - began - (simulated.made_s - made)) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--saved", choices=["fsdp", "hsdp", "ddp"], default="fsdp")
    parser.add_argument("--to", type=int, nargs="*", help="sizes of the jobs that read it")
    arguments = parser.parse_args()
    tensors = state(arguments.saved, arguments.ranks, arguments.tensors)
    simulated = simulate(tensors, world_size=arguments.ranks)
    ranks, nbytes = arguments.ranks, simulated.table_nbytes
    print(f"table of layouts of {ranks} ranks x {len(tensors)} tensors: {nbytes} bytes stored, {nbytes / len(tensors):.1f} a tensor")
    print(f"one more manifest: {min(each(simulated) for _ in range(3)):.1f} ms CPU")
    for world_size in arguments.to or (ranks // 128, ranks, ranks // 2, ranks * 3 // 4):
        print(plan(simulated, tensors, arguments.saved, arguments.ranks, world_size), flush=True)


if __name__ == "__main__":
    main()
