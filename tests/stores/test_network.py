"""A local store on what a network file system does: answers that get lost, handles that go stale, and no locks at all."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import syckpt
from syckpt.errors import ConflictError, NotFoundError, StoreError
from syckpt.repo.refs import Refs
from syckpt.stores.local import LocalStore


def stale_handle() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def lose_answer(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> list[Any]:
    """Make the next call of a function of `os` take effect and fail."""
    call, calls = getattr(os, name), []

    def lost(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        result = call(*arguments, **options)
        if len(calls) == 1:
            raise OSError(code, os.strerror(code))
        return result

    monkeypatch.setattr(f"syckpt.stores.local.os.{name}", lost)
    return calls


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / ".syckpt")


# -- lost answers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_a_key_whose_link_reported_an_error_though_it_was_made_is_created(store: LocalStore, code: int) -> None:
    sink = store.sink("objects/a")
    sink.write([b"mine"])
    calls: list[Any] = []
    link = os.link

    def lost(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        link(*arguments, **options)
        if len(calls) == 1:
            raise OSError(code, os.strerror(code))

    sink._publish = lost
    assert sink.close() == 4
    assert (store.get("objects/a"), len(calls)) == (b"mine", 2)
    assert os.listdir(Path(store.root) / "staging") == []


def test_a_key_that_another_host_has_created_stays_a_conflict_after_lost_answers(store: LocalStore) -> None:
    store.create("objects/a", b"theirs")
    sink = store.sink("objects/a")
    sink.write([b"mine"])
    calls: list[Any] = []

    def lost(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ETIMEDOUT, "lost")
        os.link(*arguments, **options)

    sink._publish = lost
    with pytest.raises(ConflictError):
        sink.close()
    assert store.get("objects/a") == b"theirs"


def test_a_record_whose_making_reported_an_error_though_it_is_there_counts(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create = store.create

    def lost(key: str, data: Any) -> None:
        create(key, data)
        raise StoreError("the answer was lost")

    monkeypatch.setattr(store, "create", lost)
    record = Refs(store).append("heads/main", after=0, commit=None, commit_seal=None, previous=None, generation=1, run="r", reason="open")
    monkeypatch.undo()
    assert Refs(store).head("heads/main") == record
    with pytest.raises(ConflictError, match="generation 1 of run r"):
        Refs(store).append("heads/main", after=0, commit=None, commit_seal=None, previous=None, generation=1, run="s", reason="open")


def test_a_key_whose_removal_reported_an_error_though_it_is_gone_is_deleted(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("objects/a", b"x")
    calls = lose_answer(monkeypatch, "unlink", errno.ETIMEDOUT)
    store.delete("objects/a")
    assert len(calls) == 2
    assert store.size("objects/a") is None


# -- stale handles ---------------------------------------------------------------------------------------------------------------


def go_stale(monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], None], *, times: int = 1) -> None:
    """Make calls of a function of `os` fail as for a file that another host has deleted; `then` says what that host did."""
    call, left = getattr(os, name), [times]

    def stale(*arguments: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            then()
            raise stale_handle()
        return call(*arguments, **options)

    monkeypatch.setattr(f"syckpt.stores.local.os.{name}", stale)


READS: dict[str, Callable[[LocalStore], bytes]] = {
    "pread": lambda store: store.get("k"),
    "preadv": lambda store: _filled(store, "k", 3),
}


def _filled(store: LocalStore, key: str, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    store.readinto(key, buffer)
    return bytes(buffer)


@pytest.mark.parametrize("call", sorted(READS))
def test_a_key_that_another_host_replaced_under_its_reader_is_read_anew(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.replace("k", b"old")
    other = LocalStore(store.root)
    go_stale(monkeypatch, call, lambda: other.replace("k", b"new"))
    assert READS[call](store) == b"new"


@pytest.mark.parametrize("call", sorted(READS))
def test_a_key_that_another_host_deleted_under_its_reader_is_absent(store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store.create("k", b"old")
    other = LocalStore(store.root)
    go_stale(monkeypatch, call, lambda: other.delete("k"))
    with pytest.raises(NotFoundError, match="no 'k'"):
        READS[call](store)


def test_a_cached_handle_that_went_stale_is_opened_anew(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("k", b"old")
    assert _filled(store, "k", 3) == b"old"
    go_stale(monkeypatch, "fstat", lambda: None)
    assert _filled(store, "k", 3) == b"old"


def test_sizes_and_times_of_what_another_host_deleted_are_none(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for read in (store.size, store.modified_s):
        store.create("k", b"old")
        go_stale(monkeypatch, "fstat", lambda: LocalStore(store.root).delete("k"))
        assert read("k") is None


def test_a_handle_that_stays_stale_is_a_store_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("k", b"old")
    go_stale(monkeypatch, "pread", lambda: None, times=9)
    with pytest.raises(StoreError, match=r"cannot read .*/k: Stale file handle"):
        store.get("k")


# -- locks -----------------------------------------------------------------------------------------------------------------------


def test_nothing_of_the_package_locks_files() -> None:
    """Locks of files fail silently on some network file systems: nothing may depend on one."""
    locks = {"filelock", "portalocker", "flock", "lockf", "F_SETLK", "F_SETLKW", "F_OFD_SETLK", "O_EXLOCK", "LOCK_EX", "LOCK_SH"}
    found = []
    for path in sorted(Path(syckpt.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.Name):
                names = [node.id]
            found += [f"{path.name}:{getattr(node, 'lineno', 0)}: {name}" for name in names if name.split(".")[0] in locks]
    assert found == []
