"""A save stopped before every one of its mutations, in the real writer process: the old tip or the new one, never anything between."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import syckpt
from syckpt import CheckpointManager
from syckpt.checkpoint.saver import PendingCommit
from syckpt.errors import StoreError, SyckptError, WriterDied
from syckpt.repo import history
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import open_branch, recover
from syckpt.repo.verify import verify
from syckpt.stores.base import StoreSpec, parse_root
from syckpt.stores.faults import FaultPlan, faulty
from syckpt.testing.scenes import State, clone, grow, leftovers, register, same, state_at, stranger

# Of a save by a new writer that has a blob, a name and a tag: from its lease to giving that back.
FIRST_SAVE = 93
# Of a later save by the same writer: every directory but the commit's own is known.
LATER_SAVE = 65
# Mutations of the first that the second does not make: the lease's, and directories made and synced.
FIRST_ONLY = (*range(1, 12), 15, 16, 24, 25, *range(52, 60), 66, 67, 76, 77, *range(86, 90), 93)
SECONDS = 60


@dataclass(frozen=True)
class Base:
    """A repository of two commits."""

    root: Path
    commits: dict[str, State]

    @property
    def tip(self) -> str:
        return list(self.commits)[-1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    root = tmp_path_factory.mktemp("base") / "run"
    return Base(root, grow(root, commits=2))


class Stopped:
    """A copy of a repository whose writer process can be stopped at a mutation."""

    def __init__(self, base: Base, directory: Path, *, action: str, lasting: bool = False) -> None:
        self.root = clone(base.root, directory / "run")
        self.trace = directory / "trace"
        self._arm = directory / "arm"
        plan = FaultPlan(action=action, arm=str(self._arm), trace=str(self.trace), spare=os.getpid(), lasting=lasting)
        self.spec: StoreSpec = faulty(self.root / ".syckpt", plan)

    def renewed(self) -> bool:
        """Whether the lease was renewed since the last arming, as it is every ten seconds: a save's mutations have other numbers then."""
        return any(" leases/" in mutation for mutation in self.traced())

    def arm(self, number: int) -> None:
        """Stop the writer before its mutation `number`, counted from now on; 0: no more."""
        written = self._arm.with_suffix(".new")
        written.write_text(str(number))
        written.rename(self._arm)

    def traced(self) -> list[str]:
        """Return the operations and keys of the mutations since the last arming."""
        lines = self.trace.read_text().splitlines()
        start = max(index for index, line in enumerate(lines) if line.startswith("1 "))
        return [line.partition(" ")[2] for line in lines[start:]]


def manager(root: Path | StoreSpec) -> CheckpointManager:
    ckpt = CheckpointManager(root, rng=False, save_on_exit=False)
    register(ckpt, stranger())
    return ckpt


def save(ckpt: CheckpointManager, step: int, **options: object) -> PendingCommit:
    register(ckpt, state_at(step))
    pending = ckpt.save(**options)  # type: ignore[arg-type]
    assert pending is not None
    return pending


def outcome(pending: PendingCommit) -> SyckptError | None:
    try:
        pending.result(SECONDS)
    except SyckptError as exc:
        return exc
    return None


def assert_holds(root: Path, commit: str, state: State) -> None:
    """HEAD is that commit and loads bit for bit."""
    repository = Repository.open(parse_root(root))
    record = repository.refs.head("heads/main")
    assert record is not None
    assert record.commit == commit
    assert same(syckpt.load(root), state)


def assert_clean(root: Path, commits: dict[str, State]) -> None:
    """The repository holds these commits, each bit for bit, and nothing else."""
    assert leftovers(root) == []
    assert verify(Repository.open(parse_root(root))).errors == []
    assert [commit.id for commit in history.log(Repository.open(parse_root(root)))] == list(commits)[::-1]
    for commit, state in commits.items():
        assert same(syckpt.load(root, commit), state)


