"""Packing: one rank's state in memory -> a blob of new bytes, a manifest and locations (FORMAT.md, sections 5 to 8).

A tensor whose address is known already becomes a pointer. A new one is stored as a delta against its value at the last keyframe where
that is stored without a base itself, else on its own; so decoding takes one base at most. Raw values of bases are kept in an unlinked
scratch file, never synced: reading them back costs a tenth of decoding. Whatever is read there is checked before it is used.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from syckpt import codecs
from syckpt.errors import IntegrityError, NotFoundError, StateError, StoreError
from syckpt.objects import address as addresses
from syckpt.objects import nodes
from syckpt.objects.address import BLOCK_NBYTES, LEAF_NBYTES
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.dtypes import dtype
from syckpt.objects.locations import BlobRecord, Locations, Row, Source
from syckpt.objects.manifest import Entry, Manifest
from syckpt.repo import documents
from syckpt.repo.keys import blob_key, locations_key, manifest_key, mark_key
from syckpt.repo.reader import Reader
from syckpt.stores.base import Sink, Store

__all__ = ["Packed", "Packer", "Staged"]

_log = logging.getLogger("syckpt")
_MAX_HEADER_NBYTES = 100_000_000
_AHEAD_NBYTES = 16 * BLOCK_NBYTES


@dataclass(frozen=True)
class Staged:
    """A tensor, or a box of one, as it lies in the staging memory.

    `offset` in bytes; None for a tensor of this rank's structure that another rank stores. `local`: its values are this rank's alone.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    offset: int | None
    local: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.shape if self.box is None else self.box.sizes


@dataclass(frozen=True)
class Packed:
    """What a rank wrote: the manifest's seal, its figures in bytes and seconds, and, of several ranks, what others compare its items by."""

    manifest_seal: str
    locations: Locations
    stats: dict[str, Any]
    items: dict[str, str] = field(default_factory=dict)
    """`Manifest.structures`."""


@dataclass(frozen=True)
class _Home:
    """Rows that hold an address: whose, which."""

    source: Source
    row: int


@dataclass
class _Base:
    """A path's value without a base of its own: what deltas of this cycle are taken against."""

    entry: Entry
    home: _Home
    leaves: bytes
    scratch_offset: int | None


@dataclass
class _View:
    """What the packer knows when a commit is the parent: where its addresses are, and the bases of its cycle."""

    commit: str | None = None
    keyframe: str = ""
    age: int = 0
    loaded: bool = False
    """Learnt from the repository: until a save is based on it, nothing tells the collector that its bases are needed."""
    homes: dict[bytes, _Home] = field(default_factory=dict)
    bases: dict[Any, _Base] = field(default_factory=dict)
    values: dict[Any, bytes] = field(default_factory=dict)
    """The addresses of the boxes in that commit, at least of those that are trainable."""


