"""`syckpt log`: commits, newest first. What can be read is shown before damage is reported."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import click

from syckpt.cli import commits as shown
from syckpt.cli import graph, output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.errors import IntegrityError, NotFoundError

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.repository import Repository

__all__ = ["command"]

_HEADER = ["commit", "step", "epoch", "metric", "written", "ratio"]
_INDENT = "    "


@click.command("log", short_help="Commits, newest first.")
@click.argument("rev", required=False)
@click.option("-n", "count", type=click.IntRange(min=0), metavar="N", help="Show at most N commits.")
@click.option("--graph", "as_graph", is_flag=True, help="Draw the branches.")
@click.option("--all", "every", is_flag=True, help="Show what all branches and tags lead to.")
@click.option("--oneline", is_flag=True, help="Only id, names, step and message.")
@json_option
@pass_invocation
def command(invocation: Invocation, rev: str | None, count: int | None, as_graph: bool, every: bool, oneline: bool) -> None:
    """Show commits, newest first, from REV (default: HEAD) back along its parents.

    "epoch" is "3 done" behind a finished epoch and "3 batch 40" within one; "written" is what the save added to the disk, "ratio" how many
    times more the state itself is. Behind them marks like [damaged], names, and the message.

    JSON: a list of objects; sizes are bytes, times seconds or ISO 8601 in UTC; a metric that is no number is the text "nan", "inf" or "-inf".

    \b
    Examples:
      syckpt log                     everything that led to HEAD
      syckpt log -n 5 experiment     the five newest of the branch `experiment`
      syckpt log --graph --all       all branches
      syckpt log --json | jq '.[0].metric'
    """
    if rev is not None and every:
        raise click.UsageError("--all shows everything: name either it or REV")
    repository = invocation.repository()
    labels = shown.Labels(repository)
    problems = [*labels.problems]
    if every:
        commits = graph.order(_everything(repository, problems), by_branch=as_graph)[:count]
    else:
        commits = list(islice(_back(repository, rev or "HEAD", problems), count))
    if invocation.as_json:
        output.echo_json([shown.record(commit, labels) for commit in commits])
    else:
        output.echo(_lines(commits, labels, as_graph=as_graph, oneline=oneline))
    if problems:
        raise problems[0]


def _back(repository: Repository, rev: str, problems: list[IntegrityError]) -> Iterator[Commit]:
    """Yield a revision's commit and its ancestors, up to the first that cannot be read; nothing for a HEAD without commits."""
    from syckpt.repo import history

    try:
        yield from history.walk(repository, history.resolve(repository, rev))
    except NotFoundError:
        if rev != "HEAD":
            raise
    except IntegrityError as exc:
        problems.append(exc)


def _everything(repository: Repository, problems: list[IntegrityError]) -> list[Commit]:
    """Return every commit that a branch or a tag leads to, in no order."""
    found: dict[str, Commit] = {}
    for kind in ("heads", "tags"):
        try:
            names = repository.refs.names(kind)
        except IntegrityError as exc:
            problems.append(exc)
            continue
        for name in names:
            for commit in _back_from(repository, f"{kind}/{name}", problems):
                if commit.id in found:
                    break
                found[commit.id] = commit
    return list(found.values())
