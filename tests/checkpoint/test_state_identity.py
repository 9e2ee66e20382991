"""What was saved comes back, bit for bit, from every commit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import syckpt
from syckpt.objects.dtypes import DTYPES
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root

pytestmark = pytest.mark.xdist_group("state_identity")

SAVES = 20


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(name: str, seed: int, elements: int = 3000) -> torch.Tensor:
    """Any bit pattern is a value: NaN payloads, -0.0, infinities, denormals."""
    dtype = getattr(torch, name)
    raw = np.random.default_rng(seed).integers(0, 256, elements * dtype.itemsize, dtype=np.uint8)
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype)


def drift(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Change a tenth of the bytes a little, as training does."""
    raw = tensor.view(torch.uint8).numpy().copy()
    if tensor.dtype == torch.bool:
        raw[:: seed + 2] ^= 1
    else:
        raw[seed % 10 :: 10] += 1
    return torch.from_numpy(raw).view(tensor.dtype)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Twenty commits of every dtype, some tensors changing at every save, some rarely, some never."""
    names = [name for name in DTYPES if hasattr(torch, name)]
    root = tmp_path_factory.mktemp("history")
    state = {f"{name}_{kind}": random_bits(name, i) for i, name in enumerate(names) for kind in ("moving", "rare", "frozen")}
    state["big"] = random_bits("float32", 99, 700_000)
    state["scalar"] = torch.tensor(float("-0.0"))
    state["empty"] = torch.empty(0, 7, dtype=torch.float16)
    state["strided"] = torch.arange(5000, dtype=torch.int32).reshape(50, 100).t()[::2]
    state["expanded"] = torch.tensor([1.5, -2.5]).expand(40, 2)
    saved = []
    with syckpt.CheckpointManager(root, save_on_exit=False) as ckpt:
        ckpt.state = state
        for save in range(SAVES):
            state = {
                key: drift(value, save) if key.endswith("_moving") or key == "big" or (key.endswith("_rare") and save % 5 == 4) else value
                for key, value in state.items()
            }
            ckpt.state = state
            pending = ckpt.save()
            saved.append((pending.id, {key: (value.dtype, value.shape, bits(value)) for key, value in state.items()}))
    return root, saved


def test_every_one_of_twenty_commits_is_restored_bit_for_bit(history):
    root, saved = history
    for commit, expected in saved:
        loaded = syckpt.load(root, commit)["state"]
        assert list(loaded) == list(expected)
        for key, (dtype, shape, raw) in expected.items():
            assert loaded[key].dtype == dtype
            assert loaded[key].shape == shape
            assert bits(loaded[key]) == raw, (commit, key)


def test_every_commit_is_restored_in_place_bit_for_bit(history):
    root, saved = history
    for commit, expected in saved[-3:]:
        target = {key: torch.zeros(len(raw), dtype=torch.uint8).view(dtype).view(shape) for key, (dtype, shape, raw) in expected.items()}
        loaded = syckpt.load(root, commit, into={"state": target})["state"]
        for key, (_, _, raw) in expected.items():
            assert loaded[key] is target[key]
            assert bits(target[key]) == raw


def test_no_tensor_needs_more_than_one_decoded_base(history):
    root, saved = history
    repository = Repository.open(parse_root(root))
    reader = Reader(repository)
    deltas = 0
    for commit, _ in saved:
        for place in reader.snapshot(repository.read_commit(commit)).places:
            if place.base is not None:
                deltas += 1
                assert place.base.base is None
                assert place.base.row.base is None
    assert deltas > 100


def test_at_most_eight_commits_share_a_keyframe(history):
    root, saved = history
    repository = Repository.open(parse_root(root))
    frames = [repository.read_locations(commit, 0).keyframe for commit, _ in saved]
    ids = [commit for commit, _ in saved]
    assert frames == [(ids[i - i % 8], i % 8) for i in range(SAVES)]


def test_history_is_one_line_of_parents_and_verifies(history):
    root, saved = history
    repository = Repository.open(parse_root(root))
    ids = [commit for commit, _ in saved]
    assert [repository.read_commit(i).parents for i in ids] == [(), *[(i,) for i in ids[:-1]]]
    report = verify(repository)
    assert report.errors == []
    assert report.commits == SAVES
