"""A repository of one commit whose documents can be forged: sealed anew, so that the checks behind the seals are reached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syckpt.codecs import zstd
from syckpt.objects import canonical
from syckpt.testing.repositories import commit_id, make_repository

Change = Callable[[dict[str, Any]], None]
COMMIT = commit_id(2)
FIRST = commit_id(1)
KEYS = {
    "commit": f"objects/{COMMIT}.json",
    "manifest": f"objects/{COMMIT}/r00000.manifest",
    "locations": f"objects/{COMMIT}/r00000.locations.0001",
}


class Forgery:
    """A copy of a repository of two commits, of which the second, a delta of the first, can be changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / ".syckpt"

    def body(self, what: str) -> dict[str, Any]:
        """Return a document's body; `what` is `commit`, `manifest`, `locations`, or a key."""
        data = (self.path / KEYS.get(what, what)).read_bytes()
        if data[:4] == b"\x28\xb5\x2f\xfd":
            data = zstd.decompress_document(data, limit=canonical.MAX_DOCUMENT_NBYTES)
        body: dict[str, Any] = json.loads(data)["body"]
        return body

    def write(self, what: str, text: bytes) -> str:
        """Put a body's text, sealed, in the place of a document; return its seal."""
        seal = canonical.digest_of(text)
        (self.path / KEYS.get(what, what)).write_bytes(b'{"body":' + text + b',"seal":"' + seal.encode() + b'"}\n')
        return seal

    def change(self, what: str, change: Change) -> None:
        """Change a document, and everything that names its seal."""
        body = self.body(what)
        change(body)
        self.put(what, json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())

    def put(self, what: str, text: bytes) -> None:
        """Replace a document's body by a text, and everything that names its seal."""
        seal = self.write(what, text)
        if what == "manifest":
            self.change("locations", lambda body: body.update(manifest=seal))
            self.change("commit", lambda body: body.update(manifests=[[0, seal]]))
        elif what == "commit":
            for path in sorted((self.path / "logs/refs/heads/main").iterdir()):
                key = str(path.relative_to(self.path))
                record = self.body(key)
                if record["commit"] == COMMIT:
                    record["commit_seal"] = seal
                    self.write(key, canonical.dumps(record))


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("original")
    make_repository(root, commits=2)
    return root


@pytest.fixture
def forgery(original: Path, tmp_path: Path) -> Forgery:
    shutil.copytree(original, tmp_path / "run")
    return Forgery(tmp_path / "run")
