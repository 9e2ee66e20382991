"""Seconds that `syckpt log` takes in a repository of many commits, process start included; the bar is 0.5 s for 10,000.

    python tests/benchmarks/log.py [--commits 10000] [--rounds 5]

The repository is forged: documents as a training run writes them, without contents and without syncs.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from syckpt.objects import canonical, ids, nodes
from syckpt.objects.refs import RefRecord
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root

CONFIG = {
    "lr": 0.001,
    "batch_size": 64,
    "model": {"layers": 12, "width": 768, "name": "gpt"},
    "optimizer": {"name": "adamw", "betas": (0.9, 0.999), "eps": 1e-8},
}
SECONDS = ("stall_s", "durable_s", "hash_s", "encode_s", "write_s")
BYTES = ("staged_bytes", "deduplicated_bytes", "encoded_bytes", "written_bytes")
START_NS = 1_767_225_600 * 10**9


def forge(root: Path, commits: int) -> None:
    """Make a repository with so many commits on main."""
    repository = Repository.open_or_create(parse_root(root))
    repository.set_head("main")
    inside = root / ".syckpt"
    (inside / "objects").mkdir()
    (inside / "logs/refs/heads/main").mkdir(parents=True)
    parent: tuple[str, str] | None = None
    for number in range(commits + 1):
        previous = None if parent is None else parent[0]
        if number:
            parent = _commit(inside, repository.id, number, parent)
        record = RefRecord(
            ref="heads/main",
            number=number + 1,
            commit=None if parent is None else parent[0],
            commit_seal=None if parent is None else parent[1],
            previous=previous,
            generation=1,
            run="benchmark",
            reason="save" if number else "open",
            time_ns=START_NS + number,
        )
        (inside / repository.refs.key("heads/main", number + 1)).write_bytes(canonical.seal(record.to_body())[0])


def _commit(inside: Path, repository: str, number: int, parent: tuple[str, str] | None) -> tuple[str, str]:
    parts: dict[str, Any] = {"fingerprint": "bbc4374f", "repository": repository, "run": "benchmark", "generation": 1}
    commit = ids.new_commit_id(**parts, sequence=number, nonce=b"")
    body = {
        "kind": "commit",
        "version": 1,
        "id": commit,
        "parents": [] if parent is None else [list(parent)],
        "manifests": [[0, "0" * 64]],
        "world_size": 1,
        "branch": "main",
        "name": None,
        "step": 100 * number,
        "epoch": number // 100,
        "batch_idx": number % 100,
        "epoch_done": False,
        "entered": True,
        "metric": nodes.encode(2.5 - number / 12345),
        "message": "",
        "tags": [],
        "config": nodes.encode(CONFIG),
        "fingerprint": "bbc4374f",
        "created_ns": str(START_NS + number * 10**9),
        "writer": "benchmark",
        "run": ["benchmark", 1, number],
        "rng_exact": True,
        "stats": {**dict.fromkeys(SECONDS, number / 54321), **dict.fromkeys(BYTES, 303_000_000 + number), "ratio": 1.51},
    }
    data, seal = canonical.seal(body)
    (inside / f"objects/{commit}.json").write_bytes(data)
    content = inside / f"objects/{commit}"
    content.mkdir()
    for name in ("r00000.manifest", "r00000.locations.0001", "r00000.safetensors"):
        (content / name).touch()
    return commit, seal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        forge(Path(folder), arguments.commits)
        # The first round compiles the modules, as an installation does.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        command = [sys.executable, "-m", "syckpt", "-C", folder, "log"]
        seconds, cpu = [], []
        for _ in range(1 + arguments.rounds):
            began, used = time.perf_counter(), _children_s()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            seconds.append(time.perf_counter() - began)
            cpu.append(_children_s() - used)
            assert done.stdout.count("\n") == arguments.commits + 1
        del seconds[0], cpu[0]
    print(f"syckpt log, {arguments.commits} commits: median {statistics.median(seconds):.2f} s, CPU {statistics.median(cpu):.2f} s")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
