"""What the ranks of test_peers_faults.py do: jobs of two, four, two and three ranks, each going on with what those before it saved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts_ranks import Own, mesh_of
from scenarios_ranks import Setting, laid_out, local, numbers, pattern, play, told
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.data import DataLoader

from syckpt import CheckpointManager, ItemSpec, Resharder, ShardingMetadata, StatefulDistributedSampler
from syckpt.checkpoint import start
from syckpt.errors import NotFoundError
from syckpt.repo.refs import Refs
from syckpt.repo.repository import Repository
from syckpt.stores.memory import MemoryStore

Config = CheckpointManager.Config
SAMPLES = 48


# -- a loader's state, on more and on fewer ranks ----------------------------------------------------------------------


class Waiting:
    """A loader with a queue of sample ids of its own on each rank."""

    def __init__(self, at: Setting) -> None:
        self.rank, self.ranks = at.rank, at.size
        self.ids = list(range(at.rank, SAMPLES, at.size))

    def state_dict(self) -> dict[str, Any]:
        return {"ids": self.ids, "rank": self.rank, "ranks": self.ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ids = state["ids"]


class DealtAnew(Resharder):
    """Deals what waits on all ranks of the commit to those of this job."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[Any, ShardingMetadata]:
        return {}  # no tensors

    def load(self, source_path: Any, item_key: str, target_metadata: Any, source_metadata: Any, target: Any, storage: Any) -> list[Any]:
        parts = [storage.read_value(source_metadata, rank, ("ids",)) for rank in source_metadata.by_rank]
        target["ids"] = sorted(number for part in parts for number in part)[target["rank"] :: target["ranks"]]
        return [("ids",), ("rank",), ("ranks",)]


WITH_QUEUE = Config(items={"queue": ItemSpec(resharder=DealtAnew())})
MODULO = Config(items={"own": ItemSpec(on_world_change="mod")})


def loaded_some(at: Setting, root: str) -> dict[str, Any]:
    """Take three batches, of a sampler and of a queue, and save where they are, with what only this rank knows."""
    sampler, queue = StatefulDistributedSampler(range(SAMPLES), 2, seed=3), Waiting(at)
    with at.manager(root, WITH_QUEUE) as ckpt:
        ckpt.sampler, ckpt.queue, ckpt.own, ckpt.note = sampler, queue, Own(at.rank), {"rank": at.rank, "all": 7}
        seen, taken = [], []
        batches = iter(DataLoader(range(SAMPLES), batch_size=2, sampler=sampler))
        for _ in range(3):
            seen += next(batches).tolist()
            taken, queue.ids = taken + queue.ids[:2], queue.ids[2:]
            ckpt.step_up()
        ckpt.save(wait=True)
    return {"seen": seen, "taken": taken}


def loaded_the_rest(at: Setting, root: str) -> dict[str, Any]:
    """Go on to the end of the epoch on another number of ranks."""
    sampler, queue, own = StatefulDistributedSampler(range(SAMPLES), 2, seed=9), Waiting(at), Own(None)
    with at.manager(root, WITH_QUEUE) as ckpt:
        ckpt.sampler, ckpt.queue, ckpt.note = sampler, queue, None
        refused = told(lambda: ckpt.register("own", Own(None)))
        seen = []
        for batch in DataLoader(range(SAMPLES), batch_size=2, sampler=sampler):
            seen += batch.tolist()
            ckpt.step_up()
        found = {"seen": seen, "waiting": queue.ids, "note": ckpt.note, "refused": refused, "per rank": ckpt.last_report.per_rank}
    with at.manager(root, MODULO) as ckpt:
        ckpt.own = own
    return {**found, "own": own.value}


def loader_on_two(at: Setting) -> dict[str, Any]:
    return loaded_some(at, "two loaders")


def loader_from_two(at: Setting) -> dict[str, Any]:
    return loaded_the_rest(at, "two loaders")


def loader_on_four(at: Setting) -> dict[str, Any]:
    return loaded_some(at, "four loaders")


def loader_from_four(at: Setting) -> dict[str, Any]:
    return loaded_the_rest(at, "four loaders")


