"""The table of layouts: one text for one table, and nothing in it is believed unchecked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import FormatError, IntegrityError
from syckpt.objects import canonical
from syckpt.objects.box import Box
from syckpt.objects.layouts import LayoutTable, Parts, TensorLayout, groups_of

TABLE = LayoutTable(
    world_size=8,
    items={"loader": ((0, 1), (7,)), "model": ((0, 2, 4, 6, 7), (1, 3, 5))},
    meshes=(((2, 2), (0, 2, 4, 6)), ((3,), (7, 1, 5))),
    layouts=((0, (None, (0,))), (1, ((1, 4),)), Parts(((3, Box((0, 0), (2, 3))), (0, Box((2, 0), (1, 3)))))),
    tensors=(
        TensorLayout(("model", "scale"), "float32", (3,), None, 5),
        TensorLayout(("model", "w"), "bfloat16", (8, 4), 0, 1),
        TensorLayout(("model", 7, {"key": "null"}), "int64", (8, 12), 1, 0),
        TensorLayout(("model", "empty"), "int64", (0, 4), 0, 3),
        TensorLayout(("loader", "queue"), "int64", (3, 3), 2, 0),
    ),
)


def test_a_table_has_this_text() -> None:
    assert TABLE.to_body() == {
        "kind": "layouts",
        "version": 1,
        "world_size": 8,
        "items": {"loader": [[[0, 2, 1]], [[7, 1, 1]]], "model": [[[0, 4, 2], [7, 1, 1]], [[1, 3, 2]]]},
        "meshes": [[[2, 2], [[0, 4, 2]]], [[3], [[7, 2, -6], [5, 1, 1]]]],
        "layouts": [[0, [None, [0]]], [1, [[1, 4]]], [None, [[3, [0, 0], [2, 3]], [0, [2, 0], [1, 3]]]]],
        "tensors": {
            "path": [["model", "scale"], ["model", "w"], ["model", 7, {"key": "null"}], ["model", "empty"], ["loader", "queue"]],
            "dtype": ["float32", "bfloat16", "int64", "int64", "int64"],
            "shape": [[3], [8, 4], [8, 12], [0, 4], [3, 3]],
            "layout": [None, 0, 1, 0, 2],
            "copy": [5, 1, 0, 3, 0],
        },
    }
    assert LayoutTable.from_body(TABLE.to_body(), where="t") == TABLE


@given(st.permutations(range(12)))
def test_any_order_of_ranks_comes_back(ranks: list[int]) -> None:
    table = LayoutTable(12, {}, (((3, 4), tuple(ranks)),), (), ())
    assert LayoutTable.from_body(canonical.loads(canonical.dumps(table.to_body())), where="t") == table


def test_thousands_of_ranks_take_a_few_numbers() -> None:
    grid = tuple(rank * 8 + tp for tp in range(8) for rank in range(1024))
    table = LayoutTable(8192, {}, (((8192,), tuple(range(8192))), ((8, 1024), grid)), (), ())
    assert [len(runs) for _, runs in table.to_body()["meshes"]] == [1, 8]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("world_size",), 0),
        (("world_size",), 1 << 50),
        (("items",), []),
        (("items", "model"), 1),
        (("items", "model"), [[[0, 9, 1]]]),  # nine of eight ranks
        (("items", "model"), [[[0, 2, 1]], [[1, 1, 1]]]),  # rank 1 in two groups
        (("items", "model"), [[[2, 2, -1]]]),  # not ascending
        (("items", "model"), [[]]),
        (("meshes", 0, 1), [[0, 5, 1]]),  # more ranks than places
        (("meshes", 0, 1), [[0, 4, 3]]),  # beyond the last rank
        (("meshes", 0, 1), [[0, 4, 0]]),
        (("meshes", 0, 1), [[0, 2, 1], [1, 2, 1]]),  # rank 1 twice
        (("meshes", 0, 1), [[0, 1 << 60, 1]]),
        (("meshes", 0, 0), [1 << 40]),
        (("meshes", 0), [[0], []]),
        (("meshes", 0), [[800_000], [[0, 8, 1]] * 100_000]),  # no time for a list of all of them
        (("layouts", 0), [2, [None, None]]),  # no such mesh
        (("layouts", 0), [0, [None]]),
        (("layouts", 0), [0, [None, [64]]]),
        (("layouts", 0), [0, [None, [0, 0]]]),
        (("layouts", 2), [None, [[8, [0, 0], [2, 3]]]]),  # no such rank
        (("layouts", 2), [None, [[0, [0, 0], [2]]]]),
        (("layouts", 2), [None, [[0, [2, 0], [2, 3]]]]),  # not within its tensor
        (("layouts", 2), [None, [[0, [0, 0]]]]),
        (("tensors", "copy", 4), 1),
        (("tensors", "layout", 1), 3),
        (("tensors", "copy", 1), 2),  # there are two copies
        (("tensors", "copy", 0), 8),
        (("tensors", "copy", 0), True),
        (("tensors", "copy", 3), 4),
        (("tensors", "shape", 2), [8]),  # its layout splits dimension 1
        (("tensors", "shape", 1), [-1, 4]),
        (("tensors", "path", 1), []),
        (("tensors", "dtype", 1), None),
        (("tensors", "copy"), [5, 1]),
        (("tensors",), None),
    ],
)
def test_what_cannot_be_is_refused(where: tuple[Any, ...], value: Any) -> None:
    body = copy.deepcopy(TABLE.to_body())
    at: Any = body
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    with pytest.raises((IntegrityError, FormatError)):
        LayoutTable.from_body(body, where="objects/x/layouts")


def test_groups_are_the_ranks_that_say_the_same_of_an_item() -> None:
    told = [{"model": "a", "loader": "x"}, {"model": "b"}, {"model": "a", "loader": "y"}, {"model": "b", "loader": "x"}]
    assert groups_of(told) == {"loader": ((0, 3), (2,)), "model": ((0, 2), (1, 3))}
    assert list(groups_of(told)) == ["loader", "model"]
