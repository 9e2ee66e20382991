"""Optimizer state by parameter name, and loading it without rounding.

torch numbers parameters by their place in the groups, so the moments of one parameter silently become another's when the order or the
grouping changes. Saved by name, state goes where its parameter is now: `names_of`, then `by_name` to save and `by_index` to load.
torch also casts floating state to the parameter's dtype on load (fp32 moments of bf16 parameters would be rounded): `load_exact`
does not.

State dicts returned here share their tensors with those passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from syckpt.errors import StateError
from syckpt.objects import canonical
from syckpt.state.flatten import flatten
from syckpt.state.wrappers import WRAPPERS

__all__ = ["by_index", "by_name", "by_number", "is_by_name", "load_exact", "names_of"]

# A part called "module" may be the model's own; around a whole model it is known by the wrapper's class.
_INSERTED = WRAPPERS - {"module"}
# These two belong to the live group, whatever the saved one says.
_NOT_HYPER = ("params", "param_names")


def _params(groups: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in groups))


def names_of(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> dict[int, str] | None:
    """Return `id(parameter) -> "item.parameter"` for all that the optimizer updates; None if a module of it is not among `modules`.

    Names do not depend on DistributedDataParallel, DataParallel, FSDP1 or torch.compile around a module; tied ones take the first.
    """
    found: dict[int, str] = {}
    for item, module in modules.items():
        while isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        for name, parameter in module.named_parameters():
            plain = ".".join(part for part in name.split(".") if part not in _INSERTED)
            found.setdefault(id(parameter), f"{item}.{plain}")
    wanted = [id(parameter) for parameter in _params(optimizer.param_groups)]
    names = {key: found[key] for key in wanted if key in found}
    if len(names) < len(set(wanted)) or len(set(names.values())) < len(names):
        return None
    return names


def is_by_name(saved: Mapping[str, Any]) -> bool:
    """Whether a saved state dict counts its parameters by name."""
    return all(isinstance(key, str) for key in _params(saved["param_groups"]))


def by_name(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with parameters named instead of numbered; everything else verbatim."""
    numbers = _params(state_dict["param_groups"])
    name_of = {number: names[id(live)] for number, live in zip(numbers, _params(optimizer.param_groups), strict=True)}
    return {
        **state_dict,
        "state": {name_of.get(key, key): value for key, value in state_dict["state"].items()},
        "param_groups": [{**group, "params": [name_of[key] for key in group["params"]]} for group in state_dict["param_groups"]],
    }


def by_number(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict saved by name as torch numbers parameters: in the order of the saved groups."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(_params(saved["param_groups"])))}
    return {
        **saved,
        "state": {numbers.get(key, key): value for key, value in saved["state"].items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["param_groups"]],
    }


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_HYPER}


def _content(group: Mapping[str, Any]) -> tuple[bytes, list[bytes]]:
    """Everything that tells one group's hyper-parameters from another's, bit for bit."""
    flat = flatten({"group": _hyper(group)})
    arrays = [torch.as_tensor(leaf.array).cpu().contiguous().reshape(-1).view(torch.uint8) for leaf in flat.leaves]
    texts = [
        canonical.dumps([leaf.dtype, list(leaf.shape)]) + array.numpy().tobytes() for leaf, array in zip(flat.leaves, arrays, strict=True)
    ]
    return canonical.dumps(flat.nodes), texts


def by_index(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return a state dict saved by name as the live optimizer numbers its parameters, whatever its order or grouping.

    A live group takes the hyper-parameters of the saved group that its parameters were in.
    Raises: StateError listing every parameter that only one side has, and every live group whose parameters come from saved groups
    with different hyper-parameters.
    """
    groups = saved["param_groups"]
    group_of = {name: index for index, group in enumerate(groups) for name in group["params"]}
    live_names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    flat_names = list(chain.from_iterable(live_names))
    problems = [f"{name}: in the optimizer, not in the commit" for name in flat_names if name not in group_of]
    problems += [f"{name}: in the commit, not in the optimizer" for name in group_of if name not in set(flat_names)]
    if isinstance(optimizer, torch.optim.LBFGS) and not problems and flat_names != list(group_of):
        problems.append(f"LBFGS keeps one flat vector of all parameters: their order must be as saved, {', '.join(group_of)}")

    number_of: dict[str, int] = {}
    for number, name in enumerate(flat_names):
        number_of.setdefault(name, number)
    param_groups = []
    for index, (live, members) in enumerate(zip(optimizer.param_groups, live_names, strict=True)):
        sources = sorted({group_of[name] for name in members if name in group_of})
        if not members and index < len(groups) and not groups[index]["params"]:
            sources = [index]
        if any(_content(groups[source]) != _content(groups[sources[0]]) for source in sources[1:]):
            problems.append(f"group {index}: its parameters come from groups {sources}, whose hyper-parameters differ; split it")
        group = _hyper(groups[sources[0]] if sources else live)
        if "param_names" in live:
            group["param_names"] = live["param_names"]
        param_groups.append({**group, "params": [number_of[name] for name in members]})
    if problems:
        raise StateError("the saved optimizer does not fit this one:\n  " + "\n  ".join(problems))

    state = {number: saved["state"][name] for name, number in number_of.items() if name in saved["state"]}
    state.update({key: value for key, value in saved["state"].items() if key not in number_of})
    return {**saved, "state": state, "param_groups": param_groups}


def _exact(saved: Any, loaded: Any, *, key: Any = None) -> Any:
    """Return what torch made of a saved value, with the bits it had: torch decides devices, the commit dtypes."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        # Fused and capturable optimizers need "step" as torch puts it.
        return loaded if key == "step" or saved.shape != loaded.shape else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {name: _exact(saved[name], value, key=name) if name in saved else value for name, value in loaded.items()}
    if type(saved) is not type(loaded):
        return loaded
    if isinstance(saved, deque):
        return deque(map(_exact, saved, loaded), saved.maxlen)
    if type(saved) in (list, tuple):
        return type(saved)(map(_exact, saved, loaded))
    # torch rebuilds any iterable from its members, which makes the repr of a generator of a string.
    return saved if isinstance(saved, str) else loaded


def load_exact(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Do `optimizer.load_state_dict(state_dict)`, but keep the dtype and bits of every state tensor, on the parameter's device.

    "step" is left as torch places it. Hooks of the optimizer run as usual, and an optimizer with a `load_state_dict` of its own has
    its way. The optimizer owns the tensors of `state_dict` from here on.
    """
    taken: dict[str, Any] = {}

    def before(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        taken.update(state)

    def after(live: torch.optim.Optimizer) -> None:
        numbers = _params(taken["param_groups"])
        for number, parameter in zip(numbers, _params(live.param_groups), strict=True):
            if number in taken["state"] and parameter in live.state:
                live.state[parameter] = _exact(taken["state"][number], live.state[parameter])

    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict(state_dict)
        return
    # Last to see what is loaded, after hooks that rename it; first to see the result, before hooks that change it on purpose.
    handles = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        optimizer.load_state_dict(state_dict)
    finally:
        for handle in handles:
            handle.remove()
