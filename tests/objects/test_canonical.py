"""One value, one text, one digest; and nothing else is read."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import FormatError, IntegrityError, StateError
from syckpt.objects import canonical

LIMIT = 2**53 - 1

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-LIMIT, LIMIT) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, b"null"),
        ([True, False, 0, -1], b"[true,false,0,-1]"),
        ({"b": 1, "a": 2, "B": 3, "\u00e4": 4, "": 5}, b'{"":5,"B":3,"a":2,"b":1,"\\u00e4":4}'),
        ('\u00fc\n\x00"\\/\x7f', b'"\\u00fc\\n\\u0000\\"\\\\/\\u007f"'),
        ("\U0001f600\ud800", b'"\\ud83d\\ude00\\ud800"'),
        ([0.1, 1.0, -0.0, 1e16, 1e-7, 5e-324, 1.7976931348623157e308], b"[0.1,1.0,-0.0,1e+16,1e-07,5e-324,1.7976931348623157e+308]"),
        ([LIMIT, -LIMIT], b"[9007199254740991,-9007199254740991]"),
        ((1, [2]), b"[1,[2]]"),
        ("9007199254740992 and 12345678901234567890", b'"9007199254740992 and 12345678901234567890"'),
    ],
)
def test_values_have_one_canonical_text(value, text):
    assert canonical.dumps(value) == text


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 2**53, -(2**53), 10**5000, [1, {"a": [2**60]}], {"a": {1, 2}}, b"bytes", {None: 1, "a": 2}, 1j],
    ids=[*"abcdefghijk"],
)
def test_what_canonical_json_cannot_say_is_refused(value):
    with pytest.raises(StateError, match="not a canonical JSON value"):
        canonical.dumps(value)


def test_a_value_that_is_too_deep_is_refused():
    value: Any = 0
    for _ in range(100_000):
        value = [value]
    with pytest.raises(StateError):
        canonical.dumps(value)


def test_a_value_that_contains_itself_is_refused():
    value: dict[str, Any] = {}
    value["a"] = [value]
    with pytest.raises(StateError, match="not a canonical JSON value"):
        canonical.dumps(value)


@given(json_values)
def test_every_value_comes_back_with_its_types_and_bits(value):
    text = canonical.dumps(value)
    again = canonical.loads(text)
    assert again == json.loads(json.dumps(value))
    assert canonical.dumps(again) == text


@pytest.mark.parametrize(
    "text",
    [
        *[b"", b"{", b"nul", b"1 2", b'{"a":1,"a":1}', b'[{"x":{"a":1,"b":2,"a":3}}]', b"NaN", b"[Infinity]", b"-Infinity", b"1e999"],
        *[b"9007199254740992", b"-9007199254740992", b"1" * 5000, b'"\xff"', b'"\n"', b"'a'", b"01", b"[1,]", b"\xef\xbb\xbf1", b"\x00"],
        *[b"[" * 513 + b"]" * 513, b'{"a":' * 600 + b"1" + b"}" * 600, b"[" * 1_000_000, b'[{"' * 300_000],
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_anything_but_strict_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        canonical.loads(text)


def test_nesting_up_to_512_is_read_and_brackets_in_texts_do_not_count():
    depth = b"[" * 512 + b"]" * 512
    assert canonical.dumps(canonical.loads(depth)) == depth
    assert canonical.loads(b'["' + b"[" * 5000 + b'","\\"[[",{}]') == ["[" * 5000, '"[[', {}]


def test_a_document_above_256_mib_is_refused_unread(monkeypatch):
    assert canonical.MAX_DOCUMENT_NBYTES == 268_435_456
    monkeypatch.setattr(canonical, "MAX_DOCUMENT_NBYTES", 10)
    with pytest.raises(ValueError, match="more than the 10 allowed"):
        canonical.loads(b"[1,2,3,4,5]")


# -- sealed documents ------------------------------------------------------------------------------------------------------------

BODY = {"kind": "test", "version": 1, "z": [1.5, "\u00e4"]}
TEXT = b'{"kind":"test","version":1,"z":[1.5,"\\u00e4"]}'


def sealed(text: bytes) -> bytes:
    return b'{"body":' + text + b',"seal":"' + blake3(text).hexdigest().encode() + b'"}\n'


def test_a_sealed_document_is_body_seal_and_a_line_feed():
    data, seal = canonical.seal(BODY)
    assert data == sealed(TEXT)
    assert seal == blake3(TEXT).hexdigest()
    assert json.loads(data) == {"body": BODY, "seal": seal}
    assert canonical.unseal(data, key="k", kind="test") == (BODY, seal)
    assert canonical.unseal(data, key="k", kind="test", seal=seal) == (BODY, seal)


def test_every_flipped_bit_and_every_cut_of_a_sealed_document_is_found():
    data, _ = canonical.seal(BODY)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(IntegrityError, match=r"^the-key: "):
                canonical.unseal(bytes(damaged), key="the-key", kind="test")
        with pytest.raises(IntegrityError, match=r"^the-key: "):
            canonical.unseal(data[:position], key="the-key", kind="test")
    with pytest.raises(IntegrityError, match="not a sealed document"):
        canonical.unseal(data + b"\n", key="the-key", kind="test")


@pytest.mark.parametrize(
    "text",
    [
        b'{"version":1,"kind":"test"}',  # keys not sorted
        b'{"kind": "test","version":1}',
        b'{"kind":"test","version":1,"a":1}'.replace(b'"a":1', b'"x":1.50'),
        b'{"kind":"test","version":1,"x":"\\u0041"}',
        '{"kind":"test","version":1,"x":"ä"}'.encode(),
        b'{"kind":"test","version":1,"x":1E2}',
        b'{"kind":"test","version":1,"x":-0}',
        b'{"kind":"test","version":1,"x":"\\/"}',
        b'{"kind":"test","version":1,"version":1}',
        b'{"kind":"test","version":1,"x":NaN}',
        b'{"kind":"test","version":1,"x":9007199254740992}',
        b'{"kind":"test","version":1,"x":' + b"[" * 600 + b"]" * 600 + b"}",
        b'{"kind":"test","version":1} ',
        b' {"kind":"test","version":1}',
        b'{"kind":"test","version":1}{}',
        b"[1]",
        b"",
        b'{"kind":"other","version":1}',
    ],
)
def test_a_seal_does_not_make_a_body_good(text):
    with pytest.raises(IntegrityError, match=r"^the-key: "):
        canonical.unseal(sealed(text), key="the-key", kind="test")


LARGE = b'{"a":[' + b",".join([b'["[[",{},"\\\\\\"{"]'] * 20_000) + b'],"kind":"test","version":1}'


def test_a_large_document_with_brackets_in_its_texts_is_read():
    body, _ = canonical.unseal(sealed(LARGE), key="k", kind="test")
    assert body["a"] == [["[[", {}, '\\"{']] * 20_000


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (b"[" * 512 + b"]" * 512, "nested deeper than 512"),
        (b'{"a":' * 512 + b"0" + b"}" * 512, "nested deeper than 512"),
        (b'["\\\\",' + b"[" * 511 + b"]" * 512, "nested deeper than 512"),
        (b'["\\\\\\"",' + b"[" * 511 + b"]" * 512, "nested deeper than 512"),
        (b"9007199254740992", "beyond 2.53"),
        (b"-9007199254740992", "beyond 2.53"),
        (b'["1234567890123456",9007199254740992]', "beyond 2.53"),
        (b"1" * 5000, "beyond 2.53"),
        (b'{"b":1,"b":1}', "duplicate key"),
        (b'{"b":1,"a":1}', "not canonical JSON"),
        (b"NaN", "not JSON compliant"),
        (b"1e999", "not JSON compliant"),
        (b"-0", "not canonical JSON"),
    ],
    ids=lambda value: ascii(value[:24]),
)
def test_a_large_document_is_looked_at_as_closely(part, problem):
    data = sealed(LARGE.replace(b'"kind"', b'"b":' + part + b',"kind"'))
    with pytest.raises(IntegrityError, match=f"^k: malformed: .*({problem})"):
        canonical.unseal(data, key="k", kind="test")


def test_a_large_document_may_be_as_deep_as_a_small_one_and_hold_the_largest_integers():
    part = b"[" * 511 + b"9007199254740991" + b"]" * 511
    body, _ = canonical.unseal(sealed(LARGE.replace(b'"kind"', b'"b":' + part + b',"kind"')), key="k", kind="test")
    assert canonical.dumps(body["b"]) == part


def test_another_document_than_the_expected_one_is_refused_though_it_is_whole():
    data, _ = canonical.seal(BODY)
    with pytest.raises(IntegrityError, match="another document than expected"):
        canonical.unseal(data, key="k", kind="test", seal="0" * 64)


@pytest.mark.parametrize("version", [2, 0, "1", None, 1.5, True])
def test_another_version_is_a_format_error_that_says_upgrade(version):
    data, _ = canonical.seal({**BODY, "version": version})
    with pytest.raises(FormatError, match="upgrade"):
        canonical.unseal(data, key="k", kind="test")


def test_hostile_documents_are_refused_quickly():
    started = time.process_time()
    for text in (
        b"[" * 2_000_000,
        b'{"a":' * 500_000,
        b'"' + b"\\" * 2_000_001 + b'"',
        b"[" + b"9" * 2_000_000,
        b'["' * 1_000_000,
        b"[{}," * 500_000,
    ):
        with pytest.raises(IntegrityError):
            canonical.unseal(sealed(text), key="k", kind="test")
    assert time.process_time() - started < 5


def test_a_small_document_that_unpacks_to_millions_of_lists_is_refused_before_any_is_made() -> None:
    with pytest.raises(ValueError, match="16777217 opening brackets are more than the 16777216 allowed"):
        canonical.loads_canonical(b"[" + b"[]," * (1 << 24) + b"0]")
