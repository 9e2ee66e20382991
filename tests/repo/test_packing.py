"""What a save stores: pointers, deltas against the keyframe, blobs, and how little it takes to say where they are."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable

import numpy as np
import pytest

from syckpt.errors import IntegrityError, StateError, StoreError, SyckptError
from syckpt.objects.locations import Locations
from syckpt.repo import documents, packing
from syckpt.repo.keys import locations_key, manifest_key
from syckpt.repo.reader import Reader
from syckpt.stores.local import LocalStore
from syckpt.stores.memory import MemoryStore

MIB = 1 << 20


def noise(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def nudged(array: np.ndarray, seed: int) -> np.ndarray:
    return (array + np.float32(1e-4) * noise(array.size, seed)).astype(np.float32)


def rows_of(desk, commit) -> Locations:
    return desk.repository.read_locations(commit.id, 0)


# -- determinism -----------------------------------------------------------------------------------------------------------------


def test_the_same_state_has_the_same_manifest_seal_whatever_the_repository_and_what_came_before(make_desk, tmp_path):
    def state(step: int) -> dict[str, np.ndarray]:
        w = ((np.arange(5000) * 7919 % 1000 + step) / 8).astype(np.float32)
        return {"w": w, "b": np.arange(7, dtype=np.int64), "again": w.copy(), "none": np.zeros((0, 3))}

    seals = []
    for desk, steps in (
        (make_desk(), (1, 2, 3)),
        (make_desk(repository_id="other", run="other", compression="none"), (3,)),
        (make_desk(LocalStore(str(tmp_path)), cycle=1), (2, 3)),
        (make_desk(cycle=2), (3, 1, 3)),
    ):
        desk.open()
        for step in steps:
            commit = desk.save(state(step), step=step)
        seals.append(commit.manifests)
    assert seals == [seals[0]] * 4
    assert seals[0] == ((0, "c80e105ec7dc0aa098cb53054be0f7f2307355221e3439dfd7afeb6ee355c80b"),)


# -- bounds ----------------------------------------------------------------------------------------------------------------------


def metadata(desk, commit) -> int:
    """Return the stored bytes of a commit's manifest and locations."""
    return desk.store.size(manifest_key(commit.id, 0)) + desk.store.size(locations_key(commit.id, 0, 1))


def test_a_tensor_costs_at_most_100_bytes_of_metadata_new_or_not(desk):
    desk.open()
    rng = random.Random(0)
    names = [f"model.layers.{i // 10}.block_{i % 10}.attention.weight" for i in range(1000)]
    state = {name: noise(rng.randrange(1, 400), i) for i, name in enumerate(names)}
    few = {name: state[name] for name in names[:1]}
    base = metadata(desk, desk.save(few))
    new = desk.save(state)
    unchanged = desk.save(state)
    changed = desk.save({name: nudged(array, 5) for name, array in state.items()})
    for commit in (new, unchanged, changed):
        assert (metadata(desk, commit) - base) / 999 <= 100
    assert desk.store.size(f"objects/{unchanged.id}/r00000.safetensors") is None


