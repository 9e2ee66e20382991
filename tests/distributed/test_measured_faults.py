"""What two other checkpointers were measured to get wrong, each fault as a test on ranks named after what happens here instead.

The first line of each test names the fault elsewhere. A job of four ranks, then one of two, play all of it; each test looks at what its own
scenarios found (measured_ranks.py). Faults that no rank can see (a version's text, the name of a module in a document) are not here.
"""

from __future__ import annotations

import math
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
from syckpt.testing.scenes import leftovers

pytestmark = pytest.mark.xdist_group("measured")

RANKS = Path(__file__).parent / "measured_ranks.py"


@pytest.fixture(scope="module")
def jobs(play_jobs: Any) -> Any:
    return play_jobs(RANKS, {"on_four": 4, "back_on_two": 2})


@pytest.fixture
def script(jobs: Any) -> Any:
    return jobs.script


def assert_holds(jobs: Any, commit: str, step: int) -> None:
    """A plain process reads a commit's every bit, whole."""
    found, whole = syckpt.load(jobs.folder / "history", commit)["values"], jobs.script.values(step)
    assert sorted(found) == sorted(whole)
    for name, value in whole.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert jobs.script.bits(found[name]) == jobs.script.bits(value), name


def saves(jobs: Any) -> Any:
    """Return what ranks found that made one save after the other: ids and bytes, alike on all of them."""
    first, *others = jobs.found("on_four", "saved_again_and_again")
    for each in others:
        assert [each[name] for name in ("same", "stored", "chain")] == [first[name] for name in ("same", "stored", "chain")]
    return first


def rows(parts: Any) -> Any:
    """Put the rows of all ranks together."""
    return [row for part in parts for row in part]


def stored_by(root: Path, rev: str, rank: int) -> list[Any]:
    """Return the paths of the tensors that a rank stored for a commit."""
    repository = Repository.open(parse_root(root))
    return [entry.path for _, entry, _ in Reader(repository).snapshot(history.resolve(repository, rev), rank).stored()]


# -- saves, one after the other ----------------------------------------------------------------------------------------


def test_every_commit_of_a_chain_is_read_whole_and_into_other_shards_bit_for_bit(jobs: Any) -> None:
    """Every weight is wrong after two saves in a row, without an error: a delta is added to another base than it was made of."""
    chain = saves(jobs)["chain"]
    assert len(chain) == 5
    for step, commit in enumerate(chain, start=2):
        assert_holds(jobs, commit, step)
    assert jobs.alike("back_on_two", "read_again") == [True] * 5


def test_saving_the_same_state_twice_stores_nothing_more_and_harms_neither_commit(jobs: Any) -> None:
    """A second save of the same state overwrites the first one's blob, and neither can be loaded."""
    found = saves(jobs)
    first, second = found["stored"]
    assert first > 0
    assert second == 0
    for commit in found["same"]:
        assert_holds(jobs, commit, 1)


def test_infinities_huge_beside_tiny_values_and_booleans_survive_deltas(jobs: Any, script: Any) -> None:
    """Deltas by subtraction make infinity NaN and tiny values zero; booleans cannot be subtracted."""
    for step, commit in enumerate(saves(jobs)["chain"], start=2):
        found = syckpt.load(jobs.folder / "history", commit)["values"]
        row = found["w"][3]
        assert row[row.isfinite()].abs().sort().values.tolist() == torch.tensor([0.0, 1e-38, 1e-3, 1e10]).tolist()
        assert (int(row.isinf().sum()), int(row.isnan().sum())) == (1, 1)
        assert math.copysign(1, row[row == 0].item()) == -1
        assert found["flags"].tolist() == script.values(step)["flags"].tolist()


def test_half_and_eighth_floats_are_saved_in_shards(jobs: Any, script: Any) -> None:
    """A model in mixed precision cannot be saved: the hash goes through NumPy, which has no bfloat16."""
    for step, commit in enumerate(saves(jobs)["chain"], start=2):
        found = syckpt.load(jobs.folder / "history", commit)["values"]
        assert (found["half"].dtype, found["eighth"].dtype) == (torch.bfloat16, torch.float8_e4m3fn)
        for name in ("half", "eighth"):
            assert script.bits(found[name]) == script.bits(script.values(step)[name])


