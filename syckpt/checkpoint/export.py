"""A commit as one file that lives without syckpt: `torch.load(path, weights_only=True)` reads it.

    {"model": state_dict, "optimizer": state_dict, ..., "syckpt": {"id": ..., "step": ..., "converted": [...], ...}}

Tensors are full ones, on the CPU, ties kept. Optimizers are in torch's own form: parameters numbered in the order of the saved groups. What
`weights_only` does not read stands as the nearest value that it does, listed in `converted`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from syckpt.checkpoint.checkout import write_whole
from syckpt.checkpoint.source import Source
from syckpt.errors import StateError
from syckpt.objects import nodes
from syckpt.state.optimizer import by_number, is_by_name
from syckpt.state.plain import plain

__all__ = ["export", "exported"]

_FACTS = "syckpt"


def exported(source: Source) -> dict[str, Any]:
    """Return what `export` writes. `source` is a plain process's.

    Raises: StateError for an item that is called as the commit's facts are; IntegrityError.
    """
    if _FACTS in source.names:
        raise StateError(f"an item is called {_FACTS!r}, as the commit's facts are in an exported file: use `syckpt checkout`, or --to dir")
    # First the structures: reading them counts the tensors.
    structures = {name: source.node(name) for name in sorted(source.names)}
    tensors = source.fetch(dict.fromkeys(range(len(source.entries)))) if structures else {}
    found: dict[str, Any] = {}
    converted: list[str] = []
    for name, node in structures.items():
        found[name], told = plain(node, tensors.__getitem__, path=(name,))
        converted += told
        if _is_optimizer(found[name]) and is_by_name(found[name]):
            found[name] = by_number(found[name])
    commit = source.commit
    config, _ = plain(nodes.encode(dict(commit.config)), tensors.__getitem__, path=("config",))
    found[_FACTS] = {
        "id": commit.id,
        "parents": list(commit.parents),
        "branch": commit.branch,
        "name": commit.name,
        "step": commit.step,
        "epoch": commit.epoch,
        "batch_idx": commit.batch_idx,
        "metric": commit.metric,
        "message": commit.message,
        "tags": list(commit.tags),
        "config": config,
        "created": commit.created.isoformat(timespec="milliseconds"),
        "world_size": commit.world_size,
        "converted": converted,
    }
    return found


def export(source: Source, path: str | os.PathLike[str]) -> None:
    """Write a commit as one file, whole or not at all; folders above it are made, a file of that name is replaced.

    Raises: as `exported`; StoreError.
    """
    content = exported(source)
    write_whole(path, lambda file: torch.save(content, file))


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys() and isinstance(value["state"], dict)
