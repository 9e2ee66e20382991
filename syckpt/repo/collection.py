"""Collection (gc): what nothing leads to goes (FORMAT.md, section 13).

Mark and sweep. Roots are all refs, every record of the last two weeks, and saves under way, looked at again between mark and sweep. Only
keys of the forms that syckpt writes are touched; what no record names goes when it is older than a day: no clock decides about anything
that was published. Safe beside savers and other collectors; cut off anywhere, the next run completes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from syckpt.objects.commit import Commit
from syckpt.objects.refs import Intent
from syckpt.repo.keys import HELLO, OF_COMMIT, RECEIPT, manifest_key
from syckpt.repo.owner import is_dead
from syckpt.repo.repacking import Sweep, plan_sweeps, run_sweeps
from syckpt.repo.repository import Repository
from syckpt.repo.survey import Sight, Survey, drop, read_intents
from syckpt.repo.transaction import settle

__all__ = ["GRACE_S", "REFLOG_S", "Collection", "collect"]

REFLOG_S = 14 * 86400.0
"""How long a record protects the commit that it names, and the one that the ref left then."""
GRACE_S = 86400.0
"""How old a file has to be that nothing accounts for."""
_log = logging.getLogger("syckpt")


@dataclass(frozen=True)
class Collection:
    """What a collection found, and, unless `dry_run`, did.

    `unreachable` commits are dropped: their records stay. `cut_off`: saves whose writer is gone; those that were published are completed,
    the others removed. `strays`: keys, with sizes, of saves that nothing accounts for. `sweeps`: what goes of dropped commits; `skipped`:
    those that had to be left, and why. `staged`: unfinished files, with sizes, of processes that are gone.
    """

    dry_run: bool
    unreachable: tuple[Commit, ...]
    cut_off: tuple[str, ...]
    strays: tuple[tuple[str, int], ...]
    sweeps: tuple[Sweep, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    staged: tuple[tuple[str, int], ...] = ()

    @property
    def freed_nbytes(self) -> int:
        """Stored bytes that go, less those that are written anew."""
        return sum(size for _, size in [*self.strays, *self.staged]) + sum(found.freed_nbytes for found in self.sweeps)

    @property
    def moved_nbytes(self) -> int:
        """Stored bytes that are copied into new blobs."""
        return sum(found.moved_nbytes for found in self.sweeps)


def collect(
    repository: Repository,
    *,
    dry_run: bool = False,
    now_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Collection:
    """Remove what nothing leads to; with `dry_run`, only say what that is.

    `now_s`: the time, in seconds since the Unix epoch. One that is ahead of the clock makes fresh marks and files of others old:
    only where nobody else is at work.

    `progress(done, total)` counts dropped commits.
    Raises: IntegrityError when what leads where cannot be read: then nothing is removed; StoreError.
    """
    now_s = time.time() if now_s is None else now_s
    survey = Survey(repository)
    store = repository.store
    # In this order: whatever a running save publishes or gives up in between is found in one of the later places.
    keys = [*store.list("objects/"), *store.list("signatures/"), *store.list("receipts/"), *store.list("hello/")]
    intents = list(read_intents(repository))
    # Whoever is dead before the look has made no record behind it.
    ended = {intent.commit for intent in intents if is_dead(intent.owner) is True}
    sight = survey.look()
    cut_off = [intent for intent in intents if intent.commit in ended or _is_fenced(intent, sight)]
    removed = {intent.commit for intent in cut_off} - sight.recorded
    known = sight.recorded | {intent.commit for intent in intents}
    strays = [key for key in keys if _is_stray(key, known) and now_s - (store.modified_s(key) or now_s) > GRACE_S]
    partial = [key for key in keys if (match := OF_COMMIT.fullmatch(key)) and match["commit"] in removed]
    reached = _reached(survey, sight, now_s=now_s)
    unreachable = tuple(survey.commit(commit) for commit in sorted(sight.recorded - reached) if not survey.is_dropped(commit))
    lost = [commit.id for commit in unreachable]
    sized = tuple((key, store.size(key) or 0) for key in [*strays, *partial])
    given_up = tuple(intent.commit for intent in cut_off)
    # Also when it is to be done: what needs which bytes is known to be readable before anything goes.
    sweeps = plan_sweeps(survey, dropping=lost, now_s=now_s)
    if dry_run:
        return Collection(True, unreachable, given_up, sized, sweeps, staged=tuple(store.staging().items()))
    for intent in cut_off:
        settle(repository, intent)
    for key in strays:
        store.delete(key)
    # Before anything is written: the disk may be full.
    staged = tuple(store.collect_staging().items())
    why = "gc: for two weeks nothing but old records has led to it"
    gone = set(drop(survey, lost, why=why, protected=lambda now: _reached(survey, now, now_s=now_s)))
    done, skipped = run_sweeps(repository, plan_sweeps(survey, now_s=now_s), progress=progress)
    filled = {match["commit"] for key in keys if (match := OF_COMMIT.fullmatch(key)) and match["content"]}
    for commit in sight.recorded - filled:
        if survey.is_dropped(commit):
            # A sweep killed behind its last deletion leaves an empty directory, which goes with a key that may be absent.
            store.delete(manifest_key(commit, 0))
    return Collection(False, tuple(commit for commit in unreachable if commit.id in gone), given_up, sized, done, skipped, staged)


def _is_fenced(intent: Intent, sight: Sight) -> bool:
    """Whether nobody can go on with a save: a newer generation has taken the branch."""
    newest = max((record.generation for record in sight.records if record.ref == f"heads/{intent.branch}"), default=0)
    return newest > intent.generation


def _is_stray(key: str, known: Iterable[str]) -> bool:
    """Whether a key belongs to a save of which there is no intent, and never was a record; or was to show who sees the directory."""
    match = OF_COMMIT.fullmatch(key) or RECEIPT.fullmatch(key)
    return match["commit"] not in known if match else HELLO.fullmatch(key) is not None


def _reached(survey: Survey, sight: Sight, *, now_s: float) -> set[str]:
    """Return the commits that refs, records of the last two weeks and saves under way lead to. Raises: IntegrityError."""
    # The name of a dropped commit is free again: it leads nowhere.
    todo = [ref.commit for ref in sight.refs.values() if ref.kind != "names" or not survey.is_dropped(ref.commit or "")]
    todo += sight.used
    for record in sight.records:
        if now_s - record.time_ns / 1e9 <= REFLOG_S:
            todo += [record.commit, record.previous]
    todo += [intent.commit for intent in sight.intents if intent.commit in sight.recorded]
    reached: set[str] = set()
    while todo:
        commit = todo.pop()
        if commit is not None and commit not in reached:
            reached.add(commit)
            todo += survey.commit(commit).parents
    return reached
