"""`syckpt tag`: list tags, make one, delete one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, check_name, json_option, pass_invocation
from syckpt.errors import IntegrityError

if TYPE_CHECKING:
    from syckpt.repo.repository import Repository

__all__ = ["command"]


@click.command("tag", short_help="List tags, make one, delete one.")
@click.argument("name", metavar="[NAME]", required=False)
@click.argument("rev", metavar="[REV]", required=False)
@click.option("-d", "--delete", "delete", is_flag=True, help="Delete the tag NAME.")
@json_option
@pass_invocation
def command(invocation: Invocation, name: str | None, rev: str | None, delete: bool) -> None:
    """List the tags; with NAME tag the commit REV (default: HEAD), and with -d delete that tag.

    A tag never moves by itself, and retention never drops what is tagged. To move one, delete it first.

    JSON: a list of objects.

    \b
    Examples:
      syckpt tag                 all tags
      syckpt tag v1              the newest commit is v1
      syckpt tag good best       the best one so far is good
      syckpt tag -d good
    """
    from syckpt.repo import branches, history

    if name is None and delete:
        raise click.UsageError("which tag? Name it: `syckpt tag -d NAME`")
    if delete and rev is not None:
        raise click.UsageError("-d takes the name of a tag, and no revision")
    repository = invocation.repository()
    if name is None:
        _list(invocation, repository)
        return
    if delete:
        commit, text = branches.delete_tag(repository, name, run="command line").previous, "deleted {0}, which was {1}"
    else:
        check_name(name, what="tag")
        at = history.resolve(repository, rev or "HEAD")
        branches.tag(repository, name, at, run="command line")
        commit, text = at.id, "{0} is {1}"
    if invocation.as_json:
        output.echo_json([{"name": name, "commit": commit, "deleted": delete}])
    else:
        output.echo([text.format(name, commit)])


def _list(invocation: Invocation, repository: Repository) -> None:
    problems: list[IntegrityError] = []
    tags = shown.named(repository, "tags", problems)
    if invocation.as_json:
        output.echo_json([{"name": name, **shown.brief(commit)} for name, commit in tags.items()])
    elif tags:
        output.echo(f"{name}  {line}" for name, line in shown.lines_of(tags))
    elif not problems:
        output.note("no tags: `syckpt tag NAME` makes one")
    if problems:
        raise problems[0]
