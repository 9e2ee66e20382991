"""Any sequence of saves, forks, tags, retention, gc and repack, against a model in plain dicts.

After every operation: exactly what the model says is dropped, with the model's reasons; every commit that is there loads byte for byte by
a reader that knows nothing yet; after a full repack no row lies on the disk that nothing leads to.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from syckpt.errors import NotFoundError, StoreError
from syckpt.objects.commit import Commit
from syckpt.objects.locations import Source
from syckpt.repo import branches, history
from syckpt.repo.collection import REFLOG_S, collect
from syckpt.repo.keys import mark_key
from syckpt.repo.reader import Reader
from syckpt.repo.repacking import repack
from syckpt.repo.retention import Keeper, Retained, Retention, retain
from syckpt.repo.transaction import recover
from syckpt.repo.verify import verify
from syckpt.stores.memory import MemoryStore

from .conftest import Desk

LATER_S = 2 * REFLOG_S
MINUTE_NS = 60 * 10**9
NAMES = ("a", "b", "c")
Versions = dict[str, tuple[int, int, bool]]
"""Of each tensor: which values, and whether it is there."""

# Mostly little, so that retention meets bases, pointers into dropped commits and new cycles all the time.
RULES = st.builds(
    Retention,
    last=st.sampled_from([1, 1, 1, 2]),
    best=st.sampled_from([None, None, None, 2]),
    every_steps=st.sampled_from([None, None, None, 4]),
    every=st.sampled_from([None, None, None, "1h"]),
)
# What becomes of a tensor in one save. `near`: a delta; `far`: stored on its own, and no base of what follows in the cycle; `back`: near
# the first values again; `gone`: left out. So some come back as deltas against a base that only the cycle knows of.
CHANGES = st.fixed_dictionaries(dict.fromkeys(NAMES, st.sampled_from(["same", "same", "near", "near", "far", "back", "gone", "gone"])))
METRICS = st.sampled_from([None, 1.0, 1.0, 1.0, 2.0, math.nan])
INDEX = st.integers(0, 63)


def value(name: str, version: tuple[int, int]) -> np.ndarray:
    """The values of a tensor: of two versions with the same first number each is a delta of the other."""
    far, near = version
    base = np.random.default_rng([far, NAMES.index(name)]).standard_normal(200).astype(np.float32)
    return (base + np.float32(near * 1e-6)).astype(np.float32)


class Cleaning(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.desks: dict[str, Desk] = {}
        self.keepers: dict[str, Keeper] = {}
        self.rules: dict[str, Retention] = {}
        self.commits: dict[str, Commit] = {}
        self.held: dict[str, dict[str, bytes]] = {}
        self.versions: dict[str, Versions] = {}
        self.made: dict[str, list[str]] = {}
        self.tips: dict[str, str] = {}
        self.forks: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.late_tags: dict[str, str] = {}
        """Tags that are still to be made, and the branch whose next opening does it."""
        self.names: dict[str, str] = {}
        self.used: set[str] = set()
        self.dropped: set[str] = set()
        self.damaged: set[str] = set()
        self.clock_ns = 1_700_000_000 * 10**9
        self.count = 0

    @initialize(cycle=st.sampled_from([2, 4, 6]), maximize=st.booleans(), keep=RULES, changes=st.lists(CHANGES, min_size=2, max_size=5))
    def begin(self, cycle: int, maximize: bool, keep: Retention, changes: list[dict[str, str]]) -> None:
        self.cycle, self.maximize = cycle, maximize
        self._open("main", None, keep)
        for change in changes:
            self._save("main", change)

    def teardown(self) -> None:
        for desk in self.desks.values():
            desk.packer.close()

    # -- the model -------------------------------------------------------------------------------------------------------------

    @property
    def there(self) -> list[str]:
        return [commit for commit in self.commits if commit not in self.dropped]

    def branch(self, index: int) -> str:
        return sorted(self.desks)[index % len(self.desks)]

    def protected(self, branch: str) -> set[str]:
        others = [commit for refs in (self.tips, self.forks) for name, commit in refs.items() if name != branch]
        return {self.tips[branch], *others, *self.tags.values(), *self.used}

    def stays(self, branch: str, keep: Retention) -> list[str]:
        """Return which of the commits made on a branch stay by a rule, oldest first."""
        mine = [commit for commit in self.made[branch] if commit not in self.dropped]
        good = [commit for commit in mine if commit not in self.damaged]
        stay = {commit for commit in mine if commit in self.protected(branch)} | set(good[len(good) - (keep.last or 0) :])
        sign = -1 if self.maximize else 1
        scored = [c for c in map(self.commits.__getitem__, good) if c.metric is not None and not math.isnan(c.metric)]
        scored.sort(key=lambda c: (sign * (c.metric or 0.0), -c.created_ns))
        stay |= {commit.id for commit in scored[: keep.best or 1]}
        line, at = [], self.tips[branch]
        while at in self.made[branch]:
            line.append(at)
            at = next(iter(self.commits[at].parents), "")
        line = [commit for commit in reversed(line) if commit in good]
        if keep.every_steps:
            bucket = {commit: self.commits[commit].step // keep.every_steps for commit in line}
            stay |= {c for i, c in enumerate(line) if bucket[c] and bucket[c] not in [bucket[before] for before in line[:i]]}
        if keep.every:
            hour = {commit: self.commits[commit].created_ns // (60 * MINUTE_NS) for commit in line}
            stay |= {c for i, c in enumerate(line) if hour[c] not in [hour[before] for before in line[:i]]}
        if not stay & set(good):
            stay |= set(good[-1:])
        return [commit for commit in mine if commit in stay]

    def reachable(self, *, reflog: bool) -> set[str]:
        todo = [*self.tips.values(), *self.tags.values(), *(c for c in self.names.values() if c not in self.dropped), *self.used]
        if reflog:
            todo += self.commits
        found: set[str] = set()
        while todo:
            commit = todo.pop()
            if commit not in found:
                found.add(commit)
                todo += self.commits[commit].parents
        return found

    @property
    def left_alone(self) -> set[str]:
        """Dropped commits that a save under way names, as the keyframe of its cycle: nothing of them goes before it has ended."""
        return self.used & self.dropped

    def rows_needed(self) -> tuple[dict[Source, set[int]], dict[Source, set[int]]]:
        """Return the rows to which commits that are there lead; and those that may be there as well.

        These are what tips name as bases of their cycles, gone where a branch began at an older commit: its saves begin a new cycle;
        and what dropped commits lead to that are left alone.
        """
        needed: dict[Source, set[int]] = {}
        bases: dict[Source, set[int]] = {}
        repository = self.desks["main"].repository
        reader = Reader(repository, threads=1)
        for commit in self.there:
            snapshot = reader.snapshot(self.commits[commit])
            for place in snapshot.places:
                for each in (place, None if place is None else place.base):
                    if each is not None:
                        needed.setdefault(each.owner, set()).add(each.number)
            if commit in {*self.tips.values(), *self.used}:
                for index, row in snapshot.locations.bases:
                    bases.setdefault(snapshot.locations.source(index), set()).add(row)
        for commit in self.left_alone:
            if self.store.list(f"objects/{commit}/"):
                table = repository.read_locations(commit, 0)
                own_bases = [row.base for row in table.rows if row is not None and row.base is not None]
                for index, number in [*table.at, *table.bases, *own_bases]:
                    source = table.source(index)
                    bases.setdefault(source, set()).add(number)
                    other = repository.read_locations(*source) if self.store.list(f"objects/{source[0]}/") else None
                    row = None if other is None else other.rows[number]
                    if other is not None and row is not None and row.base is not None:
                        bases.setdefault(other.source(row.base[0]), set()).add(row.base[1])
        return needed, bases

    # -- what happens ----------------------------------------------------------------------------------------------------------

    def _open(self, name: str, start: str | None, keep: Retention) -> None:
        if name in self.desks:
            self.desks[name].packer.close()
        desk = self.desks[name] = Desk(self.store, run=name, cycle=self.cycle)
        hold = desk.open(name, start=None if start is None else self.commits[start])
        recover(desk.repository, hold)
        self.late_tags = {tag: branch for tag, branch in self.late_tags.items() if branch != name}
        self.rules[name] = keep
        self.keepers[name] = Keeper(desk.repository, name, keep, maximize=self.maximize)
        self.made.setdefault(name, [])

    def _next(self, parent: Commit | None, change: dict[str, str]) -> Versions:
        before: Versions = {} if parent is None else self.versions[parent.id]
        after = {}
        for number, name in enumerate(NAMES):
            far, near, _ = before.get(name, (0, 0, True))
            if change[name] == "near":
                near = (near + 1 + number) % 4
            elif change[name] in ("far", "back"):
                far, near = (self.count % 5 + 1 if change[name] == "far" else 0), near + 1
            after[name] = far, near, change[name] != "gone" or name == "a"
        return after

    def _save(
        self,
        branch: str,
        change: dict[str, str],
        *,
        parent: Any = "tip",
        between: Iterator[None] | None = None,
        cut_off: bool = False,
        step: int = 1,
        minutes: int = 20,
        **facts: Any,
    ) -> None:
        """Save on a branch; `between`: what happens while that is under way. `cut_off`: after it is visible, before its tags are made."""
        desk = self.desks[branch]
        behind = desk.newest if parent == "tip" else parent
        versions = self._next(behind, change)
        arrays = {name: value(name, (far, near)) for name, (far, near, is_there) in versions.items() if is_there}
        self.count += 1
        self.clock_ns += minutes * MINUTE_NS
        uses = desk.packer.points_into(behind)
        commit, transaction = desk.begin(uses=uses)
        self.used = set(uses)
        for _ in between or ():
            pass
        packed = desk.pack(commit, arrays, parent=behind)
        facts |= {"step": (behind.step if behind else 0) + step, "created_ns": str(self.clock_ns)}
        made = desk.describe(commit, packed, parent=behind, **facts)
        if cut_off:
            self.store.before_mutation = _no_tags
        desk.hold, published = transaction.publish(made, hold=desk.hold, reader=desk.reader, locations=[packed.locations])
        self.store.before_mutation = lambda operation, key: None
        desk.packer.published()
        desk.newest = published
        self.used = set()
        self.commits[commit] = published
        self.held[commit] = {name: array.tobytes() for name, array in arrays.items()}
        self.versions[commit] = versions
        self.tips[branch] = commit
        self.made[branch] = [*(self.made[branch] if behind is not None else ()), commit]
        self.tags |= dict.fromkeys(published.tags, commit)
        if cut_off:
            self.late_tags |= dict.fromkeys(published.tags, branch)
        if published.name is not None:
            self.names[published.name] = commit

    def _retain(self, branch: str, keep: Retention, keeper: Keeper | None) -> None:
        repository = self.desks[branch].repository
        mine = [commit for commit in self.made[branch] if commit not in self.dropped]
        stay = self.stays(branch, keep)
        how: dict[str, Any] = {"maximize": self.maximize}
        dry: Retained = keeper.preview() if keeper else retain(repository, branch, keep, **how, dry_run=True)
        done: Retained = keeper.apply() if keeper else retain(repository, branch, keep, **how)
        assert [commit.id for commit, _ in done.kept] == stay
        assert [commit.id for commit in done.dropped] == [commit for commit in mine if commit not in stay]
        assert _outline(done) == _outline(dry)
        self.dropped |= set(mine) - set(stay)

    @rule(index=INDEX, changes=st.lists(CHANGES, min_size=2, max_size=5), kept=st.sampled_from([True, True, False]), metric=METRICS)
    def train(self, index: int, changes: list[dict[str, str]], kept: bool, metric: float | None) -> None:
        """Save several times, with retention behind each, as a writer does."""
        branch = self.branch(index)
        for number, change in enumerate(changes):
            self._save(branch, change, metric=None if number == index % 8 else metric, step=1 + index % 2)
            if kept:
                self._retain(branch, self.rules[branch], self.keepers[branch])

    @rule(index=INDEX, change=CHANGES, metric=METRICS, tagged=st.sampled_from([0, 1, 1, 1, 2, 2]), minutes=st.integers(1, 90))
    def save(self, index: int, change: dict[str, str], metric: float | None, tagged: int, minutes: int) -> None:
        facts = [{}, {"tags": [f"t{self.count}"]}, {"name": f"n{self.count}"}][tagged]
        branch, cut_off = self.branch(index), tagged == 1
        self._save(branch, change, metric=None if cut_off else metric, cut_off=cut_off, minutes=minutes, **facts)
        if cut_off:
            self._save(branch, change)
            self._retain(branch, Retention(last=1), None)

    @rule(index=INDEX, older=INDEX, change=CHANGES, later=st.booleans())
    def save_behind_an_older_commit_while_others_clean(self, index: int, older: int, change: dict[str, str], later: bool) -> None:
        branch = self.branch(index)
        mine = [commit for commit in self.made[branch] if commit not in self.dropped] or [self.tips[branch]]

        def cleaners() -> Iterator[None]:
            yield self._retain(branch, Retention(last=1), None)
            yield self._gc(later=later)
            self._age_marks()
            yield self._repack(0.0)

        self._save(branch, change, parent=self.commits[mine[older % len(mine)]], between=cleaners())

    @rule(index=INDEX, change=CHANGES)
    def begin_afresh(self, index: int, change: dict[str, str]) -> None:
        for parent in (None, "tip"):
            self._save(self.branch(index), change, parent=parent)
        self._gc(later=index % 2 == 0)  # What was left behind is protected by names and tags alone.

    @rule(index=INDEX)
    def save_cut_short(self, index: int) -> None:
        desk = self.desks[self.branch(index)]
        commit, transaction = desk.begin()
        desk.pack(commit, {"a": value("a", (9, 0))}, parent=desk.newest)
        desk.packer.failed()
        transaction.abort()

    @precondition(lambda self: len(self.desks) < 4)
    @rule(index=INDEX, saves=st.lists(CHANGES, max_size=3), keep=RULES)
    def fork(self, index: int, saves: list[dict[str, str]], keep: Retention) -> None:
        start = self.there[index % len(self.there)]
        name = next(name for name in ("x", "y", "z") if name not in self.desks)
        self._open(name, start, keep)
        self.made[name] = []
        self.tips[name] = self.forks[name] = start
        for change in saves:
            self._save(name, change)
        # At once: before anything else protects it, the branch that it was forked from is cleaned.
        origin = self.commits[start].branch
        if origin in self.desks:
            self._retain(origin, Retention(last=1), None)

    @rule(index=INDEX, keep=RULES)
    def restart(self, index: int, keep: Retention) -> None:
        self._open(self.branch(index), None, keep)

    @precondition(lambda self: len(self.desks) > 1)
    @rule(index=INDEX)
    def delete_branch(self, index: int) -> None:
        name = sorted(set(self.desks) - {"main"})[index % (len(self.desks) - 1)]
        branches.delete(self.desks[name].repository, name, run="t")
        self.desks.pop(name).packer.close()
        del self.tips[name], self.forks[name], self.made[name]
        self._gc(later=index % 2 == 0)

    @rule(index=INDEX)
    def tag(self, index: int) -> None:
        commit = self.there[index % len(self.there)]
        name = f"tag{self.count}-{index}"
        if name not in self.tags:
            branches.tag(self.desks["main"].repository, name, self.commits[commit], run="t")
            self.tags[name] = commit
            origin = self.commits[commit].branch
            if origin in self.desks:
                self._retain(origin, Retention(last=1), None)

    @precondition(lambda self: len(self.tags) > len(self.late_tags))
    @rule(index=INDEX)
    def delete_tag(self, index: int) -> None:
        made = sorted(self.tags.keys() - self.late_tags)
        name = made[index % len(made)]
        branches.delete_tag(self.desks["main"].repository, name, run="t")
        del self.tags[name]

    @rule(index=INDEX)
    def verification_marks_a_commit(self, index: int) -> None:
        # Often a tip: the one before it is then the newest that counts.
        commit = self.there[index % len(self.there)] if index % 4 == 0 else self.tips[self.branch(index)]
        if commit not in self.damaged:
            self.desks["main"].repository.mark(commit, "damaged", why="a test")
            self.damaged.add(commit)
        else:
            self.store.delete(f"objects/{commit}.damaged")
            self.damaged.discard(commit)
        origin = self.commits[commit].branch
        if origin in self.desks:
            self._retain(origin, Retention(last=1 + index % 2), None)
            self._retain(origin, self.rules[origin], self.keepers[origin])

    @rule(index=INDEX, keep=RULES)
    def retain_by_hand(self, index: int, keep: Retention) -> None:
        self._retain(self.branch(index), keep, None)

    @rule(index=INDEX)
    def retain_as_the_writer_does(self, index: int) -> None:
        branch = self.branch(index)
        self._retain(branch, self.rules[branch], self.keepers[branch])

    @rule(later=st.booleans())
    def gc(self, later: bool) -> None:
        self._gc(later=later)

    def _gc(self, *, later: bool) -> None:
        repository = self.desks["main"].repository
        now_s = time.time() + (LATER_S if later else 0.0)
        lost = set(self.there) - self.reachable(reflog=not later)
        dry = collect(repository, now_s=now_s, dry_run=True)
        report = collect(repository, now_s=now_s)
        assert {commit.id for commit in report.unreachable} == lost
        assert _outline(report) == _outline(dry)
        assert report.skipped == ()
        self.dropped |= lost
        # Nobody can go on with a save to a branch that was deleted: it is completed.
        self.late_tags = {tag: branch for tag, branch in self.late_tags.items() if branch in self.desks}

    def _age_marks(self) -> None:
        for commit in self.dropped:
            self.store._written[mark_key(commit, "dropped")] = 0.0

    @rule(share=st.sampled_from([0.0, 0.3]))
    def repack(self, share: float) -> None:
        self._age_marks()
        self._repack(share)

    def _repack(self, share: float) -> None:
        repository = self.desks["main"].repository
        dry = repack(repository, dead_share=share, dry_run=True)
        assert _outline(repack(repository, dead_share=share)) == _outline(dry)
        assert repack(repository, dead_share=share, dry_run=True).sweeps == ()
        needed, bases = self.rows_needed()
        for commit in self.dropped:
            rows = needed.get((commit, 0), set())
            spare = bases.get((commit, 0), set()) - rows
            if commit in self.left_alone:
                assert not rows or rows <= {number for number, row in enumerate(repository.read_locations(commit, 0).rows) if row}
                continue
            if not rows and not (spare and self.store.list(f"objects/{commit}/")):
                assert self.store.list(f"objects/{commit}/") == []
                continue
            table = repository.read_locations(commit, 0)
            left = {number for number, row in enumerate(table.rows) if row is not None}
            assert rows <= left
            rows |= spare & left
            if share == 0.0:
                assert rows == left
            for index, blob in enumerate(table.blobs):
                live = sum(table.row(number).length for number in rows if table.row(number).blob == index)
                assert blob.size - blob.header_nbytes - live <= share * blob.size

    # -- what holds ------------------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_there_loads_byte_for_byte(self) -> None:
        repository = self.desks["main"].repository
        reader = Reader(repository, threads=1)
        for commit in self.commits:
            assert repository.marks(commit) == {
                *(["dropped"] if commit in self.dropped else []),
                *(["damaged"] if commit in self.damaged else []),
            }
            if commit not in self.dropped:
                snapshot = reader.snapshot(self.commits[commit])
                found = {entry.path[1]: bytearray(entry.nbytes) for entry in snapshot.manifest.entries}
                reader.read([(entry, place, memoryview(found[entry.path[1]])) for _, entry, place in snapshot.stored()])
                assert found == self.held[commit]
        findings = verify(repository, quick=True).findings
        assert sorted(hit for hits in findings.values() for hit in hits) == sorted(self.damaged - self.dropped), findings

    @invariant()
    def refs_mean_what_they_did(self) -> None:
        repository = self.desks["main"].repository
        for refs in (self.tips, {name: commit for name, commit in self.tags.items() if name not in self.late_tags}):
            assert {name: history.resolve(repository, name).id for name in refs} == refs
        for name, commit in self.names.items():
            if commit not in self.dropped:
                assert history.resolve(repository, name).id == commit
            else:
                with pytest.raises(NotFoundError, match="dropped by retention"):
                    Reader(repository, threads=1).snapshot(history.resolve(repository, name))


def _outline(done: Any) -> dict[str, Any]:
    """Everything that a report of a cleaner says, but whether it only looked."""
    ids = [commit.id for commit in getattr(done, "dropped", getattr(done, "unreachable", ()))]
    return {"went": ids, **{name: getattr(done, name) for name in ("cut_off", "strays", "sweeps", "skipped") if hasattr(done, name)}}


def _no_tags(operation: str, key: str) -> None:
    if key.startswith("logs/refs/tags/"):
        raise StoreError("killed here")


def test_a_dropped_keyframe_that_a_save_names_is_left_alone_until_that_save_has_ended() -> None:
    """Found by the long run below: what it has that nothing needs goes only then."""
    state, same = Cleaning(), dict.fromkeys(NAMES, "same")
    left: list[bool] = []

    def look(share: float) -> None:
        Cleaning._repack(state, share)
        left.append(any(state.store.list(f"objects/{commit}/") for commit in state.left_alone))

    state._repack = look  # type: ignore[method-assign]
    try:
        state.begin(cycle=2, changes=[{**same, "b": "gone"}, same], keep=Retention(last=1), maximize=False)
        state.save_behind_an_older_commit_while_others_clean(change={**same, "a": "near"}, index=20, later=True, older=22)
        state.train(changes=[{**same, "c": "near"}, {**same, "a": "near"}], index=0, kept=True, metric=None)
        state.save_behind_an_older_commit_while_others_clean(change=same, index=0, later=False, older=0)
        state.repack(0.0)
        state.what_is_there_loads_byte_for_byte()
    finally:
        state.teardown()
    assert left == [False, True, False]


def test_cleaning_in_any_order() -> None:
    run_state_machine_as_test(Cleaning, settings=settings(max_examples=30, stateful_step_count=12, deadline=None))


@pytest.mark.slow
def test_cleaning_in_any_order_for_long() -> None:
    examples = int(os.environ.get("SYCKPT_EXAMPLES", "1500"))
    how = settings(max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Cleaning, settings=how)
