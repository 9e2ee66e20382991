"""`syckpt status`: the repository at this moment."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.objects.refs import Intent, Lease, Owner
from syckpt.repo import documents, leases, owner
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id, make_repository


def run(root: Path, *arguments: str, columns: int | None = None) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "status", *arguments], env={"COLUMNS": columns and str(columns)})


def document(root: Path, *arguments: str) -> Any:
    return json.loads(run(root, "--json", *arguments).stdout, parse_constant=pytest.fail)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path, commits=[{"tags": ("v1",)}, {"metric": 0.5}], branches={"wide": (1, 1)})
    return tmp_path


def take(root: Path, branch: str, trainer: Owner) -> None:
    """Hold a branch, and have a save in hand on it."""
    repository = Repository.open(parse_root(root))
    leases.write(repository, Lease(branch, "job", 1, "token", trainer, None, MIDNIGHT_NS + 10**18))
    documents.write(repository.store, f"intents/{commit_id(9)}.json", Intent(commit_id(9), branch, 1, "job", (), trainer).to_body())


def lines(root: Path, *, columns: int | None = None) -> list[str]:
    found = run(root, columns=columns).stdout.splitlines()
    return [re.sub(r": .*/\\.syckpt: ", ": ", re.sub(r"since .*?;", "since then;", line)) for line in found]


def test_what_is_there_and_what_to_do_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS + 3 * 3600 * 10**9)
    nbytes = sum(file.stat().st_size for file in (root / ".syckpt").rglob("*") if file.is_file())
    assert run(root).stdout == (
        f"repository  {root}/.syckpt\n"
        f"disk        {nbytes / 1000:.1f} kB, 3 commits\n"
        "HEAD        main\n"
        "branches    main  00000000-00000002  step 20, metric 0.5, 3 h ago\n"
        "            wide  00000000-00000003  step 30, 3 h ago\n"
        "tags        v1  00000000-00000001\n"
        "next        nothing: run a script again to go on from its branch; `syckpt log` shows the commits\n"
    )


def test_a_writer_and_its_save_are_told_with_what_is_known_of_the_process(root: Path) -> None:
    take(root, "wide", owner.this_process())
    pid = os.getpid()
    found = lines(root)
    assert found[5].startswith(f"              written by process {pid} on ")
    assert found[5].endswith(" (alive, since then; run job, generation 1)")
    assert found[7] == f"saves       {commit_id(9)} on wide, by process {pid} on {owner.this_process().host} (under way)"
    assert found[8:] == [
        "next        let the run on branch 'wide' go on: a second one there gets a ConflictError, unless it names another branch=..."
    ]
    where, *others = lines(root, columns=60)
    assert where.endswith("/.syckpt")  # A path stays whole, so that it can be copied.
    assert max(map(len, others)) <= 60
    record = document(root)
    assert record["branches"][1]["writer"]["alive"] is True
    assert record["branches"][0]["writer"] is None
    assert [(save["commit"], save["branch"], save["pid"], save["alive"]) for save in record["saves"]] == [(commit_id(9), "wide", pid, True)]


def test_what_the_dead_and_the_damaged_need_is_told(root: Path) -> None:
    take(root, "wide", replace(owner.this_process(), start=1))
    repository = Repository.open(parse_root(root))
    repository.mark(commit_id(1), "damaged", why="blob: a\nflipped bit")
    found = lines(root)
    assert "(dead, since then; run job, generation 1)" in found[5]
    assert found[7].endswith("(cut off: that is dead)")
    assert found[8:] == [
        f"damaged     {commit_id(1)}: blob: a flipped bit",
        f"next        `syckpt verify {commit_id(1)}` tells what is damaged",
        f"            the save {commit_id(9)} was cut off: the next run on branch 'wide' clears or completes it",
        "            the run on branch 'wide' ended without closing; run its script again to go on",
    ]
    assert document(root)["damaged"] == [{"commit": commit_id(1), "why": "blob: a\nflipped bit"}]


def test_a_writer_elsewhere_holds_a_branch_as_long_as_its_lease_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS)
    take(root, "wide", replace(owner.this_process(), host="elsewhere", boot="another"))
    assert document(root)["next"][0].startswith("let the run on branch 'wide' go on: ")
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS + 2 * 10**18)
    assert document(root)["next"][0].startswith("the lease of the run on branch 'wide', on another machine, ran out: ")


def test_where_a_resume_goes_past_damage_and_where_it_cannot(root: Path) -> None:
    repository = Repository.open(parse_root(root))
    repository.mark(commit_id(2), "damaged", why="test")
    repository.mark(commit_id(3), "damaged", why="test")
    past = f"goes past its damaged commits to {commit_id(1)}, step 10"
    assert document(root)["next"] == [
        "`syckpt verify` tells what is damaged: 2 commits are marked",
        *(f"a resume on branch '{branch}' {past}" for branch in ("main", "wide")),
    ]
    repository.mark(commit_id(1), "dropped", why="test")
    take(root, "wide", replace(owner.this_process(), start=1))
    raises = "can be loaded, and a resume raises: put the damaged files back from a copy, then `syckpt verify`; or begin anew with"
    assert document(root)["next"] == [
        "`syckpt verify` tells what is damaged: 2 commits are marked",
        *(f"no commit of branch '{branch}' {raises} auto_resume=False" for branch in ("main", "wide")),
        f"the save {commit_id(9)} was cut off: the next run on branch 'wide' clears or completes it",
    ]


def test_damage_is_shown_and_is_the_exit_status(root: Path) -> None:
    (root / ".syckpt/HEAD").write_text("nonsense")
    result = run(root)
    assert result.exit_code == 5
    assert "HEAD        cannot be read\n" in result.stdout
    assert "next        run `syckpt verify`: HEAD: expected" in result.stdout
    assert result.stderr.startswith("syckpt: HEAD: expected")
    assert document(root)["head"] is None


def test_an_empty_repository_says_how_to_begin(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=0)
    found = lines(tmp_path)
    assert found[2:] == [
        "HEAD        main",
        "branches    main  no commit yet",
        "next        no commit yet: the first save of a training script makes one",
    ]
