"""The agreement of a save: what every rank has, one verdict, each rank's part for its writer. Two rounds, no collective of torch."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from syckpt import __version__
from syckpt.checkpoint.items import Items
from syckpt.checkpoint.ledger import Ledger, joined
from syckpt.checkpoint.progress import Progress
from syckpt.checkpoint.resumption import Resumption
from syckpt.checkpoint.saver import PendingCommit, Saver
from syckpt.checkpoint.sharding import Declared, declare
from syckpt.checkpoint.share import Facts, Replicas, Sharing, whole
from syckpt.checkpoint.specs import Config
from syckpt.checkpoint.taking import refuse_other_items, refuse_untaken, united
from syckpt.checkpoint.torn import refuse_torn
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import ConflictError, CoordinationError, StateError, SyckptError, from_wire, to_wire
from syckpt.hyperparams.config import HyperConfig
from syckpt.hyperparams.fingerprint import fingerprint
from syckpt.objects import ids, nodes
from syckpt.repo.repository import Repository
from syckpt.state.flatten import Flat, flatten
from syckpt.state.staging import Part

__all__ = ["Request", "Saves"]

_log = logging.getLogger("syckpt")
_RNG = "<rng>"  # no item can be called that


@dataclass(frozen=True)
class Request:
    """One call of `save`, as the script made it."""

    name: str | None
    payload: Mapping[str, Any] | None
    metric: Any
    message: str
    tags: Iterable[str]
    epoch_end: bool | None
    started: float
    """When the call began (`time.perf_counter()`)."""


@dataclass(frozen=True)
class _Capture:
    """What a save is made of, before anything is copied."""

    flat: Flat
    rng: Any
    tags: tuple[str, ...]
    facts: Facts
    replicas: Replicas
    metric: float | None
    declared: Declared
    layouts: dict[str, Any]
    """How its items are shown."""


class Saves:
    """Makes one manager's saves. `when_busy` is decided for all ranks together; `rng`: whether random streams are part of a commit."""

    def __init__(
        self,
        repository: Repository,
        coordinator: Coordinator,
        items: Items,
        progress: Progress,
        resumption: Resumption,
        ledger: Ledger,
        saver: Saver,
        config: Config,
        *,
        run: str,
        rng: bool,
        when_busy: Literal["wait", "skip", "raise"],
    ) -> None:
        self._repository = repository
        self._coordinator = coordinator
        self._items = items
        self._progress = progress
        self._resumption = resumption
        self._ledger = ledger
        self._saver = saver
        self._config = config
        self._sharing = Sharing(coordinator, full=config.check_replicas == "full", one_file=config.one_file)
        self._run = run
        self._with_rng = rng
        self._when_busy = when_busy
        self._sequence = 0
        self._outlived = 0
        """How much of the damage that this rank has met was met before a durable save that points to nothing older."""
        self._afresh: tuple[PendingCommit, int] | None = None
        """The newest save that points to nothing older, and how much damage had been met before it."""

    @property
    def _several(self) -> bool:
        return self._coordinator.world_size > 1

    @property
    def _at(self) -> str:
        return f"step {self._progress.step}"

    def make(self, request: Request, hyper: HyperConfig) -> PendingCommit | None:
        """Agree on a save and hand this rank's part over; None where it was skipped. Raises: as `CheckpointManager.save`."""
        capture, error = self._capture(request)
        mine = {
            "step": self._progress.step,
            "busy": self._saver.busy(),
            "schema": capture.facts.schema if capture else "",
            "replicas": capture.replicas.summary if capture else {},
            "names": [request.name, *capture.tags] if capture else [],
            "items": sorted(capture.flat.nodes) if capture else [],
            "left": self._resumption.taking.left if self._resumption.taking is not None else [],
            "config": hyper.hash(),
            "layouts": {item: layout[:2] for item, layout in capture.layouts.items()} if capture else {},
            "damage": self._fears_damage(),
            # As values: every rank hears of all of them, once.
            "failed": {commit: to_wire(exc) for commit, exc in self._ledger.unheard().items()} if self._several else {},
        }
        decide = partial(self._decide, name=request.name, tags=capture.tags if capture else (), hyper=hyper)
        verdict = self._coordinator.agree("save()", mine, decide, error=error, at=self._at)
        if verdict["left"]:
            # Of items that were registered since the branch was opened.
            assert self._resumption.taking is not None
            refuse_untaken(self._coordinator, "save()", self._resumption.taking, verdict["left"], at=self._at)
            self._resumption.all_taken()
            verdict = self._coordinator.agree("save()", {**mine, "left": []}, decide, at=self._at)
        if verdict["failed"]:
            self._ledger.told(verdict["failed"]["commits"])
            raise from_wire(verdict["failed"]["error"])
        assert capture is not None
        if verdict["skip"]:
            _log.warning("a save at step %d was skipped: two are still being written (when_busy='skip')", self._progress.step)
            return None
        try:
            return self._hand_over(request, capture, verdict, hyper)
        except BaseException as exc:
            self._saver.give_up_unless_submitted(verdict["id"], exc)
            raise

    def _fears_damage(self) -> bool:
        """Whether this rank has met damage that what a save points to may have: which row it was may be another rank's to know."""
        if self._afresh is not None and self._afresh[0].done():
            pending, met = self._afresh
            self._outlived, self._afresh = self._outlived if pending.failed else met, None
        return self._resumption.damage_met > self._outlived

    def prewarm(self, payload: Mapping[str, Any] | None) -> None:
        """Make the memory that a save needs, and wait until the writer is ready. Collective. Raises: as `make`."""
        capture, error = self._capture(Request(None, payload, None, "", (), None, time.perf_counter()))
        mine = {
            "items": sorted(capture.flat.nodes) if capture else [],
            "schema": capture.facts.schema if capture else "",
            "replicas": capture.replicas.summary if capture else {},
        }
        verdict = self._coordinator.agree("prewarm()", mine, _sameness, error=error, at=self._at)
        assert capture is not None
        self._saver.prewarm(self._parts(capture, verdict))

    def _capture(self, request: Request) -> tuple[_Capture | None, Exception | None]:
        """Return what this rank has to save, or what keeps it from it: the other ranks must hear of that."""
        try:
            if self._several:
                self._ledger.raise_callback_error()
            else:
                self._ledger.raise_failure()
            self._saver.prepare()
            tags = _names(request)
            score = self._progress.metric if request.metric is None else _score(request.metric)
            values = self._items.capture() if request.payload is None else self._items.capture_payload(request.payload)
            # In order of names, whatever the order of registration: the same state, the same manifest.
            values = dict(sorted(values.items()))
            formats, world_size = self._config.formats(values), self._coordinator.world_size
            layouts = self._config.layouts(values, world_size=world_size)
            flat = flatten({**values, _RNG: self._resumption.streams_now()} if self._with_rng else values, formats=formats)
            rng = flat.nodes.pop(_RNG, None)
            refuse_torn(flat.leaves)
            declared = declare(self._config, values)
            if not self._several:
                return _Capture(flat, rng, tags, Facts(), Replicas(), score, declared, layouts), None
            facts = self._sharing.facts(flat, _RNG, declared)
            return _Capture(flat, rng, tags, facts, self._sharing.replicas(flat, facts, _RNG), score, declared, layouts), None
        except Exception as exc:  # noqa: BLE001 - also what an item's own state_dict raises
            return None, exc

    def _parts(self, capture: _Capture, verdict: Mapping[str, Any]) -> list[Part]:
        if not self._several:
            return whole(capture.flat, capture.declared)
        same = {name: verdict[name] for name in ("same_schema", "same_replicas", "tellers")}
        return self._sharing.share(capture.flat, capture.facts, capture.replicas, own=_RNG, **same, at=self._at)

    def _hand_over(self, request: Request, capture: _Capture, verdict: dict[str, Any], hyper: HyperConfig) -> PendingCommit:
        """Give this rank's part of an agreed save to its writer."""
        progress = self._progress
        met = self._resumption.damage_met
        parts = self._parts(capture, verdict)
        done = progress.epoch_done(self._items.sampler, request.epoch_end)
        if done and request.epoch_end is None and self._items.sampler is None and progress.counts_batches and progress.entered:
            _log.warning(
                "save in the middle of epoch %d without a registered sampler: a resume goes on with the next epoch; register a"
                " StatefulRandomSampler to go on inside of it, or save with epoch_end=False to start it over",
                progress.epoch,
            )
        hyper.freeze()
        if self._config.pre_finalize_callback is not None:
            self._config.pre_finalize_callback(verdict["id"])
        meta = {
            "step": progress.step,
            "epoch": progress.epoch,
            "batch_idx": progress.batch_idx,
            "epoch_done": done,
            "entered": progress.entered and request.epoch_end is not True,
            "metric": nodes.encode(capture.metric if request.metric is not None else None),
            "message": str(request.message),
            "tags": list(capture.tags),
            "name": request.name,
            "config": nodes.encode(hyper.to_dict()),
            "fingerprint": verdict["id"][:8],
            "rng_exact": self._resumption.is_exact,
            "sequence": self._sequence,
            "created_ns": str(time.time_ns()),
            "writer": f"syckpt {__version__}",
        }
        pending = self._saver.submit(
            verdict["id"],
            parts,
            items=capture.flat.nodes,
            sharding=capture.declared.rows,
            sent=self._items.sent() if self._several and request.payload is None else None,
            rng=capture.rng,
            layouts=capture.layouts,
            table=self._sharing.table if self._coordinator.rank == 0 else None,
            after=lambda: self._ledger.parent,
            meta=meta,
            started=request.started,
            afresh=verdict["afresh"],
        )
        if verdict["afresh"]:
            self._afresh = pending, met
        self._sequence += 1
        if request.payload is None:
            progress.saved(done=done, metric=capture.metric)
        else:
            progress.metric = capture.metric  # The registered items are as unsaved as before.
        self._ledger.announce(pending, name=request.name, tags=capture.tags)
        return pending

    def _decide(self, values: Sequence[dict[str, Any]], *, name: str | None, tags: Sequence[str], hyper: HyperConfig) -> dict[str, Any]:
        """Rank 0: whether all ranks save the same thing, and under which id."""
        if left := united(value["left"] for value in values):
            return {"left": left}
        if failed := _failures(values):
            return {"left": [], "failed": failed}
        for field_name in ("step", "names", "config"):
            if len({str(value[field_name]) for value in values}) > 1:
                found = ", ".join(f"rank {rank}: {value[field_name]}" for rank, value in enumerate(values))
                raise CoordinationError(f"ranks save with different {field_name} ({found}): all ranks have to make the same calls")
        _refuse_other_layouts(values)
        busy = [rank for rank, value in enumerate(values) if value["busy"]]
        if busy and self._when_busy == "raise":
            raise ConflictError(
                f"saves {', '.join(p.id for p in self._saver.pending)} are still being written on rank(s) {', '.join(map(str, busy))}"
                " (when_busy='raise')"
            )
        hold = self._saver.hold
        assert hold is not None
        self._check_names(name, tags, branch=hold.branch)
        commit = ids.new_commit_id(
            fingerprint=fingerprint(hyper),
            repository=self._repository.id,
            run=self._run,
            generation=hold.generation,
            sequence=self._sequence,
            nonce=secrets.token_bytes(16),
        )
        skip, afresh = bool(busy) and self._when_busy == "skip", any(value["damage"] for value in values)
        return {"id": commit, "left": [], "failed": None, "skip": skip, "afresh": afresh, **_sameness(values)}

    def _check_names(self, name: str | None, tags: Sequence[str], *, branch: str) -> None:
        taken = [("names", name, "commit")] if name is not None else []
        for kind, ref, what in taken + [("tags", tag, "tag") for tag in tags]:
            if ref == branch or self._repository.refs.exists(f"heads/{ref}"):
                raise ConflictError(f"{ref!r} is a branch, which a revision of that name means: choose another name for the {what}")
            head = self._repository.refs.head(f"{kind}/{ref}")
            if head is not None and head.commit is not None and not self._repository.read_commit(head.commit).dropped:
                raise ConflictError(f"the {what} {ref!r} exists already and means {head.commit}: choose another")
            if any(ref in names for names in self._ledger.names_in_hand(kind)):
                raise ConflictError(f"the {what} {ref!r} is being saved already: choose another")


