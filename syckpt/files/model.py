"""A module's state in one file. Strict: a file fits the module as a whole, or nothing of the module is touched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from syckpt.errors import StateError
from syckpt.files.header import Record
from syckpt.files.reader import CheckpointReader
from syckpt.files.writer import CheckpointWriter
from syckpt.repo.signing import KeyFile
from syckpt.state.flatten import dtype_name, is_sharded, refuse_tensor, tie_key

__all__ = ["CheckpointMixin", "load_checkpoint", "save_checkpoint"]


def save_checkpoint(model: Any, path: str | os.PathLike[str], *, signer: KeyFile | None = None) -> None:
    """Write a module's parameters and buffers to one file, which appears whole, in place of an older one. Tied tensors are stored once.

    `signer` is the path of a private key. Raises: StateError for what is no tensor, or a part of one (use a CheckpointManager); StoreError.
    """
    state = _state(model)
    names: dict[Any, str] = {}
    ties: list[tuple[str, str]] = []
    with CheckpointWriter(path, signer) as writer:
        # Large elements first, so that each tensor is aligned in the file for readers that map it.
        for name, tensor in sorted(state.items(), key=lambda pair: -pair[1].element_size()):
            refused = refuse_tensor(tensor) is not None or is_sharded(tensor)
            first = name if refused else names.setdefault(tie_key(tensor), name)
            if first == name:
                writer.add(name, tensor)
            else:
                ties.append((name, first))
        for name, first in ties:
            writer.tie(name, first)


def load_checkpoint(model: Any, path: str | os.PathLike[str], *, trusted_keys: KeyFile | Sequence[KeyFile] | None = None) -> None:
    """Fill a module in place from a file of `save_checkpoint`. Everything is read and checked before the first tensor is touched.

    `trusted_keys`: paths of public keys, one of which must have signed the file.
    Raises: NotFoundError; IntegrityError; StateError that lists everything that does not fit.
    """
    state = _state(model)
    with CheckpointReader(path, trusted_keys) as reader:
        problems = _problems(state, reader.archive.records)
        if problems:
            more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise StateError(f"{reader.archive.path} does not fit the module; nothing was changed: {'; '.join(problems[:20])}{more}")
        values: dict[str, torch.Tensor] = {}
        for record in reader.archive.contents.records:
            values[record.name] = reader[record.name]
        values.update({name: values[tied] for name, tied in reader.archive.contents.ties})
    model.load_state_dict({name: values[name] for name in state}, strict=True)


def _state(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by name. Raises: StateError for state that is none."""
    if not callable(getattr(model, "state_dict", None)):
        raise StateError(f"expected a module with a state_dict(), found {type(model).__name__}")
    state: dict[str, Any] = dict(model.state_dict())
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise StateError(f"{name!r} is a {type(value).__name__}: one file holds tensors only; use a CheckpointManager for other state")
    return state


def _problems(state: dict[str, torch.Tensor], records: dict[str, Record]) -> list[str]:
    """Return everything that does not fit."""
    found = [f"{name!r} is missing from the file" for name in state if name not in records]
    found += [f"{name!r} is not in the module" for name in records if name not in state]
    filled: dict[Any, str] = {}
    for name, target in state.items():
        record = records.get(name)
        if record is None:
            continue
        if is_sharded(target):
            found.append(f"{name!r} is sharded in the module: use a CheckpointManager")
        elif torch.nn.parameter.is_lazy(target):
            found.append(f"{name!r} is a lazy parameter of the module without a shape: run a forward pass first")
        elif (record.dtype, record.shape) != (dtype_name(target.dtype), tuple(target.shape)):
            theirs, ours = f"{record.dtype} {list(record.shape)}", f"{dtype_name(target.dtype)} {list(target.shape)}"
            found.append(f"{name!r} is {theirs} in the file and {ours} in the module")
        else:
            first = filled.setdefault(tie_key(target), name)
            if records[first].address != record.address:
                found.append(f"{first!r} and {name!r} are one tensor in the module, and differ in the file")
    return found


class CheckpointMixin:
    """Gives a module the two functions as methods: `class Net(CheckpointMixin, nn.Module)`."""

    def save_checkpoint(self, path: str | os.PathLike[str], *, signer: KeyFile | None = None) -> None:
        """See `syckpt.save_checkpoint`."""
        save_checkpoint(self, path, signer=signer)

    def load_checkpoint(self, path: str | os.PathLike[str], *, trusted_keys: KeyFile | Sequence[KeyFile] | None = None) -> None:
        """See `syckpt.load_checkpoint`."""
        load_checkpoint(self, path, trusted_keys=trusted_keys)
