"""Names with and without what wrappers insert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.state.wrappers import WRAPPERS, match, unwrapped


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("w", "w"),
        ("module.w", "w"),
        ("_orig_mod.module.a.w", "a.w"),
        ("a._orig_mod.w", "a.w"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.w", "a.b.w"),
        ("modules.w", "modules.w"),
        ("module", ""),
    ],
)
def test_parts_of_wrappers_are_left_out(name: str, plain: str) -> None:
    assert unwrapped(name) == plain


@pytest.mark.parametrize(
    ("live", "saved", "found"),
    [
        (["w", "b"], ["module.w", "module.b"], {"w": "module.w", "b": "module.b"}),
        (["_orig_mod.w"], ["module.w"], {"_orig_mod.w": "module.w"}),
        (["w", "b"], ["w", "module.b"], {"b": "module.b"}),
        (["w"], ["w"], {}),
        # The target's own name, and one that the commit has besides.
        (["w"], ["w", "module.w"], {}),
        (["w", "module.w"], ["module.w"], {}),
        # Two on one side.
        (["w"], ["module.w", "_orig_mod.w"], {}),
        (["module.w", "_orig_mod.w"], ["w"], {}),
        (["module"], ["_orig_mod"], {}),
        (["a.w"], ["b.w"], {}),
    ],
)
def test_names_are_matched_where_there_is_no_other_choice(live: list[str], saved: list[str], found: dict[str, str]) -> None:
    assert match(live, saved) == found


PARTS = st.lists(st.sampled_from(["a", "b", "w", *sorted(WRAPPERS)]), min_size=1, max_size=3)
NAMES = st.lists(PARTS.map(".".join), unique=True, max_size=6)


@given(live=NAMES, saved=NAMES)
def test_a_match_is_one_to_one_and_never_takes_a_name_that_is_there_on_both_sides(live: list[str], saved: list[str]) -> None:
    found = match(live, saved)
    assert len(set(found.values())) == len(found)
    for name, theirs in found.items():
        assert name in live
        assert theirs in saved
        assert name not in saved
        assert theirs not in live
        assert unwrapped(name) == unwrapped(theirs)
    assert match(saved, live) == {theirs: name for name, theirs in found.items()}
