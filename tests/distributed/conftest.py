"""Jobs of ranks that play scenarios (scenarios_ranks.py), one after the other, and what each of their scenarios found."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from syckpt.testing.ranks import RankResult, run_ranks

HANG_S = 400


class Jobs:
    """Jobs of several ranks, in one folder, each function of `script` on so many ranks as `sizes` says."""

    def __init__(self, script: Path, folder: Path, sizes: Mapping[str, int]) -> None:
        self.folder = folder
        self.script = _loaded(script)
        self._sizes = sizes
        self._ended: dict[str, list[RankResult]] = {}
        for function, size in sizes.items():
            self._ended[function] = run_ranks(script, function, str(folder), world_size=size, timeout_s=HANG_S)

    def found(self, function: str, scenario: str) -> list[Any]:
        """Return what a scenario found on each rank of a job. Raises: AssertionError with all that is known if it did not on one."""
        told = [self._told(function, scenario, rank) for rank in range(self._sizes[function])]
        wrong = [f"rank {rank}: {each['raised']}" for rank, each in enumerate(told) if "raised" in each]
        assert not wrong, "\n".join(wrong)
        return [each["found"] for each in told]

    def alike(self, function: str, scenario: str) -> Any:
        """Return what a scenario found, the same on all ranks."""
        first, *others = self.found(function, scenario)
        assert others == [first] * len(others)
        return first

    def _told(self, function: str, scenario: str, rank: int) -> dict[str, Any]:
        path = self.folder / "told" / function / scenario / f"{rank}.json"
        if path.exists():
            told: dict[str, Any] = json.loads(path.read_text())
            return told
        ended = self._ended[function][rank]
        return {"raised": f"never ended; the rank did with {ended.exit_status}\n{ended.raised or ''}\n{ended.output}"}


def _loaded(script: Path) -> Any:
    """Return a ranks' script as a module of this process, which is in no process group."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    sys.path.insert(0, str(script.parent))  # its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(script.parent))
    return module


@pytest.fixture(scope="module")
def play_jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Mapping[str, int]], Jobs]:
    def play(script: Path, sizes: Mapping[str, int]) -> Jobs:
        return Jobs(script, tmp_path_factory.mktemp(script.stem), sizes)

    return play
