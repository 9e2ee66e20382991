"""Managers without a root: a checkpoint is a path `DIR/NAME`, the commit named `NAME` of the repository `DIR/.syckpt`.

Each directory gets a manager of its own when it is first saved to or loaded from. There is no run to go on with: nothing is resumed, and
loops, counters and branches belong to managers that have a root.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from syckpt.checkpoint.items import Items
from syckpt.checkpoint.keys import Keys
from syckpt.checkpoint.leaving import leave
from syckpt.checkpoint.loader import LoadReport
from syckpt.checkpoint.manager import CheckpointManager
from syckpt.checkpoint.saver import PendingCommit
from syckpt.checkpoint.specs import Config
from syckpt.dist.coordinator import Coordinator, Decide, Value, connect
from syckpt.errors import StateError
from syckpt.hyperparams.config import HyperConfig
from syckpt.objects import ids
from syckpt.repo.repository import Repository
from syckpt.repo.verify import VerifyReport
from syckpt.stores.base import REPOSITORY, parse_root

__all__ = ["PathManager"]

_ARGUMENTS = frozenset(
    {"max_to_keep", "keep", "maximize", "async_save", "when_busy", "on_error", "rng", "coordinator", "timeout_s", "signer", "trusted_keys"}
)
_OFFERED = ("save", "load", "wait", "close", "prewarm", "verify", "register", "unregister", "config", "hash", "last_report")


class _Within(Coordinator):
    """A coordinator that all managers of a job share: ranks that turn to different directories meet, and are told."""

    def __init__(self, shared: Coordinator, folder: str) -> None:
        self.rank, self.world_size = shared.rank, shared.world_size
        self._shared = shared
        self._folder = folder

    @property
    def agreements(self) -> int:  # type: ignore[override]
        return self._shared.agreements

    def agree(
        self, topic: str, mine: Value, decide: Decide, *, error: BaseException | None = None, at: str = "", timeout_s: float | None = None
    ) -> Value:
        return self._shared.agree(f"{topic} in {self._folder}", mine, decide, error=error, at=at, timeout_s=timeout_s)

    def close(self) -> None:
        self._shared.close()


class PathManager(CheckpointManager):
    """What `CheckpointManager(config)` makes: saves to, and loads from, paths `DIR/NAME`."""

    def __init__(self, root: Config | None = None, config: Config | None = None, **arguments: Any) -> None:
        if root is not None and config is not None:
            raise StateError("CheckpointManager(config, config): give the Config once")
        settled = config if root is None else root
        if settled is not None and not isinstance(settled, Config):
            raise StateError(f"config={settled!r}: expected a CheckpointManager.Config")
        unknown = sorted(arguments.keys() - _ARGUMENTS)
        if unknown:
            raise StateError(f"{', '.join(unknown)}: only for a manager of one experiment; give it root=, the experiment's directory")
        self._config = settled or Config()
        self._arguments = arguments
        self._coordinator = arguments.get("coordinator") or connect(timeout_s=arguments.get("timeout_s", 600))
        if (unreadable := Keys.read(arguments.get("signer"), arguments.get("trusted_keys"), rank=self._coordinator.rank).error) is not None:
            raise unreadable
        self._items = Items(self._config)
        self._hyper: HyperConfig | None = None
        self._managers: dict[str, CheckpointManager] = {}
        self._newest: CheckpointManager | None = None
        self._reported: CheckpointManager | None = None
        self._closed = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in _OFFERED and name in vars(CheckpointManager) and name != "Config":
            raise StateError(f"{name} belongs to one experiment: make the manager with root=, the experiment's directory")
        return super().__getattribute__(name)

    def register(self, name: str, obj: Any) -> None:
        """Make an object or value part of every commit that is saved without a payload. Raises: StateError."""
        if isinstance(name, str) and hasattr(CheckpointManager, name):
            raise StateError(f"{name!r} is a name of CheckpointManager itself; register the item under another one")
        self._items.put(name, obj)
        for manager in self._managers.values():
            manager.register(name, obj)

    def unregister(self, name: str) -> None:
        """Leave an item out of later commits. Raises: StateError."""
        self._items.remove(name)
        for manager in self._managers.values():
            manager.unregister(name)

    @property
    def config(self) -> HyperConfig:
        """Hyper-parameters that every commit records; assign a mapping."""
        if self._hyper is None:
            self._hyper = HyperConfig({})
        return self._hyper

    def _set_config(self, value: Any) -> None:
        self._hyper = value if isinstance(value, HyperConfig) else HyperConfig(value)
        for manager in self._managers.values():
            manager._set_config(self._hyper)

    def save(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        payload: Mapping[str, Any] | None = None,
        *,
        metric: Any = None,
        message: str = "",
        tags: Sequence[str] = (),
        epoch_end: bool | None = None,
        wait: bool = False,
    ) -> PendingCommit | None:
        """Commit `payload`, or the registered items, as `DIR/NAME`. See `CheckpointManager.save`."""
        self._require_open()
        folder, name = _split(checkpoint_id, call="save()")
        self._newest = manager = self._manager(folder)
        return manager.save(name, payload, metric=metric, message=message, tags=tags, epoch_end=epoch_end, wait=wait)

    def load(
        self,
        rev: str | os.PathLike[str] = "HEAD",
        into: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        partial: Sequence[str] | None = None,
        map_location: Any = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Read the commit `DIR/NAME` (NAME may be any revision). See `CheckpointManager.load`."""
        self._require_open()
        folder, name = _split(rev, call="load()")
        self._reported = manager = self._existing(folder)
        return manager.load(name, into, strict=strict, cast=cast, partial=partial, map_location=map_location, dry_run=dry_run)

    def verify(self, rev: str | os.PathLike[str] = "HEAD") -> VerifyReport:
        """Read and check every byte of the commit `DIR/NAME`."""
        folder, name = _split(rev, call="verify()")
        return self._existing(folder).verify(name)

    def prewarm(self, payload: Mapping[str, Any] | None = None) -> None:
        """Nothing can be made ready before the first directory is known. Raises: StateError before the first `save`."""
        if self._newest is None:
            raise StateError("prewarm() needs to know the directory: save to it first, or make the manager with root=")
        self._newest.prewarm(payload)

    @property
    def hash(self) -> str | None:
        """Id of the newest save; None before the first one."""
        return None if self._newest is None else self._newest.hash

    @property
    def last_report(self) -> LoadReport:
        """What the last load did and did not do."""
        return LoadReport() if self._reported is None else self._reported.last_report

    def wait(self) -> None:
        """Wait until every save is durable. Raises: what one of them failed with."""
        for manager in self._managers.values():
            manager.wait()

    def close(self) -> None:
        """Wait for the saves in hand and end the writers. Raises: what a save failed with."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._coordinator.close)
            for manager in self._managers.values():
                stack.callback(manager.close)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave(kind, close=self.close)

    def _manager(self, folder: str) -> CheckpointManager:
        """Return the manager of a directory, made when it is first asked for. Collective."""
        manager = self._managers.get(folder)
        if manager is None:
            told = self._arguments | {"coordinator": _Within(self._coordinator, folder)}
            manager = CheckpointManager(folder, self._config, auto_resume=False, save_on_exit=False, **told)
            manager._follow_any_tip()
            for name in self._items.names():
                manager.register(name, self._items[name])
            if self._hyper is not None:
                manager._set_config(self._hyper)
            self._managers[folder] = manager
        return manager

    def _existing(self, folder: str) -> CheckpointManager:
        """Return the manager of a directory that holds a repository: reading makes none. Raises: NotFoundError."""

        def decide(_: object) -> dict[str, Any]:
            Repository.open(parse_root(folder))
            return {}

        if folder not in self._managers:
            self._coordinator.agree("load()", {}, decide, at=folder)
        return self._manager(folder)


def _split(path: str | os.PathLike[str] | None, *, call: str) -> tuple[str, str]:
    """Return directory and commit name of `DIR/NAME`. Raises: StateError."""
    if path is None:
        raise StateError(f"{call} needs a checkpoint_id, a path DIR/NAME, since this manager has no root=")
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    # As with a `Path`, a slash at the end means nothing.
    folder, name = os.path.split(text.rstrip("/")) if isinstance(text, str) else ("", "")
    if name in ("", ".", ".."):
        raise StateError(f"{call}: {text!r} is not a path DIR/NAME")
    base = name if call != "save()" else ids.check_name(name, what="commit")
    # One directory, one manager, by whatever links it is reached, and with or without the repository's own name behind it.
    found = os.path.realpath(folder or ".")
    found = os.path.dirname(found) if os.path.basename(found) == REPOSITORY else found
    if REPOSITORY in found.split("/"):
        raise StateError(f"{call}: {text!r} is inside of a repository, whose files are its own: name a directory outside of {REPOSITORY}")
    return found, base
