"""Keys, signatures over commits, and what a signature binds."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from syckpt.errors import ConflictError, IntegrityError, NotFoundError, StateError, StoreError
from syckpt.objects import canonical
from syckpt.objects.commit import Commit
from syckpt.repo import documents, history, signing
from syckpt.repo.keys import locations_key, manifest_key, mark_key
from syckpt.repo.repacking import repack
from syckpt.repo.retention import Retention, retain
from syckpt.repo.signing import Signer, Trusted, findings, keygen, load_trusted, require_signed, sign, signatures_of
from syckpt.repo.transaction import recover
from syckpt.repo.verify import verify

PEM, PKCS8, OPEN = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()


class Keys:
    """Pairs of keys by name, made as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            keygen(path)
        return path

    def signer(self, name: str) -> Signer:
        return Signer.open(self.path(name))

    def trust(self, *names: str) -> Trusted:
        return load_trusted([f"{self.path(name)}.pub" for name in names])


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def signed(desk, keys: Keys) -> Commit:
    """The second of two commits, signed by `team`."""
    desk.open()
    desk.save()
    commit = desk.save({"x": np.arange(4, dtype=np.float32) + 1})
    assert sign(desk.repository, commit, keys.signer("team"))
    return commit


def signature(commit: Commit, signer: Signer) -> str:
    return f"signatures/{commit.id}.{signer.key_id}.json"


def overwrite(desk, key: str, data: bytes) -> None:
    desk.store.replace(key, data)


# -- keys ----------------------------------------------------------------------------------------------------------------------


def test_a_pair_of_keys_is_made_that_only_its_owner_may_read(tmp_path: Path) -> None:
    key_id = keygen(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert Signer.open(tmp_path / "key").key_id == key_id
    assert list(load_trusted(tmp_path / "key.pub").keys) == [key_id]
    assert len(key_id) == 16
    assert (tmp_path / "key").read_text().startswith("-----BEGIN PRIVATE KEY-----\n")
    assert (tmp_path / "key.pub").read_text().startswith("-----BEGIN PUBLIC KEY-----\n")


def test_the_key_id_is_that_of_the_format(tmp_path: Path) -> None:
    pem = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAbjy29BY4xqGov50ubvnuyuLhGPo14uhLC1P877Sh6Ug=\n-----END PUBLIC KEY-----\n"
    (tmp_path / "key.pub").write_text(pem)
    assert list(load_trusted(tmp_path / "key.pub").keys) == ["7038ee4a73ea7629"]


@pytest.mark.parametrize("taken", ["key", "key.pub"])
def test_no_key_is_ever_overwritten(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("mine")
    with pytest.raises(ConflictError, match=f"{taken} exists already"):
        keygen(tmp_path / "key")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(taken, "mine")]


def test_a_dangling_link_counts_as_a_key_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConflictError):
        keygen(tmp_path / "key")
    assert not (tmp_path / "elsewhere").exists()


def test_keys_need_a_directory(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a directory"):
        keygen(tmp_path / "no" / "key")


def wrong_keys(folder: Path) -> dict[str, tuple[Path, type[Exception], str]]:
    def write(name: str, data: bytes, mode: int = 0o600) -> Path:
        path = folder / name
        path.write_bytes(data)
        path.chmod(mode)
        return path

    own = Ed25519PrivateKey.generate()
    plain = own.private_bytes(PEM, PKCS8, OPEN)
    locked = own.private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"secret"))
    return {
        "missing": (folder / "missing", NotFoundError, "there is no such file"),
        "directory": (folder, StoreError, "cannot be read"),
        "open to others": (write("open", plain, 0o640), StateError, "mode 0640.*chmod 600"),
        "garbage": (write("garbage", b"\0\1\2"), StateError, "expected an unencrypted Ed25519 key"),
        "empty": (write("empty", b""), StateError, "expected an unencrypted Ed25519 key"),
        "cut short": (write("short", plain[:60]), StateError, "expected an unencrypted Ed25519 key"),
        "encrypted": (write("locked", locked), StateError, "expected an unencrypted Ed25519 key"),
        "of another kind": (
            write("ec", ec.generate_private_key(ec.SECP256R1()).private_bytes(PEM, PKCS8, OPEN)),
            StateError,
            "expected an Ed25519 key, found ",
        ),
    }


