"""Files outside of the repository: a commit's tree as a directory, or one file; there whole, or not at all. Torch-free."""

from __future__ import annotations

import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from syckpt.checkpoint.tree import File, Tree
from syckpt.errors import ConflictError, StoreError, SyckptError
from syckpt.stores.base import REPOSITORY

__all__ = ["checkout", "write_whole"]


def checkout(tree: Tree, directory: str | os.PathLike[str], *, on_file: Callable[[File], None] | None = None) -> None:
    """Write every file of a tree below a directory that does not exist yet, or is empty. `on_file` is told of each that is written.

    A new directory appears whole; one that was there stays the one that it is (somebody may stand in it, or have given it rights), and its
    files appear when all are written.
    Raises: ConflictError for one that holds something, before anything is written; StoreError; as `Tree.write`.
    """
    target = _resolved(directory)
    with _translated(target):
        exists = target.exists()
        if exists and (not target.is_dir() or any(target.iterdir())):
            raise ConflictError(f"{target} exists and is not an empty directory: nothing was written; name another one")
        if not exists:
            target.parent.mkdir(parents=True, exist_ok=True)
        part = _beside(target / "part" if exists else target)
        try:
            part.mkdir()
            for file in tree.files():
                path = part / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as out:
                    tree.write(file.path, out)
                    out.flush()
                    os.fsync(out.fileno())
                if on_file is not None:
                    on_file(file)
            for folder in (*(path for path in part.rglob("*") if path.is_dir()), part):
                _sync(folder)
            if exists:
                _move_out(part)
            else:
                part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        _sync(target if exists else target.parent)


def _move_out(part: Path) -> None:
    """Move what is in a directory to where it stands itself, all of it or nothing, and remove it."""
    moved: list[Path] = []
    try:
        for path in sorted(part.iterdir()):
            path.rename(part.parent / path.name)
            moved.append(part.parent / path.name)
    except BaseException:
        for path in moved:
            path.rename(part / path.name)
        raise
    part.rmdir()


def write_whole(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Make a file by `write(file)`, or replace it; folders above it are made, and a symbolic link stays one.

    Raises: ConflictError for what is no file (a directory, a device); StoreError; what `write` raises.
    """
    target = _resolved(path)
    with _translated(target):
        if target.exists() and not target.is_file():
            raise ConflictError(f"{target} exists and is not a regular file: nothing was written; name another one")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = _beside(target)
        try:
            with _Target(io.FileIO(part, "xb")) as out:
                try:
                    write(out)
                except Exception as exc:
                    if out.error is None or isinstance(exc, OSError | SyckptError):
                        raise
                    raise out.error from exc
                out.flush()
                os.fsync(out.fileno())
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync(target.parent)


class _Target(io.BufferedWriter):
    """A file that remembers what the disk refused: `torch.save` says nothing of it."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            self.error = exc
            raise


def _resolved(path: str | os.PathLike[str]) -> Path:
    """Return where a path leads. Raises: ConflictError for a place inside of a repository."""
    target = Path(os.path.realpath(path))
    if REPOSITORY in target.parts:
        raise ConflictError(f"{target} is inside of a repository, whose files are its own: nothing was written; name another place")
    return target


def _beside(target: Path) -> Path:
    """Return a name for what is not complete, which is short whatever the target's is."""
    return target.with_name(f".syckpt-{secrets.token_hex(8)}.part")


@contextmanager
def _translated(target: Path) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as exc:
        raise StoreError(f"{target} cannot be written: {exc}") from exc


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
