"""Optimizers, schedulers, scalers, averaged and compiled models: everything of torch that a script trains with goes on where it was."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import syckpt
from syckpt import CheckpointManager


class Net(nn.Module):
    """Two trained layers, a frozen one and one that no forward pass ever reaches."""

    def __init__(self, seed: int, *, bias: bool = True, sparse: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(7, 4, sparse=sparse)
            self.first, self.frozen, self.last = nn.Linear(4, 6, bias), nn.Linear(6, 6, bias), nn.Linear(6, 3, bias)
            self.idle = nn.Linear(2, 2, bias)
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.first(self.embed(ids)))))


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        ids = torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))

        def closure(ids: torch.Tensor = ids) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(ids).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def weights(net: nn.Module) -> dict[str, Any]:
    return {name: parameter.tolist() for name, parameter in net.named_parameters()}


def forward_groups(net: Net) -> list[dict[str, Any]]:
    matrices = [net.embed.weight, net.first.weight, net.frozen.weight, net.last.weight, net.idle.weight]
    rest = [p for p in net.parameters() if all(p is not m for m in matrices)]
    return [{"params": matrices}, *([{"params": rest, "lr": 0.0625}] if rest else [])]


def other_groups(net: Net) -> list[dict[str, Any]]:
    """The same hyper-parameters by parameter, in another order and grouping, with rates that the restore has to put right."""
    groups = forward_groups(net)
    halves = [{**group, "params": group["params"][::-1][part]} for group in groups for part in (slice(None, 2), slice(2, None))]
    return [{**group, "lr": 9.0} for group in halves[::-1]]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adadelta": (optim.Adadelta, {}),
    "Adafactor": (optim.Adafactor, {}),
    "Adagrad": (optim.Adagrad, {}),
    "Adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "Adam_foreach": (optim.Adam, {"foreach": True, "maximize": True}),
    "Adam_fused": (optim.Adam, {"fused": True}),
    "Adam_tensor_lr": (optim.Adam, {"lr": torch.tensor(0.125)}),
    "AdamW": (optim.AdamW, {"differentiable": False, "betas": (0.8, 0.95)}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {"t0": 1}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {"decoupled_weight_decay": True}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Rprop": (optim.Rprop, {}),
    "SGD": (optim.SGD, {}),
    "SGD_momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Muon": (getattr(optim, "Muon", None), {}),
    "SparseAdam": (optim.SparseAdam, {}),
    "LBFGS": (optim.LBFGS, {"history_size": 3, "max_iter": 4}),
}
OPTIMIZERS = {name: case for name, case in OPTIMIZERS.items() if case[0] is not None}


def make(name: str, seed: int, groups: Any) -> tuple[Net, Any]:
    kind, options = OPTIMIZERS[name]
    net = Net(seed, bias=name != "Muon", sparse=name == "SparseAdam")
    if name == "LBFGS":
        return net, kind(net.parameters(), lr=0.5, **options)
    if name in ("Muon", "SparseAdam"):
        chosen = [net.first.weight, net.idle.weight, net.last.weight] if name == "Muon" else [net.embed.weight]
        picked = [{**group, "params": [p for p in group["params"] if any(p is c for c in chosen)]} for group in groups(net)]
        return net, kind([group for group in picked if group["params"]], **{"lr": 0.125, **options})
    return net, kind(groups(net), **{"lr": 0.125, **options})


def test_every_optimizer_of_this_torch_is_tried() -> None:
    known = {kind for kind, _ in OPTIMIZERS.values()}
    found = {value for value in vars(optim).values() if isinstance(value, type) and issubclass(value, optim.Optimizer)}
    assert found - {optim.Optimizer} == known


def test_every_optimizer_goes_on_bit_for_bit_in_another_order_and_grouping_registered_before_its_model(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = {name: make(name, 0, forward_groups) for name in OPTIMIZERS}
        untouched = optim.Adam(Net(5).parameters(), capturable=True)
        with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
            for name, (net, optimizer) in live.items():
                train(net, optimizer, range(3))
                ckpt.register(f"net_{name}", net)
                ckpt.register(f"opt_{name}", optimizer)
            ckpt.never_stepped = untouched
            ckpt.save()
            # Into state dicts of fresh ones of the same grouping: groups verbatim, state under torch's own numbers.
            for name, (_, optimizer) in live.items():
                net, fresh = make(name, 1, forward_groups)
                ckpt.unregister(f"net_{name}")
                ckpt.unregister(f"opt_{name}")
                ckpt.register(f"net_{name}", net)
                ckpt.register(f"opt_{name}", fresh)
                state = ckpt.load(into={f"opt_{name}": fresh.state_dict()})[f"opt_{name}"]
                expected = optimizer.state_dict()
                assert state["param_groups"] == expected["param_groups"]
                assert list(map(type, state["state"])) == [int] * len(expected["state"])
                assert state["state"].keys() == expected["state"].keys()
        resumed = CheckpointManager(tmp_path, save_on_exit=False)
        resumed.never_stepped = again = optim.Adam(Net(6).parameters(), lr=5.0)
        assert (again.state_dict()["state"], again.param_groups[0]["lr"], again.param_groups[0]["capturable"]) == ({}, 0.001, True)
        for name, (net, optimizer) in live.items():
            other, fresh = make(name, 1, forward_groups if name == "LBFGS" else other_groups)
            resumed.register(f"opt_{name}", fresh)
            resumed.register(f"net_{name}", other)
            resumed.restore()
            train(net, optimizer, range(3, 6))
            train(other, fresh, range(3, 6))
            assert weights(other) == weights(net), name
            assert len(fresh.state) == len(optimizer.state), name
            assert (other.idle.weight in fresh.state) == (net.idle.weight in optimizer.state) == (name == "Adagrad"), name
        resumed.close()


def test_one_optimizer_over_two_models_waits_for_both_and_follows_the_names(tmp_path: Path) -> None:
    def both(seed: int) -> tuple[Net, Net]:
        return Net(seed), Net(seed + 1)

    gen, disc = both(0)
    optimizer = optim.Adam([{"params": gen.parameters()}, {"params": disc.parameters(), "lr": 0.5}])
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.gen, ckpt.disc, ckpt.optimizer = gen, disc, optimizer
        train(gen, optimizer, range(2))
        train(disc, optimizer, range(2, 4))
        ckpt.save()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        gen2, disc2 = both(7)
        fresh = optim.Adam([{"params": disc2.parameters(), "lr": 3.0}, {"params": gen2.parameters(), "lr": 3.0}])
        ckpt.optimizer = fresh
        ckpt.disc = disc2
        assert fresh.state == {}
        ckpt.gen = gen2
        assert [group["lr"] for group in fresh.param_groups] == [0.5, 0.001]
        for net, opt in ((gen, optimizer), (gen2, fresh), (disc, optimizer), (disc2, fresh)):
            train(net, opt, range(4, 6))
        assert (weights(gen2), weights(disc2)) == (weights(gen), weights(disc))


def test_an_optimizer_over_a_frozen_backbone_keeps_state_for_the_head_alone(tmp_path: Path) -> None:
    net = Net(0)
    net.embed.requires_grad_(False)
    optimizer = optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model, ckpt.optimizer = net, optimizer
        train(net, optimizer, range(2))
        ckpt.save()
        state = ckpt.load()["optimizer"]
        assert list(state["state"]) == ["model.first.weight", "model.first.bias", "model.last.weight", "model.last.bias"]
        assert [name.split(".")[1] for name in state["param_groups"][0]["params"]] == ["first", "first", "last", "last", "idle", "idle"]


# --- schedulers ----------------------------------------------------------------------------------------------------------------


class Warmup:
    """A callable with state of its own: torch saves its `__dict__`."""

    def __init__(self, steps: int) -> None:
        self.steps, self.calls = steps, 0

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def sequential(opt: Any) -> Any:
    return schedules.SequentialLR(
        opt, [schedules.ConstantLR(opt, 0.1, 2), schedules.StepLR(opt, 2, 0.5), schedules.ExponentialLR(opt, 0.9)], [2, 6]
    )


SCHEDULERS: dict[str, Any] = {
    "ChainedScheduler": lambda opt: schedules.ChainedScheduler([schedules.ConstantLR(opt, 0.5, 3), schedules.ExponentialLR(opt, 0.9)]),
    "ConstantLR": lambda opt: schedules.ConstantLR(opt, 0.5, 5),
    "CosineAnnealingLR": lambda opt: schedules.CosineAnnealingLR(opt, 8, 0.01),
    "CosineAnnealingWarmRestarts": lambda opt: schedules.CosineAnnealingWarmRestarts(opt, 3, 2),
    "CyclicLR": lambda opt: schedules.CyclicLR(opt, 0.01, 1.0, 3, mode="exp_range", gamma=0.9),
    "CyclicLR_scale_fn": lambda opt: schedules.CyclicLR(opt, 0.01, 1.0, 3, scale_fn=lambda x: 0.5),
    "ExponentialLR": lambda opt: schedules.ExponentialLR(opt, 0.7),
    "LambdaLR": lambda opt: schedules.LambdaLR(opt, lambda step: 0.9**step),
    "LambdaLR_object": lambda opt: schedules.LambdaLR(opt, Warmup(8)),
    "LinearLR": lambda opt: schedules.LinearLR(opt, 0.1, 1.0, 9),
    "MultiStepLR": lambda opt: schedules.MultiStepLR(opt, [2, 6, 6, 9], 0.1),
    "MultiplicativeLR": lambda opt: schedules.MultiplicativeLR(opt, lambda step: 0.9),
    "OneCycleLR": lambda opt: schedules.OneCycleLR(opt, 2.0, 20, pct_start=0.25),
    "PolynomialLR": lambda opt: schedules.PolynomialLR(opt, 10, 2.0),
    "ReduceLROnPlateau": lambda opt: schedules.ReduceLROnPlateau(opt, patience=1, cooldown=1, min_lr=0.01),
    "SequentialLR": sequential,
    "StepLR": lambda opt: schedules.StepLR(opt, 3, 0.1),
    "SWALR": lambda opt: SWALR(opt, 0.05, 6, "linear"),
    "SWALR_cos": lambda opt: SWALR(opt, 0.05, 6, "cos"),
}


def scheduled(name: str, lr: float) -> tuple[Any, Any]:
    opt = optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    return opt, SCHEDULERS[name](opt)


def rates(opt: Any, schedule: Any, steps: range) -> list[list[float]]:
    found = []
    for step in steps:
        opt.step()
        schedule.step(*([float(step % 4)] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
        found.append([opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]])
    return found


def test_every_scheduler_of_this_torch_is_tried() -> None:
    found = {name for name, value in vars(schedules).items() if isinstance(value, type) and issubclass(value, schedules.LRScheduler)}
    assert found - {"LRScheduler", "_LRScheduler"} <= {name.partition("_")[0] for name in SCHEDULERS}


def test_every_scheduler_goes_on_with_the_rates_that_it_would_have_given(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = {name: scheduled(name, 1.0) for name in SCHEDULERS}
        with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
            for name, (opt, schedule) in live.items():
                rates(opt, schedule, range(4))
                ckpt.register(f"opt_{name}", opt)
                ckpt.register(f"schedule_{name}", schedule)
            ckpt.save()
        with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
            for name, (opt, schedule) in live.items():
                fresh_opt, fresh = scheduled(name, 0.25)
                ckpt.register(f"opt_{name}", fresh_opt)
                ckpt.register(f"schedule_{name}", fresh)
                assert rates(fresh_opt, fresh, range(4, 14)) == rates(opt, schedule, range(4, 14)), name
                state = fresh.state_dict()
                assert {key: type(value) for key, value in state.items()} == {key: type(v) for key, v in schedule.state_dict().items()}, (
                    name
                )
            milestones = ckpt.schedule_MultiStepLR.milestones
            assert (type(milestones), milestones) == (Counter, Counter({6: 2, 2: 1, 9: 1}))
            assert [type(key) for key in milestones] == [int] * 3


def test_a_callable_of_a_scheduler_gets_its_attributes_back_and_a_lambda_stays_the_scripts(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        opt = optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))]}], lr=1.0)
        ckpt.schedule = schedules.LambdaLR(opt, [Warmup(8), lambda step: 0.5])
        ckpt.schedule.lr_lambdas[0].calls = 7
        ckpt.save()
        assert ckpt.load()["schedule"]["lr_lambdas"] == [{"steps": 8, "calls": 7}, None]
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        opt = optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))]}], lr=1.0)
        ckpt.schedule = schedule = schedules.LambdaLR(opt, [Warmup(1), lambda step: 0.25])
        assert (schedule.lr_lambdas[0].steps, schedule.lr_lambdas[0].calls, schedule.lr_lambdas[1](0)) == (8, 7, 0.25)


# --- scalers, averages, compiled modules -----------------------------------------------------------------------------------------


def test_a_grad_scaler_and_averaged_models_go_on(tmp_path: Path) -> None:
    def parts(seed: int) -> tuple[Net, Any, AveragedModel, AveragedModel]:
        net = Net(seed)
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        return net, torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=2), AveragedModel(net), ema

    def step(net: Net, scaler: Any, swa: AveragedModel, ema: AveragedModel, steps: range) -> None:
        optimizer = optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        for number in steps:
            optimizer.zero_grad()
            scaler.scale(net(torch.tensor([number % 7])).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            swa.update_parameters(net)
            ema.update_parameters(net)

    live = parts(3)
    step(*live, range(3))
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.net, ckpt.scaler, ckpt.swa, ckpt.ema = live
        ckpt.save()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        fresh = parts(5)
        ckpt.net, ckpt.scaler, ckpt.swa, ckpt.ema = fresh
        assert fresh[1].state_dict() == live[1].state_dict()
        assert (fresh[2].n_averaged.item(), fresh[1].get_scale()) == (3, 16.0)
        step(*live, range(3, 6))
        step(*fresh, range(3, 6))
        assert fresh[1].state_dict() == live[1].state_dict()
        for mine, theirs in zip(fresh, live, strict=True):
            if isinstance(mine, nn.Module):
                assert weights(mine) == weights(theirs)


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")


@pytest.mark.parametrize("first", ["compiled", "plain"])
def test_a_commit_of_a_compiled_module_resumes_uncompiled_and_the_other_way_round(
    tmp_path: Path, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    def wrapped(net: Net, what: str) -> Any:
        return compiled(net) if what == "compiled" else net

    net = Net(0)
    optimizer = optim.Adam(net.parameters())
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.model, ckpt.optimizer = wrapped(net, first), optimizer
        train(net, optimizer, range(2))
        ckpt.save()
    second = "plain" if first == "compiled" else "compiled"
    caplog.set_level(logging.INFO, "syckpt")
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        other = Net(1)
        fresh = optim.Adam(other.parameters(), lr=2.0)
        ckpt.model, ckpt.optimizer = wrapped(other, second), fresh
        saved, live = ("model/_orig_mod.", "model/") if first == "compiled" else ("model/", "model/_orig_mod.")
        (note,) = ckpt.last_report.notes
        assert note.startswith(f"9 names differ only by what wrappers insert: {saved}embed.weight as {live}embed.weight, ")
        assert note in caplog.text
        train(net, optimizer, range(2, 4))
        train(other, fresh, range(2, 4))
        assert weights(other) == weights(net)


def test_names_that_wrappers_changed_are_matched_only_where_nothing_else_can_be_meant(tmp_path: Path) -> None:
    def tensors(*names: str, value: float = 0.0) -> dict[str, torch.Tensor]:
        return {name: torch.full((2,), value + number) for number, name in enumerate(names)}

    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.save("plain", {"m": tensors("w", "b", value=1.0)})
        ckpt.save("twice", {"m": tensors("module.w", "_orig_mod.w", value=1.0)})
        ckpt.save("deep", {"m": {"net": tensors("enc.module._orig_mod.w", "b", value=1.0)}})
        ckpt.save("average", {"m": {**tensors("module.w", value=1.0), "n_averaged": torch.tensor(3)}})

        target = tensors("module._orig_mod.w", "b")
        loaded = ckpt.load("plain", into={"m": target})["m"]
        assert {name: value.tolist() for name, value in target.items()} == {"module._orig_mod.w": [1.0, 1.0], "b": [2.0, 2.0]}
        assert list(loaded) == ["module._orig_mod.w", "b"]
        assert ckpt.last_report.notes == ["1 names differ only by what wrappers insert: m/w as m/module._orig_mod.w"]

        target = tensors("enc.w", "b")
        ckpt.load("deep", into={"m": {"net": target}})
        assert target["enc.w"].tolist() == [1.0, 1.0]

        # Both saved ones could be meant.
        with pytest.raises(syckpt.StateError) as caught:
            ckpt.load("twice", into={"m": tensors("w")})
        assert "1 missing from the commit: m/w\n" in str(caught.value)
        assert "2 unexpected in the commit: m/module.w; m/_orig_mod.w\n" in str(caught.value)

        # The live ones could both be meant, or the saved one is somebody's own name.
        two = tensors("module.w", "_orig_mod.w", "b")
        with pytest.raises(syckpt.StateError) as caught:
            ckpt.load("plain", into={"m": two})
        assert "2 missing from the commit: m/module.w; m/_orig_mod.w" in str(caught.value)
        assert "1 unexpected in the commit: m/w" in str(caught.value)
        assert [value.tolist() for value in two.values()] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]

        # What is left over is an error as ever; shapes are checked as ever.
        with pytest.raises(syckpt.StateError, match=r"1 unexpected in the commit: m/n_averaged"):
            ckpt.load("average", into={"m": tensors("w")})
        with pytest.raises(syckpt.StateError, match=r"m/w: expected float32 \[3\], found float32 \[2\]"):
            ckpt.load("plain", into={"m": {"module.w": torch.zeros(3), "b": torch.zeros(2)}})
        # A mapping without tensors is no module's state.
        ckpt.save("values", {"m": {"module.x": 1}})
        with pytest.raises(syckpt.StateError, match="missing from the commit: m/x"):
            ckpt.load("values", into={"m": {"x": 0}})


class Recording(nn.Module):
    """A module whose extra state is of another form each time, as that of quantizing layers is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.amax: list[torch.Tensor] = []

    def get_extra_state(self) -> Any:
        return {"amax": self.amax, "bytes": torch.zeros(len(self.amax) * 3, dtype=torch.uint8)}

    def set_extra_state(self, state: Any) -> None:
        assert state["bytes"].numel() == 3 * len(state["amax"])
        self.amax = state["amax"]


def test_a_modules_extra_state_comes_back_in_the_form_that_it_had_and_a_lazy_module_is_made_by_its_resume(tmp_path: Path) -> None:
    def parts() -> tuple[nn.Module, nn.Module]:
        return nn.Sequential(Recording(), Recording()), nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

    recording, lazy = parts()
    recording[1].amax = [torch.ones(2), torch.full((1,), 2.0)]
    lazy(torch.ones(4, 5))
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.recording, ckpt.lazy = recording, lazy
        ckpt.save()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.recording, ckpt.lazy = again, made = parts()
        assert [[t.tolist() for t in module.amax] for module in again] == [[], [[1.0, 1.0], [2.0]]]
        assert weights(made) == weights(lazy)
        assert made[1].running_mean.tolist() == lazy[1].running_mean.tolist()
