"""What a manager goes on from: the commit, the items restored from it, and the random streams, which come last.

Items are restored as they are registered. Where their bytes are damaged, everything is restored again from the next older commit: in one
process at once; on several ranks registering is no agreement, so the damage is kept until the first call that is one.

Streams are restored at the moment at which the run that was cut off had them: before an epoch's first draw, or, in an epoch that is entered
again, after the DataLoader's iterator exists, since making it draws a base seed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from syckpt.checkpoint.broadcast import Broadcast
from syckpt.checkpoint.items import Items, is_stateful
from syckpt.checkpoint.ledger import Ledger
from syckpt.checkpoint.loader import Fetch, LoadReport
from syckpt.checkpoint.progress import Progress
from syckpt.checkpoint.resume import WAYS_ON, newest_whole
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.taking import Taking
from syckpt.dataloader import StatefulSampler
from syckpt.dataloader.seeded import is_seeded
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import IntegrityError, StateError
from syckpt.objects.commit import Commit
from syckpt.repo.reader import Reader
from syckpt.state import rng as streams

__all__ = ["Resumption"]

_log = logging.getLogger("syckpt")


class Resumption:
    """State and rules of one resume; `commit` is None for a fresh start."""

    def __init__(
        self,
        reader: Reader,
        coordinator: Coordinator,
        items: Items,
        progress: Progress,
        ledger: Ledger,
        *,
        branch: str,
        with_rng: bool,
        broadcast: Broadcast | None = None,
    ) -> None:
        """`broadcast`: where all ranks restore together, what they need alike is read once for all."""
        self._reader = reader
        self._coordinator = coordinator
        self._items = items
        self._progress = progress
        self._ledger = ledger
        self.branch = branch
        """The branch on which an older commit is looked for."""
        self._with_rng = with_rng
        self._broadcast = broadcast
        self._source: Source | None = None
        self._deferred: list[str] = []
        """Optimizers that wait for the modules of their parameters."""
        self._failures: dict[str, Exception] = {}
        """What resharders of items raised on this rank, until all ranks hear of it."""
        self._left: set[str] = set()
        """Items that were unregistered."""
        self.taking: Taking | None = None
        """What this rank took of the commit since ranks last agreed that nothing is left which none of them takes."""
        self._settled = False
        self._afresh = False
        self._early = False
        """The streams were restored on demand; what is drawn before the first epoch is entered again must not count."""
        self.streams_pending = False
        """Whether the commit's streams are still to be restored."""
        self.damage: str | None = None
        """What kept this rank from reading the commit, until all ranks take an older one."""
        self.report = LoadReport()

    @property
    def commit(self) -> Commit | None:
        """The commit that is gone on from."""
        return None if self._source is None else self._source.commit

    @property
    def damage_met(self) -> int:
        """How many reads of commits have failed on this rank so far because something was not what was saved."""
        return self._reader.damage_met

    def told(self, error: BaseException) -> bool:
        """Whether an error of a restore was raised on all ranks already, so that they need not be told of it."""
        return self._broadcast is not None and self._broadcast.told(error)

    def open(self, commit: Commit, *, all_ranks: bool = False) -> Source:
        """Open any commit for this rank; `all_ranks`: in a plain process, with what each of the ranks kept for itself."""
        world_size = self._coordinator.world_size
        seen = None if all_ranks and world_size == 1 else world_size
        return Source(self._reader, commit, rank=self._coordinator.rank, world_size=seen, config=self._items.config)

    def take_over(self, commit: Commit, *, afresh: bool = False) -> None:
        """Go on from a commit: its counters now, its items as they are registered. `afresh`: counters and streams begin anew."""
        self._source = source = self.open(commit)
        self.taking = Taking(source)
        self._deferred, self._early, self.damage = [], False, None
        self._failures.clear()
        self._afresh = afresh
        self._ledger.stand_on(commit.id)
        self.report = LoadReport(commit=commit.id, rng_exact=False)
        if afresh:
            self.streams_pending = False
            self.report.notes.append("a new branch: counters, samplers and random streams begin anew")
            return
        self.streams_pending = self._with_rng and source.has_rng
        self._progress.resume(commit)
        if self._with_rng and not source.has_rng:
            self.report.notes.append("the commit holds no random streams: it was saved with rng=False")

    # -- items -------------------------------------------------------------------------------------------------------

    def restore(self, name: str) -> None:
        """Restore an item that was just registered, if the commit has it. Raises: StateError; IntegrityError (no commit is whole)."""
        source = self._source
        if source is None or self._begins_anew(name):
            return
        if name in self._left and not self._progress.at_resume:
            _log.info("item %r is registered again, after steps were made: it stays as it is", name)
            return
        if name not in source.names:
            self.report.missing.append(name)
            level = logging.WARNING if is_stateful(self._items[name]) else logging.INFO
            there = ", ".join(sorted(source.names))
            _log.log(level, "commit %s has no item %r: it starts as it is (the commit has %s)", source.commit.id, name, there)
            return
        try:
            self._restore(name, source)
        except IntegrityError as exc:
            if self._settled:
                raise  # Steps may have been made: what was restored before belongs to this commit.
            if self._coordinator.world_size > 1:
                _log.error("commit %s is damaged: %s", source.commit.id, exc)
                self.damage = str(exc)
                return
            self._pass_over(source.commit, str(exc))
            self._fall_back()
        except Exception as exc:
            if self._settled or self._coordinator.world_size == 1 or not self._items.has_resharder(name):
                raise
            # A resharder may fail on one rank only: the first call in which ranks agree raises it on all of them.
            _log.error("item %r could not be restored: %s", name, exc)
            self._failures[name] = exc

    def _begins_anew(self, name: str) -> bool:
        return self._afresh and isinstance(self._items[name], StatefulSampler)

    def forget(self, name: str) -> None:
        """An item was unregistered. Another one of its name that comes after further steps is not of the resumed commit's state."""
        self._left.add(name)
        self._failures.pop(name, None)
        if self.taking is not None:
            self.taking.drop(name)
        if name in self._deferred:
            self._deferred.remove(name)

    def _restore(self, name: str, source: Source, *, call: str | None = None) -> None:
        """Restore an item, and those that waited for it. `call`: all ranks do so together, as that."""
        if self._items.needs_modules(name, source.node(name)):
            self._deferred.append(name)
            return
        if call is not None and self._broadcast is not None:
            fetch = self._broadcast.fetcher(source, topic=call, at=name)
            asked: list[int] = []

            def once(wanted: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
                asked.append(len(wanted))
                return fetch(wanted)

            self._restore_item(name, source, once)
            if not asked:
                fetch({})  # An item that was left as it is: the other ranks may be reading it.
        else:
            self._restore_item(name, source)
        for waiting in [n for n in self._deferred if not self._items.needs_modules(n, source.node(n))]:
            self._deferred.remove(waiting)
            self._restore_item(waiting, source)

    def _restore_item(self, name: str, source: Source, fetch: Fetch | None = None) -> None:
        with self._reported(source):
            notes, left = self._items.restore(name, source, fetch=fetch)
        self.report.notes += notes
        known = set(self.report.unexpected)
        self.report.unexpected += [path for path in left if path not in known]
        if self.taking is not None:
            self.taking.add(name, left)
        for note in notes:
            _log.info("resuming from commit %s: %s", source.commit.id, note)

    @contextmanager
    def _reported(self, source: Source) -> Iterator[None]:
        """Report what is read in this."""
        before = source.bytes_read
        try:
            yield
        finally:
            self.report.bytes_read += source.bytes_read - before
        self.report.resharded = sorted(source.resharded)
        self.report.resharding = source.resharding()
        self.report.per_rank = list(source.per_rank)

    def restore_all_from(self, commit: Commit, *, call: str = "") -> None:
        """Resume from an older commit than was meant. Raises: IntegrityError."""
        _log.error("resuming from the older commit %s (step %d) instead", commit.id, commit.step)
        self._restore_all(commit, afresh=self._afresh, call=call)

    def all_taken(self) -> None:
        """Ranks agreed that what this one left is another's."""
        if self._source is not None:
            self.taking = Taking(self._source)

    @property
    def registered(self) -> list[str]:
        """Names of the items that this rank has, in order."""
        return sorted(self._items.names())

    def check(self, commit: Commit) -> Taking:
        """Check that every registered item fits its state in a commit; nothing is touched. Returns what this rank would take.

        Raises: StateError listing what does not fit.
        """
        source = self.open(commit)
        taking = Taking(source)
        problems = []
        for name in [name for name in self._items.names() if name in source.names]:
            try:
                taking.add(name, self._items.check(name, source))
            except StateError as exc:
                problems.append(str(exc))
        if problems:
            raise StateError("\n".join(problems))
        return taking

    def go_to(self, commit: Commit, *, call: str) -> None:
        """Bring every registered item to a commit that was asked for, never another. Raises: StateError, IntegrityError."""
        self._settled = True
        self._restore_all(commit, afresh=False, call=call)
        self.settle()
        self.restore_streams()
        self._report_unused()

    def _restore_all(self, commit: Commit, *, afresh: bool, call: str) -> None:
        """Restore everything that is registered, on all ranks together; `call` names the agreement in which failures are told."""
        self.take_over(commit, afresh=afresh)
        source = self._source
        assert source is not None
        for name in self._items.names() if self._broadcast is None else sorted(self._items.names()):  # Alike on all ranks.
            if name not in source.names:
                self.report.missing.append(name)
            elif not self._begins_anew(name):
                self._restore(name, source, call=call)

    def settle(self) -> None:
        """Restore what waited for other items, and read the random streams: an older commit can still be taken where they are damaged."""
        for failure in self._failures.values():
            raise failure
        while (source := self._source) is not None and self.damage is None:
            try:
                # Restoring names what is missing; what is put right is tried again.
                while self._deferred:
                    self._restore_item(self._deferred[0], source)
                    del self._deferred[0]
                if self.streams_pending and source.same_size:
                    with self._reported(source):
                        source.rng()
                return
            except IntegrityError as exc:
                if self._settled:
                    raise
                if self._coordinator.world_size > 1:
                    self.damage = str(exc)
                    return
                self._pass_over(source.commit, str(exc))
                self._fall_back()

    def older(self, damage: Sequence[str]) -> Commit | None:
        """Rank 0: mark the commit that ranks could not read, and return the one before it; None where there was no damage."""
        commit = self.commit
        if not damage or commit is None:
            return None
        self._pass_over(commit, "; ".join(damage))
        return self._newest_whole()

    def finish(self) -> None:
        """No other commit is resumed any more. Report what the script does not register."""
        if not self._settled:
            self._settled = True
            self._report_unused()

    def _report_unused(self) -> None:
        if self._source is not None:
            unused = sorted(self._source.names - set(self._items.names()))
            self.report.unexpected += unused
            if unused:
                _log.warning(
                    "commit %s also has %s, which this script does not register: the commits to come are without",
                    self._source.commit.id,
                    ", ".join(unused),
                )

    def _pass_over(self, commit: Commit, damage: str) -> None:
        _log.error("commit %s is damaged: %s", commit.id, damage)
        self._reader.repository.mark(commit.id, "damaged", why=damage)

    def _newest_whole(self) -> Commit:
        commit = newest_whole(self._reader.repository, self.branch, trusted=self._reader.trusted)
        if commit is None:
            raise IntegrityError(f"branch {self.branch!r} has no whole commit left; {WAYS_ON}")
        return commit

    def _fall_back(self) -> None:
        """Go to the newest commit that is whole in its bytes too, and restore everything registered from it."""
        while True:
            commit = self._newest_whole()
            try:
                self.restore_all_from(commit)
                return
            except IntegrityError as exc:
                self._pass_over(commit, str(exc))

    # -- random streams ----------------------------------------------------------------------------------------------

    def restore_streams(self) -> None:
        """Restore the streams now, whatever the script does next."""
        if self._source is not None and self.streams_pending:
            self._set_streams(self._source)
            self._early = True

    def begin_epoch(self) -> None:
        """Where the commit stands before its epoch's first draw: restore the streams, once."""
        source = self._source
        if source is None or source.commit.entered:
            return
        if self.streams_pending or (self._early and self._progress.at_resume):
            self._set_streams(source)

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Make a loader's iterator, which draws a seed, so that the streams are behind it what they were in the run that was cut off."""
        self.begin_epoch()
        source = self._source
        if source is None or not self._progress.at_resume:
            return iter(loader)
        # That run had made its persistent iterator, and its draw, in its first epoch.
        made_before = getattr(loader, "persistent_workers", False) and source.commit.step > 0
        before = streams.capture() if made_before and not source.commit.entered else None
        iterator: Iterator[Any] = iter(loader)
        if source.commit.entered:
            self._set_streams(source)
        elif before is not None:
            streams.restore(before)
        self._judge(source, loader)
        self._progress.at_resume = False
        return iterator

    def first_index(self) -> None:
        """The sampler's iteration begins: the DataLoader's iterator exists, and has drawn its seed."""
        source, sampler = self._source, self._items.sampler
        if source is not None and self._progress.at_resume:
            if source.commit.entered:
                self._set_streams(source)
            self._judge(source, sampler.loader if sampler is not None else None)
        self._progress.entered = True

    def streams_now(self) -> dict[str, Any]:
        """Return the streams as a resume from here has to find them: while they wait to be restored, those that will be."""
        source = self._source
        if source is None or not self.streams_pending:
            return streams.capture()
        return source.rng() if source.same_size else streams.derived(self._seed_text(source))

    @property
    def is_exact(self) -> bool:
        """Whether what is saved now continues the streams of an uninterrupted run."""
        if self._source is not None and self.streams_pending:
            return self._source.same_size
        return self._source is None or self.report.rng_exact

    def _seed_text(self, source: Source) -> str:
        """Return what this rank's streams are derived from where a commit of another number of ranks is resumed."""
        return f"{source.commit.id} rank {self._coordinator.rank} of {self._coordinator.world_size}"

    def _set_streams(self, source: Source) -> None:
        """Restore the streams, or, on another number of ranks, derive new ones."""
        if not self._with_rng or not source.has_rng:
            return
        if source.same_size:
            notes = streams.restore(source.rng())
        else:
            streams.derive(self._seed_text(source))
            here, there = self._coordinator.world_size, source.commit.world_size
            notes = [f"saved by {there} ranks, resumed on {here}: random streams are derived anew, one for each rank"]
        if self.streams_pending:
            self.report.rng_exact = not notes
            self.report.notes += notes
        self.streams_pending = self._early = False

    def _judge(self, source: Source, loader: Any) -> None:
        """Report what makes this epoch differ from the one that was cut off; `loader` is a DataLoader, or a sampler's facts about one."""
        if getattr(loader, "num_workers", 0) == 0:
            return
        lived_on = loader.persistent_workers and source.commit.step > 0
        if lived_on and not self._progress.counts_batches:
            self._inexact("a loader with persistent_workers draws a seed at its first epoch only: iterate with ckpt.batches(loader)")
        if (source.commit.entered or lived_on) and not is_seeded(loader.dataset):
            self._inexact("the loader's workers may draw random numbers of their own: wrap the dataset in syckpt.dataloader.seeded()")

    def _inexact(self, why: str) -> None:
        self.report.rng_exact = False
        if why not in self.report.notes:
            _log.warning("this resume may differ from an uninterrupted run: %s", why)
            self.report.notes.append(why)
