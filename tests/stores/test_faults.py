"""Fault plans: a store told only by its spec stops, fails or waits at a chosen mutation."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from syckpt.errors import FormatError, StoreError
from syckpt.stores.base import Store, StoreSpec, open_store
from syckpt.stores.faults import FaultPlan, faulty
from syckpt.testing.stores import StoreSuite

CREATE = """
import json, sys
from syckpt.stores.base import StoreSpec, open_store
open_store(StoreSpec.from_wire(json.loads(sys.argv[1]))).create("key", b"content")
"""


class TestFaultyStoreWithoutFaults(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(faulty(tmp_path / ".syckpt", FaultPlan()))


def test_a_spec_survives_json(tmp_path: Path) -> None:
    plan = FaultPlan(stop_at=3, action="eio", gate="/gate", trace="/trace", only="link", spare=7, arm="/arm", lasting=True)
    spec = faulty(tmp_path, plan)
    assert StoreSpec.from_wire(json.loads(json.dumps(spec.to_wire()))) == spec


def test_the_trace_numbers_every_mutation(tmp_path: Path) -> None:
    store = open_store(faulty(tmp_path / ".syckpt", FaultPlan(trace=str(tmp_path / "trace"))))
    store.replace("HEAD", b"new")
    assert (tmp_path / "trace").read_text().splitlines() == [
        "1 mkdir HEAD",
        "2 fsync-dir HEAD",
        "3 mkdir HEAD",
        "4 fsync-dir HEAD",
        "5 open HEAD",
        "6 write HEAD",
        "7 fsync HEAD",
        "8 replace HEAD",
        "9 fsync-dir HEAD",
    ]


def test_a_plan_that_sees_only_links_counts_only_them(tmp_path: Path) -> None:
    store = open_store(faulty(tmp_path, FaultPlan(stop_at=2, action="error", only="link")))
    store.create("first", b"")
    with pytest.raises(StoreError, match="injected fault"):
        store.create("second", b"")
    store.create("third", b"")
    assert store.list() == ["first", "third"]


def test_stores_of_one_spec_count_together(tmp_path: Path) -> None:
    spec = faulty(tmp_path, FaultPlan(stop_at=2, action="error", only="link"))
    open_store(spec).create("first", b"")
    with pytest.raises(StoreError):
        open_store(spec).create("second", b"")


@pytest.mark.parametrize(
    ("action", "message"), [("enospc", "No space left .* bytes are free"), ("eio", "cannot fsync .*Input/output error")]
)
def test_an_injected_errno_is_reported_like_a_real_one(tmp_path: Path, action: str, message: str) -> None:
    store = open_store(faulty(tmp_path, FaultPlan(stop_at=1, action=action, only="fsync")))
    with pytest.raises(StoreError, match=message):
        store.create("key", b"content")
    assert store.list() == []


def test_a_kill_in_another_process_leaves_the_key_absent(tmp_path: Path) -> None:
    spec = faulty(tmp_path / ".syckpt", FaultPlan(stop_at=1, action="kill", only="link"))
    done = subprocess.run([sys.executable, "-c", CREATE, json.dumps(spec.to_wire())], check=False)
    assert done.returncode == -signal.SIGKILL
    assert open_store(spec).list() == []


def test_a_stop_in_another_process_leaves_the_key_absent_until_it_is_continued(tmp_path: Path) -> None:
    spec = faulty(tmp_path / ".syckpt", FaultPlan(stop_at=1, action="stop", only="link"))
    with subprocess.Popen([sys.executable, "-c", CREATE, json.dumps(spec.to_wire())]) as creator:
        os.waitid(os.P_PID, creator.pid, os.WSTOPPED | os.WNOWAIT)
        assert open_store(spec).list() == []
        creator.send_signal(signal.SIGCONT)
        assert creator.wait() == 0
    assert open_store(spec).list() == ["key"]


def test_a_gate_holds_the_mutation_until_it_is_opened_once(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    store = open_store(faulty(tmp_path / ".syckpt", FaultPlan(gate=str(gate), only="link")))
    creator = Thread(target=store.create, args=("key", b"content"))
    creator.start()
    with gate.open("wb"):  # opens when the creator waits
        assert store.list() == []
    creator.join()
    store.create("later", b"")
    assert store.list() == ["key", "later"]


def test_a_spared_process_neither_counts_nor_stops(tmp_path: Path) -> None:
    spec = faulty(tmp_path / ".syckpt", FaultPlan(stop_at=1, action="kill", trace=str(tmp_path / "trace"), spare=os.getpid()))
    open_store(spec).create("key", b"content")
    assert not (tmp_path / "trace").exists()
    done = subprocess.run([sys.executable, "-c", CREATE, json.dumps(spec.to_wire())], check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_plan_can_be_armed_again_and_again(tmp_path: Path) -> None:
    arm = tmp_path / "arm"
    store = open_store(faulty(tmp_path / ".syckpt", FaultPlan(action="error", only="link", arm=str(arm))))
    store.create("first", b"")
    for number in (1, 2):
        arm.write_text(str(number))
        for count in range(1, number):
            store.create(f"good-{number}-{count}", b"")
        with pytest.raises(StoreError, match="injected fault"):
            store.create(f"bad-{number}", b"")
        assert not arm.exists()
    assert store.list() == ["first", "good-2-1"]


def test_a_lasting_fault_ends_when_the_plan_is_disarmed(tmp_path: Path) -> None:
    arm = tmp_path / "arm"
    store = open_store(faulty(tmp_path / ".syckpt", FaultPlan(stop_at=2, action="eio", only="link", arm=str(arm), lasting=True)))
    store.create("first", b"")
    for name in ("second", "third"):
        with pytest.raises(StoreError, match="Input/output error"):
            store.create(name, b"")
    arm.write_text("0")
    store.create("fourth", b"")
    assert store.list() == ["first", "fourth"]


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(FormatError, match="unknown fault action 'explode'"):
        FaultPlan(action="explode")
