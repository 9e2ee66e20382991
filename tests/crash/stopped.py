"""A writer that is stopped before its n-th mutation of a save, and continued after a newer incarnation has saved, cleaned and saved again.

    python stopped.py DIRECTORY FIRST STEP

does so for n = FIRST, FIRST + STEP, ... until a save makes fewer mutations, and prints one line of JSON for each: what the stopped one
was told, and what is wrong afterwards. Torch-free; real processes, real signals, a real file system.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from crowd import KEEP, Committer, expected, load

from syckpt.errors import SyckptError
from syckpt.repo import collection
from syckpt.repo.collection import collect
from syckpt.repo.repacking import repack
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Keeper, retain
from syckpt.repo.survey import Survey
from syckpt.repo.transaction import refuse_if_fenced
from syckpt.repo.verify import verify
from syckpt.stores.base import StoreSpec, parse_root
from syckpt.stores.faults import FaultPlan, faulty

NUMBER = 3
"""A committer that keeps the last 3."""


def save(spec: StoreSpec, arm: Path, number: int, answer: int) -> None:
    """Be the writer that is stopped: open, save twice, then once more under the plan, and apply retention behind it."""
    desk = Committer(spec, NUMBER)
    for _ in range(4):
        desk.save()
    arm.with_suffix(".new").write_text(str(number))
    arm.with_suffix(".new").rename(arm)
    try:
        told = {"saved": desk.save(tags=("mine",)).id}
        Keeper(desk.repository, desk.branch, KEEP).apply(guard=lambda: refuse_if_fenced(desk.repository, desk.hold))
    except SyckptError as exc:
        told = {"error": type(exc).__name__, "text": str(exc)}
    os.write(answer, json.dumps(told).encode())


def fork(work: Any, *arguments: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work(*arguments)
        status = 0
    finally:
        os._exit(status)


def newer(spec: StoreSpec) -> None:
    """Be the newer incarnation: begin, save, retain, gc and repack, and save again."""
    desk = Committer(spec, NUMBER)
    for _ in range(2):
        desk.save()
    retain(desk.repository, desk.branch, KEEP)
    collection.REFLOG_S = 0.0
    collect(desk.repository)
    repack(desk.repository, dead_share=0.0)
    desk.save()
    desk.close()


def scene(base: Path, directory: Path, number: int) -> dict[str, Any] | None:
    """Play one; return None where the save was through before."""
    shutil.copytree(base, directory / "run")
    arm, (answers, answer) = directory / "arm", os.pipe()
    spec = parse_root(directory / "run")
    old = fork(save, faulty(spec.path, FaultPlan(action="stop", arm=str(arm))), arm, number, answer)
    os.close(answer)
    _, status = os.waitpid(old, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        os.close(answers)
        return None
    assert os.waitstatus_to_exitcode(os.waitpid(fork(newer, spec), 0)[1]) == 0
    repository = Repository.open(spec)
    tip = repository.refs.head(f"heads/b{NUMBER}")
    os.kill(old, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(old, 0)[1]) == 0
    with os.fdopen(answers) as file:
        told = json.loads(file.read())
    wrong = []
    if repository.refs.head(f"heads/b{NUMBER}") != tip:
        wrong.append("the branch was moved")
    wrong += verify(repository).errors
    recorded = Survey(repository).look().recorded
    if told.get("saved", "") not in {*recorded, ""}:
        wrong.append(f"{told} is not in the records")
    for commit_id in recorded:
        commit = repository.read_commit(commit_id)
        if not commit.dropped and load(repository, commit) != expected(commit):
            wrong.append(f"{commit_id}: wrong values")
    left = repository.store.list("intents/")
    left += [key for key in repository.store.list("objects/") if key.removeprefix("objects/")[:25] not in recorded]
    left += [f"staging/{name}" for name in os.listdir(Path(spec.path) / "staging")]
    published = repository.refs.exists("tags/mine")
    desk = Committer(spec, NUMBER)
    made = desk.save()
    desk.close()
    if load(repository, made) != expected(made):
        wrong.append("the next save is wrong")
    shutil.rmtree(directory)
    return {"number": number, "told": told, "published": published, "wrong": wrong, "left": left}


def main(directory: str, first: str, step: str) -> None:
    """Play the scenes and print what came of each."""
    root = Path(directory)
    base = root / "base"
    base.mkdir(parents=True)
    Repository.open_or_create(parse_root(base))
    trunk = fork(lambda: Committer(parse_root(base), 999, branch="main").save())
    assert os.waitstatus_to_exitcode(os.waitpid(trunk, 0)[1]) == 0
    number = int(first)
    while True:
        one = root / str(number)
        one.mkdir()
        found = scene(base, one, number)
        if found is None:
            return
        print(json.dumps(found), flush=True)
        number += int(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
