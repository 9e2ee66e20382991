"""Refs over a store: numbered, create-only records (FORMAT.md, sections 2.6 and 9). The highest one is the truth, all are the reflog."""

from __future__ import annotations

import logging
import time

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from syckpt.objects.refs import RefRecord
from syckpt.repo import documents
from syckpt.repo.keys import COPY, RECORD, copy_key, record_key, records_prefix, ref_of
from syckpt.stores.base import Store

__all__ = ["CLASSES", "Refs"]

CLASSES = ("heads", "tags", "names")
_log = logging.getLogger("syckpt")
_MAX_COPY_NBYTES = 512  # a commit id and the end of a line have 26


class Refs:
    """Reads and moves refs. A ref is named `heads/<branch>`, `tags/<tag>` or `names/<name>`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def key(self, ref: str, number: int) -> str:
        """Return the key of a record."""
        return record_key(ref, number)

    def numbers(self, ref: str) -> list[int]:
        """Return the numbers of a ref's records, ascending. Raises: IntegrityError when one is missing in between."""
        listed = self._store.list(records_prefix(ref))
        found = self._without_gaps(ref, [int(match["number"]) for match in map(RECORD.fullmatch, listed) if match])
        # Listings of network file systems may lag; a look at the next name does not.
        following = found[-1] + 1 if found else 1
        while self._store.size(self.key(ref, following)) is not None:
            found.append(following)
            following += 1
        return found

    def _without_gaps(self, ref: str, found: list[int]) -> list[int]:
        if found and found[-1] - found[0] + 1 != len(found):
            # A listing is of no one moment: it may show a record, and not the one that was made just before it.
            present = set(found)
            for number in range(found[0], found[-1]):
                if number not in present and self._store.size(self.key(ref, number)) is None:
                    raise IntegrityError(f"{self.key(ref, number)}: missing, while later records of {ref} exist: a record was lost")
            return list(range(found[0], found[-1] + 1))
        return found

    def heads(self, kind: str, *, problems: list[IntegrityError] | None = None) -> dict[str, RefRecord]:
        """Return the newest record of every existing ref of a class, by name, as listed.

        Raises: IntegrityError for a damaged one; with `problems` it is left out and added there.
        """
        found = {}
        for ref, own in sorted(self.listed(kind).items()):
            try:
                newest = self._newest(ref, self._without_gaps(ref, own))
            except IntegrityError as exc:
                if problems is None:
                    raise
                problems.append(exc)
                continue
            if newest is not None and not newest.deleted:
                found[ref.partition("/")[2]] = newest
        return found

    def listed(self, kind: str) -> dict[str, list[int]]:
        """Return the listed numbers of each ref of a class; none for a branch of which only the copy for people is left."""
        # Copies first: the record of a branch that is made meanwhile is in the later listing.
        copies, records = self._store.list(f"refs/{kind}/"), self._store.list(f"logs/refs/{kind}/")
        numbers: dict[str, list[int]] = {ref_of(match): [] for match in filter(None, map(COPY.fullmatch, copies))}
        for match in filter(None, map(RECORD.fullmatch, records)):
            numbers.setdefault(ref_of(match), []).append(int(match["number"]))
        return numbers

    def read(self, ref: str, number: int) -> RefRecord:
        """Return one record. Raises: NotFoundError, IntegrityError."""
        key = self.key(ref, number)
        body, _ = documents.read(self._store, key, kind="ref")
        record = RefRecord.from_body(body, where=key)
        if (record.ref, record.number) != (ref, number):
            raise IntegrityError(f"{key}: is record {record.number} of {record.ref}, expected {number} of {ref}")
        return record

    def find(self, ref: str, commit: str, *, since: int = 0, problems: list[IntegrityError] | None = None) -> RefRecord | None:
        """Return the newest record that names a commit, or None; records of generations before `since` are not searched.

        Raises: IntegrityError for a damaged record on the way; with `problems` it is passed over and added there.
        """
        for number in reversed(self.numbers(ref)):
            try:
                record = self.read(ref, number)
            except IntegrityError as exc:
                if problems is None:
                    raise
                problems.append(exc)
                continue
            if record.commit == commit:
                return record
            if record.generation < since:
                return None
        return None

    def head(self, ref: str) -> RefRecord | None:
        """Return the newest record, or None for a ref that never was.

        Raises: IntegrityError when it is damaged, or when the copy for people shows that a newer one was lost.
        """
        return self._newest(ref, self.numbers(ref))

    def _newest(self, ref: str, numbers: list[int]) -> RefRecord | None:
        newest = self.read(ref, numbers[-1]) if numbers else None
        self._check_copy(ref, newest)
        return newest

    def _check_copy(self, ref: str, newest: RefRecord | None) -> None:
        if not ref.startswith("heads/"):
            return
        key = copy_key(ref)
        try:
            copy = self._store.get(key, limit=_MAX_COPY_NBYTES).decode("ascii", "replace").strip()
        except NotFoundError:
            return
        # The copy follows the records, so it may lag (a kill in between); it can name nothing that no record names.
        if newest is not None and copy == (newest.commit or ""):
            return
        # Listed again: the copy may be that of a record made since.
        numbers = self.numbers(ref)
        if not any(self.read(ref, number).commit == copy for number in reversed(numbers)):
            raise IntegrityError(
                f"{key}: names {copy[:40]!r}, which no record names: {self.key(ref, numbers[-1] + 1 if numbers else 1)} was lost or this"
                f" file is damaged; if `syckpt log` shows all you expect, delete {key}"
            )

    def names(self, kind: str) -> list[str]:
        """Return the names of the existing refs of a class, sorted."""
        return sorted(ref.partition("/")[2] for ref in self.listed(kind) if self.exists(ref))

    def exists(self, ref: str) -> bool:
        """Whether a ref has records and was not deleted. One whose newest record is damaged, or whose records are all lost, exists."""
        numbers = self.numbers(ref)
        if not numbers:
            return ref.startswith("heads/") and self._store.size(copy_key(ref)) is not None
        try:
            return not self.read(ref, numbers[-1]).deleted
        except IntegrityError:
            return True

    def append(
        self,
        ref: str,
        *,
        after: int,
        commit: str | None,
        commit_seal: str | None,
        previous: str | None,
        generation: int,
        run: str,
        reason: str,
    ) -> RefRecord:
        """Create record `after + 1` and return it; durable on return.

        Raises: ConflictError naming who was faster; StoreError.
        """
        record = RefRecord(
            ref=ref,
            number=after + 1,
            commit=commit,
            commit_seal=commit_seal,
            previous=previous,
            generation=generation,
            run=run,
            reason=reason,
            time_ns=time.time_ns(),
        )
        try:
            documents.write(self._store, self.key(ref, record.number), record.to_body())
        except ConflictError:
            there = self.read(ref, record.number)
            if there != record:
                raise ConflictError(
                    f"{ref} was moved by another writer: record {there.number} is generation {there.generation} of run {there.run}"
                    f" ({there.reason}, {there.commit}); this one is generation {generation} of run {run}: stop one of the two,"
                    " or give this one its own branch=..."
                ) from None
        except StoreError as exc:
            # A lost answer, or a store that could not take the record back: what counts is what readers see.
            if not self._is_there(record):
                raise
            _log.warning("%s is there, though writing it failed: %s", self.key(ref, record.number), exc)
        return record

    def _is_there(self, record: RefRecord) -> bool:
        try:
            return self.read(record.ref, record.number) == record
        except (NotFoundError, IntegrityError):
            return False

    def write_copy(self, record: RefRecord) -> None:
        """Bring the copy for people up to a branch's record."""
        key = copy_key(record.ref)
        if record.commit is None:
            self._store.delete(key)
        else:
            self._store.replace(key, record.commit.encode() + b"\n")
