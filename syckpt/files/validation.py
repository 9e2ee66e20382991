"""Is a checkpoint whole? For an experiment, a named commit, or a standalone file. Free of torch; errors are returned, not raised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from syckpt.errors import NotFoundError, StateError, SyckptError
from syckpt.files.archive import Archive
from syckpt.repo import history
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import REPOSITORY, parse_root

__all__ = ["validate_checkpoint"]


def validate_checkpoint(path: str | os.PathLike[str], rev: str | None = None) -> tuple[bool, list[str]]:
    """Read and check every byte of a checkpoint, and return whether it is whole, and what is wrong with it.

    `path` is an experiment's directory (the tip of every branch is checked, or `rev`), `DIR/NAME` for the commit of that name in the
    experiment `DIR`, or a file of `save_checkpoint` or `CheckpointWriter`. What is not there, or not of syckpt, is not whole.
    """
    try:
        errors = list(_findings(Path(os.path.abspath(os.fsdecode(path))), rev))
    except (SyckptError, OSError) as exc:  # The system's own for a name that is too long, or a folder that may not be read.
        errors = [str(exc)]
    return not errors, errors


def _findings(path: Path, rev: str | None) -> Iterator[str]:
    if path.name == REPOSITORY or (path / REPOSITORY).is_dir():
        yield from _experiment(path, rev)
    elif path.exists():
        if rev is not None:
            raise StateError(f"{path} is no experiment, so that rev={rev!r} means nothing there: expected a directory with {REPOSITORY}")
        with Archive(path) as archive:
            yield from archive.findings()
    else:
        root = next((folder for folder in path.parents if (folder / REPOSITORY).is_dir()), None)
        if root is None:
            raise NotFoundError(f"{path}: there is no such file or experiment, and no {REPOSITORY} above it")
        if rev is not None:
            raise StateError(f"{path} names a commit already, so that rev={rev!r} means nothing: give the directory {root}")
        yield from _named(root, path.relative_to(root).as_posix())


def _experiment(root: Path, rev: str | None) -> Iterator[str]:
    repository = Repository.open(parse_root(root))
    if rev is not None:
        yield from _commit(repository, history.resolve(repository, rev).id)
        return
    tips: set[str] = set()
    damaged = False
    for branch in repository.refs.names("heads"):
        try:
            tips.add(history.tip(repository, branch).id)
        except NotFoundError:
            continue  # Opened, but never saved to; or deleted.
        except SyckptError as exc:
            damaged = True
            yield str(exc)
    for tip in sorted(tips):
        yield from _commit(repository, tip)
    if not tips and not damaged:
        raise NotFoundError(f"{repository.store.describe()} holds no commit")


def _named(root: Path, name: str) -> Iterator[str]:
    repository = Repository.open(parse_root(root))
    record = repository.refs.head(f"names/{name}")
    if record is None or record.commit is None:
        raise NotFoundError(f"{repository.store.describe()} has no commit of the name {name!r}")
    repository.read_commit(record.commit, seal=record.commit_seal)
    yield from _commit(repository, record.commit)


def _commit(repository: Repository, commit: str) -> Iterator[str]:
    yield from verify(repository, commit).errors
