"""The keyed permutation: a bijection, the same for ever, as good as random, and evaluated at any position at once."""

from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.dataloader.permutation import Permutation
from syckpt.errors import StateError


def whole(length: int, *, seed: int = 42, epoch: int = 0) -> list[int]:
    order: list[int] = Permutation(length, seed=seed, epoch=epoch).at(np.arange(length)).tolist()
    return order


@given(st.integers(0, 2000), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_every_index_comes_exactly_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(whole(length, seed=seed, epoch=epoch)) == list(range(length))


@pytest.mark.parametrize("length", [2**k + d for k in range(1, 12) for d in (-1, 0, 1)])
def test_lengths_around_powers_of_two_are_bijections(length: int) -> None:
    assert sorted(whole(length)) == list(range(length))


def test_orders_are_pinned() -> None:
    assert whole(10, epoch=0) == [7, 9, 1, 3, 8, 6, 0, 5, 2, 4]
    assert whole(10, epoch=1) == [6, 7, 1, 0, 9, 3, 2, 5, 4, 8]
    assert Permutation(10**9, seed=42, epoch=0).at([0, 123456789, 999999999]).tolist() == [3553227, 154487516, 754700118]
    assert Permutation(2**62 + 1, seed=-7, epoch=3).at([0, 2**62]).tolist() == [2668817671268206605, 3192518998189476691]


@given(st.integers(1, 2**63 - 1), st.data())
def test_any_length_gives_the_same_value_alone_or_in_a_batch(length: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    order = Permutation(length, seed=1, epoch=2)
    batch = order.at(np.array(positions)).tolist()
    assert batch == [order.at(np.array([position])).tolist()[0] for position in positions]
    assert all(0 <= value < length for value in batch)
    assert len(set(batch)) == len(set(positions))


def test_the_shape_is_kept_and_the_positions_are_not_touched() -> None:
    positions = np.arange(6).reshape(2, 3)
    found = Permutation(6, seed=0, epoch=0).at(positions)
    assert found.shape == (2, 3)
    assert found.dtype == np.int64
    assert positions.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert int(Permutation(6, seed=0, epoch=0).at(np.int64(4))) == found[1, 1]
    assert Permutation(0, seed=0, epoch=0).at([]).tolist() == []
    assert len(Permutation(6, seed=0, epoch=0)) == 6


@pytest.mark.parametrize("position", [-1, 10, 15, 16])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(StateError, match=rf"position {position} is outside of range\(10\)"):
        Permutation(10, seed=0, epoch=0).at([3, position])


def test_a_length_out_of_range_is_refused() -> None:
    for length in (-1, 2**63):
        with pytest.raises(StateError, match="expected 0 to"):
            Permutation(length, seed=0, epoch=0)


@pytest.mark.parametrize(("length", "trials"), [(3, 1200), (4, 1200), (5, 1800), (6, 3600)])
def test_small_permutations_are_uniform(length: int, trials: int) -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(trials):
        order = tuple(whole(length, seed=seed))
        counts[order] = counts.get(order, 0) + 1
    cells = math.factorial(length)
    expected = trials / cells
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values()) + (cells - len(counts)) * expected
    freedom = cells - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_positions_values_and_epochs_are_unrelated() -> None:
    length = 100_000
    first, second = (Permutation(length, seed=42, epoch=epoch).at(np.arange(length)) for epoch in (0, 1))
    for a, b in ((np.arange(length), first), (first[:-1], first[1:]), (first, second)):
        cells = np.bincount((a * 20 // length) * 20 + b * 20 // length, minlength=400)
        expected = len(a) / 400
        chi_square = float(((cells - expected) ** 2 / expected).sum())
        assert abs(chi_square - 361) < 4 * math.sqrt(2 * 361)
    # A random permutation has one fixed point on average.
    assert int((first == np.arange(length)).sum()) <= 6


def test_a_seek_takes_a_millisecond_and_a_megabyte_at_any_length() -> None:
    seconds = []
    tracemalloc.start()
    for epoch in range(10):
        Permutation(10**9, seed=42, epoch=epoch).at(np.arange(512_345_678, 512_345_678 + 256))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for epoch in range(50):
        begin = time.perf_counter()
        Permutation(10**9, seed=42, epoch=epoch).at(np.arange(512_345_678, 512_345_678 + 256))
        seconds.append(time.perf_counter() - begin)
    assert peak < 1_000_000
    assert min(seconds) < 0.001


def test_a_million_indices_a_second_come_in_chunks() -> None:
    order = Permutation(10**9, seed=42, epoch=0)
    seconds = []
    for chunk in range(20):
        begin = time.perf_counter()
        order.at(np.arange(chunk * 8192, (chunk + 1) * 8192))
        seconds.append(time.perf_counter() - begin)
    assert 8192 / min(seconds) > 1_000_000
