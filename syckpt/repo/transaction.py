"""From packed bytes to a visible commit: opening a branch, intents, publication, recovery (FORMAT.md, section 9).

Order of one save: intent, blob, manifest, locations, commit, signature, ref record. The ref record is the moment at which the save exists.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from syckpt.errors import ConflictError, IntegrityError, NotFoundError
from syckpt.objects.commit import Commit
from syckpt.objects.locations import Locations
from syckpt.objects.refs import Intent, Owner, RefRecord
from syckpt.repo import documents, signing
from syckpt.repo.keys import commit_key, commit_prefix, intent_key, manifest_key
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository, dropped_error

__all__ = ["Hold", "Transaction", "blobs_of", "newest_readable", "open_branch", "recover", "refuse_if_fenced", "settle"]

_log = logging.getLogger("syckpt")


@dataclass(frozen=True)
class Hold:
    """A branch opened for writing: as of record `number`, at `tip`, by `generation`."""

    branch: str
    run: str
    generation: int
    number: int
    tip: str | None


def newest_readable(repository: Repository, branch: str) -> tuple[RefRecord | None, list[str]]:
    """Return the newest undamaged record of a branch, and what is wrong with those after it. For automatic resumption."""
    ref = f"heads/{branch}"
    damage: list[str] = []
    numbers = repository.refs.numbers(ref)
    if not numbers:
        return repository.refs.head(ref), damage  # None, unless the copy for people shows that all of them were lost
    for number in reversed(numbers):
        try:
            return repository.refs.read(ref, number), damage
        except IntegrityError as exc:
            damage.append(str(exc))
    if damage:
        raise IntegrityError(f"no record of branch {branch!r} can be read: {damage[0]}")
    return None, damage


def open_branch(repository: Repository, branch: str, *, run: str, expected: str | None, start: Commit | None = None) -> Hold:
    """Take the right to publish on a branch from every older holder, by an `open` record.

    `expected` is the tip on which the caller builds; a branch without records, or a deleted one, begins at `start`.
    Raises: ConflictError when the branch has moved on since; NotFoundError when retention has just dropped `start`.
    """
    ref = f"heads/{branch}"
    head, damage = newest_readable(repository, branch)
    tip = None if head is None else head.commit
    if tip != expected:
        raise ConflictError(
            f"branch {branch!r} has moved on from {expected or 'empty'} to {tip or 'empty'} since this manager looked: run the script again"
            " to go on from there, or give it its own branch=..."
        )
    number = 0 if head is None else head.number + len(damage)
    begins = head is None or head.deleted
    fork = start if begins else None
    record = repository.refs.append(
        ref,
        after=number,
        commit=tip if fork is None else fork.id,
        commit_seal=fork.seal if fork is not None else None if head is None else head.commit_seal,
        previous=tip,
        # A damaged record may have been an `open` one: count each as a generation.
        generation=1 if head is None else head.generation + len(damage) + 1,
        run=run,
        reason="open" if fork is None else "create",
    )
    if fork is not None and "dropped" in repository.marks(fork.id):
        # Looked at after the record was made: retention looks at the records after it has made its mark, so one of the two sees the other.
        repository.refs.append(
            ref,
            after=record.number,
            commit=None,
            commit_seal=None,
            previous=fork.id,
            generation=record.generation,
            run=run,
            reason="delete",
        )
        raise dropped_error(fork.id)
    if repository.store.size("HEAD") is None:
        repository.set_head(branch)
    return Hold(branch, run, record.generation, record.number, record.commit)


def refuse_if_fenced(repository: Repository, hold: Hold) -> None:
    """Raises: ConflictError when a newer generation has taken the branch."""
    newest, _ = newest_readable(repository, hold.branch)
    if newest is not None and newest.generation > hold.generation:
        raise ConflictError(
            f"heads/{hold.branch} was taken by generation {newest.generation} of run {newest.run}; this save is of generation"
            f" {hold.generation} of run {hold.run}: stop one of the two, or give this one its own branch=..."
        )


class Transaction:
    """One save under way. Create it before the first blob; then `publish`, or `abort`."""

    def __init__(self, repository: Repository, commit: str, hold: Hold, *, uses: tuple[str, ...], owner: Owner) -> None:
        self._repository = repository
        self._commit = commit
        self._hold = hold
        self._intent = Intent(commit, hold.branch, hold.generation, hold.run, uses, owner)
        self._may_be_visible = False
        documents.write(repository.store, intent_key(commit), self._intent.to_body())

    def publish(
        self, commit: Commit, *, hold: Hold, reader: Reader, locations: list[Locations], signer: signing.Signer | None = None
    ) -> tuple[Hold, Commit]:
        """Make the commit, signed if there is a signer, visible, durably; return the branch as it is now and the commit with its seal.

        Raises: ConflictError (fenced, or moved by another), IntegrityError (a blob is gone), StoreError; then nothing is visible.
        """
        repository = self._repository
        try:
            _check_present(reader, locations)
        except IntegrityError:
            refuse_if_fenced(repository, self._hold)
            raise
        seal = documents.write(repository.store, commit_key(commit.id), commit.to_body())
        sealed = Commit.from_body(commit.to_body(), seal=seal, where=commit.id)
        if signer is not None:
            signing.sign(repository, sealed, signer)
        ref = f"heads/{hold.branch}"
        parent = commit.parents[0] if commit.parents else None
        self._may_be_visible = True
        record = repository.refs.append(
            ref,
            after=hold.number,
            commit=commit.id,
            commit_seal=seal,
            previous=hold.tip,
            generation=hold.generation,
            run=hold.run,
            reason="save" if parent == hold.tip else "reset",
        )
        try:
            _finish(repository, sealed, record)
        except Exception as exc:  # noqa: BLE001 - visible already, so whatever it is must not be told as a save that failed
            # What is left is copies and names, which the next opening of the branch completes.
            _log.warning("commit %s is saved; completing its names and copies failed: %s", commit.id, exc)
        return Hold(hold.branch, hold.run, hold.generation, record.number, commit.id), sealed

    def abort(self) -> None:
        """Remove everything that the save wrote, unless its record is there: then the next opening of the branch completes it."""
        if self._may_be_visible and _record_of(self._repository, self._intent) is not None:
            return
        _remove(self._repository, self._commit)


def _check_present(reader: Reader, locations: list[Locations]) -> None:
    """Publication's last look: every blob that the commit leads to is there, whole."""
    wrong = _wrong_blob(reader, locations)
    while wrong is not None:
        # Repack may have moved bytes of others, and deleted the blob, since their locations were read.
        for own in locations:
            for source in own.sources:
                reader.forget(source)
        for source in {source for own in locations for other in own.sources for source in reader.table(other).sources}:
            reader.forget(source)
        again = _wrong_blob(reader, locations)
        if again == wrong:
            raise IntegrityError(f"{wrong}: the save that needs it is given up")
        wrong = again


