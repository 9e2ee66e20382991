"""`save_checkpoint`, `load_checkpoint` and the mixin: a module's state in one file, all of it or nothing."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from syckpt import CheckpointMixin, IntegrityError, NotFoundError, StateError, load_checkpoint, save_checkpoint, validate_checkpoint
from syckpt.files.archive import Archive
from syckpt.repo import signing

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_one_file.py"


class Net(nn.Module):
    """Tied weights, a view among the buffers, several dtypes, buffers that are not saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.half = nn.Linear(6, 3, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.rand(6, 6) > 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("none", torch.empty(0, 2))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)


def state(module: nn.Module) -> dict[str, tuple[torch.dtype, list[Any]]]:
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in module.state_dict().items()}


def test_a_module_comes_back_in_place(tmp_path: Path) -> None:
    one, other = Net(1), Net(2)
    tensors = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    save_checkpoint(one, tmp_path / "net.ckpt")
    load_checkpoint(other, tmp_path / "net.ckpt")
    assert state(other) == state(one)
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == tensors
    assert other.head.weight is other.embed.weight
    assert other.embed.weight.requires_grad
    assert other.scratch.tolist() == [2.0, 2.0]
    assert os.listdir(tmp_path) == ["net.ckpt"]


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    save_checkpoint(Net(1), tmp_path / "net.ckpt")
    with Archive(tmp_path / "net.ckpt") as archive:
        assert archive.contents.ties == (("head.weight", "embed.weight"),)
    assert "head.weight" not in load_file(tmp_path / "net.ckpt")


def test_a_tied_file_fills_an_untied_module_and_not_the_other_way_round(tmp_path: Path) -> None:
    tied, untied = Net(1), Net(2)
    untied.head.weight = nn.Parameter(torch.zeros(11, 6))
    save_checkpoint(untied, tmp_path / "untied.ckpt")
    save_checkpoint(tied, tmp_path / "tied.ckpt")
    before = state(tied)
    with pytest.raises(StateError, match=r"'embed\.weight' and 'head\.weight' are one tensor in the module, and differ in the file"):
        load_checkpoint(tied, tmp_path / "untied.ckpt")
    assert state(tied) == before
    load_checkpoint(untied, tmp_path / "tied.ckpt")
    assert state(untied) == state(tied)


def test_everything_that_does_not_fit_is_listed_and_nothing_touched(tmp_path: Path) -> None:
    save_checkpoint(nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "c": nn.Linear(1, 1)}), tmp_path / "a.ckpt")
    other = nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(2, 2, dtype=torch.float64), "d": nn.Linear(1, 1, bias=False)})
    before = state(other)
    with pytest.raises(StateError) as caught:
        load_checkpoint(other, tmp_path / "a.ckpt")
    assert str(caught.value) == (
        f"{tmp_path}/a.ckpt does not fit the module; nothing was changed: 'd.weight' is missing from the file;"
        " 'c.weight' is not in the module; 'c.bias' is not in the module;"
        " 'a.weight' is float32 [3, 2] in the file and float32 [4, 2] in the module;"
        " 'a.bias' is float32 [3] in the file and float32 [4] in the module;"
        " 'b.weight' is float32 [2, 2] in the file and float64 [2, 2] in the module;"
        " 'b.bias' is float32 [2] in the file and float64 [2] in the module"
    )
    assert state(other) == before


def test_damage_in_the_last_byte_is_found_before_the_first_tensor_is_touched(tmp_path: Path) -> None:
    save_checkpoint(Net(1), tmp_path / "net.ckpt")
    data = bytearray((tmp_path / "net.ckpt").read_bytes())
    data[-1] ^= 1
    (tmp_path / "net.ckpt").write_bytes(data)
    other = Net(2)
    before = state(other)
    with pytest.raises(IntegrityError, match="block 0"):
        load_checkpoint(other, tmp_path / "net.ckpt")
    assert state(other) == before


def test_state_that_is_no_tensor_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

    save_checkpoint(nn.Linear(1, 1), tmp_path / "a.ckpt")
    before = (tmp_path / "a.ckpt").read_bytes()
    with pytest.raises(StateError, match="'_extra_state' is a dict: one file holds tensors only; use a CheckpointManager"):
        save_checkpoint(Extra(1, 1), tmp_path / "a.ckpt")
    with pytest.raises(StateError, match="'weight': a meta tensor has no values"):
        save_checkpoint(nn.Linear(1, 1, device="meta"), tmp_path / "a.ckpt")
    with pytest.raises(StateError, match=r"expected a module with a state_dict\(\), found dict"):
        save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_is_told_to_run_first(tmp_path: Path) -> None:
    save_checkpoint(nn.Linear(2, 3), tmp_path / "a.ckpt")
    with pytest.raises(StateError, match="'weight' is a lazy parameter of the module without a shape: run a forward pass first"):
        load_checkpoint(nn.LazyLinear(3), tmp_path / "a.ckpt")


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no such file"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "none.ckpt")


def test_a_file_may_be_signed(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        signing.keygen(tmp_path / name)
    save_checkpoint(Net(1), tmp_path / "net.ckpt", signer=tmp_path / "mine")
    one, other = Net(1), Net(2)
    before = state(other)
    with pytest.raises(IntegrityError, match="is not to be trusted"):
        load_checkpoint(other, tmp_path / "net.ckpt", trusted_keys=tmp_path / "other.pub")
    assert state(other) == before
    load_checkpoint(other, tmp_path / "net.ckpt", trusted_keys=[tmp_path / "mine.pub"])
    assert state(other) == state(one)


def test_the_cookbook_runs(tmp_path: Path) -> None:
    Transformer = runpy.run_path(str(EXAMPLE))["Transformer"]
    sizes = {"vocab_size": 1000, "dim": 128, "num_heads": 4, "num_layers": 2, "ffn_dim": 512, "max_seq_len": 64}
    path = str(tmp_path / "model.ckpt")
    model = Transformer(**sizes)
    assert isinstance(model, CheckpointMixin)
    model.save_checkpoint(path)
    again = Transformer(**sizes)
    again.load_checkpoint(path)
    assert state(again) == state(model)
    ok, errors = validate_checkpoint(path)
    assert (ok, errors) == (True, [])


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--dir", str(tmp_path / "run")])
    for _ in range(2):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert capsys.readouterr().out == (
            "whole: True []\nthe same outputs, bit for bit: True\nten rows of the embedding: (10, 128) of 27 tensors\n"
        )
