"""Branches and tags: made at a commit, and deleted. Their history stays in their records (FORMAT.md, section 9).

Everything here is one create-only record, so of two callers at once one gets a ConflictError, and a writer that was paused before its
own record never finds a branch under another meaning. Deleting frees the name: a ref of that name that is made later goes on with the
numbers, and whoever held the old one is fenced.
"""

from __future__ import annotations

import logging
import time

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.objects.refs import RefRecord
from syckpt.repo import leases
from syckpt.repo.owner import is_dead
from syckpt.repo.repository import Repository, dropped_error

__all__ = ["create", "delete", "delete_tag", "make_default", "names", "tag", "tags"]

_log = logging.getLogger("syckpt")


def names(repository: Repository) -> list[str]:
    """Return the branches that have a commit, sorted. One whose newest record is damaged is among them."""
    return _names(repository, "heads")


def tags(repository: Repository) -> list[str]:
    """Return the tags, sorted. One whose newest record is damaged is among them."""
    return _names(repository, "tags")


def _names(repository: Repository, kind: str) -> list[str]:
    problems: list[IntegrityError] = []
    found = {name for name, record in repository.refs.heads(kind, problems=problems).items() if record.commit is not None}
    # The slow way only where something is damaged: there a ref counts as long as nothing says that it was deleted.
    damaged = set(repository.refs.names(kind)) - set(repository.refs.heads(kind, problems=[])) if problems else set()
    return sorted(found | damaged)


def create(repository: Repository, name: str, at: Commit, *, run: str) -> RefRecord:
    """Make a branch at a commit, and return its record; durable on return. The file HEAD stays as it is.

    A branch that was opened but never saved to is there to be taken, if nobody holds it.
    Raises: StateError for a bad name; ConflictError for one that a branch or a tag has; NotFoundError for a dropped commit; StoreError.
    """
    ids.check_name(name, what="branch")
    _refuse_if_dropped(at)
    head = repository.refs.head(f"heads/{name}")
    if head is not None and head.commit is not None:
        raise ConflictError(
            f"the branch {name!r} exists already, at {head.commit}: choose another name, or work on it with branch={name!r}"
            f" (`syckpt branch -d {name}` deletes it)"
        )
    if repository.refs.exists(f"tags/{name}"):
        raise ConflictError(f"{name!r} is a tag, which a branch of that name would hide: choose another, or `syckpt tag -d {name}`")
    _refuse_if_held(repository, name)
    if repository.store.size("HEAD") is None:
        # With a second branch nobody could tell any more which one a missing HEAD meant.
        repository.set_head(repository.head_branch())
    record = repository.refs.append(
        f"heads/{name}",
        after=0 if head is None else head.number,
        commit=at.id,
        commit_seal=at.seal,
        previous=None,
        generation=0 if head is None else head.generation,
        run=run,
        reason="create",
    )
    _withdraw_if_dropped(repository, record, generation=record.generation + 1)
    _write_copy(repository, record)
    return record


def make_default(repository: Repository, name: str) -> None:
    """Let the file HEAD name a branch, so that openers begin with it that name none; durable on return. No commit moves.

    Raises: NotFoundError; StoreError.
    """
    _existing(repository, f"heads/{name}", what="branch")
    repository.set_head(name)


def delete(repository: Repository, name: str, *, run: str) -> RefRecord:
    """Delete a branch, and return the record that says so; its `previous` is the commit that was the tip.

    The commits stay as long as something else leads to them, or the reflog window lasts.
    Raises: NotFoundError; ConflictError for HEAD's branch, and for one that a living writer holds; StoreError.
    """
    head = _existing(repository, f"heads/{name}", what="branch")
    if repository.head_branch() == name:
        raise ConflictError(
            f"the branch {name!r} is the one that HEAD names, with which openers begin that name none: choose another first,"
            " with `syckpt branch --default NAME`"
        )
    _refuse_if_held(repository, name)
    # A generation more, as with an opening: a writer that was paused, or begins again, finds that it was overtaken.
    record = _end(repository, head, generation=head.generation + 1, run=run)
    _write_copy(repository, record)
    return record