def test_a_shard_that_is_not_contiguous_is_saved(jobs: Any, script: Any) -> None:
    """A parameter that is not contiguous kills the writer, and `save` has returned a hash that is nowhere."""
    assert [each["is strided"] for each in jobs.found("on_four", "saved_again_and_again")] == [True] * 4
    for step, commit in enumerate(saves(jobs)["chain"], start=2):
        assert torch.equal(syckpt.load(jobs.folder / "history", commit)["values"]["turned"], script.values(step)["turned"])


def test_what_one_rank_cannot_save_is_refused_on_all_and_the_next_save_follows_the_last_good_one(jobs: Any) -> None:
    """State that cannot be written fails in silence; the hash and the next commit's parent are of a commit that is not there."""
    for rank, each in enumerate(jobs.found("on_four", "unsavable")):
        assert each["refused"].startswith("StateError: ")
        assert "odd/function" in each["refused"]
        assert ("rank(s) 1" in each["refused"]) == (rank != 1)
        assert each["hash"] == each["base"]
        assert each["parents"] == [each["base"]]
    assert [commit.id for commit in history.log(Repository.open(parse_root(jobs.folder / "unsavable")))][-1] == each["base"]
    assert syckpt.load(jobs.folder / "unsavable")["odd"] == {"set": {1, 2}, "function": None}


def test_saves_that_do_not_wait_for_each_other_are_each_others_parents_in_order(jobs: Any) -> None:
    """Of saves in quick succession no commit has a parent, and the branch ends at whichever was written last."""
    found = saves(jobs)
    log = history.log(Repository.open(parse_root(jobs.folder / "history")))
    assert [commit.id for commit in log] == [*found["same"], *found["chain"]][::-1]
    for commit, older in pairwise(log):
        assert commit.parents == (older.id,)


# -- branches and exports ----------------------------------------------------------------------------------------------


def test_a_branch_without_a_save_of_its_own_can_be_exported_left_and_gone_to(jobs: Any, script: Any) -> None:
    """Making a branch writes a commit without state: exporting it, leaving it and going back fail."""
    whole = script.pattern(10, 3)
    found = jobs.found("on_four", "branched")
    assert rows(each["gone to"] for each in found) == rows(each["main"] for each in found) == whole.tolist()
    assert [each["branches"] for each in found] == [["exp", "main"]] * 4
    assert torch.equal(torch.load(jobs.folder / "exp.pt", weights_only=True)["state"]["value"], whole)
    assert syckpt.load(jobs.folder / "branches", "exp")["state"]["value"].unique().tolist() == [2.0]


def test_a_dtensor_in_a_plain_value_comes_back_in_the_layout_that_is_registered(jobs: Any, script: Any) -> None:
    """A value that is replaced as a whole comes back with whole tensors, on every rank."""
    whole = script.pattern(10, 3)
    found = jobs.found("on_four", "plain_value_saved")
    assert [each["keys"] for each in found] == [["step", "tie", "w"]] * 4
    assert [(each["tied"], each["step"]) for each in found] == [(True, 1)] * 4
    # By columns, as the value that was registered when it went back.
    assert [each["w"] for each in found] == [chunk.tolist() for chunk in whole.split([1, 1, 1, 0], dim=1)]
    resumed = jobs.found("back_on_two", "plain_value_restored")
    assert [each["w"] for each in resumed] == [chunk.tolist() for chunk in (whole + 1).chunk(2)]
    # Where nothing is registered that says otherwise, it is whole.
    assert [(each["new"], each["step"]) for each in resumed] == [(whole.tolist(), 2)] * 2


def test_the_best_commit_outlives_its_manager_and_is_exported_whole(jobs: Any, script: Any) -> None:
    """A manager made anew forgets what was best, and a worse commit takes its place; exports hold what the chain made of the weights."""
    good = script.pattern(10, 3, seed=1)
    found = jobs.alike("on_four", "best_of_two_runs")
    assert found["metrics"] == [99.0, 1.0]
    assert found["best"] == good.tolist()
    assert torch.equal(torch.load(jobs.folder / "best.pt", weights_only=True)["state"]["w"], good)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_of_one_rank_is_raised_on_all_and_no_wrong_value_is_loaded(jobs: Any) -> None:
    """A flipped bit is loaded without an error."""
    for each in jobs.found("on_four", "damaged"):
        error, old_or_right = each["flipped"]
        assert error.startswith("IntegrityError: ")
        assert "objects/COMMIT/r00002.safetensors" in error
        assert old_or_right is True


