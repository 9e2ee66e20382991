"""The local store: what a killed process, a full disk, a hostile repository and dead writers leave behind."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from syckpt.errors import ConflictError, FormatError, IntegrityError, NotFoundError, StoreError
from syckpt.stores import local, staged
from syckpt.stores.base import StoreSpec, open_store, parse_root
from syckpt.stores.local import LocalStore
from syckpt.testing.stores import StoreSuite


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "new" / "parent" / ".syckpt")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / ".syckpt")


def mutations(store: LocalStore) -> list[str]:
    seen: list[str] = []
    store.before_mutation = lambda operation, key: seen.append(operation)
    return seen


CRASHES = """
import os, sys
from syckpt.stores.base import open_store
from syckpt.stores.faults import FaultPlan, faulty

def create(store):
    store.create("objects/x/key", b"content")

def sink(store):
    with store.sink("objects/x/key") as sink:
        sink.write([b"...."])
        sink.flush()
        sink.write([b"ent"])
        sink.patch(0, b"cont")

for number in range(1, 100):
    child = os.fork()
    if child == 0:
        globals()[sys.argv[2]](open_store(faulty(f"{sys.argv[1]}/{number}/.syckpt", FaultPlan(stop_at=number, action="kill"))))
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
print(number)
"""


@pytest.mark.parametrize("work", ["create", "sink"])
def test_a_process_killed_at_any_mutation_leaves_the_key_absent_or_complete(tmp_path: Path, work: str) -> None:
    runs = int(subprocess.run([sys.executable, "-c", CRASHES, tmp_path, work], check=True, capture_output=True).stdout)
    outcomes = []
    for number in range(1, runs + 1):
        store = LocalStore(tmp_path / str(number) / ".syckpt")
        present = store.size("objects/x/key") is not None
        outcomes.append(store.get("objects/x/key") if present else None)
        assert store.list() == (["objects/x/key"] if present else [])
        store.collect_staging()
        assert [*tmp_path.glob(f"{number}/.syckpt/staging/*")] == []
    # Killed at the sync of the directory, at the removal of the staged name, and not at all.
    assert outcomes == [None] * (runs - 3) + [b"content"] * 3


def test_create_syncs_the_bytes_then_links_then_syncs_the_directory(store: LocalStore) -> None:
    store.create("warm", b"")
    seen = mutations(store)
    store.create("key", b"content")
    assert seen == ["open", "write", "fsync", "link", "fsync-dir", "unlink"]


def test_each_new_directory_is_synced_into_its_parent_before_the_next(store: LocalStore) -> None:
    store.create("warm", b"")
    seen = mutations(store)
    store.create("a/b/key", b"content")
    assert seen == ["open", "write", "fsync", "mkdir", "fsync-dir", "mkdir", "fsync-dir", "link", "fsync-dir", "unlink"]


def test_a_directory_that_another_store_made_is_synced_once(store: LocalStore, tmp_path: Path) -> None:
    store.create("a/first", b"")
    other = LocalStore(tmp_path / ".syckpt")
    seen = mutations(other)
    other.create("a/second", b"")
    other.create("a/third", b"")
    assert seen[6:10] == ["mkdir", "fsync-dir", "link", "fsync-dir"]
    assert seen[11:] == ["open", "fsync", "link", "fsync-dir", "unlink"]


def test_replace_renames_over_the_old_file(store: LocalStore) -> None:
    store.replace("HEAD", b"old")
    seen = mutations(store)
    store.replace("HEAD", b"new")
    assert seen == ["open", "write", "fsync", "replace", "fsync-dir"]


def test_nothing_remains_in_staging(store: LocalStore, tmp_path: Path) -> None:
    store.create("a", b"1")
    store.replace("a", b"2")
    store.sink("b").abort()
    with pytest.raises(ConflictError):
        store.create("a", b"3")
    assert os.listdir(tmp_path / ".syckpt/staging") == []


def test_a_failed_write_removes_its_file_at_once(store: LocalStore, tmp_path: Path) -> None:
    sink = store.sink("a")
    store.before_mutation = fail_at("write", errno.EIO)
    sink.write([b"content"])
    with pytest.raises(StoreError, match="cannot write"):
        sink.flush()
    assert os.listdir(tmp_path / ".syckpt/staging") == []


def fail_at(operation: str, code: int) -> Callable[[str, str], None]:
    def fail(found: str, key: str) -> None:
        if found == operation:
            raise OSError(code, os.strerror(code))

    return fail


def test_a_failed_sync_of_the_directory_takes_the_link_back(store: LocalStore, tmp_path: Path) -> None:
    store.create("warm", b"")
    store.before_mutation = fail_at("fsync-dir", errno.EIO)
    with pytest.raises(StoreError, match="cannot fsync-dir"):
        store.create("key", b"content")
    assert os.listdir(tmp_path / ".syckpt/staging") == []
    assert store.list() == ["warm"]


def test_create_succeeds_although_its_staged_name_cannot_be_removed(store: LocalStore) -> None:
    store.before_mutation = fail_at("unlink", errno.EIO)
    store.create("key", b"content")
    assert store.get("key") == b"content"


def test_a_link_whose_answer_was_lost_is_no_conflict(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_twice(*arguments: object, **options: object) -> None:
        link(*arguments, **options)
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", link_twice)
    store.create("key", b"content")
    assert store.get("key") == b"content"


def test_a_full_disk_is_named_with_its_free_bytes(store: LocalStore, tmp_path: Path) -> None:
    store.before_mutation = fail_at("write", errno.ENOSPC)
    with pytest.raises(StoreError, match=rf"cannot write {tmp_path}/.*: No space left on device\. Free space .*: \d+ bytes are free there"):
        store.create("key", b"content")


def failing(operation: str, code: int, times: int) -> Callable[[str, str], None]:
    left = [times]

    def before_mutation(found: str, key: str) -> None:
        if found == operation and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))

    return before_mutation


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT])
@pytest.mark.parametrize("operation", ["mkdir", "open", "write", "link", "unlink"])
def test_an_error_that_passes_is_waited_for(store: LocalStore, tmp_path: Path, operation: str, code: int) -> None:
    store.before_mutation = failing(operation, code, 3)
    store.create("objects/x/key", b"content")
    assert store.get("objects/x/key") == b"content"
    assert list((tmp_path / ".syckpt/staging").iterdir()) == []
    store.before_mutation = failing("unlink", code, 3)
    store.delete("objects/x/key")
    assert store.list() == []


@pytest.mark.parametrize(
    ("operation", "code"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("fsync-dir", errno.EIO), ("write", errno.EBADF)]
)
def test_an_error_that_does_not_pass_or_must_not_be_tried_again_is_final(store: LocalStore, operation: str, code: int) -> None:
    store.create("objects/x/first", b"")
    store.before_mutation = failing(operation, code, 1)
    with pytest.raises(StoreError):
        store.create("objects/x/key", b"content")
    assert store.list() == ["objects/x/first"]
    store.create("objects/x/key", b"content")


def test_an_error_that_stays_is_raised_within_a_second(store: LocalStore) -> None:
    store.before_mutation = failing("write", errno.EIO, 4)
    with pytest.raises(StoreError, match="Input/output error"):
        store.create("key", b"content")
    assert store.list() == []


def test_a_file_system_without_hard_links_is_named(store: LocalStore) -> None:
    store.before_mutation = fail_at("link", errno.EPERM)
    with pytest.raises(StoreError, match="has no hard links"):
        store.create("key", b"content")


def test_a_real_short_write_is_a_store_error_that_leaves_nothing(store: LocalStore, tmp_path: Path) -> None:
    code = """
