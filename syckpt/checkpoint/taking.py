"""What the ranks of a job take of a commit between them: which structure each sees of an item, and what it leaves to others.

A rank whose target has more than its own rank saved (a stage that was cut anew) sees what all ranks saved together. A path of the commit
that a rank has no use for is no error there as long as another rank takes it: ranks tell what they leave, and then which of all that they
take, which is asked only where any leaves something. What no rank takes is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from syckpt.checkpoint.source import Source, prefixes
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import CoordinationError, StateError
from syckpt.objects import nodes
from syckpt.objects.nodes import Node, format_path
from syckpt.reshard.merge import named_parameters, without_parameters
from syckpt.state.fit import fit

__all__ = ["Taking", "agree_on_taking", "names_in", "refuse_other_items", "refuse_untaken", "suit", "suit_parameters"]

_SHOWN = 20


def suit(source: Source, name: str, target: Callable[[], Any]) -> None:
    """See an item as a target of this rank needs it: what its own rank saved if that has all of it, else what all ranks saved together.

    `target` is only called for an item in which ranks differ.
    """
    if not source.can_unite(name):
        return
    template = target()

    def missing(node: Node) -> set[str]:
        return set(fit(node, template, path=(name,), entries=source.entries).missing)

    lacking = missing(source.node(name))
    if lacking:
        source.unite(name, lambda node: not lacking <= missing(node))


def suit_parameters(source: Source, name: str, names: Iterable[str]) -> list[str]:
    """Do as `suit` for an optimizer whose parameters have these names, and leave those of others to the other ranks.

    Returns the paths that are left; none where there are no other ranks.
    """
    wanted = set(names)
    saved = set(named_parameters(source.node(name)) or ())
    if not wanted <= saved and source.can_unite(name):
        source.unite(name, lambda node: not wanted.isdisjoint(set(named_parameters(node) or ()) - saved))
        saved = set(named_parameters(source.node(name)) or ())
    others = saved - wanted
    if not others or wanted.isdisjoint(saved) or not source.has_others:
        return []
    source.show(name, without_parameters(source.node(name), others))
    return sorted(format_path((name, "state", other)) for other in others)


def names_in(state: Any) -> list[str] | None:
    """Return the parameters of an optimizer's state dict that counts them by name; None for anything else."""
    if not isinstance(state, Mapping) or not isinstance(state.get("param_groups"), list | tuple):
        return None
    names = [name for group in state["param_groups"] if isinstance(group, Mapping) for name in group.get("params", ())]
    return names if names and all(isinstance(name, str) for name in names) else None


class Taking:
    """What one rank takes of a commit. `left`: paths, as texts, that it has no use for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._left: dict[str, list[str]] = {}
        self.commit = source.commit.id

    def add(self, name: str, left: Iterable[str]) -> None:
        """This rank takes an item, but for what is left."""
        self._left[name] = list(left)

    def drop(self, name: str) -> None:
        """This rank does not take an item, after all."""
        self._left.pop(name, None)

    @property
    def left(self) -> list[str]:
        return sorted(path for paths in self._left.values() for path in paths)

    def takes(self, paths: Sequence[str]) -> str:
        """Return, as hexadecimal bits of which the lowest is that of the first path, which of them this rank takes at least a part of."""
        taken: set[str] = set()
        for name, left in self._left.items():
            node, others = self._source.node(name), set(left)
            # A parameter that an optimizer has may have no state as yet.
            kept = [(name, "state", parameter) for parameter in named_parameters(node) or ()]
            for path in [*kept, *(path for path, _ in nodes.walk(node, (name,)))]:
                texts = prefixes(path)
                if others.isdisjoint(texts):
                    taken.update(texts)
        return f"{sum(1 << number for number, path in enumerate(paths) if path in taken):x}"


def agree_on_taking(
    coordinator: Coordinator,
    call: str,
    taking: Taking | None,
    items: Sequence[str],
    *,
    strict: bool = True,
    error: BaseException | None = None,
    at: str,
) -> None:
    """The agreement that follows a check of all ranks. `items`: the names of those that this rank has; `error` is what it failed with.

    Not `strict`: what no rank takes is no error. Collective. Raises: as `Coordinator.agree`, `refuse_other_items`, `refuse_untaken`.
    """

    def decide(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        refuse_other_items([value["items"] for value in values])
        return {"left": united(value["left"] for value in values)}

    mine = {"items": list(items), "left": taking.left if taking is not None and strict else []}
    left = coordinator.agree(call, mine, decide, error=error, at=at)["left"]
    if left:
        assert taking is not None
        refuse_untaken(coordinator, call, taking, left, at=at)


def united(told: Iterable[Sequence[str]]) -> list[str]:
    """Return what any rank leaves, in order."""
    return sorted(set().union(*told))


def refuse_untaken(coordinator: Coordinator, call: str, taking: Taking, left: Sequence[str], *, at: str) -> None:
    """Let all ranks say which of these paths they take. Collective. Raises: StateError on all of them for those that none takes."""

    def decide(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        taken = 0
        for value in values:
            taken |= int(value["taken"], 16)
        untaken = [path for number, path in enumerate(left) if not taken >> number & 1]
        if untaken:
            raise StateError(
                f"commit {taking.commit} does not fit this job: {len(untaken)} unexpected in the commit, which no rank has a use for:"
                f" {_some(untaken)}. ckpt.load(rev, into=..., strict=False) takes what fits; a manager with auto_resume=False starts afresh"
            )
        return {}

    error: Exception | None = None
    bits = ""
    try:
        bits = taking.takes(left)
    except Exception as exc:  # noqa: BLE001 - the others hear of it
        error = exc
    coordinator.agree(call, {"taken": bits}, decide, error=error, at=f"{at}, what is left to others" if at else "what is left to others")


def refuse_other_items(items: Sequence[Sequence[str]]) -> None:
    """Check that all ranks have items of the same names, given those of rank 0, 1 and so on. Raises: CoordinationError."""
    if len(set(map(tuple, items))) <= 1:
        return
    having = [set(names) for names in items]
    lacking = {name: [rank for rank, names in enumerate(having) if name not in names] for name in sorted(set().union(*having))}
    told = [f"{name!r} is not on rank(s) {_some(list(map(str, ranks)))}" for name, ranks in lacking.items() if ranks]
    raise CoordinationError(
        f"items have to have the same names on all {len(items)} ranks: {_some(told)}. Register the item, or pass it, on all of them;"
        " where a rank has nothing for it, it may be empty there, such as {}"
    )


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
