"""A small byte-level GPT that may be killed at any moment: run it again and it goes on exactly where it was.

python examples/01_quickstart.py --dir runs/quickstart --losses runs/quickstart.losses
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syckpt import CheckpointManager
from syckpt.dataloader import StatefulRandomSampler

BLOCK, BATCH, SEQUENCES = 64, 16, 672  # 42 batches an epoch
WIDTH, HEADS, LAYERS, DROPOUT = 128, 4, 5, 0.1  # 1.0 million parameters
MODULES = "argparse ast bisect calendar csv dataclasses difflib enum functools heapq inspect textwrap"


def text() -> torch.Tensor:
    """The beginnings of some modules of Python's own library: real text, on every machine, without a download."""
    folder = Path(os.__file__).parent
    source = b"".join((folder / f"{name}.py").read_bytes()[:4000] for name in MODULES.split())
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
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.token.weight  # tied

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.token(x) + self.position.weight[: x.shape[1]], DROPOUT, self.training)
        return F.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs/quickstart", help="where the checkpoints are (in .syckpt/)")
    parser.add_argument("--losses", default=os.devnull, help="append every step's loss, bit for bit, to this file")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--workers", type=int, default=2, help="processes of the DataLoader")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="SIGKILL this process right after that step")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums in one order: the same bits in every run

    data = text()
    dataset = TensorDataset(data[:-1].view(-1, BLOCK), data[1:].view(-1, BLOCK))
    sampler = StatefulRandomSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=args.workers)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with CheckpointManager(args.dir, max_to_keep=None) as ckpt, open(args.losses, "a") as losses:
        ckpt.model = model
        ckpt.optimizer = optimizer
        ckpt.sampler = sampler
        ckpt.config = {"lr": 1e-3, "batch_size": BATCH, "architecture": "GPT", "width": WIDTH, "layers": LAYERS}
        if ckpt.resumed:
            print(f"resumed from {ckpt.resumed.id} at step {ckpt.resumed.step}", flush=True)

        for epoch in ckpt.loop(epochs=args.epochs):
            for x, y in loader:
                loss = model(x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.step_up()

                print(ckpt.step, loss.item().hex(), file=losses, flush=True)
                if ckpt.step % args.save_every == 0:
                    ckpt.save()  # returns at once, written in the background
                if ckpt.step == args.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            ckpt.save(metric=loss.item(), message=f"epoch-{epoch}")
            print(f"Epoch {epoch} | Loss: {loss.item():.4f} | Hash: {ckpt.hash}", flush=True)


if __name__ == "__main__":
    main()