def test_a_save_makes_the_mutations_that_are_stopped_below(base: Base, tmp_path: Path) -> None:
    scene = Stopped(base, tmp_path, action="kill")
    scene.arm(0)
    with manager(scene.spec) as ckpt:
        save(ckpt, 2, checkpoint_id="third", tags=["kept"], wait=True)
    assert len(scene.traced()) == FIRST_SAVE
    with manager(scene.spec) as ckpt:
        save(ckpt, 3, wait=True)
        scene.arm(0)
        save(ckpt, 4, checkpoint_id="fifth", tags=["kept-too"], wait=True)
        later = scene.traced()
    assert len(later) == LATER_SAVE
    commit = str(ckpt.hash)
    published = [line.replace(commit, "ID") for line in later if line.split()[0] in ("link", "replace", "unlink") and "r00000" not in line]
    assert published == [
        "link intents/ID.json",
        "unlink intents/ID.json",  # the staged file
        "link objects/ID.json",
        "unlink objects/ID.json",
        "link logs/refs/heads/main/000000000008.json",
        "unlink logs/refs/heads/main/000000000008.json",
        "link logs/refs/names/fifth/000000000001.json",
        "unlink logs/refs/names/fifth/000000000001.json",
        "link logs/refs/tags/kept-too/000000000001.json",
        "unlink logs/refs/tags/kept-too/000000000001.json",
        "replace refs/heads/main",
        "unlink intents/ID.json",
    ]


@pytest.mark.parametrize("number", range(1, FIRST_SAVE + 1))
def test_a_writer_killed_before_any_mutation_leaves_the_old_tip_or_the_new_one(base: Base, tmp_path: Path, number: int) -> None:
    scene = Stopped(base, tmp_path, action="kill")
    scene.arm(number)
    ckpt = manager(scene.spec)
    pending = save(ckpt, 2, checkpoint_id="third", tags=["kept"])
    error = outcome(pending)
    commits = dict(base.commits)
    if error is None:
        commits[pending.id] = state_at(2)
    else:
        assert isinstance(error, WriterDied)
        assert "killed by signal 9" in str(error)
        assert pending.id in str(error)
        with pytest.raises(WriterDied, match=pending.id):
            ckpt.save()
    tip = list(commits)[-1]
    assert ckpt.hash == tip
    assert_holds(scene.root, tip, commits[tip])
    ckpt.close()

    with manager(scene.root) as after:
        assert after.resumed is not None
        assert after.resumed.id == tip
        assert same({"net": after.net, "notes": after.notes}, commits[tip])
        if number in FIRST_ONLY:  # as good as its neighbours: here without the half second of another writer
            repository = Repository.open(parse_root(scene.root))
            recover(repository, open_branch(repository, "main", run="another", expected=tip))
        else:
            made = save(after, 3, checkpoint_id=None if error is None else "third", wait=True).result()
            assert made.parents == (tip,)
            commits[made.id] = state_at(3)
            assert same(syckpt.load(scene.root, "third"), state_at(2 if error is None else 3))
    assert_clean(scene.root, commits)


def save_through_an_error(ckpt: CheckpointManager, scene: Stopped, commits: dict[str, State], step: int) -> tuple[bool, bool]:
    """Make a save that is about to meet an error, then a good one; return whether the first one failed, and whether its numbers held."""
    pending = save(ckpt, step, checkpoint_id=f"at-{step}", tags=[f"tag-{step}"])
    error = outcome(pending)
    numbered = not scene.renewed()
    scene.arm(0)
    if error is None:
        commits[pending.id] = state_at(step)
    else:
        assert isinstance(error, StoreError)
        assert "injected fault" in str(error) or "No space left on device" in str(error) or "Input/output error" in str(error)
        with pytest.raises(StoreError, match=re.escape(str(error))):
            ckpt.save()
    tip = list(commits)[-1]
    assert ckpt.hash == tip
    assert_holds(scene.root, tip, commits[tip])
    following = save(ckpt, step + 1, wait=True).result()
    assert following.parents == (tip,)
    commits[following.id] = state_at(step + 1)
    return error is not None, numbered


