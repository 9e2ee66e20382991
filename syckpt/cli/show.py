"""`syckpt show`: one commit in full. Its record is shown also where its content is dropped or damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.errors import SyckptError

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.labels import Labels
    from syckpt.repo.reader import Snapshot
    from syckpt.repo.repository import Repository

__all__ = ["command"]


@dataclass
class _Rank:
    """What a rank saved. Of its tensors some are stored with this commit, whole or as a delta; the others point to earlier ones."""

    rank: int
    keyframe: str
    keyframe_age: int
    tensors: int
    nbytes: int
    whole: int
    delta: int
    pointers: int
    blob_nbytes: int


@dataclass
class _Content:
    """What a commit holds: a rank's figures each, and tensors and raw bytes of each item over all ranks."""

    ranks: list[_Rank] = field(default_factory=list)
    items: dict[str, dict[str, int]] = field(default_factory=dict)


@click.command("show", short_help="One commit in full.")
@click.argument("rev", default="HEAD")
@json_option
@pass_invocation
def command(invocation: Invocation, rev: str) -> None:
    """Show one commit in full (REV, default: HEAD): counters, who signed it, configuration, what it holds, how that is stored, and what the
    save took.

    "written" tensors have their bytes in this commit's own files, some of them as a delta against its keyframe; "unchanged" ones are
    those of an earlier commit, and cost nothing but their names. Who signed is listed, not checked: `syckpt verify --trusted-key` does.

    JSON: the object of `syckpt log --json`, and more ("signatures": ids of keys); floats that are no numbers are the texts "nan", "inf" and
    "-inf".

    \b
    Examples:
      syckpt show               the newest commit
      syckpt show best          the one with the lowest metric
      syckpt show main@{1}      where main was before its last move
      syckpt show --json | jq .config
    """
    from syckpt.repo import history
    from syckpt.repo.labels import Labels
    from syckpt.repo.signing import signatures_of

    repository = invocation.repository()
    commit = history.resolve(repository, rev)
    labels = Labels(repository)
    keys = sorted(signatures_of(repository, commit.id))
    content, problem = _Content(), None
    if not commit.dropped:
        try:
            content = _content(repository, commit)
        except SyckptError as exc:
            problem = exc
    if invocation.as_json:
        output.echo_json(_record(commit, labels, content, keys))
    else:
        output.echo(_lines(commit, labels, content, keys))
    if problem is not None:
        raise problem


def _content(repository: Repository, commit: Commit) -> _Content:
    """Read manifests and locations, no tensors. Raises: IntegrityError, FormatError."""
    from syckpt.repo.reader import Reader

    reader, content = Reader(repository), _Content()
    for number, _ in commit.manifests:
        snapshot = reader.snapshot(commit, number)
        content.ranks.append(_rank(snapshot))
        for name in snapshot.manifest.items:
            content.items.setdefault(name, {"tensors": 0, "nbytes": 0})
        for entry in snapshot.manifest.entries:
            item = content.items.setdefault(str(entry.path[0]), {"tensors": 0, "nbytes": 0})
            item["tensors"] += 1
            item["nbytes"] += entry.nbytes
    return content


def _rank(snapshot: Snapshot) -> _Rank:
    kinds = Counter("pointer" if p.owner[0] != snapshot.commit.id else "delta" if p.base else "whole" for _, _, p in snapshot.stored())
    keyframe, age = snapshot.locations.keyframe
    return _Rank(
        rank=snapshot.manifest.rank,
        keyframe=keyframe,
        keyframe_age=age,
        tensors=kinds.total(),
        nbytes=sum(entry.nbytes for entry in snapshot.manifest.entries),
        whole=kinds["whole"],
        delta=kinds["delta"],
        pointers=kinds["pointer"],
        blob_nbytes=sum(blob.size for blob in snapshot.locations.blobs),
    )


def _record(commit: Commit, labels: Labels, content: _Content, keys: list[str]) -> dict[str, Any]:
    return {
        **shown.record(commit, labels),
        "entered": commit.entered,
        "fingerprint": commit.fingerprint,
        "seal": commit.seal,
        "run": commit.run_id,
        "generation": commit.generation,
        "sequence": commit.sequence,
        "writer": commit.writer,
        "rng_exact": commit.rng_exact,
        "signatures": keys,
        "items": content.items,
        "ranks": [asdict(rank) for rank in content.ranks],
    }


