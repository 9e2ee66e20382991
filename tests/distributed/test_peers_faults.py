"""What other checkpointers' users reported of several ranks, each report as a test named after what happens here instead.

The first line of each test names the fault elsewhere. Jobs of two, four, two and three ranks, one after the other, play all of it; each
test looks at what its own scenarios found (peers_ranks.py). Values that no rank knows whole are put together here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import syckpt
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root

pytestmark = pytest.mark.xdist_group("peers")

RANKS = Path(__file__).parent / "peers_ranks.py"


@pytest.fixture(scope="module")
def jobs(play_jobs: Any) -> Any:
    return play_jobs(RANKS, {"on_two": 2, "on_four": 4, "back_on_two": 2, "on_three": 3})


def rows(parts: Iterable[Any]) -> Any:
    """Put the rows of all ranks together."""
    return [row for part in parts for row in part]


def put_together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return parameters and moments whole, of what each rank found of a run."""

    def whole(get: Any) -> Any:
        first, *others = map(get, found)
        if isinstance(first, list):
            return rows((first, *others))
        assert others == [first] * len(others)
        return first

    names, moments = found[0]["parameters"], found[0]["moments"]
    return {
        "parameters": {name: whole(lambda each, name=name: each["parameters"][name]) for name in names},
        "moments": {
            name: {key: whole(lambda each, name=name, key=key: each["moments"][name][key]) for key in state}
            for name, state in moments.items()
        },
        "lr": whole(lambda each: each["lr"]),
    }


# -- another number of ranks -------------------------------------------------------------------------------------------


def test_an_epoch_begun_on_two_ranks_goes_on_on_four_with_every_sample_once(jobs: Any) -> None:
    """A resume on twice the ranks fails: the new ranks' loader state is missing."""
    begun, rest = jobs.found("on_two", "loader_on_two"), jobs.found("on_four", "loader_from_two")
    assert [len(each["seen"]) for each in begun + rest] == [6] * 2 + [9] * 4
    assert sorted(rows(each["seen"] for each in begun + rest)) == list(range(48))
    # A loader of the user's own, with a resharder: what waited is dealt to all four.
    assert sorted(rows(each["taken"] for each in begun)) == list(range(12))
    assert [each["waiting"] for each in rest] == [list(range(12 + rank, 48, 4)) for rank in range(4)]
    # One without is refused by name, or taken by a policy; plain values are taken, and reported.
    for each in rest:
        assert each["refused"].startswith("StateError: item 'own' differed between the 2 ranks that saved it (own/value)")
        assert "note/rank" in each["per rank"]
    assert [each["own"] for each in rest] == [0, 1, 0, 1]
    assert [each["note"] for each in rest] == [{"rank": rank, "all": 7} for rank in (0, 1, 0, 1)]


def test_an_epoch_begun_on_four_ranks_goes_on_on_two_with_every_sample_once(jobs: Any) -> None:
    """A resume on half the ranks drops the other half's loader state without a word."""
    begun, rest = jobs.found("on_four", "loader_on_four"), jobs.found("back_on_two", "loader_from_four")
    assert [len(each["seen"]) for each in begun + rest] == [6] * 4 + [12] * 2
    assert sorted(rows(each["seen"] for each in begun + rest)) == list(range(48))
    assert sorted(rows(each["taken"] for each in begun)) == list(range(24))
    assert [each["waiting"] for each in rest] == [list(range(24, 48, 2)), list(range(25, 48, 2))]
    for each in rest:
        assert each["refused"].startswith("StateError: item 'own' differed between the 4 ranks that saved it (own/value)")
        assert "note/rank" in each["per rank"]
    assert [each["own"] for each in rest] == [0, 1]
    assert [each["note"] for each in rest] == [{"rank": rank, "all": 7} for rank in (0, 1)]


@pytest.mark.parametrize(("job", "size"), [("back_on_two", 2), ("on_three", 3)])
def test_moments_of_a_sharded_optimizer_go_to_another_number_of_ranks(jobs: Any, job: str, size: int) -> None:
    """Flat local shards are what was saved: sizes of the optimizer's state do not match on another number of workers."""
    saved = put_together(jobs.found("on_four", "trained"))
    found = jobs.found(job, "trained_further")
    assert [len(shard) for shard in (each["found"]["parameters"]["used.weight"] for each in found)] == {2: [3, 2], 3: [2, 2, 1]}[size]
    assert put_together([each["found"] for each in found]) == saved
    assert saved["lr"] == 0.01
    assert [len(saved["moments"][name]["exp_avg"]) for name in ("used.weight", "used.bias", "head.weight")] == [5, 5, 6]


