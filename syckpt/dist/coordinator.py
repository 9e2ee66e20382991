"""Agreement among the ranks of a job: every rank brings something, rank 0 decides, every rank gets the verdict.

It runs over torch's c10d Store (the *rendezvous store*), never as a torch collective and never on the training group, so that it
neither disturbs nor waits for one. An agreement is two rounds: a gather to rank 0, a verdict back. Every rank has to make the same
agreements in the same order; the n-th of one rank meets the n-th of the others. Use it from one thread, the one that trains.

* The verdict of an agreement is a key that is written once, by compare-and-swap. Usually rank 0 writes it; a rank that has waited for
  rank 0 in vain, or was interrupted, writes a failure. Whoever comes second takes what is there. So all who get a verdict get the same
  one, and who comes too late is told at once. A rank misses the verdict only when it is interrupted or the store does not answer it.
* Whatever goes wrong, each rank is one number further afterwards, and the next agreement works when all are there.
* A rank that brings an error raises just that one; the others raise it in its class if it is syckpt's, else as a RankFailure.
* `decide` may be overruled by a failure that was there before its result: it must not have effects outside.
* Values are JSON objects. They pass through JSON on every rank, also on the one that made them, and in a single process.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch.distributed

from syckpt.dist import topology
from syckpt.errors import CoordinationError, RankFailure, RankTimeout, SyckptError, from_wire, to_wire

__all__ = ["Coordinator", "SingleProcess", "StoreCoordinator", "connect"]

T = TypeVar("T")
Value = dict[str, Any]
Decide = Callable[[list[Value]], Value]

# TCPStore's server drops the connection of a client that sends a value of more than 8 MiB.
_CHUNK_NBYTES = 4 << 20
# What rank 0 reads from all ranks by one request.
_INLINE_NBYTES = 64 << 10
# A pause between two looks is a twentieth of what has been waited so far, within these.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.1
# How much longer than rank 0 the others wait, so that its verdict about who is missing reaches them.
_GRACE_S = 2.0
# A store that has not answered one request for so long is taken for stopped, once the deadline is over. Five seconds may be (see _Line).
_SILENCE_S = 6.0
_TICK_S = 0.25
_CLOSE_S = 1.0
_LONGEST_TEXT = 10_000

_SAME_CALLS = "Every rank has to make the same syckpt calls in the same order: none under `if rank == 0`, none skipped after an exception."


class Coordinator(Protocol):
    """How the ranks of a job agree. `agreements` counts those begun so far, of any kind."""

    rank: int
    world_size: int
    agreements: int

    def agree(
        self, topic: str, mine: Value, decide: Decide, *, error: BaseException | None = None, at: str = "", timeout_s: float | None = None
    ) -> Value:
        """Gather `mine` of every rank, let rank 0 `decide` on them in rank order, and return its result on every rank.

        `topic` names the call and must be the same on all ranks; `at` ("step 120") only tells more in messages. `error` is what kept this
        rank from having anything to bring: then nothing is decided. `timeout_s` must be the same on all ranks.

        Raises: `error` itself; the class of another rank's error, or RankFailure, naming `rank(s) 1, 2`; what `decide` raised, likewise;
        RankTimeout naming the ranks that did not come in time; CoordinationError if the ranks' topics differ.
        """

    def broadcast(
        self, topic: str, value: Value | None = None, *, error: BaseException | None = None, at: str = "", timeout_s: float | None = None
    ) -> Value:
        """Return rank 0's `value` on every rank. Raises: as `agree`."""
        return self.agree(topic, (value or {}) if self.rank == 0 else {}, lambda values: values[0], error=error, at=at, timeout_s=timeout_s)

    def barrier(self, topic: str, *, error: BaseException | None = None, at: str = "", timeout_s: float | None = None) -> None:
        """Return when every rank has come. Raises: as `agree`."""
        self.agree(topic, {}, lambda _: {}, error=error, at=at, timeout_s=timeout_s)

    def close(self) -> None:
        """Let rank 0, whose end may be that of the rendezvous store, wait a moment until the others have read its last verdict.

        For the end of a job, on any rank; not collective, and no error if they have not.
        """


