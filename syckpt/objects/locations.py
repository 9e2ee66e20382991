"""Locations: where the bytes of a manifest's tensors are (FORMAT.md, section 7)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Row:
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
    """One revision of a rank's locations. `at[i]` is `(source index, row)` of the manifest's distinct address i; source 0 is `rows`."""

    commit: str
    rank: int
    revision: int
    manifest_seal: str
    keyframe: tuple[str, int]
    blobs: tuple[BlobRecord, ...]
    sources: tuple[Source, ...]
    at: tuple[tuple[int, int], ...]
    rows: tuple[Row, ...] = field(repr=False)

    def source(self, index: int) -> Source:
        """Return whose rows a source index means."""
        return (self.commit, self.rank) if index == 0 else self.sources[index - 1]

    def to_body(self) -> dict[str, Any]:
        return {
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
                "blob": [r.blob for r in self.rows],
                "offset": [r.offset for r in self.rows],
                "length": [r.length for r in self.rows],
                "nbytes": [r.nbytes for r in self.rows],
                "width": [r.width for r in self.rows],
                "coded": [int(r.coded) for r in self.rows],
                "blocks": [list(r.blocks) or None for r in self.rows],
                "leaves": [addresses.to_text(r.leaves) or None for r in self.rows],
                "base": [None if r.base is None else list(r.base) for r in self.rows],
            },
        }

    @staticmethod
    def from_body(body: dict[str, Any], *, where: str) -> Locations:
        """Read a locations body; every index, offset and length is checked here. Raises: IntegrityError."""
        fields = Fields(body, where=where)
        blobs = fields.parse("blobs", lambda rows: tuple(_blob(row) for row in rows))
        sources = fields.parse("sources", lambda rows: tuple(_source(row) for row in rows))
        names = ("blob", "offset", "length", "nbytes", "width", "coded", "blocks", "leaves", "base")
        columns = fields.columns("rows", *names)
        try:
            rows = tuple(_row(row, blobs, len(sources)) for row in zip(*columns, strict=True))
            for row in rows:
                if row.base is not None and row.base[0] == 0 and (row.base[1] >= len(rows) or rows[row.base[1]].base is not None):
                    raise ValueError(f"its base {row.base} is no row of these, or has a base itself")
        except (ValueError, TypeError) as exc:
            fields.fail(f"rows: {exc}")
        at = tuple(zip(*fields.columns("at", "source", "row"), strict=True))
        for source, row in at:
            if (
                type(source) is not int
                or type(row) is not int
                or not 0 <= source <= len(sources)
                or row < 0
                or (source == 0 and row >= len(rows))
            ):
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
        )


# No other form: a key out of a hostile file must not lead out of a commit's directory.
_BLOB_KEY = re.compile(r"objects/[0-9a-f]{8}-[0-9a-f]{16}/[A-Za-z0-9_-][A-Za-z0-9._-]*")


def _natural(value: Any, *, most: int = MAX_SAFE_INT) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]} is not a natural number of at most {most}")
    return value


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{str(value)[:40]} is not a source and a row")
    return _natural(value[0]), _natural(value[1])


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
    if record.header_nbytes > record.size or len(record.header_digest) != addresses.LEAF_NBYTES:
        raise ValueError(f"blob {key}: a header of {header_nbytes} bytes in {size}")
    return record


def _row(value: tuple[Any, ...], blobs: tuple[BlobRecord, ...], sources: int) -> Row:
    blob, offset, length, nbytes, width, coded, blocks, leaves, base = value
    row = Row(
        _natural(blob),
        _natural(offset),
        _natural(length),
        _natural(nbytes),
        _natural(width),
        bool(_natural(coded, most=1)),
        tuple(_natural(n) for n in blocks or ()),
        addresses.from_text(leaves or ""),
        None if base is None else _pair(base),
    )
    count = addresses.block_count(row.nbytes)
    if row.blob >= len(blobs) or row.offset < blobs[row.blob].header_nbytes or row.offset + row.length > blobs[row.blob].size:
        raise ValueError(f"bytes {row.offset}+{row.length} are not in blob {row.blob}")
    if row.width not in (1, 2, 4, 8) or row.nbytes % row.width:
        raise ValueError(f"width {row.width} of {row.nbytes} bytes")
    if not row.coded and (row.length != row.nbytes or row.blocks or row.base):
        raise ValueError(f"{row.length} stored for {row.nbytes} raw bytes")
    if len(row.leaves) != (count * addresses.LEAF_NBYTES if count > 1 else 0):
        raise ValueError(f"{len(row.leaves)} bytes of leaves for {count} blocks")
    if row.coded and (len(row.blocks) != (count if count > 1 else 0) or (row.blocks and sum(row.blocks) != row.length)):
        raise ValueError(f"{len(row.blocks)} lengths for {count} blocks")
    if row.base is not None and row.base[0] > sources:
        raise ValueError(f"base in source {row.base[0]} of {sources}")
    return row
