"""Stores: a flat map from keys to bytes (FORMAT.md, section 1), and how a store is named to another process.

| operation | key absent | key present | directory missing | killed in the middle |
|---|---|---|---|---|
| `get`, `readinto` | NotFoundError | its bytes; a range beyond the end, or more than `limit`: IntegrityError | as absent | - |
| `size`, `modified_s` | None | bytes; when they were written | as absent | - |
| `create`, `sink` ... `close` | durable on return | ConflictError, old bytes kept | made, durably | key absent or complete, never torn |
| `replace` | durable on return | overwritten | made, durably | old bytes or new ones, never torn |
| `list` | - | sorted | empty list | - |
| `delete` | nothing happens | gone; after a loss of power perhaps back | as absent | present or absent |
| `staging`, `collect_staging` | - | keys are never touched | nothing | as if it had ended there |

`create` and `sink` raise nothing after the key has become durable; if they raise, the key is as it was before. If `replace` raises
StoreError the key holds the old bytes or the new ones. There is no rename and no lock. Every failure of the disk is a StoreError.

Keys are relative, `/`-separated, printable ASCII without backslashes, without empty, `.` or `..` components, and not below `staging/`
(FormatError): the same names on every file system and object store, none of which leads out of the store.
A key is not at once the directory of another: a store may refuse that with StoreError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from syckpt.errors import FormatError, IntegrityError, NotFoundError

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = [
    "MutationHook",
    "Option",
    "Sink",
    "Store",
    "StoreSpec",
    "absent",
    "check_key",
    "check_prefix",
    "check_range",
    "flat",
    "is_key",
    "open_store",
    "parse_root",
    "unobserved",
]

REPOSITORY = ".syckpt"
STAGING = "staging"

MutationHook: TypeAlias = Callable[[str, str], None]
Option: TypeAlias = "str | int | None"


def unobserved(operation: str, key: str) -> None:
    """The default `before_mutation`: nothing happens."""


class Sink(Protocol):
    """A key being created piece by piece; invisible until `close` returns. For one thread.

    As a context manager it closes on a normal exit and aborts on an exception. A sink whose method raised StoreError has aborted.
    """

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append contiguous buffers. They MUST stay unchanged until `flush` or `close` returns: large ones are not copied."""

    def flush(self) -> None:
        """Hand everything written so far to the store, so that the buffers may be reused. Not durable yet."""

    def tell(self) -> int:
        """Return how many bytes were written."""

    def patch(self, offset: int, data: Buffer) -> None:
        """Overwrite bytes written before. Raises: ValueError beyond `tell()`."""

    def close(self) -> int:
        """Publish the key, durably, and return its size; once more: only the size. Raises: ConflictError; ValueError once aborted."""

    def abort(self) -> None:
        """Drop everything. Does nothing once closed or aborted."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Store(Protocol):
    """A map from keys to bytes that behaves as the table above says; usable from several threads.

    `before_mutation(operation, key)` is called before every mutating system call: `mkdir`, `open` (of a new file), `write`, `fsync`,
    `fsync-dir`, `link`, `replace`, `unlink`, `rmdir`. An OSError that it raises is treated as that call's own.
    """

    before_mutation: MutationHook

    def get(self, key: str, *, offset: int = 0, length: int | None = None, limit: int | None = None) -> bytes:
        """Return `length` bytes from `offset`, or all up to the end.

        `limit`: more bytes than that are refused before any memory is taken: how long a key is, is up to whoever can write to the store.
        Raises: NotFoundError, IntegrityError.
        """

    def readinto(self, key: str, buffer: Buffer, *, offset: int = 0) -> None:
        """Fill the writable, contiguous buffer exactly. Raises: NotFoundError, IntegrityError; the buffer's content is then undefined."""

    def size(self, key: str) -> int | None:
        """Return the size in bytes, or None for an absent key."""

    def modified_s(self, key: str) -> float | None:
        """Return when the key's bytes were written, in seconds since the Unix epoch by the store's clock, or None for an absent key."""

    def create(self, key: str, data: Buffer) -> None:
        """Put if absent: atomic, and durable on return. Raises: ConflictError."""

    def replace(self, key: str, data: Buffer) -> None:
        """Put, present or not, atomically: for hints and copies."""

    def sink(self, key: str) -> Sink:
        """Begin a streaming `create`."""

    def list(self, prefix: str = "", *, deep: bool = True) -> list[str]:
        """Return the sorted keys below the directory `prefix` (a trailing `/` is optional; "" for all), `deep`: at any depth."""

    def delete(self, key: str) -> None:
        """Remove the key; an absent one is fine."""

    def staging(self) -> dict[str, int]:
        """Return the unfinished files that no living process owns, by a name that is no key, each with the bytes that go with it."""

    def collect_staging(self) -> dict[str, int]:
        """Remove what `staging` lists, and return it."""

    def free_nbytes(self) -> int | None:
        """Return the bytes that can still be written, or None if nobody knows."""

    def describe(self) -> str:
        """Return the path or URL, for messages."""


