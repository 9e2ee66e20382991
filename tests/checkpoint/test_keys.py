"""Whom a manager trusts: what it goes on from, and what keeps it from beginning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from syckpt.checkpoint.keys import Keys
from syckpt.checkpoint.resume import newest_whole
from syckpt.checkpoint.start import Arguments, Start, agree_on_start
from syckpt.dist.coordinator import SingleProcess
from syckpt.errors import IntegrityError, NotFoundError, StateError
from syckpt.repo import signing
from syckpt.repo.keys import manifest_key
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root
from syckpt.testing.repositories import commit_id, make_repository

ARGUMENTS = Arguments(
    root="",
    branch=None,
    base=None,
    run_mode="append",
    resume=True,
    maximize=False,
    async_save=True,
    when_busy="wait",
    rng=True,
    save_every="None",
    on_error="raise",
    save_on_exit=True,
    timeout_s=60,
)


class Scene:
    """An experiment of three commits on main and one on side, which forks from the first; of which some are signed by `mine`."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "run"
        self.keys = folder
        self.repository: Repository = make_repository(self.root, commits=3, branches={"side": (1, 1)})
        for name in ("mine", "other"):
            signing.keygen(folder / name)

    def sign(self, *numbers: int) -> None:
        signer = signing.Signer.open(self.keys / "mine")
        for number in numbers:
            signing.sign(self.repository, self.repository.read_commit(commit_id(number)), signer)

    def start(self, *, signer: Any = None, trusted: Any = None, **arguments: Any) -> Start:
        keys = Keys.read(signer, trusted, rank=0)
        told = replace(ARGUMENTS, root=str(self.root), **arguments)
        return agree_on_start(SingleProcess(), parse_root(self.root), told, keys=keys)[1]

    def marks(self) -> list[str]:
        return [key for key in self.repository.store.list("objects/") if key.endswith(".damaged")]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_signed_tip_is_gone_on_from(scene: Scene) -> None:
    scene.sign(3)
    assert scene.start(trusted=[scene.keys / "other.pub", scene.keys / "mine.pub"]).resumed == commit_id(3)


@pytest.mark.parametrize(
    "arguments", [{}, {"branch": "side"}, {"branch": "new"}, {"branch": "new", "base": "side"}, {"run_mode": "new_branch"}]
)
def test_an_unsigned_commit_is_neither_gone_on_from_nor_passed_over_nor_marked(scene: Scene, arguments: dict[str, Any]) -> None:
    scene.sign(1, 2)
    with pytest.raises(IntegrityError, match=r"is not to be trusted.*it is unsigned"):
        scene.start(trusted=scene.keys / "mine.pub", **arguments)
    assert scene.marks() == []
    assert "new" not in scene.repository.refs.names("heads")


def test_without_trusted_keys_nothing_needs_a_signature(scene: Scene) -> None:
    assert scene.start().resumed == commit_id(3)


def test_behind_a_damaged_commit_a_signed_one_is_looked_for(scene: Scene) -> None:
    scene.sign(2)
    scene.repository.store.delete(manifest_key(commit_id(3), 0))
    trusted = signing.load_trusted(scene.keys / "mine.pub")
    found = newest_whole(scene.repository, "main", trusted=trusted)
    assert found is not None
    assert found.id == commit_id(2)
    scene.repository.store.delete(manifest_key(commit_id(2), 0))
    with pytest.raises(IntegrityError, match=f"commit {commit_id(1)} is not to be trusted"):
        newest_whole(scene.repository, "main", trusted=trusted)
    assert scene.marks() == [f"objects/{commit_id(number)}.damaged" for number in (2, 3)]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"signer": "none"}, NotFoundError, "private key .*none: there is no such file"),
        ({"signer": "mine.pub"}, StateError, "is a public key"),
        ({"trusted": ["none.pub"]}, NotFoundError, "trusted key .*none.pub: there is no such file"),
        ({"trusted": []}, StateError, "trusted_keys is empty"),
    ],
)
def test_a_key_that_cannot_be_used_is_an_error_at_the_start(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    monkeypatch.chdir(scene.keys)
    with pytest.raises(error, match=text):
        scene.start(**options)


def test_only_rank_0_needs_the_private_key(scene: Scene) -> None:
    assert Keys.read(scene.keys / "none", None, rank=1) == Keys()
    assert Keys.read(scene.keys / "mine", None, rank=0) == Keys(signer=str(scene.keys / "mine"))


def test_a_manager_that_would_refuse_its_own_saves_is_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    mine, other = (signing.Signer.open(scene.keys / name).key_id for name in ("mine", "other"))
    Keys.read(scene.keys / "mine", [scene.keys / "mine.pub", scene.keys / "other.pub"], rank=0)
    Keys.read(scene.keys / "mine", None, rank=0)
    Keys.read(None, scene.keys / "mine.pub", rank=1)
    assert caplog.messages == []
    Keys.read(None, scene.keys / "mine.pub", rank=0)
    Keys.read(scene.keys / "other", scene.keys / "mine.pub", rank=0)
    assert caplog.messages == [
        f"this manager would {how}, and trusts {mine}: what it saves, the next start with these keys refuses"
        for how in ("sign with no key", f"sign with key {other}")
    ]


def test_a_reader_that_trusts_keys_looks_at_no_manifest_of_an_unsigned_commit(scene: Scene) -> None:
    reader = Reader(scene.repository, trusted=signing.load_trusted(scene.keys / "mine.pub"))
    commit = scene.repository.read_commit(commit_id(3))
    scene.repository.store.delete(manifest_key(commit_id(3), 0))
    with pytest.raises(IntegrityError, match="it is unsigned"):
        reader.snapshot(commit)
    scene.sign(3)
    with pytest.raises(IntegrityError, match=r"r00000\.manifest: missing"):
        reader.snapshot(commit)
