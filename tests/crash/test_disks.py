"""Disks that are full, without inodes, read-only, or cut off from power: real file systems, the real trainer and writer."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syckpt.testing.injection import CHANGES, Image, Victims, calls_of, no_mounts, no_strace, remount, strace, tmpfs

MOUNTS = no_mounts()
STRACE = no_strace()
pytestmark = pytest.mark.slow
mounts = pytest.mark.skipif(MOUNTS is not None, reason=str(MOUNTS))

OLD, NEW, NEXT = 1, 2, 9
GROWN = 10
"""The steps of a run whose first blob holds, beside what the last commit needs, much that no commit needs any more."""
PAGE_NBYTES = 4096


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    with Victims(Path(__file__).with_name("victims.py")) as server:
        yield server


def is_id(outcome: Any) -> bool:
    return isinstance(outcome, str) and re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{16}", outcome) is not None


def assert_goes_on(victims: Victims, root: Path, steps: list[int]) -> None:
    """All commits are there bit for bit, the next run saves, and nothing is left over."""
    found = victims.run("syckpt", "after", root, step=NEXT)
    assert [commit["step"] for commit in found["commits"]] == steps
    assert all(commit["exact"] for commit in found["commits"])
    assert is_id(found["saved"])
    assert found["tip"] == {"step": NEXT, "exact": True}
    assert (found["errors"], found["leftovers"]) == ([], [])


@mounts
@pytest.mark.parametrize(("size", "least"), [("size=1m", 0), ("size=3m", 2)])
def test_a_small_disk_fills_up(victims: Victims, tmp_path: Path, size: str, least: int) -> None:
    with tmpfs(tmp_path / "disk", size) as disk:
        root = disk / "run"
        step = OLD
        while is_id(outcome := victims.run("syckpt", "save once", root, step=step)):
            step += 1
            assert step < 20
        assert re.match(r"StoreError: .*\.syckpt: \d+ bytes are free on its file system, and this save may take up to \d+", outcome)
        assert step > least
        if step > OLD:
            assert victims.run("syckpt", "load", root) == {"step": step - 1, "exact": True}
        remount(disk, "size=16m")
        assert_goes_on(victims, root, list(range(step - 1, 0, -1)))


@mounts
def test_a_disk_that_is_full_when_the_free_bytes_lied(victims: Victims, tmp_path: Path) -> None:
    # The check of free bytes is passed: what fails is the write itself, in the middle of the blob.
    root = tmp_path / "run"
    assert is_id(victims.run("syckpt", "save once", root, step=OLD))
    outcome = victims.run("syckpt", "save once", root, step=NEW, file_nbytes=100_000)
    assert outcome.startswith("StoreError: cannot write")
    assert "File too large" in outcome
    assert victims.run("syckpt", "load", root) == {"step": OLD, "exact": True}
    assert_goes_on(victims, root, [OLD])


@mounts
def test_a_disk_without_inodes(victims: Victims, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64m,nr_inodes=200") as disk:
        root = disk / "run"
        assert is_id(victims.run("syckpt", "save once", root, step=OLD))
        filler = disk / "filler"
        filler.mkdir()
        for number in range(1000):
            try:
                (filler / str(number)).touch()
            except OSError:
                break
        for _, path in zip(range(6), sorted(filler.iterdir()), strict=False):
            path.unlink()
        outcome = victims.run("syckpt", "save once", root, step=NEW)
        assert not is_id(outcome)
        assert "StoreError" in outcome
        assert "No space left on device" in outcome
        assert victims.run("syckpt", "load", root) == {"step": OLD, "exact": True}
        shutil.rmtree(filler)
        assert_goes_on(victims, root, [OLD])


@mounts
def test_a_disk_that_is_read_only(victims: Victims, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64m") as disk:
        root = disk / "run"
        assert is_id(victims.run("syckpt", "save once", root, step=OLD))
        remount(disk, "ro")
        outcome = victims.run("syckpt", "save once", root, step=NEW)
        assert "StoreError" in outcome
        assert "mounted read-only" in outcome
        assert victims.run("syckpt", "load", root) == {"step": OLD, "exact": True}
        assert victims.run("syckpt", "verify", root) == {"errors": [], "damaged": []}
        remount(disk, "rw")
        assert_goes_on(victims, root, [OLD])


# -- while old commits go ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(victims: Victims, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grown") / "run"
    assert all(map(is_id, victims.run("syckpt", "grow", root, steps=GROWN)))
    return root


def assert_cleaning_goes_on(victims: Victims, root: Path) -> None:
    """After a cleaning that failed, all that is not dropped is there bit for bit, the next run saves, and the next cleaning ends."""
    found = victims.run("syckpt", "after", root, step=GROWN + 1)
    assert found["commits"][0]["step"] == GROWN
    assert all(commit["exact"] for commit in found["commits"])
    assert is_id(found["saved"])
    assert found["tip"] == {"step": GROWN + 1, "exact": True}
    assert (found["before"], found["errors"]) == ([], [])
    assert victims.run("syckpt", "clean", root, later_s=2 * 86400) == []
    assert_goes_on(victims, root, [GROWN + 1])


@pytest.mark.parametrize(("file_nbytes", "marks", "blobs"), [(300, 0, GROWN), (50_000, GROWN - 1, 3)])
def test_a_cleaning_whose_mark_or_moved_blob_is_too_large_for_a_limit(
    victims: Victims, grown: Path, tmp_path: Path, file_nbytes: int, marks: int, blobs: int
) -> None:
    root = shutil.copytree(grown, tmp_path / "run")
    outcome = victims.run("syckpt", "clean", root, file_nbytes=file_nbytes)
    assert outcome.startswith("StoreError: cannot write")
    assert "File too large" in outcome
    # Behind the marks what nobody needs is gone; the blob whose needed rows were to move is still there.
    assert len(list(root.glob(".syckpt/objects/*.dropped"))) == marks
    assert len(list(root.glob(".syckpt/objects/*/*.safetensors"))) == blobs
    assert_cleaning_goes_on(victims, root)


@mounts
def test_a_cleaning_on_a_full_disk(victims: Victims, grown: Path, tmp_path: Path) -> None:
    outcomes = []
    for pages in (0, 1, GROWN - 2, GROWN - 1):
        with tmpfs(tmp_path / "disk", "size=16m") as disk:
            root = shutil.copytree(grown, disk / "run")
            left = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize - pages * PAGE_NBYTES))
            outcomes.append(victims.run("syckpt", "clean", root))
            assert victims.run("syckpt", "load", root) == {"step": GROWN, "exact": True}
            (disk / "filler").unlink()
            assert_cleaning_goes_on(victims, root)
    # With room for the marks there is some for what moves, too: first goes what only goes.
    *told, last = outcomes
    assert last == []
    assert all(outcome.startswith("StoreError: ") and "No space left on device" in outcome for outcome in told)


@mounts
def test_a_cleaning_on_a_disk_without_inodes(victims: Victims, grown: Path, tmp_path: Path) -> None:
    outcomes = []
    for inodes in (0, 1, GROWN - 1, GROWN):
        with tmpfs(tmp_path / "disk", "size=16m,nr_inodes=300") as disk:
            root = shutil.copytree(grown, disk / "run")
            filler = disk / "filler"
            filler.mkdir()
            for number in range(os.statvfs(disk).f_ffree - inodes):
                (filler / str(number)).touch()
            outcomes.append(victims.run("syckpt", "clean", root))
            assert victims.run("syckpt", "load", root) == {"step": GROWN, "exact": True}
            shutil.rmtree(filler)
            assert_cleaning_goes_on(victims, root)
    *told, last = outcomes
    assert last == []
    assert all(outcome.startswith("StoreError: ") and "No space left on device" in outcome for outcome in told)


@mounts
def test_a_cleaning_on_a_disk_that_is_read_only(victims: Victims, grown: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=16m") as disk:
        root = shutil.copytree(grown, disk / "run")
        remount(disk, "ro")
        outcome = victims.run("syckpt", "clean", root)
        assert outcome.startswith("StoreError: ")
        assert "mounted read-only" in outcome
        assert victims.run("syckpt", "load", root) == {"step": GROWN, "exact": True}
        remount(disk, "rw")
        assert_cleaning_goes_on(victims, root)


# -- a loss of power -----------------------------------------------------------------------------------------------------------


@mounts
def test_a_loss_of_power_after_a_save_has_returned_loses_nothing(victims: Victims, tmp_path: Path) -> None:
    image = Image(tmp_path / "disk.img")
    with image.mounted(tmp_path / "disk") as disk:
        for step in (OLD, NEW):
            assert is_id(victims.run("syckpt", "save once", disk / "run", step=step))
            cut = image.cut_off(tmp_path / f"cut-{step}.img")
            with cut.mounted(tmp_path / "cut") as found:
                assert victims.run("syckpt", "load", found / "run") == {"step": step, "exact": True}
                assert_goes_on(victims, found / "run", list(range(step, 0, -1)))


@mounts
@pytest.mark.skipif(STRACE is not None, reason=str(STRACE))
def test_a_loss_of_power_before_any_sync_or_name_leaves_the_old_commit_or_the_new_one(victims: Victims, tmp_path: Path) -> None:
    image = Image(tmp_path / "base.img")
    with image.mounted(tmp_path / "disk") as disk:
        assert is_id(victims.run("syckpt", "save once", disk / "run", step=OLD))
    log = str(tmp_path / "log")
    traced = image.cut_off(tmp_path / "traced.img")
    with traced.mounted(tmp_path / "disk") as disk:
        pid = victims.start("syckpt", "save once", disk / "run", step=NEW)
        with strace(f"trace={CHANGES}", pid=pid, log=log):
            assert is_id((victims.go() or {}).get("value"))
    points = [call for call in calls_of(log) if call.name in ("fsync", "linkat", "renameat", "unlink", "unlinkat")]
    assert len(points) > 30
    seen = []
    for call in points:
        live = image.cut_off(tmp_path / "live.img")
        with live.mounted(tmp_path / "disk") as disk:
            pid = victims.start("syckpt", "save once", disk / "run", step=NEW)
            with strace(f"inject={call.name}:signal=SIGKILL:when={call.number}", pid=pid):
                victims.go()
            cut = live.cut_off(tmp_path / "cut.img")
        with cut.mounted(tmp_path / "cut") as found:
            tip = victims.run("syckpt", "load", found / "run")
            assert tip["exact"], (call, tip)
            seen.append(tip["step"])
            assert_goes_on(victims, found / "run", list(range(tip["step"], 0, -1)))
    assert set(seen) == {OLD, NEW}


@mounts
@pytest.mark.skipif(STRACE is not None, reason=str(STRACE))
def test_a_loss_of_power_while_old_commits_go_leaves_the_kept_one_whole(victims: Victims, tmp_path: Path) -> None:
    image = Image(tmp_path / "base.img")
    with image.mounted(tmp_path / "disk") as disk:
        assert all(map(is_id, victims.run("syckpt", "grow", disk / "run", steps=4)))
    log = str(tmp_path / "log")
    traced = image.cut_off(tmp_path / "traced.img")
    with traced.mounted(tmp_path / "disk") as disk:
        pid = victims.start("syckpt", "clean", disk / "run")
        with strace(f"trace={CHANGES}", pid=pid, log=log):
            assert (victims.go() or {}).get("value") == []
    points = [call for call in calls_of(log) if call.name in ("fsync", "linkat", "unlink", "unlinkat")]
    assert len(points) > 20
    for call in points:
        live = image.cut_off(tmp_path / "live.img")
        with live.mounted(tmp_path / "disk") as disk:
            pid = victims.start("syckpt", "clean", disk / "run")
            with strace(f"inject={call.name}:signal=SIGKILL:when={call.number}", pid=pid):
                victims.go()
            cut = live.cut_off(tmp_path / "cut.img")
        with cut.mounted(tmp_path / "cut") as found:
            assert victims.run("syckpt", "load", found / "run") == {"step": 4, "exact": True}, call
            assert victims.run("syckpt", "clean", found / "run", later_s=2 * 86400) == []
            assert_goes_on(victims, found / "run", [4])
