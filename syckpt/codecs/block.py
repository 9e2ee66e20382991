"""Blocks of raw bytes <-> stored blocks (FORMAT.md, section 8). The package's docstring is the contract."""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import numpy as np

from syckpt.codecs import planes, zstd
from syckpt.codecs.planes import Array
from syckpt.codecs.zstd import Buffer
from syckpt.errors import IntegrityError
from syckpt.objects.address import BLOCK_NBYTES

__all__ = ["Workspace", "decode_block", "encode_block", "needs_base"]

_FORMS = _RAW, _PLANES, _DELTA, _SPARSE = range(4)
_STORED, _ZSTD = range(2)
_HEADER = struct.Struct("<BBI")
_COUNT = struct.Struct("<I")

_TINY_NBYTES = 64  # stream headers and a Huffman table would eat any gain
_SPARSE_BELOW = 0.25  # of the differences are not zero
_STORED_ABOVE = 7.6  # bits a byte: a gain below 5 % is not worth its time
_FAST_BELOW = 1.3  # bits a byte: Huffman codes cannot go under one
_DELTA_GAIN = 0.995  # a delta makes its reader fetch a base, so it must be worth something


class Workspace:
    """One thread's scratch. Pages that are touched for the first time cost more than encoding does: make one and keep it."""

    def __init__(self) -> None:
        self.streams: Array = np.empty(BLOCK_NBYTES, np.uint8)
        self.zigzag: Array = np.empty(planes.PIECE_NBYTES, np.uint8)
        self.scratch: Array = np.empty(planes.PIECE_NBYTES, np.uint8)
        self.changed: Array = np.empty(BLOCK_NBYTES, np.bool_)


class _Header(NamedTuple):
    span: int
    method: int
    length: int


class _Stream(NamedTuple):
    span: int
    method: int
    payload: Buffer


_Part: TypeAlias = "tuple[int, int, Array]"  # offset in the element, span, decoded bytes


def encode_block(raw: Buffer, *, width: int, base: Buffer | None = None, workspace: Workspace) -> list[Buffer]:
    """Return the pieces of a stored block; they may alias `raw` and the workspace, and hold until its next use."""
    values = planes.elements(raw, width)
    nbytes = values.nbytes
    if nbytes > BLOCK_NBYTES:
        raise ValueError(f"a block of {nbytes} bytes; at most {BLOCK_NBYTES} are allowed")
    bases = None if base is None else planes.elements(base, width)
    if bases is not None and len(bases) != len(values):
        raise ValueError(f"a base of {bases.nbytes} bytes for a block of {nbytes}")
    if nbytes >= _TINY_NBYTES:
        pieces = _encode(values, bases, workspace)
        if sum(map(len, pieces)) <= nbytes:
            return pieces
    return [bytes([_RAW]), values.view(np.uint8)]


def _encode(values: Array, bases: Array | None, workspace: Workspace) -> list[Buffer]:
    """Pick a form from a sample and encode; the result may be longer than the block."""
    drawn = planes.sample(values)
    bits = planes.bits_per_byte(drawn)
    if bases is None:
        return _pack(bytes([_PLANES]), _planes(values, None, bits, workspace))
    zigzags = _zigzags(drawn, planes.sample(bases))
    if np.count_nonzero(zigzags) < _SPARSE_BELOW * len(zigzags):
        return _sparse(values, bases, workspace)
    delta_bits = planes.bits_per_byte(zigzags)
    if _cost(delta_bits) <= _DELTA_GAIN * _cost(bits):
        return _pack(bytes([_DELTA]), _planes(values, bases, delta_bits, workspace))
    return _pack(bytes([_PLANES]), _planes(values, None, bits, workspace))


def _cost(bits: Array) -> float:
    return float(np.where(bits > _STORED_ABOVE, 8.0, bits).sum())


def _zigzags(values: Array, bases: Array) -> Array:
    out = np.empty_like(values)
    planes.zigzag_into(values, bases, out, np.empty_like(values))
    return out