# -- a sharded model and its optimizer ---------------------------------------------------------------------------------


class Net(nn.Module):
    """Three layers, one of which takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.head = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 6, bias=False)


class Run:
    """The model under FSDP2 with an AdamW, both of which depend on the seed."""

    def __init__(self, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        for layer in (self.net.used, self.net.idle, self.net.head, self.net):
            fully_shard(layer, mesh=mesh_of((dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01 * seed)

    def step(self, *layers: str, seed: int) -> None:
        """Make a step in which only these layers have a gradient."""
        for number, (name, parameter) in enumerate(self.net.named_parameters()):
            gradient = pattern(*parameter.shape, seed=10 * seed + number)
            parameter.grad = laid_out(gradient, parameter.placements[0]) if name.startswith(layers) else None
        self.optimizer.step()

    def register(self, ckpt: CheckpointManager) -> None:
        ckpt.net, ckpt.optimizer = self.net, self.optimizer

    def found(self) -> dict[str, Any]:
        """Return this rank's part of every parameter and its moments, and the settings."""
        state = self.optimizer.state
        return {
            "parameters": {name: numbers(parameter) for name, parameter in self.net.named_parameters()},
            "moments": {
                name: {key: numbers(value) for key, value in state[parameter].items()}
                for name, parameter in self.net.named_parameters()
                if state.get(parameter)
            },
            "lr": self.optimizer.param_groups[0]["lr"],
        }


def trained(at: Setting) -> dict[str, Any]:
    run = Run(seed=1)
    with at.manager("net") as ckpt:
        run.register(ckpt)
        for seed in (1, 2):
            run.step("used", "head", seed=seed)
            ckpt.step_up()
        ckpt.save(wait=True)
    return run.found()


def trained_further(at: Setting) -> dict[str, Any]:
    """Resume into a fresh optimizer, then let the layer that had no gradient have one, and resume that."""
    run = Run(seed=5)
    made = len(run.optimizer.state)
    with at.manager("net", auto_resume=False, branch=f"on-{at.size}") as ckpt:
        run.register(ckpt)
        ckpt.goto("main")
        found = run.found()
        run.step("used", "head", "idle", seed=3)
        left = run.found()
        ckpt.save(wait=True)
    again = Run(seed=6)
    with at.manager("net", branch=f"on-{at.size}") as ckpt:
        again.register(ckpt)
    return {"made before": made, "found": found, "goes on": again.found() == left, "made after": sorted(left["moments"])}


# -- an optimizer's state in flat parts of its own ---------------------------------------------------------------------

FLAT = 23


class Flat:
    """A rank's part of flat moments, as ZeRO cuts them: equal parts, the last one filled up with -1."""

    def __init__(self, at: Setting, *, fill: bool) -> None:
        size = -(-FLAT // at.size)
        begin, end = min(FLAT, at.rank * size), min(FLAT, (at.rank + 1) * size)
        self.state = {name: torch.full((size,), -1.0) for name in ("exp_avg", "exp_avg_sq")}
        self.state |= {"step": 7 if fill else 0, "lr": 0.5 if fill else 9.0, "place": [begin, end]}
        if fill:
            for seed, name in enumerate(("exp_avg", "exp_avg_sq")):
                self.state[name][: end - begin] = pattern(FLAT, seed=seed)[begin:end]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def found(self) -> dict[str, Any]:
        return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in self.state.items()}


