"""A repository: commits, manifests and locations by id, refs by name. Torch-free; every read is checked against what points to it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping

from syckpt.errors import ConflictError, FormatError, IntegrityError, NotFoundError, SyckptError
from syckpt.objects import canonical
from syckpt.objects.checks import Fields
from syckpt.objects.commit import Commit
from syckpt.objects.layouts import LayoutTable
from syckpt.objects.locations import Locations
from syckpt.objects.manifest import Alike, Manifest
from syckpt.repo import documents
from syckpt.repo.keys import (
    LOCATIONS,
    MARKS,
    commit_key,
    commit_prefix,
    layouts_key,
    locations_key,
    locations_prefix,
    manifest_key,
    mark_key,
)
from syckpt.repo.refs import Refs
from syckpt.stores.base import Store, StoreSpec, open_store

__all__ = ["Repository"]

_log = logging.getLogger("syckpt")
_MAX_HEAD_NBYTES = 512  # names have at most 240 characters
_HEAD = re.compile(r"ref: refs/heads/(\S+)\n?")


class Repository:
    """An open repository. Use `Repository.open` or `Repository.create`."""

    def __init__(self, store: Store, repository_id: str) -> None:
        self.store = store
        self.id = repository_id
        self.refs = Refs(store)

    @staticmethod
    def open(spec: StoreSpec) -> Repository:
        """Open an existing repository.

        Raises: NotFoundError, IntegrityError, FormatError (a newer version or an unknown required feature).
        """
        store = open_store(spec)
        try:
            body, _ = documents.read(store, "format.json", kind="repository")
        except NotFoundError:
            if store.list("objects/") or store.list("logs/"):
                raise IntegrityError(f"format.json: missing, though {store.describe()} holds commits: restore it from a copy") from None
            raise NotFoundError(f"no syckpt repository at {store.describe()}: a training script with CheckpointManager makes one") from None
        fields = Fields(body, where="format.json")
        unknown = fields.texts("required")
        if unknown or fields.text("digest") != "blake3":
            raise FormatError(f"format.json: needs {unknown or fields.text('digest')}, which this syckpt does not know: upgrade it")
        return Repository(store, fields.text("id"))

    @staticmethod
    def open_or_create(spec: StoreSpec) -> Repository:
        """Open the repository, making it first where there is none. Two makers at once end up with the same one."""
        try:
            return Repository.open(spec)
        except NotFoundError:
            store = open_store(spec)
        body = {"kind": "repository", "version": 1, "id": os.urandom(16).hex(), "digest": "blake3", "required": [], "optional": []}
        try:
            documents.write(store, "format.json", body)
        except ConflictError:
            _log.debug("another process made %s first", store.describe())
        return Repository.open(spec)

    # -- documents ---------------------------------------------------------------------------------------------------

    def read_commit(self, commit: str, *, seal: str | None = None, marks: Mapping[str, set[str]] | None = None) -> Commit:
        """Return a commit with its marks, which are looked up unless all of them are given. Raises: NotFoundError, IntegrityError."""
        key = commit_key(commit)
        try:
            body, found = documents.read(self.store, key, kind="commit", seal=seal)
        except NotFoundError:
            raise NotFoundError(f"no commit {commit} in {self.store.describe()}: {key} is not there") from None
        read = Commit.from_body(body, seal=found, where=key)
        if read.id != commit:
            raise IntegrityError(f"{key}: holds commit {read.id}")
        found_marks = self.marks(commit) if marks is None else marks.get(commit)
        return read.marked(found_marks) if found_marks else read

    def marks(self, commit: str) -> set[str]:
        """Return the marks beside a commit."""
        return {mark for mark in MARKS if self.store.size(mark_key(commit, mark)) is not None}

    def all_marks(self) -> dict[str, set[str]]:
        """Return the marks of all commits that have some, from one listing."""
        found: dict[str, set[str]] = {}
        for key in self.store.list("objects/", deep=False):
            commit, _, mark = key.removeprefix("objects/").rpartition(".")
            if mark in MARKS:
                found.setdefault(commit, set()).add(mark)
        return found

    def mark(self, commit: str, mark: str, *, why: str) -> None:
        """Put a mark beside a commit; one that is there already stays."""
        try:
            documents.write(self.store, mark_key(commit, mark), {"kind": "mark", "version": 1, "why": why})
        except ConflictError:
            _log.debug("%s is marked %s already", commit, mark)

    def why(self, commit: str, mark: str) -> str | None:
        """Return why a mark was made, for people; None where that cannot be read: the mark counts all the same."""
        key = mark_key(commit, mark)
        try:
            body, _ = documents.read(self.store, key, kind="mark")
            return Fields(body, where=key).text("why")
        except SyckptError:
            return None

    def read_manifest(self, commit: Commit, rank: int, alike: Alike | None = None) -> Manifest:
        """Return a rank's manifest, checked against the commit; `alike` is of those that are read one after the other.

        Raises: NotFoundError, IntegrityError, FormatError.
        """
        if not 0 <= rank < len(commit.manifests):
            raise NotFoundError(f"commit {commit.id} has no rank {rank}; it was saved by {commit.world_size}")
        _, seal = commit.manifests[rank]
        key = manifest_key(commit.id, rank)
        parse = canonical.loads_canonical if alike is None else alike.parse
        try:
            body, _ = documents.read(self.store, key, kind="manifest", seal=seal, parse=parse)
        except NotFoundError:
            if "dropped" in self.marks(commit.id):
                raise dropped_error(commit.id) from None
            raise IntegrityError(f"{key}: missing, though commit {commit.id} names it") from None
        read = Manifest.from_body(body, where=key, alike=alike)
        if (read.rank, read.world_size) != (rank, commit.world_size):
            raise IntegrityError(f"{key}: is the manifest of rank {read.rank} of {read.world_size}, expected {rank} of {commit.world_size}")
        return read

    def read_layouts(self, commit: Commit) -> LayoutTable | None:
        """Return a commit's table of layouts, checked against the commit; None if it has none. Raises: IntegrityError, FormatError."""
        if commit.layouts is None:
            return None
        key = layouts_key(commit.id)
        try:
            body, _ = documents.read(self.store, key, kind="layouts", seal=commit.layouts)
        except NotFoundError:
            if "dropped" in self.marks(commit.id):
                raise dropped_error(commit.id) from None
            raise IntegrityError(f"{key}: missing, though commit {commit.id} names it") from None
        read = LayoutTable.from_body(body, where=key)
        if read.world_size != commit.world_size:
            raise IntegrityError(f"{key}: is of {read.world_size} ranks, expected {commit.world_size}")
        return read

    def list_locations(self, commit: str) -> dict[int, str]:
        """Return the key of the newest revision of each rank's locations."""
        found: dict[int, str] = {}
        for key in self.store.list(commit_prefix(commit)):  # sorted
            match = LOCATIONS.fullmatch(key)
            if match is not None:
                found[int(match["rank"])] = key
        return found

    def read_locations(self, commit: str, rank: int, *, listed: str | None = None) -> Locations:
        """Return the newest revision of a rank's locations; or, if it is still there, the one that was `listed`.

        Raises: IntegrityError (missing or damaged).
        """
        prefix = locations_prefix(commit, rank)
        tried = ""
        while True:
            key = listed or max((key for key in self.store.list(commit_prefix(commit)) if key.startswith(prefix)), default="")
            listed = None
            if key <= tried:
                lost = tried or locations_key(commit, rank, 1)
                raise IntegrityError(f"{lost}: missing, like any later revision: where the bytes of {commit} are is lost")
            try:
                body, _ = documents.read(self.store, key, kind="locations")
                break
            except NotFoundError:
                tried = key  # Replaced by a later revision since it was listed.
        read = Locations.from_body(body, where=key)
        if (read.commit, read.rank) != (commit, rank):
            raise IntegrityError(f"{key}: are the locations of {read.commit}, rank {read.rank}")
        return read

    # -- HEAD --------------------------------------------------------------------------------------------------------

    def head_branch(self) -> str:
        """Return the branch that HEAD names; where there is no HEAD (yet), the only branch, or `main` if there is none.

        Raises: IntegrityError when HEAD is malformed, names a branch without records while other branches have some, or was lost.
        """
        try:
            text = self.store.get("HEAD", limit=_MAX_HEAD_NBYTES).decode("ascii", "replace")
        except NotFoundError:
            branches = self.refs.names("heads")
            if len(branches) > 1:
                raise IntegrityError(
                    f"HEAD: missing, so that nobody knows which of the branches {', '.join(branches[:5])} it named; write"
                    " 'ref: refs/heads/<branch>' there, or name branch=..."
                ) from None
            return branches[0] if branches else "main"
        match = _HEAD.fullmatch(text)
        if match is None:
            raise IntegrityError(f"HEAD: expected 'ref: refs/heads/<branch>', found {text[:60]!r}; write that line, or name branch=...")
        branch = match[1]
        if not self.refs.exists(f"heads/{branch}") and (others := self.refs.names("heads")):
            why = "was deleted" if self.refs.numbers(f"heads/{branch}") else "has no records"
            raise IntegrityError(
                f"HEAD: names the branch {branch!r}, which {why}, while {', '.join(others[:5])} have some: HEAD is damaged"
                " or records were lost; name branch=..., or correct HEAD"
            )
        return branch

    def set_head(self, branch: str) -> None:
        """Make a branch the default for openers that name none."""
        self.store.replace("HEAD", f"ref: refs/heads/{branch}\n".encode())

    # -- integrity ---------------------------------------------------------------------------------------------------

    def check_whole(self, commit: Commit, *, ranks: Iterable[int] | None = None) -> None:
        """Check a commit's structure, without reading tensors: every document, and every blob's presence and size.

        `ranks`: only what these ones saved of it. Raises: IntegrityError naming the file; NotFoundError for a dropped commit.
        """
        if commit.dropped:
            raise dropped_error(commit.id)
        chosen = range(commit.world_size) if ranks is None else list(ranks)
        # A second look: repack may have moved bytes, and deleted the blob, since the locations were read.
        absent = self._absent(commit, chosen) and self._absent(commit, chosen)
        if absent:
            raise IntegrityError(f"{absent[min(absent)]}; needed by {commit.id}")

    def absent_blobs(self, blobs: Iterable[tuple[str, int]]) -> dict[str, str]:
        """Return those blobs (key, size) that are not there in their sizes, by key, each with what is found instead."""
        absent: dict[str, str] = {}
        for key, size in sorted(set(blobs)):
            found = self.store.size(key)
            if found != size:
                absent[key] = f"{key}: {'missing' if found is None else f'{found} bytes'}, expected {size} bytes"
        return absent

    def _absent(self, commit: Commit, ranks: Iterable[int]) -> dict[str, str]:
        """Return, as `absent_blobs`, what those ranks' locations lead to and is not there."""
        blobs: set[tuple[str, int]] = set()
        tables: dict[tuple[str, int], Locations] = {}
        listed: dict[str, dict[int, str]] = {}

        def table(commit_id: str, rank: int) -> Locations:
            if (commit_id, rank) not in tables:
                if commit_id not in listed:
                    listed[commit_id] = self.list_locations(commit_id)
                tables[commit_id, rank] = self.read_locations(commit_id, rank, listed=listed[commit_id].get(rank))
            return tables[commit_id, rank]

        def need(locations: Locations, source: int, row: int) -> tuple[Locations, int]:
            owner = table(*locations.source(source)) if source else locations
            blob = owner.blobs[owner.row(row).blob]
            blobs.add((blob.key, blob.size))
            return owner, row

        self.read_layouts(commit)
        for rank in ranks:
            manifest = self.read_manifest(commit, rank)
            locations = table(commit.id, rank)
            if locations.manifest_seal != commit.manifests[rank][1] or len(locations.at) != len(manifest.distinct()):
                raise IntegrityError(f"objects/{commit.id}/r{rank:05d}.locations: belong to another manifest")
            for source, row in locations.at:
                owner, number = need(locations, source, row)
                base = owner.row(number).base
                if base is not None:
                    need(owner, *base)
        return self.absent_blobs(blobs)


def dropped_error(commit: str) -> NotFoundError:
    """Return the error of whoever asks for the content of a dropped commit."""
    return NotFoundError(f"commit {commit} was dropped by retention; its record stays in the log, its tensors are gone")