def _planes(values: Array, bases: Array | None, bits: Array, workspace: Workspace) -> list[_Stream]:
    """Split the values, or their differences from `bases`, and code each plane by its entropy."""
    width, count = values.itemsize, len(values)
    spans = _spans(bits)
    offsets = [sum(spans[:i]) for i in range(len(spans))]
    streams = [workspace.streams[offset * count : (offset + span) * count] for offset, span in zip(offsets, spans, strict=True)]
    step = planes.PIECE_NBYTES // width
    zigzag, scratch = workspace.zigzag.view(values.dtype), workspace.scratch.view(values.dtype)
    for start in range(0, count, step):
        piece = values[start : start + step]
        if bases is not None:
            differences = zigzag[: len(piece)]
            planes.zigzag_into(piece, bases[start : start + step], differences, scratch[: len(piece)])
            piece = differences
        for offset, span, stream in zip(offsets, spans, streams, strict=True):
            planes.gather(piece, offset, span, stream[start * span : (start + len(piece)) * span])
    return [_code(stream, span, float(bits[offset])) for offset, span, stream in zip(offsets, spans, streams, strict=True)]


def _spans(bits: Array) -> list[int]:
    """Join the low planes that will be stored as they are, by twos: they split and merge at twice the speed."""
    stored = bits > _STORED_ABOVE
    lead = len(bits) if stored.all() else int(np.argmin(stored))
    joined = lead & ~1
    return [joined] * (joined > 0) + [1] * (len(bits) - joined)


def _code(stream: Array, span: int, bits: float) -> _Stream:
    if bits <= _STORED_ABOVE:
        packed = zstd.fast(stream) if bits < _FAST_BELOW else zstd.entropy(stream)
        if len(packed) < len(stream):
            return _Stream(span, _ZSTD, packed)
    return _Stream(span, _STORED, stream)


def _sparse(values: Array, bases: Array, workspace: Workspace) -> list[Buffer]:
    changed = np.not_equal(values, bases, out=workspace.changed[: len(values)])
    mask = np.packbits(changed, bitorder="little")
    where = np.flatnonzero(changed)  # indices gather several times faster than the mask itself
    zigzags = _zigzags(values[where], bases[where])
    head = bytes([_SPARSE]) + _COUNT.pack(len(zigzags))
    bits = planes.bits_per_byte(planes.sample(zigzags)) if len(zigzags) else np.zeros(values.itemsize)
    mask_bits = float(planes.bits_per_byte(planes.sample(mask))[0])
    return _pack(head, [_code(mask, 1, mask_bits), *_planes(zigzags, None, bits, workspace)])


def _pack(head: bytes, streams: list[_Stream]) -> list[Buffer]:
    headers = [_HEADER.pack(span, method, len(payload)) for span, method, payload in streams]
    return [b"".join([head, *headers]), *(payload for _, _, payload in streams)]


def needs_base(stored: Buffer) -> bool:
    """Whether a stored block is a difference from a base. Raises: IntegrityError."""
    return _Reader(stored).form() in (_DELTA, _SPARSE)


def decode_block(stored: Buffer, *, out: Buffer, width: int, base: Buffer | None = None) -> None:
    """Fill `out` with the raw bytes; what it holds after an IntegrityError is undefined."""
    target = planes.elements(out, width)
    reader = _Reader(stored)
    form = reader.form()
    if form == _RAW:
        target.view(np.uint8)[:] = reader.take(target.nbytes)
    elif form == _PLANES:
        _merge(reader.payloads(reader.headers(width), len(target)), None, target)
    else:
        if base is None:
            raise IntegrityError(f"encoded block: form {form}, but no base")
        base_nbytes = planes.elements(base, 1).nbytes
        if base_nbytes != target.nbytes:
            raise IntegrityError(f"encoded block: a base of {base_nbytes} bytes for a block of {target.nbytes}")
        bases = planes.elements(base, width)
        if form == _DELTA:
            _merge(reader.payloads(reader.headers(width), len(target)), bases, target)
        else:
            _decode_sparse(reader, bases, target)
    reader.end()


