"""A sweep as branches: one base, one branch for each learning rate, the best one exported. Kill it anywhere and run it again.

python examples/03_sweep.py --dir runs/sweep

Trials may also run at once, each in a process of its own: python examples/03_sweep.py --dir runs/sweep --rates 0.01
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syckpt import CheckpointManager, StatefulRandomSampler

BATCH = 32


def spirals(count: int, seed: int) -> TensorDataset:
    """Two interleaved spirals, as points and the number of their spiral."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    angle = torch.rand(count, generator=generator) * 9 + 1
    turned = angle + labels * torch.pi
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 10
    return TensorDataset(points + 0.02 * torch.randn(points.shape, generator=generator), labels)


def train(ckpt: CheckpointManager, loader: DataLoader, held_out: TensorDataset, epochs: int) -> None:
    """Train for so many epochs on the branch that `ckpt` is on; save in the middle of each, and at its end with the error."""
    model, optimizer = ckpt.model, ckpt.optimizer
    for epoch in ckpt.loop(epochs=epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step_up()
            if ckpt.step % 10 == 0:
                ckpt.save()
        model.eval()
        with torch.no_grad():
            points, labels = held_out.tensors
            wrong = (model(points).argmax(1) != labels).float().mean()
        ckpt.save(metric=wrong, message=f"epoch-{epoch}")
        print(f"{ckpt.branch:12} epoch {epoch}  error {wrong:.3f}  {ckpt.hash}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where the checkpoints are (in .syckpt/)")
    parser.add_argument("--rates", type=float, nargs="*", default=[0.001, 0.01, 0.1])
    parser.add_argument("--base-epochs", type=int, default=2, help="epochs that all trials share")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of each trial")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums in one order: the same bits in every run

    dataset, held_out = spirals(512, seed=1), spirals(256, seed=2)
    sampler = StatefulRandomSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    with CheckpointManager(args.dir) as ckpt:
        ckpt.model = model
        ckpt.optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        ckpt.sampler = sampler
        ckpt.config = {"lr": 0.003, "batch_size": BATCH}
        main_branch = ckpt.branch
        train(ckpt, loader, held_out, args.base_epochs)

        errors = {}
        for rate in args.rates:
            ckpt.checkout_branch(main_branch)  # weights, moments, sampler and random streams of the base
            ckpt.create_branch(f"lr-{rate:g}")  # or goes on with it, where an earlier run had begun it
            for group in ckpt.optimizer.param_groups:
                group["lr"] = rate
            ckpt.config = {"lr": rate, "batch_size": BATCH}
            train(ckpt, loader, held_out, args.epochs)
            errors[ckpt.branch] = ckpt.metric

        ckpt.print_tree()
        best = min(errors, key=errors.__getitem__)
        ckpt.export_ckpt(best, args.dir / "deploy" / "best.ckpt")
        print(f"the best is {best} with an error of {errors[best]:.3f}: {args.dir / 'deploy' / 'best.ckpt'}")
        print("for torch.load(path, weights_only=True)['model']")


if __name__ == "__main__":
    main()
