"""Every file of a repository flipped, cut, lengthened and deleted: exact values or an error that names the file, and verify sees it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import syckpt
from syckpt import CheckpointManager
from syckpt.errors import IntegrityError, NotFoundError, SyckptError
from syckpt.objects import canonical
from syckpt.objects.refs import Intent, Lease
from syckpt.repo import documents, leases, owner
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.scenes import State, clone, grow, register, same, state_at, stranger

COMMITS = 4
BLOBS = [f"objects/<{n}>/r00000.safetensors" for n in range(COMMITS)]
LOCATIONS = [f"objects/<{n}>/r00000.locations.0001" for n in range(COMMITS)]
KEYS = [
    "HEAD",
    "format.json",
    *[f"logs/refs/heads/main/{number:012d}.json" for number in range(1, 7)],
    "logs/refs/names/first/000000000001.json",
    "logs/refs/tags/base/000000000001.json",
    *[f"objects/<{n}>.json" for n in range(COMMITS)],
    *[f"objects/<{n}>/r00000.manifest" for n in range(COMMITS)],
    *LOCATIONS,
    *BLOBS,
    "refs/heads/main",
]
# A line feed at the end means nothing, and the copy for people may be missing: a writer makes it after the record.
HARMLESS = {("HEAD", "cut by one"), ("refs/heads/main", "cut by one"), ("refs/heads/main", "lengthened"), ("refs/heads/main", "last")}
HARMLESS |= {("refs/heads/main", "deleted")}

Damage = tuple[str, bytes | None]


@dataclass(frozen=True, repr=False)
class Scene:
    """A closed repository of four commits: a keyframe, two deltas, and one by a second manager; with random streams."""

    root: Path
    states: dict[str, State]

    def key(self, name: str) -> str:
        """Return a key in which `<n>` stands for commit n."""
        for number, commit in enumerate(self.states):
            name = name.replace(f"<{number}>", commit)
        return name

    @property
    def tip(self) -> str:
        return list(self.states)[-1]

    def damaged(self, name: str, data: bytes | None, target: Path) -> Path:
        """Return a copy in which one file has other bytes, or is gone."""
        path = clone(self.root, target) / ".syckpt" / self.key(name)
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        return target


def make(root: Path, compression: Any) -> Scene:
    states = grow(root, commits=COMMITS - 1, compression=compression, rng=True)
    with CheckpointManager(root, CheckpointManager.Config(compression=compression), save_on_exit=False) as ckpt:
        register(ckpt, stranger())
        ckpt.restore()
        ckpt.step_up()
        register(ckpt, state_at(COMMITS - 1))
        torch.manual_seed(COMMITS - 1)
        states[str(ckpt.save(wait=True))] = state_at(COMMITS - 1)
    return Scene(root, states)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make(tmp_path_factory.mktemp("fast") / "run", "fast")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make(tmp_path_factory.mktemp("raw") / "run", "none")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def damages(name: str, data: bytes) -> Iterator[Damage]:
    """Yield ways to damage a file, and the bytes that it then has (None: it is gone)."""
    if name.endswith(".safetensors"):
        begin = 8 + int.from_bytes(data[:8], "little")
        header = data[8:begin].rstrip(b" ")
        assert 8 + len(header) < begin, "no padding to damage"
        places = {"length": 0, "header": 8 + len(header) // 2, "padding": begin - 1, "first byte": begin, "last": len(data) - 1}
        for tensor, entry in json.loads(header).items():
            places[f"middle of {tensor}"] = begin + sum(entry["data_offsets"]) // 2
    else:
        places = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}
    for place, at in places.items():
        yield place, flipped(data, at)
    yield "emptied", b""
    yield "halved", data[: len(data) // 2]
    yield "cut by one", data[:-1]
    yield "lengthened", data + b"\n"
    yield "deleted", None


def attempt(make: Callable[[], Any], kind: type[SyckptError]) -> tuple[Any, SyckptError | None]:
    """Return a result, or the error of that kind; any other one is the test's end."""
    try:
        return make(), None
    except kind as exc:
        return None, exc


