"""`syckpt show`: a commit in full, also where its content is gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id, make_repository

FIELDS = {
    "config": {"lr": 0.001, "model": {"layers": 2, "name": "gpt"}, "betas": (0.9, 0.999), "sweep": {}},
    "metric": 0.4123,
    "message": "good\nand how",
    "tags": ("v1",),
    "epoch_done": False,
    "entered": True,
    "batch_idx": 40,
    "stats": {"staged_bytes": 20_384, "stall_s": 0.00123, "ratio": 1.5234, "keyframe": False},
}


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "show", *arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path, commits=[{}, FIELDS])
    return tmp_path


def test_a_commit_is_shown_in_full(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: MIDNIGHT_NS + 3 * 3600 * 10**9)
    blob = root / f".syckpt/objects/{commit_id(2)}/r00000.safetensors"
    assert run(root).stdout == (
        f"commit {commit_id(2)} (HEAD -> main, tag: v1)\n"
        f"parents     {commit_id(1)}\n"
        "branch      main\n"
        "tags        v1\n"
        "created     2026-01-01 00:02:00 UTC, 3 h ago\n"
        "step        20\n"
        "epoch       1, batch 40, entered\n"
        "metric      0.4123\n"
        "message     good\n"
        "            and how\n"
        "run         testing, generation 1, save 2, 1 rank\n"
        "writer      syckpt.testing\n"
        "randomness  exact\n"
        "\n"
        "config\n"
        "  lr: 0.001\n"
        "  model\n"
        "    layers: 2\n"
        "    name: 'gpt'\n"
        "  betas: (0.9, 0.999)\n"
        "  sweep: {}\n"
        "\n"
        "items\n"
        "  model  2 tensors  20.4 kB\n"
        "\n"
        "stored\n"
        "  tensors    2, 20.4 kB\n"
        f"  written    1 (1 as deltas) in a blob of {blob.stat().st_size / 1000:.1f} kB\n"
        "  unchanged  1, in files of earlier commits\n"
        f"  keyframe   {commit_id(1)}, 1 commit ago\n"
        "\n"
        "the save\n"
        "  keyframe  False\n"
        "  ratio     1.52x\n"
        "  staged    20.4 kB\n"
        "  stall     0.00123 s\n"
    )


def test_json_adds_what_the_commit_holds(root: Path) -> None:
    document = json.loads(run(root, "--json").stdout)
    blob = root / f".syckpt/objects/{commit_id(2)}/r00000.safetensors"
    assert document["items"] == {"model": {"tensors": 2, "nbytes": 20_384}}
    assert document["ranks"] == [
        {
            "rank": 0,
            "keyframe": commit_id(1),
            "keyframe_age": 1,
            "tensors": 2,
            "nbytes": 20_384,
            "whole": 0,
            "delta": 1,
            "pointers": 1,
            "blob_nbytes": blob.stat().st_size,
        }
    ]
    assert (document["id"], document["config"]["betas"], document["entered"]) == (commit_id(2), [0.9, 0.999], True)


def test_a_keyframe_says_so(root: Path) -> None:
    lines = run(root, "HEAD~1").stdout.splitlines()
    assert "  keyframe   this commit" in lines
    assert "  unchanged  0" in lines


def test_a_dropped_commit_shows_its_record(root: Path) -> None:
    repository = make_repository(root / "other", commits=[{"name": "old"}, {}])
    repository.mark(commit_id(1), "dropped", why="test")
    for path in (root / f"other/.syckpt/objects/{commit_id(1)}").iterdir():
        path.unlink()
    result = run(root / "other", "HEAD~1")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"commit {commit_id(1)}\ndropped     its content was removed by retention\nparents     none\n")
    assert "name        old\n" in result.stdout
    assert json.loads(run(root / "other", "HEAD~1", "--json").stdout)["ranks"] == []


def test_a_damaged_commit_shows_its_record_and_ends_in_status_5(root: Path) -> None:
    (root / f".syckpt/objects/{commit_id(2)}/r00000.manifest").unlink()
    result = run(root)
    assert result.exit_code == 5
    assert "step        20\n" in result.stdout
    assert result.stderr == f"syckpt: objects/{commit_id(2)}/r00000.manifest: missing, though commit {commit_id(2)} names it\n"


def test_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    config = {"inf": float("inf"), "bytes": b"ab", "huge": 1 << 80, "path": Path("a")}
    make_repository(tmp_path, commits=[{"config": config}])
    shown = json.loads(run(tmp_path, "--json").stdout, parse_constant=pytest.fail)["config"]
    assert shown == {"inf": "inf", "bytes": "b'ab'", "huge": "0x100000000000000000000", "path": "PosixPath('a')"}
