"""StatefulDistributedSampler: one order and one position for all ranks, which any number of ranks goes on from.

Ranks are simulated in one process: each has its own sampler, and all advance alike.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset

import syckpt
from syckpt.dataloader import StatefulDistributedSampler, StatefulRandomSampler, StatefulSampler, seeded
from syckpt.errors import StateError

Samplers = list[StatefulDistributedSampler]


def ranks_of(
    num_replicas: int, length: int = 10, batch_size: int = 2, *, state: Mapping[str, Any] | None = None, **options: Any
) -> Samplers:
    """The samplers of all ranks, at a saved position if there is one."""
    samplers = [
        StatefulDistributedSampler(range(length), batch_size, num_replicas=num_replicas, rank=rank, **options)
        for rank in range(num_replicas)
    ]
    for sampler in samplers if state is not None else ():
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return samplers


def state_of(samplers: Samplers) -> dict[str, Any]:
    """The saved state, which every rank must have alike."""
    first, *others = [sampler.state_dict() for sampler in samplers]
    assert all(other == first for other in others)
    return first


def loaders_of(samplers: Samplers, **options: Any) -> list[DataLoader[int]]:
    return [
        DataLoader(sampler.data_source, batch_size=sampler.batch_size, sampler=sampler, **options)  # type: ignore[arg-type]
        for sampler in samplers
    ]


def batchers_of(samplers: Samplers, *, drop_last: bool = False) -> list[BatchSampler]:
    """What a DataLoader draws its indices from."""
    return [BatchSampler(sampler, sampler.batch_size, drop_last) for sampler in samplers]


def train(samplers: Samplers, loaders: Iterable[Iterable[Any]], steps: int | None = None) -> list[list[list[int]]]:
    """Consume one pass, at most `steps` batches, and return each global batch as its parts by rank; ranks must stay together."""
    seen: list[list[list[int]]] = []
    iterators = [iter(loader) for loader in loaders]
    while steps is None or len(seen) < steps:
        parts = [next(iterator, None) for iterator in iterators]
        ended = [part is None for part in parts]
        assert len(set(ended)) == 1, "ranks have different numbers of batches"
        if ended[0]:
            break
        for sampler in samplers:
            sampler.advance(1)
        state_of(samplers)
        assert len({(sampler.exhausted, sampler.batch_idx) for sampler in samplers}) == 1
        seen.append([part.tolist() if isinstance(part, torch.Tensor) else list(part) for part in parts])  # type: ignore[arg-type]
    return seen


def flat(seen: Iterable[Iterable[Iterable[int]]]) -> list[int]:
    return [index for parts in seen for part in parts for index in part]


def order_of(length: int, epoch: int = 0) -> list[int]:
    sampler = StatefulRandomSampler(range(length), batch_size=1)
    sampler.set_epoch(epoch)
    return list(sampler)


# The split


def test_each_rank_takes_its_slice_of_every_global_batch() -> None:
    assert order_of(10) == [7, 9, 1, 3, 8, 6, 0, 5, 2, 4]
    assert [list(sampler) for sampler in ranks_of(2)] == [[7, 9, 8, 6, 2], [1, 3, 0, 5, 4]]
    assert [list(sampler) for sampler in ranks_of(3)] == [[7, 9, 0, 5], [1, 3, 2], [8, 6, 4]]
    assert [list(sampler) for sampler in ranks_of(2, shuffle=False)] == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
    in_epoch_1 = ranks_of(2)
    for sampler in in_epoch_1:
        sampler.set_epoch(1)
    assert order_of(10, epoch=1) == [6, 7, 1, 0, 9, 3, 2, 5, 4, 8]
    assert [list(sampler) for sampler in in_epoch_1] == [[6, 7, 9, 3, 4], [1, 0, 2, 5, 8]]


def test_samples_are_repeated_only_when_fewer_are_left_than_there_are_ranks() -> None:
    assert [list(sampler) for sampler in ranks_of(4)] == [[7, 9, 2], [1, 3, 4], [8, 6, 2], [0, 5, 4]]
    assert [list(sampler) for sampler in ranks_of(3, length=1)] == [[0], [0], [0]]
    assert [list(sampler) for sampler in ranks_of(3, length=0)] == [[], [], []]


def test_drop_last_drops_the_incomplete_global_batch() -> None:
    assert [list(sampler) for sampler in ranks_of(2, drop_last=True)] == [[7, 9, 8, 6], [1, 3, 0, 5]]
    assert [list(sampler) for sampler in ranks_of(4, drop_last=True)] == [[7, 9], [1, 3], [8, 6], [0, 5]]
    assert [list(sampler) for sampler in ranks_of(3, length=5, drop_last=True)] == [[], [], []]


@pytest.mark.parametrize(
    ("length", "num_replicas", "drop_last", "expected"),
    [
        (10, 2, False, [5, 5]),
        (10, 3, False, [4, 3, 3]),
        (10, 4, False, [3, 3, 3, 3]),
        (10, 4, True, [2, 2, 2, 2]),
        (3, 2, True, [0, 0]),
        (0, 2, False, [0, 0]),
    ],
)
def test_the_length_is_that_of_this_ranks_whole_epoch(length: int, num_replicas: int, drop_last: bool, expected: list[int]) -> None:
    samplers = ranks_of(num_replicas, length, drop_last=drop_last)
    assert [len(sampler) for sampler in samplers] == expected
    assert [len(list(sampler)) for sampler in samplers] == expected
    for sampler in samplers:
        sampler.advance(1)
    assert [len(sampler) for sampler in samplers] == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_one_rank_is_the_random_sampler(drop_last: bool) -> None:
    (one,) = ranks_of(1, length=1003, batch_size=7, drop_last=drop_last)
    random = StatefulRandomSampler(range(1003), 7, drop_last=drop_last)
    for batches, expected in ((40, 1003), (200, 1003 - 280)):
        drawn = list(one)
        assert drawn == list(random)
        assert len(drawn) == expected - (expected % 7 if drop_last else 0)
        one.advance(batches)
        random.advance(batches)
        assert one.state_dict() == random.state_dict()
    assert one.exhausted
    assert random.exhausted


def test_an_epoch_longer_than_a_chunk_comes_whole() -> None:
    samplers = ranks_of(3, length=50_000, batch_size=7)
    assert sorted(itertools.chain(*samplers)) == list(range(50_000))
    assert list(itertools.islice(samplers[1], 7)) == order_of(50_000)[7:14]


# Resuming


@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=6),
    st.integers(1, 5),
)
def test_any_numbers_of_ranks_share_the_epoch_between_them(
    length: int, batch_size: int, drop_last: bool, legs: list[tuple[int, int]], last_ranks: int
) -> None:
    order = order_of(length)
    state = state_of(ranks_of(1, length, batch_size))
    position, repeated, ended = 0, 0, False
    counted: Counter[int] = Counter()
    for num_replicas, steps in [*legs, (last_ranks, None)]:
        samplers = ranks_of(num_replicas, length, batch_size, state=state, drop_last=drop_last)
        ended = samplers[0].exhausted
        if ended:
            break
        for parts in train(samplers, batchers_of(samplers), steps):
            expected = order[position : position + batch_size * num_replicas]
            sizes = [len(part) for part in parts]
            drawn = flat([parts])
            assert drawn[: len(expected)] == expected
            if len(expected) == batch_size * num_replicas:
                assert sizes == [batch_size] * num_replicas
            else:
                assert not drop_last
                assert sizes == sorted(sizes, reverse=True)
                assert sizes[0] - sizes[-1] <= 1
                assert sizes[-1] >= 1
            if len(drawn) > len(expected):
                assert len(expected) < num_replicas == len(drawn)
                repeated += len(drawn) - len(expected)
            position += len(expected)
            counted.update(drawn)
        state = state_of(samplers)
        assert state["consumed"] == position
        ended = samplers[0].exhausted
    assert ended
    assert set(counted) == set(order[:position])
    assert counted.total() == position + repeated
    if drop_last:
        assert repeated == 0
        assert length - position < batch_size * num_replicas
    else:
        assert position == length


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "prefetch_factor": 3}], ids=["no workers", "two workers"])
def test_loaders_on_4_then_2_then_3_then_1_ranks_draw_each_sample_once(options: dict[str, Any]) -> None:
    state: dict[str, Any] | None = None
    seen = []
    for num_replicas, steps in ((4, 2), (2, 2), (3, 1), (1, None)):
        samplers = ranks_of(num_replicas, length=37, state=state)
        seen.append(train(samplers, loaders_of(samplers, **options), steps))
        state = state_of(samplers)
    assert flat(itertools.chain(*seen)) == order_of(37)
    assert [len(leg) for leg in seen] == [2, 2, 1, 4]
    assert [[len(part) for part in parts] for parts in seen[-1]] == [[2], [2], [2], [1]]
    assert state is not None
    assert (state["epoch"], state["consumed"]) == (0, 37)


def test_the_rest_is_split_anew_from_the_consumed_position() -> None:
    samplers = ranks_of(2)
    train(samplers, batchers_of(samplers), 1)
    state = state_of(samplers)
    assert (state["consumed"], state["batch_size"]) == (4, 2)
    assert [list(sampler) for sampler in ranks_of(3, state=state)] == [[8, 6], [0, 5], [2, 4]]
    assert [list(sampler) for sampler in ranks_of(2, batch_size=1, state=state)] == [[8, 0, 2], [6, 5, 4]]
    assert [sampler.batch_idx for sampler in ranks_of(3, state=state)] == [1, 1, 1]
    assert [sampler.batch_idx for sampler in ranks_of(1, state=state)] == [2]


def test_epochs_after_a_resumed_one_are_whole() -> None:
    samplers = ranks_of(2)
    train(samplers, batchers_of(samplers), 1)
    samplers = ranks_of(3, state=state_of(samplers))
    passes = [train(samplers, batchers_of(samplers)) for _ in range(3)]
    assert [sorted(flat(one)) for one in passes] == [[0, 2, 4, 5, 6, 8], list(range(10)), list(range(10))]
    assert (samplers[0].epoch, samplers[0].exhausted) == (2, True)


def test_states_of_both_samplers_are_interchangeable() -> None:
    samplers = ranks_of(2)
    train(samplers, batchers_of(samplers), 1)
    alone = StatefulRandomSampler(range(10), batch_size=4)
    alone.load_state_dict(state_of(samplers))
    assert list(alone) == [8, 6, 0, 5, 2, 4]
    alone.advance(1)
    assert [list(sampler) for sampler in ranks_of(2, batch_size=1, state=alone.state_dict())] == [[2], [4]]
    assert alone.state_dict().keys() == state_of(samplers).keys()


def test_a_state_of_another_length_is_refused() -> None:
    with pytest.raises(StateError, match="a dataset of 10 samples, found one of 11"):
        ranks_of(2, length=11, state=state_of(ranks_of(4)))


def test_a_dropped_tail_is_taken_up_by_smaller_global_batches_unless_the_epoch_is_set() -> None:
    samplers = ranks_of(4, length=13, drop_last=True)
    train(samplers, batchers_of(samplers))
    assert (samplers[0].consumed, samplers[0].exhausted) == (8, True)
    samplers = ranks_of(2, length=13, drop_last=True, state=state_of(samplers))
    assert not samplers[0].exhausted
    assert flat(train(samplers, batchers_of(samplers))) == order_of(13)[8:12]
    for sampler in samplers:
        sampler.set_epoch(1)
    assert flat(train(samplers, batchers_of(samplers))) == order_of(13, epoch=1)[:12]


def test_draws_of_a_seeded_dataset_do_not_depend_on_the_number_of_ranks() -> None:
    def drawn(num_replicas: int, **options: Any) -> dict[int, float]:
        pairs: dict[int, float] = {}
        for sampler in ranks_of(num_replicas):
            for indices, values in DataLoader(seeded(Noisy()), batch_size=2, sampler=sampler, **options):
                pairs.update(zip(indices.tolist(), values.tolist(), strict=True))
        return pairs

    assert len(set(drawn(1).values())) == 10
    assert drawn(1) == drawn(2) == drawn(3, num_workers=2)


class Noisy(Dataset[Any]):  # type: ignore[misc]
    """Draws a number with every sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


