"""`syckpt reflog`: where a branch was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id, make_repository


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "reflog", *arguments], env={"COLUMNS": columns and str(columns)})


def document(root: Path, *arguments: str) -> Any:
    return json.loads(run(root, "--json", *arguments).stdout, parse_constant=pytest.fail)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS)
    make_repository(tmp_path, commits=2, branches={"wide": (1, 1)})
    CliRunner().invoke(main, ["-C", str(tmp_path), "branch", "-d", "wide"], catch_exceptions=False)
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS + 90 * 10**9)
    return tmp_path


def test_records_stand_newest_first_with_the_revision_that_they_are(root: Path) -> None:
    assert run(root).stdout == (
        "main@{0}  00000000-00000002  save  2 min ago  generation 1 of run testing\n"
        "main@{1}  00000000-00000001  save  2 min ago  generation 1 of run testing\n"
        "          -                  open  2 min ago  generation 1 of run testing\n"
    )
    assert run(root, "-n", "1", columns=50).stdout == "main@{0}  00000000-00000002  save  2 min ago  g...\n"


def test_a_deleted_branch_tells_what_it_was(root: Path) -> None:
    assert run(root, "wide").stdout == (
        "wide@{0}  -                  delete  2 min ago  generation 2 of run command line\n"
        "wide@{1}  00000000-00000003  save    2 min ago  generation 1 of run testing\n"
        "wide@{2}  00000000-00000001  create  2 min ago  generation 1 of run testing\n"
    )


def test_json_has_every_field(root: Path) -> None:
    assert document(root, "wide", "-n", "1") == [
        {
            "number": 3,
            "moves_ago": 0,
            "reason": "delete",
            "commit": None,
            "previous": commit_id(3),
            "generation": 2,
            "run": "command line",
            "time": "2026-01-01T00:00:00.000+00:00",
        }
    ]
    assert [one["moves_ago"] for one in document(root)] == [0, 1, None]


def test_a_branch_that_never_was_is_not_found(root: Path) -> None:
    result = run(root, "nothing")
    assert result.exit_code == 3
    assert "no branch 'nothing' in" in result.stderr


def test_a_damaged_record_is_reported_behind_the_others(root: Path) -> None:
    record = root / ".syckpt/logs/refs/heads/wide/000000000002.json"
    record.write_bytes(record.read_bytes()[:-9])
    result = run(root, "wide")
    assert (result.exit_code, result.stdout.count("\n")) == (5, 2)
    assert "logs/refs/heads/wide/000000000002.json" in result.stderr
