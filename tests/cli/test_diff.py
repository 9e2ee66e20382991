"""`syckpt diff`: lines for people, JSON for programs, an exit status for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import commit_id, make_repository


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "diff", *arguments], env={"COLUMNS": columns and str(columns)})


def document(root: Path, *arguments: str) -> Any:
    return json.loads(run(root, "--json", *arguments).stdout, parse_constant=pytest.fail)


SMALL = {"lr": 0.001, "model": {"layers": 2}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment")
    make_repository(
        path, commits=[{"config": SMALL, "metric": 0.5}, {"config": {**SMALL, "lr": 0.01, "clip": 1.0}, "metric": float("nan")}]
    )
    return path


def test_lines_tell_what_leads_from_one_commit_to_the_other(root: Path) -> None:
    result = run(root, "HEAD~1", "main")
    assert result.exit_code == 0
    assert result.stdout == (
        f"{commit_id(1)} -> {commit_id(2)}\n"
        "~ step: 10 -> 20\n"
        "~ epoch: 0 -> 1\n"
        "~ metric: 0.5 -> nan\n"
        "config:\n"
        "  + clip: 1.0\n"
        "  ~ lr: 0.001 -> 0.01\n"
        "items:\n"
        "  ~ model/seen: 640 -> 1280\n"
        "tensors: 1 changed, 0 added, 0 removed, 1 the same\n"
        "  ~ model/weight: other values, float32 [64, 64]\n"
    )
    assert run(root, "HEAD~1").stdout == result.stdout


def test_a_commit_does_not_differ_from_itself(root: Path) -> None:
    assert run(root, "main", "HEAD").stdout.endswith("\nthe same: configuration, counters, items, 2 tensors, random streams\n")
    assert document(root, "main", "HEAD")["differs"] is False


def test_lines_are_cut_to_the_terminal(root: Path) -> None:
    lines = run(root, "HEAD~1", columns=40).stdout.splitlines()
    assert max(map(len, lines)) == 40
    assert "  ~ model/weight: other values, float..." in lines


def test_json_names_everything(root: Path) -> None:
    weight = {"dtype": "float32", "shape": [64, 64]}
    assert document(root, "HEAD~1", "HEAD") == {
        "a": commit_id(1),
        "b": commit_id(2),
        "differs": True,
        "counters": {"step": [10, 20], "epoch": [0, 1], "metric": [0.5, "nan"]},
        "config": {"added": {"clip": 1.0}, "removed": {}, "changed": {"lr": [0.001, 0.01]}},
        "items": {"added": {}, "removed": {}, "changed": {"model/seen": [640, 1280]}},
        "tensors": {"added": {}, "removed": {}, "changed": {"model/weight": {"before": weight, "after": weight}}, "unchanged": 1},
        "streams": False,
    }


@pytest.mark.parametrize(("revisions", "status"), [(("HEAD~1", "HEAD"), 1), (("HEAD", "main"), 0), (("HEAD", "nothing"), 3)])
def test_quiet_says_it_by_the_exit_status_alone(root: Path, revisions: tuple[str, str], status: int) -> None:
    for options in ([], ["--json"]):
        result = run(root, *revisions, "--quiet", *options)
        assert (result.exit_code, result.stdout) == (status, "")


def test_a_commit_that_was_dropped_is_not_found(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=2).mark(commit_id(1), "dropped", why="test")
    result = run(tmp_path, "HEAD~1")
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"commit {commit_id(1)} was dropped by retention" in result.stderr
