"""Targets that share memory are found, and whether they can all hold what is read for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syckpt.state.overlaps import conflict, overlapping


def test_only_targets_whose_spans_meet_are_grouped() -> None:
    buffer, other = torch.zeros(12), torch.zeros(4)
    array = np.zeros(6, np.float32)
    shared = torch.from_numpy(array)
    targets = [
        buffer[:4],
        other,
        buffer[4:8],
        buffer[6:10],
        buffer[10:],
        torch.zeros(0),
        shared[:4],
        torch.from_numpy(array[2:]),
        torch.zeros(()),
    ]
    assert sorted(map(sorted, overlapping(targets))) == [[2, 3], [6, 7]]
    chain = [buffer[:5], buffer[8:], buffer[3:9]]
    assert sorted(map(sorted, overlapping(chain))) == [[0, 1, 2]]
    assert overlapping([buffer[:6], buffer[6:]]) == []
    assert overlapping([torch.zeros(3, device="meta"), torch.zeros(3, device="meta")]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.uint3, torch.complex128])
def test_values_that_agree_where_targets_meet_can_all_be_held(dtype: torch.dtype) -> None:
    def make(length: int, start: int) -> torch.Tensor:
        raw = torch.arange(start * 16, (start + length) * 16, dtype=torch.int64).to(torch.uint8)
        return (
            raw[: length * dtype.itemsize].view(dtype)
            if dtype.itemsize == 16
            else raw.view(length, 16)[:, : dtype.itemsize].contiguous().view(dtype).view(-1)
        )

    buffer = torch.zeros(12 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    whole = make(12, 0)
    targets = [buffer[:8], buffer[4:], buffer.view(3, 4).t(), buffer[::3]]
    assert conflict(targets, [whole[:8], whole[4:], whole.view(3, 4).t(), whole[::3]]) is None
    assert conflict(targets, [whole[:8], make(8, 5), whole.view(3, 4).t(), whole[::3]]) == 1
    assert buffer.view(torch.uint8).eq(0).all()


def test_targets_that_lie_between_each_other_do_not_conflict() -> None:
    buffer = torch.zeros(4, 2)
    assert overlapping([buffer[:, 0], buffer[:, 1]]) == [[0, 1]]
    assert conflict([buffer[:, 0], buffer[:, 1]], [torch.ones(4), torch.zeros(4)]) is None


def test_converted_values_are_compared_as_the_target_holds_them() -> None:
    buffer = torch.zeros(3, dtype=torch.float32)
    third = torch.full((2,), 1 / 3, dtype=torch.float64)
    assert conflict([buffer[:2], buffer[1:]], [third, third]) is None
    assert conflict([buffer[:2], buffer[1:]], [third, third.float() + 1]) == 0