class SingleProcess(Coordinator):
    """The only rank there is."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.agreements = 0, 1, 0

    def agree(
        self, topic: str, mine: Value, decide: Decide, *, error: BaseException | None = None, at: str = "", timeout_s: float | None = None
    ) -> Value:
        self.agreements += 1
        if error is not None:
            raise error
        return _decode(_encode(decide([_decode(_encode(mine))])))

    def close(self) -> None:
        pass


class StoreCoordinator(Coordinator):
    """One of several ranks that share a rendezvous store. `session` keeps their keys from everybody else's.

    Keys, below `syckpt/<session>/`: `leader`, the number of the agreement that rank 0 has come to; `<number>/<rank>`, what a rank brings;
    `<number>/verdict`. A value of more than 64 KiB lies in chunks, `<key>.<n>`. A rank deletes what it brought when rank 0 has given a
    verdict, rank 0 deletes a verdict when every rank has come to a later agreement: before, somebody might still be reading it.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, session: str, timeout_s: float) -> None:
        self.rank, self.world_size, self.agreements = rank, world_size, 0
        self.timeout_s = timeout_s
        self._line = store if isinstance(store, _Line) else _Line(store)
        self._prefix = f"syckpt/{session}"
        self._turn = threading.Lock()
        self._brought: list[str] = []
        self._reached = dict.fromkeys(range(1, world_size), -1)
        self._settled: dict[int, list[str]] = {}
        weakref.finalize(self, self._line.close)

    def agree(
        self, topic: str, mine: Value, decide: Decide, *, error: BaseException | None = None, at: str = "", timeout_s: float | None = None
    ) -> Value:
        if not self._turn.acquire(blocking=False):
            raise CoordinationError(f"'{topic}' came while another agreement is under way in this process; use syckpt from one thread only")
        try:
            number, self.agreements = self.agreements, self.agreements + 1
            call = f"'{topic}' ({at})" if at else f"'{topic}'"
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            brought = {"topic": topic, "call": call}
            try:
                text = _encode({**brought, "value": mine, "error": None if error is None else _wire(error)})
            except (TypeError, ValueError) as exc:  # the others must not wait for it until the deadline
                error = exc
                text = _encode({**brought, "error": _wire(error)})
            try:
                if error is not None and not isinstance(error, Exception):
                    raise error  # Ctrl-C does not wait for others; they are told
                verdict = self._lead(number, call, text, decide, limit_s) if self.rank == 0 else self._follow(number, call, text, limit_s)
            except BaseException as exc:
                # Whoever waits, or comes later, must learn it; in the background if the rendezvous store does not answer now.
                self._line.post(partial(self._settle, number, self._told(call, exc)))
                if error is None or not isinstance(exc, Exception):
                    raise
            if error is not None:
                raise error
            return self._outcome(call, verdict)
        finally:
            self._turn.release()

    def close(self) -> None:
        if self.rank == 0:
            deadline = time.monotonic() + _GRACE_S
            with suppress(CoordinationError):
                self._line.call(partial(self._await_readers, self.agreements - 1, deadline), "close", deadline)

    def _await_readers(self, number: int, deadline: float) -> None:
        since = time.monotonic()
        for key in [f"{self._prefix}/{number}/{rank}" for rank in self._reached]:
            while self._line.has([key]) and time.monotonic() < deadline:
                self._line.pause(since)

    def _lead(self, number: int, call: str, mine: str, decide: Decide, limit_s: float) -> Value:
        deadline = time.monotonic() + limit_s
        gathered, verdict = self._line.call(partial(self._gather, number, deadline), call, deadline)
        if verdict is not None:
            return verdict
        everything = {0: _decode(mine), **{rank: _decode(text) for rank, text in sorted(gathered.items())}}
        verdict = self._obstacle(call, everything, limit_s)
        if verdict is None:
            verdict = {"by": 0, "value": decide([brought["value"] for brought in everything.values()])}
        if time.monotonic() > deadline + _GRACE_S / 2:
            # Stopped (SIGSTOP), or deciding, for too long: the others are giving it up, or have.
            verdict = self._failure(RankTimeout(f"rank(s) 0 did not decide on {call} within {limit_s:g} s"), missing=[0])
        return self._line.call(partial(self._settle, number, verdict), call, time.monotonic() + _GRACE_S)

    def _gather(self, number: int, deadline: float) -> tuple[dict[int, str], Value | None]:
        """Return what every rank that has come by the deadline brings, and the verdict if somebody else has given one meanwhile."""
        self._line.put(f"{self._prefix}/leader", str(number))
        keys = {rank: f"{self._prefix}/{number}/{rank}" for rank in self._reached}
        since = time.monotonic()
        while not self._line.has(list(keys.values())):
            if self._line.has([self._register(number)]):
                self._settled[number] = [self._register(number)]
                return {}, _decode(self._line.read([self._register(number)])[0])
            if time.monotonic() >= deadline:
                keys = {rank: key for rank, key in keys.items() if self._line.has([key])}
                break
            self._line.pause(since)
        self._reached |= dict.fromkeys(keys, number)
        return dict(zip(keys, self._line.read(list(keys.values())), strict=True)), None

    def _obstacle(self, call: str, everything: dict[int, Value], limit_s: float) -> Value | None:
        """Return the verdict that there is nothing to decide: ranks are missing, in different calls, or bring errors."""
        missing = [rank for rank in range(self.world_size) if rank not in everything]
        calls: dict[str, list[int]] = {}
        for rank, brought in everything.items():
            calls.setdefault(brought["call"], []).append(rank)
        errors = {rank: brought["error"] for rank, brought in everything.items() if brought["error"] is not None}
        where = ", ".join(f"rank(s) {_listed(ranks)} in {name}" for name, ranks in calls.items())
        what = "; ".join(f"rank {rank}: {wire['message']}" for rank, wire in errors.items())
        failed = f"rank(s) {_listed(errors)} failed in {call}: {what}" if errors else ""
        if missing:
            text = f"rank(s) {_listed(missing)} did not arrive at {call} within {limit_s:g} s"
            text += f" (there: {where}{'; ' + failed if failed else ''})"
            text += f". Find out what stopped them, or raise timeout_s if they are only slow. {_SAME_CALLS}"
            return self._failure(RankTimeout(text), missing=missing)
        if len({brought["topic"] for brought in everything.values()}) > 1:
            text = f"the ranks are in different calls: {where}{'; ' + failed if failed else ''}. {_SAME_CALLS}"
            return self._failure(CoordinationError(text))
        if errors:
            classes = [wire["class"] for wire in errors.values() if wire["class"] != RankFailure.__name__]
            return self._failure(from_wire({"class": classes[0] if classes else RankFailure.__name__, "message": failed}))
        return None

    def _follow(self, number: int, call: str, mine: str, limit_s: float) -> Value:
        deadline = time.monotonic() + limit_s
        return self._line.call(partial(self._bring, number, call, mine, limit_s, deadline), call, deadline)

    def _bring(self, number: int, call: str, mine: str, limit_s: float, deadline: float) -> Value:
        """Bring what this rank has, and return the verdict: rank 0's, or that it gave none."""
        register, leader = self._register(number), f"{self._prefix}/leader"
        self._brought += self._line.put(f"{self._prefix}/{number}/{self.rank}", mine)
        since, led = time.monotonic(), False
        while not self._line.has([register]):
            if not led and self._line.has([leader]) and int(self._line.read([leader])[0]) >= number:
                # Rank 0 may have come late; it waits for the others as long as anybody does.
                led, deadline = True, time.monotonic() + limit_s + _GRACE_S
                self._line.extend(deadline)
            if time.monotonic() >= deadline:
                did = f"came to {call} but gave no verdict" if led else f"did not arrive at {call}"
                text = f"rank(s) 0 {did} within {limit_s:g} s. Find out what stopped it, or raise timeout_s if it is slow. {_SAME_CALLS}"
                return self._settle(number, self._failure(RankTimeout(text), missing=[0]))
            self._line.pause(since)
        verdict = _decode(self._line.read([register])[0])
        if verdict["by"] == 0:
            # Rank 0 has finished reading; after anybody else's verdict it might just be about to. The first key goes last, as the sign
            # that this rank has read its verdict; then rank 0 may end, and the rendezvous store with it.
            with suppress(RankFailure):
                self._line.delete(self._brought[::-1])
            self._brought = []
        return verdict

    def _settle(self, number: int, verdict: Value) -> Value:
        """Give a verdict unless there is one, and return the one there is."""
        text, keys = self._line.settle(self._register(number), _encode(verdict))
        if self.rank == 0:
            self._settled[number] = keys
            for old in [old for old in self._settled if old < min(self._reached.values(), default=number)]:
                self._line.delete(self._settled.pop(old))
        return _decode(text)

    def _register(self, number: int) -> str:
        return f"{self._prefix}/{number}/verdict"

    def _failure(self, error: SyckptError, missing: Sequence[int] = ()) -> Value:
        return {"by": self.rank, "failed": to_wire(error), "missing": list(missing)}

    def _told(self, call: str, exc: BaseException) -> Value:
        """Return the verdict about an exception of this rank in the agreement itself."""
        if isinstance(exc, SyckptError):
            text = str(exc)[:_LONGEST_TEXT]
            return self._failure(from_wire({**to_wire(exc), "message": f"{text} [found by rank(s) {self.rank} in {call}]"}))
        return self._failure(RankFailure(f"rank(s) {self.rank} failed in {call}: {_said(exc)}"))

    def _outcome(self, call: str, verdict: Value) -> Value:
        if "failed" not in verdict:
            value: Value = verdict["value"]
            return value
        wire = verdict["failed"]
        if self.rank in verdict["missing"]:
            wire = {**wire, "message": f"rank {self.rank} came too late to {call}, its call was given up: {wire['message']}"}
        raise from_wire(wire)