_USUAL_KEY = re.compile(r"(?!staging(?:/|$))[A-Za-z0-9_%-][A-Za-z0-9_%.-]*(?:/[A-Za-z0-9_%-][A-Za-z0-9_%.-]*)*")


def is_key(key: str) -> bool:
    """Whether `key` is well-formed."""
    if _USUAL_KEY.fullmatch(key):  # one of the keys of the format: a listing has thousands
        return True
    parts = key.split("/")
    clean = key.isascii() and key.isprintable() and "\\" not in key
    return clean and parts[0] != STAGING and not any(part in ("", ".", "..") for part in parts)


def check_key(key: str) -> None:
    """Raises: FormatError for a malformed key."""
    if not is_key(key):
        raise FormatError(
            f"not a store key: {key!r}; expected relative printable ASCII without empty, '.' or '..' components, outside 'staging/'"
        )


def check_prefix(prefix: str) -> str:
    """Return what every key below the directory `prefix` begins with. Raises: FormatError."""
    directory = prefix.removesuffix("/")
    if not directory:
        return ""
    check_key(directory)
    return f"{directory}/"


def absent(store: Store, key: str) -> NotFoundError:
    """Return the error for an absent key."""
    return NotFoundError(f"no {key!r} in {store.describe()}; list what is there with `syckpt log`, check it with `syckpt verify`")


def check_range(store: Store, key: str, *, size: int, offset: int, length: int | None, limit: int | None = None) -> int:
    """Return the number of bytes to read of a key of `size` bytes. Raises: IntegrityError if they are not there, or beyond the limit."""
    expected = offset if length is None else offset + length
    if expected > size:
        raise IntegrityError(
            f"{key!r} in {store.describe()} is too short: expected at least {expected} bytes, found {size}; "
            "see what else is damaged with `syckpt verify`"
        )
    found = size - offset if length is None else length
    if limit is not None and found > limit:
        raise IntegrityError(
            f"{key!r} in {store.describe()} is too long: expected at most {limit} bytes, found {found}; "
            "see what else is damaged with `syckpt verify`"
        )
    return found


def flat(buffer: Buffer) -> memoryview:
    """Return the bytes of a contiguous buffer, without a copy."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # a view with a zero in its shape cannot be cast


@dataclass(frozen=True)
class StoreSpec:
    """How to open a store, in a form that another process can be told; `options` are pairs, so that a spec is hashable."""

    kind: str
    path: str
    options: tuple[tuple[str, Option], ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """Return a value for JSON."""
        return {"kind": self.kind, "path": self.path, "options": dict(self.options)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> StoreSpec:
        """Invert `to_wire`."""
        return cls(wire["kind"], wire["path"], tuple(wire["options"].items()))


def parse_root(root: str | os.PathLike[str] | StoreSpec) -> StoreSpec:
    """Return the spec of the repository in directory `root`: `root/.syckpt`, or `root` itself if that is its name."""
    if isinstance(root, StoreSpec):
        return root
    path = os.fspath(root)
    if "://" in path:
        raise FormatError(f"no store for {path!r}: expected a directory; this version knows no URLs")
    path = os.path.abspath(path)
    return StoreSpec("local", path if os.path.basename(path) == REPOSITORY else os.path.join(path, REPOSITORY))


def open_store(spec: StoreSpec) -> Store:
    """Open the store of a spec; nothing is created before the first mutation. Raises: FormatError for an unknown kind."""
    # Imported here: they implement this module's protocols.
    if spec.kind == "local":
        from syckpt.stores.local import LocalStore

        return LocalStore(spec.path)
    if spec.kind == "faulty":
        from syckpt.stores.faults import open_faulty

        return open_faulty(spec)
    raise FormatError(f"unknown kind of store {spec.kind!r} for {spec.path}: expected 'local' or 'faulty'; a newer syckpt may know it")
