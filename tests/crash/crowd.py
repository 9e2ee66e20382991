"""A crowd at one repository, without torch: committers that are killed and begun again, beside gc, repack, retention, verification, and
somebody who makes and deletes branches and tags. Then what is there is compared with what everybody was told.

    python crowd.py DIRECTORY '{"seed": 1, "committers": 20, "commits": 12, "kills": 30, "cleaners": 2}'

prints a summary as JSON, with a list of `problems`. Whatever it draws, it draws from the seed; who comes first the machine decides.

Committer i saves to its branch `b<i>`. Version v of its state follows from (i, v), so that every commit tells by its branch and step what
it has to hold. `i % 3 == 0`: keeps the last 3. `i % 4 == 1`: tags every third commit. `i % 5 == 2`: leaves a branch at every fourth.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from syckpt.errors import ConflictError, NotFoundError, SyckptError
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.repo import branches, collection, history
from syckpt.repo.collection import REFLOG_S, collect
from syckpt.repo.owner import this_process
from syckpt.repo.packing import Packed, Packer, Staged
from syckpt.repo.reader import Reader
from syckpt.repo.repacking import repack
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Keeper, Retention, retain
from syckpt.repo.survey import Survey
from syckpt.repo.transaction import Hold, Transaction, open_branch, recover, refuse_if_fenced
from syckpt.repo.verify import verify
from syckpt.stores.base import StoreSpec, open_store, parse_root
from syckpt.stores.faults import FaultPlan, faulty

KEEP = Retention(last=3)
TRUNK = 999
"""The number of the committer of `main`."""


@dataclass(frozen=True)
class Crowd:
    """How many, how long, and what is drawn."""

    seed: int = 1
    committers: int = 4
    commits: int = 5
    kills: int = 3
    cleaners: int = 1
    limit_s: int = 300


def content(number: int, version: int) -> dict[str, np.ndarray]:
    """Return the state of a committer: everybody's, its own (a little different each time), and what changes rarely or wholly."""
    own = np.random.default_rng([2, number]).standard_normal(3000, dtype=np.float32)
    return {
        "frozen": np.random.default_rng(1).standard_normal(5000, dtype=np.float32),
        "own": own + np.float32(1e-5 * version),
        "slow": np.random.default_rng([3, number, version // 4]).standard_normal(1500, dtype=np.float32),
        "wild": np.random.default_rng([4, number, version]).standard_normal(500, dtype=np.float32),
    }


class Committer:
    """One incarnation of a committer."""

    def __init__(self, spec: StoreSpec, number: int, *, branch: str | None = None) -> None:
        self.repository = Repository.open(spec)
        self.number = number
        self.branch = branch or f"b{number}"
        self.reader = Reader(self.repository, threads=1)
        cycle = 3 + number % 3
        self.packer = Packer(self.reader, rank=0, world_size=1, compression="fast", keyframe_every=cycle, threads=1)
        self.hold, self.newest = self._open()
        recover(self.repository, self.hold)

    def _open(self) -> tuple[Hold, Commit | None]:
        repository, head = self.repository, self.repository.refs.head(f"heads/{self.branch}")
        tip = None if head is None else head.commit
        trunk = history.log(repository, "main") if self.number != TRUNK else []
        start = trunk[self.number % len(trunk)] if trunk else None
        hold = open_branch(repository, self.branch, run=f"{self.branch} {os.getpid()}", expected=tip, start=start)
        return hold, None if hold.tip is None else repository.read_commit(hold.tip)

    @property
    def version(self) -> int:
        """How many commits of its own there are."""
        return self.newest.step if self.newest is not None and self.newest.branch == self.branch else 0

    def save(self, *, tags: tuple[str, ...] = ()) -> Commit:
        """Make the next commit, in the order of a writer process."""
        version, parent = self.version + 1, self.newest
        commit = ids.new_commit_id(
            fingerprint="00000000",
            repository=self.repository.id,
            run=self.hold.run,
            generation=self.hold.generation,
            sequence=version,
            nonce=secrets.token_bytes(16),
        )
        uses = self.packer.points_into(parent)
        transaction = Transaction(self.repository, commit, self.hold, uses=uses, owner=this_process())
        try:
            packed = self._pack(commit, parent, content(self.number, version))
            made = self._describe(commit, parent, packed, version, tags)
            self.hold, published = transaction.publish(made, hold=self.hold, reader=self.reader, locations=[packed.locations])
        except SyckptError:
            self.packer.failed()
            transaction.abort()
            refuse_if_fenced(self.repository, self.hold)
            raise
        self.packer.published()
        self.newest = published
        return published

    def _pack(self, commit: str, parent: Commit | None, arrays: dict[str, np.ndarray]) -> Packed:
        staged, memory = [], b""
        for name, array in arrays.items():
            staged.append(Staged(("model", name), array.dtype.name, array.shape, None, len(memory)))
            memory += array.tobytes()
        items = {"model": {"dict": [[name, {"tensor": index}] for index, name in enumerate(arrays)]}}
        return self.packer.pack(commit, parent=parent, staged=staged, memory=memoryview(memory), items=items, rng=None)

    def _describe(self, commit: str, parent: Commit | None, packed: Packed, version: int, tags: tuple[str, ...]) -> Commit:
        return Commit(
            id=commit,
            parents=() if parent is None else (parent.id,),
            parent_seals=() if parent is None else (parent.seal,),
            manifests=((0, packed.manifest_seal),),
            world_size=1,
            branch=self.branch,
            name=None,
            step=version,
            epoch=0,
            batch_idx=0,
            epoch_done=False,
            entered=False,
            metric=None,
            message="",
            tags=tags,
            config={},
            fingerprint="00000000",
            created_ns=1_767_225_600 * 10**9 + version,
            writer="crowd",
            run_id=self.hold.run,
            generation=self.hold.generation,
            sequence=version,
            rng_exact=True,
            stats={},
        )

    def close(self) -> None:
        self.packer.close()


def load(repository: Repository, commit: Commit) -> dict[str, bytes]:
    """Return the verified bytes of a commit's tensors, by a reader that has seen nothing yet."""
    reader = Reader(repository, threads=1)
    snapshot = reader.snapshot(commit)
    out = {entry.path[1]: bytearray(entry.nbytes) for entry in snapshot.manifest.entries}
    with reader.reading(commit):
        reader.read([(entry, place, memoryview(out[entry.path[1]])) for _, entry, place in snapshot.stored()])
    return {name: bytes(data) for name, data in out.items()}


def expected(commit: Commit) -> dict[str, bytes]:
    """Return what a commit has to hold."""
    number = TRUNK if commit.branch == "main" else int(commit.branch.removeprefix("b"))
    return {name: array.tobytes() for name, array in content(number, commit.step).items()}


# -- the processes ---------------------------------------------------------------------------------------------------------------


class Scene:
    """A directory with the repository, a journal of what each process was told, and a file that ends the others."""

    def __init__(self, directory: Path, crowd: Crowd) -> None:
        self.spec = parse_root(directory / "run")
        self.crowd = crowd
        self.directory = directory
        self._journal = os.open(directory / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, *words: object) -> None:
        """Append a line to the journal, whole or not at all."""
        os.write(self._journal, (" ".join(map(str, words)) + "\n").encode())

    def noted(self) -> list[list[str]]:
        return [line.split() for line in (self.directory / "journal").read_text().splitlines()]

    @property
    def is_over(self) -> bool:
        return (self.directory / "over").exists()

    def commit(self, number: int, kill_at: int | None) -> None:
        """Save until there are as many commits as asked for; `kill_at`: the mutation before which the process is killed."""
        spec = self.spec if kill_at is None else faulty(self.spec.path, FaultPlan(stop_at=kill_at))
        desk = Committer(spec, number)
        keeper = Keeper(desk.repository, desk.branch, KEEP) if number % 3 == 0 else None
        while desk.version < self.crowd.commits:
            version = desk.version + 1
            tags = (f"t{number}-{version}",) if number % 4 == 1 and version % 3 == 0 else ()
            made = desk.save(tags=tags)
            self.note("saved", desk.branch, made.id, made.step)
            if keeper is not None:
                keeper.apply(guard=lambda: refuse_if_fenced(desk.repository, desk.hold))
            if number % 5 == 2 and version % 4 == 0:
                branches.create(desk.repository, f"f{number}-{version}", made, run="crowd")
        desk.close()

    def gc(self, random_: random.Random) -> None:
        # Not by a clock that is ahead: by that, marks that were just made would be old, too.
        collection.REFLOG_S = 0.0
        collect(Repository.open(self.spec))

    def repack(self, random_: random.Random) -> None:
        repack(Repository.open(self.spec), dead_share=random_.choice((0.0, 0.3)))

    def retain(self, random_: random.Random) -> None:
        repository = Repository.open(self.spec)
        kept = [name for name in branches.names(repository) if name.startswith("b") and int(name[1:]) % 3 == 0]
        if kept:
            retain(repository, random_.choice(kept), KEEP)

    def check(self, random_: random.Random) -> None:
        report = verify(Repository.open(self.spec), quick=random_.random() < 0.5)
        if not report.ok:
            raise AssertionError(f"verify: {report.errors}")

    def read(self, random_: random.Random) -> None:
        """Load what a branch has, as long as retention leaves it."""
        repository = Repository.open(self.spec)
        for commit in _some_history(repository, random_)[:4]:
            try:
                found = load(repository, commit)
            except NotFoundError:
                assert "dropped" in repository.marks(commit.id)
                continue
            if found != expected(commit):
                raise AssertionError(f"{commit.id}: wrong values")

    def fork(self, random_: random.Random) -> None:
        """Make a branch or a tag at some commit, perhaps while that is dropped; and delete one."""
        repository = Repository.open(self.spec)
        name, commit = f"x{secrets.token_hex(4)}", random_.choice(_some_history(repository, random_))
        try:
            if random_.random() < 0.3:
                branches.tag(repository, name, commit, run="crowd")
                self.note("tagged", name, commit.id)
            else:
                branches.create(repository, name, commit, run="crowd")
                self.note("forked", name, commit.id)
        except NotFoundError:
            self.note("too-late", name, commit.id)
            return
        mine = [word for word in branches.names(repository) if word.startswith("x")]
        if len(mine) > 2:
            gone = random_.choice(mine)
            self.note("deletes", gone)
            try:
                branches.delete(repository, gone, run="crowd")
            except (ConflictError, NotFoundError):
                self.note("other-was-faster", gone)

    # -- the supervisor ----------------------------------------------------------------------------------------------------------

    def start(self, name: str, work: Callable[[], None]) -> int:
        """Fork a process that does something, and return its pid. What it raises is noted in a file."""
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            signal.alarm(self.crowd.limit_s)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - told by a file and the status
            (self.directory / f"failed-{name}-{os.getpid()}").write_text(traceback.format_exc())
        finally:
            os._exit(status)

    def again(self, name: str, seed: int) -> int:
        """Start a process that does the same again and again until all is over."""
        work: Callable[[random.Random], None] = getattr(self, name)

        def repeat() -> None:
            random_ = random.Random(seed)
            while not self.is_over:
                work(random_)
                self.note("did", name)

        return self.start(name, repeat)


def _some_history(repository: Repository, random_: random.Random) -> list[Commit]:
    """Return the log of some branch, newest first."""
    while True:
        try:
            return history.log(repository, random_.choice(branches.names(repository)))
        except NotFoundError:
            continue  # deleted meanwhile


def _later_s() -> float:
    """A time at which the reflog protects nothing any more."""
    return time.time() + 2 * REFLOG_S


def play(directory: Path, crowd: Crowd) -> dict[str, Any]:
    """Let everybody work, and return the summary."""
    scene, drawn = Scene(directory, crowd), random.Random(crowd.seed)
    Repository.open_or_create(scene.spec)

    def trunk() -> None:
        desk = Committer(scene.spec, TRUNK, branch="main")
        for _ in range(2):
            made = desk.save()
            scene.note("saved", "main", made.id, made.step)
        desk.close()

    assert os.waitstatus_to_exitcode(os.waitpid(scene.start("trunk", trunk), 0)[1]) == 0
    victims = Counter(drawn.randrange(crowd.committers) for _ in range(crowd.kills))

    def commit(number: int) -> int:
        # One save makes some 60 mutations, an opening 10.
        kill_at = drawn.randrange(1, 240) if victims[number] > 0 else None
        victims[number] -= 1
        return scene.start(f"b{number}", lambda: scene.commit(number, kill_at))

    kinds = ("gc", "repack", "retain", "check", "read", "fork")
    others = [scene.again(kind, drawn.randrange(1 << 30)) for kind in kinds for _ in range(crowd.cleaners)]
    running = {commit(number): number for number in range(crowd.committers)}
    kills = 0
    while running:
        pid, status = os.wait()
        if pid not in running:
            others.remove(pid)  # failed: its file says how
            continue
        number = running.pop(pid)
        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
            kills += 1
            running[commit(number)] = number
    (directory / "over").touch()
    for pid in others:
        os.waitpid(pid, 0)
    problems = [path.read_text() for path in sorted(directory.glob("failed-*"))]
    if not problems:
        os.waitpid(scene.start("audit", lambda: _audit(scene)), 0)
        problems = [path.read_text() for path in sorted(directory.glob("failed-*"))]
    noted = scene.noted()
    done = Counter(words[1] if words[0] == "did" else words[0] for words in noted)
    repository = Repository.open(scene.spec)
    records = [record.commit for record in Survey(repository).look().records]
    commits = {commit for commit in records if commit is not None}
    dropped = [commit for commit in commits if "dropped" in repository.marks(commit)]
    return {"problems": problems, "kills": kills, "done": dict(sorted(done.items())), "commits": len(commits), "dropped": len(dropped)}


# -- afterwards ------------------------------------------------------------------------------------------------------------------


def _audit(scene: Scene) -> None:
    """Raises: AssertionError for anything that is lost, wrong or left over."""
    repository = Repository.open(scene.spec)
    _check_kept(scene, repository)
    for number in range(scene.crowd.committers):
        desk = Committer(scene.spec, number)
        before = desk.version
        assert before == scene.crowd.commits, f"b{number} has {before} commits"
        made = desk.save()
        scene.note("saved", desk.branch, made.id, made.step)
        desk.close()
        if number % 3 == 0:
            retain(repository, desk.branch, KEEP)
    for _ in range(2):
        collect(repository, now_s=_later_s())
        repack(repository)
    report = verify(repository)
    assert report.ok, report.errors
    _check_kept(scene, repository)
    _check_garbage(repository)


def _check_kept(scene: Scene, repository: Repository) -> None:
    """Whatever was said to be saved is in the records, and what the rules keep holds what it has to."""
    refs = repository.refs
    named = {word: refs.heads(word) for word in ("heads", "tags")}
    saved = [words for words in scene.noted() if words[0] == "saved"]
    for name in {words[1] for words in saved}:
        records = [refs.read(f"heads/{name}", number) for number in refs.numbers(f"heads/{name}")]
        # Who was killed behind its record noted nothing: what is newest the records say.
        own = [record.commit for record in records if record.reason == "save"]
        told = {words[2] for words in saved if words[1] == name}
        assert told <= set(own), f"{name}: {told - set(own)} are lost"
        keeps_all = name == "main" or int(name[1:]) % 3
        for commit_id in own if keeps_all else own[-3:]:
            assert commit_id is not None
            assert "dropped" not in repository.marks(commit_id), f"{name}: {commit_id} was dropped"
    made = {words[1]: words[2] for words in scene.noted() if words[0] in ("forked", "tagged")}
    deleted = {words[1] for words in scene.noted() if words[0] == "deletes"}
    for name, commit_id in made.items():
        if name not in deleted:
            found = named["heads"].get(name) or named["tags"].get(name)
            assert getattr(found, "commit", None) == commit_id, f"{name} at {commit_id} is lost"
    for number in range(scene.crowd.committers):
        for version in range(1, scene.crowd.commits + 1):
            if number % 4 == 1 and version % 3 == 0:
                assert f"t{number}-{version}" in named["tags"]
    for name, record in {**named["heads"], **named["tags"]}.items():
        assert record.commit is not None
        assert "dropped" not in repository.marks(record.commit), f"{name}: {record.commit} was dropped"
    recorded = {record.commit for record in Survey(repository).look().records if record.commit is not None}
    for commit_id in recorded:
        commit = repository.read_commit(commit_id)
        if not commit.dropped:
            assert load(repository, commit) == expected(commit), f"{commit.branch} {commit_id}: wrong values"


def _check_garbage(repository: Repository) -> None:
    """Nothing is left that nobody needs: no intents, nothing of saves that came to nothing, no bytes of dropped commits but needed ones."""
    store = repository.store
    assert store.list("intents/") == []
    survey = Survey(repository)
    sight = survey.look()
    strays = [key for key in store.list("objects/") if key.removeprefix("objects/")[:25] not in sight.recorded]
    assert strays == [], strays
    staged = os.listdir(os.path.join(store.describe(), "staging"))
    assert staged == [], staged
    dropped = {commit for commit in sight.recorded if survey.is_dropped(commit)}
    needed = survey.needed(sight.recorded - dropped, continued=sight.continued)
    for commit in dropped:
        if store.list(f"objects/{commit}/"):
            assert any(source[0] == commit and rows for source, rows in needed.items()), f"{commit} left files that nobody needs"


def main(directory: str, settings: str) -> None:
    """Play one scene and print its summary."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    open_store(parse_root(root / "run"))
    print(json.dumps(play(root, Crowd(**json.loads(settings)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
