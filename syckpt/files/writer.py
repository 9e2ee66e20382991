"""Writing a standalone file, tensor by tensor, in one pass over the data.

The header comes first in the file and is known last. So the first bytes wait in memory: a small file is written at once, a larger one
behind a gap. Should the gap turn out too small, the data is copied once more.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from syckpt.errors import NotFoundError, StateError, StoreError, SyckptError
from syckpt.files.header import Contents, Record, render
from syckpt.objects import address as addresses
from syckpt.objects.address import BLOCK_NBYTES
from syckpt.repo.signing import KeyFile, Signer
from syckpt.state.bits import CARRIERS
from syckpt.state.flatten import dtype_name, is_sharded, refuse_tensor

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CheckpointWriter"]

_EARLY_NBYTES = 4 << 20
_GAP_NBYTES = 1 << 20


class CheckpointWriter:
    """Writes one file of named tensors, which any tool that reads safetensors opens; `signer` is the path of a private key.

        with CheckpointWriter("model.ckpt") as writer:
            writer.add("weight", model.weight)

    The file appears when the block ends, whole and durable, in place of an older one; on an exception nothing is left behind.
    """

    def __init__(self, path: str | os.PathLike[str], signer: KeyFile | None = None) -> None:
        """Raises: StateError (no regular file; a key that cannot be used); NotFoundError (no such directory, or key); StoreError."""
        # A symbolic link stays one.
        text = os.fsdecode(path)
        if "\0" in text:
            raise StateError(f"{text!r} cannot be the path of a file")
        self._path = os.path.realpath(text)
        self._signer = None if signer is None else Signer.open(signer)
        if os.path.isdir(self._path):
            raise StateError(f"{self._path} is a directory: name a file in it")
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            # Renaming would put a file in the place of a device.
            raise StateError(f"{self._path} exists and is not a regular file: name another one")
        self._records: dict[str, Record] = {}
        self._ties: dict[str, str] = {}
        self._end = 0
        self._early: bytearray | None = bytearray()
        self._ended: str | None = None
        self._part = _beside(self._path)
        self._fd = _create(self._part)
        self._pid = os.getpid()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor; it may change once this returns. Raises: StateError (the name is taken; it cannot be carried); StoreError."""
        self._check(name)
        if not isinstance(tensor, torch.Tensor):
            raise StateError(f"{name!r}: expected a tensor, found {type(tensor).__name__}; only tensors go into such a file")
        if is_sharded(tensor):
            raise StateError(
                f"{name!r} is a DTensor, of which this rank holds a part: add tensor.full_tensor(), or use a CheckpointManager"
            )
        why = refuse_tensor(tensor)
        if why is not None:
            raise StateError(f"{name!r}: {why}")
        plain, kind = tensor.detach(), dtype_name(tensor.dtype)
        try:
            data = _memory(plain)
            leaves = bytearray()
            for begin in range(0, len(data), BLOCK_NBYTES):
                block = data[begin : begin + BLOCK_NBYTES]
                leaves += addresses.leaf(block)
                self._write(block)
        except BaseException:
            # Part of it may be in the file.
            self.abort()
            raise
        shape = tuple(int(size) for size in plain.shape)
        address = addresses.address(kind, shape, bytes(leaves))
        several = len(leaves) > addresses.LEAF_NBYTES
        self._records[name] = Record(name, kind, shape, address, bytes(leaves) if several else b"", self._end)
        self._end += len(data)

    def tie(self, name: str, tied: str) -> None:
        """Add a further name of a tensor that was added before, which is stored once. Raises: StateError."""
        self._check(name)
        if tied not in self._records:
            raise StateError(f"{name!r} cannot be tied to {tied!r}, which was not added")
        self._ties[name] = tied

    def _check(self, name: str) -> None:
        if self._ended is not None:
            raise StateError(f"{self._path}: the writer was {self._ended}; make another")
        if not isinstance(name, str) or name == "__metadata__" or _is_broken(name):
            raise StateError(f"{name!r} cannot name a tensor: expected a text of whole characters, and not '__metadata__'")
        if name in self._records or name in self._ties:
            raise StateError(f"{self._path}: there is a tensor {name!r} already; each needs a name of its own")

    def _write(self, data: memoryview) -> None:
        if self._early is not None and len(self._early) + len(data) <= _EARLY_NBYTES:
            self._early += data
            return
        if self._early is not None:
            early, self._early = self._early, None
            _put(self._fd, memoryview(early), at=_GAP_NBYTES, path=self._path)
            os.lseek(self._fd, _GAP_NBYTES + len(early), os.SEEK_SET)
        _put(self._fd, data, at=None, path=self._path)

    def close(self) -> None:
        """Complete the file and make it visible, durably; once more is fine. Raises: StateError once aborted; StoreError."""
        if self._ended == "closed":
            return
        if self._ended is not None:
            raise StateError(f"{self._path}: the writer was {self._ended}; make another")
        try:
            self._complete()
            os.fsync(self._fd)
            os.replace(self._part, self._path)
        except OSError as exc:
            self.abort()
            if isinstance(exc, SyckptError):
                raise
            raise StoreError(f"{self._path} cannot be written: {exc.strerror or exc}") from exc
        except BaseException:
            self.abort()
            raise
        self._ended = "closed"
        os.close(self._fd)
        _sync_directory(os.path.dirname(self._path))

    def _complete(self) -> None:
        """Put the header in front of the data."""
        contents = Contents(tuple(self._records.values()), tuple(sorted(self._ties.items())))
        signature = None if self._signer is None else (self._signer.key_id, self._signer.sign(contents.message))
        head = render(contents, signature)
        if self._early is not None:
            _put(self._fd, memoryview(head + self._early), at=0, path=self._path)
        elif len(head) <= _GAP_NBYTES:
            _put(self._fd, memoryview(render(contents, signature, nbytes=_GAP_NBYTES)), at=0, path=self._path)
        else:
            self._shift(head)

    def _shift(self, head: bytes) -> None:
        """Write the file anew behind a header that the gap is too small for."""
        part = _beside(self._path)
        fd = _create(part)
        old, self._fd = self._fd, fd
        old_part, self._part = self._part, part
        try:
            with os.fdopen(old, "rb") as source, os.fdopen(os.dup(fd), "wb") as target:
                target.write(head)
                source.seek(_GAP_NBYTES)
                shutil.copyfileobj(source, target, BLOCK_NBYTES)
        finally:
            os.unlink(old_part)

    def abort(self) -> None:
        """Drop everything; does nothing once closed or aborted."""
        if self._ended is None:
            self._ended = "aborted"
            os.close(self._fd)
            with suppress(FileNotFoundError):  # Somebody tidied up: the exception that led here is what counts.
                os.unlink(self._part)

    def __del__(self) -> None:
        # Dropped without being closed: as an exception. A forked child has a copy only, and one that was refused has no file.
        if getattr(self, "_pid", None) == os.getpid():
            self.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _is_broken(name: str) -> bool:
    """Whether a name has half characters (lone surrogates), which JSON readers refuse."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a plain tensor's elements, little-endian in C order; shares its memory where it can."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        if plain.numel() == 0:
            return memoryview(b"")
        # As integers: torch cannot copy elements of every dtype.
        bits = plain.view(CARRIERS[plain.element_size()]).cpu().contiguous()
        return memoryview(bits.reshape(-1).view(torch.uint8).numpy())


def _beside(path: str) -> str:
    return os.path.join(os.path.dirname(path), f".syckpt-{secrets.token_hex(8)}.part")


def _create(part: str) -> int:
    try:
        return os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NotFoundError(f"{os.path.dirname(part)} is not a directory: make it first") from exc
    except OSError as exc:
        raise StoreError(f"nothing can be written in {os.path.dirname(part)}: {exc.strerror or exc}") from exc


def _put(fd: int, data: memoryview, *, at: int | None, path: str) -> None:
    """Write all of the data at an offset, or behind what was written last."""
    done = 0
    try:
        while done < len(data):
            done += os.write(fd, data[done:]) if at is None else os.pwrite(fd, data[done:], at + done)
    except OSError as exc:
        raise StoreError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def _sync_directory(directory: str) -> None:
    try:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise StoreError(
            f"{directory} cannot be synced, so that a new file in it may not outlive a loss of power: {exc.strerror or exc}"
        ) from exc
