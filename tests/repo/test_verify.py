"""Verification: what it finds, which commits it says are hit, marks, and going on after an interruption."""

from __future__ import annotations

import shutil
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syckpt.errors import StateError, StoreError
from syckpt.files.validation import validate_checkpoint
from syckpt.objects.refs import Intent, Lease, Owner
from syckpt.repo import branches, documents
from syckpt.repo.keys import locations_key
from syckpt.repo.packing import Staged
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.status import status
from syckpt.repo.verify import Progress, VerifyReport, verify
from syckpt.stores.base import parse_root
from syckpt.stores.memory import MemoryStore
from syckpt.testing.repositories import commit_id, make_repository

MIB = 1 << 20
FROZEN = np.arange(3 * MIB // 4, dtype=np.float32)
NOBODY = Owner("nowhere", "", "", 1, 1)


def blob(number: int) -> str:
    return f"objects/{commit_id(number)}/r00000.safetensors"


def flip(root: Path, key: str, offset: int) -> None:
    path = root / ".syckpt" / key
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path, commits=4, branches={"wide": (2, 1)}, compression="none")
    return tmp_path


def opened(root: Path) -> Repository:
    return Repository.open(parse_root(root))


def frozen_offset(root: Path) -> int:
    """Return where the frozen tensor begins in the first blob: every commit points to it."""
    repository = opened(root)
    snapshot = Reader(repository).snapshot(repository.read_commit(commit_id(1)))
    return next(place.row.offset for _, entry, place in snapshot.stored() if entry.path == ("model", "frozen"))


def test_a_whole_repository_has_no_findings(root: Path) -> None:
    report = verify(opened(root))
    assert report
    assert (report.findings, report.damaged, report.commits, report.tensors, report.nbytes) == ({}, [], 5, 6, 5 * 16384 + 4000)


def test_a_damaged_shared_row_hits_every_commit_that_points_to_it(root: Path) -> None:
    flip(root, blob(1), frozen_offset(root) + 5)
    report = verify(opened(root))
    (text,) = report.findings
    assert text == f"{blob(1)}: tensor model/frozen, block 0: its bytes are not those that were saved"
    assert sorted(report.findings[text]) == sorted(report.damaged) == [commit_id(n) for n in range(1, 6)]
    assert report.errors[0].startswith(f"{text}; hits commits {commit_id(1)}, ")


def test_a_row_of_one_commit_hits_that_commit_alone(root: Path) -> None:
    flip(root, blob(3), -1)
    report = verify(opened(root))
    assert list(report.findings.values()) == [[commit_id(3)]]
    assert report.damaged == [commit_id(3)]


