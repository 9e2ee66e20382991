"""Agreement among ranks: threads of this process where only the protocol matters, real processes for signals and the process group."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from syckpt.dist.coordinator import Coordinator, SingleProcess, StoreCoordinator, connect
from syckpt.errors import ConflictError, CoordinationError, RankFailure, RankTimeout, StateError, StoreError
from syckpt.testing.ranks import RankResult, run_ranks

RANKS = Path(__file__).parent / "coordinator_ranks.py"
HANG_S = 60
SHORT_S = 0.6


def tcp_store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=HANG_S), wait_for_workers=False)


STORES = [pytest.param(tcp_store, id="tcp"), pytest.param(dist.HashStore, id="hash")]


def together(world_size: int, part: Callable[[Coordinator], Any], *, store: Any = None, timeout_s: float = HANG_S) -> list[Any]:
    """Play a part on every rank, a thread each, and return what they returned or raised, in rank order."""
    store = store or dist.HashStore()
    found: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        coordinator = StoreCoordinator(store, rank=rank, world_size=world_size, session="s", timeout_s=timeout_s)
        found[rank] = outcome(lambda: part(coordinator))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "a rank hangs"
    return found


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as exc:  # noqa: BLE001 - compared below
        return exc


def ranks_of(coordinator: Coordinator) -> list[int]:
    """Agree once more, to see that the ranks are in step."""
    return coordinator.agree("who", {"rank": coordinator.rank}, lambda values: {"ranks": [each["rank"] for each in values]})["ranks"]


class TestValues:
    @pytest.mark.parametrize("make_store", STORES)
    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_rank_0_decides_on_the_values_in_rank_order_and_all_get_its_verdict(
        self, world_size: int, make_store: Callable[[], Any]
    ) -> None:
        decided = []

        def part(coordinator: Coordinator) -> Any:
            def decide(values: list[dict[str, Any]]) -> dict[str, Any]:
                decided.append(coordinator.rank)
                return {"seen": [each["rank"] for each in values]}

            return coordinator.agree("save", {"rank": coordinator.rank}, decide)

        assert together(world_size, part, store=make_store()) == [{"seen": list(range(world_size))}] * world_size
        assert decided == [0]

    def test_a_broadcast_tells_all_what_rank_0_says(self) -> None:
        def part(coordinator: Coordinator) -> Any:
            return coordinator.broadcast("id", {"id": "abc"} if coordinator.rank == 0 else None)

        assert together(3, part) == [{"id": "abc"}] * 3

    def test_no_rank_leaves_a_barrier_before_all_have_come(self) -> None:
        come = []

        def part(coordinator: Coordinator) -> Any:
            come.append(coordinator.rank)
            coordinator.barrier("end")
            return len(come)

        assert together(4, part) == [4] * 4

    def test_values_pass_through_json_on_every_rank_and_in_a_single_process(self) -> None:
        def part(coordinator: Coordinator) -> Any:
            return coordinator.agree("save", {"pair": (1, 2.5), "none": None, "é": "\ud800\0"}, lambda values: {"first": values[0]})

        expected = {"first": {"pair": [1, 2.5], "none": None, "é": "\ud800\0"}}
        assert together(2, part) == [expected] * 2
        assert part(SingleProcess()) == expected

    @pytest.mark.parametrize("make_store", STORES)
    def test_a_hundred_agreements_leave_a_bounded_number_of_keys(self, make_store: Callable[[], Any]) -> None:
        store = make_store()

        def part(coordinator: Coordinator) -> None:
            for _ in range(100):
                coordinator.barrier("step")

        before = store.num_keys()
        together(4, part, store=store)
        assert store.num_keys() - before <= 2  # rank 0's place and the last verdict

    def test_eight_megabytes_pass_both_ways_and_leave_no_keys(self) -> None:
        store = tcp_store()

        def part(coordinator: Coordinator) -> Any:
            found = coordinator.agree("large", {"text": "x" * (8 << 20)}, lambda values: values[-1])
            ranks_of(coordinator)
            return len(found["text"])

        before = store.num_keys()
        assert together(2, part, store=store) == [8 << 20] * 2
        assert store.num_keys() - before <= 2

    def test_a_file_store_serves_as_well(self, tmp_path: Path) -> None:
        def part(coordinator: Coordinator) -> Any:
            return ranks_of(coordinator) + ranks_of(coordinator)

        assert together(2, part, store=dist.FileStore(str(tmp_path / "store"), 2)) == [[0, 1, 0, 1]] * 2

    def test_a_coordinator_takes_its_thread_along(self) -> None:
        before = set(threading.enumerate())
        coordinator = StoreCoordinator(dist.HashStore(), rank=0, world_size=1, session="s", timeout_s=HANG_S)
        (thread,) = set(threading.enumerate()) - before
        coordinator.barrier("step")
        del coordinator
        thread.join(HANG_S)
        assert not thread.is_alive()

    def test_agreements_are_counted(self) -> None:
        def part(coordinator: Coordinator) -> Any:
            coordinator.barrier("a")
            coordinator.broadcast("b", {})
            outcome(lambda: coordinator.barrier("c", error=ValueError()))
            return coordinator.agreements

        assert together(2, part) == [3, 3]
        assert part(SingleProcess()) == 3


class TestErrors:
    def test_an_error_of_ours_on_one_rank_is_raised_in_its_class_on_all(self) -> None:
        mine = StoreError("no space left in /data")

        def part(coordinator: Coordinator) -> Any:
            told = outcome(lambda: coordinator.barrier("save", at="step 120", error=mine if coordinator.rank == 1 else None))
            return told, ranks_of(coordinator)

        found = together(3, part)
        assert found[1][0] is mine
        for rank in (0, 2):
            assert type(found[rank][0]) is StoreError
            assert str(found[rank][0]) == "rank(s) 1 failed in 'save' (step 120): rank 1: StoreError: no space left in /data"
        assert [ranks for _, ranks in found] == [[0, 1, 2]] * 3

    def test_an_error_of_the_users_is_itself_there_and_a_rank_failure_elsewhere(self) -> None:
        mine = FileNotFoundError("mine")
        found = together(2, lambda coordinator: coordinator.barrier("save", error=mine if coordinator.rank == 0 else None))
        assert found[0] is mine
        assert type(found[1]) is RankFailure
        assert str(found[1]) == "rank(s) 0 failed in 'save': rank 0: FileNotFoundError: mine"

    def test_the_errors_of_several_ranks_are_told_together(self) -> None:
        errors = [None, ValueError("one"), StoreError("two"), None]
        found = together(4, lambda coordinator: coordinator.barrier("save", error=errors[coordinator.rank]))
        assert found[1:3] == errors[1:3]
        assert type(found[0]) is type(found[3]) is StoreError
        assert "rank(s) 1, 2 failed in 'save': rank 1: ValueError: one; rank 2: StoreError: two" in str(found[0])

    def test_nothing_is_decided_when_a_rank_brings_an_error(self) -> None:
        decided = []

        def part(coordinator: Coordinator) -> Any:
            error = ValueError() if coordinator.rank == 1 else None
            return coordinator.agree("save", {}, lambda values: decided.append(values) or {}, error=error)

        together(2, part)
        assert decided == []

    @pytest.mark.parametrize(
        ("error", "kind", "text"),
        [
            (ConflictError("the name v1 is taken"), ConflictError, "the name v1 is taken [found by rank(s) 0 in 'save']"),
            (KeyError("x"), RankFailure, "rank(s) 0 failed in 'save': KeyError: 'x'"),
        ],
        ids=["ours", "another"],
    )
    def test_what_decide_raises_is_raised_on_all(self, error: Exception, kind: type[Exception], text: str) -> None:
        def part(coordinator: Coordinator) -> Any:
            def decide(_: list[dict[str, Any]]) -> dict[str, Any]:
                raise error

            return outcome(lambda: coordinator.agree("save", {}, decide)), ranks_of(coordinator)

        found = together(3, part)
        assert found[0][0] is error
        for rank in (1, 2):
            assert type(found[rank][0]) is kind
            assert str(found[rank][0]) == text
        assert [ranks for _, ranks in found] == [[0, 1, 2]] * 3

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_value_that_is_not_json_is_an_error_of_its_rank(self, rank: int) -> None:
        def part(coordinator: Coordinator) -> Any:
            return coordinator.agree("save", {"x": object() if coordinator.rank == rank else 1}, lambda values: {})

        found = together(2, part)
        assert type(found[rank]) is TypeError
        assert type(found[1 - rank]) is RankFailure
        assert f"rank(s) {rank}" in str(found[1 - rank])

    def test_a_verdict_that_is_not_json_is_an_error_on_all(self) -> None:
        found = together(2, lambda coordinator: coordinator.agree("save", {}, lambda values: {"x": object()}))
        assert [type(each) for each in found] == [TypeError, RankFailure]

    def test_ranks_in_different_calls_are_named_with_their_calls(self) -> None:
        def part(coordinator: Coordinator) -> Any:
            topic, at = ("load", "") if coordinator.rank == 1 else ("save", "step 3")
            return outcome(lambda: coordinator.barrier(topic, at=at)), ranks_of(coordinator)

        for told, ranks in together(3, part):
            assert type(told) is CoordinationError
            assert "rank(s) 0, 2 in 'save' (step 3), rank(s) 1 in 'load'" in str(told)
            assert ranks == [0, 1, 2]

    def test_an_interrupted_rank_waits_for_nobody_and_the_others_are_told(self) -> None:
        left = threading.Event()

        def part(coordinator: Coordinator) -> Any:
            if coordinator.rank == 1:
                told = outcome(lambda: coordinator.barrier("save", error=KeyboardInterrupt()))
                left.set()
            else:
                left.wait(HANG_S)
                told = outcome(lambda: coordinator.barrier("save"))
            return told, ranks_of(coordinator)

        found = together(3, part)
        assert [type(told) for told, _ in found] == [RankFailure, KeyboardInterrupt, RankFailure]
        assert "rank(s) 1 failed in 'save': KeyboardInterrupt" in str(found[0][0])

    def test_a_second_thread_is_refused(self) -> None:
        def part(coordinator: Coordinator) -> Any:
            return coordinator.agree("outer", {}, lambda values: coordinator.broadcast("inner"))

        found = together(2, part)
        assert [type(each) for each in found] == [CoordinationError] * 2
        assert "another agreement is under way" in str(found[0])

    def test_a_single_process_raises_what_it_brings_and_what_decide_raises(self) -> None:
        with pytest.raises(StateError, match="mine"):
            SingleProcess().barrier("save", error=StateError("mine"))
        with pytest.raises(ZeroDivisionError):
            SingleProcess().agree("save", {}, lambda values: {"x": 1 / 0})


class TestDeadlines:
    @pytest.mark.parametrize("late", [1, 2])
    def test_a_missing_rank_is_named_then_told_that_it_is_late_and_the_next_agreement_works(self, late: int) -> None:
        given_up = threading.Barrier(3)

        def part(coordinator: Coordinator) -> Any:
            if coordinator.rank == late:
                given_up.wait(HANG_S)
            told = outcome(lambda: coordinator.barrier("save", at="step 120", timeout_s=SHORT_S))
            if coordinator.rank != late:
                given_up.wait(HANG_S)
            return told, ranks_of(coordinator)

        found = together(3, part)
        assert [type(told) for told, _ in found] == [RankTimeout] * 3
        assert str(found[0][0]).startswith(
            f"rank(s) {late} did not arrive at 'save' (step 120) within 0.6 s (there: rank(s) 0, {3 - late} in"
        )
        assert str(found[3 - late][0]) == str(found[0][0])
        assert str(found[late][0]).startswith(f"rank {late} came too late to 'save' (step 120), its call was given up: rank(s) {late} did")
        assert [ranks for _, ranks in found] == [[0, 1, 2]] * 3

    def test_a_missing_rank_0_is_named_then_told_that_it_is_late_and_the_next_agreement_works(self) -> None:
        given_up = threading.Barrier(3)

        def part(coordinator: Coordinator) -> Any:
            if coordinator.rank == 0:
                given_up.wait(HANG_S)
            told = outcome(lambda: coordinator.barrier("save", timeout_s=SHORT_S))
            if coordinator.rank != 0:
                given_up.wait(HANG_S)
            return told, ranks_of(coordinator)

        found = together(3, part)
        assert [type(told) for told, _ in found] == [RankTimeout] * 3
        assert str(found[1][0]).startswith("rank(s) 0 did not arrive at 'save' within 0.6 s")
        assert str(found[0][0]).startswith("rank 0 came too late to 'save', its call was given up: rank(s) 0 did not arrive")
        assert [ranks for _, ranks in found] == [[0, 1, 2]] * 3

    @pytest.mark.parametrize("late", [0, 1])
    def test_a_rank_may_be_several_agreements_late_and_leaves_no_keys(self, late: int) -> None:
        given_up = threading.Event()
        store = tcp_store()

        def part(coordinator: Coordinator) -> Any:
            if coordinator.rank == late:
                given_up.wait(HANG_S)
            told = [outcome(lambda: coordinator.barrier("save", timeout_s=SHORT_S)) for _ in range(3)]
            given_up.set()
            ranks_of(coordinator)
            return [type(each) for each in told], ranks_of(coordinator)

        before = store.num_keys()
        assert together(2, part, store=store) == [([RankTimeout] * 3, [0, 1])] * 2
        assert store.num_keys() - before <= 2

    def test_a_missing_rank_does_not_hide_what_the_others_bring(self) -> None:
        def part(coordinator: Coordinator) -> Any:
            if coordinator.rank == 2:
                return None
            return coordinator.barrier("save", error=StoreError("disk full") if coordinator.rank == 1 else None, timeout_s=SHORT_S)

        found = together(3, part)
        assert type(found[0]) is RankTimeout
        assert "rank 1: StoreError: disk full" in str(found[0])
        assert type(found[1]) is StoreError

    def test_a_rank_waits_for_rank_0_that_came_late_as_long_as_rank_0_waits(self) -> None:
        # Rank 1 has waited most of its time when rank 0 comes; rank 2 comes within rank 0's time, but after rank 1's own.
        half_over, over = threading.Event(), threading.Event()
        timers = [threading.Timer(seconds, event.set) for seconds, event in ((1.5, half_over), (2.5, over))]

        def part(coordinator: Coordinator) -> Any:
            event = {0: half_over, 2: over}.get(coordinator.rank)
            if event:
                event.wait(HANG_S)
            return coordinator.agree("save", {}, lambda values: {"count": len(values)}, timeout_s=2.0)

        for timer in timers:
            timer.start()
        assert together(3, part) == [{"count": 3}] * 3

    def test_who_decides_for_too_long_is_told_that_it_was_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("syckpt.dist.coordinator._GRACE_S", 0.4)
        given_up = threading.Event()

        def part(coordinator: Coordinator) -> Any:
            def decide(_: list[dict[str, Any]]) -> dict[str, Any]:
                given_up.wait(HANG_S)
                return {}

            told = outcome(lambda: coordinator.agree("save", {}, decide, timeout_s=SHORT_S))
            given_up.set()
            return told, ranks_of(coordinator)

        found = together(2, part)
        assert [type(told) for told, _ in found] == [RankTimeout] * 2
        assert str(found[1][0]).startswith("rank(s) 0 came to 'save' but gave no verdict within 0.6 s")
        assert str(found[0][0]).startswith("rank 0 came too late to 'save'")


class TestConnect:
    def test_a_process_on_its_own_is_a_single_process(self) -> None:
        assert isinstance(connect(timeout_s=1), SingleProcess)

    def test_a_group_of_one_is_a_single_process(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            assert isinstance(connect(timeout_s=1), SingleProcess)
        finally:
            dist.destroy_process_group()

    def test_several_ranks_without_a_process_group_are_told_to_make_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.raises(CoordinationError, match=r"WORLD_SIZE is 4.*init_process_group first"):
            connect(timeout_s=1)


@pytest.fixture(scope="module")
def job() -> list[RankResult]:
    return run_ranks(RANKS, "everything", world_size=4, timeout_s=240)


@pytest.mark.xdist_group("ranks")
class TestProcesses:
    def found(self, job: list[RankResult], scenario: str) -> list[Any]:
        return [each[scenario] for each in job[0].value["before"]]

    def test_values_come_in_rank_order(self, job: list[RankResult]) -> None:
        assert self.found(job, "values_in_rank_order") == [{"all": [{"rank": rank} for rank in range(4)]}] * 4

    def test_a_save_costs_one_agreement(self, job: list[RankResult]) -> None:
        assert self.found(job, "a_save_costs_one_agreement_of_two_rounds") == [1] * 4

    def test_two_coordinators_live_side_by_side(self, job: list[RankResult]) -> None:
        assert self.found(job, "two_coordinators_side_by_side") == [["one", "other", "one again"]] * 4

    def test_many_coordinators_in_a_row_all_have_their_own_session(self, job: list[RankResult]) -> None:
        assert self.found(job, "many_coordinators_in_a_row") == [[20, True]] * 4

    def test_a_rank_that_does_not_make_its_coordinator_is_named_and_the_next_try_works(self, job: list[RankResult]) -> None:
        found = self.found(job, "a_rank_that_makes_its_coordinator_too_late")
        for told, _ in found[:3]:
            assert told[0] == "RankTimeout"
            assert told[1].startswith("rank(s) 3 did not come to make their coordinator within 2 s")
        assert [after for _, after in found] == [{"all": [{"rank": each} for each in range(4)]}] * 4

    def test_keys_of_an_earlier_incarnation_are_not_believed(self, job: list[RankResult]) -> None:
        assert self.found(job, "keys_of_an_earlier_incarnation_are_not_believed") == [[True, "the living"]] * 4

    def test_every_rank_may_bring_eight_megabytes(self, job: list[RankResult]) -> None:
        assert self.found(job, "a_large_value") == [[[8 << 20] * 4, True]] * 4

    def test_a_collective_of_the_training_may_be_under_way(self, job: list[RankResult]) -> None:
        assert self.found(job, "while_a_collective_of_the_training_is_under_way") == [6.0] * 4

    def test_a_rank_that_was_stopped_is_named_told_that_it_is_late_and_in_step_again(self, job: list[RankResult]) -> None:
        found = self.found(job, "a_rank_that_was_stopped_before_it_came")
        for rank, (told, in_time, after) in enumerate(found):
            text = "rank 3 came too late to 'save' (step 120)" if rank == 3 else "rank(s) 3 did not arrive at 'save' (step 120) within 2 s"
            assert told[0] == "RankTimeout"
            assert told[1].startswith(text)
            assert in_time
            assert after == {"all": [{"rank": each} for each in range(4)]}

    def test_a_rank_that_was_stopped_in_an_agreement_learns_its_verdict(self, job: list[RankResult]) -> None:
        everyone = {"all": [{"rank": each} for each in range(4)]}
        assert self.found(job, "a_rank_that_was_stopped_while_it_waited") == [[everyone, everyone]] * 4

    def test_a_stopped_host_of_the_rendezvous_store_holds_nobody_up(self, job: list[RankResult]) -> None:
        found = self.found(job, "the_stopped_host_of_the_rendezvous_store")
        for rank, (told, after) in enumerate(found):
            # Rank 0 comes back to what the others brought; whether it also finds that they have gone is a race.
            assert (rank == 0 and told == {}) or told[0] == "RankTimeout"
            assert rank == 0 or "the rendezvous store has not answered in 'save'" in told[1]
            assert after == {"all": [{"rank": each} for each in range(4)]}

    def test_the_host_of_the_rendezvous_store_ends_only_when_the_others_have_read_its_verdict(self, job: list[RankResult]) -> None:
        everyone = {"all": [{"rank": each} for each in range(4)]}
        assert self.found(job, "the_host_of_the_rendezvous_store_may_end_when_it_has_closed") == [[everyone, True]] * 4

    def test_ctrl_c_ends_the_wait_long_before_the_deadline_and_the_others_are_told(self, job: list[RankResult]) -> None:
        found = self.found(job, "ctrl_c_gets_through")
        assert found[3][0] is True
        for told, _ in found[:3]:
            assert told == ["RankFailure", "rank(s) 3 failed in 'save': KeyboardInterrupt"]
        assert [after for _, after in found] == [{"all": [{"rank": each} for each in range(4)]}] * 4

    def test_a_killed_rank_is_named_by_the_others(self, job: list[RankResult]) -> None:
        assert job[3].exit_status == -signal.SIGKILL
        for rank in range(3):
            kind, text = job[rank].value["killed"]
            assert kind == "RankTimeout"
            assert text.startswith("rank(s) 3 did not arrive at 'save' within 2 s (there: rank(s) 0, 1, 2 in 'save')")

    def test_a_rendezvous_store_whose_host_was_killed_is_reported_at_every_call(self, job: list[RankResult]) -> None:
        for rank in range(3):
            for kind, text in job[rank].value["lost"]:
                assert kind == "RankFailure"
                assert text.startswith("the rendezvous store is lost")


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_the_runner_tells_what_a_rank_raised_and_kills_those_that_hang() -> None:
    failed, hung = run_ranks(RANKS, "one_fails_and_one_hangs", world_size=2, timeout_s=30)
    assert "ValueError: no such luck" in str(failed.raised)
    assert hung.exit_status == -signal.SIGKILL
    with pytest.raises(AssertionError, match="rank 0 ended with 1"):
        _ = failed.value
