"""A repository at one moment."""

from __future__ import annotations

import time
from dataclasses import replace

from syckpt.objects.refs import Lease, Owner
from syckpt.repo import branches, leases, owner
from syckpt.repo.status import Damage, status

GONE = replace(owner.this_process(), start=1)
ELSEWHERE = Owner("elsewhere", "b", "p", 7, 7)


def test_an_empty_repository_says_how_to_begin(desk):
    found = status(desk.repository)
    assert (found.head, found.branches, found.tags, found.saves, found.damaged, found.commits) == ("main", (), {}, (), (), 0)
    assert found.advice() == ["no commit yet: the first save of a training script makes one"]


def test_branches_tags_and_size_are_told(desk):
    desk.open()
    first, second = desk.save(tags=["v1"]), desk.save()
    branches.create(desk.repository, "wide", first, run="me")
    branches.create(desk.repository, "old", first, run="me")
    branches.delete(desk.repository, "old", run="me")
    found = status(desk.repository)
    assert found.head == "main"
    assert [(b.name, b.commit, b.tip, b.writer) for b in found.branches] == [
        ("main", second.id, second, None),
        ("wide", first.id, first, None),
    ]
    assert found.tags == {"v1": first.id}
    assert found.commits == 2
    assert found.nbytes == sum(desk.store.size(key) for key in desk.store.list())
    assert found.problems == ()
    assert found.advice() == ["nothing: run a script again to go on from its branch; `syckpt log` shows the commits"]


def test_who_writes_a_branch_is_told_with_since_when_and_whether_alive(desk):
    desk.open()
    desk.save()
    taken = desk.open()
    desk.save()
    record = desk.repository.refs.read("heads/main", taken.number)
    for trainer, dead in ((owner.this_process(), False), (GONE, True), (ELSEWHERE, None)):
        held = Lease("main", "run", taken.generation, "token", trainer, None, time.time_ns())
        leases.write(desk.repository, held)
        (branch,) = status(desk.repository).branches
        assert branch.writer is not None
        assert (branch.writer.lease, branch.writer.since_ns, branch.writer.dead) == (held, record.time_ns, dead)
        ended = "the run on branch 'main' ended without closing; run its script again to go on"
        assert (ended in status(desk.repository).advice()) == (dead is True)


def test_saves_under_way_and_cut_off_and_damage_are_told(desk):
    desk.open()
    first = desk.save()
    commit, _ = desk.begin()
    desk.repository.mark(first.id, "damaged", why="blob: a flipped bit")
    found = status(desk.repository)
    assert [(save.intent.commit, save.dead) for save in found.saves] == [(commit, None)]
    assert found.damaged == (Damage(first.id, "blob: a flipped bit"),)
    assert found.advice() == [
        f"`syckpt verify {first.id}` tells what is damaged",
        (
            "no commit of branch 'main' can be loaded, and a resume raises: put the damaged files back from a copy, then `syckpt verify`;"
            " or begin anew with auto_resume=False"
        ),
    ]


def test_what_cannot_be_read_is_a_problem_and_the_rest_is_told(desk):
    desk.open()
    first, second = desk.save(tags=["v1"]), desk.save()
    desk.store.delete(f"objects/{second.id}.json")
    desk.store.replace("HEAD", b"nonsense")
    desk.store.create("intents/0badc0de-0123456789abcdef.json", b"{")
    found = status(desk.repository)
    assert (found.head, found.branches[0].commit, found.branches[0].tip, found.tags) == (None, second.id, None, {"v1": first.id})
    assert [str(problem).partition(":")[0] for problem in found.problems] == [
        "HEAD",
        f"objects/{second.id}.json",
        "intents/0badc0de-0123456789abcdef.json",
    ]
    assert found.advice()[0].startswith("run `syckpt verify`: HEAD: expected")
