"""Receipts: how the writers of several ranks complete one save, over the byte store alone (FORMAT.md, section 9).

A writer has no rendezvous store, and its trainer may be gone. So what each rank wrote, or failed with, and what rank 0 made of it, are
small documents that are waited for with a deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from syckpt.errors import ConflictError, NotFoundError, RankFailure, RankTimeout, SyckptError, from_wire, to_wire
from syckpt.objects.checks import Fields
from syckpt.repo import documents
from syckpt.repo.keys import intent_key, receipt_key, receipts_prefix, verdict_key
from syckpt.repo.repository import Repository

__all__ = ["Desk", "Receipt", "discard", "listed"]

S = TypeVar("S")
T = TypeVar("T")
_log = logging.getLogger("syckpt")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05
# The more ranks look, the longer each pauses: a store has at most ten thousand looks a second to answer.
_PAUSE_PER_RANK_S = 1e-4
# Requests at a time: a network file system takes a millisecond for each, and rank 0 makes several for every rank.
_AT_ONCE = 16
_MOST_NAMED = 16


@dataclass(frozen=True)
class Receipt:
    """One rank's part of a save: its manifest's seal and figures, the sizes of the blobs that it leads to, by key, and a digest of the
    structure of each item (`Manifest.structures`)."""

    rank: int
    manifest: str
    stats: dict[str, Any]
    blobs: dict[str, int] = field(default_factory=dict)
    items: dict[str, str] = field(default_factory=dict)


class Desk:
    """The receipts of one save of a branch. `timeout_s` bounds each wait; `world_size` is how many ranks look."""

    def __init__(self, repository: Repository, branch: str, commit: str, *, timeout_s: float, world_size: int = 1) -> None:
        self._repository = repository
        self._store = repository.store
        self._branch = branch
        self._commit = commit
        self._prefix = receipts_prefix(branch, commit)
        self._timeout_s = timeout_s
        self._last_pause_s = max(_LAST_PAUSE_S, world_size * _PAUSE_PER_RANK_S)
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
        missing = {self._key(rank): rank for rank in ranks}

        def look() -> bool | None:
            # By one listing, however many are missing.
            new = [missing.pop(key) for key in self._store.list(self._prefix, deep=False) if key in missing]
            for rank, told in zip(new, _at_once(self._read, new), strict=True):
                if isinstance(told, Receipt):
                    found[rank] = told
                else:
                    failed[rank] = told
            if failed or not missing:
                return True
            self.require_undecided()
            if self._store.size(intent_key(self._commit)) is None:
                raise RankFailure(f"save {self._commit}: another incarnation of the job cleared it")
            return None

        def late() -> str:
            absent = listed(missing.values())
            return f"save {self._commit}: rank(s) {absent} did not complete their part within {self._timeout_s:g} s; the save is given up"

        self._wait(look, late)
        if failed:
            # Every rank reads it, and they may all have failed.
            some = sorted(failed)[:_MOST_NAMED]
            causes = "; ".join(f"rank {rank}: {failed[rank]['message']}" for rank in some)
            kind = type(from_wire(failed[some[0]]))
            raise kind(f"save {self._commit} failed on rank(s) {listed(sorted(failed))}: {causes}")
        return [found[rank] for rank in ranks]

    def _read(self, rank: int) -> Receipt | dict[str, str]:
        """Return a rank's receipt, or the error that it tells of. Raises: IntegrityError."""
        key = self._key(rank)
        body, _ = documents.read(self._store, key, kind="receipt")
        fields = Fields(body, where=key)
        if fields.raw("error") is not None:
            return _error(fields)
        blobs = fields.mapping("blobs")
        if any(type(size) is not int for size in blobs.values()):
            fields.fail("'blobs' is not one of keys to sizes")
        return Receipt(rank, fields.text("manifest"), fields.mapping("stats"), blobs, fields.mapping("items"))

    def lacking(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Return the receipts that name a blob which is not there in its size."""
        sizes = {key: size for receipt in receipts for key, size in receipt.blobs.items()}
        absent = {key for key, size in zip(sizes, _at_once(self._store.size, list(sizes)), strict=True) if size != sizes[key]}
        return [receipt for receipt in receipts if not absent.isdisjoint(receipt.blobs)]

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
            pause_s = min(self._last_pause_s, 1.5 * pause_s)
        return seen


def listed(ranks: Iterable[int]) -> str:
    """Return ranks as text, of thousands the first few: every rank is told it."""
    named = list(map(str, ranks))
    more = len(named) - _MOST_NAMED
    return ", ".join(named[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _at_once(request: Callable[[S], T], about: Sequence[S]) -> list[T]:
    """Make a request of the store about each, several at a time; return the answers in order. Raises: what one of them failed with."""
    share = max(1, -(-len(about) // _AT_ONCE))
    shares = [about[begin : begin + share] for begin in range(0, len(about), share)]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="syckpt-receipts") as pool:
        return [answer for answers in pool.map(lambda each: [request(one) for one in each], shares) for answer in answers]


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
