"""A progress bar for what may take long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Draw", "bar"]


class Draw(Protocol):
    """Draws a bar."""

    def __call__(self, done: int, total: int, text: str | None = None) -> None:
        """Draw how much is done; `text` stands beside it, None for how many commits that is."""


@contextmanager
def bar(doing: str) -> Iterator[Draw | None]:
    """Yield what draws a bar on stderr. None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(doing, total=None, text="")

        def draw(done: int, total: int, text: str | None = None) -> None:
            shown.update(task, completed=done, total=total, text=f"{done}/{total} commits" if text is None else text)

        yield draw
