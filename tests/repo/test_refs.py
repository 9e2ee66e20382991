"""Refs: numbered records, created once; the highest one is the truth."""

from __future__ import annotations

import threading

import pytest

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from syckpt.objects.refs import RefRecord
from syckpt.repo import documents
from syckpt.repo.refs import Refs
from syckpt.stores.memory import MemoryStore

A, B = "00000000-000000000000000a", "00000000-000000000000000b"


def append(refs: Refs, after: int, commit: str | None = A, *, ref: str = "heads/main", run: str = "run", reason: str = "save") -> RefRecord:
    return refs.append(ref, after=after, commit=commit, commit_seal="ab", previous=None, generation=1, run=run, reason=reason)


def test_records_are_numbered_from_one_and_stand_where_the_format_says():
    store = MemoryStore()
    refs = Refs(store)
    assert refs.head("heads/main") is None
    first, second = append(refs, 0), append(refs, 1, B, run="other")
    append(refs, 0, ref="heads/team/x")
    append(refs, 0, ref="tags/v1")
    assert store.list() == [
        "logs/refs/heads/main/000000000001.json",
        "logs/refs/heads/main/000000000002.json",
        "logs/refs/heads/team%2Fx/000000000001.json",
        "logs/refs/tags/v1/000000000001.json",
    ]
    assert (first.number, second.number) == (1, 2)
    assert refs.head("heads/main") == second
    assert refs.read("heads/main", 1) == first
    assert refs.numbers("heads/main") == [1, 2]
    assert refs.names("heads") == ["main", "team/x"]
    assert refs.names("names") == []
    assert refs.exists("tags/v1")
    assert not refs.exists("heads/team")
    body, _ = documents.read(store, "logs/refs/heads/main/000000000002.json", kind="ref")
    assert body.pop("time_ns").isdigit()
    assert body == {
        "kind": "ref",
        "version": 1,
        "ref": "heads/main",
        "number": 2,
        "commit": B,
        "commit_seal": "ab",
        "previous": None,
        "generation": 1,
        "run": "other",
        "reason": "save",
    }


