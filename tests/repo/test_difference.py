"""What differs between two commits: exactly, whoever saved which box of it."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syckpt.errors import IntegrityError, NotFoundError
from syckpt.objects import nodes
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.repo.difference import TensorChange, TensorType, diff
from syckpt.repo.packing import Packer, Staged

Point = namedtuple("Point", "x y")
EMPTY = {"added": {}, "removed": {}, "changed": {}}


@dataclass(eq=False)
class Part:
    """A box of a tensor of `shape`; `values` None: other ranks store all of it. `local`: this rank's own."""

    values: Any
    shape: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    local: bool = False


def commit_of(desk: Any, *ranks: dict[str, Any], rng: Any = None, **facts: Any) -> Commit:
    """Write a commit of these items of each rank; arrays and parts are tensors, equal objects are tied."""
    if desk.hold is None:
        desk.open()
    commit, _ = desk.begin()
    manifests = []
    for rank, items in enumerate(ranks):
        staged: list[Staged] = []
        memory = bytearray()
        seen: dict[int, int] = {}

        def leaf(value: Any, path: Any, *, staged: Any = staged, memory: Any = memory, seen: Any = seen) -> Any:
            if not isinstance(value, np.ndarray | Part):
                return None
            if id(value) not in seen:
                seen[id(value)] = len(staged)
                part = value if isinstance(value, Part) else Part(value, value.shape)
                array = np.zeros(0, np.float32) if part.values is None else part.values
                box = Box(part.offsets, array.shape) if part.offsets else None
                offset = None if part.values is None else len(memory)
                staged.append(Staged(path, array.dtype.name, part.shape, box, offset, part.local))
                memory += array.tobytes()
            return {"tensor": seen[id(value)]}

        encoded = {name: nodes.encode(value, leaf=leaf, path=(name,)) for name, value in items.items()}
        streams = nodes.encode(rng, leaf=leaf, path=("<rng>",))
        packer = Packer(desk.reader, rank=rank, world_size=len(ranks), compression="none", keyframe_every=8, threads=1)
        packed = packer.pack(commit, parent=None, staged=staged, memory=memoryview(bytes(memory)), items=encoded, rng=streams)
        packer.published()
        packer.close()
        manifests.append([rank, packed.manifest_seal])
    made: Commit = desk.describe(commit, packed, parent=None, manifests=manifests, world_size=len(ranks), **facts)
    return made


def parts(found: Any) -> dict[str, Any]:
    return {name: getattr(found, name) for name in EMPTY}


def test_the_same_state_has_no_differences_and_says_so(desk):
    state = {"model": {"w": np.arange(4, dtype=np.float32), "n": 1}, "list": [1, (2, {"a"})], "x": math.nan}
    a, b = commit_of(desk, state, metric=math.nan), commit_of(desk, state, metric=math.nan)
    found = diff(desk.repository, a, b)
    assert not found
    assert (parts(found.tensors), found.tensors.unchanged, parts(found.items), found.counters) == (EMPTY, 1, EMPTY, {})
    assert str(found) == f"{a.id} -> {b.id}\nthe same: configuration, counters, items, 1 tensors, random streams"


