"""History: revisions -> commits, and the way back through parents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import count

from syckpt.errors import IntegrityError, NotFoundError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.objects.refs import RefRecord
from syckpt.repo.keys import commit_key, intent_key
from syckpt.repo.repository import Repository

__all__ = [
    "all_tips",
    "best",
    "commit_ids",
    "is_move",
    "is_published",
    "log",
    "reachable",
    "reflog",
    "resolve",
    "tip",
    "walk",
    "without_metric",
]

_FEW = 16
"""Commits whose marks are looked up one by one; on a longer way one listing is cheaper."""
_SUFFIX = re.compile(r"~(\d{0,15})(?!\d)|@\{(\d{1,15})\}", re.ASCII)


def _commit_of(repository: Repository, record: RefRecord | None, *, what: str) -> Commit:
    if record is not None and record.deleted:
        raise NotFoundError(f"{what} was deleted in {repository.store.describe()}; its last commit was {record.previous}")
    if record is None or record.commit is None:
        raise NotFoundError(f"{what} has no commit yet in {repository.store.describe()}")
    try:
        return repository.read_commit(record.commit, seal=record.commit_seal)
    except NotFoundError as exc:
        raise IntegrityError(
            f"{commit_key(record.commit)}: missing, though {repository.refs.key(record.ref, record.number)} names it"
        ) from exc


def tip(repository: Repository, branch: str) -> Commit:
    """Return a branch's newest commit. Raises: NotFoundError, IntegrityError."""
    return _commit_of(repository, repository.refs.head(f"heads/{branch}"), what=f"branch {branch!r}")


def all_tips(repository: Repository) -> dict[str, Commit]:
    """Return the tips of all branches that have a commit."""
    records = repository.refs.heads("heads")
    return {name: _commit_of(repository, record, what=f"branch {name!r}") for name, record in records.items() if record.commit is not None}


def walk(repository: Repository, commit: Commit) -> Iterator[Commit]:
    """Yield a commit and its ancestors along first parents, newest first. Raises: IntegrityError (a record is gone or damaged)."""
    yield commit
    marks = None
    for number in count(1):
        if not commit.parents:
            return
        if number == _FEW:
            marks = repository.all_marks()
        try:
            commit = repository.read_commit(commit.parents[0], seal=commit.parent_seals[0], marks=marks)
        except NotFoundError as exc:
            raise IntegrityError(f"{commit_key(commit.parents[0])}: missing, though its child {commit.id} names it") from exc
        yield commit


def log(repository: Repository, rev: str = "HEAD", *, count: int | None = None, branch: str | None = None) -> list[Commit]:
    """Return up to `count` commits from a revision back; empty for a HEAD without commits."""
    try:
        newest = resolve(repository, rev, branch=branch)
    except NotFoundError:
        if rev == "HEAD":
            return []
        raise
    found: list[Commit] = []
    for commit in walk(repository, newest):
        if count is not None and len(found) >= count:
            break
        found.append(commit)
    return found


def reachable(repository: Repository, tips: Mapping[str, str | None], *, problems: list[IntegrityError] | None = None) -> dict[str, Commit]:
    """Return every commit that these lead to (id, and its seal where it is known), by id, in no order.

    Raises: IntegrityError where a record is gone or damaged; with `problems` that line of ancestors ends there, and the error is added.
    """
    found: dict[str, Commit] = {}
    for tip_id, seal in tips.items():
        try:
            for commit in walk(repository, _named_by_a_ref(repository, tip_id, seal)):
                if commit.id in found:
                    break
                found[commit.id] = commit
        except IntegrityError as exc:
            if problems is None:
                raise
            problems.append(exc)
    return found


def _named_by_a_ref(repository: Repository, commit: str, seal: str | None) -> Commit:
    try:
        return repository.read_commit(commit, seal=seal)
    except NotFoundError as exc:
        raise IntegrityError(f"{commit_key(commit)}: missing, though a ref names it; run `syckpt verify`") from exc


def commit_ids(repository: Repository) -> list[str]:
    """Return the ids of all commit records, published or not, sorted."""
    names = (
        key.removeprefix("objects/").removesuffix(".json") for key in repository.store.list("objects/", deep=False) if key.endswith(".json")
    )
    return [name for name in names if ids.is_commit_id(name)]


def best(commits: list[Commit], *, maximize: bool = False) -> Commit | None:
    """Return the commit with the best metric: NaN is never best, of equals the newest."""
    scored = [c for c in commits if c.metric is not None and not math.isnan(c.metric) and not c.dropped]
    sign = 1 if maximize else -1
    return max(scored, key=lambda c: (sign * (c.metric or 0.0), c.created_ns), default=None)


def without_metric(commits: list[Commit], rev: str) -> NotFoundError:
    """Return what to raise where `best` finds none among a revision's commits."""
    there = sum(not commit.dropped for commit in commits)
    dropped = f" ({len(commits) - there} more are dropped)" if there < len(commits) else ""
    return NotFoundError(
        f"none of the {there} commit{'' if there == 1 else 's'} of {rev}{dropped} has a metric: give it as save(metric=...)"
    )