def test_of_many_racers_for_a_number_exactly_one_wins_and_the_others_are_told_who():
    store = MemoryStore()
    append(Refs(store), 0)
    barrier = threading.Barrier(8)
    outcomes: list[str] = []

    def race(run: str) -> None:
        barrier.wait()
        for _ in range(3):
            try:
                outcomes.append(f"won {append(Refs(store), 1, run=run).run}")
            except ConflictError as exc:
                outcomes.append(str(exc))

    threads = [threading.Thread(target=race, args=(f"run-{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = Refs(store).read("heads/main", 2).run
    assert [o for o in outcomes if o.startswith("won")] == [f"won {winner}"]
    losers = [o for o in outcomes if not o.startswith("won")]
    assert len(losers) == 23
    assert all(f"generation 1 of run {winner} " in text and "branch=" in text for text in losers)


def test_ones_own_record_whose_answer_was_lost_is_success():
    class Forgetful(MemoryStore):
        def create(self, key, data):
            super().create(key, data)
            raise StoreError("no answer")

    refs = Refs(Forgetful())
    assert append(refs, 0).number == 1
    assert refs.numbers("heads/main") == [1]


def test_a_store_that_refuses_is_a_store_error():
    class Full(MemoryStore):
        def create(self, key, data):
            raise StoreError("no space")

    with pytest.raises(StoreError, match="no space"):
        append(Refs(Full()), 0)


def make(count: int) -> tuple[MemoryStore, Refs]:
    store = MemoryStore()
    refs = Refs(store)
    for number in range(count):
        refs.write_copy(append(refs, number, f"00000000-{number:016x}"))
    return store, refs


def test_a_lost_record_in_between_is_found():
    store, refs = make(4)
    store.delete("logs/refs/heads/main/000000000002.json")
    with pytest.raises(IntegrityError, match=r"000000000002.json: missing"):
        refs.head("heads/main")
    with pytest.raises(IntegrityError, match=r"000000000002.json: missing"):
        refs.names("heads")


def test_a_lost_newest_record_is_found_by_the_copy_that_is_ahead():
    store, refs = make(3)
    store.delete("logs/refs/heads/main/000000000003.json")
    with pytest.raises(
        IntegrityError, match=r"refs/heads/main: names '00000000-0000000000000002', which no record names.*000000000003.json was lost"
    ):
        refs.head("heads/main")


def test_all_records_lost_is_found_by_the_copy():
    store, refs = make(2)
    for key in store.list("logs/"):
        store.delete(key)
    with pytest.raises(IntegrityError, match=r"000000000001.json was lost"):
        refs.head("heads/main")
    assert refs.names("heads") == ["main"]
    problems = []
    assert refs.heads("heads", problems=problems) == {}
    assert [str(problem).partition(":")[0] for problem in problems] == ["refs/heads/main"]


def test_a_copy_that_lags_or_is_gone_is_fine_and_one_of_nonsense_is_not():
    store, refs = make(3)
    for text in (b"00000000-0000000000000000\n", b"00000000-0000000000000001"):
        store.replace("refs/heads/main", text)
        assert refs.head("heads/main").number == 3
    store.delete("refs/heads/main")
    assert refs.head("heads/main").number == 3
    for text in (b"", b"main", b"\xff\xfe"):
        store.replace("refs/heads/main", text)
        with pytest.raises(IntegrityError, match=r"^refs/heads/main: "):
            refs.head("heads/main")


def test_a_damaged_newest_record_is_an_error_and_a_record_in_a_strange_place_too():
    store, refs = make(2)
    good = store.get("logs/refs/heads/main/000000000002.json")
    store.replace("logs/refs/heads/main/000000000002.json", good[:-20] + b"x" + good[-19:])
    with pytest.raises(IntegrityError, match=r"logs/refs/heads/main/000000000002.json"):
        refs.head("heads/main")
    assert refs.exists("heads/main")
    store.replace("logs/refs/heads/main/000000000002.json", store.get("logs/refs/heads/main/000000000001.json"))
    with pytest.raises(IntegrityError, match="is record 1 of heads/main, expected 2"):
        refs.head("heads/main")
    store.delete("logs/refs/heads/main/000000000002.json")
    store.create("logs/refs/heads/other/000000000001.json", good)
    with pytest.raises(IntegrityError, match="expected 1 of heads/other"):
        refs.head("heads/other")
    with pytest.raises(NotFoundError):
        refs.read("heads/main", 9)


def test_the_newest_record_that_names_a_commit_is_found_and_damaged_ones_only_by_whoever_passes_them_over():
    store, refs = make(0)
    for number, (commit, generation) in enumerate([(A, 1), (B, 1), (A, 2), (B, 3)]):
        refs.append(
            "heads/main", after=number, commit=commit, commit_seal="ab", previous=None, generation=generation, run="run", reason="save"
        )
    assert refs.find("heads/main", A).number == 3
    assert refs.find("heads/main", "00000000-000000000000000c") is None
    assert refs.find("heads/other", A) is None
    assert refs.find("heads/main", A, since=3).number == 3  # where the search ends is looked at, too
    store.replace(refs.key("heads/main", 3), b"{")
    with pytest.raises(IntegrityError, match=r"000000000003\.json"):
        refs.find("heads/main", A)
    problems = []
    assert refs.find("heads/main", A, problems=problems).number == 1
    assert refs.find("heads/main", A, since=2, problems=problems) is None
    assert [str(problem).partition(":")[0] for problem in problems] == [refs.key("heads/main", 3)] * 2
    assert refs.find("heads/main", B).number == 4


def test_a_deleted_branch_exists_no_more_but_keeps_its_numbers():
    _, refs = make(2)
    refs.write_copy(append(refs, 2, None, reason="delete"))
    assert not refs.exists("heads/main")
    assert refs.names("heads") == []
    assert refs.head("heads/main").commit is None
    assert append(refs, 3).number == 4


def test_files_of_other_names_beside_the_records_do_not_count():
    store, refs = make(1)
    for name in ("2.json", "000000000002.json.tmp", "x", "0000000000002.json"):
        store.create(f"logs/refs/heads/main/{name}", b"?")
    assert refs.numbers("heads/main") == [1]
