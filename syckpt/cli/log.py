"""`syckpt log`: commits, newest first. What can be read is shown before damage is reported."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.errors import IntegrityError, NotFoundError

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.graph import Row
    from syckpt.repo.labels import Labels
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
@click.option("--dropped", "with_dropped", is_flag=True, help="Show each commit that retention dropped, not a line for a run of them.")
@json_option
@pass_invocation
def command(
    invocation: Invocation, rev: str | None, count: int | None, as_graph: bool, every: bool, oneline: bool, with_dropped: bool
) -> None:
    """Show commits, newest first, from REV (default: HEAD) back along its parents.

    "epoch" is "3 done" behind a finished epoch and "3 batch 40" within one; "written" is what the save added to the disk, "ratio" how many
    times more the state itself is. Behind them marks like [damaged] and [signed] (by whom, tells `syckpt show`), names, and the message.
    Dropped commits that follow each other and have no name are one line.

    JSON: a list of objects, dropped commits among them; sizes are bytes, times seconds or ISO 8601 in UTC; floats that are no numbers are
    the texts "nan", "inf" and "-inf".

    \b
    Examples:
      syckpt log                     everything that led to HEAD
      syckpt log -n 5 experiment     the five newest of the branch `experiment`
      syckpt log --graph --all       all branches
      syckpt log --dropped           also what retention dropped
      syckpt log --json | jq '.[0].metric'
    """
    if rev is not None and every:
        raise click.UsageError("--all shows everything: name either it or REV")
    from syckpt.repo import graph, history
    from syckpt.repo.labels import Labels
    from syckpt.repo.signing import all_signatures

    repository = invocation.repository()
    labels = Labels(repository)
    problems = [*labels.problems]
    if every:
        everything = history.reachable(repository, labels.tips, problems=problems)
        commits = graph.order(everything.values(), by_branch=as_graph)[:count]
    else:
        commits = list(islice(_back(repository, rev or "HEAD", labels.head, problems), count))
    if invocation.as_json:
        output.echo_json([shown.record(commit, labels) for commit in commits])
    elif commits:
        signed = frozenset(all_signatures(repository))
        output.echo(_lines(commits, labels, signed, as_graph=as_graph, oneline=oneline, fold=not with_dropped))
    if problems:
        raise problems[0]


def _back(repository: Repository, rev: str, head: str | None, problems: list[IntegrityError]) -> Iterator[Commit]:
    """Yield a revision's commit and its ancestors, up to the first that cannot be read; nothing for a HEAD without commits.

    `head` is the branch that HEAD names, where that is known.
    """
    from syckpt.repo import history

    try:
        yield from history.walk(repository, history.resolve(repository, rev, branch=head))
    except NotFoundError:
        if rev != "HEAD":
            raise
    except IntegrityError as exc:
        problems.append(exc)


def _lines(commits: list[Commit], labels: Labels, signed: frozenset[str], *, as_graph: bool, oneline: bool, fold: bool) -> Iterator[str]:
    """Yield the lines of a log: one a commit, or two where the terminal is narrow; one for a run of dropped commits."""
    from syckpt.repo import graph

    columns = output.width()
    narrow = output.is_narrow() and not oneline
    rows = list(graph.draw(commits)) if as_graph else [graph.Row(commit, (), "", "", ()) for commit in commits]
    runs = _runs(rows, labels) if fold else [[row] for row in rows]
    cells = [_cells(run[0].commit, oneline=oneline, narrow=narrow) for run in runs if len(run) == 1]
    if not oneline:
        cells.insert(0, [*_HEADER, "age" if narrow else "created"])
    table = output.aligned(cells, right=() if oneline else (1, 3, 4, 5))
    lanes = max(len(row.own) for row in rows) + 1 if as_graph else 0
    if not oneline:
        yield click.style(" " * lanes + "  ".join(table.pop(0)).rstrip(), bold=True)
    texts = iter(table)
    for run in runs:
        row = run[0]
        yield from row.above
        if len(run) > 1:
            text = output.cut(_folded(run), _room(columns, lanes))
            yield row.own.replace("*", ":").ljust(lanes) + click.style(text, dim=True)
            yield from run[-1].below
            continue
        name, *rest = next(texts)
        line = "  ".join([row.own.ljust(lanes) + name, *rest])
        styled = row.own.ljust(lanes) + click.style(name, fg="yellow") + line[lanes + len(name) :]
        indent = row.beside.ljust(lanes) + _INDENT
        room = _room(columns, len(indent) if narrow else len(line) + 2)
        tail = _tail(row.commit, labels, room=room, signed=row.commit.id in signed)
        if narrow:
            yield styled.rstrip()
            yield from [indent + tail] if tail else []
        else:
            yield f"{styled}  {tail}" if tail else styled.rstrip()
        yield from row.below


def _runs(rows: list[Row], labels: Labels) -> list[list[Row]]:
    """Return the rows, those together that are dropped, have no name and stand in one lane with nothing drawn between them."""
    runs: list[list[Row]] = []
    for row in rows:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and row.commit.dropped
            and last.commit.dropped
            and not (labels.refs(row.commit) or labels.refs(last.commit))
            and last.own == row.own
            and not (last.below or row.above)
        ):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _folded(run: list[Row]) -> str:
    first, last = (choose(row.commit.step for row in run) for choose in (min, max))
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"... {output.count(len(run), 'dropped commit')}, {steps}; --dropped shows them"


def _room(columns: int | None, used: int) -> int | None:
    return None if columns is None else max(0, columns - used)


def _cells(commit: Commit, *, oneline: bool, narrow: bool) -> list[str]:
    name = shown.short_id(commit.id)
    if oneline:
        return [name, f"step {commit.step}"]
    return [
        name,
        str(commit.step),
        shown.epoch(commit),
        output.number(commit.metric),
        output.nbytes(commit.stats.get("written_bytes")),
        output.number(commit.stats.get("ratio"), ".2f", "x"),
        shown.age(commit) if narrow else shown.created(commit),
    ]


def _tail(commit: Commit, labels: Labels, *, room: int | None, signed: bool) -> str:
    """Return marks, names and the message's first line, which is cut to what is left of `room`."""
    seal = "[signed]" if signed else ""
    marks, names = "".join(f"[{mark}]" for mark in shown.marks(commit)), labels.text(commit)
    lead = " ".join(filter(None, (marks, seal, names)))
    message = output.printable(commit.message.partition("\n")[0])
    if room is not None:
        message = output.cut(message, max(0, room - len(lead) - bool(lead)))
    styled = [click.style(text, fg=colour) for text, colour in ((marks, "red"), (seal, "cyan"), (names, "green")) if text]
    return " ".join(filter(None, (*styled, message)))
