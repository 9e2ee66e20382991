"""The golden repository: written once by format version 1, read for ever. See `make.py`."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import syckpt
from syckpt import CheckpointManager
from syckpt.objects import address, nodes
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.scenes import same

HERE = Path(__file__).parent
MAKE = runpy.run_path(str(HERE / "make.py"))

START, DELTA, SIDE = "7989ef67-5be38a418f9f0d70", "7989ef67-d3bebed2296a0cdd", "7989ef67-222097f4a58cd5b3"
STEPS = {START: 1, DELTA: 2, SIDE: 3}
MANIFESTS = {
    START: "ea603d28ed59ad959dc955cd17ffe87bd930557692cf1442e098c4963a583e10",
    DELTA: "8bc1cbe7274b60ea6480b4796c5534ea1fbc366af4bfcadb3ac322ebd2f1895b",
    SIDE: "d4584513d91d43a1e0041a83fd0121a5a32f5e59ee4959e69b140cd6134e172b",
}
SEALS = {
    START: "5de941f5cbe3993e74880c44e5cbbd65aadeb3d568039e701ae1ce65a138a5d9",
    DELTA: "1e6ab35247531b57aab8eb329476114b8d1314c8605e6427325237e2e781b6c9",
    SIDE: "bce49dc7cd57aea72adae6e160ea2a06b41c6ed152c0fc09017a00a181d9291b",
}
ADDRESSES = {
    "dtypes/float64": "IA2nAq_LAtvwYT7EAN-mnCu1Bdh99o9R3Hp5OGR2uJI",
    "dtypes/bfloat16": "oWkTRGQB1R_KEXvrZi4mwq2wljEgsJiiWoFcq0Jc2Tw",
    "dtypes/float8_e4m3fn": "qLEPQ47u-3v5k5IrGb8QMG9TVo1XHTKZes4Wo-aprng",
    "dtypes/complex32": "Od3neAOQ6U2mSk8VuZl2cfeLDC8_BVNH2L8xdPIyD3Q",
    "dtypes/uint8": "5q5Nb-6iGGA0bmAtQzYylEFegzDk7SoizoRnz-Yu-nk",
    "dtypes/bool": "UyGJ5t7R4wPCpcppoMlLk6ETAq0Es_En-jxKi7thTik",
    "model/0.weight": "O9FL_Sv2e-JT_ponMRCObkVWjqACbahw7daG9Ic9CH0",
    "moving": "fT-5Z1PVdg59wwXlVtcetG7bqc31QU0r5UtP5K6Qy6I",
    "nested/torch/6": "oD62DYMLcKQeUl9t1JnfbI7AR5IiaTphTbX_rgCHGsU",
    "optimizer/state/model.1.weight/momentum": "t-OGvy-wL806Egpo2fqSFhx2wNytA-J0LkIl-uqo0H8",
    "table": "ezj-dl69pZkI5A-Fp16-jp5Bs8XS6jzFYLdjG6uCAWE",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a copy: the files only, as git keeps no empty directories."""
    for source in (HERE / "v1").rglob("*"):
        if source.is_file():
            target = tmp_path / "golden" / source.relative_to(HERE / "v1")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return tmp_path / "golden"


@pytest.fixture
def repository(root: Path) -> Repository:
    return Repository.open(parse_root(root))


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def plain(step: int) -> dict[str, Any]:
    """Return what a commit of `make.py` holds, as `load` returns it."""
    items = MAKE["parts"](step)
    model = items["model"].state_dict()
    optimizer = {
        "state": {name: {"steps": 1, "momentum": torch.full_like(model[name[6:]], 0.25)} for name in ("model.1.weight", "model.0.bias")},
        "param_groups": [{"lr": 0.5, "params": ["model.1.weight"]}, {"lr": 0.125, "params": ["model.0.bias"]}],
    }
    return {**items, "model": model, "optimizer": optimizer}


