"""Verified reading of tensors: rows -> blocks -> the caller's memory.

Each block is decoded and checked in a buffer that fits the cache, and only then copied: the target holds old or exact bytes, never
wrong ones. Blocks are independent, so a pool of threads reads them; hashing, zstd and the copies release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from syckpt import codecs
from syckpt.errors import IntegrityError, NotFoundError
from syckpt.objects import address as addresses
from syckpt.objects import nodes
from syckpt.objects.address import BLOCK_NBYTES, LEAF_NBYTES
from syckpt.objects.commit import Commit
from syckpt.objects.locations import BlobRecord, Locations, Row, Source
from syckpt.objects.manifest import Alike, Entry, Manifest
from syckpt.repo.keys import locations_key
from syckpt.repo.repository import Repository, dropped_error
from syckpt.repo.signing import Trusted, require_signed

__all__ = ["Place", "Reader", "Snapshot"]

_MAX_TABLES = 64
_MAX_LISTED = 16  # commits


class Place(NamedTuple):
    """Where a tensor's bytes are: a row, the blob that it is in, and the place of its base."""

    blob: BlobRecord
    row: Row
    base: Place | None
    owner: Source
    """Commit and rank whose rows these are."""
    number: int
    """Which of them."""

    def block_range(self, index: int) -> tuple[int, int]:
        """Return offset (in the file) and stored length of block `index`."""
        row = self.row
        if not row.coded:
            begin = index * BLOCK_NBYTES
            return row.offset + begin, min(BLOCK_NBYTES, row.nbytes - begin)
        if not row.blocks:
            return row.offset, row.length
        return row.offset + sum(row.blocks[:index]), row.blocks[index]

    def leaf(self, index: int) -> bytes | None:
        """Return the recorded digest of block `index`; None for a tensor of one block, which its address binds."""
        return self.row.leaves[index * LEAF_NBYTES : (index + 1) * LEAF_NBYTES] or None


@dataclass(frozen=True)
class Snapshot:
    """A commit's content on one rank, with the places of its entries.

    `places` is aligned with `manifest.entries`; None where other ranks store the values.
    """

    commit: Commit
    manifest: Manifest
    locations: Locations
    places: tuple[Place | None, ...]

    def stored(self) -> Iterator[tuple[int, Entry, Place]]:
        """Yield index, entry and place of everything that this rank stores."""
        for index, (entry, place) in enumerate(zip(self.manifest.entries, self.places, strict=True)):
            if place is not None:
                yield index, entry, place


class _Buffers(threading.local):
    """A thread's reused memory: faulting fresh pages for every block costs more than hashing it."""

    def __init__(self) -> None:
        self.stored = bytearray(BLOCK_NBYTES + 4096)
        self.block = bytearray(BLOCK_NBYTES)
        self.base = bytearray(BLOCK_NBYTES)


class _BlobMissing(Exception):
    """A blob that locations name is not there: they may have been replaced since they were read."""


