"""Real faults of system calls, in the real trainer and its real writer, by strace: killed, full, broken, and silently not written.

After each: the old commit or the new one bit for bit and nothing between, and a next run that resumes, saves and clears what was left.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syckpt.testing.injection import CHANGES, Call, Victims, calls_of, no_strace, strace

REASON = no_strace()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

WRITES = ("pwritev", "pwritev2")
OLD, NEW, NEXT = 1, 2, 9


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    with Victims(Path(__file__).with_name("victims.py")) as server:
        yield server


@pytest.fixture(scope="module")
def base(victims: Victims, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base") / "run"
    assert is_id(victims.run("syckpt", "save once", root, step=OLD))
    return root


@pytest.fixture(scope="module")
def calls(victims: Victims, base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Return every system call of a save that changes the disk."""
    directory = tmp_path_factory.mktemp("calls")
    return trace(victims, base, directory, action="save once")


def trace(victims: Victims, base: Path, directory: Path, *, action: str, **options: Any) -> list[Call]:
    root = copy(base, directory / "run")
    pid = victims.start("syckpt", action, root, step=NEW, **options)
    with strace(f"trace={CHANGES}", pid=pid, log=str(directory / "log")):
        victims.go()
    found = [call for call in calls_of(str(directory / "log")) if call.name != "write"]  # pipes and logs
    assert {"fsync", "linkat"} <= {call.name for call in found}
    return found


def copy(base: Path, target: Path) -> Path:
    shutil.copytree(base, target)
    return target


def is_id(outcome: Any) -> bool:
    return isinstance(outcome, str) and re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{16}", outcome) is not None


def what_is_wrong(victims: Victims, root: Path, *, steps: set[int] = frozenset({OLD, NEW})) -> list[str]:  # type: ignore[assignment]
    """Return what a look at everything and a next run find, of what should hold after any fault."""
    wrong = []
    tip = victims.run("syckpt", "load", root)
    if not (isinstance(tip, dict) and tip["exact"] and tip["step"] in steps):
        return [f"loaded {tip}"]
    found = victims.run("syckpt", "after", root, step=NEXT)
    if not isinstance(found, dict):
        return [f"next run: {found}"]
    steps_found = [commit["step"] for commit in found["commits"]]
    if (
        not all(commit["exact"] for commit in found["commits"])
        or steps_found != sorted(steps_found, reverse=True)
        or OLD not in steps_found
    ):
        wrong.append(f"commits {found['commits']}")
    if not is_id(found["saved"]) or found["tip"] != {"step": NEXT, "exact": True}:
        wrong.append(f"next save {found['saved']}, {found['tip']}")
    if found["errors"] or found["leftovers"]:
        wrong.append(f"left {found['errors']} {found['leftovers']}")
    return wrong


def test_a_process_killed_before_any_system_call_leaves_the_old_commit_or_the_new_one(
    victims: Victims, base: Path, calls: list[Call], tmp_path: Path
) -> None:
    wrong = []
    for call in calls:
        root = copy(base, tmp_path / f"{call.name}-{call.number}")
        pid = victims.start("syckpt", "save once", root, step=NEW)
        with strace(f"inject={call.name}:signal=SIGKILL:when={call.number}", pid=pid):
            victims.go()
        wrong += [f"{call}: {text}" for text in what_is_wrong(victims, root)]
        shutil.rmtree(root)
    assert wrong == []


# -- while old commits go ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(victims: Victims, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grown") / "run"
    assert all(map(is_id, victims.run("syckpt", "grow", root, steps=4)))
    return root


