"""Retention: which of a branch's commits stay, and how the others go (FORMAT.md, section 13).

`plan` decides, from commits alone; `retain` looks, plans and, unless asked to be dry, executes. A dropped commit's record stays in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syckpt.errors import IntegrityError, NotFoundError, StateError
from syckpt.objects.commit import Commit
from syckpt.objects.text import seconds_of
from syckpt.repo import history
from syckpt.repo.repacking import Sweep, plan_sweep, plan_sweeps, run_sweeps
from syckpt.repo.repository import Repository
from syckpt.repo.survey import Ref, Rows, Sight, Survey, drop

__all__ = ["Keeper", "Plan", "Retained", "Retention", "plan", "retain"]


@dataclass(frozen=True)
class Retention:
    """Which commits of a branch to keep: those that any of the rules asks for.

    last: the newest so many. best: the so many with the best metric. every_steps: the first at or after each multiple of so many steps.
    every: the first in each such period since 1970, UTC ("90s", "30m", "1h", "1d", or seconds).
    Whatever the rules say, the tip, the best, tagged commits, tips and fork points of other branches, what saves under way build on, and
    the only whole commit stay. Raises: StateError.
    """

    last: int | None = None
    best: int | None = None
    every_steps: int | None = None
    every: str | float | None = None

    def __post_init__(self) -> None:
        for name in ("last", "best", "every_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise StateError(f"Retention({name}={value!r}): expected a whole number of at least 1")
        if self.every is not None:
            self.every_s  # noqa: B018 - checked here, where it was said
        if (self.last, self.best, self.every_steps, self.every) == (None, None, None, None):
            raise StateError("Retention() asks for nothing to be kept: name at least one of last, best, every_steps, every")

    @property
    def every_s(self) -> float | None:
        """The period in seconds."""
        if self.every is None:
            return None
        if isinstance(self.every, str):
            seconds = seconds_of(self.every.strip()) or 0.0
        else:
            seconds = float(self.every) if isinstance(self.every, int | float) and not isinstance(self.every, bool) else 0.0
        if not 1e-9 <= seconds < float("inf"):  # times are whole nanoseconds
            raise StateError(f"Retention(every={self.every!r}): expected seconds, or a text such as '90s', '30m', '1h', '1d'")
        return seconds

    def to_wire(self, *, maximize: bool = False) -> dict[str, Any]:
        """Return a value for JSON, with the direction of the metric: `checkpoint.process.Settings.retention`."""
        return {"last": self.last, "best": self.best, "every_steps": self.every_steps, "every": self.every, "maximize": maximize}

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> tuple[Retention, bool]:
        """Invert `to_wire`."""
        rule = Retention(wire["last"], wire["best"], wire["every_steps"], wire["every"])
        return rule, bool(wire["maximize"])


@dataclass(frozen=True)
class Plan:
    """What stays, each with the reasons, and what goes; both oldest first."""

    kept: tuple[tuple[Commit, tuple[str, ...]], ...]
    dropped: tuple[Commit, ...]


@dataclass(frozen=True)
class Retained:
    """What retention found on a branch, and, unless `dry_run`, did.

    `dropped` are the commits that go now; `sweeps` what is removed of them, and of earlier ones that need it. `skipped`: dropped commits
    whose bytes could not be removed yet, and why; the next run tries again.
    """

    branch: str
    dry_run: bool
    kept: tuple[tuple[Commit, tuple[str, ...]], ...]
    dropped: tuple[Commit, ...]
    sweeps: tuple[Sweep, ...]
    skipped: tuple[tuple[str, str], ...] = field(default=())

    @property
    def freed_nbytes(self) -> int:
        """Stored bytes that go, less those that are written anew."""
        return sum(found.freed_nbytes for found in self.sweeps)

    @property
    def moved_nbytes(self) -> int:
        """Stored bytes that are copied into new blobs."""
        return sum(found.moved_nbytes for found in self.sweeps)


def plan(
    rule: Retention,
    made: Sequence[Commit],
    *,
    tip: str | None,
    protected: Mapping[str, Sequence[str]],
    maximize: bool | None = None,
    is_whole: Callable[[Commit], bool] = lambda commit: not commit.damaged,
) -> Plan:
    """Decide about the commits made on a branch, oldest first; dropped ones among them tell only how the others hang together.

    `maximize`: whether the best metric is the highest; None where nobody said so: what would be best either way stays.
    `protected` maps commits to why they stay whatever the rule says. `is_whole` is asked about as few commits as possible.
    Damaged commits fill no place of a rule: they stay only if something protects them.
    """
    there = [commit for commit in made if not commit.dropped]
    good = [commit for commit in there if not commit.damaged]
    reasons: dict[str, list[str]] = {commit.id: list(protected.get(commit.id, ())) for commit in there}

    def keep(commits: Iterable[Commit], why: str) -> None:
        for commit in commits:
            reasons[commit.id].append(why)

    keep([commit for commit in there if commit.id == tip], "tip")
    keep(good[-rule.last :] if rule.last else (), f"last {rule.last}")
    for highest, condition in ((False, " (if the lowest)"), (True, " (if the highest)")):
        rest = good[::-1] if maximize in (None, highest) else []
        for place in range(rule.best or 1):
            best = history.best(rest, maximize=highest)
            if best is None:
                break
            keep([best], ("best" if place == 0 else f"best {rule.best}") + (condition if maximize is None else ""))
            rest.remove(best)
    line = _line(made, tip)
    on_line = [commit for commit in good if commit.id in line]
    if rule.every_steps:
        every = rule.every_steps
        keep(_firsts(on_line, lambda c: c.step // every if c.step >= every or c.step == 0 else None), f"every {every} steps")
    if (period_s := rule.every_s) is not None:
        keep(_firsts(on_line, lambda c: c.created_ns // round(period_s * 1e9)), f"every {rule.every}")
    kept = [commit for commit in there if reasons[commit.id]]
    if not any(is_whole(commit) for commit in reversed(kept)):
        keep([commit for commit in reversed(there) if not reasons[commit.id] and is_whole(commit)][:1], "the only whole one")
    return Plan(
        tuple((commit, tuple(reasons[commit.id])) for commit in there if reasons[commit.id]),
        tuple(commit for commit in there if not reasons[commit.id]),
    )


def _line(made: Sequence[Commit], tip: str | None) -> set[str]:
    """Return the commits that lead to the tip: what a jump back in history has left aside is not among them."""
    parents = {commit.id: commit.parents[0] if commit.parents else None for commit in made}
    line = set()
    at = tip
    while at in parents and at not in line:
        line.add(at)
        at = parents[at]
    return line


def _firsts(commits: Iterable[Commit], bucket: Callable[[Commit], int | None]) -> list[Commit]:
    """Return the first commit of each bucket; None is no bucket."""
    found: dict[int, Commit] = {}
    for commit in commits:
        number = bucket(commit)
        if number is not None:
            found.setdefault(number, commit)
    return list(found.values())


def retain(repository: Repository, branch: str, rule: Retention, *, maximize: bool | None = None, dry_run: bool = False) -> Retained:
    """Apply a rule to the commits made on a branch; with `dry_run`, only say what that would do. `maximize` is that of `plan`.

    Raises: NotFoundError for a branch that does not exist; IntegrityError when what protects commits cannot be read: then nothing is
    changed; StoreError.
    """
    keeper = Keeper(repository, branch, rule, maximize=maximize)
    return keeper.preview() if dry_run else keeper.apply()


class Keeper:
    """Applies a rule to one branch, again and again: what it has read once it does not read again.

    It leaves alone what others have dropped, but for what is left of it after an hour: they are at it.
    """

    def __init__(self, repository: Repository, branch: str, rule: Retention, *, maximize: bool | None = None) -> None:
        self._repository = repository
        self._survey = Survey(repository)
        self._branch = branch
        self._rule = rule
        self._maximize = maximize
        self._swept: set[str] = set()
        """Dropped commits of which nothing is left."""

    def preview(self) -> Retained:
        """Return what `apply` would do."""
        sight = self._survey.look()
        found = self._plan(sight)
        ids = [commit.id for commit in found.dropped]
        by_commit = {sweep.commit: sweep for sweep in plan_sweeps(self._survey, dropping=ids)}
        sweeps = tuple(by_commit[commit.id] for commit in self._made(sight) if commit.id in by_commit)
        return Retained(self._branch, True, found.kept, found.dropped, sweeps)

    def apply(self, *, guard: Callable[[], None] = lambda: None) -> Retained:
        """Drop what the rule does not keep, and remove its bytes.

        `guard()` raises when the caller has lost the branch meanwhile: called before anything is marked, and again before bytes go.
        """
        sight = self._survey.look()
        found = self._plan(sight)
        self._needed(sight, [c.id for c in found.dropped])  # raises, before anything is marked, what would stop the sweep
        guard()
        why = f"retention of branch {self._branch}: {self._rule}"
        dropped = drop(self._survey, [c.id for c in found.dropped], why=why, protected=self._untouchable)
        guard()
        sight = self._survey.look()
        sweeps, skipped = run_sweeps(self._repository, self._sweeps(sight))
        left = {commit for commit, _ in skipped}
        self._swept |= {sweep.commit for sweep in sweeps if not sweep.kept_nbytes and not sweep.unknown} - left
        gone = tuple(commit for commit in found.dropped if commit.id in set(dropped))
        return Retained(self._branch, False, found.kept, gone, sweeps, skipped)

    def _sweeps(self, sight: Sight) -> list[Sweep]:
        mine = [commit.id for commit in self._made(sight) if commit.dropped]
        settled = self._survey.settled(commit for commit in mine if commit not in self._swept)
        todo = [commit for commit in mine if commit in settled]
        if not todo:
            return []
        needed = self._needed(sight, ())
        found = [plan_sweep(self._survey, commit, needed) for commit in todo]
        self._swept |= {sweep.commit for sweep in found if sweep.is_empty and not sweep.kept_nbytes and not sweep.unknown}
        return [sweep for sweep in found if not sweep.is_empty]

    def _needed(self, sight: Sight, dropping: Iterable[str]) -> Rows:
        gone = set(dropping) | self._survey.settled(sight.recorded)
        return self._survey.needed(sight.recorded - gone, continued=sight.continued)

    def _plan(self, sight: Sight) -> Plan:
        ref = self._ref(sight)
        made = self._made(sight)
        return plan(
            self._rule,
            made,
            tip=ref.commit,
            protected=self._protected(sight),
            maximize=self._maximize,
            is_whole=self._is_whole,
        )

    def _ref(self, sight: Sight) -> Ref:
        ref = sight.refs.get(f"heads/{self._branch}")
        if ref is None:
            branches = ", ".join(sorted(ref.short for ref in sight.refs.values() if ref.kind == "heads")) or "none"
            raise NotFoundError(f"no branch {self._branch!r} in {self._repository.store.describe()}; branches: {branches}")
        return ref

    def _made(self, sight: Sight) -> list[Commit]:
        """Return the commits made on the branch since it was last begun afresh, oldest first.

        What an `overwrite` left behind is the collector's, when the reflog window has passed.
        """
        made: dict[str, Commit] = {}
        for record in self._ref(sight).records:
            if record.reason in ("save", "reset") and record.commit is not None:
                commit = self._survey.commit(record.commit)
                if not commit.parents:
                    made.clear()
                if commit.branch == self._branch:
                    made[commit.id] = commit
        return list(made.values())

    def _protected(self, sight: Sight) -> dict[str, list[str]]:
        """Return the commits that no rule may drop, and why."""
        found: dict[str, list[str]] = {}

        def add(commit: str | None, why: str) -> None:
            if commit is not None:
                found.setdefault(commit, []).append(why)

        for name, ref in sorted(sight.refs.items()):
            if ref.kind == "heads":
                if ref.short != self._branch:
                    add(ref.commit, f"tip of {ref.short}")
                    add(ref.fork, f"fork point of {ref.short}")
            elif ref.kind == "tags":
                add(ref.commit, f"tag {ref.short}")
            elif ref.kind != "names":
                add(ref.commit, name)
        for used in sorted(sight.used):
            add(used, "a save under way")
        # The tags of a save that was cut off right after it became visible are still to be made.
        for commit in self._made(sight):
            for tag in commit.tags:
                if f"tags/{tag}" not in sight.ever:
                    add(commit.id, f"tag {tag}")
        return found

    def _untouchable(self, sight: Sight) -> set[str]:
        """Return what may not go, by another look: other refs and saves, or a newer incarnation's move of this branch."""
        return {*self._protected(sight), self._ref(sight).commit or ""}

    def _is_whole(self, commit: Commit) -> bool:
        try:
            self._repository.check_whole(commit)
        except (IntegrityError, NotFoundError):
            return False
        return not commit.damaged
