"""A store in the memory of one process, for tests: the semantics of every other, and nothing survives."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from syckpt.errors import ConflictError, StoreError
from syckpt.stores.base import MutationHook, absent, check_key, check_prefix, check_range, flat, unobserved

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = ["MemoryStore"]


class MemoryStore:
    """A `Store` in a dict."""

    def __init__(self, *, before_mutation: MutationHook = unobserved) -> None:
        self.before_mutation = before_mutation
        self._values: dict[str, bytes] = {}
        self._written: dict[str, float] = {}
        # Also for a mere copy of the keys: a garbage collection in the middle lets other threads run.
        self._lock = threading.RLock()

    def get(self, key: str, *, offset: int = 0, length: int | None = None, limit: int | None = None) -> bytes:
        check_key(key)
        value = self._values.get(key)
        if value is None:
            raise absent(self, key)
        return value[offset : offset + check_range(self, key, size=len(value), offset=offset, length=length, limit=limit)]

    def readinto(self, key: str, buffer: Buffer, *, offset: int = 0) -> None:
        view = flat(buffer)
        view[:] = self.get(key, offset=offset, length=len(view))

    def size(self, key: str) -> int | None:
        check_key(key)
        value = self._values.get(key)
        return None if value is None else len(value)

    def modified_s(self, key: str) -> float | None:
        check_key(key)
        return self._written.get(key) if key in self._values else None

    def create(self, key: str, data: Buffer) -> None:
        with self.sink(key) as sink:
            sink.write([data])

    def replace(self, key: str, data: Buffer) -> None:
        check_key(key)
        self._mutate("replace", key)
        with self._lock:
            self._values[key] = flat(data).tobytes()
            self._written[key] = time.time()

    def sink(self, key: str) -> _MemorySink:
        check_key(key)
        return _MemorySink(self, key)

    def list(self, prefix: str = "", *, deep: bool = True) -> list[str]:
        start = check_prefix(prefix)
        with self._lock:
            keys = tuple(self._values)
        return sorted(key for key in keys if key.startswith(start) and (deep or "/" not in key[len(start) :]))

    def delete(self, key: str) -> None:
        check_key(key)
        self._mutate("unlink", key)
        with self._lock:
            self._values.pop(key, None)

    def staging(self) -> dict[str, int]:
        return {}

    def collect_staging(self) -> dict[str, int]:
        return {}

    def free_nbytes(self) -> int | None:
        return None

    def describe(self) -> str:
        return "memory"

    def _mutate(self, operation: str, key: str) -> None:
        try:
            self.before_mutation(operation, key)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot {operation} {key!r} in {self.describe()}: {error.strerror or error}. A test injected this") from error

    def _publish(self, key: str, value: bytes) -> None:
        self._mutate("link", key)
        with self._lock:
            if key in self._values:
                raise ConflictError(f"{key!r} exists already in {self.describe()}: another writer created it, and it is never overwritten")
            self._values[key] = value
            self._written[key] = time.time()


class _MemorySink:
    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store = store
        self._key = key
        store._mutate("open", key)
        self._data: bytearray | None = bytearray()
        self._size: int | None = None

    def write(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._put(self.tell(), flat(buffer))

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return len(self._require_open()) if self._size is None else self._size

    def patch(self, offset: int, data: Buffer) -> None:
        view = flat(data)
        if not 0 <= offset <= self.tell() - len(view):
            raise ValueError(f"cannot patch bytes {offset} to {offset + len(view)} of {self._key!r}: only {self.tell()} were written")
        self._put(offset, view)

    def close(self) -> int:
        if self._size is None:
            value = bytes(self._require_open())
            self._data = None
            self._store._publish(self._key, value)
            self._size = len(value)
        return self._size

    def abort(self) -> None:
        self._data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self._data is not None:
            self.close()

    def _require_open(self) -> bytearray:
        if self._data is None:
            raise ValueError(f"the sink of {self._key!r} is closed or was aborted")
        return self._data

    def _put(self, offset: int, view: memoryview) -> None:
        data = self._require_open()
        try:
            self._store._mutate("write", self._key)
        except BaseException:
            self.abort()
            raise
        data[offset : offset + len(view)] = view
