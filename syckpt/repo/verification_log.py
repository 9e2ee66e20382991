"""What an interrupted verification had found whole, in a file outside of the repository."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress

from syckpt.errors import StateError, SyckptError
from syckpt.objects import canonical
from syckpt.objects.checks import Fields
from syckpt.repo.repository import Repository

__all__ = ["VerificationLog"]

_log = logging.getLogger("syckpt")
_SAVE_EVERY_S = 10.0
_MAX_AGE_S = 7 * 24 * 3600.0  # what was read longer ago is read again


class VerificationLog:
    """The file of `resume`: which commits were found whole, where their bytes were then, and how far the one in hand was read.

    `of` says what is verified: a commit's id, or "everything".
    It lies outside the repository: what comes with one that somebody else made must not say that it was checked.
    """

    def __init__(self, repository: Repository, path: str | os.PathLike[str], *, of: str) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._name = f"{repository.id} {repository.store.describe()}"
        self._of = of
        self._whole: dict[str, str] = {}
        self._part = ("", "", 0)
        """The commit in hand, its digest, and how many of its blocks are whole."""
        self._begun_s = time.time()
        self._saved_s = time.monotonic()
        self._read()

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as file:
                data = file.read(canonical.MAX_DOCUMENT_NBYTES)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise StateError(f"{self._path} cannot be read: {exc}") from exc
        try:
            body, _ = canonical.unseal(data, key=self._path, kind="verification")
            fields = Fields(body, where=self._path)
            name, of, begun_s = fields.text("repository"), fields.text("of"), fields.integer("begun_s")
            whole = {str(commit): str(digest) for commit, digest in fields.mapping("whole").items()}
            commit, digest, blocks = fields.parse("part", tuple)
            part = str(commit), str(digest), int(blocks)
        except (SyckptError, TypeError, ValueError) as exc:
            raise StateError(f"{self._path} is not a file that `verify` wrote; name another one, or remove it: {exc}") from exc
        if name != self._name:
            raise StateError(f"{self._path} is of another repository ({name}); name another file, or remove it")
        if of != self._of:
            raise StateError(f"{self._path} is of a verification of {of}, and this one is of {self._of}; name another file, or remove it")
        if not 0 <= time.time() - begun_s <= _MAX_AGE_S:
            _log.warning("%s was begun more than a week ago: everything is read again", self._path)
            return
        self._whole, self._part, self._begun_s = whole, part, begun_s

    def knows(self, commit: str, digest: str) -> bool:
        """Whether these very bytes were found whole."""
        return bool(digest) and self._whole.get(commit) == digest

    def position(self, commit: str, digest: str) -> int:
        """Return how many of these very bytes' blocks, from the first one on, were found whole."""
        return self._part[2] if digest and self._part[:2] == (commit, digest) else 0

    def add(self, commit: str, digest: str) -> None:
        """Note a commit that is whole."""
        self._whole[commit] = digest
        if self._part[0] == commit:
            self._part = ("", "", 0)

    def note(self, commit: str, digest: str, blocks: int) -> None:
        """Note how many blocks of a commit are whole so far."""
        self._part = (commit, digest, blocks)

    def save_sometimes(self) -> None:
        if time.monotonic() - self._saved_s >= _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file, replacing an older one whole."""
        self._saved_s = time.monotonic()
        body = {
            "kind": "verification",
            "version": 1,
            "repository": self._name,
            "of": self._of,
            "begun_s": int(self._begun_s),
            "whole": self._whole,
            "part": list(self._part),
        }
        new = f"{self._path}.{os.getpid()}.new"
        try:
            with open(new, "wb") as file:
                file.write(canonical.seal(body)[0])
            os.replace(new, self._path)
        except OSError as exc:
            _log.warning("%s cannot be written, so that an interrupted verification could not go on: %s", self._path, exc)
            with suppress(OSError):
                os.unlink(new)

    def remove(self) -> None:
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            return
        except OSError as exc:
            _log.warning("%s cannot be removed, so the next verification would go on from it: %s", self._path, exc)
