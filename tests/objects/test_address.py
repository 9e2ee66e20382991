"""Addresses: the digest of dtype, shape and bytes."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from syckpt.objects import address


def test_a_leaf_is_the_first_16_bytes_of_the_digest_of_the_raw_bytes():
    assert address.leaf(b"abc").hex() == "6437b3ac38465133ffb63b75273a8db5"  # BLAKE3's own test of "abc"
    assert address.leaf(memoryview(bytearray(b"abc"))) == address.leaf(b"abc")


def test_an_address_digests_dtype_shape_and_leaves():
    leaves = address.leaf(b"\0" * 1_048_576) + address.leaf(b"\0" * 4)
    expected = blake3(b'syckpt tensor v1\n["float32",[262145]]\n' + leaves).digest()
    assert address.address("float32", (262145,), leaves) == address.address("float32", [262145], leaves) == expected
    assert address.address("float32", (), b"") == blake3(b'syckpt tensor v1\n["float32",[]]\n').digest()
    others = {
        address.address(*other)
        for other in [("int32", (262145,), leaves), ("float32", (1, 262145), leaves), ("float32", (262145,), leaves[:16])]
    }
    assert len(others | {expected}) == 4


@pytest.mark.parametrize(("nbytes", "blocks"), [(0, 0), (1, 1), (1_048_576, 1), (1_048_577, 2), (2_097_152, 2), (200 << 20, 200)])
def test_a_block_is_a_mebibyte_and_the_last_one_may_be_shorter(nbytes, blocks):
    assert address.block_count(nbytes) == blocks


@given(st.binary(max_size=100))
def test_texts_of_digests_come_back(data):
    text = address.to_text(data)
    assert address.from_text(text) == data
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_an_address_takes_43_characters():
    assert len(address.to_text(bytes(32))) == 43


@pytest.mark.parametrize("text", ["a", "ab=", "a b", "\u00e4bcd", "ab\n", "a+/b", "AB", "AAB"])
def test_anything_but_the_one_text_of_some_bytes_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        address.from_text(text)
