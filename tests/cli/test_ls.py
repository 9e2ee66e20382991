"""`syckpt ls`: the entries of a commit, by path, and how they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import commit_id, make_repository

FILES = "item               -  model.json\nsafetensors  20.5 kB  model.safetensors\n"
WEIGHT = "float32  [64, 64]  16.4 kB  model/weight\n"
FROZEN = "float32  [1000]     4.0 kB  model/frozen\n"


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "ls", *arguments], env={"COLUMNS": columns and str(columns)})


def documents(root: Path, *arguments: str, kind: str = "tensor") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(root, *arguments, "--json").stdout)
    return [document for document in found if document["kind"] == kind]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment")
    make_repository(path, commits=2)
    return path


def test_files_are_listed_by_format_bytes_and_path_and_tensors_by_type_shape_bytes_and_path(root: Path) -> None:
    files, tensors = run(root).stdout.split("\n\n")
    assert (files + "\n").startswith(FILES + "json         ")
    assert files.endswith("  syckpt.commit.json")
    assert tensors == WEIGHT + FROZEN


def test_files_may_be_listed_alone(root: Path) -> None:
    assert run(root, "HEAD", "model", "--files").stdout == FILES
    assert documents(root, "--files") == []
    assert documents(root, "--files", kind="file")[:2] == [
        {"kind": "file", "path": "model.json", "item": "model", "rank": None, "format": "item", "nbytes": None},
        {"kind": "file", "path": "model.safetensors", "item": "model", "rank": None, "format": "safetensors", "nbytes": 20_528},
    ]


def test_values_are_listed_on_request(root: Path) -> None:
    assert run(root, "HEAD", "model", "--values").stdout == (
        f"{FILES}\n{WEIGHT}{FROZEN}float                       model/lr = 0.001\nint                         model/seen = 1280\n"
    )


@pytest.mark.parametrize("patterns", [["model"], ["model/*"], ["mod*"], ["*"], ["model/weight", "model/frozen"]], ids=" ".join)
def test_a_path_selects_what_is_at_or_below_it(patterns: list[str], root: Path) -> None:
    assert run(root, "HEAD", *patterns).stdout.rpartition("\n\n")[2] == WEIGHT + FROZEN


@pytest.mark.parametrize("pattern", ["model", "model.*", "*.safetensors"])
def test_a_path_selects_files_by_item_or_path(pattern: str, root: Path) -> None:
    assert "model.safetensors" in [document["path"] for document in documents(root, "HEAD", pattern, kind="file")]
    assert documents(root, "HEAD", "model/weight", kind="file") == []


@pytest.mark.parametrize("pattern", ["model/weight", "*/weight", "model/w*"])
def test_a_path_leaves_the_others_out(pattern: str, root: Path) -> None:
    assert [document["path"] for document in documents(root, "HEAD", pattern)] == ["model/weight"]


@pytest.mark.parametrize("pattern", ["weight", "model/weigh", "Model"])
def test_a_path_that_matches_nothing_ends_in_status_3(pattern: str, root: Path) -> None:
    result = run(root, "HEAD", pattern)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"nothing in commit {commit_id(2)} matches {pattern}" in result.stderr


def test_json_tells_how_a_delta_and_a_pointer_are_stored(root: Path) -> None:
    weight, frozen = documents(root)
    assert (weight["how"], weight["pointer"], weight["base"]) == ("delta", None, commit_id(1))
    assert (frozen["how"], frozen["pointer"], frozen["base"]) == ("planes", commit_id(1), None)
    assert {key: weight[key] for key in ("kind", "path", "rank", "dtype", "shape", "box", "nbytes")} == {
        "kind": "tensor",
        "path": "model/weight",
        "rank": 0,
        "dtype": "float32",
        "shape": [64, 64],
        "box": None,
        "nbytes": 16_384,
    }
    assert 0 < weight["stored_nbytes"] < 16_384
    assert frozen["address"] == documents(root, "HEAD~1")[1]["address"]


def test_json_lists_values_with_their_type(root: Path) -> None:
    assert documents(root, "HEAD", "model/lr", "--values", kind="value") == [
        {"kind": "value", "path": "model/lr", "rank": 0, "type": "float", "value": 0.001}
    ]


def test_long_adds_stored_bytes_ratio_how_and_address(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=2, compression="none")
    weight, frozen = (document["address"] for document in documents(tmp_path))
    assert run(tmp_path, "HEAD", "model/*", "--long").stdout == (
        f"float32  [64, 64]  16.4 kB  16.4 kB  1.00x  raw                                {weight}  model/weight\n"
        f"float32  [1000]     4.0 kB   4.0 kB  1.00x  raw, pointer -> 00000000-00000001  {frozen}  model/frozen\n"
    )
    assert run(tmp_path, "HEAD", "model/*", "--long", columns=80).stdout == (
        WEIGHT
        + f"    16.4 kB  1.00x  raw                                {weight[:22]}...\n"
        + FROZEN
        + f"     4.0 kB  1.00x  raw, pointer -> 00000000-00000001  {frozen[:22]}...\n"
    )


def test_a_commit_without_tensors_prints_nothing(tmp_path: Path, root: Path) -> None:
    make_repository(tmp_path, commits=0)
    result = run(tmp_path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("syckpt: branch 'main' has no commit yet")


def test_a_dropped_commit_is_not_found(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=2).mark(commit_id(1), "dropped", why="test")
    result = run(tmp_path, "HEAD~1")
    assert result.exit_code == 3
    assert f"the content of commit {commit_id(1)} was removed by retention" in result.stderr


def test_lost_locations_end_in_status_5(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=1)
    (tmp_path / f".syckpt/objects/{commit_id(1)}/r00000.locations.0001").unlink()
    assert run(tmp_path).exit_code == 5