def test_it_is_whole_small_and_names_no_machine(repository):
    report = verify(repository)
    assert report.errors == []
    assert (report.commits, report.tensors) == (3, 47)
    store = repository.store
    assert store.list("intents/") + store.list("leases/") == []
    assert sum(store.size(key) for key in store.list()) < 100_000
    text = b"".join(store.get(key) for key in store.list() if key.endswith(".json") or key == "HEAD")
    for word in (b'"host"', b'"pid"', b"/tmp", b"/home", b"/root"):
        assert word not in text


def test_its_commits_stand_as_they_were_written(root, repository):
    assert repository.id == "ef6bc113b63cae5f33c1756acf153aba"
    assert repository.head_branch() == "main"
    log = [(c.id, c.seal, c.manifests) for c in history.log(repository)]
    assert log == [(i, SEALS[i], ((0, MANIFESTS[i]),)) for i in (DELTA, START)]
    assert [c.id for c in history.log(repository, "team/side")] == [SIDE, START]
    start, delta, side = (repository.read_commit(i) for i in (START, DELTA, SIDE))
    assert (start.parents, start.branch, start.name, start.tags) == ((), "main", "start", ("v1.0", "release/first"))
    assert (start.step, start.epoch, start.batch_idx, start.epoch_done, start.entered) == (1, 0, 1, True, False)
    assert (start.metric, start.message, start.writer) == (0.5, "the keyframe: grüße", "syckpt 0.1.0")
    assert start.config == MAKE["CONFIG"]
    assert (start.fingerprint, start.world_size, start.rng_exact) == ("7989ef67", 1, True)
    assert start.created.isoformat(timespec="seconds") == "2026-11-29T21:38:28+00:00"
    assert (delta.parents, delta.step, delta.batch_idx, delta.epoch_done) == ((START,), 3, 4, False)
    assert delta.metric != delta.metric
    assert (side.parents, side.branch, side.step, side.epoch, side.config["lr"]) == ((START,), "team/side", 2, 1, 0.25)
    for rev, commit in [
        *[("HEAD", DELTA), ("main", DELTA), ("main@{1}", START), ("HEAD~1", START), ("start", START), ("v1.0", START)],
        *[("release/first", START), ("team/side", SIDE), ("team/side~1", START), ("best", START), ("latest", SIDE), ("7989ef67-22", SIDE)],
    ]:
        assert history.resolve(repository, rev).id == commit


def test_its_tensors_have_the_addresses_that_their_bytes_have(repository):
    snapshot = Reader(repository).snapshot(repository.read_commit(DELTA))
    found = {nodes.format_path(entry.path): entry for entry in snapshot.manifest.entries}
    assert len(found) == 38
    assert {path: address.to_text(found[path].address) for path in ADDRESSES} == ADDRESSES
    # And they are those of the definition, for one tensor of a block and one of two.
    raw = bytes((37 * i + 11) % 256 for i in range(48))
    assert found["dtypes/bfloat16"].address == address.address("bfloat16", (24,), address.leaf(raw))
    data = MAKE["table"](2).numpy().tobytes()
    leaves = address.leaf(data[: 1 << 20]) + address.leaf(data[1 << 20 :])
    assert found["table"].address == address.address("int32", (300_000,), leaves)


def test_it_holds_a_keyframe_deltas_pointers_and_raw_tensors(repository):
    reader = Reader(repository)
    kinds: dict[str, list[tuple[str, bool, bool]]] = {}
    for commit in (START, DELTA, SIDE):
        snapshot = reader.snapshot(repository.read_commit(commit))
        for entry, place in zip(snapshot.manifest.entries, snapshot.places, strict=True):
            kinds.setdefault(nodes.format_path(entry.path), []).append((place.owner[0], place.row.coded, place.base is not None))
    assert kinds["moving"] == [(START, True, False), (DELTA, True, True), (SIDE, False, False)]
    assert kinds["table"] == [(START, True, False), (DELTA, True, True), (START, True, False)]
    assert kinds["dtypes/float32"] == [(START, False, False)] * 3