def connect(*, timeout_s: float) -> Coordinator:
    """Return this process's coordinator. Collective under a process group; later agreements take `timeout_s` too.

    Raises: CoordinationError if the launcher started several ranks that have no process group; RankTimeout, naming ranks, if not all come.
    """
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not grouped:
        if (count := topology.world_size()) > 1:
            raise CoordinationError(
                f"WORLD_SIZE is {count}, but this process has no process group: call torch.distributed.init_process_group first, "
                "or unset WORLD_SIZE if this process is on its own"
            )
        return SingleProcess()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world_size == 1:
        return SingleProcess()
    store = torch.distributed.distributed_c10d._get_default_store()
    if store is None:
        raise CoordinationError("the process group has no c10d Store to agree over; call init_process_group with a store or an init_method")
    line = _Line(store)
    deadline = time.monotonic() + timeout_s
    meet = (
        partial(_welcome, line, world_size, timeout_s, deadline)
        if rank == 0
        else partial(_join, line, rank, timeout_s, deadline + _GRACE_S)
    )
    try:
        session = line.call(meet, "connect", deadline + _GRACE_S)
    except BaseException:
        line.close()
        raise
    return StoreCoordinator(line, rank=rank, world_size=world_size, session=session, timeout_s=timeout_s)


# How a session begins. The rendezvous store may hold the keys of an earlier incarnation (torchrun's agent keeps it over restarts), and
# those of coordinators made before. Rank 0 offers a new session, overwriting older offers; a rank says hello with a nonce below each offer
# that it sees, and believes only the one below which its own nonce comes back. Nobody but a living rank 0 can give that answer.
_OFFER = "syckpt/offer"


