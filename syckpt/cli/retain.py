"""`syckpt retain`: apply a retention rule to a branch by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output, sweeps
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.errors import StateError

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.retention import Retained

__all__ = ["command"]


@click.command("retain", short_help="Drop commits that a rule does not keep.")
@click.argument("branch", required=False)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N.")
@click.option("--best", type=click.IntRange(min=1), metavar="N", help="Keep the N with the best metric.")
@click.option("--every-steps", type=click.IntRange(min=1), metavar="N", help="Keep the first at or after each multiple of N steps.")
@click.option("--every", metavar="TIME", help="Keep the first in each period: 90s, 30m, 1h, 1d.")
@click.option("--maximize/--minimize", default=None, help="The best metric is the highest, or the lowest; not said: both are kept.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
@pass_invocation
def command(
    invocation: Invocation,
    branch: str | None,
    last: int | None,
    best: int | None,
    every_steps: int | None,
    every: str | None,
    maximize: bool | None,
    dry_run: bool,
) -> None:
    """Keep those commits of BRANCH (default: HEAD's) that any of the rules asks for, and drop the others.

    Only commits made on that branch are considered. The tip, the best, tagged ones, tips and fork points of other branches, what a
    save under way builds on, and the only whole one always stay. Which metric is the best, the repository does not know: without
    --maximize or --minimize, what would be best either way stays. A dropped commit stays in the log; bytes that others need stay too.

    JSON: {"branch", "dry_run", "kept": [commit with "reasons"], "dropped": [commit], "sweeps", "skipped", "freed_nbytes", "moved_nbytes"}.

    \b
    Examples:
      syckpt retain --last 5 --best 3 --dry-run     what would go?
      syckpt retain --last 5 --best 3 --maximize    let it go; highest is best
      syckpt retain wide --every-steps 1000         of another branch
    """
    from syckpt.repo.retention import Retention, retain

    try:
        rule = Retention(last, best, every_steps, every)
    except StateError as exc:
        raise click.UsageError(f"{exc}: give --last, --best, --every-steps or --every") from exc
    repository = invocation.repository()
    report = retain(repository, branch or repository.head_branch(), rule, maximize=maximize, dry_run=dry_run)
    if invocation.as_json:
        output.echo_json(
            {
                "branch": report.branch,
                "dry_run": report.dry_run,
                "kept": [{**_record(commit), "reasons": list(reasons)} for commit, reasons in report.kept],
                "dropped": [_record(commit) for commit in report.dropped],
                "sweeps": [sweeps.record(sweep) for sweep in report.sweeps],
                "skipped": [{"id": commit, "why": why} for commit, why in report.skipped],
                "freed_nbytes": report.freed_nbytes,
                "moved_nbytes": report.moved_nbytes,
            }
        )
    else:
        output.echo(_lines(report))


def _record(commit: Commit) -> dict[str, Any]:
    return {"id": commit.id, "step": commit.step, "metric": commit.metric, "name": commit.name, "created_ns": commit.created_ns}


def _lines(report: Retained) -> Iterator[str]:
    for commit, reasons in report.kept:
        why = output.printable(", ".join(reasons))
        yield from output.wrapped(f"keep  {shown.short_id(commit.id)}  step {commit.step}  {why}", indent=" " * 8)
    for commit in report.dropped:
        yield click.style(f"drop  {shown.short_id(commit.id)}  step {commit.step}", fg="yellow")
    yield from sweeps.skipped(report.skipped)
    verb = "would drop" if report.dry_run else "dropped"
    what = f"{verb} {output.count(len(report.dropped), 'commit')} of {output.printable(report.branch)}, keeping {len(report.kept)}"
    yield from output.wrapped(f"{what}: {sweeps.total(report.freed_nbytes, report.moved_nbytes, dry_run=report.dry_run)}")
