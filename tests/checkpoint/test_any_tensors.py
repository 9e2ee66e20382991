"""Any tensor that a script holds, through a real manager: carried bit for bit, or refused at the save by its path and a fix that works."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import syckpt
from syckpt import CheckpointManager
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository

DTYPES = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})
QUANTIZED = ["qint32", "qint8", "quint2x4", "quint4x2", "quint8"]
CARRIED = [name for name in DTYPES if name not in QUANTIZED]


def raw(name: str, seed: int, elements: int = 24) -> torch.Tensor:
    """Any pattern of bits is a value."""
    dtype = getattr(torch, name)
    data = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, elements * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in C order, by way of integers: some dtypes cannot even be copied."""
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.dtype.itemsize]
    return tensor.detach().resolve_conj().resolve_neg().view(carrier).contiguous().numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    return (type(a), a.dtype, a.shape, bits(a)) == (type(b), b.dtype, b.shape, bits(b))


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with CheckpointManager(tmp_path_factory.mktemp("tensors"), save_on_exit=False) as manager:
        yield manager


def saved(ckpt: CheckpointManager, **payload: Any) -> str:
    pending = ckpt.save(payload=payload)
    assert pending is not None
    return pending.id


def stored(ckpt: CheckpointManager, commit: str) -> list[str]:
    """Return the path of each entry of a commit."""
    ckpt.wait()
    repository: Repository = ckpt._repository
    entries = Reader(repository).snapshot(repository.read_commit(commit)).manifest.entries
    return ["/".join(map(str, entry.path)) for entry in entries if entry.path[0] != "<rng>"]


# --- dtypes --------------------------------------------------------------------------------------------------------------------


def test_every_dtype_of_this_torch_is_carried_in_every_form_or_refused_at_save(ckpt: CheckpointManager) -> None:
    assert set(QUANTIZED) < set(DTYPES)
    state = {}
    for seed, name in enumerate(CARRIED):
        value = raw(name, seed)
        state[name] = {
            "whole": value,
            "scalar": value[3],
            "empty": value[:0].view(0, 3),
            "transposed": value.view(4, 6).t(),
            "strided": value[1::3],
            "expanded": value[5:6].expand(4, 1),
        }
    expected = {name: {form: bits(value) for form, value in forms.items()} for name, forms in state.items()}
    commit = saved(ckpt, state=state)
    fresh = ckpt.load(commit)["state"]
    zeros = {
        name: {
            form: torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8).view(value.dtype).view(value.shape)
            for form, value in forms.items()
        }
        for name, forms in state.items()
    }
    strided = {name: torch.zeros(48 * getattr(torch, name).itemsize, dtype=torch.uint8).view(getattr(torch, name))[::2] for name in state}
    filled = ckpt.load(commit, into={"state": zeros})["state"]
    ckpt.load(commit, into={"state": {name: {**zeros[name], "whole": strided[name]} for name in state}})
    for name, forms in state.items():
        assert bits(strided[name]) == expected[name]["whole"], name
        for form, value in forms.items():
            assert filled[name][form] is zeros[name][form]
            for found in (fresh[name][form], zeros[name][form]):
                assert (found.dtype, found.shape, bits(found)) == (value.dtype, value.shape, expected[name][form]), (name, form)


