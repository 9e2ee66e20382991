"""`syckpt retain`, `gc`, `repack` and `du`: what they print, and that a dry run only prints."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id, make_repository


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), *arguments], env={"COLUMNS": columns and str(columns)})


def document(root: Path, *arguments: str) -> Any:
    return json.loads(run(root, *arguments, "--json").stdout, parse_constant=pytest.fail)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path, commits=[{"metric": 2.0}, {"metric": 1.0}, {}, {}, {}], branches={"wide": (3, 1)}, keyframe_every=2)
    return tmp_path


def test_a_dry_run_names_what_stays_and_why_and_what_would_go(root: Path) -> None:
    before = files(root)
    result = run(root, "retain", "--last", "1", "--dry-run")
    assert files(root) == before
    assert (result.exit_code, result.stderr) == (0, "")
    *lines, summary = result.stdout.splitlines()
    # Nobody said which metric is the better one.
    assert lines == [
        "keep  00000000-00000001  step 10  best (if the highest)",
        "keep  00000000-00000002  step 20  best (if the lowest)",
        "keep  00000000-00000003  step 30  fork point of wide",
        "keep  00000000-00000005  step 50  tip, last 1",
        "drop  00000000-00000004  step 40",
    ]
    assert summary.startswith("would drop 1 commit of main, keeping 4: would free ")
    lines = run(root, "retain", "--last", "1", "--dry-run", "--minimize").stdout.splitlines()
    assert lines[0] == "keep  00000000-00000002  step 20  best"
    assert lines[3:5] == ["drop  00000000-00000001  step 10", "drop  00000000-00000004  step 40"]


@pytest.mark.parametrize(("columns", "call"), [(50, "retain --last 1 --dry-run"), (60, "du"), (50, "best"), (50, "verify")])
def test_lines_are_wrapped_to_the_terminal_and_say_the_same(columns: int, call: str, root: Path) -> None:
    run(root, "tag", "good", "best")
    wide, narrow = (run(root, *call.split(), columns=width).stdout for width in (None, columns))
    assert max(map(len, narrow.splitlines())) <= columns < max(map(len, wide.splitlines()))
    assert [*map(_steady, narrow.split())] == [*map(_steady, wide.split())]


def _steady(word: str) -> str:
    return re.sub(r"[\d.]+$", "0", word)


def test_retain_drops_and_the_log_shows_it(root: Path) -> None:
    report = document(root, "retain", "main", "--last", "1", "--maximize")
    assert [(kept["id"], kept["reasons"]) for kept in report["kept"]] == [
        (commit_id(1), ["best"]),
        (commit_id(3), ["fork point of wide"]),
        (commit_id(5), ["tip", "last 1"]),
    ]
    assert [dropped["id"] for dropped in report["dropped"]] == [commit_id(2), commit_id(4)]
    assert [commit["dropped"] for commit in document(root, "log")] == [False, True, False, True, False]
    assert verify(Repository.open(parse_root(root))).errors == []
    assert run(root, "ls", commit_id(2)).exit_code == 3


@pytest.mark.parametrize("arguments", [[], ["--last", "0"], ["--every", "soon"], ["--last", "x"]], ids=" ".join)
def test_a_rule_without_sense_is_a_wrong_call(root: Path, arguments: list[str]) -> None:
    assert run(root, "retain", *arguments).exit_code == 2


def test_an_unknown_branch_is_not_found(root: Path) -> None:
    assert run(root, "retain", "nope", "--last", "1").exit_code == 3


def test_gc_of_a_clean_repository_frees_nothing(root: Path) -> None:
    before = files(root)
    assert run(root, "gc").stdout == "freed 0 B\n"
    assert files(root) == before


def test_gc_removes_what_a_late_rank_left_behind(root: Path) -> None:
    stray = root / ".syckpt/objects" / commit_id(99) / "r00001.manifest"
    stray.parent.mkdir()
    stray.write_bytes(b"12345")
    assert run(root, "gc", "--dry-run").stdout == "would free 0 B\n"
    long_ago = time.time() - 3 * 86400
    os.utime(stray, (long_ago, long_ago))
    key = f"objects/{commit_id(99)}/r00001.manifest"
    assert run(root, "gc", "--dry-run").stdout == f"{key}  5 B\nwould free 5 B\n"
    assert stray.exists()
    assert document(root, "gc")["strays"] == [{"key": key, "nbytes": 5}]
    assert not stray.parent.exists()


def test_unfinished_files_of_dead_writers_are_counted_by_all_and_removed_by_gc(root: Path) -> None:
    before = document(root, "du")["total_nbytes"]
    staging = root / ".syckpt/staging"
    staging.mkdir(exist_ok=True)
    for number in (1, 2):
        half = staging / f"elsewhere-1-1-{number}.part"
        half.write_bytes(bytes(number * 1000))
        os.utime(half, (0, 0))
    usage = document(root, "du")
    assert (usage["total_nbytes"], usage["reclaimable_nbytes"]) == (before + 3000, 3000)
    assert run(root, "du").stdout.endswith("\n`syckpt gc` would free 3.0 kB\n")
    assert document(root, "status")["nbytes"] == before + 3000
    gone = "2 unfinished files of processes that are gone  3.0 kB\n"
    assert run(root, "gc", "--dry-run").stdout == f"{gone}would free 3.0 kB\n"
    assert [file["nbytes"] for file in document(root, "gc", "--dry-run")["staged"]] == [1000, 2000]
    assert run(root, "gc").stdout == f"{gone}freed 3.0 kB\n"
    assert list(staging.iterdir()) == []
    assert document(root, "du")["total_nbytes"] == document(root, "status")["nbytes"] == before


def test_repack_leaves_no_dead_byte(root: Path) -> None:
    run(root, "retain", "--last", "1")
    assert document(root, "repack", "--dry-run")["sweeps"] == []
    hour_ago = time.time() - 3700
    for mark in (root / ".syckpt/objects").glob("*.dropped"):
        os.utime(mark, (hour_ago, hour_ago))
    report = document(root, "repack", "--all")
    assert report["skipped"] == []
    assert document(root, "repack", "--all", "--dry-run")["sweeps"] == []
    assert verify(Repository.open(parse_root(root))).errors == []


def test_du_shows_commits_items_and_tensors(root: Path) -> None:
    lines = run(root, "du").stdout.splitlines()
    assert lines[0].split() == ["only", "here", "shared", "documents", "commit"]
    assert len(lines) == 9
    assert lines[1].endswith("00000000-00000001  step 10")
    assert " of one commit each, " in lines[-2]
    assert lines[-1] == "`syckpt gc` would free 0 B"
    usage = document(root, "du")
    assert [found["id"] for found in usage["commits"]] == [commit_id(n) for n in range(1, 7)]
    assert usage["total_nbytes"] == sum(map(len, files(root).values()))
    alone = sum(found["exclusive_nbytes"] for found in usage["commits"])
    assert alone + usage["shared_nbytes"] + usage["other_nbytes"] == usage["total_nbytes"]
    (item,) = document(root, "du", "HEAD")
    assert (item["item"], item["tensors"], item["nbytes"]) == ("model", 2, 20_384)
    tensors = document(root, "du", "HEAD", "--tensors")
    assert [tensor["path"] for tensor in tensors] == ["model/weight", "model/frozen"]
    assert tensors[1]["exclusive_nbytes"] == 0
    assert "model/frozen  float32" in run(root, "du", "HEAD", "--tensors").stdout
    assert run(root, "du", "--tensors").exit_code == 2


@pytest.mark.parametrize("command", ["retain", "gc", "repack", "du"])
def test_the_help_shows_examples_and_what_json_holds(command: str, root: Path) -> None:
    text = run(root, command, "--help").stdout
    assert f"Examples:\n    syckpt {command}" in text
    assert "JSON" in text


def test_the_scene_is_older_than_any_window_and_nothing_of_it_goes(root: Path) -> None:
    assert time.time_ns() - MIDNIGHT_NS > 0
    for path in root.rglob("*"):
        os.utime(path, (0, 0))
    assert document(root, "gc")["freed_nbytes"] == 0


def test_what_syckpt_did_not_make_stays_inside_and_beside_and_no_link_is_followed(root: Path) -> None:
    inner = root / ".syckpt"
    (root / "outside").mkdir()
    (inner / "staging").mkdir(exist_ok=True)
    for place in ("notes.txt", ".syckpt/notes.txt", ".syckpt/objects/notes.txt", f".syckpt/objects/{commit_id(2)}/notes.txt"):
        (root / place).write_text("mine")
    for place in (".syckpt/staging/notes.txt", ".syckpt/intents.txt", ".syckpt/logs/notes.txt", "outside/precious"):
        (root / place).write_text("mine")
    (inner / "staging/folder").mkdir()
    for _ in range(2):
        for path in root.rglob("*"):
            os.utime(path, (0, 0))
        for command in (["retain", "--last", "1"], ["gc"], ["repack", "--all"]):
            assert run(root, *command).exit_code == 0
    mine = {name for name, content in files(root).items() if content == b"mine"}
    assert len(mine) == 8
    assert (inner / "staging/folder").is_dir()
    assert verify(Repository.open(parse_root(root))).errors == []
    (inner / "objects" / commit_id(77)).symlink_to(root / "outside")
    result = run(root, "gc")
    assert (result.exit_code, "is a symbolic link" in result.stderr) == (5, True)
    assert (root / "outside/precious").exists()


@pytest.mark.parametrize(
    ("place", "way_on"),
    [
        ("logs/refs/heads/main/000000000003.json", "put that file back from a copy"),
        (f"objects/{commit_id(2)}.json", "put that file back from a copy"),
        (f"objects/{commit_id(2)}/r00000.locations.0001", "`syckpt retain` then drops it"),
        (f"intents/{commit_id(77)}.json", "delete intents/00000000-0000004d00000000.json when no save is running"),
    ],
)
def test_what_cannot_be_read_stops_gc_which_says_what_to_do(root: Path, place: str, way_on: str) -> None:
    path = root / ".syckpt" / place
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"torn")
    before = files(root)
    for command in (["gc"], ["gc", "--dry-run"], ["repack"], ["du"]):
        result = run(root, *command)
        assert (result.exit_code, result.stdout) == (5, "")
        assert place in result.stderr
        assert way_on in result.stderr
    assert files(root) == before


def test_a_commit_whose_locations_are_damaged_can_be_let_go(root: Path) -> None:
    (root / ".syckpt/objects" / commit_id(4) / "r00000.locations.0001").write_bytes(b"torn")
    assert run(root, "gc").exit_code == 5
    assert run(root, "verify").exit_code == 5
    dropped = document(root, "retain", "--last", "1")["dropped"]
    assert commit_id(4) in [commit["id"] for commit in dropped]
    assert not list((root / ".syckpt/objects").glob(f"{commit_id(4)}/*"))
    assert run(root, "gc").exit_code == 0
    assert verify(Repository.open(parse_root(root))).errors == []


def test_a_dropped_commit_is_not_found_by_what_reads_it(root: Path) -> None:
    run(root, "retain", "--last", "1")
    for command in (["verify"], ["ls"], ["export"], ["checkout"], ["diff"], ["tag", "x"], ["du"]):
        more = {"export": [str(root / "x"), "--to", "torch"], "checkout": ["--to", str(root / "x")], "diff": ["HEAD"]}.get(command[0], [])
        result = run(root, *command, commit_id(4), *more)
        assert (command, result.exit_code) == (command, 3)
        assert commit_id(4) in result.stderr
    assert not (root / "x").exists()
    assert "dropped" in run(root, "show", commit_id(4)).stdout
