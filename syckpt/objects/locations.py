"""Locations: where the bytes of a manifest's tensors are (FORMAT.md, section 7)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from syckpt.errors import IntegrityError
from syckpt.objects import address as addresses
from syckpt.objects import ids
from syckpt.objects.canonical import MAX_SAFE_INT
from syckpt.objects.checks import Fields

__all__ = ["BlobRecord", "Locations", "Row", "Source"]

Source = tuple[str, int]  # commit id, rank: whose rows


@dataclass(frozen=True)
class BlobRecord:
    """A blob's key and size, and its header's length and digest (16 bytes)."""

    key: str
    size: int
    header_nbytes: int
    header_digest: bytes


class Row(NamedTuple):
    """How one tensor's bytes lie in a blob.

    `offset` and `length` in bytes of the file; `nbytes` raw; `blocks` are stored lengths (empty unless coded with more than one
    block); `leaves` the blocks' digests (empty for at most one block); `base` is `(source index, row)` of a row without a base.
    """

    blob: int
    offset: int
    length: int
    nbytes: int
    width: int
    coded: bool
    blocks: tuple[int, ...]
    leaves: bytes
    base: tuple[int, int] | None


@dataclass(frozen=True)
class Locations:
    """One revision of a rank's locations. `at[i]` is `(source index, row)` of the manifest's distinct address i; source 0 is `rows`.

    A row that is None is gone: repack left it behind, since nothing that is kept leads to it. `bases` are rows of others that a later
    save of the cycle may take as bases, although nothing here does. Of a dropped commit `at` may be empty.
    """

    commit: str
    rank: int
    revision: int
    manifest_seal: str
    keyframe: tuple[str, int]
    blobs: tuple[BlobRecord, ...]
    sources: tuple[Source, ...]
    at: tuple[tuple[int, int], ...]
    rows: tuple[Row | None, ...] = field(repr=False)
    bases: tuple[tuple[int, int], ...] = ()

    def source(self, index: int) -> Source:
        """Return whose rows a source index means."""
        return (self.commit, self.rank) if index == 0 else self.sources[index - 1]

    def row(self, number: int) -> Row:
        """Return a row. Raises: IntegrityError for one that is gone, or never was."""
        found = self.rows[number] if number < len(self.rows) else None
        if found is None:
            raise IntegrityError(
                f"objects/{self.commit}/r{self.rank:05d}.locations.{self.revision:04d}: no row {number}: nothing kept should lead there"
            )
        return found

    def to_body(self) -> dict[str, Any]:
        rows = [_GONE if row is None else row for row in self.rows]
        body: dict[str, Any] = {
            "kind": "locations",
            "version": 1,
            "commit": self.commit,
            "rank": self.rank,
            "revision": self.revision,
            "manifest": self.manifest_seal,
            "keyframe": list(self.keyframe),
            "blobs": [[b.key, b.size, b.header_nbytes, addresses.to_text(b.header_digest)] for b in self.blobs],
            "sources": [list(s) for s in self.sources],
            "at": {"source": [s for s, _ in self.at], "row": [r for _, r in self.at]},
            "rows": {
                "blob": [None if r is None else r.blob for r in self.rows],
                "offset": [r.offset for r in rows],
                "length": [r.length for r in rows],
                "nbytes": [r.nbytes for r in rows],
                "width": [r.width for r in rows],
                "coded": [int(r.coded) for r in rows],
                "blocks": [list(r.blocks) or None for r in rows],
                "leaves": [addresses.to_text(r.leaves) or None for r in rows],
                "base": [None if r.base is None else list(r.base) for r in rows],
            },
        }
        if self.bases:
            body["bases"] = [list(base) for base in self.bases]
        return body

    @staticmethod
    def from_body(body: dict[str, Any], *, where: str) -> Locations:
        """Read a locations body; every index, offset and length is checked here. Raises: IntegrityError."""
        fields = Fields(body, where=where)
        blobs = fields.parse("blobs", lambda rows: tuple(_blob(row) for row in rows))
        sources = fields.parse("sources", lambda rows: tuple(_source(row) for row in rows))
        names = ("blob", "offset", "length", "nbytes", "width", "coded", "blocks", "leaves", "base")
        columns = fields.columns("rows", *names)
        try:
            _naturals([blob for blob in columns[0] if blob is not None])
            for column in columns[1:6]:
                _naturals(column)
            rows = tuple([_row(row, blobs, len(sources)) for row in zip(*columns, strict=True)])
            for row in rows:
                if row is not None and row.base is not None and row.base[0] == 0 and not _stands_alone(rows, row.base[1]):
                    raise ValueError(f"its base {row.base} is no row of these, or has a base itself")
        except (ValueError, TypeError) as exc:
            fields.fail(f"rows: {exc}")
        try:
            at = tuple(zip(*map(_naturals, fields.columns("at", "source", "row")), strict=True))
            _row_number(max((row for _, row in at), default=0))
        except ValueError as exc:
            fields.fail(f"at: {exc}")
        for source, row in at:
            if source > len(sources) or (source == 0 and row >= len(rows)):
                fields.fail(f"no row {row} of source {source}")
        return Locations(
            commit=fields.text("commit"),
            rank=fields.integer("rank"),
            revision=fields.integer("revision", least=1),
            manifest_seal=fields.text("manifest"),
            keyframe=fields.parse("keyframe", _source),
            blobs=blobs,
            sources=sources,
            at=at,
            rows=rows,
            bases=fields.parse("bases", lambda rows: tuple(_other(row, len(sources)) for row in rows)) if "bases" in body else (),
        )


_MAX_HEADER_NBYTES = 100_000_000
_MAX_ROWS = 1 << 24
"""A row takes at least 27 bytes, and a document has at most 256 MiB."""

_GONE = Row(0, 0, 0, 0, 1, False, (), b"", None)


def _stands_alone(rows: tuple[Row | None, ...], number: int) -> bool:
    found = rows[number] if number < len(rows) else None
    return found is not None and found.base is None


# No other form: a key out of a hostile file must not lead out of a commit's directory.
_BLOB_KEY = re.compile(r"objects/[0-9a-f]{8}-[0-9a-f]{16}/[A-Za-z0-9_-][A-Za-z0-9._-]*")


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SAFE_INT:
        raise ValueError(f"{str(value)[:40]} is not a natural number of at most {MAX_SAFE_INT}")
    return value


def _row_number(value: Any) -> int:
    if _natural(value) >= _MAX_ROWS:
        raise ValueError(f"row {value}: numbers of rows are below {_MAX_ROWS}")
    return value  # type: ignore[no-any-return]


def _naturals(values: list[Any]) -> list[int]:
    """Check a column at once, which is several times as fast. Raises: ValueError."""
    if not set(map(type, values)) <= {int} or (values and not 0 <= min(values) <= max(values) <= MAX_SAFE_INT):
        for value in values:
            _natural(value)
    return values


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{str(value)[:40]} is not a source and a row")
    return _natural(value[0]), _row_number(value[1])


def _source(value: Any) -> Source:
    commit, number = value
    if not isinstance(commit, str) or not ids.is_commit_id(commit):
        raise ValueError(f"{str(commit)[:40]!r} is not a commit id")
    return commit, _natural(number)


def _blob(value: Any) -> BlobRecord:
    key, size, header_nbytes, digest = value
    if not isinstance(key, str) or not _BLOB_KEY.fullmatch(key):
        raise ValueError(f"{str(key)[:80]!r} is not a blob's key")
    record = BlobRecord(key, _natural(size), _natural(header_nbytes), addresses.from_text(digest))
    if record.header_nbytes > min(record.size, _MAX_HEADER_NBYTES) or len(record.header_digest) != addresses.LEAF_NBYTES:
        raise ValueError(f"blob {key}: a header of {header_nbytes} bytes in {size}")
    return record


def _other(value: Any, sources: int) -> tuple[int, int]:
    source, row = _pair(value)
    if not 1 <= source <= sources:
        raise ValueError(f"source {source} of {sources}")
    return source, row


def _row(value: tuple[Any, ...], blobs: tuple[BlobRecord, ...], sources: int) -> Row | None:
    """Read a row; its numbers were checked to be natural ones. Raises: ValueError, TypeError."""
    blob, offset, length, nbytes, width, coded, blocks, leaves, base = value
    if blob is None:
        if list(value[1:]) != [0, 0, 0, 1, 0, None, None, None]:
            raise ValueError("a row without a blob has bytes")
        return None
    stored = () if blocks is None else tuple(_naturals(blocks))
    digests = b"" if leaves is None else addresses.from_text(leaves)
    based = None if base is None else _pair(base)
    if blob >= len(blobs) or offset < blobs[blob].header_nbytes or offset + length > blobs[blob].size:
        raise ValueError(f"bytes {offset}+{length} are not in blob {blob}")
    if width not in _WIDTHS or nbytes % width:
        raise ValueError(f"width {width} of {nbytes} bytes")
    if coded > 1 or (not coded and (length != nbytes or stored or based)):
        raise ValueError(f"{length} stored for {nbytes} raw bytes")
    count = addresses.block_count(nbytes)
    if len(digests) != (count * addresses.LEAF_NBYTES if count > 1 else 0):
        raise ValueError(f"{len(digests)} bytes of leaves for {count} blocks")
    if coded and (len(stored) != (count if count > 1 else 0) or (stored and sum(stored) != length)):
        raise ValueError(f"{len(stored)} lengths for {count} blocks")
    if based is not None and based[0] > sources:
        raise ValueError(f"base in source {based[0]} of {sources}")
    return Row(blob, offset, length, nbytes, width, bool(coded), stored, digests, based)


_WIDTHS = frozenset({1, 2, 4, 8})