# Position


def test_advancing_counts_global_batches_up_to_the_end() -> None:
    for sampler in ranks_of(2):
        sampler.advance(2)
        assert (sampler.consumed, sampler.batch_idx, sampler.exhausted) == (8, 2, False)
        sampler.advance(1)
        assert (sampler.consumed, sampler.batch_idx, sampler.exhausted) == (10, 3, True)
        sampler.advance(5)
        assert (sampler.epoch, sampler.consumed) == (0, 10)
    for sampler in ranks_of(2, drop_last=True):
        sampler.advance(2)
        assert (sampler.consumed, sampler.exhausted) == (8, True)


def test_what_loaders_prefetch_is_not_consumed() -> None:
    samplers = ranks_of(2, length=40)
    iterators = [iter(loader) for loader in loaders_of(samplers, num_workers=2)]
    for iterator in iterators:
        next(iterator)
    assert state_of(samplers)["consumed"] == 0
    for sampler in samplers:
        sampler.advance(1)
    assert state_of(samplers)["consumed"] == 4


def test_set_epoch_keeps_the_position_inside_of_the_same_epoch() -> None:
    (sampler, _) = ranks_of(2)
    sampler.advance(1)
    sampler.set_epoch(0)
    assert (sampler.epoch, sampler.consumed) == (0, 4)
    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.consumed) == (2, 0)


