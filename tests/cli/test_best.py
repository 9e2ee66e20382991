"""`syckpt best`: the commit with the best metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id, make_repository


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "best", *arguments], env={"COLUMNS": columns and str(columns)})


def document(root: Path, *arguments: str) -> Any:
    return json.loads(run(root, "--json", *arguments).stdout, parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment")
    commits = [{"metric": 0.5}, {"metric": float("nan")}, {"metric": 0.25, "tags": ("v1",)}, {"metric": 0.75}]
    make_repository(path, commits=commits, branches={"wide": (1, [{"metric": 0.125}]), "none": (2, 0)})
    return path


@pytest.fixture(autouse=True)
def three_hours_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS + 3 * 3600 * 10**9)


def test_the_lowest_metric_is_the_best_unless_told_otherwise(root: Path) -> None:
    assert run(root).stdout == "00000000-00000003  step 30, metric 0.25, 3 h ago  (tag: v1)\n"
    assert run(root, "--maximize").stdout == "00000000-00000004  step 40, metric 0.75, 3 h ago  (HEAD -> main)\n"
    assert run(root, "wide").stdout == "00000000-00000005  step 50, metric 0.125, 3 h ago  (wide)\n"
    assert run(root, "v1~1").stdout == "00000000-00000001  step 10, metric 0.5, 3 h ago\n"


def test_json_is_the_object_of_log(root: Path) -> None:
    logged = CliRunner().invoke(main, ["-C", str(root), "log", "v1", "-n", "1", "--json"])
    assert document(root) == json.loads(logged.stdout)[0]
    assert document(root)["id"] == commit_id(3)


def test_without_a_metric_there_is_no_best(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=[{"metric": float("nan")}, {}])
    result = run(tmp_path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "syckpt: none of the 2 commits of HEAD has a metric: give it as save(metric=...)\n"