@pytest.mark.parametrize(
    "kind", ["missing", "directory", "open to others", "garbage", "empty", "cut short", "encrypted", "of another kind"]
)
def test_a_private_key_that_cannot_be_used_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path, error, text = wrong_keys(tmp_path)[kind]
    with pytest.raises(error, match=text) as caught:
        Signer.open(path)
    assert str(path) in str(caught.value)


def test_a_usable_key_is_named_by_its_absolute_path(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.path("team")
    monkeypatch.chdir(tmp_path)
    assert Signer.open("team").path == str(tmp_path / "team")


def test_the_two_halves_of_a_pair_are_told_apart(keys: Keys) -> None:
    path = keys.path("team")
    with pytest.raises(StateError, match="is a public key; the private one is the file without"):
        Signer.open(f"{path}.pub")
    with pytest.raises(StateError, match=f"is a private key, which only the writer may see; give {path}.pub"):
        load_trusted([path])


def test_a_trusted_key_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "garbage.pub").write_bytes(b"ssh-ed25519 AAAA")
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "x.pub").write_bytes(x25519.X25519PrivateKey.generate().public_key().public_bytes(PEM, info))
    for name, error, text in [
        ("missing.pub", NotFoundError, f"syckpt keygen {tmp_path}/missing`"),
        ("garbage.pub", StateError, "expected an Ed25519 public key"),
        ("x.pub", StateError, "expected an Ed25519 key, found X25519PublicKey"),
    ]:
        with pytest.raises(error, match=text):
            load_trusted([tmp_path / name])


def test_trusting_no_key_is_no_way_to_trust_everything() -> None:
    with pytest.raises(StateError, match="trusted_keys is empty"):
        load_trusted([])


def test_without_cryptography_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    for call in (lambda: keygen(tmp_path / "key"), lambda: Signer.open(tmp_path / "key"), lambda: load_trusted(tmp_path / "key.pub")):
        with pytest.raises(StateError, match=r'pip install "syckpt\[sign\]"'):
            call()
    assert list(tmp_path.iterdir()) == []


def test_the_module_needs_no_cryptography_until_a_key_is_used() -> None:
    code = "import sys, syckpt.repo.transaction, syckpt.repo.verify; assert 'cryptography' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- commits -------------------------------------------------------------------------------------------------------------------


def test_a_signed_commit_is_taken_by_whoever_trusts_the_key(desk, keys: Keys, signed: Commit) -> None:
    require_signed(desk.repository, signed, keys.trust("team"))
    require_signed(desk.repository, signed, keys.trust("other", "team"))


def test_an_unsigned_commit_is_refused_with_the_way_on(desk, keys: Keys, signed: Commit) -> None:
    parent = desk.repository.read_commit(signed.parents[0])
    with pytest.raises(IntegrityError) as caught:
        require_signed(desk.repository, parent, keys.trust("team"))
    assert str(caught.value) == (
        f"commit {parent.id} is not to be trusted: expected a signature by key(s) {keys.signer('team').key_id}, found none: it is unsigned;"
        f" if you know where it comes from, `syckpt sign {parent.id} --key PATH`, or trust the key that signed it"
    )


def test_a_signature_by_none_of_the_trusted_keys_is_refused_naming_both(desk, keys: Keys, signed: Commit) -> None:
    with pytest.raises(IntegrityError) as caught:
        require_signed(desk.repository, signed, keys.trust("b", "c"))
    expected = ", ".join(keys.signer(name).key_id for name in "bc")
    assert f"expected a signature by key(s) {expected}, found {keys.signer('team').key_id};" in str(caught.value)


