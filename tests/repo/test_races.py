"""Who does what between which two steps of another: the interleavings that could lose something, one by one.

A hook before a mutation of one store does another process's whole work there, as if the first had been stopped at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, SyckptError
from syckpt.objects.refs import Owner
from syckpt.repo import branches, documents, survey
from syckpt.repo.collection import GRACE_S, REFLOG_S, collect
from syckpt.repo.keys import locations_key, mark_key
from syckpt.repo.owner import this_process
from syckpt.repo.reader import Reader
from syckpt.repo.repacking import plan_sweeps, repack, sweep
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Keeper, Retention, retain
from syckpt.repo.survey import Survey
from syckpt.repo.transaction import Transaction, open_branch, recover, settle
from syckpt.repo.verify import verify
from syckpt.stores.local import LocalStore
from syckpt.stores.memory import MemoryStore

LATER_S = time.time() + 2 * REFLOG_S


class View:
    """A process's own way to a store that others use, too: with hooks before its mutations."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.before: Callable[[str, str], None] = lambda operation, key: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, data: Any) -> None:
        self.before("create", key)
        self._store.create(key, data)

    def replace(self, key: str, data: Any) -> None:
        self.before("replace", key)
        self._store.replace(key, data)

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self._store.delete(key)

    def sink(self, key: str) -> Any:
        self.before("sink", key)
        return self._store.sink(key)


def once(number: int, act: Callable[[], None]) -> tuple[Callable[[str, str], None], list[str]]:
    """Return a hook that acts before the `number`-th mutation, and the list of all that it sees."""
    seen: list[str] = []

    def before(operation: str, key: str) -> None:
        seen.append(f"{operation} {key}")
        if len(seen) == number:
            act()

    return before, seen


def at(operation: str, part: str, act: Callable[[], None]) -> Callable[[str, str], None]:
    """Return a hook that acts once, before the first such mutation of a key that has `part` in it."""
    left = [act]

    def before(found: str, key: str) -> None:
        if left and found == operation and part in key:
            left.pop()()

    return before


def dead() -> Owner:
    """A process of this machine that has ended."""
    here = this_process()
    return Owner(here.host, here.boot, here.pidns, here.pid, here.start + 1)


def state(seed: int) -> dict[str, np.ndarray]:
    drift = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    return {
        "frozen": np.arange(3000, dtype=np.float32),
        "drift": drift + np.float32(1e-5 * seed),
        "wild": np.random.default_rng(seed).standard_normal(900).astype(np.float32),
    }


def held(seed: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state(seed).items()}


def dropped_long_ago(store: MemoryStore, repository: Repository, commit: str) -> None:
    repository.mark(commit, "dropped", why="a test")
    store._written[mark_key(commit, "dropped")] -= 3601


# -- a writer that is stopped anywhere ------------------------------------------------------------------------------------------------


def newer_generation(make_desk: Callable[..., Any], store: MemoryStore) -> dict[str, Any]:
    """Begin, save, retain, gc and repack as a newer incarnation does; return its desk and what its commits hold."""
    heir = make_desk(store, run="heir", cycle=3)
    hold = heir.open()
    recover(heir.repository, hold)
    tip = heir.newest
    kept = {}
    for n in range(20, 24):
        commit = heir.save(state(n))
        kept[commit.id] = (commit, held(n))
        retain(heir.repository, "main", Retention(last=2))
    collect(heir.repository, now_s=LATER_S)
    repack(heir.repository, dead_share=0.0)
    return {"desk": heir, "kept": dict(list(kept.items())[-2:]), "tip": tip}


def stopped_save(make_desk: Callable[..., Any], number: int) -> tuple[list[str], dict[str, Any], Any, SyckptError | None]:
    """Stop a save before its `number`-th mutation, let a newer incarnation work there, and continue it."""
    store = MemoryStore()
    old = make_desk(View(store), run="old", cycle=3)
    old.open()
    for n in range(3):
        old.save(state(n))
    newer: dict[str, Any] = {}
    old.store.before, seen = once(number, lambda: newer.update(newer_generation(make_desk, store)))
    error = None
    try:
        old.save(state(3), name="mine", tags=["t"])
    except SyckptError as exc:
        error = exc
    return seen, newer, store, error