def test_tensors_are_told_apart_by_values_dtype_and_shape(desk):
    ones = np.ones((2, 3), np.float32)
    a = commit_of(desk, {"m": {"same": ones * 3, "values": ones, "dtype": ones * 5, "shape": ones * 7, "gone": ones * 9}})
    after = {"same": ones * 3, "values": ones * 2, "dtype": np.ones((2, 3), np.float16), "shape": np.ones(6, np.float32), "new": ones * 8}
    b = commit_of(desk, {"m": after})
    found = diff(desk.repository, a, b)
    kind = TensorType("float32", (2, 3))
    assert found.tensors.added == {"m/new": kind}
    assert found.tensors.removed == {"m/gone": kind}
    assert found.tensors.changed == {
        "m/values": TensorChange(kind, kind),
        "m/dtype": TensorChange(kind, TensorType("float16", (2, 3))),
        "m/shape": TensorChange(kind, TensorType("float32", (6,))),
    }
    assert found.tensors.unchanged == 1
    assert found
    assert str(found.tensors) == (
        "~ m/dtype: float32 [2, 3] -> float16 [2, 3]\n"
        "- m/gone: float32 [2, 3]\n"
        "+ m/new: float32 [2, 3]\n"
        "~ m/shape: float32 [2, 3] -> float32 [6]\n"
        "~ m/values: other values, float32 [2, 3]"
    )
    back = diff(desk.repository, b, a)
    assert (list(back.tensors.added), list(back.tensors.removed)) == (["m/gone"], ["m/new"])


def test_one_bit_of_a_nan_is_a_difference(desk):
    quiet, other = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert diff(desk.repository, commit_of(desk, {"x": quiet}), commit_of(desk, {"x": other})).tensors.changed.keys() == {"x"}
    zero = np.zeros(1, np.float32)
    assert diff(desk.repository, commit_of(desk, {"x": zero}), commit_of(desk, {"x": -zero}))


def test_no_tensor_is_read_where_addresses_tell(desk):
    a, b = (commit_of(desk, {"x": np.full(1000, value, np.float32)}) for value in (1, 2))
    for commit in (a, b):
        desk.store.delete(f"objects/{commit.id}/r00000.safetensors")
    assert list(diff(desk.repository, a, b).tensors.changed) == ["x"]


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (1, 1.0, {"x": (1, 1.0)}),
        (1, True, {"x": (1, True)}),
        (0.0, -0.0, {"x": (0.0, -0.0)}),
        ("a", b"a", {"x": ("a", b"a")}),
        (None, 2**80, {"x": (None, 2**80)}),
        ([1, 2], [1, 3], {"x/1": (2, 3)}),
        ({"a": 1}, {"a": None}, {"x/a": (1, None)}),
        ({1: "a"}, {1: "b"}, {"x/1": ("a", "b")}),
    ],
)
def test_values_are_told_apart_by_type_and_content(desk, before, after, changed):
    found = diff(desk.repository, commit_of(desk, {"x": before}), commit_of(desk, {"x": after}))
    assert repr(found.items.changed) == repr(changed)
    assert parts(found.items) == {**EMPTY, "changed": changed}
    assert found


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([1, 2], (1, 2), "~ x: list of 2 members -> tuple of 2 members"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "~ x: dict of a, b -> dict of b, a"),
        ({"a": 1}, OrderedDict(a=1), "~ x: dict of a -> ordereddict of a"),
        (deque([1], 2), deque([1], 3), "~ x: deque 2 of 1 members -> deque 3 of 1 members"),
        ([1], [1, 2], "+ x/1: 2"),
        ({"a": 1, "b": 2}, {"b": 2}, "- x/a: 1"),
        ({"a": 1}, {"a": 1, "b": {}}, "+ x/b: dict of nothing"),
        (3, [], "~ x: 3 -> list of 0 members"),
        ({"a": 1}, 3, "- x/a: 1\n~ x: dict of a -> 3"),
        ([[]], [()], "~ x/0: list of 0 members -> tuple of 0 members"),
        ({1, 2}, {1, 3}, "~ x: {1, 2} -> {1, 3}"),
        (Point(1, 2), Point(1, 3), "~ x/y: 2 -> 3"),
        (Point(1, 2), (1, 2), None),
    ],
)
def test_containers_are_told_apart_by_kind_order_and_members(desk, before, after, text):
    found = diff(desk.repository, commit_of(desk, {"x": before}), commit_of(desk, {"x": after}))
    assert found
    if text is not None:
        assert sorted(str(found.items).split("\n")) == sorted(text.split("\n"))


