"""Repacking: the bytes of dropped commits go, but for the rows that kept commits lead to (FORMAT.md, section 13).

A blob stays as it is while at most 30 % of it is dead. Beyond that its needed rows are copied, unchanged, into a new blob; a new revision
of the locations says where they are now, and only then the old blob goes. Rows keep their numbers, commits and manifests are not touched.
A crash between any two steps leaves every row where the newest revision says, and at most files that the next sweep removes.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from syckpt.errors import ConflictError, IntegrityError, NotFoundError
from syckpt.objects import address as addresses
from syckpt.objects.locations import BlobRecord, Locations, Row
from syckpt.repo import documents
from syckpt.repo.keys import OF_RANK, commit_prefix, layouts_key, locations_key, moved_blob_key
from syckpt.repo.repository import Repository
from syckpt.repo.survey import Rows, Survey, numbers_in

__all__ = ["DEAD_SHARE", "Repacking", "Rewrite", "Sweep", "plan_sweep", "plan_sweeps", "repack", "run_sweeps", "sweep"]

DEAD_SHARE = 0.30
"""How much of a blob may be dead before what is needed of it moves."""
_log = logging.getLogger("syckpt")
_CHUNK_NBYTES = 8 << 20


@dataclass(frozen=True)
class Rewrite:
    """A new revision of a dropped commit's locations: which of its rows move into a new blob, and which blobs go after it."""

    commit: str
    rank: int
    revision: int
    rows: tuple[int, ...]
    moved_nbytes: int
    blobs: tuple[tuple[str, int], ...]
    """Keys and sizes."""


@dataclass(frozen=True)
class Sweep:
    """What is to be removed of a dropped commit: keys with their sizes, and what is rewritten. `unknown` keys are left alone."""

    commit: str
    deletes: tuple[tuple[str, int], ...]
    rewrites: tuple[Rewrite, ...]
    unknown: tuple[str, ...]
    kept_nbytes: int
    """Bytes of the commit's blobs that stay, for other commits."""

    @property
    def freed_nbytes(self) -> int:
        """Stored bytes that go, less those that are written anew."""
        rewritten = sum(size for rewrite in self.rewrites for _, size in rewrite.blobs)
        return sum(size for _, size in self.deletes) + rewritten - self.moved_nbytes

    @property
    def moved_nbytes(self) -> int:
        """Stored bytes that are copied into new blobs."""
        return sum(rewrite.moved_nbytes for rewrite in self.rewrites)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.deletes and not self.rewrites


