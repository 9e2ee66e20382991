"""Revisions and the way back, over damage and unfinished saves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from syckpt.errors import IntegrityError, NotFoundError
from syckpt.objects import canonical
from syckpt.repo import branches, documents, history
from syckpt.repo.verify import verify


def test_the_way_back_follows_first_parents_and_each_parent_is_the_one_that_was_meant(desk):
    desk.open()
    made = [desk.save({"x": np.full(3, i, np.float32)}, step=i) for i in range(3)]
    assert [c.id for c in history.walk(desk.repository, made[2])] == [c.id for c in reversed(made)]
    assert [c.step for c in history.log(desk.repository, count=2)] == [2, 1]
    assert [c.step for c in history.log(desk.repository, "HEAD~1")] == [1, 0]
    # A forged parent has another seal.
    data = desk.store.get(f"objects/{made[0].id}.json")
    desk.store.delete(f"objects/{made[0].id}.json")
    with pytest.raises(IntegrityError, match=f"objects/{made[0].id}.json: missing, though its child {made[1].id} names it"):
        list(history.walk(desk.repository, made[2]))
    body, _ = canonical.unseal(data, key="k", kind="commit")
    desk.store.create(f"objects/{made[0].id}.json", canonical.seal({**body, "step": 99})[0])
    with pytest.raises(IntegrityError, match="another document than expected"):
        list(history.walk(desk.repository, made[2]))


def test_an_unfinished_save_is_no_revision(desk):
    desk.open()
    first = desk.save()
    commit, transaction = desk.begin()
    packed = desk.pack(commit, {"x": np.ones(3, np.float32)}, parent=first)
    made = desk.describe(commit, packed, parent=first)
    documents.write(desk.store, f"objects/{commit}.json", made.to_body())
    for rev in (commit, commit[:-1], commit[9:15]):
        with pytest.raises(NotFoundError):
            history.resolve(desk.repository, rev)
    assert history.resolve(desk.repository, "0badc0de").id == first.id
    transaction.abort()
    with pytest.raises(NotFoundError):
        history.resolve(desk.repository, commit)


def test_a_commit_that_a_record_names_but_is_gone_is_an_integrity_error(desk):
    desk.open()
    commit = desk.save()
    desk.store.delete(f"objects/{commit.id}.json")
    for rev in ("HEAD", "main", "latest"):
        with pytest.raises(
            IntegrityError, match=f"objects/{commit.id}.json: missing, though logs/refs/heads/main/000000000002.json names it"
        ):
            history.resolve(desk.repository, rev)


def test_all_tips_and_ids(desk, make_desk):
    assert history.all_tips(desk.repository) == {}
    assert history.commit_ids(desk.repository) == []
    desk.open()
    first = desk.save()
    other = make_desk(desk.store, repository_id="other")
    other.open("b/c", start=first)
    second = other.save()
    make_desk(desk.store).open("empty")
    assert {name: c.id for name, c in history.all_tips(desk.repository).items()} == {"main": first.id, "b/c": second.id}
    assert history.commit_ids(desk.repository) == sorted([first.id, second.id])
    assert history.resolve(desk.repository, "latest").id == second.id
    with pytest.raises(NotFoundError, match="'empty' has no commit yet"):
        history.resolve(desk.repository, "empty")


def test_best_is_never_nan_and_of_equals_the_newest(desk):
    desk.open()
    made = {}
    for metric in (0.5, math.nan, 0.25, 0.25, math.inf, None, -math.inf):
        commit = desk.save(metric=metric)
        made[commit.id] = commit
    commits = list(made.values())
    assert history.best(commits) is commits[6]
    assert history.best(commits[:6]) is commits[3]
    assert history.best(commits, maximize=True) is commits[4]
    assert history.best([commits[1], commits[5]]) is None
    assert history.best([]) is None


@pytest.mark.parametrize(
    "text", [b"", b"main", b"ref: refs/heads/", b"ref: refs/heads/a b", b"ref: refs/tags/x", b"\xff", b"ref: refs/heads/x\n\n"]
)
def test_a_malformed_head_is_an_integrity_error_that_says_what_to_write(desk, text):
    desk.open()
    desk.save()
    desk.store.replace("HEAD", text)
    with pytest.raises(IntegrityError, match=r"^HEAD: "):
        history.resolve(desk.repository, "HEAD")
    assert history.resolve(desk.repository, "main").branch == "main"


def test_a_head_of_a_branch_without_records_is_an_error_while_others_have_some(desk):
    assert desk.repository.head_branch() == "main"
    desk.store.replace("HEAD", b"ref: refs/heads/gone\n")
    assert desk.repository.head_branch() == "gone"
    desk.open()
    with pytest.raises(IntegrityError, match="'gone', which has no records, while main have some"):
        desk.repository.head_branch()


def test_a_reflog_tells_every_record_and_counts_moves(desk):
    desk.open()
    first, second = desk.save(), desk.save()
    desk.open()
    third = desk.save(parent=first)
    records = history.reflog(desk.repository, "main")
    assert [(r.number, r.reason, r.commit, r.generation) for r in records] == [
        (5, "reset", third.id, 2),
        (4, "open", second.id, 2),
        (3, "save", second.id, 1),
        (2, "save", first.id, 1),
        (1, "open", None, 1),
    ]
    assert [r.number for r in records if history.is_move(r)] == [5, 3, 2]
    assert [history.resolve(desk.repository, f"main@{{{n}}}").id for n in range(3)] == [third.id, second.id, first.id]
    branches.create(desk.repository, "wide", first, run="me")
    branches.delete(desk.repository, "wide", run="me")
    assert [r.reason for r in history.reflog(desk.repository, "wide")] == ["delete", "create"]
    with pytest.raises(NotFoundError, match=r"wide@.* was deleted"):
        history.resolve(desk.repository, "wide@{0}")
    with pytest.raises(NotFoundError, match="moved only 2 times"):
        history.resolve(desk.repository, "wide@{2}")
    for name in ("nothing", "a b"):
        with pytest.raises(NotFoundError, match=f"no branch '{name}' in .*; branches: main"):
            history.reflog(desk.repository, name)


def test_a_damaged_record_of_a_reflog_is_an_error_or_left_out_and_told(desk):
    desk.open()
    desk.save()
    key = desk.repository.refs.key("heads/main", 1)
    desk.store.replace(key, desk.store.get(key)[:-9])
    with pytest.raises(IntegrityError, match=key):
        history.reflog(desk.repository, "main")
    problems = []
    assert [r.number for r in history.reflog(desk.repository, "main", problems=problems)] == [2]
    assert [key in str(problem) for problem in problems] == [True]


def test_a_name_of_a_dropped_commit_means_it_until_another_takes_it(desk):
    desk.open()
    first = desk.save(name="good")
    desk.repository.mark(first.id, "dropped", why="test")
    assert history.resolve(desk.repository, "good").dropped
    second = desk.save(name="good")
    assert history.resolve(desk.repository, "good").id == second.id


def test_everything_that_refs_lead_to_is_reached_once_and_damage_ends_one_line_only(desk, make_desk):
    desk.open()
    first, second = desk.save(), desk.save()
    other = make_desk(desk.store, repository_id="other")
    other.open("wide", start=first)
    third = other.save()
    tips = {second.id: second.seal, third.id: None, first.id: first.seal}
    assert history.reachable(desk.repository, tips).keys() == {first.id, second.id, third.id}
    desk.store.delete(f"objects/{third.id}.json")
    with pytest.raises(IntegrityError, match=f"objects/{third.id}.json: missing, though a ref names it"):
        history.reachable(desk.repository, tips)
    problems = []
    assert history.reachable(desk.repository, tips, problems=problems).keys() == {first.id, second.id}
    assert len(problems) == 1


def test_a_healthy_repository_verifies_and_a_quick_look_reads_no_tensors(desk):
    desk.open()
    for value in range(3):
        desk.save({"x": np.full(100_000, value, np.float32), "y": np.ones(5, np.int64)}, name=f"n{value}", tags=[f"t{value}"])
    report = verify(desk.repository)
    assert (report.errors, report.commits, report.tensors, report.nbytes) == ([], 3, 4, 3 * 400_000 + 40)
    assert verify(desk.repository, quick=True).tensors == 0
    assert verify(desk.repository, "HEAD~1").commits == 1
