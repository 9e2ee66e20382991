"""StatefulRandomSampler: its position is what was consumed, and a resume at any batch goes on exactly there."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from syckpt.dataloader import StatefulRandomSampler
from syckpt.errors import FormatError, StateError


def loader_of(sampler: StatefulRandomSampler, **options: Any) -> DataLoader[int]:
    return DataLoader(range(len(sampler.data_source)), batch_size=sampler.batch_size, sampler=sampler, **options)


def batches_of(sampler: StatefulRandomSampler, loader: DataLoader[int] | None = None) -> Iterator[tuple[int, list[int]]]:
    """Train one pass: yield (epoch, indices) and count each batch as consumed before the next one is asked for."""
    for batch in loader_of(sampler) if loader is None else loader:
        sampler.advance(1)
        yield sampler.epoch, batch.tolist()


def resumed(sampler: StatefulRandomSampler, **changes: Any) -> StatefulRandomSampler:
    """A new sampler, as a new process makes it, at the saved position."""
    options = {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last} | changes
    new = StatefulRandomSampler(sampler.data_source, **options)
    new.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return new


# Sampling


def test_orders_are_pinned() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    assert list(sampler) == [7, 9, 1, 3, 8, 6, 0, 5, 2, 4]
    sampler.set_epoch(1)
    assert list(sampler) == [6, 7, 1, 0, 9, 3, 2, 5, 4, 8]
    assert list(StatefulRandomSampler(range(10), batch_size=4, shuffle=False)) == list(range(10))
    assert list(StatefulRandomSampler(range(10), batch_size=4, drop_last=True)) == [7, 9, 1, 3, 8, 6, 0, 5]


def test_indices_are_python_integers() -> None:
    assert {type(index) for index in StatefulRandomSampler(range(600), batch_size=4)} == {int}


def test_an_epoch_longer_than_a_chunk_comes_whole() -> None:
    assert sorted(StatefulRandomSampler(range(20_000), batch_size=4)) == list(range(20_000))


@pytest.mark.parametrize(("length", "drop_last", "expected"), [(10, False, 10), (10, True, 8), (3, True, 0), (0, False, 0)])
def test_the_length_is_that_of_a_whole_epoch(length: int, drop_last: bool, expected: int) -> None:
    sampler = StatefulRandomSampler(range(length), batch_size=4, drop_last=drop_last)
    assert len(sampler) == expected
    assert len(list(sampler)) == expected
    sampler.advance(1)
    assert len(sampler) == expected


def test_the_global_generators_are_not_used() -> None:
    before = torch.get_rng_state()
    list(StatefulRandomSampler(range(100), batch_size=4))
    assert torch.equal(torch.get_rng_state(), before)


# Consuming


def test_only_consumed_batches_move_the_position() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    yielded = iter(loader_of(sampler))
    next(yielded)
    next(yielded)
    assert (sampler.epoch, sampler.consumed, sampler.batch_idx) == (0, 0, 0)
    sampler.advance(1)
    assert (sampler.epoch, sampler.consumed, sampler.batch_idx) == (0, 4, 1)
    sampler.advance(0)
    sampler.advance(5)
    assert (sampler.epoch, sampler.consumed, sampler.batch_idx, sampler.exhausted) == (0, 10, 3, True)


def test_the_next_epoch_begins_with_its_first_consumed_batch() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    sampler.advance(3)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(4)] == [6, 7, 1, 0]
    assert (sampler.epoch, sampler.consumed, sampler.exhausted) == (0, 10, True)
    assert list(resumed(sampler)) == [6, 7, 1, 0, 9, 3, 2, 5, 4, 8]
    sampler.advance(1)
    assert (sampler.epoch, sampler.consumed, sampler.exhausted) == (1, 4, False)
    assert list(iterator) == [9, 3, 2, 5, 4, 8]


def test_advancing_past_the_end_without_a_new_iteration_stays_there() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    sampler.advance(3)
    sampler.advance(1)
    assert (sampler.epoch, sampler.consumed) == (0, 10)


def test_iterating_again_in_mid_epoch_goes_on_at_the_consumed_position() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    loader = loader_of(sampler)
    for batch in loader:
        sampler.advance(1)
        assert batch.tolist() == [7, 9, 1, 3]
        break
    assert [batch.tolist() for batch in loader] == [[8, 6, 0, 5], [2, 4]]


def test_plain_passes_are_epochs() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    passes = [list(batches_of(sampler)) for _ in range(3)]
    assert [{epoch for epoch, _ in one} for one in passes] == [{0}, {1}, {2}]
    assert all(sorted(itertools.chain(*(batch for _, batch in one))) == list(range(10)) for one in passes)


# Setting the epoch


def test_set_epoch_keeps_the_position_inside_of_the_same_epoch() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    sampler.advance(1)
    sampler.set_epoch(0)
    assert (sampler.epoch, sampler.consumed) == (0, 4)
    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.consumed) == (2, 0)


def test_set_epoch_starts_an_exhausted_epoch_again(caplog: pytest.LogCaptureFixture) -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    sampler.advance(3)
    with caplog.at_level(logging.INFO):
        sampler.set_epoch(0)
    assert (sampler.epoch, sampler.consumed) == (0, 0)
    assert "epoch 0 was finished" in caplog.text


def test_a_loop_over_epochs_resumes_in_mid_epoch() -> None:
    def train(sampler: StatefulRandomSampler, stop_after: int | None = None) -> list[tuple[int, list[int]]]:
        seen: list[tuple[int, list[int]]] = []
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            for item in batches_of(sampler):
                seen.append(item)
                if len(seen) == stop_after:
                    return seen
        return seen

    whole = train(StatefulRandomSampler(range(10), batch_size=4))
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    assert train(sampler, stop_after=4) + train(resumed(sampler)) == whole
    assert len(whole) == 9


def test_set_epoch_after_the_iteration_of_that_epoch_began_keeps_it_going() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    sampler.advance(3)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(1)
    next(iterator)
    sampler.advance(1)
    assert (sampler.epoch, sampler.consumed) == (1, 4)


def test_an_iteration_whose_position_was_moved_away_raises() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(5)
    with pytest.raises(StateError, match="moved during this iteration; start a new one"):
        next(iterator)
    assert len(list(sampler)) == 10


# Resuming


@given(
    st.integers(0, 40),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 6), max_size=8),
)
def test_stopping_anywhere_any_number_of_times_changes_nothing(
    length: int, batch_size: int, drop_last: bool, shuffle: bool, stops: list[int]
) -> None:
    def two_epochs(sampler: StatefulRandomSampler) -> Iterator[tuple[int, list[int]]]:
        while sampler.epoch + sampler.exhausted < 2 and len(sampler):
            yield from batches_of(sampler)

    def make() -> StatefulRandomSampler:
        return StatefulRandomSampler(range(length), batch_size, drop_last=drop_last, shuffle=shuffle)

    whole = list(two_epochs(make()))
    sampler = make()
    pieces: list[tuple[int, list[int]]] = []
    for stop in stops:
        pieces += itertools.islice(two_epochs(sampler), stop)
        sampler = resumed(sampler)
    assert pieces + list(two_epochs(sampler)) == whole
    if not drop_last:
        for epoch in range(2):
            assert sorted(itertools.chain(*(batch for at, batch in whole if at == epoch))) == list(range(length))


@pytest.mark.parametrize(("length", "batch_size", "drop_last"), [(11, 3, False), (11, 3, True), (12, 4, False), (5, 8, False)])
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "prefetch_factor": 3}], ids=["no workers", "two workers"])
def test_a_resume_at_every_batch_goes_on_exactly(length: int, batch_size: int, drop_last: bool, options: dict[str, Any]) -> None:
    sampler = StatefulRandomSampler(range(length), batch_size, drop_last=drop_last)
    loader = loader_of(sampler, **options)
    whole, saved = [], []
    for _ in range(2):
        for item in batches_of(sampler, loader):
            whole.append(item)
            saved.append(resumed(sampler))
    for done, new in enumerate(saved[:-1], start=1):
        rest: list[tuple[int, list[int]]] = []
        while len(rest) < len(whole) - done:
            rest += batches_of(new, loader_of(new, **options))
        assert rest == whole[done:]


def test_persistent_workers_go_on_at_the_consumed_position() -> None:
    sampler = StatefulRandomSampler(range(11), batch_size=3)
    loader = loader_of(sampler, num_workers=2, persistent_workers=True)
    expected = list(batches_of(StatefulRandomSampler(range(11), batch_size=3)))
    found = list(itertools.islice(batches_of(sampler, loader), 2))
    found += batches_of(sampler, loader)
    assert found == expected
    assert [epoch for epoch, _ in batches_of(sampler, loader)] == [1, 1, 1, 1]


def test_epochs_after_a_resumed_one_are_whole() -> None:
    sampler = StatefulRandomSampler(range(11), batch_size=3)
    sampler.advance(2)
    new = resumed(sampler)
    assert [len(list(itertools.chain(*(batch for _, batch in batches_of(new))))) for _ in range(3)] == [5, 11, 11]


def test_another_batch_size_goes_on_at_the_same_sample() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=3)
    sampler.advance(1)
    new = resumed(sampler, batch_size=2)
    assert (new.consumed, new.batch_idx) == (3, 2)
    assert [batch for _, batch in batches_of(new)] == [[3, 8], [6, 0], [5, 2], [4]]
    assert list(resumed(sampler, batch_size=4, drop_last=True)) == [3, 8, 6, 0]
    assert new.exhausted


def test_seed_and_shuffle_of_the_state_win_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4, seed=42)
    sampler.advance(1)
    new = resumed(sampler, seed=7, shuffle=False)
    assert list(new) == [8, 6, 0, 5, 2, 4]
    assert "the saved order is kept: seed=42, shuffle=True (this sampler was made with seed=7, shuffle=False)" in caplog.text


def test_the_state_is_plain() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=np.int64(4))
    sampler.advance(1)
    assert sampler.state_dict() == {
        "version": 1,
        "seed": 42,
        "epoch": 0,
        "consumed": 4,
        "length": 10,
        "shuffle": True,
        "batch_size": 4,
        "loader_drop_last": False,
    }
    assert {type(value) for value in sampler.state_dict().values()} == {int, bool}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"length": 9}, StateError, "a dataset of 9 samples, found one of 10"),
        ({"version": 2}, FormatError, "version 2; this syckpt reads version 1"),
        ({"consumed": 11}, StateError, "consumed: expected an integer of 0 to 10, found 11"),
        ({"epoch": "1"}, StateError, "epoch: expected an integer, found '1'"),
        ({"shuffle": 1}, StateError, "shuffle: expected True or False, found 1"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    before = sampler.state_dict()
    with pytest.raises(error, match=message):
        sampler.load_state_dict(before | {"epoch": 3} | changes)
    assert sampler.state_dict() == before


def test_something_else_than_a_state_is_refused() -> None:
    with pytest.raises(StateError, match=r"not a sampler's state: batch_size, .* missing; found \['step'\]"):
        StatefulRandomSampler(range(10), batch_size=4).load_state_dict({"step": 1})


# The loader


def test_another_batch_size_than_the_loaders_is_an_error() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    for options in ({"num_workers": 0}, {"num_workers": 1}):
        with pytest.raises(StateError, match=r"batch_size=5, its sampler batch_size=4.*make the sampler with batch_size=5"):
            next(iter(DataLoader(range(10), batch_size=5, sampler=sampler, **options)))
    with pytest.raises(StateError, match="make the sampler with batch_size=1"):
        next(iter(DataLoader(range(10), batch_size=None, sampler=sampler)))


def test_batches_in_any_order_are_an_error() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    with pytest.raises(StateError, match="in_order=True"):
        next(iter(loader_of(sampler, num_workers=2, in_order=False)))
    assert sampler.loader is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_the_loader_is_like_is_known_after_the_first_index(num_workers: int) -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    loader = loader_of(sampler, num_workers=num_workers, persistent_workers=num_workers > 0, drop_last=True)
    next(iter(loader))
    assert sampler.loader is not None
    assert sampler.loader.dataset is loader.dataset
    assert (sampler.loader.batch_size, sampler.loader.drop_last, sampler.loader.in_order) == (4, True, True)
    assert (sampler.loader.num_workers, sampler.loader.persistent_workers) == (num_workers, num_workers > 0)


def test_other_ways_to_iterate_are_recognised() -> None:
    class Wrapped:
        def __init__(self, batch_sampler: BatchSampler) -> None:
            self.batch_sampler = batch_sampler

        def __iter__(self) -> Iterator[list[int]]:
            yield from self.batch_sampler

    class OfItsOwnSize(Wrapped):
        def __iter__(self) -> Iterator[list[int]]:
            for index in self.batch_sampler:
                yield [index]

    def facts_of(sampler: StatefulRandomSampler, loader: Any) -> tuple[int | None, bool, Any] | None:
        next(iter(loader))
        facts = sampler.loader
        return None if facts is None else (facts.batch_size, facts.drop_last, facts.dataset)

    data: Any = range(10)
    sampler = StatefulRandomSampler(data, batch_size=4)
    assert facts_of(sampler, sampler) is None
    assert facts_of(sampler, BatchSampler(sampler, 4, True)) == (4, True, None)
    assert facts_of(sampler, DataLoader(data, batch_sampler=BatchSampler(sampler, 4, True))) == (4, True, data)
    assert facts_of(sampler, DataLoader(data, batch_sampler=Wrapped(BatchSampler(sampler, 4, False)))) == (4, False, data)
    as_sampler: Any = BatchSampler(sampler, 4, False)
    assert facts_of(sampler, DataLoader(TensorLike(), sampler=as_sampler, batch_size=None))[:2] == (4, False)  # type: ignore[index]
    assert facts_of(sampler, DataLoader(data, batch_sampler=OfItsOwnSize(sampler))) == (None, False, data)
    single = StatefulRandomSampler(data, batch_size=1)
    assert facts_of(single, DataLoader(data, batch_size=None, sampler=single)) == (1, False, data)


class TensorLike:
    """A dataset that is indexed by whole batches."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, indices: list[int]) -> list[int]:
        return indices


