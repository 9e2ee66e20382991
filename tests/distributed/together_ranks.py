"""The parts of test_together.py that run in each rank (and, for a single process, in the test's own)."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts_ranks import digest, mesh_of
from moves_ranks import flip, manager, outcome
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import syckpt
from syckpt import CheckpointManager, ItemSpec, Resharder, ShardingMetadata

Config = CheckpointManager.Config


class Said(logging.Handler):
    """What syckpt's logger said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("syckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# --- a model with everything that is uncommon --------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied, frozen, never stepped, in two dtypes, with a buffer; shards of it are uneven or empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(7, 6), nn.Linear(6, 14).bfloat16(), nn.Linear(14, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.tiny, self.never = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3, 2))
        self.frozen = nn.Parameter(torch.ones(5, 3), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)


def build(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a fresh model of random values, and what a run registers of it, wrapped."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    model = Odd()
    registered: Any = model
    if kind in ("fsdp", "hsdp"):
        mesh = mesh_of((size,)) if kind == "fsdp" else mesh_of((2, size // 2), ("replicate", "shard"))
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
    elif kind == "tp":
        parallelize_module(model, mesh_of((size,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "compiled":
        registered = torch.compile(model, backend="eager")
    elif kind == "ddp of compiled":
        registered = DistributedDataParallel(torch.compile(model, backend="eager"))
    groups = [
        {"params": [value for value in model.parameters() if value.ndim > 1]},
        {"params": [value for value in model.parameters() if value.ndim == 1], "lr": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    return model, {"model": registered, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any) -> None:
    """Make a step; then the moments of bf16 parameters are kept in fp32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name != "never":
            parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    scheduler.step()
    scaler.scale(torch.ones(1))
    scaler.update(512.0)
    for parameter, state in optimizer.state.items():
        if parameter.dtype is torch.bfloat16:
            state |= {name: state[name].float() / 3 for name in ("exp_avg", "exp_avg_sq")}


def seen(model: nn.Module, registered: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: f"{value.dtype} {digest(value)}" for name, value in model.state_dict().items()}
    optimizer = registered["optimizer"]
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": f"{value.dtype} {digest(value)}" for key, value in optimizer.state.get(parameter, {}).items()}
    found["scheduler"] = [registered["scheduler"].last_epoch, [group["lr"] for group in optimizer.param_groups]]
    found["scaler"] = registered["scaler"].get_scale()
    return found


def odd(root: str, kinds: Sequence[str], earlier: Sequence[str], prefix: str, **how: Any) -> dict[str, Any]:
    """Save the same state under every kind, then read each commit, and the earlier ones, under every kind."""
    found: dict[str, Any] = {}
    commits = list(earlier)
    for kind in kinds:
        model, registered = build(kind)
        with manager(root, Config(**how), auto_resume=False, branch=f"{prefix}-{kind.replace(' ', '-')}") as ckpt:
            if not commits:
                train(model, *list(registered.values())[1:])
            for name, item in registered.items():
                ckpt.register(name, item)
            if commits:
                ckpt.goto(commits[0])
            commits.append(f"{prefix}-{kind.replace(' ', '-')}-commit")
            ckpt.save(commits[-1], wait=True)
            found[f"{kind} saved"] = seen(model, registered)
            for commit in commits:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                registered["optimizer"].state.clear()
                ckpt.goto(commit)
                found[f"{commit} under {kind}"] = seen(model, registered)
    return found


# --- an optimizer's state that is still to be made -----------------------------------------------------------------------------------


def laid_out(state: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    def shown(value: Any) -> list[str]:
        return [str(value.placements) if isinstance(value, DTensor) else "plain", str(value.dtype), digest(value)]

    return {str(key): {name: shown(value) for name, value in each.items()} for key, each in state["state"].items()}


def templates(root: str) -> dict[str, Any]:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
        fully_shard(model, mesh=mesh_of((2,)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    torch.manual_seed(1)
    model, optimizer = fresh()
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    with manager(root, auto_resume=False) as ckpt:
        ckpt.model, ckpt.optimizer = model, optimizer
        ckpt.save("named", wait=True)
        ckpt.save("numbered", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, wait=True)
    found: dict[str, Any] = {"saved": laid_out(optimizer.state_dict())}
    for read in ("ranged", "broadcast"):
        with manager(root, Config(read=read), auto_resume=False, branch=f"with-{read}") as ckpt:
            model, optimizer = fresh()
            ckpt.model, ckpt.optimizer = model, optimizer
            found[read] = laid_out(ckpt.load("named", into={"optimizer": optimizer.state_dict()})["optimizer"])
    with manager(root, auto_resume=False, branch="with") as ckpt:
        model, optimizer = fresh()
        ckpt.model, ckpt.optimizer = model, optimizer
        into = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        found["not wanted"] = laid_out(ckpt.load("named", into=into, partial=["model"])["optimizer"])
        found["a part"] = laid_out(ckpt.load("named", into=into, partial=["optimizer.state.model.1.bias.exp_avg"])["optimizer"])
        found["dry"] = ckpt.load("named", into=into, dry_run=True)
        optimizer.load_state_dict(ckpt.load("named", into=into)["optimizer"])
        found["taken"] = laid_out(optimizer.state_dict())
        optimizer.step()
    with manager(root, auto_resume=False, branch="without") as ckpt:
        model, optimizer = fresh()
        into = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        found["unregistered"] = laid_out(ckpt.load("numbered", into=into)["optimizer"])
        found["by name"] = laid_out(ckpt.load("named", into=into)["optimizer"])
        ckpt.model = model
        found["model only"] = laid_out(ckpt.load("named", into={"optimizer": into["optimizer"]})["optimizer"])
        found["without a manager"] = laid_out(syckpt.load(root, "numbered", into=into)["optimizer"])
        plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
        into = {"model": plain.state_dict(), "optimizer": torch.optim.AdamW(plain.parameters()).state_dict()}
        found["plain"] = laid_out(ckpt.load("numbered", into=into)["optimizer"])
    return found


# --- copies of sharded tensors -----------------------------------------------------------------------------------------------------


def copies(root: str, rank: int) -> dict[str, Any]:
    """Save tensors of which two ranks have each part, or all have all; then with a copy that is another one."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    state = {
        "hsdp": distribute_tensor(torch.arange(40_000.0).reshape(400, 100), mesh, [Replicate(), Shard(0)]),
        "all": distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Replicate(), Replicate()]),
        "split": distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)]),
    }
    said = Said()
    rounds = []
    with manager(root, auto_resume=False) as ckpt:
        ckpt.prewarm(state)
        for name in ("alike", "alike-again", "unlike"):
            if name == "unlike" and rank == 3:
                state["hsdp"].to_local()[-1, -1] = -1
            if name == "unlike" and rank == 1:
                state["all"].to_local()[0] = 7
            before = ckpt._coordinator.agreements
            ckpt.save(name, {"state": state}, wait=True)
            rounds.append(ckpt._coordinator.agreements - before)
        loaded = ckpt.load("unlike")["state"]
    warned = [text for text in said.texts if "copies" in text]
    return {"rounds": rounds[1:], "warned": warned, "last": loaded["hsdp"][-1, -1].item(), "first": loaded["all"][0].tolist()}


# --- read once for all, also where everything is restored ---------------------------------------------------------------------------


def restored(root: str, rank: int, read: str) -> dict[str, Any]:
    """Go to commits, and fall back over two damaged ones, with values that all have and some of a rank's own."""
    config = Config(items={"extra": ItemSpec(required=False)}, read=read, compression="none")

    def run() -> tuple[CheckpointManager, nn.Linear, nn.Linear]:
        ckpt = manager(root, config)
        model, own = nn.Linear(512, 512, bias=False), nn.Linear(3, 2, bias=False)
        ckpt.own, ckpt.model = (own, model) if rank else (None, None)  # In another order on the other rank.
        if rank == 0:
            ckpt.unregister("own")
            ckpt.unregister("model")
            ckpt.model, ckpt.own = model, own
        return ckpt, model, own

    def values() -> list[float]:
        return [*model.weight.unique().tolist(), *(value - 100 * rank for value in own.weight.unique().tolist())]

    ckpt, model, own = run()
    ckpt.extra = nn.Linear(3, 2, bias=False)
    ids = []
    for value in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(value)
            own.weight.fill_(value + 100 * rank)
        ckpt.step_up()
        ckpt.save(f"c{value}", wait=True)
        ids.append(str(ckpt.hash))
    ckpt.goto("c1")
    found: dict[str, Any] = {"goto": values(), "bytes": ckpt.last_report.bytes_read}
    if rank == 1:
        ckpt.unregister("own")
    found["other items"] = outcome(lambda: ckpt.goto("c2"))
    if rank == 1:
        ckpt.own = own
    ckpt.own = nn.Linear(3 + rank, 2, bias=False)
    found["misfit"] = outcome(lambda: ckpt.goto("c2"))
    ckpt.own = own
    ckpt.goto("c2")
    found["again"] = values()
    # One rank leaves an item as it is, and the ranks stay in step.
    if rank == 1:
        ckpt.extra = nn.Linear(4, 2, bias=False)
    ckpt.goto("c1")
    found["left"] = [values(), [note for note in ckpt.last_report.notes if note.startswith("extra")]]
    ckpt.close()
    if rank == 0:
        for commit, owner in ((ids[1], 0), (ids[1], 1), (ids[2], 1)):
            flip(root, commit, owner)
    dist.barrier()
    ckpt, model, own = run()
    ckpt.restore()
    found["fallen back"] = [values(), ckpt.step]
    found["saved"] = outcome(lambda: ckpt.save(wait=True))
    ckpt.close()
    return found


def misfit_behind_damage(root: str, rank: int, read: str) -> list[list[str]]:
    """Fall back to a commit that does not fit one rank: nothing half restored may be saved."""
    config = Config(read=read, compression="none")
    with manager(root, config) as ckpt:
        ckpt.model, ckpt.own = nn.Linear(4, 4), nn.Linear(3 + rank, 2)
        ckpt.step_up()
        ckpt.save(wait=True)
        ckpt.own = nn.Linear(3, 2)
        with torch.no_grad():
            ckpt.own.weight.fill_(rank)
        ckpt.step_up()
        ckpt.save(wait=True)
        newest = str(ckpt.hash)
    if rank == 0:
        flip(root, newest, 1)
    dist.barrier()
    with manager(root, config) as ckpt:
        ckpt.model, ckpt.own = nn.Linear(4, 4), nn.Linear(3, 2)
        return [outcome(ckpt.restore), outcome(ckpt.save)]


# --- resharders that misbehave -----------------------------------------------------------------------------------------------------


class Table(Resharder):
    """Declares rows of a table; `how` says what is wrong with it."""

    def __init__(self, how: str, offset: int, count: int) -> None:
        self.how, self.offset, self.count = how, offset, count

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> Any:
        if self.how == "extract fails" and dist.get_rank() == 1:
            raise KeyError("my own mistake")
        if self.how == "extract differs" and dist.get_rank() == 1:
            return {}
        return {("rows",): ShardingMetadata((12, 3), torch.float32, [((self.offset, 0), (self.count, 3))])}

    def load(
        self, source_path: Any, item_key: str, target_metadata: Any, source_metadata: Any, target: Any, storage: Any
    ) -> list[Any] | None:
        def box(*region: tuple[int, ...], path: str = "rows") -> Any:
            return storage.read_box(source_metadata, (path,), *region)

        acts: dict[str, Callable[[], Any]] = {
            "path that is not there": lambda: [("nope",)],
            "texts": lambda: ["rows"],
            "fails": lambda: {}[dist.get_rank()] if dist.get_rank() == 1 else None,
            "outside": lambda: box((10, 0), (6, 3)),
            "negative": lambda: box((-1, 0), (6, 3)),
            "dimensions": lambda: box((0,), (6,)),
            "unknown path": lambda: box((0, 0), (1, 3), path="nope"),
            "no tensor": lambda: box((0, 0), (1, 3), path="mine"),
            "unknown rank": lambda: storage.read_value(source_metadata, 9, ("rows",)),
            "other shape": lambda: [target.update(rows=torch.zeros(2, 2)), [("rows",)]][1],
            "everything": lambda: [
                target["rows"].copy_(box((self.offset, 0), (self.count, 3))),
                target.update(mine=storage.read_value(source_metadata, 3, ("mine",))),
                [()],
            ][2],
        }
        done: list[Any] | None = acts.get(self.how, lambda: None)()
        return done


WRONG = ("path that is not there", "texts", "fails", "outside", "negative", "dimensions", "unknown path", "no tensor", "unknown rank")


def with_table(how: str, offset: int, count: int) -> Any:
    return Config(items={"table": ItemSpec(resharder=Table(how, offset, count))})


def rows(first: int, count: int) -> torch.Tensor:
    return torch.arange(first * 3, (first + count) * 3, dtype=torch.float32).reshape(count, 3)


def tables_on_four(root: str, rank: int) -> dict[str, Any]:
    payload = {"table": {"rows": rows(rank * 3, 3), "mine": rank}, "plain": {"a": rank, "b": [rank, {"c": rank}], "same": 1}}
    with manager(root, with_table("", rank * 3, 3)) as ckpt:
        ckpt.save("four", payload, wait=True)
    found = {}
    for how in ("extract fails", "extract differs"):
        with manager(root, with_table(how, rank * 3, 3), auto_resume=False, branch="other") as ckpt:
            found[how] = outcome(lambda: ckpt.save(None, payload))
            found[f"{how}, then"] = outcome(lambda: ckpt.save(None, {"plain": 1}, wait=True))
    return found


def tables_on_two(root: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how in (*WRONG, "extract fails", "other shape", "everything", "nothing"):
        target = {"rows": torch.full((6, 3), -1.0), "mine": -1}
        with manager(root, with_table(how, rank * 6, 6), auto_resume=False, branch="reader") as ckpt:
            loaded: dict[str, Any] = {}
            told = outcome(lambda ckpt=ckpt, loaded=loaded, target=target: loaded.update(ckpt.load("four", into={"table": target})))
            kept = target["rows"].flatten().tolist()
            found[how] = [*told, kept, loaded.get("table", target)["mine"], ckpt.load("four", partial=["plain.same"])["plain"]["same"]]
    with manager(root, auto_resume=False, branch="plain") as ckpt:
        found["plain"] = ckpt.load("four")["plain"]
        found["per rank"] = [path for path in ckpt.last_report.per_rank if path.startswith("plain")]
    return found


# --- what does not fit, with shards ------------------------------------------------------------------------------------------------


def strictness(root: str, rank: int, read: str) -> dict[str, Any]:
    mesh = mesh_of((2,))

    def split(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(0)])

    def whole(tensor: Any) -> list[float]:
        return [tensor.dtype == torch.float64, *tensor.full_tensor().flatten().tolist()]

    config = Config(items={"spare": ItemSpec(required=False)}, read=read)
    with manager(root, config, auto_resume=False) as ckpt:
        saved = {"w": distribute_tensor(rows(0, 5), mesh, [Shard(0)]), "b": torch.arange(4.0)}
        ckpt.save("saved", {"item": saved, "spare": {"w": saved["w"]}}, wait=True)

        def load(item: dict[str, Any], *, spare: Any = None, **how: Any) -> list[Any]:
            told = outcome(lambda: ckpt.load("saved", into={"item": item} | ({"spare": {"w": spare}} if spare is not None else {}), **how))
            return [*told, whole(item["w"]), item["b"].tolist(), ckpt.last_report.skipped]

        doubles = {"w": split(5, 3, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
        return {
            "no cast": load(doubles),
            "cast": load(doubles, cast=True),
            "partial": load({"w": split(5, 3), "b": torch.zeros(4)}, partial=["item.w"]),
            "other shape": load({"w": split(6, 3), "b": torch.zeros(4)}),
            "lenient": load({"w": split(6, 3), "b": torch.zeros(4)}, strict=False),
            "one rank": load({"w": split(5, 3), "b": torch.zeros(4 + rank)}),
            "not required": load({"w": split(5, 3), "b": torch.zeros(4)}, spare=split(7, 3)),
        }


# --- what a load costs, and what is beside it --------------------------------------------------------------------------------------------


def status_nbytes(field: str) -> int:
    """Return a figure of this process in bytes, as the kernel tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def memory(root: str, read: str) -> list[Any]:
    """Load 256 MiB in place; return how much more memory than before this process had at its worst, and whether all values are there."""
    config, values = Config(read=read, compression="none"), {f"w{number}": torch.full((4 << 20,), float(number)) for number in range(16)}
    with manager(root, config, rng=False, auto_resume=False) as ckpt:
        ckpt.save("saved", {"m": values}, wait=True)
    with manager(root, config, auto_resume=False, branch="reader") as ckpt:
        for value in values.values():
            value.fill_(-1.0)
        Path("/proc/self/clear_refs").write_text("5")  # From here on the peak counts anew.
        before = status_nbytes("VmRSS")
        ckpt.load("saved", into={"m": values})
        grown = status_nbytes("VmHWM") - before
    return [grown, all(value.eq(number).all().item() for number, value in enumerate(values.values()))]


def replicated(root: str) -> dict[str, Any]:
    """Read a tensor of 2 MiB together: whole on each rank as a DTensor, in parts, and whole on one rank only."""
    mesh, value = mesh_of((2,)), torch.arange(1 << 19, dtype=torch.float32)
    found: dict[str, Any] = {}
    with manager(root, Config(read="broadcast", compression="none"), rng=False, auto_resume=False) as ckpt:
        ckpt.save("saved", {"m": {"w": value}}, wait=True)
        placed = {"whole": Replicate(), "parts": Shard(0), "either": Replicate() if dist.get_rank() == 0 else Shard(0)}
        for name, placement in placed.items():
            into = distribute_tensor(torch.zeros(1 << 19), mesh, [placement], src_data_rank=None)
            expected = distribute_tensor(value, mesh, [placement], src_data_rank=None)
            ckpt.load("saved", into={"m": {"w": into}})
            found[name] = [ckpt.last_report.bytes_read, torch.equal(into.to_local(), expected.to_local())]
    return found


def late(root: str, rank: int) -> dict[str, Any]:
    """Register what is resumed on one rank after the other: each reads for itself, also where ranks read together."""
    config = Config(read="broadcast", compression="none")
    with manager(root, config, rng=False) as ckpt:
        ckpt.model = nn.Linear(512, 512, bias=False)
        nn.init.constant_(ckpt.model.weight, 3.0)
        ckpt.save("saved", wait=True)
    with manager(root, config, rng=False) as ckpt:
        model = nn.Linear(512, 512, bias=False)
        if rank == 1:
            dist.barrier()
        ckpt.model = model
        if rank == 0:
            dist.barrier()
        found = {"registered": ckpt.last_report.bytes_read, "value": model.weight.unique().tolist()}
        ckpt.goto("saved")
        return {**found, "goto": ckpt.last_report.bytes_read}


def parts(value: float) -> dict[str, Any]:
    """Return eight tensors of 64 KiB, each in two parts."""
    return {f"w{n}": distribute_tensor(torch.full((128, 128), value + n), mesh_of((2,)), [Shard(0)], src_data_rank=None) for n in range(8)}


def beside(root: str) -> dict[str, Any]:
    """Load an older commit with another manager while the writers have a newer one in hand."""
    with manager(root, rng=False, auto_resume=False) as ckpt, manager(root, auto_resume=False, branch="reader") as reader:
        ckpt.save("older", {"m": parts(1.0)}, wait=True)
        writer = ckpt._saver.writer_pid
        assert writer is not None
        os.kill(writer, signal.SIGSTOP)
        pending = ckpt.save("newer", {"m": parts(21.0)})
        into = parts(-1.0)
        reader.load("older", into={"m": into})
        found = {"done": pending.done(), "older": [value.to_local().unique().tolist() for value in into.values()]}
        os.kill(writer, signal.SIGCONT)
        pending.result()
        reader.load("newer", into={"m": into})
        return {**found, "newer": [value.to_local().unique().tolist() for value in into.values()]}


def after_damage(root: str, rank: int, read: str) -> dict[str, Any]:
    """Meet damage that one rank alone reads; then try to save what is half restored, and save what the damaged rows held."""
    with manager(root, Config(read=read, compression="none"), rng=False, auto_resume=False) as ckpt:
        first = ckpt.save("first", {"m": parts(1.0)}, wait=True)
        pointing = ckpt.save("second", {"m": parts(1.0)}, wait=True).result().stats["deduplicated_bytes"]
        if rank == 0:
            flip(root, str(first), 1)
        dist.barrier()
        into = parts(-1.0)
        found: dict[str, Any] = {"load": outcome(lambda: ckpt.load("second", into={"m": into}))}
        found["values"] = [value.to_local().unique().tolist() for value in into.values()]
        found["half"] = outcome(lambda: ckpt.save("half", {"m": into}))
        third = ckpt.save("third", {"m": parts(1.0)}, wait=True).result()
        ckpt.load("third", into={"m": into})
        found["third"] = [value.to_local().unique().tolist() for value in into.values()]
        fourth = ckpt.save("fourth", {"m": into}, wait=True).result()
        found["pointing"] = [pointing, third.stats["deduplicated_bytes"], fourth.stats["deduplicated_bytes"]]
    return found


# --- jobs -------------------------------------------------------------------------------------------------------------------------------


def on_four(rank: int, folder: str) -> dict[str, Any]:
    return {
        "odd": odd(f"{folder}/odd", ["hsdp", "fsdp"], ["single-compiled-commit"], "four", read="broadcast"),
        "copies": copies(f"{folder}/copies", rank),
        "tables": tables_on_four(f"{folder}/tables", rank),
    }


def on_two(rank: int, folder: str) -> dict[str, Any]:
    return {
        "odd": odd(f"{folder}/odd", ["ddp of compiled", "tp"], ["single-compiled-commit", "four-hsdp-commit", "four-fsdp-commit"], "two"),
        "templates": templates(f"{folder}/templates"),
        "tables": tables_on_two(f"{folder}/tables", rank),
        "restored": {read: restored(f"{folder}/{read}", rank, read) for read in ("ranged", "broadcast")},
        "misfit": {read: misfit_behind_damage(f"{folder}/misfit-{read}", rank, read) for read in ("ranged", "broadcast")},
        "strictness": {read: strictness(f"{folder}/strict-{read}", rank, read) for read in ("ranged", "broadcast")},
        "memory": {read: memory(f"{folder}/memory-{read}", read) for read in ("ranged", "broadcast")},
        "replicated": replicated(f"{folder}/replicated"),
        "late": late(f"{folder}/late", rank),
        "beside": beside(f"{folder}/beside"),
        "after damage": {read: after_damage(f"{folder}/after-{read}", rank, read) for read in ("ranged", "broadcast")},
    }
