"""What the ranks of test_measured_faults.py do: a job of four ranks, and one of two that goes on with what it saved."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from failure_ranks import writer
from layouts_ranks import Own, mesh_of
from moves_ranks import flip
from scenarios_ranks import Setting, bits, laid_out, local, numbers, pattern, play, told
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import syckpt
from syckpt import (
    CheckpointManager,
    DTensorResharder,
    ItemSpec,
    JsonSerialization,
    LayoutInfo,
    SafetensorsSerialization,
    TorchSerialization,
)
from syckpt.stores.faults import FaultPlan, faulty

# -- saves, one after the other ----------------------------------------------------------------------------------------

STEPS = range(2, 7)


def values(step: int) -> dict[str, torch.Tensor]:
    """Return the state of a step, whole, on every rank and in the test: what deltas by subtraction, or few dtypes, would break."""
    made = torch.Generator().manual_seed(step)
    wide = torch.randn(10, 6, generator=made)
    wide[3] = torch.tensor([1e10, -0.0, float("inf"), float("nan"), 1e-3, -1e-38])[torch.randperm(6, generator=made)]
    return {
        "w": wide,
        "half": torch.randn(5, 3, generator=made).to(torch.bfloat16),
        "flags": torch.randint(0, 2, (9,), generator=made).bool(),
        "eighth": torch.randint(0, 250, (8, 2), generator=made, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "turned": torch.randn(6, 4, generator=made).t(),
        "plain": torch.randn(7, generator=made),
    }


def state(step: int) -> dict[str, Any]:
    """Return the same on ranks: by rows, by columns, or plain; and the transpose of a shard, which is not contiguous."""
    whole = values(step)
    sharded = {name: laid_out(whole[name], Shard(0)) for name in ("w", "half", "flags", "eighth")}
    return {**sharded, "turned": laid_out(whole["turned"].t().contiguous(), Shard(0)).t(), "plain": whole["plain"]}


def saved_again_and_again(at: Setting) -> dict[str, Any]:
    """Save one state twice, once under a name that is taken, and then five states without waiting for any of them."""
    found: dict[str, Any] = {}
    with at.manager("history") as ckpt:
        ckpt.values = state(1)
        found["same"] = [ckpt.save("once").result().id, ckpt.save().result().id]
        found["stored"] = [commit.stats["encoded_bytes"] for commit in ckpt.log(2)[::-1]]
        found["taken"] = told(lambda: ckpt.save("once", wait=True))
        chain = []
        for step in STEPS:
            ckpt.values = live = state(step)
            chain.append(ckpt.save())
        found["is strided"] = local(live["turned"]).stride() == (1, 4)
        ckpt.wait()
        found["chain"] = [pending.id for pending in chain]
    return found


def read_again(at: Setting) -> list[bool]:
    """Read every commit of the five into shards of the last dimension; return whether all bits of this rank's parts are there."""
    found = []
    with at.manager("history", auto_resume=False) as ckpt:
        for step in STEPS:
            whole = values(step)
            into = {name: laid_out(torch.zeros_like(value), Shard(value.ndim - 1)) for name, value in whole.items()}
            ckpt.load(f"HEAD~{STEPS[-1] - step}", into={"values": into})
            found.append(all(bits(into[name]) == bits(laid_out(value, Shard(value.ndim - 1))) for name, value in whole.items()))
    return found


def unsavable(at: Setting) -> dict[str, Any]:
    """On rank 1, something that nothing can carry is in the state."""
    with at.manager("unsavable") as ckpt:
        ckpt.good = {"step": 0}
        base = ckpt.save(wait=True).id
        ckpt.odd = {"set": {1, 2}, "function": print if at.rank == 1 else None}
        refused = told(lambda: ckpt.save(wait=True))
        hash_then = ckpt.hash
        ckpt.odd = {"set": {1, 2}, "function": None}
        following = ckpt.save(wait=True).result()
    return {"base": base, "refused": refused, "hash": hash_then, "parents": list(following.parents)}


# -- branches and exports ----------------------------------------------------------------------------------------------