def test_an_epoch_ends_where_the_loader_drops_the_last_batch() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    loader = loader_of(sampler, drop_last=True)
    seen = list(batches_of(sampler, loader))
    assert [len(batch) for _, batch in seen] == [4, 4]
    assert (sampler.epoch, sampler.consumed, sampler.exhausted) == (0, 8, True)
    assert resumed(sampler).exhausted
    assert [epoch for epoch, _ in batches_of(sampler, loader)] == [1, 1]
    assert not StatefulRandomSampler(range(10), batch_size=4).exhausted


def test_the_hook_runs_once_per_iteration_after_the_base_seed_was_drawn() -> None:
    for options in ({}, {"num_workers": 2}):
        sampler = StatefulRandomSampler(range(10), batch_size=4)
        states: list[torch.Tensor] = []
        sampler.on_first_index = lambda states=states: states.append(torch.get_rng_state())
        torch.manual_seed(1)
        for _ in batches_of(sampler, loader_of(sampler, **options)):
            pass
        torch.manual_seed(1)
        torch.empty((), dtype=torch.int64).random_()
        assert len(states) == 1
        assert torch.equal(states[0], torch.get_rng_state())
        list(sampler)
        assert len(states) == 2


def test_the_hook_does_not_run_when_there_is_no_index() -> None:
    sampler = StatefulRandomSampler(range(3), batch_size=4, drop_last=True)
    sampler.on_first_index = lambda: pytest.fail("called")
    assert list(sampler) == []


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected an integer of 1 to"),
        ({"batch_size": 2.0}, "batch_size: expected an integer, found 2.0"),
        ({"batch_size": True}, "batch_size: expected an integer of 1 to .*, found True"),
        ({"seed": None}, "seed: expected an integer, found None"),
        ({"seed": 2**63}, "seed: expected an integer of"),
        ({"shuffle": None}, "shuffle: expected True or False, found None"),
        ({"drop_last": 1}, "drop_last: expected True or False, found 1"),
        ({"data_source": iter([])}, "data_source needs a length; list_iterator has none"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        StatefulRandomSampler(**{"data_source": range(10), "batch_size": 4, **arguments})


def test_positions_are_checked() -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    with pytest.raises(StateError, match="batches: expected"):
        sampler.advance(-1)
    with pytest.raises(StateError, match="epoch: expected"):
        sampler.set_epoch(-1)


def test_a_process_group_of_several_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = StatefulRandomSampler(range(10), batch_size=4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(StateError, match=r"2 ranks.*use StatefulDistributedSampler"):
        StatefulRandomSampler(range(10), batch_size=4)
    with pytest.raises(StateError, match="use StatefulDistributedSampler"):
        next(iter(sampler))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert len(list(sampler)) == 10