def _welcome(line: _Line, world_size: int, timeout_s: float, deadline: float) -> str:
    session = secrets.token_hex(8)
    line.put(_OFFER, session)
    keys = {rank: f"syckpt/{session}/hello/{rank}" for rank in range(1, world_size)}
    since = time.monotonic()
    while not line.has(list(keys.values())) and time.monotonic() < deadline:
        line.pause(since)
    here = {rank: key for rank, key in keys.items() if line.has([key])}
    nonces = dict(zip(map(str, here), line.read(list(here.values())), strict=True))
    missing = _listed(rank for rank in keys if rank not in here)
    failed = f"rank(s) {missing} did not come to make their coordinator within {timeout_s:g} s. {_SAME_CALLS}" if missing else None
    line.put(f"syckpt/{session}/welcome", _encode({"nonces": nonces, "failed": failed}))
    if failed:
        raise RankTimeout(failed)
    return session


def _join(line: _Line, rank: int, timeout_s: float, deadline: float) -> str:
    nonce = secrets.token_hex(8)
    session, said = "", list[str]()
    since = time.monotonic()
    while time.monotonic() < deadline:
        offer = line.read([_OFFER])[0] if line.has([_OFFER]) else ""
        # Before a newer offer is answered: rank 0 may have welcomed this rank and gone on to its next coordinator since the last look.
        if session and line.has([f"syckpt/{session}/welcome"]):
            welcome = _decode(line.read([f"syckpt/{session}/welcome"])[0])
            if welcome["nonces"].get(str(rank)) == nonce:
                line.delete(said)
                if welcome["failed"]:
                    raise RankTimeout(welcome["failed"])
                return session
        if offer != session:
            session = offer
            said += line.put(f"syckpt/{session}/hello/{rank}", nonce)
        line.pause(since)
    raise RankTimeout(f"rank(s) 0 did not come to make its coordinator within {timeout_s:g} s. {_SAME_CALLS}")


