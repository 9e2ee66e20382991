"""The part of test_seed_samples_ranks.py that runs in each of two ranks (and, for a single process, in the test's own)."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from syckpt import (
    CheckpointManager,
    DistributedItemMetadata,
    DTensorResharder,
    ItemSpec,
    JsonSerialization,
    LayoutInfo,
    NestedPath,
    Resharder,
    SafetensorsSerialization,
    ShardingMetadata,
    Storage,
    TorchSerialization,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "04_layouts.py"


class LoaderResharder(Resharder):
    """Loader progress: samples consumed are dealt out anew, and the queue of the samples ahead, a part a rank, is cut into new parts."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]:
        rank, ranks, queue = item_value["rank"], item_value["ranks"], item_value["queue"]
        return {("queue",): ShardingMetadata((queue.numel() * ranks,), queue.dtype, (((rank * queue.numel(),), (queue.numel(),)),))}

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[NestedPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[NestedPath]:
        total = sum(storage.read_value(source_metadata, rank, ("consumed",)) for rank in range(source_metadata.world_size))
        target["consumed"] = total // target["ranks"] + (target["rank"] < total % target["ranks"])
        (box,) = target_metadata[("queue",)].boxes
        target["queue"].copy_(storage.read_box(source_metadata, ("queue",), box.offsets, box.sizes))
        return [("consumed",), ("queue",), ("rank",), ("ranks",)]


class EmptyResharder(Resharder):
    """As a tutorial leaves it: there, and with nothing in it."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]: ...

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[NestedPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[NestedPath]: ...


def loader(rank: int, ranks: int, *, empty: bool = False) -> dict[str, Any]:
    """Seven samples consumed in all, of 32 ahead."""
    size = 32 // ranks
    queue = torch.zeros(size, dtype=torch.int64) if empty else torch.arange(rank * size, (rank + 1) * size)
    return {"rank": rank, "ranks": ranks, "consumed": 0 if empty else 7 // ranks + (rank < 7 % ranks), "queue": queue}


def manager(**options: Any) -> CheckpointManager:
    return CheckpointManager(
        CheckpointManager.Config(
            items={
                "model": ItemSpec(requires_copy=True, resharder=DTensorResharder()),
                "optimizer": ItemSpec(requires_copy=True, resharder=DTensorResharder()),
                "dataloader": ItemSpec(requires_copy=False, resharder=LoaderResharder()),
                "unwritten": ItemSpec(requires_copy=False, resharder=EmptyResharder()),
                "misc_state": ItemSpec(requires_copy=False, layout=LayoutInfo("misc_state_{rank}.json", JsonSerialization())),
                "flat": ItemSpec(layout=LayoutInfo("model_state_{rank}.pt", TorchSerialization())),
                "weights": ItemSpec(layout=LayoutInfo("weights_{rank}.safetensors", SafetensorsSerialization(metadata={"v": "1"}))),
                "whole": ItemSpec(layout=LayoutInfo("whole.pt", TorchSerialization())),
            },
        ),
        timeout_s=60,
        **options,
    )


def build(seed: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    if sharded:
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(state: Any) -> Any:
    """Return state as JSON knows it; of a DTensor all of it."""
    if isinstance(state, dict):
        return {str(key): plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [plain(value) for value in state]
    if isinstance(state, torch.Tensor):
        return (state.full_tensor() if isinstance(state, DTensor) else state).tolist()
    return state


def restore(path: str, rank: int, ranks: int) -> dict[str, Any]:
    """Load into fresh live targets, and tell what is in them."""
    model, optimizer = build(1, sharded=ranks > 1)
    with manager() as ckpt:
        into = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "dataloader": loader(rank, ranks, empty=True),
            "misc_state": {"step": 0, "rank": -1},
            "unwritten": {"consumed": 0},
        }
        queue = into["dataloader"]["queue"]
        restored = ckpt.load(path, into=into)
        optimizer.load_state_dict(restored["optimizer"])
        report = ckpt.last_report
    assert restored["dataloader"]["queue"] is queue
    return {
        "state": [plain(model.state_dict()), plain(optimizer.state_dict())],
        "dataloader": plain(restored["dataloader"]),
        "misc_state": restored["misc_state"],
        "unwritten": [restored["unwritten"], [note for note in report.notes if "unwritten" in note]],
        "handled": report.resharding.handled,
        "per_rank": report.per_rank,
    }


def save(path: str, rank: int, ranks: int) -> Any:
    model, optimizer = build(0, sharded=ranks > 1)
    train(model, optimizer)
    with manager() as ckpt:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "dataloader": loader(rank, ranks),
            "misc_state": {"step": 7, "rank": rank},
            "unwritten": {"consumed": 7 + rank},
            "flat": {"w": model.state_dict()["0.weight"], "mine": torch.full((2,), float(rank)), "same": torch.ones(3)},
            "weights": {"block": {"w": model.state_dict()["1.weight"]}},
            "whole": {"w": model.state_dict()["0.weight"], "step": 7},
        }
        ckpt.save(path, state)
        expected = [plain(model.state_dict()), plain(optimizer.state_dict())]
        train(model, optimizer)
    return expected


def outcome(call: Callable[[], Any]) -> list[Any]:
    try:
        return ["", call()]
    except Exception as exc:  # noqa: BLE001 - compared by the test
        return [type(exc).__name__, str(exc)]


# --- callbacks and other calls ---------------------------------------------------------------------------------------------------------


def callbacks(folder: str, rank: int) -> dict[str, Any]:
    told: list[Any] = []
    faulty: dict[str, int | None] = {"rank": None, "after": None}

    def before(commit: str) -> None:
        told.append(["before", commit])
        if faulty["rank"] == rank:
            raise RuntimeError(f"not on rank {rank}")

    def after(commit: Any) -> None:
        told.append(["durable", commit.id])
        if faulty["after"] == rank:
            raise RuntimeError(f"after, on rank {rank}")

    config = CheckpointManager.Config(
        pre_finalize_callback=before,
        finalize_callback=after,
        on_stats=lambda stats: told.append(["stats", "stall_s" in stats]),
    )
    found: dict[str, Any] = {}
    with CheckpointManager(folder, config, timeout_s=60, save_on_exit=False) as ckpt:
        ckpt.prewarm()  # nothing is registered yet
        ckpt.w = torch.full((50_000,), float(rank))
        ckpt.prewarm()
        ckpt.prewarm()
        ckpt.prewarm({"other": {"x": torch.zeros(9), "n": rank}})
        found["unequal prewarm"] = outcome(lambda: ckpt.prewarm({"x" if rank else "y": 1}))
        ids = [ckpt.save(wait=True).id, ckpt.save().id]
        ckpt.wait()
        found["told"] = [told == [x for id_ in ids for x in (["before", id_], ["stats", True], ["durable", id_])], told, ids]
        for at in (1, 0):
            faulty["rank"] = at
            found[f"fails on {at}"] = outcome(lambda: ckpt.save(wait=True).id)
            faulty["rank"] = None
            found[f"then, {at}"] = outcome(lambda: ckpt.save().result().parents[0])
            ids.append(str(ckpt.hash))
        faulty["after"] = 1
        ids.append(ckpt.save().result().id)
        faulty["after"] = None
        found["fails after"] = outcome(lambda: ckpt.save().id)
        found["then, after"] = outcome(lambda: ckpt.save().result().parents[0])
        ids.append(str(ckpt.hash))
        found["log"] = [commit.id for commit in ckpt.log()][::-1] == ids
    return found


def paths(folder: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with manager(when_busy="skip") as ckpt:
        found["other folders"] = outcome(lambda: ckpt.save(f"{folder}/{rank}/a", {"n": 1}))
        found["other names"] = outcome(lambda: ckpt.save(f"{folder}/c/{rank}", {"n": 1}))
        found["one file"] = outcome(lambda: ckpt.save(f"{folder}/c/x", {"whole": {"step": rank}}))
        found["goes on"] = outcome(lambda: ckpt.save(f"{folder}/c/x", {"whole": {"step": 1}}).result().name)
        found["prewarm"] = outcome(lambda: ckpt.prewarm({"n": torch.zeros(3)}))
        skipped = [ckpt.save(f"{folder}/c/s{n}", {"n": torch.full((2_000_000,), float(n))}) is None for n in range(6)]
        found["skipped"] = skipped
        ckpt.wait()
        found["kept"] = [
            outcome(lambda n=n: ckpt.load(f"{folder}/c/s{n}", into={"n": torch.zeros(2_000_000)})["n"][0].item()) for n in range(6)
        ]
    layout = LayoutInfo("n.json" if rank else "n_{rank}.json", JsonSerialization())
    config = CheckpointManager.Config(items={"n": ItemSpec(layout=layout)})
    with CheckpointManager(f"{folder}/d", config, timeout_s=60, save_on_exit=False) as other:
        found["other layouts"] = outcome(lambda: other.save("a", {"n": rank}))
        found["without it"] = outcome(lambda: other.save("a", {"m": rank}).result().name)
    return found


def export(folder: str, rank: int) -> Any:
    model, optimizer = build(0, sharded=True)
    train(model, optimizer)
    with CheckpointManager(folder, timeout_s=60) as ckpt:
        ckpt.model, ckpt.optimizer, ckpt.mine = model, optimizer, rank
        ckpt.save(epoch_end=False)
        ckpt.export_ckpt("HEAD", f"{folder}/made/all.pt")
        found = outcome(lambda: ckpt.export_ckpt("HEAD", f"{folder}/made"))
        return [plain(model.state_dict()), plain(optimizer.state_dict()), found]


def example(folder: str) -> None:
    """Run the example of layouts as it is; there is a process group already."""
    sys.argv = [str(EXAMPLE), "--dir", folder]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def on_two(rank: int, folder: str) -> dict[str, Any]:
    assert dist.get_world_size() == 2
    example(f"{folder}/example")
    return {
        "one to two": restore(f"{folder}/run/one", rank, 2),
        "saved": save(f"{folder}/run/two", rank, 2),
        "two to two": restore(f"{folder}/run/two", rank, 2),
        "callbacks": callbacks(f"{folder}/callbacks", rank),
        "paths": paths(f"{folder}/paths", rank),
        "export": export(f"{folder}/export", rank),
    }
