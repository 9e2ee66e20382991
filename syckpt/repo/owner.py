"""Which process is this, and is that one dead?"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from syckpt.objects.refs import Owner
from syckpt.stores.processes import start_time

__all__ = ["is_dead", "owner_of", "this_process", "wait_for_exit"]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def owner_of(pid: int) -> Owner:
    """Return the identity of a process of this machine; fields that the system does not tell are empty or 0."""
    try:
        pidns = os.readlink("/proc/self/ns/pid")
    except OSError:
        pidns = ""
    return Owner(socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), pidns, pid, start_time(pid) or 0)


def this_process() -> Owner:
    """Return the identity of the calling process."""
    return owner_of(os.getpid())


def is_dead(owner: Owner) -> bool | None:
    """Return whether a process has certainly ended; None when this machine cannot know.

    A pid that lives again with another start time is another process. A zombie is dead: it writes nothing.
    """
    here = this_process()
    if owner.host != here.host:
        return None
    if owner.boot != here.boot:
        return True
    if owner.pidns != here.pidns:
        return None
    found = start_time(owner.pid)
    # 0: of this process the system shows only that it lives.
    return found is None or found not in (0, owner.start)


def wait_for_exit(owner: Owner, *, timeout_s: float) -> bool:
    """Wait until a process of this machine has ended; False when it has not within `timeout_s` seconds, or cannot be watched."""
    if is_dead(owner) is not False:
        return is_dead(owner) is True
    if not hasattr(os, "pidfd_open"):
        return _poll_exit(owner, timeout_s=timeout_s)
    import select

    try:
        pidfd = os.pidfd_open(owner.pid)
    except OSError:
        return is_dead(owner) is True
    try:
        select.select([pidfd], [], [], timeout_s)
    finally:
        os.close(pidfd)
    return is_dead(owner) is True


def _poll_exit(owner: Owner, *, timeout_s: float) -> bool:
    import time

    deadline = time.monotonic() + timeout_s
    while is_dead(owner) is False and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_dead(owner) is True
