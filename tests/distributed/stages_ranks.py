"""What the ranks of test_stages.py do: jobs of one, eight and two ranks. What the whole model is, every process makes for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from layouts_ranks import digest, mesh_of
from scenarios_ranks import Setting, play, told
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from syckpt import CheckpointManager, ItemSpec

Config = CheckpointManager.Config
LAYERS = 4
HALVES = (("l0", "l1"), ("l2", "l3"))
ODD = (("l0", "l2"), ("l1", "l3"))
WHOLE = (("l0", "l1", "l2", "l3"),) * 2

Trained = tuple[nn.Module, torch.optim.Optimizer]


def cut(names: Iterable[str], *, seed: int) -> Trained:
    """Return these layers of the whole model, under the names that they have there, and their optimizer."""
    torch.manual_seed(seed)
    whole = {f"l{number}": nn.Linear(3, 3) for number in range(LAYERS)}
    model = nn.ModuleDict({name: whole[name] for name in names})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 if seed else 0.01, foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()


def trained(names: Iterable[str]) -> Trained:
    """Return these layers of the whole model after a step."""
    model, optimizer = cut(names, seed=0)
    step(model, optimizer)
    return model, optimizer


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    """Return digests of each parameter and of its moments."""
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        found[name] = [digest(parameter), *(digest(state[key]) for key in sorted(state))]
    return found


def put(ckpt: CheckpointManager, run: Trained) -> Trained:
    ckpt.model, ckpt.optimizer = run
    return run


# -- single process ------------------------------------------------------------------------------------------------------


def saved_alone(at: Setting) -> dict[str, list[str]]:
    with at.manager("single") as ckpt:
        run = put(ckpt, trained(WHOLE[0]))
        ckpt.save(wait=True)
    return held(*run)


def read_alone(root: str, rev: str) -> dict[str, list[str]]:
    with CheckpointManager(root, rng=False, save_on_exit=False, auto_resume=False, branch="alone") as ckpt:
        run = put(ckpt, cut(WHOLE[0], seed=1))
        ckpt.goto(rev)
    return held(*run)


# -- stages, cut anew on as many ranks -----------------------------------------------------------------------------------


def gone_to(at: Setting, root: str, rev: str, run: Trained, config: CheckpointManager.Config | None = None) -> Any:
    """Return what a run has after `goto`, or the error and whether the run is as it was."""
    before = held(*run)
    with at.manager(root, config, auto_resume=False, branch=f"{at.name}-{rev}") as ckpt:
        put(ckpt, run)
        error = told(lambda: ckpt.goto(rev))
    return held(*run) if not error else [error, held(*run) == before]


def stages_cut_anew(at: Setting) -> dict[str, Any]:
    with at.manager("stages") as ckpt:
        put(ckpt, trained(HALVES[at.rank]))
        ckpt.save("halves", wait=True)
    found = {}
    for name, stages in (("same", HALVES), ("odd", ODD), ("whole", WHOLE), ("three", (("l0",), ("l1", "l2", "l3")))):
        with at.manager("stages", branch=name, base="halves") as ckpt:
            run = put(ckpt, cut(stages[at.rank], seed=1))
            found[name] = held(*run)
            report = ckpt.restore()
            found[f"{name} report"] = [report.missing, report.unexpected, report.notes, report.per_rank]
        found[f"{name} by goto"] = gone_to(at, "stages", "halves", cut(stages[at.rank], seed=1))
    found["odd for all"] = gone_to(at, "stages", "halves", cut(ODD[at.rank], seed=1), Config(read="broadcast"))
    found["lost"] = gone_to(at, "stages", "halves", cut((("l0",), ("l2", "l3"))[at.rank], seed=1))
    return found


def stages_into_targets(at: Setting) -> dict[str, Any]:
    """As `stages_cut_anew`, into dictionaries: of a registered optimizer, and of one that torch's helper names."""
    found = {}
    with at.manager("stages", auto_resume=False, branch="targets") as ckpt:
        own = ckpt.load("halves")
        found["own"] = [sorted(own["model"]), sorted(own["optimizer"]["state"])]
        model, optimizer = put(ckpt, cut(ODD[at.rank], seed=1))
        loaded = ckpt.load("halves", into={"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        found["notes"] = ckpt.last_report.notes
        optimizer.load_state_dict(loaded["optimizer"])
        found["registered"] = held(model, optimizer)
        model, optimizer = trained(HALVES[at.rank])
        ckpt.save("named", dict(zip(("net", "moments"), get_state_dict(model, optimizer), strict=True)), wait=True)
        model, optimizer = cut(ODD[at.rank], seed=1)
        state = get_state_dict(model, optimizer)
        loaded = ckpt.load("named", into={"net": state[0], "moments": state[1]})
        found["moments"] = sorted(loaded["moments"]["state"])
        set_state_dict(model, optimizer, model_state_dict=loaded["net"], optim_state_dict=loaded["moments"])
        found["named"] = held(model, optimizer)
        odd = {"model": model.state_dict()}
        del odd["model"]["l2.weight" if at.rank == 0 else "l3.weight"]
        found["lost"] = told(lambda: ckpt.load("halves", into=odd))
        found["unexpected"] = ckpt.last_report.unexpected
        found["anyhow"] = told(lambda: ckpt.load("halves", into=odd, strict=False))
        found["dry"] = told(lambda: ckpt.load("halves", into=odd, dry_run=True))
    return found


def stages_sharded(at: Setting) -> Any:
    """Stages to shards of the whole model, on as many ranks."""
    model, _ = cut(WHOLE[0], seed=1)
    for layer in model.values():
        fully_shard(layer, mesh=mesh_of((at.size,)))
    run = model, torch.optim.AdamW(model.parameters(), foreach=False)
    with at.manager("stages", auto_resume=False, branch="sharded") as ckpt:
        put(ckpt, run)
        ckpt.goto("halves")
    return held(*run)


# -- whole models into stages --------------------------------------------------------------------------------------------


def whole_into_stages(at: Setting) -> dict[str, Any]:
    """What a single process saved, and what two ranks did, by `goto` and by registering."""
    with at.manager("whole") as ckpt:
        put(ckpt, trained(WHOLE[at.rank]))
        ckpt.save(wait=True)
    found: dict[str, Any] = {}
    for root in ("single", "whole"):
        found[f"{root} by goto"] = gone_to(at, root, "main", cut(HALVES[at.rank], seed=1))
        with at.manager(root, branch="stages") as ckpt:
            run = put(ckpt, cut(HALVES[at.rank], seed=1))
            found[root] = held(*run)
            found[f"{root} report"] = sorted(ckpt.restore().unexpected)
            found[f"{root} saved"] = told(lambda: ckpt.save(wait=True))
    optional = Config(items={"model": ItemSpec(required=False)})
    with at.manager("whole", optional, auto_resume=False, branch="optional") as ckpt:
        ckpt.model, optimizer = cut(HALVES[at.rank], seed=1)
        ckpt.goto("main")
        found["optional"] = [held(ckpt.model, optimizer), [note for note in ckpt.last_report.notes if "not required" in note]]
    return found


def nobodys(at: Setting) -> dict[str, Any]:
    """Layers, and moments, that the commit has and no rank of this job."""
    without = (("l0", "l1"), ("l2",))
    found: dict[str, Any] = {"goto": gone_to(at, "whole", "main", cut(without[at.rank], seed=1))}
    with at.manager("whole", branch="nobodys") as ckpt:
        ckpt.model, _ = cut(without[at.rank], seed=1)
        found["restore"] = told(ckpt.restore)
        found["save"] = told(ckpt.save)
        found["unexpected"] = ckpt.last_report.unexpected
        ckpt.unregister("model")
        ckpt.restore()
        ckpt.model, _ = cut(without[at.rank], seed=1)  # after the branch was opened: heard of by the next save
        found["late"] = told(ckpt.save)
        ckpt.unregister("model")
        ckpt.model, _ = cut(HALVES[at.rank], seed=1)
        found["put right"] = told(lambda: ckpt.save(wait=True))
    with at.manager("whole", branch="moments") as ckpt:
        model, optimizer = cut(HALVES[at.rank], seed=1)
        ckpt.model, ckpt.optimizer = model, torch.optim.AdamW([*model.parameters()][: 4 - at.rank])
        found["moments"] = told(ckpt.restore)
        ckpt.unregister("optimizer")
        ckpt.optimizer = optimizer
        found["moments put right"] = [told(ckpt.restore), held(model, optimizer)]
    return found


# -- names of items ------------------------------------------------------------------------------------------------------


def other_items(at: Setting) -> dict[str, Any]:
    here = {"a": {}, ("b" if at.rank else "c"): 1}
    found = {"save": told(lambda: at.ckpt.save(None, here)), "prewarm": told(lambda: at.ckpt.prewarm(here))}
    at.ckpt.save("ab", {"a": {"n": at.rank}, "b": 1}, wait=True)
    into: dict[str, Any] = {"a": {"n": 0}} if at.rank else {"a": {"n": 0}, "b": 0}
    found["load"] = told(lambda: at.ckpt.load("ab", into=into))
    found["partial"] = told(lambda: at.ckpt.load("ab", into=into, strict=False))
    found["empty"] = told(lambda: at.ckpt.save("empty", {"a": {"n": at.rank} if at.rank else {}, "b": 1}, wait=True))
    with at.manager("others", auto_resume=False) as ckpt:
        ckpt.a = 1
        if at.rank:
            ckpt.b = 1
        found["step"] = told(ckpt.step_up)
        if not at.rank:
            ckpt.b = 1
        found["put right"] = told(lambda: ckpt.save(wait=True))
        if at.rank:
            ckpt.unregister("b")
        found["goto"] = told(lambda: ckpt.goto("HEAD"))
    return found


# -- FSDP1, and dictionaries of torch's helper -----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).sum()


def whole_on_rank_0(at: Setting) -> dict[str, Any]:
    """FSDP1's dictionaries with `rank0_only`, which are empty on other ranks, into its shards and into themselves."""

    def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=True)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def kept(kind: str) -> Any:
        if kind == "sharded":
            return StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        full = {"rank0_only": kind == "rank 0", "offload_to_cpu": False}
        return StateDictType.FULL_STATE_DICT, FullStateDictConfig(**full), FullOptimStateDictConfig(**full)

    def states(run: tuple[FSDP, torch.optim.Optimizer], kind: str) -> dict[str, Any]:
        with FSDP.state_dict_type(run[0], *kept(kind)):
            return {"model": run[0].state_dict(), "optimizer": FSDP.optim_state_dict(*run)}

    def digests(state: dict[str, Any]) -> dict[str, Any]:
        moments = {f"{name} {key}": value for name, each in state["optimizer"]["state"].items() for key, value in each.items()}
        return {name: digest(value) for name, value in (state["model"] | moments).items()}

    run = build(1)
    run[0](torch.ones(2, 6)).backward()
    run[1].step()
    at.ckpt.save("rank0", states(run, "rank 0"), wait=True)
    found: dict[str, Any] = {"saved": digests(states(run, "full")), "keys": len(states(run, "rank 0")["model"])}
    again = build(2)
    into = states(again, "sharded")
    loaded = at.ckpt.load("rank0", into=into)
    with FSDP.state_dict_type(again[0], *kept("sharded")):
        again[0].load_state_dict(loaded["model"])
        again[1].load_state_dict(FSDP.optim_state_dict_to_load(*again, loaded["optimizer"]))
    found["sharded"] = digests(states(again, "full"))
    into = states(build(2), "rank 0")
    at.ckpt.load("rank0", into=into)
    found["rank 0"] = {name: digest(value) for name, value in into["model"].items()}
    return found


OPTIONS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full on rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full and flat": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
}


