"""Whatever happens to one of two ranks, both hear of it by the deadline, the old tip stays or the new one is whole, and the job goes on."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import syckpt
from syckpt import CheckpointManager
from syckpt.repo import history
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.ranks import run_ranks
from syckpt.testing.scenes import leftovers, same

RANKS = Path(__file__).parent / "failure_ranks.py"
INTERRUPTED = Path(__file__).parent / "interrupted_ranks.py"
HANG_S = 400
# Two seconds of grace come to the deadline of 3, and what a loaded machine needs: only a call that hangs takes longer.
BOUND_S = 60.0

LATE = "rank(s) 1 did not arrive at 'save()' (step 0) within 3 s"


def state(step: int) -> dict[str, Any]:
    """As failure_ranks.state, which is not imported here: tests and ranks are of different processes."""
    made = torch.Generator().manual_seed(step)
    return {"net": {"a": torch.randn(5000, generator=made), "b": torch.randn(5000, generator=made)}, "count": step}


class Played:
    """What a job of two ranks met, scenario by scenario; one that went wrong is its own tests' failure alone."""

    def __init__(self, directory: Path, *args: Any, source: Path = RANKS, function: str = "play") -> None:
        self.directory = directory
        self.results = run_ranks(
            source,
            function,
            str(directory),
            *args,
            world_size=2,
            timeout_s=HANG_S,
            environment={"TORCHELASTIC_RUN_ID": "job"},
        )

    def root(self, scenario: str) -> Path:
        return self.directory / scenario / "run"

    def met(self, scenario: str, *, ranks: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
        """Return what each rank met. No call took longer than it may, and none failed that should not."""
        found = [self._met_by(rank, scenario) for rank in ranks]
        for each in found:
            assert each.get("scenario", "did not end") is None, (each, [result.output for result in self.results])
            for call, value in each.items():
                if call.endswith("seconds") and not call.startswith("scenario"):
                    assert value < BOUND_S, (scenario, call)
        return found

    def _met_by(self, rank: int, scenario: str) -> dict[str, Any]:
        path = self.directory / scenario / f"{rank}.json"
        met: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return met

    def errors(self, scenario: str, call: str) -> list[tuple[str, str]]:
        return [(found[call][0], found[call][1]) for found in self.met(scenario)]

    def assert_only(self, scenario: str, steps: dict[str, int]) -> None:
        """The repository holds the saves of that name, in this order, each bit for bit with that state, and nothing else."""
        commits = {}
        for call, step in steps.items():
            ids = {str(found[call]) for found in self.met(scenario)}
            assert len(ids) == 1, ids
            commits[ids.pop()] = step
        assert_holds(self.root(scenario), commits)


def assert_holds(root: Path, commits: dict[str, int]) -> None:
    repository = Repository.open(parse_root(root))
    found = history.log(repository)
    assert [commit.id for commit in found] == list(commits)[::-1]
    for commit, older in pairwise(found):
        assert commit.parents == (older.id,)
    assert verify(repository).errors == []
    for commit_id, step in commits.items():
        loaded = syckpt.load(root, commit_id)
        assert same({name: loaded[name] for name in ("net", "count")}, state(step))


def assert_clean_after_the_next_manager(root: Path) -> None:
    with CheckpointManager(root, rng=False, save_on_exit=False) as ckpt:
        for name, value in state(999).items():
            ckpt.register(name, value)
        ckpt.net, ckpt.count = state(1000)["net"], 1000
        pending = ckpt.save(wait=True)
    loaded = syckpt.load(root, str(pending))
    assert same({name: loaded[name] for name in ("net", "count")}, state(1000))
    assert leftovers(root) == []
    assert [str(path) for path in (root / ".syckpt").rglob("*") if path.is_file() and path.parts[-2] == "hello"] == []
    assert [str(path) for path in (root / ".syckpt/receipts").rglob("*") if path.is_file()] == []


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Ranks that call at different times, with different things, or fail in a call; then rank 1 is killed."""
    return Played(
        tmp_path_factory.mktemp("calls"),
        [
            "saved_under_if_rank_0",
            "a_slow_rank",
            "what_a_save_costs",
            "at_another_step",
            "with_other_keys",
            "with_another_layout",
            "an_exception_in_state_dict",
            "busy_and_skipped",
            "busy_and_refused",
            "other_arguments",
            "a_directory_that_is_not_shared",
            "damaged_for_one_rank",
            "lost_for_one_rank",
            "a_stopped_trainer",
            "a_killed_trainer",
        ],
    )


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Writers that fail, die, are stopped, or are fenced."""
    return Played(
        tmp_path_factory.mktemp("writers"),
        [
            "a_full_disk",
            "a_failure_in_the_background",
            "the_writer_of_rank_0_is_killed",
            "the_writer_of_rank_1_is_killed",
            "the_writer_of_rank_0_is_stopped",
            "the_writer_of_rank_1_is_stopped",
            "an_orphaned_incarnation",
            "an_orphan_whose_writer_died",
        ],
    )


@pytest.mark.xdist_group("calls")
class TestCalls:
    def test_a_save_under_if_rank_0_times_out_the_late_rank_is_told_and_the_next_save_by_all_works(self, calls: Played) -> None:
        (first, said), (second, told) = calls.errors("saved_under_if_rank_0", "save")
        assert (first, second) == ("RankTimeout", "RankTimeout")
        assert said.startswith(LATE)
        assert "none under `if rank == 0`" in said
        assert told.startswith(f"rank 1 came too late to 'save()' (step 0), its call was given up: {LATE}")
        calls.assert_only("saved_under_if_rank_0", {"base": 0, "next": 2})

    def test_a_rank_that_is_slow_but_comes_in_time_is_waited_for(self, calls: Played) -> None:
        calls.assert_only("a_slow_rank", {"base": 0, "next": 1})

    def test_a_save_costs_two_rounds_over_the_rendezvous_store_and_no_collective_of_any_thread(self, calls: Played) -> None:
        first, second = calls.met("what_a_save_costs")
        for each in (first, second):
            assert each["agreements"] == 1
            assert each["collectives"] == [[], 0]
        # Round one: rank 1 brings, rank 0 reads. Round two: rank 0 decides, rank 1 reads. The rest tells who is where, and tidies up.
        assert [request for request in first["requests"] if request[0] != "delete_key"] == [
            ["set", "leader"],
            ["multi_get", "1"],
            ["compare_set", "verdict"],
        ]
        others = [request for request in second["requests"] if request != ["multi_get", "leader"]]
        assert others == [["set", "1"], ["multi_get", "verdict"], ["delete_key", "1"]]
        assert [request for request in first["requests"] if request[0] == "delete_key"] == [["delete_key", "verdict"]]
        calls.assert_only("what_a_save_costs", {"base": 0, "next": 1})

    def test_ranks_at_different_steps_do_not_save(self, calls: Played) -> None:
        for kind, said in calls.errors("at_another_step", "save"):
            assert kind == "CoordinationError"
            assert "ranks save with different step (rank 0: 1, rank 1: 2)" in said
        calls.assert_only("at_another_step", {"next": 2})

    def test_ranks_may_have_different_keys(self, calls: Played) -> None:
        calls.assert_only("with_other_keys", {"next": 1})
        stage = syckpt.load(calls.root("with_other_keys"))["stage"]
        assert same(dict(stage), {"layer0": torch.arange(100.0), "layer1": torch.arange(100.0) + 1000})

    def test_a_tensor_that_is_sharded_on_one_rank_only_is_refused_on_both(self, calls: Played) -> None:
        for kind, said in calls.errors("with_another_layout", "save"):
            assert kind == "StateError"
            assert "odd/x" in said
        calls.assert_only("with_another_layout", {"base": 0, "next": 2})

    def test_an_exception_in_one_ranks_state_dict_is_itself_there_and_names_the_rank_elsewhere(self, calls: Played) -> None:
        elsewhere, there = calls.errors("an_exception_in_state_dict", "save")
        assert elsewhere == ("RankFailure", "rank(s) 1 failed in 'save()' (step 0): rank 1: ValueError: no memory left on the device")
        assert there == ("ValueError", "no memory left on the device")
        calls.assert_only("an_exception_in_state_dict", {"base": 0, "next": 2})

    @pytest.mark.parametrize("scenario", ["busy_and_skipped", "busy_and_refused"])
    def test_a_save_that_finds_one_ranks_store_hanging_is_skipped_or_refused_on_all_ranks(self, calls: Played, scenario: str) -> None:
        found = calls.met(scenario)
        if scenario == "busy_and_skipped":
            assert [each["save"] for each in found] == [None, None]
        else:
            assert [each["save"][0] for each in found] == ["ConflictError", "ConflictError"]
            assert all("are still being written on rank(s) 0, 1 (when_busy='raise')" in each["save"][1] for each in found)
        in_hand, following = found[0]["base"], found[0]["next"]
        assert found[1]["base"] == in_hand
        assert_holds(calls.root(scenario), {in_hand[0]: 0, in_hand[1]: 1, following: 3})

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            ("branch", "rank 1 made its manager with branch='branch1' (rank 0: 'branch0'): give all ranks the same"),
            ("exit", "rank 1 made its manager with save_on_exit=False (rank 0: True): give all ranks the same"),
            ("deadline", "rank 1 made its manager with timeout_s=4.0 (rank 0: 3.0): give all ranks the same"),
            ("save", "ranks save with different config"),
        ],
    )
    def test_ranks_that_are_given_different_arguments_or_configurations_are_told(self, calls: Played, call: str, said: str) -> None:
        for kind, found in calls.errors("other_arguments", call):
            assert kind == "CoordinationError"
            assert said in found
        calls.assert_only("other_arguments", {"next": 2})

    @pytest.mark.parametrize(
        ("call", "cause"), [("copy", "sees another directory at"), ("empty", "does not see the directory that rank 0")]
    )
    def test_a_directory_that_is_not_shared_is_found_when_the_managers_are_made(self, calls: Played, call: str, cause: str) -> None:
        for kind, said in calls.errors("a_directory_that_is_not_shared", call):
            assert kind == "CoordinationError"
            assert f"rank 1 {cause}" in said
        calls.assert_only("a_directory_that_is_not_shared", {"base": 0, "next": 2})
        assert [path.name for path in (calls.root("a_directory_that_is_not_shared") / ".syckpt/hello").glob("*")] == []

    def test_a_commit_that_is_damaged_for_one_rank_is_passed_over_by_all(self, calls: Played) -> None:
        for found in calls.met("damaged_for_one_rank"):
            assert found["resumed"] == found["save 0"]
            assert found["own"] is True
        root = calls.root("damaged_for_one_rank")
        following = calls.met("damaged_for_one_rank")[0]["next"]
        assert history.log(Repository.open(parse_root(root)))[0].parents == (found["save 0"],)
        assert same(syckpt.load(root, following)["net"], state(2)["net"])

    def test_a_commit_of_which_one_rank_misses_a_part_is_passed_over_by_all_when_the_managers_are_made(self, calls: Played) -> None:
        for found in calls.met("lost_for_one_rank"):
            assert (found["chosen"], found["own"]) == (found["save 0"], True)
        repository = Repository.open(parse_root(calls.root("lost_for_one_rank")))
        newest, before = found["save 2"], found["save 1"]
        assert history.log(repository)[0].parents == (found["save 0"],)
        cut = repository.why(newest, "damaged")
        assert cut is not None
        assert cut.startswith(f"rank 1: objects/{newest}/r00001.safetensors: ")
        assert repository.why(before, "damaged") == f"objects/{before}/r00001.manifest: missing, though commit {before} names it"

    def test_a_stopped_trainer_is_named_told_when_it_goes_on_and_takes_part_in_the_next_save(self, calls: Played) -> None:
        (first, said), (second, told) = calls.errors("a_stopped_trainer", "save")
        assert (first, second) == ("RankTimeout", "RankTimeout")
        assert said.startswith(LATE)
        assert told.startswith("rank 1 came too late to 'save()'")
        calls.assert_only("a_stopped_trainer", {"base": 0, "next": 2})

    def test_the_writer_of_a_killed_trainer_completes_its_part_and_the_others_are_told_at_the_next_save(self, calls: Played) -> None:
        (found,) = calls.met("a_killed_trainer", ranks=(0,))
        assert [result.exit_status for result in calls.results] == [0, -9], calls.results
        assert found["save"][0] == "RankTimeout"
        assert found["save"][1].startswith(LATE)
        assert_holds(calls.root("a_killed_trainer"), {found["first"]: 1})
        assert_clean_after_the_next_manager(calls.root("a_killed_trainer"))


