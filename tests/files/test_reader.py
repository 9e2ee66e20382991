"""Reading a standalone file: every damaged bit is found, and no more is read than asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syckpt import (
    CheckpointReader,
    CheckpointWriter,
    FormatError,
    IntegrityError,
    NotFoundError,
    StateError,
    StoreError,
    validate_checkpoint,
)
from syckpt.files import header
from syckpt.objects import canonical
from syckpt.repo import signing

BLOCK = 1 << 20


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        signing.keygen(folder / name)
    return folder


@pytest.fixture
def small(tmp_path: Path, keys: Path) -> Path:
    """A signed file of a few tensors, one of them tied."""
    path = tmp_path / "small.ckpt"
    with CheckpointWriter(path, keys / "mine") as writer:
        writer.add("a", torch.arange(3.0))
        writer.add("é", torch.tensor([1, 2], dtype=torch.uint16))
        writer.add("none", torch.empty(0))
        writer.tie("b", "a")
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tensor of 3.5 blocks, of rows of 1000 bytes, between two small ones."""
    path = tmp_path_factory.mktemp("large") / "large.ckpt"
    with CheckpointWriter(path) as writer:
        writer.add("first", torch.arange(7))
        writer.add("rows", torch.arange(3670 * 250, dtype=torch.int32).reshape(3670, 250))
        writer.add("last", torch.arange(9))
    return path


def read_all(path: Path, **options: object) -> dict[str, torch.Tensor]:
    with CheckpointReader(path, **options) as reader:  # type: ignore[arg-type]
        return {name: reader[name] for name in reader}


def test_a_reader_is_a_mapping_of_names(small: Path) -> None:
    with CheckpointReader(small) as reader:
        assert reader.keys() == list(reader) == ["a", "é", "none", "b"]
        assert len(reader) == 4
        assert "é" in reader
        assert "c" not in reader
        assert torch.equal(reader["b"], torch.arange(3.0))
        with pytest.raises(NotFoundError, match=r"no tensor 'c'; it holds 4: 'a', 'é', 'none', 'b'"):
            reader["c"]


def test_a_closed_reader_reads_nothing(small: Path) -> None:
    reader = CheckpointReader(small)
    reader.close()
    reader.close()
    with pytest.raises(StateError, match="the reader is closed"):
        reader["a"]


def test_rows_are_those_of_the_tensor(large: Path) -> None:
    with CheckpointReader(large) as reader:
        whole = reader["rows"]
        for start, stop in [(0, 0), (0, 1), (0, 3670), (1048, 1050), (3669, 3670), (1000, 3000), (3670, 3670)]:
            assert torch.equal(reader.rows("rows", start, stop), whole[start:stop])
        for start, stop in [(-1, 2), (2, 1), (0, 3671)]:
            with pytest.raises(StateError, match=rf"has no rows {start} to {stop}"):
                reader.rows("rows", start, stop)


