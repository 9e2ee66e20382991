"""`syckpt du`: what commits, items and tensors cost on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

if TYPE_CHECKING:
    from syckpt.repo.usage import CommitUsage, TensorUsage, Usage

__all__ = ["command"]


@click.command("du", short_help="What commits and tensors cost on the disk.")
@click.argument("rev", required=False)
@click.option("--tensors", is_flag=True, help="With REV: every tensor, not only the items.")
@json_option
@pass_invocation
def command(invocation: Invocation, rev: str | None, tensors: bool) -> None:
    """Show what each commit costs: bytes that only it needs (they go with it), and bytes that it shares. With REV: its items.

    JSON without REV: {"total_nbytes", "files", "commits": [{"id", "step", "exclusive_nbytes", "shared_nbytes", "document_nbytes"}],
    "dropped", "retained_nbytes", "reclaimable_nbytes", "shared_nbytes", "other_nbytes"}; with REV: [{"item", "tensors", "nbytes",
    "stored_nbytes", "exclusive_nbytes"}], with --tensors one object a tensor.

    \b
    Examples:
      syckpt du                    every commit
      syckpt du HEAD               the items of the newest one
      syckpt du best --tensors     each tensor of the best one
    """
    from syckpt.repo import history
    from syckpt.repo.usage import measure, measure_tensors

    if tensors and rev is None:
        raise click.UsageError("the tensors of which commit? `syckpt du REV --tensors`")
    repository = invocation.repository()
    if rev is not None:
        found = measure_tensors(repository, history.resolve(repository, rev))
        records = [vars(tensor) for tensor in found] if tensors else _items(found)
        if invocation.as_json:
            output.echo_json(records)
        else:
            output.echo(_table(records, tensors=tensors))
        return
    usage = measure(repository)
    if invocation.as_json:
        output.echo_json({**vars(usage), "other_nbytes": usage.other_nbytes, "commits": [_record(found) for found in usage.commits]})
    else:
        output.echo(_lines(usage))


def _record(found: CommitUsage) -> dict[str, Any]:
    sizes = {name: getattr(found, name) for name in ("exclusive_nbytes", "shared_nbytes", "document_nbytes")}
    return {"id": found.commit.id, "step": found.commit.step, **sizes}


def _items(found: Sequence[TensorUsage]) -> list[dict[str, Any]]:
    items: dict[str, dict[str, Any]] = {}
    for tensor in found:
        empty = {"item": tensor.item, "tensors": 0, "nbytes": 0, "stored_nbytes": 0, "exclusive_nbytes": 0}
        item = items.setdefault(tensor.item, empty)
        item["tensors"] += 1
        for name in ("nbytes", "stored_nbytes", "exclusive_nbytes"):
            item[name] += getattr(tensor, name)
    return list(items.values())


def _table(records: Sequence[dict[str, Any]], *, tensors: bool) -> Iterator[str]:
    rows = [["raw", "stored", "only here", "tensor" if tensors else "item"]]
    for record in records:
        name = f"{record['path']}  {record['dtype']}" if tensors else f"{record['item']}  {output.count(record['tensors'], 'tensor')}"
        sizes = [output.nbytes(record[key]) for key in ("nbytes", "stored_nbytes", "exclusive_nbytes")]
        rows.append([*sizes, output.printable(name)])
    for row in output.aligned(rows, right=(0, 1, 2)):
        yield "  ".join(row).rstrip()


def _lines(usage: Usage) -> Iterator[str]:
    rows = [["only here", "shared", "documents", "commit"]]
    for found in usage.commits:
        sizes = [output.nbytes(size) for size in (found.exclusive_nbytes, found.shared_nbytes, found.document_nbytes)]
        rows.append([*sizes, f"{shown.short_id(found.commit.id)}  step {found.commit.step}"])
    for row in output.aligned(rows, right=(0, 1, 2)):
        yield "  ".join(row).rstrip()
    alone = sum(found.exclusive_nbytes for found in usage.commits)
    text = f"{output.nbytes(usage.total_nbytes)} in {output.count(usage.files, 'file')}: {output.nbytes(alone)} of one commit each,"
    text += f" {output.nbytes(usage.shared_nbytes)} shared, {output.nbytes(usage.other_nbytes)} documents and the rest"
    yield from output.wrapped(text)
    stays = f"{output.nbytes(usage.retained_nbytes)} in files of {output.count(usage.dropped, 'dropped commit')} stay for others; "
    yield from output.wrapped(f"{stays if usage.dropped else ''}`syckpt gc` would free {output.nbytes(usage.reclaimable_nbytes)}")
