"""`syckpt branch`: list branches, make one, delete one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, check_name, json_option, pass_invocation
from syckpt.errors import IntegrityError

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.repository import Repository

__all__ = ["command"]


@click.command("branch", short_help="List branches, make one, delete one.")
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--at", "rev", metavar="REV", help="Where the new branch begins. Default: HEAD.")
@click.option("-d", "--delete", "delete", is_flag=True, help="Delete the branch NAME.")
@click.option("--default", "default", is_flag=True, help="Let HEAD name the branch NAME: scripts that name none begin with it.")
@json_option
@pass_invocation
def command(invocation: Invocation, name: str | None, rev: str | None, delete: bool, default: bool) -> None:
    """List the branches (`*`: the one that HEAD names); with NAME make that branch, with -d delete it, with --default let
    HEAD name it.

    A script works on a branch by CheckpointManager(..., branch=NAME). Deleting a branch leaves its commits where they are until they
    are collected; until then NAME@{1} brings it back. HEAD's branch and one that is being written are not deleted.

    JSON: a list of objects.

    \b
    Examples:
      syckpt branch                       all branches and their tips
      syckpt branch wide --at main~3      make `wide`, three commits before main
      syckpt branch -d wide               delete it
      syckpt branch wide --at wide@{1}    and bring it back
      syckpt branch --default wide        scripts without branch= go on there
    """
    from syckpt.repo import branches, history

    if name is None and (delete or default or rev is not None):
        raise click.UsageError("which branch? Name it: `syckpt branch NAME --at REV`, `syckpt branch -d NAME`")
    if (delete or default) and rev is not None:
        raise click.UsageError("--at says where a new branch begins: it does not go with -d and --default")
    if delete and default:
        raise click.UsageError("-d deletes a branch, and --default goes on with it: choose one")
    repository = invocation.repository()
    if name is None:
        _list(invocation, repository)
    elif delete:
        record = branches.delete(repository, name, run="command line")
        _tell(invocation, {"name": name, "commit": record.previous, "deleted": True}, f"deleted {name}, which was at {record.previous}")
    elif default:
        branches.make_default(repository, name)
        _tell(invocation, {"name": name, "head": True}, f"HEAD names {output.printable(name)}")
    else:
        check_name(name, what="branch")
        at = history.resolve(repository, rev or "HEAD")
        branches.create(repository, name, at, run="command line")
        _tell(invocation, {"name": name, "commit": at.id, "deleted": False}, f"{name} begins at {at.id}")


def _tell(invocation: Invocation, record: dict[str, Any], text: str) -> None:
    if invocation.as_json:
        output.echo_json([record])
    else:
        output.echo([text])


def _list(invocation: Invocation, repository: Repository) -> None:
    problems: list[IntegrityError] = []
    head: str | None = None
    try:
        head = repository.head_branch()
    except IntegrityError as exc:
        problems.append(exc)
    tips = shown.named(repository, "heads", problems)
    if invocation.as_json:
        output.echo_json([{"name": name, "head": name == head, **shown.brief(commit)} for name, commit in tips.items()])
    elif tips:
        output.echo(_lines(tips, head))
    if problems:
        raise problems[0]


def _lines(tips: dict[str, Commit], head: str | None) -> Iterator[str]:
    for name, line in shown.lines_of(tips):
        mark, colour = ("*", "green") if name.rstrip() == head else (" ", None)
        yield f"{mark} {click.style(name, fg=colour) if colour else name}  {line}"
