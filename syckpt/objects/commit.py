"""Commits: one save, small and readable (FORMAT.md, section 9)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from syckpt.errors import IntegrityError
from syckpt.objects import ids, nodes
from syckpt.objects.checks import Fields

__all__ = ["Commit"]


@dataclass(frozen=True)
class Commit:
    """One save.

    `epoch` and `batch_idx` are the counters at the save; `epoch_done` says whether that epoch counts as finished, so that a
    resume goes on with `epoch + 1`; `entered`: whether iterating the epoch had begun, so that the random streams belong behind the
    making of a DataLoader's iterator. `stats` are the save's figures (bytes and seconds). `seal` is the digest of the commit's own
    document; `parent_seals` and `manifests` bind what it stands on. `dropped`, `damaged` and `preempted` are marks beside it.
    """

    id: str
    parents: tuple[str, ...]
    branch: str
    step: int
    epoch: int
    batch_idx: int
    epoch_done: bool
    entered: bool
    metric: float | None
    message: str
    config: dict[str, Any] = field(hash=False)
    created_ns: int
    world_size: int
    tags: tuple[str, ...]
    name: str | None
    fingerprint: str
    writer: str
    run_id: str
    generation: int
    sequence: int
    rng_exact: bool
    stats: dict[str, Any] = field(hash=False)
    parent_seals: tuple[str, ...] = field(repr=False)
    manifests: tuple[tuple[int, str], ...] = field(repr=False)
    seal: str = field(default="", repr=False)
    dropped: bool = False
    damaged: bool = False
    preempted: bool = False
    layouts: str | None = field(default=None, repr=False)
    """The seal of the table of layouts, if it has one."""

    @property
    def created(self) -> datetime:
        """When the commit was made, UTC."""
        return datetime.fromtimestamp(self.created_ns / 1e9, tz=timezone.utc)

    def __str__(self) -> str:
        return self.id

    @property
    def marks(self) -> list[str]:
        """The marks that stand beside it, by name."""
        return [name for name in ("dropped", "damaged", "preempted") if getattr(self, name)]

    def marked(self, marks: set[str]) -> Commit:
        """Return the commit with the marks that stand beside it."""
        return replace(self, dropped="dropped" in marks, damaged="damaged" in marks, preempted="preempted" in marks)

    def to_body(self) -> dict[str, Any]:
        return {
            "kind": "commit",
            "version": 1,
            "id": self.id,
            "parents": [list(pair) for pair in zip(self.parents, self.parent_seals, strict=True)],
            "manifests": [list(pair) for pair in self.manifests],
            "world_size": self.world_size,
            "branch": self.branch,
            "name": self.name,
            "step": self.step,
            "epoch": self.epoch,
            "batch_idx": self.batch_idx,
            "epoch_done": self.epoch_done,
            "entered": self.entered,
            "metric": nodes.encode(self.metric),
            "message": self.message,
            "tags": list(self.tags),
            "config": nodes.encode(self.config),
            "fingerprint": self.fingerprint,
            "created_ns": str(self.created_ns),
            "writer": self.writer,
            "run": [self.run_id, self.generation, self.sequence],
            "rng_exact": self.rng_exact,
            "stats": self.stats,
            **({} if self.layouts is None else {"layouts": self.layouts}),
        }

    @staticmethod
    def from_body(body: dict[str, Any], *, seal: str, where: str) -> Commit:
        """Read a commit's body. Raises: IntegrityError."""
        fields = Fields(body, where=where)
        parents = fields.parse("parents", lambda rows: [_parent(*row) for row in rows])
        run_id, generation, sequence = fields.parse("run", lambda row: (str(row[0]), int(row[1]), int(row[2])))
        config = _value(fields, "config")
        metric = _value(fields, "metric")
        if not isinstance(config, dict) or not (metric is None or isinstance(metric, float)):
            fields.fail("config is not a mapping or metric not a float")
        return Commit(
            id=fields.text("id"),
            parents=tuple(parent for parent, _ in parents),
            parent_seals=tuple(mark for _, mark in parents),
            manifests=fields.parse("manifests", lambda rows: _manifests(rows, fields.integer("world_size", least=1))),
            world_size=fields.integer("world_size", least=1),
            branch=fields.text("branch"),
            name=fields.text_or_none("name"),
            step=fields.integer("step"),
            epoch=fields.integer("epoch"),
            batch_idx=fields.integer("batch_idx"),
            epoch_done=fields.boolean("epoch_done"),
            entered=fields.boolean("entered"),
            metric=metric,
            message=fields.text("message"),
            tags=tuple(fields.texts("tags")),
            config=config,
            fingerprint=fields.text("fingerprint"),
            created_ns=fields.nanoseconds("created_ns"),
            writer=fields.text("writer"),
            run_id=run_id,
            generation=generation,
            sequence=sequence,
            rng_exact=fields.boolean("rng_exact"),
            stats=fields.mapping("stats"),
            seal=seal,
            layouts=fields.text("layouts") if "layouts" in body else None,
        )


def _manifests(rows: Any, world_size: int) -> tuple[tuple[int, str], ...]:
    found = tuple((rank, mark) for rank, mark in rows)
    # Each rank once: a list of a million equal ones would be read a million times.
    if len(found) != world_size or any(type(rank) is not int or rank != index for index, (rank, _) in enumerate(found)):
        raise ValueError(f"they are not those of ranks 0 to {world_size - 1}")
    if not all(isinstance(mark, str) for _, mark in found):
        raise ValueError("a seal is not a text")
    return found


def _value(fields: Fields, name: str) -> Any:
    try:
        return nodes.decode(fields.raw(name))
    except IntegrityError as exc:
        raise IntegrityError(f"{fields.where}: field {name!r}: {exc}") from exc


def _parent(commit: Any, mark: Any) -> tuple[str, str]:
    if not isinstance(commit, str) or not ids.is_commit_id(commit) or not isinstance(mark, str):
        raise ValueError(f"{commit!r} is not a commit")
    return commit, mark
