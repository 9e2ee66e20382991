"""Registered items: what a script holds, how it is captured, and how a commit's state goes back into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from syckpt.checkpoint.loader import read
from syckpt.checkpoint.source import Source
from syckpt.dataloader import StatefulSampler
from syckpt.errors import StateError
from syckpt.objects import ids, nodes
from syckpt.objects.nodes import Node
from syckpt.state import optimizer as by_parameter
from syckpt.state.flatten import is_sharded

__all__ = ["Items"]


def is_stateful(value: Any) -> bool:
    """Whether an object speaks `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_named(node: Node) -> bool:
    """Whether a saved optimizer's state is keyed by parameter name: then its groups list texts."""
    try:
        (groups,) = (value for key, value in node["dict"] if key == "param_groups")
        names = [name for group in groups["list"] for key, value in group["dict"] if key == "params" for name in value["list"]]
        return bool(names) and all(isinstance(name, str) for name in names)
    except (KeyError, ValueError, TypeError):
        return False


def _read(source: Source, into: Mapping[str, Any]) -> dict[str, Any]:
    return read(source, into)[0]


def _refuse_mixture(name: str, source: Source) -> None:
    """An object's state that ranks had each for themselves means nothing on another number of ranks; plain values are taken by rank."""
    mine = [path for path in source.per_rank if path == name or path.startswith(f"{name}/")]
    if mine:
        raise StateError(
            f"item {name!r} differed between the {source.commit.world_size} ranks that saved it ({', '.join(mine[:5])}), and this job has"
            " another number of ranks: nothing says which of them belongs here. Resume on as many ranks, or leave the item out"
        )


def _refuse_other_kind(name: str, item: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Another algorithm's state would be taken, and fail at the first step. A newer torch only adds hyper-parameters."""
    known = {key for group in saved["param_groups"] for key in group} - {"params", "initial_lr"}
    live = {key for group in item.param_groups for key in group} - {"params", "initial_lr"}
    if known - live and live - known:
        raise StateError(
            f"item {name!r} is a {type(item).__name__} with {', '.join(sorted(live - known))}; the commit's optimizer has"
            f" {', '.join(sorted(known - live))} instead: it is of another kind. Use that one, or register this one under another name"
        )


class Items:
    """The registered objects and values, by name."""

    def __init__(self) -> None:
        self._items: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def names(self) -> list[str]:
        """Names in order of registration."""
        return list(self._items)

    def put(self, name: str, value: Any) -> None:
        """Register or re-assign. Raises: StateError for a name that cannot be an item's."""
        self._items[ids.check_item_name(name)] = value

    def remove(self, name: str) -> None:
        """Forget an item. Raises: StateError."""
        if name not in self._items:
            raise StateError(f"no item {name!r} is registered; registered: {', '.join(self._items) or 'none'}")
        del self._items[name]

    @property
    def sampler(self) -> StatefulSampler | None:
        """The registered sampler, whose position follows the steps; the first one, if there are several."""
        return next((item for item in self._items.values() if isinstance(item, StatefulSampler)), None)

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {name: item for name, item in self._items.items() if isinstance(item, torch.nn.Module)}

    def capture(self) -> dict[str, Any]:
        """Return every item's state; tensors are the live ones. An exception of an item's `state_dict` is the caller's."""
        return {name: self._state(item) for name, item in self._items.items()}

    def _state(self, item: Any) -> Any:
        if not is_stateful(item):
            return item
        state = item.state_dict()
        if isinstance(item, torch.optim.Optimizer):
            names = by_parameter.names_of(item, self._modules())
            if names is not None:
                return by_parameter.by_name(state, item, names)
        return state

    def needs_modules(self, name: str, node: Node) -> bool:
        """Whether an optimizer must wait until the modules of its parameters are registered: its state was saved by their names."""
        item = self._items[name]
        return isinstance(item, torch.optim.Optimizer) and _is_named(node) and by_parameter.names_of(item, self._modules()) is None

    def restore(self, name: str, source: Source) -> None:
        """Bring an item to its state in a commit: tensors in place, the rest through `load_state_dict`; a plain value is replaced.

        Raises: StateError listing everything that does not fit, before anything is touched; IntegrityError.
        """
        item = self._items[name]
        if is_stateful(item):
            _refuse_mixture(name, source)
        if isinstance(item, torch.optim.Optimizer):
            self._restore_optimizer(name, item, source)
        elif isinstance(item, torch.nn.Module):
            item.load_state_dict(_read(source, {name: item.state_dict()})[name])
        elif is_stateful(item):
            # In place where the structure is the same, so that tensors stay on their devices. Where it has grown (a history, a buffer),
            # the object itself decides what it takes.
            template = item.state_dict()
            item.load_state_dict(_read(source, {name: template if source.fits(name, template) else None})[name])
        elif isinstance(item, torch.Generator):
            item.set_state(_read(source, {name: None})[name].get_state())
        elif isinstance(item, np.random.Generator):
            item.bit_generator.state = _read(source, {name: None})[name].bit_generator.state
        elif isinstance(item, np.random.RandomState):
            item.set_state(_read(source, {name: None})[name].get_state(legacy=False))
        elif isinstance(item, torch.Tensor | np.ndarray):
            self._items[name] = _read(source, {name: item})[name]
        else:
            self._items[name] = _read(source, {name: None})[name]

    def _restore_optimizer(self, name: str, item: torch.optim.Optimizer, source: Source) -> None:
        # Read afresh: the optimizer adopts the tensors, and most of its state does not exist yet. What belongs to a sharded parameter is
        # read in its layout.
        saved = _read(source, {name: self._sharded_state(source, name, item)})[name]
        _refuse_other_kind(name, item, saved)
        if not _is_named(source.node(name)):
            by_parameter.load_exact(item, saved)
            return
        names = by_parameter.names_of(item, self._modules())
        if names is None:
            raise StateError(
                f"item {name!r}: its state was saved by parameter name, but the module that holds its parameters is not registered:"
                f" register the model too (registered: {', '.join(self._items)})"
            )
        by_parameter.load_exact(item, by_parameter.by_index(saved, item, names))

    def _sharded_state(self, source: Source, name: str, item: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Return a template that holds, for each state tensor shaped like its sharded parameter, an empty one of the parameter's layout."""
        params = [param for group in item.param_groups for param in group["params"]]
        if not any(is_sharded(param) for param in params):
            return None
        node = source.node(name)
        names = by_parameter.names_of(item, self._modules()) if _is_named(node) else None
        keys = {(names[id(param)] if names else number): param for number, param in enumerate(params) if is_sharded(param)}
        state: dict[Any, dict[str, Any]] = {}
        for path, leaf in nodes.walk(node, (name,)):
            if len(path) == 4 and path[1] == "state" and isinstance(leaf, dict) and "tensor" in leaf and not isinstance(path[2], dict):
                param, stored = keys.get(path[2]), source.entries[leaf["tensor"]]
                if param is not None and tuple(param.shape) == stored.shape:
                    with torch.no_grad():
                        state.setdefault(path[2], {})[str(path[3])] = torch.empty_like(param, dtype=getattr(torch, stored.dtype))
        return {"state": state, "param_groups": None}

    def template(self, name: str, live: Any) -> Any:
        """Return the form in which a live optimizer state dict of the caller's is stored: by parameter name, where that is known."""
        item = self._items.get(name)
        if isinstance(item, torch.optim.Optimizer) and isinstance(live, Mapping) and "param_groups" in live:
            names = by_parameter.names_of(item, self._modules())
            if names is not None:
                return by_parameter.by_name(dict(live), item, names)
        return live

    def untemplate(self, name: str, loaded: Any) -> Any:
        """Invert `template` for what was loaded."""
        item = self._items.get(name)
        if isinstance(item, torch.optim.Optimizer) and isinstance(loaded, Mapping) and "param_groups" in loaded:
            names = by_parameter.names_of(item, self._modules())
            if names is not None:
                return by_parameter.by_index(dict(loaded), item, names)
        return loaded
