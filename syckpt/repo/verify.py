"""Verification: every document and every byte of a commit, or of the whole repository, against what vouches for it.

Quick: documents, blob headers, presence and size of every blob; memory grows by a few hundred bytes a commit. Full: every block of every
row that a commit leads to as well, once each, in the Reader's pool. A finding names the damaged file (with tensor and block where it is
in one) and every commit that it hits. What a running writer or collector changes meanwhile is looked at again before it counts.

The bytes of a pointed-to row are believed by savers for as long as the row exists: this is what finds that they rotted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

from blake3 import blake3

from syckpt.errors import NotFoundError, StoreError, SyckptError
from syckpt.objects import address as addresses
from syckpt.objects import nodes
from syckpt.objects.commit import Commit
from syckpt.objects.locations import BlobRecord, Locations, Source
from syckpt.objects.manifest import Entry
from syckpt.repo import documents, history
from syckpt.repo.keys import LOCATIONS, commit_key, mark_key
from syckpt.repo.reader import Place, Reader, Snapshot
from syckpt.repo.repository import Repository, dropped_error
from syckpt.repo.verification_documents import Records, attempt, check_documents, check_leftovers, check_names
from syckpt.repo.verification_log import VerificationLog
from syckpt.repo.verification_report import VerifyReport

__all__ = ["Progress", "VerifyReport", "verify"]

_log = logging.getLogger("syckpt")
_BATCH_NBYTES = 64 << 20  # raw bytes that the pool gets at once
_MAX_BLOCKS_NAMED = 100  # of one row: a blob of zeros has a million damaged blocks
_MAX_SIZES = 10_000
_MAX_WAITING = 1000  # commits whose rows are queued

Progress = Callable[[int, int, int, int], None]
"""Called with: commits done, commits in all, raw bytes done, raw bytes in all (of all rows; 0 in a quick check)."""

_Key = tuple[Source, int]
"""A row: whose, and which."""


def verify(
    repository: Repository,
    rev: str | None = None,
    *,
    quick: bool = False,
    mark: bool = False,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check one commit, or everything: each document, blob header and, unless `quick`, each block of each tensor.

    What only helps (leases, a branch's copy for people) is checked for sense, not for presence.
    `mark`: a full check puts the mark `damaged` beside commits that cannot be loaded whole, and removes it from those that can;
    without it nothing is changed. `resume`: a file in which a full check notes what it found whole, every few seconds and when it is
    interrupted, and from which the next one of the same goes on; it is removed at the end.
    Raises: NotFoundError for a revision that does not exist, or was dropped; StateError for a `resume` file of something else.
    """
    commit = None if rev is None else history.resolve(repository, rev)
    if commit is not None and commit.dropped:
        raise dropped_error(commit.id)
    run = _Run(repository, quick=quick, mark=mark and not quick, progress=progress)
    if resume is not None and not quick:
        run.log = VerificationLog(repository, resume, of="everything" if commit is None else commit.id)
    try:
        if commit is None:
            run.check_all()
        else:
            run.check_one(commit)
    except BaseException:
        if run.log is not None:
            run.log.save()
        raise
    if run.log is not None:
        run.log.remove()
    return run.report


@dataclass
class _Suspect:
    """A commit with all its rows queued: whole, once they are read and none is bad."""

    commit: Commit
    problems: list[str]
    rows: list[_Key]
    digest: str
    """Of where all its bytes are; "" if not everything could be looked at."""
    whole_blocks: int
    """How many of its blocks, in the order of `Snapshot.stored`, an interrupted run had found whole."""
    queued_blocks: int = 0
    """How many of them are read already, or queued."""


