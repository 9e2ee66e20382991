"""Saves and loads by several ranks: any layout into any other, on any number of ranks; who stores what; how many bytes are read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import syckpt
from syckpt import CheckpointManager, ItemSpec
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.ranks import run_ranks

RANKS = Path(__file__).parent / "reshard_ranks.py"
TIMEOUT_S = 240


def job(function: str, *args: Any, world_size: int) -> list[Any]:
    return [result.value for result in run_ranks(RANKS, function, *args, world_size=world_size, timeout_s=TIMEOUT_S)]


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location(RANKS.stem, RANKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[RANKS.stem] = module
    spec.loader.exec_module(module)
    return module


def test_any_layout_reads_back_in_any_other_on_one_two_three_and_four_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    two = job("on_two", folder, world_size=2)
    four = job("on_four", folder, world_size=4)
    three = job("on_three", folder, world_size=3)

    # A plain process reads everything, whole, and what it saves goes back to the ranks.
    script = load_script()
    expected = script.tensors()
    for rev in ("two-0", "four-1", "three-1-b"):
        found = syckpt.load(f"{folder}/t", rev)["t"]
        assert sorted(found) == sorted(expected)
        script.assert_same(found, expected, rev)
    with script.manager(f"{folder}/t", auto_resume=False) as ckpt:
        ckpt.save("one", {"t": expected}, wait=True)
    one = [{"models": script.models_job(f"{folder}/m", ["plain"])}]
    back = job("back_on_two", folder, world_size=2)

    models = [model for ranks in (two, four, three, one, back) for each in ranks for model in each["models"]]
    assert len(models) == 2 * 3 + 4 * 3 + 3 + 1 + 2
    assert len(models[0]) == 20  # five parameters, and step and two moments of each
    assert all(model == models[0] for model in models)

    # Bytes asked of the byte store. By rows each of four ranks needs 32.5 blocks; by columns all see each block of the 16, in part.
    for each in four:
        rows, columns = each["bytes"]["w"], each["bytes"]["small"]
        assert rows["needed"] == 34078720
        assert rows["counted"] == rows["asked"] == 33 << 20
        assert rows["asked"] <= 1.05 * rows["needed"]
        assert columns["counted"] == columns["asked"] == 16 << 20
        assert (rows["twice"], columns["twice"]) == (0, 0)
        assert (rows["resharded"], columns["resharded"]) == (["w"], ["small"])

    refusals = [each["refusals"] for each in four]
    for name in ("partial", "partial_on_one", "mixed"):
        assert [each[name][0] for each in refusals] == ["StateError"] * 4, refusals
        assert all("t/w: " in each[name][1] for each in refusals), refusals
    assert [each["good"] for each in refusals] == [["", ""]] * 4
    for name in ("t", "m", "big", "r"):
        assert verify(Repository.open(parse_root(f"{folder}/{name}"))).ok


def assert_a_plain_process_has_one_answer(root: Path, commit: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it reads through: what each of four ranks kept as new values, and rank 0's in a target, which is told."""
    said = f"commit {commit}: where its ranks kept values of their own, rank 0's are taken: "
    with load_script().manager(root, auto_resume=False) as ckpt, CheckpointManager(CheckpointManager.Config()) as paths:
        reads = {
            "none": lambda **how: syckpt.load(root, commit, **how),
            "root": lambda **how: ckpt.load(commit, **how),
            "paths": lambda **how: paths.load(root / commit, **how),
        }
        for name, read in reads.items():
            new = read()
            assert dict(new["note"]["rank"]) == {0: 0, 1: 1, 2: 2, 3: 3}, name
            assert {rank: value.tolist() for rank, value in new["norm"]["running_mean"].items()} == {r: [float(r)] * 3 for r in range(4)}
            norm = {"weight": torch.zeros(3), "running_mean": torch.full((3,), 9.0)}
            caplog.clear()
            told = read(into={"norm": norm, "note": {"rank": None, "same": 0}}, strict=False)
            assert (norm["running_mean"].tolist(), told["note"]) == ([0.0] * 3, {"rank": 0, "same": 7}), name
            heard = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert heard == ([f"{said}norm/running_mean, note/rank"] if name == "none" else []), name
        for manager in (ckpt, paths):
            assert {"norm/running_mean", "note/rank"} <= set(manager.last_report.per_rank)
    config = CheckpointManager.Config(items={"norm": ItemSpec(on_world_change="mod"), "stage": ItemSpec(on_world_change="rank0")})
    chosen = syckpt.load(root, commit, config=config)
    assert (chosen["norm"]["running_mean"].tolist(), chosen["stage"]) == ([0.0] * 3, {"value": 0})


