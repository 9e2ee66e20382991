"""Commits with similar configurations: what a sweep asks."""

from __future__ import annotations

from typing import Any

import pytest

from syckpt.errors import StateError
from syckpt.hyperparams.fingerprint import fingerprint, hamming, similarity
from syckpt.objects import ids, nodes
from syckpt.repo import documents
from syckpt.repo.similarity import similar

BASE = {"lr": 1e-3, "batch_size": 64, "model": {"name": "mlp", "layers": 4, "width": 256}, "seed": 7}


def save(desk: Any, config: dict[str, Any], **facts: Any) -> Any:
    """Make a commit of this configuration, with the id that a manager would give it."""
    begin = desk.begin
    new = ids.new_commit_id

    def begin_with_fingerprint(**arguments: Any) -> Any:
        ids.new_commit_id = lambda **parts: new(**{**parts, "fingerprint": fingerprint(config)})
        try:
            return begin(**arguments)
        finally:
            ids.new_commit_id = new

    desk.begin = begin_with_fingerprint
    try:
        return desk.save(config=nodes.encode(config), fingerprint=fingerprint(config), **facts)
    finally:
        desk.begin = begin


def test_the_nearest_come_first_with_distance_estimate_and_exact_similarity(desk):
    desk.open()
    rates = [1e-3, 1.5e-3, 4e-3, 0.2]
    made = {rate: save(desk, {**BASE, "lr": rate}) for rate in reversed(rates)}
    other = save(desk, {"unrelated": True})
    found = similar(desk.repository, BASE, 5)
    assert [one.commit.id for one in found] == [*[made[rate].id for rate in rates], other.id]
    assert (found[0].distance, found[0].estimate, found[0].similarity) == (0, 1.0, 1.0)
    for one in found:
        assert one.distance == hamming(fingerprint(BASE), one.commit.fingerprint)
        assert one.estimate == 1 - one.distance / 16
        assert one.similarity == similarity(BASE, one.commit.config)
    assert found[-1].similarity == 0.0
    assert [one.commit.id for one in similar(desk.repository, BASE, 2)] == [made[1e-3].id, made[1.5e-3].id]


def test_a_configuration_counts_once_a_branch_by_its_newest_commit_that_is_there(desk, make_desk):
    desk.open()
    first, second, dropped = (save(desk, BASE) for _ in range(3))
    desk.repository.mark(dropped.id, "dropped", why="test")
    other = make_desk(desk.store, repository_id="other")
    other.open("wide", start=first)
    wide = save(other, dict(reversed(BASE.items())))  # the order of keys is no part of a configuration
    assert {one.commit.id for one in similar(desk.repository, BASE)} == {second.id, wide.id}
    for commit in (first, second):
        desk.repository.mark(commit.id, "dropped", why="test")
    found = {one.commit.branch: one.commit for one in similar(desk.repository, BASE)}
    assert (found["main"].id, found["main"].dropped) == (dropped.id, True)


def test_of_equally_similar_ones_the_newest_comes_first(desk):
    desk.open()
    made = [save(desk, {**BASE, "note": text}) for text in ("a", "b", "c")]
    distances = {one.commit.id: one.distance for one in similar(desk.repository, BASE)}
    found = [one.commit.id for one in similar(desk.repository, BASE)]
    newest_first = [commit.id for commit in reversed(made)]
    assert found == sorted(newest_first, key=lambda commit: distances[commit])


def test_types_tell_configurations_apart(desk):
    desk.open()
    integer, real = save(desk, {"x": 1}), save(desk, {"x": 1.0})
    assert [(one.commit.id, one.similarity) for one in similar(desk.repository, {"x": 1.0})] == [(real.id, 1.0), (integer.id, 0.0)]


def test_a_sweep_finds_the_nearest_among_many_by_the_fingerprint_alone(desk):
    desk.open()
    made = {exponent: save(desk, {**BASE, "lr": 2.0**-exponent}).id for exponent in range(1, 31)}
    found = similar(desk.repository, {**BASE, "lr": 2.0**-12}, 3)
    assert found[0].commit.id == made[12]
    assert {one.commit.id for one in found[1:]} <= {made[exponent] for exponent in (10, 11, 13, 14)}


def test_an_unfinished_save_and_a_damaged_record_are_left_out(desk, caplog):
    desk.open()
    good, bad = save(desk, BASE), save(desk, {**BASE, "seed": 8})
    commit, _ = desk.begin()
    packed = desk.pack(commit, {}, parent=bad)
    documents.write(desk.store, f"objects/{commit}.json", desk.describe(commit, packed, parent=bad).to_body())
    key = f"objects/{bad.id}.json"
    desk.store.replace(key, desk.store.get(key)[:-20])
    assert [one.commit.id for one in similar(desk.repository, BASE)] == [good.id]
    assert key in caplog.text


def test_a_configuration_that_no_script_could_have_written_is_left_out(desk, caplog):
    desk.open()
    good = save(desk, BASE)
    odd = desk.save(config={"dict": [["x", {"set": [1]}]]})
    assert [one.commit.id for one in similar(desk.repository, BASE)] == [good.id]
    assert f"the configuration of commit {odd.id} cannot be compared: x: a set cannot be a hyperparameter" in caplog.text


def test_nothing_is_similar_in_an_empty_repository_and_nonsense_is_refused(desk):
    assert similar(desk.repository, BASE) == []
    with pytest.raises(StateError, match="k=0"):
        similar(desk.repository, BASE, 0)
    with pytest.raises(StateError, match="cannot be a hyperparameter"):
        similar(desk.repository, {"x": object()})
