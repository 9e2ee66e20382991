"""A commit as a tree of files: what `ls`, `cat` and `checkout` show (FORMAT.md, section 14). Nothing of it is stored.

    tree = Tree(Content(reader, commit))
    tree.files()                              # [File(path="model.json", ...), ...]
    tree.write("model.safetensors", file)     # tensor by tensor, in the memory of the largest

Torch-free but for files of `torch.save`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from syckpt.checkpoint import paths
from syckpt.checkpoint.content import Content, Stored, whole
from syckpt.errors import FormatError, IntegrityError, NotFoundError, StateError
from syckpt.objects import ids, nodes
from syckpt.objects.box import Box
from syckpt.objects.dtypes import dtype
from syckpt.objects.entries import renumber
from syckpt.objects.nodes import Node
from syckpt.state.formats import JsonSerialization, SafetensorsSerialization, TorchSerialization, json_text, tensor_names

__all__ = ["File", "Tree"]

_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True)
class File:
    """A file of the tree. `item` is None for the commit's facts and random streams, `rank` None for what is no rank's own.

    `form`: the format's name, `"item"` for the document of an item without a layout. `nbytes`: None where only making it would tell.
    """

    path: str
    item: str | None
    rank: int | None
    form: str
    nbytes: int | None


@dataclass(frozen=True)
class _View:
    """What a file shows: a structure, and the tensors that it counts, each with the box of it that the file has."""

    name: str
    node: Node
    content: Content
    rank: int | None

    def stored(self, index: int) -> Stored:
        return self.content.entries[index]

    def box(self, index: int) -> Box:
        """Return the part of a tensor that is shown: of a rank's own file what that rank had of it."""
        stored = self.stored(index)
        boxes = [box for (box, _, _), rank in zip(stored.pieces, stored.ranks, strict=True) if rank == self.rank]
        if not boxes:
            return whole(stored.shape)
        begin = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
        ends = ([o + n for o, n in zip(box.offsets, box.sizes, strict=True)] for box in boxes)
        around = Box(begin, tuple(end - o for end, o in zip(map(max, zip(*ends, strict=True)), begin, strict=True)))
        return around if around.elements == sum(box.elements for box in boxes) else whole(stored.shape)

    def nbytes(self, index: int) -> int:
        return self.box(index).elements * dtype(self.stored(index).dtype).itemsize

    def read(self, index: int) -> bytearray:
        """Return the verified bytes. Raises: IntegrityError, StateError."""
        stored, box, reader = self.stored(index), self.box(index), self.content.reader
        data = bytearray(self.nbytes(index))
        if not data:
            return data
        if len(stored.pieces) == 1 and stored.pieces[0][0] == box:
            _, entry, place = stored.pieces[0]
            reader.run(reader.tasks(entry, place, memoryview(data)))
        else:
            array = np.frombuffer(data, _CARRIERS[dtype(stored.dtype).itemsize]).reshape(box.sizes)
            reader.run(self.content.tasks(stored, [(box, array)]))
        return data

    def places(self) -> dict[int, nodes.KeyPath]:
        """Return the entries that the structure counts, in order, each with the keys that first lead to it."""
        found: dict[int, nodes.KeyPath] = {}
        for keys, index in _entries(self.node):
            found.setdefault(index, keys)
        return found


def _entries(node: Node, keys: nodes.KeyPath = ()) -> Iterator[tuple[nodes.KeyPath, int]]:
    for below, leaf in nodes.walk(node, keys):
        kind, payload = nodes.split(leaf)
        if kind == "tensor":
            yield below, payload
        elif kind == "ndarray":
            yield below, payload[0]
        elif kind == "encoded":
            yield below, payload[1]
        elif kind == "generator":
            yield from _entries(payload[1], below)


