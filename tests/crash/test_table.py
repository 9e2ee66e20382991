"""The table of faults in the docs is made by running them, and says that syckpt loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import syckpt
from syckpt.testing.injection import no_mounts, no_strace

DOCS = Path(syckpt.__file__).parent / "docs/faults.md"


def sums(page: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith("| **all** |")]
    return line.split(" | ")[1:]


def test_the_page_says_that_syckpt_loses_nothing() -> None:
    first = sums(DOCS.read_text())[0]
    assert first.endswith("**lost: 0**")
    assert int(first.split()[0]) > 50


@pytest.mark.slow
@pytest.mark.skipif(bool(no_strace() or no_mounts()), reason=str(no_strace() or no_mounts()))
def test_the_table_can_be_made() -> None:
    script = Path(__file__).with_name("table.py")
    done = subprocess.run([sys.executable, str(script), "--most", "1"], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout)[0].endswith("**lost: 0**")
