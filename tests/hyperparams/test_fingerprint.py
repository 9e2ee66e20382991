"""Fingerprints: pinned values, and the collision probability that FORMAT.md, section 10, promises."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import StateError
from syckpt.hyperparams.config import HyperConfig
from syckpt.hyperparams.fingerprint import estimate, fingerprint, hamming, similarity

GOLDEN: list[tuple[dict[str, Any], str]] = [
    ({"lr": 1e-3, "batch_size": 64, "architecture": "MLP"}, "bbc4374f"),
    ({"lr": 1.2e-3, "batch_size": 64, "architecture": "MLP"}, "bbc4274f"),
    (
        {
            "optimizer": {"name": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
            "steps": 100000,
            "warmup": None,
            "amp": True,
            "seed": -1,
        },
        "731b7d7b",
    ),
    (
        {"nan": math.nan, "inf": -math.inf, "big": 2**80, "raw": b"\x00\xff", "dim": (1.0, -2.5, -0.25, 0), "a.b": "é"},
        "e92540ac",
    ),
]


def shuffled(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    keys = list(config)
    rng.shuffle(keys)
    return {key: shuffled(config[key], rng) if isinstance(config[key], dict) else config[key] for key in keys}


@pytest.mark.parametrize(("config", "expected"), GOLDEN)
def test_fingerprints_are_pinned_whatever_the_order_of_keys(config: dict[str, Any], expected: str) -> None:
    assert fingerprint(config) == expected
    assert fingerprint(HyperConfig(config).freeze()) == expected
    for seed in range(3):
        assert fingerprint(shuffled(config, random.Random(seed))) == expected


@pytest.mark.parametrize("seed", ["1", "77"])
def test_fingerprints_do_not_depend_on_the_process(seed: str) -> None:
    code = (
        "from syckpt.hyperparams.fingerprint import fingerprint; print(fingerprint({'lr': 1e-3, 'batch_size': 64, 'architecture': 'MLP'}))"
    )
    env = os.environ | {"PYTHONHASHSEED": seed}
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env).stdout == "bbc4374f\n"


def test_an_empty_config_has_fingerprint_zero() -> None:
    assert fingerprint({}) == "00000000"
    assert fingerprint({"section": {}, "list": []}) == "00000000"
    assert similarity({}, {}) == 1.0
    assert similarity({}, {"a": 1}) == 0.0


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1.0, 2.0, 0.75),
        (1.0, 16.0, 0.0),
        (8, 1, 1 - (math.log2(9) - 1) / 4),
        (-3, -3, 1.0),
        (3, -3, 0.0),
        (1, 1.0, 0.0),
        (0.5, 0.2, 0.5),
        (0.5, -0.5, 0.0),
        (0.5, 2.0, 0.0),
        (0.0, 0.0, 1.0),
        (0.0, 1e-9, 0.0),
        (math.nan, math.nan, 1.0),
        (math.inf, -math.inf, 0.0),
        (True, 1, 0.0),
        ("adam", "adam", 1.0),
        ("adam", "sgd", 0.0),
        (None, None, 1.0),
        (b"x", b"x", 1.0),
        ([1, "a"], (1, "a"), 1.0),
        ([1, "a"], [1, "a", "b"], 2 / 3),
        ({"x": 1}, [1], 0.0),
    ],
)
def test_similarity_follows_the_definition(a: Any, b: Any, expected: float) -> None:
    assert similarity({"p": a}, {"p": b}) == pytest.approx(expected, abs=2**-16)
    assert similarity({"p": b}, {"p": a}) == similarity({"p": a}, {"p": b})


def test_similarity_counts_paths_that_only_one_side_has() -> None:
    assert similarity({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "d": 3}) == 0.5


@given(st.floats(), st.floats(), st.integers(), st.integers())
def test_any_number_has_a_fingerprint_and_a_similarity(a: float, b: float, c: int, d: int) -> None:
    assert 0 <= similarity({"x": a, "y": c}, {"x": b, "y": d}) <= 1
    assert len(fingerprint({"x": a, "y": c})) == 8
    assert similarity({"x": a}, {"x": a}) == 1


def test_hamming_and_estimate_count_bits() -> None:
    assert hamming("00000000", "ffffffff") == 32
    assert hamming("bbc4374f", "bbc4274f") == 1
    assert estimate("bbc4374f", "bbc4274f") == 0.9375
    assert estimate("00000000", "ffffffff") == -1.0
    with pytest.raises(StateError, match="8 lower-case hex digits, found 'BBC4374F'"):
        hamming("BBC4374F", "bbc4274f")


def random_pair(rng: random.Random, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two configurations with paths of their own, that differ at a random share of their leaves by random amounts."""
    rate = rng.random()
    a: dict[str, Any] = {}
    b: dict[str, Any] = {}
    for leaf in range(rng.randint(3, 25)):
        path = f"{number}.{leaf}"
        kind = rng.randrange(4)
        octaves = rng.uniform(-5, 5) if rng.random() < rate else 0.0
        if kind == 0:
            a[path] = 2.0 ** rng.uniform(0, 20)
            b[path] = max(1.0, a[path] * 2.0**octaves)
        elif kind == 1:
            a[path] = 2.0 ** rng.uniform(-20, -7)
            b[path] = a[path] * 2.0**octaves
        elif kind == 2:
            a[path] = rng.randint(100, 10**6)
            b[path] = int(a[path] * 2.0**octaves)
        else:
            a[path] = rng.choice(["x", "y", True, None])
            b[path] = "other" if octaves else a[path]
        if octaves and rng.random() < 0.2:
            del b[path]
    return a, b


def test_a_bit_agrees_with_probability_one_half_of_one_plus_similarity() -> None:
    # 800 pairs x 32 bits: a bin of 160 pairs has a standard error of at most 0.007, all of them together 0.003.
    rng = random.Random(20240501)
    measured = []
    for number in range(800):
        a, b = random_pair(rng, number)
        sim = similarity(a, b)
        measured.append((sim, 1 - hamming(fingerprint(a), fingerprint(b)) / 32 - (1 + sim) / 2))
    measured.sort()
    assert measured[0][0] < 0.2
    assert measured[-1][0] == 1.0
    for first in range(0, 800, 160):
        errors = [error for _, error in measured[first : first + 160]]
        assert abs(sum(errors) / len(errors)) < 0.03
    assert abs(sum(error for _, error in measured) / len(measured)) < 0.01


def test_a_near_learning_rate_is_closer_than_a_far_one() -> None:
    def config(run: int, lr: float) -> dict[str, Any]:
        return {f"run{run}": {"lr": lr, "width": 64, "name": "MLP"}}

    near = far = 0
    for run in range(60):
        original = fingerprint(config(run, 1e-3))
        near += hamming(original, fingerprint(config(run, 1.5e-3)))
        far += hamming(original, fingerprint(config(run, 0.5)))
    # Expected: 16 (1 - sim) bits each, sim = 1 - 0.15 / 3 and 2 / 3.
    assert similarity(config(0, 1e-3), config(0, 1.5e-3)) > 0.94
    assert similarity(config(0, 1e-3), config(0, 0.5)) == pytest.approx(2 / 3)
    assert near / 60 == pytest.approx(0.8, abs=0.5)
    assert far / 60 == pytest.approx(5.33, abs=1.2)


def test_a_hundred_leaves_take_less_than_five_milliseconds() -> None:
    config = HyperConfig({f"section{i}": {"rate": i * 1.5, "name": "x"} for i in range(50)})
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        fingerprint(config)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.005
