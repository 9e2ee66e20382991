"""The parts of test_resharder.py that run in each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syckpt import (
    CheckpointManager,
    DistributedItemMetadata,
    ItemSpec,
    NestedPath,
    Resharder,
    ShardingMetadata,
    Storage,
)

SAMPLES = 41


class Loader:
    """A loader with a queue of sample ids of its own on each rank: another number of ranks has to deal them anew."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.epoch = rank, world_size, 0
        self.waiting = list(range(rank, SAMPLES, world_size))

    def take(self, count: int) -> list[int]:
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "waiting": self.waiting, "place": {"rank": self.rank, "world_size": self.world_size}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["place"] == {"rank": self.rank, "world_size": self.world_size}
        self.epoch, self.waiting = state["epoch"], state["waiting"]


class LoaderResharder(Resharder):
    """Gathers what waits on all ranks of the commit, in order, and deals it to those of this job."""

    calls = 0

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]:
        return {("waiting",): ShardingMetadata((SAMPLES,), None, (), {"count": len(item_value["waiting"])})}

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[NestedPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[NestedPath]:
        type(self).calls += 1
        assert source_path.name == item_key == "dataloader"
        everything: list[int] = []
        for rank in range(source_metadata.world_size):
            part = storage.read_value(source_metadata, rank, ("waiting",))
            assert len(part) == source_metadata.by_rank[rank]["waiting",].extra["count"]
            everything += part
        place = target["place"]
        target["waiting"] = sorted(everything)[place["rank"] :: place["world_size"]]
        return [("waiting",), ("place",)]


class Rows(Resharder):
    """Declares the plain tensor of each rank as rows of a table; loading it is left to the default."""

    def __init__(self, offset: int, total: int) -> None:
        self.offset, self.total = offset, total

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]:
        rows = item_value["rows"]
        return {("rows",): ShardingMetadata((self.total, 3), rows.dtype, [((self.offset, 0), tuple(rows.shape))])}

    def load(self, *arguments: Any) -> None:
        return None


