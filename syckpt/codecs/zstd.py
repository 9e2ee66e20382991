"""zstd frames: the only module that knows the binding.

Encoders, all deterministic for one version of libzstd, all safe from any thread (one compressor a thread), all without the GIL:

* `entropy`: Huffman codes and no match search. For byte planes of 1 to 7.6 bits a byte; never under 1 bit.
* `fast`: a match search that is starved, then Huffman codes. For nearly constant planes, where it beats level 1 in size and in speed.
* `frame`: level 3. For documents.

Decoders take the size that their caller can bear and hold no more than that and a window of at most 8 MiB, whatever the frame says;
they return exactly one whole frame's content or raise IntegrityError. Every frame written here states its content's size.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, TypeAlias

import numpy as np

from syckpt.errors import IntegrityError

if sys.version_info >= (3, 14):
    from compression import zstd as _zstd
else:
    from backports import zstd as _zstd

__all__ = ["Buffer", "decompress", "decompress_document", "entropy", "fast", "frame"]

Buffer: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"

_MAGIC = b"\x28\xb5\x2f\xfd"
_HEADER_NBYTES = 18  # at most
_P = _zstd.CompressionParameter
_LITERAL_COMPRESSION_MODE = 1002  # experimental in libzstd, hence probed; 1 = always
_HUFFMAN: dict[int, int] = {
    _P.strategy: _zstd.Strategy.fast,
    _P.window_log: 15,  # also the span of one Huffman table: planes are not alike throughout
    _P.min_match: 7,
    _P.target_length: 131072,  # the stride of the match search, which so looks nowhere
    _LITERAL_COMPRESSION_MODE: 1,
}
_STARVED: dict[int, int] = {
    _P.strategy: _zstd.Strategy.fast,
    _P.window_log: 17,
    _P.hash_log: 6,
    _P.chain_log: 6,
    _P.search_log: 1,
    _P.min_match: 7,
    _P.target_length: 0,
}
_DOCUMENT: dict[int, int] = {_P.compression_level: 3}
_WINDOW: dict[int, int] = {_zstd.DecompressionParameter.window_log_max: 23}  # 8 MiB, what RFC 8878 asks every decoder to bear


@functools.cache
def _entropy_options() -> dict[int, int]:
    """Probe whether this libzstd takes forced literals: no match is looked for, so only Huffman codes can shrink the probe."""
    words = np.arange(1 << 14, dtype=np.uint32) * np.uint32(2654435761)
    probe = ((words >> np.uint32(30)) & (words >> np.uint32(13))).astype(np.uint8).tobytes()
    try:
        packed: bytes = _zstd.compress(probe, options=_HUFFMAN)
        works = len(packed) < len(probe) // 2 and _zstd.decompress(packed) == probe
    except (ValueError, _zstd.ZstdError):
        works = False
    return _HUFFMAN if works else _STARVED


class _Compressors(threading.local):
    """A thread's compressors: they lock while they work, and making one costs as much as packing a small block."""

    @functools.cached_property
    def entropy(self) -> Any:
        return _zstd.ZstdCompressor(options=_entropy_options())

    @functools.cached_property
    def fast(self) -> Any:
        return _zstd.ZstdCompressor(options=_STARVED)

    @functools.cached_property
    def document(self) -> Any:
        return _zstd.ZstdCompressor(options=_DOCUMENT)


_compressors = _Compressors()


def _pack(compressor: Any, data: Buffer) -> bytes:
    packed: bytes = compressor.compress(data, compressor.FLUSH_FRAME)
    return packed


def entropy(data: Buffer) -> bytes:
    """Return a frame of Huffman codes."""
    return _pack(_compressors.entropy, data)


def fast(data: Buffer) -> bytes:
    """Return a frame of the long matches and Huffman codes of the rest."""
    return _pack(_compressors.fast, data)


def frame(data: Buffer) -> bytes:
    """Return a frame of level 3, for documents."""
    return _pack(_compressors.document, data)


def decompress(data: Buffer, *, nbytes: int) -> bytes:
    """Return the content of one frame that states and has exactly `nbytes`. Raises: IntegrityError."""
    stated = _stated_nbytes(data)
    if stated != nbytes:
        raise IntegrityError(f"zstd frame: expected {nbytes} bytes of content, the frame states {stated}")
    return _unpack(data, nbytes)


def decompress_document(data: Buffer, *, limit: int) -> bytes:
    """Return the content of one frame of at most `limit` bytes, stated or not. Raises: IntegrityError."""
    stated = _stated_nbytes(data)
    if stated is not None and stated > limit:
        raise IntegrityError(f"zstd frame: states {stated} bytes of content, at most {limit} are allowed")
    return _unpack(data, limit if stated is None else stated)


def _stated_nbytes(data: Buffer) -> int | None:
    header = bytes(data[:_HEADER_NBYTES])
    if header[:4] != _MAGIC:
        raise IntegrityError("zstd frame: does not begin with the magic number of a frame")
    try:
        size: int | None = _zstd.get_frame_info(header).decompressed_size
    except _zstd.ZstdError as error:
        raise IntegrityError(f"zstd frame: {error}") from None
    return size


def _unpack(data: Buffer, most: int) -> bytes:
    decompressor = _zstd.ZstdDecompressor(options=_WINDOW)
    try:
        # One byte more than may come: the decompressor notices the end of a frame only where it has room to go on.
        content: bytes = decompressor.decompress(data, most + 1)
    except _zstd.ZstdError as error:
        raise IntegrityError(f"zstd frame: {error}") from None
    if len(content) > most:
        raise IntegrityError(f"zstd frame: more than the {most} bytes of content that are allowed")
    if not decompressor.eof:
        raise IntegrityError("zstd frame: truncated")
    if decompressor.unused_data:
        raise IntegrityError(f"zstd frame: {len(decompressor.unused_data)} bytes follow its end")
    return content
