"""Any sequence of saves, branches, tags, retention, gc and repack, against a model in plain dicts: nothing protected goes, and what is
there loads byte for byte after every step."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from syckpt.objects.commit import Commit
from syckpt.repo import branches
from syckpt.repo.collection import REFLOG_S, collect
from syckpt.repo.repacking import repack
from syckpt.repo.retention import Retention, retain
from syckpt.repo.verify import verify
from syckpt.stores.memory import MemoryStore

from .conftest import Desk

LATER_S = 2 * REFLOG_S
RULES = st.builds(
    Retention,
    last=st.sampled_from([1, 1, 1, 2]),
    best=st.sampled_from([None, None, 2]),
    every_steps=st.sampled_from([None, None, None, 5]),
)
INDEX = st.integers(0, 1000)


def value(name: str, version: int) -> np.ndarray:
    """Versions of one tensor: near each other (deltas), or not (`noise`)."""
    seed = version if name == "noise" else 0
    base = np.random.default_rng([seed, len(name)]).standard_normal(300).astype(np.float32)
    return base if name == "noise" else (base + np.float32(version * 1e-6)).astype(np.float32)


class Cleaning(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.desks: dict[str, Desk] = {}
        self.held: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, Commit] = {}
        self.tips: dict[str, str] = {}
        self.forks: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.dropped: set[str] = set()
        self.count = 0
        self._open("main", None)
        self._save("main", {"frozen": 0, "slow": 0, "noise": 0}, None)
        self.train(0, [0, 1, 1, 2], 0, late=True)

    def teardown(self) -> None:
        for desk in self.desks.values():
            desk.packer.close()

    # -- the model ---------------------------------------------------------------------------------------------------

    @property
    def there(self) -> list[str]:
        return [commit for commit in self.commits if commit not in self.dropped]

    def branch(self, index: int) -> str:
        return sorted(self.desks)[index % len(self.desks)]

    def reachable(self) -> set[str]:
        todo = [*self.tips.values(), *self.tags.values(), *(commit for commit in self.names.values() if commit not in self.dropped)]
        found: set[str] = set()
        while todo:
            commit = todo.pop()
            if commit not in found:
                found.add(commit)
                todo += self.commits[commit].parents
        return found

    def _open(self, name: str, start: str | None) -> None:
        if name in self.desks:
            self.desks[name].packer.close()
        desk = self.desks[name] = Desk(self.store, run=name, cycle=3)
        desk.open(name, start=None if start is None else self.commits[start])

    def _save(self, branch: str, versions: dict[str, int], parent: Any, **facts: Any) -> None:
        self.count += 1
        arrays = {key: value(key, version) for key, version in versions.items()}
        commit = self.desks[branch].save(arrays, parent=parent, step=self.count, **facts)
        self.commits[commit.id] = commit
        self.held[commit.id] = {key: array.tobytes() for key, array in arrays.items()}
        self.tips[branch] = commit.id
        for tag in commit.tags:
            self.tags[tag] = commit.id
        if commit.name is not None:
            self.names[commit.name] = commit.id

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(
        index=INDEX,
        slow=st.integers(0, 3),
        noise=st.integers(0, 3),
        more=st.booleans(),
        metric=st.none() | st.sampled_from([1.0, 2.0, 3.0, math.nan]),
        tagged=st.integers(0, 9),
        back=st.integers(0, 9),
    )
    def save(self, index: int, slow: int, noise: int, more: bool, metric: float | None, tagged: int, back: int) -> None:
        name = self.branch(index)
        versions = {"frozen": 0, "slow": slow, "noise": noise, **({"late": slow} if more else {})}
        mine = [commit for commit in self.there if self.commits[commit].branch == name]
        # Now and then behind an older commit: after a jump back in history.
        parent = "newest" if back or not mine else self.commits[mine[index % len(mine)]]
        tags = [f"t{self.count}"] if tagged == 0 else []
        self._save(name, versions, parent, metric=metric, tags=tags, name=f"n{self.count}" if tagged == 1 else None)

    @rule(index=INDEX, slow=st.lists(st.integers(0, 2), min_size=3, max_size=6), noise=st.integers(0, 3), late=st.booleans())
    def train(self, index: int, slow: list[int], noise: int, late: bool) -> None:
        for n, version in enumerate(slow):
            extra = {"late": n + noise} if late and n else {}
            self._save(self.branch(index), {"frozen": 0, "slow": version, "noise": noise + n // 2, **extra}, "newest")

    @rule(index=INDEX)
    def save_cut_short(self, index: int) -> None:
        desk = self.desks[self.branch(index)]
        commit, transaction = desk.begin()
        desk.pack(commit, {"noise": value("noise", index)}, parent=desk.newest)
        desk.packer.failed()
        transaction.abort()

    @precondition(lambda self: len(self.desks) < 4)
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        start = self.there[index % len(self.there)]
        name = next(name for name in ("a", "b", "c", "d") if name not in self.desks)
        self._open(name, start)
        self.tips[name] = self.forks[name] = start

    @rule(index=INDEX)
    def restart(self, index: int) -> None:
        self._open(self.branch(index), None)

    @precondition(lambda self: len(self.desks) > 1)
    @rule(index=INDEX)
    def delete_branch(self, index: int) -> None:
        name = sorted(set(self.desks) - {"main"})[index % (len(self.desks) - 1)]
        branches.delete(self.desks[name].repository, name, run="t")
        self.desks.pop(name).packer.close()
        del self.tips[name], self.forks[name]

    @rule(index=INDEX)
    def tag(self, index: int) -> None:
        commit = self.there[index % len(self.there)]
        name = f"tag{self.count}-{len(self.tags)}-{index}"
        if name not in self.tags:
            branches.tag(self.desks["main"].repository, name, self.commits[commit], run="t")
            self.tags[name] = commit

    @precondition(lambda self: bool(self.tags))
    @rule(index=INDEX)
    def delete_tag(self, index: int) -> None:
        name = sorted(self.tags)[index % len(self.tags)]
        branches.delete_tag(self.desks["main"].repository, name, run="t")
        del self.tags[name]

    @rule(index=INDEX, keep=RULES, maximize=st.booleans())
    def retain(self, index: int, keep: Retention, maximize: bool) -> None:
        name = self.branch(index)
        mine = [commit for commit in self.there if self.commits[commit].branch == name]
        repository = self.desks[name].repository
        dry = retain(repository, name, keep, maximize=maximize, dry_run=True)
        report = retain(repository, name, keep, maximize=maximize)
        gone = {commit.id for commit in report.dropped}
        assert [commit.id for commit in dry.dropped] == [commit.id for commit in report.dropped]
        assert gone <= set(mine)
        assert not gone & {*self.tips.values(), *self.tags.values(), *self.forks.values(), *mine[-(keep.last or 1) :]}
        scored = [c for c in map(self.commits.__getitem__, mine) if c.metric is not None and not math.isnan(c.metric)]
        if gone and (old := [c for c in scored if c.id in {commit.id for commit, _ in report.kept} | gone]):
            best = (max if maximize else min)(c.metric for c in old if c.metric is not None)
            assert [c.id for c in old if c.metric == best][-1] not in gone
        self.dropped |= gone

    @rule()
    def gc(self) -> None:
        reachable = self.reachable()
        report = collect(self.desks["main"].repository, now_s=time.time() + LATER_S)
        assert {commit.id for commit in report.unreachable} == set(self.there) - reachable
        assert report.skipped == ()
        self.dropped |= {commit.id for commit in report.unreachable}

    @rule(share=st.sampled_from([0.0, 0.3]))
    def repack(self, share: float) -> None:
        for key in self.store._written:
            if key.endswith(".dropped"):
                self.store._written[key] = 0.0
        assert repack(self.desks["main"].repository, dead_share=share).skipped == ()
        assert repack(self.desks["main"].repository, dead_share=share, dry_run=True).sweeps == ()

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_there_loads_byte_for_byte(self) -> None:
        desk = self.desks["main"]
        for commit in self.commits:
            assert ("dropped" in desk.repository.marks(commit)) == (commit in self.dropped)
            if commit not in self.dropped:
                assert desk.load(self.commits[commit]) == self.held[commit]
        assert verify(desk.repository, quick=True).errors == []


TestCleaning = Cleaning.TestCase
TestCleaning.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
