"""Bytes stored for a real AdamW run: a GPT of more than ten million parameters, lr 3e-4, betas 0.9 and 0.95, after 50 steps."""

from __future__ import annotations

import pytest

import syckpt
from syckpt.testing.training import Training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return (stats of two keyframe cycles, 10 steps between commits; stats of a lone delta, one step behind its keyframe)."""
    training = Training()
    assert sum(p.numel() for p in training.model.parameters()) >= 10_000_000
    training.step(50)
    lone_root, cycle_root = tmp_path_factory.mktemp("lone"), tmp_path_factory.mktemp("cycle")
    with (
        syckpt.CheckpointManager(lone_root, save_on_exit=False) as lone,
        syckpt.CheckpointManager(cycle_root, save_on_exit=False) as cycle,
    ):
        for ckpt in (lone, cycle):
            ckpt.model, ckpt.optimizer = training.model, training.optimizer
        cycle_stats = [cycle.save(wait=True).result().stats]
        lone.save(wait=True)
        training.step(1)
        delta = lone.save(wait=True).result().stats
        for commit in range(1, 16):
            training.step(9 if commit == 1 else 10)
            cycle_stats.append(cycle.save(wait=True).result().stats)
    print([round(s["ratio"], 4) for s in cycle_stats], round(delta["ratio"], 4))
    return cycle_stats, delta


def stored(stats: list[dict]) -> float:
    return sum(s["written_bytes"] for s in stats) / sum(s["staged_bytes"] for s in stats)


def test_commits_ten_steps_apart_store_at_most_four_fifths_over_whole_keyframe_cycles(run):
    cycles, _ = run
    assert [s["keyframe"] for s in cycles] == [i % 8 == 0 for i in range(16)]
    assert stored(cycles) <= 0.80
    assert stored(cycles[:8]) <= 0.80
    assert stored(cycles[8:]) <= 0.80


def test_a_lone_delta_one_step_behind_its_keyframe_stores_at_most_seven_tenths(run):
    _, delta = run
    assert not delta["keyframe"]
    assert delta["deduplicated_bytes"] < 0.001 * delta["staged_bytes"]
    assert stored([delta]) <= 0.70