class _Run:
    """One verification."""

    def __init__(self, repository: Repository, *, quick: bool, mark: bool, progress: Progress | None) -> None:
        self.report = VerifyReport()
        self.log: VerificationLog | None = None
        self._repository = repository
        self._reader = Reader(repository)
        self._quick = quick
        self._mark = mark
        self._progress = progress
        self._total = 0
        self._done_nbytes = 0
        self._total_nbytes: int | None = None
        """None for those of a single commit, until its rows are known."""
        self._marks = repository.all_marks()
        self._sizes: dict[str, int | None] = {}
        self._seen: dict[Source, bytearray] = {}
        """For each row that was queued the first half of the address that it was checked against: 16 bytes a row."""
        self._bad: dict[_Key, list[str]] = {}
        self._confirmed: dict[tuple[_Key, bytes], tuple[Place, list[str]]] = {}
        """What a second look found of bad rows that are to have an address, and where they were then: once, however many commits say so."""
        self._queue: list[Callable[[], None]] = []
        self._queued_nbytes = 0
        self._unsettled_nbytes = 0
        self._waiting: list[_Suspect] = []
        self._recorded: set[str] = set()

    # -- what is checked -------------------------------------------------------------------------------------------

    def check_one(self, commit: Commit) -> None:
        self._total = 1
        self._recorded = {commit.id}
        self._check(commit)
        self._settle_all()

    def check_all(self) -> None:
        """Check the records, then the commits in the order in which records name them, then everything else."""
        records = Records(self._repository, self.report)
        self._recorded = set(records.commits)
        listed = history.commit_ids(self._repository)
        order = [*records.commits, *(commit for commit in listed if commit not in records.commits)]
        present = set(listed)
        self._total = len(order)
        self._total_nbytes = 0 if self._quick or self._progress is None else _row_nbytes(self._repository)
        self._tell()
        seals: dict[str, str] = {}
        parents: list[tuple[str, str, str]] = []
        for commit_id in order:
            commit = self._read(commit_id, records.commits.get(commit_id), present=commit_id in present)
            if commit is None:
                continue
            seals[commit.id] = commit.seal
            parents += [(commit.id, *pair) for pair in zip(commit.parents, commit.parent_seals, strict=True)]
            self._check(commit)
            attempt(self.report, check_names, self._repository, commit)
        self._settle_all()
        self._check_parents(parents, seals)
        check_documents(self._repository, self.report)
        check_leftovers(self._repository, self.report, records)

    def _read(self, commit_id: str, named: tuple[str | None, str] | None, *, present: bool) -> Commit | None:
        seal, record = named or (None, "")
        try:
            return self._repository.read_commit(commit_id, seal=seal, marks=self._marks)
        except NotFoundError:
            if named is None:
                return None  # Of a save that was given up in between.
            self.report.add(f"{commit_key(commit_id)}: missing, though {record} names it", commit_id)
        except SyckptError as exc:
            self.report.add(str(exc), commit_id)
        self.report.commits += 1
        self._condemn(commit_id, whose="" if present else None)
        return None

    def _check_parents(self, parents: list[tuple[str, str, str]], seals: dict[str, str]) -> None:
        for child, parent, seal in parents:
            if parent not in seals:
                # There by now: both were made while the files were listed.
                if parent not in self.report.damaged and self._repository.store.size(commit_key(parent)) is None:
                    self.report.add(f"{commit_key(parent)}: missing, though a child names it", child)
                    self._condemn(parent, whose=None)
            elif seals[parent] != seal:
                self.report.add(f"{commit_key(parent)}: not the commit that its child {child} was saved after", child)

    def _check(self, commit: Commit) -> None:
        """Look at a commit's documents and files now, and queue its rows."""
        if commit.dropped:
            self.report.commits += 1
            return
        problems: list[str] = []
        snapshots = list(self._structure(self._reader, commit, problems))
        stored = [] if self._quick else [(entry, place) for snapshot in snapshots for _, entry, place in snapshot.stored()]
        rows = [(place.owner, place.number) for _, place in stored]
        places = blake3()
        for entry, place in stored:
            places.update(_where(entry, place))
        digest = "" if problems or self._quick else places.hexdigest(length=16)
        known = self.log is not None and self.log.knows(commit.id, digest)
        self.report.resumed += known
        whole_blocks = sys.maxsize if known else 0 if self.log is None else self.log.position(commit.id, digest)
        suspect = _Suspect(commit, problems, rows, digest, whole_blocks)
        self._waiting.append(suspect)
        if self._total_nbytes is None:
            self._total_nbytes = sum({row: entry.nbytes for row, (entry, _) in zip(rows, stored, strict=True)}.values())
        for entry, place in stored:
            self._enqueue(entry, place, suspect)
        if self._quick or len(self._waiting) >= _MAX_WAITING or self._unsettled_nbytes >= _BATCH_NBYTES:
            self._settle_all()

    def _structure(self, reader: Reader, commit: Commit, problems: list[str]) -> Iterator[Snapshot]:
        """Yield the snapshots that can be made; append what is wrong with documents, and with presence and size of blobs."""
        try:
            self._repository.read_layouts(commit)
        except SyckptError as exc:
            problems.append(str(exc))
        for rank, _ in commit.manifests:
            try:
                snapshot = reader.snapshot(commit, rank)
            except SyckptError as exc:
                problems.append(str(exc))
                continue
            blobs = {blob.key: blob for place in snapshot.places if place is not None for blob in _blobs(place)}
            for key, blob in blobs.items():
                found = self._size(key)
                if found != blob.size:
                    problems.append(f"{key}: {'missing' if found is None else f'{found} bytes'}, expected {blob.size} bytes")
            for blob in snapshot.locations.blobs:
                error = _header_error(self._repository, blob) if self._size(blob.key) == blob.size else None
                if error:
                    # It only informs: the tensors behind it are found by their rows.
                    self.report.add(error, commit.id)
            yield snapshot

    def _size(self, key: str) -> int | None:
        if key not in self._sizes:
            if len(self._sizes) >= _MAX_SIZES:
                self._sizes.clear()
            self._sizes[key] = self._repository.store.size(key)
        return self._sizes[key]

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _enqueue(self, entry: Entry, place: Place, suspect: _Suspect) -> None:
        """Queue what is still to be read of a row, and read the queue whenever it is long enough."""
        key = (place.owner, place.number)
        begin, count = suspect.queued_blocks, addresses.block_count(entry.nbytes)
        suspect.queued_blocks += count
        seen = self._seen.setdefault(place.owner, bytearray())
        at, half = 16 * place.number, entry.address[:16]
        if len(seen) < at + 16:
            seen.extend(bytes(at + 16 - len(seen)))
        if seen[at : at + 16] == half:
            return
        seen[at : at + 16] = half
        first = min(max(0, suspect.whole_blocks - begin), count)
        left = max(0, entry.nbytes - first * addresses.BLOCK_NBYTES)
        self._done_nbytes += entry.nbytes - left
        if first and not left:
            return
        self.report.tensors += 1
        self.report.nbytes += left
        self._unsettled_nbytes += left
        try:
            self._reader.check_leaves(entry, place)
        except SyckptError as exc:
            self._bad[key] = [str(exc)]
            self._done_nbytes += left
            return
        for index in range(first, count):
            self._queue.append(partial(self._check_block, key, entry, place, index))
            self._queued_nbytes += min(addresses.BLOCK_NBYTES, entry.nbytes - index * addresses.BLOCK_NBYTES)
            if self._queued_nbytes >= _BATCH_NBYTES:
                self._work()
                self._note(suspect, begin + index + 1)
                self._tell()

    def _check_block(self, key: _Key, entry: Entry, place: Place, index: int) -> None:
        error = _block_error(self._reader, entry, place, index)
        if error is not None:
            texts = self._bad.setdefault(key, [])
            if len(texts) < _MAX_BLOCKS_NAMED:
                texts.append(error)

    def _work(self) -> None:
        """Read what is queued."""
        queue, self._queue = self._queue, []
        self._reader.run(queue)
        self._done_nbytes += self._queued_nbytes
        self._queued_nbytes = 0

    def _note(self, suspect: _Suspect, blocks: int) -> None:
        """Note how many blocks of the commit in hand are whole: one may be larger than what is read in one go."""
        if self.log is not None and suspect.digest and self._bad.keys().isdisjoint(suspect.rows):
            self.log.note(suspect.commit.id, suspect.digest, blocks)
            self.log.save_sometimes()

    def _settle_all(self) -> None:
        """Read what is queued, and judge the commits that waited for it."""
        self._work()
        self._unsettled_nbytes = 0
        for suspect in self._waiting:
            self._settle(suspect)
        self._waiting.clear()
        if self.log is not None:
            self.log.save_sometimes()
        self._tell()

    def _settle(self, suspect: _Suspect) -> None:
        commit = suspect.commit
        bad = [key for key in suspect.rows if key in self._bad]
        problems = suspect.problems + [text for key in bad for text in self._bad[key]]
        if problems:
            problems = self._look_again(commit, bad)
        self.report.commits += 1
        for text in problems:
            self.report.add(text, commit.id)
        if problems:
            self._condemn(commit.id, whose=problems[0], marked=commit.damaged)
        elif commit.damaged:
            self._acquit(commit)
        if not problems and suspect.digest and self.log is not None:
            self.log.add(commit.id, suspect.digest)

    def _look_again(self, commit: Commit, bad: list[_Key]) -> list[str]:
        """Return what is still wrong: retention may have dropped the commit meanwhile, or repack have moved its bytes."""
        if "dropped" in self._repository.marks(commit.id):
            return []
        if commit.id not in self._recorded and self._repository.store.size(commit_key(commit.id)) is None:
            return []  # Of a save that was given up in between.
        reader = Reader(self._repository, threads=1)
        found: list[str] = []
        self._sizes.clear()
        suspects = set(bad)
        for snapshot in self._structure(reader, commit, found):
            for _, entry, place in snapshot.stored():
                key = (place.owner, place.number)
                if key not in suspects or any(self._size(blob.key) != blob.size for blob in _blobs(place)):
                    continue  # Of a file that is lost or cut it is enough to say so.
                # One row may be right for one commit, and not what another one's manifest says.
                asked = key, entry.address
                if asked not in self._confirmed or self._confirmed[asked][0] != place:
                    self._confirmed[asked] = place, list(islice(_check_tensor(reader, entry, place), _MAX_BLOCKS_NAMED))
                found += self._confirmed[asked][1]
        return list(dict.fromkeys(found))

    def _tell(self) -> None:
        if self._progress is not None:
            total_nbytes = max(self._total_nbytes or 0, self._done_nbytes)  # more may have been saved meanwhile
            self._progress(self.report.commits, self._total, self._done_nbytes, total_nbytes)

    # -- marks -----------------------------------------------------------------------------------------------------

    def _condemn(self, commit: str, *, whose: str | None, marked: bool = False) -> None:
        """Count a commit as damaged; `whose`: the damage, for its mark; None where there is no commit to mark."""
        if commit not in self.report.damaged:
            self.report.damaged.append(commit)
        if not self._mark or marked or whose is None:
            return
        try:
            self._repository.mark(commit, "damaged", why=(whose or "its record cannot be read")[:2000])
            self.report.marked.append(commit)
        except StoreError as exc:
            _log.warning("commit %s could not be marked as damaged: %s", commit, exc)

    def _acquit(self, commit: Commit) -> None:
        """A commit that is marked as damaged is whole, as far as was looked."""
        key = mark_key(commit.id, "damaged")
        if self._mark:
            try:
                self._repository.store.delete(key)
                self.report.cleared.append(commit.id)
            except StoreError as exc:
                self.report.add(f"{key}: marks a commit that is whole, and cannot be removed: {exc}", commit.id)
            return
        looked = "its structure is whole; `syckpt verify` reads its bytes, and then removes the mark" if self._quick else "it is whole"
        why = self._repository.why(commit.id, "damaged") or "it does not say why"
        self.report.add(f"{key}: marks the commit as damaged ({why[:200]}), but {looked}", commit.id)


