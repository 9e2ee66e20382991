"""Memory that a load was filling when it broke off: part of it is the commit's, the rest as it was, and no save may take that for a state.

It is known by its storage, weakly: whoever shows it to a save, under whatever name and through whatever manager, shows the same one. A
load that fills it whole makes an end of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from syckpt.errors import StateError
from syckpt.objects.nodes import format_path
from syckpt.reshard.tensors import local_boxes
from syckpt.state.flatten import Leaf

__all__ = ["filling", "refuse_torn"]

_torn: set[StorageWeakRef] = set()


@contextmanager
def filling(targets: Iterable[torch.Tensor]) -> Iterator[None]:
    """Fill live tensors in this: what breaks off leaves them torn, and what ends makes them whole."""
    storages = _storages(targets)
    try:
        yield
    except BaseException:
        _torn.update(storages)
        raise
    _torn.difference_update(storages)


def refuse_torn(leaves: Sequence[Leaf]) -> None:
    """Raises: StateError naming those that are to be saved and lie in torn memory."""
    _torn.difference_update([storage for storage in list(_torn) if storage.expired()])
    if not _torn:
        return
    paths = [format_path(leaf.path) for leaf in leaves if not _storages([leaf.array]).isdisjoint(_torn)]
    if paths:
        raise StateError(
            f"a load that broke off left what is to be saved half restored ({', '.join(paths[:5])}"
            + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
            + "): load() a whole commit into it, or goto() one, or put new tensors in its place first"
        )


def _storages(values: Iterable[Any]) -> set[StorageWeakRef]:
    views = [view for value in values if isinstance(value, torch.Tensor) for _, view in local_boxes(value)]
    return {StorageWeakRef(view.untyped_storage()) for view in views}
