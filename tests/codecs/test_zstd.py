"""Frames come back exactly, and hostile frames are refused before they cost memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from syckpt.codecs import zstd
from syckpt.errors import IntegrityError

# Magic number; descriptor (one segment, size of content in one byte); size; header of a last, raw block of two bytes; "hi".
HI = bytes.fromhex("28b52ffd 20 02 110000") + b"hi"


def skewed(nbytes: int) -> bytes:
    """About two bits a byte and no matches to speak of."""
    return np.random.default_rng(1).choice(4, nbytes, p=[0.4, 0.3, 0.2, 0.1]).astype(np.uint8).tobytes()


@pytest.mark.parametrize("encode", [zstd.entropy, zstd.fast, zstd.frame])
@pytest.mark.parametrize("data", [b"", b"x", bytes(100_000), skewed(100_000), bytes(range(256)) * 9])
def test_every_encoder_comes_back_and_states_its_size(encode, data):
    packed = encode(data)
    assert zstd.decompress(packed, nbytes=len(data)) == data
    assert zstd.decompress_document(packed, limit=len(data)) == data
    assert encode(memoryview(data)) == encode(np.frombuffer(data, np.uint8)) == packed


def test_a_frame_spelled_out_decodes():
    assert zstd.decompress(HI, nbytes=2) == b"hi"
    assert zstd.decompress_document(HI, limit=2) == b"hi"


def test_huffman_comes_within_a_tenth_of_the_entropy():
    assert len(zstd.entropy(skewed(1 << 18))) < 1.1 * 1.8464 / 8 * (1 << 18)


def test_without_forced_literals_the_probe_falls_back(monkeypatch):
    monkeypatch.setitem(zstd._HUFFMAN, 1002, 2)
    assert zstd._entropy_options.__wrapped__() is zstd._STARVED
    monkeypatch.setitem(zstd._HUFFMAN, 99_999, 1)
    assert zstd._entropy_options.__wrapped__() is zstd._STARVED


@pytest.mark.parametrize("at", range(len(HI)))
def test_a_truncated_frame_is_refused(at):
    with pytest.raises(IntegrityError):
        zstd.decompress(HI[:at], nbytes=2)
    with pytest.raises(IntegrityError):
        zstd.decompress_document(HI[:at], limit=2)


@pytest.mark.parametrize("tail", [b"\0", HI, bytes.fromhex("502a4d1800000000")])
def test_bytes_after_the_frame_are_refused(tail):
    with pytest.raises(IntegrityError, match="follow its end"):
        zstd.decompress(HI + tail, nbytes=2)
    with pytest.raises(IntegrityError, match="follow its end"):
        zstd.decompress_document(HI + tail, limit=100)


def test_a_skippable_frame_is_no_content():
    with pytest.raises(IntegrityError, match="magic number"):
        zstd.decompress(bytes.fromhex("502a4d1800000000"), nbytes=0)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 1 << 40])
def test_a_frame_of_another_size_is_refused(nbytes):
    with pytest.raises(IntegrityError, match="the frame states 2"):
        zstd.decompress(HI, nbytes=nbytes)


def test_a_bomb_that_states_its_size_is_refused():
    with pytest.raises(IntegrityError, match="states 10000000"):
        zstd.decompress(zstd.frame(bytes(10_000_000)), nbytes=1000)
    with pytest.raises(IntegrityError, match="at most 1000 are allowed"):
        zstd.decompress_document(zstd.frame(bytes(10_000_000)), limit=1000)


def test_a_bomb_that_lies_about_its_size_is_refused():
    # States one byte; holds a last block of 2^17 - 1 equal bytes.
    with pytest.raises(IntegrityError):
        zstd.decompress(bytes.fromhex("28b52ffd 20 01 fbff0f 00"), nbytes=1)


def test_a_frame_that_states_no_size_is_bounded_by_the_limit_alone():
    compressor = zstd._zstd.ZstdCompressor()
    packed = compressor.compress(bytes(100_000)) + compressor.flush()
    assert zstd.decompress_document(packed, limit=100_000) == bytes(100_000)
    with pytest.raises(IntegrityError, match="more than the 99999 bytes"):
        zstd.decompress_document(packed, limit=99_999)
    with pytest.raises(IntegrityError, match="states None"):
        zstd.decompress(packed, nbytes=100_000)


def test_a_window_beyond_8_mib_is_refused():
    # Descriptor 0: no size stated, a window of 2^(10 + 17) bytes follows.
    with pytest.raises(IntegrityError):
        zstd.decompress_document(bytes.fromhex("28b52ffd 00 88 110000") + b"hi", limit=2)


def test_threads_do_not_share_compressors():
    data = [skewed(50_000 + i) for i in range(8)]
    packed: dict[int, bytes] = {}
    threads = [threading.Thread(target=lambda i=i: packed.update({i: zstd.entropy(data[i])})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [packed[i] for i in range(8)] == [zstd.entropy(d) for d in data]
