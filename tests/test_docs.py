"""What the documents show can be typed, and what they point to is there."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "syckpt").glob("*.md"), *(ROOT / "syckpt" / "docs").glob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_EXAMPLE_LINES = 120


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_python_in_documents_parses_and_is_short(path: Path) -> None:
    for block in python_blocks(path):
        ast.parse(block)
        assert len(block.splitlines()) < MAX_EXAMPLE_LINES


def test_the_readme_shows_python() -> None:
    assert python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("path", EXAMPLES, ids=relative)
def test_an_example_parses_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) < MAX_EXAMPLE_LINES


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_to_local_files_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", link)]
    assert not [link for link in links if not (path.parent / link.partition("#")[0]).exists()]


def test_the_tutorial_runs_from_top_to_bottom_as_it_stands(tmp_path: Path) -> None:
    blocks = python_blocks(ROOT / "syckpt" / "docs" / "tutorial.md")
    assert len(blocks) >= 6
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(lr-high)  lr=0.005 epoch 4") == 1


def test_the_sweep_of_the_examples_goes_on_where_it_was_and_exports_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["03_sweep.py", "--dir", str(tmp_path), "--base-epochs", "1", *arguments])
        runpy.run_path(str(ROOT / "examples" / "03_sweep.py"), run_name="__main__")
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    try:
        first = run("--epochs", "1", "--rates", "0.1")
        both = run("--epochs", "2", "--rates", "0.1", "0.01")
    finally:
        torch.set_num_threads(threads)
    assert re.findall(r"^(\S+) +epoch (\d)", first, re.MULTILINE) == [("main", "0"), ("lr-0.1", "1")]
    assert re.findall(r"^(\S+) +epoch (\d)", both, re.MULTILINE) == [("lr-0.1", "2"), ("lr-0.01", "1"), ("lr-0.01", "2")]
    best = re.search(r"the best is (\S+) with an error of (\S+):", both)
    assert best is not None
    exported = torch.load(tmp_path / "deploy" / "best.ckpt", weights_only=True)
    assert (exported["syckpt"]["branch"], f"{exported['syckpt']['metric']:.3f}") == (best[1], best[2])