def _lines(commit: Commit, labels: Labels, content: _Content, keys: list[str]) -> Iterator[str]:
    names = labels.text(commit)
    yield click.style(f"commit {commit.id}", fg="yellow") + (" " + click.style(names, fg="green") if names else "")
    for mark in shown.marks(commit):
        yield click.style(f"{mark:<11} {_MARKS[mark]}", fg="red")
    for name, value in _fields(commit, keys).items():
        first, *more = value.split("\n")
        yield f"{name:<11} {output.printable(first)}".rstrip()
        yield from (f"{'':<11} {output.printable(line)}".rstrip() for line in more)
    yield from _section("config", _tree(commit.config, "  "))
    if content.items:
        yield from _section("items", _items(content))
        yield from _section("stored", (line for rank in content.ranks for line in _stored(rank, several=len(content.ranks) > 1)))
    yield from _section("the save", _figures(commit.stats))


_MARKS = {
    "dropped": "its content was removed by retention",
    "damaged": "loading it failed; see `syckpt verify`",
    "preempted": "saved because the machine was about to be taken away",
}


def _fields(commit: Commit, keys: list[str]) -> dict[str, str]:
    fields = {
        "parents": ", ".join(commit.parents) or "none",
        "branch": commit.branch,
        "name": commit.name or "",
        "tags": ", ".join(commit.tags),
        "created": f"{commit.created.strftime('%Y-%m-%d %H:%M:%S')} UTC, {shown.age(commit)}",
        "step": str(commit.step),
        "epoch": shown.epoch(commit).replace(" batch", ", batch") + (", entered" if commit.entered else ""),
        "metric": "" if commit.metric is None else repr(commit.metric),
        "message": commit.message,
        "run": f"{commit.run_id}, generation {commit.generation}, save {commit.sequence}, {output.count(commit.world_size, 'rank')}",
        "writer": commit.writer,
        "signed by": "".join(f"key {key}\n" for key in keys).rstrip(),
        "randomness": "exact" if commit.rng_exact else "not exact since a resume",
    }
    return {name: value for name, value in fields.items() if value}


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    body = list(lines)
    if body:
        yield ""
        yield click.style(title, bold=True)
        yield from body


def _tree(config: Mapping[Any, Any], indent: str) -> Iterator[str]:
    for key, value in config.items():
        name = output.printable(str(key))
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}"
            yield from _tree(value, indent + "  ")
        else:
            yield f"{indent}{name}: {output.short(value, limit=200)}"


def _items(content: _Content) -> Iterator[str]:
    rows = [
        [output.printable(name), output.count(item["tensors"], "tensor"), output.nbytes(item["nbytes"])]
        for name, item in content.items.items()
    ]
    yield from ("  " + "  ".join(row) for row in output.aligned(rows, right=(1, 2)))


def _stored(rank: _Rank, *, several: bool) -> Iterator[str]:
    indent = "  "
    if several:
        yield f"  rank {rank.rank}"
        indent = "    "
    yield f"{indent}tensors    {rank.tensors}, {output.nbytes(rank.nbytes)}"
    yield f"{indent}written    {rank.whole + rank.delta} ({rank.delta} as deltas) in a blob of {output.nbytes(rank.blob_nbytes)}"
    yield f"{indent}unchanged  {rank.pointers}{', in files of earlier commits' if rank.pointers else ''}"
    own = "this commit" if rank.keyframe_age == 0 else f"{rank.keyframe}, {output.count(rank.keyframe_age, 'commit')} ago"
    yield f"{indent}keyframe   {own}"


def _figures(stats: dict[str, Any]) -> Iterator[str]:
    rows = [_figure(name, value) for name, value in stats.items()]
    yield from (f"  {name}  {value}".rstrip() for name, value in (output.aligned(rows) if rows else []))


def _figure(name: str, value: Any) -> list[str]:
    label = output.printable(name.removesuffix("_bytes").removesuffix("_s").replace("_", " "))
    if name.endswith("_bytes"):
        return [label, output.nbytes(value)]
    if name.endswith("_s"):
        return [label, output.number(value, ".3g", " s")]
    return [label, output.number(value, ".2f", "x") if name == "ratio" else output.short(value)]
