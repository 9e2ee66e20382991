"""`syckpt status`: the repository at this moment, and what to do next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

if TYPE_CHECKING:
    from syckpt.objects.refs import Owner
    from syckpt.repo.status import Branch, Save, Status, Writer

__all__ = ["command"]

_LISTED = 20
"""Tags, and damaged commits, that are named."""


@click.command("status", short_help="The repository at this moment.")
@json_option
@pass_invocation
def command(invocation: Invocation) -> None:
    """Show HEAD, the branches and who writes them, tags, saves under way, damaged commits, bytes on the disk, and what to do next.

    A process is "alive" or "dead" where this machine can tell. Nothing is changed.

    JSON: {"repository", "head", "branches", "tags", "saves", "damaged", "commits", "nbytes", "problems", "next"}.

    \b
    Examples:
      syckpt status
      syckpt -C runs/exp1 status --json | jq '.branches[] | select(.writer)'
    """
    from syckpt.repo.status import status

    found = status(invocation.repository())
    if invocation.as_json:
        output.echo_json(_record(found))
    else:
        output.echo(_lines(found))
    if found.problems:
        raise found.problems[0]


def _record(found: Status) -> dict[str, Any]:
    return {
        "repository": found.where,
        "head": found.head,
        "branches": [_branch_record(branch) for branch in found.branches],
        "tags": [{"name": name, "commit": commit} for name, commit in found.tags.items()],
        "saves": [_save_record(save) for save in found.saves],
        "damaged": [{"commit": one.commit, "why": one.why} for one in found.damaged],
        "commits": found.commits,
        "nbytes": found.nbytes,
        "problems": [str(problem) for problem in found.problems],
        "next": found.advice(),
    }


def _branch_record(branch: Branch) -> dict[str, Any]:
    writer = branch.writer
    return {
        "name": branch.name,
        "commit": branch.commit,
        "step": None if branch.tip is None else branch.tip.step,
        "metric": None if branch.tip is None else branch.tip.metric,
        "writer": None
        if writer is None
        else {
            **_process(writer.lease.trainer, writer.dead),
            "run": writer.lease.run,
            "generation": writer.lease.generation,
            "since": None if writer.since_ns is None else _iso(writer.since_ns),
            "lease_until": _iso(writer.lease.expires_ns),
        },
    }


def _save_record(save: Save) -> dict[str, Any]:
    return {
        "commit": save.intent.commit,
        "branch": save.intent.branch,
        "run": save.intent.run,
        "generation": save.intent.generation,
        **_process(save.intent.owner, save.dead),
    }


def _process(owner: Owner, dead: bool | None) -> dict[str, Any]:
    return {"host": owner.host, "pid": owner.pid, "alive": None if dead is None else not dead}


def _iso(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, tz=timezone.utc).isoformat(timespec="milliseconds")


def _lines(found: Status) -> Iterator[str]:
    yield from _field("repository", [found.where])
    yield from _field("disk", [f"{output.nbytes(found.nbytes)}, {output.count(found.commits, 'commit')}"])
    yield from _field("HEAD", [found.head or "cannot be read"])
    yield from _field("branches", list(_branches(found)) or ["none"])
    tags = [f"{output.printable(name)}  {shown.short_id(commit)}" for name, commit in found.tags.items()]
    yield from _field("tags", _shortened(tags))
    yield from _field("saves", [_save(save) for save in found.saves])
    yield from _field("damaged", _shortened([f"{one.commit}: {output.one_line(one.why)}" for one in found.damaged]), colour="red")
    yield from _field("next", [output.one_line(text) for text in _shortened(found.advice())])


def _field(title: str, texts: list[str], *, colour: str | None = None) -> Iterator[str]:
    """Yield lines behind a title; long ones go on below, so that nothing is lost on a narrow terminal."""
    for text in texts:
        indent = " " * (len(text) - len(text.lstrip()))
        for line in output.wrapped(text, indent=f"{indent}  ", used=_TITLE):
            head = click.style(f"{title:<{_TITLE - 1}}", bold=True)
            yield f"{head} {click.style(line, fg=colour) if colour else line}"
            title = ""


_TITLE = 12


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LISTED else [*lines[:_LISTED], f"... {len(lines) - _LISTED} more"]


def _branches(found: Status) -> Iterator[str]:
    rows = []
    for branch in found.branches:
        tip = branch.tip
        name = output.printable(branch.name)
        rows.append(["-" if branch.commit is None else shown.short_id(branch.commit), name, "" if tip is None else shown.facts(tip)])
    for branch, (commit, name, facts) in zip(found.branches, output.aligned(rows) if rows else [], strict=True):
        yield f"{name}  {commit}  {facts}".rstrip() if branch.commit else f"{name}  no commit yet"
        if branch.writer is not None:
            yield f"  {_writer(branch.writer)}"


def _writer(writer: Writer) -> str:
    lease = writer.lease
    since = "" if writer.since_ns is None else f", since {output.age((time.time_ns() - writer.since_ns) / 1e9).removesuffix(' ago')}"
    left_s = (lease.expires_ns - time.time_ns()) / 1e9
    state = {True: "dead", False: "alive", None: f"its lease {'runs' if left_s > 0 else 'ran out'}"}[writer.dead]
    return f"written by {lease.trainer} ({state}{since}; run {output.printable(lease.run)}, generation {lease.generation})"


def _save(save: Save) -> str:
    state = {True: "cut off: that is dead", False: "under way", None: "on another machine"}[save.dead]
    return f"{save.intent.commit} on {output.printable(save.intent.branch)}, by {save.intent.owner} ({state})"
