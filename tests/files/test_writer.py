"""Writing a standalone file: what it may hold, what other tools see, and when it appears."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from syckpt import CheckpointReader, CheckpointWriter, NotFoundError, StateError, StoreError
from syckpt.files import writer as writing
from syckpt.objects.dtypes import DTYPES
from syckpt.repo import signing

QUANTIZED = ("qint32", "qint8", "quint2x4", "quint4x2", "quint8")
# By torch's own list: a dtype that is new in it has to be carried or refused by name.
HERE = sorted({str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)} - set(QUANTIZED))


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in C order."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.element_size()]
    return whole.view(carrier).flatten().numpy().tobytes()


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    """Return a tensor in which every byte pattern may occur."""
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def write(path: Path, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    with CheckpointWriter(path, **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)


def read(path: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(path) as reader:
        return {name: reader[name] for name in reader}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_of_torch_but_the_quantized_ones_comes_back_bit_for_bit(tmp_path: Path) -> None:
    assert {"float8_e4m3fn", "uint16", "uint32", "uint64", "complex64", "bool", "uint4", "float4_e2m1fn_x2"} <= set(HERE)
    tensors = {name: of_dtype(name, 3, 5) for name in HERE}
    write(tmp_path / "a.ckpt", tensors)
    assert_same(read(tmp_path / "a.ckpt"), tensors)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch._empty_affine_quantized([4], scale=1.0, zero_point=0, dtype=getattr(torch, name))
    with pytest.raises(StateError, match="'q': quantized tensors cannot be carried"):
        write(tmp_path / "a.ckpt", {"q": tensor})
    assert os.listdir(tmp_path) == []


def test_every_shape_and_layout_of_memory_comes_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.permute(2, 0, 1),
        "strided": base[:, ::2, 1:3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "of one block": torch.arange(1 << 18, dtype=torch.int32),
        "of more": torch.arange((1 << 18) + 1, dtype=torch.int32),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "sub-byte": of_dtype("uint4", 4, 6).t(),
        "nan and -0.0": torch.tensor([float("nan"), -0.0]),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    write(tmp_path / "a.ckpt", tensors)
    assert_same(read(tmp_path / "a.ckpt"), tensors)


names = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda name: name != "__metadata__")
dtypes = st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e5m2", "complex128"])
shapes = st.lists(st.integers(0, 5), max_size=4)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        names, st.tuples(st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e5m2", "complex128"]), shapes), max_size=6
    )
)
def test_any_names_and_shapes_come_back_in_order(tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.ckpt"
    tensors = {name: of_dtype(kind, *shape) for name, (kind, shape) in wanted.items()}
    write(path, tensors)
    assert_same(read(path), tensors)
    assert set(load_file(path)) == set(tensors)


def test_other_tools_see_the_tensors_as_they_are_or_as_their_bytes(tmp_path: Path) -> None:
    # An odd number of bytes first: nothing behind it is aligned.
    tensors = {"mask": torch.tensor([True, False, True]), **{name: of_dtype(name, 2, 3) for name in HERE if name != "complex32"}}
    write(tmp_path / "a.safetensors", tensors)
    seen = load_file(tmp_path / "a.safetensors")
    assert set(seen) == set(tensors)
    for name, tensor in tensors.items():
        known = DTYPES[str(tensor.dtype).removeprefix("torch.")].safetensors is not None
        assert (seen[name].dtype, seen[name].shape) == ((tensor.dtype, tensor.shape) if known else (torch.uint8, (len(bits(tensor)),)))
        assert bits(seen[name]) == bits(tensor)


def test_a_file_without_tensors_is_one(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", {})
    assert read(tmp_path / "a.ckpt") == load_file(tmp_path / "a.ckpt") == {}


@pytest.mark.parametrize(("early", "gap"), [(0, 1 << 20), (100, 4096), (0, 16), (1 << 22, 16)])
def test_a_file_is_the_same_to_readers_however_its_header_came_in_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: int, gap: int
) -> None:
    monkeypatch.setattr(writing, "_EARLY_NBYTES", early)
    monkeypatch.setattr(writing, "_GAP_NBYTES", gap)
    tensors = {"a": torch.arange(300_000.0), "b": torch.arange(3), "c": torch.arange(300_000)}
    write(tmp_path / "a.ckpt", tensors)
    assert_same(read(tmp_path / "a.ckpt"), tensors)
    assert set(load_file(tmp_path / "a.ckpt")) == set(tensors)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_tensor_may_change_once_it_was_added(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    with CheckpointWriter(tmp_path / "a.ckpt") as writer:
        writer.add("a", tensor)
        tensor.zero_()
    assert torch.equal(read(tmp_path / "a.ckpt")["a"], torch.arange(4.0))


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a.ckpt") as writer:
        writer.add("a", torch.ones(1))
        writer.tie("b", "a")
        for name in ("a", "b"):
            with pytest.raises(StateError, match=f"there is a tensor '{name}' already"):
                writer.add(name, torch.ones(2))
            with pytest.raises(StateError, match=f"there is a tensor '{name}' already"):
                writer.tie(name, "a")
        with pytest.raises(StateError, match="cannot be tied to 'c', which was not added"):
            writer.tie("d", "c")
    assert {name: tensor.tolist() for name, tensor in read(tmp_path / "a.ckpt").items()} == {"a": [1.0], "b": [1.0]}


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", 3, None])
def test_what_cannot_name_a_tensor_is_refused(tmp_path: Path, name: Any) -> None:
    with CheckpointWriter(tmp_path / "a.ckpt") as writer, pytest.raises(StateError, match="cannot name a tensor"):
        writer.add(name, torch.ones(1))


def test_what_cannot_be_carried_is_refused_by_name_and_the_writer_goes_on(tmp_path: Path) -> None:
    refused = {
        "meta": (torch.empty(2, device="meta"), "meta tensor has no values"),
        "sparse": (torch.eye(2).to_sparse(), "layout torch.sparse_coo cannot be carried"),
        "lazy": (torch.nn.UninitializedParameter(), "uninitialized lazy parameter"),
        "list": ([1.0], "expected a tensor, found list"),
    }
    with CheckpointWriter(tmp_path / "a.ckpt") as writer:
        writer.add("before", torch.ones(1))
        for name, (value, text) in refused.items():
            with pytest.raises(StateError, match=f"'{name}'.*{text}"):
                writer.add(name, value)  # type: ignore[arg-type]
        writer.add("after", torch.ones(1))
    assert list(read(tmp_path / "a.ckpt")) == ["before", "after"]


def test_the_file_appears_whole_at_the_end_in_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(path, {"a": torch.zeros(1)})
    with CheckpointWriter(path) as writer:
        writer.add("a", torch.ones(5_000_000))
        assert torch.equal(read(path)["a"], torch.zeros(1))
    assert torch.equal(read(path)["a"], torch.ones(5_000_000))
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("count", [1, 5_000_000])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.ckpt"
    write(path, {"a": torch.zeros(1)})

    def interrupted() -> None:
        with CheckpointWriter(path) as writer:
            writer.add("a", torch.ones(count))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(read(path)["a"], torch.zeros(1))
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("call", ["write", "pwrite", "fsync", "replace"])
def test_a_disk_that_fails_is_a_store_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*arguments: Any, **options: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError, match=r"a\.ckpt cannot be written: No space left on device"):
        write(tmp_path / "a.ckpt", {"a": torch.ones(5_000_000)})
    assert os.listdir(tmp_path) == []


def test_everything_is_synced_before_the_name_and_the_name_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def note(call: str) -> None:
        plain = getattr(os, call)

        def noted(*arguments: Any) -> Any:
            calls.append(call)
            return plain(*arguments)

        monkeypatch.setattr(os, call, noted)

    note("fsync")
    note("replace")
    write(tmp_path / "a.ckpt", {"a": torch.ones(1)})
    assert calls == ["fsync", "replace", "fsync"]


def test_a_writer_that_has_ended_takes_nothing_more(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "a.ckpt")
    writer.close()
    writer.close()
    writer.abort()
    with pytest.raises(StateError, match="the writer was closed"):
        writer.add("a", torch.ones(1))
    other = CheckpointWriter(tmp_path / "b.ckpt")
    other.abort()
    other.abort()
    with pytest.raises(StateError, match="the writer was aborted"):
        other.close()
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a.ckpt")
    write(tmp_path / "link", {"a": torch.ones(1)})
    assert os.readlink(tmp_path / "link") == "a.ckpt"
    assert list(read(tmp_path / "a.ckpt")) == ["a"]


def test_places_where_no_file_can_be_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is a directory: name a file in it"):
        CheckpointWriter(tmp_path)
    with pytest.raises(NotFoundError, match="no is not a directory: make it first"):
        CheckpointWriter(tmp_path / "no" / "a.ckpt")
    with pytest.raises(NotFoundError, match="private key"):
        CheckpointWriter(tmp_path / "a.ckpt", signer=tmp_path / "none")
    assert os.listdir(tmp_path) == []


def test_the_same_tensors_make_the_same_file(tmp_path: Path) -> None:
    signing.keygen(tmp_path / "key")
    for name in ("a", "b"):
        write(tmp_path / name, {"x": torch.arange(5), "y": torch.ones(2)}, signer=tmp_path / "key")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_writer_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = CheckpointWriter(tmp_path / "a.ckpt")
    writer.add("a", torch.ones(3))
    del writer
    assert (os.listdir(tmp_path), len(os.listdir("/proc/self/fd"))) == ([], before)


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError, match="is not a regular file"):
        CheckpointWriter(tmp_path / "pipe")
    with pytest.raises(StateError, match="cannot be the path of a file"):
        CheckpointWriter(f"{tmp_path}/a\0b")
    assert os.listdir(tmp_path) == ["pipe"]