def test_scalars_have_no_rows_and_empty_tensors_few(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.add("scalar", torch.tensor(1))
        writer.add("wide", torch.empty(3, 0))
    with CheckpointReader(tmp_path / "a") as reader:
        assert reader.rows("wide", 1, 3).shape == (2, 0)
        with pytest.raises(StateError, match="has no rows"):
            reader.rows("scalar", 0, 0)


def test_only_the_blocks_that_hold_the_rows_are_read(large: Path) -> None:
    with CheckpointReader(large) as reader:
        head = reader.archive.bytes_read
        assert head < 3000
        for (start, stop), blocks in [((0, 10), 1), ((1048, 1049), 2), ((1050, 1060), 1), ((0, 3670), 3.5), ((5, 5), 0)]:
            before = reader.archive.bytes_read
            reader.rows("rows", start, stop)
            assert reader.archive.bytes_read - before == (blocks * BLOCK if blocks != 3.5 else 3_670_000)
        before = reader.archive.bytes_read
        reader["last"]
        assert reader.archive.bytes_read - before == 72


def test_every_flipped_bit_of_a_signed_file_is_found_with_and_without_the_key(small: Path, keys: Path) -> None:
    whole = small.read_bytes()
    expected = read_all(small)
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << offset % 8
        small.write_bytes(damaged)
        for options in ({}, {"trusted_keys": keys / "mine.pub"}):
            with pytest.raises(IntegrityError) as caught:
                read_all(small, **options)
            assert str(small) in str(caught.value)
        ok, errors = validate_checkpoint(small)
        assert (ok, len(errors)) == (False, 1)
    small.write_bytes(whole)
    assert read_all(small).keys() == expected.keys()


def test_every_bit_of_one_byte_of_each_part_is_found(small: Path) -> None:
    whole = small.read_bytes()
    for offset in (0, 5, 9, 40, whole.index(b'"seal'), whole.index(b"data_offsets") + 16, whole.rindex(b"}") + 1, len(whole) - 1):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << bit
            small.write_bytes(damaged)
            with pytest.raises(IntegrityError):
                read_all(small)


def test_a_flipped_bit_is_named_by_file_tensor_and_block_and_the_rest_still_reads(large: Path, tmp_path: Path) -> None:
    data = bytearray(large.read_bytes())
    begin = len(data) - 72 - 3_670_000
    data[begin + 2 * BLOCK + 5] ^= 4
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(data)
    text = f"{path}: tensor 'rows': block 2 (bytes 2097152 to 3145728) is damaged"
    with CheckpointReader(path) as reader:
        with pytest.raises(IntegrityError) as caught:
            reader["rows"]
        assert str(caught.value) == text
        assert torch.equal(reader["last"], torch.arange(9))
        assert torch.equal(reader.rows("rows", 3200, 3670)[-1, -1], torch.tensor(3670 * 250 - 1, dtype=torch.int32))
    assert validate_checkpoint(path) == (False, [text])


def test_every_cut_is_found(small: Path) -> None:
    whole = small.read_bytes()
    for length in range(len(whole)):
        small.write_bytes(whole[:length])
        with pytest.raises(IntegrityError, match=r"small\.ckpt"):
            read_all(small)


def test_bytes_behind_the_end_are_found(small: Path) -> None:
    small.write_bytes(small.read_bytes() + b"\0")
    with pytest.raises(IntegrityError, match="added to"):
        read_all(small)


def test_a_file_that_is_cut_while_it_is_read_is_found(large: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(large.read_bytes())
    with CheckpointReader(path) as reader:
        os.truncate(path, 2 * BLOCK)
        with pytest.raises(IntegrityError, match="it was cut short"):
            reader["rows"]


JUNK = [b"", b"\0", bytes(8), bytes(100), b"\xff" * 100, (50).to_bytes(8, "little") + bytes(60), bytes(range(256)) * 16]
HEADERS = [b"{}", b"[]", b"3", b'{"__metadata__":{}}', b'{"__metadata__":{"syckpt":3}}', b"[" * 9999, b'{"a":1,"a":2}']


@pytest.mark.parametrize("data", [*JUNK, *(len(text).to_bytes(8, "little") + text for text in HEADERS)], ids=lambda data: data[:20].hex())
def test_garbage_is_an_integrity_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.ckpt").write_bytes(data)
    with pytest.raises(IntegrityError, match=r"a\.ckpt"):
        CheckpointReader(tmp_path / "a.ckpt")


def test_a_safetensors_file_without_digests_is_not_believed(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(IntegrityError, match="or no CheckpointWriter of syckpt made it"):
        CheckpointReader(tmp_path / "a.safetensors")


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError, match="is a directory: expected a file of CheckpointWriter"):
        CheckpointReader(tmp_path)
    with pytest.raises(StateError, match="is not a regular file"):
        CheckpointReader(tmp_path / "pipe")
    with pytest.raises(NotFoundError, match="there is no such file"):
        CheckpointReader(tmp_path / "none")


edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=12), st.integers(0, 12)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits)
def test_random_edits_give_the_same_values_or_an_error_of_ours(small: Path, edits: list[tuple[int, bytes, int]]) -> None:
    """Each edit replaces so many bytes at a place by others: shifted, cut, doubled, overwritten."""
    whole = small.read_bytes()
    expected = {name: (tensor.dtype, tensor.tolist()) for name, tensor in read_all(small).items()}
    data = bytearray(whole)
    for place, text, count in edits:
        start = place % (len(data) + 1)
        data[start : start + count] = text
    try:
        small.write_bytes(data)
        found = {name: (tensor.dtype, tensor.tolist()) for name, tensor in read_all(small).items()}
    except (IntegrityError, FormatError):
        assert bytes(data) != whole
    else:
        assert found == expected
    finally:
        small.write_bytes(whole)


# -- files made with care by someone else -------------------------------------------------------------------------------------


