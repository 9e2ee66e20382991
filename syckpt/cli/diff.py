"""`syckpt diff`: what differs between two commits. With --quiet exits with 1 if anything does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

if TYPE_CHECKING:
    from syckpt.repo.difference import Diff, TensorType

__all__ = ["command"]

_COLOURS = {"+": "green", "-": "red", "~": "yellow"}


@click.command("diff", short_help="What differs between two commits.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", default="HEAD")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing; exit with 1 if anything differs.")
@json_option
@pass_invocation
@click.pass_context
def command(ctx: click.Context, invocation: Invocation, a: str, b: str, quiet: bool) -> None:
    """Show what leads from commit A to commit B (default: HEAD): counters, hyperparameters, items, tensors; `+` added, `-` removed,
    `~` changed.

    Tensors are compared by their content addresses, without reading them; only where the two were saved in other pieces (by other
    numbers of ranks) both are read. Of tensors that only have other values, 20 an item are named; --json names all.

    JSON: {"a", "b", "differs", "counters", "config", "items": {path: [before, after]} each, "tensors", "streams"}.

    \b
    Examples:
      syckpt diff HEAD~1              what the last save changed
      syckpt diff main experiment
      syckpt diff best latest --json | jq .config
      syckpt diff v1 v2 --quiet && echo the same
    """
    from syckpt.repo import history
    from syckpt.repo.difference import diff

    repository = invocation.repository()
    found = diff(repository, history.resolve(repository, a), history.resolve(repository, b))
    if invocation.as_json and not quiet:
        output.echo_json(_record(found))
    elif not quiet:
        output.echo(_lines(found))
    if quiet and found:
        ctx.exit(1)


def _lines(found: Diff) -> Iterator[str]:
    for line in str(found).split("\n"):
        mark = line.strip()[:1]
        shown = output.cut(output.printable(line), output.width())
        yield click.style(shown, fg=_COLOURS[mark]) if mark in _COLOURS else shown


def _record(found: Diff) -> dict[str, Any]:
    tensors = found.tensors
    return {
        "a": found.a,
        "b": found.b,
        "differs": bool(found),
        "counters": found.counters,
        "config": _parts(found.config),
        "items": _parts(found.items),
        "tensors": {
            "added": {path: _type(kind) for path, kind in tensors.added.items()},
            "removed": {path: _type(kind) for path, kind in tensors.removed.items()},
            "changed": {path: {"before": _type(change.before), "after": _type(change.after)} for path, change in tensors.changed.items()},
            "unchanged": tensors.unchanged,
        },
        "streams": found.streams,
    }


def _parts(found: Any) -> dict[str, Any]:
    return {"added": found.added, "removed": found.removed, "changed": found.changed}


def _type(kind: TensorType) -> dict[str, Any]:
    return {"dtype": kind.dtype, "shape": list(kind.shape)}