def test_quantized_tensors_are_refused_by_path_and_the_named_fix_is_carried(ckpt: CheckpointManager) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = torch.tensor([[-1.0, 0.5], [2.0, 3.0]])
        by_tensor = torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
        by_channel = torch.quantize_per_channel(values, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8)
    for tensor in (by_tensor, by_channel):
        with pytest.raises(syckpt.StateError, match=r"^x/deep/0: quantized tensors cannot be carried; save `tensor.int_repr\(\)` with its"):
            ckpt.save(payload={"x": {"deep": [tensor]}})
    commit = saved(ckpt, x={"ints": by_tensor.int_repr(), "scale": by_tensor.q_scale(), "zero": by_tensor.q_zero_point()})
    assert ckpt.load(commit)["x"]["ints"].dtype == torch.int8


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: torch.eye(2).to_sparse(),
            r"tensors of layout torch.sparse_coo cannot be carried; save `tensor.to_dense\(\)` or its indices",
        ),
        (lambda: torch.eye(2).to_sparse_csr(), "tensors of layout torch.sparse_csr cannot be carried"),
        (lambda: torch.eye(2).to_sparse_csc(), "tensors of layout torch.sparse_csc cannot be carried"),
        (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "tensors of layout torch.sparse_bsr cannot be carried"),
        (lambda: torch.eye(4).to_sparse_bsc((2, 2)), "tensors of layout torch.sparse_bsc cannot be carried"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            r"nested tensors cannot be carried; save `list\(tensor.unbind",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            r"nested tensors cannot be carried; save `list\(tensor.unbind",
        ),
        (lambda: torch.empty(2, device="meta"), "a meta tensor has no values; materialize it"),
        (lambda: nn.LazyLinear(2).weight, "an uninitialized lazy parameter has no values yet; run a forward pass first"),
        (
            lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
            "the tensor subclass MaskedTensor keeps its data elsewhere; save the plain tensors that it is made of",
        ),
    ],
)
def test_tensors_without_plain_bits_are_refused_by_path_and_fix(ckpt: CheckpointManager, make: Any, why: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make()
        before = ckpt.hash
        with pytest.raises(syckpt.StateError, match=f'^model/a.b/"0": {why}'):
            ckpt.save(payload={"model": {"a.b": {"0": tensor}}})
    assert ckpt.hash == before


def test_a_cast_that_torch_cannot_make_is_refused_before_anything_is_touched(ckpt: CheckpointManager) -> None:
    commit = saved(ckpt, x={"a": torch.ones(2), "b": raw("uint3", 0, 2), "c": raw("float4_e2m1fn_x2", 0, 2)})
    target = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(
        syckpt.StateError, match=r"x/b: expected float32 \[2\], found uint3 \[2\]; x/c: expected float32 \[2\], found float4"
    ):
        ckpt.load(commit, into={"x": target}, cast=True)
    assert target["a"].tolist() == [0.0, 0.0]


def test_conjugate_and_negative_views_are_stored_as_their_values_and_can_be_filled(ckpt: CheckpointManager) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    commit = saved(ckpt, x={"conj": base.conj(), "neg": base.conj().imag, "plain": base})
    fresh = ckpt.load(commit)["x"]
    assert (fresh["conj"].tolist(), fresh["neg"].tolist()) == ([1 - 2j, 3 + 4j], [-2.0, 4.0])
    assert not fresh["conj"].is_conj()
    assert not fresh["neg"].is_neg()
    lazily, negative = torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64).conj().imag
    ckpt.load(commit, into={"x": {"conj": lazily, "neg": negative, "plain": torch.zeros(2, dtype=torch.complex64)}})
    assert (lazily.tolist(), negative.tolist()) == ([1 - 2j, 3 + 4j], [-2.0, 4.0])


# --- storage that is shared ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A tied head, a buffer that is registered twice, a module that is used twice."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.Linear(4, 4)
        self.again = self.block
        mask = torch.full((3,), value)
        self.register_buffer("mask", mask)
        self.register_buffer("other_mask", mask)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


def test_a_tied_module_is_stored_once_and_its_ties_hold_in_fresh_targets_and_in_new_tensors(ckpt: CheckpointManager) -> None:
    commit = saved(ckpt, model=Tied(1.5).state_dict())
    assert stored(ckpt, commit) == ["model/mask", "model/embed.weight", "model/block.weight", "model/block.bias"]
    fresh = ckpt.load(commit)["model"]
    for a, b in (("embed.weight", "head.weight"), ("block.weight", "again.weight"), ("block.bias", "again.bias"), ("mask", "other_mask")):
        assert fresh[a] is fresh[b]
    target = Tied(0.0)
    ckpt.load(commit, into={"model": target.state_dict()})
    assert target.head.weight is target.embed.weight
    assert target.head.weight.eq(1.5).all()
    assert target.other_mask.eq(1.5).all()
    target.embed.weight.data[0, 0] = 9.0
    assert target.head.weight[0, 0] == 9.0


def test_a_tied_commit_fills_a_target_without_ties_and_the_other_way_round_only_where_values_agree(ckpt: CheckpointManager) -> None:
    one = torch.tensor([1.0, 2.0])
    tied, equal, other = saved(ckpt, x=[one, one]), saved(ckpt, x=[one, one.clone()]), saved(ckpt, x=[one, one + 1])
    two = [torch.zeros(2), torch.zeros(2)]
    ckpt.load(tied, into={"x": two})
    assert [t.tolist() for t in two] == [[1.0, 2.0]] * 2
    target = torch.zeros(2)
    ckpt.load(equal, into={"x": [target, target]})
    assert target.tolist() == [1.0, 2.0]
    with pytest.raises(syckpt.StateError, match="x/1: in the target one tensor with x/0, in the commit another one; untie them"):
        ckpt.load(other, into={"x": [target, target]})
    assert target.tolist() == [1.0, 2.0]


def test_ties_across_items_are_stored_once(ckpt: CheckpointManager) -> None:
    weight = torch.randn(5)
    commit = saved(ckpt, a={"w": weight}, b=[weight])
    assert stored(ckpt, commit) == ["a/w"]
    assert ckpt.load(commit)["b"][0].tolist() == weight.tolist()