class Packer:
    """Packs successive saves of one rank. Not thread-safe; uses `threads` threads of its own for hashing and encoding."""

    def __init__(self, reader: Reader, *, rank: int, world_size: int, compression: str, keyframe_every: int, threads: int) -> None:
        self._reader = reader
        self._store = reader.repository.store
        self._rank = rank
        self._world_size = world_size
        self._compression = compression
        self._keyframe_every = keyframe_every
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="syckpt-pack")
        self._local = _Local()
        self._scratch = _Scratch()
        self._view = _View()
        self._next: _View | None = None

    def pack(
        self,
        commit: str,
        *,
        parent: Commit | None,
        staged: Sequence[Staged],
        memory: memoryview,
        items: dict[str, Any],
        rng: Any,
        layouts: dict[str, Any] | None = None,
        sharding: dict[str, Any] | None = None,
        sent: dict[str, list[str]] | None = None,
        trainable: Sequence[int] = (),
        afresh: bool = False,
    ) -> Packed:
        """Write the blob, the manifest and the locations of `commit`, durably; nothing refers to them yet.

        `memory` must stay unchanged until the return. `trainable` numbers the tensors of which it is counted how many have the bits that
        they had in the parent. `afresh`: point to no bytes that are there already, some of which are damaged; nor is that done where a
        commit whose rows would be pointed to is marked so. Follow with `published()` or `failed()`.
        """
        started = time.perf_counter()
        view = self._view_of(parent)
        if parent is not None and view.loaded and self._lost_any(parent.id, view.keyframe):
            # The intent names both, so the collector spares them from here on.
            view = self._view = self._load_view(parent)
        if afresh or self._is_damaged(view):
            if view.homes:
                _log.warning("commit %s, or what it points to, is damaged: this save stores everything anew", view.commit)
            self._scratch.clear()
            view = self._view = _View(view.commit, values=view.values)
        leaves = self._hash(staged, memory)
        entries = tuple(
            Entry(s.path, s.dtype, s.shape, s.box, b"" if s.offset is None else addresses.address(s.dtype, s.sizes, leaf))
            for s, leaf in zip(staged, leaves, strict=True)
        )
        hashed = time.perf_counter()
        values = {_part(entries[index]): entries[index].address for index in trainable}
        unchanged = sum(view.values.get(part) == address for part, address in values.items())
        begins_cycle = view.commit is None or not view.keyframe or view.age + 1 >= self._keyframe_every
        fresh = _View(commit, commit, 0) if begins_cycle else _View(commit, view.keyframe, view.age + 1, bases=dict(view.bases))
        fresh.values = values
        if begins_cycle:
            self._scratch.clear()
        table = _Table(commit, self._rank)
        new: dict[bytes, int] = {}
        for index, entry in enumerate(entries):
            if entry.address and entry.address not in view.homes:
                new.setdefault(entry.address, index)
        raw = [memory[s.offset : s.offset + e.nbytes] if s.offset is not None else memory[:0] for s, e in zip(staged, entries, strict=True)]
        blob = self._write_blob(commit, list(new.values()), entries, leaves, raw, table, fresh)
        for entry, leaf in zip(entries, leaves, strict=True):
            if not entry.address:
                continue
            home = view.homes.get(entry.address) or table.homes[entry.address]
            fresh.homes.setdefault(entry.address, home)
            if begins_cycle and _part(entry) not in fresh.bases and self._is_self_contained(home, table):
                fresh.bases[_part(entry)] = _Base(entry, home, leaf, None)
        if self._compression == "none":
            fresh.bases.clear()  # Nothing is taken against them, so nothing may keep their bytes.
        for base in fresh.bases.values():
            fresh.homes.setdefault(base.entry.address, base.home)
        written = time.perf_counter()

        local = frozenset(index for index, s in enumerate(staged) if s.local)
        manifest = Manifest(self._rank, self._world_size, entries, items, rng, local, layouts or {}, sharding or {}, sent or {})
        seal = documents.write(self._store, manifest_key(commit, self._rank), manifest.to_body())
        locations = table.finish(manifest, seal, blob, fresh)
        documents.write(self._store, locations_key(commit, self._rank, 1), locations.to_body())
        self._reader.remember(locations)
        self._next = fresh
        staged_nbytes = sum(e.nbytes for e in entries if e.address)
        new_nbytes = sum(entries[i].nbytes for i in new.values())
        stored_nbytes = blob.size if blob else 0
        metadata = sum(self._store.size(key) or 0 for key in (manifest_key(commit, self._rank), locations_key(commit, self._rank, 1)))
        stats = {
            "staged_bytes": staged_nbytes,
            "deduplicated_bytes": staged_nbytes - new_nbytes,
            "encoded_bytes": sum(row.length for row in table.rows),
            "written_bytes": stored_nbytes + metadata,
            "ratio": staged_nbytes / max(1, stored_nbytes + metadata),
            "trainable": len(values),
            "unchanged_trainable": unchanged,
            "keyframe": begins_cycle,
            "hash_s": hashed - started,
            "encode_s": written - hashed,
            "metadata_s": time.perf_counter() - written,
        }
        return Packed(seal, locations, stats, manifest.structures() if self._world_size > 1 else {})

    def points_into(self, parent: Commit | None) -> tuple[str, ...]:
        """Return the commits that a save behind `parent` may point into: for its intent."""
        view = self._view_of(parent)
        return tuple(dict.fromkeys(commit for commit in (view.commit, view.keyframe) if commit))

    def published(self) -> None:
        """The packed commit is visible: the next save may point into it."""
        if self._next is not None:
            self._view, self._next = self._next, None

    def failed(self) -> None:
        """The packed commit will never be visible: nothing may point into it. Bases are read from the repository again."""
        self._next = None
        self._view = _View()
        self._scratch.clear()

    def close(self) -> None:
        """Stop the threads and free the scratch file."""
        self._pool.shutdown()
        self._scratch.close()

    # -- what is known ------------------------------------------------------------------------------------------------

    def _view_of(self, parent: Commit | None) -> _View:
        if parent is None:
            if self._view.commit is not None:
                self._scratch.clear()
                self._view = _View()
        elif self._view.commit != parent.id:
            self._scratch.clear()
            self._view = self._load_view(parent)
        return self._view

    def _load_view(self, parent: Commit) -> _View:
        """Learn from the repository what a parent holds: after a resume, a failed save, or a jump in history."""
        view = _View(parent.id, loaded=True)
        if self._rank not in dict(parent.manifests) or self._lost_any(parent.id):
            return view
        try:
            snapshot = self._reader.snapshot(parent, self._rank)
        except (NotFoundError, IntegrityError) as exc:
            _log.log(logging.INFO if isinstance(exc, NotFoundError) else logging.ERROR, "%s; this save points to nothing of it", exc)
            return view
        self._learn(view, snapshot.locations, snapshot.manifest.distinct())
        view.values = {_part(entry): entry.address for entry in snapshot.manifest.entries if entry.address}
        keyframe, age = snapshot.locations.keyframe
        try:
            key_commit = self._reader.repository.read_commit(keyframe)
            if key_commit.dropped:
                return view
            base = snapshot if keyframe == parent.id else self._reader.snapshot(key_commit, self._rank)
        except (NotFoundError, IntegrityError):
            return view  # The keyframe is gone: this save begins a new cycle.
        view.keyframe, view.age = keyframe, age
        for source in (base, snapshot):
            for _, entry, place in source.stored():
                if place.base is None and _part(entry) not in view.bases:
                    home = view.homes.setdefault(entry.address, _Home(place.owner, place.number))
                    view.bases[_part(entry)] = _Base(entry, home, place.row.leaves, None)
        return view

    def _lost_any(self, *commits: str) -> bool:
        return any("dropped" in self._reader.repository.marks(commit) for commit in commits if commit)

    def _is_damaged(self, view: _View) -> bool:
        """Whether a verification, or a resume, has marked the commit of a view, or one whose rows it would point to."""
        homes = [*view.homes.values(), *(base.home for base in view.bases.values())]
        commits = {view.commit, *(home.source[0] for home in homes)}
        return any(self._store.size(mark_key(commit, "damaged")) is not None for commit in commits if commit)

    @staticmethod
    def _learn(view: _View, locations: Locations, distinct: list[bytes]) -> None:
        for digest, (source, row) in zip(distinct, locations.at, strict=True):
            view.homes.setdefault(digest, _Home(locations.source(source), row))

    def _is_self_contained(self, home: _Home, table: _Table) -> bool:
        row = table.rows[home.row] if home.source == table.own else self._reader.table(home.source).row(home.row)
        return row.base is None

    # -- hashing ------------------------------------------------------------------------------------------------------

    def _hash(self, staged: Sequence[Staged], memory: memoryview) -> list[bytes]:
        """Return each tensor's leaves, concatenated."""
        blocks = [block for s in staged if s.offset is not None for block in _blocks(memory, s.offset, _nbytes(s))]
        digests: Iterator[bytes] = iter([digest for group in self._pool.map(_leaves, _groups(blocks)) for digest in group])
        counts = [0 if s.offset is None else addresses.block_count(_nbytes(s)) for s in staged]
        return [b"".join(next(digests) for _ in range(count)) for count in counts]

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write_blob(
        self,
        commit: str,
        new: list[int],
        entries: Sequence[Entry],
        leaves: Sequence[bytes],
        raw: Sequence[memoryview],
        table: _Table,
        view: _View,
    ) -> BlobRecord | None:
        """Store the new tensors, by falling element size so that raw ones lie aligned; fill `table` and the bases of `view`."""
        if not new:
            return None
        order = sorted(new, key=lambda i: -dtype(entries[i].dtype).itemsize)
        names = _unique_names([entries[i] for i in order])
        reserved = _header_bound(names, [entries[i] for i in order])
        if reserved > _MAX_HEADER_NBYTES:
            raise StateError(
                f"{len(new)} new tensors need a header of {reserved} bytes, more than {_MAX_HEADER_NBYTES}: register fewer tensors"
            )
        _check_room(self._store, reserved + sum(_most_nbytes(entries[i]) for i in new))
        key = blob_key(commit, self._rank)
        header: dict[str, Any] = {}
        with self._store.sink(key) as sink:
            sink.write([bytes(reserved)])
            jobs = [_Job(entries[i], raw[i], leaves[i], _base_for(entries[i], view)) for i in order]
            for name, (job, pieces) in zip(names, self._encode_ahead(jobs), strict=True):
                row = _store_tensor(job, pieces, sink, table)
                home = table.add(job.entry.address, row)
                if row.base is None and job.base is None:
                    scratch = self._scratch.append(job.raw) if self._compression == "fast" else None
                    view.bases[_part(job.entry)] = _Base(job.entry, home, job.leaves, scratch)
                header[name] = _header_entry(job.entry, row, reserved)
            text = json.dumps(header, separators=(",", ":")).encode()
            head = (reserved - 8).to_bytes(8, "little") + text.ljust(reserved - 8)
            if len(head) != reserved:
                raise StateError(f"{key}: the header of {len(text)} bytes outgrew the {reserved} reserved for it")
            sink.patch(0, head)
            size = sink.close()
        found = self._store.size(key)
        if found != size:
            raise StoreError(f"{key}: the store holds {found} bytes of the {size} that were written")
        return BlobRecord(key, size, reserved, addresses.leaf(head))

    def _encode_ahead(self, jobs: Sequence[_Job]) -> Iterator[tuple[_Job, list[bytes] | None]]:
        """Yield each job with its encoded blocks (None: not encoded), while the pool works a few megabytes ahead."""
        if self._compression == "none":
            yield from ((job, None) for job in jobs)
            return
        ahead: deque[tuple[_Job, list[Future[bytes]]]] = deque()
        nbytes = 0
        for job in jobs:
            blocks = _blocks(job.raw, 0, len(job.raw))
            ahead.append((job, [self._pool.submit(self._encode_block, job, block, index) for index, block in enumerate(blocks)]))
            nbytes += len(job.raw)
            while nbytes > _AHEAD_NBYTES:
                done, futures = ahead.popleft()
                nbytes -= len(done.raw)
                yield self._encoded(done, futures)
        for job, futures in ahead:
            yield self._encoded(job, futures)

    def _encoded(self, job: _Job, futures: Sequence[Future[bytes]]) -> tuple[_Job, list[bytes]]:
        """Return a job's blocks; where its base turns out to be damaged, the tensor is stored on its own, and is the next base."""
        try:
            return job, [future.result() for future in futures]
        except (IntegrityError, NotFoundError) as exc:
            if job.base is None:
                raise
            _log.error("%s; %s is stored without it", exc, nodes.format_path(job.entry.path))
            alone = replace(job, base=None)
            return alone, [self._encode_block(alone, block, index) for index, block in enumerate(_blocks(job.raw, 0, len(job.raw)))]

    def _encode_block(self, job: _Job, block: memoryview, index: int) -> bytes:
        base = None if job.base is None else self._base_block(job.base, index, len(block))
        # The pieces alias the workspace: one copy makes room for the next block.
        pieces = codecs.encode_block(block, width=job.entry.kind.width, base=base, workspace=self._local.workspace)
        return b"".join(pieces)  # type: ignore[arg-type]  # numpy arrays are buffers; typing knows it from Python 3.12 on

    def _base_block(self, base: _Base, index: int, nbytes: int) -> memoryview | bytes:
        """Return a base's raw block, verified: from the scratch file, else decoded from the repository."""
        if base.scratch_offset is not None:
            block = self._scratch.read(base.scratch_offset + index * BLOCK_NBYTES, nbytes)
            if addresses.leaf(block) == base.leaves[index * LEAF_NBYTES : (index + 1) * LEAF_NBYTES]:
                return block
        place = self._reader.place_of(base.home.source, base.home.row)
        return self._reader.read_block(base.entry, place, index)


