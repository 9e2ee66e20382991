"""Repositories made to harm: rightly sealed documents that lie. Our own errors, bounded memory and time, and never a wrong value."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import syckpt
from syckpt.checkpoint.resume import newest_whole
from syckpt.cli import main
from syckpt.errors import IntegrityError, SyckptError
from syckpt.repo.collection import collect
from syckpt.repo.repacking import repack
from syckpt.repo.repository import Repository
from syckpt.repo.retention import Retention, retain
from syckpt.repo.usage import measure
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.repositories import commit_id

MIB = 1 << 20
OTHER = "00000000-ffffffffffffffff"
FIRST, COMMIT = commit_id(1), commit_id(2)
CLEANING: tuple[Callable[[Repository], object], ...] = (
    measure,
    lambda repository: collect(repository, dry_run=True),
    lambda repository: retain(repository, "main", Retention(last=1), dry_run=True),
    lambda repository: repack(repository, dry_run=True, dead_share=0.0),
)


@contextmanager
def bounded() -> Iterator[None]:
    """Check the memory and the CPU time of what is done inside."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 160 * MIB
    assert time.process_time() - started < 20


def attempts(root: Path) -> list[SyckptError | None]:
    """Return what loading, resuming and verifying end in, within bounds of memory and time."""
    found: list[SyckptError | None] = []
    with bounded():
        for attempt in (lambda: syckpt.load(root), lambda: newest_whole(Repository.open(parse_root(root)), "main"), lambda: check(root)):
            try:
                attempt()
            except SyckptError as exc:
                found.append(exc)
            else:
                found.append(None)
    assert all(len(str(error)) < 4000 for error in found)
    return found


def clean(root: Path) -> None:
    """Look for what could go, within bounds of memory and time, whatever comes of it."""
    with bounded():
        for look in CLEANING:
            with suppress(SyckptError):
                look(Repository.open(parse_root(root)))


def check(root: Path) -> None:
    report = verify(Repository.open(parse_root(root)))
    if not report:
        raise IntegrityError(report.errors[0])


