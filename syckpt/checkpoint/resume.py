"""What to resume from: the newest commit of a branch that is whole."""

from __future__ import annotations

import logging

from syckpt.errors import IntegrityError, NotFoundError, StoreError
from syckpt.objects.commit import Commit
from syckpt.repo.keys import mark_key
from syckpt.repo.repository import Repository
from syckpt.repo.signing import Trusted, require_signed
from syckpt.repo.transaction import newest_readable

__all__ = ["WAYS_ON", "newest_whole", "share"]

_log = logging.getLogger("syckpt")


WAYS_ON = (
    "`syckpt verify` says what is damaged: put those files back from a copy, or begin anew with auto_resume=False or run_mode='overwrite',"
    " or on another branch=..."
)


def newest_whole(repository: Repository, branch: str, *, trusted: Trusted | None = None, readers: int = 1) -> Commit | None:
    """Return the newest commit of a branch whose structure is whole; None for a branch without commits.

    Goes back along parents, and where a commit cannot be read, along the branch's records. Every one that is passed over is logged, and
    marked damaged so that the next restart does not try it again. With `trusted`, one of these keys must have signed it; a commit that is
    whole but not signed is not passed over: going on from an older one is what an attacker might want. Of several `readers` this one is
    the first, and checks its `share` alone; the others are to check theirs.
    Raises: IntegrityError when there are commits but none is whole, or the one found is not signed.
    """
    record, damage = newest_readable(repository, branch)
    if not damage:
        damage = _lost(repository, branch)
    for text in damage:
        _log.error("%s; going on from the record before it", text)
    if record is None or record.commit is None:
        if damage:
            raise IntegrityError(f"branch {branch!r} has no readable commit: {damage[0]}")
        return None
    tried: list[str] = []
    number = record.number
    commit_id, seal = record.commit, record.commit_seal
    while True:
        commit: Commit | None = None
        try:
            commit = repository.read_commit(commit_id, seal=seal)
            if commit.damaged:
                raise IntegrityError(f"commit {commit_id} was found damaged before: {_why(repository, commit_id)}")
            repository.check_whole(commit, ranks=share(commit, 0, readers))
        except (IntegrityError, NotFoundError) as exc:
            _log.error("commit %s cannot be resumed from: %s", commit_id, exc)
            tried.append(f"{commit_id}: {exc}")
            _mark(repository, commit_id, str(exc), already=commit is not None and (commit.damaged or commit.dropped))
        else:
            if trusted is not None:
                require_signed(repository, commit, trusted)
            return commit
        if commit is not None and commit.parents:
            commit_id, seal = commit.parents[0], commit.parent_seals[0]
            continue
        older = _record_before(repository, branch, number, {text.partition(":")[0] for text in tried}) if commit is None else None
        if older is None:
            newest = "; ".join(tried[:2]) + (f"; and {len(tried) - 2} more" if len(tried) > 2 else "")
            raise IntegrityError(f"branch {branch!r} has no whole commit left ({newest}); {WAYS_ON}")
        number, commit_id, seal = older


def share(commit: Commit, reader: int, readers: int) -> range:
    """Return the ranks of whose part of a commit a reader checks that it is whole: each part has one of the readers."""
    return range(reader, commit.world_size, readers)


def _lost(repository: Repository, branch: str) -> list[str]:
    """Return what shows that records after the newest one were lost: the copy for people may name a later commit."""
    try:
        repository.refs.head(f"heads/{branch}")
    except IntegrityError as exc:
        return [str(exc)]
    return []


def _why(repository: Repository, commit: str) -> str:
    key, why = mark_key(commit, "damaged"), repository.why(commit, "damaged")
    if why is None:
        return f"{key} does not say why"
    return f"{key} says {why}; `syckpt verify {commit}` removes that mark if it finds the commit whole again"


def _mark(repository: Repository, commit: str, why: str, *, already: bool) -> None:
    if already:
        return
    try:
        repository.mark(commit, "damaged", why=why)
    except StoreError as exc:
        _log.warning("commit %s could not be marked as damaged: %s", commit, exc)


def _record_before(repository: Repository, branch: str, number: int, tried: set[str]) -> tuple[int, str, str | None] | None:
    """Return number, commit and seal of the newest older record of another commit."""
    ref = f"heads/{branch}"
    for older in reversed([n for n in repository.refs.numbers(ref) if n < number]):
        try:
            record = repository.refs.read(ref, older)
        except IntegrityError:
            continue
        if record.commit is not None and record.commit not in tried:
            return older, record.commit, record.commit_seal
    return None