class _Local(threading.local):
    """Each pool thread's scratch memory."""

    def __init__(self) -> None:
        self.workspace = codecs.Workspace()


@dataclass(frozen=True)
class _Job:
    """A tensor to store: its raw bytes and leaves, and the base to try."""

    entry: Entry
    raw: memoryview
    leaves: bytes
    base: _Base | None


def _most_nbytes(entry: Entry) -> int:
    """Return what a new tensor takes at most: its bytes as they are, and the bound of FORMAT.md on its metadata."""
    return entry.nbytes + 100 + 24 * addresses.block_count(entry.nbytes)


def _check_room(store: Store, needed: int) -> None:
    """Refuse a save that may not fit, before it writes anything. Raises: StoreError."""
    free = store.free_nbytes()
    if free is not None and free < needed:
        raise StoreError(
            f"{store.describe()}: {free} bytes are free on its file system, and this save may take up to {needed}: free space there"
            " (`syckpt gc`; `syckpt retain`, which needs some 10 kB itself), or save fewer tensors"
        )


def _base_for(entry: Entry, view: _View) -> _Base | None:
    base = view.bases.get(_part(entry))
    return base if base is not None and (base.entry.dtype, base.entry.sizes) == (entry.dtype, entry.sizes) else None


def _store_tensor(job: _Job, pieces: list[bytes] | None, sink: Sink, table: _Table) -> Row:
    """Write one tensor, encoded or raw, whichever is smaller, and return its row."""
    offset, nbytes, width = sink.tell(), len(job.raw), job.entry.kind.width
    leaves = job.leaves if len(job.leaves) > LEAF_NBYTES else b""
    if pieces is None or sum(map(len, pieces)) >= nbytes:
        sink.write([job.raw])
        return Row(0, offset, nbytes, nbytes, width, False, (), leaves, None)
    sink.write(pieces)
    base = None
    if job.base is not None and any(codecs.needs_base(piece) for piece in pieces):
        base = (table.source(job.base.home.source), job.base.home.row)
    lengths = tuple(map(len, pieces))
    return Row(0, offset, sum(lengths), nbytes, width, True, lengths if len(lengths) > 1 else (), leaves, base)