def test_a_commit_may_have_signatures_by_several_keys_of_which_one_suffices(desk, keys: Keys, signed: Commit) -> None:
    assert sign(desk.repository, signed, keys.signer("b"))
    assert sorted(signatures_of(desk.repository, signed.id)) == sorted(keys.signer(name).key_id for name in ("team", "b"))
    desk.store.delete(signature(signed, keys.signer("team")))
    require_signed(desk.repository, signed, keys.trust("team", "b"))
    with pytest.raises(IntegrityError, match="is not to be trusted"):
        require_signed(desk.repository, signed, keys.trust("team"))


def test_one_good_signature_suffices_beside_a_damaged_one(desk, keys: Keys, signed: Commit) -> None:
    sign(desk.repository, signed, keys.signer("b"))
    overwrite(desk, signature(signed, keys.signer("team")), b"junk")
    require_signed(desk.repository, signed, keys.trust("team", "b"))


def test_signing_twice_changes_nothing(desk, keys: Keys, signed: Commit) -> None:
    key = signature(signed, keys.signer("team"))
    before = desk.store.get(key)
    assert sign(desk.repository, signed, keys.signer("team")) is False
    assert desk.store.get(key) == before


def test_signing_over_a_damaged_signature_says_so(desk, keys: Keys, signed: Commit) -> None:
    key = signature(signed, keys.signer("team"))
    overwrite(desk, key, desk.store.get(key)[:-9])
    with pytest.raises(IntegrityError, match=key):
        sign(desk.repository, signed, keys.signer("team"))


def test_every_flipped_byte_of_a_signature_is_found_with_and_without_the_key(desk, keys: Keys, signed: Commit) -> None:
    key, trusted = signature(signed, keys.signer("team")), keys.trust("team")
    whole = desk.store.get(key)
    assert findings(desk.repository) == []
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << offset % 8
        overwrite(desk, key, bytes(damaged))
        with pytest.raises(IntegrityError, match=key):
            require_signed(desk.repository, signed, trusted)
        (found,) = findings(desk.repository)
        assert found.startswith(key)
    assert verify(desk.repository).errors == [found.removesuffix("; run `syckpt verify`")]


def test_every_cut_of_a_signature_is_found(desk, keys: Keys, signed: Commit) -> None:
    key = signature(signed, keys.signer("team"))
    whole = desk.store.get(key)
    for length in range(len(whole)):
        overwrite(desk, key, whole[:length])
        with pytest.raises(IntegrityError, match=key):
            require_signed(desk.repository, signed, keys.trust("team"))


def test_a_signature_of_another_commit_does_not_fit(desk, keys: Keys, signed: Commit) -> None:
    other = desk.save({"x": np.arange(4, dtype=np.float32) + 2})
    body, _ = documents.read(desk.store, signature(signed, keys.signer("team")), kind="signature")
    forged = {**body, "commit": other.id, "seal": other.seal}
    for attempt, text in [(body, "was made for another commit"), (forged, "did not sign what commit")]:
        documents.write(desk.store, signature(other, keys.signer("team")), attempt, replace=True)
        with pytest.raises(IntegrityError, match=text):
            require_signed(desk.repository, other, keys.trust("team"))


def test_a_commit_rewritten_with_a_good_seal_is_refused(desk, keys: Keys, signed: Commit) -> None:
    body, _ = documents.read(desk.store, f"objects/{signed.id}.json", kind="commit")
    seal = documents.write(desk.store, f"objects/{signed.id}.json", {**body, "step": 7}, replace=True)
    changed = desk.repository.read_commit(signed.id)
    with pytest.raises(IntegrityError, match=f"was made for another seal: expected {seal}, found '{signed.seal}'"):
        require_signed(desk.repository, changed, keys.trust("team"))
    mine = signature(signed, keys.signer("team"))
    signed_body, _ = documents.read(desk.store, mine, kind="signature")
    documents.write(desk.store, mine, {**signed_body, "seal": seal}, replace=True)
    with pytest.raises(IntegrityError, match="did not sign what commit"):
        require_signed(desk.repository, changed, keys.trust("team"))


