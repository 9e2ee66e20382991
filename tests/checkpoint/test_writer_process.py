"""The writer process: what it may be told, when it may be killed, and what it leaves behind. Nothing here waits by sleeping."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import syckpt
from syckpt.checkpoint.wire import Channel, PeerGone, watch_process
from syckpt.repo import leases
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import StoreSpec, parse_root
from syckpt.stores.faults import FaultPlan, faulty
from syckpt.testing.scenes import leftovers

# From Python 3.12 on, forking in a process with threads (pytest-xdist has some) warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def no_test_hangs() -> Iterator[None]:
    def give_up(number: int, frame: object) -> None:
        raise TimeoutError(f"nothing came in {TIMEOUT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIMEOUT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Gate:
    """Every writer's first creation of a key waits here until the gate is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end: Any = None

    def shut(self) -> Gate:
        os.mkfifo(self.path)
        return self

    def await_arrival(self) -> None:
        """Wait until somebody stands at the gate."""
        self._end = self.path.open("wb")

    def open(self) -> None:
        if self._end is None:
            self.await_arrival()
        self._end.close()

    def remove(self) -> None:
        """Open the gate for good, whoever stands there: one that was killed at it cannot take it away."""
        if self._end is not None:
            self._end.close()
        with suppress(FileNotFoundError):
            end = os.open(self.path, os.O_RDWR)  # lets in whoever waits, and waits for nobody
            self.path.unlink()
            os.close(end)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.remove()


def gated(root: Path, gate: Gate) -> StoreSpec:
    return faulty(root / ".syckpt", FaultPlan(gate=str(gate.path), only="link", spare=os.getpid()))


def await_exit(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], TIMEOUT_S)[0], f"process {pid} is still there"
    finally:
        os.close(pidfd)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await_exit(pid)


def writer_of(ckpt: syckpt.CheckpointManager) -> int:
    pid = ckpt._saver.writer_pid
    assert pid is not None
    return pid


def await_ready(ckpt: syckpt.CheckpointManager) -> None:
    while not (process := ckpt._saver._process).ready:
        select.select([process.channel], [], [], TIMEOUT_S)
        ckpt._saver.pump()


def tip_of(root: Path) -> str | None:
    head = Repository.open(parse_root(root)).refs.head("heads/main")
    return head.commit if head else None


def saved(ckpt: syckpt.CheckpointManager, *args: Any, **how: Any) -> syckpt.PendingCommit:
    pending = ckpt.save(*args, **how)
    assert pending is not None
    return pending


