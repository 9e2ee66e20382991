"""Commits and the names that lead to them, as the commands show them."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from syckpt.cli import output
from syckpt.errors import IntegrityError

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.repository import Repository

__all__ = ["Labels", "age", "created", "epoch", "marks", "record", "short_id"]


class Labels:
    """The branches and tags of a repository, by commit. What cannot be read is left out and kept in `problems`."""

    def __init__(self, repository: Repository) -> None:
        self.problems: list[IntegrityError] = []
        self.tips: dict[str, str | None] = {}
        """The commits that refs name, with the seal that the ref binds."""
        self.head: str | None = None
        self._refs: defaultdict[str, list[str]] = defaultdict(list)
        try:
            self.head = repository.head_branch()
        except IntegrityError as exc:
            self.problems.append(exc)
        for kind in ("heads", "tags"):
            self._read(repository, kind)

    def _read(self, repository: Repository, kind: str) -> None:
        try:
            names = repository.refs.names(kind)
        except IntegrityError as exc:
            self.problems.append(exc)
            return
        for name in names:
            try:
                record = repository.refs.head(f"{kind}/{name}")
            except IntegrityError as exc:
                self.problems.append(exc)
                continue
            if record is not None and record.commit is not None:
                self.tips.setdefault(record.commit, record.commit_seal)
                self._refs[record.commit].append(f"{kind}/{name}")

    def refs(self, commit: Commit) -> list[str]:
        """Return the full names of the refs at a commit: `heads/main`, `tags/v1`."""
        return self._refs.get(commit.id, [])

    def tags(self, commit: Commit) -> list[str]:
        """Return the tags that are at a commit now."""
        return [ref.removeprefix("tags/") for ref in self.refs(commit) if ref.startswith("tags/")]

    def text(self, commit: Commit) -> str:
        """Return `(HEAD -> main, other, tag: v1, name: x)`, or nothing."""
        branches = [ref.removeprefix("heads/") for ref in self.refs(commit) if ref.startswith("heads/")]
        names = [f"HEAD -> {branch}" if branch == self.head else branch for branch in sorted(branches, key=lambda b: (b != self.head, b))]
        names += [f"tag: {tag}" for tag in self.tags(commit)]
        # The name of a dropped commit is free again.
        names += [f"name: {commit.name}"] if commit.name is not None and not commit.dropped else []
        return f"({', '.join(map(output.printable, names))})" if names else ""


def short_id(commit: str) -> str:
    """Return the fingerprint and eight digits of the second part: a prefix that every command takes."""
    return commit[:17]


def epoch(commit: Commit) -> str:
    """Return where in the training's epochs a commit is: `3 done`, `3 batch 40`."""
    return f"{commit.epoch} done" if commit.epoch_done else f"{commit.epoch} batch {commit.batch_idx}"


def marks(commit: Commit) -> list[str]:
    """Return the marks beside a commit."""
    return [name for name in ("dropped", "damaged", "preempted") if getattr(commit, name)]


def created(commit: Commit) -> str:
    """Return the time of a commit to the minute, UTC."""
    return commit.created.strftime("%Y-%m-%d %H:%MZ")


def age(commit: Commit) -> str:
    """Return how long ago a commit was made."""
    return output.age((time.time_ns() - commit.created_ns) / 1e9)


def record(commit: Commit, labels: Labels) -> dict[str, Any]:
    """Return a commit for JSON. `tags` are those that are at it now."""
    return {
        "id": commit.id,
        "parents": list(commit.parents),
        "branch": commit.branch,
        "step": commit.step,
        "epoch": commit.epoch,
        "batch_idx": commit.batch_idx,
        "epoch_done": commit.epoch_done,
        "metric": commit.metric,
        "message": commit.message,
        "config": commit.config,
        "created": commit.created.isoformat(timespec="milliseconds"),
        "world_size": commit.world_size,
        "tags": labels.tags(commit),
        "name": commit.name,
        "refs": labels.refs(commit),
        "stats": commit.stats,
        "dropped": commit.dropped,
        "damaged": commit.damaged,
        "preempted": commit.preempted,
    }