def test_a_further_block_costs_at_most_24_bytes_and_nothing_when_the_tensor_is_unchanged(desk):
    desk.open()
    generator = np.random.default_rng(0)
    # Every block another length when stored.
    large = np.zeros((200, MIB // 4), np.float32)
    for index, block in enumerate(large):
        block[: 50 * (index + 1)] = generator.standard_normal(50 * (index + 1))
    small = metadata(desk, desk.save({"w": large[:1].copy()}))
    first = desk.save({"w": large})
    assert len(rows_of(desk, first).rows[0].blocks) == 200
    assert (metadata(desk, first) - small) / 199 <= 24
    assert metadata(desk, desk.save({"w": large})) <= small + 100


# -- pointers and bases ----------------------------------------------------------------------------------------------------------


def test_unchanged_and_equal_tensors_are_pointers_to_rows_that_hold_bytes(desk):
    desk.open()
    frozen, moving = noise(1000, 1), noise(1000, 2)
    commits = [desk.save({"frozen": frozen, "tied": frozen, "moving": nudged(moving, i)}) for i in range(4)]
    first = commits[0]
    assert len(rows_of(desk, first).rows) == 2
    for commit in commits[1:]:
        locations = rows_of(desk, commit)
        assert len(locations.rows) == 1
        source, row = locations.at[0]
        assert locations.source(source) == (first.id, 0)
        assert row == 0
    assert [rows_of(desk, c).keyframe for c in commits] == [(first.id, age) for age in range(4)]


@pytest.mark.parametrize("cycle", [1, 3, 8])
def test_every_commit_decodes_over_one_base_at_most_and_comes_back(make_desk, cycle):
    desk = make_desk(cycle=cycle)
    desk.open()
    states, commits = [], []
    moving = noise(3000, 1)
    for step in range(8):
        moving = nudged(moving, step)
        rare = noise(500, step // 3)
        states.append({"moving": moving, "rare": rare, "new": noise(10, 100 + step), "frozen": noise(200, 9)})
        commits.append(desk.save(states[-1]))
    deltas = 0
    for state, commit in zip(states, commits, strict=True):
        assert desk.load(commit) == {name: array.tobytes() for name, array in state.items()}
        for place in Reader(desk.repository, threads=1).snapshot(commit).places:
            if place.base is not None:
                deltas += 1
                assert place.base.base is None
                assert place.base.row.base is None
    assert (deltas > 0) is (cycle > 1)
    keyframes = {rows_of(desk, commit).keyframe[0] for commit in commits}
    assert len(keyframes) == -(-8 // cycle)


def test_a_new_writer_goes_on_with_the_cycle_that_it_finds(make_desk):
    first = make_desk()
    first.open()
    value = noise(3000, 1)
    one = first.save({"w": value})
    second = make_desk(first.store, run="second")
    second.open()
    two = second.save({"w": nudged(value, 1)})
    assert rows_of(second, two).keyframe == (one.id, 1)
    (row,) = rows_of(second, two).rows
    assert row.base is not None
    assert row.length < 0.8 * row.nbytes
    assert second.load(two) == {"w": nudged(value, 1).tobytes()}


def test_nothing_points_into_a_save_that_failed(desk):
    desk.open()
    value = noise(3000, 1)
    first = desk.save({"w": value})
    commit, transaction = desk.begin()
    desk.pack(commit, {"w": nudged(value, 1)}, parent=first)
    desk.packer.failed()
    transaction.abort()
    second = desk.save({"w": nudged(value, 1)})
    assert commit not in json.dumps(rows_of(desk, second).to_body())
    assert desk.load(second) == {"w": nudged(value, 1).tobytes()}


def test_a_keyframe_that_is_gone_begins_a_new_cycle(make_desk):
    first = make_desk()
    first.open()
    value = noise(3000, 1)
    one = first.save({"w": value})
    two = first.save({"w": nudged(value, 1), "x": noise(10, 1)})
    first.store.delete(f"objects/{one.id}.json")
    second = make_desk(first.store, run="second")
    second.open()
    three = second.save({"w": nudged(value, 2), "x": noise(10, 1)})
    assert two.id == three.parents[0]
    assert rows_of(second, three).keyframe == (three.id, 0)
    assert second.load(three)["w"] == nudged(value, 2).tobytes()


def test_bits_that_rot_in_the_scratch_file_never_reach_a_delta(desk):
    desk.open()
    value = noise(3000, 1)
    desk.save({"w": value})
    scratch = desk.packer._scratch
    read = scratch.read
    asked = []

    def rotten(offset: int, nbytes: int) -> bytes:
        data = bytearray(read(offset, nbytes))
        data[7] ^= 4
        asked.append(offset)
        return bytes(data)

    scratch.read = rotten
    second = desk.save({"w": nudged(value, 1)})
    assert asked
    assert rows_of(desk, second).rows[0].base is not None
    assert desk.load(second) == {"w": nudged(value, 1).tobytes()}


def test_a_tensor_of_another_shape_or_dtype_is_no_base(desk):
    desk.open()
    value = noise(3000, 1)
    desk.save({"w": value, "v": value[:100]})
    commit = desk.save({"w": value.reshape(30, 100), "v": value[:100].view(np.uint8)})
    assert [row.base for row in rows_of(desk, commit).rows] == [None, None]
    assert desk.load(commit) == {"w": value.tobytes(), "v": value[:100].tobytes()}


@pytest.mark.parametrize("count", [0, 1, MIB // 4 - 1, MIB // 4, MIB // 4 + 1, MIB // 2])
@pytest.mark.parametrize("compression", ["fast", "none"])
def test_tensors_around_the_size_of_a_block_come_back(make_desk, count, compression):
    desk = make_desk(compression=compression)
    desk.open()
    value = np.zeros(count, np.float32)
    value[::1000] = 1.5
    first = desk.save({"w": value})
    value = value.copy()
    value[-1:] = 7
    second = desk.save({"w": value})
    assert desk.load(second) == {"w": value.tobytes()}
    assert len(desk.load(first)["w"]) == 4 * count


# -- blobs -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["fast", "none"])
def test_a_blob_is_a_safetensors_file_without_holes_with_a_padded_header_and_aligned_data(make_desk, tmp_path, compression):
    import safetensors.numpy

    desk = make_desk(LocalStore(str(tmp_path)), compression=compression)
    desk.open()
    state = {
        "bytes": np.arange(3, dtype=np.uint8),
        "doubles": np.array([1.5, -0.0, np.nan]),
        "flags": np.array([True, False]),
        "halves": np.arange(5, dtype=np.int16),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.array(7, np.int64),
        "zeros": np.zeros(10_000, np.float32),
        'odd "näme" ' + "x" * 300: np.ones(2, np.float32),
    }
    commit = desk.save(state)
    path = tmp_path / f"objects/{commit.id}/r00000.safetensors"
    data = path.read_bytes()
    (blob,) = rows_of(desk, commit).blobs
    length = int.from_bytes(data[:8], "little")
    assert (blob.size, blob.header_nbytes) == (len(data), 8 + length)
    assert (8 + length) % 64 == 0
    header = json.loads(data[8 : 8 + length])
    assert "__metadata__" not in header
    ranges = sorted(entry["data_offsets"] for entry in header.values())
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(data) - 8 - length
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    found = safetensors.numpy.load_file(path)
    assert set(found) == {f"model.{name}" for name in state}
    if compression == "none":
        assert all(row.offset % row.width == 0 for row in rows_of(desk, commit).rows)
        for name, array in state.items():
            assert found[f"model.{name}"].dtype == array.dtype
            assert found[f"model.{name}"].tobytes() == array.tobytes()
    assert desk.load(commit) == {name: array.tobytes() for name, array in state.items()}


def test_a_header_beyond_what_safetensors_reads_is_refused_with_the_fix(desk, monkeypatch):
    desk.open()
    monkeypatch.setattr(packing, "_MAX_HEADER_NBYTES", 500)
    with pytest.raises(StateError, match="register fewer tensors"):
        desk.save({f"t{i}": noise(2, i) for i in range(10)})
    desk.save({"t": noise(2, 1)})


# -- hostile locations -----------------------------------------------------------------------------------------------------------


def forge(desk, commit, change: Callable[[dict], None]) -> None:
    """Rewrite a commit's locations, with a good seal."""
    key = locations_key(commit.id, 0, 1)
    body, _ = documents.read(desk.store, key, kind="locations")
    change(body)
    documents.write(desk.store, key, body, replace=True)


def test_bases_that_go_in_circles_are_an_integrity_error(desk):
    desk.open()
    value = noise(3000, 1)
    one, two = desk.save({"w": value}), desk.save({"w": nudged(value, 1)})

    def point_on(body: dict) -> None:
        body["sources"], body["rows"]["base"] = [[two.id, 0]], [[1, 0]]

    forge(desk, one, point_on)
    for commit in (one, two):
        with pytest.raises(IntegrityError, match=r"base of row 0 is a delta|has a base itself"):
            desk.load(commit)

    def point_at_itself(body: dict) -> None:
        body["sources"], body["rows"]["base"] = [[one.id, 0]], [[1, 0]]

    forge(desk, one, point_at_itself)
    with pytest.raises(IntegrityError, match="base of row 0 is a delta"):
        desk.load(one)


@pytest.mark.parametrize(
    "change",
    [
        lambda body, other: body["at"].update(source=[1], row=[0]) or body.update(sources=[[other.id, 0]]),  # another tensor's bytes
        lambda body, other: body["at"].update(source=[1], row=[99]) or body.update(sources=[[other.id, 0]]),
        lambda body, other: body["at"].update(source=[1], row=[0]) or body.update(sources=[[other.id, 5]]),
        lambda body, other: body["at"].update(source=[1], row=[0]) or body.update(sources=[["0badc0de-0000000000000000", 0]]),
        lambda body, other: body["at"].update(source=[], row=[]),
        lambda body, other: body["at"].update(source=[0, 0], row=[0, 0]),
        lambda body, other: body.update(manifest="0" * 64),
        lambda body, other: body.update(commit=other.id),
        lambda body, other: body.update(rank=1),
        lambda body, other: body["blobs"][0].__setitem__(0, f"objects/{other.id}/r00000.safetensors"),
        lambda body, other: body["blobs"][0].__setitem__(0, f"objects/{other.id}/absent"),
        lambda body, other: body["rows"].update(width=[1]),
        lambda body, other: body["rows"].update(coded=[0], length=body["rows"]["nbytes"]),
        lambda body, other: body["rows"].update(offset=[body["rows"]["offset"][0] + 1], length=[body["rows"]["length"][0] - 1]),
        lambda body, other: body["rows"].update(nbytes=[40_000 * 4 + 8]),
        lambda body, other: body["rows"].update(base=[[1, 0]]) or body.update(sources=[[other.id, 0]]),
    ],
)
def test_forged_locations_lead_to_an_error_and_never_to_wrong_numbers(desk, change):
    desk.open()
    other = desk.save({"w": np.arange(40_000, dtype=np.float32)})
    commit = desk.save({"w": np.sqrt(np.arange(40_000, dtype=np.float32)) // 3})
    good = np.sqrt(np.arange(40_000, dtype=np.float32)) // 3
    forge(desk, commit, lambda body: change(body, other))
    try:
        found = desk.load(commit)
    except SyckptError:
        return
    assert found == {"w": good.tobytes()}


def test_a_later_revision_of_locations_counts(desk):
    desk.open()
    commit = desk.save({"w": noise(100, 1)})
    body, _ = documents.read(desk.store, locations_key(commit.id, 0, 1), kind="locations")
    moved = f"objects/{commit.id}/r00000.packed.safetensors"
    old = body["blobs"][0][0]
    desk.store.create(moved, desk.store.get(old))
    desk.store.delete(old)
    body["revision"], body["blobs"][0][0] = 2, moved
    documents.write(desk.store, locations_key(commit.id, 0, 2), body)
    assert desk.load(commit) == {"w": noise(100, 1).tobytes()}
    desk.repository.check_whole(commit)


def test_memory_stores_and_directories_hold_the_same_bytes(make_desk, tmp_path):
    memory, disk = make_desk(MemoryStore()), make_desk(LocalStore(str(tmp_path)))
    blobs = []
    for desk in (memory, disk):
        desk.open()
        commit = desk.save({"w": noise(1000, 1), "v": noise(300_000, 2)})
        blobs.append(desk.store.get(f"objects/{commit.id}/r00000.safetensors"))
    assert blobs[0] == blobs[1]


def test_a_damaged_base_does_not_keep_later_saves_from_being_made(make_desk):
    first = make_desk()
    first.open()
    moving = noise(3000, 1)
    keyframe = first.save({"moving": moving})
    first.save({"moving": nudged(moving, 1)})
    key = rows_of(first, keyframe).blobs[0].key
    data = bytearray(first.store.get(key))
    data[-100] ^= 1
    first.store.replace(key, data)
    second = make_desk(first.store)
    second.open()
    for step in (2, 3):
        state = {"moving": nudged(moving, step)}
        commit = second.save(state)
        assert second.load(commit) == {"moving": state["moving"].tobytes()}
    assert rows_of(second, commit).rows[0].base is not None


# -- room ------------------------------------------------------------------------------------------------------------------------


class Small(MemoryStore):
    """A store that says how much is free."""

    free: int | None = None

    def free_nbytes(self) -> int | None:
        return self.free


def test_a_save_that_may_not_fit_is_refused_before_it_writes_a_blob(make_desk):
    store = Small()
    desk = make_desk(store)
    desk.open()
    first = desk.save({"x": noise(1000, 1)})
    store.free = 4000
    with pytest.raises(StoreError, match=r"4000 bytes are free on its file system, and this save may take up to 4\d\d\d: free space"):
        desk.save({"x": noise(1000, 2)})
    assert store.list("intents/") == []
    assert [key for key in store.list("objects/") if first.id not in key] == []
    # What is stored already needs no room.
    assert desk.save({"x": noise(1000, 1)}).parents == (first.id,)
    store.free = 10_000
    second = desk.save({"x": noise(1000, 2)})
    assert desk.load(second) == {"x": noise(1000, 2).tobytes()}
