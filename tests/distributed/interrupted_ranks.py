"""More of what the ranks of test_failures.py do, two of them: processes that are stopped, or killed, in the middle of a save.

Each case has managers of its own, and, where a writer is stopped, a thread of its own, so that deadlines run out side by side. Threads
tell each other by bells, not by the rendezvous store: torch makes a process's requests to that one at a time, and one that waits is one.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import failure_ranks as base
from failure_ranks import PATIENCE_S, Scene, durable, save, writer

from syckpt import CheckpointManager
from syckpt.repo import receipts
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import open_branch, recover
from syckpt.stores.base import parse_root

# Where a writer is stopped: the rank, the operation, and what its key begins or ends with (the commit's id in the place of `*`).
POINTS: dict[str, tuple[int, str, str]] = {
    "rank 0 before its intent": (0, "link", "intents/*.json"),
    "rank 0 before its bytes": (0, "link", "objects/*/r00000.safetensors"),
    "rank 0 before the commit": (0, "link", "objects/*.json"),
    "rank 0 before the ref record": (0, "link", "logs/refs/heads/main/"),
    "rank 0 before its verdict": (0, "link", "receipts/main/*/verdict.json"),
    "rank 1 before its bytes": (1, "link", "objects/*/r00001.safetensors"),
    "rank 1 before its receipt": (1, "link", "receipts/main/*/r00001.json"),
    "rank 1 before it knows the verdict": (1, "unlink", "receipts/main/*/r00001.json"),
}


GOES_ON, DIES = ", which goes on", ", which dies"


class Bells:
    """One bell for each rank, by which the other one calls it."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._fds = []
        for number in (0, 1):
            path = directory / f"bell{number}"
            if not path.exists():
                os.mkfifo(path)
            self._fds.append(os.open(path, os.O_RDWR))
        self._rank = rank

    def meet(self) -> None:
        """Go on when both ranks are here. Raises: AssertionError."""
        os.write(self._fds[1 - self._rank], b".")
        assert select.select([self._fds[self._rank]], [], [], PATIENCE_S)[0], "the other rank does not come"
        os.read(self._fds[self._rank], 1)


def tip(scene: Scene) -> str | None:
    head = Repository.open(parse_root(scene.root)).refs.head("heads/main")
    return head and head.commit


def take_over(scene: Scene) -> None:
    """Be a newer incarnation of the job, as far as the repository knows."""
    repository = Repository.open(parse_root(scene.root))
    recover(repository, open_branch(repository, "main", run="a newer one", expected=tip(scene)))
    receipts.discard(repository, "main")


def await_stop(pid: int) -> None:
    """Wait until a child is stopped. Raises: AssertionError if it ends instead."""
    told = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert told is not None
    assert told.si_code == os.CLD_STOPPED, "the writer has ended"


class StoppedWriter:
    """One point of a save at which a writer is stopped, and goes on in time, too late, and when the branch is another's."""

    def __init__(self, directory: Path, point: str, rank: int, *, fate: str = "") -> None:
        self.victim, self.operation, self.key = POINTS[point]
        self.scene = Scene(directory, point + fate, rank)
        self.mine = rank == self.victim
        self.trace = self.scene.directory / f"trace{rank}"
        arm = str(self.scene.directory / f"arm{rank}")
        spec = self.scene.plan(action="stop", only=self.operation, arm=arm, trace=str(self.trace)) if self.mine else None
        if rank == 0:
            self.bells = Bells(self.scene.directory, rank)
        self.scene.meet("there are bells")
        if rank == 1:
            self.bells = Bells(self.scene.directory, rank)
        # Who goes on may take its time: the others of its kind are still to be stopped.
        self.ckpt = self.scene.manager(spec) if fate == GOES_ON else base.with_hasty_writers(self.scene, spec)
        self.scene.note("base", lambda: durable(self.ckpt, 0))
        if self.mine:
            self.scene.arm(0)
        self.scene.note("second", lambda: durable(self.ckpt, 1))
        self.scene.meet("there is a base")

    def play(self) -> None:
        self.number = self._number() if self.mine else 0
        note = self.scene.note
        pending = self._stopped(2)
        self._go_on()
        note("in time", lambda: pending.result(PATIENCE_S).id)

        pending = self._stopped(3)
        note("too late", lambda: pending.result().id)
        if not self.mine:
            note("given up", lambda: pending.result(PATIENCE_S).id)  # by its writer, too
        note("tip", lambda: tip(self.scene))
        self.bells.meet()
        self._go_on()
        note("became", lambda: pending.result(PATIENCE_S).id)
        for attempt in range(3):
            self.bells.meet()
            note(f"attempt {attempt}", lambda: durable(self.ckpt, 4))
        self.bells.meet()

        pending = self._stopped(5)
        self.scene.met["id"] = pending.id
        if self.scene.rank == 0:
            take_over(self.scene)
        self.bells.meet()
        self._go_on()
        note("fenced", lambda: pending.result(PATIENCE_S).id)
        self.bells.meet()
        note("fenced tip", lambda: tip(self.scene))
        note("heard", lambda: durable(self.ckpt, 6))
        note("again", lambda: durable(self.ckpt, 6))
        base.quietly(self.ckpt)

    def _number(self) -> int:
        """Return which of the operations of the last save is the point."""
        commit = self.scene.met["second"]
        wanted = self.key.replace("*", commit)
        lines = base.traced(self.trace)
        return [int(line.split()[0]) for line in lines if line.split()[2].startswith(wanted)][-1]  # a staged file is unlinked before

    def _stopped(self, step: int) -> Any:
        """Save; return when the victim is stopped."""
        if self.mine:
            self.scene.arm(self.number)
        self.bells.meet()
        pending = save(self.ckpt, step)
        assert pending is not None
        if self.mine:
            await_stop(writer(self.ckpt))
            line = self.trace.read_text().splitlines()[-1]
            assert line.split()[2].startswith(self.key.replace("*", pending.id)), line
        self.bells.meet()
        return pending

    def _go_on(self) -> None:
        if self.mine:
            os.kill(writer(self.ckpt), signal.SIGCONT)


