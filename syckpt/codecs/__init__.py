"""Blocks of a tensor's raw bytes <-> stored blocks (FORMAT.md, section 8). numpy and zstd: no torch, no I/O.

    pieces = encode_block(raw, width=4, base=base, workspace=workspace)   # b"".join(pieces) is the stored block
    decode_block(stored, out=out, width=4, base=base if needs_base(stored) else None)

* A block is at most 1 MiB of unsigned little-endian integers of `width` bytes (1, 2, 4 or 8); `base` is another tensor's block of
  equal length, at the same place. Bits are bits: values are never looked at as floats.
* `encode_block` never stores more than one byte beyond the raw bytes. It picks the form from a sample of the block, so its choice is
  within a fraction of a percent of the best, and it is the same every time. A base is used only where it pays: ask `needs_base`.
* **Aliasing.** The pieces are views of `raw` and of the workspace. Write or copy them before either changes: before the next
  `encode_block` with that workspace. A `Workspace` belongs to one thread; everything else may be called from any, and the GIL is
  free for most of the time.
* `decode_block` fills `out` exactly or raises IntegrityError, whatever the stored bytes are, and needs at most about twelve times
  `len(out)` of memory. It does not vouch for the values: the address does.
* ValueError means that the caller is wrong (width, a length that is no multiple of it, a base of another length to encode against).
"""

from syckpt.codecs.block import Workspace, decode_block, encode_block, needs_base

__all__ = ["COMPRESSIONS", "Workspace", "decode_block", "encode_block", "needs_base"]

COMPRESSIONS = ("none", "fast")
"""What `compression=` may be: raw bytes that any safetensors reader understands, or encoded blocks."""