def test_retention_gc_and_repack_killed_before_any_system_call_leave_the_kept_commit_whole(
    victims: Victims, grown: Path, tmp_path: Path
) -> None:
    root = copy(grown, tmp_path / "traced")
    pid = victims.start("syckpt", "clean", root)
    with strace(f"trace={CHANGES}", pid=pid, log=str(tmp_path / "log")):
        assert (victims.go() or {}).get("value") == []
    calls = [call for call in calls_of(str(tmp_path / "log")) if call.name != "write"]
    assert {"unlinkat", "linkat", "fsync"} <= {call.name for call in calls}
    wrong = []
    for call in calls:
        root = copy(grown, tmp_path / f"{call.name}-{call.number}")
        pid = victims.start("syckpt", "clean", root)
        with strace(f"inject={call.name}:signal=SIGKILL:when={call.number}", pid=pid):
            victims.go()
        tip = victims.run("syckpt", "load", root)
        again = victims.run("syckpt", "clean", root, later_s=2 * 86400)
        found = victims.run("syckpt", "after", root, step=NEXT)
        expected = {
            "commits": [{"step": 4, "exact": True}],
            "before": [],
            "tip": {"step": NEXT, "exact": True},
            "errors": [],
            "leftovers": [],
        }
        saved = None
        if isinstance(found, dict):
            saved = found.pop("saved")
        if tip != {"step": 4, "exact": True} or again != [] or not is_id(saved) or found != expected:
            wrong.append(f"{call}: {tip}, {again}, {saved}, {found}")
        shutil.rmtree(root)
    assert wrong == []


def what_cleaning_left_wrong(victims: Victims, root: Path, *, steps: set[int]) -> list[str]:
    """Return what a look at the newest commit, a cleaning two days later and a next run find, of what should hold after any fault."""
    tip = victims.run("syckpt", "load", root)
    again = victims.run("syckpt", "clean", root, later_s=2 * 86400)
    found = victims.run("syckpt", "after", root, step=NEXT)
    if not (isinstance(tip, dict) and tip["exact"] and tip["step"] in steps) or again != [] or not isinstance(found, dict):
        return [f"{tip}, {again}, {found}"]
    saved = found.pop("saved")
    expected = {"commits": [tip], "before": [], "tip": {"step": NEXT, "exact": True}, "errors": [], "leftovers": []}
    return [] if is_id(saved) and found == expected else [f"{tip}, {saved}, {found}"]


def test_a_writer_killed_at_any_change_of_its_retention_leaves_a_whole_commit_and_the_next_run_goes_on(
    victims: Victims, grown: Path, tmp_path: Path
) -> None:
    for name in ("plain", "keeping"):
        (tmp_path / name).mkdir()
    plain = trace(victims, grown, tmp_path / "plain", action="save once")
    keeping = trace(victims, grown, tmp_path / "keeping", action="save and keep one")
    numbers = {(call.name, call.number) for call in plain}
    calls = [call for call in keeping if (call.name, call.number) not in numbers]
    assert {"unlink", "unlinkat"} & {call.name for call in calls}
    wrong = []
    for call in calls:
        root = copy(grown, tmp_path / f"{call.name}-{call.number}")
        pid = victims.start("syckpt", "save and keep one", root, step=5)
        with strace(f"inject={call.name}:signal=SIGKILL:when={call.number}", pid=pid):
            victims.go()
        wrong += [f"{call}: {text}" for text in what_cleaning_left_wrong(victims, root, steps={4, 5})]
        shutil.rmtree(root)
    assert wrong == []


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_call_that_fails_in_a_cleaning_is_told_and_the_next_one_completes_it(
    victims: Victims, grown: Path, tmp_path: Path, error: str
) -> None:
    root = copy(grown, tmp_path / "traced")
    pid = victims.start("syckpt", "clean", root)
    with strace(f"trace={CHANGES}", pid=pid, log=str(tmp_path / "log")):
        victims.go()
    wrong, told = [], 0
    for call in calls_of(str(tmp_path / "log")):
        if call.name not in (*WRITES, "fsync", "linkat", "unlink", "unlinkat"):
            continue
        root = copy(grown, tmp_path / f"{call.name}-{call.number}")
        pid = victims.start("syckpt", "clean", root)
        with strace(f"inject={call.name}:error={error}:when={call.number}", pid=pid):
            outcome = victims.go() or {}
        told += "StoreError" in outcome.get("error", "")
        if outcome.get("value") != [] and "StoreError" not in outcome.get("error", ""):
            wrong.append(f"{call}: {outcome}")
        wrong += [f"{call}: {text}" for text in what_cleaning_left_wrong(victims, root, steps={4})]
        shutil.rmtree(root)
    assert wrong == []
    assert told > 0


