"""`syckpt checkout`: a commit's tree as a directory."""

from __future__ import annotations

from pathlib import Path

import click

from syckpt.cli import output, trees
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

__all__ = ["command"]


@click.command("checkout", short_help="Write a commit's files to a directory.")
@click.argument("rev", default="HEAD")
@click.option("--to", "directory", metavar="DIR", required=True, type=click.Path(path_type=Path), help="A directory that is empty, or new.")
@json_option
@pass_invocation
def command(invocation: Invocation, rev: str, directory: Path) -> None:
    """Write every file of a commit (REV, default: HEAD) below DIR: what `syckpt ls REV --files` lists.

    The files appear when all of them are written and on the disk, or not at all. The branch that scripts go on with does not change.

    JSON: {"commit", "directory", "files": [path]}.

    \b
    Examples:
      syckpt checkout best --to best/
      syckpt -C runs/exp1 checkout HEAD~10 --to /tmp/before
    """
    from syckpt.checkpoint.checkout import checkout

    tree = trees.open_tree(invocation.repository(), rev)
    with trees.progress_of(tree, "writing") as on_file:
        checkout(tree, directory, on_file=on_file)
    paths = [file.path for file in tree.files()]
    if invocation.as_json:
        output.echo_json({"commit": tree.commit.id, "directory": str(directory), "files": paths})
    else:
        output.echo([f"{output.count(len(paths), 'file')} of commit {tree.commit.id} in {output.printable(str(directory))}"])
