"""What the ranks of test_failures.py do, two of them. They wait for events only: keys, signals, states of processes, gates.

A deadline is short where it is to pass, and nowhere else: on a busy machine a writer may take seconds to start. A rank that leaves a
scenario before its end says so, and the other one, should it wait for a sign, leaves it too: the other scenarios are none the worse.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import syckpt
from syckpt import CheckpointManager
from syckpt.checkpoint import start
from syckpt.checkpoint.saver import PendingCommit
from syckpt.dist.coordinator import StoreCoordinator
from syckpt.repo.repository import Repository
from syckpt.stores.base import StoreSpec, parse_root
from syckpt.stores.faults import FaultPlan, faulty

SHORT_S = 3.0
PATIENCE_S = 120.0
_TICK = timedelta(seconds=1)


def state(step: int) -> dict[str, Any]:
    """Return what all ranks hold after `step` steps: each stores one of two tensors of the same size."""
    made = torch.Generator().manual_seed(step)
    return {"net": {"a": torch.randn(5000, generator=made), "b": torch.randn(5000, generator=made)}, "count": step}


def own(rank: int, step: int) -> torch.Tensor:
    """Return what a rank has for itself."""
    return torch.arange(100.0) + 1000 * rank + step


def keys() -> Any:
    """Return the rendezvous store, for signs between ranks that do not go through a coordinator."""
    return dist.distributed_c10d._get_default_store()


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class and text of its error."""
    try:
        return call()
    except Exception as exc:  # noqa: BLE001 - the test looks at it
        return [type(exc).__name__, str(exc)]


def await_state(pid: int, letters: str) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in letters:
        os.sched_yield()


