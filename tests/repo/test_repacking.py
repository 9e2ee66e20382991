"""Repack: dead bytes go, needed rows move, and nothing that vouches for them changes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from syckpt.errors import ConflictError, StoreError
from syckpt.repo import repacking, survey
from syckpt.repo.keys import mark_key
from syckpt.repo.repacking import plan_sweeps, repack, sweep
from syckpt.repo.verify import verify
from syckpt.stores.memory import MemoryStore


def arrays(seed: int) -> dict[str, np.ndarray]:
    """Two tensors that stay as they are, between others that do not."""
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal(4000).astype(np.float64),
        "frozen": np.arange(2000, dtype=np.float32),
        "b": rng.integers(0, 255, 700, dtype=np.uint8),
        "still": np.arange(99, dtype=np.int16),
    }


@pytest.fixture(params=["fast", "none"])
def scene(make_desk, request) -> Any:
    """Three commits in three cycles, the first one just dropped: its blob holds the frozen tensors, and much that nobody needs."""
    desk = make_desk(cycle=1, compression=request.param)
    desk.open()
    desk.commits = [desk.save(arrays(n)) for n in range(3)]
    dropped(desk, desk.commits[0].id)
    return desk


def dropped(desk: Any, commit: str) -> None:
    """Drop a commit long ago, and nothing more."""
    desk.repository.mark(commit, "dropped", why="a test")
    desk.store._written[mark_key(commit, "dropped")] -= 3601


def held(seed: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays(seed).items()}


def files(desk: Any) -> list[str]:
    prefix = f"objects/{desk.commits[0].id}/"
    return [key.removeprefix(prefix) for key in desk.store.list(prefix)]


def assert_survivors(desk: Any) -> None:
    for n in (1, 2):
        assert desk.load(desk.commits[n]) == held(n)
    assert verify(desk.repository).errors == []


def test_needed_rows_move_into_a_new_blob_and_keep_their_numbers(scene) -> None:
    before = scene.repository.read_locations(scene.commits[0].id, 0)
    old = scene.store.get(before.blobs[0].key)
    report = repack(scene.repository)
    after = scene.repository.read_locations(scene.commits[0].id, 0)
    blob, revision = sorted(files(scene))
    assert revision == "r00000.locations.0002"
    assert blob.startswith("r00000.0002-")
    assert (after.revision, after.at, len(after.rows)) == (2, (), len(before.rows))
    moved = [number for number, row in enumerate(after.rows) if row is not None]
    assert len(moved) == 2
    new = scene.store.get(after.blobs[0].key)
    for number in moved:
        was, now = before.row(number), after.row(number)
        assert new[now.offset : now.offset + now.length] == old[was.offset : was.offset + was.length]
        assert (was.nbytes, was.width, was.coded, was.leaves) == (now.nbytes, now.width, now.coded, now.leaves)
    assert report.moved_nbytes == sum(after.row(number).length for number in moved)
    assert_survivors(scene)


def test_the_new_blob_is_a_safetensors_file_with_the_old_names(scene, tmp_path) -> None:
    repack(scene.repository)
    blob = next(key for key in scene.store.list("objects/") if ".0002-" in key)
    data = scene.store.get(blob)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert set(header) == {"model.frozen", "model.still"}
    if scene.packer._compression == "none":
        safetensors = pytest.importorskip("safetensors.numpy")
        found = safetensors.load(data)
        assert {name: array.tobytes() for name, array in found.items()} == {
            f"model.{name}": array for name, array in held(0).items() if name in ("frozen", "still")
        }


def test_documents_that_are_signed_and_sealed_stay_as_they_are(scene) -> None:
    def sealed() -> dict[str, bytes]:
        return {k: v for k, v in scene.store._values.items() if k.endswith((".json", ".manifest")) and scene.commits[0].id + "/" not in k}

    before = sealed()
    repack(scene.repository)
    assert sealed() == before


def test_a_dry_run_says_the_same_and_changes_nothing(scene) -> None:
    before = dict(scene.store._values)
    dry = repack(scene.repository, dry_run=True)
    assert scene.store._values == before
    wet = repack(scene.repository)
    assert (dry.sweeps, dry.skipped) == (wet.sweeps, ())
    nbytes = sum(map(len, before.values())) - sum(map(len, scene.store._values.values()))
    # The header and the locations that are written anew are not foreseen.
    assert nbytes < wet.freed_nbytes < nbytes + 2000


def test_a_blob_with_few_dead_bytes_stays_unless_asked_for(make_desk) -> None:
    desk = make_desk(cycle=1)
    desk.open()
    backbone = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    desk.commits = [desk.save({"backbone": backbone, "x": np.full(50, n)}) for n in range(3)]
    dropped(desk, desk.commits[0].id)
    repack(desk.repository)
    assert sorted(files(desk)) == ["r00000.locations.0001", "r00000.safetensors"]
    repack(desk.repository, dead_share=0.0)
    assert sorted(files(desk))[1] == "r00000.locations.0002"
    assert desk.load(desk.commits[2])["backbone"] == backbone.tobytes()


def test_a_row_that_moved_once_may_move_again(scene) -> None:
    repack(scene.repository)
    scene.save({**arrays(7), "frozen": np.zeros(1)})
    for commit in scene.commits[1:]:
        dropped(scene, commit.id)
    repack(scene.repository)
    assert sorted(files(scene))[1] == "r00000.locations.0003"
    assert sum(row is not None for row in scene.repository.read_locations(scene.commits[0].id, 0).rows) == 1
    assert scene.load(scene.newest)["still"] == held(0)["still"]
    assert verify(scene.repository).errors == []


def test_bytes_of_what_was_dropped_a_moment_ago_by_a_living_process_are_left_alone(scene) -> None:
    dropped(scene, scene.commits[1].id)
    survey.drop(survey.Survey(scene.repository), [scene.commits[1].id], why="", protected=lambda now: ())
    scene.store._written[mark_key(scene.commits[0].id, "dropped")] += 3601
    scene.store._written[mark_key(scene.commits[1].id, "dropped")] += 3601
    assert repack(scene.repository).sweeps == ()


def test_of_two_repacks_one_wins_and_the_other_leaves_nothing_behind(scene) -> None:
    first = plan_sweeps(survey.Survey(scene.repository))
    second = plan_sweeps(survey.Survey(scene.repository))
    copy = repacking._copy

    def late(*arguments: Any) -> Any:
        # The second one has copied its rows when the first one is through.
        made = copy(*arguments)
        repacking._copy = copy
        sweep(scene.repository, first[0])
        return made

    repacking._copy = late
    try:
        with pytest.raises(ConflictError, match="another process has just repacked"):
            sweep(scene.repository, second[0])
    finally:
        repacking._copy = copy
    assert len(files(scene)) == 2
    assert_survivors(scene)


def test_a_file_that_is_not_syckpts_is_left_alone(scene) -> None:
    scene.store.create(f"objects/{scene.commits[0].id}/notes.txt", b"mine")
    report = repack(scene.repository)
    assert [found.unknown for found in report.sweeps] == [(f"objects/{scene.commits[0].id}/notes.txt",)]
    assert "notes.txt" in files(scene)


def test_a_damaged_header_leaves_the_commit_and_says_why(scene) -> None:
    key = f"objects/{scene.commits[0].id}/r00000.safetensors"
    data = bytearray(scene.store._values[key])
    data[20] ^= 1
    scene.store._values[key] = bytes(data)
    report = repack(scene.repository)
    assert [commit for commit, _ in report.skipped] == [scene.commits[0].id]
    assert "its header" in report.skipped[0][1]
    assert scene.load(scene.commits[2]) == held(2)


class Lossy(MemoryStore):
    """Its disk says that it has written everything; of a file that repack makes it drops a write: part of the name, and a number from 0."""

    drops: tuple[str, int] | None = None

    def sink(self, key: str) -> Any:
        found, writes = super().sink(key), itertools.count()
        write = found.write

        def lossy(buffers: Any) -> None:
            lost = self.drops is not None and self.drops[0] in key and next(writes) == self.drops[1]
            write([bytes(len(data)) for data in buffers] if lost else buffers)

        found.write = lossy  # type: ignore[method-assign]
        return found


def test_what_the_disk_did_not_write_is_noticed_before_the_old_bytes_go(make_desk) -> None:
    store = Lossy()
    desk = make_desk(store, cycle=1)
    desk.open()
    desk.commits = [desk.save(arrays(n)) for n in range(3)]
    dropped(desk, desk.commits[0].id)
    old = {"r00000.locations.0001", "r00000.safetensors"}
    for drops, why in {
        (".0002-", 0): "its header reads back otherwise than it was written",
        (".0002-", 1): "row 1 reads back otherwise than it was written",
        (".0002-", 2): "row 2 reads back otherwise than it was written",
        ("locations.0002", 0): "locations.0002: not a sealed document",
    }.items():
        store.drops = drops
        report = repack(desk.repository)
        assert [commit for commit, _ in report.skipped] == [desk.commits[0].id]
        assert why in report.skipped[0][1]
        assert old <= set(files(desk))
        assert_survivors(desk)
    store.drops = None
    assert repack(desk.repository).skipped == ()
    assert [key.partition("-")[0] for key in sorted(files(desk))] == ["r00000.0002", "r00000.locations.0002"]
    assert_survivors(desk)


def test_an_error_at_any_mutation_leaves_the_survivors_whole_and_a_rerun_completes(scene) -> None:
    snapshot = dict(scene.store._values)
    calls: list[str] = []
    scene.store.before_mutation = lambda operation, key: calls.append(key)
    repack(scene.repository)
    assert len(calls) > 8
    for stop_at in range(1, len(calls) + 1):
        scene.store._values = dict(snapshot)
        count = 0

        def fail(operation: str, key: str, stop_at: int = stop_at) -> None:
            nonlocal count
            count += 1
            if count >= stop_at:
                raise StoreError("injected fault")

        scene.store.before_mutation = fail
        with pytest.raises(StoreError):
            repack(scene.repository)
        scene.store.before_mutation = lambda operation, key: None
        assert_survivors(scene)
        repack(scene.repository)
        assert [key.partition("-")[0] for key in sorted(files(scene))] in (
            ["r00000.0002", "r00000.locations.0002"],
            # The rerun takes the number that a blob without locations was made for, or finds all done but the deletions.
            ["r00000.0003", "r00000.locations.0003"],
        )
        assert_survivors(scene)