def branched(at: Setting) -> dict[str, Any]:
    """Make a branch on which nothing was saved yet; export it, leave it, go to it."""
    found: dict[str, Any] = {}
    state = Own(laid_out(pattern(10, 3), Shard(0)))
    with at.manager("branches") as ckpt:
        ckpt.state = state
        ckpt.save(wait=True)
        ckpt.create_branch("exp")
        ckpt.export_ckpt("exp", at.folder / "exp.pt")
        ckpt.checkout_branch("main")
        local(state.value).fill_(-7)
        ckpt.goto("exp")
        found["gone to"] = numbers(state.value)
        ckpt.checkout_branch("exp")
        local(state.value).fill_(2.0)
        ckpt.step_up()
        ckpt.save(wait=True)
        ckpt.checkout_branch("main")
        found["main"] = numbers(state.value)
        found["branches"] = ckpt.list_branches()
    return found


def plain_value_saved(at: Setting) -> dict[str, Any]:
    """Save a plain value that holds DTensors, go on, and go back."""
    whole = pattern(10, 3)
    with at.manager("plain") as ckpt:
        ckpt.state = {"w": laid_out(whole, Shard(0)), "tie": None, "step": 1}
        ckpt.state["tie"] = ckpt.state["w"]
        ckpt.save("first", wait=True)
        ckpt.state = {"w": laid_out(whole + 1, Shard(1)), "tie": None, "step": 2, "new": laid_out(whole, Shard(0))}
        ckpt.save("second", wait=True)
        ckpt.goto("first")
        gone_back = ckpt.state
    return {"keys": sorted(gone_back), "tied": gone_back["w"] is gone_back["tie"], "w": numbers(gone_back["w"]), "step": gone_back["step"]}


def plain_value_restored(at: Setting) -> dict[str, Any]:
    """Resume it on another number of ranks, in the layout of what is registered."""
    with at.manager("plain") as ckpt:
        ckpt.state = {"w": laid_out(torch.zeros(10, 3), Shard(0)), "tie": None, "step": 0, "new": None}
        found = ckpt.state
    return {"w": numbers(found["w"]), "step": found["step"], "new": numbers(found["new"])}


def best_of_two_runs(at: Setting) -> dict[str, Any]:
    """Save a good metric, and in a manager made anew a worse one."""
    for name, metric in (("good", 1.0), ("worse", 99.0)):
        with at.manager("best") as ckpt:
            ckpt.state = {"w": laid_out(pattern(10, 3, seed=int(metric)), Shard(0))}
            ckpt.state = {"w": laid_out(pattern(10, 3, seed=int(metric)), Shard(0))}  # The first one was restored.
            ckpt.step_up()
            ckpt.save(name, metric=metric, wait=True)
    with at.manager("best") as ckpt:
        ckpt.export_ckpt("best", at.folder / "best.pt")
        return {"best": ckpt.load("best")["state"]["w"].tolist(), "metrics": [commit.metric for commit in ckpt.log()]}


# -- damage ------------------------------------------------------------------------------------------------------------


def damaged(at: Setting) -> dict[str, Any]:
    """Flip a bit of what rank 2 stored in one commit, cut off what rank 1 stored in another; load both on all ranks."""
    found = {}
    for name, owner in (("flipped", 2), ("cut", 1)):
        whole = laid_out(pattern(64, 3, seed=owner), Shard(0))  # Not alike: what is stored already would not be written again.
        commit = at.ckpt.save(name, {name: {"w": whole}}, wait=True).id
        if at.rank == 0 and name == "flipped":
            flip(str(at.folder / "shared"), commit, owner)
        elif at.rank == 0:
            blob = at.folder / f"shared/.syckpt/objects/{commit}/r{owner:05d}.safetensors"
            os.truncate(blob, blob.stat().st_size - 1)
        at.meet(name)
        target = laid_out(torch.zeros(64, 3), Shard(0))
        error = told(lambda name=name, target=target: at.ckpt.load(name, into={name: {"w": target}}))  # type: ignore[misc]
        pairs = zip(local(target).flatten().tolist(), local(whole).flatten().tolist(), strict=True)
        old_or_right = all(value in (0.0, right) for value, right in pairs)
        found[name] = [error.replace(commit, "COMMIT"), old_or_right]
    return found