def test_a_tie_and_a_copy_of_equal_values_differ(desk):
    one, copy = np.ones(3, np.float32), np.ones(3, np.float32)
    found = diff(desk.repository, commit_of(desk, {"m": {"a": one, "b": one}}), commit_of(desk, {"m": {"a": one, "b": copy}}))
    assert str(found.items) == "- m/b: the tensor m/a"
    assert found.tensors.added == {"m/b": TensorType("float32", (3,))}


def test_counters_metric_and_configuration_are_compared(desk):
    a = commit_of(desk, {}, step=1, metric=0.5, config=nodes.encode({"lr": 0.1, "model": {"layers": 2}, "x": 1}))
    b = commit_of(desk, {}, step=2, metric=0.25, epoch=1, config=nodes.encode({"lr": 0.2, "model": {"layers": 2}, "y": [1]}))
    found = diff(desk.repository, a, b)
    assert found.counters == {"step": (1, 2), "epoch": (0, 1), "metric": (0.5, 0.25)}
    assert (found.config.added, found.config.removed, found.config.changed) == ({"y": [1]}, {"x": 1}, {"lr": (0.1, 0.2)})
    assert str(found) == (
        f"{a.id} -> {b.id}\n~ step: 1 -> 2\n~ epoch: 0 -> 1\n~ metric: 0.5 -> 0.25\nconfig:\n  ~ lr: 0.1 -> 0.2\n  - x: 1\n  + y: [1]\n"
        "tensors: 0 changed, 0 added, 0 removed, 0 the same"
    )


def test_random_streams_are_told_in_one_word(desk):
    a, b = (commit_of(desk, {"x": 1}, rng={"python": value, "torch": np.full(4, value, np.uint8)}) for value in (1, 2))
    found = diff(desk.repository, a, b)
    assert (found.streams, parts(found.items), parts(found.tensors), found.tensors.unchanged) == (True, EMPTY, EMPTY, 0)
    assert found
    assert str(found).endswith("random streams: differ")
    assert not diff(desk.repository, a, a).streams


# -- several ranks -----------------------------------------------------------------------------------------------------------------


def rows(whole: Any, cuts: list[int]) -> list[dict[str, Any]]:
    bounds = [0, *cuts, len(whole)]
    return [{"m": {"w": Part(whole[a:b], whole.shape, (a, *[0] * (whole.ndim - 1)))}} for a, b in itertools.pairwise(bounds)]


