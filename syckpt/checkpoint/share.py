"""Who stores what: the parts of a job's state that this rank hands to its writer.

A sharded tensor is stored box by box, by ranks that hold them; a replicated one once (`reshard.placement`). While ranks have the same
structure, each works that out for itself; where they have different keys (pipeline or expert parallelism), rank 0 does, for all.
Replicas are compared by digests that travel with the save (`comparison`); a tensor that differs between ranks is stored by each. The
digests see all of a tensor up to 64 KiB and a sample of a larger one: a difference outside of the sample is not seen, unless all bytes are
compared (`check_replicas="full"`). Copies of a sharded tensor's parts (HSDP, tensor parallelism) are compared likewise; where they
differ, one of them is stored, and a warning says so. A plain tensor that a resharder declares as a box of a global one is no replica: it
is stored as that box, by one of the ranks that declare the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from syckpt.checkpoint.comparison import Claim, Compared, Told, alike, box_text, check_partition, compare, owner_of_box, place_of
from syckpt.checkpoint.paths import claim as files_claimed
from syckpt.checkpoint.sharding import Declared, part_of
from syckpt.dist.coordinator import Coordinator
from syckpt.objects import canonical
from syckpt.objects.box import Box
from syckpt.objects.dtypes import dtype
from syckpt.objects.nodes import format_path
from syckpt.reshard.layout import Layout, copies
from syckpt.reshard.placement import Declaration, Placement, Structure, Tensor, key_of, place, table
from syckpt.reshard.tensors import layout_of, local_boxes
from syckpt.state.flatten import Flat, Leaf
from syckpt.state.staging import Part

__all__ = ["Facts", "Replicas", "Sharing", "whole"]

_log = logging.getLogger("syckpt")
_WHOLE_NBYTES = 64 << 10
_SAMPLE_NBYTES = 4 << 10
_CHUNK_NBYTES = 64 << 20


@dataclass(frozen=True)
class Facts:
    """One rank's structure: each leaf's path text, layout and claim; the tensors that it may share; a digest that other ranks' are compared
    with."""

    paths: list[str] = field(default_factory=list)
    layouts: list[Layout | None] = field(default_factory=list)
    schema: str = ""
    structure: Structure = field(default_factory=Structure)
    claims: list[Claim | None] = field(default_factory=list)


@dataclass(frozen=True)
class Replicas:
    """Digests of what other ranks have too.

    `summary[""]` is one of all plain tensors that should be the same on all ranks, and of declared boxes, which make it another one; beside
    it stand those of the parts of sharded tensors of which there are copies, for each place in a mesh: ranks that share it should have the
    same one. `digests`: of single tensors, by path text.
    """

    summary: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class Sharing:
    """Decides shares, save after save; remembers owners while the structure stays. `full`: replicas are compared by all of their bytes."""

    def __init__(self, coordinator: Coordinator, *, full: bool = False, one_file: Callable[[str], str | None] = lambda name: None) -> None:
        """`one_file(item)`: the file of the commit's tree that all ranks share for an item, by its layout."""
        self._coordinator = coordinator
        self._full = full
        self._one_file = one_file
        self._placement: Placement | None = None
        self._told_schema = ""
        """Digest of this rank's structure, as rank 0 has known it last, whoever told it."""
        self._known: dict[str, Structure] = {}
        self._structures: dict[str, Structure] = {}
        """Rank 0: by their digests, the structures that ranks have told, and of those the ones that they have now."""
        self._said: set[str] = set()
        """Rank 0: the tensors, and the copies, of which it was warned that they differ."""
        self._tabled: Any = None
        self.table: dict[str, Any] | None = None
        """Rank 0: who stores what by the last shares, as `LayoutTable.to_body` without items. The same object while that stays."""

    def facts(self, flat: Flat, own: str, declared: Declared | None = None) -> Facts:
        """Return this rank's structure. Leaves of the item `own` are never shared.

        Raises: StateError (a layout that cannot be stored, a tensor that is not what its resharder declared).
        """
        paths = [format_path(leaf.path) for leaf in flat.leaves]
        layouts = [None if leaf.path[0] == own else _layout(leaf, path) for leaf, path in zip(flat.leaves, paths, strict=True)]
        claims = [_claim(leaf, path, layout, declared) for leaf, path, layout in zip(flat.leaves, paths, layouts, strict=True)]
        rows, tensors = [], []
        for path, leaf, layout, claim in zip(paths, flat.leaves, layouts, claims, strict=True):
            if leaf.path[0] == own:
                continue
            if claim is None:
                rows.append([path, leaf.dtype, list(leaf.shape), None if layout is None else layout.text])
                tensors.append(Tensor(leaf.path, leaf.dtype, leaf.shape, layout))
            else:
                rows.append([path, claim.form])
        return Facts(paths, layouts, blake3(canonical.dumps(rows)).hexdigest(), Structure(tuple(tensors)), claims)

    def replicas(self, flat: Flat, facts: Facts, own: str) -> Replicas:
        """Return digests of what other ranks have too."""
        texts = {"": [canonical.dumps(files_claimed(flat.nodes, self._one_file)).decode()]}
        places: dict[Any, str | None] = {}
        digests: dict[str, str] = {}
        for leaf, path, layout, claim in zip(flat.leaves, facts.paths, facts.layouts, facts.claims, strict=True):
            if layout is not None and copies(layout) > 1:
                # Most tensors share a mesh, and a large one is a long list.
                mesh = (id(layout.ranks), layout.mesh_shape, layout.copying)
                if mesh not in places:
                    places[mesh] = place_of(layout, self._coordinator.rank)
                if (place := places[mesh]) is not None:
                    digests[path] = self._digest(leaf, path, layout)
                    texts.setdefault(place, []).append(digests[path])
            elif layout is None and leaf.path[0] != own and (claim is None or claim.box is not None):
                digests[path] = self._digest(leaf, path, layout)
                texts[""].append(digests[path] + ("" if claim is None else str(claim.box)))
        return Replicas({place: blake3("".join(found).encode()).hexdigest(length=16) for place, found in texts.items()}, digests)

    def share(
        self,
        flat: Flat,
        facts: Facts,
        replicas: Replicas,
        *,
        own: str,
        same_schema: bool,
        same_replicas: bool,
        tellers: Sequence[int] = (),
        at: str,
    ) -> list[Part]:
        """Return this rank's parts, the first ones aligned with the leaves. `tellers`: one rank of each structure, where there are several.

        Collective when ranks differ: then one more agreement tells where. Raises: as `Coordinator.agree`; StateError for declared boxes
        that do not make a tensor.
        """
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        if same_schema and (self._placement is None or self._placement.key != facts.schema):
            self._placement = Placement(facts.schema, place({facts.schema: facts.structure}, [facts.schema] * world_size))
        if same_schema and same_replicas:
            compared = alike(facts.claims, world_size)
        else:
            compared = self._compare(flat, facts, replicas, same_schema=same_schema, tells=rank in tellers, at=at)
        assert self._placement is not None
        if rank == 0:
            self._make_table([facts.structure] if same_schema else list(self._structures.values()), compared.declared)
            self._warn(compared)
        diverged = set(compared.diverged)
        first: list[Part] = []
        further: list[Part] = []
        for leaf, path, layout, claim in zip(flat.leaves, facts.paths, facts.layouts, facts.claims, strict=True):
            if leaf.path[0] == own or path in diverged or (claim is not None and claim.box is None):
                first.append(Part(leaf.path, leaf.dtype, leaf.shape, None, leaf.array, local=True, trainable=leaf.trainable))
                continue
            if claim is not None and claim.box is not None:
                owner = owner_of_box(path, claim.box, compared.claimants.get(box_text(path, claim.box), (rank,)))
                first.append(_box_part(leaf, claim.shape, claim.box, owned=owner == rank))
                continue
            mine = _own(leaf, path, layout) if self._placement.is_stored_by(rank, path, layout) else []
            parts = [
                Part(leaf.path, leaf.dtype, leaf.shape, None if layout is None else box, view, trainable=leaf.trainable)
                for box, view in mine
            ]
            first.append(parts[0] if parts else Part(leaf.path, leaf.dtype, leaf.shape, None, None))
            further += parts[1:]
        return first + further

    def _compare(self, flat: Flat, facts: Facts, replicas: Replicas, *, same_schema: bool, tells: bool, at: str) -> Compared:
        """Have rank 0 compare what ranks have; where their structures differ, it also tells all of them who stores what."""
        digests: dict[str, str] = {}
        for leaf, path, layout in zip(flat.leaves, facts.paths, facts.layouts, strict=True):
            # Parts that nobody else holds matter only where others may have another tensor under that path.
            if path not in replicas.digests and layout is not None and not same_schema:
                digests[path] = self._digest(leaf, path, layout)
            else:
                digests[path] = replicas.digests.get(path, "")
        claims = {path: claim for path, claim in zip(facts.paths, facts.claims, strict=True) if claim is not None}
        is_news = tells and self._told_schema != facts.schema
        mine = {
            "schema": facts.schema,
            "told": self._told_schema,
            "structure": facts.structure.to_body(world_size=self._coordinator.world_size) if is_news else None,
            "digests": [digests[tensor.text] for tensor in facts.structure.tensors],
            "claims": {path: [*claim.to_body(), digests[path]] for path, claim in claims.items()},
            "files": files_claimed(flat.nodes, self._one_file),
            "placement": "" if self._placement is None else self._placement.key,
        }
        found: list[Compared] = []

        def decide(values: list[dict[str, Any]]) -> dict[str, Any]:
            structures = {facts.schema: facts.structure} if same_schema else self._gather(values)
            found.append(compare([Told.from_body(value, structures[value["schema"]]) for value in values]))
            told = {"diverged": found[0].diverged, "claimants": found[0].claimants}
            return told | {"placement": None if same_schema else self._place(values)}

        verdict = self._coordinator.agree("replicas", mine, decide, at=at)
        if not same_schema:
            self._told_schema = facts.schema
        if verdict["placement"] is not None:
            self._placement = Placement.from_body(verdict["placement"])
        # The rest is for rank 0's table and warnings alone.
        return found[0] if found else Compared(verdict["diverged"], claimants=verdict["claimants"])

    def _gather(self, values: Sequence[Mapping[str, Any]]) -> dict[str, Structure]:
        """Rank 0: return the structures of all ranks. One that a rank has told before is remembered."""
        known = dict(self._known)
        for value in values:
            if value["structure"] is not None and value["schema"] not in known:
                known[value["schema"]] = Structure.from_body(value["structure"])
        # Also what a rank believes to be known here, should it not hear the verdict.
        kept = {value[which] for value in values for which in ("schema", "told")}
        self._known = {schema: structure for schema, structure in known.items() if schema in kept}
        self._structures = {value["schema"]: known[value["schema"]] for value in values}
        return self._structures

    def _place(self, values: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Rank 0: return who stores what, if there is a rank that does not know."""
        schemas = [value["schema"] for value in values]
        key = key_of(schemas)
        if self._placement is None or self._placement.key != key:
            self._placement = Placement(key, place(self._structures, schemas))
        return None if all(value["placement"] == key for value in values) else self._placement.to_body()

    def _make_table(self, structures: Sequence[Structure], declared: Sequence[Declaration]) -> None:
        assert self._placement is not None
        told = self._placement.key, list(declared)
        if told != self._tabled:
            self._tabled = told
            self.table = table(structures, self._placement, declared, world_size=self._coordinator.world_size).to_body()

    def _warn(self, compared: Compared) -> None:
        """Rank 0: say which tensors differ between ranks, as long as that is new: a run saves thousands of times."""
        paths = sorted(compared.diverged)
        if paths and self._is_new(paths):
            what = "1 tensor differs between ranks and is" if len(paths) == 1 else f"{len(paths)} tensors differ between ranks and are"
            _log.warning("%s kept by each: %s", what, ", ".join(paths[:5]))
        holding = [f"{path} (ranks {', '.join(map(str, ranks))})" for path, ranks in compared.unlike.items()]
        if holding and self._is_new(holding):
            _log.warning(
                "%s copies that differ between ranks which should hold the same values, and the values of one of them are saved: %s. What"
                " keeps them alike in training (a gradient that is not reduced?) is broken",
                "1 sharded tensor has" if len(holding) == 1 else f"{len(holding)} sharded tensors have",
                ", ".join(holding[:5]),
            )

    def _is_new(self, texts: Sequence[str]) -> bool:
        """Whether any of the texts has not been said; then all are."""
        is_new = not self._said.issuperset(texts)
        self._said.update(texts)
        return is_new

    def _digest(self, leaf: Leaf, path: str, layout: Layout | None) -> str:
        if layout is None:
            return replica_digest(leaf, full=self._full)
        views = [Leaf(leaf.path, view, leaf.dtype, box.sizes) for box, view in local_boxes(leaf.array, path=path)]
        return "".join(replica_digest(view, full=self._full) for view in views)


def whole(flat: Flat, declared: Declared | None = None) -> list[Part]:
    """Return the parts of a job of one process: everything. Raises: StateError (a declared box that is not all of its tensor)."""
    for leaf in flat.leaves if declared is not None and declared.tensors else ():
        claim = _claim(leaf, format_path(leaf.path), None, declared)
        if claim is not None and claim.box is not None:
            check_partition(format_path(leaf.path), claim.shape, [claim.box])
    return [Part(leaf.path, leaf.dtype, leaf.shape, None, leaf.array, trainable=leaf.trainable) for leaf in flat.leaves]


def _claim(leaf: Leaf, path: str, layout: Layout | None, declared: Declared | None) -> Claim | None:
    metadata = None if declared is None or layout is not None else declared.tensors.get(path)
    if metadata is None or metadata.dtype is None or not metadata.boxes:
        return None
    if not isinstance(leaf.array, torch.Tensor):
        return Claim(leaf.path, leaf.dtype, leaf.shape, None)  # The array around an entry has an order of its own.
    box = part_of(metadata, path=path, dtype=leaf.dtype, sizes=leaf.shape)
    return Claim(leaf.path, leaf.dtype, metadata.global_shape, box)


def _box_part(leaf: Leaf, shape: tuple[int, ...], box: Box, *, owned: bool) -> Part:
    if not owned:
        return Part(leaf.path, leaf.dtype, shape, None, None)
    return Part(leaf.path, leaf.dtype, shape, None if box.sizes == shape else box, leaf.array, trainable=leaf.trainable)


def _layout(leaf: Leaf, path: str) -> Layout | None:
    return layout_of(leaf.array, path=path) if isinstance(leaf.array, torch.Tensor) else None


def _whole(leaf: Leaf) -> Box:
    return Box((0,) * len(leaf.shape), leaf.shape)


def _own(leaf: Leaf, path: str, layout: Layout | None) -> list[tuple[Box, Any]]:
    """Return the boxes that this rank holds, and their values."""
    return [(_whole(leaf), leaf.array)] if layout is None else local_boxes(leaf.array, path=path)


def replica_digest(leaf: Leaf, *, full: bool = False) -> str:
    """Return a digest of dtype, shape and values: all of them up to 64 KiB or with `full`, else a strided sample of 4 KiB and both ends."""
    array = leaf.array
    if isinstance(array, np.ndarray):
        array = torch.from_numpy(np.ascontiguousarray(array))
    flat = array.detach().reshape(-1)
    itemsize = dtype(leaf.dtype).itemsize
    nbytes = prod(leaf.shape) * itemsize
    if nbytes > _WHOLE_NBYTES and not full:
        count = _SAMPLE_NBYTES // itemsize
        step = max(1, flat.numel() // count)
        flat = torch.cat([flat[::step][:count], flat[-1:]])
    hasher = blake3(canonical.dumps([leaf.dtype, list(leaf.shape)]))
    if nbytes:
        for chunk in flat.split(_CHUNK_NBYTES // itemsize):
            hasher.update(chunk.cpu().contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest(length=16)