def _decode_sparse(reader: _Reader, bases: Array, target: Array) -> None:
    count = reader.count()
    if count > len(target):
        raise IntegrityError(f"encoded block: {count} differences in {len(target)} elements")
    mask_headers, headers = reader.headers(1), reader.headers(target.itemsize)
    ((_, _, mask),) = reader.payloads(mask_headers, -(-len(target) // 8))
    changed: Array = np.unpackbits(mask, bitorder="little").view(np.bool_)
    if np.count_nonzero(changed) != count or changed[len(target) :].any():
        raise IntegrityError(f"encoded block: the mask does not mark {count} of {len(target)} elements")
    where = np.flatnonzero(changed)
    zigzags = np.empty(count, target.dtype)
    _merge(reader.payloads(headers, count), None, zigzags)
    target[:] = bases
    planes.unzigzag_into(zigzags, bases[where], zigzags, np.empty_like(zigzags))
    target[where] = zigzags


def _merge(streams: list[_Part], bases: Array | None, target: Array) -> None:
    """Fill `target` from its planes, or from those of its differences from `bases`."""
    step = planes.PIECE_NBYTES // target.itemsize
    scratch = np.empty(0 if bases is None else min(step, len(target)), target.dtype)
    for start in range(0, len(target), step):
        piece = target[start : start + step]
        for offset, span, payload in streams:
            planes.scatter(payload[start * span : (start + len(piece)) * span], offset, span, piece)
        if bases is not None:
            planes.unzigzag_into(piece, bases[start : start + step], piece, scratch[: len(piece)])


class _Reader:
    """Walks a stored block and trusts nothing in it."""

    def __init__(self, stored: Buffer) -> None:
        self._left: Array = np.frombuffer(stored, np.uint8)

    def take(self, nbytes: int) -> Array:
        """Return the next bytes."""
        if nbytes > len(self._left):
            raise IntegrityError(f"encoded block: {nbytes} bytes are due where {len(self._left)} are left")
        taken: Array = self._left[:nbytes]
        self._left = self._left[nbytes:]
        return taken

    def end(self) -> None:
        """Check that nothing is left."""
        if len(self._left):
            raise IntegrityError(f"encoded block: {len(self._left)} bytes follow its end")

    def form(self) -> int:
        """Return the block's form, its first byte."""
        form = int(self.take(1)[0])
        if form not in _FORMS:
            raise IntegrityError(f"encoded block: unknown form {form}")
        return form

    def count(self) -> int:
        """Return a u32."""
        (count,) = _COUNT.unpack(self.take(_COUNT.size).tobytes())
        return int(count)

    def headers(self, width: int) -> list[_Header]:
        """Return the headers of the streams that cover `width` bytes."""
        headers: list[_Header] = []
        covered = 0
        while covered < width:
            header = _Header._make(_HEADER.unpack(self.take(_HEADER.size).tobytes()))
            covered += header.span
            if header.span == 0 or covered > width:
                raise IntegrityError(f"encoded block: a span of {header.span} bytes does not fit elements of {width}")
            headers.append(header)
        return headers

    def payloads(self, headers: list[_Header], count: int) -> list[_Part]:
        """Return the streams of these headers, each of `count` integers."""
        parts: list[_Part] = []
        offset = 0
        for span, method, length in headers:
            payload = self.take(length)
            if method == _ZSTD:
                payload = np.frombuffer(zstd.decompress(payload, nbytes=span * count), np.uint8)
            elif method != _STORED:
                raise IntegrityError(f"encoded block: unknown method {method}")
            elif length != span * count:
                raise IntegrityError(f"encoded block: a stream of {length} bytes, {span * count} are due")
            parts.append((offset, span, payload))
            offset += span
        return parts
