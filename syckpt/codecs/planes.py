"""Byte planes and differences of unsigned integers: the arithmetic of FORMAT.md, section 8.

Everything works on little-endian arrays in pieces that fit a core's cache, and writes where it is told: fresh pages cost more
than the arithmetic.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from syckpt.codecs.zstd import Buffer

__all__ = ["PIECE_NBYTES", "WIDTHS", "Array", "bits_per_byte", "elements", "gather", "sample", "scatter", "unzigzag_into", "zigzag_into"]

Array: TypeAlias = "np.ndarray[Any, Any]"

WIDTHS = (1, 2, 4, 8)
PIECE_NBYTES = 1 << 17
_SAMPLE_RUNS = 32
_SAMPLE_RUN_LENGTH = 128


def elements(buffer: Buffer, width: int) -> Array:
    """View a buffer's bytes as unsigned integers of `width` bytes. Raises: ValueError for another width or a broken element."""
    if width not in WIDTHS:
        raise ValueError(f"elements of {width} bytes; {WIDTHS} are known")
    values: Array = np.frombuffer(buffer, dtype=f"<u{width}")
    return values


def gather(source: Array, offset: int, span: int, stream: Array) -> None:
    """Copy bytes `offset` to `offset + span` of every element of `source` into `stream` (bytes)."""
    unit = _unit(offset, span)
    parts: Array = stream.view(f"<u{unit}").reshape(-1, span // unit)
    whole: Array = source.view(f"<u{unit}").reshape(len(source), -1)
    for part in range(span // unit):
        parts[:, part] = whole[:, offset // unit + part]


def scatter(stream: Array, offset: int, span: int, target: Array) -> None:
    """Invert `gather`."""
    unit = _unit(offset, span)
    parts: Array = stream.view(f"<u{unit}").reshape(-1, span // unit)
    whole: Array = target.view(f"<u{unit}").reshape(len(target), -1)
    for part in range(span // unit):
        whole[:, offset // unit + part] = parts[:, part]


def _unit(offset: int, span: int) -> int:
    """The widest integer that divides both: two bytes at once copy at twice the speed."""
    return (offset | span) & -(offset | span)


def zigzag_into(value: Array, base: Array, out: Array, scratch: Array) -> None:
    """out = zigzag(value - base): small differences of either sign become small unsigned integers."""
    signed = f"<i{value.itemsize}"
    np.subtract(value, base, out=out)
    np.right_shift(out.view(signed), 8 * value.itemsize - 1, out=scratch.view(signed))
    np.add(out, out, out=out)
    np.bitwise_xor(out, scratch, out=out)


def unzigzag_into(zigzags: Array, base: Array, out: Array, scratch: Array) -> None:
    """out = the value whose difference from `base` is `zigzags`; `out` may be `zigzags`."""
    np.bitwise_and(zigzags, 1, out=scratch)
    np.negative(scratch, out=scratch)
    np.right_shift(zigzags, 1, out=out)
    np.bitwise_xor(out, scratch, out=out)
    np.add(out, base, out=out)


def sample(values: Array) -> Array:
    """Short runs at equal distances (long strides would miss the cache at each element), or all if there are few."""
    if len(values) <= _SAMPLE_RUNS * _SAMPLE_RUN_LENGTH:
        return values
    stride = len(values) // _SAMPLE_RUNS
    return values[: stride * _SAMPLE_RUNS].reshape(_SAMPLE_RUNS, stride)[:, :_SAMPLE_RUN_LENGTH].reshape(-1)


def bits_per_byte(values: Array) -> Array:
    """Return the order-0 entropy of each byte plane, least significant first."""
    width = values.itemsize
    count = len(values)
    labelled = values.view(np.uint8).reshape(count, width) + np.arange(0, 256 * width, 256, dtype=np.uint16)
    counts = np.bincount(labelled.reshape(-1), minlength=256 * width).reshape(width, 256)
    plain = -(counts * np.log2(np.maximum(counts, 1) / count)).sum(axis=1) / count
    # Few draws look more regular than their source is (Miller 1955).
    bits: Array = np.minimum(plain + (np.count_nonzero(counts, axis=1) - 1) / (2 * np.log(2) * count), 8.0)
    return bits
