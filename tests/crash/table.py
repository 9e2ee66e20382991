"""What faults of processes, system calls and disks do to a checkpoint: syckpt, and the others beside it. Prints the page of the docs.

    python tests/crash/table.py [--most N] > syckpt/docs/faults.md

Every case of a save: one checkpoint is there, and the next one meets the fault. Then the newest is loaded, as the documentation of each
shows it, in another process. Every case of a cleaning: retention, repack or gc meets it; then everything that is not dropped is loaded.
Needs Linux, root (mounts) and strace. `--most`: how many of the places of one fault are tried, evenly spaced.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from syckpt.testing.injection import CHANGES, Call, Image, Victims, calls_of, no_mounts, no_strace, remount, strace, tmpfs

OLD, NEW = 1, 2
GROWN = 10
"""The steps of a run whose first blob holds, beside what the last commit needs, much that no commit needs any more."""
LIMIT_NBYTES = 50_000
WRITES = ("pwritev", "pwritev2", "write", "pwrite64", "writev")
SYNCS = ("fsync", "fdatasync")


@dataclass
class Row:
    """One fault: by column, how often it ended how."""

    fault: str
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, column: str, outcome: str) -> None:
        self.outcomes.setdefault(column, Counter())[outcome] += 1


class Bench:
    """Runs the cases of one table, whose columns are what meets the faults."""

    columns: tuple[str, ...]

    def __init__(self, victims: Victims, directory: Path, most: int) -> None:
        self.victims = victims
        self._directory = directory
        self._most = most
        self._bases: dict[str, Path] = {}
        self._calls: dict[str, list[Call]] = {}
        for column in self.columns:
            base = self._bases[column] = self._new()
            self.prepare(column, base)
            root, log = self.copy(column), str(directory / "log")
            pid = self.start(column, root)
            with strace(f"trace={CHANGES}", pid=pid, log=log):
                victims.go()
            # What is written to a pipe is no file: syckpt never calls `write` for one, and the last one of the others is the answer.
            found = calls_of(log)
            last = max((call.number for call in found if call.name == "write"), default=0)
            self._calls[column] = [c for c in found if c.name != "write" or (self.writes_plainly(column) and c.number < last)]

    def prepare(self, column: str, base: Path) -> None:
        """Make what is there before the fault."""
        raise NotImplementedError

    def start(self, column: str, root: Path, **options: Any) -> int:
        """Fork the process that is to meet the fault, which waits, and return its pid."""
        raise NotImplementedError

    def judge(self, column: str, root: Path, reported: str | None) -> str:
        """Say what is found after a fault."""
        raise NotImplementedError

    def writes_plainly(self, column: str) -> bool:
        """Whether it writes files by the system call `write`, too."""
        return False

    def _new(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._directory))

    def copy(self, column: str, target: Path | None = None) -> Path:
        root = (target or self._new()) / "run"
        shutil.copytree(self._bases[column], root)
        return root

    def calls(self, column: str, *names: str) -> list[Call]:
        """Return the system calls that something makes, at most as many as are to be tried."""
        found = [call for call in self._calls[column] if not names or call.name in names]
        step = max(1, -(-len(found) // self._most))
        return found[::step]

    def run(self, column: str, root: Path, *expressions: str, **options: Any) -> str | None:
        """Let something meet a fault; return what was reported, None for success."""
        pid = self.start(column, root, **options)
        if expressions:
            with strace(*expressions, pid=pid):
                result = self.victims.go()
        else:
            result = self.victims.go()
        if result is None:
            return "killed"
        if "error" in result:
            return str(result["error"])
        value = result["value"]
        return value if isinstance(value, str) and ("Error" in value or "Died" in value) else None

    def each(self, fault: str, expression: Callable[[Call], str | None], *names: str) -> Row:
        """Try a fault of system calls at its places."""
        row = Row(fault)
        for column in self.columns:
            for call in self.calls(column, *names):
                wanted = expression(call)
                if wanted is None:
                    continue
                root = self.copy(column)
                row.add(column, self.judge(column, root, self.run(column, root, wanted)))
                shutil.rmtree(root.parent)
        return row

    def limited(self, fault: str) -> Row:
        """Try a limit of the size of files, once."""
        row = Row(fault)
        for column in self.columns:
            root = self.copy(column)
            row.add(column, self.judge(column, root, self.run(column, root, file_nbytes=LIMIT_NBYTES)))
        return row

    def on(self, fault: str, options: str, harm: Callable[[Path], None], heal: Callable[[Path], None]) -> Row:
        """Try a fault of a whole file system, once."""
        row = Row(fault)
        for column in self.columns:
            with tmpfs(self._new(), options) as disk:
                root = self.copy(column, disk)
                harm(disk)
                reported = self.run(column, root)
                heal(disk)
                row.add(column, self.judge(column, root, reported))
        return row

    def power(self, fault: str, *, killed: bool) -> Row:
        """Cut the power: after it has returned, or before one of its system calls."""
        row = Row(fault)
        for column in self.columns:
            blank = Image(self._directory / "blank.img")
            mount, cut_mount = self._new(), self._new()
            with blank.mounted(mount) as disk:
                self.copy(column, disk)
            for call in self.calls(column) if killed else [None]:
                live = blank.cut_off(self._directory / "live.img")
                with live.mounted(mount) as disk:
                    wanted = () if call is None else (f"inject={call.name}:signal=SIGKILL:when={call.number}",)
                    reported = self.run(column, disk / "run", *wanted)
                    cut = live.cut_off(self._directory / "cut.img")
                with cut.mounted(cut_mount) as disk:
                    row.add(column, self.judge(column, disk / "run", reported))
        return row


class Saves(Bench):
    """A save meets the fault; the columns are systems."""

    columns = ("syckpt", "torch.save", "torch.save and rename", "DCP")

    def prepare(self, column: str, base: Path) -> None:
        self.victims.run(column, "save once", base, step=OLD)

    def start(self, column: str, root: Path, **options: Any) -> int:
        return self.victims.start(column, "save once", root, step=NEW, **options)

    def writes_plainly(self, column: str) -> bool:
        return column != "syckpt"

    def judge(self, column: str, root: Path, reported: str | None) -> str:
        found = self.victims.run(column, "resume" if column == "syckpt" else "load", root)
        if not isinstance(found, dict):
            return "not loadable"
        if not found["exact"]:
            return "WRONG values"
        if found["step"] == OLD and reported is None and not found.get("told"):
            return "LOST silently"
        return "new" if found["step"] == NEW else "old"


class Cleanings(Bench):
    """Retention, repack or gc of syckpt meets the fault."""

    columns = ("retain", "repack", "gc")

    def prepare(self, column: str, base: Path) -> None:
        self.victims.run("syckpt", "grow", base, steps=GROWN)
        if column != "retain":
            # A retention that could not move what is needed: its marks are there, and all of one blob.
            self.victims.run("syckpt", "retain", base, file_nbytes=LIMIT_NBYTES)
        if column == "gc":
            self.victims.run("syckpt", "desert", base)
            pid = self.victims.start("syckpt", "save once", base, step=GROWN + 1)
            with strace("inject=linkat:signal=SIGKILL:when=4", pid=pid):
                self.victims.go()
            assert os.listdir(base / ".syckpt/intents"), "the save was not cut off"

    def start(self, column: str, root: Path, **options: Any) -> int:
        if column == "gc":
            options["later_s"] = 15 * 86400  # the reflog protects nothing any more
        return self.victims.start("syckpt", column, root, **options)

    def judge(self, column: str, root: Path, reported: str | None) -> str:
        found = self.victims.run("syckpt", "after", root, step=GROWN + 1)
        if not isinstance(found, dict):
            return "not loadable"
        newest = [commit["step"] for commit in found["commits"][:1]]
        exact = all(commit["exact"] for commit in [*found["commits"], found["tip"]])
        if newest != [GROWN] or not exact:
            return "WRONG values"
        return "kept" if found["tip"]["step"] == GROWN + 1 else "no next save"


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
    yield bench.limited(f"a file size limit (RLIMIT_FSIZE, {LIMIT_NBYTES // 1000} kB)")
    yield bench.on("a disk with 64 kB left", "size=16m", _fill_bytes, _clear)
    yield bench.on("a disk with one inode left", "size=16m,nr_inodes=200", _fill_inodes, _clear)
    yield bench.on("a disk that became read-only", "size=16m", lambda disk: remount(disk, "ro"), lambda disk: remount(disk, "rw"))
    yield bench.power("loss of power before a system call", killed=True)
    yield bench.power("loss of power after it has returned", killed=False)


_BAD = ("not loadable", "LOST silently", "WRONG values", "no next save")


def _cell(outcomes: Counter[str]) -> str:
    tried = sum(outcomes.values())
    if not tried:
        return "-"
    bad = [f"**{outcomes[kind]} {kind}**" for kind in _BAD if outcomes[kind]]
    return ", ".join([f"{tried - sum(outcomes[kind] for kind in _BAD)} of {tried}", *bad])


def _table(columns: tuple[str, ...], found: list[Row]) -> str:
    head = f"| fault | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
    body = [f"| {row.fault} | {' | '.join(_cell(row.outcomes.get(column, Counter())) for column in columns)} |" for row in found]
    sums = []
    for column in columns:
        whole = sum((row.outcomes.get(column, Counter()) for row in found), Counter[str]())
        lost = sum(whole[kind] for kind in _BAD)
        sums.append(f"{whole.total()} tried, {whole.total() - lost} survived, **lost: {lost}**")
    return "\n".join([head, *body, f"| **all** | {' | '.join(sums)} |"])


def page(saves: list[Row], cleanings: list[Row], most: int) -> str:
    """Return the Markdown."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}, syckpt {version('syckpt')}"
    return f"""# Faults tried, survived, lost

Made by `tests/crash/table.py --most {most}` on {datetime.now(timezone.utc):%d %B %Y}: Linux {platform.release().split("-")[0]},
{os.cpu_count()} cores, {versions}; one process, CPU tensors (1.5 MB), ext4 and tmpfs, default settings.

## A save meets the fault

One checkpoint is there; the next one meets the fault; then another process takes up the newest as the documentation of each system
shows it. *Survived*: without anybody's help a checkpoint came back bit for bit, the new one, or the old one where somebody said so: the
save failed, or the resume named what is damaged and passed over it. *Not loadable*: loading raises, and somebody has to look for an older
one, if there is one. *LOST silently*: the save reported success, and the old one comes back without a word. *WRONG values*: neither state.

{_table(Saves.columns, saves)}

* `syckpt`: a `CheckpointManager` on the directory, which resumes. `torch.save`: to one file, over the old one.
  `torch.save and rename`: to another name, then `os.replace`. `DCP`: `torch.distributed.checkpoint.save(..., no_dist=True)` to a new
  directory each time, `load` from the newest.

## Retention, repack or gc meets the fault

Of {GROWN} commits the newest is to stay, and rows of the first that it needs are to move. `retain` drops the others; `repack` finds them
dropped by a retention that failed where it had to move rows; `gc` finds that too, two commits of a deleted branch, and a save that was cut
off. Then another process loads every commit that is not dropped, resumes, saves, and loads that. *Survived*: all of it came back bit for
bit, the newest of the {GROWN} among it.

{_table(Cleanings.columns, cleanings)}

## How

* System calls are killed or failed by strace at up to {most} places of a kind, evenly spaced over those that a column
  makes. A killed process had not made the call.
* Loss of power: ext4 in a loop device (`commit=300,noauto_da_alloc`), whose backing file is copied while it is mounted; what is loaded is
  the copy, after the replay of its journal.
* After each of these, `tests/crash/` also checks that the next save or cleaning works and that nothing is left over.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=20)
    most = parser.parse_args().most
    for missing in (no_strace(), no_mounts()):
        if missing:
            raise SystemExit(missing)
    with tempfile.TemporaryDirectory() as directory, Victims(Path(__file__).with_name("victims.py")) as victims:
        saves, cleanings = (list(rows(kind(victims, Path(directory), most))) for kind in (Saves, Cleanings))
    print(page(saves, cleanings, most), end="")


if __name__ == "__main__":
    main()
