"""`validate_checkpoint`: experiments, named commits, files; what is wrong comes back, nothing is raised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from syckpt import CheckpointWriter, validate_checkpoint
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import open_branch
from syckpt.stores.base import parse_root
from syckpt.testing.repositories import commit_id, make_repository


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two branches of two commits each; the newest of main is named `final/one`."""
    make_repository(tmp_path / "run", commits=[{}, {"name": "final/one"}], branches={"side": (1, 2)})
    return tmp_path / "run"


def damage(root: Path, number: int) -> str:
    """Flip the last byte of a commit's blob, and return its key."""
    key = f"objects/{commit_id(number)}/r00000.safetensors"
    path = root / ".syckpt" / key
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return key


def test_a_whole_experiment_is_valid_by_each_of_its_names(root: Path) -> None:
    for path in (root, str(root), root / ".syckpt", root / "final/one"):
        assert validate_checkpoint(path) == (True, [])
    assert validate_checkpoint(root, "side~1") == (True, [])


def test_the_tip_of_every_branch_is_checked(root: Path) -> None:
    key = damage(root, 4)
    ok, (error,) = validate_checkpoint(root)
    assert (ok, error.startswith(key)) == (False, True)
    assert validate_checkpoint(root, "main") == (True, [])
    assert validate_checkpoint(root, "side")[0] is False


def test_a_branch_that_nobody_saved_to_is_no_damage(root: Path) -> None:
    repository = Repository.open(parse_root(root))
    open_branch(repository, "new", run="test", expected=None)
    assert validate_checkpoint(root) == (True, [])


def test_a_commit_that_no_tip_needs_is_checked_by_revision_only(root: Path) -> None:
    damage(root, 3)
    assert validate_checkpoint(root) == (True, [])
    assert validate_checkpoint(root, "side~1")[0] is False


def test_a_named_commit_is_checked_alone(root: Path) -> None:
    damage(root, 4)
    assert validate_checkpoint(root / "final/one") == (True, [])
    key = damage(root, 2)
    ok, (error,) = validate_checkpoint(root / "final/one")
    assert (ok, error.startswith(key)) == (False, True)


def test_a_damaged_record_of_one_branch_does_not_hide_the_others(root: Path) -> None:
    key = damage(root, 4)
    record = sorted((root / ".syckpt/logs/refs/heads/main").iterdir())[-1]
    record.write_bytes(b"junk")
    ok, errors = validate_checkpoint(root)
    assert not ok
    assert [error.partition(":")[0] for error in errors] == [f"logs/refs/heads/main/{record.name}", key]


def test_a_file_is_checked_byte_for_byte(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a.ckpt") as writer:
        writer.add("a", torch.arange(600_000))
    assert validate_checkpoint(tmp_path / "a.ckpt") == (True, [])
    data = bytearray((tmp_path / "a.ckpt").read_bytes())
    data[-1] ^= 1
    data[-3_000_000] ^= 1
    (tmp_path / "a.ckpt").write_bytes(data)
    ok, errors = validate_checkpoint(tmp_path / "a.ckpt")
    assert not ok
    assert [error[error.index("block") :] for error in errors] == [
        "block 1 (bytes 1048576 to 2097152) is damaged",
        "block 4 (bytes 4194304 to 4800000) is damaged",
    ]


def test_what_is_not_there_or_not_of_syckpt_is_not_valid(root: Path, tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt")
    (tmp_path / "empty").mkdir()
    make_repository(tmp_path / "new", commits=0)
    for path, rev, text in [
        (tmp_path / "none", None, "there is no such file or experiment"),
        (root / "nobody", None, "has no commit of the name 'nobody'"),
        (root, "nobody", "nobody"),
        (root / "final/one", "main", "names a commit already, so that rev='main' means nothing"),
        (tmp_path / "old.pt", None, "is no file of CheckpointWriter"),
        (tmp_path / "old.pt", "main", "is no experiment, so that rev='main' means nothing there"),
        (tmp_path / "empty", None, "is a directory: expected a file"),
        (tmp_path / "new", None, "holds no commit"),
    ]:
        ok, (error,) = validate_checkpoint(path, rev)
        assert (ok, text in error) == (False, True), error


def test_a_dropped_commit_is_not_valid(root: Path) -> None:
    Repository.open(parse_root(root)).mark(commit_id(3), "dropped", why="retention")
    ok, (error,) = validate_checkpoint(root, "side~1")
    assert (ok, error) == (
        False,
        f"commit {commit_id(3)} was dropped by retention; its record stays in the log, its tensors are gone",
    )


def test_validation_needs_no_torch(root: Path, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a.ckpt") as writer:
        writer.add("a", torch.arange(6))
    code = (
        "import sys, syckpt\n"
        "for path in sys.argv[1:]: assert syckpt.validate_checkpoint(path) == (True, []), path\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, root, tmp_path / "a.ckpt"], check=True, timeout=60)
