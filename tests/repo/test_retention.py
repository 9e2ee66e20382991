"""Which commits of a branch stay, which go, and what their going leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, StateError, StoreError
from syckpt.objects.commit import Commit
from syckpt.repo import branches, history, survey
from syckpt.repo.owner import this_process
from syckpt.repo.reader import Reader
from syckpt.repo.retention import Keeper, Retention, plan, retain
from syckpt.repo.transaction import Transaction, open_branch
from syckpt.repo.verify import verify
from syckpt.stores.memory import MemoryStore

HOUR_NS = 3600 * 10**9


def made(
    number: int,
    *,
    metric: float | None = None,
    step: int | None = None,
    hours: float | None = None,
    parent: int | None = None,
    **facts: Any,
) -> Commit:
    """Commit `number` of a branch: its parent is the one before, its step ten times its number, its age as many hours."""
    parent = number - 1 if parent is None else parent
    return Commit(
        id=str(number),
        parents=(str(parent),) if parent else (),
        parent_seals=("",) if parent else (),
        branch="main",
        step=10 * number if step is None else step,
        epoch=0,
        batch_idx=0,
        epoch_done=False,
        entered=False,
        metric=metric,
        message="",
        config={},
        created_ns=round((number if hours is None else hours) * HOUR_NS),
        world_size=1,
        tags=(),
        name=None,
        fingerprint="",
        writer="",
        run_id="",
        generation=1,
        sequence=number,
        rng_exact=True,
        stats={},
        manifests=(),
        **facts,
    )


def kept(rule: Retention, commits: Sequence[Commit], **options: Any) -> list[int]:
    options = {"tip": commits[-1].id, "protected": {}, "maximize": False, **options}
    return [int(commit.id) for commit, _ in plan(rule, commits, **options).kept]


# -- the rules -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"last": 0}, {"last": -1}, {"last": True}, {"last": 2.0}, {"best": 0}, {"every_steps": 0}, {"every": 0}, {"every": "1 week"},
     {"every": "-1h"}, {"every": ""}, {"every": float("nan")}, {"every": float("inf")}, {"every": True}],
    ids=str,
)  # fmt: skip
def test_a_rule_without_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="Retention"):
        Retention(**options)


@pytest.mark.parametrize(("every", "seconds"), [("90s", 90), ("30m", 1800), ("1h", 3600), ("1.5 d", 129_600), (60, 60), (0.5, 0.5)])
def test_a_period_is_seconds_or_a_text(every: str | float, seconds: float) -> None:
    assert Retention(every=every).every_s == seconds


def test_a_rule_travels_to_the_writer() -> None:
    rule = Retention(last=5, best=3, every_steps=1000, every="1h")
    assert Retention.from_wire(rule.to_wire(maximize=True)) == (rule, True)


def test_last_keeps_the_newest() -> None:
    assert kept(Retention(last=3), [made(n) for n in range(1, 11)]) == [8, 9, 10]


def test_best_keeps_the_lowest_metrics_and_the_tip() -> None:
    commits = [made(n, metric=metric) for n, metric in enumerate([5.0, 1.0, 4.0, 2.0, 3.0, 9.0], start=1)]
    assert kept(Retention(best=2), commits) == [2, 4, 6]
    assert kept(Retention(best=2), commits, maximize=True) == [1, 6]


def test_the_best_stays_whatever_the_rule() -> None:
    commits = [made(1, metric=0.5), *(made(n, metric=float(n)) for n in range(2, 9))]
    assert kept(Retention(last=2), commits) == [1, 7, 8]


def test_what_would_be_best_either_way_stays_where_nobody_said_which_is() -> None:
    commits = [made(n, metric=metric) for n, metric in enumerate([0.1, 0.9, 0.3, 0.4, 0.5, math.nan], start=1)]
    found = plan(Retention(last=1), commits, tip="6", protected={})
    assert [(commit.id, reasons) for commit, reasons in found.kept] == [
        ("1", ("best (if the lowest)",)),
        ("2", ("best (if the highest)",)),
        ("6", ("tip", "last 1")),
    ]
    assert kept(Retention(best=2), commits, maximize=None) == [1, 2, 3, 5, 6]


def test_nan_is_never_best_and_of_equals_it_is_the_newest() -> None:
    commits = [made(1, metric=math.nan), made(2, metric=1.0), made(3, metric=1.0), made(4), made(5, metric=math.nan)]
    assert kept(Retention(last=1), commits) == [3, 5]
    assert kept(Retention(last=1), commits, maximize=True) == [3, 5]


def test_every_steps_keeps_the_first_at_or_after_each_multiple() -> None:
    commits = [made(n, step=step) for n, step in enumerate([0, 30, 90, 100, 130, 210, 290, 300], start=1)]
    assert kept(Retention(every_steps=100), commits) == [1, 4, 6, 8]


def test_every_keeps_the_first_of_each_period() -> None:
    commits = [made(n, hours=hours) for n, hours in enumerate([1.0, 1.2, 1.9, 2.1, 2.2, 5.5, 5.6, 5.7], start=1)]
    assert kept(Retention(every="1h"), commits) == [1, 4, 6, 8]


def test_what_a_jump_back_left_aside_serves_last_and_best_only() -> None:
    aside = [made(3, step=100, metric=1.0), made(4, step=200)]
    commits = [made(1), made(2), *aside, made(5, parent=2, step=100, metric=2.0), made(6, step=150)]
    assert kept(Retention(every_steps=100), commits) == [3, 5, 6]
    assert kept(Retention(last=3), commits) == [3, 4, 5, 6]


def test_protected_commits_stay_and_say_why() -> None:
    found = plan(Retention(last=1), [made(n) for n in range(1, 5)], tip="4", protected={"2": ["tag v1", "fork point of wide"]})
    assert [(commit.id, reasons) for commit, reasons in found.kept] == [("2", ("tag v1", "fork point of wide")), ("4", ("tip", "last 1"))]
    assert [commit.id for commit in found.dropped] == ["1", "3"]


def test_damaged_commits_fill_no_place() -> None:
    commits = [made(1), made(2), made(3, damaged=True, metric=0.0), made(4, damaged=True), made(5, damaged=True)]
    assert kept(Retention(last=2), commits) == [1, 2, 5]


def test_the_only_whole_commit_stays() -> None:
    commits = [made(n) for n in range(1, 6)]
    found = plan(Retention(last=2), commits, tip="5", protected={}, is_whole=lambda commit: commit.id in ("1", "2"))
    assert next((commit.id, reasons) for commit, reasons in found.kept) == ("2", ("the only whole one",))
    assert [commit.id for commit in found.dropped] == ["1", "3"]


def test_dropped_commits_are_not_dropped_again() -> None:
    commits = [made(1, dropped=True), made(2), made(3)]
    assert [commit.id for commit in plan(Retention(last=1), commits, tip="3", protected={}).dropped] == ["2"]


@given(
    st.lists(st.tuples(st.floats(allow_infinity=False) | st.none(), st.integers(0, 9), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
)
def test_a_rule_applied_once_more_drops_nothing(facts: list[Any], last: int, best: int, maximize: bool) -> None:
    step = 0
    commits = []
    for number, (metric, steps, damaged) in enumerate(facts, start=1):
        step += steps
        commits.append(made(number, metric=metric, step=step, damaged=damaged))
    rule = Retention(last=last, best=best, every_steps=7, every="3h")
    found = plan(rule, commits, tip=commits[-1].id, protected={}, maximize=maximize)
    ids = [int(commit.id) for commit, _ in found.kept]
    gone = {commit.id for commit in found.dropped}
    again = [commit.marked({"dropped"}) if commit.id in gone else commit for commit in commits]
    assert kept(rule, again, maximize=maximize) == ids
    assert len(commits) in ids
    scored = [c for c in commits if c.metric is not None and not math.isnan(c.metric) and not c.damaged]
    if scored:
        assert any(c.metric == (max if maximize else min)(s.metric for s in scored) for c in scored if int(c.id) in ids)


# -- in a repository ---------------------------------------------------------------------------------------------------------------


def state(seed: int, *, count: int = 20_000) -> dict[str, np.ndarray]:
    """A frozen backbone, and a small head that is another each time."""
    frozen = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    return {"backbone": frozen, "head": np.random.default_rng(seed).standard_normal(500).astype(np.float32)}


def bytes_of(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def test_dropped_commits_lose_their_files_and_the_others_load_exactly(desk) -> None:
    desk.open()
    commits = [desk.save(state(n)) for n in range(6)]
    report = retain(desk.repository, "main", Retention(last=2))
    assert [commit.id for commit in report.dropped] == [commit.id for commit in commits[:4]]
    assert [(commit.id, why) for commit, why in report.kept] == [(commits[4].id, ("last 2",)), (commits[5].id, ("tip", "last 2"))]
    for n, commit in enumerate(commits):
        if n >= 4:
            assert desk.load(commit) == bytes_of(state(n))
        else:
            assert desk.store.size(f"objects/{commit.id}/r00000.manifest") is None
            with pytest.raises(NotFoundError, match="dropped by retention"):
                desk.load(commit)
    assert [commit.dropped for commit in history.log(desk.repository)] == [False, False, True, True, True, True]
    assert verify(desk.repository).errors == []
    # The backbone lies where it was first written, and what is the keyframe's is still its base.
    assert [key for key in desk.store.list("objects/") if key.endswith(".safetensors")] == sorted(
        f"objects/{commits[n].id}/r00000.safetensors" for n in (0, 4, 5)
    )


def test_a_dry_run_says_the_same_and_changes_nothing(make_desk) -> None:
    desk = make_desk(cycle=2)
    desk.open()
    for n in range(7):
        desk.save(state(n, count=10))
    before = dict(desk.store._values)
    dry = retain(desk.repository, "main", Retention(last=2), dry_run=True)
    assert desk.store._values == before
    wet = retain(desk.repository, "main", Retention(last=2))
    assert (dry.kept, dry.dropped, dry.sweeps, dry.freed_nbytes) == (wet.kept, wet.dropped, wet.sweeps, wet.freed_nbytes)
    assert wet.freed_nbytes > 0
    assert (dry.dry_run, wet.dry_run) == (True, False)


def test_saves_go_on_after_every_retention_and_compress_as_before(make_desk) -> None:
    sizes = []
    for rule in (None, Retention(last=1)):
        desk = make_desk(cycle=4)
        desk.open()
        keeper = Keeper(desk.repository, "main", rule) if rule else None
        value = np.random.default_rng(1).standard_normal(50_000).astype(np.float32)
        written = []
        for n in range(10):
            value = (value + np.float32(1e-5) * np.random.default_rng(n).standard_normal(value.size)).astype(np.float32)
            # One that appears in mid-cycle, and gains nothing from a delta: its first value stays a base all the same.
            arrays = {"w": value} if n == 0 else {"w": value, "moment": np.random.default_rng(n).integers(0, 255, 9000, dtype=np.uint8)}
            commit = desk.save(arrays)
            written.append(desk.store.size(f"objects/{commit.id}/r00000.safetensors"))
            if keeper:
                keeper.apply()
            assert desk.load(commit) == bytes_of(arrays)
        sizes.append(written)
    assert sizes[0] == sizes[1]


def test_the_base_of_a_delta_stays_though_both_of_their_commits_go(make_desk) -> None:
    desk = make_desk(cycle=2)
    desk.open()
    first = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    second = (first + np.float32(1e-6)).astype(np.float32)
    commits = [desk.save({"w": w, "n": np.arange(n + 1)}) for n, w in enumerate([first, second, second, second])]
    # The last two are of another cycle, in which the tensor, a delta where it was stored, is no base.
    assert any(row.base is not None for row in desk.repository.read_locations(commits[1].id, 0).rows)
    retain(desk.repository, "main", Retention(last=1))
    assert desk.load(commits[3])["w"] == second.tobytes()
    assert verify(desk.repository).errors == []


def test_the_disk_is_bounded_for_a_frozen_backbone(make_desk) -> None:
    desk = make_desk()
    desk.open()
    keeper = Keeper(desk.repository, "main", Retention(last=2))
    rng = np.random.default_rng(7)
    backbone = {f"layer{n}": rng.standard_normal(5000).astype(np.float32) for n in range(20)}
    peak = 0
    for n in range(200):
        # Every tenth save one more layer of it is replaced: its old bytes die where they lie.
        if n % 10 == 9:
            backbone[f"layer{n // 10}"] = rng.standard_normal(5000).astype(np.float32)
        arrays = {**backbone, "head": rng.standard_normal(1000).astype(np.float32)}
        commit = desk.save(arrays, step=n)
        keeper.apply()
        if n % 20 == 19:
            assert desk.load(commit) == bytes_of(arrays)
        peak = max(
            peak, sum(len(v) for k, v in desk.store._values.items() if k.endswith((".safetensors", ".manifest")) or ".locations." in k)
        )
    raw = sum(array.nbytes for array in arrays.values())
    # The state, at most 30 % of it dead, the bases of the cycle and the second commit's head: less than twice the state.
    assert peak < 2 * raw
    assert verify(desk.repository).errors == []


# -- what protects ---------------------------------------------------------------------------------------------------------------


def test_tags_tips_and_fork_points_of_other_branches_stay(desk, make_desk) -> None:
    desk.open()
    commits = [desk.save(state(n), tags=["kept"] if n == 1 else [], name="weak" if n == 2 else None) for n in range(8)]
    branches.tag(desk.repository, "late", commits[3], run="t")
    branches.create(desk.repository, "side", commits[4], run="t")
    other = make_desk(desk.store)
    other.open("wide", start=commits[5])
    far = other.save(state(100))
    report = retain(desk.repository, "main", Retention(last=1))
    assert {commit.id: why for commit, why in report.kept} == {
        commits[1].id: ("tag kept",),
        commits[3].id: ("tag late",),
        commits[4].id: ("tip of side", "fork point of side"),
        commits[5].id: ("fork point of wide",),
        commits[7].id: ("tip", "last 1"),
    }
    assert not desk.repository.read_commit(far.id).dropped
    # A name is weak, and free again.
    head = desk.repository.refs.head("names/weak")
    assert head is not None
    assert desk.repository.read_commit(head.commit).dropped
    desk.newest = desk.repository.read_commit(commits[7].id)
    again = desk.save(state(9), name="weak")
    assert history.resolve(desk.repository, "weak").id == again.id


def test_a_tag_that_was_deleted_protects_no_more(desk) -> None:
    desk.open()
    first = desk.save(state(0), tags=["old"])
    desk.save(state(1))
    assert retain(desk.repository, "main", Retention(last=1)).dropped == ()
    branches.delete_tag(desk.repository, "old", run="t")
    assert [commit.id for commit in retain(desk.repository, "main", Retention(last=1)).dropped] == [first.id]


def test_commits_from_before_the_fork_are_not_the_branchs(desk, make_desk) -> None:
    desk.open()
    trunk = [desk.save(state(n)) for n in range(4)]
    other = make_desk(desk.store)
    other.open("wide", start=trunk[1])
    own = [other.save(state(10 + n)) for n in range(3)]
    report = retain(desk.repository, "wide", Retention(last=1))
    assert [commit.id for commit in report.dropped] == [commit.id for commit in own[:2]]
    assert not any(desk.repository.read_commit(commit.id).dropped for commit in trunk)
    assert other.load(own[2]) == bytes_of(state(12))


def test_what_a_fresh_start_left_behind_is_not_retentions(desk) -> None:
    desk.open()
    old = [desk.save(state(n)) for n in range(3)]
    desk.save(state(5), parent=None)
    desk.save(state(6))
    report = retain(desk.repository, "main", Retention(last=1))
    assert len(report.dropped) == 1
    assert not any(desk.repository.read_commit(commit.id).dropped for commit in old)


def test_what_a_save_under_way_builds_on_stays(desk) -> None:
    desk.open()
    commits = [desk.save(state(n)) for n in range(4)]
    transaction = Transaction(desk.repository, "00000000-00000000000000aa", desk.hold, uses=(commits[1].id,), owner=this_process())
    report = retain(desk.repository, "main", Retention(last=1))
    assert {commit.id: why for commit, why in report.kept}[commits[1].id] == ("a save under way",)
    transaction.abort()
    assert commits[1].id in {commit.id for commit in retain(desk.repository, "main", Retention(last=1)).dropped}


def test_the_only_whole_commit_of_a_branch_stays(desk) -> None:
    desk.open()
    commits = [desk.save({"x": np.arange(50 + n, dtype=np.float64)}) for n in range(4)]
    for commit in commits[2:]:
        desk.store.delete(f"objects/{commit.id}/r00000.safetensors")
    report = retain(desk.repository, "main", Retention(last=1))
    assert {commit.id: why for commit, why in report.kept} == {commits[1].id: ("the only whole one",), commits[3].id: ("tip", "last 1")}
    assert desk.load(commits[1]) == {"x": np.arange(51, dtype=np.float64).tobytes()}


def test_a_lost_record_stops_retention_before_anything_goes(desk) -> None:
    desk.open()
    for n in range(4):
        desk.save(state(n))
    desk.store.delete(desk.repository.refs.key("heads/main", 2))
    before = dict(desk.store._values)
    with pytest.raises(IntegrityError, match="a record was lost"):
        retain(desk.repository, "main", Retention(last=1))
    assert desk.store._values == before


def test_an_unknown_branch_is_named(desk) -> None:
    desk.open()
    with pytest.raises(NotFoundError, match=r"no branch 'nope'.*branches: main"):
        retain(desk.repository, "nope", Retention(last=1))


# -- others at the same time -----------------------------------------------------------------------------------------------------


def test_a_branch_made_while_its_commit_is_marked_takes_the_mark_back(desk, make_desk, monkeypatch) -> None:
    desk.open()
    commits = [desk.save(state(n)) for n in range(4)]
    looks: list[Callable[[], None]] = [lambda: None, lambda: branches.create(desk.repository, "side", commits[1], run="t")]
    look = survey.Survey.look

    def late(self: survey.Survey) -> survey.Sight:
        if looks:
            looks.pop(0)()
        return look(self)

    # Just before the second look: the plan does not know of the branch, and its maker has not seen the mark.
    monkeypatch.setattr(branches, "_is_dropped", lambda *_: False)
    monkeypatch.setattr(survey.Survey, "look", late)
    report = retain(desk.repository, "main", Retention(last=1))
    assert [commit.id for commit in report.dropped] == [commits[0].id, commits[2].id]
    spared = desk.repository.read_commit(commits[1].id)
    assert not spared.dropped
    assert desk.load(spared) == bytes_of(state(1))


def test_a_branch_is_not_begun_at_a_commit_that_was_dropped_meanwhile(desk) -> None:
    desk.open()
    commits = [desk.save(state(n)) for n in range(3)]
    read = desk.repository.read_commit(commits[0].id)
    retain(desk.repository, "main", Retention(last=1))
    with pytest.raises(NotFoundError, match="dropped by retention"):
        open_branch(desk.repository, "late", run="t", expected=None, start=read)
    assert not desk.repository.refs.exists("heads/late")


def test_a_fenced_writer_drops_nothing(desk) -> None:
    desk.open()
    for n in range(3):
        desk.save(state(n))

    def fenced() -> None:
        raise ConflictError("taken")

    before = dict(desk.store._values)
    with pytest.raises(ConflictError):
        Keeper(desk.repository, "main", Retention(last=1)).apply(guard=fenced)
    assert desk.store._values == before


def test_a_reader_that_holds_old_locations_finds_the_bytes_where_they_are_now(make_desk) -> None:
    desk = make_desk()
    desk.open()
    big = {"frozen": np.arange(3000, dtype=np.float32), "x": np.zeros(9000, np.float32)}
    desk.save({**big, "x": np.random.default_rng(1).standard_normal(9000).astype(np.float32)})
    for n in range(3):
        last = desk.save({**big, "x": np.random.default_rng(2 + n).standard_normal(9000).astype(np.float32)}, parent="newest")
    reader = Reader(desk.repository, threads=1)
    snapshot = reader.snapshot(last)
    other = make_desk(desk.store)
    other.open()
    other.save({**big, "x": np.random.default_rng(9).standard_normal(100).astype(np.float64)}, tags=[])
    keeper = Keeper(desk.repository, "main", Retention(last=2))
    report = keeper.apply()
    assert sum(len(sweep.rewrites) for sweep in report.sweeps) == 1
    frozen = bytearray(12_000)
    entry, place = next((e, p) for e, p in zip(snapshot.manifest.entries, snapshot.places, strict=True) if e.path[1] == "frozen")
    assert desk.store.size(place.blob.key) is None
    reader.read([(entry, place, memoryview(frozen))])
    assert bytes(frozen) == big["frozen"].tobytes()
    assert verify(desk.repository).errors == []


# -- cut off anywhere -----------------------------------------------------------------------------------------------------------


def build(make_desk: Callable[..., Any], store: MemoryStore) -> tuple[Any, dict[str, dict[str, bytes]]]:
    """A branch whose retention drops, moves and deletes; and what its commits hold."""
    desk = make_desk(store, cycle=2)
    desk.open()
    held = {}
    for n in range(6):
        arrays = {
            "frozen": np.arange(4000, dtype=np.float32),
            "slow": np.full(3000, n // 3, np.float32) + np.arange(3000, dtype=np.float32),
            "fast": np.random.default_rng(n).standard_normal(5000).astype(np.float32),
        }
        commit = desk.save(arrays, step=n, tags=["v"] if n == 3 else [])
        held[commit.id] = bytes_of(arrays)
    return desk, held


def test_an_error_at_any_mutation_leaves_the_survivors_whole_and_a_rerun_completes(make_desk) -> None:
    store = MemoryStore()
    desk, held = build(make_desk, store)
    snapshot = dict(store._values)
    rule = Retention(last=2)
    calls: list[str] = []
    store.before_mutation = lambda operation, key: calls.append(f"{operation} {key}")
    expected = retain(desk.repository, "main", rule)
    assert any(sweep.rewrites for sweep in expected.sweeps)
    final = {key for key in store._values if not key.endswith(".dropped")}
    for stop_at in range(1, len(calls) + 1):
        store._values = dict(snapshot)
        count = 0

        def fail(operation: str, key: str, stop_at: int = stop_at) -> None:
            nonlocal count
            count += 1
            if count >= stop_at:
                raise StoreError("injected fault")

        store.before_mutation = fail
        with pytest.raises(StoreError):
            retain(desk.repository, "main", rule)
        store.before_mutation = lambda operation, key: None
        for commit in [commit for commit in held if not desk.repository.read_commit(commit).dropped]:
            assert desk.load(desk.repository.read_commit(commit)) == held[commit]
        assert verify(desk.repository).errors == []
        # Who marked them lives, as far as anyone knows: what it left is taken over after an hour.
        for key in store._values:
            if key.endswith(".dropped"):
                store._written[key] -= 3601
        report = retain(desk.repository, "main", rule)
        assert not report.skipped
        names = {_without_nonce(key) for key in store._values if not key.endswith(".dropped")}
        assert names == {_without_nonce(key) for key in final}
        assert verify(desk.repository).errors == []


def _without_nonce(key: str) -> str:
    head, dash, tail = key.rpartition("-")
    return head if dash and tail.endswith(".safetensors") and "r0" in head else key
