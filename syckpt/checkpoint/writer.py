"""The writer: one long-lived, torch-free process a rank, which turns staged memory into commits.

Run by the trainer with `SOCKET_FD PIDFD`. It has a session of its own, since launchers kill process groups, and ignores SIGINT, SIGTERM
and SIGHUP: what was handed over completes, also when the trainer is killed. It ends when the trainer says so or is gone, after the last
save in hand. It sees its trainer end by a pidfd, not by the socket: forked DataLoader workers inherit the socket.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from syckpt.checkpoint.wire import Channel, PeerGone
from syckpt.errors import ConflictError, IntegrityError, RankTimeout, StoreError, SyckptError, from_wire, to_wire
from syckpt.objects import nodes
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.layouts import LayoutTable, groups_of
from syckpt.objects.refs import Lease, Owner
from syckpt.repo import documents, leases, owner
from syckpt.repo.keys import blob_key, layouts_key, locations_key, manifest_key
from syckpt.repo.packing import Packed, Packer, Staged
from syckpt.repo.reader import Reader
from syckpt.repo.receipts import Desk, Receipt, listed
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Keeper, Retention
from syckpt.repo.signing import Signer
from syckpt.repo.transaction import Hold, Transaction, blobs_of, recover, refuse_if_fenced
from syckpt.stores.base import StoreSpec

_log = logging.getLogger("syckpt")
_FAREWELL_S = 5.0  # how long rank 0 waits, when it ends, for the others to hear of the last save


@dataclass(frozen=True)
class _Mail:
    message: dict[str, Any]
    fd: int | None


class _Inbox:
    """Receives on a thread, so that the trainer never waits for a writer at work; ends with None when no more can come."""

    def __init__(self, channel: Channel, pidfd: int | None) -> None:
        self._channel = channel
        self._pidfd = pidfd
        self._parent = os.getppid()
        self.queue: queue.SimpleQueue[_Mail | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="syckpt-inbox", daemon=True).start()

    def _run(self) -> None:
        try:
            while self._readable():
                message, fd = self._channel.receive()
                self.queue.put(_Mail(message, fd))
                if message["op"] == "close":
                    return
        except PeerGone as exc:
            _log.debug("the trainer is gone: %s", exc)
        finally:
            self.queue.put(None)

    def _readable(self) -> bool:
        """Wait for a message; False when the trainer has ended and left none."""
        watched: list[Any] = [self._channel] if self._pidfd is None else [self._channel, self._pidfd]
        while True:
            ready, _, _ = select.select(watched, [], [], None if self._pidfd is not None else 1.0)
            if self._channel in ready:
                return True
            if ready or os.getppid() != self._parent:
                return False


class _Renewal:
    """Renews the lease until stopped."""

    def __init__(self, repository: Repository, lease: Lease) -> None:
        self._repository = repository
        self._lease = lease
        self._stop = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._run, name="syckpt-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        try:
            held = leases.read(self._repository, self._lease.branch)
            if held is not None and held.generation > self._lease.generation:
                return  # Fenced: the branch is somebody else's, and so is the lease.
            leases.write(self._repository, leases.expiring(self._lease))
        except SyckptError as exc:
            # A hint: the records decide who may publish.
            _log.warning("the lease on %s could not be renewed: %s", self._lease.branch, exc)

    def _run(self) -> None:
        while not self._stop.wait(leases.RENEW_S):
            self._renew()

    def stop(self) -> None:
        """Stop and give the lease back."""
        self._stop.set()
        self._thread.join(leases.LEASE_S)
        try:
            leases.release(self._repository, self._lease.branch, token=self._lease.token)
        except SyckptError as exc:
            _log.warning("the lease on %s could not be given back; it runs out by itself: %s", self._lease.branch, exc)


class _Writer:
    """Handles one message after the other."""

    def __init__(self, channel: Channel, start: dict[str, Any]) -> None:
        self._channel = channel
        self._start = start
        self._repository = Repository.open(StoreSpec.from_wire(start["store"]))
        self._reader = Reader(self._repository, threads=1)
        self._hold = Hold(start["branch"], start["run"], start["generation"], start["number"], start["tip"])
        self._owner = owner.this_process()
        self._rank, self._world_size = start["rank"], start["world_size"]
        self._timeout_s = start["timeout_s"]
        # Opened now, not at a save: a key that cannot be read is told before anything is written.
        self._signer = Signer.open(start["signer"]) if start["signer"] is not None and self._rank == 0 else None
        self._keeper: Keeper | None = None
        if start["retention"] is not None and self._rank == 0:
            rule, maximize = Retention.from_wire(start["retention"])
            self._keeper = Keeper(self._repository, self._hold.branch, rule, maximize=maximize)
        trainer = Owner.from_body(start["trainer"], where="the trainer's start message")
        lease = Lease(self._hold.branch, self._hold.run, self._hold.generation, start["token"], trainer, self._owner, 0)
        self._renewal = _Renewal(self._repository, lease) if self._rank == 0 else None
        self._last_desk: Desk | None = None
        self._packer = Packer(
            self._reader,
            rank=self._rank,
            world_size=self._world_size,
            compression=start["compression"],
            keyframe_every=start["keyframe_every"],
            threads=start["threads"],
        )
        self._slots: dict[int, mmap.mmap] = {}
        self._table: LayoutTable | None = None
        """Who stores what, as the trainer said it last; without the names of items."""
        self._failed: dict[str, str | None] = {}
        """Saves that came to nothing, and the save or commit that each was to follow."""
        self._newest: Commit | None = None
        self._recovered = False

    def handle(self, mail: _Mail) -> None:
        message = mail.message
        if message["op"] == "slot":
            assert mail.fd is not None
            self._slots[message["index"]] = mmap.mmap(mail.fd, message["nbytes"], mmap.MAP_SHARED, mmap.PROT_READ)
            os.close(mail.fd)
        elif message["op"] == "table":
            self._table = LayoutTable.from_body(message["table"], where="the trainer's table of layouts")
        elif message["op"] == "save":
            self._save(message)

    def _save(self, message: dict[str, Any]) -> None:
        begun = time.perf_counter()
        try:
            commit = self._commit(message, begun)
        except Exception as exc:  # noqa: BLE001 - whatever it was, the trainer is told, and the next save is tried
            if not isinstance(exc, SyckptError):
                _log.exception("save %s failed", message["id"])
            self._packer.failed()
            self._failed[message["id"]] = message["after"]
            _tell(self._channel, {"event": "failed", "id": message["id"], "error": to_wire(exc)})
            return
        durable_s = time.perf_counter() - begun
        event = {"event": "published", "id": commit.id, "seal": commit.seal, "body": commit.to_body(), "durable_s": durable_s}
        _tell(self._channel, {**event, "tidies": self._keeper is not None})
        if self._keeper is not None:
            self._tidy(self._keeper, commit)
            _tell(self._channel, {"event": "tidied"})

    def _tidy(self, keeper: Keeper, commit: Commit) -> None:
        """Apply retention to the branch. The save is announced: whatever fails here is tried again behind the next one."""
        try:
            done = keeper.apply(guard=lambda: refuse_if_fenced(self._repository, self._hold))
        except Exception as exc:  # noqa: BLE001 - it must never fail a save
            _log.warning("commit %s is saved; retention failed, and is tried again after the next save: %s", commit.id, exc)
            return
        if done.dropped:
            _log.debug("retention dropped %d commits and freed %d bytes", len(done.dropped), done.freed_nbytes)

    def _commit(self, message: dict[str, Any], begun: float) -> Commit:
        commit = self._lead(message, begun) if self._rank == 0 else self._follow(message)
        self._packer.published()
        self._newest = commit
        return commit

    def _desk(self, commit: str) -> Desk:
        return Desk(self._repository, self._hold.branch, commit, timeout_s=self._timeout_s, world_size=self._world_size)

    def _lead(self, message: dict[str, Any], begun: float) -> Commit:
        """Rank 0: write this rank's part, wait for the others', make the commit visible, and say so."""
        desk, before, self._last_desk = self._desk(message["id"]), self._last_desk, None
        transaction: Transaction | None = None
        try:
            if not self._recovered:
                for dropped in recover(self._repository, self._hold):
                    _log.info("save %s was cut off by a crash; what it left behind is removed", dropped)
                self._recovered = True
            parent = self._parent(message["after"])
            uses = self._packer.points_into(parent)
            transaction = Transaction(self._repository, message["id"], self._hold, uses=uses, owner=self._owner)
            try:
                packed = self._pack(message, parent)
            except (IntegrityError, StoreError):
                refuse_if_fenced(self._repository, self._hold)  # then a newer incarnation has removed what was written
                raise
            others = self._collect(desk, message["id"])
            # Where a blob is not there, repack may have moved its bytes, which only locations tell: those of all ranks would take seconds.
            tables = [packed.locations, *(self._reader.table((message["id"], other.rank)) for other in desk.lacking(others))]
            parts = [Receipt(0, packed.manifest_seal, packed.stats, items=packed.items), *others]
            commit = self._describe(message, parent, parts, begun)
            if message["has_table"]:
                commit = replace(commit, layouts=self._write_layouts(commit.id, parts))
            if self._world_size > 1:
                desk.require_undecided()
            self._hold, commit = transaction.publish(commit, hold=self._hold, reader=self._reader, locations=tables, signer=self._signer)
        except BaseException as exc:
            cause = self._cause(exc)
            if self._world_size == 1:
                self._give_up(message["id"], transaction, desk, cause)
                raise cause from (exc if cause is not exc else exc.__cause__)
            error = _named(cause, message["id"], rank=0)
            self._give_up(message["id"], transaction, desk, error)
            raise error from exc
        try:
            if self._world_size > 1:
                self._decide(desk, commit.seal, None)
                self._last_desk = desk
            if before is not None:
                # Every rank has handed in a later part, so all of them know how that save went.
                before.clear(wait_s=0.0)
        except Exception:  # noqa: BLE001 - the commit is visible: nothing that comes up now may be told as its failure
            _log.exception("telling the other ranks of save %s failed", message["id"])
        return commit

    def _write_layouts(self, commit: str, parts: list[Receipt]) -> str:
        """Write the table of layouts, by which readers know whose manifests they need; return its seal."""
        assert self._table is not None
        items = groups_of([part.items for part in parts])
        return documents.write(self._repository.store, layouts_key(commit), replace(self._table, items=items).to_body())

    def _collect(self, desk: Desk, commit: str) -> list[Receipt]:
        if self._world_size == 1:
            return []
        ranks = range(1, self._world_size)
        self._waits(f"the parts of rank(s) {listed(ranks)} of save {commit}")
        receipts = desk.collect(ranks)
        self._waits(None)
        return receipts

    def _cause(self, exc: BaseException) -> BaseException:
        """Return what a save failed with; that the branch is lost, if it is: the newer incarnation clears what is being written here."""
        if isinstance(exc, SyckptError) and not isinstance(exc, ConflictError):
            try:
                refuse_if_fenced(self._repository, self._hold)
            except ConflictError as lost:
                return lost
            except SyckptError as unknown:
                _log.debug("whether the branch was lost cannot be told: %s", unknown)
        return exc

    def _waits(self, what: str | None) -> None:
        if self._world_size > 1:
            _tell(self._channel, {"event": "waits", "for": what})

    def _give_up(self, commit: str, transaction: Transaction | None, desk: Desk, cause: BaseException) -> None:
        if self._world_size > 1:
            self._decide(desk, None, cause)
        try:
            if transaction is not None:
                transaction.abort()
        except SyckptError as exc:
            _log.warning("what save %s left behind could not be removed; the next opening of the branch does: %s", commit, exc)

    @staticmethod
    def _decide(desk: Desk, seal: str | None, error: BaseException | None) -> None:
        try:
            desk.decide(seal, error)
        except ConflictError:
            _log.debug("another rank has given the save up")
        except SyckptError as exc:
            # They find out by their deadline, and by the branch's records.
            _log.warning("the other ranks could not be told how the save went: %s", exc)

    def _follow(self, message: dict[str, Any]) -> Commit:
        """Any other rank: write this rank's part once rank 0 has begun, and wait for its verdict."""
        commit, desk = message["id"], self._desk(message["id"])
        self._waits(f"rank(s) 0 to begin save {commit}")
        try:
            desk.await_intent()
        except RankTimeout as exc:
            # Should rank 0 come to it yet, it need not wait for this part.
            desk.fail(self._rank, exc)
            raise
        self._waits(None)
        failure: BaseException | None = None
        try:
            packed = self._pack(message, self._parent(message["after"]))
            desk.hand_in(Receipt(self._rank, packed.manifest_seal, packed.stats, blobs_of(self._reader, packed.locations), packed.items))
        except Exception as exc:  # noqa: BLE001 - rank 0 hears of it, whatever it was, and every rank fails alike
            failure = exc
        if failure is not None:
            # A receipt may be there though writing it failed: then this part is good.
            desk.fail(self._rank, failure)
        try:
            self._waits(f"rank(s) 0 to decide on save {commit}")
            seal = desk.await_verdict(self._rank)
            self._waits(None)
        except SyckptError:
            if desk.is_settled:
                self._remove_part(desk, commit)
            # Else rank 0 may be about to publish it. If it does not, it, or recovery, removes what is here.
            raise
        return self._repository.read_commit(commit, seal=seal)

    def _remove_part(self, desk: Desk, commit: str) -> None:
        """Remove what this rank wrote for a save that was given up, unless it is visible all the same."""
        try:
            if desk.published() is None:
                # Without a listing, which would be one of all ranks' files on each of them.
                for key in (manifest_key(commit, self._rank), locations_key(commit, self._rank, 1), blob_key(commit, self._rank)):
                    self._repository.store.delete(key)
        except SyckptError as exc:
            _log.warning("what rank %d wrote for save %s could not be removed; it is in nobody's way: %s", self._rank, commit, exc)

    def _pack(self, message: dict[str, Any], parent: Commit | None) -> Packed:
        table = message["tensors"]
        columns = (table[name] for name in ("path", "dtype", "shape", "box", "offset", "local"))
        staged = [
            Staged(tuple(path), dtype, tuple(shape), None if box is None else Box(tuple(box[0]), tuple(box[1])), offset, local)
            for path, dtype, shape, box, offset, local in zip(*columns, strict=True)
        ]
        memory = memoryview(self._slots[message["slot"]]) if any(s.offset is not None for s in staged) else memoryview(b"")
        facts = {name: message[name] for name in ("items", "rng", "layouts", "sharding", "sent", "trainable", "afresh")}
        return self._packer.pack(message["id"], parent=parent, staged=staged, memory=memory, **facts)

    def _parent(self, after: str | None) -> Commit | None:
        """Return the newest published ancestor of the state: parents are fixed here, in queue order."""
        while after in self._failed:
            after = self._failed[after]
        if after is None:
            return None
        if self._newest is None or self._newest.id != after:
            self._newest = self._repository.read_commit(after)
        return self._newest

    def _describe(self, message: dict[str, Any], parent: Commit | None, parts: list[Receipt], begun: float) -> Commit:
        meta = message["meta"]
        figures = {**meta["stats"], **_together([part.stats for part in parts]), "writer_s": time.perf_counter() - begun}
        figures["steps"] = meta["step"] - (parent.step if parent is not None else 0)
        return Commit(
            id=message["id"],
            parents=() if parent is None else (parent.id,),
            parent_seals=() if parent is None else (parent.seal,),
            branch=self._hold.branch,
            step=meta["step"],
            epoch=meta["epoch"],
            batch_idx=meta["batch_idx"],
            epoch_done=meta["epoch_done"],
            entered=meta["entered"],
            metric=nodes.decode(meta["metric"]),
            message=meta["message"],
            config=nodes.decode(meta["config"]),
            created_ns=int(meta["created_ns"]),
            world_size=self._world_size,
            tags=tuple(meta["tags"]),
            name=meta["name"],
            fingerprint=meta["fingerprint"],
            writer=meta["writer"],
            run_id=self._hold.run,
            generation=self._hold.generation,
            sequence=meta["sequence"],
            rng_exact=meta["rng_exact"],
            stats={name: round(value, 6) if isinstance(value, float) else value for name, value in figures.items()},
            manifests=tuple((part.rank, part.manifest) for part in parts),
        )

    def close(self) -> None:
        self._packer.close()
        if self._last_desk is not None:
            self._last_desk.clear(wait_s=_FAREWELL_S)
        if self._renewal is not None:
            self._renewal.stop()


