"""What comes after a load that met damage: no save takes what is half restored, and none points to bytes that are known to be damaged."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syckpt
from syckpt import CheckpointManager
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root

NBYTES = 2 * 4 * 128 * 128


def filled(value: float) -> nn.ModuleDict:
    """Return two layers of 64 KiB that hold that value."""
    model = nn.ModuleDict({name: nn.Linear(128, 128, bias=False) for name in ("first", "last")})
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(value + number)
    return model


def flip(root: Path, commit: object) -> None:
    """Damage the last tensor that a commit stored."""
    with (root / f".syckpt/objects/{commit}/r00000.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def manager(root: Path, **options: Any) -> CheckpointManager:
    config = CheckpointManager.Config(compression="none")
    return CheckpointManager(root, config, **{"rng": False, "save_on_exit": False, "auto_resume": False, **options})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A commit `damaged`, whose last layer cannot be read, and a whole one, `whole`."""
    with manager(tmp_path / "run") as ckpt:
        flip(tmp_path / "run", ckpt.save("damaged", {"m": filled(1.0).state_dict()}, wait=True))
        ckpt.save("whole", {"m": filled(11.0).state_dict()}, wait=True)
    return tmp_path / "run"


# -- what is half restored -----------------------------------------------------------------------------------------------------------


def by_another_manager(ckpt: CheckpointManager, root: Path, rev: str, into: dict[str, Any]) -> None:
    with manager(root, branch="reader") as other:
        other.load(rev, into=into)


def by_a_manager_of_paths(ckpt: CheckpointManager, root: Path, rev: str, into: dict[str, Any]) -> None:
    with CheckpointManager(CheckpointManager.Config()) as other:
        other.load(root / rev, into=into)


