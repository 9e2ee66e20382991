"""`syckpt verify`: what it finds, what it prints, how it exits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import commit_id, make_repository

BLOB = f"objects/{commit_id(2)}/r00000.safetensors"


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "verify", *arguments])


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path, commits=3)
    return tmp_path


@pytest.fixture
def damaged(root: Path) -> Path:
    flip(root / ".syckpt" / BLOB, -1)
    return root


def test_a_whole_repository_ends_in_status_0_and_a_summary(root: Path) -> None:
    result = run(root)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.fullmatch(r"ok: 3 commits, 4 tensors, 53\.2 kB checked in \d+\.\d\d s\n", result.stdout)


def test_one_commit_is_verified_alone(root: Path) -> None:
    assert run(root, "HEAD").stdout.startswith("ok: 1 commit, 2 tensors, 20.4 kB checked in ")


def test_quick_reads_no_tensors(damaged: Path) -> None:
    result = run(damaged, "--quick")
    assert result.exit_code == 0
    assert re.fullmatch(r"ok: 3 commits checked in \d+\.\d\d s\n", result.stdout)


def test_a_flipped_byte_is_found_and_its_blob_named(damaged: Path) -> None:
    result = run(damaged)
    finding, summary = result.stdout.splitlines()
    assert result.exit_code == 5
    assert finding.startswith(f"{BLOB}: ")
    assert summary.startswith("DAMAGED (1 finding, 1 commit cannot be loaded whole): 3 commits, 4 tensors, 53.2 kB checked in ")


def test_a_lost_blob_is_found_without_reading_tensors(root: Path) -> None:
    (root / ".syckpt" / BLOB).unlink()
    result = run(root, "--quick")
    assert result.exit_code == 5
    assert f"{BLOB}: missing" in result.stdout


def test_commits_that_do_not_need_the_damaged_bytes_are_fine(damaged: Path) -> None:
    assert [run(damaged, rev).exit_code for rev in ("HEAD", "HEAD~1", "HEAD~2")] == [0, 5, 0]


def test_json_of_a_whole_repository(root: Path) -> None:
    document = json.loads(run(root, "--json").stdout)
    assert document.pop("seconds") >= 0
    assert document == {
        "ok": True,
        "errors": [],
        "findings": {},
        "commits": 3,
        "tensors": 4,
        "nbytes": 53_152,
        "damaged": [],
        "marked": [],
        "cleared": [],
        "resumed": 0,
    }


def test_json_of_a_damaged_repository(damaged: Path) -> None:
    result = run(damaged, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"], document["damaged"]) == (5, False, [commit_id(2)])
    (error,) = document["errors"]
    assert error.startswith(BLOB)


def test_a_damaged_commit_record_is_found(root: Path) -> None:
    flip(root / f".syckpt/objects/{commit_id(1)}.json", 20)
    result = run(root)
    assert result.exit_code == 5
    assert f"objects/{commit_id(1)}.json: " in result.stdout


def test_damage_is_marked_and_unmarked_unless_told_not_to(damaged: Path) -> None:
    mark = damaged / f".syckpt/objects/{commit_id(2)}.damaged"
    assert (run(damaged, "--no-mark").exit_code, mark.exists()) == (5, False)
    assert (run(damaged).exit_code, mark.exists()) == (5, True)
    flip(damaged / ".syckpt" / BLOB, -1)
    result = run(damaged, "--quick")
    assert (result.exit_code, mark.exists()) == (5, True)
    assert result.stdout.startswith(f"objects/{commit_id(2)}.damaged: marks the commit as damaged")
    result = run(damaged)
    assert (result.exit_code, mark.exists()) == (0, False)
    assert result.stdout.startswith(f"{commit_id(2)}: whole again; its mark `damaged` is removed\n")


def test_a_file_to_resume_from_is_for_a_full_check(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "progress"
    assert run(root, "--resume", str(file)).exit_code == 0
    assert not file.exists()
    assert run(root, "HEAD", "--resume", str(file)).exit_code == 0
    assert not file.exists()
    assert run(root, "--quick", "--resume", str(file)).exit_code == 2


def test_findings_about_signatures_name_the_commit(root: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["keygen", str(tmp_path / "team")]).exit_code == 0
    findings = json.loads(run(root, "HEAD", "--json", "--trusted-key", str(tmp_path / "team.pub")).stdout)["findings"]
    assert list(findings.values()) == [[commit_id(3)]]


def test_an_empty_repository_is_whole(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=0)
    assert run(tmp_path).stdout.startswith("ok: 0 commits, 0 tensors, 0 B checked in ")
