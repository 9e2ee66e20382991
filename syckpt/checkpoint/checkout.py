"""Files outside of the repository: a commit's tree as a directory, or one file; there whole, or not at all. Torch-free."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from syckpt.checkpoint.tree import File, Tree
from syckpt.errors import ConflictError, StoreError

__all__ = ["checkout", "write_whole"]


def checkout(tree: Tree, directory: str | os.PathLike[str], *, on_file: Callable[[File], None] | None = None) -> None:
    """Write every file of a tree below a directory that does not exist yet, or is empty. `on_file` is told of each that is written.

    Raises: ConflictError for one that holds something, before anything is written; StoreError; as `Tree.write`.
    """
    target = Path(directory).absolute()
    with _translated(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConflictError(f"{target} exists and is not an empty directory: nothing was written; name another one")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
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
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        _sync(target.parent)


def write_whole(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Make a file by `write(file)`, or replace it; folders above it are made. Raises: StoreError; what `write` raises."""
    target = Path(path).absolute()
    with _translated(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            with part.open("xb") as out:
                write(out)
                out.flush()
                os.fsync(out.fileno())
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync(target.parent)


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
