"""What commands about a commit's tree of files share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from syckpt.cli import output

if TYPE_CHECKING:
    from syckpt.checkpoint.tree import File, Tree
    from syckpt.repo.repository import Repository

__all__ = ["open_tree", "progress_of", "record"]


def open_tree(repository: Repository, rev: str) -> Tree:
    """Return the tree of a commit. Raises: NotFoundError, IntegrityError, FormatError."""
    from syckpt.checkpoint.content import Content
    from syckpt.checkpoint.tree import Tree
    from syckpt.repo import history
    from syckpt.repo.reader import Reader

    return Tree(Content(Reader(repository), history.resolve(repository, rev)))


def record(file: File) -> dict[str, Any]:
    """Return a file for JSON."""
    return {"kind": "file", "path": file.path, "item": file.item, "rank": file.rank, "format": file.form, "nbytes": file.nbytes}


@contextmanager
def progress_of(tree: Tree, what: str) -> Iterator[Callable[[File], None] | None]:
    """A bar on stderr over the files of a tree, if that is a terminal: None else."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn(what), progress.BarColumn(), progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[name]}"))
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=len(tree.files()), name="")
        yield lambda file: bar.update(task, advance=1, name=output.printable(file.path))
