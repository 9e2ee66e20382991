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
    from syckpt.checkpoint.specs import ItemSpec, LayoutInfo
    from syckpt.dataloader import StatefulDistributedSampler, StatefulRandomSampler
    from syckpt.files.model import CheckpointMixin, load_checkpoint, save_checkpoint
    from syckpt.files.reader import CheckpointReader
    from syckpt.files.validation import validate_checkpoint
    from syckpt.files.writer import CheckpointWriter
    from syckpt.hyperparams.config import HyperConfig
    from syckpt.objects.commit import Commit
    from syckpt.objects.nodes import PerRank
    from syckpt.repo.difference import Diff
    from syckpt.repo.retention import Retention
    from syckpt.repo.similarity import Similar
    from syckpt.repo.verify import VerifyReport
    from syckpt.reshard.resharder import (
        DistributedItemMetadata,
        DTensorResharder,
        LoadPlan,
        NestedPath,
        Resharder,
        ReshardingInfo,
        ShardingMetadata,
        Storage,
    )
    from syckpt.state.formats import (
        JsonSerialization,
        RawSerialization,
        SafetensorsSerialization,
        SerializationFormat,
        TorchSerialization,
    )

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "CheckpointMixin",
    "CheckpointReader",
    "CheckpointWriter",
    "Commit",
    "ConflictError",
    "CoordinationError",
    "DTensorResharder",
    "Diff",
    "DistributedItemMetadata",
    "FormatError",
    "HyperConfig",
    "IntegrityError",
    "ItemSpec",
    "JsonSerialization",
    "LayoutInfo",
    "LoadPlan",
    "LoadReport",
    "NestedPath",
    "NotFoundError",
    "PendingCommit",
    "PerRank",
    "RankFailure",
    "RankTimeout",
    "RawSerialization",
    "Resharder",
    "ReshardingInfo",
    "RestartsExhausted",
    "Retention",
    "SafetensorsSerialization",
    "SerializationFormat",
    "ShardingMetadata",
    "Similar",
    "StateError",
    "StatefulDistributedSampler",
    "StatefulRandomSampler",
    "Storage",
    "StoreError",
    "SyckptError",
    "TorchSerialization",
    "VerifyReport",
    "WriterDied",
    "__version__",
    "load",
    "load_checkpoint",
    "save_checkpoint",
    "validate_checkpoint",
]

# No name here may also be the name of a submodule: importing that would overwrite the attribute.
_LAZY = {
    "CheckpointManager": "syckpt.checkpoint.manager",
    "CheckpointMixin": "syckpt.files.model",
    "CheckpointReader": "syckpt.files.reader",
    "CheckpointWriter": "syckpt.files.writer",
    "Commit": "syckpt.objects.commit",
    "DTensorResharder": "syckpt.reshard.resharder",
    "Diff": "syckpt.repo.difference",
    "DistributedItemMetadata": "syckpt.reshard.resharder",
    "HyperConfig": "syckpt.hyperparams.config",
    "ItemSpec": "syckpt.checkpoint.specs",
    "JsonSerialization": "syckpt.state.formats",
    "LayoutInfo": "syckpt.checkpoint.specs",
    "LoadPlan": "syckpt.reshard.resharder",
    "LoadReport": "syckpt.checkpoint.loader",
    "NestedPath": "syckpt.reshard.resharder",
    "PendingCommit": "syckpt.checkpoint.saver",
    "PerRank": "syckpt.objects.nodes",
    "RawSerialization": "syckpt.state.formats",
    "Resharder": "syckpt.reshard.resharder",
    "ReshardingInfo": "syckpt.reshard.resharder",
    "Retention": "syckpt.repo.retention",
    "SafetensorsSerialization": "syckpt.state.formats",
    "SerializationFormat": "syckpt.state.formats",
    "ShardingMetadata": "syckpt.reshard.resharder",
    "Similar": "syckpt.repo.similarity",
    "StatefulDistributedSampler": "syckpt.dataloader",
    "StatefulRandomSampler": "syckpt.dataloader",
    "Storage": "syckpt.reshard.resharder",
    "TorchSerialization": "syckpt.state.formats",
    "VerifyReport": "syckpt.repo.verify",
    "load": "syckpt.checkpoint.loader",
    "load_checkpoint": "syckpt.files.model",
    "save_checkpoint": "syckpt.files.model",
    "validate_checkpoint": "syckpt.files.validation",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'syckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
