"""Random streams: captured without a draw, restored to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from syckpt.errors import StateError
from syckpt.objects import canonical
from syckpt.state import rng
from syckpt.state.flatten import flatten, unflatten


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = rng.capture()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    yield
    rng.restore(before)


def streams() -> Any:
    """The states as their libraries tell them, comparable."""
    legacy = np.random.get_state(legacy=False)
    state = legacy["state"]
    numpy_state = (state["key"].tolist(), state["pos"], legacy["has_gauss"], legacy["gauss"])
    return random.getstate(), numpy_state, torch.get_rng_state().tolist()


def draws() -> Any:
    return (
        [random.gauss(0, 1), random.random(), random.getrandbits(70)],
        [*np.random.standard_normal(3).tolist(), *np.random.randint(0, 99, 3).tolist()],
        [*torch.randn(17).tolist(), *torch.randperm(9).tolist(), *torch.nn.functional.dropout(torch.ones(9)).tolist()],
    )


def carried(value: Any) -> Any:
    flat = flatten({"rng": value})
    copies = [torch.as_tensor(leaf.array).clone() for leaf in flat.leaves]
    return unflatten(canonical.loads(canonical.dumps(flat.nodes["rng"])), copies.__getitem__)


def test_capture_moves_no_stream() -> None:
    draws()
    before = streams()
    rng.capture()
    flatten({"rng": rng.capture()})
    assert streams() == before


def test_restored_streams_draw_the_same_again_after_a_trip_through_flatten() -> None:
    # An odd number of normal draws leaves a cached one behind in Python's and numpy's streams.
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(1)
    value = carried(rng.capture())
    before = streams()
    first = draws()
    assert rng.restore(value) == []
    assert streams() == before
    assert draws() == first


def test_a_captured_state_does_not_change_with_the_streams() -> None:
    value = rng.capture()
    first = draws()
    draws()
    rng.restore(value)
    assert draws() == first


def test_the_state_is_plain() -> None:
    value = rng.capture()
    assert value["python"][0] == 3
    assert value["python"][1].dtype == np.uint32
    assert value["python"][1].shape == (625,)
    assert value["numpy"]["bit_generator"] == "MT19937"
    assert value["torch"].dtype == torch.uint8
    assert list(value) == ["python", "numpy", "torch", "cuda"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_streams_of_absent_devices_are_noted() -> None:
    value = {**rng.capture(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    assert rng.restore(value) == ["cuda: the commit holds the streams of 2 devices, here are 0"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_streams_are_restored() -> None:
    torch.cuda.init()
    value = carried(rng.capture())
    first = torch.randn(5, device="cuda").tolist()
    assert rng.restore(value) == []
    assert torch.randn(5, device="cuda").tolist() == first


def test_another_bit_generator_is_noted() -> None:
    value = rng.capture()
    value["numpy"] = np.random.RandomState(np.random.PCG64(1)).get_state(legacy=False)
    assert rng.restore(value) == ["numpy: the commit holds a PCG64 stream, numpy.random runs on MT19937 here"]


@pytest.mark.parametrize(
    "change",
    [
        {"python": None},
        {"python": (3, np.zeros(4, np.uint32), None)},
        {"numpy": {"bit_generator": "MT19937"}},
        {"numpy": 3},
        {"torch": None},
        {"torch": torch.zeros(3, dtype=torch.uint8)},
        {"cuda": 3},
    ],
)
def test_a_value_of_another_form_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="random streams"):
        rng.restore({**rng.capture(), **change})


def test_a_missing_stream_is_refused() -> None:
    with pytest.raises(StateError, match="random streams"):
        rng.restore({"python": rng.capture()["python"]})
