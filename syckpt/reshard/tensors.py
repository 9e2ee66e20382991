"""Live tensors as boxes: what torch knows of a DTensor's layout, and views of the parts that this rank holds.

* Nothing here communicates, except that a local tensor still in flight is waited for. `torch.distributed.tensor` is never imported: it
  takes half a second, and there is no DTensor in a process that has not imported it.
* Not `DTensor.__create_chunk_list__`: it returns a single box where a strided shard consists of several.
* What cannot be carried is a StateError that names the tensor's path: partial values (each rank holds a summand), placements that
  torch invents later, a local tensor whose shape is not what its placements say, shards along a mesh dimension whose ranks do not
  ascend (torch sorts the ranks of a group: its collectives and its arithmetic of placements then disagree on who has which part).
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch

from syckpt.errors import StateError
from syckpt.objects.box import Box
from syckpt.reshard.layout import Layout, Placement, Replicate, Shard, StridedShard, boxes_at, local_shape, shard_placements
from syckpt.state.shards import is_dtensor

__all__ = ["is_dtensor", "layout_of", "local_boxes"]

# Shape, ranks, whether they ascend along each dimension, and the layouts on it by global shape and placements.
_Mesh = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...], dict[tuple[tuple[int, ...], tuple[Placement, ...]], Layout]]
# A model's parameters share a few meshes and layouts, and a large mesh is a long list.
_MESHES: WeakKeyDictionary[Any, _Mesh] = WeakKeyDictionary()


def layout_of(tensor: torch.Tensor, *, path: str = "tensor") -> Layout | None:
    """Return a DTensor's layout, the same on all ranks of its mesh; None for any other tensor. Raises: StateError."""
    if not is_dtensor(tensor):
        return None
    live: Any = tensor
    mesh_shape, ranks, ascending, layouts = _mesh(live.device_mesh)
    placements = tuple(_placement(placement, path) for placement in live.placements)
    for placement, sorted_ranks in zip(placements, ascending, strict=True):
        if not sorted_ranks and not isinstance(placement, Replicate):
            raise StateError(
                f"{path}: sharded over a mesh of shape {list(mesh_shape)} whose ranks {list(ranks[:8])}... do not ascend along that "
                "dimension, where torch's own operations disagree on which rank has which part; make the mesh with ascending ranks"
            )
    # Newer versions of torch can also say in the spec that splits apply in another order than from left to right.
    for entry in getattr(live._spec, "shard_order", None) or ():
        placements = shard_placements(placements, mesh_shape, entry.mesh_dims)
    key = (tuple(tensor.shape), placements)
    if key not in layouts:
        layouts[key] = Layout(key[0], mesh_shape, ranks, placements)
    return layouts[key]


def local_boxes(tensor: torch.Tensor, *, path: str = "tensor") -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes that this rank holds, each with a detached view of its values; none on a rank outside a DTensor's mesh.

    A plain tensor is one box, the whole. Writing to a view writes to the tensor. Raises: StateError.
    """
    layout = layout_of(tensor, path=path)
    if layout is None:
        return [(Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor.detach())]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    local = _local(tensor)
    expected = local_shape(layout, coordinate)
    if tuple(local.shape) != expected and (local.numel() or 0 not in expected):
        raise StateError(
            f"{path}: this rank's part has shape {list(local.shape)}, its placements {list(tensor.placements)} of "
            f"{list(tensor.shape)} say {list(expected)}; make it with distribute_tensor or fully_shard, with even or torch.chunk's shards"
        )
    found = []
    for part in boxes_at(layout, coordinate):
        if part.box.elements == 0:
            found.append((part.box, local.reshape(part.box.sizes)))
            continue
        view = local
        for dim, (offset, size) in enumerate(zip(part.offsets, part.box.sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        found.append((part.box, view))
    return found


def _mesh(mesh: Any) -> _Mesh:
    known = _MESHES.get(mesh)
    if known is None:
        ranks = mesh.mesh
        ascending = tuple(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.ndim))
        known = _MESHES[mesh] = (tuple(ranks.shape), tuple(ranks.flatten().tolist()), ascending, {})
    return known


def _local(tensor: Any) -> torch.Tensor:
    with torch.no_grad():
        local = tensor.to_local()
        if hasattr(local, "trigger_wait"):  # an AsyncCollectiveTensor: the collective that fills it may still run
            local = local.trigger_wait()
        return local.detach()


def _placement(placement: Any, path: str) -> Placement:
    known = sys.modules["torch.distributed.tensor.placement_types"]
    if isinstance(placement, known._StridedShard):  # a Shard as well, in some versions
        return StridedShard(placement.dim, int(placement.split_factor))
    if type(placement) is known.Shard:
        return Shard(placement.dim)
    if type(placement) is known.Replicate:
        return Replicate()
    if placement.is_partial():
        raise StateError(
            f"{path}: a DTensor placed {placement} holds values that are still to be reduced; redistribute it to Shard or Replicate first"
        )
    raise StateError(f"{path}: DTensor placement {placement} is unknown to this version; redistribute to Shard or Replicate first")
