"""What is removed of dropped commits, as `retain`, `gc` and `repack` show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output

if TYPE_CHECKING:
    from syckpt.repo.repacking import Sweep

__all__ = ["lines", "record", "skipped", "total"]


def record(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep for JSON."""
    return {
        "id": sweep.commit,
        "deletes": [{"key": key, "nbytes": size} for key, size in sweep.deletes],
        "rewrites": [
            {"rank": r.rank, "revision": r.revision, "rows": len(r.rows), "nbytes": r.moved_nbytes, "blobs": [key for key, _ in r.blobs]}
            for r in sweep.rewrites
        ],
        "left_alone": list(sweep.unknown),
        "kept_nbytes": sweep.kept_nbytes,
        "freed_nbytes": sweep.freed_nbytes,
    }


def lines(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """Yield a line for each commit of which something is removed."""
    for sweep in sweeps:
        text = f"{shown.short_id(sweep.commit)}  {output.count(len(sweep.deletes), 'file')} removed"
        rows = sum(len(rewrite.rows) for rewrite in sweep.rewrites)
        if rows:
            text += f", {output.count(rows, 'tensor')} ({output.nbytes(sweep.moved_nbytes)}) moved into a new blob"
        if sweep.kept_nbytes:
            text += f"; {output.nbytes(sweep.kept_nbytes)} stay for other commits"
        yield text


def skipped(found: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each commit that had to be left as it was."""
    for commit, why in found:
        yield click.style(f"{shown.short_id(commit)}  left as it is: {output.one_line(why)}", fg="red")


def total(freed: int, moved: int, *, dry_run: bool) -> str:
    """Return what comes out of it."""
    text = f"{'would free' if dry_run else 'freed'} {output.nbytes(freed)}"
    return text + (f", {'moving' if dry_run else 'moved'} {output.nbytes(moved)}" if moved else "")
