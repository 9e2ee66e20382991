"""Text that may be printed, whatever it came from."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return text with everything that could move a cursor escaped as in a Python literal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
