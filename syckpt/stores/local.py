"""A store in a directory of a local or shared file system that has hard links.

A key is created under a name in `staging/`, synced, linked to its own name, and the directory is synced; so a process killed anywhere
leaves the key whole or absent, and at most a file in `staging/`. Every store syncs the entry of each directory that it writes to once,
whoever made it. No symbolic link below the root is followed (IntegrityError): a repository that came from elsewhere cannot lead out of
itself. A failed fsync is final: the kernel may have dropped the dirty pages and would call a second one a success.

Errors that pass, as network file systems and busy disks give them (EAGAIN, EBUSY, EINTR, EIO, ENOBUFS, ENOMEM, EREMOTEIO, ESTALE,
ETIMEDOUT), are tried again three times within a quarter of a second, where a second try does no harm: `mkdir`, `open`, `write` (at a
fixed offset), `link` and `unlink`. Not `fsync`, and not `replace`, whose first try may have taken effect; and no full disk, which does
not pass by itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import itertools
import os
import stat
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from syckpt.stores.base import STAGING, MutationHook, absent, check_key, check_prefix, check_range, flat, is_key, unobserved
from syckpt.stores.staged import is_abandoned, new_name

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = ["LocalStore"]

T = TypeVar("T")
_PASSING = {
    getattr(errno, name)
    for name in ("EAGAIN", "EBUSY", "EINTR", "EIO", "ENOBUFS", "ENOMEM", "EREMOTEIO", "ESTALE", "ETIMEDOUT")
    if hasattr(errno, name)  # EREMOTEIO is Linux's
}
_PAUSES_S = (0.01, 0.04, 0.16)
_WRITE_NBYTES = 8 << 20  # writes end at multiples of this: unaligned ones cost a third more (page and extent boundaries)
_COPY_NBYTES = 4096  # smaller buffers are copied: cheaper than a place in the vector
_VECTOR_COUNT = 1024  # IOV_MAX
_READER_COUNT = 64  # open descriptors kept for `readinto`
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # not blocking: a FIFO must not hang its reader


class LocalStore:
    """A `Store` in the directory `root`, which is made at the first write."""

    def __init__(self, root: str | os.PathLike[str], *, before_mutation: MutationHook = unobserved) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self._inside = os.path.join(self.root, "")
        self.before_mutation = before_mutation
        self._synced: set[str] = set()  # directories whose entry in their parent is durable
        self._readers: OrderedDict[str, _Reader] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, *, offset: int = 0, length: int | None = None, limit: int | None = None) -> bytes:
        return self._read(key, self._open, lambda reader: self._bytes_of(reader, key, offset, length, limit))

    def _bytes_of(self, reader: _Reader, key: str, offset: int, length: int | None, limit: int | None) -> bytes:
        length = check_range(self, key, size=reader.nbytes, offset=offset, length=length, limit=limit)
        chunks = []
        while length and (chunk := os.pread(reader.descriptor, length, offset)):
            chunks.append(chunk)
            offset += len(chunk)
            length -= len(chunk)
        if length:
            check_range(self, key, size=offset, offset=offset, length=length)
        return b"".join(chunks)

    def readinto(self, key: str, buffer: Buffer, *, offset: int = 0) -> None:
        self._read(key, self._cached, lambda reader: self._fill(reader, key, flat(buffer), offset))

    def _fill(self, reader: _Reader, key: str, view: memoryview, offset: int) -> None:
        while view and (count := os.preadv(reader.descriptor, [view], offset)):
            view = view[count:]
            offset += count
        check_range(self, key, size=min(offset, reader.nbytes) if view else offset, offset=offset, length=len(view))

    def size(self, key: str) -> int | None:
        try:
            return self._read(key, self._open, lambda reader: reader.nbytes)
        except NotFoundError:
            return None

    def modified_s(self, key: str) -> float | None:
        try:
            return self._read(key, self._open, lambda reader: reader.modified_s)
        except NotFoundError:
            return None

    def _read(self, key: str, opened: Callable[[str], _Reader], use: Callable[[_Reader], T]) -> T:
        """Return what `use` makes of a key's open file."""
        with _translating("read", self.path(key)):
            try:
                return use(opened(key))
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
            # Another host of a network file system has deleted or replaced it: opened anew, it is another file, or absent.
            return use(self._open(key))

    def create(self, key: str, data: Buffer) -> None:
        with self.sink(key) as sink:
            sink.write([data])

    def replace(self, key: str, data: Buffer) -> None:
        check_key(key)
        with _LocalSink(self, key, "replace", os.replace) as sink:
            sink.write([data])

    def sink(self, key: str) -> _LocalSink:
        check_key(key)
        return _LocalSink(self, key, "link", os.link)

    def list(self, prefix: str = "", *, deep: bool = True) -> list[str]:
        with _translating("list", self.path(prefix)):
            return sorted(self._keys(check_prefix(prefix), deep=deep))

    def delete(self, key: str) -> None:
        check_key(key)
        *parents, name = key.split("/")
        with _translating("delete", self.path(key)), suppress(FileNotFoundError, NotADirectoryError):
            with self._directory(parents) as at:
                self._unlink(name, key, at=at)
            if len(parents) == 2 and parents[0] == "objects":  # the only directories that come and go: one a commit
                self._remove_if_empty(parents, key)

    def staging(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with _translating("list", self.path(STAGING)), suppress(FileNotFoundError), self._directory([STAGING]) as at:
            for name in sorted(os.listdir(at)):
                with suppress(FileNotFoundError):  # its owner or a collector removed it first
                    file = os.lstat(name, dir_fd=at)
                    if not stat.S_ISDIR(file.st_mode) and is_abandoned(name, file.st_mtime):
                        # A second name: it was published, and its bytes stay under its key.
                        found[f"{STAGING}/{name}"] = file.st_size if file.st_nlink == 1 else 0
        return found

    def collect_staging(self) -> dict[str, int]:
        found = self.staging()
        if found:
            with _translating("list", self.path(STAGING)), self._directory([STAGING]) as at:
                for key in found:
                    self._unlink(key.removeprefix(f"{STAGING}/"), key, at=at)
        return found

    def free_nbytes(self) -> int | None:
        return _free_nbytes(self.root)

    def describe(self) -> str:
        return self.root

    def path(self, key: str) -> str:
        """Return the full path of a key, or of the root for ""."""
        return self._inside + key

    @contextmanager
    def _mutating(self, operation: str, key: str, path: str | None = None) -> Iterator[None]:
        with _translating(operation, path or self.path(key)):
            self.before_mutation(operation, key)
            yield

    def _unlink(self, name: str, key: str, *, at: int | None = None, path: str | None = None) -> None:
        def unlink() -> None:
            with self._mutating("unlink", key, path), suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)

        _patiently(unlink)

    def _mkdir(self, name: str, key: str, path: str, *, at: int | None = None) -> None:
        def mkdir() -> None:
            with self._mutating("mkdir", key, path), suppress(FileExistsError):
                os.mkdir(name, dir_fd=at)

        _patiently(mkdir)

    def _open(self, key: str) -> _Reader:
        check_key(key)
        *parents, name = key.split("/")
        path = self.path(key)
        try:
            at = self._descend(parents)
            try:
                reader = _Reader(_open_at(at, name, path, _FILE))
            finally:
                os.close(at)
        except (FileNotFoundError, NotADirectoryError):
            raise absent(self, key) from None
        if stat.S_ISDIR(reader.mode):
            raise absent(self, key)
        if not stat.S_ISREG(reader.mode):
            raise IntegrityError(f"{path} is not a regular file; a repository holds no others: remove it and run `syckpt verify`")
        return reader

    def _cached(self, key: str) -> _Reader:
        with self._lock:
            reader = self._readers.get(key)
            if reader is not None and not reader.is_unlinked():
                self._readers.move_to_end(key)
                return reader
        reader = self._open(key)
        with self._lock:
            self._readers[key] = reader
            self._readers.move_to_end(key)
            if len(self._readers) > _READER_COUNT:
                self._readers.popitem(last=False)  # closed when the last thread that reads from it lets go
        return reader

    def _keys(self, prefix: str, *, deep: bool) -> Iterator[str]:
        directories = []
        # Deleted meanwhile, or the name of a file: no keys below it.
        with suppress(FileNotFoundError, NotADirectoryError), self._directory(prefix.split("/")[:-1]) as at, os.scandir(at) as entries:
            for entry in entries:
                key = prefix + entry.name
                if entry.is_symlink():
                    raise _link_refused(self.path(key))
                if is_key(key):  # anything else (`Icon\r`, names in other alphabets) is not ours
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(f"{key}/")
                    else:
                        yield key
        for directory in directories if deep else ():
            yield from self._keys(directory, deep=True)

    def _remove_if_empty(self, parents: Sequence[str], key: str) -> None:
        with self._directory(parents[:-1]) as at, self._mutating("rmdir", key, self.path("/".join(parents))):
            try:
                os.rmdir(parents[-1], dir_fd=at)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise

    @contextmanager
    def _directory(self, parts: Sequence[str], *, made_for: str | None = None) -> Iterator[int]:
        """Yield a descriptor of a directory below the root; `made_for`: the key for which missing ones are made."""
        at = self._descend(parts, made_for=made_for)
        try:
            yield at
        finally:
            os.close(at)

    def _descend(self, parts: Sequence[str], *, made_for: str | None = None) -> int:
        """Return what `_directory` yields; the caller closes it."""
        path = self.root
        at = self._open_root(made_for)
        for name in parts:
            path = f"{path}/{name}"
            try:
                inner = self._enter(at, name, path, made_for)
            finally:
                os.close(at)
            at = inner
        return at

    def _enter(self, at: int, name: str, path: str, made_for: str | None) -> int:
        if made_for is not None and path not in self._synced:
            self._mkdir(name, made_for, path, at=at)
            self._sync_directory(at, made_for, os.path.dirname(path))
            self._synced.add(path)
        try:
            return _open_at(at, name, path, _DIRECTORY)
        except FileNotFoundError:
            if made_for is None:
                raise
            self._synced.discard(path)  # a concurrent `delete` removed it, empty
            return self._enter(at, name, path, made_for)

    def _open_root(self, made_for: str | None) -> int:
        if made_for is not None and self.root not in self._synced:
            missing = [self.root]
            while not os.path.isdir(os.path.dirname(missing[-1])):
                missing.append(os.path.dirname(missing[-1]))
            for path in reversed(missing):
                self._mkdir(path, made_for, path)
                parent = os.open(os.path.dirname(path), _DIRECTORY)
                try:
                    self._sync_directory(parent, made_for, os.path.dirname(path))
                finally:
                    os.close(parent)
            self._synced.add(self.root)
        return os.open(self.root, _DIRECTORY)

    def _sync_directory(self, at: int, key: str, path: str) -> None:
        with self._mutating("fsync-dir", key, path):
            _sync(at)


