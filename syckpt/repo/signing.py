"""Signatures over commits and standalone files, and the keys that make and check them (FORMAT.md, section 11).

A signature binds content, not locations: it survives repack, retention and copies. Whoever trusts keys asks `require_signed` before
anything of a commit is believed. `cryptography` is imported when a key is first used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from blake3 import blake3

from syckpt.errors import ConflictError, FormatError, IntegrityError, NotFoundError, StateError, StoreError
from syckpt.objects import address, canonical
from syckpt.objects.checks import Fields
from syckpt.objects.commit import Commit
from syckpt.repo import documents
from syckpt.repo.keys import SIGNATURE, commit_key, signature_key
from syckpt.repo.repository import Repository

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "COMMIT",
    "FILE",
    "KeyFile",
    "Signer",
    "Trusted",
    "all_signatures",
    "findings",
    "keygen",
    "load_trusted",
    "remove",
    "require_signed",
    "sign",
    "signatures_of",
]

COMMIT = b"syckpt commit signature v1\n"
FILE = b"syckpt file signature v1\n"
"""What is signed begins with one of these, so that a signature of one kind is none of the other."""

KeyFile: TypeAlias = "str | os.PathLike[str]"

_MAX_KEY_NBYTES = 1 << 16


# -- keys ----------------------------------------------------------------------------------------------------------------------


def _serialization() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as exc:
        raise StateError(f'signatures need the package cryptography ({exc}): pip install "syckpt[sign]"') from exc
    return serialization


def _raw(public: Ed25519PublicKey) -> bytes:
    form = _serialization()
    return bytes(public.public_bytes(form.Encoding.Raw, form.PublicFormat.Raw))


def _key_id(public: Ed25519PublicKey) -> str:
    return blake3(b"syckpt key v1\n" + _raw(public)).hexdigest()[:16]


def _read_key_file(path: str, *, secret: bool) -> bytes:
    what = "private key" if secret else "trusted key"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read(_MAX_KEY_NBYTES)
    except FileNotFoundError as exc:
        raise NotFoundError(f"{what} {path}: there is no such file; make a pair with `syckpt keygen {path.removesuffix('.pub')}`") from exc
    except OSError as exc:
        raise StoreError(f"{what} {path} cannot be read: {exc.strerror or exc}") from exc
    if secret and b"PUBLIC KEY" in data:
        raise StateError(f"{what} {path}: is a public key; the private one is the file without .pub")
    if secret and mode & 0o077:
        raise StateError(f"{what} {path} has mode {mode:04o}: others may read or change it; run `chmod 600 {path}`")
    if not secret and b"PRIVATE KEY" in data:
        raise StateError(f"{what} {path}: is a private key, which only the writer may see; give {path}.pub")
    return data


class Signer:
    """A private key. `key_id` names it; `path` is absolute, so that another process finds it."""

    def __init__(self, path: str, key: Ed25519PrivateKey) -> None:
        self.path = path
        self.key_id = _key_id(key.public_key())
        self._key = key

    @staticmethod
    def open(path: KeyFile) -> Signer:
        """Read a private key.

        Raises: NotFoundError, StoreError (unreadable), StateError (others may access it; not an unencrypted Ed25519 key in PEM;
        `cryptography` is missing).
        """
        serialization = _serialization()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        where = os.path.abspath(os.fspath(path))
        data = _read_key_file(where, secret=True)
        try:
            key = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
            raise StateError(
                f"private key {where}: expected an unencrypted Ed25519 key in PEM, as `syckpt keygen PATH` makes one: {exc}"
            ) from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise StateError(f"private key {where}: expected an Ed25519 key, found {type(key).__name__.strip('_')}; see `syckpt keygen`")
        return Signer(where, key)

    def sign(self, message: bytes) -> bytes:
        """Return the signature, 64 bytes."""
        return self._key.sign(message)


@dataclass(frozen=True)
class Trusted:
    """Public keys by key id; never empty."""

    keys: Mapping[str, Ed25519PublicKey]

    def __str__(self) -> str:
        return ", ".join(self.keys)

    def fits(self, key_id: str, message: bytes, signature: bytes) -> bool:
        """Whether the trusted key of that id signed the message; False for a key that is not trusted."""
        from cryptography.exceptions import InvalidSignature

        key = self.keys.get(key_id)
        if key is None:
            return False
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def load_trusted(paths: KeyFile | Sequence[KeyFile]) -> Trusted:
    """Read one or several public keys.

    Raises: NotFoundError, StoreError (unreadable), StateError (none given; not an Ed25519 public key in PEM; `cryptography` is missing).
    """
    serialization = _serialization()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise StateError("trusted_keys is empty, so that nothing could be trusted: name public keys (PATH.pub), or leave it out")
    keys: dict[str, Ed25519PublicKey] = {}
    for path in given:
        where = os.path.abspath(os.fspath(path))
        data = _read_key_file(where, secret=False)
        try:
            key = serialization.load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm) as exc:
            raise StateError(
                f"trusted key {where}: expected an Ed25519 public key in PEM, as `syckpt keygen PATH` makes PATH.pub: {exc}"
            ) from exc
        if not isinstance(key, Ed25519PublicKey):
            raise StateError(f"trusted key {where}: expected an Ed25519 key, found {type(key).__name__.strip('_')}; see `syckpt keygen`")
        keys[_key_id(key)] = key
    return Trusted(keys)


def keygen(path: KeyFile) -> str:
    """Make a pair of keys, `path` (mode 0600) and `path`.pub, and return their key id.

    Raises: ConflictError when one of them exists: nothing is overwritten; NotFoundError (no such directory); StoreError; StateError.
    """
    form = _serialization()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    where = os.path.abspath(os.fspath(path))
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    if os.path.lexists(f"{where}.pub"):
        raise ConflictError(f"{where}.pub exists already: a key is never overwritten; choose another path")
    _create(where, secret, 0o600)
    try:
        _create(f"{where}.pub", public, 0o644)
    except BaseException:
        os.unlink(where)
        raise
    return _key_id(key.public_key())


def _create(path: str, data: bytes, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as exc:
        raise ConflictError(f"{path} exists already: a key is never overwritten; choose another path") from exc
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NotFoundError(f"{path} cannot be made: {Path(path).parent} is not a directory") from exc
    except OSError as exc:
        raise StoreError(f"{path} cannot be made: {exc.strerror or exc}") from exc
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
    except OSError as exc:
        os.unlink(path)
        raise StoreError(f"{path} cannot be written: {exc.strerror or exc}") from exc


# -- commits -------------------------------------------------------------------------------------------------------------------


def _message(repository: Repository, commit: Commit) -> bytes:
    """Return what is signed: of the document that has the seal of `commit`, and no other."""
    body, _ = documents.read(repository.store, commit_key(commit.id), kind="commit", seal=commit.seal)
    return COMMIT + canonical.dumps(body)


def signatures_of(repository: Repository, commit: str) -> dict[str, str]:
    """Return the keys (in the store) of a commit's signatures, by the id of the key that made them; none is checked."""
    return all_signatures(repository).get(commit, {})


