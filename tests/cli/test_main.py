"""What all commands share: which repository, exit statuses, one line for an error, help."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import syckpt
from syckpt.cli import main
from syckpt.testing.repositories import make_repository

COMMANDS = [["log", "--graph", "--all"], ["show"], ["ls", "--long", "--values"], ["verify"], ["help", "format"]]
COMMANDS += [["cat", "HEAD:model.json"]]
WITHOUT_TORCH = """
import sys
from syckpt.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
assert "torch" not in sys.modules, "torch was imported"
"""
WITHOUT_TORCH_ONE_BY_ONE = """
import json, sys
from syckpt.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
    assert "torch" not in sys.modules, arguments
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment")
    make_repository(path, commits=1)
    return path


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_leaves_torch_out(arguments: list[str], root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "-C", root, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_commands_on_refs_leave_torch_out(root: Path) -> None:
    calls = [["status"], ["branch"], ["branch", "x"], ["branch", "-d", "x"], ["tag", "v1"], ["tag", "-d", "v1"], ["reflog"]]
    calls += [["diff", "HEAD", "main"], ["similar", "HEAD"], ["log", "HEAD"]]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH_ONE_BY_ONE, json.dumps([["-C", str(root), *call] for call in calls])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_python_m_syckpt_is_the_command_line(root: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "syckpt", "-C", root, "log", "--oneline"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("00000000-00000001  step 10  (HEAD -> main)\n", "")


def test_the_repository_is_the_nearest_one_at_or_above(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = root / "figures" / "of" / "it"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert len(json.loads(run("log", "--json").stdout)) == 1


def test_the_repository_may_be_named_by_its_directory_or_the_one_above(root: Path) -> None:
    assert run("-C", str(root), "show").stdout == run("-C", str(root / ".syckpt"), "show").stdout != ""


def test_without_a_repository_one_line_says_so_and_the_status_is_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("log")
    assert (result.exit_code, result.stdout) == (3, "")
    assert (
        result.stderr == f"syckpt: no syckpt repository at or above {tmp_path}: go to an experiment's directory, or name it with -C DIR\n"
    )


@pytest.mark.parametrize("arguments", [["frobnicate"], ["log", "--frobnicate"], ["log", "-n", "x"], ["help", "frobnicate"]], ids=" ".join)
def test_a_wrong_call_ends_in_status_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["log", "show", "ls", "verify"])
def test_a_wrong_revision_ends_in_status_3_and_one_line(command: str, root: Path) -> None:
    result = run("-C", str(root), command, "nope")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("syckpt: no commit 'nope' in ")
    assert result.stderr.count("\n") == 1


def test_a_newer_format_ends_in_status_6(tmp_path: Path) -> None:
    assert run("-C", "s3://bucket/run", "log").exit_code == 6


@pytest.mark.parametrize("command", ["log", "show", "ls", "verify"])
def test_json_is_accepted_before_and_behind_the_command(command: str, root: Path) -> None:
    before, behind = (json.loads(run("-C", str(root), *arguments).stdout) for arguments in (["--json", command], [command, "--json"]))
    for document in (before, behind):
        if command == "verify":
            del document["seconds"]
    assert before == behind


@pytest.mark.parametrize("command", ["log", "show", "ls", "verify", "help"])
def test_the_help_of_a_command_shows_examples(command: str) -> None:
    text = run(command, "--help").stdout
    assert "Examples:\n    syckpt " in text
    assert run("help", command).stdout == text


@pytest.mark.parametrize(("topic", "title"), [("format", "# The syckpt repository format"), ("ARCHITECTURE", "# Architecture")])
def test_help_prints_the_texts_of_the_package(topic: str, title: str) -> None:
    assert run("help", topic).stdout.startswith(title)


def test_a_topic_is_rendered_to_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syckpt.cli.help._is_terminal", lambda: True)
    result = CliRunner().invoke(main, ["help", "retention"], env={"COLUMNS": "60"})
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].strip() == "Keeping what you need, and no more"
    assert "**" not in result.stdout


def test_no_help_is_wider_than_80_columns_there() -> None:
    for arguments in ([], *([command] for command in main.list_commands(click.Context(main)))):
        text = CliRunner().invoke(main, [*arguments, "--help"], env={"COLUMNS": "80"}).stdout
        assert [line for line in text.splitlines() if len(line) > 80] == [], arguments


def test_a_mistyped_command_is_told_what_is_near() -> None:
    result = run("stauts")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no such command 'stauts'; did you mean status?" in result.stderr
    assert "did you mean" not in run("frobnicate").stderr


def test_help_lists_commands_and_topics() -> None:
    text = run("help").stdout
    assert re.search(r"^  verify +Read everything and check it\.$", text, re.MULTILINE)
    assert re.search(r"^  architecture, .*format, .*threat-model, ", text, re.MULTILINE)


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"syckpt, version {syckpt.__version__}\n"


def test_a_reader_that_goes_away_is_no_error(root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "syckpt", "help", "format"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