def one_rank_does_not_fit(at: Setting) -> list[Any]:
    """Load into targets of which only rank 1's last one does not fit."""
    at.ckpt.save("fits", {"fits": {"a": torch.ones(3), "b": laid_out(torch.ones(4), Shard(0)), "z": torch.ones(2)}}, wait=True)
    into = {"a": torch.zeros(3), "b": laid_out(torch.zeros(4), Shard(0)), "z": torch.zeros(2 + at.rank)}
    error = told(lambda: at.ckpt.load("fits", into={"fits": into}))
    return [error, {name: numbers(value) for name, value in into.items()}]


# -- names and types ---------------------------------------------------------------------------------------------------


def alike() -> dict[Any, Any]:
    """Return names that are one where they are joined by dots or made texts, and names that markers of other formats have."""
    return {
        "a.b": laid_out(torch.arange(8.0), Shard(0)),
        "a": {"b": laid_out(torch.arange(8.0) + 100, Shard(0)), 1: torch.ones(1), "1": torch.zeros(1)},
        "__tensor__": 3,
        "__tuple__": [1, 2],
        "n": {1: 2, "t": (1, [2]), None: math.nan},
    }


class Scheduled:
    """An optimizer without gradients, whose learning rate falls at the third step: its schedule has integers as keys."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[3], gamma=0.01)

    def step(self, count: int) -> float:
        for _ in range(count):
            self.optimizer.step()
            self.scheduler.step()
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr

    def register(self, ckpt: CheckpointManager) -> None:
        ckpt.optimizer, ckpt.scheduler = self.optimizer, self.scheduler


def named_alike(at: Setting) -> float:
    run = Scheduled()
    with at.manager("names") as ckpt:
        run.register(ckpt)
        ckpt.names = alike()
        lr = run.step(2)
        ckpt.save(metric=math.nan, wait=True)
    return lr


def named_alike_again(at: Setting) -> dict[str, Any]:
    run = Scheduled()
    with at.manager("names") as ckpt:
        run.register(ckpt)
        found = ckpt.load("HEAD", into={"names": alike()})["names"]
    return {
        "a.b": numbers(found["a.b"]),
        "a": [[type(key).__name__, key, numbers(value)] for key, value in found["a"].items()],
        "markers": [found["__tensor__"], found["__tuple__"]],
        "n": repr(found["n"]),
        "lr": [run.step(0), run.step(4)],
    }


class Point(NamedTuple):
    x: int
    y: Any


def forms() -> dict[str, Any]:
    return {"one": torch.tensor([5.0]), "single": torch.ones(3), "list": [1, 2, 3], "point": Point(1, torch.ones(1)), "more": {"x": 1}}


WRONG_FORMS: dict[str, Any] = {
    "one": lambda: torch.zeros(3),
    "single": lambda: torch.zeros(3, dtype=torch.bfloat16),
    "new": lambda: torch.zeros(1),
    "more": dict,
}


def forms_kept(at: Setting) -> dict[str, Any]:
    """Load plain values on the ranks that saved them: one target of another form at a time, then all as they were."""
    at.ckpt.save("forms", {"forms": forms()}, wait=True)
    found: dict[str, Any] = {}
    for name, wrong in WRONG_FORMS.items():
        into = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in forms().items()}
        into[name] = wrong()
        error = told(lambda into=into: at.ckpt.load("forms", into={"forms": into}))  # type: ignore[misc]
        touched = [key for key, value in into.items() if isinstance(value, torch.Tensor) and value.any()]
        found[name] = [error, touched]
    into = {**forms(), "list": [0, 0], "point": Point(0, torch.zeros(1))}
    loaded = at.ckpt.load("forms", into={"forms": into})["forms"]
    found["loaded"] = [loaded["list"], type(loaded["point"]).__name__, loaded["point"].x, loaded["point"].y.tolist()]
    return found


# -- other processes, all ranks' parts ---------------------------------------------------------------------------------


def read_meanwhile(at: Setting) -> dict[str, Any]:
    """While all ranks hold their manager, another process and a second manager work in the same directory."""
    found: dict[str, Any] = {}
    root = at.folder / "busy"
    with at.manager("busy") as ckpt:
        ckpt.state = {"w": laid_out(pattern(10, 3), Shard(0))}
        first = ckpt.save(wait=True).id
        if at.rank == 0:
            command = [sys.executable, "-m", "syckpt", "-C", str(root), "log", "--json"]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found["other process"] = [commit["id"] == first for commit in json.loads(shown)]
        found["read"] = bool(torch.equal(syckpt.load(root)["state"]["w"], pattern(10, 3)))
        with at.manager("busy", branch="eval", base="main") as other:
            other.state = {"w": laid_out(torch.zeros(10, 3), Shard(0))}
            second = other.save("evaluated", wait=True).result()
            third = ckpt.save(wait=True).result()
        found["parents"] = [second.parents == (first,), third.parents == (first,)]
        found["branches"] = [second.branch, third.branch]
    return found


class Tied(nn.Module):
    """An embedding that is its own head, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight


