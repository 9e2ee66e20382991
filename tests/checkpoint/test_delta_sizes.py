"""Bytes stored for a real AdamW run: a GPT of more than ten million parameters, lr 3e-4, betas 0.9 and 0.95, after 50 steps."""

from __future__ import annotations

import pytest

import syckpt
from syckpt.testing.training import Training


def stored(stats: list[dict]) -> float:
    return sum(s["written_bytes"] for s in stats) / sum(s["staged_bytes"] for s in stats)


@pytest.mark.parametrize("cycles", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lone_delta_stores_at_most_seven_tenths_and_whole_keyframe_cycles_ten_steps_apart_at_most_four_fifths(tmp_path, cycles):
    training = Training()
    assert sum(p.numel() for p in training.model.parameters()) >= 10_000_000
    training.step(50)
    with (
        syckpt.CheckpointManager(tmp_path / "lone", save_on_exit=False) as lone,
        syckpt.CheckpointManager(tmp_path / "cycle", save_on_exit=False) as cycle,
    ):
        for ckpt in (lone, cycle):
            ckpt.model, ckpt.optimizer = training.model, training.optimizer
        stats = [cycle.save(wait=True).result().stats]
        lone.save(wait=True)
        training.step(1)
        delta = lone.save(wait=True).result().stats
        for commit in range(1, 8 * cycles):
            training.step(9 if commit == 1 else 10)
            stats.append(cycle.save(wait=True).result().stats)
    print([round(s["ratio"], 4) for s in stats], round(delta["ratio"], 4))

    assert not delta["keyframe"]
    assert delta["deduplicated_bytes"] < 0.001 * delta["staged_bytes"]
    assert stored([delta]) <= 0.70
    assert [s["keyframe"] for s in stats] == [i % 8 == 0 for i in range(8 * cycles)]
    for first in range(0, 8 * cycles, 8):
        assert stored(stats[first : first + 8]) <= 0.80
