"""Branches and tags: made, deleted, made again; beside writers that live, are dead, or come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, StateError
from syckpt.objects.refs import Lease, Owner
from syckpt.repo import branches, history, leases, owner
from syckpt.repo.refs import Refs
from syckpt.repo.transaction import newest_readable, open_branch, recover
from syckpt.repo.verify import verify
from syckpt.stores.local import LocalStore

GONE = replace(owner.this_process(), start=1)
ELSEWHERE = Owner("elsewhere", "b", "p", 7, 7)


def lease(branch: str, trainer: Owner, *, writer: Owner | None = None, left_s: float = 30) -> Lease:
    return Lease(branch, "job", 3, "token", trainer, writer, time.time_ns() + int(left_s * 1e9))


def last(refs: Refs, ref: str) -> Any:
    record = refs.head(ref)
    assert record is not None
    return record.number, record.reason, record.commit, record.previous, record.generation


def test_a_branch_begins_at_a_commit_and_leaves_head_where_it_is(desk, make_desk):
    desk.open()
    first, second = desk.save(), desk.save()
    record = branches.create(desk.repository, "team/wide", first, run="me")
    assert (record.number, record.reason, record.commit, record.commit_seal, record.generation) == (1, "create", first.id, first.seal, 0)
    assert branches.names(desk.repository) == ["main", "team/wide"]
    assert history.resolve(desk.repository, "team/wide").id == first.id
    assert history.resolve(desk.repository, "HEAD").id == second.id
    assert desk.store.get("refs/heads/team%2Fwide") == first.id.encode() + b"\n"
    # Its first writer goes on from there, as generation 1.
    other = make_desk(desk.store)
    hold = other.open("team/wide")
    assert (hold.generation, hold.tip) == (1, first.id)
    assert other.save().parents == (first.id,)
    assert verify(desk.repository).errors == []


def test_a_branch_that_exists_is_a_conflict_and_stays(desk):
    desk.open()
    first, second = desk.save(), desk.save()
    branches.create(desk.repository, "wide", first, run="me")
    with pytest.raises(ConflictError, match=f"'wide' exists already, at {first.id}.*branch='wide'"):
        branches.create(desk.repository, "wide", second, run="me")
    with pytest.raises(ConflictError, match="'main' exists already"):
        branches.create(desk.repository, "main", first, run="me")
    assert last(desk.repository.refs, "heads/wide") == (1, "create", first.id, None, 0)


@pytest.mark.parametrize("name", ["HEAD", "best", "latest", "", "a b", ".x", "x/", "x.lock", "0badc0de-0123456789abcdef", "a" * 300])
def test_what_cannot_be_a_name_is_refused_before_anything_is_written(desk, name):
    desk.open()
    commit = desk.save()
    before = desk.store.list()
    for make in (branches.create, branches.tag):
        with pytest.raises(StateError, match="cannot be the name of a"):
            make(desk.repository, name, commit, run="me")
    for delete in (branches.delete, branches.delete_tag):
        with pytest.raises(NotFoundError, match="there are: "):
            delete(desk.repository, name, run="me")
    assert desk.store.list() == before


def test_a_deleted_branch_is_gone_and_its_name_free_and_its_numbers_go_on(desk, make_desk):
    desk.open()
    first = desk.save()
    other = make_desk(desk.store)
    other.open("wide", start=first)
    tip = other.save()
    record = branches.delete(desk.repository, "wide", run="me")
    assert (record.number, record.commit, record.previous, record.generation) == (3, None, tip.id, 2)
    assert branches.names(desk.repository) == ["main"] == desk.repository.refs.names("heads")
    assert list(history.all_tips(desk.repository)) == ["main"]
    assert desk.store.size("refs/heads/wide") is None
    with pytest.raises(NotFoundError, match=f"branch 'wide' was deleted in .*; its last commit was {tip.id}"):
        history.tip(desk.repository, "wide")
    with pytest.raises(NotFoundError, match=r"'wide' was deleted in .*; wide@\{1\} is where it was before"):
        history.resolve(desk.repository, "wide")
    with pytest.raises(NotFoundError, match="no branch 'wide'"):
        branches.delete(desk.repository, "wide", run="me")
    assert history.resolve(desk.repository, "wide@{1}").id == tip.id
    assert verify(desk.repository).errors == []

    branches.create(desk.repository, "wide", history.resolve(desk.repository, "wide@{1}"), run="me")
    assert last(desk.repository.refs, "heads/wide") == (4, "create", tip.id, None, 2)
    assert history.resolve(desk.repository, "wide~1").id == first.id
    assert branches.names(desk.repository) == ["main", "wide"]
    assert verify(desk.repository).errors == []


def test_a_writer_that_was_paused_cannot_save_to_a_deleted_branch_nor_to_its_successor(desk, make_desk):
    desk.open()
    first = desk.save()
    paused = make_desk(desk.store)
    paused.open("wide", start=first)
    commit, transaction = paused.begin()
    packed = paused.pack(commit, {}, parent=paused.newest)
    made = paused.describe(commit, packed, parent=paused.newest)
    branches.delete(desk.repository, "wide", run="me")
    branches.create(desk.repository, "wide", first, run="me")
    with pytest.raises(ConflictError, match="heads/wide was moved by another writer: record 2 is generation 2 of run me"):
        transaction.publish(made, hold=paused.hold, reader=paused.reader, locations=[packed.locations])
    # What it left behind is cleared by whoever opens the new branch.
    hold = open_branch(desk.repository, "wide", run="new", expected=first.id)
    assert recover(desk.repository, hold) == [commit]
    assert [key for key in desk.store.list("objects/") if commit in key] == []


def test_opening_a_deleted_branch_begins_it_afresh_at_a_commit_or_empty(desk):
    desk.open()
    first, second = desk.save(), desk.save()
    for start, reason, tip in ((first, "create", first.id), (None, "open", None)):
        branches.create(desk.repository, "wide", second, run="me")
        branches.delete(desk.repository, "wide", run="me")
        record, damage = newest_readable(desk.repository, "wide")
        assert (record.deleted, damage) == (True, [])
        before = record.number, record.generation
        hold = open_branch(desk.repository, "wide", run="new", expected=None, start=start)
        assert (hold.number, hold.generation, hold.tip) == (before[0] + 1, before[1] + 1, tip)
        assert last(desk.repository.refs, "heads/wide")[1:3] == (reason, tip)
        if tip is not None:
            branches.delete(desk.repository, "wide", run="me")
    # Opened and empty, held by nobody: there to be taken, and not listed.
    assert branches.names(desk.repository) == ["main"]
    branches.create(desk.repository, "wide", first, run="me")
    assert history.resolve(desk.repository, "wide").id == first.id


def test_the_branch_that_head_names_is_not_deleted(desk):
    desk.open()
    first = desk.save()
    branches.create(desk.repository, "wide", first, run="me")
    with pytest.raises(ConflictError, match=r"'main' is the one that HEAD names.*`syckpt branch --default NAME`"):
        branches.delete(desk.repository, "main", run="me")
    desk.repository.set_head("wide")
    branches.delete(desk.repository, "main", run="me")
    assert branches.names(desk.repository) == ["wide"]
    desk.repository.set_head("main")
    with pytest.raises(IntegrityError, match="'main', which was deleted, while wide have some"):
        desk.repository.head_branch()


def test_a_branch_that_somebody_writes_is_not_deleted_and_one_of_the_dead_is(desk):
    desk.open()
    first = desk.save()
    branches.create(desk.repository, "wide", first, run="me")
    here = owner.this_process()
    for held in (lease("wide", here), lease("wide", ELSEWHERE), lease("wide", GONE, writer=here), lease("wide", here, left_s=-5)):
        leases.write(desk.repository, held)
        with pytest.raises(ConflictError, match=r"'wide' is being written by process \d+ on .* \(run job, generation 3\): stop it first"):
            branches.delete(desk.repository, "wide", run="me")
    for free in (lease("wide", GONE), lease("wide", GONE, writer=GONE), lease("wide", ELSEWHERE, left_s=-5)):
        leases.write(desk.repository, free)
        branches.delete(desk.repository, "wide", run="me")
        branches.create(desk.repository, "wide", first, run="me")


def test_of_two_at_once_one_gets_a_conflict(desk, monkeypatch):
    desk.open()
    first = desk.save()
    append = Refs.append

    def overtaken(refs: Refs, ref: str, **arguments: Any) -> Any:
        monkeypatch.setattr(Refs, "append", append)
        append(refs, ref, **{**arguments, "run": "faster"})
        return append(refs, ref, **arguments)

    monkeypatch.setattr(Refs, "append", overtaken)
    with pytest.raises(ConflictError, match=r"heads/wide was moved by another writer: record 1 is .* of run faster"):
        branches.create(desk.repository, "wide", first, run="me")
    monkeypatch.setattr(Refs, "append", overtaken)
    with pytest.raises(ConflictError, match=r"record 2 is .* of run faster"):
        branches.delete(desk.repository, "wide", run="me")
    monkeypatch.setattr(Refs, "append", overtaken)
    with pytest.raises(ConflictError, match="tags/v1 was moved by another writer"):
        branches.tag(desk.repository, "v1", first, run="me")


def test_a_dropped_commit_is_no_place_for_a_branch_or_a_tag(desk):
    desk.open()
    first = desk.save()
    desk.repository.mark(first.id, "dropped", why="test")
    dropped = desk.repository.read_commit(first.id)
    for make in (branches.create, branches.tag):
        with pytest.raises(NotFoundError, match=f"{first.id} was dropped by retention"):
            make(desk.repository, "x", dropped, run="me")


def test_a_commit_that_is_dropped_at_the_same_moment_is_let_go_again(desk):
    desk.open()
    first = desk.save()
    desk.repository.mark(first.id, "dropped", why="test")  # `first` was read before
    for make, kind in ((branches.create, "heads"), (branches.tag, "tags")):
        with pytest.raises(NotFoundError, match=f"{first.id} was dropped by retention"):
            make(desk.repository, "x", first, run="me")
        assert last(desk.repository.refs, f"{kind}/x")[1:4] == ("delete", None, first.id)
        assert not desk.repository.refs.exists(f"{kind}/x")


def test_a_tag_names_one_commit_until_it_is_deleted(desk):
    desk.open()
    first, second = desk.save(), desk.save(tags=["saved-with"])
    branches.tag(desk.repository, "v1", first, run="me")
    assert branches.tags(desk.repository) == ["saved-with", "v1"]
    assert history.resolve(desk.repository, "v1").id == first.id
    for name in ("v1", "saved-with"):
        with pytest.raises(ConflictError, match=f"the tag '{name}' exists already and means .*`syckpt tag -d {name}` first"):
            branches.tag(desk.repository, name, second, run="me")
    record = branches.delete_tag(desk.repository, "v1", run="me")
    assert (record.number, record.commit, record.previous) == (2, None, first.id)
    with pytest.raises(NotFoundError, match="no commit 'v1'"):
        history.resolve(desk.repository, "v1")
    with pytest.raises(NotFoundError, match=r"no tag 'v1' in .*; there are: saved-with"):
        branches.delete_tag(desk.repository, "v1", run="me")
    branches.tag(desk.repository, "v1", second, run="me")
    assert last(desk.repository.refs, "tags/v1")[:3] == (3, "create", second.id)
    branches.delete_tag(desk.repository, "saved-with", run="me")
    assert branches.tags(desk.repository) == ["v1"]
    assert verify(desk.repository).errors == []


def test_the_tag_of_a_dropped_commit_is_free(desk):
    desk.open()
    first, second = desk.save(), desk.save()
    branches.tag(desk.repository, "v1", first, run="me")
    desk.repository.mark(first.id, "dropped", why="test")
    branches.tag(desk.repository, "v1", second, run="me")
    assert history.resolve(desk.repository, "v1").id == second.id


def test_a_branch_and_a_tag_do_not_hide_each_other(desk):
    desk.open()
    first = desk.save(tags=["v1"])
    with pytest.raises(ConflictError, match="'v1' is a tag, which a branch of that name would hide"):
        branches.create(desk.repository, "v1", first, run="me")
    with pytest.raises(ConflictError, match="'main' is a branch, which a revision of that name means"):
        branches.tag(desk.repository, "main", first, run="me")


def test_a_damaged_branch_is_still_listed(desk):
    desk.open()
    first = desk.save()
    branches.create(desk.repository, "wide", first, run="me")
    key = desk.repository.refs.key("heads/wide", 1)
    data = desk.store.get(key)
    desk.store.replace(key, data.replace(b"create", b"create "))
    assert branches.names(desk.repository) == ["main", "wide"]
    with pytest.raises(IntegrityError, match=key):
        branches.delete(desk.repository, "wide", run="me")


def test_a_second_branch_settles_what_a_missing_head_meant(desk):
    desk.open()
    first = desk.save()
    desk.store.delete("HEAD")
    branches.create(desk.repository, "wide", first, run="me")
    assert desk.store.get("HEAD") == b"ref: refs/heads/main\n"


def test_a_branch_whose_copy_for_people_cannot_be_written_is_made_and_deleted_all_the_same(desk, caplog):
    desk.open()
    first = desk.save()

    def refuse(operation: str, key: str) -> None:
        if key.startswith("refs/"):
            raise OSError(28, "No space left on device")

    desk.store.before_mutation = refuse
    branches.create(desk.repository, "wide", first, run="me")
    assert history.resolve(desk.repository, "wide").id == first.id
    branches.delete(desk.repository, "wide", run="me")
    assert branches.names(desk.repository) == ["main"]
    assert caplog.text.count("heads/wide has moved, but its copy for people could not be written") == 2


def test_of_many_that_make_and_delete_one_branch_at_once_one_wins_each_time(tmp_path, make_desk):
    desk = make_desk(LocalStore(tmp_path))
    desk.open()
    first = desk.save()

    def attempt(act: Callable[[int], object]) -> list[bool]:
        ready = Barrier(8)

        def one(number: int) -> bool:
            ready.wait()
            try:
                act(number)
            except (ConflictError, NotFoundError):
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(8)))

    for turn in range(3):
        assert sum(attempt(lambda number: branches.create(desk.repository, "wide", first, run=f"run {number}"))) == 1
        assert branches.names(desk.repository) == ["main", "wide"]
        assert sum(attempt(lambda number: branches.delete(desk.repository, "wide", run=f"run {number}"))) == 1
        assert branches.names(desk.repository) == ["main"]
        assert desk.repository.refs.numbers("heads/wide") == list(range(1, 2 * turn + 3))
    assert verify(desk.repository).errors == []
