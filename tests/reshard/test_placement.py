"""Who stores what follows from the structures of all ranks, and the table of layouts says it."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from syckpt.objects.box import Box
from syckpt.objects.layouts import LayoutTable, Parts, TensorLayout
from syckpt.reshard.layout import Layout, Replicate, Shard
from syckpt.reshard.placement import Declaration, Placement, Structure, Tensor, key_of, place, table


def plain(name: str, *shape: int) -> Tensor:
    return Tensor(("model", name), "float32", shape, None)


def sharded(name: str, ranks: tuple[int, ...], *shape: int) -> Tensor:
    return Tensor(("model", name), "float32", shape, Layout(shape, (len(ranks),), ranks, (Shard(0),)))


FIRST, LAST = (0, 1), (2, 3)
STAGES = {
    "first": Structure((plain("embedding", 64), sharded("a", FIRST, 8, 2), plain("shared", 100))),
    "last": Structure((plain("shared", 100), sharded("z", LAST, 8, 2), plain("norm", 64))),
}
SCHEMAS = ["first", "first", "last", "last"]


def test_each_tensor_is_stored_by_ranks_that_have_it() -> None:
    copies = place(STAGES, SCHEMAS)
    a, z = (tensor.layout for tensor in (STAGES["first"].tensors[1], STAGES["last"].tensors[1]))
    assert a is not None
    assert z is not None
    assert copies == {
        "model/shared": (None, 0),
        "model/embedding": (None, 1),
        "model/norm": (None, 2),
        "model/a": (a.text, 0),
        "model/z": (z.text, 0),
    }


def test_every_rank_can_tell_whether_it_stores_what_it_has() -> None:
    placement = Placement(key_of(SCHEMAS), place(STAGES, SCHEMAS))
    found = {
        rank: [tensor.text for tensor in STAGES[schema].tensors if placement.is_stored_by(rank, tensor.text, tensor.layout)]
        for rank, schema in enumerate(SCHEMAS)
    }
    assert found == {0: ["model/a", "model/shared"], 1: ["model/embedding", "model/a"], 2: ["model/z", "model/norm"], 3: ["model/z"]}


def test_of_several_meshes_that_hold_a_tensor_one_stores_it() -> None:
    # Tensor parallelism under DDP: each replica has a mesh of its own.
    replicas = {f"of {ranks}": Structure(tuple(sharded(f"w{n}", ranks, 8, 2) for n in range(6))) for ranks in (FIRST, LAST)}
    schemas = [f"of {FIRST}", f"of {FIRST}", f"of {LAST}", f"of {LAST}"]
    placement = Placement("k", place(replicas, schemas))
    storing = Counter(
        (tensor.text, rank)
        for rank, schema in enumerate(schemas)
        for tensor in replicas[schema].tensors
        if placement.is_stored_by(rank, tensor.text, tensor.layout)
    )
    assert set(storing.values()) == {1}
    by_tensor = {f"model/w{n}": [rank for text, rank in sorted(storing) if text == f"model/w{n}"] for n in range(6)}
    # All of a tensor's parts by one mesh, and half of the tensors by each.
    assert sorted(by_tensor.values()) == [[0, 1]] * 3 + [[2, 3]] * 3


def test_a_copy_that_ranks_outside_of_the_mesh_hold_is_none_of_theirs() -> None:
    structures = {"all": Structure((Tensor(("w",), "int8", (8,), Layout((8,), (2,), (1, 2), (Replicate(),))),))}
    placement = Placement("k", place(structures, ["all"] * 4))
    layout = structures["all"].tensors[0].layout
    assert [placement.is_stored_by(rank, "w", layout) for rank in range(4)] == [False, True, False, False]


def test_the_table_says_the_same() -> None:
    placement = Placement("k", place(STAGES, SCHEMAS))
    boxes = ((3, Box((0,), (2,))), (0, Box((2,), (1,))))
    made = table(STAGES.values(), placement, [Declaration(("loader", "queue"), "int64", (3,), boxes)], world_size=4)
    assert made == LayoutTable(
        4,
        {},
        (((2,), (0, 1)), ((2,), (2, 3))),
        ((0, ((0,),)), (1, ((0,),)), Parts(boxes)),
        (
            TensorLayout(("model", "embedding"), "float32", (64,), None, 1),
            TensorLayout(("model", "a"), "float32", (8, 2), 0, 0),
            TensorLayout(("model", "shared"), "float32", (100,), None, 0),
            TensorLayout(("model", "z"), "float32", (8, 2), 1, 0),
            TensorLayout(("model", "norm"), "float32", (64,), None, 2),
            TensorLayout(("loader", "queue"), "int64", (3,), 2, 0),
        ),
    )


def test_structures_and_placements_come_over_the_wire_as_they_were() -> None:
    for structure in STAGES.values():
        assert Structure.from_body(json.loads(json.dumps(structure.to_body(world_size=4)))) == structure
    placement = Placement(key_of(SCHEMAS), place(STAGES, SCHEMAS))
    assert Placement.from_body(json.loads(json.dumps(placement.to_body()))) == placement


@pytest.mark.parametrize("schemas", [["first", "last"], ["last", "first", "last", "last"], ["first", "first", "last"]])
def test_another_order_or_number_of_structures_is_another_placement(schemas: list[str]) -> None:
    assert key_of(schemas) != key_of(SCHEMAS)
    assert key_of(list(SCHEMAS)) == key_of(SCHEMAS)