class Scene:
    """One scenario in a directory of its own: signs between the ranks, and what each of them met."""

    def __init__(self, directory: Path, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        self.directory = directory / name
        self.root = self.directory / "run"
        self.met: dict[str, Any] = {}
        self.directory.mkdir(parents=True, exist_ok=True)

    def sign(self, what: str, value: object = 1) -> None:
        keys().set(f"{self.name}/{what}", str(value))

    def await_sign(self, what: str) -> str:
        """Wait for a sign and return what comes with it. Raises: AssertionError if the other rank has left the scenario without it."""
        key, left = f"{self.name}/{what}", f"{self.name}/left/{1 - self.rank}"
        while True:
            try:
                keys().wait([key], _TICK)
            except dist.DistStoreError:
                if not keys().check([left]):
                    continue
                if not keys().check([key]):
                    raise AssertionError(f"rank {1 - self.rank} left before '{what}': {keys().get(left).decode()}") from None
            return str(keys().get(key).decode())

    def meet(self, what: str) -> None:
        """Go on when both ranks are here."""
        self.sign(f"{what}/{self.rank}")
        for other in (0, 1):
            self.await_sign(f"{what}/{other}")

    def note(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call, and record what came of it and how long it took."""
        begun = time.monotonic()
        found = self.met[what] = outcome(call)
        self.met[f"{what}, seconds"] = time.monotonic() - begun
        (self.directory / f"{self.rank}.new").write_text(json.dumps(self.met))
        (self.directory / f"{self.rank}.new").rename(self.directory / f"{self.rank}.json")
        return found

    def manager(self, root: Path | StoreSpec | None = None, **options: Any) -> CheckpointManager:
        options = {"timeout_s": PATIENCE_S, "rng": False, "save_on_exit": False, **options}
        return CheckpointManager(self.root if root is None else root, **options)

    def plan(self, **options: Any) -> StoreSpec:
        """Return a faulty store at the same path, which leaves this process alone."""
        return faulty(self.root / ".syckpt", FaultPlan(spare=os.getpid(), **options))

    def arm(self, number: int) -> None:
        made = self.directory / f"arm{self.rank}.new"
        made.write_text(str(number))
        made.rename(self.directory / f"arm{self.rank}")

    def gated(self) -> StoreSpec:
        """Return a store whose writer waits at a gate, of this rank alone."""
        os.mkfifo(self.gate)
        return self.plan(gate=str(self.gate))

    @property
    def gate(self) -> Path:
        return self.directory / f"gate{self.rank}"

    def open_gate(self) -> None:
        self.gate.open("wb").close()


def begin(ckpt: CheckpointManager, step: int = 0) -> None:
    for name, value in state(step).items():
        ckpt.register(name, value)


def save(ckpt: CheckpointManager, step: int, **options: Any) -> PendingCommit | None:
    begin(ckpt, step)
    begin(ckpt, step)  # What is registered for the first time was restored.
    return ckpt.save(**options)


def durable(ckpt: CheckpointManager, step: int) -> str:
    """Save, wait, and return the commit's id."""
    pending = save(ckpt, step)
    assert pending is not None
    return pending.result(PATIENCE_S).id


def writer(ckpt: CheckpointManager) -> int:
    pid = ckpt._saver.writer_pid
    assert pid is not None
    return pid


@contextmanager
def in_a_hurry(ckpt: CheckpointManager) -> Iterator[None]:
    """The other rank has only a short time to come to what the block calls."""
    coordinator = ckpt._coordinator
    assert isinstance(coordinator, StoreCoordinator)
    coordinator.timeout_s = SHORT_S
    try:
        yield
    finally:
        coordinator.timeout_s = PATIENCE_S


def with_hasty_writers(scene: Scene, spec: StoreSpec | None = None) -> CheckpointManager:
    """Return a manager whose writers, which are up, wait for each other a short time only. Collective."""
    ckpt = scene.manager(spec)
    ckpt._saver._settings = replace(ckpt._saver._settings, timeout_s=SHORT_S)
    begin(ckpt)
    ckpt.restore()
    while not (process := ckpt._saver._process) or not process.ready:
        assert process, "the writer ended"
        select.select([process.channel], [], [], PATIENCE_S)
        ckpt._saver.pump()
    scene.meet("both writers are up")
    return ckpt


def quietly(ckpt: CheckpointManager) -> None:
    outcome(ckpt.close)


# -- scenarios ---------------------------------------------------------------------------------------------------------


def saved_under_if_rank_0(scene: Scene) -> None:
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
        if scene.rank == 0:
            with in_a_hurry(ckpt):
                scene.note("save", lambda: durable(ckpt, 1))
            scene.sign("given up")
        else:
            scene.await_sign("given up")
            scene.note("save", lambda: durable(ckpt, 1))
        scene.note("next", lambda: durable(ckpt, 2))


def a_slow_rank(scene: Scene) -> None:
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
        if scene.rank == 1:
            scene.await_sign("rank 0 is about to save")
        scene.sign("rank 0 is about to save") if scene.rank == 0 else None
        scene.note("next", lambda: durable(ckpt, 1))


COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]


class Counted:
    """A rendezvous store that keeps account of requests, but for looks whether keys are there: the last part of the first key."""

    def __init__(self, store: Any, requests: list[list[str]]) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, method: str) -> Any:
        def request(*args: Any) -> Any:
            if args and method != "check":
                key = args[0] if isinstance(args[0], str) else args[0][0]
                self._requests.append([method, key.rpartition("/")[2]])
            return getattr(self._store, method)(*args)

        return request