def test_a_writer_stopped_before_any_mutation_of_a_save_cannot_harm_a_newer_incarnation(make_desk) -> None:
    steps = len(stopped_save(make_desk, 0)[0])
    assert steps == 10  # intent, blob, manifest, locations, commit, record, name, tag, copy, intent
    for number in range(1, steps + 1):
        seen, newer, store, error = stopped_save(make_desk, number)
        heir = newer["desk"]
        visible = number > 6
        assert (error is None) == visible, (seen[number - 1], error)
        assert visible or isinstance(error, ConflictError)
        # The branch is the newer one's, and its commits are whole.
        assert heir.repository.refs.head("heads/main").commit == heir.newest.id
        for commit, content in newer["kept"].values():
            assert heir.load(commit) == content
        assert verify(heir.repository).errors == []
        assert visible == (newer["tip"].step == 0 and "mine" in newer["desk"].repository.refs.names("names"))
        # Its leftovers go, though not before they are old where no intent is left.
        collect(heir.repository, now_s=LATER_S)
        recorded = Survey(heir.repository).look().recorded
        assert store.list("intents/") == []
        assert [key for key in store.list("objects/") if key[8:33] not in recorded] == []
        assert heir.load(heir.save(state(30))) == held(30)


def test_a_writer_continued_behind_its_record_does_not_take_a_name_or_a_tag_back(make_desk) -> None:
    store = MemoryStore()
    old = make_desk(View(store), run="old")
    old.open()
    old.save(state(0))
    meanwhile = {}

    def go_on() -> None:
        heir = make_desk(store, run="heir")
        recover(heir.repository, heir.open())
        branches.delete_tag(heir.repository, "t", run="heir")
        meanwhile["commit"] = heir.save(state(1), name="mine")
        branches.tag(heir.repository, "t", meanwhile["commit"], run="heir")

    # Stopped right behind its record: it has not yet looked whether the name is there.
    head = old.repository.refs.head

    def stopped(ref: str) -> Any:
        if ref == "names/mine" and not meanwhile:
            go_on()
        return head(ref)

    old.repository.refs.head = stopped
    stale = old.save(state(2), name="mine", tags=["t"])
    refs = old.repository.refs
    assert stale.id != meanwhile["commit"].id
    assert refs.head("names/mine").commit == meanwhile["commit"].id
    assert refs.head("tags/t").commit == meanwhile["commit"].id
    assert refs.head("heads/main").commit == meanwhile["commit"].id


# -- marks -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namer", ["tag", "branch", "intent"])
@pytest.mark.parametrize("end", ["dead", "late"])
def test_a_commit_named_just_before_its_mark_stays_though_its_marker_never_looks_again(make_desk, monkeypatch, namer, end) -> None:
    store = MemoryStore()
    desk = make_desk(View(store))
    desk.open()
    commits = [desk.save(state(n)) for n in range(4)]

    def name() -> None:
        # Its maker has looked for the mark, and there was none yet.
        if namer == "tag":
            branches.tag(desk.repository, "v1", commits[0], run="t")
        elif namer == "branch":
            branches.create(desk.repository, "side", commits[0], run="t")
        else:
            Transaction(desk.repository, "00000000-00000000000000aa", desk.hold, uses=(commits[0].id,), owner=this_process())
        if end == "late":
            monkeypatch.setattr(survey, "_SECOND_THOUGHTS_S", -1.0)

    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    desk.store.before = at("create", f"{commits[0].id}.dropped", name)
    if end == "dead":
        monkeypatch.setattr(survey, "this_process", dead)
        look, looks = Survey.look, []

        def second_look(self: Survey) -> Any:
            looks.append(self)
            if store.size(mark_key(commits[0].id, "dropped")) is not None:
                kill()
            return look(self)

        with monkeypatch.context() as patch:
            patch.setattr(Survey, "look", second_look)
            with pytest.raises(Killed):
                retain(desk.repository, "main", Retention(last=1))
    else:
        report = retain(desk.repository, "main", Retention(last=1))
        assert [commit.id for commit in report.dropped] == [commits[1].id, commits[2].id]
        store._written[mark_key(commits[0].id, "dropped")] -= 3601
    desk.store.before = lambda operation, key: None
    monkeypatch.undo()
    for _ in range(2):
        retain(desk.repository, "main", Retention(last=1))
        collect(desk.repository, now_s=time.time() + 60)
        repack(desk.repository, dead_share=0.0)
    # Not one of its bytes went, and once the mark is gone it is a commit as before.
    assert desk.load(commits[0]) == held(0)
    store.delete(mark_key(commits[0].id, "dropped"))
    desk.repository.check_whole(desk.repository.read_commit(commits[0].id))
    assert verify(desk.repository).errors == []


