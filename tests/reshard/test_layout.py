"""boxes_at, holders and local_shape say exactly which elements a rank holds, torch.chunk's rules and torch's strided shards included."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import StateError
from syckpt.objects.box import Box
from syckpt.reshard.layout import (
    Layout,
    LocalBox,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    boxes_at,
    copies,
    copy_of,
    holders,
    keepers,
    local_shape,
    shard_placements,
)


def layout(shape: tuple[int, ...], mesh: tuple[int, ...], *placements: Placement) -> Layout:
    return Layout(shape, mesh, tuple(range(prod(mesh))), placements)


def rows(of: Layout, *coordinate: int) -> list[tuple[int, int]]:
    """Return offset and size along dimension 0 of a coordinate's boxes."""
    return [(part.box.offsets[0], part.box.sizes[0]) for part in boxes_at(of, coordinate)]


def coordinates(of: Layout) -> list[tuple[int, ...]]:
    return list(product(*map(range, of.mesh_shape)))


def chunks(array: np.ndarray, parts: int, dim: int) -> list[np.ndarray]:
    """torch.chunk, with the empty chunks that DTensor adds."""
    step = -(-array.shape[dim] // parts)
    return [array.take(range(min(array.shape[dim], i * step), min(array.shape[dim], i * step + step)), dim) for i in range(parts)]


def split_left_to_right(array: np.ndarray, of: Layout, coordinate: tuple[int, ...]) -> np.ndarray:
    """Return what `distribute_tensor` gives a rank: each placement splits what the ones before it left."""
    for parts, placement, index in zip(of.mesh_shape, of.placements, coordinate, strict=True):
        if isinstance(placement, Shard):
            array = chunks(array, parts, placement.dim)[index]
        elif isinstance(placement, StridedShard):
            runs = chunks(array, placement.split_factor, placement.dim)
            array = np.concatenate([chunks(run, parts, placement.dim)[index] for run in runs], placement.dim)
    return array


def gathered(array: np.ndarray, of: Layout, coordinate: tuple[int, ...]) -> np.ndarray:
    """Build a coordinate's local tensor from its boxes; fails if they do not tile it."""
    local = np.full(local_shape(of, coordinate), -1)
    for part in boxes_at(of, coordinate):
        there = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.box.sizes, strict=True))
        here = tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.sizes, strict=True))
        assert (local[there] == -1).all()
        local[there] = array[here]
    assert (local != -1).all()
    return local


def test_an_uneven_shard_follows_torch_chunk_with_short_and_empty_last_parts() -> None:
    of = layout((5, 2), (4,), Shard(0))
    assert [rows(of, i) for i in range(4)] == [[(0, 2)], [(2, 2)], [(4, 1)], []]
    assert local_shape(of, (3,)) == (0, 2)


def test_several_mesh_dimensions_split_one_tensor_dimension_from_left_to_right() -> None:
    of = layout((7,), (2, 2), Shard(0), Shard(0))
    assert [rows(of, *c) for c in coordinates(of)] == [[(0, 2)], [(2, 2)], [(4, 2)], [(6, 1)]]


def test_fsdp2_over_tensor_parallel_holds_one_interval_each_tensor_parallel_first() -> None:
    of = layout((8, 8), (2, 2), StridedShard(0, 2), Shard(0))
    assert [rows(of, *c) for c in coordinates(of)] == [[(0, 2)], [(4, 2)], [(2, 2)], [(6, 2)]]


def test_fsdp2_over_an_uneven_tensor_parallel_shard_splits_what_each_rank_of_it_had() -> None:
    # 9 rows over 2 are 5 and 4, over 4 then 2, 2, 1, 0 and 1, 1, 1, 1: what torch's own arithmetic of placements does not say.
    of = layout((9,), (4, 2), StridedShard(0, 2), Shard(0))
    assert [rows(of, i, 0) for i in range(4)] == [[(0, 2)], [(2, 2)], [(4, 1)], []]
    assert [rows(of, i, 1) for i in range(4)] == [[(5, 1)], [(6, 1)], [(7, 1)], [(8, 1)]]


def test_a_strided_shard_alone_has_a_box_in_each_run() -> None:
    of = layout((9, 2), (4,), StridedShard(0, 2))
    assert [rows(of, i) for i in range(4)] == [[(0, 2), (5, 1)], [(2, 2), (6, 1)], [(4, 1), (7, 1)], [(8, 1)]]
    assert boxes_at(of, (1,)) == [LocalBox(Box((2, 0), (2, 2)), (0, 0)), LocalBox(Box((6, 0), (1, 2)), (2, 0))]