class _Table:
    """The rows of a commit under construction, and the other rows that they and its manifest point to."""

    def __init__(self, commit: str, rank: int) -> None:
        self.own: Source = (commit, rank)
        self.rows: list[Row] = []
        self.homes: dict[bytes, _Home] = {}
        self._sources: dict[Source, int] = {self.own: 0}

    def add(self, digest: bytes, row: Row) -> _Home:
        home = self.homes[digest] = _Home(self.own, len(self.rows))
        self.rows.append(row)
        return home

    def source(self, source: Source) -> int:
        """Return the index by which these locations call another's rows."""
        return self._sources.setdefault(source, len(self._sources))

    def finish(self, manifest: Manifest, seal: str, blob: BlobRecord | None, view: _View) -> Locations:
        homes = [view.homes[digest] for digest in manifest.distinct()]
        at = tuple((self.source(home.source), home.row) for home in homes)
        seen = {*at, *(row.base for row in self.rows)}
        known = dict.fromkeys((self.source(base.home.source), base.home.row) for base in view.bases.values())
        bases = tuple(base for base in known if base[0] != 0 and base not in seen)
        return Locations(
            commit=self.own[0],
            rank=self.own[1],
            revision=1,
            manifest_seal=seal,
            keyframe=(view.keyframe, view.age),
            blobs=(blob,) if blob else (),
            sources=tuple(self._sources)[1:],
            at=at,
            rows=tuple(self.rows),
            bases=bases,
        )


