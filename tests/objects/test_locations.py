"""Locations: where bytes are, read without trust."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import IntegrityError, SyckptError
from syckpt.objects import canonical
from syckpt.objects.address import block_count
from syckpt.objects.locations import BlobRecord, Locations, Row

ID, OTHER = "00000000-0000000000000001", "0badc0de-0123456789abcdef"
KEY = f"objects/{ID}/r00000.safetensors"
MIB = 1 << 20


@st.composite
def tables(draw: st.DrawFn) -> Locations:
    blob = BlobRecord(KEY, 100 * MIB, 64, draw(st.binary(min_size=16, max_size=16)))
    sources = tuple((OTHER, rank) for rank in range(draw(st.integers(0, 2))))
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        nbytes = 8 * draw(st.integers(0, MIB // 2))
        count = block_count(nbytes)
        coded = draw(st.booleans())
        blocks = tuple(draw(st.lists(st.integers(1, 100), min_size=count, max_size=count))) if coded and count > 1 else ()
        length = (sum(blocks) if blocks else draw(st.integers(0, 100))) if coded else nbytes
        leaves = draw(st.binary(min_size=16 * count, max_size=16 * count)) if count > 1 else b""
        base = (draw(st.integers(1, len(sources))), draw(st.integers(0, 5))) if coded and sources and draw(st.booleans()) else None
        rows.append(Row(0, draw(st.integers(64, MIB)), length, nbytes, draw(st.sampled_from([1, 2, 4, 8])), coded, blocks, leaves, base))
    places = [(0, i) for i in range(len(rows))] + [(s + 1, 3) for s in range(len(sources))]
    at = tuple(draw(st.lists(st.sampled_from(places), max_size=5))) if places else ()
    return Locations(ID, 0, draw(st.integers(1, 9999)), "ab" * 32, (OTHER, draw(st.integers(0, 7))), (blob,), sources, at, tuple(rows))


@given(tables())
def test_locations_come_back_through_their_body(locations):
    body = canonical.loads(canonical.dumps(locations.to_body()))
    assert Locations.from_body(body, where="l") == locations


GOOD = Locations(
    ID,
    0,
    1,
    "ab" * 32,
    (OTHER, 2),
    (BlobRecord(KEY, 4 * MIB, 128, bytes(16)),),
    ((OTHER, 0),),
    ((0, 0), (1, 9), (0, 1)),
    (
        Row(0, 128, 100, 2 * MIB, 4, True, (60, 40), bytes(32), (1, 3)),
        Row(0, 228, 40, 40, 8, False, (), b"", None),
    ),
)


def test_the_body_is_columns():
    assert GOOD.to_body() == {
        "kind": "locations",
        "version": 1,
        "commit": ID,
        "rank": 0,
        "revision": 1,
        "manifest": "ab" * 32,
        "keyframe": [OTHER, 2],
        "blobs": [[KEY, 4 * MIB, 128, "AAAAAAAAAAAAAAAAAAAAAA"]],
        "sources": [[OTHER, 0]],
        "at": {"source": [0, 1, 0], "row": [0, 9, 1]},
        "rows": {
            "blob": [0, 0],
            "offset": [128, 228],
            "length": [100, 40],
            "nbytes": [2 * MIB, 40],
            "width": [4, 8],
            "coded": [1, 0],
            "blocks": [[60, 40], None],
            "leaves": ["A" * 43, None],
            "base": [[1, 3], None],
        },
    }
    assert (GOOD.source(0), GOOD.source(1)) == ((ID, 0), (OTHER, 0))


def body_with(**changes: Any) -> dict[str, Any]:
    body = copy.deepcopy(GOOD.to_body())
    for key, value in changes.items():
        table, _, column = key.rpartition("__")
        (body[table] if table else body)[column] = value
    return body


@pytest.mark.parametrize(
    "changes",
    [
        {"blobs": [["objects/../../../etc/passwd", 4 * MIB, 128, "A" * 22]]},
        {"blobs": [["/etc/passwd", 4 * MIB, 128, "A" * 22]]},
        {"blobs": [[f"objects/{ID}/../x", 4 * MIB, 128, "A" * 22]]},
        {"blobs": [[f"objects/{ID}/..", 4 * MIB, 128, "A" * 22]]},
        {"blobs": [[f"objects/{ID}", 4 * MIB, 128, "A" * 22]]},
        {"blobs": [["leases/main.json", 4 * MIB, 128, "A" * 22]]},
        {"blobs": [[f"objects/{ID}/a\\b", 4 * MIB, 128, "A" * 22]]},
        {"blobs": [[f"objects/{ID}/a\x00", 4 * MIB, 128, "A" * 22]]},
        {"blobs": [[KEY, -1, 0, "A" * 22]]},
        {"blobs": [[KEY, 100, 128, "A" * 22]]},
        {"blobs": [[KEY, 2**40, 100_000_001, "A" * 22]], "rows__offset": [2**30, 2**31]},
        {"blobs": [[KEY, 4 * MIB, 128, "A" * 21]]},
        {"blobs": [[KEY, 4 * MIB, 128]]},
        {"blobs": [None]},
        {"blobs": []},
        {"sources": [["main", 0]]},
        {"sources": [[OTHER, -1]]},
        {"sources": []},
        {"keyframe": [OTHER]},
        {"keyframe": ["../x", 0]},
        {"keyframe": None},
        {"revision": 0},
        {"at__source": [0, 2, 0]},
        {"at__source": [0, -1, 0]},
        {"at__source": [0, True, 0]},
        {"at__row": [0, -9, 1]},
        {"at__row": [0, 9, 2]},
        {"at__row": [0, 2**24, 1]},
        {"rows__base": [[1, 2**24], None]},
        {"bases": [[1, 2**24]]},
        {"at__row": [0, 9]},
        {"rows__blob": [1, 0]},
        {"rows__blob": [-1, 0]},
        {"rows__offset": [127, 228]},  # inside the header
        {"rows__offset": [-128, 228]},
        {"rows__offset": [4 * MIB - 99, 228]},  # beyond the end
        {"rows__offset": [2**53 - 1, 228]},
        {"rows__offset": [128.0, 228]},
        {"rows__length": [101, 40]},  # not the sum of the blocks
        {"rows__length": [100, 41]},  # raw, but not nbytes
        {"rows__nbytes": [3 * MIB, 40]},
        {"rows__nbytes": [2**53 - 1, 40]},
        {"rows__nbytes": [-2 * MIB, 40]},
        {"rows__width": [3, 8]},
        {"rows__width": [0, 8]},
        {"rows__width": [4, 16]},
        {"rows__coded": [2, 0]},
        {"rows__coded": [1, None]},
        {"rows__blocks": [[60, 41], None]},
        {"rows__blocks": [[100], None]},
        {"rows__blocks": [None, None]},
        {"rows__blocks": [[160, -60], None]},
        {"rows__blocks": [{"a": 1}, None]},
        {"rows__blocks": [[60, 40], [40]]},
        {"rows__leaves": ["A" * 22, None]},
        {"rows__leaves": [None, None]},
        {"rows__leaves": ["A" * 43, "A" * 22]},
        {"rows__leaves": [7, None]},
        {"rows__base": [[2, 3], None]},
        {"rows__base": [[-1, 3], None]},
        {"rows__base": [[1, -3], None]},
        {"rows__base": [[], None]},
        {"rows__base": [[1], None]},
        {"rows__base": [[1, 3, 4], None]},
        {"rows__base": [{}, None]},
        {"rows__base": ["ab", None]},
        {"rows__base": [[0, 2], None]},  # no such row of its own
        {"rows__base": [[1, 3], [1, 3]]},  # raw bytes have no base
        {"rows": []},
        {"at": {"source": []}},
    ],
)
def test_a_malformed_body_is_an_integrity_error_that_names_the_document(changes):
    with pytest.raises(IntegrityError, match=r"^where: "):
        Locations.from_body(body_with(**changes), where="where")


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["blobs", "sources", "keyframe", "at", "rows", "commit", "at__source", "at__row"]
FIELDS += [f"rows__{name}" for name in ("blob", "offset", "length", "nbytes", "width", "coded", "blocks", "leaves", "base")]


@given(st.sampled_from(FIELDS), junk, st.booleans())
def test_no_junk_in_any_field_raises_anything_but_a_syckpt_error(field, value, nested):
    try:
        Locations.from_body(body_with(**{field: [value, value] if nested else value}), where="where")
    except SyckptError:
        pass


def test_rows_that_are_gone_and_bases_come_back_through_their_body():
    gone = Locations(*[getattr(GOOD, name) for name in ("commit", "rank", "revision", "manifest_seal", "keyframe", "blobs", "sources")], (),
                     (GOOD.rows[0], None), ((1, 7),))  # fmt: skip
    body = canonical.loads(canonical.dumps(gone.to_body()))
    assert body["rows"]["blob"] == [0, None]
    assert body["bases"] == [[1, 7]]
    assert Locations.from_body(body, where="l") == gone
    assert gone.row(0) == GOOD.rows[0]
    for number in (1, 2):
        with pytest.raises(IntegrityError, match=f"locations.0001: no row {number}"):
            gone.row(number)


def test_without_bases_there_is_no_such_field():
    assert "bases" not in GOOD.to_body()


@pytest.mark.parametrize("bases", [[[0, 1]], [[2, 1]], [[1, -1]], [[1]], 7])
def test_bases_that_lead_nowhere_are_refused(bases):
    with pytest.raises(IntegrityError):
        Locations.from_body({**GOOD.to_body(), "bases": bases}, where="l")


def test_a_row_that_is_gone_holds_nothing():
    body = copy.deepcopy(GOOD.to_body())
    body["rows"]["blob"][1] = None
    with pytest.raises(IntegrityError, match="a row without a blob has bytes"):
        Locations.from_body(body, where="l")