@pytest.mark.parametrize(("job", "size"), [("back_on_two", 2), ("on_three", 3)])
def test_flat_parts_of_moments_are_cut_anew_by_a_resharder(jobs: Any, job: str, size: int) -> None:
    """Partitions of the optimizer are tied to the number of ranks that made them: a load on others is refused."""
    saved, found = jobs.found("on_four", "flat_saved"), jobs.found(job, "flat_loaded")
    part = {2: 12, 3: 8}[size]
    for seed, name in enumerate(("exp_avg", "exp_avg_sq")):
        whole = jobs.script.pattern(23, seed=seed).tolist()
        assert rows(each[name] for each in saved) == [*whole, -1.0]
        assert rows(each[name] for each in found) == [*whole, -1.0]
        assert [len(each[name]) for each in found] == [part] * size
    assert [(each["step"], each["lr"]) for each in found] == [(7, 0.5)] * size
    assert [each["place"] for each in found] == [[part * rank, min(23, part * (rank + 1))] for rank in range(size)]


@pytest.mark.parametrize(("job", "source"), [("on_four", 2), ("back_on_two", 2), ("back_on_two", 4), ("on_three", 2), ("on_three", 4)])
def test_empty_and_uneven_shards_go_to_any_number_of_ranks(jobs: Any, job: str, source: int) -> None:
    """A load on another number of nodes fails in the arithmetic of chunks where some ranks hold nothing."""
    saved = jobs.found({2: "on_two", 4: "on_four"}[source], "shards_saved")
    assert [shapes["one"] for shapes in saved] == [[1], *[[0]] * (source - 1)]
    assert [shapes["three"][0] for shapes in saved] == {2: [2, 1], 4: [1, 1, 1, 0]}[source]
    found = [each[str(source)] for each in jobs.found(job, "shards_loaded")]
    assert [len(each["three"]) for each in found] == {"on_four": [1, 1, 1, 0], "back_on_two": [2, 1], "on_three": [1, 1, 1]}[job]
    for name, shape in jobs.script.SHAPES.items():
        assert rows(each[name] for each in found) == jobs.script.pattern(*shape).tolist(), name


@pytest.mark.parametrize("kind", ["strided", "chunks"])
def test_interleaved_chunks_of_a_fused_weight_find_their_places_on_other_ranks(jobs: Any, kind: str) -> None:
    """A fused weight of two chunks a rank loads on another number of ranks with its chunks mixed up: the loss starts anew."""
    jobs.found("on_four", "fused_saved")
    gate, up = jobs.script.pattern(24, 3).chunk(2)
    for job, size in (("back_on_two", 2), ("on_three", 3)):
        count = 12 // size
        for rank, each in enumerate(jobs.found(job, "fused_loaded")):
            part = slice(rank * count, (rank + 1) * count)
            assert each[kind] == [*gate[part].tolist(), *up[part].tolist()]
    whole = syckpt.load(jobs.folder / "shared", "fused")
    assert torch.equal(whole["strided"]["fc1"], torch.cat([gate, up]))
    assert torch.equal(whole["chunks"]["gate"], gate)
    assert torch.equal(whole["chunks"]["up"], up)


@pytest.mark.parametrize(("job", "counts"), [("on_four", [3, 3, 3, 1]), ("on_three", [4, 4, 2])])
def test_a_whole_tensor_fills_shards_that_do_not_divide_it(jobs: Any, job: str, counts: list[int]) -> None:
    """A load from whole to sharded fails unless the ranks divide the first dimension: its shape is guessed from a shard."""
    jobs.found("on_two", "whole_saved")
    found = jobs.found(job, "whole_loaded")
    assert [len(each["w"]) for each in found] == counts
    assert rows(each["w"] for each in found) == jobs.script.pattern(10, 3).tolist()
    assert rows(each["b"] for each in found) == jobs.script.pattern(7).tolist()


def test_stages_of_a_pipeline_become_experts_on_half_the_ranks_with_their_moments(jobs: Any) -> None:
    """An optimizer's state that a pipeline saved does not load where experts are split: keys differ from rank to rank."""
    saved = {name: held for each in jobs.found("on_four", "stages_saved") for name, held in each.items()}
    assert sorted(saved) == sorted(f"layer{layer}_expert{expert}.weight" for layer in range(4) for expert in range(4))
    assert all(len(held) == 4 for held in saved.values())  # the parameter, two moments, a count of steps
    for rank, each in enumerate(jobs.found("back_on_two", "experts_restored")):
        mine = sorted(f"layer{layer}_expert{expert}.weight" for layer in range(4) for expert in (2 * rank, 2 * rank + 1))
        assert sorted(each["found"]) == mine
        assert each["found"] == {name: saved[name] for name in mine}
        assert each["lr"] == 0.1


