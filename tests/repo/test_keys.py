"""Keys stand where FORMAT.md says, and each is told from all others."""

from __future__ import annotations

import re

import pytest

from syckpt.repo import keys

ID = "0badc0de-00000000000000ff"
MADE = {
    keys.commit_key(ID): "objects/0badc0de-00000000000000ff.json",
    keys.manifest_key(ID, 3): "objects/0badc0de-00000000000000ff/r00003.manifest",
    keys.layouts_key(ID): "objects/0badc0de-00000000000000ff/layouts",
    keys.locations_key(ID, 3, 12): "objects/0badc0de-00000000000000ff/r00003.locations.0012",
    keys.blob_key(ID, 3): "objects/0badc0de-00000000000000ff/r00003.safetensors",
    keys.moved_blob_key(ID, 3, 12, nonce="0123abcd"): "objects/0badc0de-00000000000000ff/r00003.0012-0123abcd.safetensors",
    keys.mark_key(ID, "damaged"): "objects/0badc0de-00000000000000ff.damaged",
    keys.signature_key(ID, "0123456789abcdef"): "signatures/0badc0de-00000000000000ff.0123456789abcdef.json",
    keys.record_key("heads/team/x", 7): "logs/refs/heads/team%2Fx/000000000007.json",
    keys.copy_key("heads/team/x"): "refs/heads/team%2Fx",
    keys.intent_key(ID): "intents/0badc0de-00000000000000ff.json",
    keys.lease_key("team/x"): "leases/team%2Fx.json",
    keys.receipt_key("team/x", ID, 3): "receipts/team%2Fx/0badc0de-00000000000000ff/r00003.json",
    keys.verdict_key("team/x", ID): "receipts/team%2Fx/0badc0de-00000000000000ff/verdict.json",
    keys.hello_key("abc"): "hello/abc.json",
}
PATTERNS = {name: pattern for name, pattern in vars(keys).items() if name.isupper() and isinstance(pattern, re.Pattern)}


def test_keys_stand_where_the_format_says() -> None:
    assert list(MADE) == list(MADE.values())


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [("OF_COMMIT", {0, 1, 2, 3, 4, 5, 6, 7}), ("OF_RANK", {1, 3, 4, 5}), ("LOCATIONS", {3}), ("MARK", {6}), ("SIGNATURE", {7}),
     ("RECORD", {8}), ("COPY", {9}), ("RECEIPT", {12, 13}), ("HELLO", {14})],
)  # fmt: skip
def test_a_pattern_tells_its_keys_from_all_others(pattern: str, numbers: set[int]) -> None:
    assert {number for number, key in enumerate(MADE) if PATTERNS[pattern].fullmatch(key)} == numbers


def test_the_parts_of_a_key_are_named() -> None:
    blob = keys.OF_RANK.fullmatch(keys.moved_blob_key(ID, 3, 12, nonce="0123abcd"))
    locations = keys.OF_RANK.fullmatch(keys.locations_key(ID, 3, 12))
    assert blob is not None
    assert locations is not None
    assert blob.groupdict() == {"commit": ID, "rank": "00003", "revision": None, "made_for": "0012"}
    assert locations.groupdict() == {"commit": ID, "rank": "00003", "revision": "0012", "made_for": None}
    of_dropped = [key for key in MADE if (match := keys.OF_COMMIT.fullmatch(key)) and match["content"]]
    assert of_dropped == [key for key in MADE if key.startswith(keys.commit_prefix(ID))]
    record, copy = keys.RECORD.fullmatch(keys.record_key("tags/a/b", 7)), keys.COPY.fullmatch(keys.copy_key("heads/a/b"))
    assert record is not None
    assert copy is not None
    assert (keys.ref_of(record), int(record["number"]), keys.ref_of(copy)) == ("tags/a/b", 7, "heads/a/b")
    assert {keys.commit_of(key) for key in MADE if key.startswith(("objects/", "intents/"))} == {ID}


@pytest.mark.parametrize(
    "key",
    [f"objects/{ID}/r0003.manifest", f"objects/{ID}/r00003.manifest.new", f"objects/{ID}/x/r00003.manifest", f"objects/{ID[:-1]}.json",
     f"objects/{ID}.lost", "logs/refs/heads/main/7.json", "logs/refs/heads/a/b/000000000007.json", f"receipts/main/{ID}/other.json",
     "hello/a/b.json", f"signatures/{ID}.json.json", "refs/tags/v1"],
)  # fmt: skip
def test_keys_of_no_form_belong_to_nothing(key: str) -> None:
    assert [name for name, pattern in PATTERNS.items() if pattern.fullmatch(key)] == []
