"""Each item under a file and in a format of its own, and loader progress that goes on with any number of ranks. Run both, in turn:

python examples/04_layouts.py --dir runs/layouts
torchrun --nproc-per-node 2 examples/04_layouts.py --dir runs/layouts
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syckpt import (
    CheckpointManager,
    DistributedItemMetadata,
    ItemSpec,
    JsonSerialization,
    LayoutInfo,
    NestedPath,
    NotFoundError,
    Resharder,
    SafetensorsSerialization,
    SerializationFormat,
    ShardingMetadata,
    Storage,
    TorchSerialization,
)


class Lines(SerializationFormat):
    """A format of one's own: a name, and both directions."""

    name = "lines"

    def encode(self, value: Any) -> bytes:
        return "\n".join(value).encode()

    def decode(self, data: bytes) -> Any:
        return data.decode().split("\n")


class Progress(Resharder):
    """Samples that ranks have consumed: on another number of ranks, their sum is dealt out anew."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]:
        return {}  # no tensors

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[NestedPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[NestedPath]:
        total = sum(storage.read_value(source_metadata, rank, ("consumed",)) for rank in source_metadata.by_rank)
        target["consumed"] = total // target["ranks"] + (target["rank"] < total % target["ranks"])
        return [("consumed",), ("rank",), ("ranks",)]


CONFIG = CheckpointManager.Config(
    items={
        "model": ItemSpec(layout=LayoutInfo("model_{rank}.pt", TorchSerialization())),
        "optimizer": ItemSpec(layout=LayoutInfo("optimizer_{rank}.pt", TorchSerialization())),
        "release": ItemSpec(layout=LayoutInfo("release.safetensors", SafetensorsSerialization(metadata={"format": "pt"}))),
        "misc": ItemSpec(requires_copy=False, layout=LayoutInfo("misc_{rank}.json", JsonSerialization())),
        "vocabulary": ItemSpec(layout=LayoutInfo("vocabulary.txt", Lines())),
        "loader": ItemSpec(requires_copy=False, resharder=Progress()),
    },
    default=None,  # a key that is not listed is an error
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state(step: int, consumed: int) -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "release": {"net": model.state_dict()},
            "misc": {"step": step, "epoch": step // 10},
            "vocabulary": ["the", "quick", "brown", "fox"],
            "loader": {"rank": rank, "ranks": ranks, "consumed": consumed},
        }

    step, consumed = 0, 0
    with CheckpointManager(CONFIG) as manager:  # no root: a checkpoint is a path
        try:
            restored = manager.load(args.dir / "latest", into=state(step, consumed))  # tensors of the model are filled in place
            optimizer.load_state_dict(restored["optimizer"])
            step, consumed = restored["misc"]["step"], restored["loader"]["consumed"]
        except NotFoundError:
            pass  # the first time
        for _ in range(20):
            loss = model(torch.randn(8, 32)).square().mean()  # the same on every rank, to be short
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, consumed = step + 1, consumed + 8
        manager.save(args.dir / f"step-{step}", state(step, consumed), wait=True)
        print(f"rank {rank} of {ranks}: step {step}, {consumed} samples; see `syckpt -C {args.dir} ls HEAD --files`", flush=True)
    if dist.is_torchelastic_launched():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