def test_four_ddp_ranks_share_one_copy_and_later_saves_point_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = job("share", str(tmp_path), world_size=4)
    first = found[0]

    blobs = [(tmp_path / f"none/.syckpt/objects/{first['none']}/r0000{rank}.safetensors").stat().st_size for rank in range(4)]
    assert sum(blobs) <= 1.02 * first["nbytes"]
    assert all(0.22 <= size / sum(blobs) <= 0.28 for size in blobs), blobs

    # The first call of a manager agrees on taking the branch too. None of it is a collective.
    assert [each["agreements"] for each in found] == [[2, 1, 1]] * 4
    assert [each["collectives"] for each in found] == [0] * 4
    assert all(each["sees_collectives"] > 0 for each in found)

    repository = Repository.open(parse_root(tmp_path / "fast"))
    reader = Reader(repository)
    keyframe = first["commits"][0]
    frozen = 0
    for age, commit in enumerate(first["commits"]):
        deltas = 0
        for rank in range(4):
            snapshot = reader.snapshot(repository.read_commit(commit), rank)
            assert snapshot.locations.keyframe == (keyframe, age)
            for _, entry, place in snapshot.stored():
                if entry.path == ("model", "module.0.weight"):
                    frozen += 1
                    assert place.owner == (keyframe, rank)
                elif place.base is not None:
                    deltas += 1
                    assert place.base.row.base is None
                    assert place.base.owner[0] == keyframe
        assert (deltas == 0) if age == 0 else (deltas >= 76), deltas  # weights, most of their moments, biases
    assert frozen == 3  # once in each commit
    table = repository.read_layouts(repository.read_commit(keyframe))
    assert table is not None
    assert table.items == {"model": ((0, 1, 2, 3),), "optimizer": ((0, 1, 2, 3),)}
    stored = {entry.path: rank for rank in range(4) for _, entry, _ in reader.snapshot(repository.read_commit(keyframe), rank).stored()}
    assert {row.path: row.copy for row in table.tensors} == {path: rank for path, rank in stored.items() if path[0] != "<rng>"}

    # What differs between ranks is kept by each, and said once.
    assert [len(each["warnings"]) for each in found] == [1, 0, 0, 0]
    assert first["warnings"] == ["1 tensor differs between ranks and is kept by each: norm/running_mean"]
    halves = [{"a": [1.0, 1.0]}, {"b": [2.0, 2.0]}, {"b": [2.0, 2.0]}, {"b": [2.0, 2.0]}]
    assert [each["restored"] for each in found] == [[[float(r)] * 3, r, {"rank": r, "same": 7}, halves[r]] for r in range(4)]
    plain = syckpt.load(tmp_path / "own")
    assert plain["note"]["same"] == 7
    assert dict(plain["note"]["rank"]) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert type(plain["note"]["rank"]).__name__ == "PerRank"
    assert {rank: value.tolist() for rank, value in plain["norm"]["running_mean"].items()} == {r: [float(r)] * 3 for r in range(4)}
    assert plain["norm"]["num_batches_tracked"].item() == 0
    assert {key: value.tolist() for key, value in plain["part"].items()} == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert torch.equal(plain["norm"]["weight"], torch.ones(3))
    assert_a_plain_process_has_one_answer(tmp_path / "own", first["own"], caplog)

    for rank, each in enumerate(job("share_on_two", str(tmp_path), world_size=2)):
        assert each["note"] == {"rank": rank, "same": 7}
        assert each["part"] == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
        assert [each["stage"][0], each["norm"][0]] == ["StateError", "StateError"]
        assert "item 'stage' differed between the 4 ranks that saved it (stage/value)" in each["stage"][1]
        assert "item 'norm' differed between the 4 ranks that saved it (norm/running_mean)" in each["norm"][1]
        assert {"note/rank", "norm/running_mean", "stage/value"} <= set(each["per_rank"])
