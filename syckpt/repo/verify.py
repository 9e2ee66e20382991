"""Verification: every byte of a commit, or of the whole repository, against what vouches for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from syckpt.errors import IntegrityError, NotFoundError, SyckptError
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

    What only helps (leases, a branch's copy for people) is checked for sense, not for presence.
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
        for commit in commits:
            _attempt(report, _verify_names, repository, commit)
        _verify_leftovers(repository, report)
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
    seals = {commit.id: commit.seal for commit in commits}
    for child in commits:
        for parent, seal in zip(child.parents, child.parent_seals, strict=True):
            if parent not in seals and parent not in report.damaged:
                report._add(f"objects/{parent}.json: missing, though a child names it")
                report.damaged.append(parent)
            elif seals.get(parent, seal) != seal:
                report._add(f"objects/{parent}.json: not the commit that its child {child.id} was saved after")
    return commits


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
    for _, entry, place in snapshot.stored():
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
    _attempt(report, _verify_head, repository)
    for ref in _refs(repository):
        _attempt(report, repository.refs.head, ref)
        _attempt(report, _verify_records, repository, ref, report)
    for key in repository.store.list("intents/"):
        _attempt(report, partial(documents.read, kind="intent"), repository.store, key)
    for key in repository.store.list("leases/"):
        _attempt(report, partial(documents.read, kind="lease"), repository.store, key)
    for key in repository.store.list("objects/"):
        if _MARK.fullmatch(key):
            _attempt(report, partial(documents.read, kind="mark"), repository.store, key)


def _refs(repository: Repository) -> list[str]:
    """Return every ref that has records, deleted ones too, sorted."""
    found = (_RECORD.fullmatch(key) for key in repository.store.list("logs/"))
    return sorted({f"{match[1]}/{ids.name_of_component(match[2])}" for match in found if match})


def _attempt(report: VerifyReport, check: Callable[..., object], *arguments: object) -> None:
    try:
        check(*arguments)
    except NotFoundError:
        return  # A running writer finished in between.
    except SyckptError as exc:
        report._add(str(exc))


def _verify_head(repository: Repository) -> None:
    repository.head_branch()
    if repository.store.size("HEAD") is None and repository.refs.names("heads"):
        raise IntegrityError("HEAD: missing; until there is a second branch, the only one is taken for it")


def _verify_records(repository: Repository, ref: str, report: VerifyReport) -> None:
    numbers = repository.refs.numbers(ref)
    if numbers[0] != 1:
        raise IntegrityError(f"{repository.refs.key(ref, 1)}: missing, though later records of {ref} exist: a record was lost")
    for number in numbers:
        _attempt(report, _verify_record, repository, ref, number)


def _verify_record(repository: Repository, ref: str, number: int) -> None:
    record = repository.refs.read(ref, number)
    if record.commit is None:
        return
    try:
        repository.read_commit(record.commit, seal=record.commit_seal)
    except NotFoundError:
        raise IntegrityError(f"objects/{record.commit}.json: missing, though {repository.refs.key(ref, number)} names it") from None


def _verify_names(repository: Repository, commit: Commit) -> None:
    """Check that the name and tags that a commit was saved with exist, or existed."""
    if commit.dropped or repository.store.size(f"intents/{commit.id}.json") is not None:
        return  # Names are free again, or still to be made.
    for ref in [f"names/{commit.name}"] * (commit.name is not None) + [f"tags/{tag}" for tag in commit.tags]:
        if not repository.refs.numbers(ref):
            raise IntegrityError(f"{repository.refs.key(ref, 1)}: missing, though commit {commit.id} was saved by that name")


def _verify_leftovers(repository: Repository, report: VerifyReport) -> None:
    """Check that every object belongs to a commit that a record names, or to a save under way: to its intent."""
    # In this order: what a running writer publishes or gives up in between is found in one of the later places.
    found = {key.removeprefix("objects/")[:25] for key in repository.store.list("objects/")}
    known = {key.removeprefix("intents/")[:25] for key in repository.store.list("intents/")}
    try:
        for ref in _refs(repository):
            known |= {str(repository.refs.read(ref, number).commit) for number in repository.refs.numbers(ref)}
    except SyckptError:
        return  # Reported already; and what it named is not known.
    for commit in sorted(found - known):
        keys = [key for key in repository.store.list("objects/") if key.startswith(f"objects/{commit}")]
        if keys:
            report._add(f"intents/{commit}.json: missing, though {keys[-1]} belongs to no commit that a record names")
