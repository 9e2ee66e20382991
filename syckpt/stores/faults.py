"""Faults on demand: a local store that stops, fails or waits at a chosen mutation, also in a writer process that is told only its spec.

Mutations are counted from 1, over all stores of one spec in the process. `gate` is the path of a FIFO: while it exists, a mutation
waits until somebody has opened it for writing and closed it; then it is removed and later mutations pass. One process, one gate.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from syckpt.errors import FormatError, StoreError
from syckpt.stores.base import MutationHook, StoreSpec
from syckpt.stores.local import LocalStore

__all__ = ["FaultPlan", "faulty", "open_faulty"]


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail() -> None:
    raise StoreError("injected fault")


def _no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _io_error() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


_ACTIONS: dict[str, Callable[[], None]] = {"kill": _kill, "stop": _stop, "error": _fail, "enospc": _no_space, "eio": _io_error}


@dataclass(frozen=True)
class FaultPlan:
    """What happens before which mutation.

    stop_at: the number of the mutation before which `action` happens, once; None for never.
    action: `kill` (SIGKILL), `stop` (SIGSTOP: the mutation follows once it is continued), `error` (StoreError), `enospc` or `eio`
        (an OSError, as if from the system call).
    gate: a FIFO to wait at, see above. trace: a file that gets a line `<number> <operation> <key>` a mutation.
    only: the one operation that the plan sees (counts, traces, stops, waits for); None for all.
    spare: a process, by its pid, in which nothing happens: a trainer opens the store by the same spec as its writer.
    arm: a file with a number in place of `stop_at` (0: never); the mutation that finds it removes it and counts as 1. So one process
        can be stopped again and again, or only the first of several. Rename it into place: it must never be seen half written.
    lasting: whether every later mutation suffers `action` too, as on a disk that stays broken.
    """

    stop_at: int | None = None
    action: str = "kill"
    gate: str | None = None
    trace: str | None = None
    only: str | None = None
    spare: int | None = None
    arm: str | None = None
    lasting: bool = False

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise FormatError(f"unknown fault action {self.action!r}; expected one of {', '.join(_ACTIONS)}")


def faulty(path: str | os.PathLike[str], plan: FaultPlan) -> StoreSpec:
    """Return the spec of a local store at `path` (the `.syckpt` directory itself) that suffers `plan`."""
    return StoreSpec("faulty", os.path.abspath(path), tuple(asdict(plan).items()))


def open_faulty(spec: StoreSpec) -> LocalStore:
    """Open the store of a spec that `faulty` made."""
    options: dict[str, Any] = dict(spec.options)
    return LocalStore(spec.path, before_mutation=_hook(spec, FaultPlan(**options)))


_counts: Counter[StoreSpec] = Counter()
_armed: dict[StoreSpec, int] = {}
_lock = threading.Lock()


def _hook(spec: StoreSpec, plan: FaultPlan) -> MutationHook:
    def before_mutation(operation: str, key: str) -> None:
        if plan.only not in (None, operation) or plan.spare == os.getpid():
            return
        with _lock:  # held at the gate: the other threads wait there too
            if plan.arm is not None:
                _take_arm(spec, plan.arm)
            _counts[spec] += 1
            number = _counts[spec]
            if plan.trace is not None:
                with open(plan.trace, "a", encoding="ascii") as file:
                    file.write(f"{number} {operation} {key}\n")
            if plan.gate is not None:
                _wait_at(plan.gate)
            stop_at = _armed.get(spec, plan.stop_at)
        if stop_at and (number == stop_at or (plan.lasting and number > stop_at)):
            _ACTIONS[plan.action]()

    return before_mutation


def _take_arm(spec: StoreSpec, path: str) -> None:
    with suppress(FileNotFoundError):
        with open(path, encoding="ascii") as file:
            _armed[spec] = int(file.read())
        os.unlink(path)
        _counts[spec] = 0


def _wait_at(gate: str) -> None:
    with suppress(FileNotFoundError):
        with open(gate, "rb") as file:  # blocks until the other side opens
            file.read()
        os.unlink(gate)