class Reader:
    """Reads tensors of a repository. Caches locations; safe to use from several threads.

    `trusted`: a commit must be signed by one of these keys, which is checked before its manifests are read.
    """

    def __init__(self, repository: Repository, *, threads: int | None = None, trusted: Trusted | None = None) -> None:
        self.repository = repository
        self.trusted = trusted
        self._signed: set[str] = set()
        """Seals of commits whose signature was checked."""
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._tables: OrderedDict[Source, Locations] = OrderedDict()
        self._listed: dict[str, dict[int, str]] = {}
        """By commit and rank the keys of the newest locations, as of the last listing."""
        self._buffers = _Buffers()
        self.bytes_read = 0
        """Stored bytes asked of the byte store so far."""
        self.damage_met = 0
        """How many reads of a commit have failed so far because something was not what was saved."""
        self._lock = threading.Lock()

    def check_signed(self, commit: Commit) -> None:
        """Check, once, that one of the trusted keys signed a commit, where there are such. Raises: as `signing.require_signed`."""
        if self.trusted is not None and commit.seal not in self._signed:
            require_signed(self.repository, commit, self.trusted)
            self._signed.add(commit.seal)

    def snapshot(self, commit: Commit, rank: int = 0, alike: Alike | None = None) -> Snapshot:
        """Return a rank's manifest (`alike`: as `Repository.read_manifest`) and the places of its entries.

        Raises: IntegrityError, NotFoundError, FormatError.
        """
        self.check_signed(commit)
        manifest = self.repository.read_manifest(commit, rank, alike)
        with self.reading(commit):
            return self._placed(commit, manifest, self.table((commit.id, rank)))

    @contextmanager
    def reading(self, commit: Commit) -> Iterator[None]:
        """Read of a commit in this: what is missing since it was dropped meanwhile is a NotFoundError that says so."""
        try:
            yield
        except IntegrityError:
            if "dropped" in self.repository.marks(commit.id):
                raise dropped_error(commit.id) from None
            self.damage_met += 1
            raise

    def _placed(self, commit: Commit, manifest: Manifest, locations: Locations) -> Snapshot:
        rank = manifest.rank
        where = locations_key(commit.id, rank, locations.revision)
        distinct = manifest.distinct()
        if locations.manifest_seal != commit.manifests[rank][1] or len(locations.at) != len(distinct):
            raise IntegrityError(f"{where}: belongs to another manifest")
        tables = {source: self._owner(locations, source) for source in {source for source, _ in locations.at}}
        by_address = {digest: self._place(*tables[source], row) for digest, (source, row) in zip(distinct, locations.at, strict=True)}
        places = tuple([by_address.get(entry.address) for entry in manifest.entries])
        for entry, place in zip(manifest.entries, places, strict=True):
            if place is None:
                continue
            row, nbytes = place.row, entry.nbytes
            if nbytes != row.nbytes or (row.coded and row.width != entry.kind.width):
                raise IntegrityError(
                    f"{where}: {nodes.format_path(entry.path)} has {row.nbytes} bytes of width {row.width}; its manifest says {nbytes}"
                )
        return Snapshot(commit, manifest, locations, places)

    def place(self, locations: Locations, source: int, row: int) -> Place:
        """Return the place that `(source, row)` means in these locations. Raises: IntegrityError."""
        return self._place(*self._owner(locations, source), row)

    def _owner(self, locations: Locations, source: int) -> tuple[Locations, Source]:
        """Return the locations that a source index means, and whose they are."""
        return (locations if source == 0 else self.table(locations.source(source))), locations.source(source)

    def _place(self, table: Locations, owner: Source, number: int) -> Place:
        row = table.row(number)
        base = None
        if row.base is not None:
            source, below = row.base
            of_base, base_owner = self._owner(table, source)
            found = of_base.row(below)
            if found.base is not None or found.nbytes != row.nbytes:
                raise IntegrityError(f"locations of {table.commit}: the base of row {number} is a delta or of another size")
            base = Place(of_base.blobs[found.blob], found, None, base_owner, below)
        return Place(table.blobs[row.blob], row, base, owner, number)

    def table(self, source: Source) -> Locations:
        """Return the locations of `(commit id, rank)`. Raises: IntegrityError."""
        with self._lock:
            table = self._tables.get(source)
        if table is None:
            table = self.repository.read_locations(*source, listed=self._listed_key(source))
        self.remember(table)
        return table

    def _listed_key(self, source: Source) -> str | None:
        """Return the key of locations by a listing that may be old: a directory of thousands of ranks is not listed for each of them."""
        commit, rank = source
        with self._lock:
            listed = self._listed.get(commit)
        if listed is None:
            listed = self.repository.list_locations(commit)
            with self._lock:
                if len(self._listed) >= _MAX_LISTED:
                    self._listed.clear()
                self._listed[commit] = listed
        return listed.get(rank)

    def place_of(self, source: Source, row: int) -> Place:
        """Return the place of a row of `(commit id, rank)`. Raises: IntegrityError."""
        return self.place(self.table(source), 0, row)

    def forget(self, source: Source) -> None:
        """Drop the locations of `(commit id, rank)` from the cache: a later revision may be there."""
        with self._lock:
            self._tables.pop(source, None)
            self._listed.pop(source[0], None)

    def moved(self, place: Place) -> Place | None:
        """Return where a place's bytes are by the newest locations; None if those say nothing new. Raises: IntegrityError."""
        self.forget(place.owner)
        if place.base is not None:
            self.forget(place.base.owner)
        found = self.place_of(place.owner, place.number)
        return None if found == place else found

    def remember(self, locations: Locations) -> None:
        """Put locations into the cache, which keeps the most recently used ones: a long run would fill the memory."""
        with self._lock:
            self._tables[locations.commit, locations.rank] = locations
            self._tables.move_to_end((locations.commit, locations.rank))
            if len(self._tables) > _MAX_TABLES:
                self._tables.popitem(last=False)

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Run tasks in the pool; each may read one block. Raises: what the first one failed with."""
        if len(work) <= 1 or self._threads == 1:
            for task in work:
                task()
            return
        with ThreadPoolExecutor(self._threads, thread_name_prefix="syckpt-read") as pool:
            futures = [pool.submit(_run, chunk) for chunk in _chunks(work, self._threads * 8)]
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
            for future in pending:
                future.cancel()
            for future in done:
                future.result()

    def tasks(self, entry: Entry, place: Place, out: memoryview) -> list[Callable[[], None]]:
        """Return what `run` has to do to fill a byte buffer (of `entry.nbytes`) with an entry's verified raw bytes."""
        self.check_leaves(entry, place)
        return [self._task(entry, place, index, out) for index in range(addresses.block_count(entry.nbytes))]

    def read(self, requests: Sequence[tuple[Entry, Place, memoryview]]) -> None:
        """Fill each request's byte buffer.

        Raises: IntegrityError naming file, tensor and block; what was filled by then holds exact bytes.
        """
        self.run([task for request in requests for task in self.tasks(*request)])

    def check(self, entry: Entry, place: Place) -> None:
        """Read and verify a tensor, keeping nothing. Raises: IntegrityError."""
        self.check_leaves(entry, place)
        for index in range(addresses.block_count(entry.nbytes)):
            self.read_block(entry, place, index)

    def _task(self, entry: Entry, place: Place, index: int, out: memoryview) -> Callable[[], None]:
        begin = index * BLOCK_NBYTES

        def run() -> None:
            block = self.read_block(entry, place, index)
            out[begin : begin + len(block)] = block

        return run

    def read_block(self, entry: Entry, place: Place, index: int) -> memoryview:
        """Return the verified raw bytes of one block, in this thread's buffer: valid until its next call."""
        while True:
            try:
                return self._read_block(entry, place, index)
            except _BlobMissing as exc:
                # Repack publishes where the bytes are now before it deletes a blob.
                newer = self.moved(place)
                if newer is None:
                    raise IntegrityError(f"{exc}; run `syckpt verify`") from exc
                place = newer

    def _read_block(self, entry: Entry, place: Place, index: int) -> memoryview:
        out = memoryview(self._buffers.block)[: min(BLOCK_NBYTES, entry.nbytes - index * BLOCK_NBYTES)]
        base = None
        if place.base is not None:
            base = memoryview(self._buffers.base)[: len(out)]
            self._decode(entry, place.base, index, out=base, base=None)
        self._decode(entry, place, index, out=out, base=base)
        digest = addresses.leaf(out)
        recorded = place.leaf(index)
        good = digest == recorded if recorded else addresses.address(entry.dtype, entry.sizes, digest) == entry.address
        if not good:
            raise IntegrityError(f"{_describe(entry, place, index)}: its bytes are not those that were saved; run `syckpt verify`")
        return out

    def check_leaves(self, entry: Entry, place: Place) -> None:
        """Check that the digests of an entry's blocks lead to its address, before any is believed. Raises: IntegrityError."""
        # One block: the address is checked with the block itself.
        many = addresses.block_count(entry.nbytes) != 1
        if many and addresses.address(entry.dtype, entry.sizes, place.row.leaves) != entry.address:
            raise IntegrityError(f"{_describe(entry, place, 0)}: the digests of its blocks do not lead to its address")

    def _decode(self, entry: Entry, place: Place, index: int, *, out: memoryview, base: memoryview | None) -> None:
        offset, length = place.block_range(index)
        with self._lock:
            self.bytes_read += length
        if not place.row.coded:
            self._readinto(place, out, offset)
            return
        if length > len(out) + 64:
            raise IntegrityError(f"{_describe(entry, place, index)}: {length} stored bytes for {len(out)}")
        stored = memoryview(self._buffers.stored)[:length]
        self._readinto(place, stored, offset)
        try:
            codecs.decode_block(stored, out=out, width=place.row.width, base=base)
        except IntegrityError as exc:
            raise IntegrityError(f"{_describe(entry, place, index)} at byte {offset}: {exc}; run `syckpt verify`") from exc

    def _readinto(self, place: Place, buffer: memoryview, offset: int) -> None:
        try:
            self.repository.store.readinto(place.blob.key, buffer, offset=offset)
        except NotFoundError as exc:
            raise _BlobMissing(f"{place.blob.key}: missing, though the locations of {place.owner[0]} name it") from exc


def _run(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def _chunks(work: Sequence[Callable[[], None]], count: int) -> Iterator[Sequence[Callable[[], None]]]:
    size = max(1, -(-len(work) // count))
    for begin in range(0, len(work), size):
        yield work[begin : begin + size]


def _describe(entry: Entry, place: Place, index: int) -> str:
    base = f" (its base is in {place.base.blob.key})" if place.base else ""
    return f"{place.blob.key}: tensor {nodes.format_path(entry.path)}, block {index}{base}"
