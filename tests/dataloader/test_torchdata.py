"""torchdata's StatefulDataLoader as a component: it keeps its own position, and the manager its state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from syckpt import CheckpointManager

# torchdata 0.11 makes a call that torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")


def train(root: Path, *, workers: int, stop_at: int | None) -> list[tuple[int, float]]:
    """Return (sample, draw) of each step; the draw shows where torch's stream is."""
    torch.manual_seed(3)
    loader = torchdata.StatefulDataLoader(TensorDataset(torch.arange(12)), batch_size=1, shuffle=True, num_workers=workers)
    seen: list[tuple[int, float]] = []
    with CheckpointManager(root, save_on_exit=False) as ckpt:
        ckpt.loader = loader
        for _ in ckpt.loop(epochs=2):
            for (sample,) in ckpt.batches(loader):
                seen.append((int(sample), torch.rand(()).item()))
                if ckpt.step == stop_at:
                    ckpt.save(epoch_end=False, wait=True)
                    return seen
            ckpt.save(epoch_end=True, wait=True)
    return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_data_loader_goes_on_with_the_sample_behind_the_save(tmp_path, workers):
    straight = train(tmp_path / "straight", workers=workers, stop_at=None)
    assert len(straight) == 24
    assert sorted(sample for sample, _ in straight[:12]) == list(range(12))
    cut = train(tmp_path / "cut", workers=workers, stop_at=5)
    cut += train(tmp_path / "cut", workers=workers, stop_at=None)
    assert [sample for sample, _ in cut] == [sample for sample, _ in straight]
    if workers == 0:
        assert cut == straight