def setting(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change that puts a value at a path."""

    def change(body: Any) -> None:
        *parents, last = path
        for key in parents:
            body = body[key]
        body[last] = to

    return change


def deep(levels: int) -> Any:
    node: Any = None
    for _ in range(levels):
        node = {"list": [node]}
    return node


LIES = {
    # Locations: where bytes are said to be.
    "blob outside": ("locations", setting("blobs", 0, 0, to="../../etc/passwd")),
    "blob in another commit's place": ("locations", setting("blobs", 0, 0, to=f"objects/{OTHER}/r00000.safetensors")),
    "blob absolute": ("locations", setting("blobs", 0, 0, to="/etc/passwd")),
    "blob with dots": ("locations", setting("blobs", 0, 0, to=f"objects/{OTHER}/../../../x")),
    "blob with NUL": ("locations", setting("blobs", 0, 0, to=f"objects/{OTHER}/a\0b")),
    "blob is a document": ("locations", setting("blobs", 0, 0, to=f"objects/{OTHER}.json")),
    "blob size negative": ("locations", setting("blobs", 0, 1, to=-1)),
    "blob size huge": ("locations", setting("blobs", 0, 1, to=2**53 - 1)),
    "blob header beyond": ("locations", setting("blobs", 0, 2, to=2**40)),
    "blob digest short": ("locations", setting("blobs", 0, 3, to="AAAA")),
    "offset negative": ("locations", setting("rows", "offset", 0, to=-8)),
    "offset beyond": ("locations", setting("rows", "offset", 0, to=2**52)),
    "offset in the header": ("locations", setting("rows", "offset", 0, to=0)),
    "offset a float": ("locations", setting("rows", "offset", 0, to=64.0)),
    "offset a boolean": ("locations", setting("rows", "offset", 0, to=True)),
    "length huge": ("locations", setting("rows", "length", 0, to=2**50)),
    "nbytes huge": ("locations", setting("rows", "nbytes", 0, to=2**50)),
    "nbytes zero": ("locations", setting("rows", "nbytes", 0, to=0)),
    "width zero": ("locations", setting("rows", "width", 0, to=0)),
    "width odd": ("locations", setting("rows", "width", 0, to=3)),
    "width other": ("locations", setting("rows", "width", 0, to=8)),
    "coded twice": ("locations", setting("rows", "coded", 0, to=2)),
    "not coded": ("locations", setting("rows", "coded", 0, to=0)),
    "blocks for one block": ("locations", setting("rows", "blocks", 0, to=[1, 2])),
    "blocks nested": ("locations", setting("rows", "blocks", 0, to=[[1]])),
    "blocks a number": ("locations", setting("rows", "blocks", 0, to=7)),
    "leaves for one block": ("locations", setting("rows", "leaves", 0, to="A" * 64)),
    "base is itself": ("locations", setting("rows", "base", 0, to=[0, 0])),
    "base nowhere": ("locations", setting("rows", "base", 0, to=[99, 0])),
    "base beyond": ("locations", setting("rows", "base", 0, to=[1, 10**6])),
    "base beyond any document": ("locations", setting("rows", "base", 0, to=[1, 2**40])),
    "bases beyond any document": ("locations", lambda body: body.update(bases=[[1, 2**38]])),
    "base negative": ("locations", setting("rows", "base", 0, to=[1, -1])),
    "base of another size": ("locations", setting("rows", "base", 0, to=[1, 1])),
    "base a text": ("locations", setting("rows", "base", 0, to="01")),
    "base forgotten": ("locations", setting("rows", "base", 0, to=None)),
    "source is the commit itself": ("locations", setting("sources", 0, to=["00000000-0000000200000000", 0])),
    "source not there": ("locations", setting("sources", 0, to=[OTHER, 0])),
    "source outside": ("locations", setting("sources", 0, to=["../../secret", 0])),
    "source rank huge": ("locations", setting("sources", 0, to=["00000000-0000000100000000", 2**53 - 1])),
    "source of three": ("locations", setting("sources", 0, to=["00000000-0000000100000000", 0, 0])),
    "pointer to another row": ("locations", setting("at", "row", 1, to=0)),
    "pointer beyond": ("locations", setting("at", "row", 1, to=2**53 - 1)),
    "pointer beyond any document": ("locations", setting("at", "row", 1, to=2**38)),
    "pointer to the last of the rows": ("locations", setting("at", "row", 1, to=2**24 - 1)),
    "pointers far apart": (
        "locations",
        lambda body: body["at"].update(source=[0] + [1] * 20_000, row=list(range(0, 2**24, 838))[:20_001]),
    ),
    "pointer negative": ("locations", setting("at", "row", 1, to=-1)),
    "pointer to no source": ("locations", setting("at", "source", 1, to=2)),
    "pointers too few": ("locations", setting("at", to={"source": [0], "row": [0]})),
    "rows without number": ("locations", lambda body: body["rows"].update({name: body["rows"][name] * 10**4 for name in body["rows"]})),
    "columns unequal": ("locations", setting("rows", "length", to=[])),
    "rows a list": ("locations", setting("rows", to=[])),
    "revision zero": ("locations", setting("revision", to=0)),
    "of another rank": ("locations", setting("rank", to=3)),
    "keyframe outside": ("locations", setting("keyframe", to=["../x", 0])),
    # Manifest: what is said to be there.
    "shape negative": ("manifest", setting("tensors", "shape", 0, to=[-1, 64])),
    "shape absurd": ("manifest", setting("tensors", "shape", 0, to=[2**50, 2**50])),
    "shape absurd but empty": ("manifest", setting("tensors", "shape", 0, to=[0, 2**53 - 1])),
    "shape of many dimensions": ("manifest", setting("tensors", "shape", 0, to=[1] * 10**5)),
    "shape large": ("manifest", setting("tensors", "shape", 0, to=[2**49])),
    "shape floats": ("manifest", setting("tensors", "shape", 0, to=[64.0, 64.0])),
    "shape other": ("manifest", setting("tensors", "shape", 0, to=[32, 128])),
    "shape null": ("manifest", setting("tensors", "shape", 0, to=None)),
    "dtype unknown": ("manifest", setting("tensors", "dtype", 0, to="object")),
    "dtype other": ("manifest", setting("tensors", "dtype", 0, to="int32")),
    "dtype a list": ("manifest", setting("tensors", "dtype", 0, to=["float32"])),
    "box outside": ("manifest", setting("tensors", "box", 0, to=[[1, 0], [64, 64]])),
    "box negative": ("manifest", setting("tensors", "box", 0, to=[[-1, 0], [64, 64]])),
    "box of one": ("manifest", setting("tensors", "box", 0, to=[[0, 0]])),
    "address of the other": ("manifest", lambda body: body["tensors"]["address"].reverse()),
    "address short": ("manifest", setting("tensors", "address", 0, to="AAAA")),
    "address not canonical": ("manifest", setting("tensors", "address", 0, to="A" * 42 + "B")),
    "path empty": ("manifest", setting("tensors", "path", 0, to=[])),
    "path a text": ("manifest", setting("tensors", "path", 0, to="model")),
    "paths equal": ("manifest", setting("tensors", "path", 0, to=["model", "frozen"])),
    "node beyond": ("manifest", setting("items", "model", to={"tensor": 9})),
    "node negative": ("manifest", setting("items", "model", to={"tensor": -1})),
    "node unknown": ("manifest", setting("items", "model", to={"reduce": ["os.system", "true"]})),
    "node of two": ("manifest", setting("items", "model", to={"list": [], "tuple": []})),
    "node deep": ("manifest", setting("items", "model", to=deep(250))),
    "node int huge": ("manifest", setting("items", "model", to={"int": "9" * 10**6})),
    "node range huge": ("manifest", setting("items", "model", to={"list": [{"range": [0, 2**53 - 1, 0]}]})),
    "node ndarray of objects": ("manifest", setting("items", "model", to={"ndarray": [0, "|O", "C"]})),
    "node ndarray huge": ("manifest", setting("items", "model", to={"ndarray": [0, "S999999999999", "C"]})),
    "node npscalar of objects": ("manifest", setting("items", "model", to={"npscalar": ["|O", "AAAAAAAAAAA"]})),
    "node dict unhashable": ("manifest", setting("items", "model", to={"dict": [[{"list": []}, 1]]})),
    "node set twice": ("manifest", setting("items", "model", to={"set": [1, 1]})),
    "node size huge": ("manifest", setting("items", "model", to={"size": [10**18] * 9})),
    "node dtype is code": ("manifest", setting("items", "model", to={"dtype": "load"})),
    "node device odd": ("manifest", setting("items", "model", to={"device": "no such:9"})),
    "node generator odd": ("manifest", setting("items", "model", to={"generator": ["torch", {"dict": [["state", 3]]}]})),
    "node dict of bare lists": ("manifest", setting("items", "model", to={"dict": [["a"]]})),
    "node dict of triples": ("manifest", setting("items", "model", to={"dict": [["a", 1, 2]]})),
    "node dict of numbers": ("manifest", setting("items", "model", to={"dict": [1, 2]})),
    "node namedtuple short": ("manifest", setting("items", "model", to={"namedtuple": ["A"]})),
    "node deque empty": ("manifest", setting("items", "model", to={"deque": []})),
    "node empty": ("manifest", setting("items", "model", to={})),
    "node empty in a list": ("manifest", setting("items", "model", to={"list": [{}]})),
    "node a bare list": ("manifest", setting("items", "model", to=[1])),
    "tensor a key": ("manifest", setting("items", "model", to={"dict": [[{"tensor": 0}, 1]]})),
    "tensor in a set": ("manifest", setting("items", "model", to={"set": [{"tensor": 0}]})),
    "tensor in a slice": ("manifest", setting("items", "model", to={"slice": [None, {"tensor": 0}, None]})),
    "tensor in an enum": ("manifest", setting("items", "model", to={"enum": ["A", "B", {"tensor": 0}]})),
    "generator a key": ("manifest", setting("items", "model", to={"dict": [[{"generator": ["torch", {"dict": []}]}, 1]]})),
    "streams a bare list": ("manifest", setting("rng", to=[1])),
    "streams beyond": ("manifest", setting("rng", to={"generator": ["torch", {"dict": [["state", {"tensor": 9}]]}]})),
    "item name outside": ("manifest", setting("items", "../../x", to=1)),
    "world size zero": ("manifest", setting("world_size", to=0)),
    "rank of another": ("manifest", setting("rank", to=5)),
    "tensors null": ("manifest", setting("tensors", to=None)),
    # Commit.
    "manifests of many ranks": ("commit", lambda body: body.update(manifests=body["manifests"] * 10**4)),
    "manifest rank a text": ("commit", setting("manifests", 0, 0, to="../../x")),
    "manifest rank negative": ("commit", setting("manifests", 0, 0, to=-1)),
    "manifest rank huge": ("commit", setting("manifests", 0, 0, to=2**53 - 1)),
    "manifests empty": ("commit", setting("manifests", to=[])),
    "its own parent": ("commit", setting("parents", 0, 0, to="00000000-0000000200000000")),
    "parent outside": ("commit", setting("parents", 0, 0, to="../../../etc/passwd")),
    "id of another": ("commit", setting("id", to="00000000-0000000100000000")),
    "time huge": ("commit", setting("created_ns", to="9" * 40)),
    "config a text": ("commit", setting("config", to="x")),
    "config deep": ("commit", setting("config", to=deep(250))),
    "metric an infinity": ("commit", setting("metric", to={"float": "zz"})),
    "step negative": ("commit", setting("step", to=-1)),
    "run short": ("commit", setting("run", to=["x"])),
    "tags a text": ("commit", setting("tags", to="abc")),
    "tags outside": ("commit", setting("tags", to=["../../x"])),
    "name outside": ("commit", setting("name", to="../../x")),
    "stats a list": ("commit", setting("stats", to=[])),
}
# Only torch or numpy can judge these; `verify` does without them, and their bytes are those that were saved.
FOREIGN = {lie for lie in LIES if lie.startswith(("node ndarray", "node npscalar", "node dtype", "node device", "node generator"))}
FOREIGN |= {"node size huge"}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_a_sealed_document_is_our_own_error_or_harmless(forgery: Any, lie: str) -> None:
    before = syckpt.load(forgery.root)["model"]
    what, change = LIES[lie]
    forgery.change(what, change)
    clean(forgery.root)
    loaded, _, verified = attempts(forgery.root)
    if loaded is None:
        # Nothing that tensors or structure depend on: then they are exactly what they were.
        after = syckpt.load(forgery.root)["model"]
        assert what == "commit" or lie in EXACT
        assert set(after) == set(before)
        assert all(_same(after[name], before[name]) for name in before)
    else:
        assert verified is not None or lie in FOREIGN


EXACT = {"item name outside", "base forgotten", "rows without number"}


def _same(one: Any, other: Any) -> bool:
    return bool((one == other).all()) if hasattr(one, "all") else one == other


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie.startswith(("tensor ", "generator", "streams", "node dict of", "node empty"))])
def test_whoever_takes_a_malformed_node_apart_is_told_which_manifest_has_it(forgery: Any, tmp_path: Path, lie: str) -> None:
    what, change = LIES[lie]
    forgery.change(what, change)
    expected = rf"^objects/{COMMIT}/r00000\.manifest: malformed node "
    with pytest.raises(IntegrityError, match=expected):
        syckpt.load(forgery.root)
    with pytest.raises(IntegrityError, match=expected):
        syckpt.load(forgery.root, into={"model": {}})
    with pytest.raises(IntegrityError, match=expected):
        check(forgery.root)
    for arguments in (
        ["ls", "HEAD"],
        ["cat", "HEAD:model.json"],
        ["checkout", "HEAD", "--to", str(tmp_path / "out")],
        ["diff", "HEAD~1", "HEAD"],
    ):
        done = CliRunner().invoke(main, ["-C", str(forgery.root), *arguments])
        assert done.exit_code == 5
        assert re.search(expected.replace("^", "^syckpt: "), done.stderr)


def test_a_resume_goes_on_from_the_commit_before_one_whose_nodes_are_malformed(forgery: Any) -> None:
    forgery.change("manifest", setting("items", "model", to={"dict": [["a"]]}))
    with syckpt.CheckpointManager(forgery.root, save_on_exit=False) as ckpt:
        assert (ckpt.resumed.id, ckpt.hash) == (FIRST, FIRST)


def raw_texts() -> dict[str, bytes]:
    """Return texts that are no canonical JSON, to be sealed as a manifest's body."""
    start = b'{"items":{},"kind":"manifest","rank":0,"rng":'
    end = b',"tensors":{"address":[],"box":[],"dtype":[],"path":[],"shape":[]},"version":1,"world_size":1}'
    values = {
        "nested a million deep": b"[" * 10**6 + b"]" * 10**6,
        "nested a million deep and left open": b"[" * 10**6,
        "objects a million deep": b'{"a":' * 10**6 + b"1" + b"}" * 10**6,
        "brackets in a text": b'"' + b"[" * 10**6 + b'"',
        "NaN": b"NaN",
        "infinity": b"-Infinity",
        "float beyond": b"1e999",
        "integer of a million digits": b"1" * 10**6,
        "integer beyond": b"9007199254740993",
        "duplicate keys": b'{"list":[],"list":[1]}',
        "unsorted keys": b'{"b":1,"a":2}',
        "white space": b"[1, 2]",
        "not UTF-8": b'"\xff\xfe"',
        "UTF-8 where escapes are due": '"ä"'.encode(),
        "a lone surrogate": b'"\\ud800"',
        "a bare control character": b'"\x01"',
        "an open string": b'"abc',
        "a backslash at the end": b'"\\',
        "nothing": b"",
        "minus zero": b"-0",
        "an exponent": b"1E5",
        "leading zeros": b"007",
    }
    return {name: start + value + end for name, value in values.items()}


@pytest.mark.parametrize("name", raw_texts())
def test_text_that_is_not_canonical_json_is_refused_behind_a_right_seal(forgery: Any, name: str) -> None:
    forgery.put("manifest", raw_texts()[name])
    loaded, resumed, verified = attempts(forgery.root)
    assert isinstance(loaded, IntegrityError)
    assert isinstance(verified, IntegrityError)
    assert resumed is None  # from the commit before


def test_a_cycle_of_commits_ends(forgery: Any) -> None:
    forgery.change("commit", setting("parents", 0, 0, to="00000000-0000000200000000"))
    for revision in ("HEAD~1", "HEAD~999999"):
        with pytest.raises(SyckptError):
            syckpt.load(forgery.root, revision)


def test_bases_that_lead_in_a_circle_are_refused(forgery: Any) -> None:
    def change(body: dict[str, Any]) -> None:
        body["sources"] = [["00000000-0000000200000000", 0]]
        body["rows"]["base"][0] = [1, 0]

    forgery.change("objects/00000000-0000000100000000/r00000.locations.0001", change)
    assert forgery.body("locations")["rows"]["base"][0] == [1, 0]
    for revision in ("HEAD", "HEAD~1"):
        with pytest.raises(IntegrityError, match=r"the base of row 0 is a delta or of another size"):
            syckpt.load(forgery.root, revision)
    assert isinstance(attempts(forgery.root)[2], IntegrityError)


def test_rows_may_overlap_but_every_tensor_is_checked_by_itself(forgery: Any) -> None:
    body = forgery.body("locations")
    for name in body["rows"]:
        body["rows"][name].append(body["rows"][name][0])
    forgery.change("locations", lambda found: found.update(rows=body["rows"]))
    assert attempts(forgery.root) == [None, None, None]


def test_a_blob_may_be_a_link_to_nothing_of_ours(forgery: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    path = forgery.path / "objects/00000000-0000000200000000/r00000.safetensors"
    secret.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(secret)
    loaded, _, verified = attempts(forgery.root)
    for error in (loaded, verified):
        assert isinstance(error, IntegrityError)
        assert "symbolic link" in str(error)


@pytest.mark.parametrize("place", ["objects", "objects/00000000-0000000200000000", "logs", "refs", "HEAD", "format.json"])
def test_links_anywhere_in_a_repository_are_refused(forgery: Any, tmp_path: Path, place: str) -> None:
    outside = tmp_path / "outside"
    (forgery.path / place).rename(outside)
    (forgery.path / place).symlink_to(outside)
    with pytest.raises(IntegrityError, match="symbolic link"):
        syckpt.load(forgery.root)


@pytest.mark.parametrize("what", ["objects/00000000-0000000200000000.json", "HEAD", "logs/refs/heads/main/000000000003.json"])
def test_a_pipe_or_a_directory_in_the_place_of_a_document_hangs_nobody(forgery: Any, what: str) -> None:
    path = forgery.path / what
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(IntegrityError, match="is not a regular file"):
        syckpt.load(forgery.root)
    path.unlink()
    path.mkdir()
    if what != "HEAD":  # as if it were absent: the only branch is taken
        with pytest.raises(SyckptError):
            syckpt.load(forgery.root)


@pytest.mark.parametrize("text", ["ref: refs/heads/../../x", "ref: refs/heads/" + "a" * 10**6, "\xff\0", "ref: refs/heads/main\n" * 2, ""])
def test_a_head_that_leads_elsewhere_is_an_error(forgery: Any, text: str) -> None:
    (forgery.path / "HEAD").write_bytes(text.encode("latin-1"))
    with pytest.raises(SyckptError):
        syckpt.load(forgery.root)


@pytest.mark.parametrize(
    "field", [("version", 2), ("version", True), ("digest", "md5"), ("required", ["later"]), ("required", "x"), ("kind", "zoo"), ("id", 5)]
)
def test_a_repository_of_another_kind_is_refused(forgery: Any, field: tuple[str, Any]) -> None:
    forgery.change("format.json", lambda body: body.update([field]))
    with pytest.raises(SyckptError):
        syckpt.load(forgery.root)


# -- bombs, in a process whose memory is bounded -----------------------------------------------------------------------------

BOMBS = """
import os, resource, struct, sys
import numpy as np
from backports import zstd
from syckpt import codecs
from syckpt.codecs import zstd as ours
from syckpt.errors import SyckptError, IntegrityError
from syckpt.objects import canonical
from syckpt.repo import documents
from syckpt.repo.repository import Repository
from syckpt.repo.reader import Reader
from syckpt.stores.base import parse_root
from syckpt.stores.memory import MemoryStore

P = zstd.CompressionParameter
zeros = bytes(1 << 20)

def frame(blocks, *, stated, window=27):
    # Bombs without their size in the header: a compressor that is fed piece by piece; with it: one that is told.
    compressor = zstd.ZstdCompressor(options={P.compression_level: 1, P.window_log: window, P.content_size_flag: int(stated)})
    if stated:
        compressor.set_pledged_input_size(blocks << 20)
    return b"".join([compressor.compress(zeros) for _ in range(blocks)] + [compressor.flush()])

bombs = {
    "little is stated": frame(512, stated=False),
    "much is stated": frame(512, stated=True),
    "the window is huge": frame(300, stated=True, window=27),
    "many frames": zstd.compress(zeros) * 1000,
}
lying = bytearray(frame(512, stated=True))
bombs["one size is stated, another comes"] = bytes(lying[:6]) + struct.pack("<I", 4096) + bytes(lying[10:])
resource.setrlimit(resource.RLIMIT_AS, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + (700 << 20),) * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, bomb in bombs.items():
    for nbytes in (0, 4096, 1 << 20):
        try:
            ours.decompress(bomb, nbytes=nbytes)
        except IntegrityError as exc:
            pass
        else:
            raise SystemExit(f"{name}: decoded to {nbytes}")
    try:
        ours.decompress_document(bomb, limit=1 << 20)
    except IntegrityError:
        pass
    else:
        raise SystemExit(f"{name}: decoded as a document")
    # As a plane of an encoded block: form 1, one stream of span 4, method zstd.
    block = bytes([1]) + struct.pack("<BBI", 4, 1, len(bomb)) + bomb
    try:
        codecs.decode_block(block, out=bytearray(4096), width=4)
    except IntegrityError:
        pass
    else:
        raise SystemExit(f"{name}: decoded as a block")
    store = MemoryStore()
    store.create("doc", bomb)
    try:
        documents.read(store, "doc", kind="commit")
    except IntegrityError:
        pass
    else:
        raise SystemExit(f"{name}: read as a document")
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < (600 << 10), f"{grown} KiB"
print("held")
"""


# -- files of 16 GiB, all holes ------------------------------------------------------------------------------------------------

HUGE = 16 << 30
WHOLE_DOCUMENTS = (
    "format.json",
    "HEAD",
    "refs/heads/main",
    "logs/refs/heads/main/000000000003.json",
    f"objects/{COMMIT}.json",
    f"objects/{COMMIT}/r00000.manifest",
    f"objects/{COMMIT}/r00000.locations.0001",
)


@pytest.mark.parametrize("key", WHOLE_DOCUMENTS)
def test_a_document_of_16_gib_is_refused_before_it_is_read(forgery: Any, key: str) -> None:
    os.truncate(forgery.path / key, HUGE)
    clean(forgery.root)
    loaded, _, verified = attempts(forgery.root)
    assert isinstance(loaded, IntegrityError)
    assert re.search(rf"^'{key}' in .* is too long: expected at most (512|268435456) bytes, found 17179869184; ", str(loaded))
    assert verified is not None


@pytest.mark.parametrize(
    "key",
    [
        f"signatures/{COMMIT}.{'0' * 16}.json",
        f"intents/{COMMIT}.json",
        f"objects/{COMMIT}.dropped",
        f"receipts/main/{COMMIT}/r00000.json",
        "leases/main.json",
        "hello/x.json",
    ],
)
def test_what_a_load_does_not_need_costs_no_memory_either(forgery: Any, key: str) -> None:
    path = forgery.path / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, HUGE)
    clean(forgery.root)
    attempts(forgery.root)
    with suppress(SyckptError), syckpt.CheckpointManager(forgery.root, save_on_exit=False) as ckpt:
        assert ckpt.hash in (COMMIT, FIRST)


def test_a_blob_that_is_all_header_is_refused_before_it_is_read(forgery: Any) -> None:
    key = forgery.body("locations")["blobs"][0][0]
    os.truncate(forgery.path / key, HUGE)

    def change(body: dict[str, Any]) -> None:
        body["blobs"][0][1:3] = [HUGE, 8 << 30]
        body["rows"]["offset"] = [(8 << 30) + offset for offset in body["rows"]["offset"]]

    forgery.change("locations", change)
    loaded, _, verified = attempts(forgery.root)
    for error in (loaded, verified):
        assert isinstance(error, IntegrityError)
        assert "a header of 8589934592 bytes in 17179869184" in str(error)


def test_zstd_bombs_do_not_explode() -> None:
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr
