"""Saves become visible at once or not at all, and only for the newest holder of a branch."""

from __future__ import annotations

import numpy as np
import pytest

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from syckpt.objects.refs import Intent
from syckpt.repo import documents, history
from syckpt.repo.transaction import newest_readable, open_branch, recover
from syckpt.stores.memory import MemoryStore


def objects_of(store: MemoryStore, commit: str) -> list[str]:
    return [key for key in store.list() if commit in key]


def test_a_save_leaves_these_keys_in_this_order(desk):
    desk.open()
    order: list[str] = []
    desk.store.before_mutation = lambda operation, key: (
        order.append(f"{operation} {key}") if operation in ("link", "replace", "unlink") else None
    )
    commit = desk.save(name="first", tags=["v1"])
    objects = f"objects/{commit.id}"
    assert order == [
        f"link intents/{commit.id}.json",
        f"link {objects}/r00000.safetensors",
        f"link {objects}/r00000.manifest",
        f"link {objects}/r00000.locations.0001",
        f"link {objects}.json",
        "link logs/refs/heads/main/000000000002.json",
        "link logs/refs/names/first/000000000001.json",
        "link logs/refs/tags/v1/000000000001.json",
        "replace refs/heads/main",
        f"unlink intents/{commit.id}.json",
    ]
    assert desk.store.get("HEAD") == b"ref: refs/heads/main\n"
    assert desk.store.get("refs/heads/main") == commit.id.encode() + b"\n"
    record = desk.repository.refs.head("heads/main")
    assert (record.commit, record.commit_seal, record.previous, record.generation, record.reason) == (
        commit.id,
        commit.seal,
        None,
        1,
        "save",
    )


def test_opening_makes_a_record_of_the_same_commit_and_a_higher_generation(desk, make_desk):
    assert (desk.open().generation, desk.hold.number, desk.hold.tip) == (1, 1, None)
    first = desk.save()
    other = make_desk(desk.store, run="other")
    assert (other.open().generation, other.hold.number, other.hold.tip) == (2, 3, first.id)
    record = desk.repository.refs.head("heads/main")
    assert (record.reason, record.commit, record.commit_seal, record.run) == ("open", first.id, first.seal, "other")


def test_a_fork_begins_with_a_record_of_its_start(desk, make_desk):
    desk.open()
    first = desk.save()
    desk.save()
    fork = make_desk(desk.store)
    hold = fork.open("fork", start=first)
    assert (hold.generation, hold.number, hold.tip) == (1, 1, first.id)
    record = desk.repository.refs.head("heads/fork")
    assert (record.reason, record.commit, record.commit_seal) == ("create", first.id, first.seal)
    assert fork.save().parents == (first.id,)
    assert desk.store.get("HEAD") == b"ref: refs/heads/main\n"


def test_a_branch_that_moved_since_it_was_looked_at_is_a_conflict(desk):
    desk.open()
    commit = desk.save()
    with pytest.raises(ConflictError, match=f"has moved on from empty to {commit.id}"):
        open_branch(desk.repository, "main", run="late", expected=None)


def test_an_older_generation_can_publish_nothing_and_leaves_nothing(desk, make_desk):
    desk.open()
    first = desk.save()
    newer = make_desk(desk.store, run="newer")
    newer.open()
    before = desk.store.list()
    with pytest.raises(ConflictError, match="record 3 is generation 2 of run newer"):
        desk.save()
    assert desk.store.list() == before
    second = newer.save()
    with pytest.raises(ConflictError, match="generation 2 of run newer"):
        desk.save()
    assert [c.id for c in history.log(desk.repository)] == [second.id, first.id]


def test_two_newcomers_cannot_both_take_a_branch(desk, make_desk):
    desk.open()
    desk.save()
    one, two = make_desk(desk.store, run="one"), make_desk(desk.store, run="two")
    one.open()
    two.open()
    assert two.save().parents == (desk.newest.id,)
    with pytest.raises(ConflictError, match="run two"):
        one.save()


def test_a_commit_beside_the_tip_is_recorded_as_a_reset(desk):
    desk.open()
    first, second = desk.save(), desk.save()
    third = desk.save(parent=first)
    assert third.parents == (first.id,)
    record = desk.repository.refs.head("heads/main")
    assert (record.reason, record.previous) == ("reset", second.id)
    assert history.resolve(desk.repository, "HEAD@{1}").id == second.id


def test_a_save_whose_blobs_are_gone_is_given_up(desk):
    desk.open()
    first = desk.save()
    desk.store.delete(f"objects/{first.id}/r00000.safetensors")
    before = desk.store.list()
    with pytest.raises(IntegrityError, match=f"objects/{first.id}/r00000.safetensors: missing, expected"):
        desk.save()
    assert desk.store.list() == before


# -- recovery --------------------------------------------------------------------------------------------------------------------


class Kill(BaseException):
    """The process ends here: nobody cleans up."""


def kill_at(desk, number: int, **facts) -> str | None:
    """Make a save that dies before its `number`-th mutation; return its id, or None when it has fewer."""
    count = 0

    def before(operation: str, key: str) -> None:
        nonlocal count
        if operation in ("link", "replace", "unlink"):
            count += 1
            if count == number:
                raise Kill

    commit, transaction = None, None
    desk.store.before_mutation = before
    try:
        commit, transaction = desk.begin()
        packed = desk.pack(commit, facts.pop("arrays", {"x": np.full(3, float(number))}), parent=desk.newest)
        made = desk.describe(commit, packed, parent=desk.newest, name=f"n{number}", tags=[f"t{number}"])
        transaction.publish(made, hold=desk.hold, reader=desk.reader, locations=[packed.locations])
    except Kill:
        return commit or "before its intent"
    finally:
        desk.store.before_mutation = lambda operation, key: None
    return None


