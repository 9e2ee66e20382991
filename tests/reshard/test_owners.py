"""assign gives each piece to one rank that holds it, evenly by bytes, and every rank comes to the same answer."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syckpt.errors import StateError
from syckpt.objects.box import Box
from syckpt.reshard.owners import Copied, Piece, assign, choose, spread


def piece(name: str, nbytes: int, *candidates: int) -> Piece:
    return Piece(name, Box((0,), (nbytes,)), nbytes, candidates)


def loads(pieces: list[Piece], owners: list[int], world_size: int) -> list[int]:
    result = [0] * world_size
    for item, owner in zip(pieces, owners, strict=True):
        result[owner] += item.nbytes
    return result


def test_the_largest_pieces_go_first_and_ties_to_the_lowest_rank() -> None:
    pieces = [piece("a", 1, 0, 1), piece("b", 5, 0, 1), piece("c", 3, 0, 1), piece("d", 3, 0, 1)]
    assert assign(pieces, 2) == [0, 0, 1, 1]


def test_what_a_rank_holds_alone_counts_before_anything_is_shared_out() -> None:
    pieces = [piece("replica", 4, 0, 1), piece("tiny", 1, 0, 1), piece("shard", 3, 0)]
    assert assign(pieces, 2) == [1, 0, 0]


def test_only_ranks_that_hold_a_piece_may_own_it() -> None:
    pieces = [piece("a", 10, 2, 3), piece("b", 10, 2, 3), piece("c", 10, 3), piece("d", 10, 0, 3)]
    assert assign(pieces, 4) == [2, 2, 3, 0]


def test_nothing_to_assign_is_no_owners() -> None:
    assert assign([], 4) == []


@pytest.mark.parametrize("candidates", [(), (-1,), (0, 4)])
def test_a_piece_that_no_rank_of_the_world_holds_is_refused_by_name(candidates: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match=r"^model/w: "):
        assign([piece("model/w", 1, *candidates)], 4)


@given(st.integers(50, 200), st.integers(0, 2**32))
def test_four_ranks_with_fifty_tensors_none_over_three_percent_get_a_quarter_each(count: int, seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.paretovariate(1.0) for _ in range(count)]
    for _ in range(100):
        cap = 0.029 * sum(weights)
        weights = [min(weight, cap) for weight in weights]
    sizes = [max(1, int(1e6 * weight / sum(weights))) for weight in weights]
    pieces = [piece(f"p{i}", size, 0, 1, 2, 3) for i, size in enumerate(sizes)]
    assume(max(sizes) <= 0.03 * sum(sizes))
    total = sum(p.nbytes for p in pieces)
    assert all(0.22 <= load / total <= 0.28 for load in loads(pieces, assign(pieces, 4), 4))


PIECES = st.lists(
    st.tuples(st.integers(0, 50), st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True).map(tuple)), max_size=30
).map(lambda rows: [piece(f"p{i}", nbytes, *candidates) for i, (nbytes, candidates) in enumerate(rows)])


@given(PIECES, st.randoms(use_true_random=False))
def test_the_answer_is_the_same_in_whatever_order_pieces_are_listed(pieces: list[Piece], rng: random.Random) -> None:
    shuffled = rng.sample(pieces, len(pieces))
    expected = dict(zip(pieces, assign(pieces, 7), strict=True))
    assert dict(zip(shuffled, assign(shuffled, 7), strict=True)) == expected
    assert all(owner in item.candidates for item, owner in expected.items())


@given(PIECES)
def test_each_choice_is_that_of_the_plain_greedy_rule(pieces: list[Piece]) -> None:
    load, expected = [0] * 7, {}
    for item in sorted(pieces, key=lambda p: (len(p.candidates) > 1, -p.nbytes, p.key)):
        owner = min(item.candidates, key=lambda rank: (load[rank], rank))
        load[owner] += item.nbytes
        expected[item] = owner
    assert assign(pieces, 7) == [expected[item] for item in pieces]


def test_replicas_that_all_ranks_hold_differ_by_at_most_one_piece() -> None:
    pieces = [piece(f"p{i}", nbytes, *range(8)) for i, nbytes in enumerate(random.Random(0).choices(range(1, 100), k=300))]
    got = loads(pieces, assign(pieces, 8), 8)
    assert max(got) - min(got) <= max(p.nbytes for p in pieces)


def copied(name: str, nbytes: int, *copies: tuple[int, ...]) -> Copied:
    return Copied(name, nbytes, tuple(enumerate(copies)))


def test_of_a_tensor_with_copies_the_one_is_stored_whose_busiest_rank_has_least() -> None:
    tensors = [
        copied("shard", 4, (0, 1, 2, 3)),
        copied("plain", 3, (0,), (1,), (2,), (3,)),
        copied("large", 9, (0, 1), (2, 3)),
        copied("small", 2, (0, 1), (2, 3)),
    ]
    # 4 each; `large` to the first copy: 13, 13, 4, 4; `plain` to rank 2: 7; `small` to ranks 2 and 3.
    assert choose(tensors, 4) == [0, 2, 0, 1]


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from([1, 2, 4])), max_size=20), st.randoms())
def test_which_copies_are_stored_does_not_depend_on_the_order(sizes: list[tuple[int, int]], random: random.Random) -> None:
    groups = {1: ((0, 1, 2, 3),), 2: ((0, 1), (2, 3)), 4: ((0,), (1,), (2,), (3,))}
    tensors = [copied(f"t{number}", nbytes, *groups[count]) for number, (nbytes, count) in enumerate(sizes)]
    chosen = dict(zip(tensors, choose(tensors, 4), strict=True))
    shuffled = random.sample(tensors, len(tensors))
    assert choose(shuffled, 4) == [chosen[tensor] for tensor in shuffled]


def test_few_copies_come_into_question_and_they_are_far_apart() -> None:
    assert spread(1) == [0]
    assert spread(5) == [0, 1, 2, 3, 4]
    assert spread(1024) == list(range(0, 1024, 64))
    assert len(set(spread(1000))) == 16