def stop(rank: int, directory: str) -> None:
    stop_writers(rank, directory)
    stop_trainers(rank, directory)


def stop_writers(rank: int, directory: str) -> None:
    cases = [StoppedWriter(Path(directory), point, rank) for point in POINTS]
    threads = [threading.Thread(target=case.scene.note, args=("scenario", case.play)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def stop_trainers(rank: int, directory: str) -> None:
    """Stop a trainer between the agreement on a save and the hand-over to its writer; the other rank lets it go on."""
    for victim in (0, 1):
        for when in ("in time", "too late", "fenced"):
            scene = Scene(Path(directory), f"the trainer of rank {victim}, {when}", rank)
            scene.note("scenario", lambda scene=scene, victim=victim, when=when: stop_trainer(scene, victim, when))  # type: ignore[misc]
            scene.sign(f"left/{rank}", scene.met["scenario"])
            scene.await_sign(f"left/{1 - rank}")


def stop_trainer(scene: Scene, victim: int, when: str) -> None:
    ckpt = base.with_hasty_writers(scene)
    scene.note("base", lambda: durable(ckpt, 0))
    scene.meet("there is a base")
    if scene.rank == victim:
        submit = ckpt._saver.submit

        def stop_first(*args: Any, **options: Any) -> Any:
            ckpt._saver.submit = submit  # type: ignore[method-assign]
            scene.sign("pid", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
            return submit(*args, **options)

        ckpt._saver.submit = stop_first  # type: ignore[method-assign]
        scene.note("save", lambda: durable(ckpt, 1))
    else:
        pending = save(ckpt, 1)
        assert pending is not None
        pid = int(scene.await_sign("pid"))
        try:
            base.await_state(pid, "T")
            if when == "too late":
                scene.note("save", lambda: pending.result().id)
                scene.note("tip", lambda: tip(scene))
            elif when == "fenced":
                take_over(scene)
        finally:
            os.kill(pid, signal.SIGCONT)
        if when != "too late":
            scene.note("save", lambda: pending.result(PATIENCE_S).id)
    scene.meet("went on")
    scene.note("heard", lambda: durable(ckpt, 2))
    scene.note("next", lambda: durable(ckpt, 2))
    base.quietly(ckpt)


def kill_trainer(rank: int, directory: str, victim: int) -> None:
    """Kill a trainer while its writers are stopped, one at each point, and before it hands over a further save.

    Then some of these writers go on, and the others are killed too. The other rank hears of each save.
    """
    points = [point for point, (whose, _, _) in POINTS.items() if whose == victim]
    cases = [StoppedWriter(Path(directory), point, rank, fate=fate) for fate in (GOES_ON, DIES) for point in points]
    last = Scene(Path(directory), "before the hand-over", rank)
    ckpt = base.with_hasty_writers(last)
    last.note("base", lambda: durable(ckpt, 0))
    handed: list[tuple[Scene, CheckpointManager, Any]] = []
    for case in cases:
        case.number = case._number() if case.mine else 0
        handed.append((case.scene, case.ckpt, case._stopped(2)))
        if case.mine:
            case.scene.sign("writer", writer(case.ckpt))
    if rank == victim:
        last.sign("pid", os.getpid())
        ckpt._saver.submit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    handed.append((last, ckpt, save(ckpt, 1)))
    base.await_state(int(last.await_sign("pid")), "Z")
    for case in cases:
        fate = signal.SIGCONT if case.scene.name.endswith(GOES_ON) else signal.SIGKILL
        os.kill(int(case.scene.await_sign("writer")), fate)
    threads = [threading.Thread(target=each[0].note, args=("scenario", partial(hear, *each))) for each in handed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hear(scene: Scene, ckpt: CheckpointManager, pending: Any) -> None:
    scene.met["id"] = pending.id
    scene.note("save", lambda: pending.result().id)
    scene.note("tip", lambda: tip(scene))
    with base.in_a_hurry(ckpt):
        scene.note("next", lambda: save(ckpt, 3))
    base.quietly(ckpt)
