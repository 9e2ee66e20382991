"""`syckpt cat`: one file of a commit's tree, byte by byte."""

from __future__ import annotations

import base64
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load as load_safetensors

from syckpt.cli import main
from syckpt.testing.repositories import commit_id, make_repository


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["-C", str(root), "cat", *arguments])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment")
    make_repository(path, commits=2)
    return path


def test_a_document_is_printed(root: Path) -> None:
    assert run(root, "HEAD:model.json").stdout == (
        '{\n  "format": "syckpt item",\n  "item": "model",\n'
        '  "tensors": [["weight", "float32", [64, 64]], ["frozen", "float32", [1000]]],\n'
        '  "value": {"dict": [["weight", {"tensor": 0}], ["frozen", {"tensor": 1}], ["lr", 0.001], ["seen", 1280]]},\n  "version": 1\n}\n'
    )


def test_tensors_are_a_safetensors_file_on_stdout(root: Path) -> None:
    found = load_safetensors(run(root, "HEAD~1:model.safetensors").stdout_bytes)
    assert {name: (value.dtype.name, value.shape) for name, value in found.items()} == {
        "weight": ("float32", (64, 64)),
        "frozen": ("float32", (1000,)),
    }
    assert (found["frozen"] == load_safetensors(run(root, "HEAD:model.safetensors").stdout_bytes)["frozen"]).all()
    assert (found["weight"] != load_safetensors(run(root, "HEAD:model.safetensors").stdout_bytes)["weight"]).any()


def test_json_tells_of_the_file_and_holds_its_text_or_bytes(root: Path) -> None:
    text, data = (json.loads(run(root, f"HEAD:{path}", "--json").stdout) for path in ("syckpt.commit.json", "model.safetensors"))
    assert json.loads(text["text"])["id"] == commit_id(2)
    assert {key: text[key] for key in ("kind", "path", "item", "rank", "format")} == {
        "kind": "file",
        "path": "syckpt.commit.json",
        "item": None,
        "rank": None,
        "format": "json",
    }
    assert base64.b64decode(data["base64"]) == run(root, "HEAD:model.safetensors").stdout_bytes
    assert data["nbytes"] == len(base64.b64decode(data["base64"]))


def test_a_file_that_is_not_there_ends_in_status_3_and_names_those_that_are(root: Path) -> None:
    result = run(root, "HEAD:weights")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"syckpt: commit {commit_id(2)} has no file 'weights'; it has model.json, model.safetensors, syckpt.commit.json\n"
    )


@pytest.mark.parametrize("name", ["HEAD", ":model.json", "HEAD:"])
def test_what_is_no_revision_and_path_ends_in_status_2(name: str, root: Path) -> None:
    result = run(root, name)
    assert result.exit_code == 2
    assert "is not REV:PATH, such as HEAD:model.json" in result.stderr


def test_damage_ends_in_status_5(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=1)
    (tmp_path / f".syckpt/objects/{commit_id(1)}/r00000.safetensors").unlink()
    assert run(tmp_path, "HEAD:model.safetensors").exit_code == 5


def test_a_dropped_commit_is_not_found(tmp_path: Path) -> None:
    make_repository(tmp_path, commits=2).mark(commit_id(1), "dropped", why="test")
    assert run(tmp_path, "HEAD~1:model.json").exit_code == 3


def process(root: Path, path: str, stdout: int | None) -> tuple[int, str]:
    """Run the command with that file descriptor as its output (None: a closed one); return its exit status and last line of errors."""
    command = [sys.executable, "-m", "syckpt", "-C", str(root), "cat", f"HEAD:{path}"]
    if stdout is None:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    found = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    return found.returncode, found.stderr.strip().rpartition("\n")[2]


def test_output_that_nobody_takes_ends_in_a_status_and_no_traceback(root: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert process(root, "model.safetensors", writer) == (141, "")
        assert process(root, "model.safetensors", full) == (7, "syckpt: [Errno 28] No space left on device")
        assert process(root, "model.safetensors", None) == (2, "Error: standard output is closed")
    finally:
        os.close(writer)
        os.close(full)


def test_a_terminal_gets_plain_text_only(root: Path) -> None:
    master, terminal = pty.openpty()
    try:
        status, told = process(root, "model.safetensors", terminal)
        assert (status, told) == (2, "Error: model.safetensors is not plain text: write it to a file (> FILE), or add --json")
        assert process(root, "syckpt.commit.json", terminal) == (0, "")
        assert os.read(master, 1) == b"{"
    finally:
        os.close(master)
        os.close(terminal)