class Run:
    """The tied model under FSDP2, and its optimizer."""

    def __init__(self, *, seed: int, lr: float) -> None:
        torch.manual_seed(seed)
        self.model = Tied()
        fully_shard(self.model, mesh=mesh_of((dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.5, lr))

    def register(self, ckpt: CheckpointManager) -> None:
        ckpt.model, ckpt.optimizer = self.model, self.optimizer

    def step(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = laid_out(pattern(*parameter.shape, seed=number), Shard(0))
        self.optimizer.step()

    def found(self) -> dict[str, Any]:
        names = {name: parameter for name, parameter in self.model.named_parameters() if parameter in self.optimizer.state}
        moments = {f"{name} {key}": self.optimizer.state[names[name]][key] for name in names for key in ("exp_avg", "exp_avg_sq")}
        return {name: numbers(value) for name, value in {**dict(self.model.named_parameters()), **moments}.items()}


def tied_saved(at: Setting) -> dict[str, Any]:
    run = Run(seed=1, lr=5e-4)
    with at.manager("tied") as ckpt:
        run.register(ckpt)
        run.step()
        ckpt.save(wait=True)
    return run.found()


def tied_restored(at: Setting) -> dict[str, Any]:
    run = Run(seed=2, lr=1e-3)
    with at.manager("tied") as ckpt:
        run.register(ckpt)
    group = run.optimizer.param_groups[0]
    return {
        "found": run.found(),
        "tied": run.model.head.weight is run.model.embedding.weight,
        "settings": [group["lr"], list(group["betas"])],
    }


def replicated(at: Setting) -> dict[str, Any]:
    """The very first save of a model in DistributedDataParallel, and a second one. Wrapping is a collective; nothing can fail before."""
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = pattern(*parameter.shape, seed=number)
    optimizer.step()
    with at.manager("ddp") as ckpt:
        ckpt.model, ckpt.optimizer = model, optimizer
        ids = [ckpt.save(wait=True).id]
        optimizer.step()
        ckpt.step_up()
        ids.append(ckpt.save(wait=True).id)
    return {"ids": ids, "weight": model.module[0].weight.tolist()}


def writers(at: Setting) -> dict[str, Any]:
    """Look at the process that writes for this rank."""
    at.ckpt.save("writers", {"x": at.rank}, wait=True)
    process = Path(f"/proc/{writer(at.ckpt)}")
    mine = Path("/proc/self")
    return {
        "another program": process.joinpath("cmdline").read_bytes() != mine.joinpath("cmdline").read_bytes(),
        "torch there": "libtorch" in process.joinpath("maps").read_text(),
        "torch here": "libtorch" in mine.joinpath("maps").read_text(),
    }


# -- resharding --------------------------------------------------------------------------------------------------------


def leaves(at: Setting, *, fill: bool) -> dict[str, Any]:
    whole = torch.ones(4) if fill else torch.zeros(4)
    return {"a": laid_out(whole, Shard(0)), "n": int(fill), "text": "saved" if fill else "", "nested": [{"lr": 5e-4 if fill else 1e-3}]}


def reshardable_saved(at: Setting) -> None:
    """Save leaves that are no tensors beside a sharded one, with the default resharder by its name and without one."""
    at.ckpt.save("leaves", {"named": leaves(at, fill=True), "unnamed": leaves(at, fill=True)}, wait=True)
    at.ckpt.save("wrong", {"wrong": {"w": laid_out(pattern(10, 6), Shard(0)), "plain": torch.ones(7)}}, wait=True)


def leaves_restored(at: Setting) -> dict[str, Any]:
    loaded = at.ckpt.load("leaves", into={name: leaves(at, fill=False) for name in ("named", "unnamed")})
    return {name: {**value, "a": numbers(value["a"])} for name, value in loaded.items()}


WRONG: dict[str, Callable[[], torch.Tensor]] = {
    "larger": lambda: laid_out(torch.zeros(11, 6), Shard(0)),
    "smaller": lambda: laid_out(torch.zeros(9, 6), Shard(0)),
    "of one dimension": lambda: laid_out(torch.zeros(60), Shard(0)),
    "of another dtype": lambda: laid_out(torch.zeros(10, 6, dtype=torch.int32), Shard(0)),
    "to broadcast": lambda: laid_out(torch.zeros(1, 6), Replicate()),
}


def wrong_targets(at: Setting) -> dict[str, Any]:
    """Load into targets of which one has another form, on all ranks; return what came of it, and whether any tensor was touched."""
    found = {}
    for name, wrong in WRONG.items():
        into = {"plain": torch.full((7,), 3.0), "w": wrong()}
        error = told(lambda into=into: at.ckpt.load("wrong", into={"wrong": into}))  # type: ignore[misc]
        found[name] = [error, into["plain"].tolist(), bool(local(into["w"]).any())]
    return found


def changing(at: Setting) -> list[Any]:
    """Save an item with a resharder whose tensors become others: other shards, another shape, fewer and more of them."""
    steps: list[dict[str, Any]] = [
        {"w": laid_out(pattern(8, 4), Shard(0)), "v": laid_out(torch.ones(4), Shard(0))},
        {"w": laid_out(pattern(8, 4), Shard(1)), "v": torch.ones(4)},
        {"w": laid_out(pattern(6, 5), Shard(0))},
        {"w": laid_out(pattern(6, 5), Shard(0)), "n": {"new": laid_out(torch.arange(5.0), Shard(0))}},
    ]
    for number, value in enumerate(steps):
        at.ckpt.save(f"changing-{number}", {"changing": value}, wait=True)
    return [sorted(at.ckpt.load(f"changing-{number}")["changing"]) for number in range(len(steps))]


# -- files and formats -------------------------------------------------------------------------------------------------


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


PICKLED = CheckpointManager.Config(items={"odd": ItemSpec(layout=LayoutInfo("odd_{rank}.pt", TorchSerialization(weights_only=False)))})


def pickled(at: Setting) -> None:
    with at.manager("pickled", PICKLED) as ckpt:
        ckpt.save(None, {"odd": {"trap": Trap(str(at.folder / f"sprung-{at.rank}"))}, "good": {"n": 1}}, wait=True)


def unpickled(at: Setting) -> dict[str, Any]:
    """Load what needs unpickling without saying so, then the rest, then with the spec that says so."""
    sprung = at.folder / f"sprung-{at.rank}"
    with at.manager("pickled", auto_resume=False) as ckpt:
        refused = told(lambda: ckpt.load("HEAD"))
        rest = ckpt.load("HEAD", into={"good": {"n": 0}})["good"]
    before = sprung.exists()
    with at.manager("pickled", PICKLED, auto_resume=False) as ckpt:
        ckpt.load("HEAD", into={"odd": {"trap": None}})
    return {"refused": refused, "rest": rest, "sprung": [before, sprung.exists()]}


def shown_as_safetensors(at: Setting) -> dict[str, Any]:
    """Show as safetensors what that cannot say: names that its dots make one, values that are no tensors; and tied tensors."""
    tied = laid_out(torch.arange(8.0), Shard(0))
    both = told(lambda: at.ckpt.save(None, {"weights": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}))
    number = told(lambda: at.ckpt.save(None, {"weights": {"w": torch.ones(1), "step": 3}}))
    at.ckpt.save("tied", {"weights": {"x": tied, "y": tied}}, wait=True)
    loaded = at.ckpt.load("tied")["weights"]
    return {"names": both, "number": number, "tied": loaded["x"] is loaded["y"], "values": loaded["x"].tolist()}


def shown_as_json(at: Setting) -> dict[str, Any]:
    """Show as JSON what that cannot say, then without a layout."""
    value = {1: 2, "t": (1, 2), "nan": math.nan}
    refused = {
        name: told(lambda part=part: at.ckpt.save(None, {"notes": part}))  # type: ignore[misc]
        for name, part in (("key", {1: 2, "t": 3}), ("tuple", {"t": (1, 2)}), ("nan", {"n": math.nan}))
    }
    at.ckpt.save("typed", {"typed": value}, wait=True)
    return {**refused, "typed": repr(at.ckpt.load("typed")["typed"])}


def in_one_file(at: Setting) -> dict[str, Any]:
    """Let all ranks fill one file, differently and alike."""
    refused = told(lambda: at.ckpt.save(None, {"shared": {"rank": at.rank}}))
    at.ckpt.save("shared", {"shared": {"rank": 7}}, wait=True)
    return {"refused": refused, "loaded": at.ckpt.load("shared")["shared"]}


# -- a save that is killed ---------------------------------------------------------------------------------------------


def killed_writer(at: Setting) -> dict[str, Any]:
    """Kill rank 2's writer in the middle of a save, which waits at a gate; then save, and save again from a new manager."""
    gate, mine = at.folder / "gate", at.rank == 2
    with at.manager("killed") as ckpt:
        ckpt.state = Own(laid_out(pattern(10, 3), Shard(0)))
        base = ckpt.save(wait=True).id
    plan = FaultPlan(spare=os.getpid(), gate=str(gate))
    root: Any = faulty(at.folder / "killed/.syckpt", plan) if mine else at.folder / "killed"
    if mine:
        os.mkfifo(gate)
    ckpt = CheckpointManager(root, timeout_s=60, rng=False, save_on_exit=False)
    ckpt.state = Own(laid_out(torch.zeros(10, 3), Shard(0)))
    ckpt.stray = {"of the killed save": laid_out(torch.ones(4), Shard(0))}
    pending = ckpt.save()
    if mine:
        os.kill(writer(ckpt), signal.SIGKILL)
        gate.unlink()
    died = told(pending.result)
    ckpt.unregister("stray")
    heard = told(lambda: ckpt.save(wait=True))
    following = ckpt.save("next", wait=True).result()
    told(ckpt.close)
    with at.manager("killed") as ckpt:
        ckpt.state = Own(laid_out(torch.zeros(10, 3), Shard(0)))
        ckpt.save("last", wait=True)
    return {"base": base, "killed": pending.id, "died": died, "heard": heard, "next": following.id, "parents": list(following.parents)}


# -- jobs --------------------------------------------------------------------------------------------------------------

ITEMS = {
    "named": ItemSpec(resharder=DTensorResharder()),
    "changing": ItemSpec(resharder=DTensorResharder()),
    "weights": ItemSpec(layout=LayoutInfo("weights.safetensors", SafetensorsSerialization())),
    "notes": ItemSpec(layout=LayoutInfo("notes.json", JsonSerialization())),
    "shared": ItemSpec(layout=LayoutInfo("shared.json", JsonSerialization())),
}


def on_four(rank: int, folder: str) -> None:
    scenarios = [
        replicated,
        saved_again_and_again,
        unsavable,
        branched,
        plain_value_saved,
        best_of_two_runs,
        damaged,
        named_alike,
        read_meanwhile,
        tied_saved,
        writers,
        reshardable_saved,
        changing,
        pickled,
        shown_as_safetensors,
        shown_as_json,
        in_one_file,
        killed_writer,
    ]
    play(rank, folder, "on_four", scenarios, items=ITEMS)


def back_on_two(rank: int, folder: str) -> None:
    scenarios = [
        read_again,
        plain_value_restored,
        named_alike_again,
        forms_kept,
        one_rank_does_not_fit,
        tied_restored,
        leaves_restored,
        wrong_targets,
        unpickled,
    ]
    play(rank, folder, "back_on_two", scenarios, items=ITEMS)