import resource, sys
from syckpt.stores.local import LocalStore
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
LocalStore(sys.argv[1]).create("key", bytes(5_000_000))
"""
    done = subprocess.run([sys.executable, "-c", code, store.root], check=False, capture_output=True, text=True)
    assert "syckpt.errors.StoreError: cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert store.list() == []
    assert os.listdir(tmp_path / ".syckpt/staging") == []


def test_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda file, vector, offset: pwrite(file, vector[0][: 1 + len(vector[0]) // 2], offset))
    pieces = [bytes([n]) * size for n, size in enumerate([5000, 10, 20_000, 1])]
    with store.sink("key") as sink:
        sink.write(pieces)
        sink.patch(1, b"patch")
    assert store.get("key") == b"\0patch" + b"".join(pieces)[6:]


@pytest.mark.parametrize("count", [0, 8])
def test_a_write_that_claims_nothing_or_too_much_is_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "pwritev", lambda file, vector, offset: count)
    with pytest.raises(StoreError, match=f"{count} of 7 bytes were written, says the file system"):
        store.create("key", b"content")
    monkeypatch.undo()
    assert store.list() == []


def test_a_write_that_is_silently_lost_is_found_by_the_size(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda file, vector, offset: sum(map(len, vector)))
    with pytest.raises(StoreError, match="has 0 bytes of the 7 that were written to it"):
        store.create("key", b"content")
    monkeypatch.undo()
    assert store.list() == []


def test_writes_end_at_multiples_of_8_mib_of_the_file(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    ends = []

    def record(file: int, vector: list[memoryview], offset: int) -> int:
        count = pwritev(file, vector, offset)
        ends.append(offset + count)
        return count

    monkeypatch.setattr(os, "pwritev", record)
    with store.sink("key") as sink:
        for _ in range(6):
            sink.write([bytes(3_000_000)])
    assert ends == [8_388_608, 16_777_216, 18_000_000]


def test_two_processes_that_race_to_create_have_one_winner(store: LocalStore) -> None:
    code = """