def test_the_bytes_that_are_checked_are_those_that_were_read(desk, keys: Keys, signed: Commit) -> None:
    """The attacker puts the signed document back between the reader's two looks at it."""
    key = f"objects/{signed.id}.json"
    good = desk.store.get(key)
    body, _ = documents.read(desk.store, key, kind="commit")
    documents.write(desk.store, key, {**body, "step": 7}, replace=True)
    changed = desk.repository.read_commit(signed.id)
    overwrite(desk, key, good)
    with pytest.raises(IntegrityError, match="another document than expected"):
        require_signed(desk.repository, changed, keys.trust("team"))


def test_a_signature_over_a_file_is_none_over_a_commit(desk, keys: Keys, signed: Commit) -> None:
    signer = keys.signer("b")
    body, seal = documents.read(desk.store, f"objects/{signed.id}.json", kind="commit")
    wrong = signing.address.to_text(signer.sign(signing.FILE + canonical.dumps(body)))
    record = {"kind": "signature", "version": 1, "commit": signed.id, "seal": seal, "key": signer.key_id, "signature": wrong}
    documents.write(desk.store, signature(signed, signer), record)
    with pytest.raises(IntegrityError, match="did not sign"):
        require_signed(desk.repository, signed, keys.trust("b"))


def test_what_is_below_a_signed_commit_cannot_be_swapped(desk, keys: Keys, signed: Commit) -> None:
    parent = desk.repository.read_commit(signed.parents[0])
    manifest, locations = manifest_key(signed.id, 0), locations_key(signed.id, 0, 1)
    kept = {key: desk.store.get(key) for key in (manifest, locations)}
    overwrite(desk, manifest, desk.store.get(manifest_key(parent.id, 0)))
    require_signed(desk.repository, signed, keys.trust("team"))
    with pytest.raises(IntegrityError, match="another document than expected"):
        desk.load(signed)
    overwrite(desk, manifest, kept[manifest])
    # The bytes of the parent's tensor in the place of the signed commit's own, with locations that say so.
    body, _ = documents.read(desk.store, locations_key(parent.id, 0, 1), kind="locations")
    body |= {"commit": signed.id, "manifest": dict(signed.manifests)[0]}
    documents.write(desk.store, locations, body, replace=True)
    with pytest.raises(IntegrityError, match="model"):
        desk.load(signed)
    overwrite(desk, locations, kept[locations])
    assert desk.load(signed) == {"x": (np.arange(4, dtype=np.float32) + 1).tobytes()}


def test_a_swapped_parent_is_found_by_its_signed_child(desk, signed: Commit) -> None:
    body, _ = documents.read(desk.store, f"objects/{signed.parents[0]}.json", kind="commit")
    documents.write(desk.store, f"objects/{signed.parents[0]}.json", {**body, "message": "another"}, replace=True)
    with pytest.raises(IntegrityError, match="another document than expected"):
        list(history.walk(desk.repository, signed))


def test_signatures_outlive_retention_and_repack(make_desk, keys: Keys) -> None:
    def state(value: float) -> dict[str, np.ndarray]:
        return {"frozen": np.arange(500, dtype=np.float32), "moving": np.full(40, value, dtype=np.float32)}

    desk = make_desk(cycle=1)
    desk.open()
    commits = [desk.save(state(step)) for step in range(3)]
    for commit in commits:
        assert sign(desk.repository, commit, keys.signer("team"))
    assert [commit.id for commit in retain(desk.repository, "main", Retention(last=1)).dropped] == [commits[0].id, commits[1].id]
    # Of what was dropped less than an hour ago by a process that lives others leave the bytes alone.
    desk.store._written[mark_key(commits[0].id, "dropped")] -= 3601
    repack(desk.repository, dead_share=0.0)
    # What is left of the first is the frozen tensor in a new place, of the second nothing.
    left = [[key.rpartition("/")[2] for key in desk.store.list(f"objects/{commit.id}/")] for commit in commits[:2]]
    assert [[name.partition("-")[0] for name in names] for names in left] == [["r00000.0002", "r00000.locations.0002"], []]
    for commit in commits:
        require_signed(desk.repository, desk.repository.read_commit(commit.id), keys.trust("team"))
    assert findings(desk.repository) == []
    assert verify(desk.repository).errors == []
    assert desk.load(commits[2])["frozen"] == state(2)["frozen"].tobytes()


