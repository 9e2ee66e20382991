"""Names of parameters with and without what wrappers insert: `_orig_mod.`, `module.` and their like. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

__all__ = ["WRAPPERS", "match", "unwrapped"]

WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Of torch.compile, DistributedDataParallel and AveragedModel, FSDP1, activation checkpointing."""


def unwrapped(name: str) -> str:
    """Return a name without the parts that wrappers inserted."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def match(live: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """Return, for names of `live` that `saved` lacks, the saved names that are theirs but for wrappers.

    Only where there is no other choice: a name that two on one side would share without their wrappers is matched with nothing.
    """
    names, found = Counter(map(unwrapped, live)), Counter(map(unwrapped, saved))
    theirs = {unwrapped(name): name for name in saved}
    return {
        name: theirs[plain]
        for name in live
        if (plain := unwrapped(name)) and name not in saved and names[plain] == 1 and found[plain] == 1 and theirs[plain] not in live
    }
