"""Histories as lines of text."""

from __future__ import annotations

from typing import Any

import pytest

from syckpt.errors import IntegrityError
from syckpt.objects.commit import Commit
from syckpt.repo import graph
from syckpt.testing.repositories import commit_id, make_repository


def test_a_tree_shows_all_branches_and_tags_with_what_tells_commits_apart(tmp_path):
    commits = [{"metric": 0.5}, {"message": "diverged\nand how", "metric": float("nan")}, {"tags": ("v1",), "name": "good"}]
    repository = make_repository(tmp_path, commits=commits, branches={"wide": (2, 2)})
    repository.mark(commit_id(4), "preempted", why="test")
    assert graph.tree(repository) == (
        "*   00000000-00000005  step 50  (wide)\n"
        "*   00000000-00000004  step 40  [preempted]\n"
        "| * 00000000-00000003  step 30  (HEAD -> main, tag: v1, name: good)\n"
        "|/\n"
        "*   00000000-00000002  step 20  metric nan  diverged\n"
        "*   00000000-00000001  step 10  metric 0.5"
    )
    assert "step 50  (HEAD -> wide)" in graph.tree(repository, head="wide")


def test_a_repository_without_commits_has_no_tree_and_a_damaged_one_an_error(tmp_path):
    assert graph.tree(make_repository(tmp_path / "empty", commits=0)) == ""
    repository = make_repository(tmp_path, commits=2)
    repository.store.delete(f"objects/{commit_id(1)}.json")
    with pytest.raises(IntegrityError, match=f"objects/{commit_id(1)}.json: missing"):
        graph.tree(repository)


def drawn(*parents: int | None) -> list[str]:
    """Draw commits 1, 2, ... with these parents, all by the newest, and name each by its number."""
    commits = [_commit(number, parent) for number, parent in enumerate(parents, 1)]
    lines = []
    for row in graph.draw(graph.order(commits, by_branch=True)):
        lines += [*row.above, f"{row.own} {row.commit.step}", *row.below]
    return lines


def _commit(number: int, parent: int | None) -> Commit:
    fields: dict[str, Any] = dict.fromkeys(Commit.__dataclass_fields__)
    parents = () if parent is None else (commit_id(parent),)
    return Commit(**{**fields, "id": commit_id(number), "parents": parents, "created_ns": number, "step": number})


def test_a_lane_crosses_those_between() -> None:
    assert drawn(None, 1, 2, 1, 2, 1) == ["* 6", "| * 5", "| | * 4", "|_|/", "|/|", "| | * 3", "| |/", "| * 2", "|/", "* 1"]


def test_lanes_to_the_right_of_a_join_move_left() -> None:
    rows = graph.draw([_commit(6, 1), _commit(5, 3), _commit(4, 2), _commit(3, 1), _commit(2, 1)])
    assert [(row.own, row.below) for row in rows] == [
        ("*", ()),
        ("| *", ()),
        ("| | *", ()),
        ("| * |", ("|/ /",)),
        ("| *", ("|/",)),
    ]


def test_three_branches_of_one_commit_join_one_by_one() -> None:
    assert drawn(None, 1, 1, 1) == ["* 4", "| * 3", "|/", "| * 2", "|/", "* 1"]


def test_a_history_that_begins_below_another_is_set_apart() -> None:
    assert drawn(None, None) == ["* 2", "", "* 1"]
    assert drawn(None, None, None, 1, 1) == ["* 5", "| * 4", "|/", "* 1", "", "* 3", "", "* 2"]


def test_the_first_commit_of_a_history_ends_its_lane() -> None:
    rows = list(graph.draw([_commit(4, 2), _commit(3, None), _commit(2, None)]))
    assert [(row.above, row.own, row.below) for row in rows] == [((), "*", ()), ((), "| *", ()), ((), "*", ())]
    rows = list(graph.draw([_commit(4, 1), _commit(3, 2), _commit(1, None), _commit(2, None)]))
    assert [(row.own, row.below) for row in rows] == [("*", ()), ("| *", ()), ("* |", (" /",)), ("*", ())]
