"""What differs between two commits: counters, configuration, structure and tensors.

Tensors are compared by their content addresses, so manifests are all that is read, whatever the size of the state. Only where two
commits cut a tensor into other boxes (they were saved by other numbers of ranks, or in other layouts) do addresses say nothing: such a
tensor is read from both, verified, one at a time, and compared by its bytes. So the answer is exact: a `Diff` is false if and only if
counters, configurations and contents are the same.

What ranks saved alike is one thing, under its path; what they saved each for itself stands as `<path> (rank R)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from syckpt.errors import IntegrityError
from syckpt.hyperparams.config import ConfigDiff, HyperConfig
from syckpt.objects import canonical, nodes
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.locations import Source
from syckpt.objects.manifest import Entry, Manifest
from syckpt.objects.text import printable
from syckpt.repo.reader import Place, Reader
from syckpt.repo.repository import Repository

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Diff", "ItemDiff", "TensorChange", "TensorDiff", "TensorType", "diff"]

_COUNTERS = ("step", "epoch", "batch_idx", "epoch_done", "entered", "metric", "world_size")
_STREAMS = "<rng>"
_TEXT_LENGTH = 200
_LISTED = 20
"""Tensors of an item that `str()` names, of those that have other values and nothing else."""


class TensorType(NamedTuple):
    """Element type and global shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class TensorChange(NamedTuple):
    """A tensor that both commits have; where the types are equal the values differ."""

    before: TensorType
    after: TensorType

    def __str__(self) -> str:
        return f"other values, {self.after}" if self.before == self.after else f"{self.before} -> {self.after}"


@dataclass(frozen=True)
class TensorDiff:
    """Tensors by path, as `model/net.0.weight`. `unchanged` counts those that are bit for bit the same."""

    added: dict[str, TensorType] = field(default_factory=dict)
    removed: dict[str, TensorType] = field(default_factory=dict)
    changed: dict[str, TensorChange] = field(default_factory=dict)
    unchanged: int = 0

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        return "\n".join(_tensor_lines(self))


@dataclass(frozen=True)
class ItemDiff:
    """Leaves that are no tensors, and containers, by path: numbers, texts, types, the order of keys, which tensors are tied."""

    added: dict[str, Any] = field(default_factory=dict)
    removed: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        lines = {path: f"+ {path}: {_text(value)}" for path, value in self.added.items()}
        lines |= {path: f"- {path}: {_text(value)}" for path, value in self.removed.items()}
        lines |= {path: f"~ {path}: {_text(old)} -> {_text(new)}" for path, (old, new) in self.changed.items()}
        return "\n".join(lines[path] for path in sorted(lines))


@dataclass(frozen=True)
class Diff:
    """What leads from one commit to another. True if there is anything; `str()` is for people.

    `counters` are step, epoch, batch_idx, metric and their like, as `(before, after)`; `config` the hyperparameters; `tensors` and
    `items` the content; `streams` says whether the states of the random generators differ.
    """

    a: str
    b: str
    counters: dict[str, tuple[Any, Any]]
    config: ConfigDiff
    tensors: TensorDiff
    items: ItemDiff
    streams: bool

    def __bool__(self) -> bool:
        return bool(self.counters or self.config or self.tensors or self.items or self.streams)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def diff(repository: Repository, a: Commit, b: Commit, *, reader: Reader | None = None) -> Diff:
    """Compare two commits; `reader` says whom to trust.

    Raises: NotFoundError for one that was dropped, IntegrityError (damage, not signed by a trusted key), FormatError.
    """
    reader = reader or Reader(repository)
    before, after = (_Content.of(reader, commit) for commit in (a, b))
    own, streams = _compare_tensors(_Bytes(reader), before, after)
    return Diff(
        a=a.id,
        b=b.id,
        counters={name: (old, new) for name in _COUNTERS if not _is_same(old := getattr(a, name), new := getattr(b, name))},
        config=HyperConfig(a.config).diff(HyperConfig(b.config)),
        tensors=own,
        items=_compare_leaves(before.leaves, after.leaves),
        streams=bool(streams) or before.streams != after.streams,
    )