def test_recovery_clears_what_never_became_visible_and_completes_what_did(make_desk):
    for number in range(1, 12):
        desk = make_desk(run="killed")
        desk.open()
        first = desk.save()
        clean = desk.store.list()
        cut = kill_at(desk, number)
        if cut is None:
            assert number == 11  # one beyond the last mutation
            break
        visible = number > 6  # the record is the sixth
        assert history.tip(desk.repository, "main").id == (cut if visible else first.id)

        heir = make_desk(desk.store, run="heir")
        hold = heir.open()
        dropped = recover(heir.repository, hold)
        assert heir.store.list("intents/") == []
        if visible:
            assert dropped == []
            assert heir.store.get("refs/heads/main") == cut.encode() + b"\n"
            for ref in (f"n{number}", f"t{number}"):
                assert history.resolve(heir.repository, ref).id == cut
        else:
            assert dropped == ([] if number == 1 else [cut])
            assert [key for key in heir.store.list() if key not in clean] == ["logs/refs/heads/main/000000000003.json"]
        assert recover(heir.repository, hold) == []
        heir.save()
        assert heir.newest.parents == (cut if visible else first.id,)


def test_recovery_leaves_intents_of_its_own_generation_of_others_and_of_other_branches_alone(make_desk):
    one, other = make_desk(run="one"), make_desk(run="other")
    other.store = one.store
    one.open()
    other = make_desk(one.store, run="other", repository_id="other")
    other.open("other")
    mine, _ = one.begin()
    theirs, _ = other.begin()
    assert recover(one.repository, one.hold) == []
    assert one.store.list("intents/") == sorted(f"intents/{commit}.json" for commit in (mine, theirs))
    assert recover(one.repository, one.open()) == [mine]
    assert one.store.list("intents/") == [f"intents/{theirs}.json"]


def test_a_damaged_intent_is_left_alone_and_stops_nothing(desk, make_desk, caplog):
    desk.open()
    commit, _ = desk.begin()
    desk.store.replace(f"intents/{commit}.json", b"garbage")
    heir = make_desk(desk.store, run="heir")
    assert recover(heir.repository, heir.open()) == []
    assert f"intents/{commit}.json" in caplog.text
    heir.save()


def test_a_published_commit_that_was_damaged_before_it_was_completed_does_not_stop_the_saves_to_come(desk, make_desk, caplog):
    desk.open()
    first = desk.save()
    cut = kill_at(desk, 7)
    assert history.tip(desk.repository, "main").id == cut
    desk.store.replace(f"objects/{cut}.json", b"garbage")
    heir = make_desk(desk.store, run="heir")
    hold = open_branch(heir.repository, "main", run="heir", expected=cut)
    assert recover(heir.repository, hold) == []
    assert f"objects/{cut}.json" in caplog.text
    heir.hold, heir.newest = hold, first
    assert heir.save().parents == (first.id,)


def test_an_intent_says_who_saves_what_behind_what(desk):
    desk.open()
    commit, _ = desk.begin(uses=("00000000-0000000000000001",))
    body, _ = documents.read(desk.store, f"intents/{commit}.json", kind="intent")
    intent = Intent.from_body(body, where="intent")
    assert (intent.commit, intent.branch, intent.generation, intent.run) == (commit, "main", 1, "run")
    assert (intent.uses, str(intent.owner)) == (("00000000-0000000000000001",), "process 1 on nowhere")


def test_an_aborted_save_is_gone_and_a_visible_one_stays(desk):
    desk.open()
    commit, transaction = desk.begin()
    desk.pack(commit, {"x": np.ones(3)}, parent=None)
    assert len(objects_of(desk.store, commit)) == 4
    transaction.abort()
    assert objects_of(desk.store, commit) == []

    desk.packer.failed()
    commit, transaction = desk.begin()
    packed = desk.pack(commit, {"x": np.ones(3)}, parent=None)
    made = desk.describe(commit, packed, parent=None)
    transaction.publish(made, hold=desk.hold, reader=desk.reader, locations=[packed.locations])
    transaction.abort()
    assert history.tip(desk.repository, "main").id == commit


def test_names_that_could_not_be_written_do_not_fail_a_visible_save(desk, caplog):
    desk.open()

    def before(operation: str, key: str) -> None:
        if key.startswith("logs/refs/names/"):
            raise StoreError("no space for names")

    desk.store.before_mutation = before
    commit = desk.save(name="lost")
    assert "no space for names" in caplog.text
    desk.store.before_mutation = lambda operation, key: None
    assert history.tip(desk.repository, "main").id == commit.id
    recover(desk.repository, desk.open())
    assert history.resolve(desk.repository, "lost").id == commit.id


# -- damaged records -------------------------------------------------------------------------------------------------------------


def test_a_damaged_newest_record_is_passed_over_and_never_written_over(desk, make_desk):
    desk.open()
    first = desk.save()
    desk.save()
    key = desk.repository.refs.key("heads/main", 3)
    desk.store.replace(key, b"garbage")
    record, damage = newest_readable(desk.repository, "main")
    assert (record.commit, len(damage)) == (first.id, 1)
    hold = open_branch(desk.repository, "main", run="heir", expected=first.id)
    # The lost record may have been an opening: its generation is counted.
    assert (hold.number, hold.generation) == (4, 3)
    assert desk.store.get(key) == b"garbage"


def test_no_readable_record_at_all_is_an_error(desk):
    desk.open()
    for key in desk.store.list("logs/"):
        desk.store.replace(key, b"garbage")
    with pytest.raises(IntegrityError, match="no record of branch 'main' can be read"):
        newest_readable(desk.repository, "main")
    with pytest.raises((IntegrityError, NotFoundError)):
        history.tip(desk.repository, "main")
