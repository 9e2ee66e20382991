"""Surveys: which commits refs, intents and commits lead to, and which rows those need (FORMAT.md, section 13).

Ref records, commits and the locations of commits that are kept never change: a survey that looks again reads only what is new. Whatever
cannot be read is an error: nothing may be removed by someone who has not seen what may need it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from syckpt.errors import ConflictError, IntegrityError, NotFoundError
from syckpt.objects.commit import Commit
from syckpt.objects.locations import Locations, Source
from syckpt.objects.refs import Intent, Owner, RefRecord
from syckpt.repo import documents
from syckpt.repo.keys import COPY, RECORD, commit_key, commit_prefix, locations_prefix, manifest_key, mark_key, ref_of
from syckpt.repo.owner import is_dead, this_process
from syckpt.repo.repository import Repository

__all__ = ["SETTLED_AFTER_S", "Needs", "Ref", "Rows", "Sight", "Survey", "add_rows", "drop", "numbers_in", "read_intents"]

SETTLED_AFTER_S = 3600.0
"""A mark younger than this may be taken back by whoever made it; others leave that commit's bytes alone."""
_SECOND_THOUGHTS_S = 60.0
_log = logging.getLogger("syckpt")

Rows = dict[Source, int]
"""Rows by whose they are: bit n stands for row n."""


@dataclass(frozen=True)
class Ref:
    """An existing ref: its records since it was last deleted, oldest first."""

    name: str
    records: tuple[RefRecord, ...]

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def short(self) -> str:
        """The name without its class."""
        return self.name.partition("/")[2]

    @property
    def commit(self) -> str | None:
        """The commit that the ref names now."""
        return self.records[-1].commit

    @property
    def fork(self) -> str | None:
        """The commit at which a branch was forked from another."""
        return self.records[0].commit if self.kind == "heads" and self.records[0].reason == "create" else None


@dataclass(frozen=True)
class Sight:
    """What one look showed. `intents` are those whose owner is not known to be dead; `ever` names every ref that has records."""

    refs: Mapping[str, Ref]
    ever: frozenset[str]
    records: tuple[RefRecord, ...]
    intents: tuple[Intent, ...]

    @property
    def recorded(self) -> frozenset[str]:
        """Every commit that any record names: they were published."""
        return frozenset(record.commit for record in self.records if record.commit is not None)

    @property
    def continued(self) -> frozenset[str]:
        """The commits that a save may be under way behind: tips, and what intents name."""
        tips = {ref.commit for ref in self.refs.values() if ref.kind == "heads" and ref.commit is not None}
        return frozenset(tips | self.used)

    @property
    def named(self) -> frozenset[str]:
        """The commits that a branch (as tip or fork point), a tag or a save under way names."""
        refs = [ref for ref in self.refs.values() if ref.kind != "names"]
        return frozenset(commit for ref in refs for commit in (ref.commit, ref.fork) if commit is not None) | self.used

    @property
    def used(self) -> frozenset[str]:
        """The commits that saves under way may point into. One that is published points where its commit says."""
        recorded = self.recorded
        return frozenset(commit for intent in self.intents if intent.commit not in recorded for commit in intent.uses)


@dataclass(frozen=True)
class Needs:
    """The rows that a commit needs, bases of its own rows among them; and those that only a save behind it may take as bases."""

    rows: Rows
    bases: Rows