def _wrong_blob(reader: Reader, locations: list[Locations]) -> str | None:
    """Return what is wrong with the first blob that is not there as it should be."""
    sizes = {key: size for own in locations for key, size in blobs_of(reader, own).items()}
    for key, size in sizes.items():
        found = reader.repository.store.size(key)
        if found != size:
            return f"{key}: {'missing' if found is None else f'{found} bytes'}, expected {size}"
    return None


def blobs_of(reader: Reader, locations: Locations) -> dict[str, int]:
    """Return the blobs to which a rank's locations lead, with their sizes. Raises: IntegrityError, NotFoundError."""
    sizes: dict[str, int] = {}
    for source, row in locations.at:
        place = reader.place(locations, source, row)
        sizes[place.blob.key] = place.blob.size
        if place.base is not None:
            sizes[place.base.blob.key] = place.base.blob.size
    return sizes


def _finish(repository: Repository, commit: Commit, record: RefRecord) -> None:
    """Write what follows a visible commit: its name, its tags, the copy for people; then the intent goes."""
    if commit.name is not None:
        _point(repository, f"names/{commit.name}", commit)
    for tag in commit.tags:
        _point(repository, f"tags/{tag}", commit)
    repository.refs.write_copy(record)
    repository.store.delete(intent_key(commit.id))


def _point(repository: Repository, ref: str, commit: Commit) -> None:
    head = repository.refs.head(ref)
    # Once made, it may have been deleted since, or mean another commit: a process that was stopped must not take it back.
    if head is not None and repository.refs.find(ref, commit.id) is not None:
        return
    try:
        _append_point(repository, ref, commit, head)
    except ConflictError:
        if repository.refs.find(ref, commit.id) is None:  # by whoever completes it at this moment
            raise


def _append_point(repository: Repository, ref: str, commit: Commit, head: RefRecord | None) -> None:
    repository.refs.append(
        ref,
        after=head.number if head else 0,
        commit=commit.id,
        commit_seal=commit.seal,
        previous=head.commit if head else None,
        generation=commit.generation,
        run=commit.run_id,
        reason="create",
    )


def _remove(repository: Repository, commit: str) -> None:
    # From the top down: what is left after a kill in between is still unreachable, and the intent still names it.
    repository.store.delete(commit_key(commit))
    signing.remove(repository, commit)
    # One key that may be absent: the directory goes with the last of its files, and a save cut off early left it without any.
    for key in [*repository.store.list(commit_prefix(commit)), manifest_key(commit, 0)]:
        repository.store.delete(key)
    repository.store.delete(intent_key(commit))


def recover(repository: Repository, hold: Hold) -> list[str]:
    """Clear what older generations of a branch left behind; return the commits whose saves were given up.

    They were fenced by `hold`, so none of them can become visible any more. Raises: ConflictError when `hold` itself is fenced: what is
    there may be a newer generation's.
    """
    refuse_if_fenced(repository, hold)
    dropped: list[str] = []
    for key in repository.store.list("intents/"):
        try:
            body, _ = documents.read(repository.store, key, kind="intent")
            intent = Intent.from_body(body, where=key)
        except NotFoundError:
            continue
        except IntegrityError as exc:
            _log.warning("%s; its save cannot be told apart from others, so it is left alone", exc)
            continue
        if intent.branch != hold.branch or intent.generation >= hold.generation:
            continue
        if not settle(repository, intent):
            dropped.append(intent.commit)
    repository.store.collect_staging()
    return dropped


def settle(repository: Repository, intent: Intent) -> bool:
    """Complete a save that was cut off, if a record names its commit (True), else remove what it wrote (False).

    Only for a save that nobody can publish any more: its branch was fenced, or its writer is dead.
    """
    record = _record_of(repository, intent)
    if record is None:
        _remove(repository, intent.commit)
        return False
    try:
        _finish(repository, repository.read_commit(intent.commit), repository.refs.head(record.ref) or record)
    except (ConflictError, IntegrityError, NotFoundError) as exc:
        # What damaged it, or is completing it at this moment, may not stop the saves to come; what is damaged `verify` names.
        _log.warning("completing commit %s, whose save was cut off by a crash, failed: %s", intent.commit, exc)
    return True


def _record_of(repository: Repository, intent: Intent) -> RefRecord | None:
    """Return the record that published an intent's commit."""
    # Past damaged ones: a record that rotted must not stop the saves to come. Whoever answers a user, or would make a name, stops there.
    return repository.refs.find(f"heads/{intent.branch}", intent.commit, since=intent.generation, problems=[])
