"""What ./launchers/quickstart claims of its job of several ranks, each computed from what is on the disk alone.

    python launchers/proofs.py FOLDER state|samples|stored|stall

Started once for each proof, as a plain process beside the job: no torchrun, no ranks, no manager. Prints one line, or says why the proof
fails and exits with 1. FOLDER holds the repository and samples/, which the ranks of the job wrote while they trained.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import syckpt

SYCKPT = Path(sys.executable).parent / "syckpt"
TIMEOUT_S = 300
FIRST = "-"  # What the ranks of a job that resumed nothing write for the commit that they resumed.


class ProofFailed(Exception):
    """Something that the quickstart claims did not hold."""


def check(holds: bool, claim: str) -> None:
    if not holds:
        raise ProofFailed(claim)


def cli(folder: Path, *arguments: str) -> str:
    done = subprocess.run([SYCKPT, "-C", folder, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    check(done.returncode == 0, f"`syckpt {' '.join(arguments)}` ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def log(folder: Path) -> list[dict[str, Any]]:
    """Return the commits, oldest first."""
    commits: list[dict[str, Any]] = json.loads(cli(folder, "log", "--json"))
    return commits[::-1]


def resumption(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the commit that the job of fewer ranks resumed, and the one that it made before its first step."""
    commits = log(folder)
    made = next((commit for commit in commits if commit["world_size"] != commits[0]["world_size"]), None)
    check(made is not None, "no commit was made by another number of ranks than the first one")
    assert made is not None
    resumed = next(commit for commit in commits if commit["id"] in made["parents"])
    check(made["step"] == resumed["step"], f"the first commit after the resume is of step {made['step']}, not {resumed['step']}")
    return resumed, made


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield everything in nested mappings and sequences, by path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            yield from leaves(inner, f"{path}/{position}")
    else:
        yield path, value


def state(folder: Path) -> str:
    """Parameters and moments of the two commits are equal in every bit, and so is the rest of the optimizer's state."""
    import torch

    before, after = resumption(folder)
    read = [syckpt.load(folder, commit["id"], items=["model", "optimizer"]) for commit in (before, after)]
    old, new = (dict(leaves(values, "")) for values in read)
    check(old.keys() == new.keys(), f"only one commit has {sorted(old.keys() ^ new.keys())[:5]}")
    counts = {"model": 0, "optimizer": 0}
    nbytes = 0
    for path, value in old.items():
        other = new[path]
        if not isinstance(value, torch.Tensor):
            check(type(value) is type(other) and value == other, f"{path}: {value!r} before the resume, {other!r} after it")
            continue
        check((value.dtype, value.shape) == (other.dtype, other.shape), f"{path}: {other.dtype} {tuple(other.shape)} after the resume")
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other)]
        check(torch.equal(*bits), f"{path}: other bits after the resume than before it")
        counts[path.split("/")[1]] += 1
        nbytes += bits[0].numel()
    moments = sum(path.endswith(("/exp_avg", "/exp_avg_sq")) for path in old)
    check(counts["model"] > 0 and moments == 2 * counts["model"], f"{counts['model']} parameters, but {moments} moments")
    return (
        f"{counts['model']} parameters and {moments} moments equal in all {megabytes(nbytes)}:\n"
        f"         {before['id']} by {before['world_size']} ranks, {after['id']} by {after['world_size']}"
    )


def samples(folder: Path) -> str:
    """Every sample of the epoch was consumed once: before the commit that was resumed, or after it."""
    commits = {commit["id"]: commit for commit in log(folder)}
    last = next(reversed(commits.values()))
    position = syckpt.load(folder, last["id"], items=["sampler"])["sampler"]
    resumed, _ = resumption(folder)
    counts: dict[str, list[int]] = {FIRST: [], resumed["id"]: []}
    again = 0
    for path in sorted((folder / "samples").glob("rank*.txt")):
        for line in path.read_text().splitlines():
            job, step, epoch, *taken = line.split()
            check(job in counts and epoch == "0", f"{path}: a job of another commit or epoch: {line}")
            if job == FIRST and int(step) > resumed["step"]:
                again += len(taken)  # No commit holds what was learnt of them: the resumed job has to take them again.
            else:
                counts[job] += map(int, taken)
    total = sum(map(len, counts.values()))
    consumed = sorted(sample for part in counts.values() for sample in part)
    check(consumed == list(range(position["length"])), f"{total} samples, {len(set(consumed))} different ones, of {position['length']}")
    check(position["consumed"] == total and last["epoch_done"], f"the last commit counts {position['consumed']} samples, not {total}")
    old, new = (len(part) for part in counts.values())
    return (
        f"{total} of {position['length']} exactly once: {old} up to the commit resumed, {new} after it\n"
        f"         ({again} that it did not hold were taken again)"
    )


def stored(folder: Path) -> str:
    """The repository is smaller than as many full copies."""
    commits = log(folder)
    disk = sum(path.stat().st_size for path in (folder / ".syckpt").rglob("*") if path.is_file())
    copies = [(commit["stats"] or {}).get("staged_bytes", 0) for commit in commits]
    check(all(copies), "a commit does not say how large the state was")
    full = sum(copies)
    check(disk < full, f"{megabytes(disk)} on the disk, more than {megabytes(full)} for {len(commits)} full copies")
    return f"{megabytes(disk)} for {len(commits)} commits; full copies: {megabytes(full)} ({full / disk:.2f} x)"


def stall(folder: Path) -> str:
    """Every save says for how long it held the training up."""
    figures = [commit["stats"] or {} for commit in log(folder)]
    check(all("stall_s" in stats and "copy_s" in stats for stats in figures), "a commit does not say how long its save() took")
    whole, copying = ([1e3 * stats[key] for stats in figures] for key in ("stall_s", "copy_s"))
    median, longest, copy = statistics.median(whole), max(whole), statistics.median(copying)
    return f"{median:.0f} ms a save(), {copy:.0f} ms of it copying (medians); at most {longest:.0f} ms"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


PROOFS = {proof.__name__: proof for proof in (state, samples, stored, stall)}


def main() -> int:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    try:
        print(f"{name:9}{PROOFS[name](folder)}")
    except (ProofFailed, syckpt.SyckptError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