def what_a_save_costs(scene: Scene) -> None:
    """The second save of a manager: nothing is to be opened any more, and there is a verdict to put away."""
    group = dist.distributed_c10d._get_default_group()
    requests: list[list[str]] = []
    collectives: list[list[str]] = []

    def note_calls(name: str, function: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            collectives.append([name, threading.current_thread().name])
            return function(*args, **options)

        return noted

    originals = {(module, name): getattr(module, name) for module in (dist, dist.distributed_c10d) for name in COLLECTIVES}
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
        line = ckpt._coordinator._line  # type: ignore[attr-defined]
        store = line._store
        scene.meet("is at rest")
        before, agreements = group._get_sequence_number_for_group(), ckpt._coordinator.agreements
        line._store = Counted(store, requests)
        try:
            for (module, name), function in originals.items():
                setattr(module, name, note_calls(name, function))
            scene.note("next", lambda: durable(ckpt, 1))
        finally:
            line._store = store
            for (module, name), function in originals.items():
                setattr(module, name, function)
        scene.met["collectives"] = [collectives, group._get_sequence_number_for_group() - before]
        scene.met["agreements"] = ckpt._coordinator.agreements - agreements
        scene.met["requests"] = requests


def at_another_step(scene: Scene) -> None:
    with scene.manager() as ckpt:
        begin(ckpt)
        ckpt.step_up(1 + scene.rank)
        scene.note("save", lambda: durable(ckpt, 1))
        ckpt.step_up(2 - scene.rank)
        scene.note("next", lambda: durable(ckpt, 2))


def with_other_keys(scene: Scene) -> None:
    with scene.manager() as ckpt:
        begin(ckpt)
        ckpt.register("stage", {f"layer{scene.rank}": own(scene.rank, 0)})
        scene.note("next", lambda: durable(ckpt, 1))


def with_another_layout(scene: Scene) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
        sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        ckpt.register("odd", {"x": sharded if scene.rank == 0 else torch.arange(8.0)})
        scene.note("save", lambda: durable(ckpt, 1))
        ckpt.odd = {"x": sharded}
        scene.note("next", lambda: durable(ckpt, 2))


class Moody:
    """An item whose state cannot be had now and then."""

    def __init__(self) -> None:
        self.broken = False

    def state_dict(self) -> dict[str, Any]:
        if self.broken:
            raise ValueError("no memory left on the device")
        return {"mood": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def an_exception_in_state_dict(scene: Scene) -> None:
    with scene.manager() as ckpt:
        item = Moody()
        ckpt.register("moody", item)
        scene.note("base", lambda: durable(ckpt, 0))
        item.broken = scene.rank == 1
        scene.note("save", lambda: durable(ckpt, 1))
        item.broken = False
        scene.note("next", lambda: durable(ckpt, 2))


def a_full_disk(scene: Scene) -> None:
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
        before = resource.prlimit(writer(ckpt), resource.RLIMIT_FSIZE)
        if scene.rank == 1:
            resource.prlimit(writer(ckpt), resource.RLIMIT_FSIZE, (10_000, before[1]))
        scene.note("save", lambda: durable(ckpt, 1))
        scene.note("heard", lambda: durable(ckpt, 1))
        resource.prlimit(writer(ckpt), resource.RLIMIT_FSIZE, before)
        scene.note("next", lambda: durable(ckpt, 2))


def a_failure_in_the_background(scene: Scene) -> None:
    """Nobody asks how the save went; rank 0's trainer knows long before rank 1's."""
    spec = scene.plan(arm=str(scene.directory / f"arm{scene.rank}"), action="enospc")
    with scene.manager(spec) as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
        if scene.rank == 0:
            scene.arm(9)
        scene.meet("armed")
        pending = save(ckpt, 1)
        assert pending is not None
        if scene.rank == 0:
            while not pending.done():
                os.sched_yield()
        scene.note("save", lambda: durable(ckpt, 1))
        scene.note("next", lambda: durable(ckpt, 2))


def killed_writer(scene: Scene, victim: int) -> None:
    mine = scene.rank == victim
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
    ckpt = scene.manager(scene.gated() if mine else None)
    begin(ckpt)
    pending = save(ckpt, 1)
    assert pending is not None
    if mine:
        os.kill(writer(ckpt), signal.SIGKILL)
        scene.gate.unlink()
    scene.note("save", lambda: pending.result(PATIENCE_S).id)
    scene.note("heard", lambda: durable(ckpt, 1))
    scene.note("next", lambda: durable(ckpt, 2))
    quietly(ckpt)


def the_writer_of_rank_0_is_killed(scene: Scene) -> None:
    killed_writer(scene, 0)


def the_writer_of_rank_1_is_killed(scene: Scene) -> None:
    killed_writer(scene, 1)


def stopped_writer(scene: Scene, victim: int) -> None:
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
    ckpt = with_hasty_writers(scene)
    if scene.rank == victim:
        os.kill(writer(ckpt), signal.SIGSTOP)
        await_state(writer(ckpt), "T")
    scene.meet("stopped")
    pending = save(ckpt, 1)
    assert pending is not None
    scene.note("save", lambda: pending.result().id)
    scene.meet("heard of it")
    scene.met["tip"] = str(syckpt.load(scene.root)["count"])
    if scene.rank == victim:
        os.kill(writer(ckpt), signal.SIGCONT)
    scene.meet("continued")
    scene.note("heard", lambda: durable(ckpt, 2))
    scene.note("next", lambda: durable(ckpt, 2))
    quietly(ckpt)


def the_writer_of_rank_0_is_stopped(scene: Scene) -> None:
    stopped_writer(scene, 0)


def the_writer_of_rank_1_is_stopped(scene: Scene) -> None:
    stopped_writer(scene, 1)


def busy(scene: Scene, when_busy: str) -> None:
    spec = scene.gated() if scene.rank == 1 else None
    with scene.manager(spec, when_busy=when_busy) as ckpt:
        begin(ckpt)
        in_hand = [save(ckpt, step) for step in (0, 1)]
        scene.note("save", lambda: save(ckpt, 2))
        if scene.rank == 1:
            scene.open_gate()
        scene.note("base", lambda: [str(pending and pending.result(PATIENCE_S).id) for pending in in_hand])
        scene.note("next", lambda: durable(ckpt, 3))


def busy_and_skipped(scene: Scene) -> None:
    busy(scene, "skip")


def busy_and_refused(scene: Scene) -> None:
    busy(scene, "raise")


def other_arguments(scene: Scene) -> None:
    scene.note("branch", lambda: scene.manager(branch=f"branch{scene.rank}").close())
    scene.note("exit", lambda: scene.manager(save_on_exit=scene.rank == 0).close())
    scene.note("deadline", lambda: scene.manager(timeout_s=SHORT_S + scene.rank).close())
    with scene.manager() as ckpt:
        ckpt.config = {"lr": 0.1 + scene.rank}
        scene.note("save", lambda: durable(ckpt, 1))
        ckpt.config = {"lr": 0.1}
        scene.note("next", lambda: durable(ckpt, 2))


def a_directory_that_is_not_shared(scene: Scene) -> None:
    """Rank 1 is shown another directory by the path that rank 0 was given, as if it were a disk of its own node."""
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
    elsewhere = scene.directory / "elsewhere"
    if scene.rank == 1:
        shutil.copytree(scene.root, elsewhere / "copy")
        (elsewhere / "empty").mkdir()

    class Mounted(Repository):
        at = elsewhere

        @classmethod
        def open(cls, spec: StoreSpec) -> Repository:
            return Repository.open(parse_root(cls.at))

    scene.meet("copied")
    for name in ("copy", "empty"):
        if scene.rank == 1:
            Mounted.at = elsewhere / name
            start.Repository = Mounted  # type: ignore[misc]
        try:
            scene.note(name, lambda: scene.manager().close())
        finally:
            start.Repository = Repository  # type: ignore[misc]
    with scene.manager() as ckpt:
        scene.note("next", lambda: durable(ckpt, 2))


def damaged_for_one_rank(scene: Scene) -> None:
    with scene.manager() as ckpt:
        for step in (0, 1):
            ckpt.register("own", {"values": own(scene.rank, step)})
            scene.note(f"save {step}", lambda step=step: durable(ckpt, step))  # type: ignore[misc]
            del ckpt.own
    if scene.rank == 1:
        newest = scene.root / ".syckpt" / "objects" / scene.met["save 1"]
        blob = next(path for path in newest.iterdir() if path.name.startswith("r00001") and path.suffix == ".safetensors")
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.unlink()
        blob.write_bytes(data)
    scene.meet("damaged")
    with scene.manager() as ckpt:
        ckpt.register("own", {"values": torch.zeros(100)})
        ckpt.restore()
        scene.note("resumed", lambda: ckpt.resumed and ckpt.resumed.id)
        scene.note("own", lambda: bool(torch.equal(ckpt.own["values"], own(scene.rank, 0))))
        scene.note("next", lambda: durable(ckpt, 2))


def lost_for_one_rank(scene: Scene) -> None:
    """Of rank 1's parts, the newest commit has a blob that is cut off, and the one before it no manifest: rank 0's are whole."""
    with scene.manager() as ckpt:
        for step in (0, 1, 2):
            ckpt.register("own", {"values": own(scene.rank, step)})
            scene.note(f"save {step}", lambda step=step: durable(ckpt, step))  # type: ignore[misc]
            del ckpt.own
    if scene.rank == 1:
        objects = scene.root / ".syckpt" / "objects"
        blob = objects / scene.met["save 2"] / "r00001.safetensors"
        data = blob.read_bytes()[:-1]
        blob.unlink()
        blob.write_bytes(data)
        (objects / scene.met["save 1"] / "r00001.manifest").unlink()
    scene.meet("lost")
    with scene.manager() as ckpt:
        scene.note("chosen", lambda: ckpt.resumed and ckpt.resumed.id)
        ckpt.register("own", {"values": torch.zeros(100)})
        scene.note("own", lambda: bool(torch.equal(ckpt.own["values"], own(scene.rank, 0))))
        scene.note("next", lambda: durable(ckpt, 3))


def newcomer(root: str) -> None:
    """Be a newer incarnation of the job, of one process."""
    with CheckpointManager(root, rng=False, save_on_exit=False) as ckpt:
        print(durable(ckpt, 9))


def orphaned(scene: Scene, *, without_writer: bool) -> None:
    ckpt = scene.manager()
    scene.note("base", lambda: durable(ckpt, 0))
    if scene.rank == 0:
        single = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
        env = {name: value for name, value in os.environ.items() if name not in single}
        here, root = str(Path(__file__).parent), str(scene.root)
        code = f"import sys; sys.path.insert(0, {here!r}); import failure_ranks; failure_ranks.newcomer({root!r})"
        made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=2 * PATIENCE_S)
        scene.note("newcomer", lambda: made.stdout.strip() or made.stderr)
        if without_writer:
            os.kill(writer(ckpt), signal.SIGKILL)
            process = ckpt._saver._process
            assert process is not None
            assert process.await_exit(PATIENCE_S) == -signal.SIGKILL
    scene.meet("fenced")
    scene.note("save", lambda: durable(ckpt, 1))
    scene.note("again", lambda: durable(ckpt, 1))
    quietly(ckpt)


def an_orphaned_incarnation(scene: Scene) -> None:
    orphaned(scene, without_writer=False)


def an_orphan_whose_writer_died(scene: Scene) -> None:
    orphaned(scene, without_writer=True)


def a_stopped_trainer(scene: Scene) -> None:
    with scene.manager() as ckpt:
        scene.note("base", lambda: durable(ckpt, 0))
        if scene.rank == 1:
            scene.sign("pid", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
            scene.note("save", lambda: durable(ckpt, 1))
        else:
            pid = int(scene.await_sign("pid"))
            try:
                await_state(pid, "T")
                with in_a_hurry(ckpt):
                    scene.note("save", lambda: durable(ckpt, 1))
            finally:
                os.kill(pid, signal.SIGCONT)
        scene.note("next", lambda: durable(ckpt, 2))


def a_killed_trainer(scene: Scene) -> None:
    """The last scenario: rank 1 is gone afterwards. Its writer, at the gate, is not."""
    ckpt = scene.manager(scene.gated() if scene.rank == 1 else None)
    begin(ckpt)
    pending = save(ckpt, 1)
    assert pending is not None
    if scene.rank == 1:
        scene.sign("saving")
        os.kill(os.getpid(), signal.SIGKILL)
    scene.await_sign("saving")
    with in_a_hurry(ckpt):
        scene.note("save", lambda: save(ckpt, 2))
    (scene.directory / "gate1").open("wb").close()
    scene.note("first", lambda: pending.result(PATIENCE_S).id)
    quietly(ckpt)


SCENARIOS: list[Callable[[Scene], None]] = [
    saved_under_if_rank_0,
    a_slow_rank,
    what_a_save_costs,
    at_another_step,
    with_other_keys,
    with_another_layout,
    an_exception_in_state_dict,
    a_full_disk,
    a_failure_in_the_background,
    the_writer_of_rank_0_is_killed,
    the_writer_of_rank_1_is_killed,
    the_writer_of_rank_0_is_stopped,
    the_writer_of_rank_1_is_stopped,
    busy_and_skipped,
    busy_and_refused,
    other_arguments,
    a_directory_that_is_not_shared,
    damaged_for_one_rank,
    lost_for_one_rank,
    an_orphaned_incarnation,
    an_orphan_whose_writer_died,
    a_stopped_trainer,
    a_killed_trainer,
]


def play(rank: int, directory: str, only: list[str]) -> list[str]:
    """Play the scenarios one after the other; what a rank met lies in `<scenario>/<rank>.json`."""
    played = []
    for scenario in SCENARIOS:
        if only and scenario.__name__ not in only:
            continue
        scene = Scene(Path(directory), scenario.__name__, rank)
        met = scene.note("scenario", lambda scenario=scenario, scene=scene: scenario(scene))  # type: ignore[misc]
        scene.sign(f"left/{rank}", met)
        if scenario is not a_killed_trainer:
            scene.await_sign(f"left/{1 - rank}")
        played.append(scenario.__name__)
    return played


def sweep(rank: int, directory: str, action: str, victim: int, every: int) -> list[Any]:
    """Make saves that meet a fault before each `every`-th mutation of the victim's writer, each followed by a good one.

    Returns, for each: the mutation, the id that the first save had and what came of it, the tip afterwards, and the id of the good one.
    """
    scene = Scene(Path(directory), f"{action} on rank {victim}", rank)
    trace = scene.directory / f"trace{rank}"
    spec = scene.plan(action=action, arm=str(scene.directory / f"arm{rank}"), trace=str(trace))
    found: list[Any] = []
    with scene.manager(spec) as ckpt:
        durable(ckpt, 0)
        scene.arm(0)
        durable(ckpt, 1)
        scene.sign(f"count/{rank}", len(traced(trace)))
        count = int(scene.await_sign(f"count/{victim}"))
        step = 2
        for number in range(1, count + 1, every):
            if rank == victim:
                scene.arm(number)
            scene.meet(f"armed {number}")
            pending = save(ckpt, step)
            assert pending is not None
            met = outcome(lambda pending=pending: pending.result(PATIENCE_S).id)  # type: ignore[misc]
            if rank == victim:
                (scene.directory / f"arm{rank}").unlink(missing_ok=True)
                scene.arm(0)
            scene.meet(f"over {number}")
            head = Repository.open(parse_root(scene.root)).refs.head("heads/main")
            heard = None if isinstance(met, str) else outcome(lambda: ckpt.save() and None)
            good = outcome(lambda step=step: durable(ckpt, step + 1))  # type: ignore[misc]
            found.append([number, pending.id, met, head and head.commit, heard, good, step])
            step += 2
    return found


def traced(trace: Path) -> list[str]:
    """Return the mutations since the last arming."""
    lines = trace.read_text().splitlines()
    return lines[max(index for index, line in enumerate(lines) if line.startswith("1 ")) :]
