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

    def __init__(
        self,
        *,
        on_error: Literal["raise", "warn"],
        on_stats: Callable[[dict[str, Any]], None] | None,
        on_durable: Callable[[Commit], None] | None,
        parent: str | None,
    ) -> None:
        self.failures = 0
        """How many saves have failed so far."""
        self._on_error = on_error
        self._on_stats = on_stats
        self._on_durable = on_durable
        self._announced: str | None = None
        self._published: str | None = None
        self._base = parent
        self._lost = False
        self._unheard: dict[str, SyckptError] = {}
        self._told: set[str] = set()
        self._callback_error: Exception | None = None
        self._names: dict[str, tuple[str | None, tuple[str, ...]]] = {}
        self._lock = threading.Lock()

    @property
    def newest(self) -> str | None:
        """Id of the newest save that has not failed; before the first one, of the commit that the state descends from."""
        return self._announced or self._published or self._base

    @property
    def parent(self) -> str | None:
        """Id of the save, or commit, that the state at hand descends from: what the next save follows."""
        return self._announced or self._base

    @property
    def only_warns(self) -> bool:
        """Whether failures are logged and counted, and raised by nothing but `result`."""
        return self._on_error == "warn"

    @property
    def lost(self) -> bool:
        """Whether the newest save has failed."""
        return self._lost

    def stand_on(self, commit: str | None) -> None:
        """The state at hand is that of a commit, or descends from it (None: from no one); no save is in hand."""
        with self._lock:
            self._announced, self._base, self._lost = None, commit, False

    def announce(self, pending: PendingCommit, *, name: str | None = None, tags: Iterable[str] = ()) -> None:
        """A save was handed over; it may have failed by now, when the writer was found dead."""
        with self._lock:
            self._announced, self._lost = (None, True) if pending.failed else (pending.id, False)
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
        """A save became durable, or failed. What a callback of the user's raises waits for `raise_failure`: other saves are in hand."""
        with self._lock:
            self._names.pop(pending.id, None)
            if commit is not None:
                self._published = self._base = commit.id
            elif error is not None:
                self.failures += 1
                if self._announced == pending.id:
                    self._announced, self._lost = None, True
                if self._on_error == "raise" and pending.id not in self._told:
                    self._unheard[pending.id] = error
        if error is not None:
            _log.error("save %s failed: %s", pending.id, error)
        if commit is not None:
            _log.info("%s", line(commit))
            if is_stale(commit):
                _log.warning(
                    "stale state? none of the %d trainable tensors in %s has changed since the commit before, though %d steps were made:"
                    " check that what is registered is what is being trained",
                    commit.stats["trainable"],
                    commit.id,
                    commit.stats["steps"],
                )
            self._tell("on_stats", self._on_stats, commit.stats, of=commit)
            self._tell("finalize_callback", self._on_durable, commit, of=commit)

    def _tell(self, name: str, callback: Callable[[Any], None] | None, what: Any, *, of: Commit) -> None:
        if callback is None:
            return
        try:
            callback(what)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is kept and raised later
            _log.exception("%s raised for %s, which is durable", name, of.id)
            if self._on_error == "raise":
                self._callback_error = self._callback_error or exc

    def raise_callback_error(self) -> None:
        """Raise what a callback raised, once: the first, if there were several; all were logged."""
        error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    def raise_failure(self) -> None:
        """Raise the oldest failure that was not raised yet, once; further ones are named in its text. Else as `raise_callback_error`."""
        with self._lock:
            unheard, self._unheard = list(self._unheard.values()), {}
        if unheard:
            self._callback_error = None
            raise joined(unheard)
        self.raise_callback_error()


def joined(errors: Sequence[SyckptError]) -> SyckptError:
    """Return the first of several failures; the further ones are named in its text."""
    first = errors[0]
    if len(errors) == 1:
        return first
    return type(first)(f"{first} (and {len(errors) - 1} more saves failed: {'; '.join(map(str, errors[1:]))})")


def is_stale(commit: Commit) -> bool:
    """Whether steps were made since the parent, and every trainable tensor, on all ranks, has the bits that it had there."""
    stats = commit.stats
    return bool(commit.parents) and stats.get("steps", 0) > 0 and 0 < stats.get("trainable", 0) == stats.get("unchanged_trainable")


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