def test_the_same_tensor_in_other_boxes_is_the_same_and_one_element_more_is_not(desk):
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    other = whole.copy()
    other[3, 1] += 1
    one, two, three = (commit_of(desk, *rows(whole, cuts)) for cuts in ([], [3], [2, 5]))
    columns = commit_of(desk, *({"m": {"w": Part(np.ascontiguousarray(whole[:, a : a + 2]), whole.shape, (0, a))}} for a in (0, 2)))
    plain = commit_of(desk, {"m": {"w": whole}})
    for a, b in ((one, two), (two, three), (three, columns), (columns, plain), (plain, one)):
        found = diff(desk.repository, a, b)
        assert (parts(found.tensors), found.tensors.unchanged) == (EMPTY, 1)
        assert set(found.counters) <= {"world_size"}
    for cuts in ([], [3], [2, 5]):
        changed = commit_of(desk, *rows(other, cuts))
        for commit in (one, two, three, columns, plain):
            assert list(diff(desk.repository, commit, changed).tensors.changed) == ["m/w"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(data=st.data())
def test_diff_is_true_exactly_where_values_differ_whatever_the_boxes(desk, data):
    rows_count = data.draw(st.integers(1, 5))
    whole = np.array(data.draw(st.lists(st.integers(0, 1), min_size=rows_count * 2, max_size=rows_count * 2)), np.int16).reshape(-1, 2)
    other = np.array(data.draw(st.lists(st.integers(0, 1), min_size=rows_count * 2, max_size=rows_count * 2)), np.int16).reshape(-1, 2)
    cuts = st.sets(st.integers(1, rows_count)).map(lambda found: sorted(found - {rows_count}))
    found = diff(desk.repository, commit_of(desk, *rows(whole, data.draw(cuts))), commit_of(desk, *rows(other, data.draw(cuts))))
    assert bool(found.tensors) == (whole.tobytes() != other.tobytes())


def test_what_ranks_saved_each_for_itself_stands_by_rank(desk):
    def ranks(noise: int, seen: int) -> list[dict[str, Any]]:
        noises = [Part(np.full(2, rank * noise, np.float32), (2,), local=True) for rank in (0, 1)]
        return [{"m": {"noise": noises[rank], "seen": rank + seen, "lr": 1}} for rank in (0, 1)]

    a, b = commit_of(desk, *ranks(1, 0)), commit_of(desk, *ranks(2, 5))
    found = diff(desk.repository, a, b)
    assert list(found.tensors.changed) == ["m/noise (rank 1)"]
    assert found.tensors.unchanged == 1
    assert found.items.changed == {"m/seen (rank 0)": (0, 5), "m/seen (rank 1)": (1, 6)}


def test_a_tensor_that_another_rank_stores_counts_once(desk):
    w = np.ones(4, np.float32)
    a = commit_of(desk, {"w": w}, {"w": Part(None, (4,))})
    b = commit_of(desk, {"w": Part(None, (4,))}, {"w": w})
    found = diff(desk.repository, a, b)
    assert (bool(found), found.tensors.unchanged) == (False, 1)


def test_boxes_that_do_not_make_up_the_tensor_are_damage(desk):
    whole = np.zeros((4, 2), np.float32)
    a = commit_of(desk, {"m": {"w": Part(whole[:2], (4, 2), (0, 0))}})
    with pytest.raises(IntegrityError, match=rf"{a.id}: the boxes of m/w do not add up to \[4, 2\]"):
        diff(desk.repository, a, commit_of(desk, {"m": {"w": whole}}))


# -- damage, length ----------------------------------------------------------------------------------------------------------------


def test_a_dropped_commit_and_a_damaged_one_are_errors(desk):
    a, b = commit_of(desk, {"x": np.zeros(3, np.float32)}), commit_of(desk, {"x": 1})
    with pytest.raises(NotFoundError, match=f"{a.id} was dropped by retention"):
        diff(desk.repository, a.marked({"dropped"}), b)
    desk.store.delete(f"objects/{b.id}/r00000.manifest")
    with pytest.raises(IntegrityError, match=f"objects/{b.id}/r00000.manifest: missing"):
        diff(desk.repository, a, b)


def test_a_long_list_of_other_values_is_cut_an_item(desk):
    a, b = (commit_of(desk, {"m": {f"w{i:02d}": np.full(1, i + n, np.int64) for i in range(23)}, "y": np.ones(1) * n}) for n in (1, 100))
    lines = str(diff(desk.repository, a, b)).split("\n")
    assert lines[1] == "tensors: 24 changed, 0 added, 0 removed, 0 the same"
    assert lines[2] == "  ~ m/w00: other values, int64 [1]"
    assert lines[-2:] == ["  ~ y: other values, float64 [1]", "  ~ m/...: other values in 3 more"]
    assert len(lines) == 2 + 20 + 2
    assert len(diff(desk.repository, a, b).tensors.changed) == 24


def test_long_values_are_cut_and_no_integer_is_too_long(desk):
    a, b = (commit_of(desk, {"text": mark * 1000, "big": 10**5000 + value}) for mark, value in (("a", 1), ("b", 2)))
    found = diff(desk.repository, a, b)
    assert found.items.changed == {"text": ("a" * 1000, "b" * 1000), "big": (10**5000 + 1, 10**5000 + 2)}
    assert str(found.items) == f"~ big: <int> -> <int>\n~ text: '{'a' * 196}... -> '{'b' * 196}..."
