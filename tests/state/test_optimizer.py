"""Optimizer state follows its parameters by name and keeps its bits."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn, optim

from syckpt.errors import StateError
from syckpt.objects import canonical
from syckpt.state.flatten import flatten, unflatten
from syckpt.state.optimizer import by_index, by_name, is_by_name, load_exact, names_of


def model(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def train(module: nn.Module, optimizer: Any, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    for _ in range(steps):
        inputs = torch.randn(8, 4, generator=generator).to(dtype)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def carried(value: Any) -> Any:
    flat = flatten({"optimizer": value})
    copies = [torch.as_tensor(leaf.array).clone() for leaf in flat.leaves]
    return unflatten(canonical.loads(canonical.dumps(flat.nodes["optimizer"])), copies.__getitem__)


def weights(module: nn.Module) -> dict[str, list[Any]]:
    return {name: parameter.tolist() for name, parameter in module.named_parameters()}


OPTIMIZERS: dict[str, Any] = {
    "Adadelta": lambda groups: optim.Adadelta(groups, lr=0.1),
    "Adafactor": lambda groups: optim.Adafactor(groups, lr=0.1),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=0.1),
    "Adam": lambda groups: optim.Adam(groups, lr=0.1, amsgrad=True),
    "Adam foreach": lambda groups: optim.Adam(groups, lr=0.1, foreach=True),
    "Adam fused": lambda groups: optim.Adam(groups, lr=0.1, fused=True),
    "Adam tensor lr": lambda groups: optim.Adam(groups, lr=torch.tensor(0.1)),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.1),
    "Adamax": lambda groups: optim.Adamax(groups, lr=0.1),
    "ASGD": lambda groups: optim.ASGD(groups, lr=0.1, t0=1),
    "NAdam": lambda groups: optim.NAdam(groups, lr=0.1),
    "RAdam": lambda groups: optim.RAdam(groups, lr=0.1),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda groups: optim.Rprop(groups, lr=0.1),
    "SGD": lambda groups: optim.SGD(groups, lr=0.1),
    "SGD momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
}


def two_groups(module: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": [module[0].weight, module[2].weight]}, {"params": [module[0].bias, module[2].bias], "lr": 0.05}]


def regrouped(module: nn.Sequential) -> list[dict[str, Any]]:
    """The same parameters with the same hyper-parameters, in another order and in three groups."""
    return [
        {"params": [module[2].bias, module[0].bias], "lr": 9.0},
        {"params": [module[2].weight]},
        {"params": [module[0].weight]},
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_by_name_into_another_order_continues_identically(name: str) -> None:
    first = model()
    saver = OPTIMIZERS[name](two_groups(first))
    train(first, saver, 3, seed=1)
    names = names_of(saver, {"model": first})
    assert names is not None
    saved = carried(by_name(saver.state_dict(), saver, names))
    assert is_by_name(saved)
    assert not is_by_name(saver.state_dict())

    second = model(seed=5)
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    loader = OPTIMIZERS[name](regrouped(second))
    live_names = names_of(loader, {"model": second})
    assert live_names is not None
    load_exact(loader, by_index(saved, loader, live_names))
    assert [float(group["lr"]) for group in loader.param_groups] == [float(saver.param_groups[i]["lr"]) for i in (1, 0, 0)]
    train(first, saver, 3, seed=2)
    train(second, loader, 3, seed=2)
    assert weights(second) == weights(first)


def test_lbfgs_continues_identically_in_the_same_order_and_refuses_another() -> None:
    first = model()
    saver = optim.LBFGS(first.parameters(), max_iter=4, history_size=3)
    train(first, saver, 3, seed=1)
    names = names_of(saver, {"model": first})
    assert names is not None
    saved = carried(by_name(saver.state_dict(), saver, names))
    second = model(seed=5)
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    loader = optim.LBFGS(second.parameters(), max_iter=4, history_size=3)
    load_exact(loader, by_index(saved, loader, names_of(loader, {"model": second}) or {}))
    train(first, saver, 2, seed=2)
    train(second, loader, 2, seed=2)
    assert weights(second) == weights(first)

    other = optim.LBFGS(reversed(list(second.parameters())))
    with pytest.raises(StateError, match="one flat vector"):
        by_index(saved, other, names_of(other, {"model": second}) or {})


def test_names_carry_the_item_and_state_is_keyed_by_them() -> None:
    module = model()
    optimizer = optim.SGD([module[2].weight, module[0].bias], lr=0.1, momentum=0.9)
    module[2].weight.grad = torch.ones(3, 6)
    optimizer.step()
    names = names_of(optimizer, {"net": module})
    assert names == {id(module[2].weight): "net.2.weight", id(module[0].bias): "net.0.bias"}
    saved = by_name(optimizer.state_dict(), optimizer, names)
    assert list(saved["state"]) == ["net.2.weight"]
    assert saved["param_groups"][0]["params"] == ["net.2.weight", "net.0.bias"]
    assert saved["param_groups"][0]["lr"] == 0.1


def test_a_parameter_of_no_registered_module_means_no_names() -> None:
    module, other = model(), nn.Linear(1, 1)
    assert names_of(optim.SGD([*module.parameters(), *other.parameters()], lr=0.1), {"model": module}) is None


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_names_do_not_depend_on_wrappers() -> None:
    module = model()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    plain = names_of(optimizer, {"model": module})
    assert names_of(optimizer, {"model": nn.DataParallel(module)}) == plain
    assert names_of(optimizer, {"model": torch.compile(module)}) == plain


def test_tied_parameters_take_the_first_name() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    assert names_of(optim.SGD(module.parameters(), lr=0.1), {"m": module}) == {id(module["a"].weight): "m.a.weight"}


def test_every_parameter_that_does_not_fit_is_listed() -> None:
    module = model()
    saver = optim.SGD([module[0].weight, module[0].bias], lr=0.1)
    saved = by_name(saver.state_dict(), saver, names_of(saver, {"model": module}) or {})
    loader = optim.SGD([module[0].weight, module[2].weight, module[2].bias], lr=0.1)
    with pytest.raises(StateError) as caught:
        by_index(saved, loader, names_of(loader, {"model": module}) or {})
    assert str(caught.value).splitlines() == [
        "the saved optimizer does not fit this one:",
        "  model.2.weight: in the optimizer, not in the commit",
        "  model.2.bias: in the optimizer, not in the commit",
        "  model.0.bias: in the commit, not in the optimizer",
    ]


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (0.1, 0.2, True),
        (0.1, 0.1, False),
        (torch.tensor(0.1), torch.tensor(0.1), False),
        (torch.tensor(0.1), torch.tensor(0.2), True),
        (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), True),
    ],
)
def test_a_group_may_join_saved_groups_only_if_their_hyper_parameters_agree(first: Any, second: Any, refused: bool) -> None:
    module = model()
    groups = [{"params": [module[0].weight], "lr": first}, {"params": [module[2].weight], "lr": second}]
    saver = optim.Adam(groups)
    saved = by_name(saver.state_dict(), saver, names_of(saver, {"model": module}) or {})
    loader = optim.Adam([module[2].weight, module[0].weight])
    names = names_of(loader, {"model": module}) or {}
    if refused:
        with pytest.raises(StateError, match=r"group 0: its parameters come from groups \[0, 1\]"):
            by_index(saved, loader, names)
    else:
        assert by_index(saved, loader, names)["param_groups"][0]["lr"] == first


def test_the_optimizer_s_own_names_stay_those_of_its_parameters() -> None:
    module = model()
    saver = optim.SGD(module[0].named_parameters(), lr=0.1)
    saved = by_name(saver.state_dict(), saver, names_of(saver, {"model": module}) or {})
    loader = optim.SGD(list(module[0].named_parameters())[::-1], lr=0.5)
    load_exact(loader, by_index(saved, loader, names_of(loader, {"model": module}) or {}))
    assert loader.param_groups[0]["param_names"] == ["bias", "weight"]
    assert loader.param_groups[0]["lr"] == 0.1


def test_empty_groups_and_state_of_no_parameter_survive() -> None:
    module = model()
    saver = optim.SGD([{"params": list(module.parameters())}, {"params": [], "lr": 7.0}], lr=0.1)
    saver.state["calls"] = 3  # type: ignore[index]
    saved = carried(by_name(saver.state_dict(), saver, names_of(saver, {"model": module}) or {}))
    loader = optim.SGD([{"params": list(module.parameters())[::-1]}, {"params": []}], lr=0.5)
    load_exact(loader, by_index(saved, loader, names_of(loader, {"model": module}) or {}))
    assert [group["lr"] for group in loader.param_groups] == [0.1, 7.0]
    assert loader.state["calls"] == 3  # type: ignore[index]


def test_never_stepped_parameters_have_no_state_afterwards() -> None:
    module = model()
    saver = optim.Adam(module.parameters())
    module[0].weight.grad = torch.ones(6, 4)
    saver.step()
    saved = by_name(saver.state_dict(), saver, names_of(saver, {"model": module}) or {})
    loader = optim.Adam(reversed(list(module.parameters())))
    load_exact(loader, by_index(saved, loader, names_of(loader, {"model": module}) or {}))
    assert [parameter is module[0].weight for parameter in loader.state] == [True]


def moments(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([1.0, 1.0000001, -0.0, 3e-42], dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("fused", [False, True])
def test_state_keeps_its_dtype_over_parameters_of_another(fused: bool) -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = optim.Adam([parameter], fused=fused)
    saved = {
        "state": {0: {"step": torch.tensor(5.0), "exp_avg": moments(torch.float32), "exp_avg_sq": moments(torch.float64), "n": 3}},
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    load_exact(optimizer, saved)
    state = optimizer.state[parameter]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["step"].dtype) == (torch.float32, torch.float64, torch.float32)
    assert state["exp_avg"].view(torch.int32).tolist() == moments(torch.float32).view(torch.int32).tolist()
    assert state["exp_avg_sq"].view(torch.int64).tolist() == moments(torch.float64).view(torch.int64).tolist()
    assert (state["step"].item(), state["n"]) == (5.0, 3)


def test_nested_state_keeps_its_dtype_and_its_types() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = optim.SGD([parameter], lr=0.1)
    value = {
        "list": [moments(torch.float32), (moments(torch.float64), None)],
        "deque": deque([moments(torch.float32)], 4),
        "dict": {"step": 1, "inner": moments(torch.float32)},
        "text": "abc",
    }
    load_exact(optimizer, {"state": {0: value}, "param_groups": optimizer.state_dict()["param_groups"]})
    state = optimizer.state[parameter]
    assert state["list"][0].dtype is state["dict"]["inner"].dtype is state["deque"][0].dtype is torch.float32
    assert state["list"][1][0].dtype is torch.float64
    assert isinstance(state["list"][1], tuple)
    assert state["deque"].maxlen == 4
    assert state["text"] == "abc"


def test_hooks_of_the_optimizer_run_and_have_the_last_word() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = optim.SGD([parameter], lr=0.1)

    def rename(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {0: {"new": state["state"][0]["old"]}}}

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(lambda live: live.state[parameter].update(seen=live.state[parameter]["new"].dtype))
    groups = optimizer.state_dict()["param_groups"]
    load_exact(optimizer, {"state": {0: {"old": moments(torch.float64)}}, "param_groups": groups})
    assert optimizer.state[parameter]["seen"] is torch.float64
    assert list(optimizer.state[parameter]) == ["new", "seen"]
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1
