"""The random streams that training code draws from without naming a generator: capture and restore, bit for bit.

Python's `random`, numpy's legacy stream, torch's CPU generator and, once CUDA is initialized, every CUDA device's. Capturing moves
no stream and initializes nothing. The captured value is made of plain values, arrays and tensors, which `flatten` carries.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from syckpt.errors import StateError

__all__ = ["capture", "derive", "derived", "restore"]


def capture() -> dict[str, Any]:
    """Return the state of every stream: `python` (version, words, gauss_next), `numpy`, `torch`, `cuda` (a list by device)."""
    version, internal, gauss_next = random.getstate()
    return {
        "python": (version, np.array(internal, np.uint32), gauss_next),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def derive(text: str) -> None:
    """Set every stream, on every device, to a state that follows from a text alone."""
    seed = int.from_bytes(blake3(b"syckpt streams v1\n" + text.encode()).digest(length=8), "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def derived(text: str) -> dict[str, Any]:
    """Return the streams that `derive` would set, as `capture` does, and leave the present ones alone."""
    before = capture()
    try:
        derive(text)
        return capture()
    finally:
        restore(before)


def _restore_cuda(states: list[torch.Tensor]) -> list[str]:
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(states[:here]):
        torch.cuda.set_rng_state(state.cpu(), device)
    if len(states) != here and (states or torch.cuda.is_initialized()):
        return [f"cuda: the commit holds the streams of {len(states)} devices, here are {here}"]
    return []


def restore(value: Mapping[str, Any]) -> list[str]:
    """Set every stream to a captured state; return a note for each one that could not be.

    Raises: StateError for a value that `capture` did not make; streams may have been set by then.
    """
    notes = []
    try:
        version, words, gauss_next = value["python"]
        random.setstate((version, tuple(np.asarray(words).tolist()), gauss_next))
        name = np.random.get_state(legacy=False)["bit_generator"]
        if value["numpy"]["bit_generator"] == name:
            np.random.set_state(value["numpy"])
        else:
            notes.append(f"numpy: the commit holds a {value['numpy']['bit_generator']} stream, numpy.random runs on {name} here")
        torch.set_rng_state(value["torch"].cpu())
        return notes + _restore_cuda(list(value["cuda"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError) as exc:
        raise StateError(f"not a captured state of the random streams: {type(exc).__name__}: {exc}") from exc
