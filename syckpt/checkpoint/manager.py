"""`CheckpointManager`: what a training script talks to.

Contract (single process): the constructor picks what to resume from; each item is restored when it is registered; the random streams come
last, at the moment at which the interrupted run had them (see `restore`). `save()` returns when the state is copied; a writer process makes
it durable. A clean exit saves what advanced and waits; an exit by exception waits for what was handed over and saves nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch

from syckpt import __version__
from syckpt.checkpoint import loader as loading
from syckpt.checkpoint.items import Items
from syckpt.checkpoint.ledger import Ledger, joined
from syckpt.checkpoint.loader import LoadReport
from syckpt.checkpoint.progress import Interval, Progress
from syckpt.checkpoint.resumption import Resumption
from syckpt.checkpoint.saver import PendingCommit, Saver, Settings
from syckpt.checkpoint.share import Facts, Sharing, whole
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.specs import Config
from syckpt.checkpoint.start import Arguments, Start, agree_on_start, open_for_writing
from syckpt.dist.coordinator import connect
from syckpt.errors import ConflictError, CoordinationError, IntegrityError, StateError, SyckptError, from_wire, to_wire
from syckpt.hyperparams.config import HyperConfig
from syckpt.hyperparams.fingerprint import fingerprint
from syckpt.objects import ids, nodes
from syckpt.objects.commit import Commit
from syckpt.repo import history, receipts
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold
from syckpt.repo.verify import VerifyReport, verify
from syckpt.state.flatten import Flat, flatten
from syckpt.stores.base import StoreSpec, parse_root

__all__ = ["CheckpointManager"]

_log = logging.getLogger("syckpt")
_RNG = "<rng>"  # no item can be called that
# Of the public contract, not here yet: an item of such a name could not be reached any more.
_NAMES_TO_COME = frozenset({"goto", "create_branch", "checkout_branch", "delete_branch", "list_branches", "tag", "diff", "similar"})
_NAMES_TO_COME |= {"print_tree", "retain", "gc", "export_ckpt", "prewarm"}


@dataclass(frozen=True)
class _Capture:
    """What a save is made of, before anything is copied."""

    flat: Flat
    rng: Any
    facts: Facts
    replicas: str
    metric: float | None
    registered: bool
    """Whether it is the registered items, not a payload."""


class CheckpointManager:
    """Git for one training run. See the module's contract and `syckpt help`."""

    Config: TypeAlias = Config

    def __init__(
        self,
        root: str | os.PathLike[str] | StoreSpec | None = None,
        config: Config | None = None,
        *,
        max_to_keep: int | None = None,
        keep: object | None = None,
        maximize: bool = False,
        auto_resume: bool = True,
        run_mode: Literal["append", "overwrite"] = "append",
        branch: str | None = None,
        base: str | None = None,
        async_save: bool = True,
        when_busy: Literal["wait", "skip", "raise"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        save_on_exit: bool = True,
        save_every: int | str | None = None,
        rng: bool = True,
        coordinator: object | None = None,
        timeout_s: float = 600,
        signer: object | None = None,
        trusted_keys: object | None = None,
    ) -> None:
        """Open (or make) the repository `root/.syckpt` and pick what to resume from; no tensor is read yet.

        Raises: StateError for arguments, IntegrityError when the branch has commits but none is whole, StoreError.
        """
        _refuse_unfinished(root=root, run_mode=run_mode, coordinator=coordinator, signer=signer, trusted_keys=trusted_keys)
        _one_of("when_busy", when_busy, ("wait", "skip", "raise"))
        _one_of("on_error", on_error, ("raise", "warn"))
        if keep is not None or max_to_keep is not None:
            _log.warning("retention (keep=, max_to_keep=) is not in this version of syckpt: every commit is kept")
        assert root is not None
        self._config = config or Config()
        self._maximize = maximize
        self._async_save = async_save
        self._when_busy = when_busy
        self._save_on_exit = save_on_exit
        self._interval = Interval(save_every)
        self._with_rng = rng
        self._timeout_s = timeout_s
        self._items = Items()
        self._progress = Progress()
        self._hyper: HyperConfig | None = None
        self._sequence = 0
        self._closed = False
        self._opened = False
        self._report: LoadReport | None = None

        spec = parse_root(root)
        resume = run_mode == "append" and auto_resume
        told = Arguments(
            spec.path, branch, base, resume, maximize, async_save, when_busy, rng, str(save_every), on_error, save_on_exit, timeout_s
        )
        self._coordinator = connect(timeout_s=timeout_s)
        self._sharing = Sharing(self._coordinator)
        self._repository, self._start = agree_on_start(self._coordinator, spec, told)
        self._ledger = Ledger(on_error=on_error, on_stats=self._config.on_stats)
        self._resumption = Resumption(
            Reader(self._repository),
            self._coordinator,
            self._items,
            self._progress,
            self._ledger,
            branch=self._start.branch,
            with_rng=rng,
        )
        if self._start.resumed is not None:
            self._resumption.take_over(self._repository.read_commit(self._start.resumed))
        self._fork = self.resumed if self._start.forks else None
        self._saver = Saver(
            self._repository,
            self._settings(spec),
            reopen=_opener(self._repository, self._start, self._fork, rank=self._coordinator.rank),
            on_settled=self._ledger.settle,
        )
        # Also run at the interpreter's exit: what was handed over becomes durable, and its failure is heard of.
        self._finalizer = weakref.finalize(self, _close_quietly, self._saver, self._ledger, os.getpid())

    def _settings(self, spec: StoreSpec) -> Settings:
        idle = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) - torch.get_num_threads()
        return Settings(
            spec=spec,
            token=self._start.token,
            compression=self._config.compression,
            keyframe_every=self._config.keyframe_every,
            threads=min(4, max(1, idle)),
            timeout_s=self._timeout_s,
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
        )

    # -- registering -------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name == "config":
            self._set_config(value)
        else:
            self.register(name, value)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what is no attribute of the class or the instance.
        if not name.startswith("_") and name in self._items:
            return self._items[name]
        if name in _NAMES_TO_COME:
            raise AttributeError(f"CheckpointManager.{name} is not in this version of syckpt")
        raise AttributeError(f"no item {name!r} is registered; registered: {', '.join(self._items.names()) or 'none'}")

    def __delattr__(self, name: str) -> None:
        self.unregister(name)

    def register(self, name: str, obj: Any) -> None:
        """Make an object or value part of every commit, and restore it if a commit with it is being resumed.

        The second time a name is assigned, the value replaces the first and nothing is restored.
        Raises: StateError for a name of the API, or a state that does not fit; IntegrityError when no commit is whole.
        """
        if isinstance(name, str) and (hasattr(type(self), name) or name in _NAMES_TO_COME):
            raise StateError(f"{name!r} is a name of CheckpointManager itself; register the item under another one")
        known = name in self._items
        self._items.put(name, obj)
        if known:
            return
        sampler = self._items.sampler
        if sampler is not None and sampler is obj:
            # A weak reference: the sampler may outlive the manager, and must not keep it.
            sampler.on_first_index = _weakly(self._resumption.first_index)
        try:
            self._resumption.restore(name)
        except BaseException:
            self._items.remove(name)  # The next one of that name is a first one, and restored.
            raise

    def unregister(self, name: str) -> None:
        """Leave an item out of later commits. Raises: StateError."""
        self._items.remove(name)
        self._resumption.forget(name)

    @property
    def config(self) -> HyperConfig:
        """Hyper-parameters of this run; assign a mapping. A resume never overwrites what was assigned."""
        if self._hyper is None:
            self._hyper = HyperConfig(self.resumed.config if self.resumed is not None else {})
        return self._hyper

    def _set_config(self, value: Any) -> None:
        self._hyper = value if isinstance(value, HyperConfig) else HyperConfig(value)
        resumed = self.resumed
        if resumed is not None and self._hyper != HyperConfig(resumed.config):
            _log.warning("the configuration differs from that of commit %s: %s", resumed.id, HyperConfig(resumed.config).diff(self._hyper))

    # -- resuming ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What the first `loop/batches/restore/step_up/save` does: settle the resume, take the branch, start the writer."""
        if self._closed:
            raise StateError("this manager is closed; make another one")
        self._saver.require_own_process()
        if self._opened:
            self._resumption.settle()
            return
        hold = self._agree_to_begin()
        self._resumption.finish()
        self._saver.open(hold)
        self._opened = True

    def _agree_to_begin(self) -> Hold:
        """Settle the resume on all ranks and take the branch."""
        resumption = self._resumption
        while True:
            error: Exception | None = None
            try:
                resumption.settle()
            except Exception as exc:  # noqa: BLE001 - whatever it is, the other ranks hear of it
                error = exc
            mine = {"damage": resumption.damage}
            verdict = self._coordinator.agree("the first call of a manager", mine, self._decide_to_begin, error=error)
            if verdict["resume"] is None:
                return Hold(**verdict["hold"])
            try:
                resumption.restore_all_from(self._repository.read_commit(verdict["resume"]))
            except IntegrityError as exc:
                resumption.damage = str(exc)

    def _decide_to_begin(self, values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Rank 0: an older commit for all, if any rank met damage; else the branch is taken."""
        older = self._resumption.older([f"rank {rank}: {value['damage']}" for rank, value in enumerate(values) if value["damage"]])
        if older is not None:
            return {"resume": older.id}
        hold = open_for_writing(self._repository, self._start, fork=self._fork, expected=self._start.tip)
        receipts.discard(self._repository, hold.branch)
        return {"resume": None, "hold": asdict(hold)}

    def restore(self) -> LoadReport:
        """Restore the random streams now and return the report of the resume.

        `loop` and `batches` do this at the right moment by themselves: before an epoch's first draw, or, in an epoch that is entered
        again, after the DataLoader's iterator exists (making it draws a base seed). Call it in scripts that use neither.
        """
        self._begin()
        self._resumption.restore_streams()
        return self._resumption.report

    @property
    def resumed(self) -> Commit | None:
        """The commit that this manager goes on from, or None."""
        return self._resumption.commit

    @property
    def last_report(self) -> LoadReport:
        """What the last load, or the resume, did and did not do."""
        return self._report or self._resumption.report

    # -- progress ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._progress.epoch

    @property
    def batch_idx(self) -> int:
        """Batches of the epoch that were consumed."""
        return self._progress.batch_idx

    @property
    def metric(self) -> float | None:
        """The metric of the newest save that gave one."""
        return self._progress.metric

    @property
    def branch(self) -> str:
        """The branch that this manager writes."""
        return self._start.branch

    def loop(self, epochs: int | None = None) -> Iterator[int]:
        """Yield the epochs still to do, up to `epochs` in all (None: without end); one that was cut off is entered again."""
        self._begin()
        while True:
            epoch = self._progress.next_epoch
            if epochs is not None and epoch >= epochs:
                return
            self._progress.enter(epoch, self._items.sampler)
            self._resumption.begin_epoch()
            yield epoch
            self._progress.leave()

    def step_up(self, n: int = 1, *, batches: int | None = None) -> None:
        """Count `n` optimizer steps, after they were made, and `batches` micro-batches (default: n) as consumed.

        Raises: StateError when random streams are still to be restored, or `batches()` is counting; what a background save failed with.
        """
        self._begin()
        self._progress.count_by("step_up")
        if self._resumption.streams_pending:
            raise StateError(
                "a step was made before the random streams of the resumed commit were restored: iterate with ckpt.loop() or"
                " ckpt.batches(), or call ckpt.restore() before the first draw"
            )
        self._progress.advance(n, n if batches is None else batches, self._items.sampler)
        self._after_step(n)

    def batches(self, loader: Any, accumulate: int = 1) -> Iterator[Any]:
        """Iterate a loader, counting each batch when its body begins, and a step every `accumulate` batches.

        Random streams are restored where they have to be, also with persistent workers.
        """
        self._begin()
        self._progress.count_by("batches")
        if type(accumulate) is not int or accumulate < 1:
            raise StateError(f"accumulate={accumulate!r}: expected a number of batches, at least 1")
        # An epoch that is entered again makes its steps where they would have been.
        done = self._progress.batch_idx if self._progress.at_resume else 0
        iterator = self._resumption.iterate(loader)
        self._progress.entered = True
        for number, batch in enumerate(iterator, start=done + 1):
            at_boundary = number % accumulate == 0
            self._progress.advance(1 if at_boundary else 0, 1, self._items.sampler)
            yield batch
            if at_boundary:
                self._after_step(1)
        self._progress.entered = False

    def _after_step(self, steps: int) -> None:
        self._saver.pump()
        if self._interval.is_due(self._progress.step, steps):
            self.save()

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        checkpoint_id: str | None = None,
        payload: Mapping[str, Any] | None = None,
        *,
        metric: Any = None,
        message: str = "",
        tags: Sequence[str] = (),
        epoch_end: bool | None = None,
        wait: bool = False,
    ) -> PendingCommit | None:
        """Commit the registered items, or exactly `payload`; return as soon as the caller may change its tensors.

        `checkpoint_id` names the commit. With `wait`, or `async_save=False`, it is durable on return.
        Returns None for a save that was skipped (`when_busy="skip"`).
        Raises: what an earlier background save failed with; StateError for what cannot be carried, naming its path; ConflictError for a
        name that is taken, or (`when_busy="raise"`) when two saves are in hand.
        """
        started = time.perf_counter()
        self._saver.pump()
        self._begin()
        if isinstance(tags, str):
            raise StateError(f"tags={tags!r}: expected a sequence of names, such as ({tags!r},)")
        capture, error = self._capture(payload, metric)
        mine = {
            "step": self.step,
            "busy": self._saver.busy(),
            "schema": capture.facts.schema if capture else "",
            "replicas": capture.replicas if capture else "",
            "names": [checkpoint_id, *tags],
            "config": self.config.hash(),
            # As values: every rank hears of all of them, once.
            "failed": {commit: to_wire(exc) for commit, exc in self._ledger.unheard().items()} if self._coordinator.world_size > 1 else {},
        }
        decide = partial(self._decide_save, name=checkpoint_id, tags=tags)
        verdict = self._coordinator.agree("save()", mine, decide, error=error, at=f"step {self.step}")
        if verdict["failed"]:
            self._ledger.told(verdict["failed"]["commits"])
            raise from_wire(verdict["failed"]["error"])
        assert capture is not None
        if verdict["skip"]:
            _log.warning("a save at step %d was skipped: two are still being written (when_busy='skip')", self.step)
            return None
        try:
            return self._hand_over(capture, verdict, checkpoint_id, metric, message, tags, epoch_end, wait, started)
        except BaseException as exc:
            self._saver.give_up_unless_submitted(verdict["id"], exc)
            raise

    def _hand_over(
        self,
        capture: _Capture,
        verdict: dict[str, Any],
        checkpoint_id: str | None,
        metric: Any,
        message: str,
        tags: Sequence[str],
        epoch_end: bool | None,
        wait: bool,
        started: float,
    ) -> PendingCommit:
        """Give this rank's part of an agreed save to its writer."""
        several = self._coordinator.world_size > 1
        same = {"same_schema": verdict["same_schema"], "same_replicas": verdict["same_replicas"]}
        parts = (
            self._sharing.share(capture.flat, capture.facts, own=_RNG, **same, at=f"step {self.step}") if several else whole(capture.flat)
        )
        done = self._progress.epoch_done(self._items.sampler, epoch_end)
        if done and epoch_end is None and self._items.sampler is None and self._progress.counts_batches and self._progress.entered:
            _log.warning(
                "save in the middle of epoch %d without a registered sampler: a resume goes on with the next epoch; register a"
                " StatefulRandomSampler to go on inside of it, or save with epoch_end=False to start it over",
                self.epoch,
            )
        config = self.config
        config.freeze()
        meta = {
            "step": self.step,
            "epoch": self.epoch,
            "batch_idx": self.batch_idx,
            "epoch_done": done,
            "entered": self._progress.entered and epoch_end is not True,
            "metric": nodes.encode(capture.metric if metric is not None else None),
            "message": str(message),
            "tags": list(tags),
            "name": checkpoint_id,
            "config": nodes.encode(config.to_dict()),
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
            rng=capture.rng,
            after=lambda: self._ledger.newest,
            meta=meta,
            started=started,
        )
        self._sequence += 1
        if capture.registered:
            self._progress.saved(done=done, metric=capture.metric)
        else:
            self._progress.metric = capture.metric  # The registered items are as unsaved as before.
        self._ledger.announce(pending, name=checkpoint_id, tags=tags)
        if wait or not self._async_save:
            try:
                pending.result()
            except SyckptError as exc:
                self._ledger.heard(exc)  # Here; the next save does not fail for this one.
                raise
        return pending

    def _capture(self, payload: Mapping[str, Any] | None, metric: Any) -> tuple[_Capture | None, Exception | None]:
        """Return what this rank has to save, or what keeps it from it: the other ranks must hear of that."""
        try:
            if self._coordinator.world_size == 1:
                self._ledger.raise_failure()
            self._saver.prepare()
            score = self._progress.metric if metric is None else _score(metric)
            values = self._items.capture() if payload is None else {ids.check_item_name(name): value for name, value in payload.items()}
            # In order of names, whatever the order of registration: the same state, the same manifest.
            values = dict(sorted(values.items()))
            flat = flatten({**values, _RNG: self._resumption.streams_now()} if self._with_rng else values)
            rng = flat.nodes.pop(_RNG, None)
            if self._coordinator.world_size == 1:
                return _Capture(flat, rng, Facts([], [], ""), "", score, payload is None), None
            facts = self._sharing.facts(flat, _RNG)
            return _Capture(flat, rng, facts, self._sharing.replicas(flat, facts, _RNG), score, payload is None), None
        except Exception as exc:  # noqa: BLE001 - also what an item's own state_dict raises
            return None, exc

    def _decide_save(self, values: Sequence[dict[str, Any]], *, name: str | None, tags: Sequence[str]) -> dict[str, Any]:
        """Rank 0: whether all ranks save the same thing, and under which id."""
        if failed := _failures(values):
            return {"failed": failed}
        for field_name in ("step", "names", "config"):
            if len({str(value[field_name]) for value in values}) > 1:
                found = ", ".join(f"rank {rank}: {value[field_name]}" for rank, value in enumerate(values))
                raise CoordinationError(f"ranks save with different {field_name} ({found}): all ranks have to make the same calls")
        busy = [rank for rank, value in enumerate(values) if value["busy"]]
        if busy and self._when_busy == "raise":
            raise ConflictError(
                f"saves {', '.join(p.id for p in self._saver.pending)} are still being written on rank(s) {', '.join(map(str, busy))}"
                " (when_busy='raise')"
            )
        self._check_names(name, tags)
        hold = self._saver.hold
        assert hold is not None
        commit = ids.new_commit_id(
            fingerprint=fingerprint(self.config),
            repository=self._repository.id,
            run=self._start.run,
            generation=hold.generation,
            sequence=self._sequence,
            nonce=secrets.token_bytes(16),
        )
        return {
            "id": commit,
            "failed": None,
            "skip": bool(busy) and self._when_busy == "skip",
            "same_schema": len({value["schema"] for value in values}) == 1,
            "same_replicas": len({value["replicas"] for value in values}) == 1,
        }

    def _check_names(self, name: str | None, tags: Sequence[str]) -> None:
        taken = [("names", name, "commit")] if name is not None else []
        for kind, ref, what in taken + [("tags", tag, "tag") for tag in tags]:
            ids.check_name(ref, what=what)
            head = self._repository.refs.head(f"{kind}/{ref}")
            if head is not None and head.commit is not None and not self._repository.read_commit(head.commit).dropped:
                raise ConflictError(f"the {what} {ref!r} exists already and means {head.commit}: choose another")
            if any(ref in names for names in self._ledger.names_in_hand(kind)):
                raise ConflictError(f"the {what} {ref!r} is being saved already: choose another")

    @property
    def hash(self) -> str | None:
        """Id of the newest save by this manager; after a reported failure, of the newest published one; else what was resumed."""
        self._saver.pump()
        return self._ledger.newest

    def wait(self) -> None:
        """Wait until every save is durable. Raises: what one of them failed with; CoordinationError after `timeout_s`."""
        self._saver.wait_for(None, timeout_s=None)
        self._ledger.raise_failure()

    def close(self) -> None:
        """Wait for the saves in hand, end the writer, give the branch back. Raises: what a save failed with."""
        if self._closed or self._saver.is_inherited:
            return
        self._closed = True
        try:
            self._saver.close()
        finally:
            self._finalizer.detach()
            self._coordinator.close()
        self._ledger.raise_failure()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._saver.is_inherited:
            return  # A forked child leaves; the manager is its parent's.
        if kind is None:
            try:
                earlier = self._final_save()
            except BaseException as exc:
                self._close_logged(type(exc).__name__)
                raise
            self.close()
            if earlier is not None:
                raise earlier
            return
        # Half-updated state is never saved; what was handed over before is.
        self._close_logged(kind.__name__)

    def _final_save(self) -> SyckptError | None:
        """Save what no commit has; return the failure of an earlier save that is still to be raised, which does not prevent this one."""
        if self._closed or not self._opened or not self._save_on_exit:
            return None
        self._saver.wait_for(None, timeout_s=None)
        earlier: SyckptError | None = None
        try:
            self._ledger.raise_failure()
        except SyckptError as exc:
            earlier = exc
        if self._ledger.lost or self._progress.advanced(self._items.sampler):
            self.save(message="exit")
        return earlier

    def _close_logged(self, leaving_by: str) -> None:
        try:
            self.close()
        except SyckptError as exc:
            _log.error("while leaving by %s: %s", leaving_by, exc)

    # -- reading -----------------------------------------------------------------------------------------------------

    def load(
        self,
        rev: str = "HEAD",
        into: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        partial: Sequence[str] | None = None,
        map_location: Any = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Read a commit: into live targets in place (`into`), or as new CPU tensors. See `syckpt.load`.

        Waits for this manager's own saves first. Random streams and counters are left alone. Collective: what does not fit on one rank is
        raised on all, before anything is touched; so is damage that one of them reads.
        """
        self.wait()
        commit = self._resolve(rev)
        targets = None if into is None else {name: self._items.template(name, target) for name, target in into.items()}
        how: dict[str, Any] = {"strict": strict, "cast": cast, "partial": partial, "map_location": map_location}
        source: Source | None = None
        for dry in (True,) if dry_run else (True, False):
            error: Exception | None = None
            try:
                source = source or self._resumption.open(commit)
                values, report = loading.read(source, targets, **how, dry_run=dry)
            except Exception as exc:  # noqa: BLE001 - the other ranks hear of it
                error = exc
            self._coordinator.barrier("load()", error=error, at=rev)
        self._report = report
        return values if into is None else {name: self._items.untemplate(name, value) for name, value in values.items()}

    def _resolve(self, rev: str) -> Commit:
        """Return the commit that a revision names, the same on all ranks."""

        def decide(_: object) -> dict[str, Any]:
            return {"id": history.resolve(self._repository, rev, branch=self._start.branch, maximize=self._maximize).id}

        return self._repository.read_commit(self._coordinator.agree("load()", {}, decide, at=rev)["id"])

    def log(self, n: int | None = None) -> list[Commit]:
        """Return up to `n` commits of this branch, newest first, after waiting for this manager's own."""
        self.wait()
        return history.log(self._repository, count=n, branch=self._start.branch)

    def verify(self, rev: str = "HEAD") -> VerifyReport:
        """Read and check every byte of a commit, after waiting for this manager's own saves."""
        self.wait()
        commit = history.resolve(self._repository, rev, branch=self._start.branch, maximize=self._maximize)
        return verify(self._repository, commit.id)


def _opener(repository: Repository, start: Start, fork: Commit | None, *, rank: int) -> Callable[[Hold, str | None], Hold]:
    """Return how a branch is opened anew when a writer died: only rank 0's writer publishes, so only it has to be fenced."""

    def reopen(hold: Hold, tip: str | None) -> Hold:
        return open_for_writing(repository, start, fork=fork, expected=tip) if rank == 0 else replace(hold, tip=tip)

    return reopen


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    reference = weakref.WeakMethod(method)

    def call() -> None:
        live = reference()
        if live is not None:
            live()

    return call


def _close_quietly(saver: Saver, ledger: Ledger, pid: int) -> None:
    """For a manager that was never closed: its saves become durable all the same, and failures are at least logged."""
    if os.getpid() != pid:
        return
    try:
        saver.close()
        ledger.raise_failure()
    except SyckptError as exc:
        _log.error("a save of a manager that was not closed failed: %s", exc)


def _failures(values: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the earlier saves that failed on any rank, and the error that every rank raises for them."""
    first: dict[str, SyckptError] = {}
    for rank, value in enumerate(values):
        for commit, wire in value["failed"].items():
            where = "" if "rank(s)" in wire["message"] else f"on rank(s) {rank}: "
            first.setdefault(commit, from_wire({**wire, "message": where + wire["message"]}))
    return {"commits": list(first), "error": to_wire(joined(list(first.values())))} if first else None


def _score(metric: Any) -> float:
    try:
        value = metric.item() if hasattr(metric, "item") else metric
        if not isinstance(value, bool) and isinstance(value, int | float):
            return float(value)
    except (ValueError, RuntimeError, OverflowError):
        pass  # Several elements, or beyond a float.
    raise StateError(f"metric={metric!r}: expected a number")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StateError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _refuse_unfinished(*, root: object, run_mode: str, coordinator: object, signer: object, trusted_keys: object) -> None:
    """Arguments of the public contract that this version does not honour are errors, never ignored."""
    if root is None:
        raise StateError(
            "CheckpointManager needs root=, the experiment's directory; managers without one are not in this version of syckpt"
        )
    if run_mode == "new_branch":
        raise StateError("run_mode='new_branch' is not in this version of syckpt; name a branch with branch=...")
    _one_of("run_mode", run_mode, ("append", "overwrite"))
    for name, value in (("coordinator", coordinator), ("signer", signer), ("trusted_keys", trusted_keys)):
        if value is not None:
            raise StateError(f"{name}= is not in this version of syckpt; leave it out")
