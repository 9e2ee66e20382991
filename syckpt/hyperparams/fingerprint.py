"""Locality-sensitive fingerprints of configurations (FORMAT.md, section 10): near configurations have near fingerprints.

Contract: `fingerprint` is a pure function of the typed configuration, the same on every machine. For configurations A and B with
similarity `sim`, each of the 32 bits agrees with probability (1 + sim) / 2 (measured over random pairs, the mean of each fifth of them lies
within 0.03 of that and the mean of all within 0.01: a test holds it). It is a name to search by, never an address: different configurations
may share one.

What section 10 leaves open is fixed here. Kinds: `int+` (0 included) and `int-`; `unit+` and `unit-` for floats with an absolute value in
(0, 1), `float+` and `float-` for those of 1 and more; `value` for categories, hashed as their nodes, to which 0.0 and -0.0 belong. Empty
sections, lists and tuples have no leaves. Two empty configurations have similarity 1.

Sources: minwise hashing: Broder 1997; one bit of each minimum: Li and Koenig 2010; random shifts of bins: Rahimi and Recht 2007.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from blake3 import blake3

from syckpt.errors import StateError
from syckpt.hyperparams.config import HyperConfig, leaf_node
from syckpt.objects.canonical import dumps

__all__ = ["NBITS", "estimate", "fingerprint", "hamming", "similarity"]

NBITS = 32
_CATEGORY = "value"
# Scaled values are integers in units of 2^-16, so that bins are exact arithmetic.
_UNIT_NBITS = 16
_BIN_WIDTH_NBITS = 2
_HEX = re.compile(r"[0-9a-f]{8}")
_EXTENDED = struct.Struct(f"<{2 * NBITS}Q")


class _Leaf(NamedTuple):
    kind: str
    scaled: int
    node: Any


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return the fingerprint of a configuration: 8 hex digits, bit 0 first."""
    leaves = _leaves(config)
    extended = {path: _EXTENDED.unpack(blake3(b"syckpt lsh v1\n" + path.encode("ascii")).digest(_EXTENDED.size)) for path in leaves}
    bits = 0
    for number in range(NBITS if leaves else 0):
        _, path = max((extended[path][2 * number], path) for path in leaves)
        kind, scaled, node = leaves[path]
        if kind != _CATEGORY:
            # floor(s / 4 + shift / 2^64), all over 2^64
            node = ((scaled << (64 - _UNIT_NBITS - _BIN_WIDTH_NBITS)) + extended[path][2 * number + 1]) >> 64
        digest = blake3(b"syckpt lsh bit v1\n" + dumps([number, path, kind, node])).digest(1)
        bits |= (digest[0] & 1) << (NBITS - 1 - number)
    return f"{bits:08x}"


def hamming(a: str, b: str) -> int:
    """Return how many of the 32 bits of two fingerprints differ."""
    for text in (a, b):
        if not _HEX.fullmatch(text):
            raise StateError(f"a fingerprint has 8 lower-case hex digits, found {text!r}")
    return (int(a, 16) ^ int(b, 16)).bit_count()


def estimate(a: str, b: str) -> float:
    """Return the similarity that two fingerprints suggest: 1 for equal ones, around 0 for unrelated ones, sometimes below."""
    return 1 - 2 * hamming(a, b) / NBITS


def similarity(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the exact similarity of two configurations, from 0 to 1: the share of paths at which they agree, numbers by nearness."""
    ours, theirs = _leaves(a), _leaves(b)
    union = ours.keys() | theirs.keys()
    if not union:
        return 1.0
    # fsum: the sum must not depend on the order of the paths
    return math.fsum(_nearness(ours[path], theirs[path]) for path in ours.keys() & theirs.keys()) / len(union)


def _nearness(a: _Leaf, b: _Leaf) -> float:
    if a.kind != b.kind:
        return 0.0
    if a.kind == _CATEGORY:
        return float(dumps(a.node) == dumps(b.node))
    return max(0.0, 1 - abs(a.scaled - b.scaled) / (1 << (_UNIT_NBITS + _BIN_WIDTH_NBITS)))


def _leaves(config: Mapping[str, Any]) -> dict[str, _Leaf]:
    """Return the leaves by path text."""
    # A copy also of a HyperConfig: whoever read a list from it may have put anything into that.
    return {dumps(path).decode("ascii"): _leaf(value) for path, value in _walk(HyperConfig(config), [])}


def _walk(value: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], Any]]:
    if isinstance(value, HyperConfig):
        for key, inner in value._values.items():
            yield from _walk(inner, [*path, key])
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _walk(inner, [*path, index])
    else:
        yield path, value


def _leaf(value: Any) -> _Leaf:
    if isinstance(value, int) and not isinstance(value, bool):
        return _number("int", value < 0, math.log2(1 + abs(value)))
    if isinstance(value, float) and value != 0 and math.isfinite(value):
        size = abs(value)
        return _number("unit", value < 0, math.log2(size / (1 - size))) if size < 1 else _number("float", value < 0, math.log2(size))
    return _Leaf(_CATEGORY, 0, leaf_node(value))


def _number(kind: str, negative: bool, scale: float) -> _Leaf:
    return _Leaf(f"{kind}{'-' if negative else '+'}", round(scale * (1 << _UNIT_NBITS)), None)
