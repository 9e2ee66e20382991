"""What the ranks of `test_coordinator.py` do, four of them. They wait for events only: keys, signals, states of processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syckpt.dist.coordinator import Coordinator, StoreCoordinator, connect

SHORT_S = 2.0


def keys() -> Any:
    """Return the rendezvous store, for signs between ranks that do not go through a coordinator."""
    return dist.distributed_c10d._get_default_store()


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class and text of its error."""
    try:
        return call()
    except Exception as exc:  # noqa: BLE001 - the test looks at it
        return [type(exc).__name__, str(exc)]


def collect(values: list[dict[str, Any]]) -> dict[str, Any]:
    return {"all": values}


def pids(coordinator: Coordinator) -> list[int]:
    return [each["pid"] for each in coordinator.agree("pids", {"pid": os.getpid()}, collect)["all"]]


def await_stop(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


def await_arrival(coordinator: Coordinator, rank: int) -> None:
    """Wait until a rank has brought something to the agreement that comes next here."""
    assert isinstance(coordinator, StoreCoordinator)
    keys().wait([f"{coordinator._prefix}/{coordinator.agreements}/{rank}"])


def values_in_rank_order(coordinator: Coordinator) -> Any:
    return coordinator.agree("values", {"rank": coordinator.rank}, collect)


def a_save_costs_one_agreement_of_two_rounds(coordinator: Coordinator) -> Any:
    before = coordinator.agreements
    coordinator.agree("save", {}, collect)
    return coordinator.agreements - before


def two_coordinators_side_by_side(coordinator: Coordinator) -> Any:
    one, other = connect(timeout_s=60), connect(timeout_s=60)
    told = [one.broadcast("a", {"of": "one"}), other.broadcast("a", {"of": "other"}), one.broadcast("b", {"of": "one again"})]
    return [each["of"] for each in told]


def many_coordinators_in_a_row(coordinator: Coordinator) -> Any:
    sessions = [made._prefix for made in (connect(timeout_s=60) for _ in range(20)) if isinstance(made, StoreCoordinator)]
    found = coordinator.agree("sessions", {"of": sessions}, collect)["all"]
    return [len(set(sessions)), all(each["of"] == sessions for each in found)]


def a_rank_that_makes_its_coordinator_too_late(coordinator: Coordinator) -> Any:
    if coordinator.rank == 3:
        keys().wait([f"given up/{rank}" for rank in range(3)])
        told = None
    else:
        told = outcome(lambda: connect(timeout_s=SHORT_S))
        keys().set(f"given up/{coordinator.rank}", "")
    return [told, values_in_rank_order(connect(timeout_s=60))]


def keys_of_an_earlier_incarnation_are_not_believed(coordinator: Coordinator) -> Any:
    earlier = keys().get("syckpt/offer").decode()
    if coordinator.rank == 0:
        # Everybody else has come first, and has only seen what is left of the earlier one.
        keys().wait([f"syckpt/{earlier}/hello/{rank}" for rank in range(1, coordinator.world_size)])
    new = connect(timeout_s=60)
    assert isinstance(new, StoreCoordinator)
    return [new._prefix != f"syckpt/{earlier}", new.broadcast("hello", {"by": "the living"})["by"]]


def a_large_value(coordinator: Coordinator) -> Any:
    mine = {"text": f"{coordinator.rank}" * (8 << 20)}
    found = coordinator.agree("large", mine, lambda values: {"lengths": [len(each["text"]) for each in values], "last": values[-1]["text"]})
    return [found["lengths"], found["last"] == "3" * (8 << 20)]


def while_a_collective_of_the_training_is_under_way(coordinator: Coordinator) -> Any:
    tensor = torch.full((1000,), float(coordinator.rank))
    if coordinator.rank == 0:
        coordinator.barrier("in between")
        dist.all_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, async_op=True)
        coordinator.barrier("in between")
        assert not work.is_completed()
        work.wait()
    return tensor[0].item()


def a_rank_that_was_stopped_before_it_came(coordinator: Coordinator) -> Any:
    pid = pids(coordinator)[3]
    if coordinator.rank == 3:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    told = outcome(lambda: coordinator.agree("save", {}, collect, at="step 120", timeout_s=SHORT_S))
    took = time.monotonic() - began
    if coordinator.rank == 0:
        await_stop(pid)
        os.kill(pid, signal.SIGCONT)
    return [told, took < 30, values_in_rank_order(coordinator)]


