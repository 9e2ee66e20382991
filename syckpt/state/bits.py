"""Elements as bits: copies that convert nothing, also of dtypes for which torch has no copy of its own (sub-byte integers)."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["CARRIERS", "SUB_BYTE", "can_cast", "copy_tensor"]

# Integers of each size, and for 16 bytes the only type that numpy and torch share.
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


SUB_BYTE = frozenset(getattr(torch, name, None) for name in (f"{sign}int{size}" for sign in ("", "u") for size in range(1, 8)))
"""Integers of a byte each, which torch can view and neither copy nor pickle."""


@cache
def _copies(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch can copy elements of one dtype to another: `torch.can_cast` says yes to some that then fail."""
    try:
        torch.zeros(target.itemsize, dtype=torch.uint8).view(target).copy_(torch.zeros(source.itemsize, dtype=torch.uint8).view(source))
    except RuntimeError:  # NotImplementedError is one.
        return False
    return True


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether values of `source` can become ones of `target`, which is of no lesser kind."""
    return torch.can_cast(source, target) and _copies(source, target)


def copy_tensor(target: torch.Tensor, value: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy a tensor over another one of its shape: bit for bit where the dtypes are the same, converted where they can be."""
    if target.dtype == value.dtype and value.dtype in SUB_BYTE:
        carrier = CARRIERS[value.dtype.itemsize]
        target, value = target.view(carrier), value.view(carrier)
    target.copy_(value, non_blocking=non_blocking)
