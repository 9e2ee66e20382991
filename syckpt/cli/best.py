"""`syckpt best`: the commit with the best metric."""

from __future__ import annotations

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

__all__ = ["command"]


@click.command("best", short_help="The commit with the best metric.")
@click.argument("rev", default="HEAD")
@click.option("--maximize", is_flag=True, help="The highest metric is the best; default: the lowest.")
@json_option
@pass_invocation
def command(invocation: Invocation, rev: str, maximize: bool) -> None:
    """Show the commit with the lowest metric among REV (default: HEAD) and its ancestors. NaN is never best, of equals the newest is.

    JSON: the object of `syckpt log --json`.

    \b
    Examples:
      syckpt best                      of the branch that HEAD names
      syckpt best wide --maximize      the highest accuracy on `wide`
      syckpt export "$(syckpt best --json | jq -r .id)" best.pt
    """
    from syckpt.repo import history
    from syckpt.repo.labels import Labels

    repository = invocation.repository()
    commits = history.log(repository, rev)
    commit = history.best(commits, maximize=maximize)
    if commit is None:
        raise history.without_metric(commits, rev)
    labels = Labels(repository)
    if invocation.as_json:
        output.echo_json(shown.record(commit, labels))
        return
    names = labels.text(commit)
    line = f"{shown.short_id(commit.id)}  {shown.facts(commit)}"
    styled = click.style(shown.short_id(commit.id), fg="yellow") + line[len(shown.short_id(commit.id)) :]
    columns = output.width()
    apart = "\n    " if columns is not None and len(line) + 2 + len(names) > columns else "  "
    output.echo([f"{styled}{apart}{click.style(names, fg='green')}" if names else styled])
