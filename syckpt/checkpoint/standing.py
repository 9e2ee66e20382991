"""Where a manager stands: the branch that it writes, the commit that its state descends from, and how both change.

All of it is collective: rank 0 looks at the repository and decides; every rank does the same, or all raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from syckpt.checkpoint.ledger import Ledger
from syckpt.checkpoint.progress import Progress
from syckpt.checkpoint.resumption import Resumption
from syckpt.checkpoint.saver import PendingCommit, Saver
from syckpt.checkpoint.start import Seat
from syckpt.checkpoint.taking import Taking, agree_on_taking, refuse_other_items, refuse_untaken, united
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import ConflictError, CoordinationError, IntegrityError, StateError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.repo import branches, history, leases, receipts
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold

__all__ = ["Standing", "text_of"]

_log = logging.getLogger("syckpt")

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
        hold = Hold(**self._agree(f"opening branch {self.branch!r}", self._take, settles=True)["hold"])
        if hold.tip != self._seat.start.tip and self._seat.follows_any_tip:
            self._ledger.stand_on(hold.tip)
        self._resumption.finish()
        self._saver.open(hold)
        self.taken = self.used = True

    def _take(self) -> _Decision:
        hold = self._seat.take()
        receipts.discard(self._repository, hold.branch)
        return {"hold": asdict(hold)}

    def _agree(
        self,
        call: str,
        decide: Callable[[], _Decision],
        *,
        at: str = "",
        check: Callable[[], object] = lambda: None,
        settles: bool = False,
    ) -> _Decision:
        """Settle the resume on all ranks, from an older commit as long as any of them meets damage; then return rank 0's decision.

        `at` are the caller's arguments, the same on all ranks; `check` raises for those that are wrong. `settles`: what is registered must
        have the same names on all ranks, and what one of them left of the commit must be another's.
        """
        resumption = self._resumption

        def settled(values: Sequence[dict[str, Any]]) -> _Decision:
            _refuse_other_arguments(call, [value["at"] for value in values])
            older = resumption.older([f"rank {rank}: {value['damage']}" for rank, value in enumerate(values) if value["damage"]])
            if older is not None:
                return {"resume": older.id}
            refuse_other_items([value["items"] for value in values])
            left = united(value["left"] for value in values)
            return {"resume": None, "left": left, **({} if left else decide())}

        while True:
            error: Exception | None = None
            try:
                check()
                if self._torn is None:
                    resumption.settle()
                if self.taken:
                    self._saver.wait_for(None, timeout_s=None)
                    self._ledger.raise_failure()
            except Exception as exc:  # noqa: BLE001 - whatever it is, the other ranks hear of it
                error = exc
            mine = {
                "damage": resumption.damage,
                "at": at,
                "items": resumption.registered if settles else [],
                "left": resumption.taking.left if settles and resumption.taking is not None else [],
            }
            verdict = self._coordinator.agree(call, mine, settled, error=error, at=at)
            if verdict["resume"] is None and not verdict["left"]:
                return verdict
            if verdict["resume"] is None:
                assert resumption.taking is not None
                refuse_untaken(self._coordinator, call, resumption.taking, verdict["left"], at=at)
                resumption.all_taken()
                continue
            self._torn = "resuming from an older commit failed"
            try:
                self._together(resumption.restore_all_from, verdict["resume"], call=call, at="an older commit")
            except IntegrityError as exc:
                resumption.damage = str(exc)
            self._torn = None

    def _refuse_torn(self) -> None:
        if self._torn is not None:
            raise StateError(f"{self._torn}, which left the registered items half restored: goto() a commit that is whole first")

    # -- moving ----------------------------------------------------------------------------------------------------------

    def goto(self, rev: str) -> None:
        """Bring the registered items, counters and streams to a commit; the branch stays, and its next save follows that commit."""
        self._saver.require_own_process()
        call = f"goto({_shown(rev)!r})"
        commit = self._agree("goto()", lambda: self._found(rev), at=_shown(rev), check=lambda: text_of(rev))["commit"]
        self._check(commit, call=call)
        self._restore(commit, call=call)

    def create_branch(
        self, name: str, at: str, *, first_save: Callable[[], PendingCommit | None], save_unsaved: Callable[[], object], unsaved: bool
    ) -> None:
        """Make a branch and go there: at HEAD the state stays, elsewhere it is restored; a branch that exists is gone on with.

        `first_save` commits the state where nothing has been committed yet. `save_unsaved` commits `unsaved` progress before it is
        replaced, and before a branch is made of it: a branch begins at a commit, which a script that runs again has to find.
        """
        self._saver.require_own_process()
        self._refuse_torn()
        call = f"create_branch({name!r})"

        def check() -> None:
            ids.check_name(name, what="branch")
            text_of(at)

        if name == self.branch and unsaved:
            save_unsaved()
        asked = f"{name} at {_shown(at)}"
        told = self._agree("create_branch()", lambda: self._look(name, text_of(at), unsaved=unsaved), at=asked, check=check)
        commit: str | None = told["commit"]
        if commit is None and name == self.branch:
            first_save()
            self._forks[name] = self._progress.first_epoch = self._progress.next_epoch
            return
        if commit is None:
            commit = self._first_commit(name, first_save)
            if commit is None:
                return
        if told["restore"]:
            self._check(commit, call=call)
            save_unsaved()
        elif told["fork"] is None and told["commit"] is not None:
            save_unsaved()
            commit = self._ledger.parent
        assert commit is not None
        fork = told["fork"]
        if fork is None:
            start = commit
            fork = self._agree("create_branch()", lambda: self._fork(name, start, here=not told["restore"]), at="fork")["fork"]
        self._forks[name] = fork
        self._switch(name, commit)
        if told["restore"]:
            self._restore(commit, call=call)

    def _look(self, name: str, at: str, *, unsaved: bool) -> _Decision:
        """Rank 0: where a branch is (`fork`: the epoch at which it began), or is to begin (None: at a save that is still to be made)."""
        here, parent = at == "HEAD", self._ledger.parent
        leases.await_drain(self._repository, name)
        if name in branches.names(self._repository):
            tip = history.tip(self._repository, name)
            # A script that was cut off right after it had made the branch, at this very state: nothing was saved on it yet.
            untouched = here and name != self.branch and tip.id == parent and tip.branch != name and not unsaved
            return {"commit": tip.id, "restore": not untouched, "fork": self._epoch_here(tip) if untouched else self._fork_of(name)}
        self._refuse_taken(name)
        if not here:
            return {"commit": self._resolve(at).id, "restore": True, "fork": None}
        return {"commit": parent, "restore": False, "fork": None}

    def _refuse_taken(self, name: str) -> None:
        for kind, what in (("tags", "tag"), ("names", "commit")):
            head = self._repository.refs.head(f"{kind}/{name}")
            if head is not None and head.commit is not None and not self._repository.read_commit(head.commit).dropped:
                raise ConflictError(f"{name!r} is a {what}, which a branch of that name would hide: choose another")

    def _fork(self, name: str, commit_id: str, *, here: bool) -> _Decision:
        commit = self._repository.read_commit(commit_id)
        branches.create(self._repository, name, commit, run=self._seat.start.run)
        return {"fork": self._epoch_here(commit) if here else _next_epoch(commit)}

    def _epoch_here(self, commit: Commit) -> int:
        """Return the epoch that follows a commit; where the state is not the commit's (it began afresh), the state's."""
        return _next_epoch(commit) if commit.step == self._progress.step else self._progress.next_epoch

    def _first_commit(self, name: str, save: Callable[[], PendingCommit | None]) -> str | None:
        """Commit the state that no commit has, on the branch as it is, and return its id.

        Where others are writing that one (the scripts of a sweep begin at once), it begins the branch `name` instead: None.
        """
        try:
            pending = save()
            assert pending is not None  # skipped: nothing else is in hand
            return pending.result().id
        except ConflictError as exc:
            _log.info("branch %r begins with a commit of its own: %s", name, exc)

        def keep_head() -> _Decision:
            if self._repository.store.size("HEAD") is None:
                self._repository.set_head(self.branch)  # Else it would come to name the new branch.
            return {}

        self._agree("create_branch()", keep_head, at="HEAD")
        self._forks[name] = self._progress.next_epoch
        self._switch(name, None)
        save()
        return None

    def checkout_branch(self, name: str, *, save_unsaved: Callable[[], object]) -> None:
        """Go to another branch and restore its tip, after `save_unsaved`."""
        self._saver.require_own_process()
        if name == self.branch:
            save_unsaved()

        def decide() -> _Decision:
            if ids.is_name(name):  # The writer of a script that died may still be at work there.
                leases.await_drain(self._repository, name)
            return {"commit": history.tip(self._repository, name).id}

        commit = self._agree("checkout_branch()", decide, at=str(name))["commit"]
        call = f"checkout_branch({name!r})"
        self._check(commit, call=call)
        if name != self.branch:
            save_unsaved()
            self._switch(name, commit)
        self._restore(commit, call=call)

    def delete_branch(self, name: str) -> None:
        """Delete another branch; its commits stay until the collector finds them unreachable."""

        def check() -> None:
            if name == self.branch:
                raise ConflictError(f"branch {name!r} is the one that this manager writes: checkout_branch() another one first")

        def decide() -> _Decision:
            branches.delete(self._repository, name, run=self._seat.start.run)
            return {}

        self._agree("delete_branch()", decide, at=str(name), check=check)

    def tag(self, name: str, rev: str) -> None:
        """Name a commit, for good."""

        def decide() -> _Decision:
            branches.tag(self._repository, name, self._resolve(text_of(rev)), run=self._seat.start.run)
            return {}

        self._agree("tag()", decide, at=f"{name} at {_shown(rev)}", check=lambda: text_of(rev))

    def commit(self, rev: str, *, call: str, more: str = "") -> Commit:
        """Return the commit that a revision names, the same on all ranks, after waiting for this manager's own saves.

        `more`: what else has to be the same.
        """
        found = self._agree(call, lambda: self._found(rev), at=_shown(rev) + more, check=lambda: text_of(rev))
        return self._repository.read_commit(found["commit"])

    def _found(self, rev: str) -> _Decision:
        return {"commit": self._resolve(text_of(rev)).id}

    def _resolve(self, rev: str) -> Commit:
        return history.resolve(self._repository, rev, branch=self.branch, maximize=self._maximize)

    def _fork_of(self, branch: str) -> int:
        """Return the epoch at which a branch was forked: that of the commit at which it was made, or of its own first one, if that is less.

        The latter where it begins with a state that had begun afresh.
        """
        ref, first = f"heads/{branch}", None
        for number in reversed(self._repository.refs.numbers(ref)):
            record = self._repository.refs.read(ref, number)
            if record.deleted:
                break
            if record.reason == "create" and record.commit is not None:
                fork = _next_epoch(self._repository.read_commit(record.commit))
                return fork if first is None else min(fork, self._repository.read_commit(first).epoch)
            if record.reason != "open":
                first = record.commit
        return 0 if first is None else self._repository.read_commit(first).epoch

    def _switch(self, branch: str, tip: str | None) -> None:
        """Give the branch that is written back, and write another one from the next save on (`tip` None: as its first)."""
        if self.taken:
            self._saver.close()
            self.taken = False
        self._seat.move(branch, tip=tip)
        self._resumption.branch = branch
        self._resumption.finish()
        self._progress.first_epoch = self._forks.get(branch, 0)
        self._ledger.stand_on(tip)

    def _check(self, commit: str, *, call: str) -> None:
        """Check on every rank that what is registered fits a commit: before anything is made, moved or touched."""
        error: Exception | None = None
        taking: Taking | None = None
        try:
            taking = self._resumption.check(self._repository.read_commit(commit))
        except Exception as exc:  # noqa: BLE001 - the other ranks hear of it
            error = exc
        agree_on_taking(self._coordinator, call, taking, self._resumption.registered, error=error, at="check")

    def _restore(self, commit: str, *, call: str) -> None:
        """Restore everything that is registered, on every rank."""
        self._torn = f"{call} failed"  # Until all of it is done, whatever interrupts it.
        self._together(self._resumption.go_to, commit, call=call, at="restore")
        self._torn = None

    def _together(self, act: Callable[..., None], commit: str, *, call: str, at: str) -> None:
        error: Exception | None = None
        try:
            act(self._repository.read_commit(commit), call=call)
        except Exception as exc:
            if self._resumption.told(exc):
                raise
            error = exc
        self._coordinator.barrier(call, error=error, at=at)


def _refuse_other_arguments(call: str, found: Sequence[str]) -> None:
    """Ranks that name different things would go to different places. Raises: CoordinationError."""
    if len(set(found)) > 1:
        told = ", ".join(f"rank {rank}: {text!r}" for rank, text in enumerate(found))
        raise CoordinationError(f"ranks call {call} with different arguments ({told}): all ranks have to make the same calls")


def text_of(rev: object) -> str:
    """Return a revision as text: a save, or its commit, stands for its id. Raises: StateError."""
    if isinstance(rev, PendingCommit | Commit):
        return rev.id
    if not isinstance(rev, str):
        raise StateError(f"{rev!r} is not a revision: expected a text such as 'HEAD~1', or what save() returned")
    return rev


def _shown(rev: object) -> str:
    """Return what stands for a revision where ranks compare what they ask for."""
    return rev.id if isinstance(rev, PendingCommit | Commit) else str(rev)


def _next_epoch(commit: Commit) -> int:
    return commit.epoch + 1 if commit.epoch_done else commit.epoch
