"""What the documents show can be typed, and what they point to is there."""

from __future__ import annotations

import ast
import re
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
