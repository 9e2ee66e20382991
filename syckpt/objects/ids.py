"""Names: commit ids, branches, tags (FORMAT.md, section 4)."""

from __future__ import annotations

import re

from blake3 import blake3

from syckpt.errors import StateError

__all__ = [
    "check_item_name",
    "check_name",
    "is_commit_id",
    "is_file_path",
    "is_name",
    "key_component",
    "name_of_component",
    "new_commit_id",
]

_COMMIT_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{16}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_MAX_COMPONENT = 240  # of 255 bytes of a file name, with a suffix
_ITEM = re.compile(r"[A-Za-z0-9_-]+")


def new_commit_id(*, fingerprint: str, repository: str, run: str, generation: int, sequence: int, nonce: bytes) -> str:
    """Return `<fingerprint>-<16 hex>`; the second part digests everything else."""
    text = f"syckpt commit v1\n{repository}\n{run}\n{generation}\n{sequence}\n{nonce.hex()}"
    return f"{fingerprint}-{blake3(text.encode()).hexdigest(length=8)}"


def is_commit_id(text: str) -> bool:
    """Whether a text has the form of a full commit id."""
    return _COMMIT_ID.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether a text is formed as the name of a ref: its component of a key fits every file system."""
    fits = isinstance(text, str) and _NAME.fullmatch(text) and len(text) <= 200 and len(key_component(text)) <= _MAX_COMPONENT
    return bool(fits) and not any(part.endswith(".lock") for part in text.split("/"))


def check_name(name: str, *, what: str) -> str:
    """Return a branch, tag or commit name unchanged.

    Raises: StateError when it could not be a key's component on every store, or reads as a commit id.
    """
    if not is_name(name) or is_commit_id(name) or name in ("HEAD", "latest", "best"):
        raise StateError(
            f"{name!r} cannot be the name of a {what}: use 1 to 200 of A-Z a-z 0-9 . _ - /, no component that is empty, begins"
            f" with a dot or ends in .lock, at most {_MAX_COMPONENT} with each / counted as 3; HEAD, latest, best and the form of a"
            " commit id are taken"
        )
    return name


def check_item_name(name: str) -> str:
    """Return an item's name unchanged, or raise StateError."""
    if not isinstance(name, str) or not _ITEM.fullmatch(name):
        raise StateError(f"{name!r} cannot be an item's name: use A-Z a-z 0-9 _ -")
    return name


def is_file_path(path: object) -> bool:
    """Whether a text can be the path of a file in a commit's tree: relative, of parts that lead nowhere else and fit every file system.

    No part is `.syckpt`: a checkout would look like a repository, whose content the commit chose.
    """
    if not isinstance(path, str) or not path.isprintable() or "\\" in path:
        return False
    parts = path.split("/")
    return len(parts) <= 32 and all(part.lower() not in ("", ".", "..", ".syckpt") and len(part.encode()) <= 255 for part in parts)


def key_component(name: str) -> str:
    """Return a name as one component of a key."""
    return name.replace("/", "%2F")


def name_of_component(component: str) -> str:
    """Invert `key_component`."""
    return component.replace("%2F", "/")
