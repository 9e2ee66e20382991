"""Ref records, intents, leases and owners: who moved what, who is about to, who is alive (FORMAT.md, section 9)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from syckpt.objects.checks import Fields

__all__ = ["Intent", "Lease", "Owner", "RefRecord"]


@dataclass(frozen=True)
class RefRecord:
    """One move of a ref. `number` counts from 1; `commit` is None on an empty or deleted branch."""

    ref: str
    number: int
    commit: str | None
    commit_seal: str | None
    previous: str | None
    generation: int
    run: str
    reason: str
    time_ns: int

    @property
    def deleted(self) -> bool:
        """Whether this record ended the ref: until a later one it is as if it had never been."""
        return self.reason == "delete"

    def to_body(self) -> dict[str, Any]:
        return {"kind": "ref", "version": 1, **asdict(self), "time_ns": str(self.time_ns)}

    @staticmethod
    def from_body(body: dict[str, Any], *, where: str) -> RefRecord:
        fields = Fields(body, where=where)
        return RefRecord(
            ref=fields.text("ref"),
            number=fields.integer("number", least=1),
            commit=fields.text_or_none("commit"),
            commit_seal=fields.text_or_none("commit_seal"),
            previous=fields.text_or_none("previous"),
            generation=fields.integer("generation"),
            run=fields.text("run"),
            reason=fields.text("reason"),
            time_ns=fields.nanoseconds("time_ns"),
        )


@dataclass(frozen=True)
class Owner:
    """A process: host, boot, pid namespace, pid and start time (clock ticks since boot), as far as the system tells."""

    host: str
    boot: str
    pidns: str
    pid: int
    start: int

    @staticmethod
    def from_body(body: Any, *, where: str) -> Owner:
        fields = Fields(body, where=where)
        return Owner(fields.text("host"), fields.text("boot"), fields.text("pidns"), fields.integer("pid"), fields.integer("start"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Intent:
    """A save under way: which commit, and which published ones it may point into."""

    commit: str
    branch: str
    generation: int
    run: str
    uses: tuple[str, ...]
    owner: Owner

    def to_body(self) -> dict[str, Any]:
        return {"kind": "intent", "version": 1, **asdict(self), "uses": list(self.uses)}

    @staticmethod
    def from_body(body: dict[str, Any], *, where: str) -> Intent:
        fields = Fields(body, where=where)
        return Intent(
            commit=fields.text("commit"),
            branch=fields.text("branch"),
            generation=fields.integer("generation"),
            run=fields.text("run"),
            uses=tuple(fields.texts("uses")),
            owner=fields.parse("owner", lambda value: Owner.from_body(value, where=where)),
        )


@dataclass(frozen=True)
class Lease:
    """Who writes a branch. `token` is the manager's; `trainer` and `writer` its processes."""

    branch: str
    run: str
    generation: int
    token: str
    trainer: Owner
    writer: Owner | None
    expires_ns: int

    def to_body(self) -> dict[str, Any]:
        return {"kind": "lease", "version": 1, **asdict(self), "expires_ns": str(self.expires_ns)}

    @staticmethod
    def from_body(body: dict[str, Any], *, where: str) -> Lease:
        fields = Fields(body, where=where)
        return Lease(
            branch=fields.text("branch"),
            run=fields.text("run"),
            generation=fields.integer("generation"),
            token=fields.text("token"),
            trainer=fields.parse("trainer", lambda value: Owner.from_body(value, where=where)),
            writer=None if fields.raw("writer") is None else fields.parse("writer", lambda value: Owner.from_body(value, where=where)),
            expires_ns=fields.nanoseconds("expires_ns"),
        )
