"""`syckpt export`: a commit for tools that do not know syckpt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from syckpt.cli import main
from syckpt.testing.repositories import commit_id, make_repository


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "export", *arguments])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment")
    make_repository(path, commits=2)
    return path


def test_by_default_one_file_that_plain_torch_reads(root: Path, tmp_path: Path) -> None:
    result = run(root, "HEAD", str(tmp_path / "new/best.pt"))
    assert (result.exit_code, result.stdout) == (0, f"wrote commit {commit_id(2)} to {tmp_path / 'new/best.pt'}\n")
    found = torch.load(tmp_path / "new/best.pt", weights_only=True)
    assert {name: getattr(value, "shape", value) for name, value in found["model"].items()} == {
        "weight": (64, 64),
        "frozen": (1000,),
        "lr": 0.001,
        "seen": 1280,
    }
    assert (found["syckpt"]["id"], found["syckpt"]["step"]) == (commit_id(2), 20)


def test_safetensors_is_one_file_of_all_tensors(root: Path, tmp_path: Path) -> None:
    assert run(root, "HEAD~1", str(tmp_path / "all.safetensors"), "--to", "safetensors").exit_code == 0
    assert {name: value.shape for name, value in load_file(tmp_path / "all.safetensors").items()} == {
        "model.weight": (64, 64),
        "model.frozen": (1000,),
    }


def test_dir_is_what_checkout_writes(root: Path, tmp_path: Path) -> None:
    assert json.loads(run(root, "HEAD", str(tmp_path / "dir"), "--to", "dir", "--json").stdout) == {
        "commit": commit_id(2),
        "path": str(tmp_path / "dir"),
        "format": "dir",
    }
    assert sorted(path.name for path in (tmp_path / "dir").iterdir()) == ["model.json", "model.safetensors", "syckpt.commit.json"]


WITHOUT_TORCH = """
import sys
from syckpt.cli import main
for arguments in (
    ["cat", "HEAD:model.safetensors"],
    ["checkout", "HEAD", "--to", "out"],
    ["export", "HEAD", "all.safetensors", "--to", "safetensors"],
    ["ls", "HEAD"],
):
    try:
        main(["-C", sys.argv[1], *arguments])
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
    assert "torch" not in sys.modules, arguments
"""


def test_torch_is_imported_for_files_of_torch_only(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(root)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.safetensors", "out"]


def test_a_place_that_cannot_be_written_ends_in_status_7(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for form in ("torch", "safetensors", "dir"):
        result = run(root, "HEAD", str(tmp_path / "file/below"), "--to", form)
        assert result.exit_code == 7
        assert "cannot be written" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("arguments", [["HEAD"], ["HEAD", "x", "--to", "onnx"]])
def test_a_wrong_call_ends_in_status_2(arguments: list[str], root: Path) -> None:
    assert run(root, *arguments).exit_code == 2
