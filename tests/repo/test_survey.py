"""Sets of rows, up to the largest number that a document may name (`tests/hostile` bounds what they cost)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from syckpt.objects.locations import Locations
from syckpt.repo.survey import Rows, add_rows, numbers_in

ID, OTHER = "00000000-0000000000000001", "00000000-0000000000000002"
LOCATIONS = Locations(ID, 3, 1, "", (ID, 0), (), ((OTHER, 5),), (), ())


def test_pointers_are_gathered_by_whose_rows_they_mean() -> None:
    rows: Rows = {(OTHER, 5): 0b1}
    add_rows(rows, LOCATIONS, [(0, 2), (1, 9), (0, 2), (1, 1), (0, 0)])
    assert rows == {(ID, 3): 0b101, (OTHER, 5): 0b1000000011}
    add_rows(rows, LOCATIONS, ())
    assert sorted(rows) == [(ID, 3), (OTHER, 5)]


def test_numbers_come_out_ascending() -> None:
    assert list(numbers_in(0)) == []
    assert list(numbers_in(0b1000000011)) == [0, 1, 9]


@given(st.sets(st.integers(0, 2**24 - 1), min_size=1, max_size=50))
@settings(max_examples=25, deadline=None)
def test_what_goes_in_comes_out(numbers: set[int]) -> None:
    rows: Rows = {}
    add_rows(rows, LOCATIONS, [(1, number) for number in numbers])
    assert list(numbers_in(rows[OTHER, 5])) == sorted(numbers)