def test_a_file_of_one_rank_that_is_cut_off_is_raised_on_all_and_no_wrong_value_is_loaded(jobs: Any) -> None:
    """A file that was cut off is found by the rank that reads beyond its end, and there only."""
    for each in jobs.found("on_four", "damaged"):
        error, old_or_right = each["cut"]
        assert error.startswith("IntegrityError: ")
        assert "objects/COMMIT/r00001.safetensors" in error
        assert old_or_right is True


def test_where_one_rank_does_not_fit_no_tensor_of_any_rank_is_touched(jobs: Any) -> None:
    """A load that raises has overwritten the tensors before the one that does not fit."""
    for rank, each in enumerate(jobs.found("back_on_two", "one_rank_does_not_fit")):
        error, values = each
        assert error.startswith("StateError: ")
        assert "fits/z: expected float32 [3], found float32 [2]" in error
        assert ("rank(s) 1" in error) == (rank == 0)
        assert values == {"a": [0.0] * 3, "b": [0.0] * 2, "z": [0.0] * (2 + rank)}


# -- names and types ---------------------------------------------------------------------------------------------------


def test_names_that_dots_or_texts_would_make_one_stay_apart(jobs: Any) -> None:
    """Two tensors whose joined names are the same become one; keys that are markers of the format are misread."""
    for rank, each in enumerate(jobs.found("back_on_two", "named_alike_again")):
        assert each["a.b"] == [float(number) for number in range(4 * rank, 4 * rank + 4)]
        assert each["a"] == [["str", "b", [100 + value for value in each["a.b"]]], ["int", 1, [1.0]], ["str", "1", [0.0]]]
        assert each["markers"] == [3, [1, 2]]


def test_keys_that_are_no_texts_and_nan_come_back_on_another_number_of_ranks(jobs: Any) -> None:
    """Integers as keys come back as texts, so a schedule never takes effect; NaN makes the file invalid, tuples become lists."""
    assert jobs.found("on_four", "named_alike") == [0.1] * 4
    for each in jobs.found("back_on_two", "named_alike_again"):
        assert each["n"] == "{1: 2, 't': (1, [2]), None: nan}"
        assert each["lr"] == [0.1, pytest.approx(0.001)]
    (commit,) = history.log(Repository.open(parse_root(jobs.folder / "names")))
    assert commit.metric is not None
    assert math.isnan(commit.metric)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("one", "forms/one: expected float32 [3], found float32 [1]"),
        ("single", "forms/single: expected bfloat16 [3], found float32 [3]"),
        ("new", "forms/new"),
        ("more", "forms/more/x"),
    ],
)
def test_what_has_another_form_is_an_error_on_as_many_ranks_too(jobs: Any, form: str, said: str) -> None:
    """One element is broadcast, another dtype is cast, names are passed over: all in silence."""
    for each in jobs.found("back_on_two", "forms_kept"):
        error, touched = each[form]
        assert error.startswith("StateError: ")
        assert said in error
        assert touched == []


def test_a_longer_list_comes_back_whole_and_a_namedtuple_as_one(jobs: Any) -> None:
    """A list is cut to the length of the target's; a namedtuple comes back as a list."""
    for each in jobs.found("back_on_two", "forms_kept"):
        assert each["loaded"] == [[1, 2, 3], "Point", 1, [1.0]]


# -- other processes, all ranks' parts ---------------------------------------------------------------------------------


def test_others_read_and_write_the_directory_while_ranks_train_in_it(jobs: Any) -> None:
    """A lock is held for the whole training: a reader, an evaluation and every other rank are locked out."""
    found = jobs.found("on_four", "read_meanwhile")
    assert found[0]["other process"] == [True]
    for each in found:
        assert each["read"] is True
        assert each["parents"] == [True, True]
        assert each["branches"] == ["eval", "main"]


