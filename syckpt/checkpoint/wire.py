"""Messages between a trainer and its writer: JSON behind an 8-byte header (length, whether a descriptor comes along). Torch-free."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from typing import Any

__all__ = ["Channel", "PeerGone", "PeerStuck", "watch_process"]

_HEADER = struct.Struct("<IB3x")
_MAX_NBYTES = 1 << 30


class PeerGone(Exception):
    """The other process has closed its end."""


class PeerStuck(PeerGone):
    """The other process takes, or finishes, no message within the time allowed. What it has got of one is cut off: it cannot go on."""


class Channel:
    """One end of a socket pair. `send` and `receive` may be used by one thread each.

    `timeout_s` bounds a send, and each silence inside of a message. `peer` is a descriptor of the other process (`watch_process`): should
    it die in the middle of a message, its end may be kept open by children that inherited it.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float | None = None, peer: int | None = None) -> None:
        self.sock = sock
        self._peer = peer
        sock.settimeout(timeout_s)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: dict[str, Any], *, fd: int | None = None) -> None:
        """Send a message, with a descriptor if given. Raises: PeerGone."""
        data = json.dumps(message).encode()
        header = _HEADER.pack(len(data), fd is not None)
        try:
            if fd is None:
                self.sock.sendall(header + data)
            else:
                # The descriptor travels with the first byte; the header is short enough never to be cut.
                sent = socket.send_fds(self.sock, [header], [fd])
                self.sock.sendall(header[sent:] + data)
        except TimeoutError as exc:
            raise PeerStuck(str(exc)) from exc
        except OSError as exc:
            raise PeerGone(str(exc)) from exc
        except BaseException:
            # Interrupted in the middle of a message (Ctrl-C): whatever followed would be read as its rest.
            self.close()
            raise

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """Return the next message and its descriptor. Raises: PeerGone, also in the middle of a message."""
        try:
            first, fds, _, _ = socket.recv_fds(self.sock, _HEADER.size, 1)
            header = first + self._exactly(_HEADER.size - len(first)) if first else b""
            if not header:
                raise PeerGone("closed")
            length, has_fd = _HEADER.unpack(header)
            if length > _MAX_NBYTES or bool(has_fd) != bool(fds):
                raise PeerGone(f"a malformed message of {length} bytes")
            return json.loads(self._exactly(length)), fds[0] if fds else None
        except TimeoutError as exc:
            raise PeerStuck(str(exc)) from exc
        except OSError as exc:
            raise PeerGone(str(exc)) from exc
        except BaseException:
            self.close()
            raise

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            if self._peer is not None and self.fileno() not in select.select([self.fileno(), self._peer], [], [])[0]:
                raise PeerGone("ended in the middle of a message")
            got = self.sock.recv_into(view)
            if got == 0:
                raise PeerGone("closed in the middle of a message")
            view = view[got:]
        return bytes(data)

    def close(self) -> None:
        self.sock.close()


def watch_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None where the system has none."""
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
