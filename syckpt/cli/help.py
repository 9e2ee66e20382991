"""`syckpt help`: a command's help, or one of the texts that ship with the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import MarkdownElement

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
        output.echo([_rendered(text) if name is not None and name.lower() in _topics() and _is_terminal() else text])


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


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _rendered(text: str) -> str:
    """Return Markdown as a terminal of this width shows it."""
    from rich.console import Console
    from rich.markdown import Markdown, TableElement
    from rich.table import Table

    class Whole(TableElement):
        """A table that folds long words: rich alone cuts them."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for part in super().__rich_console__(console, options):
                for column in part.columns if isinstance(part, Table) else ():
                    column.overflow = "fold"
                yield part

    class Topic(Markdown):
        elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": Whole}

    console = Console(width=output.width(), force_terminal=True)
    with console.capture() as capture:
        console.print(Topic(text, hyperlinks=False))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _topics() -> dict[str, Path]:
    """Return the texts in the package, by the name of their file in lower case."""
    package = Path(__file__).parent.parent
    files = [*package.glob("*.md"), *package.glob("docs/*.md")]
    return {file.stem.lower(): file for file in sorted(files, key=lambda file: file.stem.lower())}