def _check_tensor(reader: Reader, entry: Entry, place: Place) -> Iterator[str]:
    """Yield what is wrong with a tensor, block by block."""
    try:
        reader.check_leaves(entry, place)
    except SyckptError as exc:
        yield str(exc)
        return
    errors = (_block_error(reader, entry, place, index) for index in range(addresses.block_count(entry.nbytes)))
    yield from (error for error in errors if error is not None)


def _block_error(reader: Reader, entry: Entry, place: Place, index: int) -> str | None:
    """Read a block, and return what is wrong with it, beginning with the key of a file."""
    try:
        reader.read_block(entry, place, index)
    except SyckptError as exc:
        text = str(exc)
        if text.startswith(tuple(f"{blob.key}: " for blob in _blobs(place))):
            return text
        # What a store says of a file that it cannot read.
        return f"{place.blob.key}: tensor {nodes.format_path(entry.path)}, block {index}: {text}"
    return None


def _row_nbytes(repository: Repository) -> int:
    """Return the raw bytes of all rows that locations name; none of locations that cannot be read: whoever needs them finds that."""
    listed = filter(None, map(LOCATIONS.fullmatch, repository.store.list("objects/")))
    newest = {(match["commit"], match["rank"]): match.string for match in listed}  # sorted by revision
    total = 0
    for key in newest.values():
        with suppress(SyckptError):
            body, _ = documents.read(repository.store, key, kind="locations")
            total += sum(row.nbytes for row in Locations.from_body(body, where=key).rows if row is not None)
    return total


def _blobs(place: Place) -> Iterable[BlobRecord]:
    return (place.blob,) if place.base is None else (place.blob, place.base.blob)


def _where(entry: Entry, place: Place) -> bytes:
    """Return what identifies a tensor's bytes: their address, and the place that they are read from."""
    parts = [f"{p.blob.key} {p.blob.size} {p.blob.header_digest.hex()} {p.row.offset} {p.row.length}" for p in (place, place.base) if p]
    return f"{entry.address.hex()} {place.number} {place.owner} {' '.join(parts)}\n".encode()


def _header_error(repository: Repository, blob: BlobRecord) -> str | None:
    try:
        head = repository.store.get(blob.key, length=blob.header_nbytes)
    except SyckptError as exc:
        return str(exc)
    if addresses.leaf(head) != blob.header_digest:
        return f"{blob.key}: its header (the first {blob.header_nbytes} bytes) is damaged; tensors may still load"
    return None