@pytest.mark.parametrize("number", FIRST_ONLY)
def test_a_new_writer_survives_an_error_at_a_mutation_that_only_its_first_save_makes(base: Base, tmp_path: Path, number: int) -> None:
    scene = Stopped(base, tmp_path, action=("enospc", "eio", "error")[number % 3])
    scene.arm(number)
    commits = dict(base.commits)
    with manager(scene.spec) as ckpt:
        failed, _ = save_through_an_error(ckpt, scene, commits, 2)
    # An EIO of `mkdir` (52, 58) passes: it is tried again.
    assert failed == (number in {15, 16, 24, 25, *range(52, 60)} - {52, 58})
    if leftovers(scene.root):  # of a commit that is visible: the next opening of the branch completes it
        assert not failed
        with manager(scene.root) as after:
            commits[str(save(after, 4, wait=True))] = state_at(4)
    assert_clean(scene.root, commits)


@pytest.mark.parametrize(("action", "lasting"), [("enospc", False), ("error", False), ("eio", True)])
def test_a_writer_survives_an_error_at_any_mutation_of_a_save(base: Base, tmp_path: Path, action: str, lasting: bool) -> None:
    scene = Stopped(base, tmp_path, action=action, lasting=lasting)
    commits = dict(base.commits)
    failed = {}
    with manager(scene.spec) as ckpt:
        commits[str(save(ckpt, 2, wait=True))] = state_at(2)
        for number in range(1, LATER_SAVE + 1):
            scene.arm(number)
            did_fail, numbered = save_through_an_error(ckpt, scene, commits, 2 * number + 1)
            if numbered:
                failed[number] = did_fail
    with manager(scene.root) as after:
        commits[str(save(after, 3, wait=True))] = state_at(3)
    assert_clean(scene.root, commits)
    # Up to the ref record, which is visible once it is linked. What only removes a staged file (6, 15 ...) may fail; where the failure
    # lasts, the record cannot be taken back after a failed sync of its directory (38), so it counts.
    expected = {*range(1, 38)} if lasting else {*range(1, 39)} - {6, 15, 21, 27, 33}
    assert failed == {number: number in expected for number in failed}
    assert len(failed) > LATER_SAVE / 2


@pytest.mark.parametrize("number", [1, 17, 29, 47, 60])
def test_a_manager_goes_on_with_another_writer_after_one_was_killed(base: Base, tmp_path: Path, number: int) -> None:
    scene = Stopped(base, tmp_path, action="kill")
    scene.arm(number)
    commits = dict(base.commits)
    with manager(scene.spec) as ckpt:
        assert isinstance(outcome(save(ckpt, 2, checkpoint_id="third")), WriterDied)
        with pytest.raises(WriterDied, match="killed by signal 9"):
            ckpt.wait()
        made = save(ckpt, 3, checkpoint_id="third", wait=True).result()
        assert made.parents == (base.tip,)
        commits[made.id] = state_at(3)
    assert_clean(scene.root, commits)


@pytest.mark.parametrize(("number", "visible", "mutations"), [(48, False, 27), (62, True, 49)], ids=["given up", "completed"])
def test_the_recovery_from_a_kill_may_be_cut_off_anywhere(base: Base, tmp_path: Path, number: int, visible: bool, mutations: int) -> None:
    scene = Stopped(base, tmp_path, action="kill")
    scene.arm(number)
    ckpt = manager(scene.spec)
    pending = save(ckpt, 2, checkpoint_id="third", tags=["kept"])
    commits = dict(base.commits)
    if outcome(pending) is None:
        commits[pending.id] = state_at(2)
    assert (pending.id in commits) is visible
    with suppress(WriterDied):
        ckpt.close()

    tip = list(commits)[-1]
    for stop_at in range(1, mutations + 2):
        root = clone(scene.root, tmp_path / str(stop_at) / "run")
        # Nothing succeeds any more from there on, as after a kill; but in this process, which is a hundred times as fast.
        plan = FaultPlan(stop_at=stop_at, action="error", lasting=True)
        repository = Repository.open(faulty(root / ".syckpt", plan))
        cut_off = True
        with suppress(StoreError):
            recover(repository, open_branch(repository, "main", run="second", expected=tip))
            cut_off = False
        assert cut_off == (stop_at <= mutations)
        assert_holds(root, tip, commits[tip])
        for staged in (root / ".syckpt/staging").iterdir():
            staged.unlink()  # its owner, this process, lives: nobody else would
        repository = Repository.open(parse_root(root))
        recover(repository, open_branch(repository, "main", run="third", expected=tip))
        assert_clean(root, commits)
