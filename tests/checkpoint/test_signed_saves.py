"""Managers that sign what they save, and go on from nothing that is not signed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import syckpt
from syckpt import CheckpointManager, IntegrityError, NotFoundError, StateError
from syckpt.repo import signing
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory with the keys `mine` and `other`."""
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in ("mine", "other"):
        signing.keygen(folder / name)
    return folder


def test_a_manager_signs_each_save_and_goes_on_from_it(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    monkeypatch.chdir(keys)  # the writer runs elsewhere
    with CheckpointManager(root, signer="mine", trusted_keys="mine.pub") as ckpt:
        ckpt.weight = torch.arange(5.0)
        first = ckpt.save(wait=True)
    with CheckpointManager(root, signer="mine", trusted_keys=["other.pub", "mine.pub"], save_on_exit=False) as ckpt:
        ckpt.weight = torch.zeros(5)
        assert torch.equal(ckpt.weight, torch.arange(5.0))
        second = ckpt.save(wait=True)
        assert torch.equal(ckpt.load(f"{second}")["weight"], torch.arange(5.0))
        ckpt.goto(f"{first}")
        ckpt.export_ckpt("HEAD", tmp_path / "out.pt")
    repository = Repository.open(parse_root(root))
    mine = signing.Signer.open("mine").key_id
    assert [list(signing.signatures_of(repository, str(commit))) for commit in (first, second)] == [[mine], [mine]]
    assert verify(repository).errors == []
    trusted = [keys / "other.pub", keys / "mine.pub"]
    assert torch.equal(syckpt.load(root, trusted_keys=trusted)["weight"], torch.arange(5.0))
    with pytest.raises(IntegrityError, match="is not to be trusted"):
        syckpt.load(root, trusted_keys=keys / "other.pub")


def test_nothing_of_an_unsigned_commit_is_taken(tmp_path: Path, keys: Path) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root) as ckpt:
        ckpt.weight = torch.arange(5.0)
        commit = ckpt.save(wait=True)
    with pytest.raises(IntegrityError, match=f"commit {commit} is not to be trusted"):
        CheckpointManager(root, signer=keys / "mine", trusted_keys=keys / "mine.pub")
    with CheckpointManager(root, signer=keys / "mine", trusted_keys=keys / "mine.pub", auto_resume=False, save_on_exit=False) as ckpt:
        ckpt.weight = mine = torch.zeros(5)
        target = {"weight": torch.zeros(5)}
        for call in (lambda: ckpt.load(into=target), lambda: ckpt.goto("HEAD"), lambda: ckpt.export_ckpt("HEAD", tmp_path / "out.pt")):
            with pytest.raises(IntegrityError, match="found none: it is unsigned"):
                call()
    assert torch.equal(target["weight"], torch.zeros(5))
    assert torch.equal(mine, torch.zeros(5))
    assert not (tmp_path / "out.pt").exists()
    assert not (root / f".syckpt/objects/{commit}.damaged").exists()


def test_a_load_that_trusts_keys_looks_at_no_manifest_of_an_unsigned_commit(tmp_path: Path, keys: Path) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root) as ckpt:
        ckpt.weight = torch.arange(5.0)
        commit = ckpt.save(wait=True)
    # Were its manifest looked at, that would be the error.
    (root / f".syckpt/objects/{commit}/r00000.manifest").unlink()
    target = {"weight": torch.zeros(5)}
    with pytest.raises(IntegrityError, match="found none: it is unsigned"):
        syckpt.load(root, into=target, trusted_keys=[keys / "mine.pub"])
    assert torch.equal(target["weight"], torch.zeros(5))
    with pytest.raises(StateError, match="trusted_keys is empty"):
        syckpt.load(root, trusted_keys=[])


def test_a_key_that_cannot_be_used_is_an_error_of_the_constructor(tmp_path: Path, keys: Path) -> None:
    for options in ({"signer": keys / "none"}, {"trusted_keys": [keys / "none.pub"]}):
        with pytest.raises(NotFoundError, match="there is no such file"):
            CheckpointManager(tmp_path / "run", **options)
    (keys / "mine").chmod(0o644)
    with pytest.raises(StateError, match="chmod 600"):
        CheckpointManager(tmp_path / "run", signer=keys / "mine")


def test_a_key_that_went_away_fails_the_save_and_not_silently(tmp_path: Path, keys: Path) -> None:
    ckpt = CheckpointManager(tmp_path / "run", signer=keys / "mine", save_on_exit=False)
    ckpt.weight = torch.arange(5.0)
    (keys / "mine").unlink()
    with pytest.raises(NotFoundError, match=f"private key {keys}/mine: there is no such file"):
        ckpt.save(wait=True)
    ckpt.close()
    assert Repository.open(parse_root(tmp_path / "run")).store.list("objects/") == []
