"""Blocks come back bit for bit; what is not a block is an IntegrityError and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syckpt.codecs import Workspace, decode_block, encode_block, needs_base
from syckpt.errors import IntegrityError

WORKSPACE = Workspace()
WIDTHS = (1, 2, 4, 8)
quick = settings(database=None, derandomize=True, deadline=None, max_examples=150)

# Bits that floats would lose: quiet and signalling NaNs with payloads, -0.0, a subnormal, infinity.
STRANGE = np.array([0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x80000000, 0x00000001, 0x7F800000], "<u4")


def encode(raw, width, base=None) -> bytes:
    return b"".join(bytes(piece) for piece in encode_block(raw, width=width, base=base, workspace=WORKSPACE))


def decode(stored, nbytes, width, base=None) -> bytes:
    out = bytearray(nbytes)
    decode_block(stored, out=memoryview(out), width=width, base=base)
    return bytes(out)


def check(raw: bytes, width: int, base: bytes | None = None) -> bytes:
    stored = encode(raw, width, base)
    assert len(stored) <= len(raw) + 1
    assert decode(stored, len(raw), width, base if needs_base(stored) else None) == raw
    return stored


def floats(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count).astype("<f4")


def step(values: np.ndarray, seed: int = 1) -> np.ndarray:
    """Move every value a little, as an optimizer does."""
    return (values * (1 + 1e-4 * np.random.default_rng(seed).normal(size=len(values)))).astype("<f4")


def sparse(count: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    base = rng.integers(0, 1 << 16, count).astype("<u2")
    value = base.copy()
    value[rng.random(count) < share] += 1
    return value, base


# --- the format, spelled out -------------------------------------------------------------------------------------------


def test_form_0_is_the_raw_bytes():
    assert decode(bytes.fromhex("00 61626364"), 4, 4) == b"abcd"
    assert decode(bytes.fromhex("00"), 0, 8) == b""


def test_form_1_holds_planes_from_the_least_significant_byte():
    stored = bytes.fromhex("01  01 00 02000000  01 00 02000000  01 03  02 04")
    assert decode(stored, 4, 2) == bytes.fromhex("0102 0304")


def test_form_1_joins_planes_by_span():
    stored = bytes.fromhex("01  02 00 04000000  01 00 02000000  01 00 02000000  1122 5566  33 77  44 88")
    assert decode(stored, 8, 4) == bytes.fromhex("11223344 55667788")
    stored = bytes.fromhex("01  01 00 02000000  03 00 06000000  11 55  223344 667788")
    assert decode(stored, 8, 4) == bytes.fromhex("11223344 55667788")


def test_form_1_reads_zstd_frames():
    frame = "28b52ffd 20 02 110000"
    stored = bytes.fromhex(f"01  01 01 0b000000  01 00 02000000  {frame} 0103  02 04")
    assert decode(stored, 4, 2) == bytes.fromhex("0102 0304")


def test_form_2_adds_zigzag_differences_modulo_the_width():
    # +1, -1, and 255 -> 0, which is +1 modulo 256.
    stored = bytes.fromhex("02  01 00 03000000  02 01 02")
    assert decode(stored, 3, 1, base=bytes([10, 20, 255])) == bytes([11, 19, 0])


def test_form_3_changes_the_marked_elements_only():
    # Ten elements of 0x0100; element 1 changes by -1, element 9 by +2.
    stored = bytes.fromhex("03 02000000  01 00 02000000  01 00 02000000  01 00 02000000  02 02  01 04  00 00")
    assert decode(stored, 20, 2, base=bytes.fromhex("0001") * 10) == bytes.fromhex("0001 ff00" + "0001" * 7 + "0201")


@pytest.mark.parametrize(
    "stored",
    [
        "",  # empty
        "04 00000000",  # unknown form
        "00 000000",  # raw, too short
        "00 0000000000",  # raw, too long
        "01",  # no headers
        "01  00 00 00000000",  # span 0
        "01  03 00 06000000  000000 000000",  # spans beyond the width
        "01  01 02 02000000  01 00 02000000  0000 0000",  # unknown method
        "01  01 00 03000000  01 00 02000000  000000 0000",  # stored stream too long
        "01  02 00 ffffffff  00000000",  # length beyond the buffer
        "01  02 00 04000000  00000000 00",  # trailing byte
        "01  02 01 0b000000  28b52ffd 20 02 110000 6869",  # a frame of two bytes where four are due
        "02  02 00 04000000  000000",  # truncated delta
        "03 0300",  # truncated count
        "03 03000000  01 00 01000000  02 00 06000000  03  000000000000",  # more differences than elements
        "03 01000000  01 00 01000000  02 00 02000000  03  0200",  # two marked, one counted
        "03 01000000  01 00 01000000  02 00 02000000  04  0200",  # marks an element beyond the block
        "03 01000000  02 00 01000000  02 00 02000000  01  0200",  # a mask of span 2
    ],
)
def test_malformed_blocks_of_two_shorts_are_refused(stored):
    with pytest.raises(IntegrityError):
        decode(bytes.fromhex(stored), 4, 2, base=bytes(4))


def test_a_delta_without_its_base_or_with_a_base_of_another_length_is_refused():
    for stored in (bytes.fromhex("02  01 00 01000000  02"), bytes.fromhex("03 00000000  01 00 01000000  01 00 00000000  00")):
        with pytest.raises(IntegrityError, match="no base"):
            decode(stored, 1, 1)
        with pytest.raises(IntegrityError, match="a base of 2 bytes"):
            decode(stored, 1, 1, base=b"ab")
        assert needs_base(stored)


@pytest.mark.parametrize("stored", [b"", b"\4", b"\xff"])
def test_needs_base_refuses_what_is_no_block(stored):
    with pytest.raises(IntegrityError):
        needs_base(stored)


def test_a_decompression_bomb_is_refused():
    # A frame that states 2^30 bytes of content (eight-byte size), then an RLE block.
    frame = "28b52ffd e0 0000004000000000 020010 00"
    stored = bytes.fromhex(f"01  01 01 {len(bytes.fromhex(frame)):02x}000000  {frame}")
    with pytest.raises(IntegrityError, match="states 1073741824"):
        decode(stored, 100, 1)


# --- what the encoder picks --------------------------------------------------------------------------------------------


def test_incompressible_bytes_cost_one_byte():
    raw = np.random.default_rng(3).bytes(100_000)
    assert check(raw, 4) == b"\0" + raw
    assert check(raw, 4, np.random.default_rng(4).bytes(100_000)) == b"\0" + raw


def test_tiny_blocks_stay_raw():
    assert check(bytes(60), 4, bytes(60)) == bytes(61)
    assert check(b"", 8) == b"\0"


def test_floats_alone_become_planes_with_the_low_bytes_joined():
    stored = check(floats(1 << 18).tobytes(), 4)
    assert stored[:7] == bytes.fromhex("01  02 00 00000800")
    assert len(stored) < 0.86 * (1 << 20)


def test_an_optimizer_step_becomes_delta_planes():
    old = floats(1 << 18)
    stored = check(step(old).tobytes(), 4, old.tobytes())
    assert stored[0] == 2
    assert len(stored) < 0.75 * (1 << 20)


def test_an_unrelated_base_is_not_used():
    stored = check(floats(1 << 16).tobytes(), 4, floats(1 << 16, seed=9).tobytes())
    assert stored[0] == 1
    assert not needs_base(stored)


def test_few_changes_become_a_sparse_delta():
    value, base = sparse(1 << 19, 0.02)
    stored = check(value.tobytes(), 2, base.tobytes())
    assert stored[0] == 3
    assert len(stored) < 0.03 * (1 << 20)


def test_no_change_costs_next_to_nothing():
    raw = np.random.default_rng(3).bytes(1 << 20)
    assert len(check(raw, 4, raw)) < 100


def test_a_sample_that_saw_no_change_does_no_harm():
    raw = np.random.default_rng(3).bytes(1 << 20)
    base = bytearray(raw)
    base[8 * 128 :: 8] = bytes(len(base[8 * 128 :: 8]))
    check(raw, 8, bytes(base))


def test_encoding_is_deterministic():
    old = floats(5000)
    new = step(old)
    assert encode(new.tobytes(), 4, old.tobytes()) == b"".join(
        bytes(p) for p in encode_block(new.tobytes(), width=4, base=old.tobytes(), workspace=Workspace())
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_a_full_block_of_each_width_comes_back(width):
    rng = np.random.default_rng(width)
    old = rng.integers(0, 1000, (1 << 20) // width).astype(f"<u{width}")
    new = old + rng.integers(0, 3, len(old)).astype(old.dtype)
    check(new.tobytes(), width)
    check(new.tobytes(), width, old.tobytes())


def test_buffers_of_any_kind_and_alignment_work():
    old = floats(3000)
    new = step(old)
    room = bytearray(1 + 2 * new.nbytes)
    room[1 : 1 + new.nbytes] = new.tobytes()
    view = memoryview(room)
    stored = encode(view[1 : 1 + new.nbytes], 4, old.view(np.uint8))
    assert stored[0] == 2
    for target in (view[1 + new.nbytes :], np.zeros(new.nbytes, np.uint8), bytearray(new.nbytes)):
        decode_block(memoryview(b"-" + stored)[1:], out=target, width=4, base=bytearray(old.tobytes()))
        assert bytes(target) == new.tobytes()


def test_a_wrong_call_is_a_value_error():
    with pytest.raises(ValueError, match="elements of 3 bytes"):
        encode(bytes(6), 3)
    with pytest.raises(ValueError, match="multiple"):
        encode(bytes(6), 4)
    with pytest.raises(ValueError, match="a base of 4 bytes"):
        encode(bytes(8), 4, bytes(4))
    with pytest.raises(ValueError, match="at most 1048576"):
        encode(bytes((1 << 20) + 1), 1)


# --- properties --------------------------------------------------------------------------------------------------------


@st.composite
def blocks(draw):
    """A width, a block, and a base that may be absent, unrelated, equal, near, or equal in most places."""
    width = draw(st.sampled_from(WIDTHS))
    count = draw(st.one_of(st.integers(0, 40), st.integers(0, 6000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["random", "small", "floats", "strange", "constant"]))
    nbytes = width * count
    if kind == "random":
        value = np.frombuffer(rng.bytes(nbytes), f"<u{width}")
    elif kind == "small":
        value = rng.geometric(draw(st.floats(0.02, 0.99)), count).astype(f"<u{width}")
    elif kind == "constant":
        value = np.full(count, 0x80 << 8 * (width - 1), f"<u{width}")
    else:
        source = floats(-(-nbytes // 4), seed=int(rng.integers(1000))) if kind == "floats" else rng.choice(STRANGE, -(-nbytes // 4))
        value = np.frombuffer(source.tobytes()[:nbytes], f"<u{width}")
    near = draw(st.sampled_from(["absent", "unrelated", "equal", "near", "sparse"]))
    if near == "absent":
        return width, value.tobytes(), None
    if near == "unrelated":
        return width, value.tobytes(), rng.bytes(nbytes)
    change = rng.integers(-3, 4, count) if near == "near" else rng.integers(-3, 4, count) * (rng.random(count) < 0.1)
    return width, value.tobytes(), (value + change.astype(value.dtype) if near != "equal" else value).tobytes()


@quick
@given(blocks())
def test_any_block_comes_back_bit_for_bit(block):
    width, raw, base = block
    check(raw, width, base)


@quick
@given(st.sampled_from(WIDTHS), st.binary(max_size=200), st.integers(0, 40))
def test_random_bytes_are_an_integrity_error_or_a_block(width, noise, count):
    for form in range(4):
        try:
            decode(bytes([form]) + noise, count * width, width, bytes(count * width))
        except IntegrityError:
            continue


def small_blocks():
    old = floats(150)
    value, base = sparse(400, 0.1)
    few = np.arange(300, dtype="<u4") % 5
    yield "raw", np.random.default_rng(5).bytes(80), 4, None, 0
    yield "planes", few.tobytes(), 4, None, 1
    yield "delta", step(old).tobytes(), 4, old.tobytes(), 2
    yield "sparse", value.tobytes(), 2, base.tobytes(), 3


@pytest.mark.parametrize(("raw", "width", "base", "form"), [pytest.param(*rest, id=name) for name, *rest in small_blocks()])
def test_every_flipped_bit_and_every_truncation_is_an_integrity_error_or_other_bytes(raw, width, base, form):
    stored = check(raw, width, base)
    assert stored[0] == form
    assert len(stored) < 1000
    for bit in range(8 * len(stored)):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            decode(flipped, len(raw), width, base)
        except IntegrityError:
            continue
    for length in range(len(stored)):
        with pytest.raises(IntegrityError):
            decode(stored[:length], len(raw), width, base)