class Tree:
    """The files of a commit."""

    def __init__(self, content: Content) -> None:
        """Raises: IntegrityError for a malformed structure."""
        self._content = content
        self.commit = content.commit
        self._items, _ = content.merged(choose=None)
        for mine in content.items.values():
            for node in mine.values():
                self._check(node)
        for node in content.rng.values():
            self._check(node)
        self._makers: dict[str, tuple[File, Callable[[BinaryIO], None]]] = {}
        for file, maker in self._all():
            if not ids.is_file_path(file.path):
                raise IntegrityError(f"commit {content.commit.id}: {file.path!r} cannot be a file's path; run `syckpt verify`")
            if file.path in self._makers:
                other = self._makers[file.path][0]
                raise IntegrityError(f"commit {content.commit.id}: items {other.item!r} and {file.item!r} are both the file {file.path}")
            self._makers[file.path] = file, maker
        for path in self._makers:
            parts = path.split("/")
            above = next((folder for end in range(1, len(parts)) if (folder := "/".join(parts[:end])) in self._makers), None)
            if above is not None:
                raise IntegrityError(f"commit {content.commit.id}: {above} is a file, and a directory of the file {path}")

    def _check(self, node: Node) -> None:
        nodes.decode(node)
        if any(index >= len(self._content.entries) for _, index in _entries(node)):
            raise IntegrityError(f"commit {self._content.commit.id}: its structure counts tensors that it has not; run `syckpt verify`")

    def files(self) -> list[File]:
        """Return the files, by path."""
        return [self._makers[path][0] for path in sorted(self._makers)]

    def write(self, path: str, out: BinaryIO) -> None:
        """Write a file's content.

        Raises: NotFoundError; IntegrityError (what was written by then is exact); StateError for a file that no one can have: two ranks
        differ, or its format lacks something.
        """
        if path not in self._makers:
            known = sorted(self._makers)
            more = f" and {len(known) - 20} more" if len(known) > 20 else ""
            raise NotFoundError(f"commit {self._content.commit.id} has no file {path!r}; it has {', '.join(known[:20])}{more}")
        self._makers[path][1](out)

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises: as `write`."""
        out = io.BytesIO()
        self.write(path, out)
        return out.getvalue()

    def write_tensors(self, out: BinaryIO) -> None:
        """Write one safetensors file with every tensor of the commit, named `item.key`, and, as the text `syckpt` of its metadata, a JSON
        object of the commit's facts and the items' documents. Raises: IntegrityError.
        """
        taken: dict[str, int] = {}
        views: list[tuple[_View, Mapping[str, int]]] = []
        documents: dict[str, Any] = {}
        for name, node in self._items.items():
            view = _View(name, node, self._content, None)
            names = _names(view, taken=taken, prefix=f"{name}.")
            taken.update(names)
            views.append((view, names))
            documents[name] = _document(view, names, name)
        facts = {"commit": self.commit.to_body(), "items": documents}
        _Safetensors(views, {"syckpt": json.dumps(facts, sort_keys=True, allow_nan=False)}).write(out)

    def _all(self) -> Iterator[tuple[File, Callable[[BinaryIO], None]]]:
        content = self._content
        facts = (_readable(content.commit.to_body()) + "\n").encode()
        yield File(paths.COMMIT, None, None, "json", len(facts)), _writes(facts)
        for name, node in self._items.items():
            layout = content.layouts.get(name)
            ranks = [rank for rank, mine in content.items.items() if name in mine]
            if layout is None:
                yield from _documents(_View(name, node, content, None), None, name, paths.of_item(name, None, ranks))
                continue
            for path, rank in paths.of_item(name, layout, ranks):
                view = _View(name, node if rank is None else content.items[rank][name], content, rank)
                yield _file(view, path, layout[1], layout[2])
        for rank, node in content.rng.items():
            if node is not None:
                names = [(path, rank) for path in paths.rng_of(rank)]
                yield from _documents(_View("rng", node, content, None), rank, None, names)


def _writes(data: bytes | bytearray) -> Callable[[BinaryIO], None]:
    def write(out: BinaryIO) -> None:
        out.write(data)

    return write


# --- items without a layout --------------------------------------------------------------------------------------------------------


def _names(view: _View, *, taken: Mapping[str, Any] | None = None, prefix: str = "") -> dict[str, int]:
    """Return names for a view's tensors: the joined keys, with a number where two paths join to the same text."""
    names: dict[str, int] = {}
    for index, keys in view.places().items():
        text = ".".join(key["key"] if isinstance(key, dict) else str(key) for key in keys)
        name = base = prefix + text if text else view.name
        count = 1
        while name in names or name in (taken or {}) or name == "__metadata__":
            count += 1
            name = f"{base}#{count}"
        names[name] = index
    return names


def _document(view: _View, names: Mapping[str, int], item: str | None) -> dict[str, Any]:
    """Return an item's structure, faithful to type, around the names of its tensors."""
    numbers = {index: number for number, index in enumerate(names.values())}
    return {
        "format": "syckpt item",
        "version": 1,
        "item": item,
        "tensors": [[name, view.stored(index).dtype, list(view.box(index).sizes)] for name, index in names.items()],
        "value": _renumbered(view.node, numbers),
    }


def _readable(value: Any, indent: str = "") -> str:
    """Return JSON for people: what fits on a line stands on one."""
    line = json.dumps(value, sort_keys=True, allow_nan=False)
    if len(indent) + len(line) <= 120 or not isinstance(value, list | dict):
        return line
    deeper = indent + "  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(deeper + _readable(item, deeper) for item in value) + f"\n{indent}]"
    pairs = (f"{deeper}{json.dumps(key)}: {_readable(value[key], deeper)}" for key in sorted(value))
    return "{\n" + ",\n".join(pairs) + f"\n{indent}}}"


def _renumbered(node: Node, numbers: Mapping[int, int]) -> Node:
    if isinstance(node, dict) and nodes.PER_RANK in node:
        # Ranks are numbers too, and stay.
        return {nodes.PER_RANK: [[rank, _renumbered(child, numbers)] for rank, child in node[nodes.PER_RANK]]}
    return renumber(node, numbers)


