"""Names of files in `staging/`: each says which process is writing it, so that what a dead one left can be told and removed."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import time

from syckpt.stores.processes import start_time

__all__ = ["is_abandoned", "new_name"]

_FOREIGN_AGE_S = 24 * 3600
_SUFFIX = ".part"  # whatever else lies there is somebody else's
_counter = itertools.count()


def new_name() -> str:
    """Return a name that no living process has given."""
    pid = os.getpid()
    return f"{_host()}-{pid}-{start_time(pid) or 0}-{next(_counter)}{_SUFFIX}"


@functools.cache
def _host() -> str:
    """Return the host's name and pid namespace: containers may share the first, and then their pids mean nothing to each other."""
    try:
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def is_abandoned(name: str, modified_s: float) -> bool:
    """Whether nobody writes a staged file any more: its process is dead, or, where that cannot be known, it is a day old."""
    if not name.endswith(_SUFFIX):
        return False
    try:
        host, pid, start, _ = name.rsplit("-", 3)
        if host == _host():
            found = start_time(int(pid))
            return found is None or (start != "0" and found not in (0, int(start)))
    except ValueError:  # not named by this version: judged by its age
        pass
    return time.time() - modified_s > _FOREIGN_AGE_S