# -- calls that fail -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_call_that_fails_fails_at_most_its_save_and_the_next_save_works(
    victims: Victims, base: Path, calls: list[Call], tmp_path: Path, error: str
) -> None:
    wrong, failed = [], 0
    for call in calls:
        if call.name not in (*WRITES, "fsync"):
            continue
        root = copy(base, tmp_path / f"{call.name}-{call.number}")
        pid = victims.start("syckpt", "save", root, step=NEW)
        with strace(f"inject={call.name}:error={error}:when={call.number}", pid=pid):
            result = victims.go()
        # It meets every process and thread that comes to its n-th call of that kind, each once: so perhaps more than one save.
        outcomes = (result or {}).get("value") or [str(result)]
        first = outcomes[0]
        failed += not is_id(first)
        if not is_id(first) and "StoreError" not in first:
            wrong.append(f"{call}: {first}")
        # Where it met the trainer before it could save at all, the next run saves.
        if len(outcomes) > 1 and not is_id(outcomes[-1]):
            wrong.append(f"{call}: next saves {outcomes[1:]}")
        if error == "EIO" and call.name in WRITES and not is_id(first):
            wrong.append(f"{call}: not tried again: {first}")
        wrong += [f"{call}: {text}" for text in what_is_wrong(victims, root, steps=set(range(OLD, NEW + 4)))]
        shutil.rmtree(root)
    assert wrong == []
    assert failed > 0


def test_a_write_that_is_silently_lost_at_the_end_is_found_by_the_size(
    victims: Victims, base: Path, calls: list[Call], tmp_path: Path
) -> None:
    wrong, failed = [], 0
    for call in calls:
        if call.name not in WRITES or not call.returned:
            continue
        root = copy(base, tmp_path / f"{call.name}-{call.number}")
        pid = victims.start("syckpt", "save once", root, step=NEW)
        with strace(f"inject={call.name}:retval={call.returned}:when={call.number}", pid=pid):
            result = victims.go()
        outcome = (result or {}).get("value", str(result))
        failed += not is_id(outcome)
        tip = victims.run("syckpt", "load", root)
        report = victims.run("syckpt", "verify", root)
        if isinstance(tip, dict):
            # Only the header of a blob lies inside of it: it informs, and the tensors behind it are whole.
            inside = any("its header" in text for text in report["errors"])
            good = tip["exact"] and tip["step"] in (OLD, NEW) and (inside or not report["errors"]) and not report["damaged"]
        else:
            # It met another process's write of another size: the file has its length, with a hole in it. It is named, and passed over.
            resumed = victims.run("syckpt", "resume", root)
            good = (
                tip.startswith("IntegrityError")
                and report["errors"]
                and resumed["told"]
                and (resumed["step"], resumed["exact"]) == (OLD, True)
            )
        if not good:
            wrong.append(f"{call}: {outcome}, loaded {tip}, verified {report}")
        shutil.rmtree(root)
    assert wrong == []
    assert failed > 3


def test_a_write_lost_inside_is_named_by_the_next_load_and_by_verify_and_resume_falls_back(victims: Victims, tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert is_id(victims.run("syckpt", "save once", base, step=OLD, big=True))
    (tmp_path / "traced").mkdir()
    found = trace(victims, base, tmp_path / "traced", action="save once", big=True)
    whole = next(call for call in found if call.name in WRITES and call.returned == 8 << 20)
    root = copy(base, tmp_path / "run")
    pid = victims.start("syckpt", "save once", root, step=NEW, big=True)
    with strace(f"inject={whole.name}:retval={whole.returned}:when={whole.number}", pid=pid):
        result = victims.go()
    assert result is not None
    commit = result["value"]
    assert is_id(commit)
    blob = f"objects/{commit}/r00000.safetensors"
    error = victims.run("syckpt", "load", root)
    assert error.startswith("IntegrityError")
    assert blob in error
    resumed = victims.run("syckpt", "resume", root, big=True)
    assert (resumed["step"], resumed["exact"]) == (OLD, True)
    assert any(blob in text for text in resumed["told"])
    report = victims.run("syckpt", "verify", root)
    assert report["damaged"] == [commit]
    assert all(blob in text for text in report["errors"])
    assert any("tensor net/noise, block 1" in text for text in report["errors"])
    # Once and for all: the mark is there, and nothing is read in vain.
    assert (root / f".syckpt/objects/{commit}.damaged").exists()
    resumed = victims.run("syckpt", "resume", root, big=True)
    assert (resumed["step"], resumed["exact"]) == (OLD, True)