class Survey:
    """Looks at a repository again and again. Not thread-safe."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self._records: dict[str, dict[int, RefRecord]] = defaultdict(dict)
        self._commits: dict[str, Commit] = {}
        self._needs: dict[str, Needs] = {}
        self._settled: set[str] = set()
        self._tables: dict[Source, tuple[str, Locations]] = {}

    # -- refs and intents --------------------------------------------------------------------------------------------

    def look(self) -> Sight:
        """Read what is new. Raises: IntegrityError when any record or intent is damaged or lost."""
        # Intents first: a save that is published in between is found in the records.
        intents = tuple(intent for intent in read_intents(self.repository) if is_dead(intent.owner) is not True)
        store, refs = self.repository.store, self.repository.refs
        numbers: dict[str, list[int]] = defaultdict(list)
        for match in filter(None, map(RECORD.fullmatch, store.list("logs/"))):
            numbers[ref_of(match)].append(int(match["number"]))
        for match in filter(None, map(COPY.fullmatch, store.list("refs/"))):
            refs.head(ref_of(match))  # raises when a record was lost that the copy names
        for name, before in self._records.items():
            # A listing that lags may lack what was read already; records never go.
            if len(numbers.get(name, ())) < len(before):
                numbers[name] = sorted(before)
        found: dict[str, Ref] = {}
        for name, present in numbers.items():
            if present != list(range(1, len(present) + 1)):
                present = refs.numbers(name)  # raises, unless the listing was made while records were
            if present[0] != 1:
                raise IntegrityError(f"{refs.key(name, 1)}: missing, while later records of {name} exist: a record was lost")
            known = self._records[name]
            for number in present[len(known) :]:
                try:
                    known[number] = refs.read(name, number)
                except IntegrityError as exc:
                    raise IntegrityError(
                        f"{exc}. Which commits it protects cannot be told, so nothing is removed: put that file back from a copy of the"
                        " repository"
                    ) from exc
            records = [known[number] for number in present]
            since = max((index for index, record in enumerate(records) if record.deleted), default=-1) + 1
            if records[since:]:
                found[name] = Ref(name, tuple(records[since:]))
        everything = tuple(record for name in numbers for record in self._records[name].values())
        return Sight(found, frozenset(numbers), everything, intents)

    # -- commits -----------------------------------------------------------------------------------------------------

    def commit(self, commit: str) -> Commit:
        """Return a commit, with its marks as they are now. Raises: IntegrityError."""
        if commit not in self._commits:
            try:
                self._commits[commit] = self.repository.read_commit(commit)
            except (IntegrityError, NotFoundError) as exc:
                what = str(exc) if isinstance(exc, IntegrityError) else f"{commit_key(commit)}: missing, though a record names it"
                raise IntegrityError(
                    f"{what}. What it leads to cannot be told, so nothing is removed: put that file back from a copy of the repository"
                ) from exc
        # A verification marks commits, and takes marks away, while a writer runs for weeks.
        return self._commits[commit].marked({"dropped"} if commit in self._settled else self.repository.marks(commit))

    def is_dropped(self, commit: str) -> bool:
        """Whether a commit is marked as dropped."""
        return commit in self._settled or self.repository.store.size(mark_key(commit, "dropped")) is not None

    def settled(self, commits: Iterable[str], *, now_s: float | None = None) -> set[str]:
        """Return those of the commits that are dropped for good: marked by this survey's owner, or by another who takes no mark back.

        That one may have died before its second look, and somebody may have named the commit just before the mark. Whoever names it
        behind the mark sees it, and lets go; so a look behind the mark tells. Raises: IntegrityError.
        """
        asked = set(commits)
        left = {commit for commit in asked - self._settled if self._is_left(commit, now_s=now_s)}
        named = self.look().named if left else frozenset()
        for commit in left:
            if commit in named and self.repository.store.size(manifest_key(commit, 0)) is None:
                continue  # Dropped long since: a save under way only names it as the keyframe of its cycle.
            if commit in named:
                _log.warning(
                    "%s: left by a process that did not look again, on a commit that a branch, a tag or a save names: its bytes stay; with"
                    " all its files there, it is a commit again once you delete the mark",
                    mark_key(commit, "dropped"),
                )
            else:
                self.settle(commit)
        return asked & self._settled

    def _is_left(self, commit: str, *, now_s: float | None) -> bool:
        """Whether another process has marked a commit, and is dead, or did so more than an hour ago."""
        marked_s = self.repository.store.modified_s(mark_key(commit, "dropped"))
        if marked_s is None:
            return False
        return (time.time() if now_s is None else now_s) - marked_s >= SETTLED_AFTER_S or self._marker_is_dead(commit)

    def _marker_is_dead(self, commit: str) -> bool:
        key = mark_key(commit, "dropped")
        try:
            body, _ = documents.read(self.repository.store, key, kind="mark")
        except NotFoundError:
            return False  # Taken back.
        return "owner" in body and is_dead(Owner.from_body(body["owner"], where=key)) is True

    def settle(self, commit: str) -> None:
        """Take a commit for dropped from here on."""
        self._settled.add(commit)
        self._needs.pop(commit, None)

    # -- rows --------------------------------------------------------------------------------------------------------

    def needs(self, commit: str) -> Needs | None:
        """Return what a commit needs; None for one that is being dropped, and whose locations are gone. Raises: IntegrityError."""
        if commit not in self._needs:
            rows: Rows = defaultdict(int)
            bases: Rows = defaultdict(int)
            try:
                for rank, _ in self.commit(commit).manifests:
                    _add_needs(self.repository.read_locations(commit, rank), rows, bases)
            except IntegrityError as exc:
                if self.is_dropped(commit):
                    return None
                raise IntegrityError(
                    f"{exc}. What commit {commit} needs of others cannot be told, so nothing is removed: put that file back from a copy of"
                    " the repository, or let the commit go (`syckpt verify` marks it, and `syckpt retain` then drops it if nothing"
                    " protects it)"
                ) from exc
            self._needs[commit] = Needs(dict(rows), dict(bases))
        return self._needs[commit]

    def needed(self, kept: Iterable[str], *, continued: Iterable[str]) -> Rows:
        """Return the rows that commits need; of those in `continued` also what a save behind them may take as bases."""
        total: Rows = defaultdict(int)
        whole = set(kept)
        goes_on = set(continued)
        told: set[str] = set()
        for commit in whole:
            needs = self.needs(commit)
            if needs is None:
                continue
            told.add(commit)
            for source, rows in needs.rows.items():
                total[source] |= rows
            for source, rows in needs.bases.items() if commit in goes_on else ():
                total[source] |= rows
        # Bases of the rows of others: of commits that are dropped, or of which another process has removed some ranks' locations already.
        for source in [source for source in total if source[0] not in told]:
            table = self.table(source)
            if table is None:
                self._refuse_if_lost(source, whole)
                continue
            own = (table.rows[number] for number in numbers_in(total[source]) if number < len(table.rows))
            add_rows(total, table, (row.base for row in own if row is not None and row.base is not None))
        return dict(total)

    def _refuse_if_lost(self, source: Source, kept: Iterable[str]) -> None:
        """Raises: IntegrityError when a commit that nobody is dropping needs rows of which nobody can tell what they need."""
        for commit in kept:
            needs = self.needs(commit)
            if needs is not None and source in needs.rows and not self.is_dropped(commit):
                raise IntegrityError(
                    f"objects/{source[0]}/r{source[1]:05d}.locations: missing, though {commit} needs them; run `syckpt verify`"
                )

    def table(self, source: Source) -> Locations | None:
        """Return the newest locations of a dropped commit; None where there are none any more. Raises: IntegrityError."""
        commit, rank = source
        prefix = locations_prefix(commit, rank)
        tried = ""
        while True:
            key = max((key for key in self.repository.store.list(commit_prefix(commit)) if key.startswith(prefix)), default="")
            if key <= tried:
                break
            known = self._tables.get(source)
            if known is not None and known[0] == key:
                return known[1]
            try:
                body, _ = documents.read(self.repository.store, key, kind="locations")
            except NotFoundError:
                tried = key  # Somebody else replaced or removed it in between.
                continue
            self._tables[source] = (key, Locations.from_body(body, where=key))
        self._tables.pop(source, None)
        return None


def read_intents(repository: Repository) -> Iterator[Intent]:
    """Yield the intents, whoever's they are. Raises: IntegrityError."""
    for key in repository.store.list("intents/"):
        try:
            body, _ = documents.read(repository.store, key, kind="intent")
        except NotFoundError:
            continue
        except IntegrityError as exc:
            raise IntegrityError(f"{exc}; nobody knows what its save needs: delete {key} when no save is running") from exc
        yield Intent.from_body(body, where=key)


