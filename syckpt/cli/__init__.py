"""The command line `syckpt`: one module a command, each with a click command named `command`. Free of torch.

The library returns data; the modules here only format it. A command's module is imported when the command is used (or listed), and
imports the repository, numpy and rich inside its functions, so that `syckpt --help` answers at once.

A SyckptError ends in one line on stderr and the exit status of its class (`syckpt.errors.exit_code`); a wrong call in 2.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import click

from syckpt import __version__
from syckpt.cli.invocation import Invocation
from syckpt.cli.output import one_line
from syckpt.errors import StoreError, SyckptError, exit_code

__all__ = ["main"]

_COMMANDS = (
    "log",
    "show",
    "diff",
    "ls",
    "cat",
    "checkout",
    "export",
    "status",
    "branch",
    "tag",
    "reflog",
    "best",
    "similar",
    "verify",
    "retain",
    "gc",
    "repack",
    "du",
    "keygen",
    "sign",
    "help",
)


class _Commands(click.Group):
    """Imports commands as they are asked for, and translates errors at the outermost place, also for click's CliRunner."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"syckpt.cli.{cmd_name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        near = [] if args[0] in _COMMANDS or ctx.resilient_parsing else difflib.get_close_matches(args[0], _COMMANDS, n=3)
        if near:
            raise click.UsageError(f"no such command {one_line(args[0])!r}; did you mean {' or '.join(near)}?", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SyckptError as error:
            click.echo(f"syckpt: {one_line(str(error))}", err=True)
            ctx.exit(exit_code(error))
        except BrokenPipeError:
            # The reader has gone, as in `syckpt log | head`.
            _drop_output()
            ctx.exit(128 + signal.SIGPIPE)
        except OSError as error:
            _drop_output()
            click.echo(f"syckpt: {one_line(str(error))}", err=True)
            ctx.exit(exit_code(StoreError()))


def _drop_output() -> None:
    """Forget what could not be written: the interpreter flushes stdout once more when it ends."""
    with suppress(AttributeError, io.UnsupportedOperation):  # There is none, or it is no file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("-C", "directory", metavar="DIR", help="The experiment: DIR, or DIR/.syckpt. Default: the nearest .syckpt at or above here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs (also accepted behind the command).")
@click.version_option(__version__, prog_name="syckpt")
@click.pass_context
def main(ctx: click.Context, directory: str | None, as_json: bool) -> None:
    """Git for training state: look at the checkpoints of an experiment, and check them.

    A revision REV is HEAD, a branch, a tag, a commit's name, an id or a unique beginning of one (or of its second half), latest or
    best; each followed by ~N (N commits earlier), a branch also by @{N} (N moves ago).

    \b
    Exit status: 0 all is well, 1 it differs (diff --quiet), 2 wrong call,
    3 not found, 4 conflict, 5 damaged, 6 a newer format, 7 the disk failed,
    8 state does not fit, 9 coordination.

    \b
    Examples:
      syckpt log                       the commits of the experiment around here
      syckpt -C runs/exp1 log --graph --all
      syckpt status                    who writes, what is damaged, what to do
      syckpt show best                 the commit with the lowest metric, in full
      syckpt diff HEAD~1 HEAD          what the last save changed
      syckpt branch wide --at main~3   a branch that begins three commits back
      syckpt ls HEAD~3 model --long    files and tensors of an item
      syckpt checkout best --to best/  the files of a commit
      syckpt verify                    read everything and check it
      syckpt help log                  a command's help
      syckpt help format               the format on disk
    """
    ctx.obj = Invocation(directory, as_json)
