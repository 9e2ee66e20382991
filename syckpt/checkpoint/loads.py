"""The agreement of a load: checked, resharded, read, each by every rank before the first one goes on to the next.

So nothing is touched that does not fit on any rank, and what the resharder of one rank raises is raised before another fills its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from syckpt.checkpoint import loader
from syckpt.checkpoint.broadcast import Broadcast
from syckpt.checkpoint.loader import LoadReport
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.specs import Config
from syckpt.dist.coordinator import Coordinator
from syckpt.objects.commit import Commit

__all__ = ["Loads"]

_TOPIC = "load()"


class Loads:
    """Makes one manager's loads. `open_commit` opens one for this rank. Making this is collective where values are read once for all."""

    def __init__(self, coordinator: Coordinator, config: Config, open_commit: Callable[[Commit], Source], *, timeout_s: float) -> None:
        self._coordinator = coordinator
        self._config = config
        self._open = open_commit
        self._broadcast = Broadcast(coordinator, topic=_TOPIC, timeout_s=timeout_s) if config.read == "broadcast" else None

    def close(self) -> None:
        """Give up what reading for all needs. Not collective."""
        if self._broadcast is not None:
            self._broadcast.close()

    def make(self, commit: Commit, targets: Mapping[str, Any] | None, report: LoadReport, *, dry_run: bool, **how: Any) -> dict[str, Any]:
        """Load a commit on all ranks; `how` and `report` are those of `loader.read`. Collective.

        Raises: as `CheckpointManager.load`; what a resharder raises is itself on its rank, a RankFailure elsewhere.
        """
        source: Source | None = None
        values: dict[str, Any] = {}
        done: Any = None
        notes: list[str] = []
        for step in self._steps(targets, dry_run=dry_run):
            error: Exception | None = None
            try:
                source = source or self._open(commit)
                if step == "reshard":
                    done = loader.reshard(source, targets or {}, notes, partial=how.get("partial"))
                else:
                    fetch = self._broadcast.fetcher(source) if self._broadcast is not None and step == "read" else None
                    values, _ = loader.read(source, targets, **how, dry_run=step == "check", report=report, done=done, fetch=fetch)
            except Exception as exc:
                if self._broadcast is not None and self._broadcast.told(exc):
                    raise  # On all ranks, by the agreement that the others of this step meant.
                error = exc
            self._coordinator.barrier(_TOPIC, error=error, at=f"{commit.id}, {step}")
        report.notes += notes
        return values

    def _steps(self, targets: Mapping[str, Any] | None, *, dry_run: bool) -> tuple[str, ...]:
        if dry_run:
            return ("check",)
        return ("check", "reshard", "read") if targets is not None and loader.reshards(self._config) else ("check", "read")
