"""seeded(): what a dataset draws for an index depends on (seed, epoch, index), and on nothing else."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from syckpt.dataloader import StatefulRandomSampler, is_seeded, seeded
from syckpt.errors import StateError

Drawn = tuple[int, float, float, float]


class Drawing(Dataset[Drawn]):
    """Draws from all three global generators."""

    transform = "flip"

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Drawn:
        if index == 99:
            raise IndexError(index)
        return index, random.random(), float(np.random.standard_normal()), float(torch.rand(()))

    def __getitems__(self, indices: list[int]) -> list[Drawn]:
        pytest.fail("batched access draws unkeyed")


def epochs_of(count: int, **options: Any) -> list[list[list[Any]]]:
    dataset = seeded(Drawing())
    sampler = StatefulRandomSampler(dataset, batch_size=4)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, **options)
    passes = []
    for _ in range(count):
        batches = []
        for batch in loader:
            sampler.advance(1)
            batches.append([column.tolist() for column in batch])
        passes.append(batches)
    return passes


def states() -> tuple[Any, ...]:
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return python, numpy[1].tolist(), numpy[2:], torch_state.tolist()


def test_draws_are_pinned() -> None:
    dataset = seeded(Drawing())
    dataset.begin_epoch(1, seed=42)
    assert dataset[3] == (3, 0.7486218545869122, -1.038145626312609, 0.7620676755905151)


def test_draws_depend_on_seed_epoch_and_index_alone() -> None:
    dataset = seeded(Drawing())
    found: dict[tuple[int, int, int], Drawn] = {}
    for seed, epoch, index in itertools.product((0, 1), (0, 1), (0, 1)):
        dataset.begin_epoch(epoch, seed=seed)
        random.seed(len(found))
        found[seed, epoch, index] = dataset[index]
        assert dataset[index] == found[seed, epoch, index]
    for column in (1, 2, 3):
        assert len({drawn[column] for drawn in found.values()}) == 8


def test_the_streams_of_the_process_do_not_move() -> None:
    dataset = seeded(Drawing())
    np.random.standard_normal()  # leaves a second value in the generator's own store
    before = states()
    dataset[3]
    with pytest.raises(IndexError):
        dataset[99]
    assert states() == before


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2, "prefetch_factor": 3},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
    ],
    ids=["one", "two", "persistent", "spawned"],
)
def test_samples_are_the_same_with_any_workers(options: dict[str, Any]) -> None:
    expected = epochs_of(3)
    assert epochs_of(3, **options) == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_the_same_after_a_resume_in_mid_epoch(num_workers: int) -> None:
    whole = epochs_of(2)
    dataset = seeded(Drawing())
    sampler = StatefulRandomSampler(dataset, batch_size=4)
    sampler.load_state_dict(sampler.state_dict() | {"epoch": 1, "consumed": 4})
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=num_workers)
    assert [[column.tolist() for column in batch] for batch in loader] == whole[1][1:]


def test_the_sampler_finds_seeded_parts_and_the_loaders_dataset() -> None:
    parts = [seeded(Drawing()), seeded(Drawing())]
    joined = ConcatDataset([Subset(parts[0], [0, 1]), parts[1]])
    sampler = StatefulRandomSampler(joined, batch_size=4, seed=7)
    sampler.set_epoch(3)
    next(iter(sampler))
    expected = seeded(Drawing())
    expected.begin_epoch(3, seed=7)
    assert joined[1] == joined[3] == expected[1]

    behind = seeded(Drawing())
    sampler = StatefulRandomSampler(range(10), batch_size=4, seed=7)
    sampler.set_epoch(3)
    next(iter(DataLoader(behind, batch_size=4, sampler=sampler)))
    assert behind[1] == expected[1]


def test_only_what_keys_all_its_draws_is_seeded() -> None:
    inner = Drawing()
    assert not is_seeded(inner)
    assert is_seeded(seeded(inner))
    assert is_seeded(Subset(seeded(inner), [0]))
    assert is_seeded(ConcatDataset([seeded(inner), Subset(seeded(inner), [0])]))
    assert not is_seeded(ConcatDataset([seeded(inner), inner]))
    assert not is_seeded(None)


def test_the_wrapper_shows_the_dataset() -> None:
    inner = Drawing()
    dataset = seeded(inner)
    assert seeded(dataset) is dataset
    assert isinstance(dataset, Dataset)
    assert len(dataset) == 10
    assert dataset.transform == "flip"
    dataset.transform = "crop"
    assert inner.transform == "crop"
    assert not hasattr(dataset, "missing")
    assert repr(seeded([1, 2])) == "seeded([1, 2])"
    assert seeded([1, 2])[np.int64(1)] == 2
    assert seeded({"a": 1})["a"] == 1


def test_copies_and_pickles_draw_alike_and_share_their_epoch_with_their_own_workers() -> None:
    dataset = seeded(Drawing())
    dataset.begin_epoch(2, seed=5)
    for twin in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert twin[1] == dataset[1]
        twin.begin_epoch(3, seed=5)
        assert twin[1] != dataset[1]
        assert twin._announced.is_shared()


def test_what_has_no_index_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([])

    for wrong in (Stream(), iter([]), 3):
        with pytest.raises(StateError, match="map-style dataset"):
            seeded(wrong)
    with pytest.raises(StateError, match="indexed by integers or strings, found list"):
        seeded([1])[[0]]
