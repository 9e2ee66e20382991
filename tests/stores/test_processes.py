"""Which processes live, and since when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from syckpt.stores.processes import start_time


def test_this_process_has_begun_at_one_moment() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid())
    assert start_time(os.getpid()) is not None


def test_a_zombie_is_as_dead_as_one_that_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert start_time(child.pid) is not None
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet collected
    if os.path.exists("/proc/self/stat"):
        assert start_time(child.pid) is None
    child.communicate()
    assert start_time(child.pid) is None


@pytest.mark.parametrize(("error", "expected"), [(None, 0), (PermissionError, 0), (ProcessLookupError, None)])
def test_a_process_that_the_system_hides_lives_unless_its_pid_is_free(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None, expected: int | None
) -> None:
    def kill(pid: int, number: int) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(os, "kill", kill)
    assert start_time(2**22 + 1) == expected  # above the largest pid: nothing in /proc
