"""Registered items: what a script holds, how it is captured, and how a commit's state goes back into it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from syckpt.checkpoint.loader import Fetch, LoadReport, read
from syckpt.checkpoint.moments import Parameters, empty_state, filled_up, of_parameters, of_targets
from syckpt.checkpoint.resharding import Resharded, prepare, sent_buffers, settle
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.specs import Config
from syckpt.checkpoint.taking import names_in, suit, suit_parameters
from syckpt.dataloader import StatefulSampler
from syckpt.errors import StateError
from syckpt.objects import ids
from syckpt.objects.nodes import Node, format_path
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


def _suit_parameters(source: Source, name: str, names: Iterable[str], notes: list[str]) -> list[str]:
    left = suit_parameters(source, name, names)
    if left:
        notes.append(f"{name}: {len(left)} parameters, which this rank does not have, are left to other ranks")
    return left


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

    def check(self, name: str, source: Source) -> list[str]:
        """Check that an item fits its state in a commit; nothing is touched, and no tensor read. Raises: StateError.

        Returns the paths of the commit that are left to other ranks.
        """
        found = self._checked(name, source)
        return found.unexpected if self.config.spec(name).required else []

    def _checked(self, name: str, source: Source) -> LoadReport:
        item = self._items[name]
        template: Any = None
        left: list[str] = []
        done = self._reshard(name, source, [], dry_run=True)
        if done is not None:
            template = done.target
        elif isinstance(item, torch.optim.Optimizer):
            left = self._suit_optimizer(name, item, source, [])
        elif isinstance(item, torch.nn.Module):
            template = _template(item)
        elif isinstance(item, torch.Tensor | np.ndarray):
            template = item
        report = read(source, {name: template}, dry_run=True, done={name: done})[1]
        report.unexpected += left
        return report

    def restore(self, name: str, source: Source, *, fetch: Fetch | None = None) -> tuple[list[str], list[str]]:
        """Bring an item to its state in a commit: tensors in place, the rest through `load_state_dict`; a plain value is replaced.

        Returns notes for the report, and the paths of the commit that are left to other ranks. Types that only live values show
        (dataclasses, enums ...) are those of the item as it is. One that need not be there (`required=False`) and does not fit is left as
        it is, which is noted. `fetch` is called once at most.
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
                return self._restore(name, source, fetch, touch)[0], []
        except StateError as exc:
            # An optimizer's problems are found on the way. Behind `touch`, it may be half of what it was.
            if touched:
                raise
            why = str(exc)
        return [f"{name} was left as it is: {why}"], []

    def _restore(self, name: str, source: Source, fetch: Fetch | None, touch: Callable[[], None]) -> tuple[list[str], list[str]]:
        """Restore an item; `touch()` is called before whatever changes it."""
        item = self._items[name]
        report = LoadReport()

        def fetched(wanted: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
            if any(target is not None for target in wanted.values()):
                touch()
            return (fetch or source.fetch)(wanted)

        taken = partial(_read, source, name, report=report, fetch=fetched)
        notes: list[str] = []
        left: list[str] = []
        done = self._reshard(name, source, notes, touch=touch)
        if done is not None:
            self._take(name, item, taken(done.target, done=done))
        elif isinstance(item, torch.optim.Optimizer):
            left = self._restore_optimizer(name, item, source, notes, fetch, touch)
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
        return notes + report.notes, left + report.unexpected

    def _reshard(
        self, name: str, source: Source, notes: list[str], *, dry_run: bool = False, touch: Callable[[], None] = lambda: None
    ) -> Resharded | None:
        """Run the item's resharder of the user's, if it has one and the layout is another one; settle what was each rank's own."""
        item, spec = self._items[name], self.config.spec(name)
        resharder = spec.resharder
        done: Resharded | None = None
        source.see_anew(name)
        if isinstance(item, torch.nn.Module):
            suit(source, name, partial(_template, item))
        elif is_stateful(item) and not isinstance(item, torch.optim.Optimizer):
            suit(source, name, item.state_dict)
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

    def _names_of(self, name: str, item: torch.optim.Optimizer, source: Source) -> dict[int, str] | None:
        """Return the names that an optimizer's parameters have in a commit, by their ids; None where it counts them."""
        return by_parameter.names_of(item, self._modules()) if _is_named(source.node(name)) else None

    def _suit_optimizer(self, name: str, item: torch.optim.Optimizer, source: Source, notes: list[str]) -> list[str]:
        """See an optimizer's state as its parameters on this rank need it; return the paths that are left to other ranks."""
        names = by_parameter.names_of(item, self._modules())
        return [] if names is None else _suit_parameters(source, name, names.values(), notes)

    def _restore_optimizer(
        self,
        name: str,
        item: torch.optim.Optimizer,
        source: Source,
        notes: list[str],
        fetch: Fetch | None,
        touch: Callable[[], None],
    ) -> list[str]:
        """Restore an optimizer; returns the paths that are left to other ranks."""
        left = self._suit_optimizer(name, item, source, notes)
        names = self._names_of(name, item, source)
        # Read afresh: the optimizer adopts the tensors, and most of its state does not exist yet. What belongs to a sharded parameter is
        # read in its layout.
        saved = _read(source, name, self._sharded_state(source, name, item), fetch=fetch)
        _refuse_other_kind(name, item, saved)
        if not _is_named(source.node(name)):
            touch()
            by_parameter.load_exact(item, saved)
            return left
        if names is None:
            raise StateError(
                f"item {name!r}: its state was saved by parameter name, but the module that holds its parameters is not registered:"
                f" register the model too (registered: {', '.join(self._items)})"
            )
        state = by_parameter.by_index(saved, item, names)
        touch()
        by_parameter.load_exact(item, state)
        return left

    def _sharded_state(self, source: Source, name: str, item: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Return a template that holds, for each state tensor shaped like its sharded parameter, an empty one of the parameter's layout."""
        params = [param for group in item.param_groups for param in group["params"]]
        if not any(is_sharded(param) for param in params):
            return None
        return {"state": empty_state(source, name, self._parameters(source, name, item)), "param_groups": None}

    def _parameters(self, source: Source, name: str, item: torch.optim.Optimizer) -> Parameters:
        """Return how to tell an optimizer's parameter by the key of its state in a commit."""
        params = [param for group in item.param_groups for param in group["params"]]
        names = self._names_of(name, item, source)
        return of_parameters({(names[id(param)] if names else number): param for number, param in enumerate(params)})

    def sent(self) -> dict[str, list[str]]:
        """Return the buffers that DistributedDataParallel sends from rank 0, by item (`Manifest.sent`)."""
        found = {name: [format_path((name, buffer)) for buffer in sorted(sent_buffers(module))] for name, module in self._modules().items()}
        return {name: paths for name, paths in found.items() if paths}

    def templates(
        self, source: Source, into: Mapping[str, Any], notes: list[str], *, partial: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return what a commit is read into in place of the caller's targets: with optimizer state that is still to be made.

        Items are seen as these need them. What an optimizer's state dict leaves to other ranks is noted.
        """
        found = {name: self.template(name, live) for name, live in into.items()}
        for name, template in found.items():
            if name in source.names:
                suit(source, name, lambda template=template: template)  # type: ignore[misc]
                if (names := names_in(template)) is not None:
                    _suit_parameters(source, name, names, notes)
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
