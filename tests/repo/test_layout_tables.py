"""The table of layouts is a file of its commit: it is verified, goes with the commit, and nothing takes it for a stranger's."""

from __future__ import annotations

from typing import Any

import pytest

from syckpt.errors import IntegrityError, NotFoundError
from syckpt.objects.commit import Commit
from syckpt.objects.layouts import LayoutTable
from syckpt.repo import documents
from syckpt.repo.collection import GRACE_S, collect
from syckpt.repo.keys import layouts_key
from syckpt.repo.retention import Retention, retain
from syckpt.repo.transaction import recover
from syckpt.repo.verify import verify

TABLE = LayoutTable(1, {"model": ((0,),)}, (), (), ())


def begin(desk: Any) -> tuple[Commit, Any]:
    """Write all of a save with a table, up to its publication."""
    commit, transaction = desk.begin()
    packed = desk.pack(commit, {}, parent=desk.newest)
    seal = documents.write(desk.store, layouts_key(commit), TABLE.to_body())
    return desk.describe(commit, packed, parent=desk.newest, layouts=seal), (transaction, packed)


def save(desk: Any) -> Commit:
    made, (transaction, packed) = begin(desk)
    desk.hold, desk.newest = transaction.publish(made, hold=desk.hold, reader=desk.reader, locations=[packed.locations])
    desk.packer.published()
    return desk.newest


def test_a_commit_names_its_table_and_a_commit_without_one_has_none(desk: Any) -> None:
    desk.open()
    with_table, without = save(desk), desk.save()
    assert desk.repository.read_layouts(desk.repository.read_commit(with_table.id)) == TABLE
    assert with_table.to_body()["layouts"] == with_table.layouts
    assert "layouts" not in without.to_body()
    assert desk.repository.read_layouts(without) is None


@pytest.mark.parametrize("harm", ["lost", "flipped", "other"])
def test_a_damaged_table_is_a_damaged_commit(desk: Any, harm: str) -> None:
    desk.open()
    commit = save(desk)
    assert verify(desk.repository, commit.id).ok
    key, data = layouts_key(commit.id), bytearray(desk.store.get(layouts_key(commit.id)))
    desk.store.delete(key)
    if harm == "flipped":
        data[20] ^= 1
        desk.store.create(key, data)
    if harm == "other":
        documents.write(desk.store, key, LayoutTable(1, {}, (), (), ()).to_body())
    with pytest.raises(IntegrityError, match=key):
        desk.repository.check_whole(commit)
    ((text, commits),) = verify(desk.repository, mark=True).findings.items()
    assert key in text
    assert commits == [commit.id]
    assert desk.repository.marks(commit.id) == {"damaged"}


def test_it_goes_with_its_commit_and_not_before(desk: Any) -> None:
    desk.open()
    old, new = save(desk), save(desk)
    assert collect(desk.repository).strays == ()
    retain(desk.repository, "main", Retention(last=1))
    assert desk.store.size(layouts_key(old.id)) is None
    assert desk.store.size(layouts_key(new.id)) is not None
    with pytest.raises(NotFoundError, match="dropped"):
        desk.repository.read_layouts(old)
    assert desk.store.list(f"objects/{old.id}/") == []
    assert verify(desk.repository).ok


def test_that_of_a_save_which_was_cut_off_or_given_up_goes_too(desk: Any, make_desk: Any) -> None:
    desk.open()
    made, (transaction, _) = begin(desk)
    transaction.abort()
    desk.packer.failed()
    assert desk.store.list(f"objects/{made.id}/") == []
    made, _ = begin(desk)
    desk.packer.failed()
    later = make_desk(desk.store)
    assert recover(later.repository, later.open()) == [made.id]
    assert desk.store.list(f"objects/{made.id}/") == []
    later.store.create(layouts_key(made.id), b"left behind without an intent")
    later.store._written[layouts_key(made.id)] -= GRACE_S + 60
    assert [key for key, _ in collect(later.repository).strays] == [layouts_key(made.id)]