class Script:
    """A program of its own: lines go to its standard input and come from its standard output."""

    def __init__(self, folder: Path, body: str, *arguments: object, **how: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "script.py"
        path.write_text(textwrap.dedent(body))
        how = {"cwd": folder, "start_new_session": True} | how
        command = [sys.executable, *how.pop("options", ()), str(path), *map(str, arguments)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)

    def line(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            assert self.popen.stderr is not None
            pytest.fail(f"the script ended with status {self.popen.wait()}:\n{self.popen.stderr.read()}")
        return line.strip()

    def end(self) -> tuple[int, str, str]:
        """Wait until it and everything that it started have ended; return its exit status, and what else was printed."""
        out, err = self.popen.communicate()
        return self.popen.returncode, out, err


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def start(*args: Any, **how: Any) -> Script:
        scripts.append(Script(*args, **how))
        return scripts[-1]

    yield start
    for one in scripts:
        if one.popen.poll() is None:
            one.popen.kill()
        one.popen.communicate()


# -- saving in the background ----------------------------------------------------------------------------------------------------------


def test_save_returns_and_training_goes_on_while_the_store_takes_nothing(tmp_path: Path, gate: Gate) -> None:
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.Adam(model.parameters())
    with syckpt.CheckpointManager(gated(tmp_path, gate.shut()), save_on_exit=False) as ckpt:
        ckpt.model, ckpt.optimizer = model, optimizer
        pending = saved(ckpt)
        gate.await_arrival()
        for _ in range(10):
            model(torch.randn(4, 10)).sum().backward()
            optimizer.step()
            ckpt.step_up()
        assert ckpt.step == 10
        assert not pending.done()
        assert tip_of(tmp_path) is None
        assert ckpt.hash == pending.id
        with pytest.raises(TimeoutError, match=pending.id):
            pending.result(timeout=0)
        gate.open()
        commit = pending.result()
        assert pending.done()
        assert (commit.id, commit.step) == (pending.id, 0)
        assert tip_of(tmp_path) == commit.id


def test_changing_everything_right_after_save_changes_nothing_in_the_commit(tmp_path: Path, gate: Gate) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()
    structured = np.zeros(3, dtype=[("a", "<i4"), ("b", ">f8")])
    notes: dict[str, Any] = {"list": [1, [2, torch.arange(3)]], "set": {1}, "bytes": bytearray(b"abc"), "text": "before"}
    arrays = {
        "c": np.arange(12.0).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "strided": np.arange(24, dtype=">i2").reshape(4, 6)[:, ::2],
        "structured": structured,
    }
    transposed = torch.arange(12.0).reshape(3, 4).t()
    generator, numpy_generator = torch.Generator().manual_seed(5), np.random.default_rng(5)
    config = {"lr": 0.25, "layers": [1, 2]}
    with syckpt.CheckpointManager(gated(tmp_path, gate.shut()), save_on_exit=False) as ckpt:
        ckpt.config = config
        ckpt.model, ckpt.optimizer = model, optimizer
        ckpt.notes, ckpt.arrays, ckpt.transposed = notes, arrays, transposed
        ckpt.generator, ckpt.numpy_generator = generator, numpy_generator
        expected = copy.deepcopy(
            {
                "weights": model.state_dict(),
                "moments": [state["exp_avg"] for state in optimizer.state.values()],
                "notes": notes,
                "arrays": arrays,
                "transposed": transposed,
                "generator": generator.get_state(),
                "numpy_generator": numpy_generator.bit_generator.state,
            }
        )
        pending = saved(ckpt, metric=1.5, message="before")
        gate.await_arrival()

        for tensor in (*model.state_dict().values(), transposed, notes["list"][1][1]):
            tensor.fill_(77)
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(77)
        optimizer.param_groups[0]["lr"] = 77
        for array in arrays.values():
            array[...] = 77 if array.dtype.names is None else (77, 77)
        notes["list"][1].append(77)
        notes["set"].add(77)
        notes["bytes"][:] = b"77"
        notes["text"] = "after"
        arrays["new"] = np.ones(1)
        config["layers"].append(77)
        generator.manual_seed(77)
        numpy_generator.random()
        torch.rand(1)
        ckpt.step_up(77)
        gate.open()

        commit = pending.result()
        loaded = ckpt.load(commit.id)
    assert (commit.step, commit.metric, commit.message, commit.config) == (0, 1.5, "before", {"lr": 0.25, "layers": [1, 2]})
    for name, weight in expected["weights"].items():
        assert torch.equal(loaded["model"][name], weight)
    assert [group["lr"] for group in loaded["optimizer"]["param_groups"]] == [0.25]
    for state, moment in zip(loaded["optimizer"]["state"].values(), expected["moments"], strict=True):
        assert state["step"].item() == 1
        assert torch.equal(state["exp_avg"], moment)
    assert repr(loaded["notes"]) == repr(expected["notes"])
    assert loaded["arrays"].keys() == expected["arrays"].keys()
    for name, array in expected["arrays"].items():
        assert loaded["arrays"][name].dtype == array.dtype
        assert np.array_equal(loaded["arrays"][name], array)
    assert torch.equal(loaded["transposed"], expected["transposed"])
    assert torch.equal(loaded["generator"].get_state(), expected["generator"])
    assert loaded["numpy_generator"].bit_generator.state == expected["numpy_generator"]


def test_five_saves_without_waiting_follow_each_other(tmp_path: Path) -> None:
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        pending = []
        for value in range(5):
            ckpt.value = torch.full((1000,), float(value))
            pending.append(saved(ckpt))
        commits = [one.result() for one in pending]
    assert [commit.parents for commit in commits] == [(), *((commit.id,) for commit in commits[:-1])]
    for value, commit in enumerate(commits):
        assert syckpt.load(tmp_path, commit.id)["value"][0].item() == value


def busy(tmp_path: Path, gate: Gate, **how: Any) -> tuple[syckpt.CheckpointManager, list[syckpt.PendingCommit]]:
    """Return a manager with two saves in hand, which stand at the gate."""
    ckpt = syckpt.CheckpointManager(gated(tmp_path, gate.shut()), save_on_exit=False, **how)
    ckpt.value = torch.zeros(10)
    pending = [saved(ckpt), saved(ckpt)]
    gate.await_arrival()
    return ckpt, pending


def test_a_third_save_at_a_time_is_skipped_if_asked(tmp_path: Path, gate: Gate) -> None:
    ckpt, pending = busy(tmp_path, gate, when_busy="skip")
    with ckpt:
        assert ckpt.save() is None
        assert ckpt.hash == pending[1].id
        gate.open()
        ckpt.wait()
        after = saved(ckpt).result()
    assert after.parents == (pending[1].id,)


def test_a_third_save_at_a_time_is_refused_if_asked(tmp_path: Path, gate: Gate) -> None:
    ckpt, pending = busy(tmp_path, gate, when_busy="raise")
    with ckpt:
        with pytest.raises(syckpt.ConflictError, match=f"{pending[0].id}, {pending[1].id}"):
            ckpt.save()
        gate.open()
        ckpt.wait()
        after = saved(ckpt).result()
    assert after.parents == (pending[1].id,)


def test_a_third_save_at_a_time_waits_for_a_slot_and_no_longer(tmp_path: Path, gate: Gate) -> None:
    ckpt, pending = busy(tmp_path, gate)
    with ckpt:
        opener = threading.Thread(target=gate.open)
        opener.start()
        third = saved(ckpt)
        opener.join()
        assert pending[0].done()
        assert [one.result().parents for one in (pending[0], pending[1], third)] == [(), (pending[0].id,), (pending[1].id,)]


def test_waiting_for_a_slot_ends_after_the_timeout_and_names_what_is_stuck(tmp_path: Path, gate: Gate) -> None:
    ckpt, pending = busy(tmp_path, gate, timeout_s=0.1)
    with pytest.raises(syckpt.CoordinationError, match=f"no staging slot came free in 0.1 s.*{pending[0].id}"):
        ckpt.save()
    gate.open()
    assert [one.result(TIMEOUT_S).parents for one in pending] == [(), (pending[0].id,)]
    assert saved(ckpt).result(TIMEOUT_S).parents == (pending[1].id,)
    ckpt.close()


# -- what the process is ---------------------------------------------------------------------------------------------------------------


def test_the_writer_maps_no_torch_and_is_small_at_rest(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    with syckpt.CheckpointManager(tmp_path) as ckpt:
        ckpt.restore()
        await_ready(ckpt)
        process = Path(f"/proc/{writer_of(ckpt)}")
        mapped = (process / "maps").read_text()
        rss_kb = next(int(line.split()[1]) for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
        record_property("writer_rss_mb", rss_kb / 1024)
        assert "libpython" in mapped or "python" in mapped
        assert "torch" not in mapped
        assert rss_kb <= 60 * 1024

        ckpt.model = torch.nn.Linear(100, 100)
        saved(ckpt).result()
        assert "torch" not in (process / "maps").read_text()


def test_the_writer_runs_in_a_session_of_its_own_and_inherits_two_descriptors(tmp_path: Path) -> None:
    with (tmp_path / "a-file-of-the-trainer").open("w") as file, syckpt.CheckpointManager(tmp_path) as ckpt:
        os.set_inheritable(file.fileno(), True)
        ckpt.restore()
        await_ready(ckpt)
        pid = writer_of(ckpt)
        assert os.getsid(pid) == pid
        open_files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert not any("a-file-of-the-trainer" in name for name in open_files)


SHADOW = """
import os
with open(os.environ["SHADOWS"], "a") as file:
    file.write(__name__ + "\\n")
raise ImportError(f"{__name__} of the user's directory was imported")
"""

TRAINER_AMONG_SHADOWS = """
import sys
import torch, syckpt
syckpt.CheckpointManager  # loaded when it is first asked for
if sys.argv[2] == "path":
    sys.path.insert(0, sys.argv[3])
with syckpt.CheckpointManager(sys.argv[1]) as ckpt:
    ckpt.model = torch.nn.Linear(3, 3)
    print(ckpt.save(wait=True), flush=True)
"""


@pytest.mark.parametrize("where", ["cwd", "path", "beside the script"])
def test_the_writer_imports_nothing_from_the_users_directory(tmp_path: Path, script: Callable[..., Script], where: str) -> None:
    user = tmp_path / "user"
    user.mkdir()
    names = ["sitecustomize"]
    if where != "beside the script":
        names += ["numpy", "json", "syckpt", "blake3", "backports", "mmap", "queue", "logging", "socket", "usercustomize"]
    for name in names:
        (user / f"{name}.py").write_text(SHADOW)
    shadows = tmp_path / "shadows"
    home = user if where == "beside the script" else tmp_path / "script"
    run = script(home, TRAINER_AMONG_SHADOWS, tmp_path / "run", where, user, cwd=user, env={**os.environ, "SHADOWS": str(shadows)})
    commit = run.line()
    assert run.end()[0] == 0
    assert not shadows.exists(), shadows.read_text()
    assert tip_of(tmp_path / "run") == commit


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path, script: Callable[..., Script]) -> None:
    (tmp_path / "helper.py").write_text("with open('helper.txt', 'a') as file: file.write('imported\\n')\n")
    body = """
        with open("script.txt", "a") as file:
            file.write("run\\n")
        import torch, helper
        from torch.utils.data import DataLoader, TensorDataset
        import syckpt
        from syckpt.dataloader import StatefulRandomSampler
        dataset = TensorDataset(torch.arange(8.0))
        sampler = StatefulRandomSampler(dataset, batch_size=2)
        with syckpt.CheckpointManager("run") as ckpt:
            ckpt.sampler = sampler
            for epoch in ckpt.loop(2):
                for batch in ckpt.batches(DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=2)):
                    ckpt.save()
    """
    assert script(tmp_path, body).end() == (0, "", "")
    assert (tmp_path / "script.txt").read_text() == "run\n"
    assert (tmp_path / "helper.txt").read_text() == "imported\n"
    assert len(Repository.open(parse_root(tmp_path / "run")).refs.numbers("heads/main")) == 1 + 8


# -- the trainer dies ------------------------------------------------------------------------------------------------------------------

TRAINER = """
    import os, signal, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import syckpt
    from syckpt.dataloader import StatefulRandomSampler
    from syckpt.stores.faults import FaultPlan, faulty

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that a shell runs in the background ignores it
    root, gate, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = faulty(root + "/.syckpt", FaultPlan(gate=gate, only="link", spare=os.getpid()))
    dataset = TensorDataset(torch.arange(64.0))
    sampler = StatefulRandomSampler(dataset, batch_size=2)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=workers)
    ckpt = syckpt.CheckpointManager(store)
    ckpt.sampler, ckpt.weight = sampler, torch.arange(100_000.0)
    with ckpt:
        for epoch in ckpt.loop():
            # More workers than the writer knows of, started after it, which inherit its socket and its memory.
            for number, batch in enumerate(ckpt.batches(loader)):
                if number == 3:
                    first = ckpt.save()
                    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
                    print(first.id, ckpt._saver.writer_pid, *children, flush=True)
                    sys.stdin.readline()
                    sys.exit("nobody should write to this script")
"""


def start_trainer(script: Callable[..., Script], tmp_path: Path, gate: Gate, *, workers: int) -> tuple[Script, str, int, list[int]]:
    """Return a trainer that has handed a save over, the save, its writer, and all its child processes."""
    run = script(tmp_path / "script", TRAINER, tmp_path / "run", gate.path, workers)
    commit, writer, *children = run.line().split()
    assert writer in children
    assert len(children) >= 1 + workers
    return run, commit, int(writer), [int(child) for child in children]


@pytest.mark.parametrize("workers", [0, 2])
def test_no_process_and_no_memory_outlives_a_killed_trainer(
    tmp_path: Path, gate: Gate, script: Callable[..., Script], workers: int
) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    run, commit, _, children = start_trainer(script, tmp_path, gate, workers=workers)
    run.popen.kill()
    run.popen.wait()
    for child in children:
        await_exit(child)
    # The pipes are at their end: nobody is left who inherited them, so the slots, files without a name, are gone with their holders.
    status, out, err = run.end()
    assert (status, out, err) == (-signal.SIGKILL, "", "")
    # Other tests' loaders run beside this one, and torch names its files by process.
    new = set(os.listdir("/dev/shm")) - shared_memory
    assert [name for name in new if not name.startswith("torch_") or f"_{run.popen.pid}_" in name] == []
    assert tip_of(tmp_path / "run") == commit
    assert leases.read(Repository.open(parse_root(tmp_path / "run")), "main") is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_save_handed_over_by_a_trainer_killed_right_after_becomes_head_and_the_next_manager_waits_for_it(
    tmp_path: Path, gate: Gate, script: Callable[..., Script], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    gate.shut()
    run, commit, writer, _ = start_trainer(script, tmp_path, gate, workers=workers)
    run.popen.kill()
    run.popen.wait()
    gate.await_arrival()
    assert tip_of(tmp_path / "run") is None

    waits = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "completes the last save of a trainer that has ended" in record.getMessage():
                waits.set()

    made: list[syckpt.CheckpointManager] = []
    watch = Watch()
    logging.getLogger("syckpt").addHandler(watch)
    try:
        with caplog.at_level(logging.INFO, logger="syckpt"):
            maker = threading.Thread(target=lambda: made.append(syckpt.CheckpointManager(tmp_path / "run")))
            maker.start()
            assert waits.wait(TIMEOUT_S)
            assert not made
            gate.open()
            maker.join()
    finally:
        logging.getLogger("syckpt").removeHandler(watch)
    (ckpt,) = made
    assert ckpt.resumed is not None
    assert (ckpt.resumed.id, ckpt.resumed.step) == (commit, 4)
    ckpt.weight = torch.zeros(100_000)
    assert torch.equal(ckpt.weight, torch.arange(100_000.0))
    ckpt.close()
    await_exit(writer)
    assert verify(Repository.open(parse_root(tmp_path / "run"))).errors == []


@pytest.mark.parametrize("big", [False, True])
def test_a_first_save_completes_though_its_trainer_dies_before_the_writer_is_up(
    tmp_path: Path, script: Callable[..., Script], big: bool
) -> None:
    body = """
        import os, signal, sys, time
        import torch, syckpt
        ckpt = syckpt.CheckpointManager(sys.argv[1])
        ckpt.weights = [torch.full((10,), float(i)) for i in range(int(sys.argv[2]))]
        ckpt.restore()
        os.kill(ckpt._saver.writer_pid, signal.SIGSTOP)
        print(ckpt._saver.writer_pid, ckpt.save(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = script(tmp_path, body, tmp_path / "run", 300 if big else 1)
    writer, commit = run.line().split()
    run.popen.wait()
    os.kill(int(writer), signal.SIGCONT)
    assert run.end() == (-signal.SIGKILL, "", "")
    assert tip_of(tmp_path / "run") == commit


def test_a_manager_that_opens_right_after_a_first_save_waits_for_it(tmp_path: Path, script: Callable[..., Script]) -> None:
    body = """
        import os, signal, sys
        import torch, syckpt
        ckpt = syckpt.CheckpointManager(sys.argv[1])
        ckpt.weight = torch.ones(10)
        ckpt.restore()
        os.kill(ckpt._saver.writer_pid, signal.SIGSTOP)  # before it could say that it is there
        print(ckpt._saver.writer_pid, ckpt.save(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = script(tmp_path, body, tmp_path / "run")
    writer, commit = run.line().split()
    run.popen.wait()
    waiter = threading.Thread(target=os.kill, args=(int(writer), signal.SIGCONT))
    waiter.start()
    with syckpt.CheckpointManager(tmp_path / "run", save_on_exit=False) as ckpt:
        assert ckpt.resumed is not None
        assert ckpt.resumed.id == commit
    waiter.join()


def test_a_message_cut_off_by_its_senders_death_is_given_up_though_a_child_of_its_holds_the_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as sender:
        peer = watch_process(sender.pid)
        theirs.sendall(struct.pack("<IB3x", 100, 0) + b"half of it")
        killer = threading.Thread(target=sender.kill)
        killer.start()
        with pytest.raises(PeerGone, match="ended in the middle of a message"):
            Channel(ours, peer=peer).receive()
        killer.join()
        os.close(peer)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_process_group_do_not_end_the_writer_before_the_save_is_complete(
    tmp_path: Path, gate: Gate, script: Callable[..., Script], number: signal.Signals
) -> None:
    gate.shut()
    run, commit, writer, _ = start_trainer(script, tmp_path, gate, workers=0)
    gate.await_arrival()
    os.killpg(run.popen.pid, number)
    os.kill(writer, number)  # `kill` by hand, or a launcher that walks the process tree
    if number != signal.SIGINT:  # Python turns that into KeyboardInterrupt, and leaving the manager waits for the save
        assert run.popen.wait() == -number
    gate.open()
    status, out, err = run.end()
    assert out == ""
    assert status == -number, err
    assert ("KeyboardInterrupt" in err) is (number == signal.SIGINT)
    assert tip_of(tmp_path / "run") == commit


# -- the writer dies -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("via", ["save", "wait", "close"])
def test_a_killed_writer_is_reported_by_result_and_once_more_and_the_next_save_works(tmp_path: Path, gate: Gate, via: str) -> None:
    ckpt = syckpt.CheckpointManager(gated(tmp_path, gate), save_on_exit=False)
    ckpt.value = torch.zeros(1000)
    first = saved(ckpt, wait=True)
    gate.shut()
    lost = saved(ckpt)
    gate.await_arrival()
    victim = writer_of(ckpt)
    kill(victim)
    with pytest.raises(syckpt.WriterDied, match=f"writer process {victim} .*killed by signal 9.*{lost.id}"):
        lost.result()
    assert lost.done()
    assert ckpt.hash == first.id
    gate.remove()
    with pytest.raises(syckpt.WriterDied, match=lost.id):
        {"save": ckpt.save, "wait": ckpt.wait, "close": ckpt.close}[via]()
    if via == "close":
        ckpt.close()
        return
    after = saved(ckpt)
    assert after.result().parents == (first.id,)
    assert writer_of(ckpt) != victim
    ckpt.close()
    assert leftovers(tmp_path) == []


def test_a_failing_save_moves_no_random_stream(tmp_path: Path, gate: Gate) -> None:
    ckpt = syckpt.CheckpointManager(gated(tmp_path, gate.shut()), save_on_exit=False)
    ckpt.value = torch.zeros(1000)
    before = torch.get_rng_state()
    numpy_before = np.random.get_state()[1].copy()
    lost = saved(ckpt)
    gate.await_arrival()
    kill(writer_of(ckpt))
    with pytest.raises(syckpt.WriterDied):
        lost.result()
    with pytest.raises(syckpt.WriterDied):
        ckpt.close()
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_a_writer_that_dies_idle_is_replaced_without_a_word(tmp_path: Path) -> None:
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        first = saved(ckpt, wait=True)
        kill(writer_of(ckpt))
        assert saved(ckpt).result().parents == (first.id,)


class KillsTheWriter:
    """An item whose `state_dict` takes so long that the writer dies meanwhile."""

    def __init__(self, ckpt: syckpt.CheckpointManager) -> None:
        self.ckpt: syckpt.CheckpointManager | None = ckpt

    def state_dict(self) -> dict[str, Any]:
        if self.ckpt is not None:
            kill(writer_of(self.ckpt))
            self.ckpt = None
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_writer_that_dies_while_a_third_save_waits_takes_only_its_own_saves_along(tmp_path: Path, gate: Gate) -> None:
    ckpt, pending = busy(tmp_path, gate)
    ckpt.item = KillsTheWriter(ckpt)
    third = saved(ckpt)
    gate.remove()
    assert third.result().parents == ()
    for one in pending:
        with pytest.raises(syckpt.WriterDied):
            one.result()
    with pytest.raises(syckpt.WriterDied, match=rf"{pending[0].id}.*and 1 more.*{pending[1].id}"):
        ckpt.wait()
    assert saved(ckpt).result().parents == (third.id,)
    ckpt.close()


def test_a_writer_that_dies_in_the_middle_of_save_costs_one_save_at_most(tmp_path: Path) -> None:
    ckpt = syckpt.CheckpointManager(tmp_path, save_on_exit=False)
    first = saved(ckpt, wait=True)
    ckpt.item = KillsTheWriter(ckpt)
    second = saved(ckpt, "name", tags=["tag"])
    parent = first.id
    try:
        parent = second.result().id
    except syckpt.WriterDied:
        with pytest.raises(syckpt.WriterDied):
            ckpt.wait()
        assert ckpt.hash == first.id
    third = saved(ckpt, "another", tags=["another"])
    assert third.result().parents == (parent,)
    ckpt.close()


def test_a_save_that_waits_reports_a_killed_writer_once(tmp_path: Path, gate: Gate) -> None:
    ckpt = syckpt.CheckpointManager(gated(tmp_path, gate.shut()), save_on_exit=False)

    def strike() -> None:
        gate.await_arrival()
        kill(writer_of(ckpt))

    striker = threading.Thread(target=strike)
    striker.start()
    with pytest.raises(syckpt.WriterDied):
        ckpt.save(wait=True)
    striker.join()
    gate.remove()
    assert saved(ckpt, wait=True).result().parents == ()
    ckpt.close()


def test_leaving_by_an_exception_does_not_hide_it_behind_a_dead_writer(tmp_path: Path, gate: Gate) -> None:
    lost: list[syckpt.PendingCommit] = []

    def train() -> None:
        with syckpt.CheckpointManager(gated(tmp_path, gate.shut())) as ckpt:
            lost.append(saved(ckpt))
            gate.await_arrival()
            kill(writer_of(ckpt))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    with pytest.raises(syckpt.WriterDied):
        lost[0].result()


def test_leaving_cleanly_after_the_writer_died_saves_what_advanced_and_reports_the_lost_save(tmp_path: Path, gate: Gate) -> None:
    def train() -> None:
        with syckpt.CheckpointManager(gated(tmp_path, gate.shut())) as ckpt:
            ckpt.step_up()
            saved(ckpt)
            gate.await_arrival()
            kill(writer_of(ckpt))
            gate.remove()
            ckpt.step_up()

    with pytest.raises(syckpt.WriterDied):
        train()
    with syckpt.CheckpointManager(tmp_path) as again:
        assert again.resumed is not None
        assert (again.resumed.step, again.resumed.message) == (2, "exit")


# -- the writer hangs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[syckpt.CheckpointManager, int]]:
    """A manager of little patience, and its writer, which is stopped."""
    ckpt = syckpt.CheckpointManager(tmp_path, save_on_exit=False, timeout_s=0.2)
    ckpt.value = torch.zeros(10)
    ckpt.restore()
    await_ready(ckpt)
    writer = writer_of(ckpt)
    os.kill(writer, signal.SIGSTOP)
    yield ckpt, writer
    with suppress(ProcessLookupError):
        os.kill(writer, signal.SIGCONT)
    with suppress(syckpt.SyckptError):
        ckpt.close()


@pytest.mark.parametrize("via", ["wait", "close", "save(wait=True)", "result"])
def test_waiting_for_a_stopped_writer_ends_after_the_timeout(
    tmp_path: Path, stopped: tuple[syckpt.CheckpointManager, int], via: str
) -> None:
    ckpt, writer = stopped
    if via == "save(wait=True)":
        with pytest.raises(syckpt.CoordinationError, match=f"writer process {writer} is alive but has not finished"):
            ckpt.save(wait=True)
        return
    pending = saved(ckpt)
    ways: dict[str, Callable[[], object]] = {"wait": ckpt.wait, "close": ckpt.close, "result": pending.result}
    with pytest.raises(syckpt.CoordinationError, match=f"0.2 s.*writer process {writer} is alive but has not finished {pending.id}"):
        ways[via]()
    os.kill(writer, signal.SIGCONT)
    if via != "close":
        assert pending.result(TIMEOUT_S).id == pending.id
        return
    # The save was handed over: it completes, and the writer ends, although nobody listens any more.
    await_exit(writer)
    assert tip_of(tmp_path) == pending.id


def test_handing_a_long_message_to_a_stopped_writer_ends_after_the_timeout(stopped: tuple[syckpt.CheckpointManager, int]) -> None:
    ckpt, writer = stopped
    ckpt.many = [torch.ones(1) for _ in range(20_000)]
    pending = saved(ckpt)
    with pytest.raises(syckpt.CoordinationError, match=rf"writer process {writer} .*0\.2 s"):
        pending.result(TIMEOUT_S)
    with pytest.raises(syckpt.CoordinationError):
        ckpt.save()
    del ckpt.many
    assert saved(ckpt).result(TIMEOUT_S).parents == ()


def test_closing_with_a_stopped_idle_writer_ends(stopped: tuple[syckpt.CheckpointManager, int], caplog: pytest.LogCaptureFixture) -> None:
    ckpt, writer = stopped
    ckpt.close()
    assert f"writer process {writer} did not end when it was told to; it has been killed" in caplog.text
    await_exit(writer)


INCARNATION = """
    import sys, torch, syckpt
    for root in sys.argv[1:]:
        with syckpt.CheckpointManager(root, save_on_exit=False) as ckpt:
            ckpt.value = torch.ones(10)
            print(ckpt.save(wait=True), flush=True)
"""


def stopping(root: Path, at: int) -> StoreSpec:
    """A store whose writer stops itself before it creates its `at`-th key."""
    return faulty(root / ".syckpt", FaultPlan(stop_at=at, action="stop", only="link", spare=os.getpid()))


@pytest.fixture
def await_stop() -> Iterator[Callable[[int], None]]:
    """Wait until a child is stopped; it is continued at the latest when the test ends, however it does."""
    stopped = []

    def wait(pid: int) -> None:
        assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT) is not None
        stopped.append(os.pidfd_open(pid))

    yield wait
    for pidfd in stopped:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)


def test_a_writer_that_was_stopped_anywhere_in_a_save_cannot_move_the_branch_of_a_newer_incarnation(
    tmp_path: Path, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, await_stop: Callable[[int], None]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "the-run")
    # A save creates its intent, the blob, the manifest, the locations, the commit, and at last the record of the branch.
    roots = [tmp_path / f"{creation}" for creation in range(1, 7)]
    older = []
    for creation, root in enumerate(roots, start=1):
        ckpt = syckpt.CheckpointManager(stopping(root, creation), save_on_exit=False)
        ckpt.value = torch.zeros(10)
        older.append((ckpt, saved(ckpt)))
        await_stop(writer_of(ckpt))
    newer = script(tmp_path, INCARNATION, *roots)
    commits = [newer.line() for _ in roots]
    assert newer.end()[0] == 0
    for root, (ckpt, pending), commit in zip(roots, older, commits, strict=True):
        assert tip_of(root) == commit
        assert not pending.done()
        os.kill(writer_of(ckpt), signal.SIGCONT)
        with pytest.raises(syckpt.ConflictError, match=r"generation 2 of run torchelastic-the-run\b.* generation 1 of run"):
            pending.result()
        with pytest.raises(syckpt.ConflictError):
            ckpt.close()
        assert tip_of(root) == commit
        assert [c.id for c in syckpt.CheckpointManager(root).log()] == [commit]
        assert leftovers(root) == []
        assert verify(Repository.open(parse_root(root))).errors == []


def test_a_fenced_writer_leaves_the_lease_of_the_newer_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository.open_or_create(parse_root(tmp_path))
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.restore()
        await_ready(ckpt)
        own = leases.read(repository, "main")
        assert own is not None
        assert own.writer is not None
        assert own.writer.pid == writer_of(ckpt)
        newer = leases.Lease(own.branch, own.run, own.generation + 1, "another token", own.trainer, None, own.expires_ns)
        leases.write(repository, newer)
        ckpt.close()
        assert leases.read(repository, "main") == newer


def test_a_stopped_writer_whose_trainer_died_is_given_up_and_cannot_move_the_branch_later(
    tmp_path: Path, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(leases.await_drain.__kwdefaults__, "timeout_s", 0.1)
    body = """
        import os, sys, torch, syckpt
        from syckpt.stores.faults import FaultPlan, faulty
        store = faulty(sys.argv[1] + "/.syckpt", FaultPlan(stop_at=6, action="stop", only="link", spare=os.getpid()))
        ckpt = syckpt.CheckpointManager(store)
        ckpt.value = torch.zeros(10)
        pending = ckpt.save()
        writer = ckpt._saver.writer_pid
        os.waitid(os.P_PID, writer, os.WSTOPPED | os.WNOWAIT)
        print(pending, writer, flush=True)
        os.kill(os.getpid(), 9)
    """
    run = script(tmp_path, body, tmp_path / "run")
    given_up, writer = run.line().split()
    run.popen.wait()
    with syckpt.CheckpointManager(tmp_path / "run", save_on_exit=False) as ckpt:
        assert ckpt.resumed is None
        commit = saved(ckpt, wait=True)
    os.kill(int(writer), signal.SIGCONT)
    status, _, err = run.end()
    assert status == -signal.SIGKILL
    assert tip_of(tmp_path / "run") == commit.id != given_up
    assert "Traceback" not in err
    assert leftovers(tmp_path / "run") == []


# -- forks and exits -------------------------------------------------------------------------------------------------------------------


def in_a_fork(work: Callable[[], None], leave: Callable[[], None]) -> int:
    """Run `work` in a forked child that ends by `leave`, and return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            leave()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_that_exits_leaves_the_parents_writer_alone(tmp_path: Path, gate: Gate) -> None:
    with syckpt.CheckpointManager(gated(tmp_path, gate.shut()), save_on_exit=False) as ckpt:
        ckpt.value = torch.zeros(1000)
        pending = saved(ckpt)
        gate.await_arrival()
        writer = writer_of(ckpt)
        assert in_a_fork(ckpt.close, lambda: os._exit(7)) == 7
        child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(8,))
        child.start()
        child.join()
        assert child.exitcode == 8
        child.close()
        assert not pending.done()
        gate.open()
        assert pending.result().id == pending.id
        assert writer_of(ckpt) == writer
        assert saved(ckpt).result().parents == (pending.id,)


def test_a_forked_child_that_ends_normally_leaves_the_parents_writer_alone(tmp_path: Path, script: Callable[..., Script]) -> None:
    body = """
        import os, sys, torch, syckpt
        with syckpt.CheckpointManager(sys.argv[1]) as ckpt:
            ckpt.value = torch.zeros(1000)
            first = ckpt.save()
            ckpt.step_up()
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                second = ckpt.save(wait=True)
        if child:
            print(first, second, ckpt.hash)
    """
    run = script(tmp_path, body, tmp_path / "run")
    status, out, err = run.end()
    assert (status, err) == (0, "")
    first, second, newest = out.split()
    assert newest == second
    assert [commit.id for commit in syckpt.CheckpointManager(tmp_path / "run").log()] == [second, first]


def test_a_forked_child_may_not_use_the_parents_manager(tmp_path: Path) -> None:
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.value = torch.zeros(1000)
        pending = saved(ckpt)

        def refused() -> None:
            for call in (ckpt.save, pending.result, ckpt.wait, ckpt.step_up):
                with pytest.raises(syckpt.StateError, match=f"process {os.getppid()}"):
                    call()

        assert in_a_fork(refused, lambda: os._exit(0)) == 0
        assert saved(ckpt).result().parents == (pending.id,)


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "del ckpt", "ckpt = None; import gc; gc.collect()"])
def test_an_exit_without_close_waits_for_what_was_handed_over_and_prints_nothing(
    tmp_path: Path, script: Callable[..., Script], ending: str
) -> None:
    body = f"""
        import sys, torch, syckpt
        ckpt = syckpt.CheckpointManager(sys.argv[1])
        ckpt.weight = torch.randn(1_000_000)
        pending = [ckpt.save(message=str(i)).id for i in range(2)]
        {ending}
    """
    run = script(tmp_path, body, tmp_path / "run", options=["-W", "always::ResourceWarning"])
    assert run.end() == (0, "", "")
    assert [commit.message for commit in syckpt.CheckpointManager(tmp_path / "run").log()] == ["1", "0"]


def test_an_exit_without_close_logs_a_save_that_failed(tmp_path: Path, script: Callable[..., Script]) -> None:
    body = """
        import os, signal, sys, torch, syckpt
        ckpt = syckpt.CheckpointManager(sys.argv[1])
        ckpt.restore()
        os.kill(ckpt._saver.writer_pid, signal.SIGSTOP)
        ckpt.save()
        os.kill(ckpt._saver.writer_pid, signal.SIGKILL)
    """
    status, out, err = script(tmp_path, body, tmp_path / "run").end()
    assert (status, out) == (0, "")
    assert "killed by signal 9" in err
    assert "Traceback" not in err


def test_a_second_manager_of_the_branch_in_this_process_is_refused_at_once(tmp_path: Path) -> None:
    with syckpt.CheckpointManager(tmp_path, save_on_exit=False) as first:
        first.restore()
        second = syckpt.CheckpointManager(tmp_path)
        with pytest.raises(syckpt.ConflictError, match="another manager of this process"):
            second.save()
        second.close()
        assert saved(first).result().parents == ()
