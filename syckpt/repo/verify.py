"""Verification: every document and every byte of a commit, or of the whole repository, against what vouches for it.

Quick: documents, blob headers, presence and size of every blob; memory grows by a few hundred bytes a commit. Full: every block of every
row that a commit leads to as well, once each, in the Reader's pool. A finding names the damaged file (with tensor and block where it is
in one) and every commit that it hits. What a running writer or collector changes meanwhile is looked at again before it counts.

The bytes of a pointed-to row are believed by savers for as long as the row exists: this is what finds that they rotted.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from blake3 import blake3

from syckpt.errors import IntegrityError, NotFoundError, StateError, StoreError, SyckptError
from syckpt.objects import address as addresses
from syckpt.objects import canonical, ids
from syckpt.objects.checks import Fields
from syckpt.objects.commit import Commit
from syckpt.objects.locations import BlobRecord, Source
from syckpt.objects.manifest import Entry
from syckpt.objects.refs import Intent, Lease
from syckpt.repo import documents, history, signing
from syckpt.repo.reader import Place, Reader, Snapshot
from syckpt.repo.repository import Repository, dropped_error

__all__ = ["Progress", "VerifyReport", "verify"]

_log = logging.getLogger("syckpt")
_BATCH_NBYTES = 64 << 20  # raw bytes that the pool gets at once
_SAVE_EVERY_S = 10.0
_RESUME_FILE_AGE_S = 7 * 24 * 3600.0  # what was read longer ago is read again
_MAX_BLOCKS_NAMED = 100  # of one row: a blob of zeros has a million damaged blocks
_MAX_SIZES = 10_000
_MAX_WAITING = 1000  # commits whose rows are queued

Progress = Callable[[int, int, int], None]
"""Called with: commits done, commits in all, raw bytes checked so far."""

_Key = tuple[Source, int]
"""A row: whose, and which."""


@dataclass
class VerifyReport:
    """What was found. Truthy when nothing is wrong."""

    findings: dict[str, list[str]] = field(default_factory=dict)
    """What is wrong, beginning with the key of the damaged file, and the ids of the commits that it hits."""
    commits: int = 0
    tensors: int = 0
    nbytes: int = 0
    """Raw bytes that were decoded and checked; a tensor that several commits share counts once."""
    damaged: list[str] = field(default_factory=list)
    """Ids of the commits that cannot be loaded whole."""
    marked: list[str] = field(default_factory=list)
    """Ids of the commits that got the mark `damaged` by this run."""
    cleared: list[str] = field(default_factory=list)
    """Ids of the commits whose mark `damaged` was removed: they are whole."""
    resumed: int = 0
    """Commits whose bytes an interrupted run had found whole, so that they were not read again."""

    @property
    def errors(self) -> list[str]:
        """One text a finding, which begins with the key of the damaged file and ends with the commits that it hits."""
        return [text + _hits(commits) for text, commits in self.findings.items()]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def add(self, text: str, commit: str | None = None) -> None:
        """Note a finding, and a commit that it hits."""
        hit = self.findings.setdefault(text, [])
        if commit is not None and commit not in hit:
            hit.append(commit)


def _hits(commits: list[str]) -> str:
    if not commits:
        return ""
    more = f" and {len(commits) - 8} more" if len(commits) > 8 else ""
    return f"; hits commit{'s' if len(commits) > 1 else ''} {', '.join(commits[:8])}{more}"


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
    without it nothing is changed. `resume`: a file in which a full check of everything notes what it found whole, every few seconds
    and when it is interrupted, and from which the next one goes on; it is removed at the end.
    Raises: NotFoundError for a revision that does not exist, or was dropped; StateError for a `resume` file of something else.
    """
    run = _Run(repository, quick=quick, mark=mark and not quick, progress=progress)
    if rev is not None:
        commit = history.resolve(repository, rev)
        if commit.dropped:
            raise dropped_error(commit.id)
        run.check_one(commit)
        return run.report
    run.log = _Log(repository, resume) if resume is not None and not quick else None
    try:
        run.check_all()
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


