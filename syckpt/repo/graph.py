"""Branches drawn beside commits, as `git log --graph` does: from commits to rows (pure), and a repository's whole history as text.

A lane is a column in which a line leads down to a commit that is still to come. Only first parents are drawn: no writer makes merges.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from syckpt.objects.commit import Commit
from syckpt.objects.text import printable
from syckpt.repo import history
from syckpt.repo.labels import Labels
from syckpt.repo.repository import Repository

__all__ = ["Row", "draw", "order", "tree"]


@dataclass(frozen=True)
class Row:
    """A commit with the lanes around it: lines above, its own (with `*`), what stands before further lines of it, lines below."""

    commit: Commit
    above: tuple[str, ...]
    own: str
    beside: str
    below: tuple[str, ...]


def order(commits: Iterable[Commit], *, by_branch: bool) -> list[Commit]:
    """Return the commits newest first, children before parents whatever the clocks said; `by_branch`: each branch in one piece."""
    known = {commit.id: commit for commit in commits}
    children = Counter(commit.parents[0] for commit in known.values() if commit.parents)
    ready = sorted((commit for commit in known.values() if not children[commit.id]), key=_created)
    found = []
    while ready:
        commit = ready.pop()
        found.append(commit)
        parent = known.get(commit.parents[0]) if commit.parents else None
        if parent is None:
            continue
        children[parent.id] -= 1
        if children[parent.id]:
            continue
        if by_branch:
            ready.append(parent)
        else:
            insort(ready, parent, key=_created)
    return found


def tree(repository: Repository, *, head: str | None = None) -> str:
    """Return all that branches and tags lead to, a line a commit: graph, id, step, metric, marks, names, message.

    `head` is the branch to call HEAD (default: the one that the file HEAD names). Raises: IntegrityError.
    """
    labels = Labels(repository, head=head)
    if labels.problems:
        raise labels.problems[0]
    rows = list(draw(order(history.reachable(repository, labels.tips).values(), by_branch=True)))
    lanes = max((len(row.own) for row in rows), default=0)
    lines: list[str] = []
    for row in rows:
        lines += [*row.above, f"{row.own:<{lanes}} {_line(row.commit, labels)}", *row.below]
    return "\n".join(lines)


def _line(commit: Commit, labels: Labels) -> str:
    facts = [commit.id[:17], f"step {commit.step}"]
    facts += [f"metric {commit.metric:.6g}"] if commit.metric is not None else []
    facts += [f"[{mark}]" for mark in commit.marks]
    facts += filter(None, (labels.text(commit), printable(commit.message.partition("\n")[0])))
    return "  ".join(facts)


def _created(commit: Commit) -> int:
    return commit.created_ns


def draw(commits: Sequence[Commit]) -> Iterator[Row]:
    """Yield the rows of commits that stand with children before parents."""
    lanes: list[str] = []
    ended: int | None = None
    for commit in commits:
        above: tuple[str, ...] = ()
        if commit.id not in lanes:
            if ended == len(lanes):
                # Right below the first commit of another history this one would seem to be its parent.
                above = (_bars(len(lanes)),)
            lanes.append(commit.id)
        column = lanes.index(commit.id)
        own = _bars(len(lanes), column, "*")
        ended = None
        if commit.parents:
            beside = _bars(len(lanes))
            lanes[column] = commit.parents[0]
            below = _join(lanes)
        else:
            beside = _bars(len(lanes), column, " ")
            del lanes[column]
            below = ("| " * column + " /" * (len(lanes) - column),) if column < len(lanes) else ()
            ended = column if column == len(lanes) else None
        yield Row(commit, above, own, beside.rstrip(), below)


def _bars(count: int, column: int = -1, mark: str = "") -> str:
    return " ".join(mark if index == column else "|" for index in range(count))


def _join(lanes: list[str]) -> tuple[str, ...]:
    """Lead two lanes to one commit together, into the left one; return the lines that show it."""
    right = next((index for index, commit in enumerate(lanes) if commit in lanes[:index]), None)
    if right is None:
        return ()
    left = lanes.index(lanes[right])
    del lanes[right]
    crossed = right - left - 1
    lines = ["| " * left + "|" + "_|" * crossed + "/" + " /" * (len(lanes) - right)]
    if crossed:
        lines.append("| " * left + "|/" + _bars(len(lanes) - left - 1))
    return tuple(lines)
