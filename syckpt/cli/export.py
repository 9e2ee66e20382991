"""`syckpt export`: a commit in a form that lives without syckpt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from syckpt.cli import output, trees
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.repository import Repository

__all__ = ["command"]


@click.command("export", short_help="A commit for tools that do not know syckpt.")
@click.argument("rev")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(["torch", "safetensors", "dir"]), default="torch", show_default=True, help="What to make.")
@json_option
@pass_invocation
def command(invocation: Invocation, rev: str, path: Path, form: str) -> None:
    """Write a commit (REV) to PATH; folders above it are made, and PATH appears whole or not at all. A file that is there already is
    replaced; a directory has to be new or empty.

    \b
    torch        one file that torch.load(PATH, weights_only=True) reads:
                 {item: state_dict, ..., "syckpt": facts}
    safetensors  one file with every tensor as ITEM.KEY; the structure around
                 them is in its metadata
    dir          a directory with the commit's files, as `syckpt checkout`

    JSON: {"commit", "path", "format"}.

    \b
    Examples:
      syckpt export best best.pt
      syckpt export HEAD weights.safetensors --to safetensors
      syckpt export v1 release/ --to dir
    """
    from syckpt.repo import history

    repository = invocation.repository()
    commit = history.resolve(repository, rev)
    _export(repository, commit, path, form)
    if invocation.as_json:
        output.echo_json({"commit": commit.id, "path": str(path), "format": form})
    else:
        output.echo([f"wrote commit {commit.id} to {output.printable(str(path))}"])


def _export(repository: Repository, commit: Commit, path: Path, form: str) -> None:
    from syckpt.repo.reader import Reader

    if form == "torch":
        from syckpt.checkpoint.export import export
        from syckpt.checkpoint.source import Source

        export(Source(Reader(repository), commit), path)
        return
    from syckpt.checkpoint.checkout import checkout, write_whole

    tree = trees.open_tree(repository, commit.id)
    if form == "safetensors":
        write_whole(path, tree.write_tensors)
        return
    with trees.progress_of(tree, "writing") as on_file:
        checkout(tree, path, on_file=on_file)