NOT_SET = ("full on rank 0", "full and flat")
"""Of which torch's helper restores nothing: all ranks need the whole state, and the last one is a KeyError of its own."""


def helper_dictionaries(at: Setting) -> dict[str, Any]:
    """Save under each of the options of torch's helper, and load each under each that has the same form."""

    def build(seed: int) -> Trained:
        torch.manual_seed(seed)
        model = Net()
        fully_shard(model.up, mesh=mesh_of((at.size,)))
        fully_shard(model, mesh=mesh_of((at.size,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    def states(run: Trained, options: StateDictOptions) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(*run, options=options), strict=True))

    run = build(1)
    step(*run)
    found: dict[str, Any] = {"saved": held(*run)}
    for name, options in OPTIONS.items():
        at.ckpt.save(name.replace(" ", "-"), states(run, options), wait=True)
    for saved, was in OPTIONS.items():
        for name, options in OPTIONS.items():
            if was.flatten_optimizer_state_dict != options.flatten_optimizer_state_dict or name in NOT_SET:
                continue
            fresh = build(2)
            into = states(fresh, options)
            loaded = at.ckpt.load(saved.replace(" ", "-"), into=into)
            set_state_dict(*fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options)
            found[f"{saved} as {name}"] = held(*fresh)
    return found


# -- experts ---------------------------------------------------------------------------------------------------------------


EXPERTS = 8


def experts(mine: Sequence[int], *, seed: int) -> Trained:
    """Return a layer of which every rank has the gate, and each some experts, under the names that they have in all."""
    torch.manual_seed(seed)
    gate, every = nn.Linear(4, EXPERTS), {f"e{number}": nn.Linear(4, 3) for number in range(EXPERTS)}
    model = nn.ModuleDict({"gate": gate, **{f"e{number}": every[f"e{number}"] for number in mine}})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def dealt(at: Setting) -> list[int]:
    return list(range(at.rank, EXPERTS, at.size))


def experts_of(at: Setting, mine: Sequence[int]) -> dict[str, Any]:
    with at.manager("experts") as ckpt:
        run = put(ckpt, experts(mine, seed=at.size))
        if ckpt.resumed is None:
            step(*run)
        ckpt.save(wait=True)
        notes = [note for note in ckpt.last_report.notes if note.startswith("optimizer")]
    return {"held": held(*run), "notes": notes}


def experts_dealt(at: Setting) -> dict[str, Any]:
    return experts_of(at, dealt(at))


def experts_dealt_anew(at: Setting) -> dict[str, Any]:
    """On as many ranks: the first half to rank 0."""
    half = EXPERTS // at.size
    return experts_of(at, range(at.rank * half, (at.rank + 1) * half))


# -- a mesh of three dimensions ----------------------------------------------------------------------------------------------


def on_mesh(kind: str, size: int, *, seed: int) -> Trained:
    torch.manual_seed(seed)
    model = Net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "hsdp x tp":
        mesh = mesh_of((2, 2, size // 4), ("replicate", "shard", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["replicate", "shard"])
    elif kind == "tp":
        parallelize_module(model, mesh_of((size,)), plan)
    else:
        fully_shard(model, mesh=mesh_of((size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def cube(at: Setting) -> dict[str, Any]:
    """Save on a mesh of 2 x 2 x 2, read it in one dimension, save that, and read it on the mesh."""
    found = {}
    with at.manager("cube", auto_resume=False) as ckpt:
        run = put(ckpt, on_mesh("hsdp x tp", at.size, seed=1))
        step(*run)
        found["placements"] = [str(parameter.placements) for parameter in run[0].parameters()]
        found["saved"] = held(*run)
        ckpt.save("cube", wait=True)
    for kind, rev in (("fsdp", "cube"), ("hsdp x tp", "cube"), ("hsdp x tp", "fsdp")):
        with at.manager("cube", auto_resume=False, branch=f"{kind}-of-{rev}".replace(" ", "")) as ckpt:
            run = put(ckpt, on_mesh(kind, at.size, seed=2))
            ckpt.goto(rev)
            found[f"{rev} as {kind}"] = held(*run)
            if kind == "fsdp":
                ckpt.save("fsdp", wait=True)
    return found


def cube_on_two(at: Setting) -> dict[str, Any]:
    found = {}
    for kind in ("fsdp", "tp"):
        with at.manager("cube", auto_resume=False, branch=f"two-{kind}") as ckpt:
            run = put(ckpt, on_mesh(kind, at.size, seed=3))
            ckpt.goto("cube")
            found[kind] = held(*run)
    return found


# -- jobs --------------------------------------------------------------------------------------------------------------------


def alone(rank: int, folder: str) -> None:
    play(rank, folder, "alone", [saved_alone])


def on_eight(rank: int, folder: str) -> None:
    play(rank, folder, "on_eight", [experts_dealt, cube])


def on_two(rank: int, folder: str) -> None:
    scenarios: list[Callable[[Setting], Any]] = [
        stages_cut_anew,
        stages_into_targets,
        whole_into_stages,
        nobodys,
        other_items,
        experts_dealt,
        experts_dealt_anew,
        # With collectives of torch's.
        stages_sharded,
        whole_on_rank_0,
        helper_dictionaries,
        cube_on_two,
    ]
    play(rank, folder, "on_two", scenarios)
