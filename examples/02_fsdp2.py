"""A small byte-level GPT trained with FSDP2. Kill it at any moment and go on with any number of ranks, on GPUs or without.

torchrun --standalone --nproc-per-node=4 examples/02_fsdp2.py --dir runs/fsdp2
torchrun --standalone --nproc-per-node=2 examples/02_fsdp2.py --dir runs/fsdp2
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from syckpt import CheckpointManager
from syckpt.dataloader import StatefulDistributedSampler

BLOCK, GLOBAL_BATCH, SEQUENCES = 64, 32, 1285  # 40 batches of all ranks together an epoch, and one of 5 samples
WIDTH, HEADS, LAYERS, DROPOUT = 128, 4, 6, 0.1  # 1.3 million parameters


def text() -> torch.Tensor:
    """The beginning of Python's own library: real text, on every machine, without a download."""
    source = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    return torch.tensor(list(source[: SEQUENCES * BLOCK + 1]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT if self.training else 0.0, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.token(x) + self.position.weight[: x.shape[1]], DROPOUT, self.training)
        return F.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs/fsdp2", help="where the checkpoints are (in .syckpt/)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=8, metavar="STEPS")
    parser.add_argument("--samples", type=Path, help="a folder: each rank appends to a file there which samples each step took")
    parser.add_argument("--commit-first", action="store_true", help="commit what was resumed before the first step too, to compare")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="every rank SIGKILLs itself right after that step")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    data = text()
    dataset = TensorDataset(data[:-1].view(-1, BLOCK), data[1:].view(-1, BLOCK), torch.arange(SEQUENCES))
    sampler = StatefulDistributedSampler(dataset, batch_size=GLOBAL_BATCH // ranks)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // ranks, sampler=sampler)
    torch.manual_seed(0)  # every rank begins with the same parameters, of which it then keeps its part
    model = GPT().to(device)
    for module in (*model.blocks, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # and has dropout masks of its own

    record = open(args.samples / f"rank{rank}.txt" if args.samples else os.devnull, "a")  # noqa: SIM115
    with record, CheckpointManager(args.dir) as ckpt:
        ckpt.model = model
        ckpt.optimizer = optimizer
        ckpt.sampler = sampler
        ckpt.config = {"lr": 1e-3, "batch_size": GLOBAL_BATCH, "architecture": "GPT", "width": WIDTH, "layers": LAYERS}
        if ckpt.resumed and rank == 0:
            print(f"resumed from {ckpt.resumed.id} at step {ckpt.resumed.step}: {ckpt.resumed.world_size} -> {ranks} ranks", flush=True)
        if ckpt.resumed and args.commit_first:
            ckpt.save(message=f"resumed on {ranks} ranks")

        for epoch in ckpt.loop(epochs=args.epochs):
            for x, y, ids in loader:
                loss = model(x.to(device), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.step_up()

                print(ckpt.resumed.id if ckpt.resumed else "-", ckpt.step, epoch, *ids.tolist(), file=record, flush=True)
                if ckpt.step % args.save_every == 0:
                    ckpt.save()  # returns at once, written in the background
                if ckpt.step == args.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            ckpt.save(metric=mean.item(), message=f"epoch-{epoch}")
            if rank == 0:
                print(f"Epoch {epoch} | Loss: {mean.item():.4f} | Hash: {ckpt.hash}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
