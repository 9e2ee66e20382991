"""The life of a writer process, seen from its trainer: how it is started, heard, and brought to its end. `saver` gives it work."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syckpt.checkpoint.wire import Channel, PeerGone, watch_process
from syckpt.dist import topology
from syckpt.errors import WriterDied
from syckpt.repo import owner
from syckpt.repo.transaction import Hold
from syckpt.stores.base import StoreSpec

__all__ = ["Settings", "WriterProcess"]

# Python's own modules first, then the packages that the writer needs, and nothing else: no module in the user's directories, no
# `sitecustomize` or `.pth` file takes a name, or time.
_WRITER = (
    "import sys; sys.path[:] = [*filter(None, sys.path), *sys.argv[3:]];"
    " from syckpt.checkpoint.writer import main; sys.exit(main(sys.argv[1:3]))"
)
_PACKAGES = ("numpy", "blake3", "backports.zstd", "cryptography", "syckpt")


@dataclass(frozen=True)
class Settings:
    """How a writer works. `threads` hash and encode; `timeout_s` bounds every wait for the writer."""

    spec: StoreSpec
    token: str
    compression: str
    keyframe_every: int
    threads: int
    timeout_s: float
    rank: int = 0
    world_size: int = 1
    signer: str | None = None
    """Absolute path of the private key that rank 0's writer signs with."""
    retention: dict[str, Any] | None = None
    """What rank 0's writer keeps of the branch, as `Retention.to_wire` says it; None for everything."""


@dataclass
class WriterProcess:
    """A writer, and what this side knows of it. Not safe to use from several threads at once."""

    popen: subprocess.Popen[bytes]
    channel: Channel
    pidfd: int | None
    ready: bool = False
    waits_for: str | None = None
    tidies: bool = False
    """Whether it applies retention, after a save that it has announced."""
    slots: set[int] = field(default_factory=set)
    """Slots that this process has mapped, in their present size."""
    table: dict[str, Any] | None = None
    """The table of layouts that this process was given last."""

    @classmethod
    def start(cls, *, timeout_s: float) -> WriterProcess:
        """Start a process, which waits for `begin`; `timeout_s` bounds every message to it. Raises: WriterDied."""
        ours, theirs = socket.socketpair()
        me = watch_process(os.getpid())
        passed = [theirs.fileno()] if me is None else [theirs.fileno(), me]
        try:
            popen = subprocess.Popen(
                [sys.executable, "-S", "-c", _WRITER, str(theirs.fileno()), "-" if me is None else str(me), *_package_folders()],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=topology.child_environment(PYTHONPATH="", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
                # Launchers kill process groups; the writer has to outlive its trainer.
                start_new_session=True,
            )
        except OSError as exc:
            raise WriterDied(f"the writer process could not be started: {exc}") from exc
        finally:
            theirs.close()
            if me is not None:
                os.close(me)
        return cls(popen, Channel(ours, timeout_s=timeout_s), watch_process(popen.pid))

    @property
    def pid(self) -> int:
        """The process id."""
        return self.popen.pid

    def begin(self, settings: Settings, hold: Hold) -> None:
        """Tell the process what it works on. Raises: PeerGone."""
        self.channel.send(
            {
                "op": "start",
                "store": settings.spec.to_wire(),
                "branch": hold.branch,
                "run": hold.run,
                "generation": hold.generation,
                "number": hold.number,
                "tip": hold.tip,
                "token": settings.token,
                "trainer": vars(owner.this_process()),
                "compression": settings.compression,
                "keyframe_every": settings.keyframe_every,
                "threads": settings.threads,
                "timeout_s": settings.timeout_s,
                "rank": settings.rank,
                "world_size": settings.world_size,
                "signer": settings.signer,
                "retention": settings.retention,
            }
        )

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next event, waiting for it up to `timeout_s`; None when none came. Raises: PeerGone when there will be none."""
        if self.channel.fileno() < 0:
            raise PeerGone("closed")
        watched: list[Any] = [self.channel] if self.pidfd is None else [self.channel, self.pidfd]
        ready, _, _ = select.select(watched, [], [], max(0.0, timeout_s))
        if self.channel in ready:
            return self.channel.receive()[0]
        if ready or self.popen.poll() is not None:
            raise PeerGone("ended")
        return None

    def await_exit(self, timeout_s: float) -> int | None:
        """Return the exit status, or None if the process is still there after `timeout_s`."""
        try:
            if self.pidfd is None:
                return self.popen.wait(timeout_s)
            # Not `Popen.wait`, which sleeps in between.
            select.select([self.pidfd], [], [], timeout_s)
            return self.popen.poll()
        except subprocess.TimeoutExpired:
            return None

    def end(self, *, timeout_s: float) -> int | None:
        """Let it end, which it does after its last save when nobody is at the other end; by force after `timeout_s`. Returns its status."""
        self.channel.close()
        code = self.await_exit(timeout_s)
        if code is None:
            self.popen.kill()
            code = self.await_exit(10)  # Not without end: a process in a system call that hangs cannot be killed.
        self._let_go()
        return code

    def leave(self) -> None:
        """Part from it while it is still at work: it completes what it can, and ends."""
        self.channel.close()
        self._let_go()

    def _let_go(self) -> None:
        """Give up the descriptor; should the process still be there, its status is collected in the background."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        if self.popen.poll() is None:
            threading.Thread(target=self.popen.wait, name="syckpt-reaper", daemon=True).start()


def _package_folders() -> list[str]:
    """Return the folders from which this process has imported the packages that the writer needs."""
    found = [(name, sys.modules[name].__file__) for name in _PACKAGES if name in sys.modules]
    return list(dict.fromkeys(str(Path(file).absolute().parents[name.count(".") + 1]) for name, file in found if file))
