"""Where a manager stands: the branch that it writes, the commit that its state descends from, and how both change.

All of it is collective: rank 0 looks at the repository and decides; every rank does the same, or all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from syckpt.checkpoint.ledger import Ledger
from syckpt.checkpoint.progress import Progress
from syckpt.checkpoint.resumption import Resumption
from syckpt.checkpoint.saver import Saver
from syckpt.checkpoint.start import Seat
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import ConflictError, IntegrityError, StateError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.repo import branches, history, receipts
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold

__all__ = ["Standing"]

_Decision = dict[str, Any]


class Standing:
    """One manager's branch and commit. `taken`: whether the branch is held for writing; `used`: whether any branch ever was."""

    def __init__(
        self,
        repository: Repository,
        coordinator: Coordinator,
        resumption: Resumption,
        saver: Saver,
        ledger: Ledger,
        progress: Progress,
        seat: Seat,
        *,
        maximize: bool,
    ) -> None:
        self._repository = repository
        self._coordinator = coordinator
        self._resumption = resumption
        self._saver = saver
        self._ledger = ledger
        self._progress = progress
        self._seat = seat
        self._maximize = maximize
        self._forks: dict[str, int] = {}
        self._torn: str | None = None
        self.taken = False
        self.used = False

    @property
    def branch(self) -> str:
        """The branch that is written."""
        return self._seat.start.branch

    # -- taking the branch -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """What the first `loop/batches/restore/step_up/save` does: settle the resume, take the branch, start the writer.

        Raises: ConflictError; StateError after a `goto` that broke off.
        """
        self._saver.require_own_process()
        self._refuse_torn()
        if self.taken:
            self._resumption.settle()
            return
        hold = Hold(**self._agree(f"opening branch {self.branch!r}", self._take)["hold"])
        self._resumption.finish()
        self._saver.open(hold)
        self.taken = self.used = True

    def _take(self) -> _Decision:
        hold = self._seat.take()
        receipts.discard(self._repository, hold.branch)
        return {"hold": asdict(hold)}

    def _agree(self, call: str, decide: Callable[[], _Decision], *, at: str = "") -> _Decision:
        """Settle the resume on all ranks, from an older commit as long as any of them meets damage; then return rank 0's decision."""
        resumption = self._resumption

        def settled(values: Sequence[dict[str, Any]]) -> _Decision:
            older = resumption.older([f"rank {rank}: {value['damage']}" for rank, value in enumerate(values) if value["damage"]])
            return {"resume": older.id} if older is not None else {"resume": None, **decide()}

        while True:
            error: Exception | None = None
            try:
                if self._torn is None:
                    resumption.settle()
                if self.taken:
                    self._saver.wait_for(None, timeout_s=None)
                    self._ledger.raise_failure()
            except Exception as exc:  # noqa: BLE001 - whatever it is, the other ranks hear of it
                error = exc
            verdict = self._coordinator.agree(call, {"damage": resumption.damage}, settled, error=error, at=at)
            if verdict["resume"] is None:
                return verdict
            try:
                resumption.restore_all_from(self._repository.read_commit(verdict["resume"]))
            except IntegrityError as exc:
                resumption.damage = str(exc)

    def _refuse_torn(self) -> None:
        if self._torn is not None:
            raise StateError(f"{self._torn}, which left the registered items half restored: goto() a commit that is whole first")

    # -- moving ----------------------------------------------------------------------------------------------------------

    def goto(self, rev: str) -> None:
        """Bring the registered items, counters and streams to a commit; the branch stays, and its next save follows that commit."""
        self._saver.require_own_process()
        self._move_to(self._agree("goto()", lambda: {"commit": self._resolve(rev).id}, at=rev)["commit"], call=f"goto({rev!r})")

    def create_branch(self, name: str, at: str, *, first_save: Callable[[], object]) -> None:
        """Make a branch and go there: at HEAD the state stays, elsewhere it is restored; a branch that exists is gone on with.

        `first_save` commits the state where nothing has been committed yet.
        """
        self._saver.require_own_process()
        self._refuse_torn()
        ids.check_name(name, what="branch")
        if self._ledger.parent is None and at == "HEAD":
            first_save()

        def decide() -> _Decision:
            if name in branches.names(self._repository):
                return {"commit": history.tip(self._repository, name).id, "restore": True, "fork": self._fork_of(name)}
            here = at == "HEAD"
            commit = self._standing_on() if here else self._resolve(at)
            branches.create(self._repository, name, commit, run=self._seat.start.run)
            return {"commit": commit.id, "restore": not here, "fork": _next_epoch(commit)}

        told = self._agree("create_branch()", decide, at=name)
        self._forks[name] = told["fork"]
        self._switch(name, told["commit"])
        if told["restore"]:
            self._move_to(told["commit"], call=f"create_branch({name!r})")

    def checkout_branch(self, name: str) -> None:
        """Go to another branch and restore its tip. What is unsaved has to be saved before."""
        told = self._agree("checkout_branch()", lambda: {"commit": history.tip(self._repository, name).id}, at=name)
        if name != self.branch:
            self._switch(name, told["commit"])
        self._move_to(told["commit"], call=f"checkout_branch({name!r})")

    def delete_branch(self, name: str) -> None:
        """Delete another branch; its commits stay until the collector finds them unreachable."""
        if name == self.branch:
            raise ConflictError(f"branch {name!r} is the one that this manager writes: checkout_branch() another one first")

        def decide() -> _Decision:
            branches.delete(self._repository, name, run=self._seat.start.run)
            return {}

        self._agree("delete_branch()", decide, at=name)

    def tag(self, name: str, rev: str) -> None:
        """Name a commit, for good."""

        def decide() -> _Decision:
            branches.tag(self._repository, name, self._resolve(rev), run=self._seat.start.run)
            return {}

        self._agree("tag()", decide, at=name)

    def commit(self, rev: str, *, call: str) -> Commit:
        """Return the commit that a revision names, the same on all ranks, after waiting for this manager's own saves."""
        return self._repository.read_commit(self._agree(call, lambda: {"commit": self._resolve(rev).id}, at=rev)["commit"])

    def _resolve(self, rev: str) -> Commit:
        return history.resolve(self._repository, rev, branch=self.branch, maximize=self._maximize)

    def _standing_on(self) -> Commit:
        parent = self._ledger.parent
        return self._resolve("HEAD") if parent is None else self._repository.read_commit(parent)

    def _fork_of(self, branch: str) -> int:
        """Return the epoch at which a branch was forked."""
        ref = f"heads/{branch}"
        for number in reversed(self._repository.refs.numbers(ref)):
            record = self._repository.refs.read(ref, number)
            if record.reason == "create" and record.commit is not None:
                return _next_epoch(self._repository.read_commit(record.commit))
        return 0

    def _switch(self, branch: str, tip: str) -> None:
        """Give the branch that is written back, and write another one from the next save on."""
        if self.taken:
            self._saver.close()
            self.taken = False
        self._seat.move(branch, tip=tip)
        self._resumption.branch = branch
        self._resumption.finish()
        self._progress.first_epoch = self._forks.get(branch, 0)
        self._ledger.stand_on(tip)

    def _move_to(self, commit_id: str, *, call: str) -> None:
        """Restore everything that is registered: checked on every rank before the first one touches anything."""
        commit = self._repository.read_commit(commit_id)
        steps: tuple[tuple[str, Callable[[Commit], None]], ...] = (("check", self._resumption.check), ("restore", self._resumption.go_to))
        for step, act in steps:
            error: Exception | None = None
            try:
                act(commit)
            except Exception as exc:  # noqa: BLE001 - whatever it is, the other ranks hear of it
                error = exc
            if step == "restore":
                self._torn = f"{call} failed"
            self._coordinator.barrier(call, error=error, at=step)
        self._torn = None


def _next_epoch(commit: Commit) -> int:
    return commit.epoch + 1 if commit.epoch_done else commit.epoch