def test_stages_of_a_pipeline_become_experts_on_as_many_ranks_with_their_moments(jobs: Any) -> None:
    """An optimizer's state that a pipeline saved does not load where experts are split, on the very same ranks."""
    saved = {name: held for each in jobs.found("on_four", "stages_saved") for name, held in each.items()}
    for rank, each in enumerate(jobs.found("on_four", "experts_restored")):
        assert each["found"] == {name: saved[name] for name in (f"layer{layer}_expert{rank}.weight" for layer in range(4))}
        assert each["lr"] == 0.1


def test_a_process_without_ranks_or_devices_reads_and_restores_what_four_ranks_saved(jobs: Any) -> None:
    """Not even metadata can be read with fewer devices: the saved sharding is made again from those that are there."""
    saved = put_together(jobs.found("on_four", "trained"))
    repository = Repository.open(parse_root(jobs.folder / "net"))
    commit = history.resolve(repository, "main")
    assert (commit.world_size, commit.step) == (4, 2)
    reader = Reader(repository)
    paths = {entry.path: entry.shape for rank in range(4) for _, entry, _ in reader.snapshot(commit, rank).stored()}
    assert paths["net", "head.weight"] == (6, 5)
    assert paths["net", "used.weight"] == (5, 6)

    torch.manual_seed(8)
    net = jobs.script.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    with syckpt.CheckpointManager(jobs.folder / "net", rng=False, save_on_exit=False) as ckpt:
        ckpt.net, ckpt.optimizer = net, optimizer
    assert {name: parameter.tolist() for name, parameter in net.named_parameters()} == saved["parameters"]
    names = {parameter: name for name, parameter in net.named_parameters()}
    moments = {names[parameter]: {key: value.tolist() for key, value in state.items()} for parameter, state in optimizer.state.items()}
    assert moments == saved["moments"]
    assert optimizer.param_groups[0]["lr"] == 0.01


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_what_is_overwritten_as_soon_as_save_returns_is_saved_as_it_was(jobs: Any) -> None:
    """What is changed after a save in the background has returned is in the checkpoint."""
    for each in jobs.found("on_four", "overwritten"):
        assert each["live"] == [[-7.0], [-7.0]]
        for seed, loaded in enumerate(each["loaded"], start=1):
            whole = jobs.script.pattern(10, 3, seed=seed)
            same = dict.fromkeys(("rows", "columns", "copies", "plain", "array"), whole.tolist())
            assert loaded == {**same, "turned": whole.t().tolist(), "list": [seed, {"name": f"step {seed}"}]}


def test_an_item_and_keys_that_appear_after_two_saves_are_in_the_next_one(jobs: Any) -> None:
    """A plan that is kept from the saves before leaves a new object out: the save succeeds, the load fails on all ranks."""
    found = jobs.found("on_four", "appearing")
    assert [each["more"] for each in found] == [[0.0, 1.0], [2.0, 3.0], [4.0], []]
    third = syckpt.load(jobs.folder / "appearing", "third")
    assert third["late"]["new"].tolist() == list(range(12))
    assert third["late"]["of one rank"] == {f"rank {rank}": rank for rank in range(4)}
    assert third["state"]["more"].tolist() == list(range(5))
    assert sorted(syckpt.load(jobs.folder / "appearing", "second")) == ["state"]


# -- ranks that do not do the same -------------------------------------------------------------------------------------


def test_a_save_under_if_rank_0_ends_by_its_deadline_names_who_is_missing_and_the_next_one_works(jobs: Any) -> None:
    """A save under `if rank == 0` hangs, since it is a collective, until an error of the transport that says nothing."""
    first, *others = jobs.found("on_four", "under_if_rank_0")
    late = "rank(s) 1, 2, 3 did not arrive at 'save()' (step 0) within 0.5 s"
    assert first["save"].startswith(f"RankTimeout: {late}")
    assert "none under `if rank == 0`" in first["save"]
    for rank, each in enumerate(others, start=1):
        assert each["save"].startswith(f"RankTimeout: rank {rank} came too late to 'save()' (step 0), its call was given up: {late}")
    for each in (first, *others):
        assert each["log"] == each["made"] == first["made"]
    assert syckpt.load(jobs.folder / "under if")["value"] == 2