def forge(path: Path, **changes: object) -> None:
    """Write a file of one tensor of 2 x 4 bytes whose document was changed and sealed again."""
    with CheckpointWriter(path) as writer:
        writer.add("a", torch.tensor([1.0, 2.0]))
    head = path.read_bytes()[:-8]
    table = json.loads(head[8:])
    body = json.loads(table["__metadata__"]["syckpt"])["body"]
    for name, value in changes.items():
        if name in body["content"]["tensors"]:
            body["content"]["tensors"][name] = [value]
        elif name in body["content"]:
            body["content"][name] = value
        else:
            body[name] = value
    table["__metadata__"]["syckpt"] = canonical.seal(body)[0].decode()
    text = json.dumps(table, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[-8:])


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "b"},
        {"name": 3},
        {"dtype": "int32"},
        {"shape": [1, 2]},
        {"shape": [-2]},
        {"shape": [2.0]},
        {"shape": [2**52]},
        {"shape": [2**40, 2**40]},
        {"shape": 2},
        {"address": "AAAA"},
        {"leaves": "AAAA"},
        {"ties": [["b", "c"]]},
        {"ties": [["a", "a"]]},
        {"ties": [["b", "a"], ["b", "a"]]},
        {"ties": 3},
        {"signature": ["x"]},
        {"signature": 7},
        {"content": []},
        {"more": 1},
    ],
    ids=str,
)
def test_a_forged_document_is_an_integrity_error(tmp_path: Path, changes: dict[str, object]) -> None:
    forge(tmp_path / "a.ckpt", **changes)
    with pytest.raises(IntegrityError):
        read_all(tmp_path / "a.ckpt")


@pytest.mark.parametrize("changes", [{"version": 2}, {"dtype": "float3"}])
def test_a_newer_document_says_upgrade(tmp_path: Path, changes: dict[str, object]) -> None:
    forge(tmp_path / "a.ckpt", **changes)
    with pytest.raises(FormatError, match="upgrade"):
        read_all(tmp_path / "a.ckpt")


def test_a_shape_that_torch_cannot_make_is_an_integrity_error(tmp_path: Path) -> None:
    shape = (0, 2**52, 2**52)
    record = header.Record("a", "float32", shape, header.addresses.address("float32", shape, b""), b"", 0)
    (tmp_path / "a.ckpt").write_bytes(header.render(header.Contents((record,))))
    with pytest.raises(IntegrityError, match="tensor 'a': torch cannot make it"):
        read_all(tmp_path / "a.ckpt")


# -- signatures ----------------------------------------------------------------------------------------------------------------


def test_a_signed_file_is_read_by_whoever_trusts_the_key(small: Path, keys: Path) -> None:
    assert torch.equal(read_all(small, trusted_keys=keys / "mine.pub")["a"], torch.arange(3.0))
    assert torch.equal(read_all(small, trusted_keys=[keys / "other.pub", keys / "mine.pub"])["a"], torch.arange(3.0))


def test_an_unsigned_file_or_another_key_is_refused_naming_both(small: Path, large: Path, keys: Path) -> None:
    mine, other = (signing.Signer.open(keys / name).key_id for name in ("mine", "other"))
    for path, found in [(large, "none: it is unsigned"), (small, mine)]:
        with pytest.raises(IntegrityError) as caught:
            CheckpointReader(path, [keys / "other.pub"])
        assert str(caught.value) == f"{path} is not to be trusted: expected a signature by key(s) {other}, found {found}"


def test_a_signature_of_another_file_does_not_fit(small: Path, tmp_path: Path, keys: Path) -> None:
    _, signature = header.parse(small.read_bytes()[: -12 - 4], where="")
    other = tmp_path / "other.ckpt"
    with CheckpointWriter(other) as writer:
        writer.add("a", torch.zeros(3))
    data = other.read_bytes()
    theirs, _ = header.parse(data[:-12], where="")
    other.write_bytes(header.render(theirs, signature) + data[-12:])
    assert torch.equal(read_all(other)["a"], torch.zeros(3))
    with pytest.raises(IntegrityError, match="did not sign this content"):
        CheckpointReader(other, keys / "mine.pub")


def test_a_signature_over_a_commit_is_none_over_a_file(small: Path, tmp_path: Path, keys: Path) -> None:
    data = small.read_bytes()
    contents, _ = header.parse(data[:-16], where="")
    signer = signing.Signer.open(keys / "mine")
    wrong = signer.sign(signing.COMMIT + contents.message[len(signing.FILE) :])
    small.write_bytes(header.render(contents, (signer.key_id, wrong)) + data[-16:])
    with pytest.raises(IntegrityError, match="did not sign this content"):
        CheckpointReader(small, keys / "mine.pub")


def test_a_reader_that_is_dropped_closes_its_file(small: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert CheckpointReader(small).keys()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_told_as_ever(name: str, tmp_path: Path) -> None:
    assert validate_checkpoint(tmp_path / name)[0] is False
    with pytest.raises((NotFoundError, StoreError)):
        CheckpointReader(tmp_path / name)
