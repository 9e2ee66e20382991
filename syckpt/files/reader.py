"""Reading a standalone file: tensors by name, each byte checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from syckpt.errors import FormatError, IntegrityError, StateError
from syckpt.files.archive import Archive
from syckpt.files.header import Record
from syckpt.repo.signing import KeyFile, load_trusted

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CheckpointReader"]


class CheckpointReader:
    """Reads a file of `CheckpointWriter` or `save_checkpoint`: the header when it is made, tensors when they are asked for.

        with CheckpointReader("model.ckpt") as reader:
            weight = reader["weight"]

    `trusted_keys`: paths of public keys, one of which must have signed the file. Not for several threads at once.
    """

    def __init__(self, path: str | os.PathLike[str], trusted_keys: KeyFile | Sequence[KeyFile] | None = None) -> None:
        """Raises: NotFoundError; StateError (a directory; no key that can be used); IntegrityError (damaged, or not signed); StoreError."""
        self.archive = Archive(path, trusted=None if trusted_keys is None else load_trusted(trusted_keys))

    def keys(self) -> list[str]:
        """Return the names in the order in which they were added; further names of the same tensors follow."""
        return list(self.archive.records)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.archive.records)

    def __contains__(self, name: object) -> bool:
        return name in self.archive.records

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor, into the CPU's memory. Raises: NotFoundError, IntegrityError naming the damaged block."""
        record = self.archive.record(name)
        return self._read(record, record.shape, begin=0)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read `tensor[start:stop]`: no more of the file than the blocks that hold these rows.

        Raises: NotFoundError; StateError for rows that the tensor does not have; IntegrityError.
        """
        record = self.archive.record(name)
        if not record.shape or not 0 <= start <= stop <= record.shape[0]:
            raise StateError(f"{self.archive.path}: tensor {name!r} of shape {list(record.shape)} has no rows {start} to {stop}")
        row = record.nbytes // max(1, record.shape[0])
        return self._read(record, (stop - start, *record.shape[1:]), begin=start * row)

    def _read(self, record: Record, shape: tuple[int, ...], *, begin: int) -> torch.Tensor:
        try:
            found = torch.empty(shape, dtype=getattr(torch, record.dtype))
        except AttributeError as exc:
            raise FormatError(f"{self.archive.path}: tensor {record.name!r}: this torch has no {record.dtype}: upgrade it") from exc
        except RuntimeError as exc:
            raise IntegrityError(f"{self.archive.path}: tensor {record.name!r}: torch cannot make it: {exc}") from exc
        if found.numel():
            self.archive.read(record, memoryview(found.reshape(-1).view(torch.uint8).numpy()), begin=begin)
        return found

    def close(self) -> None:
        """Close the file; tensors that were read stay."""
        self.archive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
