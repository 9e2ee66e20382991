"""`syckpt verify`: read everything and check it. Exits with 5 when something is damaged."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.errors import IntegrityError, exit_code

if TYPE_CHECKING:
    from syckpt.repo.verify import VerifyReport

__all__ = ["command"]


@click.command("verify", short_help="Read everything and check it.")
@click.argument("rev", required=False)
@click.option("--quick", is_flag=True, help="Documents, and presence and headers of blobs, but no tensors.")
@json_option
@pass_invocation
@click.pass_context
def command(ctx: click.Context, invocation: Invocation, rev: str | None, quick: bool) -> None:
    """Check a commit (REV), or everything: commits, refs, manifests, blobs, and every block of every tensor against its digest.

    Prints a line for each finding, which begins with the damaged file, and a summary. Exit status: 0 all is well, 5 something is
    damaged. Nothing is changed.

    JSON: {"ok", "errors": [text], "commits", "tensors", "nbytes", "damaged": [commit id], "seconds"}.

    \b
    Examples:
      syckpt verify             everything
      syckpt verify HEAD        the newest commit only
      syckpt verify --quick     is every file there, of the right size?
      syckpt -C runs/exp1 verify || echo damaged
    """
    from syckpt.repo.verify import verify

    repository = invocation.repository()
    started = time.perf_counter()
    with _progress() as progress:
        report = verify(repository, rev, quick=quick, progress=progress)
    seconds = time.perf_counter() - started
    if invocation.as_json:
        output.echo_json(
            {
                "ok": report.ok,
                "errors": report.errors,
                "commits": report.commits,
                "tensors": report.tensors,
                "nbytes": report.nbytes,
                "damaged": report.damaged,
                "seconds": round(seconds, 3),
            }
        )
    else:
        output.echo(_lines(report, seconds, quick=quick))
    if not report.ok:
        ctx.exit(exit_code(IntegrityError()))


def _lines(report: VerifyReport, seconds: float, *, quick: bool) -> Iterator[str]:
    for error in report.errors:
        yield click.style(output.one_line(error), fg="red")
    what = output.count(report.commits, "commit")
    what += "" if quick else f", {output.count(report.tensors, 'tensor')}, {output.nbytes(report.nbytes)}"
    found = f"{output.count(len(report.errors), 'finding')}, {output.count(len(report.damaged), 'commit')} cannot be loaded whole"
    verdict = "ok" if report.ok else f"DAMAGED ({found})"
    yield f"{verdict}: {what} checked in {seconds:.2f} s"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, if that is a terminal: None else."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TextColumn("commits"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
