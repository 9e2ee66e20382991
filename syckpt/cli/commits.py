"""Commits, as the commands show them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import output
from syckpt.errors import IntegrityError, NotFoundError

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.labels import Labels
    from syckpt.repo.repository import Repository

__all__ = ["age", "brief", "created", "epoch", "facts", "lines_of", "marks", "named", "record", "short_id"]


def short_id(commit: str) -> str:
    """Return the fingerprint and eight digits of the second part: a prefix that every command takes."""
    return commit[:17]


def epoch(commit: Commit) -> str:
    """Return where in the training's epochs a commit is: `3 done`, `3 batch 40`."""
    return f"{commit.epoch} done" if commit.epoch_done else f"{commit.epoch} batch {commit.batch_idx}"


def marks(commit: Commit) -> list[str]:
    """Return the marks beside a commit."""
    return commit.marks


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


def named(repository: Repository, kind: str, problems: list[IntegrityError]) -> dict[str, Commit]:
    """Return the commits that the refs of a class name, by the refs' names. What cannot be read is added to `problems`."""
    found = {}
    for name, ref in repository.refs.heads(kind, problems=problems).items():
        if ref.commit is None:
            continue
        try:
            found[name] = repository.read_commit(ref.commit, seal=ref.commit_seal)
        except IntegrityError as exc:
            problems.append(exc)
        except NotFoundError:
            problems.append(IntegrityError(f"objects/{ref.commit}.json: missing, though {kind}/{name} names it; run `syckpt verify`"))
    return found


def brief(commit: Commit) -> dict[str, Any]:
    """Return what tells a commit in a list of refs, for JSON."""
    return {
        "commit": commit.id,
        "step": commit.step,
        "epoch": commit.epoch,
        "metric": commit.metric,
        "message": commit.message,
        "created": commit.created.isoformat(timespec="milliseconds"),
        **{mark: getattr(commit, mark) for mark in ("dropped", "damaged", "preempted")},
    }


def facts(commit: Commit) -> str:
    """Return step, metric, marks and age in a few words."""
    metric = [] if commit.metric is None else [f"metric {output.number(commit.metric)}"]
    return ", ".join([f"step {commit.step}", *metric, *commit.marks, age(commit)])


def lines_of(refs: dict[str, Commit]) -> list[tuple[str, str]]:
    """Return a padded name and a line about its commit, for each ref; cut to the terminal."""
    rows = [[output.printable(name), short_id(commit.id), facts(commit)] for name, commit in refs.items()]
    found = []
    for commit, (name, short, about) in zip(refs.values(), output.aligned(rows), strict=True):
        columns = output.width()
        message = output.printable(commit.message.partition("\n")[0])
        text = output.cut(f"{about}  {message}".rstrip(), None if columns is None else max(0, columns - len(name) - len(short) - 6))
        found.append((name, f"{click.style(short, fg='yellow')}  {text}"))
    return found
