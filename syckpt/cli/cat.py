"""`syckpt cat`: one file of a commit's tree on stdout."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING

import click

from syckpt.cli import output, trees
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

if TYPE_CHECKING:
    from syckpt.checkpoint.tree import Tree

__all__ = ["command"]


@click.command("cat", short_help="One file of a commit.")
@click.argument("name", metavar="REV:PATH")
@json_option
@pass_invocation
def command(invocation: Invocation, name: str) -> None:
    """Write a file of a commit's tree to stdout, byte by byte (to a terminal only plain text). `syckpt ls REV --files` lists them.

    An item that was saved with a layout is the file that the layout names, in its format. Any other is two: ITEM.json, the structure with
    every type, and ITEM.safetensors, its tensors. syckpt.commit.json holds the commit's own facts, syckpt.rng.RANK.* the random streams.

    JSON: an object with "text", or, where that is no text, "base64".

    \b
    Examples:
      syckpt cat HEAD:misc_state_0.json
      syckpt cat best:model.safetensors > model.safetensors
      syckpt cat HEAD~3:syckpt.commit.json | jq .config
      syckpt cat main:model_1.pt > model_1.pt      what rank 1 had
    """
    rev, colon, path = name.partition(":")
    if not colon or not rev or not path:
        raise click.UsageError(f"{name!r} is not REV:PATH, such as HEAD:model.json; `syckpt ls HEAD --files` lists files")
    tree = trees.open_tree(invocation.repository(), rev)
    if not invocation.as_json:
        _write(tree, path)
        return
    data = tree.read(path)
    file = next(file for file in tree.files() if file.path == path)
    try:
        content = {"text": data.decode()}
    except UnicodeDecodeError:
        content = {"base64": base64.b64encode(data).decode()}
    output.echo_json({**trees.record(file), "nbytes": len(data), **content})


def _write(tree: Tree, path: str) -> None:
    if sys.stdout is None:
        raise click.UsageError("standard output is closed")
    if not sys.stdout.isatty():
        tree.write(path, sys.stdout.buffer)
    elif (data := tree.read(path)) and not _is_text(data):
        # A commit may be hostile, and a terminal obeys control characters.
        raise click.UsageError(f"{path} is not plain text: write it to a file (> FILE), or add --json")
    else:
        sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _is_text(data: bytes) -> bool:
    try:
        return all(character.isprintable() or character in "\n\t" for character in data.decode())
    except UnicodeDecodeError:
        return False
