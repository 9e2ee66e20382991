"""`syckpt ls`: the files of a commit's tree, its entries, and how they are stored. Reads manifests and locations, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output, trees
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.errors import NotFoundError

if TYPE_CHECKING:
    from syckpt.checkpoint.tree import File
    from syckpt.objects.manifest import Entry
    from syckpt.repo.reader import Place, Snapshot

__all__ = ["command"]


@dataclass(frozen=True)
class _Tensor:
    """An entry. `stored_nbytes`, `how` and `base` are those of the commit that holds the bytes: of `pointer`, if that is not None."""

    kind = "tensor"
    path: str
    rank: int
    dtype: str
    shape: list[int]
    box: list[list[int]] | None
    nbytes: int
    stored_nbytes: int
    how: str
    pointer: str | None
    base: str | None
    address: str


@dataclass(frozen=True)
class _Value:
    """A leaf that is no tensor."""

    kind = "value"
    path: str
    rank: int
    type: str
    value: Any


@click.command("ls", short_help="The files and tensors of a commit.")
@click.argument("rev", default="HEAD")
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("--long", "-l", "as_long", is_flag=True, help="Also how each is stored.")
@click.option("--files", "files_only", is_flag=True, help="The files alone.")
@click.option("--values", "with_values", is_flag=True, help="Also numbers, texts and other leaves.")
@json_option
@pass_invocation
def command(invocation: Invocation, rev: str, paths: tuple[str, ...], as_long: bool, files_only: bool, with_values: bool) -> None:
    """List what a commit holds (REV, default: HEAD). First the files of its tree, which `syckpt cat` and `syckpt checkout` write: format,
    bytes where they are known beforehand, path. Then its tensors: element type, shape, raw bytes, path.

    A PATH selects files by their path or item, and what is at or below it: `model`, `model/encoder*`, `'*/exp_avg'`; `*` also matches `/`.

    --long adds the stored bytes, how many times smaller that is, the content address, and how: "raw" bytes, byte "planes" or a "delta"
    against the commit's keyframe; "pointer" means that the bytes are those of an earlier commit, which is named.

    JSON: a list of objects of the kinds "file" and "tensor", always with everything; with --values of the kind "value" too. Floats that
    are no numbers are the texts "nan", "inf" and "-inf".

    \b
    Examples:
      syckpt ls                         all of the newest commit
      syckpt ls best --files            what `syckpt cat best:...` takes
      syckpt ls HEAD~2 model            those of the item `model`, two commits ago
      syckpt ls best 'optimizer/*/exp_avg' --long
      syckpt ls HEAD scheduler --values
    """
    from syckpt.repo import history
    from syckpt.repo.reader import Reader

    repository = invocation.repository()
    commit = history.resolve(repository, rev)
    if commit.dropped:
        raise NotFoundError(f"the content of commit {commit.id} was removed by retention; `syckpt show {commit.id}` shows its record")
    reader = Reader(repository)
    files = [file for file in trees.open_tree(repository, commit.id).files() if _selects(file, paths)]
    found: list[_Tensor | _Value] = []
    for rank, _ in () if files_only else commit.manifests:
        snapshot = reader.snapshot(commit, rank)
        found += _tensors(snapshot)
        found += _values(snapshot) if with_values else []
    chosen = [item for item in found if _matches(item.path, paths)]
    if paths and not chosen and not files:
        raise NotFoundError(f"nothing in commit {commit.id} matches {' '.join(paths)}; `syckpt ls {rev} --values` lists all")
    if invocation.as_json:
        output.echo_json([*map(trees.record, files), *({"kind": item.kind, **asdict(item)} for item in chosen)])
        return
    lines = _file_lines(files) if files else []
    if chosen:
        lines += [*([""] if files else []), *_lines(chosen, as_long=as_long, several=len(commit.manifests) > 1)]
    output.echo(lines)


def _selects(file: File, patterns: Sequence[str]) -> bool:
    return _matches(file.path, patterns) or (file.item is not None and file.item in patterns)


def _file_lines(files: Sequence[File]) -> list[str]:
    rows = [(output.printable(file.form), output.nbytes(file.nbytes), output.printable(file.path)) for file in files]
    return ["  ".join(row).rstrip() for row in output.aligned(rows, right=(1,))]


def _matches(path: str, patterns: Sequence[str]) -> bool:
    # Also literally: path texts may hold brackets.
    return not patterns or any(
        path == p or path.startswith(f"{p}/") or fnmatchcase(path, p) or fnmatchcase(path, f"{p}/*") for p in patterns
    )


def _tensors(snapshot: Snapshot) -> Iterator[_Tensor]:
    for _, entry, place in snapshot.stored():
        yield _tensor(entry, place, snapshot)


def _tensor(entry: Entry, place: Place, snapshot: Snapshot) -> _Tensor:
    from syckpt.objects import address, nodes

    return _Tensor(
        path=nodes.format_path(entry.path),
        rank=snapshot.manifest.rank,
        dtype=entry.dtype,
        shape=list(entry.shape),
        box=None if entry.box is None else [list(entry.box.offsets), list(entry.box.sizes)],
        nbytes=entry.nbytes,
        stored_nbytes=place.row.length,
        how="delta" if place.base else "planes" if place.row.coded else "raw",
        pointer=None if place.owner[0] == snapshot.commit.id else place.owner[0],
        base=None if place.base is None else place.base.owner[0],
        address=address.to_text(entry.address),
    )


def _values(snapshot: Snapshot) -> Iterator[_Value]:
    from syckpt.objects import nodes

    for name, item in snapshot.manifest.items.items():
        for path, node in nodes.walk(item, (name,)):
            if nodes.split(node)[0] in ("tensor", "ndarray"):
                continue
            value = nodes.decode(node)
            kind = value.kind if isinstance(value, nodes.Opaque) else type(value).__name__
            yield _Value(nodes.format_path(path), snapshot.manifest.rank, kind, value)


def _lines(found: list[_Tensor | _Value], *, as_long: bool, several: bool) -> list[str]:
    """Return a line an entry; with `as_long` two, if the terminal is too narrow for one."""
    table = output.aligned([_cells(item, several=several) for item in found], right=(2 + several,))
    names = [output.printable(item.path) + (f" = {output.short(item.value)}" if isinstance(item, _Value) else "") for item in found]
    if not as_long:
        return ["  ".join([*cells, name]) for cells, name in zip(table, names, strict=True)]
    details = output.aligned([_details(item) for item in found], right=(0, 1))
    lines = ["  ".join([*cells, *detail, name]) for cells, detail, name in zip(table, details, names, strict=True)]
    columns = output.width()
    if columns is None or max(map(len, lines)) <= columns:
        return lines
    split: list[str] = []
    for item, cells, detail, name in zip(found, table, details, names, strict=True):
        split.append("  ".join([*cells, name]))
        if isinstance(item, _Tensor):
            split.append(output.cut("    " + "  ".join(detail), columns))
    return split


def _cells(item: _Tensor | _Value, *, several: bool) -> list[str]:
    rank = [f"r{item.rank}"] if several else []
    if isinstance(item, _Value):
        return [*rank, output.printable(item.type), "", ""]
    sizes = item.shape if item.box is None else item.box[1]
    shape = str(sizes) if item.box is None else f"{sizes} of {item.shape}"
    return [*rank, item.dtype, shape, output.nbytes(item.nbytes)]


def _details(item: _Tensor | _Value) -> list[str]:
    if isinstance(item, _Value):
        return ["", "", "", ""]
    how = f"{item.how}, pointer -> {shown.short_id(item.pointer)}" if item.pointer else item.how
    return [output.nbytes(item.stored_nbytes), output.number(item.nbytes / max(1, item.stored_nbytes), ".2f", "x"), how, item.address]