class _Abandoned(Exception):
    """Whoever asked for the work waits no longer."""


class _Job:
    def __init__(self, work: Callable[[], Any], deadline: float) -> None:
        self.work, self.deadline = work, deadline
        self.requests = 0
        self.abandoned, self.done = threading.Event(), threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class _Line:
    """The rendezvous store, and a thread that makes the requests.

    A client waits for its TCPStore's host without a limit, even to end a wait whose timeout has passed (torch 2.13), and nothing can
    interrupt it. So requests are made on a thread, and the caller waits for that with a deadline and open to Ctrl-C. All requests are
    short, since torch makes those of a process one at a time: looking repeatedly instead of `Store.wait` delays nobody else's, and spares
    the warnings on stderr when its timeout passes. A connection of our own (`Store.clone`) would not be free: the server looks up the name
    of every new client, and answers nobody for 5 s where name servers do not answer.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._job = _Job(int, math.inf)
        self._thread = threading.Thread(target=self._serve, name="syckpt-agreement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after what it is doing; wait for that a moment."""
        self._jobs.put(None)
        # A daemon thread that the interpreter's end meets inside of torch's C++ takes the process down with it ("terminate called").
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def call(self, work: Callable[[], T], call: str, deadline: float) -> T:
        """Do the work on the line's thread. Raises: what it raises; RankTimeout if the store is silent and the deadline is over."""
        job = _Job(work, deadline)
        self._jobs.put(job)
        seen, silence_s = 0, 0.0
        try:
            while not job.done.wait(_TICK_S):
                # Ticks are counted, not a clock read: after a SIGSTOP of this process the store has had no time to answer yet.
                silence_s = silence_s + _TICK_S if job.requests == seen else 0.0
                seen = job.requests
                if silence_s >= _SILENCE_S and time.monotonic() >= job.deadline:
                    raise RankTimeout(
                        f"the rendezvous store has not answered in {call} for {silence_s:g} s, and the deadline is over: rank(s) 0, or "
                        "torchrun's agent, whichever hosts it, is stopped or out of reach"
                    )
        except BaseException:
            job.abandoned.set()
            raise
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def post(self, work: Callable[[], object]) -> None:
        """Have work done after all before, and wait for it a moment only. If it fails, there is nobody left to tell."""
        job = _Job(work, math.inf)
        self._jobs.put(job)
        job.done.wait(1.0)

    def _serve(self) -> None:
        for job in iter(self._jobs.get, None):
            self._job = job
            try:
                if not job.abandoned.is_set():
                    job.result = job.work()
            except BaseException as exc:  # noqa: BLE001 - raised again by `call`, in the caller's thread
                job.error = exc
            job.done.set()
            self._job = _Job(int, math.inf)
            del job  # it refers to the coordinator, whose end is this thread's

    # The rest is for work on the line's thread.

    def _request(self, method: str, *args: Any) -> Any:
        if self._job.abandoned.is_set():
            raise _Abandoned
        self._job.requests += 1
        try:
            return getattr(self._store, method)(*args)
        except RuntimeError as exc:
            cause = str(exc).partition("\n")[0]  # C++ frames follow
            raise RankFailure(
                f"the rendezvous store is lost ({cause}): rank(s) 0, or torchrun's agent, whichever hosts it, has ended. Restart the job"
            ) from exc

    def extend(self, deadline: float) -> None:
        self._job.deadline = deadline

    def pause(self, since: float) -> None:
        """Wait a little, the longer the longer ago `since` is."""
        self._job.abandoned.wait(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, (time.monotonic() - since) / 20)))

    def has(self, keys: list[str]) -> bool:
        """Whether all of the keys are there."""
        return not keys or bool(self._request("check", keys))

    def put(self, key: str, text: str) -> list[str]:
        """Store a text, and return the keys that it takes: chunks first, since requests are done in order."""
        head, chunks = self._put_chunks(key, text)
        self._request("set", key, head)
        return [key, *chunks]

    def settle(self, key: str, text: str) -> tuple[str, list[str]]:
        """Store a text unless there is one. Return the one there is, and the keys that it takes as far as they are ours to delete."""
        head, chunks = self._put_chunks(key, text)
        found = self._request("compare_set", key, "", head).decode()
        if found == head:
            return text, [key, *chunks]
        self.delete(chunks)
        return self._joined(key, found), [key]

    def read(self, keys: list[str]) -> list[str]:
        """Return the texts of keys that are there."""
        if not keys:
            return []
        together = self._store.has_extended_api()
        heads = self._request("multi_get", keys) if together else [self._request("get", key) for key in keys]
        return [self._joined(key, head.decode()) for key, head in zip(keys, heads, strict=True)]

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._request("delete_key", key)

    def _put_chunks(self, key: str, text: str) -> tuple[str, list[str]]:
        if len(text) <= _INLINE_NBYTES:
            return text, []
        chunks = {f"{key}.{n}": text[at : at + _CHUNK_NBYTES] for n, at in enumerate(range(0, len(text), _CHUNK_NBYTES))}
        for name, chunk in chunks.items():
            self._request("set", name, chunk)
        return f"#{len(chunks)}", list(chunks)  # no JSON text begins so

    def _joined(self, key: str, head: str) -> str:
        if not head.startswith("#"):
            return head
        return "".join(self._request("get", f"{key}.{n}").decode() for n in range(int(head[1:])))


def _encode(value: Value) -> str:
    """Return ASCII text, so that characters are bytes."""
    return json.dumps(value, separators=(",", ":"))


def _decode(text: str) -> Value:
    value: Value = json.loads(text)
    return value


def _wire(error: BaseException) -> dict[str, str]:
    """Describe what a rank brings instead of a value; an error that is not syckpt's becomes a RankFailure elsewhere."""
    kind = to_wire(error)["class"] if isinstance(error, SyckptError) else RankFailure.__name__
    return {"class": kind, "message": _said(error)}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_LONGEST_TEXT]


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks))
