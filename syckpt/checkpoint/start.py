"""How a manager begins: rank 0 looks at the repository and decides, every rank opens the same one."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from syckpt.checkpoint.keys import Keys
from syckpt.checkpoint.resume import newest_whole, share
from syckpt.dist import topology
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import ConflictError, CoordinationError, IntegrityError, NotFoundError, StateError, SyckptError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.repo import branches, documents, history, leases
from syckpt.repo.keys import hello_key
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Retention
from syckpt.repo.signing import Trusted, require_signed
from syckpt.repo.transaction import Hold, newest_readable, open_branch
from syckpt.stores.base import StoreSpec

__all__ = ["Arguments", "Seat", "Start", "agree_on_start", "rule_of"]

_log = logging.getLogger("syckpt")
_CHOICES = {
    "run_mode": ("append", "new_branch", "overwrite"),
    "when_busy": ("wait", "skip", "raise"),
    "on_error": ("raise", "warn"),
}


@dataclass(frozen=True)
class Arguments:
    """What has to be the same on all ranks. Raises: StateError for what is none of the choices."""

    root: str
    branch: str | None
    base: str | None
    run_mode: str
    resume: bool
    maximize: bool
    async_save: bool
    when_busy: str
    rng: bool
    save_every: str
    on_error: str
    save_on_exit: bool
    timeout_s: float
    read: str = "ranged"
    check_replicas: str = "sampled"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise StateError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def rule_of(keep: Retention | None, max_to_keep: int | None) -> Retention | None:
    """Return what retention is to keep; None keeps everything. Raises: StateError."""
    if keep is not None and max_to_keep is not None:
        raise StateError(f"keep={keep} and max_to_keep={max_to_keep}: give one of the two; max_to_keep=n is Retention(last=n)")
    if keep is not None and not isinstance(keep, Retention):
        raise StateError(f"keep={keep!r}: expected syckpt.Retention(last=..., best=..., every_steps=..., every=...)")
    return keep if max_to_keep is None else Retention(last=max_to_keep)


@dataclass(frozen=True)
class Start:
    """What was decided: the branch and its tip as they are, the commit to go on from, and who is writing.

    `forks`: the branch has no record yet and begins at that commit. `afresh`: its state is taken, its counters are not.
    `parent`: what the first save follows.
    """

    repository: str
    branch: str
    tip: str | None
    resumed: str | None
    parent: str | None
    forks: bool
    afresh: bool
    run: str
    token: str
    hello: str


class Seat:
    """The branch that a manager writes, as it was when it was chosen; moves with the manager."""

    def __init__(self, repository: Repository, start: Start, *, rank: int) -> None:
        self.start = start
        self.follows_any_tip = False
        """Whether what others saved since the branch was chosen is gone on from: there is no state that descends from its tip."""
        self._repository = repository
        self._rank = rank

    def move(self, branch: str, *, tip: str | None) -> None:
        """Go to another branch, whose tip is known; None for one that is to begin with the next save."""
        self.start = replace(self.start, branch=branch, tip=tip, forks=False)

    def take(self) -> Hold:
        """Rank 0: open the branch for writing. Raises: ConflictError naming a holder that lives, or a tip that moved."""
        if self.follows_any_tip:
            head, _ = newest_readable(self._repository, self.start.branch)
            return self._open(None if head is None else head.commit)
        return self._open(self.start.tip)

    def reopen(self, hold: Hold, tip: str | None) -> Hold:
        """Open the branch anew after a writer died. Only rank 0's writer publishes, so only it has to be fenced."""
        return self._open(tip) if self._rank == 0 else replace(hold, tip=tip)

    def _open(self, expected: str | None) -> Hold:
        start = self.start
        fork = self._repository.read_commit(start.resumed) if start.forks and start.resumed is not None else None
        leases.await_holder(self._repository, start.branch, run=start.run, token=start.token)
        return open_branch(self._repository, start.branch, run=start.run, expected=expected, start=fork)


