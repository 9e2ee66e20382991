"""What became of the saves: the newest announced and published ids, and failures that the script has not heard of yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from syckpt.checkpoint.saver import PendingCommit
from syckpt.errors import SyckptError
from syckpt.objects.commit import Commit

__all__ = ["Ledger", "joined"]

_log = logging.getLogger("syckpt")


class Ledger:
    """Accounts of one manager's saves. Apart from the manager, so that a saver at work does not keep the manager alive."""

    def __init__(self, *, on_error: Literal["raise", "warn"], on_stats: Callable[[dict[str, Any]], None] | None) -> None:
        self.resumed: Commit | None = None
        """The commit that the run goes on from."""
        self.failures = 0
        """How many saves have failed so far."""
        self._on_error = on_error
        self._on_stats = on_stats
        self._announced: str | None = None
        self._published: str | None = None
        self._unheard: dict[str, SyckptError] = {}
        self._told: set[str] = set()
        self._names: dict[str, tuple[str | None, tuple[str, ...]]] = {}
        self._lock = threading.Lock()

    @property
    def newest(self) -> str | None:
        """Id of the newest save that has not failed; else of what was resumed."""
        return self._announced or self._published or (self.resumed.id if self.resumed else None)

    @property
    def lost(self) -> bool:
        """Whether the newest save has failed."""
        return self.failures > 0 and self._announced is None

    def announce(self, pending: PendingCommit, *, name: str | None = None, tags: Iterable[str] = ()) -> None:
        """A save was handed over; it may have failed by now, when the writer was found dead."""
        with self._lock:
            self._announced = None if pending.failed else pending.id
            if not pending.failed:
                self._names[pending.id] = (name, tuple(tags))

    def heard(self, error: SyckptError) -> None:
        """A failure was raised by other means."""
        with self._lock:
            self._unheard = {commit: other for commit, other in self._unheard.items() if other is not error}

    def unheard(self) -> dict[str, SyckptError]:
        """Return the failures that were not raised yet, oldest first."""
        with self._lock:
            return dict(self._unheard)

    def told(self, commits: Iterable[str]) -> None:
        """The failures of these saves are raised on all ranks: also of one of which this rank's writer has not told yet."""
        with self._lock:
            self._told.update(commits)
            self._unheard = {commit: error for commit, error in self._unheard.items() if commit not in self._told}

    def names_in_hand(self, kind: str) -> list[tuple[str, ...]]:
        """Names (or tags) of the saves that are not settled."""
        return [((name,) if name else ()) if kind == "names" else tags for name, tags in self._names.values()]

    def settle(self, pending: PendingCommit, commit: Commit | None, error: SyckptError | None) -> None:
        """A save became durable, or failed."""
        with self._lock:
            self._names.pop(pending.id, None)
            if commit is not None:
                self._published = commit.id
            elif error is not None:
                self.failures += 1
                if self._announced == pending.id:
                    self._announced = None
                if self._on_error == "raise" and pending.id not in self._told:
                    self._unheard[pending.id] = error
        if error is not None:
            _log.error("save %s failed: %s", pending.id, error)
        if commit is not None:
            _log.info("%s", line(commit))
            if self._on_stats is not None:
                self._on_stats(commit.stats)

    def raise_failure(self) -> None:
        """Raise the oldest failure that was not raised yet, once; further ones are named in its text."""
        with self._lock:
            unheard, self._unheard = list(self._unheard.values()), {}
        if unheard:
            raise joined(unheard)


def joined(errors: Sequence[SyckptError]) -> SyckptError:
    """Return the first of several failures; the further ones are named in its text."""
    first = errors[0]
    if len(errors) == 1:
        return first
    return type(first)(f"{first} (and {len(errors) - 1} more saves failed: {'; '.join(map(str, errors[1:]))})")


def line(commit: Commit) -> str:
    """Return the one line that a save leaves in the log."""
    stats = commit.stats
    return (
        f"saved {commit.id} step {commit.step}: stall {1e3 * stats.get('stall_s', 0.0):.1f} ms, staged {_mb(stats.get('staged_bytes', 0))},"
        f" deduplicated {_mb(stats.get('deduplicated_bytes', 0))}, written {_mb(stats.get('written_bytes', 0))}"
        f" ({stats.get('ratio', 1.0):.2f}x), durable after {stats.get('durable_s', 0.0):.2f} s"
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