def test_shards_of_all_ranks_are_saved_and_tied_ones_once(jobs: Any) -> None:
    """Of model and optimizer only rank 0's part is saved, the other ranks' shards are lost; tied weights are stored twice."""
    saved, restored = jobs.found("on_four", "tied_saved"), jobs.found("back_on_two", "tied_restored")
    whole = {name: rows(each[name] for each in saved) for name in saved[0]}
    assert [len(each["embedding.weight"]) for each in saved] == [2, 2, 2, 1]
    assert sorted(whole) == sorted(
        f"{name}{kind}" for name in ("embedding.weight", "layer.weight", "layer.bias") for kind in ("", " exp_avg", " exp_avg_sq")
    )
    assert {name: rows(each["found"][name] for each in restored) for name in whole} == whole
    assert [each["tied"] for each in restored] == [True, True]
    model = syckpt.load(jobs.folder / "tied")["model"]
    assert model["embedding.weight"].tolist() == whole["embedding.weight"]
    assert model["head.weight"] is model["embedding.weight"]
    stored = [[path for path in stored_by(jobs.folder / "tied", "HEAD", rank) if path[0] == "model"] for rank in range(4)]
    both = [("model", "embedding.weight"), ("model", "layer.bias"), ("model", "layer.weight")]
    assert list(map(sorted, stored)) == [both, both, both, both[:1]]  # six rows are three ranks'


def test_the_first_save_of_ranks_in_ddp_ends_and_stores_one_copy_of_the_state(jobs: Any) -> None:
    """The first save under DistributedDataParallel never ends: a lock and a barrier wait for each other. Or all write all of it."""
    found = jobs.alike("on_four", "replicated")
    for commit in found["ids"]:
        paths = [path for rank in range(4) for path in stored_by(jobs.folder / "ddp", commit, rank)]
        assert len(paths) == len(set(paths)) == 4 + 4 * 3  # parameters; two moments and a count of steps of each
    assert syckpt.load(jobs.folder / "ddp")["model"]["module.0.weight"].tolist() == found["weight"]
    assert verify(Repository.open(parse_root(jobs.folder / "ddp"))).errors == []


def test_the_writer_of_each_rank_is_a_program_of_its_own_without_torch(jobs: Any) -> None:
    """A process is forked for each save, out of one with threads and devices."""
    assert jobs.found("on_four", "writers") == [{"another program": True, "torch there": False, "torch here": True}] * 4


# -- resharding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["named", "unnamed"])
def test_what_is_no_tensor_is_restored_on_another_number_of_ranks(jobs: Any, name: str) -> None:
    """Where tensors are resharded, numbers beside them keep the target's values; what was saved without a resharder never is."""
    jobs.found("on_four", "reshardable_saved")
    for each in jobs.found("back_on_two", "leaves_restored"):
        assert each[name] == {"a": [1.0, 1.0], "n": 1, "text": "saved", "nested": [{"lr": 5e-4}]}


def test_an_optimizers_settings_are_restored_on_another_number_of_ranks(jobs: Any) -> None:
    """Training goes on with the wrong learning rate after a resharding."""
    assert [each["settings"] for each in jobs.found("back_on_two", "tied_restored")] == [[5e-4, [0.5, 5e-4]]] * 2


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("larger", "float32 [11, 6]"),
        ("smaller", "float32 [9, 6]"),
        ("of one dimension", "float32 [60]"),
        ("of another dtype", "int32 [10, 6]"),
        ("to broadcast", "float32 [1, 6]"),
    ],
)
def test_a_sharded_target_of_another_form_is_refused_and_nothing_is_touched(jobs: Any, form: str, expected: str) -> None:
    """A larger target is filled in part, a smaller one with what fits, one of other dimensions not at all, another dtype is cast."""
    for each in jobs.found("back_on_two", "wrong_targets"):
        error, plain, touched = each[form]
        assert error.startswith("StateError: ")
        assert f"wrong/w: expected {expected}, found float32 [10, 6]" in error
        assert plain == [3.0] * 7
        assert touched is False


