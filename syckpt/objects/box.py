"""Boxes: half-open regions of a global tensor, in elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from syckpt.errors import StateError

__all__ = ["Box"]


@dataclass(frozen=True)
class Box:
    """The elements `offsets[d] <= i_d < offsets[d] + sizes[d]` of a tensor, per dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or any(n < 0 for n in (*self.offsets, *self.sizes)):
            raise StateError(f"not a box: offsets {self.offsets}, sizes {self.sizes}")

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Yield offsets and sizes: `offsets, sizes = box`."""
        yield self.offsets
        yield self.sizes

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.sizes)

    def within(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies in a tensor of that shape."""
        return len(shape) == len(self.sizes) and all(o + n <= total for o, n, total in zip(self.offsets, self.sizes, shape, strict=True))

    def meets(self, other: Box) -> bool:
        """Whether two boxes of one tensor share elements."""
        low = map(max, self.offsets, other.offsets)
        ends = ((a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        return all(begin < min(pair) for begin, pair in zip(low, ends, strict=True))
