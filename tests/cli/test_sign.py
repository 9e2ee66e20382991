"""`syckpt keygen`, `sign` and `verify --trusted-key`: what they print, how they exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from syckpt.cli import main
from syckpt.testing.repositories import commit_id, make_repository


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["-C", str(root / "run"), *arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with the repository `run` of two commits and the keys `mine` and `other`."""
    make_repository(tmp_path / "run", commits=2)
    for name in ("mine", "other"):
        assert run(tmp_path, "keygen", str(tmp_path / name)).exit_code == 0
    return tmp_path


def test_keygen_prints_the_key_id_and_the_paths(tmp_path: Path) -> None:
    path = tmp_path / "key"
    result = run(tmp_path, "keygen", str(path))
    key_id, _, rest = result.stdout.partition(": ")
    assert (result.exit_code, len(key_id)) == (0, 16)
    assert rest == f"private key {path}, public key {path}.pub\n"
    document = json.loads(run(tmp_path, "keygen", f"{path}2", "--json").stdout)
    assert {**document, "key": 0} == {"key": 0, "private": f"{path}2", "public": f"{path}2.pub"}


def test_keygen_overwrites_nothing(root: Path) -> None:
    before = (root / "mine").read_bytes()
    result = run(root, "keygen", str(root / "mine"))
    assert (result.exit_code, result.stdout) == (4, "")
    assert "exists already: a key is never overwritten" in result.stderr
    assert (root / "mine").read_bytes() == before


def test_a_commit_is_signed_once(root: Path) -> None:
    first, second = (run(root, "sign", "HEAD", "--key", str(root / "mine")) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout.startswith(f"{commit_id(2)} signed by key ")
    assert second.stdout.startswith(f"{commit_id(2)} was signed already by key ")
    document = json.loads(run(root, "sign", "HEAD", "--key", str(root / "other"), "--json").stdout)
    assert (document["id"], document["signed"]) == (commit_id(2), True)


def test_a_key_that_cannot_be_used_signs_nothing(root: Path) -> None:
    (root / "mine").chmod(0o644)
    for path, status in [("mine", 8), ("none", 3), ("mine.pub", 8)]:
        result = run(root, "sign", "HEAD", "--key", str(root / path))
        assert (result.exit_code, result.stdout) == (status, "")
    assert not (root / "run/.syckpt/signatures").exists()


def test_a_commit_that_is_not_whole_is_not_signed(root: Path) -> None:
    (root / f"run/.syckpt/objects/{commit_id(2)}/r00000.manifest").unlink()
    assert run(root, "sign", "HEAD", "--key", str(root / "mine")).exit_code == 5
    assert not (root / "run/.syckpt/signatures").exists()


def test_verify_takes_a_signed_commit_and_refuses_an_unsigned_one(root: Path) -> None:
    run(root, "sign", "HEAD", "--key", str(root / "mine"))
    trusting = ["--trusted-key", str(root / "other.pub"), "--trusted-key", str(root / "mine.pub")]
    assert run(root, "verify", "HEAD", *trusting).exit_code == 0
    assert run(root, "verify", "HEAD").exit_code == 0
    for arguments in (["HEAD~1"], [], ["--quick"]):
        result = run(root, "verify", *arguments, *trusting)
        assert result.exit_code == 5
        (finding,) = [line for line in result.stdout.splitlines() if line.startswith("commit ")]
        assert finding.startswith(f"commit {commit_id(1)} is not to be trusted: expected a signature by key(s) ")
    assert json.loads(run(root, "verify", "HEAD~1", *trusting, "--json").stdout)["ok"] is False


def test_verify_refuses_a_key_that_did_not_sign(root: Path) -> None:
    run(root, "sign", "HEAD", "--key", str(root / "mine"))
    assert run(root, "verify", "HEAD", "--trusted-key", str(root / "other.pub")).exit_code == 5


def test_verify_needs_keys_that_exist(root: Path) -> None:
    assert run(root, "verify", "--trusted-key", str(root / "none.pub")).exit_code == 3


def test_verify_finds_a_damaged_signature_without_any_key(root: Path) -> None:
    run(root, "sign", "HEAD", "--key", str(root / "mine"))
    (path,) = (root / "run/.syckpt/signatures").iterdir()
    path.write_bytes(path.read_bytes().replace(b"signature", b"signaturf", 1))
    result = run(root, "verify")
    assert result.exit_code == 5
    assert result.stdout.startswith(f"signatures/{path.name}: damaged")


def test_who_signed_stands_in_show_and_that_it_is_signed_in_the_log(root: Path) -> None:
    keys = [json.loads(run(root, "sign", "HEAD", "--key", str(root / name), "--json").stdout)["key"] for name in ("mine", "other")]
    first, second = sorted(keys)
    assert f"signed by   key {first}\n            key {second}\n" in run(root, "show").stdout
    assert "signed by" not in run(root, "show", "HEAD~1").stdout
    assert json.loads(run(root, "show", "--json").stdout)["signatures"] == [first, second]
    assert json.loads(run(root, "show", "HEAD~1", "--json").stdout)["signatures"] == []
    assert run(root, "log", "--oneline").stdout == ("00000000-00000002  step 20  [signed] (HEAD -> main)\n00000000-00000001  step 10\n")
