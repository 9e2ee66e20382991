"""What commits and tensors cost, and what they share."""

from __future__ import annotations

import numpy as np

from syckpt.repo.retention import Retention, retain
from syckpt.repo.usage import measure, measure_tensors


def state(seed: int) -> dict[str, np.ndarray]:
    return {"frozen": np.arange(1000, dtype=np.float64), "x": np.random.default_rng(seed).integers(0, 256, 3000, dtype=np.uint8)}


def test_shared_and_exclusive_bytes_of_commits(make_desk) -> None:
    desk = make_desk(compression="none")
    desk.open()
    commits = [desk.save(state(n)) for n in range(3)]
    usage = measure(desk.repository)
    assert [(found.commit.id, found.exclusive_nbytes, found.shared_nbytes) for found in usage.commits] == [
        (commit.id, 3000, 8000) for commit in commits
    ]
    assert usage.total_nbytes == sum(map(len, desk.store._values.values()))
    assert usage.files == len(desk.store._values)
    documents = {key: len(value) for key, value in desk.store._values.items() if commits[1].id in key and ".safetensors" not in key}
    assert usage.commits[1].document_nbytes == sum(size for key, size in documents.items() if key.startswith("objects/"))
    assert (usage.dropped, usage.retained_nbytes, usage.reclaimable_nbytes) == (0, 0, 0)


def test_what_gc_would_free_is_counted(make_desk) -> None:
    desk = make_desk(compression="none")
    desk.open()
    desk.save(state(0))
    stray = "objects/00000000-00000000000000ff/r00001.safetensors"
    desk.store.create(stray, b"12345")
    desk.store._written[stray] = 1.0  # older than a day
    usage = measure(desk.repository)
    assert usage.reclaimable_nbytes == 5
    assert usage.other_nbytes == sum(map(len, desk.store._values.values())) - 11_000


def test_a_base_is_shared_by_its_deltas(make_desk) -> None:
    desk = make_desk()
    desk.open()
    base = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    for n in range(3):
        last = desk.save({"w": (base + np.float32(n * 1e-6)).astype(np.float32)})
    sizes = [(found.exclusive_nbytes, found.shared_nbytes) for found in measure(desk.repository).commits]
    rows = [desk.repository.read_locations(found.commit.id, 0).rows[0].length for found in measure(desk.repository).commits]
    assert sizes == [(0, rows[0]), (rows[1], rows[0]), (rows[2], rows[0])]
    (tensor,) = measure_tensors(desk.repository, last)
    assert (tensor.item, tensor.path, tensor.dtype, tensor.nbytes) == ("model", "model/w", "float32", 36_000)
    assert (tensor.stored_nbytes, tensor.exclusive_nbytes) == (rows[2] + rows[0], rows[2])


def test_a_tensor_under_two_paths_counts_once(make_desk) -> None:
    desk = make_desk(compression="none")
    desk.open()
    commit = desk.save({"a": np.arange(50), "b": np.arange(50)})
    assert [(tensor.nbytes, tensor.stored_nbytes) for tensor in measure_tensors(desk.repository, commit)] == [(400, 400), (400, 0)]
    assert measure(desk.repository).commits[0].exclusive_nbytes == 400


def test_bytes_of_dropped_commits_that_stay_are_shown(make_desk) -> None:
    desk = make_desk(compression="none")
    desk.open()
    for n in range(3):
        desk.save(state(n))
    retain(desk.repository, "main", Retention(last=1))
    usage = measure(desk.repository)
    assert [(found.exclusive_nbytes, found.shared_nbytes) for found in usage.commits] == [(11_000, 0)]
    assert usage.dropped == 2
    assert 8000 < usage.retained_nbytes < 13_000
    assert usage.reclaimable_nbytes == 0


def test_the_figures_add_up_to_what_is_on_the_disk(make_desk) -> None:
    desk = make_desk(cycle=3)
    desk.open()
    base = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    for n in range(7):
        desk.save({"frozen": base, "w": (base + np.float32(n * 1e-6)).astype(np.float32), "x": state(n // 2)["x"]})
    usage = measure(desk.repository)
    tables = [desk.repository.read_locations(found.commit.id, 0) for found in usage.commits]
    rows = sum(row.length for table in tables for row in table.rows)
    # Nothing is dropped: each row is needed by one commit, or by several.
    assert sum(found.exclusive_nbytes for found in usage.commits) + usage.shared_nbytes == rows
    headers = sum(blob.header_nbytes for table in tables for blob in table.blobs)
    documents = sum(len(value) for key, value in desk.store._values.items() if not key.endswith(".safetensors"))
    assert usage.other_nbytes == headers + documents
    assert usage.total_nbytes == sum(map(len, desk.store._values.values()))
    retain(desk.repository, "main", Retention(last=2))
    after = measure(desk.repository)
    alone = sum(found.exclusive_nbytes for found in after.commits)
    assert alone + after.shared_nbytes + after.other_nbytes == sum(map(len, desk.store._values.values()))
