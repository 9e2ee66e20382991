"""Whether a process of this machine lives, and since when: a pid alone may be another process's by now."""

from __future__ import annotations

import os

__all__ = ["start_time"]


def start_time(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; 0 where the system does not tell, None if it is dead.

    A zombie is dead: it writes nothing.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in field 2 may hold spaces and parentheses: what follows is counted from the last one.
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # alive, another user's
            return 0
        return 0
    return None if state in (b"Z", b"X") else int(fields[18])