def test_shards_shapes_and_keys_of_an_item_may_change_from_save_to_save(jobs: Any, script: Any) -> None:
    """With a resharder, a state whose structure is not that of the first save is refused."""
    assert jobs.alike("on_four", "changing") == [["v", "w"], ["v", "w"], ["w"], ["n", "w"]]
    found = [syckpt.load(jobs.folder / "shared", f"changing-{number}")["changing"] for number in range(4)]
    assert [torch.equal(each["w"], script.pattern(8, 4)) for each in found[:2]] == [True, True]
    assert [torch.equal(each["w"], script.pattern(6, 5)) for each in found[2:]] == [True, True]
    assert found[1]["v"].tolist() == [1.0] * 4
    assert found[3]["n"]["new"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# -- files and formats -------------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_is_refused_on_all_ranks_and_leaves_nothing(jobs: Any) -> None:
    """A save to a path that is there writes everything, raises, and leaves its files behind."""
    for each in jobs.found("on_four", "saved_again_and_again"):
        assert each["taken"].startswith("ConflictError: the commit 'once' exists already")
    assert leftovers(jobs.folder / "history") == []
    assert syckpt.load(jobs.folder / "history", "once")["values"]["plain"].tolist() == jobs.script.values(1)["plain"].tolist()


def test_what_a_killed_save_left_is_in_no_later_commit(jobs: Any) -> None:
    """Files that a killed save left are taken into the next checkpoint."""
    found = jobs.found("on_four", "killed_writer")
    for each in found:
        for call in ("died", "heard"):
            assert each[call].startswith("WriterDied: ")
            assert "rank(s) 2" in each[call]
        assert each["parents"] == [found[0]["base"]]
        assert [each[name] for name in ("base", "killed", "next")] == [found[0][name] for name in ("base", "killed", "next")]
    root = jobs.folder / "killed"
    commits = [commit.id for commit in history.log(Repository.open(parse_root(root)))]
    assert found[0]["killed"] not in commits
    assert found[0]["next"] in commits
    for rev in ("next", "last"):
        assert sorted(syckpt.load(root, rev)) == ["state"]
        assert torch.equal(syckpt.load(root, rev)["state"]["value"], jobs.script.pattern(10, 3))
    assert leftovers(root) == []


def test_what_safetensors_cannot_say_is_refused_at_save_and_tied_tensors_are_no_matter(jobs: Any) -> None:
    """As safetensors, two names become one in silence, tied tensors raise, and so does everything that is no tensor."""
    for each in jobs.found("on_four", "shown_as_safetensors"):
        assert each["names"].startswith("StateError: ")
        assert "a.b" in each["names"]
        assert each["number"].startswith("StateError: ")
        assert "weights/step" in each["number"]
        assert each["tied"] is True
        assert each["values"] == [float(number) for number in range(8)]


def test_what_json_cannot_say_is_refused_at_save_and_without_a_layout_every_type_comes_back(jobs: Any) -> None:
    """As JSON, keys of two types raise, tuples become lists, and NaN is written as no JSON is."""
    for each in jobs.found("on_four", "shown_as_json"):
        for name, path in (("key", "notes"), ("tuple", "notes/t"), ("nan", "notes/n")):
            assert each[name].startswith("StateError: "), name
            assert path in each[name]
        assert each["typed"] == "{1: 2, 't': (1, 2), 'nan': nan}"


def test_nothing_is_unpickled_unless_the_reader_says_so_itself(jobs: Any) -> None:
    """A load runs code out of the checkpoint: tensors and metadata are pickles."""
    jobs.found("on_four", "pickled")
    for each in jobs.found("back_on_two", "unpickled"):
        assert each["refused"].startswith("StateError: ")
        assert "odd/trap" in each["refused"]
        assert each["rest"] == {"n": 1}
        assert each["sprung"] == [False, True]


def test_ranks_that_would_fill_one_file_differently_are_refused_and_named(jobs: Any) -> None:
    """A path without the rank in it is written by all ranks: whoever is last wins."""
    for each in jobs.found("on_four", "in_one_file"):
        assert each["refused"].startswith("StateError: ")
        assert "shared.json" in each["refused"]
        assert each["loaded"] == {"rank": 7}
