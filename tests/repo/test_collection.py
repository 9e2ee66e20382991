"""gc: what nothing leads to goes, and nothing else."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syckpt.errors import IntegrityError, StoreError
from syckpt.objects.refs import Owner
from syckpt.repo import branches, documents
from syckpt.repo.collection import GRACE_S, REFLOG_S, collect
from syckpt.repo.owner import this_process
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Retention, retain
from syckpt.repo.transaction import Transaction, open_branch
from syckpt.repo.verify import verify
from syckpt.stores.local import LocalStore
from syckpt.stores.memory import MemoryStore
from syckpt.testing.repositories import make_repository

DAY_S = 86400.0
LATER_S = time.time() + REFLOG_S + DAY_S


def dead() -> Owner:
    """A process of this machine that has ended."""
    here = this_process()
    return Owner(here.host, here.boot, here.pidns, here.pid, here.start + 1)


def state(seed: int) -> dict[str, np.ndarray]:
    return {"frozen": np.arange(3000, dtype=np.float32), "x": np.random.default_rng(seed).standard_normal(2000).astype(np.float32)}


def held(seed: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state(seed).items()}


def orphan(desk: Any) -> str:
    """Leave what a save has written, without its intent: as a rank does that was late for a save that had been given up."""
    commit, _ = desk.begin()
    desk.pack(commit, state(50), parent=desk.newest)
    desk.packer.failed()
    desk.store.delete(f"intents/{commit}.json")
    return commit


def age(desk: Any, prefix: str, seconds: float) -> None:
    for key in desk.store.list():
        if key.startswith(prefix):
            desk.store._written[key] -= seconds


def test_a_repository_in_use_keeps_every_byte_however_old_it_is(desk) -> None:
    desk.open()
    commits = [desk.save(state(n), name=f"n{n}") for n in range(3)]
    desk.begin(uses=(commits[0].id,))
    desk.store.create("notes.txt", b"mine")
    desk.store.create("objects/notes.txt", b"mine")
    desk.store.create("hello/not json", b"mine")
    age(desk, "", 400 * DAY_S)
    before = dict(desk.store._values)
    report = collect(desk.repository, now_s=LATER_S)
    assert desk.store._values == before
    assert (report.unreachable, report.cut_off, report.strays, report.sweeps, report.freed_nbytes) == ((), (), (), (), 0)


def test_a_deleted_branch_goes_when_the_reflog_window_has_passed(desk, make_desk) -> None:
    desk.open()
    trunk = [desk.save(state(n)) for n in range(2)]
    other = make_desk(desk.store)
    other.open("wide", start=trunk[0])
    far = [other.save(state(10 + n)) for n in range(2)]
    branches.delete(desk.repository, "wide", run="t")
    now_s = time.time()
    assert collect(desk.repository, now_s=now_s + REFLOG_S - DAY_S).unreachable == ()
    assert other.load(far[1]) == held(11)
    report = collect(desk.repository, now_s=LATER_S)
    assert {commit.id for commit in report.unreachable} == {commit.id for commit in far}
    assert not [key for key in desk.store.list("objects/") if any(key.startswith(f"objects/{commit.id}/") for commit in far)]
    assert desk.repository.read_commit(far[1].id).dropped
    for n, commit in enumerate(trunk):
        assert desk.load(commit) == held(n)
    assert verify(desk.repository).errors == []


def test_what_an_overwrite_left_behind_stays_for_the_window(desk) -> None:
    desk.open()
    old = [desk.save(state(n)) for n in range(2)]
    new = desk.save(state(5), parent=None)
    assert collect(desk.repository, now_s=time.time() + REFLOG_S - DAY_S).unreachable == ()
    assert {commit.id for commit in collect(desk.repository, now_s=LATER_S).unreachable} == {commit.id for commit in old}
    assert desk.load(new) == held(5)


@pytest.mark.parametrize("protector", ["tag", "name", "branch", "intent"])
def test_whatever_leads_to_a_commit_protects_its_history(desk, make_desk, protector) -> None:
    desk.open()
    first = desk.save(state(0))
    second = desk.save(state(1), name="named" if protector == "name" else None)
    desk.save(state(5), parent=None)
    if protector == "tag":
        branches.tag(desk.repository, "v1", second, run="t")
    if protector == "branch":
        branches.create(desk.repository, "old", second, run="t")
    if protector == "intent":
        Transaction(desk.repository, "00000000-00000000000000aa", desk.hold, uses=(second.id,), owner=this_process())
    assert collect(desk.repository, now_s=LATER_S).unreachable == ()
    assert desk.load(first) == held(0)


def test_a_save_whose_writer_is_dead_goes_at_once(desk) -> None:
    desk.open()
    kept = desk.save(state(0))
    commit, _ = desk.begin()
    desk.pack(commit, state(1), parent=kept)
    body, _ = documents.read(desk.store, f"intents/{commit}.json", kind="intent")
    desk.store.delete(f"intents/{commit}.json")
    documents.write(desk.store, f"intents/{commit}.json", {**body, "owner": vars(dead())})
    report = collect(desk.repository)
    assert report.cut_off == (commit,)
    assert {key for key, _ in report.strays} >= {f"objects/{commit}/r00000.manifest", f"objects/{commit}/r00000.safetensors"}
    assert [key for key in desk.store.list() if commit in key] == []
    assert desk.load(kept) == held(0)


def test_a_save_of_a_generation_that_was_fenced_goes_and_a_running_one_stays(desk, make_desk) -> None:
    desk.open()
    desk.save(state(0))
    old, _ = desk.begin()
    desk.pack(old, state(1), parent=desk.newest)
    other = make_desk(desk.store)
    other.open()
    running, transaction = other.begin()
    packed = other.pack(running, state(2), parent=other.newest)
    age(desk, "", 400 * DAY_S)
    assert collect(desk.repository, now_s=LATER_S).cut_off == (old,)
    made = other.describe(running, packed, parent=other.newest)
    transaction.publish(made, hold=other.hold, reader=other.reader, locations=[packed.locations])
    assert other.load(made.marked(set())) == held(2)
    assert not [key for key in desk.store.list() if old in key]


def test_a_published_save_that_was_cut_off_gets_its_names(desk) -> None:
    desk.open()
    commit = desk.save(state(0), name="x")
    desk.store.delete(desk.repository.refs.key("names/x", 1))
    intent = {"kind": "intent", "version": 1, "commit": commit.id, "branch": "main", "generation": 1, "run": "run", "uses": []}
    documents.write(desk.store, f"intents/{commit.id}.json", {**intent, "owner": vars(dead())})
    collect(desk.repository)
    assert desk.repository.refs.head("names/x").commit == commit.id
    assert desk.store.list("intents/") == []
    assert desk.load(commit) == held(0)


def test_leftovers_without_an_intent_go_after_a_day(desk) -> None:
    desk.open()
    desk.save(state(0))
    commit = orphan(desk)
    desk.store.create(f"receipts/main/{commit}/r00001.json", b"{}")
    desk.store.create("hello/abc.json", b"{}")
    assert collect(desk.repository).strays == ()
    age(desk, "", GRACE_S + 60)
    dry = collect(desk.repository, dry_run=True)
    wet = collect(desk.repository)
    assert dry.strays == wet.strays
    assert sorted(key for key, _ in wet.strays) == [
        "hello/abc.json",
        f"objects/{commit}/r00000.locations.0001",
        f"objects/{commit}/r00000.manifest",
        f"objects/{commit}/r00000.safetensors",
        f"receipts/main/{commit}/r00001.json",
    ]
    assert not [key for key in desk.store.list() if commit in key or key.startswith("hello/")]
    assert verify(desk.repository).errors == []


@pytest.mark.parametrize("lost", ["record", "commit", "intent", "locations", "newest"])
def test_nothing_goes_where_something_that_leads_on_cannot_be_read(desk, lost) -> None:
    desk.open()
    commits = [desk.save(state(n)) for n in range(3)]
    retain(desk.repository, "main", Retention(last=2))
    orphan(desk)
    age(desk, "", 400 * DAY_S)
    if lost == "record":
        desk.store._values[desk.repository.refs.key("heads/main", 2)] = b"torn"
    elif lost == "newest":
        desk.store.delete(desk.repository.refs.key("heads/main", 4))
    elif lost == "commit":
        desk.store.delete(f"objects/{commits[1].id}.json")
    elif lost == "intent":
        desk.store.create("intents/00000000-00000000000000aa.json", b"torn")
    else:
        desk.store.delete(f"objects/{commits[1].id}/r00000.locations.0001")
    before = dict(desk.store._values)
    with pytest.raises(IntegrityError):
        collect(desk.repository, dry_run=True)
    with pytest.raises(IntegrityError):
        collect(desk.repository)
    with pytest.raises(IntegrityError):
        retain(desk.repository, "main", Retention(last=2))
    assert desk.store._values == before


def test_a_copied_repository_is_no_litter(desk, tmp_path) -> None:
    desk.open()
    commits = [desk.save(state(n), tags=["v"] if n == 0 else []) for n in range(4)]
    retain(desk.repository, "main", Retention(last=1))
    copy = LocalStore(tmp_path)
    for key, value in desk.store._values.items():
        copy.create(key, value)
    desk.repository.store = copy
    before = {key: copy.get(key) for key in copy.list()}
    report = collect(desk.repository, now_s=LATER_S)
    assert report.freed_nbytes == 0
    assert {key: copy.get(key) for key in copy.list()} == before
    assert desk.load(commits[0]) == held(0)


def test_an_error_at_any_mutation_leaves_the_survivors_whole_and_a_rerun_completes(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(store, cycle=2)
    desk.open()
    commits = {}
    for n in range(5):
        commits[desk.save(state(n), step=n).id] = held(n)
    other = make_desk(store)
    other.open("wide", start=desk.newest)
    for n in range(2):
        commits[other.save(state(20 + n)).id] = held(20 + n)
    branches.delete(desk.repository, "wide", run="t")
    orphan(desk)
    for commit in list(commits)[:3]:
        desk.repository.mark(commit, "dropped", why="a retention that was cut off")
    snapshot = dict(store._values)
    calls: list[str] = []
    store.before_mutation = lambda operation, key: calls.append(f"{operation} {key}")
    collect(desk.repository, now_s=LATER_S)
    final = {key for key in store._values if "-" not in key.rpartition("/")[2]}
    for stop_at in range(1, len(calls) + 1):
        store._values = dict(snapshot)
        count = 0

        def fail(operation: str, key: str, stop_at: int = stop_at) -> None:
            nonlocal count
            count += 1
            if count >= stop_at:
                raise StoreError("injected fault")

        store.before_mutation = fail
        with pytest.raises(StoreError):
            collect(desk.repository, now_s=LATER_S)
        store.before_mutation = lambda operation, key: None
        for commit, content in commits.items():
            found = desk.repository.read_commit(commit)
            if not found.dropped:
                assert desk.load(found) == content
        assert not [error for error in verify(desk.repository).errors if "intents/" not in error]
        collect(desk.repository, now_s=LATER_S + 7200)
        assert {key for key in store._values if "-" not in key.rpartition("/")[2]} == final
        assert verify(desk.repository).errors == []


def test_twenty_savers_with_retention_and_two_collectors_at_once(make_desk) -> None:
    store = MemoryStore()
    trunk = make_desk(store)
    trunk.open()
    base = [trunk.save(state(n)) for n in range(2)]
    errors: list[BaseException] = []
    last: dict[str, tuple[Any, int]] = {}
    done = threading.Event()

    def train(branch: int) -> None:
        try:
            desk = make_desk(store, cycle=3)
            desk.open(f"b{branch}", start=base[branch % 2])
            for n in range(6):
                commit = desk.save(state(100 * branch + n))
                retain(desk.repository, f"b{branch}", Retention(last=1))
                last[f"b{branch}"] = commit, 100 * branch + n
        except BaseException as exc:  # noqa: BLE001 - shown by the test
            errors.append(exc)

    def clean() -> None:
        try:
            while not done.is_set():
                collect(trunk.repository, now_s=LATER_S)
        except BaseException as exc:  # noqa: BLE001 - shown by the test
            errors.append(exc)

    savers = [threading.Thread(target=train, args=(n,)) for n in range(20)]
    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    for thread in [*savers, *cleaners]:
        thread.start()
    for thread in savers:
        thread.join()
    done.set()
    for thread in cleaners:
        thread.join()
    assert errors == []
    assert len(last) == 20
    for commit, number in last.values():
        assert trunk.load(commit) == held(number)
    assert verify(trunk.repository).errors == []


def test_a_branch_taken_anew_goes_on_after_a_collection(desk, make_desk) -> None:
    desk.open()
    for n in range(4):
        desk.save(state(n))
    retain(desk.repository, "main", Retention(last=1))
    collect(desk.repository, now_s=LATER_S)
    other = make_desk(desk.store)
    other.open()
    made = other.save(state(9))
    assert other.load(made) == held(9)
    assert open_branch(desk.repository, "main", run="t", expected=made.id).tip == made.id


def test_an_empty_directory_that_a_killed_sweep_left_behind_goes(desk, tmp_path) -> None:
    desk.open()
    # Of nothing that the other one has: what is left of the first one is an empty directory, and no loss.
    commits = [desk.save({"x": np.arange(n, n + 50, dtype=np.float64)}) for n in range(0, 200, 100)]
    retain(desk.repository, "main", Retention(last=1))
    store = LocalStore(tmp_path)
    for key, value in desk.store._values.items():
        store.create(key, value)
    desk.repository.store = store
    for key in store.list(f"objects/{commits[0].id}/"):
        store.delete(key)
    empty = tmp_path / "objects" / commits[0].id
    empty.mkdir()
    collect(desk.repository)
    assert not empty.exists()
    assert (tmp_path / "objects" / commits[1].id).is_dir()


# -- a disk without any room -----------------------------------------------------------------------------------------------------


def full_disk(path: Path, *, until_gone: Path | None = None) -> LocalStore:
    """Open a store that takes no further byte, or none before a file is gone."""

    def before_mutation(operation: str, key: str) -> None:
        if operation in ("mkdir", "open", "write", "link") and (until_gone is None or until_gone.exists()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return LocalStore(path, before_mutation=before_mutation)


def abandoned(path: Path) -> Path:
    """Make what a writer that is gone has left in the middle of a blob."""
    half = path / "staging/elsewhere-1-1-1.part"
    half.parent.mkdir(exist_ok=True)
    half.write_bytes(bytes(5000))
    os.utime(half, (1, 1))
    return half


def test_on_a_full_disk_retention_says_that_it_needs_some_room_and_changes_nothing(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, commits=4)
    path = tmp_path / ".syckpt"
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(StoreError, match=r"No space left.*`syckpt retain` writes some 10 kB before it frees any: .*`syckpt gc`"):
        retain(Repository(full_disk(path), repository.id), "main", Retention(last=1))
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert len(retain(repository, "main", Retention(last=1)).dropped) == 3


def test_on_a_full_disk_gc_removes_unfinished_files_before_it_writes_anything(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, commits=2, branches={"side": (1, 2)})
    branches.delete(repository, "side", run="test")
    half = abandoned(tmp_path / ".syckpt")
    full = Repository(full_disk(tmp_path / ".syckpt", until_gone=half), repository.id)
    report = collect(full, now_s=time.time() + REFLOG_S + 60)
    assert [size for _, size in report.staged] == [5000]
    assert len(report.unreachable) == 2
    assert verify(repository).errors == []


def test_gc_of_nothing_but_unfinished_files_needs_no_room(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, commits=1)
    half = abandoned(tmp_path / ".syckpt")
    assert collect(Repository(full_disk(tmp_path / ".syckpt"), repository.id)).freed_nbytes == 5000
    assert not half.exists()
