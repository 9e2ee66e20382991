"""A table of layouts says who stores what a reader needs, and a manifest that says otherwise is damage."""

from __future__ import annotations

import pytest

from syckpt.errors import IntegrityError
from syckpt.objects.box import Box
from syckpt.objects.layouts import LayoutTable, Parts, TensorLayout
from syckpt.objects.manifest import Entry, Manifest
from syckpt.reshard.keeping import Keeping, split_of
from syckpt.reshard.layout import Replicate, Shard, StridedShard

TABLE = LayoutTable(
    world_size=8,
    items={"loader": ((0, 1), (5,)), "model": (tuple(range(8)),)},
    meshes=(((2, 4), (0, 1, 2, 3, 4, 5, 6, 7)),),
    layouts=((0, (None, (0,))), (0, ((0, 4), (0,))), Parts(((6, Box((0, 0), (3, 2))), (2, Box((3, 0), (1, 2))), (7, Box((4, 0), (0, 2)))))),
    tensors=(
        TensorLayout(("model", "scale"), "float32", (3,), None, 5),
        TensorLayout(("model", "w"), "float32", (8, 4), 0, 1),
        TensorLayout(("model", "tp"), "float32", (16,), 1, 0),
        TensorLayout(("loader", "queue"), "float32", (4, 2), 2, 0),
    ),
)
KEEPING = Keeping(TABLE, where="objects/x/layouts")


def test_the_ranks_follow_from_layout_and_copy() -> None:
    assert KEEPING.ranks(("model", "scale"), [Box((0,), (3,))]) == {5}
    assert KEEPING.ranks(("model", "w"), [Box((1, 0), (2, 4))]) == {4, 5}
    # Tensor parallelism under FSDP2: the inner mesh dimension splits first, into 4, and each part goes to two ranks.
    assert KEEPING.ranks(("model", "tp"), [Box((4,), (4,))]) == {1, 5}
    assert KEEPING.ranks(("model", "tp"), [Box((6,), (4,))]) == {5, 2}
    # Boxes that a resharder declared, an empty one among them.
    assert KEEPING.ranks(("loader", "queue"), [Box((2, 0), (2, 1))]) == {6, 2}
    assert KEEPING.ranks(("loader", "queue"), [Box((0, 0), (3, 2))]) == {6}
    assert KEEPING.ranks(("loader", "queue"), [Box((4, 0), (0, 2))]) == {7}
    assert KEEPING.ranks(("model", "other"), [Box((0,), (3,))]) == set()


def test_nobody_waits_for_a_layout_that_takes_forever() -> None:
    table = LayoutTable(8, {}, (((8,), tuple(range(8))),), ((0, ((0, 1 << 40),)),), (TensorLayout(("m", "w"), "int8", (1 << 45,), 0, 0),))
    assert Keeping(table, where="").ranks(("m", "w"), [Box((0,), (1,))]) == set()


def test_placements_come_back_as_they_were() -> None:
    assert [split_of(placement) for placement in (Replicate(), Shard(3), StridedShard(1, 4))] == [None, (3,), (1, 4)]


@pytest.mark.parametrize(
    ("rank", "items", "wrong"),
    [(3, {"loader": 1, "model": 1}, "loader"), (1, {"model": 1}, "loader"), (3, {"model": 1, "other": 1}, "other"), (3, {}, "model")],
)
def test_a_manifest_with_other_items_is_damage(rank: int, items: dict[str, int], wrong: str) -> None:
    with pytest.raises(IntegrityError, match=f"objects/x/layouts: disagrees with the manifest of rank {rank} on item '{wrong}'"):
        KEEPING.check_items(Manifest(rank, 8, (), items, None))


def test_a_manifest_with_just_the_items_of_its_rank_is_fine() -> None:
    KEEPING.check_items(Manifest(3, 8, (), {"model": 1}, None))
    KEEPING.check_items(Manifest(5, 8, (), {"loader": 2, "model": 1}, None))


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (8, 5)), ("bfloat16", (8, 4))])
def test_an_entry_of_another_tensor_is_damage(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(IntegrityError, match="objects/x/layouts: model/w is float32"):
        KEEPING.check_entry("model/w", Entry(("model", "w"), dtype, shape, None, b""), 3)
    KEEPING.check_entry("model/new", Entry(("model", "new"), dtype, shape, None, b""), 3)


def test_two_tensors_of_one_path_are_damage() -> None:
    rows = (TensorLayout(("m", "w"), "int8", (8, 3), 0, 0), TensorLayout(("m", "w"), "int8", (3,), None, 1))
    with pytest.raises(IntegrityError, match="objects/x/layouts: several tensors at one path"):
        Keeping(LayoutTable(8, {}, TABLE.meshes, TABLE.layouts, rows), where="objects/x/layouts")
