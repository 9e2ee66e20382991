"""Reading once for all: values that every rank needs alike are read by one of them and broadcast (`Config(read="broadcast")`).

Each rank reads its share of them, balanced by bytes, and the rounds in which they are sent bound the memory: two shares of a round are all
that lies between the repository and the targets. The group is this module's own, over gloo and CPU memory, so nothing meets the training's
collectives; it is made in the manager's constructor, which all ranks call together. Everything else (shards, what a rank kept for itself)
is read by whoever needs it, as without this.

A failure of any rank reaches all: before anything is sent by the first agreement, later by the flag that goes with each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from syckpt.checkpoint.content import whole
from syckpt.checkpoint.loader import Fetch
from syckpt.checkpoint.source import Source
from syckpt.dist.coordinator import Coordinator
from syckpt.errors import CoordinationError
from syckpt.objects import nodes
from syckpt.objects.box import Box
from syckpt.objects.dtypes import dtype
from syckpt.reshard.owners import Piece, assign
from syckpt.reshard.tensors import local_boxes
from syckpt.state.bits import copy_tensor

__all__ = ["Broadcast"]

_UNIT_NBYTES = 16 << 20
_ROUND_NBYTES = 32 << 20
_ALIGN = 16


@dataclass(frozen=True)
class _Unit:
    """A box of an entry, and where it lies in its reader's share of a round."""

    number: int
    box: Box
    nbytes: int
    offset: int


class Broadcast:
    """Reads for the ranks of a job together. Making one is collective; so is what `fetcher` returns, and closing is not."""

    def __init__(self, coordinator: Coordinator, *, timeout_s: float) -> None:
        self._coordinator = coordinator
        self._group: Any = None
        self._told: BaseException | None = None
        if coordinator.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Give the group up."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def told(self, error: BaseException) -> bool:
        """Whether an error was raised on all ranks already, so that they need not be told of it."""
        return error is self._told

    def fetcher(self, source: Source, *, topic: str, at: str = "") -> Fetch:
        """Return what stands for `source.fetch`: every rank has to call it as often.

        `topic` is that of the caller's own agreement, in which a rank that fails on its way to a fetch tells the others.
        """

        def agree(mine: dict[str, Any], decide: Any, *, error: BaseException | None = None) -> dict[str, Any]:
            try:
                return self._coordinator.agree(topic, mine, decide, error=error, at=at)
            except BaseException as exc:
                self._told = exc
                raise

        return lambda wanted: self._fetch(source, wanted, agree, at)

    def _fetch(self, source: Source, wanted: Mapping[int, torch.Tensor | None], agree: Any, at: str) -> dict[int, torch.Tensor]:
        if self._group is None:
            return source.fetch(wanted)
        # By path: ranks count their tensors in the order in which they read manifests.
        mine = {
            nodes.format_path(source.entries[number].path): number for number, target in wanted.items() if _is_alike(source, number, target)
        }
        common = [mine[path] for path in agree({"wanted": list(mine), "at": at}, _common)["common"]]
        found: dict[int, torch.Tensor] = {}
        views: dict[int, torch.Tensor] = {}
        error: BaseException | None = None
        try:
            found = source.fetch({number: target for number, target in wanted.items() if number not in set(common)})
            for number in common:
                target = wanted[number]
                found[number] = source.new(number) if target is None else target
                ((_, views[number]),) = local_boxes(found[number])
        except Exception as exc:  # noqa: BLE001 - the others hear of it
            error = exc
        # One for what is read here, one for what comes: the allocator would not give those of every round back.
        own, other = (torch.empty(_ROUND_NBYTES, dtype=torch.uint8) for _ in range(2))
        for shares in _rounds(source, common, self._coordinator.world_size):
            failed, error = self._round(source, shares, views, error, own=own, other=other)
            if failed:
                agree({}, lambda _: {}, error=error)
        if error is not None:
            raise error
        return found

    def _round(
        self,
        source: Source,
        shares: Sequence[Sequence[_Unit]],
        views: Mapping[int, torch.Tensor],
        error: BaseException | None,
        *,
        own: torch.Tensor,
        other: torch.Tensor,
    ) -> tuple[bool, BaseException | None]:
        """Read this rank's share and send all of them around; return whether any rank has failed, and this rank's error.

        `own` and `other` are overwritten: they hold a share each.
        """
        rank, nbytes = self._coordinator.rank, [max((unit.offset + unit.nbytes for unit in share), default=0) for share in shares]
        try:
            for unit in shares[rank] if error is None else ():
                stored = source.entries[unit.number]
                source.read_into(stored, unit.box, _part(own, unit, stored.dtype))
        except Exception as exc:  # noqa: BLE001 - the others hear of it
            error = exc
        try:
            flag = torch.tensor([int(error is not None)], dtype=torch.int32)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
            if flag.item():
                return True, error
            for owner, size in enumerate(nbytes):
                if not size:
                    continue
                sent = (own if owner == rank else other)[:size]
                dist.broadcast(sent, src=owner, group=self._group)
                for unit in shares[owner]:
                    where = (..., *(slice(o, o + n) for o, n in zip(unit.box.offsets, unit.box.sizes, strict=True)))
                    region = views[unit.number][where]
                    with torch.no_grad():
                        copy_tensor(region, _part(sent, unit, source.entries[unit.number].dtype))
        except RuntimeError as exc:
            raise CoordinationError(f"rank {rank}: the values that all ranks read together could not be sent around: {exc}") from exc
        return False, error