def _is_same(a: Any, b: Any) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


# -- content ------------------------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A box of a tensor, and who stores it."""

    entry: Entry
    rank: int


@dataclass(frozen=True)
class _Content:
    """A commit's tensors by path text, and the texts of its other leaves and containers; those of the random streams apart."""

    commit: Commit
    tensors: dict[str, list[_Piece]]
    leaves: dict[str, bytes]
    streams: dict[str, bytes]

    @staticmethod
    def of(reader: Reader, commit: Commit) -> _Content:
        reader.check_signed(commit)
        if commit.dropped:
            # With the reason that every other reader of its content gives.
            reader.repository.check_whole(commit)
        tensors: dict[str, list[_Piece]] = {}
        leaves: dict[str, dict[int, bytes]] = {}
        for rank, _ in commit.manifests:
            manifest = reader.repository.read_manifest(commit, rank)
            for index, entry in enumerate(manifest.entries):
                if entry.address:
                    path = nodes.format_path(entry.path)
                    tensors.setdefault(_of_rank(path, rank) if index in manifest.local else path, []).append(_Piece(entry, rank))
            for path, text in _leaves(manifest):
                leaves.setdefault(path, {})[rank] = text
        found: dict[str, bytes] = {}
        for path, by_rank in leaves.items():
            if len(set(by_rank.values())) == 1:
                found[path] = next(iter(by_rank.values()))
            else:
                found |= {_of_rank(path, rank): text for rank, text in by_rank.items()}
        streams = {path: text for path, text in found.items() if _is_stream(path)}
        return _Content(commit, tensors, {path: text for path, text in found.items() if path not in streams}, streams)


def _of_rank(path: str, rank: int) -> str:
    return f"{path} (rank {rank})"


def _is_stream(path: str) -> bool:
    return path.startswith(_STREAM_TEXT)


_STREAM_TEXT = nodes.format_path((_STREAMS,))


