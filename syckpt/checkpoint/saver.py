"""The trainer's account of saves: which are in the writer's hands, in which slots, and what became of each. Knows nothing of models."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from syckpt.checkpoint.process import Settings, WriterProcess
from syckpt.checkpoint.wire import PeerGone, PeerStuck
from syckpt.errors import ConflictError, CoordinationError, StateError, SyckptError, WriterDied, from_wire, to_wire
from syckpt.objects.commit import Commit
from syckpt.objects.refs import Lease
from syckpt.repo import leases, owner
from syckpt.repo.receipts import Desk
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold, newest_readable, refuse_if_fenced
from syckpt.state.staging import Part, Slot, layout

__all__ = ["PendingCommit", "Saver"]

_log = logging.getLogger("syckpt")
_MAX_SLOTS = 2
_GRACE_S = 2.0


class PendingCommit:
    """A save under way. Prints as its id, which never changes."""

    def __init__(self, commit: str, saver: Saver) -> None:
        self.id = commit
        self._saver = saver
        self._commit: Commit | None = None
        self._error: SyckptError | None = None

    def done(self) -> bool:
        """Whether the save is durable, or has failed."""
        self._saver.pump()
        return self._settled

    def result(self, timeout: float | None = None) -> Commit:
        """Wait, for at most `timeout` seconds, until the save is durable, and return its commit.

        Raises: what made the save fail; TimeoutError.
        """
        self._saver.wait_for(self, timeout_s=timeout)
        if self._error is not None:
            raise self._error
        assert self._commit is not None
        return self._commit

    @property
    def failed(self) -> bool:
        """Whether the save is known to have failed."""
        return self._error is not None

    @property
    def _settled(self) -> bool:
        return self._commit is not None or self._error is not None

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        state = "failed" if self._error else "durable" if self._commit else "pending"
        return f"<PendingCommit {self.id} {state}>"


@dataclass
class _InHand:
    pending: PendingCommit
    slot: Slot
    stall_s: float


class Saver:
    """Hands saves to the writer and keeps account of them. One branch at a time; safe to use from several threads.

    `reopen(hold, tip)` opens the branch anew, after a writer died. `on_settled(pending, commit, error)` is told of each save once.
    """

    def __init__(
        self,
        repository: Repository,
        settings: Settings,
        *,
        reopen: Callable[[Hold, str | None], Hold],
        on_settled: Callable[[PendingCommit, Commit | None, SyckptError | None], None],
    ) -> None:
        self._repository = repository
        self._settings = settings
        self._reopen = reopen
        self._on_settled = on_settled
        self._hold: Hold | None = None
        self._process: WriterProcess | None = None
        self._slots: list[Slot] = []
        self._in_hand: dict[str, _InHand] = {}
        self._submitted: str | None = None
        self.lock = self._lock = threading.RLock()
        """Held by whoever uses the writer; a manager holds it for a whole save, so that threads make theirs one after the other."""
        self._pid = os.getpid()

    @property
    def hold(self) -> Hold | None:
        """The branch as this saver last knew it; None before `open`."""
        return self._hold

    @property
    def writer_pid(self) -> int | None:
        """The writer's process id, while there is one."""
        return self._process.pid if self._process else None

    @property
    def pending(self) -> list[PendingCommit]:
        """Saves in hand, oldest first."""
        return [entry.pending for entry in self._in_hand.values()]

    def open(self, hold: Hold) -> None:
        """Start a writer for a branch that was just opened; returns before it is ready."""
        with self._lock:
            self._hold = hold
            self._start()

    # -- saving ------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """See to it that there is a writer. Raises: ConflictError when the branch was lost meanwhile; WriterDied; StoreError."""
        self.require_own_process()
        with self._lock:
            self._ensure_writer()

    def busy(self) -> bool:
        """Whether a save would have to wait for a slot."""
        self.pump()
        return len(self._in_hand) >= _MAX_SLOTS

    def prewarm(self, parts: Sequence[Part]) -> None:
        """Make a slot that holds the parts and wait until the writer is ready. Raises: as `prepare`, CoordinationError (not in time)."""
        self.require_own_process()
        with self._lock:
            self._ensure_writer()
            self._free_slot(layout(parts)[1])
            deadline = time.monotonic() + self._settings.timeout_s
            while (process := self._process) is not None and not process.ready:
                if not self._pump(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise CoordinationError(f"writer process {process.pid} was not ready in {self._settings.timeout_s:g} s")

    def submit(
        self,
        commit: str,
        parts: Sequence[Part],
        *,
        items: dict[str, Any],
        rng: Any,
        after: Callable[[], str | None],
        meta: dict[str, Any],
        started: float,
        layouts: dict[str, Any] | None = None,
        sharding: dict[str, Any] | None = None,
        sent: dict[str, list[str]] | None = None,
        table: dict[str, Any] | None = None,
        afresh: bool = False,
    ) -> PendingCommit:
        """Copy the parts into a slot and hand them to the writer; on return the caller may change its tensors.

        `items` and `rng` are the structure around the parts, whose entries it counts; `layouts` is how items are shown (`Config.layouts`),
        `sharding` what resharders declared of them (`Declared.rows`), `sent` what of them is rank 0's in truth (`Manifest.sent`).
        `table` is who stores what (`Sharing.table`), for rank 0's writer: sent when it is another object than the last one. `afresh`: the
        writer points to no bytes that are there already (`Packer.pack`).

        `after()` is the save, or commit, that this one is to follow.
        `started` is when the caller's `save()` began (`time.perf_counter()`): the stall is counted from there.
        Raises: CoordinationError when no slot comes free in time; StoreError when there is no memory for one.
        """
        self.require_own_process()
        with self._lock:
            self._ensure_writer()
            offsets, nbytes = layout(parts)
            slot = self._free_slot(nbytes)
            copying = time.perf_counter()
            slot.fill(parts, offsets)
            ended = time.perf_counter()
            meta["stats"] = {"stall_s": ended - started, "copy_s": ended - copying}
            message = {
                "op": "save",
                "id": commit,
                "slot": slot.index,
                # Asked now: waiting for a slot may have shown that the save before this one failed.
                "after": after(),
                "tensors": {
                    "path": [list(part.path) for part in parts],
                    "dtype": [part.dtype for part in parts],
                    "shape": [list(part.shape) for part in parts],
                    "box": [None if part.box is None else [list(part.box.offsets), list(part.box.sizes)] for part in parts],
                    "offset": offsets,
                    "local": [part.local for part in parts],
                },
                "trainable": [index for index, part in enumerate(parts) if part.trainable and part.array is not None],
                "items": items,
                "rng": rng,
                "layouts": layouts or {},
                "sharding": sharding or {},
                "sent": sent or {},
                "has_table": table is not None,
                "afresh": afresh,
                "meta": meta,
            }
            pending = PendingCommit(commit, self)
            self._in_hand[commit] = _InHand(pending, slot, 0.0)
            self._submitted = commit
            self._send_save(slot, message, table)
            if commit in self._in_hand:  # else the writer was found dead
                self._in_hand[commit].stall_s = time.perf_counter() - started
            return pending

    def _send_save(self, slot: Slot, message: dict[str, Any], table: dict[str, Any] | None) -> None:
        process = self._process
        assert process is not None
        try:
            if slot.index not in process.slots:
                process.channel.send({"op": "slot", "index": slot.index, "nbytes": slot.nbytes}, fd=slot.fd)
                process.slots.add(slot.index)
            if table is not None and table is not process.table:
                process.channel.send({"op": "table", "table": table})
                process.table = table
            process.channel.send(message)
        except PeerGone as exc:
            self._lost(exc)
        except BaseException:
            # The channel is closed: the writer completes what it has in hand, and ends.
            self._writer_ended()
            raise

    def _free_slot(self, nbytes: int) -> Slot:
        deadline = time.monotonic() + self._patience_s
        while len(self._in_hand) >= _MAX_SLOTS:
            if not self._pump(deadline - time.monotonic()):
                raise CoordinationError(f"no staging slot came free in {self._settings.timeout_s:g} s: {self._what_is_stuck()}")
        busy = {entry.slot.index for entry in self._in_hand.values()}
        self._ensure_writer()
        slot = next((s for s in self._slots if s.index not in busy and s.nbytes >= nbytes), None)
        if slot is None:
            slot = self._replace_slot(next((s for s in self._slots if s.index not in busy), None), nbytes)
        return slot

    def _replace_slot(self, old: Slot | None, nbytes: int) -> Slot:
        """Make a slot, in place of one that is too small, if there is one. A tenth of room: optimizers grow state after the first step."""
        index = len(self._slots) if old is None else old.index
        if old is not None:
            self._slots.remove(old)
            old.close()
            if self._process is not None:
                self._process.slots.discard(index)
        slot = Slot(index, nbytes + nbytes // 10)
        self._slots.append(slot)
        return slot

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that made the saver, to which the writer listens."""
        return self._pid != os.getpid()

    def require_own_process(self) -> None:
        """Raises: StateError in a fork."""
        if self.is_inherited:
            raise StateError(
                f"this manager belongs to process {self._pid}, of which this one, {os.getpid()}, is a fork: save there, or make another"
                " manager here, on a branch of its own"
            )

    # -- hearing of saves --------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take in what the writer has said, without waiting."""
        if not self.is_inherited:
            with self._lock:
                while self._pump(0.0):
                    pass

    def wait_for(self, pending: PendingCommit | None, *, timeout_s: float | None) -> None:
        """Wait until one save (None: all, and the retention behind them) is settled.

        Raises: TimeoutError after `timeout_s`; without one, CoordinationError after the settings' time.
        """
        limit = self._patience_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        if self._in_hand:
            self.require_own_process()
        while not pending._settled if pending is not None else bool(self._in_hand):
            with self._lock:
                heard = self._pump(min(0.5, deadline - time.monotonic()))
            if not heard and time.monotonic() >= deadline:
                if timeout_s is not None:
                    raise TimeoutError(f"save {pending or 'in hand'} was not durable within {timeout_s:g} s")
                raise CoordinationError(f"waited {limit:g} s for saves to become durable: {self._what_is_stuck()}")
        while pending is None and (process := self._process) is not None and process.tidies and time.monotonic() < deadline:
            with self._lock:
                self._pump(min(0.5, deadline - time.monotonic()))

    @property
    def _patience_s(self) -> float:
        """A little longer than the writers wait for each other, so that theirs is the verdict."""
        return self._settings.timeout_s + (_GRACE_S if self._settings.world_size > 1 else 0.0)

    def _what_is_stuck(self) -> str:
        work = ", ".join(self._in_hand) or "anything"
        if self._settings.world_size > 1:
            waits = self._process.waits_for if self._process else None
            busy = f"last said that it waits for {waits}" if waits else f"is alive but has not finished {work}; is it, or the store, hung?"
            return f"writer process {self.writer_pid} of rank(s) {self._settings.rank} {busy}"
        return f"writer process {self.writer_pid} is alive but has not finished {work}; is {self._repository.store.describe()} hung?"

    def _pump(self, timeout_s: float) -> bool:
        """Handle one event of the writer, waiting for it up to `timeout_s`; False when none came."""
        process = self._process
        if process is None:
            return False
        try:
            event = process.hear(timeout_s)
        except PeerGone as exc:
            self._lost(exc)
            return True
        if event is not None:
            self._handle(event)
        return event is not None

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready" and self._process is not None:
            self._process.ready = True
        elif kind == "waits" and self._process is not None:
            self._process.waits_for = event["for"]
        elif kind == "published":
            body, seal = event["body"], event["seal"]
            self._settle(event["id"], commit=Commit.from_body(body, seal=seal, where=event["id"]), durable_s=event["durable_s"])
            if self._process is not None:
                self._process.tidies = event["tidies"]
        elif kind == "tidied" and self._process is not None:
            self._process.tidies = False
        elif kind == "failed":
            self._settle(event["id"], error=from_wire(event["error"]))
        elif kind == "fatal":
            self._writer_ended(from_wire(event["error"]))

    def _settle(
        self, commit_id: str, *, commit: Commit | None = None, error: SyckptError | None = None, durable_s: float | None = None
    ) -> None:
        entry = self._in_hand.pop(commit_id)
        if commit is not None:
            stats = {**commit.stats, "stall_s": entry.stall_s}
            if durable_s is not None:
                stats["durable_s"] = entry.stall_s + durable_s
            commit = replace(commit, stats=stats)
            if self._hold is not None:
                self._hold = replace(self._hold, tip=commit.id)
        entry.pending._commit, entry.pending._error = commit, error
        self._on_settled(entry.pending, commit, error)

    # -- the process -------------------------------------------------------------------------------------------------

    def _ensure_writer(self) -> None:
        """Start another writer where the last one died. The branch is opened anew: the dead one may have published a save or not."""
        if self._process is None:
            assert self._hold is not None
            if self._settings.rank == 0:
                # The dead writer may have lost the branch to a newer incarnation, which is not to be fenced in turn.
                refuse_if_fenced(self._repository, self._hold)
            head, _ = newest_readable(self._repository, self._hold.branch)
            self._hold = self._reopen(self._hold, head.commit if head else None)
            self._start()

    def _start(self) -> None:
        assert self._hold is not None
        self._process = process = WriterProcess.start(timeout_s=self._settings.timeout_s)
        self._take_lease(self._hold, process.pid)
        try:
            process.begin(self._settings, self._hold)
        except PeerGone as exc:
            self._lost(exc)

    def _take_lease(self, hold: Hold, writer: int) -> None:
        """Say who writes the branch at once: whoever opens it before the writer is up would take it, and not wait for what it writes."""
        if self._settings.rank != 0:
            return  # The lease is rank 0's.
        holders = owner.this_process(), owner.owner_of(writer)
        lease = leases.expiring(Lease(hold.branch, hold.run, hold.generation, self._settings.token, *holders, 0))
        try:
            leases.write(self._repository, lease)
        except SyckptError as exc:
            # A hint: the records decide who may publish.
            _log.warning("the lease on %s could not be taken: %s", hold.branch, exc)

    def _lost(self, why: PeerGone) -> None:
        """No message can be exchanged with the writer any more: it has ended, or is ended here."""
        pid = self.writer_pid
        if not isinstance(why, PeerStuck):
            self._writer_ended()
            return
        cause = f"writer process {pid} took no message for {self._settings.timeout_s:g} s: it was stopped or hung, and has been killed"
        self._writer_ended(CoordinationError(f"{cause}; the next save starts another"), kill=True)

    def _writer_ended(self, cause: SyckptError | None = None, *, kill: bool = False) -> None:
        """Account for every save in hand of a writer that is no more: published, as the records show, or lost."""
        process, self._process = self._process, None
        if process is None:
            return
        code = process.end(timeout_s=0.0 if kill else self._settings.timeout_s)
        published = self._published() if self._in_hand else {}
        for commit_id in list(self._in_hand):
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            own = f" of rank(s) {self._settings.rank}" if self._settings.world_size > 1 else ""
            why = f"writer process {process.pid}{own} ended ({how}) before save {commit_id} was durable; the next save starts another"
            error = cause or WriterDied(why)
            try:
                commit = self._speak_for_writer(commit_id, published.get(commit_id), error)
            except SyckptError as exc:
                self._settle(commit_id, error=exc)
            else:
                self._settle(commit_id, commit=commit, error=None if commit else error)

    def _speak_for_writer(self, commit_id: str, commit: Commit | None, error: SyckptError) -> Commit | None:
        """Tell the other ranks in a dead writer's place how its part went; return the commit if it is visible, or becomes so.

        Raises: what a save failed with elsewhere, to which this rank's part had been complete.
        """
        settings = self._settings
        if settings.world_size == 1:
            return commit
        if settings.rank == 0:
            self.give_up(commit_id, error, seal=None if commit is None else commit.seal)
            return commit
        if commit is not None or self.give_up(commit_id, error):
            return commit
        # The part is good, and the commit becomes visible without its writer.
        seal = self._desk(commit_id).await_verdict(settings.rank)
        return self._repository.read_commit(commit_id, seal=seal)

    def _desk(self, commit: str) -> Desk:
        assert self._hold is not None
        return Desk(self._repository, self._hold.branch, commit, timeout_s=self._settings.timeout_s)

    def give_up_unless_submitted(self, commit: str, error: BaseException) -> None:
        """Tell the other ranks of an agreed save that comes to nothing here before the writer has it."""
        if self._submitted != commit:
            where = f"save {commit} failed on rank(s) {self._settings.rank}: "
            wire = to_wire(error)
            # What a callback of the user's raises is itself on its rank only.
            kind = "RankFailure" if wire["class"] == "SyckptError" else wire["class"]
            self.give_up(commit, from_wire({"class": kind, "message": where + wire["message"]}))

    def give_up(self, commit: str, error: BaseException, *, seal: str | None = None) -> bool:
        """Say that a save has failed on this rank (with `seal`: that it is visible), so that the others need not wait for their deadline.

        Returns False if this rank's part has been completed before.
        """
        if self._settings.world_size == 1 or self._hold is None:
            return True
        try:
            if self._settings.rank == 0:
                self._desk(commit).decide(seal, None if seal is not None else error)
                return True
            return self._desk(commit).fail(self._settings.rank, error)
        except ConflictError:
            _log.debug("save %s was decided before", commit)
        except SyckptError as exc:
            _log.warning("the other ranks could not be told how save %s went here: %s", commit, exc)
        return True

    def _published(self) -> dict[str, Commit]:
        """Return those of the saves in hand that the branch's records name."""
        assert self._hold is not None
        found: dict[str, Commit] = {}
        ref = f"heads/{self._hold.branch}"
        try:
            for number in reversed(self._repository.refs.numbers(ref)):
                record = self._repository.refs.read(ref, number)
                if record.commit in self._in_hand and record.commit is not None:
                    found[record.commit] = self._repository.read_commit(record.commit, seal=record.commit_seal)
                if record.generation < self._hold.generation:
                    break
        except SyckptError as exc:
            _log.warning("cannot tell which saves the writer that died had finished: %s", exc)
        return found

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for the saves in hand, end the writer and free the slots. Raises: CoordinationError when it takes too long."""
        if self.is_inherited:
            return  # A forked child: the saver is its parent's.
        try:
            self.wait_for(None, timeout_s=timeout_s)
            if self._process is not None:
                self._say_goodbye(self._process)
            self._give_back()
        finally:
            self._leave_to_itself()
            for slot in self._slots:
                slot.close()
            self._slots.clear()

    def _say_goodbye(self, process: WriterProcess) -> None:
        """Let the writer end, which has nothing left to do."""
        with self._lock:
            try:
                process.channel.send({"op": "close"})
            except PeerGone:
                _log.debug("the writer has ended already")
            self._process = None
            if process.await_exit(self._settings.timeout_s) is None:
                _log.warning("writer process %d did not end when it was told to; it has been killed", process.pid)
            process.end(timeout_s=0.0)

    def _leave_to_itself(self) -> None:
        """Part from a writer that is still at work: it completes what it can, and ends."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.leave()
            for commit_id in list(self._in_hand):
                why = f"save {commit_id} was not durable when its manager was closed; the writer completes it if it still can"
                self._settle(commit_id, error=CoordinationError(why))

    def _give_back(self) -> None:
        """Give back the lease of a writer that died, or could not: this process lives on, so nobody else would take the lease for lost."""
        if self._hold is not None and self._settings.rank == 0:
            try:
                leases.release(self._repository, self._hold.branch, token=self._settings.token)
            except SyckptError as exc:
                _log.warning("the lease on %s could not be given back: %s", self._hold.branch, exc)