def assert_exact_or_named(load: Callable[[], State], expected: State, name: str) -> bool:
    """Return whether the values came; if not, the error names the file."""
    found, error = attempt(load, SyckptError)
    if error is not None:
        assert isinstance(error, IntegrityError | NotFoundError)
        assert name in str(error)
        return False
    assert same(found, expected)
    return True


def resume(root: Path) -> CheckpointManager:
    ckpt = CheckpointManager(root, save_on_exit=False)
    register(ckpt, stranger())
    return ckpt


def assert_resumed(ckpt: CheckpointManager, scene: Scene, key: str, log: str) -> str:
    """What was resumed is one commit, exactly; where it is not the tip, the log names the file. Returns the commit's id."""
    assert ckpt.resumed is not None
    commit = ckpt.resumed.id
    assert same({"net": ckpt.net, "notes": ckpt.notes}, scene.states[commit])
    assert ckpt.step == list(scene.states).index(commit)
    assert commit == scene.tip or key in log
    return commit


def examine(scene: Scene, name: str, damage: Damage, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = scene.key(name)
    root = scene.damaged(name, damage[1], directory / "run")
    whole = True
    for commit, state in scene.states.items():
        whole &= assert_exact_or_named(lambda commit=commit: syckpt.load(root, commit), state, key)
    whole &= assert_exact_or_named(lambda: syckpt.load(root), scene.states[scene.tip], key)

    if (name, damage[0]) in HARMLESS:
        assert whole
    else:
        report, error = attempt(lambda: verify(Repository.open(parse_root(root))), IntegrityError)
        assert any(key in text for text in (report.errors if error is None else [str(error)]))

    caplog.clear()
    ckpt, error = attempt(lambda: resume(root), IntegrityError)
    if ckpt is not None:
        assert_resumed(ckpt, scene, key, caplog.text)
    else:
        assert key in str(error)
    shutil.rmtree(root)


@pytest.mark.parametrize("name", KEYS)
def test_a_damaged_file_gives_exact_values_or_an_error_that_names_it(
    fast: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for damage in damages(name, (fast.root / ".syckpt" / fast.key(name)).read_bytes()):
        examine(fast, name, damage, tmp_path, caplog)


@pytest.mark.parametrize("name", [*BLOBS, *LOCATIONS])
def test_the_same_holds_without_compression(raw: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    for damage in damages(name, (raw.root / ".syckpt" / raw.key(name)).read_bytes()):
        examine(raw, name, damage, tmp_path, caplog)


def test_these_are_all_files_and_every_way_to_store_a_tensor(fast: Scene, raw: Scene) -> None:
    for scene in (fast, raw):
        assert Repository.open(parse_root(scene.root)).store.list() == sorted(scene.key(name) for name in KEYS)
        assert verify(Repository.open(parse_root(scene.root))).errors == []
    tables = [Repository.open(parse_root(fast.root)).read_locations(commit, 0) for commit in fast.states]
    assert [table.keyframe[1] for table in tables] == [0, 1, 2, 3]
    assert any(row.base is not None for row in tables[3].rows)
    assert any(row.base is None for row in tables[3].rows)
    assert any(len(row.leaves) > 16 for row in tables[3].rows)
    assert any(source for source, _ in tables[3].at)


NOT_RESUMED = {f"logs/refs/heads/main/{number:012d}.json" for number in range(2, 6)} | {"format.json", BLOBS[0], LOCATIONS[0]}


@pytest.mark.parametrize("name", [name for name in KEYS if name not in NOT_RESUMED])
def test_after_a_file_was_lost_a_manager_resumes_and_saves(
    fast: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    assert_goes_on(fast, name, None, tmp_path, caplog)


@pytest.mark.parametrize("name", ["logs/refs/heads/main/000000000006.json", *BLOBS])
def test_after_a_bit_flipped_a_manager_resumes_and_saves(fast: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    data = (fast.root / ".syckpt" / fast.key(name)).read_bytes()
    places = dict(damages(name, data))
    # In a blob: in what no item holds, so that it shows only when the random streams are restored.
    place = next((place for place in places if place.startswith("middle of <rng>.torch")), "middle")
    assert_goes_on(fast, name, places[place], tmp_path, caplog)


def assert_goes_on(scene: Scene, name: str, data: bytes | None, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = scene.damaged(name, data, directory / "run")
    with resume(root) as ckpt:
        ckpt.restore()
        commit = assert_resumed(ckpt, scene, scene.key(name), caplog.text)
        streams = torch.get_rng_state()
        torch.manual_seed(list(scene.states).index(commit))
        assert torch.equal(streams, torch.get_rng_state())
        register(ckpt, state_at(9))
        made = ckpt.save(wait=True).result()
    assert made.parents == (commit,)
    assert same(syckpt.load(root), state_at(9))
    assert same(syckpt.load(root, made.id), state_at(9))


# -- what a crash leaves ---------------------------------------------------------------------------------------------------

DEAD = replace(owner.this_process(), boot="another boot")


def cut_off(fast: Scene, target: Path) -> tuple[Path, str]:
    """Return a copy with what a save leaves that was killed before its ref record, and that save's id."""
    root = clone(fast.root, target)
    repository = Repository.open(parse_root(root))
    commit = "00000000-0123456789abcdef"
    intent = Intent(commit, "main", 2, "run", (fast.tip,), DEAD)
    documents.write(repository.store, f"intents/{commit}.json", intent.to_body())
    repository.store.create(f"objects/{commit}/r00000.safetensors", b"half of a blob")
    leases.write(repository, Lease("main", "run", 2, "token", DEAD, DEAD, time.time_ns() + 10**12))
    return root, commit


@pytest.mark.parametrize("place", ["whole", "first", "middle", "last", "emptied", "halved", "cut by one", "lengthened", "deleted"])
@pytest.mark.parametrize("kind", ["intents", "leases"])
def test_what_a_crash_left_may_be_damaged_too(fast: Scene, tmp_path: Path, kind: str, place: str) -> None:
    root, commit = cut_off(fast, tmp_path / "run")
    key = {"intents": f"intents/{commit}.json", "leases": "leases/main.json"}[kind]
    path = root / ".syckpt" / key
    data = path.read_bytes()
    path.unlink()
    damaged = data if place == "whole" else dict(damages(key, data))[place]
    if damaged is not None:
        path.write_bytes(damaged)
    assert same(syckpt.load(root), fast.states[fast.tip])
    errors = verify(Repository.open(parse_root(root))).errors
    assert [key in error for error in errors] == ([] if place == "whole" or (kind, place) == ("leases", "deleted") else [True])
    if place not in ("whole", "middle", "deleted"):
        return
    with resume(root) as ckpt:
        ckpt.restore()
        assert ckpt.resumed is not None
        assert ckpt.resumed.id == fast.tip
        register(ckpt, state_at(9))
        ckpt.save(wait=True)
    assert same(syckpt.load(root), state_at(9))
    left = [key for key in Repository.open(parse_root(root)).store.list() if commit in key or key.startswith("leases/")]
    # Without its intent nobody can tell that the blob is not of a save under way.
    assert left == (
        [] if kind == "leases" or place == "whole" else [*([key] * (place == "middle")), f"objects/{commit}/r00000.safetensors"]
    )


def test_a_lost_head_is_an_error_once_there_are_two_branches(fast: Scene, tmp_path: Path) -> None:
    root = clone(fast.root, tmp_path / "run")
    (root / ".syckpt/HEAD").unlink()
    assert same(syckpt.load(root), fast.states[fast.tip])
    with CheckpointManager(root, branch="other", save_on_exit=False) as ckpt:
        register(ckpt, stranger())
        ckpt.save(wait=True)
    (root / ".syckpt/HEAD").unlink()
    with pytest.raises(IntegrityError, match="HEAD: missing, so that nobody knows which of the branches main, other it named"):
        syckpt.load(root)
    assert same(syckpt.load(root, "main"), fast.states[fast.tip])
    assert "HEAD: missing" in verify(Repository.open(parse_root(root))).errors[0]


def test_a_branch_whose_records_are_all_lost_is_not_begun_afresh(fast: Scene, tmp_path: Path) -> None:
    root = clone(fast.root, tmp_path / "run")
    shutil.rmtree(root / ".syckpt/logs/refs/heads/main")
    with pytest.raises(IntegrityError, match=r"logs/refs/heads/main/000000000001\.json was lost"):
        CheckpointManager(root)
    assert same(syckpt.load(root, fast.tip), fast.states[fast.tip])


# -- at random -------------------------------------------------------------------------------------------------------------

EDITS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(min_size=1, max_size=20)),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, where: float, how: int, new: bytes) -> bytes:
    at = int(where * len(data))
    return (data[:at] + new + data[at + len(new) :], data[:at] + new + data[at:], data[:at] + data[at + len(new) :], data[:at])[how]


def assert_exact_or_refused(root: Path, scene: Scene) -> None:
    middle = list(scene.states)[1]
    for rev, commit in [("HEAD", scene.tip), ("first", next(iter(scene.states))), (middle, middle)]:
        found, error = attempt(lambda rev=rev: syckpt.load(root, rev), SyckptError)
        assert error is not None or same(found, scene.states[commit])
    attempt(lambda: verify(Repository.open(parse_root(root))), SyckptError)
    ckpt, error = attempt(lambda: resume(root), SyckptError)
    if ckpt is not None:
        assert ckpt.resumed is not None
        assert same({"net": ckpt.net, "notes": ckpt.notes}, scene.states[ckpt.resumed.id])


@settings(max_examples=100, deadline=None)
@given(edits=EDITS)
def test_random_edits_of_any_files_never_give_a_wrong_value(fast: Scene, tmp_path_factory: pytest.TempPathFactory, edits: Any) -> None:
    root = clone(fast.root, tmp_path_factory.mktemp("edited") / "run")
    for name, where, how, new in edits:
        path = root / ".syckpt" / fast.key(name)
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(edited(data, where, how, new))
    assert_exact_or_refused(root, fast)
    shutil.rmtree(root)


SEALED = [name for name in KEYS if name.endswith((".json", ".manifest", ".0001"))]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.integers(0, canonical.MAX_SAFE_INT),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(inner, (*path, key))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_forged_documents_with_a_right_seal_never_give_a_wrong_value(
    fast: Scene, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = clone(fast.root, tmp_path_factory.mktemp("forged") / "run")
    name = data.draw(st.sampled_from([*SEALED, *LOCATIONS, *LOCATIONS, *LOCATIONS]))
    path = root / ".syckpt" / fast.key(name)
    body = json.loads(path.read_bytes())["body"]
    paths = [p for p in leaves(body) if p and p[0] not in ("kind", "version")]
    *parents, last = data.draw(st.sampled_from(paths))
    place = body
    for key in parents:
        place = place[key]
    other = body
    for key in data.draw(st.sampled_from(paths)):
        other = other[key]
    # A value from elsewhere in the document, or any; or nothing.
    choice = data.draw(st.integers(0, 3))
    if choice == 0:
        del place[last]
    else:
        place[last] = json.loads(json.dumps(other)) if choice == 1 else data.draw(VALUES)
    path.unlink()
    path.write_bytes(canonical.seal(body)[0])
    assert_exact_or_refused(root, fast)
    shutil.rmtree(root)