def test_a_strided_shard_over_one_rank_is_the_whole() -> None:
    assert rows(layout((5,), (1, 2), StridedShard(0, 3), Replicate()), 0, 1) == [(0, 5)]


def test_runs_that_touch_are_one_box() -> None:
    assert rows(layout((4,), (2,), StridedShard(0, 4)), 0) == [(0, 4)]


def test_strided_shards_in_two_dimensions_hold_the_product_of_their_runs() -> None:
    of = layout((4, 4), (2, 2), StridedShard(0, 2), StridedShard(1, 2))
    assert boxes_at(of, (0, 1)) == [
        LocalBox(Box((0, 1), (1, 1)), (0, 0)),
        LocalBox(Box((0, 3), (1, 1)), (0, 1)),
        LocalBox(Box((2, 1), (1, 1)), (1, 0)),
        LocalBox(Box((2, 3), (1, 1)), (1, 1)),
    ]


def test_a_scalar_is_one_box_without_dimensions() -> None:
    of = layout((), (2,), Replicate())
    assert boxes_at(of, (1,)) == [LocalBox(Box((), ()), ())]
    assert holders(of) == {Box((), ()): (0, 1)}


def test_a_tensor_without_elements_is_one_box_on_every_rank() -> None:
    of = layout((4, 0), (2,), Shard(0))
    assert [boxes_at(of, (i,)) for i in range(2)] == [[LocalBox(Box((0, 0), (4, 0)), (0, 0))]] * 2
    assert holders(of) == {Box((0, 0), (4, 0)): (0, 1)}


def test_holders_of_a_hybrid_shard_are_the_replicas_in_global_ranks() -> None:
    of = Layout((4,), (2, 2), (6, 7, 4, 5), (Replicate(), Shard(0)))
    assert holders(of) == {Box((0,), (2,)): (4, 6), Box((2,), (2,)): (5, 7)}
    assert of.coordinate_of(4) == (1, 0)
    assert of.coordinate_of(0) is None


def test_an_order_of_splits_other_than_left_to_right_is_written_as_strided_shards() -> None:
    # Tensor dimension 0 over mesh dimensions 2, 0, 1 in that order: torch's own example.
    placements = shard_placements((Shard(0), Shard(0), Shard(0)), (4, 3, 2), (2, 0, 1))
    assert placements == (StridedShard(0, 2), StridedShard(0, 2), Shard(0))
    of = layout((48,), (4, 3, 2), *placements)
    assert rows(of, 1, 0, 0) == [(6, 2)]
    assert rows(of, 0, 2, 1) == [(28, 2)]
    assert shard_placements((Shard(0), Shard(0)), (2, 2), (0, 1)) == (Shard(0), Shard(0))


@pytest.mark.parametrize(
    ("shape", "mesh", "ranks", "placements"),
    [
        ((4,), (2,), (0, 1), ()),
        ((4,), (2,), (0, 1, 2), (Shard(0),)),
        ((4,), (2,), (1, 1), (Shard(0),)),
        ((4,), (2,), (0, 1), (Shard(1),)),
        ((4,), (2,), (0, 1), (Shard(-1),)),
        ((4,), (2,), (0, 1), (StridedShard(0, 0),)),
    ],
)
def test_what_is_no_layout_is_refused(shape: tuple[int, ...], mesh: tuple[int, ...], ranks: tuple[int, ...], placements: tuple) -> None:
    with pytest.raises(StateError, match="not a layout"):
        Layout(shape, mesh, ranks, placements)


@st.composite
def layouts(draw: st.DrawFn, *, strided: bool = True) -> Layout:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Placement] = []
    for _ in mesh:
        kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
        if shape:
            dims = st.integers(0, len(shape) - 1)
            kinds.append(st.builds(Shard, dims))
            if strided:
                kinds.append(st.builds(StridedShard, dims, st.integers(1, 4)))
        placements.append(draw(st.one_of(kinds)))
    return Layout(shape, mesh, tuple(draw(st.permutations(range(3, 3 + prod(mesh))))), tuple(placements))


