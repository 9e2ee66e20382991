"""`syckpt help`: a command's help, or one of the texts that ship with the package."""

from __future__ import annotations

from pathlib import Path

import click

from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

__all__ = ["command"]


@click.command("help", short_help="Help on a command, or a text about syckpt.")
@click.argument("name", metavar="[COMMAND|TOPIC]", required=False)
@json_option
@pass_invocation
@click.pass_context
def command(ctx: click.Context, invocation: Invocation, name: str | None) -> None:
    """Show a command's help, or one of the texts about syckpt; without an argument the commands and the topics.

    \b
    Examples:
      syckpt help verify
      syckpt help format | less     the format on disk, byte by byte
      syckpt help architecture      the rooms of the code
    """
    text = _text(ctx, name)
    if invocation.as_json:
        output.echo_json({"name": name, "text": text})
    else:
        output.echo([text])


def _text(ctx: click.Context, name: str | None) -> str:
    parent = ctx.parent
    if parent is None or not isinstance(parent.command, click.Group):
        raise click.UsageError("help is a command of syckpt: call `syckpt help`")
    topics = _topics()
    if name is None:
        return f"{parent.get_help()}\n\nTopics of syckpt help:\n  {', '.join(topics)}"
    command = parent.command.get_command(parent, name)
    if command is not None:
        return command.get_help(click.Context(command, info_name=name, parent=parent))
    if name.lower() not in topics:
        commands = ", ".join(parent.command.list_commands(parent))
        raise click.UsageError(f"no help on {name!r}; commands: {commands}; topics: {', '.join(topics)}")
    return topics[name.lower()].read_text(encoding="utf-8").rstrip("\n")


def _topics() -> dict[str, Path]:
    """Return the texts in the package, by the name of their file in lower case."""
    package = Path(__file__).parent.parent
    files = [*package.glob("*.md"), *package.glob("docs/*.md")]
    return {file.stem.lower(): file for file in sorted(files, key=lambda file: file.stem.lower())}
