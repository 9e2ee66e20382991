"""Keys of a repository's files (FORMAT.md, section 4): how they are made, and how they are told apart. Pure."""

from __future__ import annotations

import re

from syckpt.objects import ids

__all__ = [
    "COPY",
    "HELLO",
    "LOCATIONS",
    "MARK",
    "MARKS",
    "OF_COMMIT",
    "OF_RANK",
    "RECEIPT",
    "RECORD",
    "SIGNATURE",
    "blob_key",
    "commit_key",
    "commit_of",
    "commit_prefix",
    "copy_key",
    "hello_key",
    "intent_key",
    "layouts_key",
    "lease_key",
    "locations_key",
    "locations_prefix",
    "manifest_key",
    "mark_key",
    "moved_blob_key",
    "receipt_key",
    "receipts_prefix",
    "record_key",
    "records_prefix",
    "ref_of",
    "signature_key",
    "verdict_key",
]

MARKS = ("damaged", "dropped", "preempted")

_COMMIT = r"(?P<commit>[0-9a-f]{8}-[0-9a-f]{16})"
_BLOB = r"(?:\.(?P<made_for>\d{4})-[0-9a-f]{8})?\.safetensors"  # its own, or for which revision repack made it
_RANK = rf"r(?P<rank>\d{{5}})(?:\.manifest|\.locations\.(?P<revision>\d{{4}})|{_BLOB})"

OF_RANK = re.compile(rf"objects/{_COMMIT}/{_RANK}")
"""What a rank has saved."""
OF_COMMIT = re.compile(
    rf"(?:objects|signatures)/{_COMMIT}(?:\.json|\.(?:{'|'.join(MARKS)})|\.[0-9a-f]{{16}}\.json|(?P<content>/layouts|/{_RANK}))"
)
"""Any file that goes with its commit; `content`: what a dropped one has no more."""
LOCATIONS = re.compile(rf"objects/{_COMMIT}/r(?P<rank>\d{{5}})\.locations\.(?P<revision>\d{{4}})")
MARK = re.compile(rf"objects/{_COMMIT}\.(?P<mark>{'|'.join(MARKS)})")
SIGNATURE = re.compile(rf"signatures/{_COMMIT}\.(?P<key_id>[0-9a-f]{{16}})\.json")
RECORD = re.compile(r"logs/refs/(?P<kind>[a-z]+)/(?P<component>[^/]+)/(?P<number>\d{12})\.json")
COPY = re.compile(r"refs/(?P<kind>heads)/(?P<component>[^/]+)")
RECEIPT = re.compile(rf"receipts/(?P<component>[^/]+)/{_COMMIT}/(?:r(?P<rank>\d{{5}})|verdict)\.json")
HELLO = re.compile(r"hello/[^/]+\.json")


def commit_key(commit: str) -> str:
    """Return the key of a commit."""
    return f"objects/{commit}.json"


def commit_prefix(commit: str) -> str:
    """Return what the keys of a commit's content begin with."""
    return f"objects/{commit}/"


def commit_of(key: str) -> str:
    """Return the id of the commit to which a key in `objects/` or `intents/` belongs; another text where it belongs to none."""
    return key.partition("/")[2][:25]


def mark_key(commit: str, mark: str) -> str:
    """Return the key of a mark beside a commit."""
    return f"objects/{commit}.{mark}"


def manifest_key(commit: str, rank: int) -> str:
    """Return the key of a rank's manifest."""
    return f"objects/{commit}/r{rank:05d}.manifest"


def layouts_key(commit: str) -> str:
    """Return the key of a commit's table of layouts."""
    return f"objects/{commit}/layouts"


def locations_prefix(commit: str, rank: int) -> str:
    """Return what the keys of a rank's locations begin with: the revision follows."""
    return f"objects/{commit}/r{rank:05d}.locations."


def locations_key(commit: str, rank: int, revision: int) -> str:
    """Return the key of a revision of a rank's locations."""
    return f"{locations_prefix(commit, rank)}{revision:04d}"


def blob_key(commit: str, rank: int) -> str:
    """Return the key of a rank's blob."""
    return f"objects/{commit}/r{rank:05d}.safetensors"


def moved_blob_key(commit: str, rank: int, revision: int, *, nonce: str) -> str:
    """Return the key of a blob of rows that repack moves for a revision of a rank's locations; `nonce`: 8 hex digits."""
    return f"objects/{commit}/r{rank:05d}.{revision:04d}-{nonce}.safetensors"


def signature_key(commit: str, key_id: str) -> str:
    """Return the key of a signature over a commit."""
    return f"signatures/{commit}.{key_id}.json"


def records_prefix(ref: str) -> str:
    """Return what the keys of a ref's records begin with."""
    kind, _, name = ref.partition("/")
    return f"logs/refs/{kind}/{ids.key_component(name)}/"


def record_key(ref: str, number: int) -> str:
    """Return the key of a ref's record."""
    return f"{records_prefix(ref)}{number:012d}.json"


def ref_of(match: re.Match[str]) -> str:
    """Return the ref to which a key that is a `RECORD` or `COPY` belongs."""
    return f"{match['kind']}/{ids.name_of_component(match['component'])}"


def copy_key(ref: str) -> str:
    """Return the key of a branch's copy for people."""
    kind, _, name = ref.partition("/")
    return f"refs/{kind}/{ids.key_component(name)}"


def intent_key(commit: str) -> str:
    """Return the key of the intent of a save under way."""
    return f"intents/{commit}.json"


def lease_key(branch: str) -> str:
    """Return the key of the lease on a branch."""
    return f"leases/{ids.key_component(branch)}.json"


def receipts_prefix(branch: str, commit: str | None = None) -> str:
    """Return what the keys of the receipts of a branch, or of one save, begin with."""
    return f"receipts/{ids.key_component(branch)}/" + ("" if commit is None else f"{commit}/")


def receipt_key(branch: str, commit: str, rank: int) -> str:
    """Return the key of a rank's receipt."""
    return f"{receipts_prefix(branch, commit)}r{rank:05d}.json"


def verdict_key(branch: str, commit: str) -> str:
    """Return the key of the verdict on a save."""
    return f"{receipts_prefix(branch, commit)}verdict.json"


def hello_key(token: str) -> str:
    """Return the key of a file that shows at the start whether all ranks see one directory."""
    return f"hello/{token}.json"