def test_views_and_overlapping_views_come_back_as_their_values(ckpt: CheckpointManager) -> None:
    buffer = torch.arange(12.0)
    views = {
        "left": buffer[:8],
        "right": buffer[4:],
        "matrix": buffer.view(3, 4),
        "transposed": buffer.view(3, 4).t(),
        "window": buffer.as_strided((3, 4), (2, 1)),
        "expanded": buffer[2].expand(2, 3),
        "permuted": buffer.view(2, 3, 2).permute(2, 0, 1),
    }
    expected = {name: view.tolist() for name, view in views.items()}
    commit = saved(ckpt, x=views)
    assert {name: value.tolist() for name, value in ckpt.load(commit)["x"].items()} == expected
    # Into views of one buffer again, overlapping as they were.
    fresh = torch.zeros(12)
    target = {"left": fresh[:8], "right": fresh[4:], "matrix": fresh.view(3, 4), "transposed": fresh.view(3, 4).t()}
    ckpt.load(commit, into={"x": target}, strict=False)
    assert fresh.tolist() == buffer.tolist()
    # A target one of whose elements are one and the same in memory cannot hold them.
    with pytest.raises(syckpt.StateError, match="x/expanded: the target cannot be filled: it overlaps itself; clone it"):
        ckpt.load(commit, into={"x": {**{k: torch.zeros_like(v) for k, v in views.items()}, "expanded": torch.zeros(1).expand(2, 3)}})


# --- parameters and subclasses ---------------------------------------------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass with nothing but a name of its own."""


def test_parameters_and_plain_subclasses_come_back_as_tensors_and_fill_what_the_target_holds(ckpt: CheckpointManager) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    state = {
        "p": parameter,
        "b": nn.Buffer(torch.tensor([3.0])),
        "n": torch.tensor([4.0]).as_subclass(Named),
        "g": torch.ones(1, requires_grad=True),
    }
    commit = saved(ckpt, x=state)
    fresh = ckpt.load(commit)["x"]
    assert {(type(value), value.requires_grad) for value in fresh.values()} == {(torch.Tensor, False)}
    assert [value.tolist() for value in fresh.values()] == [[1.0, 2.0], [3.0], [4.0], [1.0]]
    target = {
        "p": nn.Parameter(torch.zeros(2)),
        "b": nn.Buffer(torch.zeros(1)),
        "n": torch.zeros(1).as_subclass(Named),
        "g": torch.zeros(1, requires_grad=True),
    }
    loaded = ckpt.load(commit, into={"x": target})["x"]
    assert all(loaded[name] is target[name] for name in target)
    assert [type(value) for value in loaded.values()] == [nn.Parameter, type(target["b"]), Named, torch.Tensor]
    assert [value.requires_grad for value in loaded.values()] == [True, False, False, True]
    assert [value.tolist() for value in loaded.values()] == [[1.0, 2.0], [3.0], [4.0], [1.0]]
    assert loaded["p"].is_leaf
    assert loaded["p"].grad is None


def test_a_target_that_autograd_is_following_is_filled_all_the_same(ckpt: CheckpointManager) -> None:
    commit = saved(ckpt, x={"w": torch.tensor([5.0])})
    weight = torch.zeros(1, requires_grad=True)
    loss = (weight * 2).sum()
    ckpt.load(commit, into={"x": {"w": weight}})
    loss.backward()
    assert (weight.tolist(), weight.grad.tolist()) == ([5.0], [2.0])


def test_everything_may_change_right_after_save_and_nothing_of_it_is_in_the_commit(ckpt: CheckpointManager) -> None:
    tensor, strided = torch.zeros(300_000), torch.zeros(400, 400).t()[::2]
    array, raw_array = np.zeros(1000), np.zeros(500, "datetime64[s]")
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {
        "t": tensor,
        "s": strided,
        "a": array,
        "r": raw_array,
        "g": generator,
        "list": [1],
        "bytes": bytearray(b"ab"),
        "set": {1},
    }
    before = generator.get_state().tolist()
    commits = []
    for _ in range(3):
        commits.append(saved(ckpt, x=state))
        for value in (tensor, strided, array):
            value += 1
        raw_array += np.timedelta64(1, "s")
        torch.rand(5, generator=generator)
        state["list"].append(2)
        state["bytes"][0] += 1
        state["set"].add(len(state["set"]) + 1)
        state["new"] = True
        state.pop("gone", None)
    for number, commit in enumerate(commits):
        found = ckpt.load(commit)["x"]
        assert found["t"].eq(number).all()
        assert found["s"].eq(number).all()
        assert (found["a"] == number).all()
        assert (found["r"].astype(int) == number).all()
        assert (found["list"], found["bytes"], found["set"]) == (
            [1] + [2] * number,
            bytearray(bytes([97 + number, 98])),
            set(range(1, number + 2)),
        )
        assert ("new" in found) == (number > 0)
    assert ckpt.load(commits[0])["x"]["g"].get_state().tolist() == before


def test_an_exported_file_holds_sub_byte_integers_as_bytes_and_says_so(ckpt: CheckpointManager, tmp_path: Path) -> None:
    three = torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.uint3)
    ckpt.export_ckpt(saved(ckpt, x=[three, three, torch.ones(1)]), tmp_path / "x.pt")
    exported = torch.load(tmp_path / "x.pt", weights_only=True)
    assert [value.tolist() for value in exported["x"]] == [[1, 2, 3], [1, 2, 3], [1.0]]
    assert exported["syckpt"]["converted"] == ["x/0: uint3 as uint8", "x/1: uint3 as uint8"]
    assert exported["x"][0].data_ptr() == exported["x"][1].data_ptr()
