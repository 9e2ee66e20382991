"""How a document's fields are checked when they are read: one error, naming the document and the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from syckpt.errors import IntegrityError

__all__ = ["Fields"]

T = TypeVar("T")


def _is_int(value: Any) -> bool:
    return type(value) is int


class Fields:
    """Typed access to a decoded body. Whatever is missing or of another type raises IntegrityError naming `where`."""

    def __init__(self, body: Any, *, where: str) -> None:
        self.where = where
        self._body = body if isinstance(body, dict) else self.fail("expected an object")

    def fail(self, why: str) -> Any:
        raise IntegrityError(f"{self.where}: malformed: {why}")

    def raw(self, name: str) -> Any:
        if name not in self._body:
            self.fail(f"no field {name!r}")
        return self._body[name]

    def _wrong(self, name: str, expected: str) -> Any:
        self.raw(name)  # says so where it is missing
        return self.fail(f"field {name!r} is not {expected}")

    def parse(self, name: str, convert: Callable[[Any], T]) -> T:
        """Return `convert(field)`; any of its ValueError, TypeError, LookupError is a malformed field."""
        try:
            return convert(self.raw(name))
        except (ValueError, TypeError, LookupError, OverflowError) as exc:
            if isinstance(exc, IntegrityError):
                raise
            return self.fail(f"field {name!r}: {exc}")  # type: ignore[no-any-return]

    def text(self, name: str) -> str:
        value = self._body.get(name)
        return value if isinstance(value, str) else self._wrong(name, "a text")

    def nanoseconds(self, name: str) -> int:
        """Return a time since the Unix epoch, which is written as decimal text: it exceeds 2^53."""
        text = self.text(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else self.fail(f"field {name!r} is not a time")

    def text_or_none(self, name: str) -> str | None:
        return None if self.raw(name) is None else self.text(name)

    def integer(self, name: str, *, least: int = 0) -> int:
        value = self._body.get(name)
        return value if type(value) is int and value >= least else self._wrong(name, f"an integer of at least {least}")

    def boolean(self, name: str) -> bool:
        value = self._body.get(name)
        return value if isinstance(value, bool) else self._wrong(name, "a boolean")

    def items(self, name: str) -> list[Any]:
        value = self._body.get(name)
        return value if isinstance(value, list) else self._wrong(name, "a list")

    def integers(self, name: str) -> list[int]:
        value = self.items(name)
        return value if all(_is_int(n) and n >= 0 for n in value) else self.fail(f"field {name!r} holds other than natural numbers")

    def texts(self, name: str) -> list[str]:
        value = self.items(name)
        return value if all(isinstance(t, str) for t in value) else self.fail(f"field {name!r} holds other than texts")

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._body.get(name)
        return value if isinstance(value, dict) else self._wrong(name, "an object")

    def columns(self, name: str, *names: str) -> tuple[list[Any], ...]:
        """Return the columns of a table, which must be of equal length."""
        table = Fields(self.mapping(name), where=f"{self.where}: {name}")
        found = tuple(table.items(column) for column in names)
        if len({len(column) for column in found}) > 1:
            self.fail(f"columns of {name!r} differ in length")
        return found
