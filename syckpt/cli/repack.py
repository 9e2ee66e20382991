"""`syckpt repack`: move needed bytes out of blobs that are mostly dead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from syckpt.cli import output, sweeps
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.cli.progress import bar

if TYPE_CHECKING:
    from syckpt.repo.repacking import Repacking

__all__ = ["command"]


@click.command("repack", short_help="Rewrite blobs of which little is needed.")
@click.option("--all", "everything", is_flag=True, help="Every blob that holds anything dead, not only those more than 30 % dead.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
@pass_invocation
def command(invocation: Invocation, everything: bool, dry_run: bool) -> None:
    """Copy what other commits need out of the blobs of dropped commits, and remove those. Commits, manifests and signatures stay as they
    are. `retain` and `gc` do it by themselves; `--all` frees the last bytes.

    JSON: {"dry_run", "sweeps", "skipped", "freed_nbytes", "moved_nbytes"}.

    \b
    Examples:
      syckpt repack --dry-run          what would be done?
      syckpt repack --all              leave no dead byte
    """
    from syckpt.repo.repacking import DEAD_SHARE, repack

    share = 0.0 if everything else DEAD_SHARE
    with bar("repacking") as progress:
        report = repack(invocation.repository(), dry_run=dry_run, dead_share=share, progress=progress)
    if invocation.as_json:
        output.echo_json(
            {
                "dry_run": report.dry_run,
                "sweeps": [sweeps.record(sweep) for sweep in report.sweeps],
                "skipped": [{"id": commit, "why": why} for commit, why in report.skipped],
                "freed_nbytes": report.freed_nbytes,
                "moved_nbytes": report.moved_nbytes,
            }
        )
    else:
        output.echo(_lines(report))


def _lines(report: Repacking) -> Iterator[str]:
    yield from sweeps.lines(report.sweeps)
    yield from sweeps.skipped(report.skipped)
    yield sweeps.total(report.freed_nbytes, report.moved_nbytes, dry_run=report.dry_run)
