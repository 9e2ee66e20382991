"""What a long run with retention leaves on a real disk: what the kept commits need, and three small files a save for good."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from syckpt import CheckpointManager

SAVES = 200
LAYERS = 20
ELEMENTS = 5000
RAW_NBYTES = LAYERS * ELEMENTS * 4 + 1000 * 4


def layer(seed: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))


def state_at(step: int) -> dict[str, torch.Tensor]:
    """Return a backbone that stays, but for one layer that is replaced every tenth step, and a head that is new at every step."""
    layers = {f"layer{n}": layer(1000 + n if step >= 10 * n + 9 else n) for n in range(LAYERS)}
    return {**layers, "head": torch.randn(1000, generator=torch.Generator().manual_seed(2000 + step))}


def files_of(root: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of all files below `.syckpt`, in bytes: those below `objects/<id>/`, and the others."""
    base = root / ".syckpt"
    sizes = {str(path.relative_to(base)): path.stat().st_size for path in base.rglob("*") if path.is_file()}
    content = {name for name in sizes if name.startswith("objects/") and name.count("/") == 2}
    return {name: sizes[name] for name in content}, {name: sizes[name] for name in sizes.keys() - content}


@pytest.mark.slow
def test_two_hundred_saves_of_a_frozen_backbone_take_the_place_of_what_is_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, rng=False, save_on_exit=False, max_to_keep=2) as ckpt:
        for step in range(SAVES):
            ckpt.state = state_at(step)
            ckpt.step_up()
            ckpt.save(wait=True)
            if step + 1 in (50, 100, 200):
                ckpt.wait()  # for the retention behind the save
                content, others = files_of(tmp_path)
                # The state, at most 30 % of a blob dead, the bases of the cycle and the other commit's head.
                assert sum(content.values()) < 1.4 * RAW_NBYTES
                # Commit, record and mark of each save, but that the two kept ones have no mark; format, HEAD, branch, lease, `open` record.
                assert len(others) == 3 * (step + 1) - 2 + 5
                assert sum(others.values()) < 2000 * (step + 1)
                assert {key: value.tolist() for key, value in ckpt.load()["state"].items()} == {
                    key: value.tolist() for key, value in state_at(step).items()
                }
        assert [commit.dropped for commit in ckpt.log()].count(False) == 2
