"""Who may write a branch, where branches begin, and what names a commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import syckpt
from syckpt import CheckpointManager
from syckpt.repo.leases import LEASE_S

HOLDER = """
import sys
import syckpt
ckpt = syckpt.CheckpointManager(sys.argv[1], branch=sys.argv[2])
ckpt.x = 1
ckpt.restore()
ckpt.step_up()
ckpt.save(wait=True)
print("holding", flush=True)
sys.stdin.read()
ckpt.close()
"""


@contextmanager
def holder(root: Path, branch: str) -> Iterator[subprocess.Popen]:
    """Another process that holds a branch."""
    arguments = [sys.executable, "-c", HOLDER, str(root), branch]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)


def save_one(root: Path, value: int, **arguments: object) -> str:
    with CheckpointManager(root, **arguments) as ckpt:
        ckpt.x = None
        ckpt.restore()
        ckpt.x = value
        ckpt.step_up()
    assert ckpt.hash is not None
    return ckpt.hash


# -- writers ---------------------------------------------------------------------------------------------------------------------


def test_two_managers_of_one_process_cannot_write_one_branch(tmp_path):
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first.x = second.x = 1
    first.step_up()
    with pytest.raises(syckpt.ConflictError, match=r"'main' is being written by another manager of this process .*branch="):
        second.step_up()
    with pytest.raises(syckpt.ConflictError, match="another manager of this process"):
        second.save()
    first.save(wait=True)
    with pytest.raises(syckpt.ConflictError, match="another manager of this process"):
        second.save()
    first.close()
    # Given back; but what the second one looked at is no longer the tip.
    with pytest.raises(syckpt.ConflictError, match=r"has moved on from empty to .* run the script again"):
        second.save()
    second.close()
    third = save_one(tmp_path, 2)
    assert [c.id for c in CheckpointManager(tmp_path).log()] == [third, first.hash]


def test_a_manager_that_took_nothing_leaves_the_branch_free(tmp_path):
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first.x = second.x = 1
    second.step_up()
    second.close()
    first.close()


def test_managers_of_one_process_write_different_branches_side_by_side(tmp_path):
    save_one(tmp_path, 0)
    with CheckpointManager(tmp_path, branch="a") as a, CheckpointManager(tmp_path, branch="team/b") as b:
        for ckpt, value in ((a, 1), (b, 2)):
            ckpt.x = 0
            ckpt.restore()
            ckpt.x = value
        for _ in range(2):
            a.step_up()
            b.step_up()
            a.save()
            b.save()
    assert [syckpt.load(tmp_path, rev)["x"] for rev in ("main", "a", "team/b", "HEAD")] == [0, 1, 2, 0]
    assert [len(CheckpointManager(tmp_path, branch=name).log()) for name in ("a", "team/b")] == [3, 3]


def test_a_branch_that_another_process_holds_is_refused_at_once_by_its_pid(tmp_path):
    with holder(tmp_path, "main") as other:
        ckpt = CheckpointManager(tmp_path)
        ckpt.x = 1
        started = time.monotonic()
        with pytest.raises(syckpt.ConflictError, match=f"process {other.pid} on .*branch="):
            ckpt.restore()
        assert time.monotonic() - started < LEASE_S / 2
        # Reading needs nobody's leave, another branch neither.
        assert ckpt.load() == syckpt.load(tmp_path) == {"x": 1}
        ckpt.close()
        save_one(tmp_path, 5, branch="other")
    assert save_one(tmp_path, 6) == CheckpointManager(tmp_path).log()[0].id


def test_a_dead_holder_is_taken_over_at_once(tmp_path):
    with holder(tmp_path, "main") as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        started = time.monotonic()
        save_one(tmp_path, 2)
        assert time.monotonic() - started < LEASE_S / 2
    assert [c.step for c in CheckpointManager(tmp_path).log()] == [2, 1]


def test_a_holder_on_another_host_is_waited_for_until_its_lease_runs_out_and_is_fenced_then(tmp_path):
    from syckpt.objects.refs import Lease, Owner
    from syckpt.repo import leases
    from syckpt.repo.repository import Repository
    from syckpt.stores.base import parse_root

    with CheckpointManager(tmp_path, save_on_exit=False) as slow:
        slow.x = 1
        first = slow.save(wait=True)
        # As if it were another machine's: nobody here can tell whether it lives.
        elsewhere = Owner("another-host", "boot", "pid:[1]", 4711, 99)
        expires_ns = time.time_ns() + 700_000_000
        leases.write(Repository.open(parse_root(tmp_path)), Lease("main", "other", 1, "theirs", elsewhere, None, expires_ns))
        second = save_one(tmp_path, 2)
        assert time.time_ns() >= expires_ns
        with pytest.raises(syckpt.ConflictError, match="generation 2"):
            slow.save(wait=True)
    assert [c.id for c in CheckpointManager(tmp_path).log()] == [second, first.id]


def test_a_manager_that_was_fenced_by_a_newer_one_gets_a_conflict_and_publishes_nothing(tmp_path):
    from syckpt.repo.repository import Repository
    from syckpt.repo.transaction import open_branch
    from syckpt.stores.base import parse_root

    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.x = 1
        first = ckpt.save(wait=True)
        open_branch(Repository.open(parse_root(tmp_path)), "main", run="newer incarnation", expected=first.id)
        with pytest.raises(syckpt.ConflictError, match="generation 2 of run newer incarnation"):
            ckpt.save(wait=True)
    assert [c.id for c in CheckpointManager(tmp_path).log()] == [first.id]
    assert not list((tmp_path / ".syckpt/intents").glob("*"))


# -- branches --------------------------------------------------------------------------------------------------------------------


def test_a_new_branch_begins_at_heads_tip_or_at_its_base_and_is_continued_when_it_exists(tmp_path):
    first, second = save_one(tmp_path, 1), save_one(tmp_path, 2)
    for branch, base, start in (("default", None, second), ("older", "main~1", first), ("by-id", first, first)):
        with CheckpointManager(tmp_path, branch=branch, base=base) as ckpt:
            assert (ckpt.branch, ckpt.resumed.id, ckpt.hash) == (branch, start, start)
            assert ckpt.step == ckpt.resumed.step
            ckpt.x = None
            ckpt.restore()
            assert ckpt.x == (1 if start == first else 2)
            ckpt.step_up()
        assert ckpt.log()[0].parents == (start,)
        assert ckpt.log()[0].branch == branch
        # Run again: the branch goes on, whatever its base.
        again = CheckpointManager(tmp_path, branch=branch, base=base)
        assert again.resumed.id == ckpt.hash
    assert (tmp_path / ".syckpt/HEAD").read_text() == "ref: refs/heads/main\n"
    assert CheckpointManager(tmp_path).resumed.id == second


def test_a_base_that_does_not_exist_is_an_error_and_the_first_branch_needs_none(tmp_path):
    with pytest.raises(syckpt.NotFoundError, match="no commit 'nowhere'"):
        CheckpointManager(tmp_path, branch="x", base="nowhere")
    save_one(tmp_path, 1, branch="x")
    assert (tmp_path / ".syckpt/HEAD").read_text() == "ref: refs/heads/x\n"
    assert CheckpointManager(tmp_path).branch == "x"


def test_overwrite_starts_the_branch_afresh_and_the_old_commits_stay_in_the_reflog(tmp_path):
    old = save_one(tmp_path, 1)
    with CheckpointManager(tmp_path, run_mode="overwrite") as ckpt:
        assert (ckpt.resumed, ckpt.step, ckpt.hash) == (None, 0, None)
        ckpt.x = 7
        assert ckpt.x == 7
        ckpt.step_up()
    (only,) = ckpt.log()
    assert only.parents == ()
    assert syckpt.load(tmp_path) == {"x": 7}
    assert syckpt.load(tmp_path, "HEAD@{1}") == {"x": 1} == syckpt.load(tmp_path, old)


def test_auto_resume_can_be_switched_off(tmp_path):
    save_one(tmp_path, 1)
    with CheckpointManager(tmp_path, auto_resume=False) as ckpt:
        ckpt.x = 9
        assert (ckpt.x, ckpt.step, ckpt.resumed) == (9, 0, None)
        ckpt.step_up()
    # A state of its own, on the branch all the same.
    assert [(c.step, len(c.parents)) for c in CheckpointManager(tmp_path).log()] == [(1, 1), (1, 0)]


# -- revisions -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> tuple[Path, list[str]]:
    """Four commits on main with metrics, the second one named and tagged, and a fork of it with one more."""
    root = tmp_path_factory.mktemp("history")
    saved = []
    with CheckpointManager(root, save_on_exit=False) as ckpt:
        for number, metric in enumerate((0.5, 0.25, float("nan"), 0.25)):
            ckpt.x = number
            ckpt.step_up()
            names = {"checkpoint_id": "named", "tags": ["tagged/it"]} if number == 1 else {}
            saved.append(str(ckpt.save(metric=metric, **names)))
    with CheckpointManager(root, branch="fork", base="named") as ckpt:
        ckpt.x = 0
        ckpt.restore()
        ckpt.x = 10
        ckpt.step_up()
    assert ckpt.hash is not None
    return root, [*saved, ckpt.hash]


@pytest.mark.parametrize(
    ("rev", "x"),
    [
        *[("HEAD", 3), ("main", 3), ("fork", 10), ("named", 1), ("tagged/it", 1), ("latest", 10), ("best", 3)],
        *[("HEAD~", 2), ("HEAD~1", 2), ("main~3", 0), ("HEAD~1~2", 0), ("fork~1", 1), ("fork~2", 0), ("named~1", 0), ("best~2", 1)],
        *[("HEAD@{0}", 3), ("main@{2}", 1), ("main@{1}~1", 1), ("fork@{1}", 1), ("HEAD~0", 3), ("latest~1", 1)],
    ],
)
def test_revisions_mean_what_they_say(history, rev, x):
    assert syckpt.load(history[0], rev) == {"x": x}


def test_ids_and_unique_prefixes_of_either_part_are_revisions(history):
    root, saved = history
    for x, commit in zip((0, 1, 2, 3, 10), saved, strict=True):
        for rev in (commit, commit[:-1], commit[:15], commit[9:], commit[9:15], f"{commit}~0"):
            assert syckpt.load(root, rev) == {"x": x}


def test_an_ambiguous_prefix_is_an_error_with_the_candidates(history):
    root, saved = history
    with pytest.raises(syckpt.NotFoundError) as caught:
        syckpt.load(root, saved[0][:8])
    assert "ambiguous" in str(caught.value)
    assert all(commit in str(caught.value) for commit in saved)


@pytest.mark.parametrize(
    "rev",
    [
        *["nothing", "", "~1", "@{1}", "HEAD~4", "HEAD@{4}", "HEAD~1@{1}", "HEAD~x", "HEAD@{x}", "HEAD^", "named@{0}", "tagged", "abc"],
        *["0badc0de", "0badc0de-0123456789abcdef", "..", "../..", "/", "a b", "ä", "x" * 5000, "a/" * 120 + "a", "HEAD~" + "9" * 5000],
        *["HEAD\n", "*", "HEAD~²"],
    ],
)
def test_what_names_no_commit_is_not_found(history, rev):
    with pytest.raises(syckpt.NotFoundError):
        syckpt.load(history[0], rev)


def test_best_is_the_managers_sense_of_best_and_never_nan(history):
    root, _ = history
    assert CheckpointManager(root).load("best") == {"x": 3}  # of equals the newest
    assert CheckpointManager(root, maximize=True).load("best") == {"x": 0}
    assert CheckpointManager(root, branch="fork").load("best") == {"x": 1}
    assert CheckpointManager(root, branch="fork").load("HEAD") == {"x": 10}
    assert CheckpointManager(root, branch="fork").load("latest~1") == {"x": 1}


def test_best_without_a_metric_is_not_found(tmp_path):
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.x = 1
        ckpt.save(metric=float("nan"))
        ckpt.save()
    with pytest.raises(syckpt.NotFoundError, match="none of the 2 commits of main has a metric"):
        syckpt.load(tmp_path, "best")


def test_log_goes_back_along_the_branch(history):
    root, saved = history
    ckpt = CheckpointManager(root)
    assert [c.id for c in ckpt.log()] == saved[3::-1]
    assert [c.id for c in ckpt.log(2)] == saved[3:1:-1]
    assert ckpt.log(0) == []
    assert [c.id for c in CheckpointManager(root, branch="fork").log()] == [saved[4], saved[1], saved[0]]


def test_verify_reads_every_byte(history, tmp_path):
    import shutil

    root, saved = history
    report = CheckpointManager(root).verify("named")
    assert (report.ok, bool(report), report.errors, report.commits) == (True, True, [], 1)
    shutil.copytree(root, tmp_path / "copy")
    manifest = tmp_path / "copy/.syckpt/objects" / saved[1] / "r00000.manifest"
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)
    report = CheckpointManager(tmp_path / "copy").verify("named")
    assert not report
    assert report.damaged == [saved[1]]
    assert f"objects/{saved[1]}/r00000.manifest" in report.errors[0]
    with pytest.raises(syckpt.NotFoundError):
        CheckpointManager(tmp_path / "copy").verify("nothing")


# -- damage ----------------------------------------------------------------------------------------------------------------------


def test_a_resume_passes_over_damage_loudly_and_a_restart_does_not_try_it_again(tmp_path, caplog):
    for number in range(3):
        with CheckpointManager(tmp_path, CheckpointManager.Config(compression="none"), rng=False) as ckpt:
            ckpt.x = torch.zeros(100)
            ckpt.x.fill_(number)
            ckpt.y = None
            ckpt.y = number
            ckpt.step_up()
    tip, before, _ = (c.id for c in ckpt.log())
    blob = tmp_path / ".syckpt/objects" / tip / "r00000.safetensors"
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)

    ckpt = CheckpointManager(tmp_path, rng=False)
    assert ckpt.resumed.id == tip
    ckpt.y, ckpt.x = None, torch.zeros(100)
    assert (ckpt.resumed.id, ckpt.step, ckpt.y, ckpt.x.tolist()) == (before, 2, 1, [1.0] * 100)
    assert "is damaged" in caplog.text
    assert f"resuming from the older commit {before}" in caplog.text
    # An explicit revision never falls back.
    with pytest.raises(syckpt.IntegrityError, match="safetensors"):
        ckpt.load("HEAD")
    ckpt.step_up()
    commit = ckpt.save(wait=True).result()
    assert commit.parents == (before,)
    ckpt.close()
    assert [c.step for c in ckpt.log()] == [3, 2, 1]
    assert CheckpointManager(tmp_path).resumed.id == commit.id
    assert (tmp_path / f".syckpt/objects/{tip}.damaged").exists()


def test_a_branch_without_a_whole_commit_is_an_error(tmp_path):
    commit = save_one(tmp_path, 1)
    (tmp_path / f".syckpt/objects/{commit}/r00000.manifest").unlink()
    with pytest.raises(syckpt.IntegrityError, match="no whole commit left"):
        CheckpointManager(tmp_path)
