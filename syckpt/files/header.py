"""The header of a standalone file: pure values <-> the bytes in front of the data (FORMAT.md, section 12). Free of torch.

One content has one header: a reader builds it again from the sealed document inside and compares, so that no bit of it is unchecked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

from syckpt.errors import IntegrityError, StateError
from syckpt.objects import address as addresses
from syckpt.objects import canonical
from syckpt.objects.checks import Fields
from syckpt.objects.dtypes import dtype
from syckpt.repo.signing import FILE

__all__ = ["MAX_HEADER_NBYTES", "Contents", "Record", "Signature", "parse", "render"]

MAX_HEADER_NBYTES = 100_000_000
"""Where readers of safetensors give up."""

_METADATA, _OURS = "__metadata__", "syckpt"

Signature = tuple[str, bytes]
"""Key id and signature."""


@dataclass(frozen=True)
class Record:
    """One tensor; `begin` counts from the first byte of data. `leaves`: its blocks' digests; none where there is at most one block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: bytes
    leaves: bytes
    begin: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype(self.dtype).itemsize

    @property
    def blocks(self) -> int:
        """How many blocks hold its bytes."""
        return addresses.block_count(self.nbytes)

    def digests_to(self, index: int, block: memoryview) -> bool:
        """Whether these are the bytes of block `index`."""
        leaf = addresses.leaf(block)
        if self.blocks > 1:
            size = addresses.LEAF_NBYTES
            return leaf == self.leaves[index * size : (index + 1) * size]
        return addresses.address(self.dtype, self.shape, leaf) == self.address


@dataclass(frozen=True)
class Contents:
    """The tensors of a file in the order of its data, and further names of some of them."""

    records: tuple[Record, ...]
    ties: tuple[tuple[str, str], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.records[-1].begin + self.records[-1].nbytes if self.records else 0

    def to_body(self) -> dict[str, Any]:
        def text(leaves: bytes) -> str | None:
            return addresses.to_text(leaves) if leaves else None

        return {
            "tensors": {
                "name": [record.name for record in self.records],
                "dtype": [record.dtype for record in self.records],
                "shape": [list(record.shape) for record in self.records],
                "address": [addresses.to_text(record.address) for record in self.records],
                "leaves": [text(record.leaves) for record in self.records],
            },
            "ties": [list(tie) for tie in sorted(self.ties)],
        }

    @property
    def message(self) -> bytes:
        """What is signed."""
        return FILE + canonical.dumps(self.to_body())


def _contents(body: dict[str, Any], *, where: str) -> Contents:
    fields = Fields(body, where=where)
    records: list[Record] = []
    begin = 0
    for name, kind, shape, address, leaves in zip(*fields.columns("tensors", "name", "dtype", "shape", "address", "leaves"), strict=True):
        if not isinstance(name, str) or not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            fields.fail(f"tensor {name!r} has the shape {shape!r}")
        row = Fields({"address": address, "leaves": leaves or ""}, where=f"{where}: tensor {name!r}")
        record = Record(
            name, kind, tuple(shape), row.parse("address", addresses.from_text), row.parse("leaves", addresses.from_text), begin
        )
        several = record.blocks > 1
        if len(record.leaves) != (record.blocks * addresses.LEAF_NBYTES if several else 0):
            fields.fail(f"tensor {name!r} has {len(record.leaves)} bytes of leaves for {record.blocks} blocks")
        if (several or not record.blocks) and addresses.address(record.dtype, record.shape, record.leaves) != record.address:
            fields.fail(f"the digests of tensor {name!r} are not those that its address binds")
        begin += record.nbytes
        records.append(record)
    names = {record.name for record in records}
    ties = fields.parse("ties", lambda rows: tuple((str(name), str(tied)) for name, tied in rows))
    if len({*names, *(name for name, _ in ties)}) != len(records) + len(ties) or not all(tied in names for _, tied in ties):
        fields.fail("a name stands twice, or a tie leads nowhere")
    return Contents(tuple(records), ties)


def _shown(record: Record) -> dict[str, Any]:
    """Return how a tensor stands in a safetensors header."""
    known = dtype(record.dtype).safetensors
    return {
        "dtype": known or "U8",
        "shape": list(record.shape) if known else [record.nbytes],
        "data_offsets": [record.begin, record.begin + record.nbytes],
    }


def render(contents: Contents, signature: Signature | None = None, *, nbytes: int | None = None) -> bytes:
    """Return the header behind the eight bytes of its length, padded to a multiple of eight, or to `nbytes` in all.

    Raises: StateError when it does not fit in there, or in what readers of safetensors take.
    """
    document, _ = canonical.seal(
        {
            "kind": "file",
            "version": 1,
            "content": contents.to_body(),
            "signature": None if signature is None else [signature[0], addresses.to_text(signature[1])],
        }
    )
    table = {_METADATA: {_OURS: document.decode("ascii")}, **{record.name: _shown(record) for record in contents.records}}
    text = json.dumps(table, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    size = -(-len(text) // 8) * 8 if nbytes is None else nbytes - 8
    if not len(text) <= size <= MAX_HEADER_NBYTES:
        raise StateError(f"a header of {len(text)} bytes does not fit in {min(size, MAX_HEADER_NBYTES)}: write fewer tensors in a file")
    return size.to_bytes(8, "little") + text.ljust(size)


def parse(head: bytes, *, where: str) -> tuple[Contents, Signature | None]:
    """Read a header, with its eight bytes of length. Raises: IntegrityError, FormatError (a newer version)."""
    try:
        table = canonical.loads(head[8:].rstrip(b" "))
        document = table[_METADATA][_OURS].encode("ascii")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise IntegrityError(f"{where}: its header is damaged, or no CheckpointWriter of syckpt made it: {exc}") from exc
    body, _ = canonical.unseal(document, key=f"{where}: header", kind="file")
    fields = Fields(body, where=f"{where}: header")
    contents = _contents(fields.mapping("content"), where=fields.where)
    signature: Signature | None = None
    if fields.raw("signature") is not None:
        signature = fields.parse("signature", lambda pair: (str(pair[0]), addresses.from_text(pair[1])))
    try:
        whole = render(contents, signature, nbytes=len(head)) == head
    except StateError:
        whole = False  # It is longer than what was found.
    if not whole:
        raise IntegrityError(f"{where}: its header is damaged: it is not the one that belongs to its content")
    return contents, signature