class _Scratch:
    """Raw bytes of bases in an unlinked file: page cache that the kernel may write back, gone with the process.

    Running out of room only costs time: the base is decoded from the repository instead.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._size = 0
        self._full = False

    def append(self, raw: memoryview) -> int | None:
        """Keep a tensor's bytes; return their offset, or None when there is no room."""
        if self._full:
            return None
        try:
            if self._fd is None:
                self._fd, path = tempfile.mkstemp(prefix="syckpt-scratch-")
                os.unlink(path)
            offset, done = self._size, 0
            while done < len(raw):
                done += os.pwrite(self._fd, raw[done:], offset + done)
        except OSError:
            self._full = True
            return None
        self._size = offset + len(raw)
        return offset

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes as they are now; the caller checks them."""
        if self._fd is None:
            return b""
        try:
            return os.pread(self._fd, nbytes, offset)
        except OSError:
            return b""

    def clear(self) -> None:
        """Forget everything: a new cycle begins."""
        self.close()
        self._size, self._full = 0, False

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _part(entry: Entry) -> Any:
    """What successive values of one box are known by."""
    # A key may be a dict, which cannot be hashed; a tuple is no other key.
    return tuple((key["key"],) if isinstance(key, dict) else key for key in entry.path), entry.box


def _nbytes(staged: Staged) -> int:
    total = dtype(staged.dtype).itemsize
    for size in staged.sizes:
        total *= size
    return total


def _blocks(memory: memoryview, offset: int, nbytes: int) -> list[memoryview]:
    return [memory[begin : min(begin + BLOCK_NBYTES, offset + nbytes)] for begin in range(offset, offset + nbytes, BLOCK_NBYTES)]


def _groups(blocks: list[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the blocks into tasks of about a block's bytes: handing a thread 4 bytes costs more than hashing them."""
    group: list[memoryview] = []
    nbytes = 0
    for block in blocks:
        group.append(block)
        nbytes += len(block)
        if nbytes >= BLOCK_NBYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _leaves(blocks: list[memoryview]) -> list[bytes]:
    return [addresses.leaf(block) for block in blocks]