def _leaves(manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Yield the path text of every leaf and container, with a text that is equal for equal ones only."""
    paths = [nodes.format_path(entry.path) for entry in manifest.entries]
    for name, node in (*manifest.items.items(), (_STREAMS, manifest.rng)):
        nodes.decode(node)  # Whatever is malformed ends here.
        yield from _flatten(node, (name,), paths)


def _flatten(node: Any, path: nodes.KeyPath, paths: list[str]) -> Iterator[tuple[str, bytes]]:
    text = nodes.format_path(path)
    below = nodes.children(node)
    if below is None:
        named = _named(node, paths)
        if named != {"tensor": text}:  # a tensor in its own place is told by the tensors; a tie is told here
            yield text, canonical.dumps(named)
        return
    kind, payload = nodes.split(node)
    # What a container is besides its members: kind, order of keys, name of a type, length limit.
    about = payload[:1] if kind in ("deque", "namedtuple", "dataclass") else []
    keys = [key for key, _ in below]
    shape = keys if kind in nodes.MAPPING_KINDS or kind in ("namedtuple", "dataclass") else len(keys)
    yield text, _CONTAINER + canonical.dumps([kind, about, shape])
    for key, child in below:
        yield from _flatten(child, (*path, key), paths)


_CONTAINER = b"container "


def _named(node: Any, paths: list[str]) -> Any:
    """Return a leaf with the paths of tensors instead of their numbers, which depend on what stands elsewhere. Raises: IntegrityError."""
    if isinstance(node, dict):
        kind, payload = nodes.split(node)
        if kind in ("tensor", "ndarray"):
            index, *rest = payload if kind == "ndarray" else [payload]
            if index >= len(paths):
                raise IntegrityError(f"malformed node: no tensor {index} of {len(paths)}; run `syckpt verify`")
            return {kind: [paths[index], *rest] if rest else paths[index]}
        return {kind: _named(payload, paths)}
    if isinstance(node, list):
        return [_named(child, paths) for child in node]
    return node


# -- comparing ----------------------------------------------------------------------------------------------------------------------


def _compare_tensors(bytes_of: _Bytes, before: _Content, after: _Content) -> tuple[TensorDiff, TensorDiff]:
    """Return how the tensors differ, and how those of the random streams do."""
    own, streams = TensorDiff(), TensorDiff()
    unchanged = 0
    for path in sorted(before.tensors.keys() | after.tensors.keys()):
        found = streams if _is_stream(path) else own
        old, new = before.tensors.get(path, []), after.tensors.get(path, [])
        if not new:
            found.removed[path] = _type(old)
        elif not old:
            found.added[path] = _type(new)
        elif _type(old) != _type(new) or not _is_equal(bytes_of, before.commit, old, after.commit, new):
            found.changed[path] = TensorChange(_type(old), _type(new))
        else:
            unchanged += found is own
    return TensorDiff(own.added, own.removed, own.changed, unchanged), streams


def _type(pieces: list[_Piece]) -> TensorType:
    return TensorType(pieces[0].entry.dtype, pieces[0].entry.shape)


def _is_equal(bytes_of: _Bytes, a: Commit, old: list[_Piece], b: Commit, new: list[_Piece]) -> bool:
    ours, theirs = _by_box(old), _by_box(new)
    if ours.keys() == theirs.keys():
        return all(ours[box].entry.address == theirs[box].entry.address for box in ours)
    # A box that both have may settle it; else the bytes do.
    if any(ours[box].entry.address != theirs[box].entry.address for box in ours.keys() & theirs.keys()):
        return False
    return bool((bytes_of.whole(a, ours) == bytes_of.whole(b, theirs)).all())


def _by_box(pieces: list[_Piece]) -> dict[Box, _Piece]:
    return {_box(piece.entry): piece for piece in pieces}


def _box(entry: Entry) -> Box:
    return entry.box or Box((0,) * len(entry.shape), entry.shape)


class _Bytes:
    """Reads whole tensors, for where addresses cannot tell."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._places: dict[Source, dict[bytes, Place]] = {}

    def whole(self, commit: Commit, pieces: Mapping[Box, _Piece]) -> np.ndarray[Any, Any]:
        """Return a tensor's verified bytes, `[*shape, itemsize]`, put together from its boxes. Raises: IntegrityError."""
        import numpy as np

        first = next(iter(pieces.values())).entry
        if sum(box.elements for box in pieces) != prod(first.shape):
            raise IntegrityError(f"{commit.id}: the boxes of {nodes.format_path(first.path)} do not add up to {list(first.shape)}")
        out: np.ndarray[Any, Any] = np.zeros((*first.shape, first.kind.itemsize), np.uint8)
        for box, (entry, rank) in pieces.items():
            data = bytearray(entry.nbytes)
            self._reader.read([(entry, self._place(commit, rank, entry), memoryview(data))])
            region = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
            out[region] = np.frombuffer(data, np.uint8).reshape(*box.sizes, first.kind.itemsize)
        return out

    def _place(self, commit: Commit, rank: int, entry: Entry) -> Place:
        source = (commit.id, rank)
        if source not in self._places:
            self._places[source] = {stored.address: place for _, stored, place in self._reader.snapshot(commit, rank).stored()}
        return self._places[source][entry.address]


def _compare_leaves(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> ItemDiff:
    added = {path: _value(text) for path, text in after.items() if path not in before and not text.startswith(_CONTAINER)}
    removed = {path: _value(text) for path, text in before.items() if path not in after and not text.startswith(_CONTAINER)}
    # A container without members has nothing else that tells of it.
    added |= {path: _value(text) for path, text in after.items() if path not in before and _is_empty(text)}
    removed |= {path: _value(text) for path, text in before.items() if path not in after and _is_empty(text)}
    changed = {}
    for path, text in after.items():
        if path in before and before[path] != text and not _differs_by_members_alone(before[path], text):
            changed[path] = (_value(before[path]), _value(text))
    return ItemDiff(added, removed, changed)


def _container(text: bytes) -> list[Any] | None:
    return canonical.loads(text[len(_CONTAINER) :]) if text.startswith(_CONTAINER) else None


def _is_empty(text: bytes) -> bool:
    parts = _container(text)
    return parts is not None and not parts[2]


def _differs_by_members_alone(before: bytes, after: bytes) -> bool:
    """Whether two containers differ only by members that one of them lacks, which are told under their own paths."""
    old, new = _container(before), _container(after)
    if old is None or new is None or old[:2] != new[:2]:
        return False
    if isinstance(old[2], int) or isinstance(new[2], int):
        return True
    ours, theirs = ([canonical.dumps(key) for key in shape] for shape in (old[2], new[2]))
    both = set(ours) & set(theirs)
    return [key for key in ours if key in both] == [key for key in theirs if key in both]


class _Shown(str):
    """A text that stands for what is no plain value; its repr is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _value(text: bytes) -> Any:
    """Return what a leaf's text says as a value, or a text about it."""
    parts = _container(text)
    if parts is None:
        node = canonical.loads(text)
        kind, payload = nodes.split(node)
        if kind == "tensor":
            return _Shown(f"the tensor {payload}")
        if kind in ("namedtuple", "dataclass", "enum"):
            return _Shown(f"{payload[0]} {nodes.decode(node)!r}")
        return _Shown(f"{kind} {payload}") if kind in ("ndarray", "generator") else nodes.decode(node)
    kind, about, shape = parts
    name = " ".join([kind or "value", *map(str, about)])
    return _Shown(f"{name} of {shape} members" if isinstance(shape, int) else f"{name} of {', '.join(map(_key, shape)) or 'nothing'}")


def _text(value: Any) -> str:
    """Return Python's text of a value, cut to what a line can hold."""
    try:
        text = repr(value)
    except ValueError:
        return f"<{type(value).__name__}>"  # It holds an integer of more digits than Python prints.
    return text if len(text) <= _TEXT_LENGTH else f"{text[: _TEXT_LENGTH - 3]}..."


def _key(key: Any) -> str:
    return nodes.format_path((key,))


# -- for people ---------------------------------------------------------------------------------------------------------------------


def _lines(found: Diff) -> Iterator[str]:
    yield f"{found.a} -> {found.b}"
    if not found:
        yield f"the same: configuration, counters, items, {found.tensors.unchanged} tensors, random streams"
        return
    yield from (f"~ {name}: {old!r} -> {new!r}" for name, (old, new) in found.counters.items())
    for title, part in (("config", found.config), ("items", found.items)):
        if part:
            yield f"{title}:"
            yield from (f"  {printable(line)}" for line in str(part).split("\n"))
    yield (
        f"tensors: {len(found.tensors.changed)} changed, {len(found.tensors.added)} added, {len(found.tensors.removed)} removed,"
        f" {found.tensors.unchanged} the same"
    )
    yield from (f"  {line}" for line in _tensor_lines(found.tensors))
    if found.streams:
        yield "random streams: differ"


def _tensor_lines(tensors: TensorDiff) -> Iterator[str]:
    lines = {path: f"+ {path}: {kind}" for path, kind in tensors.added.items()}
    lines |= {path: f"- {path}: {kind}" for path, kind in tensors.removed.items()}
    values: dict[str, int] = {}
    for path, change in tensors.changed.items():
        item = path.partition("/")[0]
        if change.before == change.after:
            values[item] = values.get(item, 0) + 1
            if values[item] > _LISTED:
                continue
        lines[path] = f"~ {path}: {change}"
    yield from (printable(lines[path]) for path in sorted(lines))
    yield from (printable(f"~ {item}/...: other values in {count - _LISTED} more") for item, count in _beyond(values.items()))


def _beyond(counts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted((item, count) for item, count in counts if count > _LISTED)
