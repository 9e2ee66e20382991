"""Commits of several ranks' states, made in one process, without training, without a writer.

    repository = make_commit(tmp_path, {"model": {"w": torch.ones(4, 2)}}, {"model": {"w": torch.ones(4, 2)}}, shards={"model/w": 0})

makes a commit of two ranks in which each stored two rows of `w`. Called again on the same directory, it makes the next commit of `main`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from syckpt.checkpoint.specs import Config
from syckpt.objects.box import Box
from syckpt.objects.commit import Commit
from syckpt.objects.entries import renumber
from syckpt.objects.nodes import format_path
from syckpt.repo import owner
from syckpt.repo.packing import Packed, Packer, Staged
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Transaction, open_branch
from syckpt.state.flatten import Flat, Leaf, flatten
from syckpt.stores.base import parse_root
from syckpt.testing.repositories import MIDNIGHT_NS, commit_id

__all__ = ["make_commit"]


def make_commit(
    root: str | os.PathLike[str],
    *states: Mapping[str, Any],
    specs: Config | None = None,
    shards: Mapping[str, int] | None = None,
    rng: Sequence[Any] | None = None,
    **fields: Any,
) -> Repository:
    """Commit the states of as many ranks, by item, and return the repository.

    `specs`: layouts and formats of the items. `shards`: dimensions along which tensors are in parts, by path text; each rank is given the
    whole one and stores its part. Other tensors are stored by the first rank that has them, or, where ranks differ, by each. `rng`: each
    rank's random streams. `fields` of `Commit`.
    """
    settings = specs or Config()
    repository = Repository.open_or_create(parse_root(root))
    head = repository.refs.head("heads/main")
    parent = None if head is None or head.commit is None else repository.read_commit(head.commit)
    number = 1 if parent is None else parent.sequence + 1
    layouts = settings.layouts({name for state in states for name in state}, world_size=len(states))
    flats = [flatten(dict(sorted(state.items())), formats=settings.formats(state)) for state in states]
    streams = [None] * len(states) if rng is None else [flatten({"<rng>": value}) for value in rng]
    hold = open_branch(repository, "main", run="testing", expected=None if parent is None else parent.id)
    transaction = Transaction(repository, commit_id(number), hold, uses=(), owner=owner.this_process())
    reader = Reader(repository)
    packed = [
        _pack(reader, number, parent, rank, flats, streams[rank], dict(shards or {}), {n: layouts[n] for n in states[rank] if n in layouts})
        for rank in range(len(states))
    ]
    commit = Commit(**{**_fields(number, parent, len(states), packed), **fields})
    transaction.publish(commit, hold=hold, reader=reader, locations=[part.locations for part in packed])
    return repository


def _pack(
    reader: Reader,
    number: int,
    parent: Commit | None,
    rank: int,
    flats: Sequence[Flat],
    streams: Flat | None,
    shards: Mapping[str, int],
    layouts: dict[str, Any],
) -> Packed:
    flat = flats[rank]
    leaves = [*flat.leaves, *([] if streams is None else streams.leaves)]
    memory, staged = bytearray(), []
    for leaf in leaves:
        box, array, local = _share(leaf, rank, flats, shards)
        staged.append(Staged(leaf.path, leaf.dtype, leaf.shape, box, None if array is None else len(memory), local))
        memory += b"" if array is None else _bytes(array)
    rng = None if streams is None else _shifted(streams.nodes["<rng>"], len(flat.leaves))
    packer = Packer(reader, rank=rank, world_size=len(flats), compression="fast", keyframe_every=8, threads=1)
    try:
        where = commit_id(number)
        return packer.pack(where, parent=parent, staged=staged, memory=memoryview(memory), items=flat.nodes, rng=rng, layouts=layouts)
    finally:
        packer.close()


def _share(leaf: Leaf, rank: int, flats: Sequence[Flat], shards: Mapping[str, int]) -> tuple[Box | None, Any, bool]:
    """Return the box that a rank stores of a tensor, the values (None: others store them), and whether they are its own."""
    if leaf.path[0] == "<rng>":
        return None, leaf.array, True
    path = format_path(leaf.path)
    held = {r: other.array for r, flat in enumerate(flats) for other in flat.leaves if format_path(other.path) == path}
    if path in shards:
        dim = shards[path]
        size = -(-leaf.shape[dim] // len(flats))
        begin, end = min(rank * size, leaf.shape[dim]), min((rank + 1) * size, leaf.shape[dim])
        if begin == end:
            return None, None, False
        offsets, sizes = [0] * len(leaf.shape), list(leaf.shape)
        offsets[dim], sizes[dim] = begin, end - begin
        return Box(tuple(offsets), tuple(sizes)), leaf.array.narrow(dim, begin, end - begin), False
    if len({_bytes(array) for array in held.values()}) > 1:
        return None, leaf.array, True
    return None, leaf.array if rank == min(held) else None, False


def _shifted(node: Any, count: int) -> Any:
    """Return a node whose entries are counted from `count` on."""

    class Later(dict[int, int]):
        def __missing__(self, index: int) -> int:
            return index + count

    return renumber(node, Later())


def _bytes(array: Any) -> bytes:
    if isinstance(array, np.ndarray):
        return bytes(np.ascontiguousarray(array).tobytes())
    flat = array.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _fields(number: int, parent: Commit | None, world_size: int, packed: Sequence[Packed]) -> dict[str, Any]:
    return {
        "id": commit_id(number),
        "parents": () if parent is None else (parent.id,),
        "parent_seals": () if parent is None else (parent.seal,),
        "manifests": tuple((rank, part.manifest_seal) for rank, part in enumerate(packed)),
        "world_size": world_size,
        "branch": "main",
        "name": None,
        "step": 10 * number,
        "epoch": number - 1,
        "batch_idx": 0,
        "epoch_done": True,
        "entered": False,
        "metric": None,
        "message": "",
        "tags": (),
        "config": {},
        "fingerprint": "00000000",
        "created_ns": MIDNIGHT_NS + number * 60 * 10**9,
        "writer": "syckpt.testing",
        "run_id": "testing",
        "generation": number,
        "sequence": number,
        "rng_exact": True,
        "stats": {},
    }
