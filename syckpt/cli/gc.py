"""`syckpt gc`: remove what nothing leads to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from syckpt.cli import commits as shown
from syckpt.cli import output, sweeps
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.cli.progress import bar

if TYPE_CHECKING:
    from syckpt.repo.collection import Collection

__all__ = ["command"]


@click.command("gc", short_help="Remove what nothing leads to.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
@pass_invocation
def command(invocation: Invocation, dry_run: bool) -> None:
    """Remove commits that no branch, tag or name leads to and that only records older than two weeks know; what saves that were cut off
    left behind; and bytes of dropped commits that no other commit needs.

    Safe while runs save to the same repository, and beside another gc. What syckpt did not write is never touched.

    JSON: {"dry_run", "unreachable": [commit id], "cut_off": [save], "strays": [{"key", "nbytes"}], "sweeps", "skipped",
    "staged": [{"key", "nbytes"}], "freed_nbytes", "moved_nbytes"}.

    \b
    Examples:
      syckpt gc --dry-run      what would go?
      syckpt gc                let it go
    """
    from syckpt.repo.collection import collect

    with bar("removing") as progress:
        report = collect(invocation.repository(), dry_run=dry_run, progress=progress)
    if invocation.as_json:
        output.echo_json(
            {
                "dry_run": report.dry_run,
                "unreachable": [commit.id for commit in report.unreachable],
                "cut_off": list(report.cut_off),
                "strays": [{"key": key, "nbytes": size} for key, size in report.strays],
                "sweeps": [sweeps.record(sweep) for sweep in report.sweeps],
                "skipped": [{"id": commit, "why": why} for commit, why in report.skipped],
                "staged": [{"key": key, "nbytes": size} for key, size in report.staged],
                "freed_nbytes": report.freed_nbytes,
                "moved_nbytes": report.moved_nbytes,
            }
        )
    else:
        output.echo(_lines(report))


def _lines(report: Collection) -> Iterator[str]:
    for commit in report.unreachable:
        yield click.style(f"{shown.short_id(commit.id)}  dropped: nothing leads to it", fg="yellow")
    for save in report.cut_off:
        yield f"{shown.short_id(save)}  a save that was cut off"
    for key, size in report.strays:
        yield f"{output.printable(key)}  {output.nbytes(size)}"
    yield from sweeps.lines(report.sweeps)
    yield from sweeps.skipped(report.skipped)
    if report.staged:
        total = output.nbytes(sum(size for _, size in report.staged))
        yield f"{output.count(len(report.staged), 'unfinished file')} of processes that are gone  {total}"
    yield sweeps.total(report.freed_nbytes, report.moved_nbytes, dry_run=report.dry_run)