class FlatResharder(Resharder):
    """Puts the parts of all ranks together, without what filled them up, and cuts this rank's anew."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[Any, ShardingMetadata]:
        begin, end = item_value["place"]
        return {(name,): ShardingMetadata((FLAT,), None, (), {"count": end - begin}) for name in ("exp_avg", "exp_avg_sq")}

    def load(self, source_path: Any, item_key: str, target_metadata: Any, source_metadata: Any, target: Any, storage: Any) -> list[Any]:
        begin, end = target["place"]
        for path in target_metadata:
            counts = [source_metadata.by_rank[rank][path].extra["count"] for rank in source_metadata.by_rank]
            parts = [storage.read_value(source_metadata, rank, path)[:count] for rank, count in enumerate(counts)]
            target[path[0]][: end - begin] = torch.cat(parts)[begin:end]
        return [*target_metadata, ("place",)]


WITH_FLAT = {"flat": ItemSpec(resharder=FlatResharder())}


def flat_saved(at: Setting) -> dict[str, Any]:
    flat = Flat(at, fill=True)
    at.ckpt.save("flat", {"flat": flat.state}, wait=True)
    return {name: flat.state[name].tolist() for name in ("exp_avg", "exp_avg_sq")}


def flat_loaded(at: Setting) -> dict[str, Any]:
    flat = Flat(at, fill=False)
    flat.load_state_dict(at.ckpt.load("flat", into={"flat": flat.state})["flat"])
    return flat.found()


# -- shards ------------------------------------------------------------------------------------------------------------

SHAPES = {"one": (1,), "three": (3,), "rows": (5, 2), "none": (0, 4), "deep": (7, 1, 3), "ten": (10, 3)}


def shards(at: Setting, *, empty: bool = False) -> dict[str, DTensor]:
    return {name: laid_out(pattern(*shape) * (0 if empty else 1), Shard(0)) for name, shape in SHAPES.items()}


def shards_saved(at: Setting) -> dict[str, Any]:
    state = shards(at)
    at.ckpt.save(f"shards of {at.size}".replace(" ", "-"), {"shards": state}, wait=True)
    return {name: list(local(state[name]).shape) for name in ("one", "three")}


def shards_loaded(at: Setting) -> dict[str, Any]:
    """Fill shards from the commits of two and of four ranks, where they are there; return this rank's parts."""
    found = {}
    for size in (2, 4):
        if told(lambda size=size: at.ckpt.load(f"shards-of-{size}", dry_run=True)):  # type: ignore[misc]
            continue
        state = shards(at, empty=True)
        at.ckpt.load(f"shards-of-{size}", into={"shards": state})
        found[str(size)] = {name: numbers(value) for name, value in state.items()}
    return found


def whole_saved(at: Setting) -> None:
    at.ckpt.save("whole", {"whole": {"w": pattern(10, 3), "b": pattern(7)}}, wait=True)


def whole_loaded(at: Setting) -> dict[str, Any]:
    """Fill shards of tensors that were whole."""
    state = {"w": laid_out(torch.zeros(10, 3), Shard(0)), "b": laid_out(torch.zeros(7), Shard(0))}
    at.ckpt.load("whole", into={"whole": state})
    return {name: numbers(value) for name, value in state.items()}


# -- two chunks a rank -------------------------------------------------------------------------------------------------

HALF, WIDE = 12, 3


