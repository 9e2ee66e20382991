"""`syckpt checkout`: a commit's files in a directory, all or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import commit_id, make_repository

FILES = ["model.json", "model.safetensors", "syckpt.commit.json"]


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), *arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path / "run", commits=2)
    return tmp_path / "run"


def test_the_files_are_those_that_cat_prints(root: Path, tmp_path: Path) -> None:
    result = run(root, "checkout", "HEAD~1", "--to", str(tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (0, f"3 files of commit {commit_id(1)} in {tmp_path / 'out'}\n")
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == FILES
    assert {name: run(root, "cat", f"HEAD~1:{name}").stdout_bytes for name in FILES} == found


def test_json_lists_what_was_written(root: Path, tmp_path: Path) -> None:
    result = run(root, "checkout", "--to", str(tmp_path / "out"), "--json")
    assert json.loads(result.stdout) == {"commit": commit_id(2), "directory": str(tmp_path / "out"), "files": FILES}


def test_a_directory_that_holds_something_is_refused_with_status_4(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    result = run(root, "checkout", "HEAD", "--to", str(tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (4, "")
    assert "is not an empty directory: nothing was written" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_damage_ends_in_status_5_and_leaves_no_directory(root: Path, tmp_path: Path) -> None:
    (root / f".syckpt/objects/{commit_id(1)}/r00000.safetensors").unlink()
    assert run(root, "checkout", "HEAD~1", "--to", str(tmp_path / "out")).exit_code == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_the_directory_has_to_be_named(root: Path) -> None:
    assert run(root, "checkout", "HEAD").exit_code == 2
