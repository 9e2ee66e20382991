"""Registered items: what a script holds, how it is captured, and how a commit's state goes back into it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from syckpt.checkpoint.loader import Fetch, LoadReport, read
from syckpt.checkpoint.moments import Parameters, empty_state, filled_up, of_parameters, of_targets
from syckpt.checkpoint.resharding import Resharded, prepare, settle
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.specs import Config
from syckpt.dataloader import StatefulSampler
from syckpt.errors import StateError
from syckpt.objects import ids
from syckpt.objects.nodes import Node
from syckpt.reshard.merge import named_parameters, without_parameters
from syckpt.reshard.resharder import is_custom
from syckpt.state import optimizer as by_parameter
from syckpt.state.flatten import is_sharded, refuse_tensor, tie_key
from syckpt.state.shards import is_flat_shard

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


def _with_parameters(state: Any, module: torch.nn.Module) -> Any:
    """Return a module's state with the parameters that are trained in place of their detached views: so they can be told from the rest."""
    if not isinstance(state, dict):
        return state
    shown = copy.copy(state)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(name)
        # A module may show other tensors under these names.
        if parameter.requires_grad and isinstance(value, torch.Tensor) and _is_same_memory(value, parameter):
            shown[name] = parameter
    return shown


def _template(module: torch.nn.Module) -> Any:
    """Return a module's state as what is filled; a lazy one makes its parameters from what it loads."""
    state = module.state_dict()
    lazy = [key for key, value in state.items() if is_lazy(value)]
    return {**state, **dict.fromkeys(lazy)} if lazy else state


