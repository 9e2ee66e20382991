"""Git for training state: exact, verified, lossless-delta checkpoints for PyTorch.

`import syckpt` does not import torch: public names are looked up when they are first used, so that the command line is quick
and runs where torch is not wanted, on login nodes and in the background writer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from syckpt.errors import (
    ConflictError,
    CoordinationError,
    FormatError,
    IntegrityError,
    NotFoundError,
    RankFailure,
    RankTimeout,
    RestartsExhausted,
    StateError,
    StoreError,
    SyckptError,
    WriterDied,
)

if TYPE_CHECKING:
    from syckpt.checkpoint.loader import LoadReport, load
    from syckpt.checkpoint.manager import CheckpointManager
    from syckpt.checkpoint.saver import PendingCommit
    from syckpt.dataloader import StatefulDistributedSampler, StatefulRandomSampler
    from syckpt.hyperparams.config import HyperConfig
    from syckpt.objects.commit import Commit
    from syckpt.repo.verify import VerifyReport

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "Commit",
    "ConflictError",
    "CoordinationError",
    "FormatError",
    "HyperConfig",
    "IntegrityError",
    "LoadReport",
    "NotFoundError",
    "PendingCommit",
    "RankFailure",
    "RankTimeout",
    "RestartsExhausted",
    "StateError",
    "StatefulDistributedSampler",
    "StatefulRandomSampler",
    "StoreError",
    "SyckptError",
    "VerifyReport",
    "WriterDied",
    "__version__",
    "load",
]

# No name here may also be the name of a submodule: importing that would overwrite the attribute.
_LAZY = {
    "CheckpointManager": "syckpt.checkpoint.manager",
    "Commit": "syckpt.objects.commit",
    "HyperConfig": "syckpt.hyperparams.config",
    "LoadReport": "syckpt.checkpoint.loader",
    "PendingCommit": "syckpt.checkpoint.saver",
    "StatefulDistributedSampler": "syckpt.dataloader",
    "StatefulRandomSampler": "syckpt.dataloader",
    "VerifyReport": "syckpt.repo.verify",
    "load": "syckpt.checkpoint.loader",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'syckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
