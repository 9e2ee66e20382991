"""Real faults for tests: system calls that fail or kill, by strace, and small, broken or cut-off file systems, by mounts.

    with strace("inject=pwritev:signal=SIGKILL:when=3", pid=process.pid):
        ...     # its third pwritev, and that of each of its later children, kills it before anything is written

Needs Linux; strace for the one, root and mounts for the other: `no_strace()` and `no_mounts()` say what is missing, for a test to skip.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CHANGES", "Call", "Image", "Victims", "calls_of", "no_mounts", "no_strace", "remount", "strace", "tmpfs"]

CHANGES = "pwritev,pwritev2,write,pwrite64,writev,fsync,fdatasync,link,linkat,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir"
"""The system calls that change a file system, in strace's form."""

_CALL = re.compile(r"(\d+)\s+(?:(\w+)\(|<\.\.\. (\w+) resumed>).*?(?:=\s+(-?\d+)|<unfinished \.\.\.>|\?)")


@cache
def no_strace() -> str | None:
    """Return why system calls cannot be injected here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    # What is wanted is attaching to a process that is no child; hardened kernels and containers forbid it.
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        done = subprocess.run(
            ["strace", "-qq", "-o", "/dev/null", "-p", str(sleeper.pid), "-e", "trace=none", "-e", "inject=fsync:error=EIO"],
            stderr=subprocess.PIPE,
            text=True,
            timeout=1,
            check=False,
        )
        return f"strace cannot attach to a process: {done.stderr.strip()}"
    except subprocess.TimeoutExpired:
        return None
    finally:
        sleeper.kill()
        sleeper.wait()


def no_mounts() -> str | None:
    """Return why file systems cannot be mounted here, or None."""
    if os.geteuid() != 0:
        return "only root may mount file systems"
    missing = [tool for tool in ("mount", "umount", "mkfs.ext4") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return None


@dataclass(frozen=True)
class Call:
    """One system call of a process, counted from 1 by its kind in that process, and what it returned."""

    name: str
    number: int
    returned: int | None


@contextmanager
def strace(*expressions: str, pid: int, paths: Sequence[str] = (), log: str = "/dev/null") -> Iterator[None]:
    """Trace a process and its later children by these `-e` expressions, from the entry on; it must wait until then.

    `paths`: only calls on these.
    """
    command = ["strace", "-f", "-s", "0", "-o", log]
    for expression in expressions:
        command += ["-e", expression]
    for path in paths:
        command += ["-P", path]
    tracer = subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        for line in tracer.stderr:
            if "attached" in line:
                break
        else:
            raise RuntimeError(f"strace did not attach to process {pid}")
        yield
    finally:
        if tracer.poll() is None:
            tracer.terminate()  # it lets its processes go on
        tracer.stderr.close()
        tracer.wait()


def calls_of(log: str) -> list[Call]:
    """Return the calls of a strace log; of several processes that made a n-th call of one kind, the first one's."""
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int], Call] = {}
    for line in Path(log).read_text(errors="replace").splitlines():
        match = _CALL.match(line)
        if match is None:
            continue
        pid, name, resumed, returned = match.groups()
        value = None if returned is None else int(returned)
        if resumed is not None:
            key = (resumed, counts[pid, resumed])
            if key in found and found[key].returned is None:
                found[key] = Call(*key, value)
            continue
        counts[pid, name] += 1
        key = (name, counts[pid, name])
        found.setdefault(key, Call(*key, value))
    return list(found.values())


class Victims:
    """A script that forks a process for each order, which waits until it is told to go; see `start`. Torch is imported once.

    It reads orders and writes answers, lines of JSON: `{"do": "start", ...}` -> `{"pid"}`, `{"do": "go"}` -> `{"status", "result"}`.
    """

    def __init__(self, script: Path) -> None:
        self._server = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def start(self, system: str, action: str, directory: Path, **options: Any) -> int:
        """Fork a process that will do something, and return its pid."""
        return int(self._ask({"do": "start", "system": system, "action": action, "directory": str(directory), **options})["pid"])

    def go(self) -> dict[str, Any] | None:
        """Let it run to its end; return `{"value"}` or `{"error"}`, or None where it was killed."""
        result: dict[str, Any] | None = self._ask({"do": "go"})["result"]
        return result

    def run(self, system: str, action: str, directory: Path, **options: Any) -> Any:
        """Do something undisturbed, and return its value or the text of its error."""
        self.start(system, action, directory, **options)
        result = self.go()
        assert result is not None, f"{system} {action} was killed"
        return result.get("value", result.get("error"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def _mounted(target: Path, *arguments: str) -> Iterator[Path]:
    target.mkdir(parents=True, exist_ok=True)
    _run("mount", *arguments, str(target))
    try:
        yield target
    finally:
        _run("umount", str(target))


@contextmanager
def tmpfs(target: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory with options like `size=1m,nr_inodes=20`."""
    with _mounted(target, "-t", "tmpfs", "-o", options, "tmpfs"):
        yield target


def remount(target: Path, options: str) -> None:
    """Change a mounted file system: its size, or `ro` and `rw`."""
    _run("mount", "-o", f"remount,{options}", str(target))


class Image:
    """An ext4 file system in a file, which writes back as late as it may: a copy of the file is what a loss of power leaves."""

    def __init__(self, path: Path, *, megabytes: int = 32) -> None:
        self.path = path
        with open(path, "wb") as file:
            file.truncate(megabytes << 20)
        _run("mkfs.ext4", "-q", "-F", str(path))

    @contextmanager
    def mounted(self, target: Path) -> Iterator[Path]:
        with _mounted(target, "-o", "loop,commit=300,noauto_da_alloc", str(self.path)):
            yield target

    def cut_off(self, target: Path) -> Image:
        """Return a copy as the disk is now, mounted or not: its journal is replayed when it is mounted."""
        _run("cp", "--sparse=always", str(self.path), str(target))
        copy = object.__new__(Image)
        copy.path = target
        return copy