@pytest.mark.parametrize("commit", [START, DELTA, SIDE])
def test_every_commit_reads_as_it_was_saved_and_reading_changes_no_file(root, commit):
    before = files(root)
    loaded = syckpt.load(root, commit)
    expected = plain(STEPS[commit])
    generators, made = loaded["nested"].pop("generators"), expected["nested"].pop("generators")
    arrays, saved = loaded["nested"].pop("numpy"), expected["nested"].pop("numpy")
    assert list(loaded) == sorted(expected)
    for name, value in loaded.items():
        assert same(value, expected[name]), name
    assert loaded["nested"]["torch"][3] is loaded["nested"]["torch"][4]["tied"]
    for found, array in zip(arrays, saved, strict=True):
        assert (type(found), found.dtype, found.shape, found.tobytes()) == (type(array), array.dtype, array.shape, array.tobytes())
    assert arrays[3].flags.f_contiguous
    assert torch.equal(generators[0].get_state(), made[0].get_state())
    assert generators[1].bit_generator.state == made[1].bit_generator.state
    assert files(root) == before


def test_a_few_values_literally(root):
    loaded = syckpt.load(root, "main", items=["model", "moving", "table", "optimizer", "nested"])
    assert loaded["model"]["0.bias"].tolist() == [1.25, 2.25]
    assert loaded["moving"][0, :4].tolist() == [0.25, 115.125, 105.0, 94.875]
    assert loaded["table"][:3].tolist() == [-7, -7, 0]
    assert loaded["table"][299_998:].tolist() == [5, 5]
    assert int(loaded["table"].sum()) == 431
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.5, "params": ["model.1.weight"]}, {"lr": 0.125, "params": ["model.0.bias"]}]
    assert loaded["nested"]["beyond"][0] == 1180591620717411303424
    assert loaded["nested"][(1, "a")] == "a tuple as key"
    assert loaded["nested"]["numpy"][4]["score"].tolist() == [2.5, -4.5]


def test_the_same_saves_in_a_new_repository_have_the_same_manifest_seals(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # its streams are no part of the golden state
    made = MAKE["build"](tmp_path)
    repository = Repository.open(parse_root(tmp_path))
    commits = [repository.read_commit(commit) for commit in made]
    assert [commit.fingerprint for commit in commits] == ["7989ef67"] * 3
    assert [commit.manifests for commit in commits] == [((0, MANIFESTS[commit]),) for commit in (START, DELTA, SIDE)]


def test_training_goes_on_from_it(root):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    # One group, in another order: state follows the names.
    optimizer = MAKE["Momentum"]([{"params": [model[0].bias], "lr": 9.0}, {"params": [model[1].weight], "lr": 9.0}], lr=9.0)
    with CheckpointManager(root) as ckpt:
        assert (ckpt.resumed.id, ckpt.step, ckpt.epoch, ckpt.batch_idx) == (DELTA, 3, 0, 4)
        ckpt.optimizer, ckpt.model, ckpt.moving = optimizer, model, torch.zeros(32, 64)
        report = ckpt.restore()
        assert report.rng_exact
        assert report.unexpected == ["dtypes", "nested", "table"]
        assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]
        assert optimizer.state[model[0].bias]["momentum"].tolist() == [0.25, 0.25]
        assert model[0].bias.tolist() == [1.25, 2.25]
        assert torch.equal(ckpt.moving, MAKE["moving"](2))
        ckpt.step_up()
        ckpt.moving.add_(0.125)
    commit = ckpt.log()[0]
    assert (commit.parents, commit.step, commit.generation) == ((DELTA,), 4, 2)
    locations = Repository.open(parse_root(root)).read_locations(commit.id, 0)
    assert locations.keyframe == (START, 2)
    assert [row.base is not None for row in locations.rows if row.nbytes == 8192] == [True]


def test_its_random_streams_are_those_that_were_saved(root):
    with CheckpointManager(root) as ckpt:
        ckpt.restore()
        drawn = torch.rand(3), np.random.rand(3).tolist()
    torch.manual_seed(3)
    np.random.seed(2)
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1] == np.random.rand(3).tolist()
