"""How long a newcomer waits for a branch, and for whom: leases decide that, and nothing else."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from typing import Any

import pytest

from syckpt.errors import ConflictError
from syckpt.objects.refs import Lease, Owner
from syckpt.repo import leases
from syckpt.repo.owner import is_dead, owner_of, this_process

ELSEWHERE = Owner("another-host", "boot", "pid:[1]", 4711, 99)


@pytest.fixture
def living() -> Any:
    """Another process of this machine that lives."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield owner_of(process.pid)
        process.kill()


class Clock:
    """Time that passes only while somebody sleeps; `at` says what happens when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self._began_ns = time.time_ns()
        self.at: dict[float, Any] = {}
        monkeypatch.setattr(leases, "time", self)

    def time_ns(self) -> int:
        return self._began_ns + int(self.now_s * 1e9)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for when in sorted(self.at):
            if when <= self.now_s:
                self.at.pop(when)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def leave(desk: Any, trainer: Owner, *, clock: Clock, left_s: float = 30.0, run: str = "other", token: str = "theirs") -> Lease:
    lease = Lease("main", run, 1, token, trainer, None, clock.time_ns() + int(left_s * 1e9))
    leases.write(desk.repository, lease)
    return lease


def arrive(desk: Any, *, run: str = "mine") -> None:
    leases.await_holder(desk.repository, "main", run=run, token="mine")


def test_nobody_waits_where_nobody_holds(desk: Any, clock: Clock) -> None:
    arrive(desk)
    assert clock.now_s == 0


def test_a_living_holder_of_another_run_is_named_at_once(desk: Any, clock: Clock, living: Owner) -> None:
    leave(desk, living, clock=clock)
    with pytest.raises(ConflictError, match=rf"'main' is being written by process {living.pid} on .*run other, generation 1.*branch="):
        arrive(desk)
    assert clock.now_s == 0


def test_a_living_holder_is_a_conflict_though_its_lease_ran_out(desk: Any, clock: Clock, living: Owner) -> None:
    # It is only late: the process is there to be seen.
    leave(desk, living, clock=clock, left_s=-1000)
    with pytest.raises(ConflictError, match=f"process {living.pid}"):
        arrive(desk)


def test_an_older_incarnation_of_the_same_run_is_taken_over_at_once(desk: Any, clock: Clock, living: Owner) -> None:
    leave(desk, living, clock=clock, run="mine")
    arrive(desk)
    assert clock.now_s == 0


@pytest.mark.parametrize("change", ["start", "boot", "pid"])
def test_a_dead_holder_is_taken_over_at_once(desk: Any, clock: Clock, living: Owner, change: str) -> None:
    """Of a process whose number lives on as another's, of one from before a restart, and of one that is gone."""
    other = {"start": living.start + 1, "boot": "another-boot", "pid": 2**22 + 1}[change]
    leave(desk, replace(living, **{change: other}), clock=clock)
    arrive(desk)
    assert clock.now_s == 0


@pytest.mark.parametrize("unknown", [{"host": "another-host"}, {"pidns": "pid:[1]"}])
def test_a_holder_elsewhere_is_waited_for_until_its_lease_runs_out(desk: Any, clock: Clock, unknown: dict[str, str]) -> None:
    owner = replace(this_process(), **unknown)
    assert is_dead(owner) is None
    leave(desk, owner, clock=clock, left_s=12.5)
    arrive(desk)
    assert 12.5 <= clock.now_s < 13.6


def test_an_expired_lease_from_elsewhere_is_not_waited_for(desk: Any, clock: Clock) -> None:
    leave(desk, ELSEWHERE, clock=clock, left_s=-0.001)
    arrive(desk)
    assert clock.now_s == 0


def test_a_holder_elsewhere_that_renews_is_named(desk: Any, clock: Clock) -> None:
    lease = leave(desk, ELSEWHERE, clock=clock, left_s=20)
    clock.at[9.5] = lambda: leases.write(desk.repository, replace(lease, expires_ns=clock.time_ns() + 30 * 10**9))
    with pytest.raises(ConflictError, match="process 4711 on another-host"):
        arrive(desk)
    assert clock.now_s == 10


def test_a_holder_elsewhere_that_gives_back_is_waited_for_no_longer(desk: Any, clock: Clock) -> None:
    leave(desk, ELSEWHERE, clock=clock)
    clock.at[3.0] = lambda: leases.release(desk.repository, "main", token="theirs")
    arrive(desk)
    assert clock.now_s == 3


def test_a_lease_by_a_clock_that_is_hours_ahead_is_waited_for_no_longer_than_any(desk: Any, clock: Clock) -> None:
    leave(desk, ELSEWHERE, clock=clock, left_s=7200)
    arrive(desk)
    assert clock.now_s == leases.LEASE_S


def test_only_the_holder_gives_a_lease_back(desk: Any, clock: Clock) -> None:
    lease = leave(desk, ELSEWHERE, clock=clock)
    leases.release(desk.repository, "main", token="mine")
    assert leases.read(desk.repository, "main") == lease


def test_a_damaged_lease_keeps_nobody_out(desk: Any, clock: Clock) -> None:
    leave(desk, ELSEWHERE, clock=clock)
    desk.store.replace("leases/main.json", b"torn")
    arrive(desk)
    assert clock.now_s == 0


def test_a_lease_that_was_waited_for_decides_nothing(desk: Any, make_desk: Any, clock: Clock) -> None:
    """The holder elsewhere was only slow: the records say which of the two goes on."""
    desk.open()
    leave(desk, ELSEWHERE, clock=clock, left_s=5)
    other = make_desk(desk.store, run="newcomer")
    arrive(other, run="newcomer")
    other.open()
    with pytest.raises(ConflictError, match="run newcomer"):
        desk.save()
    assert other.save().generation == 2