import sys
from syckpt.stores.local import LocalStore
sys.stdin.read()
LocalStore(sys.argv[1]).create("a/key", sys.argv[2].encode())
"""
    racers = [
        subprocess.Popen([sys.executable, "-c", code, store.root, str(n)], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for n in range(2)
    ]
    for racer in racers:
        racer.stdin.close()
    statuses = [racer.wait() for racer in racers]
    assert sorted(statuses) == [0, 1]
    assert store.get("a/key") == str(statuses.index(0)).encode()


@pytest.mark.parametrize("key", ["link/secret", "link/deeper/secret"])
def test_a_linked_directory_is_refused(store: LocalStore, tmp_path: Path, key: str) -> None:
    store.create("warm", b"")
    (tmp_path / "outside/deeper").mkdir(parents=True)
    (tmp_path / "outside/secret").write_bytes(b"secret")
    (tmp_path / ".syckpt/link").symlink_to(tmp_path / "outside")
    operations: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.readinto(key, bytearray(1)),
        lambda: store.size(key),
        lambda: store.create(key, b""),
        lambda: store.replace(key, b""),
        lambda: store.delete(key),
        lambda: store.list("link"),
        lambda: store.list(),
    ]
    for operation in operations:
        with pytest.raises(IntegrityError, match=r"\.syckpt/link is a symbolic link"):
            operation()
    assert (tmp_path / "outside/secret").read_bytes() == b"secret"
    assert sorted(os.listdir(tmp_path / "outside")) == ["deeper", "secret"]


def test_a_linked_file_is_not_read(store: LocalStore, tmp_path: Path) -> None:
    store.create("warm", b"")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / ".syckpt/key").symlink_to(tmp_path / "secret")
    with pytest.raises(IntegrityError, match=r"\.syckpt/key is a symbolic link"):
        store.get("key")


def test_replace_overwrites_a_linked_file_and_not_its_target(store: LocalStore, tmp_path: Path) -> None:
    store.create("warm", b"")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / ".syckpt/HEAD").symlink_to(tmp_path / "secret")
    store.replace("HEAD", b"mine")
    assert (store.get("HEAD"), (tmp_path / "secret").read_bytes()) == (b"mine", b"secret")


def test_linked_staging_is_refused(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / ".syckpt").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / ".syckpt/staging").symlink_to(tmp_path / "outside")
    with pytest.raises(IntegrityError, match="staging is a symbolic link"):
        store.create("key", b"")


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / ".syckpt").symlink_to(tmp_path / "disk")
    LocalStore(tmp_path / ".syckpt").create("key", b"content")
    assert (tmp_path / "disk/key").read_bytes() == b"content"


def test_a_fifo_at_a_key_does_not_hang_its_reader(store: LocalStore, tmp_path: Path) -> None:
    store.create("warm", b"")
    os.mkfifo(tmp_path / ".syckpt/key")
    with pytest.raises(IntegrityError, match="not a regular file"):
        store.get("key")


def test_a_file_in_the_place_of_a_directory_is_a_store_error(store: LocalStore) -> None:
    store.create("a", b"")
    with pytest.raises(StoreError, match="Not a directory"):
        store.create("a/b", b"")


def test_list_ignores_names_that_are_no_keys(store: LocalStore, tmp_path: Path) -> None:
    store.create("a", b"")
    (tmp_path / ".syckpt/Icon\r").write_bytes(b"")
    assert store.list() == ["a"]


def test_delete_removes_the_emptied_directory_of_a_commit(store: LocalStore, tmp_path: Path) -> None:
    store.create("objects/x/1", b"")
    store.create("intents/x.json", b"")
    store.delete("objects/x/1")
    store.delete("intents/x.json")
    assert sorted(os.listdir(tmp_path / ".syckpt")) == ["intents", "objects", "staging"]
    assert os.listdir(tmp_path / ".syckpt/objects") == []


def test_readinto_notices_that_another_process_truncated_the_file(store: LocalStore, tmp_path: Path) -> None:
    store.create("a", b"0123456789")
    store.readinto("a", bytearray(10))
    os.truncate(tmp_path / ".syckpt/a", 7)
    with pytest.raises(IntegrityError, match="expected at least 10 bytes, found 7"):
        store.readinto("a", bytearray(10))


def test_readers_of_more_keys_than_there_are_descriptors_close_the_older_ones(store: LocalStore) -> None:
    before = len(os.listdir("/dev/fd"))
    for n in range(100):
        store.create(f"k{n}", b"1")
        store.readinto(f"k{n}", bytearray(1))
    assert len(os.listdir("/dev/fd")) == before + 64


def test_collect_staging_removes_only_files_of_dead_owners(store: LocalStore, tmp_path: Path) -> None:
    store.create("warm", b"")
    staging = tmp_path / ".syckpt/staging"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead = child.pid
    own = staged.new_name()
    host, pid, start, _ = own.rsplit("-", 3)
    names = {
        own: False,
        f"{host}-{pid}-0-7.part": False,  # its start time is unknown, and the pid lives
        f"{host}-{dead}-{start}-7.part": True,
        f"{host}-{dead}-0-7.part": True,
        f"elsewhere-{dead}-{start}-7.part": False,
        "unheard-of": False,
    }
    if start != "0":
        names[f"{host}-{pid}-{int(start) + 1}-7.part"] = True  # the pid was given to another process
    for name in names:
        (staging / name).write_bytes(b"half")
    abandoned = {f"staging/{name}": 4 for name, removed in names.items() if removed}
    assert store.staging() == abandoned
    assert sorted(os.listdir(staging)) == sorted(names)
    assert store.collect_staging() == abandoned
    assert store.staging() == {}
    assert sorted(os.listdir(staging)) == sorted(name for name, removed in names.items() if not removed)


def test_collect_staging_removes_files_of_other_hosts_after_a_day(store: LocalStore, tmp_path: Path) -> None:
    store.create("warm", b"")
    old = tmp_path / ".syckpt/staging/elsewhere-1-1-1.part"
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    assert store.collect_staging() == {"staging/elsewhere-1-1-1.part": 0}


def test_the_bytes_of_a_staged_file_that_was_published_stay(store: LocalStore, tmp_path: Path) -> None:
    # Killed between link and unlink.
    store.create("key", b"content")
    second = tmp_path / ".syckpt/staging/elsewhere-1-1-1.part"
    os.link(tmp_path / ".syckpt/key", second)
    os.utime(second, (0, 0))
    assert store.collect_staging() == {"staging/elsewhere-1-1-1.part": 0}
    assert (second.exists(), store.get("key")) == (False, b"content")


def test_collect_staging_leaves_what_syckpt_did_not_make(store: LocalStore, tmp_path: Path) -> None:
    store.create("warm", b"")
    staging = tmp_path / ".syckpt/staging"
    (staging / "notes.txt").write_bytes(b"mine")
    (staging / "folder.part").mkdir()
    (tmp_path / "outside").write_bytes(b"mine")
    (staging / "elsewhere-1-1-1.part").symlink_to(tmp_path / "outside")
    for path in [*staging.iterdir(), tmp_path / "outside"]:
        os.utime(path, (0, 0), follow_symlinks=False)
    assert [*store.collect_staging()] == ["staging/elsewhere-1-1-1.part"]
    assert sorted(os.listdir(staging)) == ["folder.part", "notes.txt"]
    assert (tmp_path / "outside").read_bytes() == b"mine"


def test_a_staged_name_left_from_before_a_restart_is_passed_over(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("warm", b"")
    (tmp_path / ".syckpt/staging/taken").write_bytes(b"old")
    names = iter(["taken", "free"])
    monkeypatch.setattr(local, "new_name", lambda: next(names))
    store.create("key", b"content")
    assert (store.get("key"), (tmp_path / ".syckpt/staging/taken").read_bytes()) == (b"content", b"old")


def test_reading_makes_nothing(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        store.get("a/b")
    store.delete("objects/a/b")
    assert (store.list(), store.size("a"), store.collect_staging()) == ([], None, {})
    assert store.free_nbytes() > 0
    assert os.listdir(tmp_path) == []


def test_a_directory_means_the_repository_in_it(tmp_path: Path) -> None:
    assert parse_root(tmp_path) == StoreSpec("local", str(tmp_path / ".syckpt"))
    assert parse_root(f"{tmp_path}/.syckpt/") == StoreSpec("local", str(tmp_path / ".syckpt"))
    assert parse_root(StoreSpec("other", "x")) == StoreSpec("other", "x")


def test_a_relative_root_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_root("run") == StoreSpec("local", os.path.join(os.getcwd(), "run/.syckpt"))


def test_a_url_is_not_taken_for_a_directory() -> None:
    with pytest.raises(FormatError, match="knows no URLs"):
        parse_root("s3://bucket/run")


def test_a_spec_opens_its_store(tmp_path: Path) -> None:
    store = open_store(parse_root(tmp_path))
    store.create("key", b"content")
    assert (tmp_path / ".syckpt/key").read_bytes() == b"content"
    assert store.describe() == str(tmp_path / ".syckpt")


def test_an_unknown_kind_of_store_is_refused() -> None:
    with pytest.raises(FormatError, match="unknown kind of store 'tape'"):
        open_store(StoreSpec("tape", "x"))
