"""`syckpt log`: its table, its graph, its JSON, and what it does about damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id, make_repository

STATS = {"written_bytes": 12_300_000, "ratio": 1.5234}


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "log", *arguments], env={"COLUMNS": columns and str(columns)})


def documents(root: Path, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(root, "--json", *arguments).stdout, parse_constant=pytest.fail)
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """main: 1 2 3; wide: 1 2 4 5."""
    path = tmp_path_factory.mktemp("experiment")
    main_commits = [
        {"stats": STATS, "metric": 2.3456789, "config": {"lr": 0.001, "model": {"layers": 2}}},
        {"stats": STATS, "metric": float("nan"), "message": "diverged\nand how", "epoch_done": False, "batch_idx": 40},
        {"stats": {}, "tags": ("v1",), "name": "last-good"},
    ]
    repository = make_repository(path, commits=main_commits, branches={"wide": (2, [{"stats": STATS}, {"stats": STATS}])})
    repository.mark(commit_id(4), "preempted", why="test")
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    make_repository(tmp_path, commits=0)
    return tmp_path


def test_commits_stand_newest_first_in_columns(root: Path) -> None:
    assert run(root).stdout == (
        "commit             step  epoch        metric  written  ratio  created\n"
        "00000000-00000003    30  2 done            -        -      -  2026-01-01 00:03Z  (HEAD -> main, tag: v1, name: last-good)\n"
        "00000000-00000002    20  1 batch 40      nan  12.3 MB  1.52x  2026-01-01 00:02Z  diverged\n"
        "00000000-00000001    10  0 done      2.34568  12.3 MB  1.52x  2026-01-01 00:01Z\n"
    )


def test_a_graph_draws_the_fork_of_two_branches(root: Path) -> None:
    assert run(root, "--graph", "--all", "--oneline").stdout == (
        "*   00000000-00000005  step 50  (wide)\n"
        "*   00000000-00000004  step 40  [preempted]\n"
        "| * 00000000-00000003  step 30  (HEAD -> main, tag: v1, name: last-good)\n"
        "|/\n"
        "*   00000000-00000002  step 20  diverged\n"
        "*   00000000-00000001  step 10\n"
    )


def test_on_80_columns_names_and_message_take_a_line_of_their_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS + 3 * 3600 * 10**9)
    assert run(root, "--graph", "--all", columns=80).stdout == (
        "    commit             step  epoch        metric  written  ratio  age\n"
        "*   00000000-00000005    50  4 done            -  12.3 MB  1.52x  3 h ago\n"
        "|       (wide)\n"
        "*   00000000-00000004    40  3 done            -  12.3 MB  1.52x  3 h ago\n"
        "|       [preempted]\n"
        "| * 00000000-00000003    30  2 done            -        -      -  3 h ago\n"
        "| |     (HEAD -> main, tag: v1, name: last-good)\n"
        "|/\n"
        "*   00000000-00000002    20  1 batch 40      nan  12.3 MB  1.52x  3 h ago\n"
        "|       diverged\n"
        "*   00000000-00000001    10  0 done      2.34568  12.3 MB  1.52x  3 h ago\n"
    )


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("options", [[], ["--oneline"], ["--graph", "--all"]], ids=" ".join)
def test_a_long_message_is_cut_to_the_terminal(options: list[str], columns: int, tmp_path: Path) -> None:
    make_repository(tmp_path, commits=[{"message": "words " * 100}])
    lines = run(tmp_path, *options, columns=columns).stdout.splitlines()
    assert max(map(len, lines)) == columns
    assert lines[-1].endswith("...")


def test_a_message_cannot_move_the_cursor(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=[{"message": "red \x1b[31m \u202e \ud800"}])
    assert run(tmp_path, "--oneline").stdout == "00000000-00000001  step 10  (HEAD -> main) red \\x1b[31m \\u202e \\ud800\n"


def test_colour_is_for_terminals_without_no_color(root: Path) -> None:
    arguments = ["-C", str(root), "log", "-n", "1", "--oneline"]
    plain = "00000000-00000003  step 30  (HEAD -> main, tag: v1, name: last-good)\n"
    coloured = CliRunner().invoke(main, arguments, color=True, env={"NO_COLOR": None}).stdout
    assert coloured.startswith("\x1b[33m00000000-00000003\x1b[0m  step 30  \x1b[32m(HEAD -> main, ")
    assert CliRunner().invoke(main, arguments, color=True, env={"NO_COLOR": "1"}).stdout == plain
    assert CliRunner().invoke(main, arguments).stdout == plain


def test_without_graph_branches_are_merged_by_time(tmp_path: Path) -> None:
    later = [{"created_ns": MIDNIGHT_NS + minute * 60 * 10**9} for minute in (10, 30)]
    make_repository(tmp_path, commits=[{}, *later], branches={"wide": (1, [{"created_ns": MIDNIGHT_NS + 20 * 60 * 10**9}])})
    assert [document["id"] for document in documents(tmp_path, "--all")] == [commit_id(k) for k in (3, 4, 2, 1)]


def test_a_revision_and_a_count_choose(root: Path) -> None:
    assert [document["step"] for document in documents(root, "wide", "-n", "3")] == [50, 40, 20]
    assert [document["step"] for document in documents(root, "--all", "-n", "1")] == [50]
    assert documents(root, "-n", "0") == []


def test_a_revision_and_all_exclude_each_other(root: Path) -> None:
    assert run(root, "wide", "--all").exit_code == 2


def test_json_has_every_field(root: Path) -> None:
    assert documents(root, "HEAD~2") == [
        {
            "id": commit_id(1),
            "parents": [],
            "branch": "main",
            "step": 10,
            "epoch": 0,
            "batch_idx": 0,
            "epoch_done": True,
            "metric": 2.3456789,
            "message": "",
            "config": {"lr": 0.001, "model": {"layers": 2}},
            "created": "2026-01-01T00:01:00.000+00:00",
            "world_size": 1,
            "tags": [],
            "name": None,
            "refs": [],
            "stats": STATS,
            "dropped": False,
            "damaged": False,
            "preempted": False,
        }
    ]


def test_json_tells_names_and_marks(root: Path) -> None:
    newest, *_ = documents(root)
    assert (newest["tags"], newest["name"], newest["refs"]) == (["v1"], "last-good", ["heads/main", "tags/v1"])
    assert [document["preempted"] for document in documents(root, "wide")] == [False, True, False, False]


@pytest.mark.parametrize(("metric", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_a_metric_that_is_no_number_is_text_in_json(metric: float, text: str, tmp_path: Path) -> None:
    make_repository(tmp_path, commits=[{"metric": metric, "config": {"clip": metric}}])
    (document,) = documents(tmp_path)
    assert (document["metric"], document["config"]) == (text, {"clip": text})


@pytest.mark.parametrize("options", [[], ["--all"], ["--graph", "--all"], ["--oneline"]], ids=" ".join)
def test_an_empty_repository_has_an_empty_log(options: list[str], empty: Path) -> None:
    result = run(empty, *options)
    assert (result.exit_code, result.output) == (0, "")
    assert documents(empty, *options) == []


@pytest.mark.parametrize("options", [[], ["--graph", "--all"]], ids=" ".join)
def test_a_lost_commit_is_reported_behind_what_can_be_read(options: list[str], tmp_path: Path) -> None:
    make_repository(tmp_path, commits=3)
    (tmp_path / f".syckpt/objects/{commit_id(1)}.json").unlink()
    result = run(tmp_path, "--oneline", *options)
    assert result.exit_code == 5
    assert result.stdout.count("\n") == 2
    assert result.stderr == f"syckpt: objects/{commit_id(1)}.json: missing, though its child {commit_id(2)} names it\n"


def test_a_damaged_tag_does_not_hide_the_commits(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=[{"tags": ("v1",)}])
    record = tmp_path / ".syckpt/logs/refs/tags/v1/000000000001.json"
    record.write_bytes(record.read_bytes().replace(b"create", b"create "))
    result = run(tmp_path, "--oneline")
    assert (result.exit_code, result.stdout) == (5, "00000000-00000001  step 10  (HEAD -> main)\n")
    assert "logs/refs/tags/v1/000000000001.json" in result.stderr


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """main: 1 to 6; wide: 1 2 3 7 8 9. Kept are 3, 6, 9 alone, and 1, which is tagged."""
    path = tmp_path_factory.mktemp("thinned")
    repository = make_repository(path, commits=[{"tags": ("v1",)}, {}, {}, {}, {}, {}], branches={"wide": (3, 3)})
    for number in (2, 4, 5, 7, 8):
        repository.mark(commit_id(number), "dropped", why="test")
    return path


def test_dropped_commits_that_follow_each_other_are_one_line(thinned: Path) -> None:
    assert run(thinned, "--oneline").stdout == (
        "00000000-00000006  step 60  (HEAD -> main)\n"
        "... 2 dropped commits, steps 40 to 50; --dropped shows them\n"
        "00000000-00000003  step 30\n"
        "00000000-00000002  step 20  [dropped]\n"
        "00000000-00000001  step 10  (tag: v1)\n"
    )
    assert max(map(len, run(thinned, columns=40).stdout.splitlines()[3:4])) <= 40
    assert [one["id"] for one in documents(thinned)] == [commit_id(k) for k in (6, 5, 4, 3, 2, 1)]


def test_a_fold_leaves_the_graph_right_and_dropped_unfolds_it(thinned: Path) -> None:
    assert run(thinned, "--graph", "--all", "--oneline").stdout == (
        "*   00000000-00000009  step 90  (wide)\n"
        ":   ... 2 dropped commits, steps 70 to 80; --dropped shows them\n"
        "| * 00000000-00000006  step 60  (HEAD -> main)\n"
        "| : ... 2 dropped commits, steps 40 to 50; --dropped shows them\n"
        "|/\n"
        "*   00000000-00000003  step 30\n"
        "*   00000000-00000002  step 20  [dropped]\n"
        "*   00000000-00000001  step 10  (tag: v1)\n"
    )
    assert run(thinned, "--graph", "--all", "--oneline", "--dropped").stdout.count("[dropped]") == 5


def test_a_branch_at_an_older_commit_needs_no_lane(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=2, branches={"still": (1, 0)})
    assert run(tmp_path, "--graph", "--all", "--oneline").stdout == (
        "* 00000000-00000002  step 20  (HEAD -> main)\n* 00000000-00000001  step 10  (still)\n"
    )
