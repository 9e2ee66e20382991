"""The agreement of a load: checked, resharded, read, each by every rank before the first one goes on to the next.

So nothing is touched that does not fit on any rank, and what the resharder of one rank raises is raised before another fills its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from syckpt.checkpoint import loader
from syckpt.checkpoint.broadcast import Broadcast
from syckpt.checkpoint.items import Items
from syckpt.checkpoint.loader import LoadReport
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.taking import Taking, agree_on_taking
from syckpt.dist.coordinator import Coordinator
from syckpt.objects.commit import Commit

__all__ = ["Loads"]

_TOPIC = "load()"


class Loads:
    """Makes one manager's loads. `open_commit` is `Resumption.open`; `broadcast`: values that all ranks need are read once for all."""

    def __init__(self, coordinator: Coordinator, items: Items, open_commit: Callable[..., Source], *, broadcast: Broadcast | None) -> None:
        self._coordinator = coordinator
        self._items = items
        self._open = open_commit
        self._broadcast = broadcast

    def make(self, commit: Commit, into: Mapping[str, Any] | None, report: LoadReport, *, dry_run: bool, **how: Any) -> dict[str, Any]:
        """Load a commit on all ranks; `how` and `report` are those of `loader.read`. Collective.

        Raises: as `CheckpointManager.load`; what a resharder raises is itself on its rank, a RankFailure elsewhere.
        """
        source: Source | None = None
        targets: dict[str, Any] | None = None
        values: dict[str, Any] = {}
        done: Any = None
        taking: Taking | None = None
        notes: list[str] = []
        for step in self._steps(into, dry_run=dry_run):
            error: Exception | None = None
            try:
                if source is None:
                    source = self._open(commit, all_ranks=into is None)
                    targets = None if into is None else self._items.templates(source, into, notes, partial=how.get("partial"))
                if step == "reshard":
                    done = loader.reshard(source, targets or {}, notes, partial=how.get("partial"))
                else:
                    fetch = self._broadcast.fetcher(source, topic=_TOPIC) if self._broadcast is not None and step == "read" else None
                    values, _ = loader.read(source, targets, **how, dry_run=step == "check", report=report, done=done, fetch=fetch)
                    taking = taking or _taking(source, targets, report)
            except Exception as exc:
                if self._broadcast is not None and self._broadcast.told(exc):
                    raise  # On all ranks, by the agreement that the others of this step meant.
                error = exc
            at = f"{commit.id}, {step}"
            if step == "check":
                strict = how.get("strict", True) and how.get("partial") is None
                agree_on_taking(self._coordinator, _TOPIC, taking, sorted(into or ()), strict=strict, error=error, at=at)
            else:
                self._coordinator.barrier(_TOPIC, error=error, at=at)
        report.notes += notes
        if into is None or targets is None:
            return values
        # What was left alone altogether is the caller's own.
        return {name: into[name] if value is targets[name] else self._items.untemplate(name, value) for name, value in values.items()}

    def _steps(self, into: Mapping[str, Any] | None, *, dry_run: bool) -> tuple[str, ...]:
        if dry_run:
            return ("check",)
        return ("check", "reshard", "read") if into is not None and loader.reshards(self._items.config) else ("check", "read")


def _taking(source: Source, targets: Mapping[str, Any] | None, report: LoadReport) -> Taking:
    """Return what this rank takes, by the report of its check."""
    taking = Taking(source)
    for name in source.names if targets is None else source.names & targets.keys():
        taking.add(name, [path for path in report.unexpected if path == name or path.startswith(f"{name}/")])
    return taking
