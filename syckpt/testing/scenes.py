"""Small repositories to break: two or more commits with everything in them that can be damaged, and what each commit holds."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from syckpt.checkpoint.manager import CheckpointManager
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root

__all__ = ["State", "clone", "grow", "leftovers", "register", "same", "state_at", "stranger"]

State = dict[str, Any]


def state_at(step: int) -> State:
    """Return the state after `step` steps: moving, frozen, tied and new tensors, one of two blocks, and values that are no tensors."""
    generator = torch.Generator().manual_seed(7)
    weight, frozen = torch.randn(24, 9, generator=generator), torch.randn(31, generator=generator)
    # Two blocks; mostly zeros, so that neither a repository nor a test becomes slow by it.
    table = torch.zeros(300_000)
    table[::3000] = torch.randn(100, generator=generator)
    moves = torch.Generator().manual_seed(8)
    for count in range(step):
        weight += 1e-3 * torch.randn(24, 9, generator=moves)
        table[count] = float(count) + 0.5
    return {
        "net": {"weight": weight, "frozen": frozen, "tied": weight, "table": table, "half": weight[0].to(torch.bfloat16)},
        "notes": {"count": step, "nan": float("nan"), "name": f"step {step}", "ids": torch.arange(step + 3), (1, "a"): [None, True, 2.5]},
    }


def stranger() -> State:
    """Return a state of the same form in which no value is that of a commit, to restore into."""
    values = state_at(0)
    for tensor in values["net"].values():
        tensor.fill_(-7)
    return {**values, "notes": {"count": -1}}


def register(ckpt: CheckpointManager, values: State) -> None:
    """Register every item; what is being resumed replaces it."""
    for name, value in values.items():
        ckpt.register(name, value)


def grow(root: Path, *, commits: int, compression: Literal["fast", "none"] = "fast", rng: bool = False) -> dict[str, State]:
    """Make a repository whose commit number k holds `state_at(k)`, and return the states by commit id, oldest first.

    The first commit is named `first` and tagged `base`. With `rng`, commit k holds the streams as after `torch.manual_seed(k)`.
    """
    states: dict[str, State] = {}
    settings = CheckpointManager.Config(compression=compression)
    with CheckpointManager(root, settings, rng=rng, save_on_exit=False) as ckpt:
        for step in range(commits):
            register(ckpt, copy.deepcopy(state_at(step)))
            if rng:
                torch.manual_seed(step)
            first = step == 0
            pending = ckpt.save("first" if first else None, tags=["base"] if first else [], metric=float(step), wait=True)
            assert pending is not None
            states[pending.id] = state_at(step)
            ckpt.step_up()
    return states


def clone(root: Path, target: Path) -> Path:
    """Copy a repository by hard links: nothing in one is ever changed in place. Replace a file of the copy, never write into it."""
    shutil.copytree(root, target, copy_function=os.link)
    return target


def same(found: Any, expected: Any) -> bool:
    """Whether two values are alike in type, structure and every bit."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        return alike and _bits(found) == _bits(expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected if isinstance(expected, set | frozenset) else repr(found) == repr(expected)


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def leftovers(root: Path) -> list[str]:
    """Return the keys that a finished and cleaned repository would not hold: of unfinished saves, and of commits that no record names."""
    repository = Repository.open(parse_root(root))
    store, refs = repository.store, repository.refs
    published = {
        record.commit
        for branch in refs.names("heads")
        for record in (refs.read(f"heads/{branch}", number) for number in refs.numbers(f"heads/{branch}"))
    }
    unknown = [key for key in store.list("objects/") if key.removeprefix("objects/")[:25] not in published]
    path = Path(store.describe())
    empty = [f"objects/{found.name}/" for found in (path / "objects").iterdir() if found.is_dir() and not any(found.iterdir())]
    staged = [f"staging/{found.name}" for found in (path / "staging").iterdir()]
    return store.list("intents/") + unknown + empty + staged
