"""A further rank's manifest is opened faster than the first one where it says the same, and refused for the same reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from syckpt.checkpoint.content import Content
from syckpt.errors import FormatError, IntegrityError, StateError
from syckpt.objects.box import Box
from syckpt.repo import documents
from syckpt.repo.keys import locations_key, manifest_key
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.reshard.layout import Layout, Shard
from syckpt.stores.memory import MemoryStore
from syckpt.testing.simulation import Tensor, simulate

Change = Callable[[dict[str, Any]], None]


def opened(*changes: Change) -> Content:
    """Open a commit of as many ranks, each with half of `w` and of `v`, its manifest changed and then sealed as if it was saved so."""
    ranks = len(changes)
    shape = (2 * ranks, 3)
    layout = Layout(shape, (ranks,), tuple(range(ranks)), (Shard(0),))
    saved = simulate([Tensor(("model", name), "float32", shape, layout) for name in "wv"], world_size=ranks, has_table=False)
    store, seals = MemoryStore(), []
    for rank, change in enumerate(changes):
        body, _ = documents.read(saved.repository.store, manifest_key(saved.commit.id, rank), kind="manifest")
        change(body)
        seals.append((rank, documents.write(store, manifest_key(saved.commit.id, rank), body)))
        key = locations_key(saved.commit.id, rank, 1)
        body, _ = documents.read(saved.repository.store, key, kind="locations")
        documents.write(store, key, {**body, "manifest": seals[rank][1]})
    return Content(Reader(Repository(store, "0" * 32)), replace(saved.commit, manifests=tuple(seals)))


def same(body: dict[str, Any]) -> None:
    """Leave a manifest as it is."""


def column(name: str, value: Any) -> Change:
    def change(body: dict[str, Any]) -> None:
        body["tensors"][name][1] = value

    return change


def node(value: Any) -> Change:
    def change(body: dict[str, Any]) -> None:
        body["items"]["model"]["dict"][1][1] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (column("box", [[3, 0], [2, 3]]), IntegrityError, r"box \[\[3, 0\], \[2, 3\]\] is not within \(4, 3\)"),
        (column("box", [[2, 0], [2]]), IntegrityError, "not a box"),
        (column("box", [[2, False], [2, 3]]), IntegrityError, "not a shape"),
        (column("box", [[2, 0], [2, 3], [0]]), IntegrityError, "too many values"),
        (column("box", [[2, 0], [1, 3]]), IntegrityError, "model/v has 24 bytes of width 4; its manifest says 12"),
        (column("address", "A" * 42), IntegrityError, "not an address"),
        (column("address", "A" * 44), IntegrityError, "not an address"),
        (column("address", "A" * 42 + "B"), IntegrityError, "is not the base64 of anything"),
        (column("address", "A" * 42 + "="), IntegrityError, "is not the base64 of anything"),
        (column("address", None), IntegrityError, "a box without an address"),
        (column("path", ["model", True]), IntegrityError, "not a path"),
        (column("path", []), IntegrityError, "not a path"),
        (column("shape", [4, 3.0]), IntegrityError, "not a shape"),
        (column("dtype", "float33"), FormatError, "unknown dtype 'float33'"),
        (node({"tensor": 2}), IntegrityError, "malformed node tensor: names entry 2 of 2"),
        (node({"tensor": True}), IntegrityError, "malformed node tensor: True"),
        (node({"tensor": 1.0}), IntegrityError, r"malformed node tensor: 1\.0"),
    ],
)
def test_a_bad_manifest_is_refused_alike_before_and_behind_a_good_one_of_the_same_columns(
    change: Change, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why) as alone:
        assert opened(same, change).items[1]
    content = opened(same, change)
    assert set(content.items[0]) == {"model"}
    with pytest.raises(error) as behind:
        assert content.items[1]
    assert (type(behind.value), str(behind.value)) == (type(alone.value), str(alone.value))
    # Nothing of it is there, and it is no better at the second try.
    assert [stored.near_ranks for stored in content.entries] == [[0], [0]]
    with pytest.raises(error, match=why):
        assert content.items[1]


def test_whichever_comes_second_is_refused_where_two_say_something_else_of_one_tensor() -> None:
    def longer(body: dict[str, Any]) -> None:
        body["tensors"]["shape"][0] = [5, 3]

    for ranks in ([0, 1], [1, 0]):
        content = opened(same, longer)
        assert set(content.items[ranks[0]]) == {"model"}
        with pytest.raises(IntegrityError, match=rf"rank {ranks[1]} saved model/w as float32 \[\d, 3\], another one as float32 \[\d, 3\]"):
            assert content.items[ranks[1]]


def test_nodes_that_only_python_takes_for_equal_stay_each_rank_s_own() -> None:
    content = opened(*[node(value) for value in (1, True, 1.0, 0.0, -0.0, 1)])
    found = [content.items[rank]["model"]["dict"][1][1] for rank in range(6)]
    assert list(map(repr, found)) == ["1", "True", "1.0", "0.0", "-0.0", "1"]


def test_a_box_that_another_one_overlaps_is_refused_by_the_plan_though_it_is_there() -> None:
    content = opened(same, column("box", [[1, 0], [2, 3]]))
    assert len(content.items[1]) == 1
    mine = [Box((0, 0), (2, 3))]
    stored = {stored.path[-1]: stored for stored in content.entries}
    content.locate(stored["w"], mine)
    content.check(stored["w"], mine)
    content.locate(stored["v"], mine)
    for _ in range(2):
        with pytest.raises(StateError, match=r"^model/v: \[1:2, 0:3\] is covered more than once"):
            content.check(stored["v"], mine)


def test_tensors_that_a_rank_kept_for_itself_are_not_those_of_the_next_one() -> None:
    def keep(body: dict[str, Any]) -> None:
        body["tensors"]["local"] = [1]

    content = opened(same, keep, same, keep)
    numbers = [[pair[1]["tensor"] for pair in content.items[rank]["model"]["dict"]] for rank in range(4)]
    assert numbers == [[0, 1], [0, 2], [0, 1], [0, 3]]
    assert content.local == {2, 3}
    assert [stored.near_ranks for stored in content.entries] == [[0, 1, 2, 3], [0, 2], [1], [3]]
