"""A table of layouts says who stores what a reader needs, and a manifest that says otherwise is damage."""

from __future__ import annotations

import pytest

from syckpt.errors import IntegrityError
from syckpt.objects.box import Box
from syckpt.objects.layouts import LayoutTable, TensorLayout
from syckpt.objects.manifest import Entry, Manifest
from syckpt.reshard.keeping import Keeping, split_of
from syckpt.reshard.layout import Replicate, Shard, StridedShard

TABLE = LayoutTable(
    world_size=8,
    items={"loader": False, "model": True},
    meshes=(((2, 4), (0, 1, 2, 3, 4, 5, 6, 7)),),
    layouts=((0, (None, (0,))), (0, ((0, 4), (0,)))),
    tensors=(
        TensorLayout(("model", "scale"), "float32", (3,), None, 5),
        TensorLayout(("model", "w"), "float32", (8, 4), 0, 1),
        TensorLayout(("model", "tp"), "float32", (16,), 1, 0),
    ),
)
KEEPING = Keeping(TABLE, where="objects/x/layouts")


def test_the_ranks_follow_from_layout_and_copy() -> None:
    assert KEEPING.ranks(("model", "scale"), [Box((0,), (3,))]) == {5}
    assert KEEPING.ranks(("model", "w"), [Box((1, 0), (2, 4))]) == {4, 5}
    # Tensor parallelism under FSDP2: the inner mesh dimension splits first, into 4, and each part goes to two ranks.
    assert KEEPING.ranks(("model", "tp"), [Box((4,), (4,))]) == {1, 5}
    assert KEEPING.ranks(("model", "tp"), [Box((6,), (4,))]) == {5, 2}
    assert KEEPING.ranks(("model", "other"), [Box((0,), (3,))]) == set()


def test_nobody_waits_for_a_layout_that_takes_forever() -> None:
    table = LayoutTable(8, {}, (((8,), tuple(range(8))),), ((0, ((0, 1 << 40),)),), (TensorLayout(("m", "w"), "int8", (1 << 45,), 0, 0),))
    assert Keeping(table, where="").ranks(("m", "w"), [Box((0,), (1,))]) == set()


def test_placements_come_back_as_they_were() -> None:
    assert [split_of(placement) for placement in (Replicate(), Shard(3), StridedShard(1, 4))] == [None, (3,), (1, 4)]


@pytest.mark.parametrize("items", [{"loader": 1}, {"model": 1, "other": 1}])
def test_a_manifest_with_other_items_is_damage(items: dict[str, int]) -> None:
    with pytest.raises(IntegrityError, match=r"objects/x/layouts: disagrees with the manifest of rank 3 on item '(model|other)'"):
        KEEPING.check_items(Manifest(3, 8, (), items, None))
    KEEPING.check_items(Manifest(3, 8, (), {"model": 1}, None))


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (8, 5)), ("bfloat16", (8, 4))])
def test_an_entry_of_another_tensor_is_damage(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(IntegrityError, match="objects/x/layouts: model/w is float32"):
        KEEPING.check_entry("model/w", Entry(("model", "w"), dtype, shape, None, b""), 3)
    KEEPING.check_entry("model/new", Entry(("model", "new"), dtype, shape, None, b""), 3)