# The loader


def test_another_batch_size_than_the_loaders_is_an_error_on_every_rank() -> None:
    for sampler in ranks_of(2):
        with pytest.raises(StateError, match=r"batch_size=4, its sampler batch_size=2.*make the sampler with batch_size=4"):
            next(iter(DataLoader(range(10), batch_size=4, sampler=sampler)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_drops_the_last_share_of_every_rank_ends_the_epoch_there(num_workers: int) -> None:
    samplers = ranks_of(2)
    passes = [train(samplers, loaders_of(samplers, num_workers=num_workers, drop_last=True)) for _ in range(2)]
    assert passes[0] == [[[7, 9], [1, 3]], [[8, 6], [0, 5]]]
    assert flat(passes[1]) == order_of(10, epoch=1)[:8]
    assert (samplers[0].epoch, samplers[0].consumed, samplers[0].exhausted) == (1, 8, True)
    assert [sampler.exhausted for sampler in ranks_of(3, state=state_of(samplers))] == [True, True, True]


def test_a_loader_that_drops_nothing_as_every_rank_has_a_whole_batch_ends_the_epoch_at_its_end() -> None:
    samplers = ranks_of(4, batch_size=1)
    seen = train(samplers, loaders_of(samplers, drop_last=True))
    assert seen == [[[7], [9], [1], [3]], [[8], [6], [0], [5]], [[2], [4], [2], [4]]]
    assert (samplers[0].consumed, samplers[0].exhausted) == (10, True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_would_drop_the_last_share_of_some_ranks_only_is_an_error_on_all(num_workers: int) -> None:
    message = r"last 5 samples make 2 a rank, but 1 on the last ranks: with batch_size=2 .*; make the sampler with drop_last=True"
    samplers = ranks_of(4, length=13)
    for loader in loaders_of(samplers, num_workers=num_workers, drop_last=True):
        with pytest.raises(StateError, match=message):
            next(iter(loader))
    samplers = ranks_of(4, length=13, drop_last=True)
    assert len(train(samplers, loaders_of(samplers, num_workers=num_workers, drop_last=True))) == 1


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 5), st.integers(0, 40), st.booleans())
def test_a_dropping_loader_leaves_all_ranks_at_one_position(
    length: int, batch_size: int, num_replicas: int, consumed: int, drop_last: bool
) -> None:
    state = state_of(ranks_of(1, length)) | {"consumed": min(consumed, length)}
    samplers = ranks_of(num_replicas, length, batch_size, state=state, drop_last=drop_last)
    errors = 0
    for batcher in batchers_of(samplers, drop_last=True):
        try:
            next(iter(batcher), None)
        except StateError:
            errors += 1
    assert errors in (0, num_replicas)
    if not errors:
        seen = train(samplers, batchers_of(samplers, drop_last=True))
        assert {len(part) for parts in seen for part in parts} <= {batch_size}
        # A pass in which the loader drops all there is consumes nothing, and the position stays at the end before.
        assert samplers[0].exhausted


# Ranks


def test_the_process_group_gives_rank_and_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = StatefulDistributedSampler(range(10), 2)
    assert (before.num_replicas, before.rank) == (1, 0)
    explicit = StatefulDistributedSampler(range(10), 2, num_replicas=3, rank=1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    within = StatefulDistributedSampler(range(10), 2)
    assert (within.num_replicas, within.rank) == (2, 1)
    assert list(within) == [1, 3, 0, 5, 4]
    assert list(explicit) == [1, 3, 2]
    with pytest.raises(StateError, match="made with no process group, and iterates with a process group of 2 ranks: make it after"):
        next(iter(before))
    with pytest.raises(StateError, match=r"num_replicas=4 with a process group of 2 ranks: .* Pass rank=, too"):
        StatefulDistributedSampler(range(10), 2, num_replicas=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 2}, "num_replicas=2 with no process group: which of them is this process"),
        ({"num_replicas": 0, "rank": 0}, "num_replicas: expected an integer of 1 to"),
        ({"num_replicas": 2, "rank": 2}, "rank: expected an integer of 0 to 1, found 2"),
        ({"rank": 1}, "rank: expected an integer of 0 to 0, found 1"),
        ({"batch_size": 0}, "batch_size: expected an integer of 1 to"),
        ({"num_replicas": 2, "rank": 0, "batch_size": 2**62}, f"batch_size: expected an integer of 1 to {2**62 - 1}"),
        ({"drop_last": 1}, "drop_last: expected True or False, found 1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        StatefulDistributedSampler(**{"data_source": range(10), "batch_size": 2, **arguments})


def test_both_samplers_have_one_base() -> None:
    assert syckpt.StatefulDistributedSampler is StatefulDistributedSampler
    assert issubclass(StatefulDistributedSampler, StatefulSampler)
    assert issubclass(StatefulRandomSampler, StatefulSampler)
