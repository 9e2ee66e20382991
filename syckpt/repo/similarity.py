"""Commits whose configurations are near a given one: the question of a sweep, "has something like this been tried, and how did it do?"

Fingerprints are the search: they stand in the commits' ids, so that the nearest are found without reading a commit. Then the records of the
nearest are read, and ordered by the exact similarity of their configurations.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from syckpt.errors import IntegrityError, NotFoundError, StateError
from syckpt.hyperparams.config import HyperConfig
from syckpt.hyperparams.fingerprint import NBITS, fingerprint, similarity
from syckpt.objects.commit import Commit
from syckpt.repo import history
from syckpt.repo.keys import intent_key
from syckpt.repo.repository import Repository

__all__ = ["Similar", "similar"]

_log = logging.getLogger("syckpt")
_POOL = 4
"""How many times `k` configurations are compared exactly: a fingerprint's distance has a standard deviation of up to 2.8 bits."""


@dataclass(frozen=True)
class Similar:
    """A commit, how many of the 32 bits of its fingerprint differ, the similarity that this suggests, and the exact one (1: the same)."""

    commit: Commit
    distance: int
    estimate: float
    similarity: float


def similar(repository: Repository, config: Mapping[str, Any], k: int = 5) -> list[Similar]:
    """Return up to `k` commits whose configurations are the most similar to `config`, most similar first, of equals the newest first.

    A configuration counts once a branch: by its newest commit there, of those that were not dropped where there are any. Candidates
    are the nearest by fingerprint, with all that are equally near, at least four times `k`.
    Raises: StateError for a `k` below 1 or what cannot be a configuration. A record that is damaged is passed over and logged.
    """
    if k < 1:
        raise StateError(f"k={k!r}: expected how many commits to return, at least 1")
    wanted = HyperConfig(config)
    print_of = int(fingerprint(wanted), 16)
    by_distance: dict[int, list[str]] = {}
    for commit in history.commit_ids(repository):
        by_distance.setdefault((int(commit[:8], 16) ^ print_of).bit_count(), []).append(commit)
    found: list[Similar] = []
    for distance in sorted(by_distance):
        nearest = _newest_of_each(_read(repository, by_distance[distance]))
        found += [Similar(commit, distance, 1 - 2 * distance / NBITS, similarity(wanted, commit.config)) for commit in nearest]
        if len(found) >= _POOL * k:
            break
    return sorted(found, key=lambda one: (-one.similarity, one.distance, -one.commit.created_ns))[:k]


def _read(repository: Repository, commits: list[str]) -> Iterator[Commit]:
    under_way = set(repository.store.list("intents/"))
    for commit in commits:
        try:
            if intent_key(commit) not in under_way or history.is_published(repository, commit):
                yield repository.read_commit(commit)
        except NotFoundError:
            continue  # It was collected meanwhile.
        except IntegrityError as exc:
            _log.warning("%s; it is left out of the search", exc)


def _newest_of_each(commits: Iterator[Commit]) -> list[Commit]:
    """Return the newest commit of each branch and configuration, whole ones before dropped ones."""
    newest: dict[tuple[str, str], Commit] = {}
    digests: dict[str, str] = {}
    for commit in commits:
        # A run saves the same configuration thousands of times: its digest is made once.
        try:
            text = repr(commit.config)
            if text not in digests:
                digests[text] = HyperConfig(commit.config).hash()
        except ValueError as exc:  # also StateError
            _log.warning("the configuration of commit %s cannot be compared: %s", commit.id, exc)
            continue
        key = (commit.branch, digests[text])
        best = newest.get(key)
        if best is None or (not commit.dropped, commit.created_ns) > (not best.dropped, best.created_ns):
            newest[key] = commit
    return list(newest.values())
