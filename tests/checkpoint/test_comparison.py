"""What rank 0 makes of the digests that ranks bring."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syckpt.checkpoint.comparison import Claim, Compared, Told, alike, compare, owner_of_box
from syckpt.errors import StateError
from syckpt.objects.box import Box
from syckpt.reshard.layout import Layout, Placement, Replicate, Shard
from syckpt.reshard.placement import Declaration, Structure, Tensor


def over(shape: tuple[int, ...], ranks: tuple[int, ...], *placements: Placement, mesh: tuple[int, ...] | None = None) -> Layout:
    return Layout(shape, mesh or (len(ranks),), ranks, placements or (Shard(0),))


def structure(**layouts: Layout | None) -> Structure:
    return Structure(tuple(Tensor((name,), "float32", (8,), layout) for name, layout in layouts.items()))


def told(structure: Structure, *digests: str, claims: dict[str, tuple[Claim, str]] | None = None, files: Any = None) -> Told:
    return Told(structure, digests, claims or {}, files or {})


def test_a_plain_tensor_with_two_digests_has_diverged() -> None:
    both, one = structure(a=None, b=None), structure(b=None)
    assert compare([told(both, "1", "2"), told(both, "1", "3"), told(one, "2")]) == Compared(diverged=["b"])
    assert compare([told(both, "1", "2"), told(one, "2")]) == Compared()


def test_copies_of_one_part_that_differ_are_told_with_all_ranks_that_hold_it() -> None:
    mine = structure(w=over((8,), (0, 1, 2, 3), Replicate(), Shard(0), mesh=(2, 2)))
    assert compare([told(mine, digest) for digest in "abab"]) == Compared()
    assert compare([told(mine, digest) for digest in "abax"]) == Compared(unlike={"w": [1, 3]})
    assert compare([told(mine, digest) for digest in "abxy"]) == Compared(unlike={"w": [0, 1, 2, 3]})


def test_parts_on_one_mesh_may_differ_and_on_several_each_is_one() -> None:
    one = structure(w=over((8,), (0, 1, 2, 3)))
    assert compare([told(one, digest) for digest in "abcd"]) == Compared()
    first, second = structure(w=over((8,), (0, 1))), structure(w=over((8,), (2, 3)))
    assert compare([told(first, "a"), told(first, "b"), told(second, "a"), told(second, "b")]) == Compared()
    with pytest.raises(StateError, match="w: ranks 1 and 3, on two meshes, hold the same part of it with values that differ"):
        compare([told(first, "a"), told(first, "b"), told(second, "a"), told(second, "x")])


@pytest.mark.parametrize("other", [None, over((8,), (2, 3), Replicate()), over((8,), (1, 2, 3)), "dtype"])
def test_two_tensors_under_one_path_are_refused_by_the_first_ranks_that_have_them(other: Any) -> None:
    mine = structure(v=None, w=over((8,), (0, 1)))
    theirs = Structure((Tensor(("w",), "int32", (8,), over((8,), (2, 3))),)) if other == "dtype" else structure(w=other)
    with pytest.raises(StateError, match="w: the sharded tensor on rank 0 and the one on rank 2 are not one"):
        compare([told(mine, "a", "b"), told(mine, "a", "b"), told(theirs, "b"), told(theirs, "b")])


def test_ranks_that_claim_one_file_have_one_content() -> None:
    mine, files = structure(m=None), {"m.pt": ["m", {"m/step": "1"}]}
    assert compare([told(mine, "a", files=files)] * 2) == Compared()
    with pytest.raises(StateError, match=r"ranks 0 and 1 both claim the file m.pt, with values of m that differ"):
        compare([told(mine, "a", files=files), told(mine, "b", files=files)])


# --- declared boxes ------------------------------------------------------------------------------------------------------------


def claim(begin: int | None, size: int = 2, total: int = 4) -> Claim:
    box = None if begin is None else Box((begin,), (size,))
    return Claim(("q",), "int64", (total,), box)


def brings(*claims: Claim | None, digest: str = "d") -> list[Told]:
    return [told(structure(), claims={} if each is None else {"q": (each, digest)}) for each in claims]


def test_the_table_learns_who_stores_which_declared_box() -> None:
    found = compare(brings(claim(0), claim(2), claim(0), claim(2)))
    low, high = Box((0,), (2,)), Box((2,), (2,))
    assert found.claimants == {"q (0,) (2,)": [0, 2], "q (2,) (2,)": [1, 3]}
    assert found.declared == [
        Declaration(("q",), "int64", (4,), ((owner_of_box("q", low, [0, 2]), low), (owner_of_box("q", high, [1, 3]), high)))
    ]
    assert compare(brings(claim(0), claim(2))).claimants == {}


def test_what_ranks_keep_for_themselves_is_in_no_table() -> None:
    assert compare(brings(claim(None), claim(None))) == Compared()


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ((claim(0), claim(0)), "do not make the global tensor of shape"),
        ((claim(0, 3), claim(2)), "do not make the global tensor of shape"),
        ((claim(0), claim(2, total=5)), r"declares int64 \[4\] on rank 0 and int64 \[5\] on rank 1"),
        ((claim(0), claim(None)), r"declares int64 \[4\] on rank 0 and its own on rank 1"),
    ],
)
def test_claims_that_make_no_tensor_are_refused(claims: tuple[Claim, ...], message: str) -> None:
    with pytest.raises(StateError, match=message):
        compare(brings(*claims))


def test_a_box_has_one_value_and_a_path_is_declared_on_all_ranks_that_have_it() -> None:
    with pytest.raises(StateError, match=r"ranks \[0, 2\] declare one box"):
        compare([*brings(claim(0), claim(2)), *brings(claim(0), digest="e")])
    with pytest.raises(StateError, match="q: its resharder declares it on rank 0 and not on rank 1"):
        compare([*brings(claim(0)), told(structure(q=None), "d")])


def test_what_all_ranks_declare_alike_needs_no_comparison() -> None:
    whole = Box((0,), (4,))
    assert alike([None, claim(0, 4), claim(None)], 3) == Compared(
        claimants={"q (0,) (4,)": range(3)}, declared=[Declaration(("q",), "int64", (4,), ((owner_of_box("q", whole, range(3)), whole),))]
    )
    with pytest.raises(StateError, match="do not make the global tensor"):
        alike([claim(0)], 2)


def test_what_a_rank_tells_comes_over_the_wire() -> None:
    mine = claim(2)
    body = {"digests": ["a"], "claims": {"q": [*mine.to_body(), "d"]}, "files": {}}
    assert Told.from_body(json.loads(json.dumps(body)), structure(w=None)) == Told(structure(w=None), ["a"], {"q": (mine, "d")}, {})