@pytest.mark.parametrize("compression", ["none", "fast"])
def test_every_damaged_block_is_named(make_desk: Callable[..., Any], compression: str) -> None:
    desk = make_desk(compression=compression)
    desk.open()
    noise = np.random.default_rng(1).integers(0, 255, 4 * MIB, dtype=np.uint8)
    commit = desk.save({"big": noise, "small": np.zeros(3, np.uint8)})
    key = f"objects/{commit.id}/r00000.safetensors"
    place = next(p for _, entry, p in Reader(desk.repository).snapshot(commit).stored() if entry.path == ("model", "big"))
    data = bytearray(desk.store.get(key))
    for index in (1, 3):
        offset, length = place.block_range(index)
        data[offset + length // 2] ^= 64
    desk.store.replace(key, data)
    report = verify(desk.repository)
    blocks = sorted(text.partition("block ")[2][0] for text in report.findings)
    assert blocks == ["1", "3"]
    assert all(text.startswith(key) for text in report.findings)


def test_a_damaged_shared_row_is_read_twice_however_many_commits_lead_to_it(make_desk: Callable[..., Any]) -> None:
    class Reads(MemoryStore):
        nbytes = 0

        def readinto(self, key: str, buffer: Any, *, offset: int = 0) -> None:
            Reads.nbytes += len(memoryview(buffer).cast("B"))
            super().readinto(key, buffer, offset=offset)

    store = Reads()
    desk = make_desk(store, compression="none")
    desk.open()
    commits = [desk.save({"frozen": FROZEN, "x": np.full(4, float(n), np.float32)}) for n in range(10)]
    key = f"objects/{commits[0].id}/r00000.safetensors"
    data = bytearray(store.get(key))
    data[-100] ^= 1
    store.replace(key, data)
    Reads.nbytes = 0
    assert len(verify(desk.repository).damaged) == 10
    assert Reads.nbytes < 2.1 * FROZEN.nbytes


def test_a_row_that_is_right_for_one_commit_is_found_wrong_for_another(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(compression="none")
    desk.open()
    right, wrong = (desk.save({"x": np.arange(n, n + 50, dtype=np.float64)}) for n in (0, 100))
    table = desk.repository.read_locations(wrong.id, 0)
    astray = replace(table, sources=((right.id, 0),), at=((1, 0),), bases=())
    documents.write(desk.store, locations_key(wrong.id, 0, 1), astray.to_body(), replace=True)
    report = verify(desk.repository)
    assert report.damaged == [wrong.id]
    assert [commits for text, commits in report.findings.items() if "model/x" in text] == [[wrong.id]]


def swap(root: Path, one: str, other: str) -> None:
    a, b = root / ".syckpt" / one, root / ".syckpt" / other
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


@pytest.mark.parametrize(
    ("pattern", "damaged"),
    [
        ("objects/{}/r00000.safetensors", [2, 3]),
        ("objects/{}/r00000.manifest", [2, 3]),
        ("objects/{}/r00000.locations.0001", [2, 3]),
        ("objects/{}.json", [2, 3]),
    ],
)
def test_swapped_files_are_found(root: Path, pattern: str, damaged: list[int]) -> None:
    swap(root, pattern.format(commit_id(2)), pattern.format(commit_id(3)))
    report = verify(opened(root))
    assert sorted(report.damaged) == [commit_id(n) for n in damaged]
    for n in damaged:
        assert any(error.startswith(pattern.format(commit_id(n))) for error in report.errors)


def test_swapped_records_are_found(root: Path) -> None:
    keys = [f"logs/refs/heads/main/{number:012d}.json" for number in (2, 3)]
    swap(root, *keys)
    errors = verify(opened(root)).errors
    assert all(any(error.startswith(key) for error in errors) for key in keys)


def test_a_branch_whose_records_are_all_lost_is_found_by_its_copy(root: Path) -> None:
    at_main = opened(root)
    branches.create(at_main, "side", at_main.read_commit(commit_id(2)), run="test")
    for branch in ("side", "wide"):
        shutil.rmtree(root / f".syckpt/logs/refs/heads/{branch}")
    report = verify(opened(root), quick=True)
    # The commit that `wide` had alone is not taken for the rest of a save.
    assert [text.partition(":")[0] for text in report.findings] == ["refs/heads/side", "refs/heads/wide"]
    assert all(
        f"logs/refs/heads/{name}/000000000001.json was lost" in text for name, text in zip(["side", "wide"], report.findings, strict=True)
    )
    problems = status(opened(root)).problems
    assert [str(problem) for problem in problems] == list(report.findings)
    whole, errors = validate_checkpoint(root)
    assert (whole, errors) == (False, list(report.findings))


@pytest.mark.parametrize("quick", [True, False])
def test_a_cut_or_lost_blob_hits_every_commit_that_needs_it(root: Path, quick: bool) -> None:
    path = root / ".syckpt" / blob(1)
    path.write_bytes(path.read_bytes()[:-1])
    report = verify(opened(root), quick=quick)
    size = path.stat().st_size
    # One line a file, however many rows in it are lost.
    assert list(report.findings) == [f"{blob(1)}: {size} bytes, expected {size + 1} bytes"]
    assert len(report.damaged) == 5
    path.unlink()
    report = verify(opened(root), quick=quick)
    (text,) = report.findings
    assert text == f"{blob(1)}: missing, expected {size + 1} bytes"
    assert sorted(report.findings[text]) == [commit_id(n) for n in range(1, 6)]


def test_a_damaged_header_is_a_finding_but_the_commit_is_whole(root: Path) -> None:
    flip(root, blob(2), 20)
    report = verify(opened(root), mark=True)
    assert not report.ok
    assert (report.damaged, report.marked) == ([], [])
    assert report.errors[0].startswith(f"{blob(2)}: its header")


# -- marks -----------------------------------------------------------------------------------------------------------------


def test_damaged_commits_are_marked_and_the_mark_goes_once_they_are_whole(root: Path) -> None:
    flip(root, blob(3), -1)
    report = verify(opened(root), mark=True)
    assert report.marked == [commit_id(3)]
    assert opened(root).read_commit(commit_id(3)).damaged
    again = verify(opened(root), mark=True)
    assert (again.damaged, again.marked, again.cleared) == ([commit_id(3)], [], [])

    flip(root, blob(3), -1)
    for quick in (True, False):
        (error,) = verify(opened(root), quick=quick).errors
        assert error.startswith(f"objects/{commit_id(3)}.damaged: marks the commit as damaged ({blob(3)}: ")
    assert opened(root).read_commit(commit_id(3)).damaged
    assert verify(opened(root), quick=True, mark=True).cleared == []
    report = verify(opened(root), commit_id(3), mark=True)
    assert (report.ok, report.cleared) == (True, [commit_id(3)])
    assert not opened(root).read_commit(commit_id(3)).damaged
    assert verify(opened(root), quick=True)


def test_without_mark_nothing_is_written(root: Path) -> None:
    flip(root, blob(3), -1)
    before = opened(root).store.list()
    assert not verify(opened(root))
    assert not verify(opened(root), quick=True, mark=True) or opened(root).store.list() == before
    assert opened(root).store.list() == before


def test_a_commit_whose_record_cannot_be_read_is_marked_too(root: Path) -> None:
    flip(root, f"objects/{commit_id(4)}.json", 30)
    report = verify(opened(root), mark=True)
    assert report.marked == [commit_id(4)]
    assert opened(root).marks(commit_id(4)) == {"damaged"}


# -- going on --------------------------------------------------------------------------------------------------------------


class Interruption(BaseException):
    pass


def interrupted_after(count: int, *, nbytes: int = 10**9) -> Progress:
    def progress(commits: int, all_commits: int, done_nbytes: int, all_nbytes: int) -> None:
        if commits >= count or done_nbytes >= nbytes:
            raise Interruption

    return progress


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syckpt.repo.verify._MAX_WAITING", 1)


@pytest.mark.usefixtures("small_batches")
def test_an_interrupted_run_goes_on_where_it_was(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "progress"
    with pytest.raises(Interruption):
        verify(opened(root), resume=file, progress=interrupted_after(3))
    report = verify(opened(root), resume=file)
    assert report.ok
    assert (report.resumed, report.commits, report.tensors, report.nbytes) == (3, 5, 2, 2 * 16384)
    assert not file.exists()


@pytest.mark.usefixtures("small_batches")
def test_damage_is_found_again_after_an_interruption(root: Path, tmp_path: Path) -> None:
    flip(root, blob(1), frozen_offset(root))
    file = tmp_path / "progress"
    with pytest.raises(Interruption):
        verify(opened(root), resume=file, progress=interrupted_after(3))
    assert len(verify(opened(root), resume=file).damaged) == 5


@pytest.mark.usefixtures("small_batches")
def test_bytes_that_moved_since_the_interruption_are_read_again(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "progress"
    with pytest.raises(Interruption):
        verify(opened(root), resume=file, progress=interrupted_after(4))
    # A repack: the same rows, in another blob.
    repository, key = opened(root), f"objects/{commit_id(3)}/moved.safetensors"
    repository.store.create(key, repository.store.get(blob(3)))
    body = repository.read_locations(commit_id(3), 0).to_body()
    body["revision"], body["blobs"][0][0] = 2, key
    documents.write(repository.store, f"objects/{commit_id(3)}/r00000.locations.0002", body)
    flip(root, key, -1)
    report = verify(opened(root), resume=file)
    assert (report.resumed, report.damaged) == (3, [commit_id(3)])


@pytest.fixture
def big(make_desk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A desk with one commit of six blocks in three tensors, of which four are read at once."""
    monkeypatch.setattr("syckpt.repo.verify._BATCH_NBYTES", 4 * MIB)
    desk = make_desk(compression="none")
    desk.open()
    numbers = np.random.default_rng(3)
    desk.save({name: numbers.integers(0, 255, size, dtype=np.uint8) for name, size in [("a", MIB), ("b", 4 * MIB), ("c", MIB // 2)]})
    return desk


def in_hand(desk: Any, file: Path, rev: str | None = None) -> VerifyReport:
    """Verify up to the first four blocks, and then the rest."""
    with pytest.raises(Interruption):
        verify(desk.repository, rev, resume=file, progress=interrupted_after(1, nbytes=4 * MIB))
    return verify(desk.repository, rev, resume=file)


@pytest.mark.parametrize("rev", [None, "main"])
def test_a_commit_in_hand_goes_on_behind_the_blocks_that_were_read(big: Any, tmp_path: Path, rev: str | None) -> None:
    seen: list[tuple[int, ...]] = []
    assert verify(big.repository, rev, progress=lambda *facts: seen.append(facts))
    whole = 5 * MIB + MIB // 2
    assert [facts for n, facts in enumerate(seen) if facts not in seen[:n] and facts[3]] == [
        *([(0, 1, 0, whole)] * (rev is None)),
        (0, 1, 4 * MIB, whole),
        (1, 1, whole, whole),
    ]
    file = tmp_path / "progress"
    report = in_hand(big, file, rev)
    assert (report.ok, report.resumed, report.commits, report.tensors) == (True, 0, 1, 2)
    assert report.nbytes == MIB + MIB // 2
    assert not file.exists()


def test_damage_behind_the_blocks_that_were_read_is_found(big: Any, tmp_path: Path) -> None:
    key = f"objects/{big.newest.id}/r00000.safetensors"
    data = bytearray(big.store.get(key))
    data[-1] ^= 1
    big.store.replace(key, data)
    assert in_hand(big, tmp_path / "progress").damaged == [big.newest.id]


def test_damage_in_the_blocks_that_were_read_is_found_again(big: Any, tmp_path: Path) -> None:
    place = next(place for _, entry, place in Reader(big.repository).snapshot(big.newest).stored() if entry.path == ("model", "a"))
    data = bytearray(big.store.get(place.blob.key))
    data[place.row.offset] ^= 1
    big.store.replace(place.blob.key, data)
    report = in_hand(big, tmp_path / "progress")
    assert (report.damaged, report.tensors, report.nbytes) == ([big.newest.id], 3, 5 * MIB + MIB // 2)


def test_a_commit_in_hand_whose_bytes_moved_is_read_from_the_first_block_on(big: Any, tmp_path: Path) -> None:
    file = tmp_path / "progress"
    with pytest.raises(Interruption):
        verify(big.repository, resume=file, progress=interrupted_after(1, nbytes=4 * MIB))
    old, new = f"objects/{big.newest.id}/r00000.safetensors", f"objects/{big.newest.id}/moved.safetensors"
    big.store.create(new, big.store.get(old))
    body = big.repository.read_locations(big.newest.id, 0).to_body()
    body["revision"], body["blobs"][0][0] = 2, new
    documents.write(big.store, locations_key(big.newest.id, 0, 2), body)
    assert verify(big.repository, resume=file).nbytes == 5 * MIB + MIB // 2


def test_a_file_of_something_else_is_refused(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "progress"
    file.write_text("my thesis")
    with pytest.raises(StateError, match="is not a file that `verify` wrote"):
        verify(opened(root), resume=file)
    assert file.read_text() == "my thesis"
    file.unlink()
    with pytest.raises(Interruption):
        verify(opened(root), resume=file, progress=interrupted_after(1))
    make_repository(tmp_path / "other", commits=1)
    with pytest.raises(StateError, match="is of another repository"):
        verify(opened(tmp_path / "other"), resume=file)
    with pytest.raises(StateError, match=f"is of a verification of everything, and this one is of {commit_id(4)}; name another file"):
        verify(opened(root), commit_id(4), resume=file)
    assert file.exists()


# -- beside others ---------------------------------------------------------------------------------------------------------


class Moving(MemoryStore):
    """A store in which something happens before a key is read for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Callable[[], None]] = {}

    def readinto(self, key: str, buffer: Any, *, offset: int = 0) -> None:
        if key in self.before:
            self.before.pop(key)()
        super().readinto(key, buffer, offset=offset)


def test_a_commit_that_retention_drops_meanwhile_is_no_finding(make_desk: Callable[..., Any]) -> None:
    store = Moving()
    desk = make_desk(store)
    desk.open()
    commits = [desk.save({"x": np.full(100, float(n), np.float32)}) for n in range(2)]
    key = f"objects/{commits[0].id}/r00000.safetensors"

    def drop() -> None:
        desk.repository.mark(commits[0].id, "dropped", why="retention")
        store.delete(key)

    store.before[key] = drop
    # The later one needs nothing of it: the values differ in every element, and are few.
    report = verify(desk.repository)
    assert commits[0].id not in report.damaged


def test_bytes_that_repack_moves_meanwhile_are_read_at_their_new_place(make_desk: Callable[..., Any]) -> None:
    store = Moving()
    desk = make_desk(store)
    desk.open()
    commit = desk.save({"x": FROZEN})
    old, new = f"objects/{commit.id}/r00000.safetensors", f"objects/{commit.id}/moved.safetensors"

    def move() -> None:
        store.create(new, store.get(old))
        body = desk.repository.read_locations(commit.id, 0).to_body()
        body["revision"], body["blobs"][0][0] = 2, new
        documents.write(store, f"objects/{commit.id}/r00000.locations.0002", body)
        store.delete(old)

    store.before[old] = move
    report = verify(desk.repository)
    assert report.errors == []


def test_what_a_store_says_of_a_file_that_it_cannot_read_is_told_with_tensor_and_block(make_desk: Callable[..., Any]) -> None:
    class Broken(MemoryStore):
        def readinto(self, key: str, buffer: Any, *, offset: int = 0) -> None:
            raise StoreError("cannot read: Input/output error")

    desk = make_desk(Broken(), compression="none")
    desk.open()
    commit = desk.save({"x": np.zeros(4, np.uint8)})
    (text,) = verify(desk.repository).findings
    assert text == f"objects/{commit.id}/r00000.safetensors: tensor model/x, block 0: cannot read: Input/output error"


# -- other documents -------------------------------------------------------------------------------------------------------


def errors_with(root: Path, key: str, body: dict[str, Any]) -> list[str]:
    repository = opened(root)
    documents.write(repository.store, key, {"version": 1, **body})
    return verify(repository, quick=True).errors


def test_documents_are_about_what_their_names_say(root: Path) -> None:
    one, other = commit_id(8), commit_id(9)
    intent = Intent(one, "main", 1, "run", (), NOBODY).to_body()
    lease = Lease("main", "run", 1, "token", NOBODY, None, 5).to_body()
    receipt = {"kind": "receipt", "commit": one, "rank": 1, "manifest": None, "stats": {}, "error": None}
    cases = {
        f"intents/{other}.json": intent,
        "leases/wide.json": lease,
        f"receipts/main/{other}/r00001.json": receipt,
        f"receipts/main/{one}/r00002.json": receipt,
        f"receipts/main/{one}/verdict.json": receipt,
        "receipts/main/stray.json": receipt,
        "hello/x.json": {"kind": "mark", "why": ""},
        f"objects/{commit_id(1)}.preempted": {"kind": "mark"},
    }
    for number, (key, body) in enumerate(cases.items(), 1):
        errors = errors_with(root, key, body)
        assert len(errors) == number, errors
        assert any(error.startswith(key) for error in errors)


def test_documents_of_a_save_under_way_are_fine(root: Path) -> None:
    one = commit_id(8)
    repository = opened(root)
    documents.write(repository.store, f"intents/{one}.json", Intent(one, "feature/x", 1, "run", (), NOBODY).to_body())
    documents.write(repository.store, "leases/feature%2Fx.json", Lease("feature/x", "run", 1, "t", NOBODY, None, 5).to_body())
    receipt = {"kind": "receipt", "version": 1, "commit": one, "rank": 1, "manifest": None, "stats": {}, "error": None}
    documents.write(repository.store, f"receipts/feature%2Fx/{one}/r00001.json", receipt)
    verdict = {"kind": "verdict", "version": 1, "commit": one, "seal": None, "error": None}
    documents.write(repository.store, f"receipts/feature%2Fx/{one}/verdict.json", verdict)
    documents.write(repository.store, "hello/x.json", {"kind": "hello", "version": 1})
    assert verify(repository).errors == []


def test_a_manifest_that_names_an_entry_beyond_its_own_is_found(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    desk.open()
    commit, transaction = desk.begin()
    staged = [Staged(("model", "x"), "uint8", (4,), None, 0)]
    packed = desk.packer.pack(commit, parent=None, staged=staged, memory=memoryview(b"1234"), items={"model": {"tensor": 7}}, rng=None)
    made = desk.describe(commit, packed, parent=None)
    transaction.publish(made, hold=desk.hold, reader=desk.reader, locations=[packed.locations])
    (error,) = verify(desk.repository, quick=True).errors
    assert error.startswith(f"objects/{commit}/r00000.manifest: malformed node tensor: names entry 7 of 1")


# -- size ------------------------------------------------------------------------------------------------------------------


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get(self, key: str, **options: Any) -> bytes:
        self.calls += 1
        return super().get(key, **options)

    def size(self, key: str) -> int | None:
        self.calls += 1
        return super().size(key)


def test_quick_asks_the_store_a_bounded_number_of_questions_a_commit(make_desk: Callable[..., Any]) -> None:
    counts = []
    for commits in (20, 40):
        store = Counting()
        desk = make_desk(store)
        desk.open()
        for number in range(commits):
            desk.save({"x": np.full(50, float(number), np.float32)})
        store.calls = 0
        assert verify(desk.repository, quick=True)
        counts.append(store.calls)
    assert counts[1] - counts[0] <= 20 * 12


@pytest.mark.slow
def test_quick_of_10000_commits_is_quick_and_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # making them is not what is measured
    repository = make_repository(tmp_path, commits=10_000)
    started = time.process_time()
    report = verify(repository, quick=True)
    assert time.process_time() - started < 10
    assert (report.ok, report.commits) == (True, 10_000)
    tracemalloc.start()
    verify(repository, quick=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * MIB


def test_a_report_is_truthy_when_nothing_is_wrong() -> None:
    report = VerifyReport()
    assert (bool(report), report.ok, report.errors) == (True, True, [])
    report.add("x: lost")
    assert (bool(report), report.errors) == (False, ["x: lost"])


def test_a_revision_that_is_none_raises(root: Path) -> None:
    with pytest.raises(LookupError):
        verify(opened(root), "nothing")