def tag(repository: Repository, name: str, commit: Commit, *, run: str) -> RefRecord:
    """Name a commit for good, and return the record; durable on return. A tag protects from retention.

    Raises: StateError for a bad name; ConflictError for one that a tag or a branch has (to move a tag, delete it first); NotFoundError
    for a dropped commit; StoreError.
    """
    ids.check_name(name, what="tag")
    _refuse_if_dropped(commit)
    head = repository.refs.head(f"tags/{name}")
    if head is not None and head.commit is not None and not _is_dropped(repository, head.commit):
        raise ConflictError(f"the tag {name!r} exists already and means {head.commit}: choose another, or `syckpt tag -d {name}` first")
    if repository.refs.exists(f"heads/{name}"):
        raise ConflictError(f"{name!r} is a branch, which a revision of that name means: choose another name for the tag")
    record = repository.refs.append(
        f"tags/{name}",
        after=0 if head is None else head.number,
        commit=commit.id,
        commit_seal=commit.seal,
        previous=None if head is None else head.commit,
        generation=commit.generation,
        run=run,
        reason="create",
    )
    _withdraw_if_dropped(repository, record, generation=record.generation)
    return record


def delete_tag(repository: Repository, name: str, *, run: str) -> RefRecord:
    """Delete a tag, and return the record that says so; its `previous` is the commit that it meant.

    Raises: NotFoundError; ConflictError when another was faster; StoreError.
    """
    head = _existing(repository, f"tags/{name}", what="tag")
    return _end(repository, head, generation=head.generation, run=run)


def _write_copy(repository: Repository, record: RefRecord) -> None:
    try:
        repository.refs.write_copy(record)
    except StoreError as exc:
        # The record is there, and the copy is only for people: it may lag.
        _log.warning("%s has moved, but its copy for people could not be written: %s", record.ref, exc)


def _end(repository: Repository, head: RefRecord, *, generation: int, run: str) -> RefRecord:
    return repository.refs.append(
        head.ref,
        after=head.number,
        commit=None,
        commit_seal=None,
        previous=head.commit,
        generation=generation,
        run=run,
        reason="delete",
    )


def _withdraw_if_dropped(repository: Repository, record: RefRecord, *, generation: int) -> None:
    """Raises: NotFoundError when retention marked the commit before it could see the record (FORMAT.md, section 13)."""
    assert record.commit is not None
    if _is_dropped(repository, record.commit):
        _end(repository, record, generation=generation, run=record.run)
        raise dropped_error(record.commit)


def _existing(repository: Repository, ref: str, *, what: str) -> RefRecord:
    kind, _, name = ref.partition("/")
    head = repository.refs.head(ref) if ids.is_name(name) else None
    if head is None or head.deleted:
        others = ", ".join(repository.refs.names(kind)[:8]) or "none"
        raise NotFoundError(f"no {what} {name!r} in {repository.store.describe()}; there are: {others}")
    return head


def _refuse_if_dropped(commit: Commit) -> None:
    if commit.dropped:
        raise dropped_error(commit.id)


def _is_dropped(repository: Repository, commit: str) -> bool:
    return "dropped" in repository.marks(commit)


def _refuse_if_held(repository: Repository, branch: str) -> None:
    """Raises: ConflictError naming a process that lives, or that nobody here knows to be dead while its lease runs."""
    lease = leases.read(repository, branch)
    if lease is None:
        return
    dead = is_dead(lease.trainer)
    if dead is None and lease.expires_ns <= time.time_ns():
        return
    holder = lease.trainer
    if dead is True:
        if lease.writer is None or is_dead(lease.writer) is not False:
            return
        holder = lease.writer
    raise ConflictError(
        f"branch {branch!r} is being written by {holder} (run {lease.run}, generation {lease.generation}): stop it first, or wait until"
        " its last save is through"
    )