def _named(exc: BaseException, commit: str, *, rank: int) -> SyckptError:
    """Return the error as all ranks raise it: its text says on which rank it came up."""
    wire = to_wire(exc)
    where = "" if "rank(s)" in wire["message"] else f"save {commit} failed on rank(s) {rank}: "
    return from_wire({**wire, "message": where + wire["message"]})


_SUMS = ("staged_bytes", "deduplicated_bytes", "encoded_bytes", "written_bytes", "trainable", "unchanged_trainable")


def _together(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rank 0's figures with the bytes, and the trainable tensors, of all ranks."""
    sums = {name: sum(part[name] for part in stats) for name in _SUMS}
    return {**stats[0], **sums, "ratio": sums["staged_bytes"] / max(1, sums["written_bytes"])}


def _tell(channel: Channel, event: dict[str, Any]) -> None:
    """Tell the trainer, if there still is one: its saves are completed without it, too."""
    try:
        channel.send(event)
    except PeerGone:
        _log.debug("no trainer is left to hear of %s", event["event"])


def main(arguments: list[str]) -> int:
    """Serve the trainer at the other end of the socket until it is done or gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="[syckpt writer] %(message)s", stream=sys.stderr)
    pidfd = int(arguments[1]) if arguments[1] != "-" else None
    channel = Channel(socket.socket(fileno=int(arguments[0])), peer=pidfd)
    inbox = _Inbox(channel, pidfd)
    first = inbox.queue.get()
    if first is None:
        return 0
    try:
        writer = _Writer(channel, first.message)
    except SyckptError as exc:
        _tell(channel, {"event": "fatal", "error": to_wire(exc)})
        return 1
    _tell(channel, {"event": "ready"})
    while (mail := inbox.queue.get()) is not None and mail.message["op"] != "close":
        writer.handle(mail)
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