@given(layouts())
def test_boxes_tile_every_local_tensor_and_distinct_boxes_tile_the_global_one(of: Layout) -> None:
    array = np.arange(prod(of.global_shape)).reshape(of.global_shape)
    counts = np.zeros(of.global_shape, int)
    held: dict[Box, list[int]] = {}
    for coordinate, rank in zip(coordinates(of), of.ranks, strict=True):
        assert of.coordinate_of(rank) == coordinate
        if array.size:
            gathered(array, of, coordinate)
        for part in boxes_at(of, coordinate):
            held.setdefault(part.box, []).append(rank)
    for box in held:
        counts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (counts == 1).all()
    assert holders(of) == {box: tuple(sorted(ranks)) for box, ranks in held.items()}


@given(layouts(strided=False))
def test_shards_are_those_of_torch_chunk_applied_from_left_to_right(of: Layout) -> None:
    array = np.arange(prod(of.global_shape)).reshape(of.global_shape)
    for coordinate in coordinates(of):
        expected = split_left_to_right(array, of, coordinate)
        assert local_shape(of, coordinate) == expected.shape
        if array.size:
            assert (gathered(array, of, coordinate) == expected).all()


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_evenly_split_strided_shards_read_from_left_to_right_as_torch_does(times: int, mesh: list[int], data: st.DataObject) -> None:
    placements: list[Placement] = [StridedShard(0, data.draw(st.integers(1, 4))) for _ in mesh]
    even = prod(mesh) * prod(p.split_factor for p in placements if isinstance(p, StridedShard))
    of = layout((times * even,), tuple(mesh), *placements)
    array = np.arange(times * even)
    for coordinate in coordinates(of):
        assert (gathered(array, of, coordinate) == split_left_to_right(array, of, coordinate)).all()


@given(st.integers(1, 40), st.integers(1, 5), st.integers(2, 5))
def test_fsdp2_over_tensor_parallel_is_a_chunk_of_a_chunk_at_any_size(size: int, data_parallel: int, tensor_parallel: int) -> None:
    of = layout((size,), (data_parallel, tensor_parallel), StridedShard(0, tensor_parallel), Shard(0))
    array = np.arange(size)
    for i, j in coordinates(of):
        assert (gathered(array, of, (i, j)) == chunks(chunks(array, tensor_parallel, 0)[j], data_parallel, 0)[i]).all()


def test_replicas_of_a_large_mesh_share_one_box() -> None:
    of = layout((64, 8), (1 << 13, 8), Replicate(), Shard(0))
    found = holders(of)
    assert len(found) == 8
    assert found[Box((8, 0), (8, 8))][:2] == (1, 9)


@st.composite
def parts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)))


def meet(first: Box, second: Box) -> bool:
    corners = zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    return all(max(a, c) < min(a + b, c + d) for a, b, c, d in corners)


@given(layouts(), st.data())
def test_the_keepers_of_a_copy_are_the_ranks_of_it_that_hold_elements_of_the_boxes(of: Layout, data: st.DataObject) -> None:
    found = holders(of)
    whole = Box((0,) * len(of.global_shape), of.global_shape)
    assert {len(ranks) for ranks in found.values()} <= {copies(of)}
    assert {rank: copy_of(of, rank) for rank in (*of.ranks, max(of.ranks) + 1)}[max(of.ranks) + 1] is None
    for copy in range(copies(of)):
        members = {rank for rank in of.ranks if copy_of(of, rank) == copy}
        assert all(len(members.intersection(ranks)) == 1 for ranks in found.values())
        assert keepers(of, copy) == members.intersection(*[set().union(*found.values())])
        box = data.draw(parts_of(of.global_shape))
        near = [ranks for held, ranks in found.items() if meet(held, box)]
        if whole.elements:
            assert keepers(of, copy, [box]) == members.intersection(set().union(*near))
        else:
            assert keepers(of, copy, [box]) == members


def test_the_keepers_of_a_part_of_a_large_mesh_are_found_without_a_look_at_its_ranks() -> None:
    of = layout((1 << 40, 3), (8192,), Shard(0))
    assert keepers(of, 0, [Box((1 << 27, 0), (1 << 28, 1))]) == {1, 2}
    hybrid = layout((100, 3), (2, 4, 2), Replicate(), Shard(0), Replicate())
    assert [keepers(hybrid, copy, [Box((25, 0), (26, 3))]) for copy in range(4)] == [{2, 4}, {3, 5}, {10, 12}, {11, 13}]
