"""`syckpt similar`: who else tried something like this?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import commit_id, make_repository


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "similar", *arguments], env={"COLUMNS": columns and str(columns)})


def document(root: Path, *arguments: str) -> Any:
    return json.loads(run(root, "--json", *arguments).stdout, parse_constant=pytest.fail)


CONFIGS = [{"lr": 0.001, "width": 64}, {"lr": 0.002, "width": 64}, {"lr": 0.002, "width": 64, "name": "x"}, {"other": True}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment")
    make_repository(
        path, commits=[{"config": config, "metric": 0.5} for config in CONFIGS], branches={"again": (1, [{"config": CONFIGS[0]}])}
    )
    return path


def test_a_commit_is_compared_with_the_others_and_what_differs_stands_below(root: Path) -> None:
    # The ids of a made repository begin with 00000000, whatever the configuration: "bits" only says that.
    assert run(root, "HEAD~3", "-k", "3").stdout == (
        "similarity  bits  commit             branch  step  metric\n"
        "     1.000    20  00000000-00000005  again     50       -  (again)\n"
        "     0.875    20  00000000-00000002  main      20     0.5\n"
        "    ~ lr: 0.001 -> 0.002\n"
        "     0.583    20  00000000-00000003  main      30     0.5\n"
        "    ~ lr: 0.001 -> 0.002\n"
        "    + name: 'x'\n"
    )


def test_a_json_file_is_compared_with_all(root: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"lr": 0.001, "width": 64}))
    found = document(root, str(plan))
    assert [one["id"] for one in found] == [commit_id(k) for k in (5, 1, 2, 3, 4)]
    assert (found[0]["similarity"], found[0]["distance"], found[0]["estimate"]) == (1.0, 20, -0.25)
    assert found[3]["diff"] == {"added": {"name": "x"}, "removed": {}, "changed": {"lr": [0.001, 0.002]}}
    assert found[3]["metric"] == 0.5


@pytest.mark.parametrize(("text", "message"), [("[1]", "holds a list"), ("{", "cannot be read as JSON"), (None, "cannot be read as JSON")])
def test_a_file_that_is_no_configuration_is_a_wrong_call(root: Path, tmp_path: Path, text: str | None, message: str) -> None:
    plan = tmp_path / "plan.json"
    if text is not None:
        plan.write_text(text)
    result = run(root, str(plan))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_revision_that_does_not_exist_is_not_found(root: Path) -> None:
    assert run(root, "nothing").exit_code == 3


def test_many_differences_are_cut(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=[{"config": {}}, {"config": {f"k{i:02d}": i for i in range(20)}}])
    lines = run(tmp_path, "HEAD~1", columns=40).stdout.splitlines()
    assert lines[2] == "    + k00: 0"
    assert lines[-1] == "    ... 12 more"
    assert len(lines) == 2 + 8 + 1


def test_that_nothing_is_similar_is_told_on_stderr(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=1)
    result = run(tmp_path, "HEAD")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "syckpt: no other commit has a configuration to compare with\n"
    assert (document(tmp_path, "HEAD"), run(tmp_path, "HEAD", "--json").stderr) == ([], "")
