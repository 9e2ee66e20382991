"""Kills a job of four ranks in the middle of an epoch, goes on with two, and proves from the disk that nothing was lost.

With --single instead: kills a training of one process three times, and proves its losses equal to those of a run never killed.
Exits with 1 if a proof fails. Started by ./launchers/quickstart, which makes the environment.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from proofs import PROOFS, SYCKPT, TIMEOUT_S, ProofFailed, check, cli, stored

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# The job of several ranks makes 41 steps and saves every 8, so it dies two steps behind a save.
RANKS, RANKS_AFTER, KILL_AT = 4, 2, 26

# The single process, mid-epoch in epochs 0, 1 and 2 of 42 steps, saves every 10: the second time it dies right after save() returned,
# with the save under way.
KILLS = (27, 70, 118)
STEPS = 126


def run(command: Sequence[str | Path], output: Path) -> tuple[int, str]:
    """Run a training with its standard error in a file; print and return what it printed, with its status before it."""
    started = time.monotonic()
    with output.open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT)
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.terminate()  # torchrun ends its ranks then.
            raise
    for line in printed.splitlines():
        print(f"    {line}")
    ended = "SIGKILL" if process.returncode == -signal.SIGKILL else f"exit {process.returncode}"
    print(f"    {ended} after {time.monotonic() - started:.1f} s", flush=True)
    return process.returncode, printed


def resumed_from(printed: str) -> tuple[str, int] | None:
    found = re.search(r"^resumed from (\S+) at step (\d+)", printed, re.MULTILINE)
    return (found[1], int(found[2])) if found else None


def show_log(folder: Path) -> None:
    print("\n$ syckpt log --graph", flush=True)
    subprocess.run([SYCKPT, "-C", folder, "log", "--graph"], check=True)
    print()


def prove_ranks(folder: Path) -> None:
    """The main job: four ranks, killed, and two that go on."""
    errors = folder / "torchrun.log"
    (folder / "samples").mkdir()

    def torchrun(ranks: int, *options: str) -> tuple[int, str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
        job = [ROOT / "examples" / "02_fsdp2.py", "--dir", folder, "--samples", folder / "samples"]
        return run([*launcher, *job, *options], errors)

    print(f"FSDP2 on {RANKS} ranks, all killed (SIGKILL) after step {KILL_AT} of 41", flush=True)
    status, _ = torchrun(RANKS, "--kill-at", str(KILL_AT))
    text = errors.read_text()
    check(status != 0 and "SIGKILL" in text, f"the job should have ended by SIGKILL, not with status {status}:\n{text[-4000:]}")

    print(f"    (its ranks are dead: so it should)\nthe same on {RANKS_AFTER} ranks", flush=True)
    status, printed = torchrun(RANKS_AFTER, "--commit-first")
    check(status == 0, f"the job should have ended with status 0, not {status}:\n{errors.read_text()[-4000:]}")
    check(resumed_from(printed) is not None, "the job should have resumed, not started again")

    print("\nproofs, each by a process that reads the repository only", flush=True)
    for proof in PROOFS:
        command = [sys.executable, ROOT / "launchers" / "proofs.py", folder, proof]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        check(done.returncode == 0, done.stderr.strip())
        for line in done.stdout.splitlines():
            print(f"    {line}", flush=True)
    show_log(folder)


def read_losses(path: Path) -> dict[int, list[str]]:
    """Map each step to the losses that it had, in hexadecimal: more than one if it was made again after a resume."""
    steps: dict[int, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        step, loss = line.split()
        steps[int(step)].append(loss)
    return dict(steps)


def compare(reference: dict[int, list[str]], killed: dict[int, list[str]]) -> int:
    """Check every loss of the killed run, and return how many steps it made more than once."""
    check(sorted(reference) == list(range(1, STEPS + 1)), f"the run never killed should have made steps 1 to {STEPS}")
    check(sorted(killed) == sorted(reference), "the killed run should have made the same steps")
    for step, losses in sorted(killed.items()):
        for loss in losses:
            check([loss] == reference[step], f"step {step}: loss {loss}, without a kill {reference[step][0]}")
    return sum(len(losses) - 1 for losses in killed.values())


def prove_single(folder: Path) -> None:
    """One process: three deaths change no loss."""
    errors = folder / "train.log"

    def train(name: str, *options: str) -> tuple[int, str]:
        job = [sys.executable, ROOT / "examples" / "01_quickstart.py", "--dir", folder / name, "--losses", folder / f"{name}.losses"]
        return run([*job, *options], errors)

    def finish(name: str) -> str:
        status, printed = train(name)
        check(status == 0, f"the training should have ended with status 0, not {status}:\n{errors.read_text()[-4000:]}")
        return printed

    print("a run never killed", flush=True)
    finish("reference")

    print("the same, killed three times in the middle of an epoch", flush=True)
    lines = []
    for kill_at, after in zip((None, *KILLS), (*KILLS, None), strict=True):
        if after is None:
            printed = finish("killed")
        else:
            status, printed = train("killed", "--kill-at", str(after))
            check(status == -signal.SIGKILL, f"the training should have been killed, but ended with status {status}")
        found = resumed_from(printed)
        if kill_at is None:
            check(found is None, "the first process should have had nothing to resume from")
            continue
        check(found is not None, f"after the kill at step {kill_at} the training should have resumed, not started again")
        assert found is not None
        check(0 < found[1] <= kill_at, f"resumed at step {found[1]}, but was killed at {kill_at}")
        lines.append(f"killed after step {kill_at:3}, resumed at {found[1]:3} from {found[0]}")

    repeated = compare(read_losses(folder / "reference.losses"), read_losses(folder / "killed.losses"))
    verified = cli(folder / "killed", "verify").strip()
    print("\nproofs")
    print(f"    losses   {STEPS} of {STEPS} equal (==, bit for bit); {repeated} steps were made again after a kill")
    for line in lines:
        print(f"    resume   {line}")
    print(f"    stored   {stored(folder / 'killed')}")
    print(f"    verify   {verified.splitlines()[-1] if verified else 'ok'}")
    show_log(folder / "killed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./launchers/quickstart", description=__doc__)
    parser.add_argument("--dir", type=Path, help="an empty folder to work in, kept afterwards (default: a temporary one)")
    parser.add_argument("--single", action="store_true", help="the proof for one process")
    args = parser.parse_args()
    prove = prove_single if args.single else prove_ranks
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
