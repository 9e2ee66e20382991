"""A standalone file, opened: ranged, verified reads of its bytes. Free of torch.

Each block is checked in a buffer that fits the cache, and only then copied: the target holds old or exact bytes, never wrong ones.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Iterator
from types import TracebackType

from syckpt.errors import IntegrityError, NotFoundError, StateError, StoreError
from syckpt.files.header import MAX_HEADER_NBYTES, Contents, Record, parse
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.repo.signing import Trusted

__all__ = ["Archive"]


class Archive:
    """An open file, whose header is checked. `trusted`: one of these keys must have signed it.

    Raises: NotFoundError; StateError (a directory); IntegrityError (damaged, cut short, no such file, or not signed); StoreError.
    """

    def __init__(self, path: str | os.PathLike[str], *, trusted: Trusted | None = None) -> None:
        self.path = os.path.abspath(os.fsdecode(path))
        self.bytes_read = 0
        """Bytes read of the file so far."""
        self._buffer = bytearray(BLOCK_NBYTES)
        self._fd: int | None = _open(self.path)
        # A reader that is dropped without being closed must not cost a descriptor.
        self._closing = weakref.finalize(self, os.close, self._fd)
        try:
            self.contents, self._begin = self._head(trusted)
        except BaseException:
            self.close()
            raise
        self.records: dict[str, Record] = {record.name: record for record in self.contents.records}
        """By every name, ties included."""
        self.records.update({name: self.records[tied] for name, tied in self.contents.ties})

    def _head(self, trusted: Trusted | None) -> tuple[Contents, int]:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        begin = 8 + int.from_bytes(self._read(0, 8), "little") if size >= 8 else 0
        if not 8 <= begin <= min(size, 8 + MAX_HEADER_NBYTES):
            raise IntegrityError(
                f"{self.path}: is no file of CheckpointWriter, or cut short: {size} bytes, with a header of {max(0, begin - 8)}"
            )
        contents, signature = parse(self._read(0, begin), where=self.path)
        if size != begin + contents.nbytes:
            raise IntegrityError(f"{self.path}: expected {begin + contents.nbytes} bytes, found {size}: it was cut short, or added to")
        if trusted is not None:
            found = "none: it is unsigned" if signature is None else signature[0]
            if signature is None or signature[0] not in trusted.keys:
                raise IntegrityError(f"{self.path} is not to be trusted: expected a signature by key(s) {trusted}, found {found}")
            if not trusted.fits(signature[0], contents.message, signature[1]):
                raise IntegrityError(
                    f"{self.path} is not to be trusted: key {found} did not sign this content; it was changed after signing"
                )
        return contents, begin

    def _read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self._readinto(memoryview(data), offset)
        return bytes(data)

    def _readinto(self, view: memoryview, offset: int) -> None:
        if self._fd is None:
            raise StateError(f"{self.path}: the reader is closed; open another")
        length, done = len(view), 0
        try:
            while done < length and (got := os.preadv(self._fd, [view[done:]], offset + done)):
                done += got
        except OSError as exc:
            raise StoreError(f"{self.path} cannot be read: {exc.strerror or exc}") from exc
        self.bytes_read += done
        if done < length:
            raise IntegrityError(f"{self.path}: ends at byte {offset + done}, where {length - done} more are expected: it was cut short")

    def record(self, name: str) -> Record:
        """Return the tensor of that name. Raises: NotFoundError."""
        if name not in self.records:
            known = ", ".join(map(repr, list(self.records)[:5]))
            raise NotFoundError(f"{self.path}: no tensor {name!r}; it holds {len(self.records)}: {known}{', ..' * (len(self.records) > 5)}")
        return self.records[name]

    def block(self, record: Record, index: int) -> memoryview:
        """Return the bytes of a block, checked; valid until the next call. Raises: IntegrityError."""
        offset = index * BLOCK_NBYTES
        view = memoryview(self._buffer)[: min(BLOCK_NBYTES, record.nbytes - offset)]
        self._readinto(view, self._begin + record.begin + offset)
        if not record.digests_to(index, view):
            raise IntegrityError(f"{self.path}: tensor {record.name!r}: block {index} (bytes {offset} to {offset + len(view)}) is damaged")
        return view

    def read(self, record: Record, target: memoryview, *, begin: int = 0) -> None:
        """Fill the target with a tensor's bytes from `begin` on, reading the blocks that hold them. Raises: IntegrityError."""
        end, at = begin + len(target), begin
        while at < end:
            index = at // BLOCK_NBYTES
            block = self.block(record, index)[at - index * BLOCK_NBYTES :]
            part = block[: end - at]
            target[at - begin : at - begin + len(part)] = part
            at += len(part)

    def findings(self) -> Iterator[str]:
        """Read everything and yield what is damaged."""
        for record in self.contents.records:
            for index in range(record.blocks):
                try:
                    self.block(record, index)
                except IntegrityError as exc:
                    yield str(exc)

    def close(self) -> None:
        """Close the file; once more is fine."""
        self._fd = None
        self._closing()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _open(path: str) -> int:
    try:
        # Looked at first: opening a pipe would wait for whoever writes to it.
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError, ValueError) as exc:  # The last for a null character.
        raise NotFoundError(f"{path!r}: there is no such file" if "\0" in path else f"{path}: there is no such file") from exc
    except OSError as exc:
        raise StoreError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
    raise StateError(f"{path} is {what}: expected a file of CheckpointWriter or save_checkpoint; experiments are read by syckpt.load")