def test_a_mark_that_a_dead_process_left_on_what_nothing_names_is_carried_out(make_desk) -> None:
    desk = make_desk()
    desk.open()
    commits = [desk.save(state(n)) for n in range(3)]
    documents.write(desk.store, mark_key(commits[0].id, "dropped"), {"kind": "mark", "version": 1, "why": "", "owner": vars(dead())})
    collect(desk.repository)
    assert [key for key in desk.store.list(f"objects/{commits[0].id}/") if key.endswith("manifest")] == []
    assert desk.load(commits[2]) == held(2)


def test_a_commit_is_spared_whoever_of_many_marked_ones_was_first(make_desk, monkeypatch) -> None:
    # Making the marks takes longer than second thoughts may: each mark counts by itself.
    desk = make_desk(View(MemoryStore()))
    desk.open()
    commits = [desk.save(state(n)) for n in range(5)]
    clock = [0.0]
    monkeypatch.setattr(survey.time, "monotonic", lambda: clock[0])

    def slow(operation: str, key: str) -> None:
        if key.endswith(".dropped") and operation == "create":
            clock[0] += 40
            if commits[3].id in key:
                branches.tag(desk.repository, "v1", commits[3], run="t")

    desk.store.before = slow
    report = retain(desk.repository, "main", Retention(last=1))
    assert [commit.id for commit in report.dropped] == [commit.id for commit in commits[:3]]
    assert not desk.repository.read_commit(commits[3].id).dropped


# -- a save beside sweepers ------------------------------------------------------------------------------------------------------------


