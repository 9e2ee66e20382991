"""Receipts: how the writers of several ranks complete one save, over the byte store alone (FORMAT.md, section 9).

A writer has no rendezvous store, and its trainer may be gone. So what each rank wrote, or failed with, and what rank 0 made of it, are
small documents that are waited for with a deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from syckpt.errors import ConflictError, NotFoundError, RankFailure, RankTimeout, SyckptError, from_wire, to_wire
from syckpt.objects.checks import Fields
from syckpt.repo import documents
from syckpt.repo.keys import intent_key, receipt_key, receipts_prefix, verdict_key
from syckpt.repo.repository import Repository

__all__ = ["Desk", "Receipt", "discard"]

T = TypeVar("T")
_log = logging.getLogger("syckpt")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05


@dataclass(frozen=True)
class Receipt:
    """One rank's part of a save: its manifest's seal and figures, the sizes of the blobs that it leads to, by key, and a digest of the
    structure of each item (`Manifest.structures`)."""

    rank: int
    manifest: str
    stats: dict[str, Any]
    blobs: dict[str, int] = field(default_factory=dict)
    items: dict[str, str | None] = field(default_factory=dict)


class Desk:
    """The receipts of one save of a branch. `timeout_s` bounds each wait."""

    def __init__(self, repository: Repository, branch: str, commit: str, *, timeout_s: float) -> None:
        self._repository = repository
        self._store = repository.store
        self._branch = branch
        self._commit = commit
        self._prefix = receipts_prefix(branch, commit)
        self._timeout_s = timeout_s
        self.is_settled = False
        """Whether the verdict that was awaited is rank 0's: then nothing changes it any more."""

    def _key(self, rank: int) -> str:
        return receipt_key(self._branch, self._commit, rank)

    def await_intent(self) -> None:
        """Wait until rank 0 has begun the save. Raises: RankTimeout; what rank 0 failed with before."""

        def begun() -> bool | None:
            return True if self._store.size(intent_key(self._commit)) is not None or self._verdict() is not None else None

        self._wait(begun, lambda: f"save {self._commit}: rank(s) 0 did not begin it within {self._timeout_s:g} s")
        verdict = self._verdict()
        if verdict is not None and verdict["error"] is not None:
            raise from_wire(verdict["error"])

    def hand_in(self, receipt: Receipt) -> bool:
        """Leave a rank's receipt. Returns False if one is there already, which stays."""
        return self._leave(receipt.rank, vars(receipt) | {"error": None})

    def fail(self, rank: int, error: BaseException) -> bool:
        """Say that a rank's part has failed. Returns False if its receipt is there already, which stays."""
        return self._leave(rank, {"rank": rank, "manifest": None, "stats": {}, "blobs": {}, "items": {}, "error": to_wire(error)})

    def _leave(self, rank: int, told: dict[str, Any]) -> bool:
        body = {"kind": "receipt", "version": 1, "commit": self._commit, **told}
        try:
            documents.write(self._store, self._key(rank), body)
        except ConflictError:
            return False
        return True

    def collect(self, ranks: Sequence[int]) -> list[Receipt]:
        """Wait for the receipts of other ranks.

        Raises: the first failure found, in its class, naming every rank that failed; RankTimeout naming those that are missing; RankFailure
        when the save's own intent is gone: nobody but a newer incarnation removes it.
        """
        found: dict[int, Receipt] = {}
        failed: dict[int, dict[str, str]] = {}

        def look() -> bool | None:
            for rank in ranks:
                if rank not in found and rank not in failed and self._store.size(self._key(rank)) is not None:
                    self._take(rank, found, failed)
            if failed or len(found) == len(ranks):
                return True
            self.require_undecided()
            if self._store.size(intent_key(self._commit)) is None:
                raise RankFailure(f"save {self._commit}: another incarnation of the job cleared it")
            return None

        def missing() -> str:
            absent = ", ".join(str(rank) for rank in ranks if rank not in found)
            return f"save {self._commit}: rank(s) {absent} did not complete their part within {self._timeout_s:g} s; the save is given up"

        self._wait(look, missing)
        if failed:
            first = from_wire(next(iter(failed.values())))
            causes = "; ".join(f"rank {rank}: {wire['message']}" for rank, wire in sorted(failed.items()))
            raise type(first)(f"save {self._commit} failed on rank(s) {', '.join(map(str, sorted(failed)))}: {causes}")
        return [found[rank] for rank in ranks]

    def _take(self, rank: int, found: dict[int, Receipt], failed: dict[int, dict[str, str]]) -> None:
        key = self._key(rank)
        body, _ = documents.read(self._store, key, kind="receipt")
        fields = Fields(body, where=key)
        if fields.raw("error") is not None:
            failed[rank] = _error(fields)
        else:
            blobs = fields.mapping("blobs")
            if any(type(size) is not int for size in blobs.values()):
                fields.fail("'blobs' is not one of keys to sizes")
            found[rank] = Receipt(rank, fields.text("manifest"), fields.mapping("stats"), blobs, fields.mapping("items"))

    def decide(self, seal: str | None, error: BaseException | None = None, *, rank: int = 0) -> None:
        """Tell the other ranks' writers that the save is visible, or has failed. Raises: ConflictError when that was said before."""
        body = {
            "kind": "verdict",
            "version": 1,
            "commit": self._commit,
            "rank": rank,
            "seal": seal,
            "error": None if error is None else to_wire(error),
        }
        documents.write(self._store, verdict_key(self._branch, self._commit), body)

    def _verdict(self) -> dict[str, Any] | None:
        key = verdict_key(self._branch, self._commit)
        if self._store.size(key) is None:
            return None
        try:
            body, _ = documents.read(self._store, key, kind="verdict")
        except NotFoundError:
            return None
        fields = Fields(body, where=key)
        error = None if fields.raw("error") is None else _error(fields)
        return {"rank": fields.integer("rank"), "seal": fields.text_or_none("seal"), "error": error}

    def await_verdict(self, rank: int) -> str:
        """Wait for rank 0's verdict, remove this rank's receipt, and return the commit's seal.

        Raises: what the save failed with; RankTimeout when a rank has given it up: then it becomes visible only if rank 0 is already
        about to make it so.
        """
        # Rank 0 itself waits as long for the slowest part, and only then decides.
        late = f"save {self._commit}: rank(s) 0 did not decide it within {2 * self._timeout_s:g} s"
        try:
            verdict = self._wait(self._outcome, lambda: late, times=2)
        except RankTimeout as exc:
            verdict = self._give_up(rank, exc)
        try:
            self._store.delete(self._key(rank))
        except SyckptError as exc:
            _log.warning("the receipt of rank %d for save %s could not be removed: %s", rank, self._commit, exc)
        self.is_settled = verdict["rank"] == 0
        # Somebody may have given it up while rank 0 was publishing it.
        seal = verdict["seal"] if verdict["error"] is None else self.published()
        if seal is None:
            raise from_wire(verdict["error"])
        return str(seal)

    def _give_up(self, rank: int, late: RankTimeout) -> dict[str, Any]:
        """Decide in rank 0's place that the save has failed; return the verdict that there is, which may be another one."""
        try:
            self.decide(None, late, rank=rank)
        except ConflictError:
            _log.debug("save %s was decided meanwhile", self._commit)
        verdict = self._outcome()
        if verdict is None:
            raise late
        return verdict

    def require_undecided(self) -> None:
        """Raises: what another rank has given the save up with, since rank 0 took, or was stopped, for too long."""
        verdict = self._verdict()
        if verdict is not None and verdict["error"] is not None:
            raise from_wire(verdict["error"])

    def _outcome(self) -> dict[str, Any] | None:
        """Return the verdict; without one, what the branch shows: a save whose intent is gone was published or given up."""
        begun = self._store.size(intent_key(self._commit)) is not None
        verdict = self._verdict()
        if verdict is not None or begun:
            return verdict
        seal = self.published()
        gone = RankFailure(f"save {self._commit}: rank(s) 0 gave it up, or another incarnation of the job cleared it")
        return {"rank": 0, "seal": seal, "error": None if seal is not None else to_wire(gone)}

    def published(self) -> str | None:
        """Return the seal that the branch's records have for the commit; None if it is not visible."""
        record = self._repository.refs.find(f"heads/{self._branch}", self._commit, problems=[])
        return None if record is None else record.commit_seal

    def clear(self, *, wait_s: float) -> None:
        """Remove the verdict once every rank knows it; after `wait_s` it stays for recovery."""
        deadline = time.monotonic() + wait_s
        try:
            while any(not key.endswith("verdict.json") for key in self._store.list(self._prefix)):
                if time.monotonic() >= deadline:
                    return
                time.sleep(_LAST_PAUSE_S)
            self._store.delete(verdict_key(self._branch, self._commit))
        except SyckptError as exc:
            _log.warning("the verdict on save %s could not be removed; recovery does it: %s", self._commit, exc)

    def _wait(self, look: Callable[[], T | None], late: Callable[[], str], *, times: int = 1) -> T:
        deadline = time.monotonic() + times * self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while (seen := look()) is None:
            if time.monotonic() >= deadline:
                raise RankTimeout(late())
            time.sleep(pause_s)
            pause_s = min(_LAST_PAUSE_S, 1.5 * pause_s)
        return seen


def _error(fields: Fields) -> dict[str, str]:
    """Return the error that a document tells of, for `from_wire`. Raises: IntegrityError."""
    told = Fields(fields.mapping("error"), where=f"{fields.where}: error")
    return {"class": told.text("class"), "message": told.text("message")}


def discard(repository: Repository, branch: str) -> None:
    """Remove every receipt of a branch that was just taken, before its first save: no older generation can go on."""
    try:
        for key in repository.store.list(receipts_prefix(branch)):
            repository.store.delete(key)
    except SyckptError as exc:
        _log.warning("receipts of given up saves on %s could not be removed; the next opening does it: %s", branch, exc)
