"""plan covers every wanted element once; block_schedule and copy_block move exactly those bytes, decoding no block twice."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from syckpt.errors import StateError
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.objects.box import Box
from syckpt.reshard.layout import Layout, Placement, Replicate, Shard, StridedShard, boxes_at, holders, local_shape
from syckpt.reshard.plan import Region, block_schedule, copy_block, plan, touched_blocks


def span(begin: int, end: int) -> Box:
    return Box((begin,), (end - begin,))


def cut(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Index a box of an array; the ellipsis makes it a view of a scalar, too."""
    return (..., *(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)))


# --- regions


def test_a_target_takes_from_every_source_that_it_meets() -> None:
    assert plan([span(0, 4), span(4, 8), span(8, 12)], [span(2, 9)]) == [
        Region(0, 0, (2,), (0,), (2,)),
        Region(1, 0, (0,), (2,), (4,)),
        Region(2, 0, (0,), (6,), (1,)),
    ]


def test_regions_come_by_target_then_by_source_however_many_there_are() -> None:
    sources = [span(i, i + 2) for i in (6, 0, 4, 2)]
    assert plan(sources, [span(i, i + 1) for i in range(8)]) == [
        Region(1 + (0, 2, 1, -1)[i // 2], i, (i % 2,), (0,), (1,)) for i in range(8)
    ]
    assert [region.source for region in plan(sources, [span(0, 8)])] == [0, 1, 2, 3]


def test_offsets_are_within_the_boxes_in_every_dimension() -> None:
    assert plan([Box((2, 3), (5, 6))], [Box((4, 3), (2, 4))]) == [Region(0, 0, (2, 0), (0, 0), (2, 4))]


def test_a_scalar_is_one_region_without_dimensions() -> None:
    assert plan([Box((), ())], [Box((), ())]) == [Region(0, 0, (), (), ())]


def test_boxes_without_elements_neither_give_nor_want_anything() -> None:
    assert plan([Box((0, 0), (0, 4)), Box((0, 0), (2, 4))], [Box((0, 0), (2, 0)), Box((0, 0), (1, 4))]) == [
        Region(1, 1, (0, 0), (0, 0), (1, 4))
    ]
    assert plan([], [Box((0,), (0,))]) == []


def test_readers_spread_over_identical_copies() -> None:
    copies = [span(0, 4), span(0, 4), span(4, 8), span(0, 4)]
    assert [[region.source for region in plan(copies, [span(0, 8)], reader=reader)] for reader in range(4)] == [
        [0, 2],
        [1, 2],
        [2, 3],
        [0, 2],
    ]


@pytest.mark.parametrize(
    ("sources", "target", "missing"),
    [
        ([span(0, 4), span(5, 8)], span(0, 8), r"\[4:5\]"),
        ([], span(0, 8), r"\[0:8\]"),
        ([Box((0, 0), (4, 4)), Box((0, 4), (3, 4))], Box((0, 2), (4, 6)), r"\[3:4, 4:8\]"),
        ([], Box((), ()), r"\[\]"),
    ],
)
def test_an_element_that_nobody_saved_is_an_error_naming_path_and_box(sources: list[Box], target: Box, missing: str) -> None:
    with pytest.raises(StateError, match=rf"^model/w: no saved piece covers {missing} of"):
        plan(sources, [target], path="model/w")


def test_an_element_that_two_different_pieces_have_is_an_error_even_where_the_counts_agree() -> None:
    # 0:3 and 1:3 have five elements together, as many as the target.
    with pytest.raises(StateError, match=r"^model/w: \[1:3\] is covered more than once"):
        plan([span(0, 3), span(1, 3)], [span(0, 5)], path="model/w")
    with pytest.raises(StateError, match=r"^model/w: \[2:4, 1:4\] is covered more than once"):
        plan([Box((0, 0), (4, 4)), Box((2, 1), (4, 4))], [Box((0, 0), (6, 5))], path="model/w")


def test_an_overlap_outside_of_what_is_wanted_does_no_harm() -> None:
    assert plan([span(0, 4), span(4, 8), span(6, 10)], [span(0, 5)]) == [Region(0, 0, (0,), (0,), (4,)), Region(1, 0, (0,), (4,), (1,))]


@st.composite
def partitions(draw: st.DrawFn, box: Box) -> list[Box]:
    """Cut a box at random, again and again."""
    boxes = [box]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(boxes) - 1))
        dims = [dim for dim, size in enumerate(boxes[index].sizes) if size > 1]
        if not dims:
            continue
        whole, dim = boxes.pop(index), draw(st.sampled_from(dims))
        at = draw(st.integers(1, whole.sizes[dim] - 1))
        left, right = list(whole.sizes), list(whole.sizes)
        left[dim], right[dim] = at, whole.sizes[dim] - at
        moved = list(whole.offsets)
        moved[dim] += at
        boxes += [Box(whole.offsets, tuple(left)), Box(tuple(moved), tuple(right))]
    return boxes


SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@given(st.data(), SHAPES)
def test_any_partition_fills_any_boxes_exactly(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = Box((0,) * len(shape), shape)
    sources, targets = data.draw(partitions(whole)), data.draw(partitions(whole))
    array = np.arange(prod(shape)).reshape(shape)
    filled = [np.full(target.sizes, -1) for target in targets]
    for region in plan(sources, targets):
        part = array[cut(sources[region.source].offsets, sources[region.source].sizes)]
        there = cut(region.target_offsets, region.sizes)
        assert (filled[region.target][there] == -1).all()
        taken = part[cut(region.source_offsets, region.sizes)]
        filled[region.target][there] = taken
    for target, found in zip(targets, filled, strict=True):
        assert (found == array[cut(target.offsets, target.sizes)]).all()


@given(st.data(), SHAPES)
def test_a_partition_that_lacks_a_box_is_refused_and_so_is_one_with_an_overlap(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = Box((0,) * len(shape), shape)
    sources = data.draw(partitions(whole))
    removed = data.draw(st.integers(0, len(sources) - 1))
    with pytest.raises(StateError, match="no saved piece covers"):
        plan(sources[:removed] + sources[removed + 1 :], [whole])
    if len(sources) > 1:
        with pytest.raises(StateError, match="covered more than once"):
            plan([*sources, whole], [whole])


# --- blocks


def test_rows_of_a_piece_touch_the_blocks_between_their_first_and_last_byte() -> None:
    # A row has 1,000 bytes; rows 2 and 3 are bytes 2,000 to 4,000.
    assert touched_blocks((10, 250), (2, 0), (2, 250), itemsize=4, block_nbytes=1024) == [1, 2, 3]
    assert touched_blocks((1 << 20,), (1 << 18,), (1 << 18,), itemsize=4) == [1]


def test_blocks_between_the_rows_of_a_column_are_not_touched() -> None:
    # A row has four blocks, and the column lies in the third.
    assert touched_blocks((3, 1 << 20), (0, (1 << 19) + 5), (3, 2), itemsize=4) == [2, 6, 10]
    assert touched_blocks((3, 1 << 20), (0, (1 << 19) - 1), (3, 2), itemsize=4) == [1, 2, 5, 6, 9, 10]


def test_a_scalar_touches_its_block_and_nothing_touches_none() -> None:
    assert touched_blocks((), (), (), itemsize=8) == [0]
    assert touched_blocks((4, 4), (0, 2), (4, 0), itemsize=8) == []


def test_a_block_that_several_regions_share_is_scheduled_once() -> None:
    regions = [Region(0, 0, (0,), (0,), (300,)), Region(0, 1, (200,), (0,), (700,))]
    assert block_schedule((1000,), regions, itemsize=4, block_nbytes=1024) == [(0, [0, 1]), (1, [0, 1]), (2, [1]), (3, [1])]


@st.composite
def regions_of_pieces(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    sizes = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    return sizes, offsets, tuple(draw(st.integers(0, size - offset)) for size, offset in zip(sizes, offsets, strict=True))


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4", "<u8", "V16"])
@given(where=regions_of_pieces(), items=st.integers(1, 40), order=st.randoms(use_true_random=False))
@example(where=((3, 4, 5), (1, 1, 1), (2, 2, 3)), items=7, order=None)
@settings(max_examples=60)
def test_copying_exactly_the_touched_blocks_fills_any_strided_view(dtype: str, where: tuple, items: int, order) -> None:
    sizes, offsets, region = where
    itemsize = np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).bytes(prod(sizes) * itemsize)
    wanted = np.frombuffer(raw, dtype).reshape(sizes)[cut(offsets, region)]
    elements = np.arange(prod(sizes)).reshape(sizes)[cut(offsets, region)]
    blocks = touched_blocks(sizes, offsets, region, itemsize=itemsize, block_nbytes=items * itemsize)
    assert blocks == np.unique(elements // items).tolist()
    # A view with gaps, transposed: as a column shard of a column-major tensor.
    store = np.zeros(tuple(2 * n for n in reversed(region)), dtype)
    out = store[(..., *[slice(0, None, 2)] * len(region))].transpose()
    for block in blocks if order is None else order.sample(blocks, len(blocks)):
        part = memoryview(raw)[block * items * itemsize : (block + 1) * items * itemsize]
        copy_block(part, block * items, sizes, offsets, region, out=out)
    assert out.tobytes() == wanted.tobytes()


def test_bits_that_are_no_ordinary_floats_are_copied_as_they_are() -> None:
    raw = np.array([0x7FA00001, 0x80000000, 0xFFFFFFFF, 0x00000001], "<u4").tobytes()
    out = np.zeros(2, "<u4")
    copy_block(raw, 0, (2, 2), (0, 1), (2, 1), out=out[:, None])
    assert out.tolist() == [0x80000000, 0x00000001]


# --- from layout to layout


class Ranks:
    """Simulated ranks: a layout, and the local tensor of each of its ranks."""

    def __init__(self, layout: Layout, dtype: str) -> None:
        self.layout = layout
        self.coordinates = dict(zip(layout.ranks, product(*map(range, layout.mesh_shape)), strict=True))
        self.locals = {rank: np.zeros(local_shape(layout, at), dtype) for rank, at in self.coordinates.items()}
        self.read_nbytes: dict[int, int] = dict.fromkeys(layout.ranks, 0)
        self.needed_nbytes: dict[int, int] = dict.fromkeys(layout.ranks, 0)
        self.partial_nbytes: dict[int, int] = dict.fromkeys(layout.ranks, 0)

    def view(self, rank: int, index: int) -> np.ndarray:
        part = boxes_at(self.layout, self.coordinates[rank])[index]
        # A tensor without elements is one box, whatever empty shape its shards have.
        return self.locals[rank][cut(part.offsets, part.box.sizes)].reshape(part.box.sizes)

    def fill(self, array: np.ndarray) -> None:
        for rank, at in self.coordinates.items():
            for index, part in enumerate(boxes_at(self.layout, at)):
                self.view(rank, index)[...] = array[cut(part.box.offsets, part.box.sizes)]

    def saved(self) -> list[tuple[Box, bytes]]:
        """Every distinct box, written by the last of its holders."""
        result = []
        for box, ranks in holders(self.layout).items():
            boxes = [part.box for part in boxes_at(self.layout, self.coordinates[ranks[-1]])]
            result.append((box, self.view(ranks[-1], boxes.index(box)).tobytes()))
        return result

    def load(self, pieces: list[tuple[Box, bytes]], *, block_nbytes: int) -> None:
        """Fill the local tensors as a loader does, holding that no rank decodes a block twice or one that it does not need."""
        places = [box for box, _ in pieces]
        for rank, at in self.coordinates.items():
            targets = [part.box for part in boxes_at(self.layout, at)]
            itemsize = self.locals[rank].itemsize
            regions = plan(places, targets, reader=rank)
            for source in sorted({region.source for region in regions}):
                box, raw = pieces[source]
                takers = [region for region in regions if region.source == source]
                outs = [self.view(rank, region.target)[cut(region.target_offsets, region.sizes)] for region in takers]
                wanted = np.zeros(box.sizes, bool)
                for region in takers:
                    wanted[cut(region.source_offsets, region.sizes)] = True
                wanted = wanted.ravel()
                schedule = block_schedule(box.sizes, takers, itemsize=itemsize, block_nbytes=block_nbytes)
                assert len({block for block, _ in schedule}) == len(schedule)
                for block, positions in schedule:
                    part = memoryview(raw)[block * block_nbytes : (block + 1) * block_nbytes]
                    first = block * block_nbytes // itemsize
                    there = wanted[first : first + len(part) // itemsize]
                    assert there.any()
                    self.read_nbytes[rank] += len(part)
                    self.partial_nbytes[rank] += len(part) - int(there.sum()) * itemsize
                    for position in positions:
                        taker = takers[position]
                        copy_block(part, first, box.sizes, taker.source_offsets, taker.sizes, out=outs[position])
                self.needed_nbytes[rank] += int(wanted.sum()) * itemsize


def spread(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(2, 3))]
    meshes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple).filter(lambda mesh: prod(mesh) <= 6)
    return meshes.flatmap(
        lambda mesh: st.builds(
            Layout,
            st.just(shape),
            st.just(mesh),
            st.permutations(range(prod(mesh))).map(tuple),
            st.tuples(*[st.one_of(kinds)] * len(mesh)),
        )
    )


@given(
    st.lists(st.integers(0, 7), max_size=4).map(tuple).flatmap(lambda shape: st.tuples(spread(shape), spread(shape))),
    st.sampled_from(["u1", "<u2", "<u4", "<u8", "V16"]),
    st.integers(1, 24),
)
@settings(max_examples=60)
def test_resharding_to_another_layout_and_back_is_the_identity(layouts: tuple[Layout, Layout], dtype: str, items: int) -> None:
    shape, itemsize = layouts[0].global_shape, np.dtype(dtype).itemsize
    array = np.frombuffer(np.random.default_rng(1).bytes(prod(shape) * itemsize), dtype).reshape(shape)
    start, there, back = Ranks(layouts[0], dtype), Ranks(layouts[1], dtype), Ranks(layouts[0], dtype)
    start.fill(array)
    there.load(start.saved(), block_nbytes=items * itemsize)
    back.load(there.saved(), block_nbytes=items * itemsize)
    expected = Ranks(layouts[1], dtype)
    expected.fill(array)
    for one, other in ((start, back), (there, expected)):
        for rank in one.locals:
            assert one.locals[rank].tobytes() == other.locals[rank].tobytes()
    for ranks in (there, back):
        for rank in ranks.locals:
            assert ranks.read_nbytes[rank] == ranks.needed_nbytes[rank] + ranks.partial_nbytes[rank]
            assert ranks.needed_nbytes[rank] == ranks.locals[rank].nbytes


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((3,), (Shard(0),)), ((2,), (Shard(1),)), ((2, 2), (StridedShard(0, 2), Shard(0))), ((2, 2), (Replicate(), Shard(1)))],
)
def test_blocks_of_their_real_size_reshard_exactly(mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    # Four shards of 2.75 blocks each, rows of 5,632 bytes: no boundary of a block is one of a row.
    layout = Layout((2048, 1408), (4,), (0, 1, 2, 3), (Shard(0),))
    array = np.random.default_rng(2).integers(0, 2**32, (2048, 1408), np.uint32)
    start, there, back = (
        Ranks(of, "<u4") for of in (layout, Layout(layout.global_shape, mesh, tuple(range(prod(mesh))), placements), layout)
    )
    start.fill(array)
    there.load(start.saved(), block_nbytes=BLOCK_NBYTES)
    back.load(there.saved(), block_nbytes=BLOCK_NBYTES)
    for rank in start.locals:
        assert (back.locals[rank] == start.locals[rank]).all()


def test_shards_of_64_blocks_move_to_other_shards_for_at_most_five_percent_more_than_they_need() -> None:
    # With blocks of 64 bytes: 4 shards of 64 blocks each go to 3 ranks, and back.
    four, three = (Layout((4096,), (n,), tuple(range(n)), (Shard(0),)) for n in (4, 3))
    start, there, back = Ranks(four, "<u4"), Ranks(three, "<u4"), Ranks(four, "<u4")
    start.fill(np.arange(4096, dtype=np.uint32))
    there.load(start.saved(), block_nbytes=64)
    back.load(there.saved(), block_nbytes=64)
    assert sum(there.read_nbytes.values()) <= 1.05 * 4096 * 4
    assert sum(back.read_nbytes.values()) <= 1.05 * 4096 * 4


def test_a_thousand_pieces_are_planned_onto_a_thousand_others() -> None:
    sources = [Box((16 * i, 0), (16, 8)) for i in range(1024)]
    regions = plan(sources, [Box((16 * i + 8, 0), (16, 8)) for i in range(1023)])
    assert len(regions) == 2046
    assert regions[-1] == Region(1023, 1022, (0, 0), (8, 0), (8, 8))