READERS: dict[str, Callable[[CheckpointManager, Path, str, dict[str, Any]], object]] = {
    "manager": lambda ckpt, root, rev, into: ckpt.load(rev, into=into),
    "another manager": by_another_manager,
    "manager of paths": by_a_manager_of_paths,
    "no manager": lambda ckpt, root, rev, into: syckpt.load(root, rev, into=into),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_what_a_load_left_half_restored_is_not_saved_until_it_is_whole(root: Path, read: Callable[..., object]) -> None:
    live, other = filled(21.0), filled(31.0)
    half = r"half restored \(model/first.weight, model/last.weight\): load\(\) a whole commit into it"
    with manager(root) as ckpt:
        ckpt.model, ckpt.other = live, other
        with pytest.raises(syckpt.IntegrityError, match="its bytes are not those that were saved"):
            read(ckpt, root, "damaged", {"m": live.state_dict()})
        with pytest.raises(syckpt.StateError, match=half):
            ckpt.save()
        with pytest.raises(syckpt.StateError, match=half):
            ckpt.save(payload={"model": live.state_dict()})
        with pytest.raises(syckpt.StateError, match=half):
            ckpt.prewarm()
        ckpt.save("others", {"model": other.state_dict()}, wait=True)
        read(ckpt, root, "whole", {"m": live.state_dict()})
        ckpt.save("then", wait=True)
        found = ckpt.load("then")["model"]
    assert [found[name].unique().tolist() for name in ("first.weight", "last.weight")] == [[11.0], [12.0]]


def test_a_part_of_a_commit_makes_only_that_part_whole(root: Path) -> None:
    live = filled(21.0)
    with manager(root) as ckpt:
        ckpt.m = live
        with pytest.raises(syckpt.IntegrityError):
            ckpt.load("damaged", into={"m": live.state_dict()})
        ckpt.load("damaged", into={"m": live.state_dict()}, partial=["m.first.weight"])
        with pytest.raises(syckpt.StateError, match=r"half restored \(m/last.weight\)"):
            ckpt.save()
        ckpt.goto("whole")
        ckpt.save(wait=True)


def test_new_tensors_in_place_of_what_is_half_restored_may_be_saved(root: Path) -> None:
    live = filled(21.0)
    with manager(root) as ckpt:
        ckpt.m = live
        with pytest.raises(syckpt.IntegrityError):
            ckpt.load("damaged", into={"m": live.state_dict()})
        for layer in live.values():
            layer.weight = nn.Parameter(torch.zeros(128, 128))
        ckpt.save(wait=True)


def test_what_a_load_refuses_before_it_reads_stays_fit_to_be_saved(root: Path) -> None:
    live = filled(21.0)
    with manager(root) as ckpt:
        ckpt.m = live
        with pytest.raises(syckpt.StateError, match="missing from the commit"):
            ckpt.load("damaged", into={"m": {**live.state_dict(), "more": torch.zeros(1)}})
        ckpt.save(wait=True)


# -- what is damaged -----------------------------------------------------------------------------------------------------------------


def shared(root: Path) -> tuple[CheckpointManager, dict[str, Any]]:
    """Return a manager whose newest commit points to what an older one stored, since damaged; and what it saved."""
    ckpt = manager(root)
    payload = {"m": filled(1.0).state_dict()}
    first = ckpt.save("first", payload, wait=True)
    assert ckpt.save("second", payload, wait=True).result().stats["deduplicated_bytes"] == NBYTES
    flip(root, first)
    return ckpt, payload


def assert_stored_anew(ckpt: CheckpointManager, payload: dict[str, Any], name: str) -> None:
    assert ckpt.save(name, payload, wait=True).result().stats["deduplicated_bytes"] == 0
    assert ckpt.load(name)["m"]["last.weight"].unique().tolist() == [2.0]
    assert ckpt.verify(name)
    assert ckpt.save(f"{name}-again", payload, wait=True).result().stats["deduplicated_bytes"] == NBYTES


def test_a_save_after_a_load_that_met_damage_points_to_nothing_older(tmp_path: Path) -> None:
    ckpt, payload = shared(tmp_path)
    with pytest.raises(syckpt.IntegrityError):
        ckpt.load("first")
    assert_stored_anew(ckpt, payload, "third")
    ckpt.close()


def test_a_save_after_another_process_found_damage_points_to_nothing_older(tmp_path: Path) -> None:
    ckpt, payload = shared(tmp_path)
    assert len(verify(Repository.open(parse_root(tmp_path)), mark=True).marked) == 2
    assert_stored_anew(ckpt, payload, "third")
    ckpt.close()


def test_one_that_only_an_older_commit_has_is_not_pointed_to_either(tmp_path: Path) -> None:
    ckpt, payload = shared(tmp_path)
    # The check of one commit marks that one alone, and the newest leads to its rows.
    assert verify(Repository.open(parse_root(tmp_path)), "first", mark=True).marked == [str(ckpt.log()[1].id)]
    assert_stored_anew(ckpt, payload, "third")
    ckpt.close()


def test_damage_is_feared_until_a_save_that_points_to_nothing_older_is_durable(tmp_path: Path) -> None:
    ckpt, payload = shared(tmp_path)
    with pytest.raises(syckpt.IntegrityError):
        ckpt.load("second")
    writer = ckpt._saver.writer_pid
    assert writer is not None
    os.kill(writer, signal.SIGSTOP)
    lost = ckpt.save("lost", payload)
    os.kill(writer, signal.SIGKILL)
    with pytest.raises(syckpt.WriterDied):
        lost.result()
    with pytest.raises(syckpt.WriterDied):
        ckpt.save("not made", payload)
    assert_stored_anew(ckpt, payload, "third")
    ckpt.close()


# -- figures ---------------------------------------------------------------------------------------------------------------------------


def test_a_report_counts_the_bytes_of_its_own_restore(tmp_path: Path) -> None:
    with manager(tmp_path) as ckpt:
        ckpt.m = filled(1.0)
        ckpt.save("one", wait=True)
        counts = []
        for read in (ckpt.goto, ckpt.goto, ckpt.load):
            read("one")
            counts.append(ckpt.last_report.bytes_read)
        assert counts == [NBYTES] * 3
    with manager(tmp_path, auto_resume=True) as ckpt:
        ckpt.m = filled(1.0)
        ckpt.restore()
        assert ckpt.last_report.bytes_read == NBYTES
