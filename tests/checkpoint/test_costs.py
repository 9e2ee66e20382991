"""What a save costs: bytes on disk, and passes over the data."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import syckpt


def stored_nbytes(root: Path) -> int:
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


def random_state(tensors: int, elements: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(elements, generator=generator) for i in range(tensors)}


@pytest.mark.parametrize("compression", ["fast", "none"])
def test_an_unchanged_tensor_costs_at_most_100_bytes_whatever_its_size(tmp_path, compression):
    def cost(tensors: int, elements: int) -> list[int]:
        root = tmp_path / f"{tensors}-{elements}"
        sizes = []
        with syckpt.CheckpointManager(root, syckpt.CheckpointManager.Config(compression=compression), rng=False) as ckpt:
            ckpt.state = random_state(tensors, elements)
            for _ in range(11):
                ckpt.save(wait=True)
                sizes.append(stored_nbytes(root))
        return [after - before for before, after in pairwise(sizes)]

    few, many, large = cost(1, 1000), cost(401, 1000), cost(1, 2_000_000)
    assert all((m - f) / 400 <= 100 for f, m in zip(few, many, strict=True)), (few, many)
    assert all(abs(big - small) <= 100 for small, big in zip(few, large, strict=True)), (few, large)


def test_saving_the_same_state_twice_stores_no_tensor_twice(tmp_path):
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.state = random_state(50, 1000)
        first = ckpt.save(wait=True).result()
        second = ckpt.save(wait=True).result()
    assert first.stats["deduplicated_bytes"] == 0
    assert second.stats["deduplicated_bytes"] == second.stats["staged_bytes"]
    assert second.stats["encoded_bytes"] == 0
    assert not (tmp_path / ".syckpt/objects" / second.id / "r00000.safetensors").exists()


def test_equal_and_tied_tensors_are_stored_once(tmp_path):
    weight = torch.randn(1000, 100)
    with syckpt.CheckpointManager(tmp_path, syckpt.CheckpointManager.Config(compression="none"), rng=False) as ckpt:
        ckpt.state = {"tied": weight, "again": weight, "equal": weight.clone()}
        commit = ckpt.save(wait=True).result()
        assert commit.stats["encoded_bytes"] == 400_000
        loaded = ckpt.load()["state"]
    assert loaded["tied"] is loaded["again"]
    assert loaded["equal"] is not loaded["tied"]
    assert torch.equal(loaded["equal"], weight)


def test_a_frozen_backbone_is_stored_once_over_many_saves(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 4))
    model[0].requires_grad_(requires_grad=False)
    with syckpt.CheckpointManager(tmp_path, rng=False) as ckpt:
        ckpt.model = model
        first = ckpt.save(wait=True).result().stats["written_bytes"]
        for _ in range(18):
            with torch.no_grad():
                model[1].weight.add_(1e-3)
            later = ckpt.save(wait=True).result().stats["written_bytes"]
            assert later < 8_004 + 2_000
    assert first > 800_000


def test_an_uncompressed_commit_is_read_by_any_safetensors_reader(tmp_path):
    from safetensors.torch import load_file

    weight, steps = torch.randn(30, 40, dtype=torch.bfloat16), torch.arange(7)
    with syckpt.CheckpointManager(tmp_path, syckpt.CheckpointManager.Config(compression="none"), rng=False, save_on_exit=False) as ckpt:
        ckpt.model = {"weight": weight, "steps": steps}
        commit = ckpt.save(wait=True).result()
    tensors = load_file(tmp_path / ".syckpt/objects" / commit.id / "r00000.safetensors")
    assert list(tensors) == ["model.steps", "model.weight"]
    assert torch.equal(tensors["model.weight"], weight)
    assert torch.equal(tensors["model.steps"], steps)
