"""Processes that save and load, to be harmed: a server, run as a script, that forks one for every order it gets on its standard input.

Orders and answers are lines of JSON. `{"do": "start", "system", "action", "directory", ...}` forks a process, which waits, and answers
`{"pid"}`; `{"do": "go"}` lets it run, and answers `{"status", "result"}`. So a tracer can be attached before anything happens, and torch
is imported once.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import syckpt
from syckpt import CheckpointManager
from syckpt.errors import SyckptError
from syckpt.repo import branches, history
from syckpt.repo.collection import collect
from syckpt.repo.repacking import repack
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Retention, retain
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.scenes import leftovers, register, same, state_at, stranger

SIDE = 50
"""The step of the first commit beside `main`."""

BIG = 3_000_000  # elements: so that a blob takes more than one write


def random_tensors(step: int, *, big: bool = False) -> dict[str, torch.Tensor]:
    """Return what does not compress, so that no write is empty: a tensor that is new at each step, and one that stays as it is."""
    return {
        "noise": torch.randn(BIG if big else 60_000, generator=torch.Generator().manual_seed(step)),
        "still": torch.randn(20_000, generator=torch.Generator().manual_seed(0)),
    }


def plain_state(step: int, *, big: bool = False) -> dict[str, Any]:
    """Return a state that every system can hold."""
    net = {name: value for name, value in state_at(step)["net"].items() if name != "tied"}
    return {"net": {**net, **random_tensors(step, big=big)}, "count": step}


def which(found: Any) -> dict[str, Any]:
    """Return which step a state is, and whether exactly."""
    step = found["count"]
    return {
        "step": step,
        "exact": type(step) is int and 0 <= step < 1000 and same(found, plain_state(step, big=len(found["net"]["noise"]) == BIG)),
    }


# -- syckpt ----------------------------------------------------------------------------------------------------------------


def _manager(directory: str, *, big: bool = False, **settings: Any) -> CheckpointManager:
    ckpt = CheckpointManager(directory, rng=False, save_on_exit=False, **settings)
    others = {name: torch.zeros_like(tensor) for name, tensor in random_tensors(0, big=big).items()}
    register(ckpt, {"net": {**stranger()["net"], **others}, "count": -1})
    return ckpt


def _save(ckpt: CheckpointManager, step: int, *, big: bool = False) -> str | None:
    register(ckpt, {"net": {**state_at(step)["net"], **random_tensors(step, big=big)}, "count": step})
    try:
        return str(ckpt.save(wait=True))
    except SyckptError as exc:
        return f"{type(exc).__name__}: {exc}"


def syckpt_save(directory: str, step: int) -> Any:
    """Save, and again under the next number until a second save succeeds; return what came of each."""
    outcomes: list[str | None] = []
    with _manager(directory) as ckpt:
        while len(outcomes) < 2 or (outcomes[-1] is not None and "Error" in outcomes[-1] and len(outcomes) < 4):
            outcomes.append(_save(ckpt, step + len(outcomes)))
    return outcomes


def syckpt_save_once(directory: str, step: int, *, big: bool = False, file_nbytes: int | None = None) -> Any:
    ckpt = _manager(directory, big=big)
    if file_nbytes is not None:
        # The writer alone: for the trainer, staging memory counts as a file.
        ckpt.prewarm()
        (writer,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        resource.prlimit(int(writer), resource.RLIMIT_FSIZE, (file_nbytes, file_nbytes))
    outcome = _save(ckpt, step, big=big)
    ckpt.close()
    return outcome


def _exact(found: Any) -> dict[str, Any]:
    net = {name: value for name, value in found["net"].items() if name != "tied"}
    return which({"net": net, "count": found["count"]})


def syckpt_load(directory: str) -> Any:
    return _exact(syckpt.load(directory))


def syckpt_resume(directory: str, *, big: bool = False) -> Any:
    """Resume as a script does: past a damaged commit, which is told."""
    told: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("syckpt").addHandler(handler)
    with _manager(directory, big=big) as ckpt:
        ckpt.restore()
        return {**_exact({"net": ckpt.net, "count": ckpt.count}), "told": told}


def syckpt_after(directory: str, step: int) -> Any:
    """Look at everything that is there, then resume and save; return what was found."""
    repository = Repository.open(parse_root(directory))
    commits = [_exact(syckpt.load(directory, commit.id)) for commit in history.log(repository) if not commit.dropped]
    before = verify(repository).errors
    with _manager(directory) as ckpt:
        saved = _save(ckpt, step)
    after = Repository.open(parse_root(directory))
    return {
        "commits": commits,
        "before": before,
        "saved": saved,
        "tip": _exact(syckpt.load(directory)),
        "errors": verify(after).errors,
        "leftovers": leftovers(Path(directory)),
    }


def syckpt_grow(directory: str, steps: int) -> Any:
    """Save several commits, of which each holds bytes of the first."""
    with _manager(directory) as ckpt:
        return [_save(ckpt, step) for step in range(1, steps + 1)]


def syckpt_save_and_keep_one(directory: str, step: int) -> Any:
    """Save once, with retention behind it in the writer."""
    with _manager(directory, max_to_keep=1) as ckpt:
        return _save(ckpt, step)


def syckpt_clean(directory: str, *, later_s: float = 0.0, file_nbytes: int | None = None) -> Any:
    """Keep only the newest commit, and give back all other bytes."""
    syckpt_retain(directory, file_nbytes=file_nbytes)
    syckpt_repack(directory)
    return syckpt_gc(directory, later_s=later_s)


def syckpt_retain(directory: str, *, file_nbytes: int | None = None) -> Any:
    _limit(file_nbytes)
    return [commit.id for commit in retain(Repository.open(parse_root(directory)), "main", Retention(last=1)).dropped]


def syckpt_repack(directory: str, *, file_nbytes: int | None = None) -> Any:
    _limit(file_nbytes)
    return repack(Repository.open(parse_root(directory)), dead_share=0.0).moved_nbytes


def syckpt_gc(directory: str, *, later_s: float = 0.0, file_nbytes: int | None = None) -> Any:
    _limit(file_nbytes)
    return [commit.id for commit in collect(Repository.open(parse_root(directory)), now_s=time.time() + later_s).unreachable]


def syckpt_desert(directory: str) -> Any:
    """Leave two commits that nothing but the reflog leads to, of a branch that is gone."""
    repository = Repository.open(parse_root(directory))
    (tip, *_) = history.log(repository, "main")
    branches.create(repository, "side", tip, run="test")
    with _manager(directory, branch="side") as ckpt:
        saved = [_save(ckpt, step) for step in (SIDE, SIDE + 1)]
    branches.delete(repository, "side", run="test")
    return saved


def syckpt_verify(directory: str) -> Any:
    report = verify(Repository.open(parse_root(directory)), mark=True)
    return {"errors": report.errors, "damaged": report.damaged}


# -- the others, as their documentation shows them -------------------------------------------------------------------------


def torch_save(directory: str, step: int) -> Any:
    torch.save(plain_state(step), Path(directory, "checkpoint.pt"))


def torch_load(directory: str) -> Any:
    return which(torch.load(Path(directory, "checkpoint.pt"), weights_only=True))


def renamed_save(directory: str, step: int) -> Any:
    torch.save(plain_state(step), Path(directory, "checkpoint.tmp"))
    os.replace(Path(directory, "checkpoint.tmp"), Path(directory, "checkpoint.pt"))


def dcp_save(directory: str, step: int) -> Any:
    dcp.save(plain_state(step), checkpoint_id=Path(directory, f"step_{step:04d}"), no_dist=True)


def dcp_load(directory: str) -> Any:
    newest = max(path for path in Path(directory).iterdir() if path.name.startswith("step_"))
    state = plain_state(0)
    dcp.load(state, checkpoint_id=newest, no_dist=True)
    return which(state)


ACTIONS: dict[str, Callable[..., Any]] = {
    "syckpt save": syckpt_save,
    "syckpt save once": syckpt_save_once,
    "syckpt load": syckpt_load,
    "syckpt resume": syckpt_resume,
    "syckpt after": syckpt_after,
    "syckpt grow": syckpt_grow,
    "syckpt clean": syckpt_clean,
    "syckpt retain": syckpt_retain,
    "syckpt repack": syckpt_repack,
    "syckpt gc": syckpt_gc,
    "syckpt desert": syckpt_desert,
    "syckpt save and keep one": syckpt_save_and_keep_one,
    "syckpt verify": syckpt_verify,
    "torch.save save once": torch_save,
    "torch.save load": torch_load,
    "torch.save and rename save once": renamed_save,
    "torch.save and rename load": torch_load,
    "DCP save once": dcp_save,
    "DCP load": dcp_load,
}


def _limit(file_nbytes: int | None) -> None:
    """Let no file of this process grow beyond that; Python ignores the signal that says so, and the system call fails."""
    if file_nbytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_nbytes, file_nbytes))


def _child(order: dict[str, Any], gate: int, answer: int) -> None:
    os.read(gate, 1)
    if order["system"] != "syckpt":
        _limit(order.pop("file_nbytes", None))
    action = ACTIONS[f"{order.pop('system')} {order.pop('action')}"]
    try:
        result = {"value": action(**order)}
    except BaseException as exc:  # noqa: BLE001 - the others raise whatever they like (DCP no Exception); all of it is an answer
        result = {"error": f"{type(exc).__name__}: {exc}"[:500]}
    os.write(answer, json.dumps(result).encode())


def main() -> None:
    # In the others' writers, too: a warning is no answer.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    gate = answer = child = 0
    for line in sys.stdin:
        order = json.loads(line)
        if order.pop("do") == "start":
            (inner_gate, gate), (answer, inner_answer) = os.pipe(), os.pipe()
            child = os.fork()
            if child == 0:
                os.close(gate)
                try:
                    _child(order, inner_gate, inner_answer)
                finally:
                    os._exit(0)
            os.close(inner_gate)
            os.close(inner_answer)
            print(json.dumps({"pid": child}), flush=True)
            continue
        os.write(gate, b"x")
        _, status = os.waitpid(child, 0)
        os.set_blocking(answer, False)
        try:
            text = os.read(answer, 1 << 20)  # less than a pipe holds
        except BlockingIOError:
            text = b""
        os.close(gate)
        os.close(answer)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "result": json.loads(text) if text else None}), flush=True)


if __name__ == "__main__":
    main()
