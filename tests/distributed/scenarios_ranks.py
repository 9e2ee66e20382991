"""Many scenarios in one launch of ranks, for tests that look at one each: what a rank found lies in a file of its own.

A scenario that goes wrong is its own tests' failure alone. It ends on the other ranks by the deadlines of their calls, or at once where
they wait for a sign; ranks begin the next one together, and with another shared manager, since their calls may have come apart. So
scenarios make no collectives of torch's, which would wait for a rank that has left.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from failure_ranks import keys
from layouts_ranks import mesh_of
from moves_ranks import outcome
from torch.distributed.tensor import DTensor, distribute_tensor

from syckpt import CheckpointManager

TIMEOUT_S = 60.0
_TICK = timedelta(seconds=1)


class Setting:
    """Where a scenario plays: its rank and files, signs between the ranks, and a manager that it shares with the others of its job."""

    def __init__(self, rank: int, folder: str, job: str, config: CheckpointManager.Config) -> None:
        self.rank, self.size = rank, dist.get_world_size()
        self.folder = Path(folder)
        self.name = ""
        self._job, self._config = job, config
        self._shared: CheckpointManager | None = None

    def manager(self, root: str, config: CheckpointManager.Config | None = None, **options: Any) -> CheckpointManager:
        """Return a manager of a root of this scenario's own. Collective."""
        return CheckpointManager(self.folder / root, config, **{"timeout_s": TIMEOUT_S, "rng": False, "save_on_exit": False, **options})

    @property
    def ckpt(self) -> CheckpointManager:
        """The shared manager: one writer serves many scenarios, which name what they save. Collective the first time."""
        if self._shared is None:
            self._shared = self.manager("shared", self._config, auto_resume=False)
        return self._shared

    def close(self) -> None:
        """Let go of the shared manager."""
        shared, self._shared = self._shared, None
        if shared is not None:
            outcome(shared.close)

    def sign(self, what: str) -> None:
        """Give a sign to all ranks."""
        keys().set(f"{self._job}/{self.name}/{what}", "1")

    def await_sign(self, what: str) -> None:
        """Wait for a sign. Raises: AssertionError if a rank has left the scenario because of an error, and the sign is not there."""
        key = f"{self._job}/{self.name}/{what}"
        while not _is_set(key):
            if keys().check([f"{self._job}/{self.name}/failed"]):
                raise AssertionError(f"a rank left {self.name} before {what!r}")

    def meet(self, what: str) -> None:
        """Go on when all ranks are here. Raises: as `await_sign`."""
        self.sign(f"{what}/{self.rank}")
        for rank in range(self.size):
            self.await_sign(f"{what}/{rank}")

    def play(self, scenario: Callable[[Setting], Any]) -> None:
        """Play a scenario on all ranks, and write down what it returns or raises."""
        self.name = scenario.__name__
        told = self.folder / "told" / self._job / self.name / f"{self.rank}.json"
        told.parent.mkdir(parents=True, exist_ok=True)
        try:
            text = json.dumps({"found": scenario(self)})
        except Exception:  # noqa: BLE001 - the scenario's tests raise it
            text = json.dumps({"raised": traceback.format_exc()})
            self.sign("failed")
        told.write_text(text)
        self.sign(f"left/{self.rank}")
        for rank in range(self.size):
            while not _is_set(f"{self._job}/{self.name}/left/{rank}"):
                pass
        if keys().check([f"{self._job}/{self.name}/failed"]):
            self.close()


def _is_set(key: str) -> bool:
    """Wait a moment for a key."""
    try:
        keys().wait([key], _TICK)
    except dist.DistStoreError:
        return False
    return True


def play(rank: int, folder: str, job: str, scenarios: Sequence[Callable[[Setting], Any]], **config: Any) -> None:
    """Play scenarios one after the other. `config` is the shared manager's."""
    mesh_of((dist.get_world_size(),))  # Making a mesh is a collective.
    setting = Setting(rank, folder, job, CheckpointManager.Config(**config))
    for scenario in scenarios:
        setting.play(scenario)
    setting.close()


# -- tensors -----------------------------------------------------------------------------------------------------------


def laid_out(value: torch.Tensor, placement: Any) -> DTensor:
    """Return a whole value as a DTensor over all ranks; bits travel nowhere, each rank cuts out its own part."""
    return distribute_tensor(value, mesh_of((dist.get_world_size(),)), [placement], src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def numbers(tensor: torch.Tensor) -> Any:
    """Return the values of this rank's part."""
    return local(tensor.detach()).tolist()


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of this rank's part."""
    found: list[int] = local(tensor.detach()).contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def pattern(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same random values on every rank of every job."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def told(call: Callable[[], Any]) -> str:
    """Return the class and text of the error that a call raises, or nothing."""
    kind, text = outcome(call)
    return f"{kind}: {text}" if kind else ""