def _is_same_memory(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    if type(value) is torch.Tensor and type(parameter) is torch.nn.Parameter and value.layout is torch.strided:
        # What `tie_key` compares, at a third of its cost: this is in the way of every save.
        return (value.data_ptr(), value.shape, value.stride(), value.dtype) == (
            parameter.data_ptr(),
            parameter.shape,
            parameter.stride(),
            parameter.dtype,
        )
    return refuse_tensor(value) is None and refuse_tensor(parameter) is None and tie_key(value) == tie_key(parameter)


def _read(
    source: Source,
    name: str,
    live: Any,
    *,
    report: LoadReport | None = None,
    as_saved: bool = False,
    done: Resharded | None = None,
    fetch: Fetch | None = None,
) -> Any:
    """Return an item's value, read into `live`, or (`as_saved`) as new: then `live` shows its types."""
    return read(source, {name: live}, as_saved=as_saved, report=report, done={name: done}, fetch=fetch)[0][name]


def _refuse_flat_shards(item: torch.optim.Optimizer) -> None:
    """What FSDP1's optimizers hold are pieces of flat parameters, which have no meaning on another number of ranks, or apart."""
    if any(is_flat_shard(parameter) for group in item.param_groups for parameter in group["params"]):
        raise StateError(
            f"this {type(item).__name__} updates the flat parameters of an FSDP1 model (FullyShardedDataParallel): its own state is pieces"
            " of them. Register an object whose state_dict() returns FSDP.optim_state_dict(model, optimizer) and whose load_state_dict()"
            " passes FSDP.optim_state_dict_to_load(model, optimizer, state) to the optimizer; or shard with fully_shard (FSDP2)"
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

    def __init__(self, config: Config | None = None) -> None:
        self._items: dict[str, Any] = {}
        self.config = config or Config()
        """How each item is kept."""

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def names(self) -> list[str]:
        """Names in order of registration."""
        return list(self._items)

    def put(self, name: str, value: Any) -> None:
        """Register or re-assign. Raises: StateError for a name that cannot be an item's, or is not listed where it has to be."""
        self.config.spec(ids.check_item_name(name))
        self._items[name] = value

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

    def capture_payload(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a save that is given its state. Raises: StateError as `put`."""
        for name in payload:
            self.config.spec(ids.check_item_name(name))
        return dict(payload)

    def _state(self, item: Any) -> Any:
        if not is_stateful(item):
            return item
        state = item.state_dict()
        if isinstance(item, torch.nn.Module):
            return _with_parameters(state, item)
        if isinstance(item, torch.optim.Optimizer):
            _refuse_flat_shards(item)
            names = by_parameter.names_of(item, self._modules())
            if names is not None:
                return by_parameter.by_name(state, item, names)
        return state

    def has_resharder(self, name: str) -> bool:
        """Whether a resharder of the user's restores an item."""
        return is_custom(self.config.spec(name).resharder)

    def needs_modules(self, name: str, node: Node) -> bool:
        """Whether an optimizer must wait until the modules of its parameters are registered: its state was saved by their names."""
        item = self._items[name]
        return isinstance(item, torch.optim.Optimizer) and _is_named(node) and by_parameter.names_of(item, self._modules()) is None

    def check(self, name: str, source: Source) -> None:
        """Check that an item fits its state in a commit; nothing is touched, and no tensor read. Raises: StateError."""
        self._checked(name, source)

    def _checked(self, name: str, source: Source) -> LoadReport:
        item = self._items[name]
        template: Any = None
        done = self._reshard(name, source, [], dry_run=True)
        if done is not None:
            template = done.target
        elif isinstance(item, torch.nn.Module):
            template = _template(item)
        elif isinstance(item, torch.Tensor | np.ndarray):
            template = item
        return read(source, {name: template}, dry_run=True, done={name: done})[1]

    def restore(self, name: str, source: Source, *, fetch: Fetch | None = None) -> list[str]:
        """Bring an item to its state in a commit: tensors in place, the rest through `load_state_dict`; a plain value is replaced.

        Returns notes for the report. Types that only live values show (dataclasses, enums ...) are those of the item as it is. One that
        need not be there (`required=False`) and does not fit is left as it is, which is noted. `fetch` is called once at most.
        Raises: StateError listing everything that does not fit, before anything is touched; IntegrityError; what the item itself raises.
        """
        touched = False

        def touch() -> None:
            nonlocal touched
            touched = True

        if self.config.spec(name).required:
            return self._restore(name, source, fetch, touch)
        try:
            why = "; ".join(self._checked(name, source).skipped)
            if not why:
                return self._restore(name, source, fetch, touch)
        except StateError as exc:
            # An optimizer's problems are found on the way. Behind `touch`, it may be half of what it was.
            if touched:
                raise
            why = str(exc)
        return [f"{name} was left as it is: {why}"]

    def _restore(self, name: str, source: Source, fetch: Fetch | None, touch: Callable[[], None]) -> list[str]:
        """Restore an item; `touch()` is called before whatever changes it."""
        item = self._items[name]
        report = LoadReport()

        def fetched(wanted: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
            if any(target is not None for target in wanted.values()):
                touch()
            return (fetch or source.fetch)(wanted)

        taken = partial(_read, source, name, report=report, fetch=fetched)
        notes: list[str] = []
        done = self._reshard(name, source, notes, touch=touch)
        if done is not None:
            self._take(name, item, taken(done.target, done=done))
        elif isinstance(item, torch.optim.Optimizer):
            self._restore_optimizer(name, item, source, notes, fetch, touch)
        elif isinstance(item, torch.nn.Module):
            value = taken(_template(item))
            touch()
            item.load_state_dict(value)
        elif is_stateful(item):
            # In place where the structure is the same, so that tensors stay on their devices. Where it has grown (a history, a buffer),
            # the object itself decides what it takes.
            template = item.state_dict()
            value = taken(template, as_saved=not source.fits(name, template))
            touch()
            item.load_state_dict(value)
        elif isinstance(item, torch.Generator):
            item.set_state(taken(None, as_saved=True).get_state())
        elif isinstance(item, np.random.Generator):
            item.bit_generator.state = taken(None, as_saved=True).bit_generator.state
        elif isinstance(item, np.random.RandomState):
            item.set_state(taken(None, as_saved=True).get_state(legacy=False))
        elif isinstance(item, torch.Tensor | np.ndarray):
            self._items[name] = taken(item)
        else:
            self._items[name] = taken(item, as_saved=True)
        return notes + report.notes

    def _reshard(
        self, name: str, source: Source, notes: list[str], *, dry_run: bool = False, touch: Callable[[], None] = lambda: None
    ) -> Resharded | None:
        """Run the item's resharder of the user's, if it has one and the layout is another one; settle what was each rank's own."""
        item, spec = self._items[name], self.config.spec(name)
        resharder = spec.resharder
        done: Resharded | None = None
        if resharder is not None and is_custom(resharder):
            done = prepare(source, name, resharder, self._state(item), notes, dry_run=dry_run, touch=touch)
        notes += settle(source, name, spec, done, item, is_object=is_stateful(item))
        return done

    def _take(self, name: str, item: Any, value: Any) -> None:
        """Make a loaded value the item's."""
        if isinstance(item, torch.optim.Optimizer):
            by_parameter.load_exact(item, self.untemplate(name, value))
        elif is_stateful(item):
            item.load_state_dict(value)
        else:
            self._items[name] = value

    def _leave_others(self, name: str, source: Source, names: Mapping[int, str], notes: list[str]) -> None:
        """On another number of ranks, leave alone parameters that are not this rank's, where only some ranks had them (pipeline stages)."""
        if source.same_size or not source.has_others or source.content.is_common(name):
            return
        groups = source.content.groups(name)
        saved = [set(named_parameters(source.content.items[group[0]][name]) or ()) for group in groups]
        common = set.intersection(*saved) if sum(map(len, groups)) == source.commit.world_size else set()
        others = set.union(*saved) - common - set(names.values())
        if others:
            source.show(name, without_parameters(source.node(name), others))
            notes.append(f"{name}: {len(others)} parameters, which only some of the ranks had, are left to other ranks")

    def _restore_optimizer(
        self,
        name: str,
        item: torch.optim.Optimizer,
        source: Source,
        notes: list[str],
        fetch: Fetch | None,
        touch: Callable[[], None],
    ) -> None:
        names = by_parameter.names_of(item, self._modules()) if _is_named(source.node(name)) else None
        if names is not None:
            self._leave_others(name, source, names, notes)
        # Read afresh: the optimizer adopts the tensors, and most of its state does not exist yet. What belongs to a sharded parameter is
        # read in its layout.
        saved = _read(source, name, self._sharded_state(source, name, item), fetch=fetch)
        _refuse_other_kind(name, item, saved)
        if not _is_named(source.node(name)):
            touch()
            by_parameter.load_exact(item, saved)
            return
        if names is None:
            raise StateError(
                f"item {name!r}: its state was saved by parameter name, but the module that holds its parameters is not registered:"
                f" register the model too (registered: {', '.join(self._items)})"
            )
        state = by_parameter.by_index(saved, item, names)
        touch()
        by_parameter.load_exact(item, state)

    def _sharded_state(self, source: Source, name: str, item: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Return a template that holds, for each state tensor shaped like its sharded parameter, an empty one of the parameter's layout."""
        params = [param for group in item.param_groups for param in group["params"]]
        if not any(is_sharded(param) for param in params):
            return None
        return {"state": empty_state(source, name, self._parameters(source, name, item)), "param_groups": None}

    def _parameters(self, source: Source, name: str, item: torch.optim.Optimizer) -> Parameters:
        """Return how to tell an optimizer's parameter by the key of its state in a commit."""
        params = [param for group in item.param_groups for param in group["params"]]
        names = by_parameter.names_of(item, self._modules()) if _is_named(source.node(name)) else None
        return of_parameters({(names[id(param)] if names else number): param for number, param in enumerate(params)})

    def templates(self, source: Source, into: Mapping[str, Any], *, partial: Sequence[str] | None = None) -> dict[str, Any]:
        """Return what a commit is read into in place of the caller's targets: with optimizer state that is still to be made."""
        found = {name: self.template(name, live) for name, live in into.items()}
        modules = {name: dict(module.named_parameters()) for name, module in self._modules().items() if name not in into}
        elsewhere = of_targets({**modules, **into})
        for name in [name for name in found if name in source.names and not self.has_resharder(name)]:
            item = self._items.get(name)
            known = self._parameters(source, name, item) if isinstance(item, torch.optim.Optimizer) else elsewhere
            found[name] = filled_up(source, name, found[name], known, partial=partial)
        return found

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
        is_state = isinstance(item, torch.optim.Optimizer) and isinstance(loaded, Mapping) and "param_groups" in loaded
        if is_state and by_parameter.is_by_name(loaded):
            names = by_parameter.names_of(item, self._modules())
            if names is not None:
                return by_parameter.by_index(dict(loaded), item, names)
        return loaded
