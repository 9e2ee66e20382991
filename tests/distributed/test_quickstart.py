"""`./launchers/quickstart` as a user runs it, but for the environment that it makes; and that its proofs can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
PROOFS = [
    r"state    77 parameters and 154 moments equal in all 15\.2 MB:\n +\S+ by 4 ranks, \S+ by 2\n",
    r"samples  1285 of 1285 exactly once: \d+ up to the commit resumed, \d+ after it\n",
    r"stored   [\d.]+ MB for \d commits; full copies: [\d.]+ MB \([\d.]+ x\)\n",
    r"stall    \d+ ms a save\(\)",
]


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, LAUNCHERS / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_four_ranks_are_killed_two_go_on_and_four_proofs_hold(tmp_path: Path) -> None:
    done = run("quickstart.py", "--dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"resumed from \S+ at step (8|16|24): 4 -> 2 ranks\n", done.stdout)
    for proof in PROOFS:
        assert re.search(f"^    {proof}", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"\$ syckpt log --graph\n(?s:.*)resumed on 2 ranks\n(?s:.*)\nall proofs hold", done.stdout)

    record = tmp_path / "samples" / "rank1.txt"
    first, *rest = record.read_text().splitlines(keepends=True)
    for lines, found in (([first, first, *rest], "1293 samples, 1285 different ones"), (rest, "1277 samples, 1277 different ones")):
        record.write_text("".join(lines))
        failed = run("proofs.py", tmp_path, "samples")
        assert failed.returncode == 1
        assert f"{found}, of 1285" in failed.stderr

    resumed = re.search(r"(\S+) by 4 ranks", done.stdout)
    assert resumed is not None
    blob = tmp_path / ".syckpt" / "objects" / resumed[1] / "r00002.safetensors"
    damaged = bytearray(blob.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    blob.write_bytes(damaged)
    failed = run("proofs.py", tmp_path, "state")
    assert failed.returncode == 1
    assert failed.stderr.startswith("state: ")
    assert blob.name in failed.stderr
