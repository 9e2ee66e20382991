"""The errors of syckpt, grouped by what a handler would do about them.

    SyckptError
    |- NotFoundError (LookupError)     no such repository, commit, ref, item     choose another
    |- ConflictError                   someone else writes it, the name is taken  re-read, or another branch
    |- IntegrityError                  damaged or missing bytes                   stop; `syckpt verify`
    |- FormatError                     a newer version, an unknown feature        upgrade
    |- StoreError (OSError)            the disk or the remote failed              free space, retry
    |- StateError (ValueError)         the state does not fit, cannot be carried  mend the script
    `- CoordinationError               ranks, writers, launchers                  restart the job
       |- RankTimeout (TimeoutError)
       |- RankFailure
       |- WriterDied
       `- RestartsExhausted

Every message says what, which path, rank or id, what was expected and found, and what to do. All of them pickle.
"""

from __future__ import annotations

__all__ = [
    "ConflictError",
    "CoordinationError",
    "FormatError",
    "IntegrityError",
    "NotFoundError",
    "RankFailure",
    "RankTimeout",
    "RestartsExhausted",
    "StateError",
    "StoreError",
    "SyckptError",
    "WriterDied",
    "exit_code",
    "from_wire",
    "to_wire",
]


class SyckptError(Exception):
    """Any error that syckpt raises on purpose."""


class NotFoundError(SyckptError, LookupError):
    """No repository, commit, ref, item or file of that name."""


class ConflictError(SyckptError):
    """Somebody else moved the ref, holds the branch, or took the name."""


class IntegrityError(SyckptError):
    """Bytes are damaged or missing: what was read is not what was written."""


class FormatError(SyckptError):
    """Written by a version, or with a feature, that this one does not know."""


class StoreError(SyckptError, OSError):
    """The byte store refused or failed."""


class StateError(SyckptError, ValueError):
    """The state cannot be carried, or does not fit its target."""


class CoordinationError(SyckptError):
    """Ranks, writers or launchers could not agree or did not answer."""


class RankTimeout(CoordinationError, TimeoutError):
    """Ranks did not arrive within the deadline."""


class RankFailure(CoordinationError):
    """Another rank failed."""


class WriterDied(CoordinationError):
    """The background writer process ended with saves in hand."""


class RestartsExhausted(CoordinationError):
    """The launcher gave up restarting."""


_EXIT_CODES: tuple[tuple[type[SyckptError], int], ...] = (
    (NotFoundError, 3),
    (ConflictError, 4),
    (IntegrityError, 5),
    (FormatError, 6),
    (StoreError, 7),
    (StateError, 8),
    (CoordinationError, 9),
)


def exit_code(error: SyckptError) -> int:
    """Return the command line's exit status for an error; 1 for an unclassified one."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


_BY_NAME = {name: cls for name, cls in globals().items() if isinstance(cls, type) and issubclass(cls, SyckptError)}


def to_wire(error: BaseException) -> dict[str, str]:
    """Describe an error for another process, without pickle."""
    if isinstance(error, SyckptError):
        return {"class": type(error).__name__, "message": str(error)}
    kind = "StoreError" if isinstance(error, OSError) else "SyckptError"
    return {"class": kind, "message": f"{type(error).__name__}: {error}"}


def from_wire(wire: dict[str, str]) -> SyckptError:
    """Rebuild what `to_wire` described, in its own class."""
    return _BY_NAME.get(wire["class"], SyckptError)(wire["message"])