def _documents(
    view: _View, rank: int | None, item: str | None, names: Sequence[tuple[str, int | None]]
) -> Iterator[tuple[File, Callable[[BinaryIO], None]]]:
    (document, _), (tensors, _) = names
    found = _names(view)

    def describe(out: BinaryIO) -> None:
        out.write((_readable(_document(view, found, item)) + "\n").encode())

    yield File(document, item, rank, "item", None), describe
    if found:
        yield _tensors(view, found, tensors, item, rank, None)


def _tensors(
    view: _View, names: Mapping[str, int], path: str, item: str | None, rank: int | None, metadata: Mapping[str, str] | None
) -> tuple[File, Callable[[BinaryIO], None]]:
    form = _Safetensors([(view, names)], metadata)
    return File(path, item, rank, SafetensorsSerialization.name, form.nbytes), form.write


class _Safetensors:
    """A safetensors file of several views' tensors."""

    def __init__(self, views: list[tuple[_View, Mapping[str, int]]], metadata: Mapping[str, str] | None) -> None:
        rows = [(name, view, index) for view, names in views for name, index in names.items()]
        # By falling size of element, so that each tensor is aligned to its own.
        self._rows = sorted(rows, key=lambda row: -dtype(row[1].stored(row[2]).dtype).itemsize)
        header: dict[str, Any] = {} if not metadata else {"__metadata__": dict(sorted(metadata.items()))}
        end = 0
        for name, view, index in self._rows:
            kind, nbytes = dtype(view.stored(index).dtype).safetensors, view.nbytes(index)
            shape = [nbytes] if kind is None else list(view.box(index).sizes)
            header[name] = {"dtype": kind or "U8", "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        size = -(-(8 + len(text)) // 8) * 8
        self._head = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
        self.nbytes = size + end

    def write(self, out: BinaryIO) -> None:
        out.write(self._head)
        for _, view, index in self._rows:
            out.write(view.read(index))


# --- items with a layout -----------------------------------------------------------------------------------------------------------


def _file(view: _View, path: str, form: str, configuration: Mapping[str, Any]) -> tuple[File, Callable[[BinaryIO], None]]:
    """Return an item's file. Raises nothing for one that cannot be made: its writer does."""
    name, rank, node = view.name, view.rank, view.node
    differing = _differing(node, (name,))
    if differing is not None:
        return File(path, name, rank, form, None), _fails(StateError(f"{path}: {differing}"))
    if form == SafetensorsSerialization.name:
        try:
            names = tensor_names(node, (name,))
        except StateError as exc:
            return File(path, name, rank, form, None), _fails(exc)
        metadata = configuration.get("metadata")
        if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())):
            why = f"{path}: its metadata are no texts; run `syckpt verify`"
            return File(path, name, rank, form, None), _fails(IntegrityError(why))
        return _tensors(view, names, path, name, rank, metadata)
    if form in (JsonSerialization.name, TorchSerialization.name):
        make = _json if form == JsonSerialization.name else _torch

        def write(out: BinaryIO) -> None:
            out.write(make(view))

        return File(path, name, rank, form, None), write
    kind, payload = nodes.split(node)
    if kind != "encoded" or payload[0] != form:
        why = f"{path}: the item is not in the format {form}, as its layout says; run `syckpt verify`"
        return File(path, name, rank, form, None), _fails(IntegrityError(why))
    return File(path, name, rank, form, view.nbytes(payload[1])), lambda out: _ignore(out.write(view.read(payload[1])))


def _ignore(_: object) -> None:
    return None


def _fails(error: Exception) -> Callable[[BinaryIO], None]:
    def write(out: BinaryIO) -> None:
        raise error

    return write


def _differing(node: Node, path: nodes.KeyPath) -> str | None:
    """Return why a file of several ranks cannot be: the first place at which they differ, and who does."""
    kind, payload = nodes.split(node)
    if kind == nodes.PER_RANK:
        ranks = " and ".join(str(rank) for rank, _ in payload[:2])
        return f"{nodes.format_path(path)} differs between ranks {ranks}, which claim this one file: put {{rank}} into its path"
    for key, child in nodes.children(node) or ():
        found = _differing(child, (*path, key))
        if found is not None:
            return found
    return None


def _json(view: _View) -> bytes:
    try:
        return json_text(nodes.decode(view.node))
    except (TypeError, ValueError) as exc:
        raise IntegrityError(f"item {view.name!r} is no JSON, as its layout says ({exc}); run `syckpt verify`") from exc


def _torch(view: _View) -> bytes:
    import torch

    from syckpt.state.plain import plain

    def tensor(index: int) -> torch.Tensor:
        name = view.stored(index).dtype
        kind = getattr(torch, name, None)
        if not isinstance(kind, torch.dtype):
            raise FormatError(f"this torch has no dtype {name}; use a newer torch")
        data = view.read(index)
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(kind).view(view.box(index).sizes)

    return TorchSerialization().encode(plain(view.node, tensor, path=(view.name,))[0])