def all_signatures(repository: Repository) -> dict[str, dict[str, str]]:
    """Return what `signatures_of` does for each commit that has a signature, from one listing."""
    found: dict[str, dict[str, str]] = {}
    for match in filter(None, map(SIGNATURE.fullmatch, repository.store.list("signatures/"))):
        found.setdefault(match["commit"], {})[match["key_id"]] = match[0]
    return found


def remove(repository: Repository, commit: str) -> None:
    """Remove the signatures of a commit that nobody will see."""
    for key in signatures_of(repository, commit).values():
        repository.store.delete(key)


def sign(repository: Repository, commit: Commit, signer: Signer) -> bool:
    """Sign a commit, durably; False if this key's signature is there already.

    Raises: IntegrityError when the commit, or the signature that is there, is damaged; StoreError.
    """
    message = _message(repository, commit)
    signature = address.to_text(signer.sign(message))
    body = {
        "kind": "signature",
        "version": 1,
        "commit": commit.id,
        "seal": commit.seal,
        "key": signer.key_id,
        "signature": signature,
    }
    key = signature_key(commit.id, signer.key_id)
    try:
        documents.write(repository.store, key, body)
    except ConflictError:
        # Ed25519 is deterministic: the same key over the same bytes makes the same signature.
        if _read(repository, key, commit, signer.key_id) != address.from_text(signature):
            raise IntegrityError(
                f"{key}: is there, but is no signature of commit {commit.id} by that key; delete it and sign again"
            ) from None
        return False
    return True


def _read(repository: Repository, key: str, commit: Commit, key_id: str) -> bytes:
    """Return a signature that says it is over that commit, by that key. Raises: NotFoundError, IntegrityError."""
    body, _ = documents.read(repository.store, key, kind="signature")
    fields = Fields(body, where=key)
    for name, expected in (("commit", commit.id), ("seal", commit.seal), ("key", key_id)):
        if fields.text(name) != expected:
            raise IntegrityError(f"{key}: was made for another {name}: expected {expected}, found {fields.text(name)[:80]!r}")
    return fields.parse("signature", address.from_text)


def require_signed(repository: Repository, commit: Commit, trusted: Trusted) -> None:
    """Check that one of the trusted keys signed a commit as it was read: content, manifests and parents, all that its seal binds.

    Raises: IntegrityError for a commit that is unsigned, signed by other keys only, or whose signature does not fit.
    """
    message = _message(repository, commit)
    problems: list[str] = []
    for key_id in trusted.keys:
        key = signature_key(commit.id, key_id)
        try:
            if trusted.fits(key_id, message, _read(repository, key, commit, key_id)):
                return
            problems.append(f"{key}: does not fit: key {key_id} did not sign what commit {commit.id} says")
        except NotFoundError:
            continue
        except IntegrityError as exc:
            problems.append(str(exc))
    if problems:
        raise IntegrityError(
            f"commit {commit.id} is not to be trusted: {'; '.join(problems)}; it, or its signature, was changed after signing"
        )
    found = ", ".join(signatures_of(repository, commit.id)) or "none: it is unsigned"
    raise IntegrityError(
        f"commit {commit.id} is not to be trusted: expected a signature by key(s) {trusted}, found {found}; if you know where it comes"
        f" from, `syckpt sign {commit.id} --key PATH`, or trust the key that signed it"
    )


def findings(repository: Repository) -> list[str]:
    """Return what is wrong with the signatures of a repository, as far as it shows without keys; each text begins with the store's key."""
    found: list[str] = []
    for key in repository.store.list("signatures/"):
        match = SIGNATURE.fullmatch(key)
        if match is None:
            found.append(f"{key}: is no signature: expected signatures/<commit id>.<key id>.json")
            continue
        try:
            commit = repository.read_commit(match["commit"])
            _read(repository, key, commit, match["key_id"])
        except NotFoundError:
            if repository.store.size(key) is not None:  # else a running writer gave the save up in between
                found.append(f"{key}: belongs to no commit: {commit_key(match['commit'])} is missing")
        except (IntegrityError, FormatError) as exc:
            if str(exc).startswith(key):  # else it is the commit that is damaged, and reported as such
                found.append(str(exc))
    return found
