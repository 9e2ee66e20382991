"""Boxes: half-open regions of a global tensor, in elements."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from syckpt.errors import StateError

__all__ = ["Box"]


class _Corners(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Box(_Corners):
    """The elements `offsets[d] <= i_d < offsets[d] + sizes[d]` of a tensor, per dimension d; `offsets, sizes = box`."""

    # A tuple, since hundreds of thousands are hashed and compared to plan a load.
    __slots__ = ()

    def __new__(cls, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
        if len(offsets) != len(sizes) or (sizes and (min(offsets) < 0 or min(sizes) < 0)):
            raise StateError(f"not a box: offsets {offsets}, sizes {sizes}")
        return super().__new__(cls, offsets, sizes)

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
