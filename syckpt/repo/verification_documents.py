"""The documents that are no part of a commit: refs, HEAD, intents, leases, receipts, marks. Each whole, and about what its name says."""

from __future__ import annotations

from collections.abc import Callable

from syckpt.errors import IntegrityError, NotFoundError, SyckptError
from syckpt.objects import ids
from syckpt.objects.checks import Fields
from syckpt.objects.commit import Commit
from syckpt.objects.refs import Intent, Lease
from syckpt.repo import documents, signing
from syckpt.repo.keys import MARK, RECEIPT, commit_of, intent_key, lease_key
from syckpt.repo.refs import CLASSES
from syckpt.repo.repository import Repository
from syckpt.repo.verification_report import VerifyReport

__all__ = ["Records", "attempt", "check_documents", "check_leftovers", "check_names"]


class Records:
    """HEAD and every ref record, checked; and the commits that they name, oldest first."""

    def __init__(self, repository: Repository, report: VerifyReport) -> None:
        self.commits: dict[str, tuple[str | None, str]] = {}
        """Seal, and the key of the record that says so."""
        self.complete = True
        """Whether every record could be read."""
        self._repository = repository
        self._report = report
        for kind in CLASSES:
            for ref, numbers in sorted(repository.refs.listed(kind).items()):
                before = len(report.findings)
                attempt(report, repository.refs.head, ref)
                self._check(ref, numbers)
                self.complete &= len(report.findings) == before
        # Last, since it may find what is wrong with a ref in the same words.
        attempt(report, _check_head, repository)

    def _check(self, ref: str, numbers: list[int]) -> None:
        refs = self._repository.refs
        gaps = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
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


def attempt(report: VerifyReport, check: Callable[..., object], *arguments: object) -> None:
    try:
        check(*arguments)
    except NotFoundError:
        return  # A running writer finished in between.
    except SyckptError as exc:
        report.add(str(exc))


def _check_head(repository: Repository) -> None:
    repository.head_branch()
    if repository.store.size("HEAD") is None and repository.refs.names("heads"):
        raise IntegrityError("HEAD: missing; until there is a second branch, the only one is taken for it")


def check_names(repository: Repository, commit: Commit) -> None:
    """Check that the name and tags that a commit was saved with exist, or existed."""
    wanted = [f"names/{commit.name}"] * (commit.name is not None) + [f"tags/{tag}" for tag in commit.tags]
    if not wanted or commit.dropped or repository.store.size(intent_key(commit.id)) is not None:
        return  # Names are free again, or still to be made.
    for ref in wanted:
        if not repository.refs.numbers(ref):
            raise IntegrityError(f"{repository.refs.key(ref, 1)}: missing, though commit {commit.id} was saved by that name")


# -- other documents -------------------------------------------------------------------------------------------------------


def check_documents(repository: Repository, report: VerifyReport) -> None:
    """Check every document that is no part of a commit and no record: whole, and about what its name says."""
    checks = {"intents/": _check_intent, "leases/": _check_lease, "receipts/": _check_receipt, "hello/": _check_hello}
    for prefix, check in checks.items():
        for key in repository.store.list(prefix):
            attempt(report, check, repository, key)
    for key in repository.store.list("objects/"):
        if MARK.fullmatch(key):
            attempt(report, _check_mark, repository, key)
    for text in signing.findings(repository):
        report.add(text)


def _check_intent(repository: Repository, key: str) -> None:
    body, _ = documents.read(repository.store, key, kind="intent")
    intent = Intent.from_body(body, where=key)
    if key != intent_key(intent.commit):
        raise IntegrityError(f"{key}: is the intent of {intent.commit}")


def _check_lease(repository: Repository, key: str) -> None:
    body, _ = documents.read(repository.store, key, kind="lease")
    lease = Lease.from_body(body, where=key)
    if key != lease_key(lease.branch):
        raise IntegrityError(f"{key}: is the lease on {lease.branch!r}")


def _check_receipt(repository: Repository, key: str) -> None:
    match = RECEIPT.fullmatch(key)
    if match is None:
        raise IntegrityError(f"{key}: neither a rank's receipt nor a verdict")
    body, _ = documents.read(repository.store, key, kind="verdict" if match["rank"] is None else "receipt")
    fields = Fields(body, where=key)
    if fields.text("commit") != match["commit"] or (match["rank"] is not None and fields.integer("rank") != int(match["rank"])):
        raise IntegrityError(f"{key}: is about {fields.text('commit')}, rank {body.get('rank')}")


def _check_hello(repository: Repository, key: str) -> None:
    documents.read(repository.store, key, kind="hello")


def _check_mark(repository: Repository, key: str) -> None:
    body, _ = documents.read(repository.store, key, kind="mark")
    Fields(body, where=key).text("why")


def check_leftovers(repository: Repository, report: VerifyReport, records: Records) -> None:
    """Check that every object belongs to a commit that a record names, or to a save under way: to its intent."""
    if not records.complete:
        return  # Reported already; and what the damaged ones named is not known.
    # In this order: what a running writer publishes or gives up in between is found in one of the later places.
    found = {commit_of(key): key for key in repository.store.list("objects/")}
    known = records.commits.keys() | {commit_of(key) for key in repository.store.list("intents/")}
    unknown = {commit: key for commit, key in found.items() if commit not in known and ids.is_commit_id(commit)}
    if not unknown:
        return
    published = Records(repository, VerifyReport()).commits.keys()
    for commit, key in sorted(unknown.items()):
        if commit not in published and repository.store.size(key) is not None:
            report.add(f"{intent_key(commit)}: missing, though {key} belongs to no commit that a record names")
