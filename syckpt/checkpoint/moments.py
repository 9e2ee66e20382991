"""Optimizer state that does not exist yet: what it is read into, so that it comes in the layout of its parameters.

A fresh optimizer has no state to fill. For each tensor of a saved state that has the shape of its sharded parameter, the template gets an
empty one in the parameter's layout; everything else of the state is read as new, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from syckpt.checkpoint.source import Source
from syckpt.objects import nodes
from syckpt.reshard.resharder import leaves_of
from syckpt.reshard.tensors import is_dtensor
from syckpt.state.fit import matching
from syckpt.state.wrappers import unwrapped

__all__ = ["empty_state", "filled_up", "of_parameters", "of_targets"]

Parameters: TypeAlias = Callable[[Any, tuple[int, ...]], "torch.Tensor | None"]
"""Tells by the key of a state, and the shape of a tensor in it, the sharded parameter that it belongs to."""


def of_parameters(parameters: Mapping[Any, torch.Tensor]) -> Parameters:
    """Return how to tell where parameters are known by the keys of the state."""

    def find(key: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
        found = parameters.get(key)
        return found if found is not None and is_dtensor(found) and tuple(found.shape) == shape else None

    return find


def of_targets(into: Mapping[str, Any]) -> Parameters:
    """Return how to tell where only targets of a load are known, not the optimizer: by `item.parameter`, else by shape.

    By shape only where all tensors of that shape have one layout: numbers do not say which parameter is meant.
    """
    by_name: dict[str, torch.Tensor] = {}
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for item, target in into.items():
        if not _is_optimizer_state(target):
            for path, leaf in leaves_of(target, (item,)):
                if isinstance(leaf, torch.Tensor):
                    by_name[unwrapped(".".join(map(str, path)))] = leaf
                    by_shape.setdefault(tuple(leaf.shape), []).append(leaf)

    def find(key: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
        named = by_name.get(unwrapped(key)) if isinstance(key, str) else None
        found = [named] if named is not None else by_shape.get(shape, [])
        alike = {(leaf.device_mesh, leaf.placements) if is_dtensor(leaf) else None for leaf in found}
        return found[0] if len(alike) == 1 and None not in alike and tuple(found[0].shape) == shape else None

    return find


def empty_state(
    source: Source, name: str, parameters: Parameters, *, partial: Sequence[str] | None = None
) -> dict[Any, dict[str, torch.Tensor]]:
    """Return empty tensors, by key and name, for those of a commit's optimizer state that belong to sharded parameters."""
    wanted = None if partial is None else matching(partial)
    state: dict[Any, dict[str, torch.Tensor]] = {}
    for path, leaf in nodes.walk(source.node(name), (name,)):
        if len(path) != 4 or path[1] != "state" or isinstance(path[2], dict) or not (isinstance(leaf, dict) and "tensor" in leaf):
            continue
        stored = source.entries[leaf["tensor"]]
        parameter = parameters(path[2], stored.shape)
        # What is not going to be filled must not be there.
        if parameter is not None and not stored.is_local and (wanted is None or wanted(nodes.format_path(path))):
            with torch.no_grad():
                state.setdefault(path[2], {})[str(path[3])] = torch.empty_like(parameter, dtype=getattr(torch, stored.dtype))
    return state


def filled_up(source: Source, name: str, template: Any, parameters: Parameters, *, partial: Sequence[str] | None = None) -> Any:
    """Return an optimizer's state dict with empty tensors in the place of state that it has not yet; anything else as it is."""
    if not _is_optimizer_state(template) or name not in source.names:
        return template
    made = empty_state(source, name, parameters, partial=partial)
    if not made:
        return template
    there = template["state"]
    return {**template, "state": {**there, **{key: {**tensors, **there.get(key, {})} for key, tensors in made.items()}}}


def _is_optimizer_state(target: Any) -> bool:
    return isinstance(target, Mapping) and isinstance(target.get("state"), Mapping) and "param_groups" in target