def test_a_save_behind_a_commit_that_is_dropped_before_its_intent_points_to_nothing_of_it(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(store)
    desk.open()
    commits = [desk.save(state(n)) for n in range(4)]
    other = make_desk(View(store))
    other.open("side", start=commits[3])
    other.newest = commits[0]  # a jump back: nothing but the coming intent names it
    other.packer.points_into(commits[0])

    def drop() -> None:
        retain(desk.repository, "main", Retention(last=1))
        repack(desk.repository, dead_share=0.0)

    other.store.before = at("create", "intents/", drop)
    made = other.save(state(0))
    assert other.repository.read_commit(commits[0].id).dropped
    assert store.list(f"objects/{commits[0].id}/") == [] or other.repository.read_locations(made.id, 0).sources == ()
    assert other.load(made) == held(0)
    assert verify(desk.repository).errors == []


@pytest.mark.parametrize("step", ["sink objects", "create manifest", "create locations", "create .json", "create logs/refs"])
def test_a_save_behind_a_commit_that_is_to_be_dropped_after_its_intent_keeps_it(make_desk, step) -> None:
    store = MemoryStore()
    desk = make_desk(store)
    desk.open()
    commits = [desk.save(state(n)) for n in range(4)]
    other = make_desk(View(store))
    other.open("side", start=commits[3])
    other.newest = commits[0]
    begin = other.begin
    other.begin = lambda: begin(uses=other.packer.points_into(commits[0]))
    operation, _, part = step.partition(" ")

    def clean() -> None:
        retain(desk.repository, "main", Retention(last=1))
        collect(desk.repository, now_s=LATER_S)
        repack(desk.repository, dead_share=0.0)

    before = at(operation, part, clean)
    other.store.before = lambda found, key: None if key.startswith("intents/") else before(found, key)
    made = other.save({**state(0), "wild": state(9)["wild"]})
    assert other.load(made) == {**held(0), "wild": held(9)["wild"]}
    assert not other.repository.read_commit(commits[0].id).dropped
    assert verify(desk.repository).errors == []


def test_a_rank_that_reads_its_parent_only_after_the_sweepers_finds_everything(make_desk) -> None:
    # The intent is there, rank 0 has made it; this rank begins only then, and is slow.
    store = MemoryStore()
    desk = make_desk(store)
    desk.open()
    commits = [desk.save(state(n)) for n in range(4)]
    rank = make_desk(store)
    rank.open("side", start=commits[3])
    commit, transaction = rank.begin(uses=(commits[2].id, commits[0].id))
    retain(desk.repository, "main", Retention(last=1))
    collect(desk.repository, now_s=LATER_S)
    repack(desk.repository, dead_share=0.0)
    assert [desk.repository.read_commit(made.id).dropped for made in commits] == [False, True, False, False]
    packed = rank.pack(commit, state(2), parent=commits[2])
    assert packed.locations.rows == ()  # all of it is there
    made = rank.describe(commit, packed, parent=commits[2])
    _, published = transaction.publish(made, hold=rank.hold, reader=rank.reader, locations=[packed.locations])
    assert rank.load(published) == held(2)
    assert verify(desk.repository).errors == []


def test_a_running_packer_goes_on_after_every_row_that_it_points_to_has_moved(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(store, cycle=4)
    desk.open()
    shared = make_desk(store)
    made = {}
    for n in range(12):
        commit = desk.save(state(n))
        made[n] = commit
        retain(shared.repository, "main", Retention(last=1))
        store_marks = [key for key in store.list("objects/", deep=False) if key.endswith(".dropped")]
        for key in store_marks:
            store._written[key] -= 3601
        repack(shared.repository, dead_share=0.0)
        assert shared.load(commit) == held(n)
    locations = desk.repository.read_locations(made[11].id, 0)
    assert (made[0].id, 0) in locations.sources  # the frozen tensor's row, moved again and again
    assert desk.repository.read_locations(made[0].id, 0).revision > 1
    assert verify(desk.repository).errors == []


def test_a_repack_between_the_last_look_and_the_record_loses_nothing(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(View(store))
    desk.open()
    for n in range(3):
        desk.save(state(n))

    def clean() -> None:
        retain(make_desk(store).repository, "main", Retention(last=1))
        for key in store.list("objects/", deep=False):
            if key.endswith(".dropped"):
                store._written[key] -= 3601
        repack(make_desk(store).repository, dead_share=0.0)

    desk.store.before = at("create", "logs/refs/heads", clean)
    made = desk.save(state(3))
    assert desk.load(made) == held(3)
    assert verify(desk.repository).errors == []


def test_rows_that_move_twice_while_a_save_looks_for_its_blobs_do_not_fail_it(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(View(store), cycle=1)
    desk.open()
    first = desk.save({**state(0), "still": np.arange(50, dtype=np.int16)})
    desk.save({**state(1), "still": np.arange(50, dtype=np.int16)})
    dropped_long_ago(store, desk.repository, first.id)
    moves = [0]
    other = make_desk(store)

    def move_on_every_look(key: str) -> int | None:
        if key.startswith(f"objects/{first.id}/") and moves[0] < 3:
            moves[0] += 1
            _move(other.repository, first.id)
        return store.size(key)

    desk.store.size = move_on_every_look
    made = desk.save({**state(2), "still": np.arange(50, dtype=np.int16)})
    assert moves == [3]
    assert desk.load(made)["frozen"] == held(2)["frozen"]


def _move(repository: Repository, commit: str) -> None:
    """Move the needed rows of a dropped commit into another blob, whether that frees anything or not."""
    sweeps = plan_sweeps(Survey(repository), dead_share=-1.0)
    for found in sweeps:
        if found.commit == commit:
            sweep(repository, found)


def test_a_reader_follows_rows_that_move_again_and_again(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(View(store), cycle=1)
    desk.open()
    first, last = (desk.save(state(n)) for n in range(2))
    dropped_long_ago(store, desk.repository, first.id)
    other = make_desk(store)
    moves = [0]

    def move_on_every_read(key: str, buffer: Any, *, offset: int = 0) -> None:
        if key.startswith(f"objects/{first.id}/") and moves[0] < 4:
            moves[0] += 1
            _move(other.repository, first.id)
        store.readinto(key, buffer, offset=offset)

    desk.store.readinto = move_on_every_read
    assert desk.load(last) == held(1)
    assert moves == [4]


def test_a_commit_that_is_dropped_while_it_is_read_is_called_dropped(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(View(store))
    desk.open()
    commits = [desk.save(state(n)) for n in range(3)]
    read = desk.repository.read_manifest

    def drop_then(*arguments: Any) -> Any:
        manifest = read(*arguments)
        retain(make_desk(store).repository, "main", Retention(last=1))
        return manifest

    desk.repository.read_manifest = drop_then
    with pytest.raises(NotFoundError, match=f"{commits[1].id} was dropped by retention"):
        Reader(desk.repository, threads=1).snapshot(commits[1])


# -- two sweepers ----------------------------------------------------------------------------------------------------------------


def test_a_repack_stopped_before_its_revision_cannot_harm_later_ones(make_desk) -> None:
    # Others use the number that it meant to take, go on, and remove it: then it could be made once more.
    store = MemoryStore()
    desk = make_desk(View(store), cycle=1)
    desk.open()
    first = desk.save({**state(0), "still": np.arange(50, dtype=np.int16)})
    last = desk.save({**state(1), "still": np.arange(50, dtype=np.int16)})
    dropped_long_ago(store, desk.repository, first.id)
    other = make_desk(store).repository

    def others_repack() -> None:
        _move(other, first.id)
        assert locations_key(first.id, 0, 2) in store._values
        # The third one keeps the blob of the second.
        newest = other.read_locations(first.id, 0)
        body = {**newest.to_body(), "revision": 3}
        documents.write(store, locations_key(first.id, 0, 3), body)
        store.delete(locations_key(first.id, 0, 2))

    desk.store.before = at("create", f"{first.id}/r00000.locations.0002", others_repack)
    sweeps = [found for found in plan_sweeps(Survey(desk.repository), dead_share=-1.0) if found.commit == first.id]
    with pytest.raises(ConflictError, match="other processes have repacked"):
        sweep(desk.repository, sweeps[0])
    names = [key.rpartition("/")[2] for key in store.list(f"objects/{first.id}/")]
    assert (names[-1], len(names)) == ("r00000.locations.0003", 2) or sorted(names)[1] == "r00000.locations.0003"
    assert len(names) == 2
    assert desk.load(last)["still"] == np.arange(50, dtype=np.int16).tobytes()
    assert verify(desk.repository).errors == []


def test_two_collectors_may_take_turns_at_every_step(make_desk) -> None:
    def scene() -> tuple[MemoryStore, Any, Any]:
        store = MemoryStore()
        desk = make_desk(View(store), cycle=2)
        desk.open()
        commits = [desk.save(state(n)) for n in range(5)]
        for commit in commits[:3]:
            dropped_long_ago(store, desk.repository, commit.id)
        side = make_desk(store)
        side.open("side", start=commits[4])
        side.save(state(8))
        branches.delete(desk.repository, "side", run="t")
        late, _ = desk.begin()
        desk.pack(late, state(50), parent=desk.newest)
        desk.packer.failed()
        store.delete(f"intents/{late}.json")
        return store, desk, commits

    store, desk, commits = scene()
    desk.store.before, seen = once(0, lambda: None)
    collect(desk.repository, now_s=LATER_S)
    final = {key for key in store.list("objects/") if "-" not in key.rpartition("/")[2]}
    count = len(seen)
    assert count > 12
    for number in range(1, count + 1):
        store, desk, commits = scene()
        other = Repository(store, desk.repository.id)
        desk.store.before, _ = once(number, lambda other=other: collect(other, now_s=LATER_S))
        collect(desk.repository, now_s=LATER_S)
        desk.store.before = lambda operation, key: None
        assert len([key for key in store.list("objects/") if "-" not in key.rpartition("/")[2]]) == len(final)
        for n in (3, 4):
            assert desk.load(commits[n]) == held(n)
        assert verify(desk.repository).errors == []


def test_a_writer_that_publishes_and_dies_while_gc_looks_loses_nothing(make_desk, monkeypatch) -> None:
    store = MemoryStore()
    desk = make_desk(store)
    desk.open()
    desk.save(state(0))
    alive = [True]
    monkeypatch.setattr("syckpt.repo.collection.is_dead", lambda owner: not alive[0])
    monkeypatch.setattr(survey, "is_dead", lambda owner: not alive[0])
    commit, transaction = desk.begin()
    packed = desk.pack(commit, state(1), parent=desk.newest)
    look = Survey.look
    made = []

    def die_after(self: Survey) -> Any:
        sight = look(self)
        if not made:
            described = desk.describe(commit, packed, parent=desk.newest)
            monkeypatch.setattr("syckpt.repo.transaction._finish", lambda *arguments: None)
            made.append(transaction.publish(described, hold=desk.hold, reader=desk.reader, locations=[packed.locations])[1])
            monkeypatch.undo()
            monkeypatch.setattr("syckpt.repo.collection.is_dead", lambda owner: True)
        return sight

    monkeypatch.setattr(Survey, "look", die_after)
    collect(desk.repository, now_s=LATER_S)
    assert desk.load(made[0]) == held(1)
    collect(desk.repository, now_s=LATER_S)
    assert store.list("intents/") == []
    assert verify(desk.repository).errors == []


def test_gc_and_the_next_incarnation_may_settle_one_save_at_once(make_desk) -> None:
    for number in range(1, 5):
        store = MemoryStore()
        desk = make_desk(View(store))
        desk.open()
        commit = desk.save(state(0), name="x", tags=["t"])
        for key in (desk.repository.refs.key("names/x", 1), desk.repository.refs.key("tags/t", 1)):
            store.delete(key)
        body = {"kind": "intent", "version": 1, "commit": commit.id, "branch": "main", "generation": 1, "run": "run", "uses": []}
        documents.write(store, f"intents/{commit.id}.json", {**body, "owner": vars(dead())})
        heir = make_desk(store, run="heir")
        intent = next(survey.read_intents(desk.repository))
        desk.store.before, seen = once(number, lambda heir=heir: recover(heir.repository, heir.open()))
        settle(desk.repository, intent)
        assert len(seen) >= 1
        collect(desk.repository)
        assert [desk.repository.refs.head(ref).commit for ref in ("names/x", "tags/t")] == [commit.id] * 2
        assert store.list("intents/") == []
        assert heir.load(heir.save(state(1))) == held(1)


# -- several ranks ---------------------------------------------------------------------------------------------------------------


def test_a_collection_leaves_a_save_alone_whose_other_rank_is_slow(make_desk) -> None:
    desk = make_desk()
    desk.open()
    desk.save(state(0))
    commit, _ = desk.begin()
    desk.pack(commit, state(1), parent=desk.newest)
    desk.store.create(f"objects/{commit}/r00001.safetensors", b"half of it")
    desk.store.create(f"receipts/main/{commit}/r00001.json", b"{}")
    for key in desk.store.list():
        desk.store._written[key] -= 400 * 86400.0
    before = dict(desk.store._values)
    collect(desk.repository, now_s=LATER_S)
    assert desk.store._values == before


def test_what_a_slow_rank_writes_after_its_save_was_given_up_goes_when_it_is_old(make_desk) -> None:
    desk = make_desk()
    desk.open()
    kept = desk.save(state(0))
    commit, transaction = desk.begin()
    desk.pack(commit, state(1), parent=kept)
    transaction.abort()
    desk.store.create(f"objects/{commit}/r00001.safetensors", b"too late")
    collect(desk.repository)
    assert desk.store.size(f"objects/{commit}/r00001.safetensors") == 8
    desk.store._written[f"objects/{commit}/r00001.safetensors"] -= GRACE_S + 60
    collect(desk.repository)
    assert desk.store.list(f"objects/{commit}/") == []
    assert desk.load(kept) == held(0)


# -- readers beside writers ------------------------------------------------------------------------------------------------------


def test_a_record_made_between_a_listing_and_the_copy_for_people_is_not_called_lost(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(store)
    desk.open()
    desk.save(state(0))
    reader = View(store)
    saves = [lambda: desk.save(state(1)), lambda: desk.save(state(2)), lambda: desk.save(state(3))]

    def get(key: str, **options: Any) -> bytes:
        if key.startswith("refs/heads/") and saves:
            saves.pop()()  # after the listing of records, before the copy
        return store.get(key, **options)

    reader.get = get
    refs = Repository(reader, "00ff").refs
    assert refs.head("heads/main").number == 2
    assert refs.heads("heads")["main"].number == 3
    assert len(Survey(Repository(reader, "00ff")).look().records) >= 4
    assert saves == []


def test_a_listing_that_shows_a_record_and_not_the_one_before_is_no_gap(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(store)
    desk.open()
    commits = [desk.save(state(n)) for n in range(3)]
    torn = View(store)
    hidden = desk.repository.refs.key("heads/main", 3)
    torn.list = lambda *arguments, **options: [key for key in store.list(*arguments, **options) if key != hidden]
    repository = Repository(torn, "00ff")
    assert repository.refs.numbers("heads/main") == [1, 2, 3, 4]
    assert repository.refs.heads("heads")["main"].commit == commits[2].id
    assert [record.number for record in Survey(repository).look().records] == [1, 2, 3, 4]
    store.delete(hidden)
    for read in (lambda: repository.refs.numbers("heads/main"), Survey(repository).look):
        with pytest.raises(IntegrityError, match=f"{hidden}: missing, while later records of heads/main exist"):
            read()


# -- listings that lag -----------------------------------------------------------------------------------------------------------


class Lagging(View):
    """A host whose listings are those of a moment ago, as network file systems give them; look-ups by name are not."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.shown: list[str] | None = None

    def lag(self) -> None:
        self.shown = self._store.list()

    def list(self, prefix: str = "", *, deep: bool = True) -> list[str]:
        keys = self._store.list() if self.shown is None else self.shown
        start = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        return [key for key in keys if key.startswith(start) and (deep or "/" not in key[len(start) :])]


def test_a_host_whose_listings_lag_sees_new_records_by_name(make_desk) -> None:
    store = MemoryStore()
    desk = make_desk(store)
    desk.open()
    desk.save(state(0))
    far = Lagging(store)
    far.lag()
    newest = [desk.save(state(n)) for n in range(1, 3)][-1]
    repository = Repository(far, "00ff")
    assert repository.refs.head("heads/main").commit == newest.id
    heir = open_branch(repository, "main", run="far", expected=newest.id)
    assert heir.tip == newest.id
    with pytest.raises(ConflictError, match="run far"):
        desk.save(state(3))


@pytest.mark.parametrize("number", range(1, 11))
def test_gc_and_repack_with_a_lagging_listing_take_nothing_of_a_running_save(make_desk, number) -> None:
    store = MemoryStore()
    desk = make_desk(View(store), cycle=2)
    desk.open()
    commits = {}
    for n in range(5):
        commits[n] = desk.save(state(n))
    for n in range(3):
        dropped_long_ago(store, desk.repository, commits[n].id)
    far = Lagging(store)
    far.lag()

    def clean() -> None:
        for work in (collect, lambda repository: repack(repository, dead_share=0.0)):
            try:
                work(Repository(far, "00ff"))
            except IntegrityError:
                # What it sees does not fit together: then nothing goes.
                if far.shown is None:
                    raise

    desk.store.before, _ = once(number, clean)
    made = desk.save(state(5), name="n", tags=["t"])
    clean()
    for commit, n in ((made, 5), (commits[4], 4), (commits[3], 3)):
        assert desk.load(commit) == held(n)
    far.shown = None
    clean()
    assert verify(desk.repository).errors == []


def test_a_fenced_keeper_that_goes_on_drops_nothing_that_the_newer_one_names(make_desk, tmp_path) -> None:
    store = LocalStore(tmp_path)
    desk = make_desk(store, repository_id="00ff")
    desk.open()
    commits = [desk.save(state(n)) for n in range(4)]
    slow = Repository(LocalStore(tmp_path), "00ff")
    keeper = Keeper(slow, "main", Retention(last=1))
    made = {}

    def newer(operation: str, key: str) -> None:
        if not made and key.endswith(".dropped"):
            heir = make_desk(store, run="heir")
            heir.open()
            made["tip"] = heir.save(state(8), parent=commits[1])
            branches.tag(heir.repository, "v", commits[2], run="heir")

    slow.store.before_mutation = newer
    report = keeper.apply()
    assert {commit.id for commit in report.dropped} == {commits[0].id, commits[1].id}
    assert desk.load(made["tip"]) == held(8)
    assert desk.load(commits[2]) == held(2)
    assert desk.load(commits[3]) == held(3)
    assert verify(desk.repository).errors == []