def _is_alike(source: Source, number: int, target: torch.Tensor | None) -> bool:
    """Whether a rank needs a stored tensor whole, as others may: also a DTensor that is replicated."""
    stored = source.entries[number]
    if stored.window is not None or stored.is_local:
        return False
    return target is None or [box for box, _ in local_boxes(target)] == [whole(stored.shape)]


def _common(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len({value.get("at") for value in values}) > 1:
        found = ", ".join(f"rank {rank}: {value.get('at', 'nothing more')}" for rank, value in enumerate(values))
        raise CoordinationError(f"ranks read different items together ({found}): register the same items on all ranks")
    return {"common": sorted(set.intersection(*(set(value["wanted"]) for value in values)))}


def _part(buffer: torch.Tensor, unit: _Unit, name: str) -> torch.Tensor:
    return buffer[unit.offset : unit.offset + unit.nbytes].view(getattr(torch, name)).view(unit.box.sizes)


def _rounds(source: Source, numbers: Sequence[int], world_size: int) -> Iterator[list[list[_Unit]]]:
    """Yield what each rank reads in each round; the same on every rank. There is at least one round, so that a failure is heard of."""
    pieces = []
    for number in numbers:
        stored = source.entries[number]
        for box in _cut(whole(stored.shape), dtype(stored.dtype).itemsize):
            pieces.append((number, box, box.elements * dtype(stored.dtype).itemsize))
    everyone = tuple(range(world_size))
    keys = {number: nodes.format_path(source.entries[number].path) for number in numbers}
    owners = assign([Piece(keys[number], box, nbytes, everyone) for number, box, nbytes in pieces], world_size)
    queues: list[list[tuple[int, Box, int]]] = [[] for _ in everyone]
    for owner, piece in zip(owners, pieces, strict=True):
        queues[owner].append(piece)
    positions = [0] * world_size
    while True:
        shares: list[list[_Unit]] = []
        for owner, queue in enumerate(queues):
            share: list[_Unit] = []
            end = 0
            while positions[owner] < len(queue) and (not share or end + queue[positions[owner]][2] <= _ROUND_NBYTES):
                number, box, nbytes = queue[positions[owner]]
                share.append(_Unit(number, box, nbytes, end))
                end += -(-nbytes // _ALIGN) * _ALIGN
                positions[owner] += 1
            shares.append(share)
        yield shares
        if all(position == len(queue) for position, queue in zip(positions, queues, strict=True)):
            return


def _cut(box: Box, itemsize: int) -> Iterator[Box]:
    """Yield parts of a box of at most 16 MiB, each contiguous in it; rows are kept together as long as they fit."""
    if box.elements * itemsize <= _UNIT_NBYTES:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    row = prod(box.sizes[dim + 1 :]) * itemsize
    step = max(1, _UNIT_NBYTES // row)
    for begin in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = box.offsets[dim] + begin, min(step, box.sizes[dim] - begin)
        yield from _cut(Box(tuple(offsets), tuple(sizes)), itemsize)
