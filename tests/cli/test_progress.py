"""The bar on a terminal: a pty stands for one."""

from __future__ import annotations

import os
import pty
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syckpt.cli import main
from syckpt.cli.progress import bar
from syckpt.repo.reader import Reader
from syckpt.testing.repositories import make_repository


class Terminal:
    """What a program draws on stderr, read from the other end."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stderr = open(slave, "w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        self._drawn = b""

    def wait_for(self, text: str) -> None:
        """Return once a text is drawn, behind what was waited for before."""
        deadline_s = time.monotonic() + 60  # a bar is drawn again and again, so that there is always something to read
        while text.encode() not in self._drawn:
            ready, _, _ = select.select([self._master], [], [], max(0, deadline_s - time.monotonic()))
            assert ready, self._drawn
            self._drawn += os.read(self._master, 65536)
        self._drawn = self._drawn.partition(text.encode())[2]

    def close(self) -> None:
        self.stderr.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    found = Terminal()
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    yield found
    found.close()


def test_a_bar_counts_commits(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    with bar("removing") as draw:
        assert draw is not None
        draw(1, 3)
        terminal.wait_for("removing")
        terminal.wait_for("1/3 commits")
        draw(2, 3)
        terminal.wait_for("2/3 commits")


def test_no_bar_is_drawn_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "stderr", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with bar("removing") as draw:
            assert draw is None


def test_the_bar_of_a_verification_moves_within_a_commit(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_repository(tmp_path, commits=1)
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    monkeypatch.setattr("syckpt.repo.verify._BATCH_NBYTES", 1)
    gate = threading.Semaphore(0)
    read_block = Reader.read_block

    def gated(*arguments: Any) -> memoryview:
        gate.acquire()
        return read_block(*arguments)

    monkeypatch.setattr(Reader, "read_block", gated)
    thread = threading.Thread(target=main, args=(["-C", str(tmp_path), "verify"],), kwargs={"standalone_mode": False})
    thread.start()
    try:
        terminal.wait_for("0/1 commits, 0 B of 20.4 kB")
        gate.release()
        terminal.wait_for("0/1 commits, 16.4 kB of 20.4 kB")
    finally:
        gate.release(9)
        thread.join()