class Columns(Rows):
    """Reads the same table by columns."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]:
        return {("rows",): ShardingMetadata((self.total, 3), torch.float32, [((0, self.offset), tuple(item_value["rows"].shape))])}

    def load(
        self, source_path: Path, item_key: str, target_metadata: Any, source_metadata: Any, target: Any, storage: Storage
    ) -> list[NestedPath]:
        (box,) = target_metadata["rows",].boxes
        target["rows"].copy_(storage.read_box(source_metadata, ("rows",), *box))
        return [("rows",)]


class Broken(Rows):
    """Fails on one rank."""

    def load(self, source_path: Path, item_key: str, target_metadata: Any, source_metadata: Any, target: Any, storage: Storage) -> None:
        if dist.get_rank() == 1:
            raise KeyError("my own mistake")


def outcome(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - compared by the test
        return [type(exc).__name__, str(exc)]
    return ["", ""]


def manager(root: str, table: Resharder | None = None, **options: Any) -> CheckpointManager:
    items = {"dataloader": ItemSpec(resharder=LoaderResharder()), "table": ItemSpec(resharder=table)}
    return CheckpointManager(root, CheckpointManager.Config(items=items), timeout_s=90, save_on_exit=False, **options)


def values(first: int, rows: int) -> torch.Tensor:
    return torch.arange(first * 3, (first + rows) * 3, dtype=torch.float32).reshape(rows, 3)


# Rows of the table on each of four ranks: uneven, one has none.
FIRST, COUNT = (0, 4, 4, 9), (4, 0, 5, 1)


def on_four(rank: int, root: str) -> dict[str, Any]:
    loader = Loader(rank, 4)
    loader.epoch = 3
    found: dict[str, Any] = {"taken": loader.take(3 + rank)}
    table = {"rows": values(FIRST[rank], COUNT[rank]), "mine": rank}
    with manager(root, Rows(FIRST[rank], 10)) as ckpt:
        ckpt.save("four", {"dataloader": loader.state_dict(), "table": table}, wait=True)
        # As many ranks, as they were: everything is each rank's own, and no resharder is asked.
        again = Loader(rank, 4)
        target = {"rows": torch.zeros(COUNT[rank], 3), "mine": -1}
        loaded = ckpt.load("four", into={"dataloader": again.state_dict(), "table": target})
        found["same"] = [
            loaded["dataloader"]["waiting"] == loader.waiting,
            torch.equal(target["rows"], table["rows"]),
            loaded["table"]["mine"],
            LoaderResharder.calls,
            ckpt.last_report.resharded,
        ]
        without = ckpt.load("four")["table"]
        found["without"] = [torch.equal(without["rows"], table["rows"]), without["mine"]]
    with manager(root, Rows((0, 2, 4, 7)[rank], 10)) as ckpt:
        # As many ranks, other rows: the default reads the boxes that are declared now.
        target = {"rows": torch.zeros((2, 2, 3, 3)[rank], 3), "mine": -1}
        ckpt.load("four", into={"table": target})
        found["moved"] = target["rows"].flatten().tolist() == values((0, 2, 4, 7)[rank], (2, 2, 3, 3)[rank]).flatten().tolist()
    return found | {"refused": refusals(root + "-refused", rank)}


def refusals(root: str, rank: int) -> dict[str, list[str]]:
    """Save what a resharder declares wrongly; then something good."""
    rows = torch.ones(2, 3)

    def saving(table: Resharder, value: torch.Tensor = rows) -> list[str]:
        with manager(root, table, auto_resume=False) as ckpt:
            return outcome(lambda: ckpt.save(None, {"table": {"rows": value}}, wait=True))

    class Odd(Rows):
        def extract_sharding_metadata(self, item_key: str, item_value: Any) -> Any:
            return [("rows",)] if self.total == 0 else {("rows",): ShardingMetadata((8, 3), torch.float64, [((0, 0), (2, 3))])}

    return {
        "overlap": saving(Rows(rank, 5)),
        "hole": saving(Rows(rank * 2, 9)),
        "shape": saving(Rows(rank * 2, 8 + rank)),
        "copies": saving(Rows(0, 2), rows + rank),
        "dtype": saving(Odd(0, 8)),
        "no_mapping": saving(Odd(0, 0)),
        "good": saving(Rows(rank * 2, 8)),
        "good_copies": saving(Rows(0, 2)),
    }


def on_two(rank: int, root: str) -> dict[str, Any]:
    loader = Loader(rank, 2)
    target = {"rows": torch.zeros(5, 3), "mine": -1}
    found: dict[str, Any] = {}
    with manager(root, Rows(rank * 5, 10), auto_resume=False) as ckpt:
        before = loader.state_dict()
        into = {"dataloader": before, "table": target}
        ckpt.load("four", into=into, dry_run=True)
        info = ckpt.last_report.resharding
        plan = info.plans["table/rows"]
        found["dry"] = [
            info.handled,
            list(plan.global_shape),
            [[list(part) for part in box] for box in plan.targets],
            [[part.rank, list(part.box.offsets), list(part.box.sizes)] for part in plan.slices],
            target["rows"].sum().item(),
            LoaderResharder.calls,
        ]
        loaded = ckpt.load("four", into=into)
        found["loaded"] = [
            torch.equal(target["rows"], values(rank * 5, 5)),
            loaded["table"]["rows"] is target["rows"],
            loaded["table"]["mine"],
            ckpt.last_report.resharding.handled,
            [path for path in ckpt.last_report.per_rank if path.startswith("table")],
            ckpt.last_report.resharded,
            [note for note in ckpt.last_report.notes if note.startswith("table")],
        ]
        loader.load_state_dict(loaded["dataloader"])
        found["epoch"] = loader.epoch
        found["taken"] = loader.take(4)
        # Registered, the item of another number of ranks needs its resharder too.
        ckpt.dataloader, ckpt.table = loader, {"rows": target["rows"], "mine": rank}
        ckpt.save("two", wait=True)
    columns = {"rows": torch.zeros(10, 1 + rank), "mine": -1}
    with manager(root, Columns(rank, 10), auto_resume=False) as ckpt:
        # By a resharder that reads regions, of a commit with as many ranks and another layout.
        loaded = ckpt.load("two", into={"table": columns})
        whole = values(0, 10)
        found["columns"] = [torch.equal(columns["rows"], whole[:, :1] if rank == 0 else whole[:, 1:]), loaded["table"]["mine"]]
    with manager(root, Broken(rank * 5, 10), auto_resume=False) as ckpt:
        kept = {"rows": torch.full((5, 3), -1.0), "mine": 7}
        found["broken"] = outcome(lambda: ckpt.load("four", into={"table": kept}))
        found["kept"] = [kept["rows"].unique().tolist(), kept["mine"]]
        ckpt.load("two")  # the ranks are still in step
    return found


def on_three(rank: int, root: str) -> dict[str, Any]:
    loader = Loader(rank, 3)
    with manager(root, Rows((0, 3, 8)[rank], 10)) as ckpt:
        ckpt.dataloader = loader
        ckpt.table = {"rows": torch.zeros((3, 5, 2)[rank], 3), "mine": -1}
        found = {
            "rows": torch.equal(ckpt.table["rows"], values((0, 3, 8)[rank], (3, 5, 2)[rank])),
            "mine": ckpt.table["mine"],
            "handled": ckpt.last_report.resharding.handled,
            "taken": loader.take(100),
        }
        ckpt.save("three", wait=True)
    with manager(root, Broken((0, 3, 8)[rank], 10), branch="other", base="two") as ckpt:
        ckpt.table = {"rows": torch.zeros((3, 5, 2)[rank], 3), "mine": -1}
        # Registering is no agreement: the failure of one rank is raised by the first call that is one, on all of them.
        found["broken"] = outcome(lambda: ckpt.save(wait=True))
    return found