@dataclass(frozen=True)
class Repacking:
    """What `repack` found, and, unless `dry_run`, did. `skipped`: commits that could not be repacked, and why."""

    dry_run: bool
    sweeps: tuple[Sweep, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def freed_nbytes(self) -> int:
        """Stored bytes that go, less those that are written anew."""
        return sum(found.freed_nbytes for found in self.sweeps)

    @property
    def moved_nbytes(self) -> int:
        """Stored bytes that are copied into new blobs."""
        return sum(found.moved_nbytes for found in self.sweeps)


def repack(
    repository: Repository, *, dry_run: bool = False, dead_share: float = DEAD_SHARE, progress: Callable[[int, int], None] | None = None
) -> Repacking:
    """Rewrite every blob more than `dead_share` of which nothing leads to. What commits hold, and their signatures, stay as they are.

    `progress(done, total)` counts dropped commits.
    Raises: IntegrityError when what needs which bytes cannot be read: then nothing is changed; StoreError.
    """
    survey = Survey(repository)
    sweeps = plan_sweeps(survey, dead_share=dead_share)
    if dry_run:
        return Repacking(True, sweeps)
    done, skipped = run_sweeps(repository, sweeps, progress=progress)
    return Repacking(False, done, skipped)


def plan_sweeps(
    survey: Survey, *, dropping: Iterable[str] = (), now_s: float | None = None, dead_share: float = DEAD_SHARE
) -> tuple[Sweep, ...]:
    """Return what there is to do for every dropped commit; with `dropping`, as if those were dropped already."""
    sight = survey.look()
    settled = set(dropping) | survey.settled(sight.recorded, now_s=now_s)
    needed = survey.needed(sight.recorded - settled, continued=sight.continued)
    return tuple(
        found
        for commit in sorted(settled & sight.recorded)
        if not (found := plan_sweep(survey, commit, needed, dead_share=dead_share)).is_empty
    )


def plan_sweep(survey: Survey, commit: str, needed: Rows, *, dead_share: float = DEAD_SHARE) -> Sweep:
    """Return what is to be removed of a commit that is dropped for good, given the rows that others need. Raises: IntegrityError."""
    store = survey.repository.store
    by_rank: dict[int, list[tuple[str, re.Match[str]]]] = {}
    unknown = []
    deletes: list[str] = []
    for key in store.list(commit_prefix(commit)):
        match = OF_RANK.fullmatch(key)
        if key == layouts_key(commit):
            deletes.append(key)
        elif match is None:
            unknown.append(key)
        else:
            by_rank.setdefault(int(match["rank"]), []).append((key, match))
    rewrites: list[Rewrite] = []
    kept_nbytes = 0
    for rank, files in sorted(by_rank.items()):
        rows = needed.get((commit, rank), 0)
        if not rows:
            # Locations last: while they are there, it can be seen what else was.
            deletes += [key for key, _ in sorted(files, key=lambda pair: (pair[1]["revision"] is not None, pair[0]))]
        elif (table := survey.table((commit, rank))) is None:
            unknown += [key for key, _ in files]  # Damaged: what is needed of it nobody can tell.
        else:
            named = {blob.key for blob in table.blobs}
            deletes += [key for key, match in files if _is_surplus(key, match, table.revision, named)]
            rewrite = _plan_rewrite(table, rows, dead_share=dead_share)
            if rewrite is None and any(int(match["made_for"] or 1) > table.revision for _, match in files):
                # A blob of a repack that was cut off, or is at work: once its revision is taken, nobody can publish it any more.
                rewrite = Rewrite(commit, rank, table.revision + 1, (), 0, ())
            rewrites += [] if rewrite is None else [rewrite]
            gone = {key for key, _ in rewrite.blobs} if rewrite is not None else set()
            kept_nbytes += sum(blob.size for blob in table.blobs if blob.key not in gone) + (rewrite.moved_nbytes if rewrite else 0)
    return Sweep(commit, tuple((key, store.size(key) or 0) for key in deletes), tuple(rewrites), tuple(unknown), kept_nbytes)


def _is_surplus(key: str, match: re.Match[str], newest: int, named: set[str]) -> bool:
    """Whether a file of a commit, some rows of which are needed, is not: its manifest, older locations, blobs that they named.

    A blob that was made for a later revision may be that of another repack, which is about to publish it.
    """
    if match["revision"] is not None:
        return int(match["revision"]) < newest
    return key not in named and int(match["made_for"] or 1) <= newest


def _plan_rewrite(table: Locations, needed: int, *, dead_share: float) -> Rewrite | None:
    live: dict[int, list[int]] = {index: [] for index in range(len(table.blobs))}
    for number in numbers_in(needed):
        row = table.rows[number] if number < len(table.rows) else None
        if row is not None:
            live[row.blob].append(number)
    moving: list[int] = []
    blobs: list[tuple[str, int]] = []
    moved_nbytes = 0
    for index, numbers in live.items():
        blob = table.blobs[index]
        nbytes = sum(table.row(number).length for number in numbers)
        if not numbers or blob.size - blob.header_nbytes - nbytes > dead_share * blob.size:
            moving += numbers
            moved_nbytes += nbytes
            blobs.append((blob.key, blob.size))
    # In the order of their bytes, so that raw rows stay aligned.
    moving.sort(key=lambda number: (table.row(number).blob, table.row(number).offset))
    return Rewrite(table.commit, table.rank, table.revision + 1, tuple(moving), moved_nbytes, tuple(blobs)) if blobs else None


def run_sweeps(
    repository: Repository, sweeps: Iterable[Sweep], *, progress: Callable[[int, int], None] | None = None
) -> tuple[tuple[Sweep, ...], tuple[tuple[str, str], ...]]:
    """Carry out sweeps; return those that were, and the commits left as they are, with the reason.

    What only goes does so first, of all of them: on a full disk that makes the room which rewriting needs. Raises: StoreError.
    """
    todo = list(sweeps)
    for found in todo:
        _delete(repository, found)
    done: list[Sweep] = []
    skipped: list[tuple[str, str]] = []
    for number, found in enumerate(todo):
        if progress is not None:
            progress(number, len(todo))
        try:
            sweep(repository, found)
        except (ConflictError, IntegrityError, NotFoundError) as exc:
            # Another sweeper was faster, or its bytes are damaged: those of other commits go nevertheless.
            _log.warning("dropped commit %s is left as it is: %s", found.commit, exc)
            skipped.append((found.commit, str(exc)))
        else:
            done.append(found)
    if progress is not None:
        progress(len(todo), len(todo))
    return tuple(done), tuple(skipped)


def sweep(repository: Repository, found: Sweep) -> None:
    """Remove what a sweep says.

    Raises: ConflictError when another process has repacked the commit meanwhile; IntegrityError for bytes that cannot be moved; StoreError.
    """
    _delete(repository, found)
    for rewrite in found.rewrites:
        _rewrite(repository, rewrite)


def _delete(repository: Repository, found: Sweep) -> None:
    for key, _ in found.deletes:
        repository.store.delete(key)


def _rewrite(repository: Repository, rewrite: Rewrite) -> None:
    store = repository.store
    table = repository.read_locations(rewrite.commit, rewrite.rank)
    old_key = locations_key(rewrite.commit, rewrite.rank, table.revision)
    if table.revision != rewrite.revision - 1:
        raise ConflictError(f"{old_key}: another process has repacked {rewrite.commit}")
    left = {key for key, _ in rewrite.blobs}
    blobs = [blob for blob in table.blobs if blob.key not in left]
    places = {number: row._replace(blob=blobs.index(blob)) for number, row, blob in _rows(table) if blob in blobs}
    made: BlobRecord | None = None
    if rewrite.rows:
        made, moved = _copy(repository, table, rewrite)
        places |= {number: row._replace(blob=len(blobs)) for number, row in moved.items()}
        blobs.append(made)
    # The keyframe stays: it is no pointer. Nothing needs `at` without the manifest.
    newer = replace(
        table,
        revision=rewrite.revision,
        blobs=tuple(blobs),
        at=(),
        bases=(),
        rows=tuple(places.get(number) for number in range(len(table.rows))),
    )
    new_key = locations_key(rewrite.commit, rewrite.rank, rewrite.revision)
    try:
        documents.write(store, new_key, newer.to_body())
    except ConflictError:
        if made is not None:
            store.delete(made.key)
        raise ConflictError(f"{old_key}: another process has just repacked {rewrite.commit}") from None
    try:
        documents.read(store, new_key, kind="locations")
    except IntegrityError:
        # The disk has not written what it said: everybody would go by it, and the older revision is whole.
        store.delete(new_key)
        if made is not None:
            store.delete(made.key)
        raise
    except NotFoundError:
        _log.debug("%s: gone already", new_key)  # other processes have repacked the commit: noticed below
    newest = repository.read_locations(rewrite.commit, rewrite.rank)
    if newest.revision != rewrite.revision:
        # This process was stopped: others have used the number and removed it, so it could be made again, or went on from it meanwhile.
        store.delete(new_key)
        if made is not None and made.key not in {blob.key for blob in newest.blobs}:
            store.delete(made.key)
        raise ConflictError(f"{old_key}: other processes have repacked {rewrite.commit} meanwhile")
    named = {blob.key for blob in blobs}
    for key in store.list(commit_prefix(rewrite.commit)):
        match = OF_RANK.fullmatch(key)
        if match is not None and int(match["rank"]) == rewrite.rank and _is_surplus(key, match, rewrite.revision, named):
            store.delete(key)


def _rows(table: Locations) -> Iterable[tuple[int, Row, BlobRecord]]:
    return ((number, row, table.blobs[row.blob]) for number, row in enumerate(table.rows) if row is not None)


def _copy(repository: Repository, table: Locations, rewrite: Rewrite) -> tuple[BlobRecord, dict[int, Row]]:
    """Write the moving rows into a new blob, unchanged; return it and the rows with their new offsets."""
    store = repository.store
    names = {blob.key: _names(repository, blob) for blob in table.blobs if blob.key in {key for key, _ in rewrite.blobs}}
    entries: dict[str, Any] = {}
    moved: dict[int, Row] = {}
    offset = 0
    for number in rewrite.rows:
        row = table.row(number)
        key = table.blobs[row.blob].key
        name, entry = names[key].get((row.offset, row.length), (f"row {number}", {"dtype": "U8", "shape": [row.length]}))
        while name in entries:
            name += "'"
        entries[name] = {**entry, "data_offsets": [offset, offset + row.length]}
        moved[number] = row._replace(offset=offset)
        offset += row.length
    text = json.dumps(entries, separators=(",", ":")).encode()
    header_nbytes = -(-(8 + len(text)) // 64) * 64
    head = (header_nbytes - 8).to_bytes(8, "little") + text.ljust(header_nbytes - 8)
    moved = {number: row._replace(offset=header_nbytes + row.offset) for number, row in moved.items()}
    # The revision in its name, and a nonce: once that revision is there without it, nobody can mean it any more.
    key = moved_blob_key(rewrite.commit, rewrite.rank, rewrite.revision, nonce=secrets.token_hex(4))
    digests = {}
    with store.sink(key) as sink:
        sink.write([head])
        for number in rewrite.rows:
            digests[number] = _digest(repository, table.blobs[table.row(number).blob].key, table.row(number), into=sink)
        size = sink.close()
    if store.get(key, length=header_nbytes) != head:
        raise IntegrityError(f"{key}: its header reads back otherwise than it was written: the disk or its memory fails")
    for number, row in moved.items():
        # Nothing vouches for a row here but its own bytes, and the old ones are about to go.
        if _digest(repository, key, row) != digests[number]:
            raise IntegrityError(f"{key}: row {number} reads back otherwise than it was written: the disk or its memory fails")
    return BlobRecord(key, size, header_nbytes, addresses.leaf(head)), moved


def _digest(repository: Repository, key: str, row: Row, *, into: Any = None) -> bytes:
    """Return the digest of a row's stored bytes, which are also written to a sink."""
    hasher = blake3()
    buffer = bytearray(min(_CHUNK_NBYTES, row.length))
    for begin in range(0, row.length, _CHUNK_NBYTES):
        piece = memoryview(buffer)[: min(_CHUNK_NBYTES, row.length - begin)]
        repository.store.readinto(key, piece, offset=row.offset + begin)
        hasher.update(piece)
        if into is not None:
            into.write([piece])
            into.flush()
    return hasher.digest()


def _names(repository: Repository, blob: BlobRecord) -> dict[tuple[int, int], tuple[str, dict[str, Any]]]:
    """Return the names in a blob's header, with dtype and shape, by offset in the file and length."""
    head = repository.store.get(blob.key, length=blob.header_nbytes)
    if addresses.leaf(head) != blob.header_digest:
        raise IntegrityError(f"{blob.key}: its header (the first {blob.header_nbytes} bytes) is damaged; run `syckpt verify`")
    found = {}
    try:
        for name, entry in json.loads(head[8:]).items():
            begin, end = entry["data_offsets"]
            found[blob.header_nbytes + begin, end - begin] = (str(name), {"dtype": str(entry["dtype"]), "shape": list(entry["shape"])})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise IntegrityError(f"{blob.key}: its header is malformed: {exc}") from exc
    return found
