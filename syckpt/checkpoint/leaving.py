"""How a manager is left: its with-block ends, well or by an exception, or nobody ever closes it.

A clean end saves what advanced and waits for it; an end by exception waits for what was handed over and saves nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from syckpt.checkpoint.ledger import Ledger
from syckpt.checkpoint.saver import Saver

__all__ = ["close_quietly", "leave", "save_finally"]

_log = logging.getLogger("syckpt")


def leave(
    error: type[BaseException] | None, *, close: Callable[[], None], final_save: Callable[[], Exception | None] = lambda: None
) -> None:
    """Close a manager whose block ends by `error`, or well: then `final_save()` comes first.

    Raises: what it raises, or returns as an earlier failure; what `close` raises, which is only logged where `error` propagates already.
    """
    if error is not None:
        # Half-updated state is never saved; what was handed over before is.
        _close_logged(close, error.__name__)
        return
    try:
        earlier = final_save()
    except BaseException as exc:
        _close_logged(close, type(exc).__name__)
        raise
    close()
    if earlier is not None:
        raise earlier


def save_finally(saver: Saver, ledger: Ledger, *, save: Callable[[], object]) -> Exception | None:
    """Wait for earlier saves, and save what is left; return an earlier failure that is still to be raised, which does not prevent this."""
    saver.wait_for(None, timeout_s=None)
    earlier: Exception | None = None
    try:
        ledger.raise_failure()
    except Exception as exc:  # noqa: BLE001 - also what a callback raised
        earlier = exc
    save()
    return earlier


def close_quietly(saver: Saver, ledger: Ledger, pid: int) -> None:
    """For a manager that process `pid` never closed: its saves become durable all the same, and failures are at least logged."""
    if os.getpid() != pid:
        return
    try:
        saver.close()
        ledger.raise_failure()
    except Exception as exc:  # noqa: BLE001 - also what a callback raised
        _log.error("a save of a manager that was not closed failed: %s", exc)


def _close_logged(close: Callable[[], None], leaving_by: str) -> None:
    try:
        close()
    except Exception as exc:  # noqa: BLE001 - also what a callback raised; what the script leaves by is what propagates
        _log.error("while leaving by %s: %s", leaving_by, exc)
