"""Faults of other checkpointers on several ranks, each as a test named after what happens here instead.

Where another test shows it already, it is only named:

| fault elsewhere | here |
|---|---|
| a rank's loader state is missing, or dropped, on another number of ranks | test_resume: an epoch begun on four ranks goes on on two, ... |
| optimizer state cannot go to another number of ranks (flat shards, ZeRO) | test_reshard: any layout reads back in any other |
| empty or uneven shards; shards that do not divide; interleaved parts | test_reshard, the same: shapes (), (1,), (3,), (0, 4), (7, 1, 3) |
| `save` under `if rank == 0` hangs | test_failures: a save under `if rank == 0` times out |
| ranks disagree on what exists | test_failures: a directory that is not shared; a commit that is damaged for one rank |
| moments made lazily are not loaded into a fresh optimizer | below, and test_resume (16 tensors of state on every number of ranks) |
| the position in the data comes back, its order does not; a second resume shifts it | test_resume: each sample once over four resumes |
| rank 0's random streams on every rank | test_resume: losses of the two ranks differ; new streams differ on another size |
| the first save under DDP never ends; a copy of the state on every rank | test_reshard: four DDP ranks share one copy |
| resharding forgets what is no tensor (`lr`, counters) | test_reshard (settings), test_resume (`settings`), below (`lr`) |
| a flipped bit is loaded; a load that fails has overwritten half | test_resume, there: what is wrong on one rank is raised on all |
| what a killed save left gets into the next one | test_failures: every test that ends with `assert_clean_after_the_next_manager` |
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import syckpt
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.ranks import run_ranks

RANKS = Path(__file__).parent / "peers_ranks.py"
TIMEOUT_S = 240


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location(RANKS.stem, RANKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[RANKS.stem] = module
    spec.loader.exec_module(module)
    return module


class Jobs:
    """A job of four ranks, one of two that went on from it, and their repositories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.four, self.two = (
            [result.value for result in run_ranks(RANKS, function, str(folder), world_size=size, timeout_s=TIMEOUT_S)]
            for function, size in (("on_four", 4), ("on_two", 2))
        )
        self.script = load_script()

    def assert_holds(self, rev: str, step: int) -> None:
        """A plain process reads a commit's every bit, whole."""
        found, whole = syckpt.load(self.folder / "state", rev)["values"], self.script.values(step)
        expected = {**whole, "a.b": whole["w"]}
        nested = {"b": whole["w"] + 1, 1: whole["plain"], "1": whole["plain"]}
        for name, value in expected.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            assert self.script.bits(found[name]) == self.script.bits(value), name
        assert list(found["a"]) == ["b", 1, "1"]
        for name, value in nested.items():
            assert self.script.bits(found["a"][name]) == self.script.bits(value), name


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("peers"))


