"""How items are kept, as the caller states it once: specs by item name, and what holds for all saves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from syckpt.checkpoint.paths import refuse_collisions
from syckpt.errors import StateError
from syckpt.objects import ids
from syckpt.reshard.resharder import Resharder
from syckpt.state.formats import check_format, configuration

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.state.formats import SerializationFormat

__all__ = ["Config", "ItemSpec", "LayoutInfo"]

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class LayoutInfo:
    """Under which logical file of a commit's tree an item stands, and in which format; `{rank}` is the only placeholder.

    Presentation only: tensors inside are ordinary entries, stored once, delta-coded and resharded.
    """

    file_path: str
    serialization_format: SerializationFormat

    def __post_init__(self) -> None:
        if not ids.is_file_path(self.file_path):
            raise StateError(
                f"LayoutInfo({self.file_path!r}): expected a relative path of up to 32 parts, none of them empty, '.', '..' or '.syckpt'"
            )
        unknown = set(_PLACEHOLDER.findall(self.file_path)) - {"{rank}"}
        if unknown:
            raise StateError(f"LayoutInfo({self.file_path!r}): {{rank}} is the only placeholder, found {', '.join(sorted(unknown))}")
        check_format(self.serialization_format, where=f"LayoutInfo({self.file_path!r})")


@dataclass(frozen=True)
class ItemSpec:
    """How one item is kept.

    `requires_copy=False`: the value is host memory and stays as it is until the save is durable. That is a promise to other writers than
    this one, which reads a copy in any case: the copy that hands the value to the writer process is the only one, and `save()` returns when
    it is made. `layout`: its logical file (None: the default one). `resharder`: maps it to another world size (None: tensors
    by their boxes). `required=False`: a commit without it, or one that it does not fit, is reported and not an error.
    `on_world_change`: what another number of ranks makes of an object that each rank had for itself: "raise", "mod" (rank r takes that of
    r mod old size), "rank0".
    """

    requires_copy: bool = True
    layout: LayoutInfo | None = None
    resharder: Resharder | None = None
    required: bool = True
    on_world_change: Literal["raise", "mod", "rank0"] | None = None

    def __post_init__(self) -> None:
        if self.on_world_change not in (None, "raise", "mod", "rank0"):
            raise StateError(f"on_world_change={self.on_world_change!r}: expected 'raise', 'mod', 'rank0' or None")
        if self.layout is not None and not isinstance(self.layout, LayoutInfo):
            raise StateError(f"layout={self.layout!r}: expected LayoutInfo(file_path, serialization_format) or None")
        if not (self.resharder is None or isinstance(self.resharder, Resharder)):
            raise StateError(f"resharder={self.resharder!r}: expected an instance of a Resharder such as DTensorResharder(), or None")


@dataclass(frozen=True)
class Config:
    """How commits are stored and read.

    `items`: specs by item name; `default`: that of all others (None: an item that is not listed is an error). `compression`: "fast" or
    "none"; at most `keyframe_every` commits share a keyframe. `read="broadcast"`: values that all ranks need alike are read once and
    broadcast, in whatever all ranks do together (`load`, `goto`, going to another branch, a resume from an older commit; an item that is
    restored when it is registered is read by each rank). `check_replicas="full"`: replicas are compared by all of their bytes, not by a
    sample.
    """

    items: Mapping[str, ItemSpec] = field(default_factory=dict)
    default: ItemSpec | None = field(default_factory=ItemSpec)
    compression: Literal["fast", "none"] = "fast"
    keyframe_every: int = 8
    read: Literal["ranged", "broadcast"] = "ranged"
    check_replicas: Literal["sampled", "full"] = "sampled"
    pre_finalize_callback: Callable[[str], None] | None = None
    """Called with the id of each save in the caller's thread, when all ranks have agreed on it and before its state is copied; what it
    raises gives the save up, on all ranks."""
    finalize_callback: Callable[[Commit], None] | None = None
    """Called with each durable commit, in the caller's thread, when it is next heard of. What it raises is logged, and raised by the next
    `save`, `wait` or `close` (`on_error="warn"`: logged)."""
    on_stats: Callable[[dict[str, Any]], None] | None = None
    """Called with each durable save's figures before `finalize_callback`, in the same way."""

    def __post_init__(self) -> None:
        _one_of("compression", self.compression, ("fast", "none"))
        _one_of("read", self.read, ("ranged", "broadcast"))
        _one_of("check_replicas", self.check_replicas, ("sampled", "full"))
        if type(self.keyframe_every) is not int or self.keyframe_every < 1:
            raise StateError(f"keyframe_every={self.keyframe_every!r}: expected a number of commits, at least 1")
        for name in ("pre_finalize_callback", "finalize_callback", "on_stats"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise StateError(f"{name}={getattr(self, name)!r}: expected a function, or None")
        if not isinstance(self.items, Mapping):
            raise StateError(f"items={self.items!r}: expected a mapping of item names to ItemSpec")
        for name, spec in self.items.items():
            if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
                raise StateError(f"items: {name!r} is not an item's name: letters, digits, - and _ only")
            if not isinstance(spec, ItemSpec):
                raise StateError(f"items[{name!r}]={spec!r}: expected an ItemSpec")
        self.layouts(self.items)
        if self.default is not None and not isinstance(self.default, ItemSpec):
            raise StateError(f"default={self.default!r}: expected an ItemSpec, or None for strict names")

    def spec(self, name: str) -> ItemSpec:
        """Return an item's spec. Raises: StateError for a name that is not listed where `default` is None."""
        found = self.items.get(name, self.default)
        if found is None:
            raise StateError(
                f"item {name!r} is not listed in Config.items and Config.default is None; listed: {', '.join(sorted(self.items)) or 'none'}"
            )
        return found

    def formats(self, names: Iterable[str]) -> dict[str, SerializationFormat]:
        """Return the formats of those items that have a layout, for `flatten`. Raises: StateError for a name that is not listed."""
        layouts = ((name, self.spec(name).layout) for name in names)
        return {name: layout.serialization_format for name, layout in layouts if layout is not None}

    def one_file(self, name: str) -> str | None:
        """Return the path of an item's file where all ranks share one by its layout, else None."""
        layout = self.spec(name).layout
        return None if layout is None or "{rank}" in layout.file_path else layout.file_path

    def layouts(self, names: Iterable[str], *, world_size: int = 1) -> dict[str, list[Any]]:
        """Return how these items are shown, for the manifest.

        Raises: StateError for a name that is not listed, and for two items that would be one file of the commit's tree.
        """
        found: dict[str, list[Any]] = {}
        for name in names:
            layout = self.spec(name).layout
            if layout is not None:
                found[name] = [layout.file_path, layout.serialization_format.name, configuration(layout.serialization_format)]
        refuse_collisions(names, found, world_size=world_size)
        return found


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StateError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
