"""Sharded tensors; FSDP1's as DTensors over the same memory: then there is one kind of sharding to save, plan and fill."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["as_dtensor", "is_dtensor", "is_flat_shard"]

_MESHES: dict[tuple[str, str], Any] = {}


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor; False, without an import, where there cannot be one."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def as_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a ShardedTensor that is split as FSDP1 does (by rows, as `torch.chunk`) as a DTensor that shares its values.

    Any other tensor is returned as it is. Nothing is sent.
    """
    kind = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor"), "ShardedTensor", None)
    if kind is None or not isinstance(tensor, kind):
        return tensor
    live: Any = tensor
    # Its own methods and properties warn of their age.
    group, known = live._process_group, live.metadata()
    sizes, parts = tuple(known.size), known.shards_metadata
    count = group.size()
    step = -(-sizes[0] // count) if sizes else 0
    begins = list(range(0, sizes[0], step)) if step else []
    expected = [([begin, *[0] * (len(sizes) - 1)], [min(step, sizes[0] - begin), *sizes[1:]]) for begin in begins]
    if [(list(part.shard_offsets), list(part.shard_sizes)) for part in parts] != expected:
        return tensor
    local = [shard.tensor.detach() for shard in live.local_shards()]
    if len(local) != (1 if group.rank() < len(expected) else 0):
        return tensor
    from torch.distributed.tensor import DTensor, Shard

    held = local[0] if local else torch.empty((0, *sizes[1:]), dtype=known.tensor_properties.dtype)
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    mesh = _mesh_of(group, held.device.type)
    made: torch.Tensor = DTensor.from_local(held, mesh, [Shard(0)], run_check=False, shape=torch.Size(sizes), stride=tuple(strides))
    return made


def _mesh_of(group: Any, device_type: str) -> Any:
    """Return the mesh of a process group: one object for all of a model's tensors."""
    from torch.distributed import get_process_group_ranks
    from torch.distributed.device_mesh import DeviceMesh

    key = (group.group_name, device_type)
    known = _MESHES.get(key)
    # A group that is made after another one was destroyed may have its name.
    if known is None or known.mesh.tolist() != get_process_group_ranks(group):
        known = _MESHES[key] = DeviceMesh.from_group(group, device_type)
    return known


def is_flat_shard(parameter: torch.Tensor) -> bool:
    """Whether FSDP1 keeps a parameter flat, with a piece of it on each rank: an optimizer's own state is such pieces too."""
    return type(parameter).__name__ == "FlatParameter" or bool(getattr(parameter, "_fsdp_flattened", False))
