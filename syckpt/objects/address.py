"""Addresses: what a tensor is called by its content (FORMAT.md, section 5)."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from blake3 import blake3

from syckpt.objects import canonical

__all__ = ["BLOCK_NBYTES", "LEAF_NBYTES", "address", "block_count", "from_text", "leaf", "to_text"]

BLOCK_NBYTES = 1 << 20
LEAF_NBYTES = 16


def block_count(nbytes: int) -> int:
    """How many blocks hold `nbytes` raw bytes."""
    return -(-nbytes // BLOCK_NBYTES)


def leaf(block: bytes | bytearray | memoryview) -> bytes:
    """Return the 16-byte digest of one block's raw bytes; releases the GIL."""
    return blake3(block).digest(length=LEAF_NBYTES)


def address(dtype: str, sizes: Sequence[int], leaves: bytes) -> bytes:
    """Return the 32-byte address of a tensor; `leaves` is the concatenation of its blocks' digests."""
    head = canonical.dumps([dtype, list(sizes)])
    return blake3(b"syckpt tensor v1\n" + head + b"\n" + leaves).digest()


def to_text(digest: bytes) -> str:
    """Return bytes as unpadded URL base64."""
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")


def from_text(text: str) -> bytes:
    """Invert `to_text`; only the one text that it makes is read. Raises: ValueError."""
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if to_text(data) != text:
        raise ValueError(f"{text[:40]!r} is not the base64 of anything")
    return data