@pytest.mark.xdist_group("writers")
class TestWriters:
    def test_a_full_disk_on_one_rank_is_a_store_error_on_all_and_again_at_the_next_save(self, writers: Played) -> None:
        for call in ("save", "heard"):
            for kind, said in writers.errors("a_full_disk", call):
                assert kind == "StoreError"
                assert "failed on rank(s) 1" in said
                assert "File too large" in said
        writers.assert_only("a_full_disk", {"base": 0, "next": 2})
        assert_clean_after_the_next_manager(writers.root("a_full_disk"))

    def test_a_failure_in_the_background_is_raised_once_on_all_ranks_at_the_next_save(self, writers: Played) -> None:
        (first, said), (second, told) = writers.errors("a_failure_in_the_background", "save")
        assert (first, second) == ("StoreError", "StoreError")
        assert said == told
        assert "failed on rank(s) 0" in said
        assert "No space left on device" in said
        writers.assert_only("a_failure_in_the_background", {"base": 0, "next": 2})

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_killed_writer_is_named_on_all_ranks_and_the_next_save_works(self, writers: Played, victim: int) -> None:
        scenario = f"the_writer_of_rank_{victim}_is_killed"
        for call in ("save", "heard"):
            for kind, said in writers.errors(scenario, call):
                assert kind == "WriterDied"
                assert f"of rank(s) {victim} ended (killed by signal 9) before save" in said
        writers.assert_only(scenario, {"base": 0, "next": 2})
        assert_clean_after_the_next_manager(writers.root(scenario))

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_stopped_writer_is_named_on_all_ranks_and_mixes_nothing_when_it_goes_on(self, writers: Played, victim: int) -> None:
        scenario = f"the_writer_of_rank_{victim}_is_stopped"
        errors = writers.errors(scenario, "save")
        assert errors[victim][0] == "CoordinationError"
        assert f"of rank(s) {victim} is alive but has not finished" in errors[victim][1]
        assert errors[1 - victim][0] == "RankTimeout"
        did = "did not begin it" if victim == 0 else "did not complete their part"
        assert f"rank(s) {victim} {did} within 3 s" in errors[1 - victim][1]
        assert [found["tip"] for found in writers.met(scenario)] == ["0", "0"]
        assert [kind for kind, _ in writers.errors(scenario, "heard")] == ["RankTimeout", "RankTimeout"]
        writers.assert_only(scenario, {"base": 0, "next": 2})
        assert_clean_after_the_next_manager(writers.root(scenario))

    @pytest.mark.parametrize("scenario", ["an_orphaned_incarnation", "an_orphan_whose_writer_died"])
    def test_an_older_incarnation_is_refused_on_all_its_ranks_and_leaves_the_branch_to_the_newer_one(
        self, writers: Played, scenario: str
    ) -> None:
        for call in ("save", "again"):
            for kind, said in writers.errors(scenario, call):
                assert kind == "ConflictError"
                assert "generation 2 of run torchelastic-job" in said
                assert "rank(s) 0" in said or "was taken by" in said
        found = writers.met(scenario)[0]
        assert_holds(writers.root(scenario), {found["base"]: 0, found["newcomer"]: 9})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Writers and trainers that are stopped in the middle of a save, and go on in time, too late, or when a newer incarnation has begun."""
    return Played(tmp_path_factory.mktemp("stopped"), source=INTERRUPTED, function="stop")


# Where a writer is stopped past the deadline: what each rank hears of that save, and whether it is there in the end.
UNDECIDED = "CoordinationError"
STOPS = {
    "rank 0 before its intent": (UNDECIDED, "RankTimeout", False),
    "rank 0 before its bytes": (UNDECIDED, UNDECIDED, False),
    # In the act of publishing: it looks no more whether the other one still waits.
    "rank 0 before the commit": (UNDECIDED, UNDECIDED, True),
    "rank 0 before the ref record": (UNDECIDED, UNDECIDED, True),
    "rank 0 before its verdict": (UNDECIDED, "", True),
    "rank 1 before its bytes": ("RankTimeout", UNDECIDED, False),
    "rank 1 before its receipt": ("RankTimeout", UNDECIDED, False),
    "rank 1 before it knows the verdict": ("", UNDECIDED, True),
}


def assert_named(met: Any, kind: str, victim: int) -> None:
    assert met[0] == kind, met
    assert f"rank(s) {victim}" in met[1], met


@pytest.mark.xdist_group("stopped")
class TestStopped:
    @pytest.mark.parametrize("point", STOPS)
    def test_a_writer_that_is_stopped_in_a_save_goes_on_is_named_or_is_fenced(self, stopped: Played, point: str) -> None:
        found = stopped.met(point)
        victim, (*kinds, visible) = int(point[5]), STOPS[point]
        saves = {found[0][call]: step for step, call in enumerate(("base", "second", "in time"))}
        assert [each["in time"] for each in found] == [found[0]["in time"]] * 2

        for each, kind in zip(found, kinds, strict=True):
            if kind:
                assert_named(each["too late"], kind, victim)
        tip = found[0]["tip"]
        assert found[1]["tip"] == tip
        if visible:
            saves[str(found[0]["became"])] = 3
            assert tip in (found[0]["became"], found[0]["in time"])
        else:
            assert tip == found[0]["in time"]
            for each in found:
                assert_named(each["became"], "RankTimeout", victim)

        # What failed is raised once, on both; then the job goes on.
        attempts = [[each[f"attempt {number}"] for each in found] for number in range(3)]
        if not isinstance(attempts[0][0], str):
            for met in attempts.pop(0):
                assert_named(met, "RankTimeout", victim)
        for first, second in attempts:
            assert first == second
            saves[str(first)] = 4

        published = point in ("rank 0 before its verdict", "rank 1 before it knows the verdict")
        if published:
            assert [each["fenced"] for each in found] == [found[0]["id"]] * 2
            saves[found[0]["id"]] = 5
        else:
            first, second = (each["fenced"] for each in found)
            assert first[0] == "ConflictError", first
            assert second[0] in ("ConflictError", "RankFailure"), second
            assert_named(second, second[0], 0)
        for each in found:
            assert each["fenced tip"] == list(saves)[-1]
            for call in ("heard", "again"):
                assert each[call][0] == "ConflictError", each[call]
                assert "of run a newer one" in each[call][1]
        assert_holds(stopped.root(point), saves)
        assert_clean_after_the_next_manager(stopped.root(point))

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_trainer_that_is_stopped_in_a_save_goes_on_is_named_or_is_fenced(self, stopped: Played, victim: int) -> None:
        scenario = f"the trainer of rank {victim}, in time"
        stopped.assert_only(scenario, {"base": 0, "save": 1, "heard": 2, "next": 2})

        scenario = f"the trainer of rank {victim}, too late"
        for call in ("save", "heard"):
            for met in stopped.errors(scenario, call):
                assert_named(met, "RankTimeout", victim)
        assert stopped.met(scenario)[1 - victim]["tip"] == stopped.met(scenario)[0]["base"]
        stopped.assert_only(scenario, {"base": 0, "next": 2})
        assert_clean_after_the_next_manager(stopped.root(scenario))

        scenario = f"the trainer of rank {victim}, fenced"
        for call in ("save", "heard", "next"):
            for kind, said in stopped.errors(scenario, call):
                assert kind in (("ConflictError", "RankFailure") if call == "save" else ("ConflictError",)), said
                assert "rank(s) 0" in said
        stopped.assert_only(scenario, {"base": 0})
        assert_clean_after_the_next_manager(stopped.root(scenario))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_trainer_loses_no_save_that_its_writer_completes_and_leaves_no_half_of_others(tmp_path: Path, victim: int) -> None:
    played = Played(tmp_path, victim, source=INTERRUPTED, function="kill_trainer")
    told = "\n".join(f"rank {result.rank}: {result.raised}\n{result.output}" for result in played.results)
    assert [result.exit_status for result in played.results] == ([-9, 0] if victim == 0 else [0, -9]), told
    points = [point for point in STOPS if point.startswith(f"rank {victim}")]
    for scenario in [*(point + fate for point in points for fate in (", which goes on", ", which dies")), "before the hand-over"]:
        (found,) = played.met(scenario, ranks=(1 - victim,))
        saves = {found[call]: step for step, call in enumerate(("base", "second")) if call in found}
        if scenario.endswith("goes on") or "verdict" in scenario:
            assert found["save"] == found["id"], scenario
            saves[found["id"]] = 2
        else:
            assert_named(found["save"], found["save"][0], victim)
            assert found["save"][0] in ("RankTimeout", UNDECIDED), scenario
        assert_named(found["next"], "RankTimeout", victim)
        assert found["tip"] == list(saves)[-1]
        assert_holds(played.root(scenario), saves)
        if not scenario.endswith("goes on"):
            assert_clean_after_the_next_manager(played.root(scenario))


def assert_survives_a_sweep(directory: Path, *, action: str, victim: int, every: int) -> None:
    results = run_ranks(RANKS, "sweep", str(directory), action, victim, every, world_size=2, timeout_s=HANG_S * (4 if every == 1 else 1))
    first, second = (result.value for result in results)
    assert len(first) == len(second) >= (20 if every == 1 else 5)
    root = directory / f"{action} on rank {victim}" / "run"
    expected = [("base", 0), ("base", 1)]
    for (number, commit, met, head, heard, good, step), (_, _, other_met, _, other_heard, other_good, _) in zip(first, second, strict=True):
        where = f"mutation {number}"
        old = expected[-1][0]
        # Both ranks agree, with what the branch shows too: there is no half.
        assert (met == commit) == (other_met == commit) == (head == commit), where
        if met == commit:
            expected.append((commit, step))
        else:
            assert old in ("base", head), where
            wanted = "StoreError" if action == "error" else "WriterDied"
            for raised in (met, other_met, heard, other_heard):
                assert raised[0] == wanted, where
                assert f"rank(s) {victim}" in raised[1], where
        assert good == other_good, where
        assert isinstance(good, str), (where, good)
        expected.append((good, step + 1))
    commits = [commit.id for commit in history.log(Repository.open(parse_root(root)))][::-1]
    assert commits[2:] == [commit for commit, _ in expected[2:]]
    assert_holds(root, dict(zip(commits, (step for _, step in expected), strict=True)))
    assert_clean_after_the_next_manager(root)


SWEEPS = pytest.mark.parametrize(("action", "victim"), [("error", 0), ("error", 1), ("kill", 0), ("kill", 1)])


@SWEEPS
def test_a_fault_before_every_fourth_mutation_of_one_writer_leaves_the_old_tip_or_the_new_commit(
    tmp_path: Path, action: str, victim: int
) -> None:
    assert_survives_a_sweep(tmp_path, action=action, victim=victim, every=4)


@pytest.mark.slow
@SWEEPS
def test_a_fault_before_every_mutation_of_one_writer_leaves_the_old_tip_or_the_new_commit(tmp_path: Path, action: str, victim: int) -> None:
    assert_survives_a_sweep(tmp_path, action=action, victim=victim, every=1)
