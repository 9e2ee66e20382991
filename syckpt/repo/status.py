"""How a repository is at this moment: branches and who writes them, tags, saves under way, damage, size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from syckpt.errors import IntegrityError, NotFoundError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.objects.refs import Intent, Lease, RefRecord
from syckpt.repo import documents, leases
from syckpt.repo.owner import is_dead
from syckpt.repo.repository import Repository

__all__ = ["Branch", "Damage", "Save", "Status", "Writer", "status"]


@dataclass(frozen=True)
class Writer:
    """Who holds a branch, by its lease, since when (ns since the epoch; None where that is not known); `dead` None: nobody here knows."""

    lease: Lease
    since_ns: int | None
    dead: bool | None


@dataclass(frozen=True)
class Branch:
    """A branch, with its tip: None where it has no commit yet, or that cannot be read."""

    name: str
    commit: str | None
    tip: Commit | None
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
        found += [f"`syckpt verify {one.commit}` tells what is damaged; a resume goes past this commit" for one in self.damaged]
        found += [
            f"the save {save.intent.commit} was cut off: the next run on branch {save.intent.branch!r} clears or completes it"
            for save in self.saves
            if save.dead
        ]
        for branch in self.branches:
            if branch.writer is not None and branch.writer.dead and (branch.tip is not None or branch.commit is None):
                found.append(f"the run on branch {branch.name!r} ended without closing; run its script again to go on")
        if not any(branch.commit for branch in self.branches):
            found.append("no commit yet: the first save of a training script makes one")
        return found or ["nothing: run a script again to go on from its branch; `syckpt log` shows the commits"]


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
    nbytes, commits, damaged = 0, 0, []
    for key in repository.store.list():
        nbytes += repository.store.size(key) or 0  # gone meanwhile
        name = key.removeprefix("objects/")
        commits += name != key and ids.is_commit_id(name.removesuffix(".json"))
        if name != key and name.endswith(".damaged"):
            damaged.append(Damage(name.removesuffix(".damaged"), _why(repository, key)))
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
                IntegrityError(f"objects/{record.commit}.json: missing, though {repository.refs.key(record.ref, record.number)} names it")
            )
    lease = leases.read(repository, name)
    writer = None if lease is None else Writer(lease, _since(repository, record, lease.generation), is_dead(lease.trainer))
    return Branch(name, record.commit, tip, writer)


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


def _why(repository: Repository, key: str) -> str:
    try:
        return str(documents.read(repository.store, key, kind="mark")[0].get("why"))
    except (IntegrityError, NotFoundError):
        return "its mark does not say why"
