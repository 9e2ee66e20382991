"""Verification: every byte of a commit, or of the whole repository, against what vouches for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from syckpt.errors import NotFoundError, SyckptError
from syckpt.objects import address as addresses
from syckpt.objects import ids
from syckpt.objects.commit import Commit
from syckpt.objects.locations import BlobRecord, Source
from syckpt.repo import documents, history
from syckpt.repo.reader import Reader, Snapshot
from syckpt.repo.repository import Repository

__all__ = ["VerifyReport", "verify"]

_Checked = dict[tuple[Source, int, bytes], "str | None"]
"""Tensors that were read already, by their rows and address, and what was wrong with them."""


@dataclass
class VerifyReport:
    """What was found. Truthy when nothing is wrong."""

    errors: list[str] = field(default_factory=list)
    """One text each, beginning with the key of the damaged file."""
    commits: int = 0
    tensors: int = 0
    nbytes: int = 0
    """Raw bytes that were decoded and checked; a tensor that several commits share counts once."""
    damaged: list[str] = field(default_factory=list)
    """Ids of the commits that cannot be loaded whole."""

    @property
    def ok(self) -> bool:
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    def _add(self, error: str) -> None:
        if error not in self.errors:
            self.errors.append(error)


def verify(
    repository: Repository, rev: str | None = None, *, quick: bool = False, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Check one commit, or everything: each document, blob header and, unless `quick`, each block of each tensor.

    `progress(done, total)` counts commits. Nothing is changed. Raises: NotFoundError for a revision that does not exist.
    """
    report = VerifyReport()
    reader = Reader(repository)
    checked: _Checked = {}
    commits = _commits(repository, rev, report)
    for number, commit in enumerate(commits):
        if progress is not None:
            progress(number, len(commits))
        if not commit.dropped and _verify_commit(reader, commit, report, checked, quick=quick):
            report.damaged.append(commit.id)
        report.commits += 1
    if rev is None:
        _verify_refs(repository, report)
    if progress is not None:
        progress(len(commits), len(commits))
    return report


def _commits(repository: Repository, rev: str | None, report: VerifyReport) -> list[Commit]:
    if rev is not None:
        return [history.resolve(repository, rev)]
    commits = []
    for commit in history.commit_ids(repository):
        try:
            commits.append(repository.read_commit(commit))
        except SyckptError as exc:
            report._add(str(exc))
            report.damaged.append(commit)
    for commit in sorted(_parents(commits) - {c.id for c in commits} - set(report.damaged)):
        report._add(f"objects/{commit}.json: missing, though a child names it")
    return commits


def _parents(commits: Iterable[Commit]) -> set[str]:
    return {parent for commit in commits for parent in commit.parents}


def _verify_commit(reader: Reader, commit: Commit, report: VerifyReport, checked: _Checked, *, quick: bool) -> bool:
    """Return whether the commit is damaged."""
    before = len(report.errors)
    damaged = False
    try:
        reader.repository.check_whole(commit)
    except SyckptError as exc:
        report._add(str(exc))
        damaged = True
    for rank, _ in commit.manifests:
        try:
            snapshot = reader.snapshot(commit, rank)
        except SyckptError as exc:
            report._add(str(exc))
            damaged = True
            continue
        for blob in snapshot.locations.blobs:
            error = _header_error(reader.repository, blob)
            if error:
                report._add(error)
        if not quick:
            damaged |= _verify_tensors(reader, snapshot, report, checked)
    return damaged or len(report.errors) > before


def _header_error(repository: Repository, blob: BlobRecord) -> str | None:
    try:
        head = repository.store.get(blob.key, length=blob.header_nbytes)
    except SyckptError as exc:
        return str(exc)
    if addresses.leaf(head) != blob.header_digest:
        return f"{blob.key}: its header (the first {blob.header_nbytes} bytes) is damaged; tensors may still load"
    return None


def _verify_tensors(reader: Reader, snapshot: Snapshot, report: VerifyReport, checked: _Checked) -> bool:
    damaged = False
    for entry, place in zip(snapshot.manifest.entries, snapshot.places, strict=True):
        key = (place.owner, place.number, entry.address)
        if key not in checked:
            checked[key] = None
            report.tensors += 1
            report.nbytes += entry.nbytes
            try:
                reader.check(entry, place)
            except SyckptError as exc:
                checked[key] = str(exc)
        error = checked[key]
        if error is not None:
            report._add(error)
            damaged = True
    return damaged


_MARK = re.compile(r"objects/[0-9a-f-]{25}\.(damaged|dropped|preempted)")
_RECORD = re.compile(r"logs/refs/(heads|tags|names)/([^/]+)/\d{12}\.json")


def _verify_refs(repository: Repository, report: VerifyReport) -> None:
    """Check HEAD, every ref record and what it names, and every other document of the repository."""
    _attempt(report, repository.head_branch)
    keys = repository.store.list("logs/")
    for ref in sorted({f"{m[1]}/{ids.name_of_component(m[2])}" for key in keys if (m := _RECORD.fullmatch(key))}):
        _attempt(report, repository.refs.head, ref)
        _attempt(report, _verify_records, repository, ref)
    for key in repository.store.list("intents/"):
        _attempt(report, partial(documents.read, kind="intent"), repository.store, key)
    for key in repository.store.list("leases/"):
        _attempt(report, partial(documents.read, kind="lease"), repository.store, key)
    for key in repository.store.list("objects/"):
        if _MARK.fullmatch(key):
            _attempt(report, partial(documents.read, kind="mark"), repository.store, key)


def _attempt(report: VerifyReport, check: Callable[..., object], *arguments: object) -> None:
    try:
        check(*arguments)
    except NotFoundError:
        return  # A running writer finished in between.
    except SyckptError as exc:
        report._add(str(exc))


def _verify_records(repository: Repository, ref: str) -> None:
    for number in repository.refs.numbers(ref):
        record = repository.refs.read(ref, number)
        if record.commit is not None:
            repository.read_commit(record.commit, seal=record.commit_seal)
