"""Targets that lie in one another's memory: what one takes is in the other too, so the values that are read for them must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from syckpt.state.bits import copy_tensor
from syckpt.state.flatten import is_sharded

__all__ = ["conflict", "overlapping"]

_ALIGN = 64


@dataclass(frozen=True)
class _Span:
    """The bytes from a tensor's first element to behind its last one."""

    number: int
    start: int
    stop: int


def _spans(targets: Sequence[torch.Tensor]) -> Iterator[tuple[torch.device, _Span]]:
    for number, target in enumerate(targets):
        if target.numel() and not is_sharded(target) and target.layout is torch.strided and target.device.type != "meta":
            reach = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True)) + 1
            yield target.device, _Span(number, target.data_ptr(), target.data_ptr() + reach * target.element_size())


def overlapping(targets: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return groups of targets, by number, whose spans of memory meet. Their elements may still lie between each other."""
    by_device: dict[torch.device, list[_Span]] = {}
    for device, span in _spans(targets):
        by_device.setdefault(device, []).append(span)
    groups: list[list[int]] = []
    for spans in by_device.values():
        stop = -1
        for span in sorted(spans, key=lambda span: span.start):
            if span.start < stop:
                groups[-1].append(span.number)
            else:
                groups.append([span.number])
            stop = max(stop, span.stop)
    return [group for group in groups if len(group) > 1]


def conflict(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> int | None:
    """Return the number of a target of one group that could not hold its value if all were filled; None if they agree. Touches nothing."""
    spans = [span for _, span in _spans(targets)]
    low = min(span.start for span in spans)
    low -= low % _ALIGN
    memory = torch.zeros(max(span.stop for span in spans) - low + _ALIGN, dtype=torch.uint8).untyped_storage()
    doubles = []
    for target in targets:
        offset, misplaced = divmod(target.data_ptr() - low, target.element_size())
        if misplaced:
            return None  # An array in the middle of a structure: torch has no view of it.
        doubles.append(torch.empty(0, dtype=target.dtype).set_(memory, offset, target.shape, target.stride()))
    converted = [value if value.dtype == double.dtype else value.to(double.dtype) for value, double in zip(values, doubles, strict=True)]
    for double, value in zip(doubles, converted, strict=True):
        copy_tensor(double, value)
    for number, (double, value) in enumerate(zip(doubles, converted, strict=True)):
        if not _same_bits(double, value):
            return number
    return None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = []
    for tensor in (a, b):
        whole = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        copy_tensor(whole.view(tensor.dtype).view(tensor.shape), tensor)
        raw.append(whole)
    return bool(torch.equal(*raw))
