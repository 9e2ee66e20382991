"""Names of commits, branches and tags."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import StateError
from syckpt.objects import ids


def test_a_commit_id_is_the_fingerprint_and_64_bits_over_everything_else():
    facts = {"repository": "00ff", "run": "run-1", "generation": 3, "sequence": 7, "nonce": bytes(range(16))}
    commit = ids.new_commit_id(fingerprint="89abcdef", **facts)
    text = b"syckpt commit v1\n00ff\nrun-1\n3\n7\n000102030405060708090a0b0c0d0e0f"
    assert commit == f"89abcdef-{blake3(text).hexdigest()[:16]}"
    others = [
        ids.new_commit_id(fingerprint="89abcdef", **{**facts, key: value})
        for key, value in [("repository", "01"), ("run", "r"), ("generation", 4), ("sequence", 8), ("nonce", bytes(16))]
    ]
    assert len({commit, *others}) == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("0badc0de-0123456789abcdef", True), ("0BADC0DE-0123456789abcdef", False), ("0badc0de-0123456789abcde", False), ("", False)],
        *[("0badc0de0123456789abcdef", False), ("0badc0de-0123456789abcdef\n", False), ("\u0660" * 8 + "-" + "0" * 16, False)],
    ],
)
def test_a_full_id_is_told_by_its_form(text, expected):
    assert ids.is_commit_id(text) is expected


@pytest.mark.parametrize(
    "name",
    ["main", "a", "A-Z_0.9", "feature/x/y", "v1.2", "-", "_", "0badc0de", "x" * 200, "a.lock.b", "lock", "head", "a-/b", "1/2/3", "best/x"],
)
def test_names_are_taken_as_they_are(name):
    assert ids.check_name(name, what="branch") == name
    assert ids.name_of_component(ids.key_component(name)) == name
    assert "/" not in ids.key_component(name)


@pytest.mark.parametrize(
    "name",
    [
        *["", "/", "a/", "/a", "a//b", ".", "..", ".a", "a/.b", "a/../b", "x.lock", "x.lock/y", "a b", "a\n", "\u00e4", "a%2Fb", "a\\b"],
        *["HEAD", "latest", "best", "0badc0de-0123456789abcdef", "x" * 201, "a/" * 99 + "a", None, 3, b"main", "~1", "a~1", "a@{1}", "*"],
    ],
)
def test_a_name_that_no_store_could_hold_or_that_means_something_else_is_refused_with_the_rules(name):
    with pytest.raises(StateError, match="cannot be the name of a tag: use 1 to 200 of"):
        ids.check_name(name, what="tag")


@given(st.text(alphabet="ab./-_%2F", min_size=1, max_size=300))
def test_an_accepted_name_is_one_component_that_every_file_system_holds(name):
    if ids.is_name(name):
        component = ids.key_component(name)
        assert len(component) <= 240
        assert not component.startswith(".")
        assert ids.name_of_component(component) == name


@pytest.mark.parametrize("name", ["model", "0", "a-b_c", "X"])
def test_items_have_plain_names(name):
    assert ids.check_item_name(name) == name


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a b", "\u00e4", "a\n", None, 1, "<rng>"])
def test_other_names_of_items_are_refused(name):
    with pytest.raises(StateError, match="use A-Z a-z 0-9 _ -"):
        ids.check_item_name(name)