class Chunks(Resharder):
    """Declares both halves of a fused weight, of each of which a rank has some rows. Loading is left to the default."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[Any, ShardingMetadata]:
        rank, rows = dist.get_rank(), HALF // dist.get_world_size()
        return {(name,): ShardingMetadata((HALF, WIDE), torch.float32, [((rank * rows, 0), (rows, WIDE))]) for name in ("gate", "up")}

    def load(self, source_path: Any, item_key: str, target_metadata: Any, source_metadata: Any, target: Any, storage: Any) -> None:
        return None


WITH_CHUNKS = {"chunks": ItemSpec(resharder=Chunks())}


def fused(at: Setting, *, fill: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a rank's rows of gate and up, which lie behind each other in one tensor, and that as two kinds of state."""
    rows = HALF // at.size
    whole = pattern(2 * HALF, WIDE)
    mine = torch.cat([half[at.rank * rows : (at.rank + 1) * rows] for half in whole.chunk(2)]) if fill else torch.zeros(2 * rows, WIDE)
    strided = DTensor.from_local(
        mine, mesh_of((at.size,)), [_StridedShard(0, split_factor=2)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return mine, {"strided": {"fc1": strided}, "chunks": {"gate": mine[:rows], "up": mine[rows:]}}


def fused_saved(at: Setting) -> None:
    _, state = fused(at, fill=True)
    at.ckpt.save("fused", state, wait=True)


def fused_loaded(at: Setting) -> dict[str, Any]:
    found = {}
    for name in ("strided", "chunks"):
        mine, state = fused(at, fill=False)
        at.ckpt.load("fused", into={name: state[name]})
        found[name] = mine.tolist()
    return found


# -- a pipeline's stages as experts ------------------------------------------------------------------------------------

PARTS = 4


def one_layer(at: Setting, layer: int, expert: int) -> bool:
    """Whether a rank of a pipeline has an expert of a layer: its stage is one layer."""
    return layer == at.rank


def some_experts(at: Setting, layer: int, expert: int) -> bool:
    """Whether a rank has an expert of a layer: it has some experts of every layer."""
    return expert // (PARTS // at.size) == at.rank


def parts(at: Setting, has: Callable[[Setting, int, int], bool], *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return what a rank has of four layers of four experts, under the names that they have in all."""
    module = nn.Module()
    for layer in range(PARTS):
        for expert in range(PARTS):
            if has(at, layer, expert):
                torch.manual_seed(100 * seed + PARTS * layer + expert)
                module.add_module(f"layer{layer}_expert{expert}", nn.Linear(2, 3, bias=False))
    return module, torch.optim.Adam(module.parameters(), lr=0.1 * seed)


def parts_found(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: [numbers(parameter), *(numbers(value) for _, value in sorted(optimizer.state[parameter].items()))]
        for name, parameter in module.named_parameters()
    }


def stages_saved(at: Setting) -> dict[str, Any]:
    with at.manager("parts") as ckpt:
        ckpt.model, ckpt.optimizer = module, optimizer = parts(at, one_layer, seed=1)
        for parameter in module.parameters():
            parameter.grad = parameter.detach() + at.rank
        optimizer.step()
        ckpt.save(wait=True)
    return parts_found(module, optimizer)


def experts_restored(at: Setting) -> dict[str, Any]:
    with at.manager("parts") as ckpt:
        ckpt.model, ckpt.optimizer = module, optimizer = parts(at, some_experts, seed=2)
    return {"found": parts_found(module, optimizer), "lr": optimizer.param_groups[0]["lr"]}


# -- what is saved -----------------------------------------------------------------------------------------------------


def everything(seed: int) -> dict[str, Any]:
    """Return sharded, replicated and plain tensors, and what is none, in nested containers."""
    whole = pattern(10, 3, seed=seed)
    return {
        "rows": laid_out(whole.clone(), Shard(0)),
        "columns": laid_out(whole.clone(), Shard(1)),
        "copies": laid_out(whole.clone(), Replicate()),
        "plain": whole.clone(),
        "turned": whole.clone().t(),
        "array": whole.numpy().copy(),
        "list": [seed, {"name": f"step {seed}"}],
    }


def overwritten(at: Setting) -> dict[str, Any]:
    """Overwrite everything as soon as `save` returns, first while the writer is not up yet."""
    found: dict[str, Any] = {"loaded": [], "live": []}
    for seed in (1, 2):
        state = everything(seed)
        pending = at.ckpt.save(f"overwritten-{seed}", {"state": state})
        for name in ("rows", "columns", "copies", "plain", "turned"):
            local(state[name]).fill_(-7)
        state["array"].fill(-7)
        state["list"][1]["name"] = "overwritten"
        state["list"].append("new")
        state["later"] = torch.ones(1)
        pending.result()
        found["live"].append(sorted({float(value) for name in ("rows", "columns", "plain") for value in local(state[name]).unique()}))
        loaded = at.ckpt.load(f"overwritten-{seed}")["state"]
        found["loaded"].append({name: value.tolist() if hasattr(value, "tolist") else value for name, value in loaded.items()})
    return found


def appearing(at: Setting) -> dict[str, Any]:
    """Save twice under one plan; then an item, a key, a shard and a rank's own key are new."""
    with at.manager("appearing") as ckpt:
        state = {"w": laid_out(pattern(10, 3), Shard(0))}
        ckpt.state = state
        ckpt.save("first", wait=True)
        ckpt.save("second", wait=True)
        ckpt.late = {"new": laid_out(torch.arange(12.0), Shard(0)), "of one rank": {f"rank {at.rank}": at.rank}}
        state["more"] = laid_out(torch.arange(5.0), Shard(0))
        ckpt.save("third", wait=True)
        into = {"state": {"w": laid_out(torch.zeros(10, 3), Shard(0)), "more": laid_out(torch.zeros(5), Shard(0))}}
        ckpt.load("third", into={**into, "late": {"new": laid_out(torch.zeros(12), Shard(0)), "of one rank": {f"rank {at.rank}": None}}})
        return {"more": numbers(into["state"]["more"])}


# -- ranks that do not do the same -------------------------------------------------------------------------------------


def under_if_rank_0(at: Setting) -> dict[str, Any]:
    """Only rank 0 saves; when it has given up, the others do, and then all."""
    found = {}
    with at.manager("under if") as ckpt:
        ckpt.value = 1
        base = ckpt.save("base", wait=True).id
        if at.rank == 0:
            coordinator = ckpt._coordinator
            coordinator.timeout_s = 0.5  # Nobody is to come in time.
            found["save"] = told(lambda: ckpt.save("alone"))
            coordinator.timeout_s = ckpt._timeout_s
            at.sign("given up")
        else:
            at.await_sign("given up")
            found["save"] = told(lambda: ckpt.save("alone"))
        ckpt.value = 2
        following = ckpt.save("together", wait=True).id
        found["made"], found["log"] = [following, base], [commit.id for commit in ckpt.log()]
    return found


@contextmanager
def seeing(view: Callable[[Any], Repository] | None) -> Iterator[None]:
    """In the block, a manager's repository is what `view` makes of its place, as on a file system that shows this host something else."""

    class Seen(Repository):
        open = staticmethod(view)  # type: ignore[assignment]

    if view is not None:
        start.Repository = Seen  # type: ignore[misc]
    try:
        yield
    finally:
        start.Repository = Repository  # type: ignore[misc]


def nothing_there(spec: Any) -> Repository:
    raise NotFoundError(f"no repository at {spec.path}")


def no_branch_there(spec: Any) -> Repository:
    """Return the repository as a host sees it that has no branch of it yet."""
    repository = Repository.open(spec)
    repository.refs = Refs(MemoryStore())
    assert repository.refs.head("heads/main") is None
    return repository


def disagreeing(at: Setting) -> dict[str, Any]:
    """Of a directory with two commits, ranks 1 and 3 see nothing, or no branch."""
    with at.manager("seen") as ckpt:
        for ckpt.value in (10 + at.rank, 20 + at.rank):
            ckpt.save(wait=True)
        newest = ckpt.hash
    odd = at.rank % 2 == 1
    with seeing(nothing_there if odd else None):
        refused = told(lambda: at.manager("seen").close())
    with seeing(no_branch_there if odd else None), at.manager("seen") as ckpt:
        resumed = ckpt.resumed and ckpt.resumed.id
        ckpt.value = None
        found = ckpt.value
        ckpt.value = 30 + at.rank
        following = ckpt.save(wait=True).result()
    return {"refused": refused, "newest": newest, "resumed": resumed, "value": found, "parents": list(following.parents)}


# -- keys that do not fit ----------------------------------------------------------------------------------------------


def keys_loaded(at: Setting) -> dict[str, Any]:
    """Load with a name too many, a name too few, and shapes and dtypes that are others, on rank 1 only or on all ranks."""
    saved = {name: laid_out(pattern(4, 2), Shard(0)) for name in ("fits", "old", "shape", "dtype")}
    at.ckpt.save("keys", {"keys": saved}, wait=True)

    def into(*, wrong: bool) -> dict[str, Any]:
        if not wrong:
            return {name: laid_out(torch.zeros(4, 2), Shard(0)) for name in saved}
        zeros = {"fits": torch.zeros(4, 2), "new": torch.zeros(1), "shape": torch.zeros(5, 2), "dtype": torch.zeros(4, 2).double()}
        return {name: laid_out(value, Shard(0)) for name, value in zeros.items()}

    def load(target: dict[str, Any], **how: Any) -> list[Any]:
        error = told(lambda: at.ckpt.load("keys", into={"keys": target}, **how))
        report = at.ckpt.last_report
        touched = sorted(name for name, value in target.items() if local(value).any())
        return [error, report.missing, report.unexpected, report.mismatched, touched]

    return {
        "all": load(into(wrong=True)),
        "one": load(into(wrong=at.rank == 1)),
        "lenient": load(into(wrong=True), strict=False),
        "fits": load(into(wrong=False)),
    }


# -- order of the data, and random streams -----------------------------------------------------------------------------

EPOCHS = 3


def batches_of(sampler: StatefulDistributedSampler) -> Iterator[list[int]]:
    for batch in DataLoader(range(24), batch_size=2, sampler=sampler):
        yield batch.tolist()


def order_begun(at: Setting) -> dict[str, Any]:
    """Save in the middle of the first epoch; and go through all epochs without a manager."""
    sampler, whole = (StatefulDistributedSampler(range(24), 2, seed=4) for _ in range(2))
    with at.manager("order") as ckpt:
        ckpt.sampler = sampler
        seen = []
        for _ in ckpt.loop(1):
            for batch in batches_of(sampler):
                seen.append(batch)
                ckpt.step_up()
                if ckpt.step == 4:
                    break
        ckpt.save(wait=True, epoch_end=False)
    epochs = []
    for epoch in range(EPOCHS):
        whole.set_epoch(epoch)
        epochs.append(list(batches_of(whole)))
    return {"seen": seen, "whole": epochs}


def order_gone_on(at: Setting) -> dict[str, Any]:
    sampler = StatefulDistributedSampler(range(24), 2, seed=8)
    seen: dict[str, Any] = {}
    with at.manager("order") as ckpt:
        ckpt.sampler = sampler
        for epoch in ckpt.loop(EPOCHS):
            for batch in batches_of(sampler):
                seen.setdefault(str(epoch), []).append(batch)
                ckpt.step_up()
    return seen


def drawn() -> list[Any]:
    """Draw from every stream of this process: a dropout mask, and values of torch, NumPy and Python."""
    mask = F.dropout(torch.ones(64), 0.5)
    return [mask.tolist(), torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()]


def streams_saved(at: Setting) -> list[Any]:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 + at.rank)
    with at.manager("streams", rng=True) as ckpt:
        drawn()
        ckpt.value = 1
        ckpt.save(wait=True)
        return drawn()


def streams_restored(at: Setting) -> dict[str, Any]:
    """Both ranks begin with the same streams."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    with at.manager("streams", rng=True) as ckpt:
        ckpt.value = None
        report = ckpt.restore()
        return {"drawn": drawn(), "exact": report.rng_exact}


# -- jobs --------------------------------------------------------------------------------------------------------------

ITEMS = WITH_FLAT | WITH_CHUNKS


def on_two(rank: int, folder: str) -> None:
    play(rank, folder, "on_two", [loader_on_two, shards_saved, whole_saved, order_begun, streams_saved], items=ITEMS)


def on_four(rank: int, folder: str) -> None:
    scenarios = [
        overwritten,
        loader_from_two,
        loader_on_four,
        shards_loaded,
        shards_saved,
        whole_loaded,
        trained,
        flat_saved,
        fused_saved,
        stages_saved,
        experts_restored,
        appearing,
        under_if_rank_0,
        disagreeing,
    ]
    play(rank, folder, "on_four", scenarios, items=ITEMS)


def back_on_two(rank: int, folder: str) -> None:
    scenarios = [
        loader_from_four,
        shards_loaded,
        trained_further,
        flat_loaded,
        fused_loaded,
        experts_restored,
        keys_loaded,
        order_gone_on,
        streams_restored,
    ]
    play(rank, folder, "back_on_two", scenarios, items=ITEMS)


def on_three(rank: int, folder: str) -> None:
    play(rank, folder, "on_three", [shards_loaded, whole_loaded, trained_further, flat_loaded, fused_loaded], items=ITEMS)