@pytest.mark.xdist_group("peers")
class TestPeersFaults:
    def test_what_is_overwritten_as_soon_as_save_returns_is_saved_as_it_was(self, jobs: Jobs) -> None:
        assert [each["looked"] for each in jobs.four] == [[0x11]] * 4
        jobs.assert_holds(jobs.four[0]["overwritten"], 0)

    def test_saving_the_same_state_twice_stores_nothing_more_and_harms_neither_commit(self, jobs: Jobs) -> None:
        first, second = jobs.four[0]["stored"]
        assert first > 0
        assert second == 0
        for commit in jobs.four[0]["same"]:
            jobs.assert_holds(commit, 1)

    def test_a_name_that_is_taken_is_refused_on_all_ranks_and_leaves_nothing(self, jobs: Jobs) -> None:
        for each in jobs.four:
            assert each["taken"][0] == "ConflictError"
            assert "the commit 'once' exists already" in each["taken"][1]
        assert verify(Repository.open(parse_root(jobs.folder / "state"))).errors == []

    def test_saves_one_after_the_other_without_waiting_have_their_parents_and_each_its_own_state(self, jobs: Jobs) -> None:
        log = history.log(Repository.open(parse_root(jobs.folder / "state")))
        ids = [jobs.four[0]["overwritten"], *jobs.four[0]["same"], *jobs.four[0]["chain"], jobs.four[0]["grown"]]
        assert [commit.id for commit in log] == ids[::-1]
        for commit, older in pairwise(log):
            assert commit.parents == (older.id,)
        # Infinities, huge next to tiny values, booleans, half and eighth floats: what deltas by subtraction would get wrong.
        for step, commit in enumerate(jobs.four[0]["chain"], start=2):
            jobs.assert_holds(commit, step)

    def test_an_item_and_a_key_that_appear_after_the_first_saves_are_in_the_next_one(self, jobs: Jobs) -> None:
        jobs.assert_holds(jobs.four[0]["grown"], 7)
        loaded = syckpt.load(jobs.folder / "state", jobs.four[0]["grown"])
        assert torch.equal(loaded["late"]["new"], torch.arange(12.0))
        assert torch.equal(loaded["values"]["more"], torch.arange(5.0))

    def test_sharded_tensors_under_names_that_flatten_alike_stay_apart(self, jobs: Jobs) -> None:
        values = syckpt.load(jobs.folder / "state")["values"]
        assert not torch.equal(values["a.b"], values["a"]["b"])
        assert {key: type(key).__name__ for key in values["a"]} == {"b": "str", 1: "int", "1": "str"}

    def test_any_commit_of_the_chain_fills_other_layouts_on_another_number_of_ranks(self, jobs: Jobs) -> None:
        assert [each["loaded"] for each in jobs.two] == [{"once": True, "HEAD~1": True, "HEAD": True}] * 2

    def test_what_never_got_a_gradient_and_what_did_go_on_in_a_fresh_optimizer_on_another_number_of_ranks(self, jobs: Jobs) -> None:
        saved = jobs.four[0]["net"]
        assert sorted(saved["moments"]) == ["head.weight", "used.bias", "used.weight"]
        assert saved["lr"] == [0.01]
        assert [each["net"] for each in jobs.four + jobs.two] == [saved] * 6

    def test_stages_of_a_pipeline_split_otherwise_get_their_layers_and_moments(self, jobs: Jobs) -> None:
        saved = {name: held for each in jobs.four for name, held in each["stage"].items()}
        assert sorted(saved) == sorted(f"layer{number}.{kind}" for number in range(4) for kind in ("weight", "bias"))
        assert all(len(held) == 4 for held in saved.values())  # the parameter, two moments, a count of steps
        for rank, each in enumerate(jobs.two):
            mine = (f"layer{2 * rank}", f"layer{2 * rank + 1}")
            assert each["stage"] == {name: held for name, held in saved.items() if name.startswith(mine)}
            assert each["stage lr"] == 0.1

    @pytest.mark.parametrize(
        ("wrong", "expected"),
        [
            ("larger", "float32 [11, 6]"),
            ("smaller", "float32 [9, 6]"),
            ("of one dimension", "float32 [60]"),
            ("of another dtype", "int32 [10, 6]"),
            ("to broadcast", "float32 [1, 6]"),
        ],
    )
    def test_a_target_of_another_form_is_refused_on_all_ranks_and_nothing_is_touched(self, jobs: Jobs, wrong: str, expected: str) -> None:
        for each in jobs.two:
            kind, said, *untouched = each["refused"][wrong]
            assert kind == "StateError"
            assert f"values/w: expected {expected}, found float32 [10, 6]" in said
            assert untouched == [True, True]

    def test_what_is_missing_and_what_is_unexpected_is_reported_whatever_strict_says(self, jobs: Jobs) -> None:
        unexpected = [f"values/{name}" for name in ("a", "a.b", "eighth", "flags", "half", "more", "plain", "turned")]
        for each in jobs.two:
            assert each["lenient"] == ["", ""]
            assert each["report"] == [["values/no"], unexpected, []]
            assert each["filled"]

    def test_a_process_without_ranks_or_devices_reads_what_was_saved_and_by_whom(self, jobs: Jobs) -> None:
        repository = Repository.open(parse_root(jobs.folder / "net"))
        (commit,) = history.log(repository)
        assert commit.world_size == 4
        reader = Reader(repository)
        stored = [[entry.path for _, entry, _ in reader.snapshot(commit, rank).stored()] for rank in range(4)]
        assert {path for paths in stored for path in paths} >= {("net", f"{name}.weight") for name in ("used", "idle", "head")}
        shapes = {entry.path: entry.shape for entry in reader.snapshot(commit, 3).manifest.entries}
        assert shapes["net", "head.weight"] == (6, 5)