def a_rank_that_was_stopped_while_it_waited(coordinator: Coordinator) -> Any:
    pid = pids(coordinator)[3]
    if coordinator.rank == 0:
        await_arrival(coordinator, 3)
        os.kill(pid, signal.SIGSTOP)
        await_stop(pid)
    told = outcome(lambda: coordinator.agree("save", {"rank": coordinator.rank}, collect, timeout_s=SHORT_S))
    if coordinator.rank == 0:
        os.kill(pid, signal.SIGCONT)
    return [told, values_in_rank_order(coordinator)]


def the_stopped_host_of_the_rendezvous_store(coordinator: Coordinator) -> Any:
    rank, pid = coordinator.rank, pids(coordinator)[0]
    host = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False) if rank == 0 else None
    port = coordinator.broadcast("port", {"port": host.port if host else 0})["port"]
    store = host or dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    hosted = StoreCoordinator(store, rank=rank, world_size=coordinator.world_size, session="hosted", timeout_s=60)
    hosted.barrier("begin")
    coordinator.barrier("begun")  # rank 0 may leave the other barrier first
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    else:
        await_stop(pid)
    told = outcome(lambda: hosted.agree("save", {}, lambda _: {}, timeout_s=SHORT_S))
    if rank != 0:
        keys().set(f"told/{rank}", "")
    if rank == 1:
        keys().wait([f"told/{other}" for other in (1, 2, 3)])
        os.kill(pid, signal.SIGCONT)
    found = [told, values_in_rank_order(hosted)]
    coordinator.barrier("end")  # the host must outlive what the others still read
    return found


def the_host_of_the_rendezvous_store_may_end_when_it_has_closed(coordinator: Coordinator) -> Any:
    rank = coordinator.rank
    host = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False) if rank == 0 else None
    port = coordinator.broadcast("port", {"port": host.port if host else 0})["port"]
    store = host or dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    hosted = StoreCoordinator(store, rank=rank, world_size=coordinator.world_size, session="hosted", timeout_s=60)
    found = values_in_rank_order(hosted)
    hosted.close()
    left = rank != 0 or not any(store.check([f"{hosted._prefix}/0/{other}"]) for other in (1, 2, 3))
    coordinator.barrier("end")
    return [found, left]


def ctrl_c_gets_through(coordinator: Coordinator) -> Any:
    pid = pids(coordinator)[3]
    if coordinator.rank == 0:
        await_arrival(coordinator, 3)
        keys().set("interrupted at", str(time.monotonic()))  # one clock for all processes of a machine
        os.kill(pid, signal.SIGINT)
    try:
        if coordinator.rank in (1, 2):
            keys().wait(["interrupted at"])
        told = outcome(lambda: coordinator.agree("save", {}, collect))
    except KeyboardInterrupt:
        told = time.monotonic() - float(keys().get("interrupted at")) < 30
    return [told, values_in_rank_order(coordinator)]


SCENARIOS = [
    values_in_rank_order,
    a_save_costs_one_agreement_of_two_rounds,
    two_coordinators_side_by_side,
    keys_of_an_earlier_incarnation_are_not_believed,
    many_coordinators_in_a_row,
    a_rank_that_makes_its_coordinator_too_late,
    a_large_value,
    while_a_collective_of_the_training_is_under_way,
    a_rank_that_was_stopped_before_it_came,
    a_rank_that_was_stopped_while_it_waited,
    the_stopped_host_of_the_rendezvous_store,
    the_host_of_the_rendezvous_store_may_end_when_it_has_closed,
    ctrl_c_gets_through,
]


def everything(rank: int) -> dict[str, Any]:
    """Play every scenario; return what each rank found, by scenario, and what the others find after rank 3 was killed."""
    coordinator = connect(timeout_s=60)
    found = {scenario.__name__: scenario(coordinator) for scenario in SCENARIOS}
    before = coordinator.agree("results", found, collect)["all"]

    host = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False) if rank == 3 else None
    port = coordinator.agree("port", {"port": host.port if host else 0}, lambda values: values[3])["port"]
    store = host or dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    hosted = StoreCoordinator(store, rank=rank, world_size=4, session="hosted", timeout_s=60)
    hosted.barrier("begin")
    coordinator.barrier("end")
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    killed = outcome(lambda: coordinator.agree("save", {}, collect, timeout_s=SHORT_S))
    lost = [outcome(lambda: hosted.barrier("save")) for _ in range(2)]
    return {"before": before, "killed": killed, "lost": lost}


def one_fails_and_one_hangs(rank: int) -> None:
    if rank == 0:
        raise ValueError("no such luck")
    while True:
        signal.pause()