class _Run:
    """One verification."""

    def __init__(self, repository: Repository, *, quick: bool, mark: bool, progress: Progress | None) -> None:
        self.report = VerifyReport()
        self.log: _Log | None = None
        self._repository = repository
        self._reader = Reader(repository)
        self._quick = quick
        self._mark = mark
        self._progress = progress
        self._total = 0
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
        records = _Records(self._repository, self.report)
        self._recorded = set(records.commits)
        listed = history.commit_ids(self._repository)
        order = [*records.commits, *(commit for commit in listed if commit not in records.commits)]
        present = set(listed)
        self._total = len(order)
        seals: dict[str, str] = {}
        parents: list[tuple[str, str, str]] = []
        for commit_id in order:
            commit = self._read(commit_id, records.commits.get(commit_id), present=commit_id in present)
            if commit is None:
                continue
            seals[commit.id] = commit.seal
            parents += [(commit.id, *pair) for pair in zip(commit.parents, commit.parent_seals, strict=True)]
            self._check(commit)
            _attempt(self.report, _verify_names, self._repository, commit)
        self._settle_all()
        self._check_parents(parents, seals)
        _verify_documents(self._repository, self.report)
        _verify_leftovers(self._repository, self.report, records)

    def _read(self, commit_id: str, named: tuple[str | None, str] | None, *, present: bool) -> Commit | None:
        seal, record = named or (None, "")
        try:
            return self._repository.read_commit(commit_id, seal=seal, marks=self._marks)
        except NotFoundError:
            if named is None:
                return None  # Of a save that was given up in between.
            self.report.add(f"objects/{commit_id}.json: missing, though {record} names it", commit_id)
        except SyckptError as exc:
            self.report.add(str(exc), commit_id)
        self.report.commits += 1
        self._condemn(commit_id, whose="" if present else None)
        return None

    def _check_parents(self, parents: list[tuple[str, str, str]], seals: dict[str, str]) -> None:
        for child, parent, seal in parents:
            if parent not in seals:
                # There by now: both were made while the files were listed.
                if parent not in self.report.damaged and self._repository.store.size(f"objects/{parent}.json") is None:
                    self.report.add(f"objects/{parent}.json: missing, though a child names it", child)
                    self._condemn(parent, whose=None)
            elif seals[parent] != seal:
                self.report.add(f"objects/{parent}.json: not the commit that its child {child} was saved after", child)

    def _check(self, commit: Commit) -> None:
        """Look at a commit's documents and files now, and queue its rows."""
        if commit.dropped:
            self.report.commits += 1
            return
        problems: list[str] = []
        snapshots = list(self._structure(self._reader, commit, problems))
        rows: list[_Key] = []
        places = blake3()
        if not self._quick:
            for snapshot in snapshots:
                for _, entry, place in snapshot.stored():
                    places.update(_where(entry, place))
                    rows.append((place.owner, place.number))
        digest = "" if problems or self._quick else places.hexdigest(length=16)
        known = self.log is not None and self.log.knows(commit.id, digest)
        self.report.resumed += known
        self._waiting.append(_Suspect(commit, problems, rows, digest))
        if not self._quick:
            for snapshot in snapshots:
                for _, entry, place in snapshot.stored():
                    self._enqueue(entry, place, known=known)
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

    def _enqueue(self, entry: Entry, place: Place, *, known: bool) -> None:
        key = (place.owner, place.number)
        seen = self._seen.setdefault(place.owner, bytearray())
        begin, half = 16 * place.number, entry.address[:16]
        if len(seen) < begin + 16:
            seen.extend(bytes(begin + 16 - len(seen)))
        if seen[begin : begin + 16] == half:
            return
        seen[begin : begin + 16] = half
        if known:
            return
        self.report.tensors += 1
        self.report.nbytes += entry.nbytes
        self._unsettled_nbytes += entry.nbytes
        try:
            self._reader.check_leaves(entry, place)
        except SyckptError as exc:
            self._bad[key] = [str(exc)]
            return
        for index in range(addresses.block_count(entry.nbytes)):
            self._queue.append(partial(self._check_block, key, entry, place, index))
            self._queued_nbytes += min(addresses.BLOCK_NBYTES, entry.nbytes)
            if self._queued_nbytes >= _BATCH_NBYTES:
                self._work()

    def _check_block(self, key: _Key, entry: Entry, place: Place, index: int) -> None:
        try:
            self._reader.read_block(entry, place, index)
        except SyckptError as exc:
            texts = self._bad.setdefault(key, [])
            if len(texts) < _MAX_BLOCKS_NAMED:
                texts.append(str(exc))

    def _work(self) -> None:
        """Read what is queued."""
        queue, self._queue, self._queued_nbytes = self._queue, [], 0
        self._reader.run(queue)
        self._tell()

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
        if commit.id not in self._recorded and self._repository.store.size(f"objects/{commit.id}.json") is None:
            return []  # Of a save that was given up in between.
        reader = Reader(self._repository, threads=1)
        found: list[str] = []
        self._sizes.clear()
        suspects = set(bad)
        for snapshot in self._structure(reader, commit, found):
            for _, entry, place in snapshot.stored():
                key = (place.owner, place.number)
                if key not in suspects:
                    continue
                # One row may be right for one commit, and not what another one's manifest says.
                asked = key, entry.address
                if asked not in self._confirmed or self._confirmed[asked][0] != place:
                    self._confirmed[asked] = place, list(islice(_check_tensor(reader, entry, place), _MAX_BLOCKS_NAMED))
                found += self._confirmed[asked][1]
        return list(dict.fromkeys(found))

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.report.commits, self._total, self.report.nbytes)

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
        key = f"objects/{commit.id}.damaged"
        if self._mark:
            try:
                self._repository.store.delete(key)
                self.report.cleared.append(commit.id)
            except StoreError as exc:
                self.report.add(f"{key}: marks a commit that is whole, and cannot be removed: {exc}", commit.id)
            return
        looked = "its structure is whole; `syckpt verify` reads its bytes, and then removes the mark" if self._quick else "it is whole"
        self.report.add(f"{key}: marks the commit as damaged ({_why(self._repository, key)}), but {looked}", commit.id)


