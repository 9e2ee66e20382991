"""What faults of processes, system calls and disks do to a checkpoint: syckpt, and the others beside it. Prints the page of the docs.

    python tests/crash/table.py [--most N] > syckpt/docs/faults.md

Every case: one checkpoint is there, and the next one meets the fault. Then the newest is loaded, as the documentation of each shows it,
in another process. Needs Linux, root (mounts) and strace. `--most`: how many of the places of one fault are tried, evenly spaced.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from syckpt.testing.injection import CHANGES, Call, Image, Victims, calls_of, no_mounts, no_strace, remount, strace, tmpfs

SYSTEMS = ("syckpt", "torch.save", "torch.save and rename", "DCP")
OLD, NEW = 1, 2
WRITES = ("pwritev", "pwritev2", "write", "pwrite64", "writev")
SYNCS = ("fsync", "fdatasync")


@dataclass
class Row:
    """One fault: by system, how often it ended how."""

    fault: str
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, system: str, outcome: str) -> None:
        self.outcomes.setdefault(system, Counter())[outcome] += 1


class Bench:
    """Runs the cases."""

    def __init__(self, victims: Victims, directory: Path, most: int) -> None:
        self._victims = victims
        self._directory = directory
        self._most = most
        self._bases: dict[str, Path] = {}
        self._calls: dict[str, list[Call]] = {}
        for system in SYSTEMS:
            base = self._bases[system] = self._new()
            victims.run(system, "save once", base, step=OLD)
            root, log = self.copy(system), str(directory / "log")
            pid = victims.start(system, "save once", root, step=NEW)
            with strace(f"trace={CHANGES}", pid=pid, log=log):
                victims.go()
            # What is written to a pipe is no file: syckpt never calls `write` for one, and the last one of the others is the answer.
            found = calls_of(log)
            last = max((call.number for call in found if call.name == "write"), default=0)
            self._calls[system] = [c for c in found if c.name != "write" or (system != "syckpt" and c.number < last)]

    def _new(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._directory))

    def copy(self, system: str, target: Path | None = None) -> Path:
        root = (target or self._new()) / "run"
        shutil.copytree(self._bases[system], root)
        return root

    def calls(self, system: str, *names: str) -> list[Call]:
        """Return calls of a system's save, at most as many as are to be tried."""
        found = [call for call in self._calls[system] if not names or call.name in names]
        step = max(1, -(-len(found) // self._most))
        return found[::step]

    def judge(self, system: str, root: Path, reported: str | None) -> str:
        """Say what a load finds after a fault."""
        found = self._victims.run(system, "resume" if system == "syckpt" else "load", root)
        if not isinstance(found, dict):
            return "not loadable"
        if not found["exact"]:
            return "WRONG values"
        if found["step"] == OLD and reported is None and not found.get("told"):
            return "LOST silently"
        return "new" if found["step"] == NEW else "old"

    def save(self, system: str, root: Path, *expressions: str, **options: Any) -> str | None:
        """Save under a fault; return what was reported, None for success."""
        pid = self._victims.start(system, "save once", root, step=NEW, **options)
        if expressions:
            with strace(*expressions, pid=pid):
                result = self._victims.go()
        else:
            result = self._victims.go()
        if result is None:
            return "killed"
        if "error" in result:
            return str(result["error"])
        value = result["value"]
        return value if isinstance(value, str) and ("Error" in value or "Died" in value) else None

    def each(self, fault: str, expression: Callable[[Call], str | None], *names: str) -> Row:
        """Try a fault of system calls at its places."""
        row = Row(fault)
        for system in SYSTEMS:
            for call in self.calls(system, *names):
                wanted = expression(call)
                if wanted is None:
                    continue
                root = self.copy(system)
                row.add(system, self.judge(system, root, self.save(system, root, wanted)))
                shutil.rmtree(root.parent)
        return row

    def on(self, fault: str, options: str, harm: Callable[[Path], None], heal: Callable[[Path], None]) -> Row:
        """Try a fault of a whole file system, once."""
        row = Row(fault)
        for system in SYSTEMS:
            with tmpfs(self._new(), options) as disk:
                root = self.copy(system, disk)
                harm(disk)
                reported = self.save(system, root)
                heal(disk)
                row.add(system, self.judge(system, root, reported))
        return row

    def power(self, fault: str, *, killed: bool) -> Row:
        """Cut the power: after a save has returned, or before one of its system calls."""
        row = Row(fault)
        for system in SYSTEMS:
            blank = Image(self._directory / "blank.img")
            mount, cut_mount = self._new(), self._new()
            with blank.mounted(mount) as disk:
                self.copy(system, disk)
            for call in self.calls(system) if killed else [None]:
                live = blank.cut_off(self._directory / "live.img")
                with live.mounted(mount) as disk:
                    wanted = () if call is None else (f"inject={call.name}:signal=SIGKILL:when={call.number}",)
                    reported = self.save(system, disk / "run", *wanted)
                    cut = live.cut_off(self._directory / "cut.img")
                with cut.mounted(cut_mount) as disk:
                    row.add(system, self.judge(system, disk / "run", reported))
        return row


def _fill_bytes(disk: Path) -> None:
    left = os.statvfs(disk)
    with open(disk / "filler", "wb") as file:
        file.write(bytes(max(0, left.f_bavail * left.f_frsize - 64 * 1024)))


def _fill_inodes(disk: Path) -> None:
    (disk / "filler").mkdir()
    try:
        for number in range(10**6):
            (disk / "filler" / str(number)).touch()
    except OSError:
        (disk / "filler" / "0").unlink()


def _clear(disk: Path) -> None:
    filler = disk / "filler"
    shutil.rmtree(filler) if filler.is_dir() else filler.unlink()


def rows(bench: Bench) -> Iterator[Row]:
    yield bench.each(
        "killed before a system call that changes the disk", lambda call: f"inject={call.name}:signal=SIGKILL:when={call.number}"
    )
    yield bench.each("no space at a write (ENOSPC)", lambda call: f"inject={call.name}:error=ENOSPC:when={call.number}", *WRITES)
    yield bench.each("I/O error at a write (EIO)", lambda call: f"inject={call.name}:error=EIO:when={call.number}", *WRITES)
    yield bench.each("I/O error at a sync (EIO)", lambda call: f"inject={call.name}:error=EIO:when={call.number}", *SYNCS)
    yield bench.each(
        "a write that reports success and writes nothing",
        lambda call: f"inject={call.name}:retval={call.returned}:when={call.number}" if call.returned else None,
        *WRITES,
    )
    limited = Row("a file size limit (RLIMIT_FSIZE, 100 kB)")
    for system in SYSTEMS:
        root = bench.copy(system)
        limited.add(system, bench.judge(system, root, bench.save(system, root, file_nbytes=100_000)))
    yield limited
    yield bench.on("a disk with 64 kB left", "size=16m", _fill_bytes, _clear)
    yield bench.on("a disk with one inode left", "size=16m,nr_inodes=120", _fill_inodes, _clear)
    yield bench.on("a disk that became read-only", "size=16m", lambda disk: remount(disk, "ro"), lambda disk: remount(disk, "rw"))
    yield bench.power("loss of power before a system call", killed=True)
    yield bench.power("loss of power after the save has returned", killed=False)


_BAD = ("not loadable", "LOST silently", "WRONG values")


def _cell(outcomes: Counter[str]) -> str:
    tried = sum(outcomes.values())
    if not tried:
        return "-"
    bad = [f"**{outcomes[kind]} {kind}**" for kind in _BAD if outcomes[kind]]
    return ", ".join([f"{tried - sum(outcomes[kind] for kind in _BAD)} of {tried}", *bad])


def page(found: list[Row], most: int) -> str:
    """Return the Markdown."""
    tried = {system: sum(sum(row.outcomes.get(system, Counter()).values()) for row in found) for system in SYSTEMS}
    lost = {system: sum(row.outcomes.get(system, Counter())[kind] for row in found for kind in _BAD) for system in SYSTEMS}
    head = f"| fault | {' | '.join(SYSTEMS)} |\n|---|{'---|' * len(SYSTEMS)}"
    body = [f"| {row.fault} | {' | '.join(_cell(row.outcomes.get(system, Counter())) for system in SYSTEMS)} |" for row in found]
    sums = " | ".join(f"{tried[s]} tried, {tried[s] - lost[s]} survived, **lost: {lost[s]}**" for s in SYSTEMS)
    versions = f"Python {platform.python_version()}, torch {version('torch')}, syckpt {version('syckpt')}"
    return f"""# Faults tried, survived, lost

Made by `tests/crash/table.py --most {most}` on {datetime.now(timezone.utc):%d %B %Y}: Linux {platform.release().split("-")[0]},
{os.cpu_count()} cores, {versions}; one process, CPU tensors (1.4 MB), ext4 and tmpfs, default settings.

One checkpoint is there; the next one meets the fault; then another process takes up the newest as the documentation of each system
shows it. *Survived*: without anybody's help a checkpoint came back bit for bit, the new one, or the old one where somebody said so: the
save failed, or the resume named what is damaged and passed over it. *Not loadable*: loading raises, and somebody has to look for an older
one, if there is one. *LOST silently*: the save reported success, and the old one comes back without a word. *WRONG values*: neither state.

{head}
{chr(10).join(body)}
| **all** | {sums} |

* `syckpt`: a `CheckpointManager` on the directory, which resumes. `torch.save`: to one file, over the old one.
  `torch.save and rename`: to another name, then `os.replace`. `DCP`: `torch.distributed.checkpoint.save(..., no_dist=True)` to a new
  directory each time, `load` from the newest.
* System calls are killed or failed by strace at up to {most} places, evenly spaced over those that a save makes; each system makes its
  own. A killed process had not made the call.
* Loss of power: ext4 in a loop device (`commit=300,noauto_da_alloc`), whose backing file is copied while it is mounted; what is loaded is
  the copy, after the replay of its journal.
* After each of these, `tests/crash/` also checks that the next save works and that nothing is left over.
"""


@contextmanager
def _bench(most: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as directory, Victims(Path(__file__).with_name("victims.py")) as victims:
        yield Bench(victims, Path(directory), most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=20)
    most = parser.parse_args().most
    for missing in (no_strace(), no_mounts()):
        if missing:
            raise SystemExit(missing)
    with _bench(most) as bench:
        print(page(list(rows(bench)), most), end="")


if __name__ == "__main__":
    main()