class _LocalSink:
    """A file in `staging/` until `close`; `publish` is os.link or os.replace, `operation` its name."""

    def __init__(self, store: LocalStore, key: str, operation: str, publish: Callable[..., None]) -> None:
        self._store = store
        self._key = key
        self._operation = operation
        self._publish = publish
        self._pending: deque[bytearray | memoryview] = deque()
        self._written = 0
        self._size = 0
        self._closed = False
        self._file: int | None = None
        self._staged = ""
        while self._file is None:
            self._file = _patiently(self._stage)

    def _stage(self) -> int | None:
        """Open a new file in `staging/`; None if that name was taken: of the same pid and start time, before the machine was restarted."""
        store, name = self._store, new_name()
        self._staged = store.path(f"{STAGING}/{name}")
        with (
            _translating("open", self._staged),
            store._directory([STAGING], made_for=self._key) as at,
            store._mutating("open", self._key, self._staged),
            suppress(FileExistsError),
        ):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=at)
        return None

    def write(self, buffers: Sequence[Buffer]) -> None:
        self._require_open()
        for buffer in buffers:
            view = flat(buffer)
            if len(view) >= _COPY_NBYTES:
                self._pending.append(view)
            elif self._pending and isinstance(last := self._pending[-1], bytearray):
                last += view
            elif view:
                self._pending.append(bytearray(view))
            self._size += len(view)
        self._drain(self._size - self._size % _WRITE_NBYTES)

    def flush(self) -> None:
        self._drain(self._size)

    def tell(self) -> int:
        return self._size

    def patch(self, offset: int, data: Buffer) -> None:
        view = flat(data)
        if not 0 <= offset <= self._size - len(view):
            raise ValueError(f"cannot patch bytes {offset} to {offset + len(view)} of {self._key!r}: only {self._size} were written")
        if offset + len(view) > self._written:
            self.flush()
        while view:
            count = self._pwritev([view], offset)
            view = view[count:]
            offset += count

    def close(self) -> int:
        if not self._closed:
            file = self._require_open()
            try:
                self._drain(self._size)
                with self._store._mutating("fsync", self._key, self._staged):
                    _sync(file)
                found = os.fstat(file).st_size
                if found != self._size:
                    raise StoreError(
                        f"{self._staged} has {found} bytes of the {self._size} that were written to it: check the disk (dmesg)"
                    )
                self._make_visible(file)
            except BaseException:
                self.abort()
                raise
            self._closed = True
            self._release(remove=self._operation == "link")
        return self._size

    def abort(self) -> None:
        if self._file is not None:
            self._release(remove=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self._file is not None:
            self.close()

    def _require_open(self) -> int:
        if self._file is None:
            raise ValueError(f"the sink of {self._key!r} is closed or was aborted")
        return self._file

    def _release(self, *, remove: bool) -> None:
        file, self._file = self._require_open(), None
        self._pending.clear()
        with suppress(OSError):  # nothing to learn: fsync said whether the bytes are there
            os.close(file)
        if remove:
            # What cannot be removed now is left to `collect_staging`; the key's fate is decided already.
            with suppress(StoreError):
                self._store._unlink(self._staged, self._key, path=self._staged)

    def _drain(self, end: int) -> None:
        """Write what is pending up to the file offset `end`."""
        while self._written < end:
            aligned = self._written - self._written % _WRITE_NBYTES
            count = self._pwritev(self._vector(min(aligned + _WRITE_NBYTES, end) - self._written), self._written)
            self._written += count
            while count:  # a short write leaves the rest pending
                first = self._pending.popleft()
                if count < len(first):
                    self._pending.appendleft(memoryview(first)[count:])
                count -= min(count, len(first))
            if self._written == aligned + _WRITE_NBYTES and _start_writeback is not None and self._file is not None:
                _start_writeback(self._file, aligned, _WRITE_NBYTES, _SYNC_FILE_RANGE_WRITE)

    def _vector(self, nbytes: int) -> list[memoryview]:
        vector = []
        for piece in itertools.islice(self._pending, _VECTOR_COUNT):
            if not nbytes:
                break
            vector.append(memoryview(piece)[:nbytes])
            nbytes -= len(vector[-1])
        return vector

    def _pwritev(self, vector: Sequence[memoryview], offset: int) -> int:
        file = self._require_open()
        asked = sum(map(len, vector))

        def write() -> int:
            with self._store._mutating("write", self._key, self._staged):
                count = os.pwritev(file, vector, offset)
            if not 0 < count <= asked:
                # No sane system says so; a loop that believed it would not end, or leave bytes out.
                raise StoreError(f"cannot write {self._staged}: {count} of {asked} bytes were written, says the file system")
            return count

        try:
            return _patiently(write)
        except BaseException:
            self.abort()
            raise

    def _make_visible(self, file: int) -> None:
        store, key = self._store, self._key
        *parents, name = key.split("/")
        path = store.path(key)
        while True:
            with _translating("open", path), store._directory(parents, made_for=key) as at:
                publish = functools.partial(self._publish_in, at, name, file)
                if not (_patiently(publish) if self._operation == "link" else publish()):
                    continue  # a concurrent `delete` removed the directory, empty
                try:
                    store._sync_directory(at, key, os.path.dirname(path))
                except BaseException:
                    if self._operation == "link":
                        with suppress(StoreError):
                            store._unlink(name, key, at=at)
                    raise
                return

    def _publish_in(self, at: int, name: str, file: int) -> bool:
        """Give the staged file its name in a directory; False where that directory is gone."""
        path = self._store.path(self._key)
        with self._store._mutating(self._operation, self._key, path):
            try:
                self._publish(self._staged, name, dst_dir_fd=at)
            except FileNotFoundError:
                if not os.path.exists(self._staged):
                    raise
                return False
            except FileExistsError:
                # A second link: ours was made and the answer lost (NFS repeats the request).
                if os.fstat(file).st_nlink < 2:
                    raise ConflictError(f"{path} exists already: another process created it, and it is never overwritten") from None
        return True


class _Reader:
    """A descriptor that closes when nobody holds it any more: threads may still read from one that the cache dropped."""

    __slots__ = ("descriptor", "mode", "modified_s", "nbytes")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        found = os.fstat(descriptor)
        self.mode, self.nbytes, self.modified_s = found.st_mode, found.st_size, found.st_mtime

    def __del__(self) -> None:
        os.close(self.descriptor)

    def is_unlinked(self) -> bool:
        """Whether the file was deleted or replaced after it was opened."""
        try:
            return os.fstat(self.descriptor).st_nlink == 0
        except OSError:
            return True  # ESTALE, on a network file system.


def _patiently(attempt: Callable[[], T]) -> T:
    """Return what `attempt` does, tried again after errors that pass."""
    for pause_s in _PAUSES_S:
        try:
            return attempt()
        except StoreError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _PASSING:
                raise
        time.sleep(pause_s)
    return attempt()


class _translating:
    """Within it an OSError becomes a StoreError. No `contextmanager`: `log` reads thousands of small files."""

    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: str) -> None:
        self._operation, self._path = operation, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            operation, path = self._operation, self._path
            raise StoreError(f"cannot {operation} {path}: {error.strerror or error}. {_remedy(operation, path, error)}") from error


def _remedy(operation: str, path: str, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _free_nbytes(path)
        return (
            f"Free space (or raise the quota) for {os.path.dirname(path)}: {'unknown' if free is None else free} bytes are free there;"
            " `syckpt retain` writes some 10 kB before it frees any: without these, `syckpt gc` or removing another file comes first"
        )
    if operation == "link" and error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
        return "The file system has no hard links, by which syckpt publishes files atomically: put the repository on one that has"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Check its owner and permissions, and whether it is mounted read-only"
    return "Check the disk or its mount (dmesg, quota, limits), then try again"


def _free_nbytes(path: str) -> int | None:
    while not os.path.exists(path):  # not made yet
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _open_at(at: int, name: str, path: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode):
            raise _link_refused(path) from error
        raise


def _link_refused(path: str) -> IntegrityError:
    return IntegrityError(f"{path} is a symbolic link, which could lead out of the repository: put the real file or directory there")


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":
        # There fsync stops at the drive's cache.
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise  # those three: a network file system, which has fsync alone
    os.fsync(descriptor)


_SYNC_FILE_RANGE_WRITE = 2


def _find_start_writeback() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's sync_file_range where libc has it: a hint to begin writing, so that the later fsync finds little to do."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_start_writeback = _find_start_writeback()
