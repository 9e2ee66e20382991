"""Periods of time as people write them."""

from __future__ import annotations

import pytest

from syckpt.objects.text import seconds_of


@pytest.mark.parametrize(("period", "seconds"), [("0s", 0), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2 d", 172_800)])
def test_a_period_is_a_number_and_a_unit(period: str, seconds: float) -> None:
    assert seconds_of(period) == seconds


@pytest.mark.parametrize(
    "period", ["", "10", "m", "-1s", "+1s", "1 week", "1w", "1H", ".5s", "1.s", "1e3s", " 1s", "1s ", "1h30m", "inf s"]
)
def test_any_other_text_is_no_period(period: str) -> None:
    assert seconds_of(period) is None
