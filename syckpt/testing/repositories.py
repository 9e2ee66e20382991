"""Small repositories, made without torch and without a training: for tests of commands and plug-ins.

    repository = make_repository(tmp_path, commits=2, branches={"wide": (1, [{"metric": 0.5, "tags": ("good",)}])})

makes `main` with two commits, and `wide` with one more that forks from main's first. Commit number k, counted from 1 in the order in
which they are made, has the id `00000000-<8 hex digits of k><8 zeros>`, step 10 k, epoch k - 1, and was made k minutes after midnight UTC
of 1 January 2026. Its item `model` holds a `weight` (float32, 64 x 64; a little different each time: a delta), a `frozen`
(float32, 1000; always the same: a pointer, but in the first commit), and the numbers `lr` and `seen`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from syckpt.objects.commit import Commit
from syckpt.repo import owner
from syckpt.repo.packing import Packed, Packer, Staged
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.transaction import Hold, Transaction, open_branch
from syckpt.stores.base import parse_root

__all__ = ["MIDNIGHT_NS", "Saves", "commit_id", "make_repository"]

MIDNIGHT_NS = 1_767_225_600 * 10**9
"""1 January 2026, UTC."""

Saves = int | Sequence[Mapping[str, Any]]
"""How many commits to make; or for each the fields of `Commit` that are to be others than the defaults."""


def commit_id(number: int) -> str:
    """Return the id of the `number`-th commit made, counted from 1."""
    return f"00000000-{number:08x}{0:08x}"


def make_repository(
    root: str | os.PathLike[str],
    *,
    commits: Saves = 3,
    branches: Mapping[str, tuple[int, Saves]] | None = None,
    compression: str = "fast",
    keyframe_every: int = 8,
) -> Repository:
    """Make a repository in directory `root` with `commits` on main, and return it.

    `branches` maps further names to the number of the commit that they fork from, and their own commits; they may fork from each other.
    """
    maker = _Maker(Repository.open_or_create(parse_root(root)), compression=compression, keyframe_every=keyframe_every)
    try:
        maker.save("main", start=None, saves=commits)
        for name, (fork, saves) in (branches or {}).items():
            maker.save(name, start=maker.made[fork - 1], saves=saves)
    finally:
        maker.packer.close()
    return maker.repository


class _Maker:
    def __init__(self, repository: Repository, *, compression: str, keyframe_every: int) -> None:
        self.repository = repository
        self.made: list[Commit] = []
        self._reader = Reader(repository)
        self._random = np.random.default_rng(0)
        self._weight = self._random.standard_normal((64, 64), dtype=np.float32)
        self._frozen = self._random.standard_normal(1000, dtype=np.float32)
        self.packer = Packer(self._reader, rank=0, world_size=1, compression=compression, keyframe_every=keyframe_every, threads=1)

    def save(self, branch: str, *, start: Commit | None, saves: Saves) -> None:
        """Open a branch and save to it."""
        hold, tip = open_branch(self.repository, branch, run="testing", expected=None, start=start), start
        for fields in [{}] * saves if isinstance(saves, int) else saves:
            hold, tip = self._commit(hold, tip, fields)
            self.made.append(tip)

    def _commit(self, hold: Hold, parent: Commit | None, fields: Mapping[str, Any]) -> tuple[Hold, Commit]:
        number = len(self.made) + 1
        transaction = Transaction(self.repository, commit_id(number), hold, uses=(), owner=owner.this_process())
        packed = self._pack(number, parent)
        commit = _commit(number, hold, parent, packed, fields)
        published = transaction.publish(commit, hold=hold, reader=self._reader, locations=[packed.locations])
        self.packer.published()
        return published

    def _pack(self, number: int, parent: Commit | None) -> Packed:
        self._weight += np.float32(1e-4) * self._random.standard_normal(self._weight.shape, dtype=np.float32)
        staged = [
            Staged(("model", "weight"), "float32", self._weight.shape, None, 0),
            Staged(("model", "frozen"), "float32", self._frozen.shape, None, self._weight.nbytes),
        ]
        pairs = [["weight", {"tensor": 0}], ["frozen", {"tensor": 1}], ["lr", 0.001], ["seen", 640 * number]]
        memory = memoryview(self._weight.tobytes() + self._frozen.tobytes())
        return self.packer.pack(commit_id(number), parent=parent, staged=staged, memory=memory, items={"model": {"dict": pairs}}, rng=None)


def _commit(number: int, hold: Hold, parent: Commit | None, packed: Packed, fields: Mapping[str, Any]) -> Commit:
    defaults: dict[str, Any] = {
        "id": commit_id(number),
        "parents": () if parent is None else (parent.id,),
        "parent_seals": () if parent is None else (parent.seal,),
        "manifests": ((0, packed.manifest_seal),),
        "world_size": 1,
        "branch": hold.branch,
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
        "run_id": hold.run,
        "generation": hold.generation,
        "sequence": number,
        "rng_exact": True,
        # Not the seconds: they would differ from one run to the next.
        "stats": {name: value for name, value in packed.stats.items() if not name.endswith("_s")},
    }
    return Commit(**{**defaults, **fields})
