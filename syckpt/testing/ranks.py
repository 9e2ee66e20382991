"""A job of several ranks on this machine, to test with: plain processes with a gloo process group, as torchrun would start them.

The rendezvous store is hosted by the caller's process, as torchrun's agent does, so that it outlives every rank. Starting costs an import
of torch for each rank (seconds): let one job make many checks.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from syckpt.dist import topology

__all__ = ["RankResult", "run_ranks"]

_STACKS = signal.SIGUSR2
_STACKS_S = 2.0


@dataclass(frozen=True)
class RankResult:
    """How a rank ended: what its function returned, or the traceback of what it raised, or neither if it was killed."""

    rank: int
    exit_status: int  # minus the signal's number, if one ended it
    returned: Any
    raised: str | None
    output: str  # standard output and error

    @property
    def value(self) -> Any:
        """What the function returned. Raises: AssertionError with all that is known if it did not return."""
        if self.raised is not None or self.exit_status != 0:
            raise AssertionError(f"rank {self.rank} ended with {self.exit_status}\n{self.raised or ''}\n{self.output}")
        return self.returned


def run_ranks(
    source: Path, function: str, *args: Any, world_size: int, timeout_s: float = 120, environment: Mapping[str, str] | None = None
) -> list[RankResult]:
    """Call `function(rank, *args)` of a Python file in every rank of a new job, and return how the ranks ended, in their order.

    Arguments and results are JSON. The default process group is there during the call. Ranks that have not ended after `timeout_s` are
    killed (SIGKILL), also stopped ones; before, each adds to its output what its threads are doing.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="syckpt-ranks-") as name:
        folder = Path(name)
        ranks = []
        try:
            for rank in range(world_size):
                env = topology.child_environment(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(world_size),
                    LOCAL_WORLD_SIZE=str(world_size),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(store.port),
                    TORCHELASTIC_USE_AGENT_STORE="True",
                    TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                    OMP_NUM_THREADS="1",
                    GLOO_SOCKET_IFNAME=socket.if_nameindex()[0][1],  # loopback: no name has to resolve, no firewall is in the way
                    **(environment or {}),
                )
                command = [
                    sys.executable,
                    "-m",
                    "syckpt.testing.ranks",
                    str(source),
                    function,
                    json.dumps(args),
                    str(folder / f"{rank}.json"),
                ]
                with (folder / f"{rank}.txt").open("wb") as output:
                    ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT))
            for process in ranks:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    _ask_for_stacks([each for each in ranks if each.poll() is None])
                    break
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [_result(folder, rank, process.returncode) for rank, process in enumerate(ranks)]


def _ask_for_stacks(hanging: list[subprocess.Popen[bytes]]) -> None:
    """Let ranks that hang write their stacks, as far as they can."""
    for process in hanging:
        process.send_signal(_STACKS)
        process.send_signal(signal.SIGCONT)  # one that is stopped would only take it when it goes on
    deadline = time.monotonic() + _STACKS_S
    for process in hanging:
        with suppress(subprocess.TimeoutExpired):  # it does not end by it
            process.wait(max(0.0, deadline - time.monotonic()))


def _result(folder: Path, rank: int, exit_status: int) -> RankResult:
    output = (folder / f"{rank}.txt").read_text(errors="replace")
    path = folder / f"{rank}.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    return RankResult(rank, exit_status, told.get("returned"), told.get("raised"), output)


def _function_of(source: Path, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(source.stem, source)
    if spec is None or spec.loader is None:
        raise ValueError(f"{source} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(source.parent.absolute()))  # its neighbours, as if it were run itself
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _run(source: str, function: str, args: str, target: str) -> None:
    """Be a rank. The result is renamed into place, since a rank may be killed at any moment."""
    faulthandler.register(_STACKS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    torch.distributed.init_process_group("gloo")
    told: dict[str, Any] = {}
    try:
        told["returned"] = _function_of(Path(source), function)(torch.distributed.get_rank(), *json.loads(args))
        json.dumps(told)
    except BaseException:
        told = {"raised": traceback.format_exc()}
        raise
    finally:
        unfinished = Path(f"{target}.new")
        unfinished.write_text(json.dumps(told))
        unfinished.rename(target)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run(*sys.argv[1:])
