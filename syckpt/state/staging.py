"""Staging: tensors -> a slot of shared memory that the writer process reads. The caller's thread copies each byte once, nothing more.

A slot is a memory file without a name, so that it goes with its last process and no limit of `/dev/shm` applies; other systems than Linux
use an unlinked file. Slots are reused: touching fresh pages costs six times the copy. Tensors lie in order, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from syckpt.errors import StoreError
from syckpt.objects.box import Box
from syckpt.objects.dtypes import dtype
from syckpt.objects.nodes import KeyPath
from syckpt.state.bits import copy_tensor

__all__ = ["Part", "Slot", "layout"]

_ALIGN = 64
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, eq=False)
class Part:
    """What this rank hands over of one tensor: a box of it (None: the whole) and its values; no `array` where another rank stores them.

    `shape` is the whole tensor's. `local`: the values are this rank's alone. `trainable`: it is a parameter that training changes.
    The array is the live one: copy it before training goes on.
    """

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    array: Any
    local: bool = False
    trainable: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return 0 if self.array is None else prod(self.shape if self.box is None else self.box.sizes) * dtype(self.dtype).itemsize


def layout(parts: Sequence[Part]) -> tuple[list[int | None], int]:
    """Return each part's offset in a slot (None: nothing to copy), and the bytes that the slot needs."""
    offsets: list[int | None] = []
    end = 0
    for part in parts:
        offsets.append(None if part.array is None else end)
        end += -(-part.nbytes // _ALIGN) * _ALIGN
    return offsets, end


def _memory_left() -> int | None:
    """Return the bytes that this process's control group and machine still allow; None where nobody says."""
    left: list[int] = []
    try:
        group = next(line.split("::", 1)[1].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if "::" in line)
        directory = Path("/sys/fs/cgroup") / group.lstrip("/")
        for folder in (directory, *directory.parents):
            if not folder.is_relative_to("/sys/fs/cgroup"):
                break
            limit = folder / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                left.append(int(text) - int((folder / "memory.current").read_text()))
    except (OSError, StopIteration, ValueError):
        left.clear()
    try:
        available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        left.append(int(available.split()[1]) * 1024)
    except (OSError, StopIteration):
        pass
    return min(left, default=None)


def _memory_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("syckpt-slot")
    else:
        fd, path = tempfile.mkstemp(prefix="syckpt-slot-")
        os.unlink(path)
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise StoreError(
            f"no staging memory of {nbytes} bytes: {error.strerror}; it counts as a file: check the limit of file sizes (ulimit -f)"
        ) from error
    return fd


@dataclass
class _Streams:
    """One side stream a CUDA device, so that copies do not queue behind the next step's kernels."""

    by_device: dict[torch.device, Any]

    def of(self, device: torch.device) -> Any:
        if device not in self.by_device:
            self.by_device[device] = torch.cuda.Stream(device)
        return self.by_device[device]


class Slot:
    """Shared memory for one save. `index` names it to the writer; `fd` is what the writer maps."""

    def __init__(self, index: int, nbytes: int) -> None:
        """Allocate at least `nbytes`. Raises: StoreError when the machine or the control group has no room for it."""
        self.index = index
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        left = _memory_left()
        if left is not None and self.nbytes > left:
            raise StoreError(
                f"a staging slot needs {self.nbytes} bytes of memory and {left} are left: give the job more memory,"
                " or save with async_save=False, which needs one slot instead of two"
            )
        self.fd = _memory_file(self.nbytes)
        self._map = mmap.mmap(self.fd, self.nbytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._numpy = np.frombuffer(self._map, dtype=np.uint8)
        self._pinned = False
        self._streams = _Streams({})

    def fill(self, parts: Sequence[Part], offsets: Sequence[int | None]) -> None:
        """Copy every part to its offset; on return the sources may change. Device copies run side by side and are waited for."""
        used: set[torch.device] = set()
        for part, offset in zip(parts, offsets, strict=True):
            if offset is None or part.nbytes == 0:
                continue
            if isinstance(part.array, np.ndarray):
                self._copy_array(part.array, offset, part.nbytes)
            else:
                self._copy_tensor(part.array.detach(), offset, part.nbytes, used)
        for device in used:
            # The optimizer may overwrite the source as soon as we return.
            self._streams.of(device).synchronize()

    def _copy_array(self, array: np.ndarray[Any, Any], offset: int, nbytes: int) -> None:
        target = self._numpy[offset : offset + nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(target, array, casting="no")

    def _copy_tensor(self, tensor: torch.Tensor, offset: int, nbytes: int, used: set[torch.device]) -> None:
        target = self._bytes[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape)
        if tensor.device.type != "cuda":
            copy_tensor(target, tensor)
            return
        self._pin()
        stream = self._streams.of(tensor.device)
        if tensor.device not in used:
            # The values are those that the training stream has written up to now.
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            used.add(tensor.device)
        with torch.cuda.stream(stream):
            copy_tensor(target, tensor, non_blocking=True)
        # Should the caller free the tensor now, its memory must not be handed out before the copy has ended.
        tensor.record_stream(stream)

    def _pin(self) -> None:
        if not self._pinned:
            torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.nbytes, 0)
            self._pinned = True

    def close(self) -> None:
        """Give the memory back. The writer's mapping, if any, keeps its own hold."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        os.close(self.fd)
        del self._bytes, self._numpy
        self._map.close()