def resolve(repository: Repository, rev: str, *, branch: str | None = None, maximize: bool = False) -> Commit:
    """Return the commit that a revision names.

    HEAD (the tip of `branch`, default: of the branch that the file HEAD names), a branch, a tag or name, an id, a unique prefix of an
    id or of its second part, `latest`, `best`; each followed by any number of `~N` (N-th ancestor) and, for branches, `@{N}` (N moves
    ago).
    Raises: NotFoundError (with the candidates when ambiguous), IntegrityError.
    """
    base = re.split(r"[~@]", rev, maxsplit=1)[0]
    suffixes = rev[len(base) :]
    if not base or _SUFFIX.sub("", suffixes):
        raise NotFoundError(f"{rev!r} is not a revision: expected a name or id, then ~N or @{{N}}")
    commit: Commit | None = None
    for match in _SUFFIX.finditer(suffixes):
        if match[2] is not None:
            if commit is not None:
                raise NotFoundError(f"{rev!r}: @{{N}} goes right behind a branch")
            commit = _moves_ago(repository, base, int(match[2]), branch=branch)
            continue
        commit = commit or _named(repository, base, branch=branch, maximize=maximize)
        back = int(match[1] or 1)
        chain = [found for _, found in zip(range(back + 1), walk(repository, commit), strict=False)]
        if len(chain) <= back:
            raise NotFoundError(f"{rev!r}: {commit.id} has only {len(chain) - 1} ancestors")
        commit = chain[back]
    return commit or _named(repository, base, branch=branch, maximize=maximize)


def _branch_of(repository: Repository, base: str, branch: str | None) -> str:
    return (branch or repository.head_branch()) if base == "HEAD" else base


def _moves_ago(repository: Repository, base: str, moves: int, *, branch: str | None) -> Commit:
    name = _branch_of(repository, base, branch)
    if not ids.is_name(name):
        return _missing(repository, base)
    ref = f"heads/{name}"
    seen = 0
    for number in reversed(repository.refs.numbers(ref)):
        record = repository.refs.read(ref, number)
        if not is_move(record):
            continue
        if seen == moves:
            return _commit_of(repository, record, what=f"{name}@{{{moves}}}")
        seen += 1
    raise NotFoundError(f"{name}@{{{moves}}}: the branch has moved only {seen} times")


def is_move(record: RefRecord) -> bool:
    """Whether `@{N}` counts a record: it gave the branch a commit, or took it away. Taking the right to write is no move."""
    return record.deleted or (record.commit is not None and record.reason != "open")


def reflog(repository: Repository, branch: str, *, problems: list[IntegrityError] | None = None) -> list[RefRecord]:
    """Return the records of a branch, deleted or not, newest first.

    Raises: NotFoundError for a branch that never was; IntegrityError for a damaged record, which is left out and added to `problems`
    where that is given.
    """
    ref = f"heads/{branch}"
    numbers = repository.refs.numbers(ref) if ids.is_name(branch) else []
    if not numbers:
        raise NotFoundError(
            f"no branch {branch!r} in {repository.store.describe()}; branches: {', '.join(repository.refs.names('heads')) or 'none'}"
        )
    found = []
    for number in reversed(numbers):
        try:
            found.append(repository.refs.read(ref, number))
        except IntegrityError as exc:
            if problems is None:
                raise
            problems.append(exc)
    return found


def _named(repository: Repository, base: str, *, branch: str | None, maximize: bool) -> Commit:
    if base == "HEAD":
        return tip(repository, _branch_of(repository, base, branch))
    if base == "latest":
        newest = max(all_tips(repository).values(), key=lambda c: c.created_ns, default=None)
        return newest or _missing(repository, base)
    if base == "best":
        commits = log(repository, branch=branch)
        chosen = best(commits, maximize=maximize)
        if chosen is None:
            raise without_metric(commits, _branch_of(repository, "HEAD", branch))
        return chosen
    if ids.is_commit_id(base):
        return _published(repository, base)
    if not ids.is_name(base):
        return _missing(repository, base)
    for kind in ("heads", "tags", "names"):
        if repository.refs.exists(f"{kind}/{base}"):
            return _commit_of(repository, repository.refs.head(f"{kind}/{base}"), what=f"{base!r}")
    found = _by_prefix(repository, base)
    if len(found) > 1:
        raise NotFoundError(f"{base!r} is ambiguous: {', '.join(found[:8])}{' ...' if len(found) > 8 else ''}")
    return repository.read_commit(found[0]) if found else _missing(repository, base)


def _by_prefix(repository: Repository, prefix: str) -> list[str]:
    if not re.fullmatch(r"[0-9a-f-]{4,}", prefix):
        return []
    found = (commit for commit in commit_ids(repository) if commit.startswith(prefix) or commit[9:].startswith(prefix))
    return [commit for commit in found if is_published(repository, commit)]


def is_published(repository: Repository, commit: str) -> bool:
    """Whether a commit whose record is there is a commit of its branch. Raises: NotFoundError, IntegrityError."""
    # A commit record without a ref record is a save that a crash cut off: its intent is still there.
    if repository.store.size(intent_key(commit)) is None:
        return True
    record = repository.read_commit(commit)
    return repository.refs.find(f"heads/{record.branch}", commit) is not None


def _published(repository: Repository, commit: str) -> Commit:
    found = repository.read_commit(commit)
    return found if is_published(repository, commit) else _missing(repository, commit)


def _missing(repository: Repository, base: str) -> Commit:
    if ids.is_name(base) and repository.refs.numbers(f"heads/{base}") and not repository.refs.exists(f"heads/{base}"):
        raise NotFoundError(f"the branch {base!r} was deleted in {repository.store.describe()}; {base}@{{1}} is where it was before")
    branches = ", ".join(repository.refs.names("heads")) or "none"
    raise NotFoundError(f"no commit {base!r} in {repository.store.describe()}; branches: {branches}; `syckpt log` lists commits")
