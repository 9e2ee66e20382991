"""`syckpt reflog`: where a branch was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.errors import IntegrityError

if TYPE_CHECKING:
    from syckpt.objects.refs import RefRecord

__all__ = ["command"]


@click.command("reflog", short_help="Where a branch was.")
@click.argument("branch", required=False)
@click.option("-n", "count", type=click.IntRange(min=0), metavar="N", help="Show at most N records.")
@json_option
@pass_invocation
def command(invocation: Invocation, branch: str | None, count: int | None) -> None:
    """Show the records of a branch (default: HEAD's), newest first; also of one that was deleted.

    BRANCH@{N} is the revision that a line begins with. "open" took the right to write and moved nothing; "save" is a commit after the
    last one, "reset" one after another commit, "create" the beginning at a commit, "delete" the end.

    JSON: a list of objects; `moves_ago` is the N of @{N}, null for "open".

    \b
    Examples:
      syckpt reflog
      syckpt reflog wide -n 10
      syckpt branch wide --at wide@{1}     bring back a deleted branch
    """
    from syckpt.repo import history

    repository = invocation.repository()
    problems: list[IntegrityError] = []
    name = branch or repository.head_branch()
    numbered = list(_numbered(history.reflog(repository, name, problems=problems)))[:count]
    if invocation.as_json:
        output.echo_json([_record(record, moves) for record, moves in numbered])
    elif numbered:
        output.echo(_lines(name, numbered))
    if problems:
        raise problems[0]


def _numbered(records: list[RefRecord]) -> Iterator[tuple[RefRecord, int | None]]:
    from syckpt.repo import history

    moves = 0
    for record in records:
        if history.is_move(record):
            yield record, moves
            moves += 1
        else:
            yield record, None


def _record(record: RefRecord, moves: int | None) -> dict[str, Any]:
    return {
        "number": record.number,
        "moves_ago": moves,
        "reason": record.reason,
        "commit": record.commit,
        "previous": record.previous,
        "generation": record.generation,
        "run": record.run,
        "time": datetime.fromtimestamp(record.time_ns / 1e9, tz=timezone.utc).isoformat(timespec="milliseconds"),
    }


def _lines(name: str, numbered: list[tuple[RefRecord, int | None]]) -> Iterator[str]:
    now = time.time_ns()
    rows = [
        [
            "" if moves is None else f"{name}@{{{moves}}}",
            "-" if record.commit is None else shown.short_id(record.commit),
            output.printable(record.reason),
            output.age((now - record.time_ns) / 1e9),
            f"generation {record.generation} of run {output.printable(record.run)}",
        ]
        for record, moves in numbered
    ]
    for first, commit, *rest in output.aligned(rows):
        tail = output.cut("  ".join(rest).rstrip(), _room(len(first) + len(commit) + 4))
        yield f"{first}  {click.style(commit, fg='yellow')}  {tail}"


def _room(used: int) -> int | None:
    columns = output.width()
    return None if columns is None else max(0, columns - used)