def _refuse_other_layouts(values: Sequence[dict[str, Any]]) -> None:
    """Check that an item is to be the same file on all ranks that have it: else no one could make that file. Raises: StateError."""
    seen: dict[str, tuple[int, list[Any]]] = {}
    for rank, value in enumerate(values):
        for item, layout in value["layouts"].items():
            other, known = seen.setdefault(item, (rank, layout))
            if known != layout:
                found = f"{' as '.join(known)}; {' as '.join(layout)}"
                raise StateError(
                    f"ranks {other} and {rank} save item {item!r} under other layouts ({found}): give all ranks the same Config;"
                    " {rank} in a path stands for the rank"
                )


def _sameness(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return whether all ranks have the same structure, and the same values where they should be the same.

    Raises: CoordinationError for items that only some of them have.
    """
    refuse_other_items([value["items"] for value in values])
    digests = {(place, digest) for value in values for place, digest in value["replicas"].items()}
    first: dict[str, int] = {}
    for rank, value in enumerate(values):
        first.setdefault(value["schema"], rank)
    return {
        "same_schema": len(first) == 1,
        "same_replicas": len(digests) == len({place for place, _ in digests}),
        # Who tells rank 0 of a structure: one of the ranks that have it, where there are several.
        "tellers": list(first.values()) if len(first) > 1 else [],
    }


def _failures(values: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the earlier saves that failed on any rank, and the error that every rank raises for them."""
    first: dict[str, SyckptError] = {}
    for rank, value in enumerate(values):
        for commit, wire in value["failed"].items():
            where = "" if "rank(s)" in wire["message"] else f"on rank(s) {rank}: "
            first.setdefault(commit, from_wire({**wire, "message": where + wire["message"]}))
    return {"commits": list(first), "error": to_wire(joined(list(first.values())))} if first else None


def _names(request: Request) -> tuple[str, ...]:
    """Check the names that a commit is to have, and return its tags, each once. Raises: StateError."""
    if request.name is not None:
        ids.check_name(request.name, what="commit")
    if isinstance(request.tags, str) or not isinstance(request.tags, Iterable):
        raise StateError(f"tags={request.tags!r}: expected a sequence of names, such as ({str(request.tags)!r},)")
    return tuple(dict.fromkeys([ids.check_name(tag, what="tag") for tag in request.tags]))


def _score(metric: Any) -> float:
    try:
        value = metric.item() if hasattr(metric, "item") else metric
        if not isinstance(value, bool) and isinstance(value, int | float):
            return float(value)
    except (ValueError, RuntimeError, OverflowError):
        pass  # Several elements, or beyond a float.
    raise StateError(f"metric={metric!r}: expected a number")
