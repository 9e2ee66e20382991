"""How a repository is at this moment: branches and who writes them, tags, saves under way, damage, size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from syckpt.errors import IntegrityError, NotFoundError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.objects.refs import Intent, Lease, RefRecord
from syckpt.repo import documents, history, leases
from syckpt.repo.keys import commit_key
from syckpt.repo.owner import is_dead
from syckpt.repo.repository import Repository

__all__ = ["Branch", "Damage", "Save", "Status", "Writer", "status"]


@dataclass(frozen=True)
class Writer:
    """Who holds a branch, by its lease, since when (ns since the epoch; None where that is not known); `dead` None: nobody here knows.

    `holds`: nobody else gets the branch now, for this process lives, or may live while its lease runs.
    """

    lease: Lease
    since_ns: int | None
    dead: bool | None
    holds: bool


@dataclass(frozen=True)
class Branch:
    """A branch, with its tip: None where it has no commit yet, or that cannot be read.

    `whole` is the newest commit, from the tip back, that is marked neither damaged nor dropped: a resume goes on from it.
    """

    name: str
    commit: str | None
    tip: Commit | None
    whole: Commit | None
    writer: Writer | None


@dataclass(frozen=True)
class Save:
    """A save under way, or cut off: `dead` says whether its process has ended, None that nobody here knows."""

    intent: Intent
    dead: bool | None


@dataclass(frozen=True)
class Damage:
    """A commit that loading found damaged, and why."""

    commit: str
    why: str


@dataclass(frozen=True)
class Status:
    """A repository at one moment. `problems` are what could not be read of it."""

    where: str
    head: str | None
    branches: tuple[Branch, ...]
    tags: dict[str, str]
    saves: tuple[Save, ...]
    damaged: tuple[Damage, ...]
    commits: int
    nbytes: int
    problems: tuple[IntegrityError, ...]

    def advice(self) -> list[str]:
        """Return what to do next, the most pressing first."""
        found = [f"run `syckpt verify`: {problem}" for problem in self.problems[:1]]
        if len(self.damaged) == 1:
            found.append(f"`syckpt verify {self.damaged[0].commit}` tells what is damaged")
        elif self.damaged:
            found.append(f"`syckpt verify` tells what is damaged: {len(self.damaged)} commits are marked")
        found += filter(None, map(_about_damage, self.branches))
        found += [
            f"the save {save.intent.commit} was cut off: the next run on branch {save.intent.branch!r} clears or completes it"
            for save in self.saves
            if save.dead
        ]
        found += filter(None, map(_about_writer, self.branches))
        if not any(branch.commit for branch in self.branches):
            found.append("no commit yet: the first save of a training script makes one")
        return found or ["nothing: run a script again to go on from its branch; `syckpt log` shows the commits"]


def _about_damage(branch: Branch) -> str | None:
    if branch.tip is None or branch.whole is branch.tip:
        return None
    if branch.whole is not None:
        return f"a resume on branch {branch.name!r} goes past its damaged commits to {branch.whole.id}, step {branch.whole.step}"
    return (
        f"no commit of branch {branch.name!r} can be loaded, and a resume raises: put the damaged files back from a copy, then"
        " `syckpt verify`; or begin anew with auto_resume=False"
    )


def _about_writer(branch: Branch) -> str | None:
    if branch.writer is None:
        return None
    if branch.writer.holds:
        return f"let the run on branch {branch.name!r} go on: a second one there gets a ConflictError, unless it names another branch=..."
    if branch.commit is not None and branch.whole is None:
        return None  # Running it again only raises.
    if branch.writer.dead is None:
        return f"the lease of the run on branch {branch.name!r}, on another machine, ran out: if it is gone, run its script again to go on"
    return f"the run on branch {branch.name!r} ended without closing; run its script again to go on"


def status(repository: Repository) -> Status:
    """Look at a repository; no manifests and no tensors are read. What is damaged is left out and told in `problems`."""
    problems: list[IntegrityError] = []
    head: str | None = None
    try:
        head = repository.head_branch()
    except IntegrityError as exc:
        problems.append(exc)
    heads = repository.refs.heads("heads", problems=problems)
    tags = repository.refs.heads("tags", problems=problems)
    nbytes, commits, damaged = sum(repository.store.staging().values()), 0, []
    for key in repository.store.list():
        nbytes += repository.store.size(key) or 0  # gone meanwhile
        name = key.removeprefix("objects/")
        commits += name != key and ids.is_commit_id(name.removesuffix(".json"))
        if name != key and name.endswith(".damaged"):
            commit = name.removesuffix(".damaged")
            damaged.append(Damage(commit, repository.why(commit, "damaged") or "its mark does not say why"))
    return Status(
        where=repository.store.describe(),
        head=head,
        branches=tuple(_branch(repository, name, record, problems) for name, record in heads.items()),
        tags={name: record.commit for name, record in tags.items() if record.commit is not None},
        saves=tuple(_saves(repository, problems)),
        damaged=tuple(damaged),
        commits=commits,
        nbytes=nbytes,
        problems=tuple(problems),
    )


def _branch(repository: Repository, name: str, record: RefRecord, problems: list[IntegrityError]) -> Branch:
    tip = None
    if record.commit is not None:
        try:
            tip = repository.read_commit(record.commit, seal=record.commit_seal)
        except IntegrityError as exc:
            problems.append(exc)
        except NotFoundError:
            problems.append(
                IntegrityError(f"{commit_key(record.commit)}: missing, though {repository.refs.key(record.ref, record.number)} names it")
            )
    whole = None if tip is None else _whole(repository, tip, problems)
    return Branch(name, record.commit, tip, whole, _writer(repository, record, leases.read(repository, name)))


def _whole(repository: Repository, tip: Commit, problems: list[IntegrityError]) -> Commit | None:
    try:
        return next((commit for commit in history.walk(repository, tip) if not (commit.damaged or commit.dropped)), None)
    except IntegrityError as exc:
        problems.append(exc)
        return None


def _writer(repository: Repository, record: RefRecord, lease: Lease | None) -> Writer | None:
    if lease is None:
        return None
    dead = is_dead(lease.trainer)
    holds = dead is False or (dead is None and lease.expires_ns > time.time_ns())
    return Writer(lease, _since(repository, record, lease.generation), dead, holds)


def _since(repository: Repository, newest: RefRecord, generation: int) -> int | None:
    """Return when a generation took a branch: the time of its first record."""
    since = None
    for number in range(newest.number, 0, -1):
        try:
            record = repository.refs.read(newest.ref, number)
        except (IntegrityError, NotFoundError):
            return since
        if record.generation < generation:
            break
        if record.generation == generation:
            since = record.time_ns
            if record.reason in ("open", "create"):
                break
    return since


def _saves(repository: Repository, problems: list[IntegrityError]) -> Iterator[Save]:
    for key in repository.store.list("intents/"):
        try:
            body, _ = documents.read(repository.store, key, kind="intent")
            intent = Intent.from_body(body, where=key)
        except NotFoundError:
            continue  # It ended in between.
        except IntegrityError as exc:
            problems.append(exc)
            continue
        yield Save(intent, is_dead(intent.owner))