def drop(survey: Survey, commits: Iterable[str], *, why: str, protected: Callable[[Sight], Iterable[str]]) -> list[str]:
    """Mark commits as dropped, look again, and take back the marks of those that are `protected` by then; return the others.

    Nothing of them is deleted yet. Whoever makes a record or an intent looks for the mark afterwards, so one of the two sees the other.
    """
    store = survey.repository.store
    made = []
    for commit in commits:
        began_s = time.monotonic()
        try:
            documents.write(store, mark_key(commit, "dropped"), {"kind": "mark", "version": 1, "why": why, "owner": asdict(this_process())})
        except ConflictError:
            continue  # Somebody else is dropping it.
        made.append((commit, began_s))
    if not made:
        return []
    spared = set(protected(survey.look()))
    dropped = []
    for commit, began_s in made:
        if commit not in spared:
            survey.settle(commit)
            dropped.append(commit)
        elif time.monotonic() - began_s < _SECOND_THOUGHTS_S:
            store.delete(mark_key(commit, "dropped"))
        # Later, nobody may take it back, since another sweeper may go by it. It stays; so do the bytes, while something names the
        # commit.
    return dropped


def numbers_in(rows: int) -> Iterator[int]:
    """Yield the numbers of the rows in a set, ascending."""
    bits = f"{rows:b}"[::-1]
    number = bits.find("1")
    while number >= 0:
        yield number
        number = bits.find("1", number + 1)


def add_rows(rows: Rows, locations: Locations, pointers: Iterable[tuple[int, int]]) -> None:
    """Add what locations point to, as `(source index, row)`, to sets of rows."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for index, number in pointers:
        numbers[index].append(number)
    for index, found in numbers.items():
        source = locations.source(index)
        rows[source] = rows.get(source, 0) | _set_of(found)


def _set_of(numbers: Sequence[int]) -> int:
    # By way of bytes: one integer after the other would be a copy of the whole set for each of them.
    bits = bytearray(max(numbers) // 8 + 1)
    for number in numbers:
        bits[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(bits, "little")


def _add_needs(locations: Locations, rows: Rows, bases: Rows) -> None:
    add_rows(rows, locations, locations.at)
    add_rows(rows, locations, (own.base for own in locations.rows if own is not None and own.base is not None))
    add_rows(bases, locations, locations.bases)
