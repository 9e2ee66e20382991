"""Disk usage: what commits, items and tensors cost, what they share, and what could go."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from syckpt.objects import nodes
from syckpt.objects.commit import Commit
from syckpt.objects.locations import Locations, Source
from syckpt.repo.collection import collect
from syckpt.repo.keys import commit_of, commit_prefix
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.survey import Rows, Survey, add_rows, numbers_in

__all__ = ["CommitUsage", "TensorUsage", "Usage", "measure", "measure_tensors"]


@dataclass(frozen=True)
class CommitUsage:
    """What a commit costs, in stored bytes: of tensors that nothing else needs, that others need as well, and of its documents."""

    commit: Commit
    exclusive_nbytes: int
    shared_nbytes: int
    document_nbytes: int

    @property
    def needed_nbytes(self) -> int:
        """What the commit needs to be loaded."""
        return self.exclusive_nbytes + self.shared_nbytes + self.document_nbytes


@dataclass(frozen=True)
class Usage:
    """What a repository costs. `commits` are those that are there, oldest first; `reclaimable_nbytes` is what `gc` would free.

    `total_nbytes` is what tensors of single commits take (`CommitUsage.exclusive_nbytes`), `shared_nbytes`, and `other_nbytes`. An
    unfinished file counts once its process is gone.
    """

    total_nbytes: int
    files: int
    commits: tuple[CommitUsage, ...]
    dropped: int
    """How many commits retention has dropped."""
    retained_nbytes: int
    """Bytes in files of dropped commits, for commits that are there."""
    reclaimable_nbytes: int
    shared_nbytes: int
    """Stored bytes of tensors that several commits need, each counted once."""

    @property
    def other_nbytes(self) -> int:
        """What is no tensor that a commit needs: documents, records, headers, unfinished files, and bytes that nothing needs any more."""
        return self.total_nbytes - self.shared_nbytes - sum(found.exclusive_nbytes for found in self.commits)


@dataclass(frozen=True)
class TensorUsage:
    """What a tensor costs in one commit. `stored_nbytes` includes the base that it is a delta against."""

    item: str
    path: str
    rank: int
    dtype: str
    nbytes: int
    stored_nbytes: int
    exclusive_nbytes: int
    """What only this commit needs of it."""


def measure(repository: Repository) -> Usage:
    """Measure everything. Raises: IntegrityError, StoreError."""
    survey = Survey(repository)
    books = _Books(survey)
    store = repository.store
    sizes = {key: store.size(key) or 0 for key in store.list()}
    documents: dict[str, int] = defaultdict(int)
    for key, size in sizes.items():
        if key.startswith("objects/") and not key.endswith(".safetensors"):
            documents[commit_of(key)] += size
    commits = [
        CommitUsage(survey.commit(commit), *books.split(commit), documents[commit])
        for commit in sorted(books.kept, key=lambda commit: survey.commit(commit).created_ns)
    ]
    dropped = [commit for commit in books.recorded if survey.is_dropped(commit)]
    of_dropped = tuple(commit_prefix(commit) for commit in dropped)
    retained = sum(size for key, size in sizes.items() if key.startswith(of_dropped)) if of_dropped else 0
    could_go = collect(repository, dry_run=True)
    sizes.update(could_go.staged)
    return Usage(sum(sizes.values()), len(sizes), tuple(commits), len(dropped), retained, could_go.freed_nbytes, books.shared())


def measure_tensors(repository: Repository, commit: Commit) -> list[TensorUsage]:
    """Measure the tensors of one commit, in its order; one under several paths counts once. Raises: IntegrityError, NotFoundError."""
    books = _Books(Survey(repository))
    reader = Reader(repository, threads=1)
    found: list[TensorUsage] = []
    for rank, _ in commit.manifests:
        counted: set[tuple[Source, int]] = set()
        for _, entry, place in reader.snapshot(commit, rank).stored():
            places = [place] if place.base is None else [place, place.base]
            new = {(p.owner, p.number): p.row.length for p in places if (p.owner, p.number) not in counted}
            counted |= set(new)
            exclusive = sum(length for row, length in new.items() if books.users(row) <= 1)
            path = nodes.format_path(entry.path)
            found.append(TensorUsage(str(entry.path[0]), path, rank, entry.dtype, entry.nbytes, sum(new.values()), exclusive))
    return found


class _Books:
    """Which commits need which rows, and how long those are."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        sight = survey.look()
        self.recorded = sight.recorded
        self.kept = {commit for commit in sight.recorded if not survey.is_dropped(commit)}
        self._tables: dict[Source, Locations | None] = {}
        self._rows = {commit: self._closure(commit) for commit in self.kept}
        self._users: dict[Source, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for rows in self._rows.values():
            for source, numbers in rows.items():
                for number in numbers_in(numbers):
                    self._users[source][number] += 1

    def users(self, row: tuple[Source, int]) -> int:
        """Return how many commits need a row."""
        return self._users[row[0]][row[1]]

    def split(self, commit: str) -> tuple[int, int]:
        """Return the stored bytes that only this commit needs, and those that others need as well."""
        exclusive = shared = 0
        for source, numbers in self._rows[commit].items():
            for number in numbers_in(numbers):
                length = self._length(source, number)
                if self._users[source][number] > 1:
                    shared += length
                else:
                    exclusive += length
        return exclusive, shared

    def shared(self) -> int:
        """Return the stored bytes that several commits need, each counted once."""
        rows = ((source, number) for source, users in self._users.items() for number, count in users.items() if count > 1)
        return sum(self._length(*row) for row in rows)

    def _closure(self, commit: str) -> Rows:
        needs = self._survey.needs(commit)
        rows = dict(needs.rows) if needs is not None else {}
        for source, numbers in list(rows.items()):
            table = self._table(source)
            if table is not None:
                own = (table.rows[number] for number in numbers_in(numbers) if number < len(table.rows))
                add_rows(rows, table, (row.base for row in own if row is not None and row.base is not None))
        return rows

    def _table(self, source: Source) -> Locations | None:
        if source not in self._tables:
            self._tables[source] = self._survey.table(source)
        return self._tables[source]

    def _length(self, source: Source, number: int) -> int:
        table = self._table(source)
        row = table.rows[number] if table is not None and number < len(table.rows) else None
        return row.length if row is not None else 0
