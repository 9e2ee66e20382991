"""The decoders under a coverage-guided fuzzer for three minutes, and its target on its own seeds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

TARGET = Path(__file__).with_name("fuzz.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed: it has wheels for few systems")
def test_three_minutes_of_fuzzing_find_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TARGET), "180"], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(tmp_path.glob("crash-*")) + list(tmp_path.glob("timeout-*")) + list(tmp_path.glob("oom-*")) == []
    executed = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    assert executed is not None
    assert int(executed[1]) > 10_000


def test_the_seeds_reach_every_decoder_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("syckpt_fuzz_target", TARGET)
    assert spec is not None
    assert spec.loader is not None
    target = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "argv", [str(TARGET), str(TARGET)])
    monkeypatch.setitem(sys.modules, spec.name, target)  # for its dataclasses
    spec.loader.exec_module(target)
    reached = set()
    for decoder, data in target.seeds():
        reached.add(decoder)
        target.run_one(bytes([target.DECODERS.index(decoder)]) + data)
    assert reached == set(target.DECODERS)