def _unique_names(entries: Sequence[Entry]) -> list[str]:
    """Return names for people: the joined path, with a number where two paths join to the same text."""
    names: dict[str, None] = {}
    for entry in entries:
        name = base = ".".join(key["key"] if isinstance(key, dict) else str(key) for key in entry.path)
        count = 1
        while name in names or name == "__metadata__":
            count += 1
            name = f"{base}#{count}"
        names[name] = None
    return list(names)


def _header_entry(entry: Entry, row: Row, reserved: int) -> dict[str, Any]:
    begin = row.offset - reserved
    kind, shape = entry.kind.safetensors, list(entry.sizes)
    if row.coded or kind is None:
        kind, shape = "U8", [row.length]
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, begin + row.length]}


def _header_bound(names: list[str], entries: Sequence[Entry]) -> int:
    """Return the bytes to reserve for length and header, whatever the encoding: a multiple of 64, so that data begins aligned."""
    digits = len(str(sum(entry.nbytes + 1 + addresses.block_count(entry.nbytes) for entry in entries)))
    fixed = len('"":{"dtype":"F8_E4M3","shape":[],"data_offsets":[,]},') + 2 * digits
    text = 2 + sum(len(json.dumps(n)) + fixed + max(digits, len(json.dumps(list(e.sizes)))) for n, e in zip(names, entries, strict=True))
    return -(-(8 + text) // 64) * 64