def test_strange_files_among_the_signatures_are_found(desk, signed: Commit) -> None:
    overwrite(desk, "signatures/notes.txt", b"hello")
    stranger = "signatures/00000000-0000000000000000.0011223344556677.json"
    overwrite(desk, stranger, desk.store.get(next(iter(signatures_of(desk.repository, signed.id).values()))))
    assert findings(desk.repository) == [
        f"{stranger}: belongs to no commit: objects/00000000-0000000000000000.json is missing",
        "signatures/notes.txt: is no signature: expected signatures/<commit id>.<key id>.json",
    ]


# -- a save --------------------------------------------------------------------------------------------------------------------


def publish(desk, signer: Signer | None, *, on_packed: Callable[[], None] = lambda: None) -> Commit:
    """Make a save that is signed before it is visible."""
    commit, transaction = desk.begin()
    try:
        packed = desk.pack(commit, {"x": np.arange(8, dtype=np.float32)}, parent=desk.newest)
        made = desk.describe(commit, packed, parent=desk.newest)
        on_packed()
        desk.hold, published = transaction.publish(made, hold=desk.hold, reader=desk.reader, locations=[packed.locations], signer=signer)
    except BaseException:
        desk.packer.failed()
        transaction.abort()
        raise
    desk.packer.published()
    desk.newest = published
    return published


class Stop(BaseException):
    """The process ends here."""


def test_a_commit_is_signed_before_it_is_visible(desk, keys: Keys) -> None:
    desk.open()
    seen: list[str] = []
    desk.store.before_mutation = lambda operation, key: seen.append(key)
    commit = publish(desk, keys.signer("team"))
    order = [f"objects/{commit.id}.json", signature(commit, keys.signer("team")), "logs/refs/heads/main/000000000002.json"]
    first = [next(index for index, key in enumerate(seen) if key == wanted) for wanted in order]
    assert first == sorted(first)
    require_signed(desk.repository, commit, keys.trust("team"))


def mutations(make_desk, keys: Keys) -> int:
    desk = make_desk()
    desk.open()
    count: list[str] = []
    desk.store.before_mutation = lambda operation, key: count.append(key)
    publish(desk, keys.signer("team"))
    return len(count)


def test_wherever_a_signed_save_fails_or_dies_it_leaves_all_of_it_or_nothing(make_desk, keys: Keys) -> None:
    """Also its signature; and whoever recovers needs no key."""
    total = mutations(make_desk, keys)
    outcomes = set()
    for number in range(total):
        for died in (False, True):
            desk = make_desk()
            desk.open()
            left = [number]

            def fault(operation: str, key: str, left: list[int] = left, died: bool = died) -> None:
                left[0] -= 1
                if (left[0] < 0) if died else left[0] == -1:
                    raise Stop if died else OSError(5, "Input/output error")

            desk.store.before_mutation = fault
            try:
                publish(desk, keys.signer("team"))
            except (Stop, StoreError):
                pass
            desk.store.before_mutation = lambda operation, key: None
            next_desk = make_desk(desk.store, run="next")
            hold = next_desk.open()
            recover(next_desk.repository, hold)
            outcomes.add(hold.tip is not None)
            if hold.tip is None:
                assert not desk.store.list("signatures/"), (number, died)
            else:
                require_signed(next_desk.repository, next_desk.newest, keys.trust("team"))
            assert verify(next_desk.repository).errors == []
            assert not desk.store.list("intents/")
    assert outcomes == {True, False}


def test_a_save_that_cannot_be_signed_is_not_made(desk, keys: Keys) -> None:
    desk.open()

    class Broken(Signer):
        def sign(self, message: bytes) -> bytes:
            raise StateError("the key went away")

    signer = keys.signer("team")
    with pytest.raises(StateError, match="the key went away"):
        publish(desk, Broken(signer.path, signer._key))
    assert desk.store.list("objects/") == desk.store.list("signatures/") == desk.store.list("intents/") == []