def test_ranks_that_do_not_see_the_directory_are_named_and_rank_0_decides_what_is_resumed(jobs: Any) -> None:
    """Ranks that do not agree on whether a directory, or a checkpoint in it, exists make other collectives than the rest: a deadlock."""
    found = jobs.found("on_four", "disagreeing")
    for rank, each in enumerate(found):
        assert each["refused"].startswith("CoordinationError: ")
        assert f"rank {rank if rank % 2 else 1} does not see the directory that rank 0 uses" in each["refused"]
        # Ranks 1 and 3 saw no commit of the branch.
        assert each["resumed"] == each["newest"] == found[0]["newest"]
        assert each["value"] == 20 + rank
        assert each["parents"] == [found[0]["newest"]]


# -- keys, and state that is not there yet -----------------------------------------------------------------------------


def test_missing_unexpected_and_mismatched_keys_are_all_reported_and_strict_decides_what_they_are(jobs: Any) -> None:
    """Keys too many are passed over, keys too few are fatal, and `strict` changes neither."""
    missing, unexpected = ["keys/new"], ["keys/old"]
    dtype = "keys/dtype: expected float64 [4, 2], found float32 [4, 2] (cast=True would convert it)"
    mismatched = [dtype, "keys/shape: expected float32 [5, 2], found float32 [4, 2]"]
    for rank, each in enumerate(jobs.found("back_on_two", "keys_loaded")):
        error, *report, touched = each["all"]
        assert error.startswith("StateError: ")
        assert all(text in error for text in (*missing, *unexpected, *mismatched))
        assert [report[0], report[1], sorted(report[2])] == [missing, unexpected, mismatched]
        assert touched == []
        # What is wrong on rank 1 only is raised on both.
        error, *report, touched = each["one"]
        assert error.startswith("StateError: ")
        assert "keys/new" in error
        assert ("rank(s) 1" in error) == (rank == 0)
        assert touched == []
        # Reported all the same, and what fits is filled.
        error, *report, touched = each["lenient"]
        assert error == ""
        assert [report[0], report[1], sorted(report[2])] == [missing, unexpected, mismatched]
        assert touched == ["fits"]
        assert each["fits"] == ["", [], [], [], ["dtype", "fits", "old", "shape"]]


def test_moments_that_a_fresh_optimizer_has_not_made_yet_are_made_by_the_load(jobs: Any) -> None:
    """Moments that are made by the first step are not there to be loaded into: the resume drops them in silence."""
    saved = put_together(jobs.found("on_four", "trained"))["moments"]
    for job in ("back_on_two", "on_three"):
        found = jobs.found(job, "trained_further")
        assert [each["made before"] for each in found] == [0] * len(found)
        assert put_together([each["found"] for each in found])["moments"] == saved
    assert sorted(saved) == ["head.weight", "used.bias", "used.weight"]
    assert all(sorted(state) == ["exp_avg", "exp_avg_sq", "step"] and state["step"] == 2.0 for state in saved.values())
    assert all(any(map(any, saved[name][key])) for name in ("head.weight", "used.weight") for key in ("exp_avg", "exp_avg_sq"))


def test_a_layer_that_never_got_a_gradient_resumes_without_moments_and_gets_them_later(jobs: Any) -> None:
    """Parameters that had no gradient yet have no state: the resume fails on them."""
    for job in ("back_on_two", "on_three"):
        for each in jobs.found(job, "trained_further"):
            assert not {"idle.weight", "idle.bias"} & set(each["found"]["moments"])
            assert each["made after"] == ["head.weight", "idle.bias", "idle.weight", "used.bias", "used.weight"]
            assert each["goes on"] is True


# -- the order of the data, and random streams -------------------------------------------------------------------------


def test_an_epoch_goes_on_in_its_order_and_the_next_ones_have_others(jobs: Any) -> None:
    """The position in the data comes back, its order does not; and the epoch after a resume repeats the one before."""
    begun, rest = jobs.found("on_two", "order_begun"), jobs.found("back_on_two", "order_gone_on")
    for before, after in zip(begun, rest, strict=True):
        assert len(before["seen"]) == 4
        assert before["seen"] + after["0"] == before["whole"][0]
        assert [after["1"], after["2"]] == before["whole"][1:]
    orders = [rows(rows(each["whole"][epoch]) for each in begun) for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(24))] * 3
    assert len({tuple(order) for order in orders}) == 3


def test_each_rank_goes_on_with_its_own_random_streams(jobs: Any) -> None:
    """Rank 0's random streams are restored on all ranks: their dropout masks become the same."""
    saved, restored = jobs.found("on_two", "streams_saved"), jobs.found("back_on_two", "streams_restored")
    assert [each["drawn"] for each in restored] == saved
    assert [each["exact"] for each in restored] == [True, True]
    assert all(first != second for first, second in zip(*saved, strict=True))
    assert all(set(mask) == {0.0, 2.0} for mask, *_ in saved)
