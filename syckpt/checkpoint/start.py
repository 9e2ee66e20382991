"""How a manager begins: rank 0 looks at the repository and decides, every rank opens the same one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from syckpt.checkpoint.resume import newest_whole
from syckpt.dist import topology
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import CoordinationError, NotFoundError, SyckptError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.repo import documents, history, leases
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold, newest_readable, open_branch
from syckpt.stores.base import StoreSpec

__all__ = ["Arguments", "Start", "agree_on_start", "open_for_writing"]


@dataclass(frozen=True)
class Arguments:
    """What has to be the same on all ranks."""

    root: str
    branch: str | None
    base: str | None
    resume: bool
    maximize: bool
    async_save: bool
    when_busy: str
    rng: bool
    save_every: str
    on_error: str
    save_on_exit: bool
    timeout_s: float


@dataclass(frozen=True)
class Start:
    """What was decided: the branch and its tip as they are, the commit to go on from, whether it begins a new branch, who is writing."""

    repository: str
    branch: str
    tip: str | None
    resumed: str | None
    forks: bool
    run: str
    token: str
    hello: str


def agree_on_start(coordinator: Coordinator, spec: StoreSpec, arguments: Arguments) -> tuple[Repository, Start]:
    """Open (or make) the repository and choose what to resume from, alike on all ranks; no tensor is read.

    Raises: CoordinationError when ranks were given different arguments or do not see one directory; IntegrityError when the branch has
    commits but none is whole; NotFoundError (`base`); StoreError.
    """

    def decide(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        for rank, other in enumerate(values):
            differing = [name for name, value in values[0].items() if other[name] != value]
            if differing:
                told = ", ".join(f"{name}={other[name]!r} (rank 0: {values[0][name]!r})" for name in differing)
                raise CoordinationError(f"rank {rank} made its manager with {told}: give all ranks the same")
        return asdict(_choose(spec, arguments, several=coordinator.world_size > 1))

    start = Start(**coordinator.agree("CheckpointManager()", asdict(arguments), decide))
    repository: Repository | None = None
    error: SyckptError | None = None
    try:
        repository = Repository.open(spec)
        _check_shared(repository, start, coordinator.rank)
    except NotFoundError as exc:
        error = CoordinationError(
            f"rank {coordinator.rank} does not see the directory that rank 0 uses ({exc}): all ranks need a shared one"
        )
    except SyckptError as exc:
        error = exc
    try:
        if coordinator.world_size > 1:
            coordinator.barrier("CheckpointManager()", error=error)
        elif error is not None:
            raise error
    finally:
        if coordinator.rank == 0 and start.hello and repository is not None:
            with suppress(SyckptError):  # A small file more.
                repository.store.delete(start.hello)
    assert repository is not None
    return repository, start


def _choose(spec: StoreSpec, arguments: Arguments, *, several: bool) -> Start:
    """Rank 0: look at the repository."""
    repository = Repository.open_or_create(spec)
    branch = ids.check_name(arguments.branch, what="branch") if arguments.branch is not None else repository.head_branch()
    leases.await_drain(repository, branch)
    record, _ = newest_readable(repository, branch)
    commit: Commit | None = None
    if arguments.resume and record is None:
        commit = _fork_point(repository, arguments)
    elif arguments.resume:
        commit = newest_whole(repository, branch)
    token, hello = secrets.token_hex(8), ""
    if several:
        hello = f"hello/{token}.json"
        documents.write(repository.store, hello, {"kind": "hello", "version": 1})
    return Start(
        repository=repository.id,
        branch=branch,
        tip=None if record is None else record.commit,
        resumed=None if commit is None else commit.id,
        forks=commit is not None and record is None,
        run=topology.run_id(),
        token=token,
        hello=hello,
    )


def _fork_point(repository: Repository, arguments: Arguments) -> Commit | None:
    """Return where a new branch begins; None in an empty repository."""
    try:
        commit = history.resolve(repository, arguments.base or "HEAD", maximize=arguments.maximize)
    except NotFoundError:
        if arguments.base is not None:
            raise
        return None
    repository.check_whole(commit)
    return commit


def _check_shared(repository: Repository, start: Start, rank: int) -> None:
    if repository.id != start.repository or (start.hello and repository.store.size(start.hello) is None):
        raise CoordinationError(
            f"rank {rank} sees another directory at {repository.store.describe()} than rank 0 does (a copy, or a disk of its own node):"
            " all ranks need one that they share"
        )


def open_for_writing(repository: Repository, start: Start, *, fork: Commit | None, expected: str | None) -> Hold:
    """Rank 0: take the branch. Raises: ConflictError naming a holder that lives, or a tip that moved."""
    leases.await_holder(repository, start.branch, run=start.run, token=start.token)
    return open_branch(repository, start.branch, run=start.run, expected=expected, start=fork)
