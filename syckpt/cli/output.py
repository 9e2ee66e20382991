"""Text and JSON for stdout. Whatever comes from a repository may be hostile: control characters never reach the terminal.

JSON is strict: a float that JSON does not know stands as the text "nan", "inf" or "-inf" (as `float()` reads them), and a value of
a type that JSON does not know as Python's text of it. Colour only on terminals, and never where NO_COLOR is set.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from syckpt.objects.text import printable

__all__ = [
    "age",
    "aligned",
    "count",
    "cut",
    "echo",
    "echo_json",
    "is_narrow",
    "nbytes",
    "note",
    "number",
    "one_line",
    "plain",
    "printable",
    "short",
    "width",
    "wrapped",
]

_NARROW_BELOW = 100
_SIZE = re.compile(r"(?<=\d) (?=(?:B|kB|MB|GB|TB|s)\b)")
_GLUE = "\xa0"
"""A space at which no line ends."""


def echo(lines: Iterable[str]) -> None:
    """Print lines; characters that the output's encoding lacks are escaped."""
    text = "\n".join(lines)
    if text:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # None: the caller closed it
        colour = False if os.environ.get("NO_COLOR") else None
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding), color=colour)


def note(text: str) -> None:
    """Say on stderr that there is nothing to print: stdout stays empty for programs."""
    click.echo(f"syckpt: {text}", err=True)


def echo_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(plain(value), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value as JSON knows it, by the rules above."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        # hex: Python refuses decimal text of huge integers.
        return value if value.bit_length() <= 64 else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _text(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [plain(item) for item in value]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # It holds an integer of more digits than Python prints.
        return f"<{type(value).__name__}>"


def short(value: Any, *, limit: int = 60) -> str:
    """Return Python's text of a value on one line, cut to `limit` characters."""
    return cut(printable(_text(value)), limit)


def one_line(text: str) -> str:
    """Return text of several lines as one, without control characters."""
    return printable(" ".join(text.split("\n")))


def cut(text: str, limit: int | None) -> str:
    """Return text shortened to `limit` characters; None is no limit."""
    if limit is None or len(text) <= limit:
        return text
    return text[: max(0, limit - 3)] + "..." if limit >= 8 else text[:limit]


def wrapped(text: str, *, indent: str = "  ", used: int = 0) -> list[str]:
    """Return text in lines that fit beside `used` columns of the terminal, all but the first indented; ids, paths and sizes stay whole."""
    columns = width()
    if columns is None or len(text) + used <= columns:
        return [text]
    glued = _SIZE.sub(_GLUE, text)
    lines = textwrap.wrap(glued, max(20, columns - used), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines]


def width() -> int | None:
    """Return the columns of the terminal (or what COLUMNS says), None for a file or a pipe: nothing is cut there."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def is_narrow() -> bool:
    """Whether a row with all its columns would wrap."""
    columns = width()
    return columns is not None and columns < _NARROW_BELOW


def aligned(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[list[str]]:
    """Return the rows with each cell padded to its column's width, the columns in `right` on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flush = set(right)
    return [
        [cell.rjust(size) if index in flush else cell.ljust(size) for index, (cell, size) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]


def nbytes(size: Any) -> str:
    """Return bytes for people, in powers of 1000; "-" for what is no number."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        return "-"
    if abs(size) < 1000:
        return f"{size:.0f} B"
    size, units = size / 1000, iter(("kB", "MB", "GB", "TB"))
    unit = next(units)
    while abs(size) >= 999.95 and (larger := next(units, None)):
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}"


def number(value: Any, form: str = ".6g", unit: str = "") -> str:
    """Return a number in a format, with its unit; "-" for what is no number."""
    return "-" if isinstance(value, bool) or not isinstance(value, int | float) else f"{value:{form}}{unit}"


def count(number: int, what: str) -> str:
    """Return `1 commit`, `2 commits`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def age(seconds: float) -> str:
    """Return how long ago something was, in one unit."""
    for size, unit in ((365 * 86400, "y"), (86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