def agree_on_start(
    coordinator: Coordinator, spec: StoreSpec, arguments: Arguments, *, keys: Keys | None = None
) -> tuple[Repository, Start]:
    """Open (or make) the repository and choose what to resume from, alike on all ranks; no tensor is read.

    Raises: CoordinationError when ranks were given different arguments or do not see one directory; IntegrityError when the branch has
    commits but none is whole, or the one found is not signed by a trusted key; NotFoundError (`base`); StoreError; `keys.error`.
    """
    given = keys or Keys()

    def decide(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        for rank, other in enumerate(values):
            differing = [name for name, value in values[0].items() if other[name] != value]
            if differing:
                told = ", ".join(f"{name}={other[name]!r} (rank 0: {values[0][name]!r})" for name in differing)
                raise CoordinationError(f"rank {rank} made its manager with {told}: give all ranks the same")
        return asdict(_choose(spec, arguments, given.trusted, readers=coordinator.world_size))

    start = Start(**coordinator.agree("CheckpointManager()", asdict(arguments), decide, error=given.error))
    repository: Repository | None = None
    error: SyckptError | None = None
    damage: str | None = None
    try:
        repository = Repository.open(spec)
        _check_shared(repository, start, coordinator.rank)
        damage = _damage(repository, start, coordinator)
    except NotFoundError as exc:
        error = CoordinationError(
            f"rank {coordinator.rank} does not see the directory that rank 0 uses ({exc}): all ranks need a shared one"
        )
    except SyckptError as exc:
        error = exc

    def settle(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        found = [f"rank {rank}: {value['damage']}" for rank, value in enumerate(values) if value["damage"]]
        return {"resumed": _older(repository, start, found, given.trusted) if found and repository is not None else start.resumed}

    try:
        if coordinator.world_size > 1:
            resumed = coordinator.agree("CheckpointManager()", {"damage": damage}, settle, error=error)["resumed"]
            if resumed != start.resumed:
                start = replace(start, resumed=resumed, parent=resumed)
        elif error is not None:
            raise error
    finally:
        if coordinator.rank == 0 and start.hello and repository is not None:
            with suppress(SyckptError):  # A small file more.
                repository.store.delete(start.hello)
    assert repository is not None
    return repository, start


def _choose(spec: StoreSpec, arguments: Arguments, trusted: Trusted | None, *, readers: int) -> Start:
    """Rank 0: look at the repository."""
    repository = Repository.open_or_create(spec)
    branch = ids.check_name(arguments.branch, what="branch") if arguments.branch is not None else repository.head_branch()
    run = topology.run_id()
    afresh = False
    if arguments.run_mode == "new_branch":
        branch, afresh = _new_branch(repository, branch, run=run, trusted=trusted)
    leases.await_drain(repository, branch)
    record, _ = newest_readable(repository, branch)
    begins = record is None or record.deleted
    commit: Commit | None = None
    if arguments.resume and begins:
        commit = _fork_point(repository, arguments)
        if commit is not None and trusted is not None:
            require_signed(repository, commit, trusted)
    elif arguments.resume:
        commit = newest_whole(repository, branch, trusted=trusted, readers=readers)
    parent = commit
    if parent is None and arguments.run_mode == "append":
        parent = _readable_tip(repository, branch)
    token, hello = secrets.token_hex(8), ""
    if readers > 1:
        hello = hello_key(token)
        documents.write(repository.store, hello, {"kind": "hello", "version": 1})
    return Start(
        repository=repository.id,
        branch=branch,
        tip=None if record is None else record.commit,
        resumed=None if commit is None else commit.id,
        parent=None if parent is None else parent.id,
        forks=commit is not None and begins,
        afresh=afresh,
        run=run,
        token=token,
        hello=hello,
    )


def _new_branch(repository: Repository, source: str, *, run: str, trusted: Trusted | None) -> tuple[str, bool]:
    """Fork a branch from the tip of `source`; return its name, and whether it is new.

    A relaunch of the same run goes on with the branch that it made. A branch without commits has nothing to fork.
    """
    taken = set(repository.refs.names("heads"))
    for number in count(2):
        name = f"{source}-{number}"
        if name in taken and not topology.outlives_process(run):
            continue
        if name in taken:
            first = repository.refs.read(f"heads/{name}", repository.refs.numbers(f"heads/{name}")[0])
            if first.reason == "create" and first.run == run:
                return name, first.commit == repository.refs.read(f"heads/{name}", repository.refs.numbers(f"heads/{name}")[-1]).commit
            continue
        commit = newest_whole(repository, source, trusted=trusted)
        if commit is None:
            return source, False
        with suppress(ConflictError):  # Another run took this number; the next one is free.
            branches.create(repository, name, commit, run=run)
            return name, True
    raise AssertionError("unreachable")


def _readable_tip(repository: Repository, branch: str) -> Commit | None:
    """Return what a save follows that begins with a state of its own."""
    try:
        return history.tip(repository, branch)
    except NotFoundError:
        return None
    except IntegrityError as exc:
        _log.warning("the first save will have no parent: %s", exc)
        return None


def _fork_point(repository: Repository, arguments: Arguments) -> Commit | None:
    """Return where a new branch begins; None in an empty repository."""
    try:
        commit = history.resolve(repository, arguments.base or "HEAD", maximize=arguments.maximize)
    except NotFoundError:
        if arguments.base is not None:
            raise
        return None
    repository.check_whole(commit)
    if arguments.base is None:
        # It may as well be a slip of the pen.
        _log.warning(
            "branch %r is new: it begins at commit %s of branch %r (step %d), with its counters; base= begins it elsewhere",
            arguments.branch,
            commit.id,
            commit.branch,
            commit.step,
        )
    return commit


def _damage(repository: Repository, start: Start, coordinator: Coordinator) -> str | None:
    """Return what is wrong with this rank's share of the commit that is to be resumed; rank 0 chose it by its own."""
    if start.resumed is None or start.forks or coordinator.rank == 0:
        return None
    try:
        commit = repository.read_commit(start.resumed)
        repository.check_whole(commit, ranks=share(commit, coordinator.rank, coordinator.world_size))
    except (IntegrityError, NotFoundError) as exc:
        return str(exc)
    return None


def _older(repository: Repository, start: Start, damage: Sequence[str], trusted: Trusted | None) -> str | None:
    """Rank 0: pass over the commit that was chosen, and return the next one that is whole in the parts of all ranks."""
    why = "; ".join(damage)
    _log.error("commit %s cannot be resumed from: %s", start.resumed, why)
    assert start.resumed is not None
    if "dropped" not in repository.marks(start.resumed):  # Else nothing rotted: retention was at work meanwhile.
        repository.mark(start.resumed, "damaged", why=why)
    commit = newest_whole(repository, start.branch, trusted=trusted)
    return None if commit is None else commit.id


def _check_shared(repository: Repository, start: Start, rank: int) -> None:
    if repository.id != start.repository or (start.hello and repository.store.size(start.hello) is None):
        raise CoordinationError(
            f"rank {rank} sees another directory at {repository.store.describe()} than rank 0 does (a copy, or a disk of its own node):"
            " all ranks need one that they share"
        )
