"""The commits that exist, for one manager: what is asked of them, and what is done to them as a whole.

Whatever it is, this manager's own saves are waited for first. `export`, `retain` and `collect` are collective and rank 0's work; the rest
each rank does for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from syckpt.checkpoint.export import export
from syckpt.checkpoint.ledger import Ledger
from syckpt.checkpoint.saver import Saver
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.standing import Standing, text_of
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import IntegrityError, StateError
from syckpt.hyperparams.config import HyperConfig
from syckpt.objects.commit import Commit
from syckpt.repo import branches, graph, history
from syckpt.repo.collection import Collection, collect
from syckpt.repo.difference import Diff, diff
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Retained, Retention, retain
from syckpt.repo.signing import Trusted, require_signed
from syckpt.repo.similarity import Similar, similar
from syckpt.repo.verify import VerifyReport, verify

__all__ = ["Past"]

_T = TypeVar("_T")


class Past:
    """The repository's history as a manager sees it. `rule` is its `keep=`; `maximize` says which metric is the better one."""

    def __init__(
        self,
        repository: Repository,
        coordinator: Coordinator,
        saver: Saver,
        ledger: Ledger,
        standing: Standing,
        *,
        trusted: Trusted | None,
        rule: Retention | None,
        maximize: bool,
    ) -> None:
        self._repository = repository
        self._coordinator = coordinator
        self._saver = saver
        self._ledger = ledger
        self._standing = standing
        self._trusted = trusted
        self._rule = rule
        self._maximize = maximize

    def wait(self) -> None:
        """Wait until every save is durable. Raises: what one of them failed with; CoordinationError."""
        self._saver.wait_for(None, timeout_s=None)
        self._ledger.raise_failure()

    def commit(self, rev: str) -> Commit:
        """Return the commit that a revision names, for this rank alone. Raises: NotFoundError, StateError."""
        self.wait()
        return history.resolve(self._repository, text_of(rev), branch=self._standing.branch, maximize=self._maximize)

    # -- asked -------------------------------------------------------------------------------------------------------

    def branches(self) -> list[str]:
        """Return the names of branches that have a commit, sorted."""
        self.wait()
        return branches.names(self._repository)

    def log(self, n: int | None) -> list[Commit]:
        """Return up to `n` commits of the branch, newest first."""
        self.wait()
        return history.log(self._repository, count=n, branch=self._standing.branch)

    def tree(self) -> str:
        """Return the history of all branches as a graph."""
        self.wait()
        return graph.tree(self._repository, head=self._standing.branch)

    def diff(self, a: str, b: str) -> Diff:
        """Return in what two commits differ."""
        return diff(self._repository, self.commit(a), self.commit(b), reader=self._reader())

    def similar(self, config: HyperConfig, k: int) -> list[Similar]:
        """Return the `k` commits whose configurations are most alike."""
        self.wait()
        return similar(self._repository, config, k=k)

    def verify(self, rev: str) -> VerifyReport:
        """Read and check every byte of a commit, and that it is signed where it has to be."""
        commit = self.commit(rev)
        report = verify(self._repository, commit.id, mark=True)
        if self._trusted is not None:
            try:
                require_signed(self._repository, commit, self._trusted)
            except IntegrityError as exc:
                report.add(str(exc), commit.id)
        return report

    # -- done --------------------------------------------------------------------------------------------------------

    def export(self, rev: str, path: str | os.PathLike[str]) -> None:
        """Write a commit as one file."""
        commit = self._standing.commit(rev, call="export_ckpt()")
        self._on_rank_0("export_ckpt()", lambda: export(Source(self._reader(), commit), path))

    def retain(self, *, dry_run: bool) -> Retained | None:
        """Apply the rule to the branch. Raises: StateError without one; IntegrityError."""
        rule = self._rule
        if rule is None:
            raise StateError("retain(): no rule says what to keep; make the manager with keep=Retention(...) or max_to_keep=...")
        branch, how = self._standing.branch, {"maximize": self._maximize, "dry_run": dry_run}
        return self._on_rank_0("retain()", lambda: retain(self._repository, branch, rule, **how))

    def collect(self, *, dry_run: bool) -> Collection | None:
        """Remove what nothing leads to. Raises: IntegrityError."""
        return self._on_rank_0("gc()", lambda: collect(self._repository, dry_run=dry_run))

    def _on_rank_0(self, call: str, work: Callable[[], _T]) -> _T | None:
        """Do work that is rank 0's alone, after this manager's own saves; the others wait for it, and hear of its failure."""
        error: Exception | None = None
        done: _T | None = None
        try:
            self.wait()
            if self._coordinator.rank == 0:
                done = work()
        except Exception as exc:  # noqa: BLE001 - the other ranks hear of it
            error = exc
        self._coordinator.barrier(call, error=error)
        return done

    def _reader(self) -> Reader:
        return Reader(self._repository, trusted=self._trusted)