def _check_tensor(reader: Reader, entry: Entry, place: Place) -> Iterator[str]:
    """Yield what is wrong with a tensor, block by block."""
    try:
        reader.check_leaves(entry, place)
    except SyckptError as exc:
        yield str(exc)
        return
    for index in range(addresses.block_count(entry.nbytes)):
        try:
            reader.read_block(entry, place, index)
        except SyckptError as exc:
            yield str(exc)


def _why(repository: Repository, key: str) -> str:
    try:
        return str(documents.read(repository.store, key, kind="mark")[0].get("why"))[:200]
    except SyckptError:
        return "it does not say why"


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


# -- what an interrupted run left ------------------------------------------------------------------------------------------


class _Log:
    """The file of `resume`: which commits were found whole, and where their bytes were then.

    It lies outside the repository: what comes with one that somebody else made must not say that it was checked.
    """

    def __init__(self, repository: Repository, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._name = f"{repository.id} {repository.store.describe()}"
        self._whole: dict[str, str] = {}
        self._begun_s = time.time()
        self._saved_s = time.monotonic()
        self._read()

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as file:
                data = file.read(canonical.MAX_DOCUMENT_NBYTES)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise StateError(f"{self._path} cannot be read: {exc}") from exc
        try:
            body, _ = canonical.unseal(data, key=self._path, kind="verification")
            fields = Fields(body, where=self._path)
            name, begun_s = fields.text("repository"), fields.integer("begun_s")
            whole = {str(commit): str(digest) for commit, digest in fields.mapping("whole").items()}
        except SyckptError as exc:
            raise StateError(f"{self._path} is not a file that `verify` wrote; name another one, or remove it: {exc}") from exc
        if name != self._name:
            raise StateError(f"{self._path} is of another repository ({name}); name another file, or remove it")
        if not 0 <= time.time() - begun_s <= _RESUME_FILE_AGE_S:
            _log.warning("%s was begun more than a week ago: everything is read again", self._path)
            return
        self._whole, self._begun_s = whole, begun_s

    def knows(self, commit: str, digest: str) -> bool:
        """Whether these very bytes were found whole."""
        return bool(digest) and self._whole.get(commit) == digest

    def add(self, commit: str, digest: str) -> None:
        self._whole[commit] = digest

    def save_sometimes(self) -> None:
        if time.monotonic() - self._saved_s >= _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file, replacing an older one whole."""
        self._saved_s = time.monotonic()
        body = {"kind": "verification", "version": 1, "repository": self._name, "begun_s": int(self._begun_s), "whole": self._whole}
        new = f"{self._path}.{os.getpid()}.new"
        try:
            with open(new, "wb") as file:
                file.write(canonical.seal(body)[0])
            os.replace(new, self._path)
        except OSError as exc:
            _log.warning("%s cannot be written, so that an interrupted verification could not go on: %s", self._path, exc)
            with suppress(OSError):
                os.unlink(new)

    def remove(self) -> None:
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            return
        except OSError as exc:
            _log.warning("%s cannot be removed, so the next verification would go on from it: %s", self._path, exc)


# -- refs ------------------------------------------------------------------------------------------------------------------

_MARK = re.compile(r"objects/([0-9a-f]{8}-[0-9a-f]{16})\.(damaged|dropped|preempted)")
_RECORD = re.compile(r"logs/refs/(heads|tags|names)/([^/]+)/(\d{12})\.json")
_RECEIPT = re.compile(r"receipts/([^/]+)/([0-9a-f]{8}-[0-9a-f]{16})/(?:r(\d{5})|verdict)\.json")


class _Records:
    """HEAD and every ref record, checked; and the commits that they name, oldest first."""

    def __init__(self, repository: Repository, report: VerifyReport) -> None:
        self.commits: dict[str, tuple[str | None, str]] = {}
        """Seal, and the key of the record that says so."""
        self.complete = True
        """Whether every record could be read."""
        self._repository = repository
        self._report = report
        _attempt(report, _verify_head, repository)
        numbers: dict[str, list[int]] = {}
        for key in repository.store.list("logs/"):
            match = _RECORD.fullmatch(key)
            if match is not None:
                numbers.setdefault(f"{match[1]}/{ids.name_of_component(match[2])}", []).append(int(match[3]))
        for ref in sorted(numbers, key=lambda ref: (not ref.startswith("heads/"), ref)):
            before = len(report.findings)
            _attempt(report, repository.refs.head, ref)
            self._check(ref, sorted(numbers[ref]))
            self.complete &= len(report.findings) == before

    def _check(self, ref: str, numbers: list[int]) -> None:
        refs = self._repository.refs
        gaps = sorted(set(range(1, numbers[-1] + 1)) - set(numbers))
        # A listing may show a record and not the one that was made just before it.
        gaps = [number for number in gaps if self._repository.store.size(refs.key(ref, number)) is None]
        if gaps:
            self._report.add(f"{refs.key(ref, gaps[0])}: missing, though later records of {ref} exist: a record was lost")
        for number in numbers:
            try:
                record = refs.read(ref, number)
            except NotFoundError:
                continue  # Gone in between.
            except SyckptError as exc:
                self._report.add(str(exc))
                continue
            if record.commit is None:
                continue
            known, first = self.commits.setdefault(record.commit, (record.commit_seal, refs.key(ref, number)))
            if known != record.commit_seal and None not in (known, record.commit_seal):
                text = f"{refs.key(ref, number)}: names another content of commit {record.commit} than {first}"
                self._report.add(text, record.commit)


def _attempt(report: VerifyReport, check: Callable[..., object], *arguments: object) -> None:
    try:
        check(*arguments)
    except NotFoundError:
        return  # A running writer finished in between.
    except SyckptError as exc:
        report.add(str(exc))


def _verify_head(repository: Repository) -> None:
    repository.head_branch()
    if repository.store.size("HEAD") is None and repository.refs.names("heads"):
        raise IntegrityError("HEAD: missing; until there is a second branch, the only one is taken for it")


def _verify_names(repository: Repository, commit: Commit) -> None:
    """Check that the name and tags that a commit was saved with exist, or existed."""
    wanted = [f"names/{commit.name}"] * (commit.name is not None) + [f"tags/{tag}" for tag in commit.tags]
    if not wanted or commit.dropped or repository.store.size(f"intents/{commit.id}.json") is not None:
        return  # Names are free again, or still to be made.
    for ref in wanted:
        if not repository.refs.numbers(ref):
            raise IntegrityError(f"{repository.refs.key(ref, 1)}: missing, though commit {commit.id} was saved by that name")


# -- other documents -------------------------------------------------------------------------------------------------------


def _verify_documents(repository: Repository, report: VerifyReport) -> None:
    """Check every document that is no part of a commit and no record: whole, and about what its name says."""
    checks = {"intents/": _verify_intent, "leases/": _verify_lease, "receipts/": _verify_receipt, "hello/": _verify_hello}
    for prefix, check in checks.items():
        for key in repository.store.list(prefix):
            _attempt(report, check, repository, key)
    for key in repository.store.list("objects/"):
        if _MARK.fullmatch(key):
            _attempt(report, _verify_mark, repository, key)
    for text in signing.findings(repository):
        report.add(text)


def _verify_intent(repository: Repository, key: str) -> None:
    body, _ = documents.read(repository.store, key, kind="intent")
    intent = Intent.from_body(body, where=key)
    if key != f"intents/{intent.commit}.json":
        raise IntegrityError(f"{key}: is the intent of {intent.commit}")


def _verify_lease(repository: Repository, key: str) -> None:
    body, _ = documents.read(repository.store, key, kind="lease")
    lease = Lease.from_body(body, where=key)
    if key != f"leases/{ids.key_component(lease.branch)}.json":
        raise IntegrityError(f"{key}: is the lease on {lease.branch!r}")


def _verify_receipt(repository: Repository, key: str) -> None:
    match = _RECEIPT.fullmatch(key)
    if match is None:
        raise IntegrityError(f"{key}: neither a rank's receipt nor a verdict")
    body, _ = documents.read(repository.store, key, kind="verdict" if match[3] is None else "receipt")
    fields = Fields(body, where=key)
    if fields.text("commit") != match[2] or (match[3] is not None and fields.integer("rank") != int(match[3])):
        raise IntegrityError(f"{key}: is about {fields.text('commit')}, rank {body.get('rank')}")


def _verify_hello(repository: Repository, key: str) -> None:
    documents.read(repository.store, key, kind="hello")


def _verify_mark(repository: Repository, key: str) -> None:
    body, _ = documents.read(repository.store, key, kind="mark")
    Fields(body, where=key).text("why")


def _verify_leftovers(repository: Repository, report: VerifyReport, records: _Records) -> None:
    """Check that every object belongs to a commit that a record names, or to a save under way: to its intent."""
    if not records.complete:
        return  # Reported already; and what the damaged ones named is not known.
    # In this order: what a running writer publishes or gives up in between is found in one of the later places.
    found = {key.removeprefix("objects/")[:25]: key for key in repository.store.list("objects/")}
    known = records.commits.keys() | {key.removeprefix("intents/")[:25] for key in repository.store.list("intents/")}
    unknown = {commit: key for commit, key in found.items() if commit not in known and ids.is_commit_id(commit)}
    if not unknown:
        return
    published = _Records(repository, VerifyReport()).commits.keys()
    for commit, key in sorted(unknown.items()):
        if commit not in published and repository.store.size(key) is not None:
            report.add(f"intents/{commit}.json: missing, though {key} belongs to no commit that a record names")
