"""Text that may be printed, whatever it came from, and periods of time as people write them."""

from __future__ import annotations

import re

__all__ = ["printable", "seconds_of"]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PERIOD = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")


def printable(text: str) -> str:
    """Return text with everything that could move a cursor escaped as in a Python literal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def seconds_of(period: str) -> float | None:
    """Return the seconds of a period such as "90s", "30m", "1.5h" or "1d"; None for any other text."""
    match = _PERIOD.fullmatch(period)
    return float(match[1]) * _UNITS_S[match[2]] if match else None
