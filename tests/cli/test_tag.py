"""`syckpt tag`: its list, making, deleting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id, make_repository


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "tag", *arguments], env={"COLUMNS": columns and str(columns)})


def document(root: Path, *arguments: str) -> Any:
    return json.loads(run(root, "--json", *arguments).stdout, parse_constant=pytest.fail)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path, commits=[{"tags": ("v1",), "metric": 0.5}, {}])
    return tmp_path


@pytest.fixture(autouse=True)
def three_hours_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS + 3 * 3600 * 10**9)


def test_tags_are_made_listed_and_deleted(root: Path) -> None:
    assert run(root, "newest").stdout == f"newest is {commit_id(2)}\n"
    assert run(root, "good", "best").stdout == f"good is {commit_id(1)}\n"
    assert run(root).stdout == (
        "good    00000000-00000001  step 10, metric 0.5, 3 h ago\n"
        "newest  00000000-00000002  step 20, 3 h ago\n"
        "v1      00000000-00000001  step 10, metric 0.5, 3 h ago\n"
    )
    assert run(root, "-d", "v1").stdout == f"deleted v1, which was {commit_id(1)}\n"
    assert [(one["name"], one["commit"]) for one in document(root)] == [("good", commit_id(1)), ("newest", commit_id(2))]
    assert document(root, "v1") == [{"name": "v1", "commit": commit_id(2), "deleted": False}]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["v1"], 4, "the tag 'v1' exists already"),
        (["main"], 4, "'main' is a branch"),
        (["-d", "nothing"], 3, "no tag 'nothing'"),
        (["x", "nothing"], 3, "no commit 'nothing'"),
        (["best"], 2, "cannot be the name of a tag"),
        (["-d"], 2, "which tag?"),
        (["-d", "v1", "HEAD"], 2, "-d takes the name of a tag"),
    ],
)
def test_what_cannot_be_done_is_told_with_its_exit_status(root: Path, arguments: list[str], status: int, text: str) -> None:
    result = run(root, *arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert text in result.stderr
    assert len(document(root)) == 1


def test_no_tags_are_told_on_stderr(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=1)
    result = run(tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "syckpt: no tags: `syckpt tag NAME` makes one\n")
    assert (document(tmp_path), run(tmp_path, "--json").stderr) == ([], "")
