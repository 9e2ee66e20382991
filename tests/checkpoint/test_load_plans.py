"""A rank reads the manifests of those ranks that store what it needs; a table of layouts that lies costs reading, or is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syckpt.checkpoint.content import Content, whole
from syckpt.checkpoint.resume import share
from syckpt.errors import IntegrityError
from syckpt.objects.box import Box
from syckpt.objects.layouts import LayoutTable
from syckpt.repo import documents
from syckpt.repo.keys import layouts_key
from syckpt.repo.reader import Reader
from syckpt.reshard.layout import Layout, Placement, Replicate, Shard, StridedShard, boxes_at
from syckpt.testing.simulation import Simulated, Tensor, simulate

RANKS = 1024


def over(shape: tuple[int, ...], mesh: tuple[int, ...], *placements: Placement) -> Layout:
    count = 1
    for size in mesh:
        count *= size
    return Layout(shape, mesh, tuple(range(count)), placements)


def job(mesh: tuple[int, ...], *placements: Placement, plain: int = 0) -> list[Tensor]:
    """A few sharded tensors, and plain ones."""
    shapes = [(8192, 16), (4096, 4), (RANKS, 16)]
    tensors = [Tensor(("model", f"w{number}"), "bfloat16", shape, over(shape, mesh, *placements)) for number, shape in enumerate(shapes)]
    return tensors + [Tensor(("model", f"z{number}"), "float32", (64,), None) for number in range(plain)]


def located(simulated: Simulated, tensors: list[Tensor], rank: int, mesh: tuple[int, ...], *placements: Placement) -> Content:
    """Do what a rank does that reads all tensors into such a layout."""
    content = Content(Reader(simulated.repository), simulated.commit)
    _ = content.items[rank % RANKS]
    for stored, tensor in zip(list(content.entries), tensors, strict=True):
        boxes = [whole(tensor.shape)]
        if tensor.layout is not None and placements:
            layout = over(tensor.shape, mesh, *placements)
            at = layout.coordinate_of(rank)
            assert at is not None
            boxes = [part.box for part in boxes_at(layout, at)]
        content.locate(stored, boxes)
        assert sum(_shared(box, target) for box, _, _ in stored.near for target in boxes) == sum(box.elements for box in boxes)
    return content


def _shared(first: Box, second: Box) -> int:
    count = 1
    for a, b, c, d in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True):
        count *= max(0, min(a + b, c + d) - max(a, c))
    return count


@pytest.fixture(scope="module")
def sharded() -> tuple[Simulated, list[Tensor]]:
    tensors = job((RANKS,), Shard(0))
    return simulate(tensors, world_size=RANKS), tensors


@pytest.mark.parametrize(("world_size", "rank", "manifests"), [(1024, 5, 1), (512, 5, 3), (2048, 11, 2), (4, 2, 256 + 1), (1, 0, 1024)])
def test_a_rank_reads_the_manifests_that_overlap_its_own_part(
    sharded: tuple[Simulated, list[Tensor]], world_size: int, rank: int, manifests: int
) -> None:
    simulated, tensors = sharded
    simulated.reads.clear()
    content = located(simulated, tensors, rank, (world_size,), Shard(0))
    # Those that overlap, and the one whose structure it takes.
    assert content.manifests_read == manifests
    assert simulated.reads == {"layouts": 1, "manifest": manifests, "locations": manifests}


@pytest.mark.parametrize("readers", [1024, 512, 300])
def test_readers_that_resume_check_every_part_once_between_them(sharded: tuple[Simulated, list[Tensor]], readers: int) -> None:
    simulated, _ = sharded
    shares = [share(simulated.commit, reader, readers) for reader in range(readers)]
    assert sorted(rank for mine in shares for rank in mine) == list(range(RANKS))
    simulated.reads.clear()
    simulated.repository.check_whole(simulated.commit, ranks=shares[0])
    parts = len(shares[0])
    assert parts == -(-RANKS // readers)
    assert simulated.reads == {"layouts": 1, "manifest": parts, "locations": parts}


def test_plain_tensors_are_stored_by_sixteen_ranks_however_many_there_are() -> None:
    tensors = job((RANKS,), Shard(0), plain=100)
    assert located(simulate(tensors, world_size=RANKS), tensors, 5, (RANKS,), Shard(0)).manifests_read == 1 + 16


def test_a_rank_of_many_copies_reads_those_that_store_its_part() -> None:
    tensors = job((128, 8), Replicate(), Shard(0))
    simulated = simulate(tensors, world_size=RANKS)
    assert located(simulated, tensors, 1001, (128, 8), Replicate(), Shard(0)).manifests_read <= 1 + len(tensors)
    # To other axes: half of a part each, of three tensors.
    assert located(simulated, tensors, 7, (16,), Shard(0)).manifests_read <= 1 + len(tensors)


def test_tensor_parallelism_under_sharding_is_found_by_arithmetic_too() -> None:
    tensors = job((128, 8), StridedShard(0, 8), Shard(0))
    simulated = simulate(tensors, world_size=RANKS)
    assert located(simulated, tensors, 77, (128, 8), StridedShard(0, 8), Shard(0)).manifests_read == 1
    assert located(simulated, tensors, 77, (512,), Shard(0)).manifests_read == 3


def stages(count: int, tensors: int) -> list[Tensor]:
    """A pipeline of stages that are sharded each, an embedding that the first and the last one have, and a scale that all have."""
    each = RANKS // count
    meshes = [tuple(range(stage * each, (stage + 1) * each)) for stage in range(count)]
    made = [
        Tensor(("model", f"s{stage}.w{n}"), "bfloat16", (2 * each, 4), Layout((2 * each, 4), (each,), ranks, (Shard(0),)))
        for stage, ranks in enumerate(meshes)
        for n in range(tensors)
    ]
    return [*made, Tensor(("model", "scale"), "float32", (64,), None)]


def test_of_a_pipeline_one_manifest_a_stage_tells_the_structure_and_arithmetic_the_rest() -> None:
    tensors = stages(16, 3)
    simulated = simulate(tensors, world_size=RANKS)
    content = Content(Reader(simulated.repository), simulated.commit)
    node, differing = content.merged_item("model", choose=700)
    assert [key for key, _ in node["dict"]] == [*(f"s0.w{n}" for n in range(3)), "scale", *(t.path[1] for t in tensors[3:-1])]
    assert differing == []
    assert simulated.reads == {"layouts": 1, "manifest": 16, "locations": 16}
    # Stage 10's first tensor, of which a rank of another job has 6 of 128 rows.
    (wanted,) = [entry for entry in content.entries if entry.path == ("model", "s10.w0")]
    content.locate(wanted, [Box((9, 0), (6, 4))])
    assert sorted(wanted.near_ranks) == [644, 645, 646, 647, 700]  # those that overlap, and the one that spoke for the stage
    assert content.manifests_read == 16 + 4


def test_a_rank_of_the_same_pipeline_reads_its_own_manifest() -> None:
    simulated = simulate(stages(16, 3), world_size=RANKS)
    content = Content(Reader(simulated.repository), simulated.commit)
    node = content.items[700]["model"]
    for _, child in node["dict"][:-1]:
        stored = content.entries[child["tensor"]]
        content.locate(stored, [box for box, _, _ in stored.near])
    assert content.manifests_read == 1


def test_a_plain_process_sees_every_stage() -> None:
    tensors = stages(256, 1)
    simulated = simulate(tensors, world_size=RANKS)
    node, differing = Content(Reader(simulated.repository), simulated.commit).merged_item("model", choose=None)
    assert (len(node["dict"]), differing) == (257, [])


def test_without_a_table_whatever_the_own_manifest_lacks_is_looked_for_everywhere() -> None:
    tensors = job((RANKS,), Shard(0), plain=1)
    simulated = simulate(tensors, world_size=RANKS, has_table=False)
    content = Content(Reader(simulated.repository), simulated.commit)
    assert set(content.items[5]) == {"model"}
    assert content.manifests_read == 1
    content.locate(content.entries[0], [Box((40, 0), (8, 16))])
    assert content.manifests_read == 1
    content.locate(content.entries[0], [Box((40, 0), (9, 16))])
    assert content.manifests_read == RANKS


# --- tables that lie ---------------------------------------------------------------------------------------------------------------


def with_table(simulated: Simulated, change: LayoutTable) -> Simulated:
    """Return the commit with another table."""
    store = simulated.repository.store
    store.delete(layouts_key(simulated.commit.id))
    seal = documents.write(store, layouts_key(simulated.commit.id), change.to_body())
    return replace(simulated, commit=replace(simulated.commit, layouts=seal))


@pytest.fixture
def four() -> tuple[Simulated, list[Tensor], LayoutTable]:
    shapes = [(8, 2), (3,)]
    tensors = [Tensor(("model", f"w{n}"), "float32", shape, over(shape, (4,), Shard(0))) for n, shape in enumerate(shapes)]
    tensors.append(Tensor(("model", "z"), "float32", (2,), None))
    simulated = simulate(tensors, world_size=4)
    table = simulated.repository.read_layouts(simulated.commit)
    assert table is not None
    return simulated, tensors, table


def test_a_table_that_names_wrong_ranks_leads_to_all_manifests(four: tuple[Simulated, list[Tensor], LayoutTable]) -> None:
    simulated, tensors, table = four
    changed = with_table(simulated, replace(table, meshes=(((4,), (3, 2, 1, 0)),)))
    content = Content(Reader(changed.repository), changed.commit)
    _ = content.items[0]
    content.locate(content.entries[0], [Box((2, 0), (2, 2))])
    assert content.manifests_read == 4
    assert [box for box, _, _ in content.entries[0].near if box.offsets == (2, 0)] == [Box((2, 0), (2, 2))]
    assert tensors[0].shape == content.entries[0].shape


def test_a_table_without_a_tensor_leads_to_all_manifests(four: tuple[Simulated, list[Tensor], LayoutTable]) -> None:
    simulated, _, table = four
    changed = with_table(simulated, replace(table, tensors=()))
    content = Content(Reader(changed.repository), changed.commit)
    _ = content.items[0]
    content.locate(content.entries[0], [Box((2, 0), (2, 2))])
    assert content.manifests_read == 4


def test_a_table_of_other_tensors_or_items_is_damage(four: tuple[Simulated, list[Tensor], LayoutTable]) -> None:
    simulated, _, table = four
    for wrong in (
        replace(table, tensors=(replace(table.tensors[0], shape=(9, 2)), *table.tensors[1:])),
        replace(table, tensors=(replace(table.tensors[0], dtype="int32"), *table.tensors[1:])),
        replace(table, items={"model": ((0, 1, 2, 3),), "more": ((1,),)}),
        replace(table, items={"model": ((0, 2, 3),)}),
        replace(table, items={}),
    ):
        changed = with_table(simulated, wrong)
        content = Content(Reader(changed.repository), changed.commit)
        with pytest.raises(IntegrityError, match=f"objects/{simulated.commit.id}/layouts"):
            content.items[1]


def test_a_lost_foreign_or_changed_table_is_damage(four: tuple[Simulated, list[Tensor], LayoutTable]) -> None:
    simulated, _, table = four
    reader, store, key = Reader(simulated.repository), simulated.repository.store, layouts_key(simulated.commit.id)
    for body in (replace(table, items={"model": ((0,), (1, 2, 3))}).to_body(), {**table.to_body(), "kind": "mark"}, None):
        store.delete(key)
        if body is not None:
            documents.write(store, key, body)
        with pytest.raises(IntegrityError, match=key):
            Content(reader, simulated.commit)
    foreign = with_table(simulated, replace(table, world_size=5))
    with pytest.raises(IntegrityError, match="is of 5 ranks, expected 4"):
        Content(reader, foreign.commit)
