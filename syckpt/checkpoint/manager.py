"""`CheckpointManager`: what a training script talks to.

Contract (single process): the constructor picks what to resume from; each item is restored when it is registered; the random streams come
last, at the moment at which the interrupted run had them (see `restore`). `save()` returns when the state is copied; a writer process makes
it durable. A clean exit saves what advanced and waits; an exit by exception waits for what was handed over and saves nothing.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch

from syckpt.checkpoint.broadcast import Broadcast
from syckpt.checkpoint.course import Course
from syckpt.checkpoint.items import Items
from syckpt.checkpoint.keys import Keys
from syckpt.checkpoint.leaving import close_quietly, leave, save_finally
from syckpt.checkpoint.ledger import Ledger
from syckpt.checkpoint.loader import LoadReport
from syckpt.checkpoint.loads import Loads
from syckpt.checkpoint.past import Past
from syckpt.checkpoint.process import Settings
from syckpt.checkpoint.progress import Interval, Progress
from syckpt.checkpoint.resumption import Resumption
from syckpt.checkpoint.saver import PendingCommit, Saver
from syckpt.checkpoint.saves import Request, Saves
from syckpt.checkpoint.specs import Config
from syckpt.checkpoint.standing import Standing
from syckpt.checkpoint.start import Arguments, Seat, agree_on_start, rule_of
from syckpt.dist.coordinator import Coordinator, connect
from syckpt.errors import StateError, SyckptError
from syckpt.hyperparams.config import HyperConfig
from syckpt.objects.commit import Commit
from syckpt.repo.collection import Collection
from syckpt.repo.difference import Diff
from syckpt.repo.reader import Reader
from syckpt.repo.retention import Retained, Retention
from syckpt.repo.signing import KeyFile
from syckpt.repo.similarity import Similar
from syckpt.repo.verify import VerifyReport
from syckpt.stores.base import StoreSpec, parse_root

__all__ = ["CheckpointManager"]

_log = logging.getLogger("syckpt")


class CheckpointManager:
    """Git for one training run. See the module's contract and `syckpt help`."""

    Config: TypeAlias = Config

    def __new__(cls, root: object = None, *arguments: object, **named: object) -> CheckpointManager:
        """Return a manager of one experiment, or without a root one of paths (`checkpoint.rootless`)."""
        if cls is CheckpointManager and (root is None or isinstance(root, Config)):
            from syckpt.checkpoint.rootless import PathManager

            return object.__new__(PathManager)
        return object.__new__(cls)

    def __init__(
        self,
        root: str | os.PathLike[str] | StoreSpec | Config | None = None,
        config: Config | None = None,
        *,
        max_to_keep: int | None = None,
        keep: Retention | None = None,
        maximize: bool = False,
        auto_resume: bool = True,
        run_mode: Literal["append", "new_branch", "overwrite"] = "append",
        branch: str | None = None,
        base: str | None = None,
        async_save: bool = True,
        when_busy: Literal["wait", "skip", "raise"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        save_on_exit: bool = True,
        save_every: int | str | None = None,
        rng: bool = True,
        coordinator: Coordinator | None = None,
        timeout_s: float = 600,
        signer: KeyFile | None = None,
        trusted_keys: KeyFile | Sequence[KeyFile] | None = None,
    ) -> None:
        """Open (or make) the repository `root/.syckpt` and pick what to resume from; no tensor is read yet.

        Collective: every rank makes its manager, with the same arguments. `timeout_s`, in seconds, bounds each wait for other ranks and for
        the writer. Without a root (`CheckpointManager(CheckpointManager.Config(...))`) see `checkpoint.rootless`.
        Raises: StateError for arguments; IntegrityError when the branch has commits but none is whole, or the one found is not signed by
        one of `trusted_keys`; NotFoundError (`base`); CoordinationError (ranks differ, or share no directory); StoreError.
        """
        assert root is not None
        assert not isinstance(root, Config)
        self._config = config or Config()
        self._maximize = maximize
        rule = rule_of(keep, max_to_keep)
        self._async_save = async_save
        self._save_on_exit = save_on_exit
        interval = Interval(save_every)
        self._timeout_s = timeout_s
        self._items = Items(self._config)
        self._progress = Progress()
        self._hyper: HyperConfig | None = None
        self._closed = False
        self._report: LoadReport | None = None

        spec = parse_root(root)
        told = Arguments(
            root=spec.path,
            branch=branch,
            base=base,
            run_mode=run_mode,
            resume=run_mode != "overwrite" and auto_resume,
            maximize=maximize,
            async_save=async_save,
            when_busy=when_busy,
            rng=rng,
            save_every=str(save_every),
            on_error=on_error,
            save_on_exit=save_on_exit,
            timeout_s=timeout_s,
            read=self._config.read,
            check_replicas=self._config.check_replicas,
        )
        self._coordinator = coordinator or connect(timeout_s=timeout_s)
        self._keys = Keys.read(signer, trusted_keys, rank=self._coordinator.rank)
        self._repository, start = agree_on_start(self._coordinator, spec, told, keys=self._keys)
        self._ledger = Ledger(
            on_error=on_error, on_stats=self._config.on_stats, on_durable=self._config.finalize_callback, parent=start.parent
        )
        self._broadcast = Broadcast(self._coordinator, timeout_s=timeout_s) if self._config.read == "broadcast" else None
        self._resumption = Resumption(
            Reader(self._repository, trusted=self._keys.trusted),
            self._coordinator,
            self._items,
            self._progress,
            self._ledger,
            branch=start.branch,
            with_rng=rng,
            broadcast=self._broadcast,
        )
        self._loads = Loads(self._coordinator, self._items, self._resumption.open, broadcast=self._broadcast)
        if start.resumed is not None:
            self._resumption.take_over(self._repository.read_commit(start.resumed), afresh=start.afresh)
        self._seat = seat = Seat(self._repository, start, rank=self._coordinator.rank)
        self._saver = Saver(self._repository, self._settings(spec, start.token, rule), reopen=seat.reopen, on_settled=self._ledger.settle)
        self._course = Course(self._coordinator, self._items, self._progress, self._resumption, self._saver, interval=interval)
        self._standing = Standing(
            self._repository,
            self._coordinator,
            self._resumption,
            self._saver,
            self._ledger,
            self._progress,
            seat,
            maximize=maximize,
        )
        self._past = Past(
            self._repository,
            self._coordinator,
            self._saver,
            self._ledger,
            self._standing,
            trusted=self._keys.trusted,
            rule=rule,
            maximize=maximize,
        )
        self._saves = Saves(
            self._repository,
            self._coordinator,
            self._items,
            self._progress,
            self._resumption,
            self._ledger,
            self._saver,
            self._config,
            run=start.run,
            rng=rng,
            when_busy=when_busy,
        )
        # Also run at the interpreter's exit: what was handed over becomes durable, and its failure is heard of.
        self._finalizer = weakref.finalize(self, close_quietly, self._saver, self._ledger, os.getpid())

    def _settings(self, spec: StoreSpec, token: str, rule: Retention | None) -> Settings:
        idle = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) - torch.get_num_threads()
        return Settings(
            spec=spec,
            token=token,
            compression=self._config.compression,
            keyframe_every=self._config.keyframe_every,
            threads=min(4, max(1, idle)),
            timeout_s=self._timeout_s,
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
            signer=self._keys.signer,
            retention=None if rule is None else rule.to_wire(maximize=self._maximize),
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
        if name.startswith("_"):
            # Also of an instance that was never initialised, which copying makes: it has no items to look at.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in self._items:
            return self._items[name]
        raise AttributeError(f"no item {name!r} is registered; registered: {', '.join(self._items.names()) or 'none'}")

    def __reduce_ex__(self, protocol: object) -> str:
        raise StateError("a manager cannot be copied or pickled: it holds a branch and a process; make another one, on a branch of its own")

    def __delattr__(self, name: str) -> None:
        self.unregister(name)

    def register(self, name: str, obj: Any) -> None:
        """Make an object or value part of every commit, and restore it if a commit with it is being resumed.

        The object stays the caller's; every save reads it as it is then. Restoring fills tensors in place, also a module's, and hands the
        rest to `load_state_dict`; a plain value is replaced by the saved one: read it as `ckpt.<name>`. The second time a name is assigned,
        the value replaces the first and nothing is restored.
        Raises: StateError for a name of the API, or a state that does not fit, before anything is touched; IntegrityError when no commit is
        whole; what the object's own `load_state_dict` raises.
        """
        if isinstance(name, str) and hasattr(type(self), name):
            raise StateError(f"{name!r} is a name of CheckpointManager itself; register the item under another one")
        known = name in self._items
        self._items.put(name, obj)
        self._course.follow_sampler(name)
        if known:
            return
        try:
            self._resumption.restore(name)
        except BaseException:
            self._items.remove(name)  # The next one of that name is a first one, and restored.
            self._course.follow_sampler()
            raise

    def unregister(self, name: str) -> None:
        """Leave an item out of later commits; the object stays as it is. Raises: StateError for a name that is not registered."""
        self._items.remove(name)
        self._course.follow_sampler()
        self._resumption.forget(name)

    @property
    def config(self) -> HyperConfig:
        """Hyper-parameters of this run, the resumed commit's until a mapping is assigned, which a resume never overwrites.

        A mapping is copied, a `HyperConfig` is kept; the first save freezes it. Raises: StateError for what is no configuration.
        """
        if self._hyper is None:
            self._hyper = HyperConfig(self.resumed.config if self.resumed is not None else {})
        return self._hyper

    def _set_config(self, value: Any) -> None:
        self._hyper = value if isinstance(value, HyperConfig) else HyperConfig(value)
        resumed = self.resumed
        if resumed is not None and self._hyper != HyperConfig(resumed.config):
            _log.warning(
                "the configuration differs from that of commit %s: %s. What was restored, such as an optimizer's groups, is the commit's",
                resumed.id,
                HyperConfig(resumed.config).diff(self._hyper),
            )

    # -- resuming ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What the first `loop/batches/restore/step_up/save` does: settle the resume, take the branch, start the writer."""
        self._require_open()
        self._standing.begin()

    def _follow_any_tip(self) -> None:
        """Save behind whatever is newest on the branch, also where others saved meanwhile: for managers that go on from nothing."""
        self._seat.follows_any_tip = True

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this manager is closed; make another one")

    def restore(self) -> LoadReport:
        """Restore the random streams now and return the report of the resume.

        `loop` and `batches` do this at the right moment by themselves: before an epoch's first draw, or, in an epoch that is entered
        again, after the DataLoader's iterator exists (making it draws a base seed). Call it in scripts that use neither. The global streams
        of Python, NumPy and torch are overwritten. Collective the first time: the branch is taken.
        Raises: ConflictError when somebody else writes the branch; IntegrityError; StateError for items that do not fit.
        """
        self._begin()
        self._resumption.restore_streams()
        return self._resumption.report

    @property
    def resumed(self) -> Commit | None:
        """The commit that this manager goes on from, or None; after `goto` and its like, the one that was gone to."""
        return self._resumption.commit

    @property
    def last_report(self) -> LoadReport:
        """What the last `load`, or without one the resume, did and did not do; its lists grow while items are registered."""
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
        return self._standing.branch

    def loop(self, epochs: int | None = None) -> Iterator[int]:
        """Yield the epochs still to do, up to `epochs` in all (None: without end); one that was cut off is entered again.

        On a branch that `create_branch` made, `epochs` counts from the fork. A `goto` inside goes on with the epoch that it leads to. The
        registered sampler is told of each epoch, and random streams are restored before its first draw.
        Raises, when iterated: StateError for `epochs`; as `restore`; what a background save failed with.
        """
        return self._course.loop(epochs, begin=self._begin, save=self.save)

    def step_up(self, n: int = 1, *, batches: int | None = None) -> None:
        """Count `n` optimizer steps, after they were made, and `batches` micro-batches (default: n) as consumed.

        Raises: StateError when random streams are still to be restored, or `batches()` is counting; what a background save failed with.
        """
        self._begin()
        self._course.step_up(n, batches, save=self.save)

    def batches(self, loader: Any, accumulate: int = 1) -> Iterator[Any]:
        """Iterate a loader, counting each batch when its body begins, and a step every `accumulate` batches.

        Random streams are restored where they have to be, also with persistent workers. Where the body goes to another commit (`goto`,
        `checkout_branch`), the iteration ends: what is left of it belongs to where the run was. Batches are the loader's, untouched.
        Raises, when iterated: StateError for `accumulate`, or where `step_up()` counts; as `restore`; what a background save failed with.
        """
        return self._course.batches(loader, accumulate, begin=self._begin, save=self.save)

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        payload: Mapping[str, Any] | None = None,
        *,
        metric: Any = None,
        message: str = "",
        tags: Sequence[str] = (),
        epoch_end: bool | None = None,
        wait: bool = False,
    ) -> PendingCommit | None:
        """Commit the registered items, or exactly `payload`; return as soon as the caller may change its tensors.

        Collective. Nothing of the caller's is changed or kept. `checkpoint_id` names the commit, `tags` are further names, for good.
        `metric` is a number, or a tensor of one element. `epoch_end` says whether the epoch is done, where no sampler knows it.
        With `wait`, or `async_save=False`, it is durable on return.
        Returns None for a save that was skipped (`when_busy="skip"`).
        Raises: what an earlier background save failed with; StateError for what cannot be carried, naming its path; ConflictError for a
        name that is taken, a branch that somebody else writes, or (`when_busy="raise"`) when two saves are in hand; CoordinationError when
        ranks, or the writer, do not come in time.
        """
        started = time.perf_counter()
        self._saver.pump()
        name = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id
        request = Request(name, payload, metric, message, tags, epoch_end, started)
        self._saver.require_own_process()  # Before the lock, which a thread may have held when this process was forked.
        with self._saver.lock:
            self._begin()
            pending = self._saves.make(request, self.config)
        if pending is not None and (wait or not self._async_save):
            try:
                pending.result()
            except SyckptError as exc:
                self._ledger.heard(exc)  # Here; the next save does not fail for this one.
                if not (pending.failed and self._ledger.only_warns):
                    raise
            self._ledger.raise_callback_error()
        return pending

    def prewarm(self, payload: Mapping[str, Any] | None = None) -> None:
        """Start the writer and make the memory for saves of the registered items (or of `payload`) now, so that the first save is quick.

        Nothing is saved or kept. Collective the first time, as `restore`. Raises: as `restore`; StateError for what cannot be carried;
        CoordinationError when the writer is not ready in time; StoreError without the memory.
        """
        self._begin()
        self._saves.prewarm(payload)

    @property
    def hash(self) -> str | None:
        """Id of the newest save by this manager; after a reported failure, of the newest published one; else what was resumed."""
        self._saver.pump()
        return self._ledger.newest

    def wait(self) -> None:
        """Wait until every save is durable. Raises: what one of them failed with; CoordinationError after `timeout_s`."""
        self._past.wait()

    def close(self) -> None:
        """Wait for the saves in hand, end the writer, give the branch back; registered objects stay as they are. Again, it does nothing.

        Raises: what a save failed with; CoordinationError when one is not durable in time (then all is given back nevertheless).
        """
        if self._closed or self._saver.is_inherited:
            return
        self._closed = True
        try:
            self._saver.close()
        finally:
            self._finalizer.detach()
            if self._broadcast is not None:
                self._broadcast.close()
            self._coordinator.close()
        self._ledger.raise_failure()

    def __enter__(self) -> CheckpointManager:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._saver.is_inherited:
            return  # A forked child leaves; the manager is its parent's.
        leave(kind, close=self.close, final_save=self._final_save)

    def _final_save(self) -> Exception | None:
        """Save what no commit has; return the failure of an earlier save that is still to be raised, which does not prevent this one."""
        if self._closed or not self._standing.used or not self._save_on_exit:
            return None
        return save_finally(self._saver, self._ledger, save=lambda: self.save(message="exit") if self._has_unsaved() else None)

    def _has_unsaved(self) -> bool:
        return self._ledger.lost or self._progress.advanced(self._items.sampler)

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
        raised on all, before anything is touched; so is damage that one of them reads: targets then hold old or exact values, never wrong
        ones. Tensors of `into` stay the caller's, in their shapes, dtypes and devices; what comes back new is the caller's too.
        Raises: NotFoundError, StateError listing everything that does not fit, IntegrityError.
        """
        how_far = ("" if into is None else " into targets") + (", dry_run" if dry_run else "")
        commit = self._standing.commit(rev, call="load()", more=how_far)
        how: dict[str, Any] = {"strict": strict, "cast": cast, "partial": partial, "map_location": map_location}
        self._report = LoadReport(commit=commit.id)
        return self._loads.make(commit, into, self._report, dry_run=dry_run, **how)

    # -- history -----------------------------------------------------------------------------------------------------

    def goto(self, rev: str) -> None:
        """Bring the registered items, the counters and the random streams to a commit; the next save follows it. Never falls back.

        Collective. Tensors are filled in place, as in `register`. Inside an iteration of a DataLoader, leave that iteration afterwards: the
        sampler has moved.
        Raises: NotFoundError, IntegrityError, StateError listing what does not fit (then nothing was touched).
        """
        self._require_open()
        self._standing.goto(rev)

    def create_branch(self, name: str, at: str = "HEAD") -> None:
        """Make a branch and write it from now on: at HEAD the state stays as it is, another revision is restored.

        Progress that no commit has is committed first, on the branch that is left; so is the registered state without any commit yet.
        A branch that exists (a script that runs again) is gone on with: its tip is restored; where nothing was saved on it yet, the state
        stays, as it did when the branch was made. `loop(epochs=n)` then counts n from the fork. Collective.
        Raises: ConflictError for the name of a tag or commit; NotFoundError; StateError.
        """
        self._require_open()

        def first_save() -> PendingCommit | None:
            return self.save(message=f"start of {self.branch}", wait=True)

        how: dict[str, Any] = {"first_save": first_save, "save_unsaved": lambda: self._save_unsaved(name)}
        self._standing.create_branch(name, at, **how, unsaved=self._standing.used and self._has_unsaved())

    def checkout_branch(self, name: str) -> None:
        """Save what is unsaved, write another branch from now on and restore its tip, as `goto` does. Collective.

        Raises: NotFoundError, StateError listing what does not fit (then nothing was touched), IntegrityError; what a save failed with.
        """
        self._require_open()
        self._standing.checkout_branch(name, save_unsaved=lambda: self._save_unsaved(name))

    def _save_unsaved(self, name: str) -> None:
        """Before the state is replaced by that of branch `name`."""
        if not (self._standing.used and self._has_unsaved()):
            return
        self._saver.wait_for(None, timeout_s=None)  # So that this save is not skipped.
        pending = self.save(message=f"before {name}", wait=True)
        if pending is not None:
            pending.result()  # A failure is raised also where others are only logged: the state would be lost.

    def delete_branch(self, name: str) -> None:
        """Delete a branch other than the one that is written; `name@{1}` leads to its commits as long as `gc` leaves them. Collective.

        Raises: NotFoundError, ConflictError (it is written, here or elsewhere).
        """
        self._require_open()
        self._standing.delete_branch(name)

    def list_branches(self) -> list[str]:
        """Return the names of all branches that have a commit, sorted, after waiting for this manager's own saves. Raises: as `wait`."""
        return self._past.branches()

    def tag(self, name: str, rev: str = "HEAD") -> None:
        """Name a commit for good: retention keeps it. Collective. Raises: ConflictError (a tag that exists), NotFoundError, StateError."""
        self._require_open()
        self._standing.tag(name, rev)

    def log(self, n: int | None = None) -> list[Commit]:
        """Return up to `n` commits of this branch (None: all), newest first, after waiting for this manager's own.

        Raises: as `wait`; IntegrityError.
        """
        return self._past.log(n)

    def diff(self, a: str, b: str = "HEAD") -> Diff:
        """Return in what two commits differ: configuration, counters, tensors. Tensors are read only where their boxes differ.

        Waits for this manager's own saves first. Raises: as `wait`; NotFoundError, IntegrityError.
        """
        return self._past.diff(a, b)

    def similar(self, config: Mapping[str, Any] | None = None, k: int = 5) -> list[Similar]:
        """Return the `k` commits whose configurations are most like `config` (default: this run's), the nearest first.

        Waits for this manager's own saves first. Raises: as `wait`; StateError for what is no configuration; IntegrityError.
        """
        return self._past.similar(self.config if config is None else HyperConfig(config), k)

    def print_tree(self) -> None:
        """Print the history of all branches as a graph, after waiting for this manager's own saves. Raises: as `wait`; IntegrityError."""
        print(self._past.tree())

    def export_ckpt(self, rev: str, path: str | os.PathLike[str]) -> None:
        """Write a commit as one file that `torch.load(path, weights_only=True)` reads. Collective: rank 0 writes, the others wait.

        Raises: as `wait`; NotFoundError, IntegrityError, StateError for what such a file cannot say.
        """
        self._require_open()
        self._past.export(rev, path)

    def retain(self, *, dry_run: bool = False) -> Retained | None:
        """Apply `keep=` to this branch now, as after each save; with `dry_run`, only plan. Returns what was done, on rank 0.

        Collective: rank 0 does it, the others wait.
        Raises: as `wait`; StateError without a rule; IntegrityError (then nothing was dropped).
        """
        self._require_open()
        return self._past.retain(dry_run=dry_run)

    def gc(self, *, dry_run: bool = False) -> Collection | None:
        """Remove what nothing leads to; with `dry_run`, only plan. Returns what was done, on rank 0.

        Collective: rank 0 does it, the others wait. Raises: as `wait`; IntegrityError (then nothing was removed).
        """
        self._require_open()
        return self._past.collect(dry_run=dry_run)

    def verify(self, rev: str = "HEAD") -> VerifyReport:
        """Read and check every byte of a commit, after waiting for this manager's own saves; one that is damaged is marked so.

        What is wrong is in the report. Raises: as `wait`; NotFoundError.
        """
        return self._past.verify(rev)


# `__new__` only tells the two kinds of managers apart; what can be given is what `__init__` says.
_told = signature(CheckpointManager.__init__)
CheckpointManager.__signature__ = _told.replace(parameters=list(_told.parameters.values())[1:])  # type: ignore[attr-defined]
