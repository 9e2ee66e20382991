"""Runs examples/01_quickstart.py twice, once undisturbed and once killed three times, and proves the losses equal.

Exits with 1 if a proof fails. Started by ./launchers/quickstart, which makes the environment.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "01_quickstart.py"
SYCKPT = Path(sys.executable).parent / "syckpt"
# Mid-epoch in epochs 0, 1 and 2 of 42 steps, saves every 10: the second dies right after save() returned, with the save under way.
KILLS = (27, 70, 118)
STEPS = 126
TIMEOUT_S = 300


class ProofFailed(Exception):
    """Something that the quickstart claims did not hold."""


def check(holds: bool, claim: str) -> None:
    if not holds:
        raise ProofFailed(claim)


def train(folder: Path, losses: Path, *, kill_at: int | None = None) -> str:
    """Run the example in a process of its own and return what it printed."""
    command = [sys.executable, str(EXAMPLE), "--dir", str(folder), "--losses", str(losses)]
    if kill_at is not None:
        command += ["--kill-at", str(kill_at)]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    for line in done.stdout.splitlines():
        print(f"    {line}")
    ended = "SIGKILL" if done.returncode == -signal.SIGKILL else f"exit {done.returncode}"
    print(f"    {ended} after {time.monotonic() - started:.1f} s", flush=True)
    expected = 0 if kill_at is None else -signal.SIGKILL
    check(done.returncode == expected, f"the training should have ended with status {expected}, not {done.returncode}")
    return done.stdout


def read_losses(path: Path) -> dict[int, list[str]]:
    """Map each step to the losses that it had, in hexadecimal: more than one if it was made again after a resume."""
    steps: dict[int, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        step, loss = line.split()
        steps[int(step)].append(loss)
    return dict(steps)


def syckpt(folder: Path, *arguments: str) -> str:
    done = subprocess.run([SYCKPT, "-C", folder, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    check(done.returncode == 0, f"`syckpt {' '.join(arguments)}` ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def compare(reference: dict[int, list[str]], killed: dict[int, list[str]]) -> int:
    """Check every loss of the killed run, and return how many steps it made more than once."""
    check(sorted(reference) == list(range(1, STEPS + 1)), f"the run never killed should have made steps 1 to {STEPS}")
    check(sorted(killed) == sorted(reference), "the killed run should have made the same steps")
    for step, losses in sorted(killed.items()):
        for loss in losses:
            check([loss] == reference[step], f"step {step}: loss {loss}, without a kill {reference[step][0]}")
    return sum(len(losses) - 1 for losses in killed.values())


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def describe_storage(folder: Path) -> str:
    commits = json.loads(syckpt(folder, "log", "--json"))
    stored = sum(path.stat().st_size for path in (folder / ".syckpt").rglob("*") if path.is_file())
    copies = [(commit.get("stats") or {}).get("staged_bytes") for commit in commits]
    text = f"{len(commits)} commits in {megabytes(stored)} of disk"
    if copies and all(copies):
        full = sum(copies)
        text += f"; {len(commits)} full copies would be {megabytes(full)} ({full / stored:.2f} times as much)"
    return text


def prove(folder: Path) -> None:
    print("a run never killed", flush=True)
    train(folder / "reference", folder / "reference.losses")

    print("the same, killed three times in the middle of an epoch", flush=True)
    resumed = []
    for i, kill_at in enumerate((*KILLS, None)):
        output = train(folder / "killed", folder / "killed.losses", kill_at=kill_at)
        found = re.search(r"^resumed from (\S+) at step (\d+)$", output, re.MULTILINE)
        if i == 0:
            check(found is None, "the first process should have had nothing to resume from")
            continue
        check(found is not None, f"after the kill at step {KILLS[i - 1]} the training should have resumed, not started again")
        assert found is not None
        commit, step = found[1], int(found[2])
        check(0 < step <= KILLS[i - 1], f"resumed at step {step}, but was killed at {KILLS[i - 1]}")
        resumed.append(f"killed after step {KILLS[i - 1]:3}, resumed from {commit} at step {step}")

    repeated = compare(read_losses(folder / "reference.losses"), read_losses(folder / "killed.losses"))
    verified = syckpt(folder / "killed", "verify").strip()

    print("\nproofs")
    print(f"    losses   {STEPS} of {STEPS} equal (==, bit for bit); {repeated} of the steps were made again after a kill, equal too")
    for line in resumed:
        print(f"    resume   {line}")
    print(f"    stored   {describe_storage(folder / 'killed')}")
    print(f"    verify   {verified.splitlines()[-1] if verified else 'ok'}")
    print(f"\n$ syckpt log\n{syckpt(folder / 'killed', 'log')}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./launchers/quickstart", description=__doc__)
    parser.add_argument("--dir", type=Path, help="an empty folder to work in, kept afterwards (default: a temporary one)")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        if args.dir is None:
            with tempfile.TemporaryDirectory(prefix="syckpt-quickstart-") as folder:
                prove(Path(folder))
        else:
            folder = args.dir.resolve()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                parser.error(f"{folder} is not empty; the proof needs to start from nothing")
            prove(folder)
    except (ProofFailed, subprocess.TimeoutExpired) as error:
        print(f"\nPROOF FAILED: {error}", file=sys.stderr)
        return 1
    print(f"all proofs hold ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
