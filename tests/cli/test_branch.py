"""`syckpt branch`: its list, making, deleting, bringing back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id, make_repository


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "branch", *arguments], env={"COLUMNS": columns and str(columns)})


def document(root: Path, *arguments: str) -> Any:
    return json.loads(run(root, "--json", *arguments).stdout, parse_constant=pytest.fail)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    wide = [{"metric": 0.25, "message": "wider\nmuch"}]
    make_repository(tmp_path, commits=2, branches={"team/wide": (1, wide), "empty": (1, 0)})
    return tmp_path


@pytest.fixture(autouse=True)
def three_hours_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS + 3 * 3600 * 10**9)


def test_branches_stand_with_their_tips_and_heads_has_a_star(root: Path) -> None:
    assert run(root).stdout == (
        "  empty      00000000-00000001  step 10, 3 h ago\n"
        "* main       00000000-00000002  step 20, 3 h ago\n"
        "  team/wide  00000000-00000003  step 30, metric 0.25, 3 h ago  wider\n"
    )
    assert run(root, columns=60).stdout.splitlines()[2] == "  team/wide  00000000-00000003  step 30, metric 0.25, 3 h..."


def test_json_is_a_list_of_objects(root: Path) -> None:
    found = document(root)
    assert [(one["name"], one["head"], one["commit"], one["metric"]) for one in found] == [
        ("empty", False, commit_id(1), None),
        ("main", True, commit_id(2), None),
        ("team/wide", False, commit_id(3), 0.25),
    ]
    assert found[1]["created"] == "2026-01-01T00:02:00.000+00:00"
    assert document(root, "new", "--at", "HEAD~1") == [{"name": "new", "commit": commit_id(1), "deleted": False}]
    assert document(root, "-d", "new") == [{"name": "new", "commit": commit_id(1), "deleted": True}]


def test_a_branch_is_made_at_head_or_where_it_is_told_deleted_and_brought_back(root: Path) -> None:
    assert run(root, "new").stdout == f"new begins at {commit_id(2)}\n"
    assert run(root, "old", "--at", "team/wide~1").stdout == f"old begins at {commit_id(1)}\n"
    assert run(root, "--delete", "old").stdout == f"deleted old, which was at {commit_id(1)}\n"
    assert [one["name"] for one in document(root)] == ["empty", "main", "new", "team/wide"]
    assert run(root, "old").stdout == f"old begins at {commit_id(2)}\n"
    assert run(root, "older", "--at", "old@{2}").stdout == f"older begins at {commit_id(1)}\n"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["main"], 4, "the branch 'main' exists already"),
        (["-d", "main"], 4, "is the one that HEAD names"),
        (["-d", "nothing"], 3, "no branch 'nothing'"),
        (["x", "--at", "nothing"], 3, "no commit 'nothing'"),
        (["a b"], 2, "cannot be the name of a branch"),
        (["--default", "nothing"], 3, "no branch 'nothing'"),
        (["--default"], 2, "which branch?"),
        (["--default", "-d", "team/wide"], 2, "choose one"),
        (["--default", "team/wide", "--at", "HEAD"], 2, "--at says where"),
        (["-d"], 2, "which branch?"),
        (["--at", "HEAD"], 2, "which branch?"),
        (["-d", "team/wide", "--at", "HEAD"], 2, "--at says where"),
    ],
)
def test_what_cannot_be_done_is_told_with_its_exit_status(root: Path, arguments: list[str], status: int, text: str) -> None:
    result = run(root, *arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert text in result.stderr
    assert len(document(root)) == 3


def test_head_goes_to_another_branch_and_then_the_first_can_be_deleted(root: Path) -> None:
    refused = run(root, "-d", "main").stderr
    assert refused.endswith("choose another first, with `syckpt branch --default NAME`\n")
    assert run(root, "--default", "team/wide").stdout == "HEAD names team/wide\n"
    assert (root / ".syckpt/HEAD").read_text() == "ref: refs/heads/team/wide\n"
    assert run(root, "-d", "main").exit_code == 0
    assert [(one["name"], one["head"]) for one in document(root)] == [("empty", False), ("team/wide", True)]
    assert document(root, "--default", "empty") == [{"name": "empty", "head": True}]


def test_a_damaged_head_is_set_right(root: Path) -> None:
    (root / ".syckpt/HEAD").write_text("nonsense")
    assert run(root).exit_code == 5
    assert run(root, "--default", "main").exit_code == 0
    assert run(root).exit_code == 0


def test_an_empty_repository_has_no_branches(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=0)
    assert (run(tmp_path).stdout, document(tmp_path)) == ("", [])
    assert run(tmp_path, "x").exit_code == 3


def test_damage_is_reported_behind_what_can_be_read(root: Path) -> None:
    (root / f".syckpt/objects/{commit_id(3)}.json").unlink()
    result = run(root)
    assert (result.exit_code, result.stdout.count("\n")) == (5, 2)
    assert result.stderr == f"syckpt: objects/{commit_id(3)}.json: missing, though heads/team/wide names it; run `syckpt verify`\n"
