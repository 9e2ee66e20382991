"""Who is this process: rank, world size, and the identity of its run. The one place of the library that reads the environment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

_LOCAL_RUN = f"local-{secrets.token_hex(8)}"

__all__ = ["child_environment", "outlives_process", "run_id", "world_size"]


def world_size(environment: Mapping[str, str] | None = None) -> int:
    """Return how many processes the launcher says the job has; 1 without a launcher."""
    text = (os.environ if environment is None else environment).get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


def run_id(environment: Mapping[str, str] | None = None) -> str:
    """Return what identifies this run over restarts: torchelastic's id, else the SLURM job (with its array index), else a random one."""
    env = os.environ if environment is None else environment
    elastic = env.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return f"torchelastic-{elastic}"
    if "SLURM_JOB_ID" in env:
        array = env.get("SLURM_ARRAY_JOB_ID")
        return f"slurm-{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}" if array else f"slurm-{env['SLURM_JOB_ID']}"
    return _LOCAL_RUN


def outlives_process(run: str) -> bool:
    """Whether a relaunch has the same run id."""
    return run != _LOCAL_RUN


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, for a process of ours."""
    return {**os.environ, **changes}
