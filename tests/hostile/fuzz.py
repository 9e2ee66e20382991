"""Coverage-guided fuzzing of every decoder: whatever the bytes, only our own errors, in bounded memory and time.

    python tests/hostile/fuzz.py SECONDS       fuzz, from the seeds of a small repository
    python tests/hostile/fuzz.py FILE          run one input, such as a `crash-...` file that was left behind

The first byte of an input chooses the decoder. Documents are sealed here, so that the checks behind the seals are reached.
Needs the package atheris, except for a FILE.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

if len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    import atheris

    instrumented = atheris.instrument_imports(include=["syckpt"])
else:
    atheris, instrumented = None, nullcontext()

with instrumented:
    import numpy as np
    import torch

    from syckpt import codecs
    from syckpt.codecs import zstd
    from syckpt.errors import SyckptError, to_wire
    from syckpt.files import header
    from syckpt.hyperparams.config import HyperConfig
    from syckpt.objects import address, canonical, nodes
    from syckpt.objects.box import Box
    from syckpt.objects.commit import Commit
    from syckpt.objects.entries import entries_in, renumber
    from syckpt.objects.layouts import LayoutTable, Parts, TensorLayout
    from syckpt.objects.locations import BlobRecord, Locations
    from syckpt.objects.manifest import Alike, Entry, Manifest
    from syckpt.objects.refs import Intent, Lease, Owner, RefRecord
    from syckpt.repo import documents, keys, leases, repacking
    from syckpt.repo.receipts import Desk
    from syckpt.repo.repository import Repository
    from syckpt.repo.survey import Survey, read_intents
    from syckpt.repo.verification_documents import check_documents
    from syckpt.repo.verification_log import VerificationLog
    from syckpt.repo.verification_report import VerifyReport
    from syckpt.reshard.keeping import Keeping
    from syckpt.reshard.resharder import ShardingMetadata, decode_sharding, encode_sharding
    from syckpt.state.fit import Options, fit
    from syckpt.state.flatten import flatten, unflatten
    from syckpt.state.formats import JsonSerialization, RawSerialization, SafetensorsSerialization, TorchSerialization
    from syckpt.state.plain import plain
    from syckpt.stores.memory import MemoryStore
    from syckpt.testing.repositories import commit_id, make_repository

BASE = bytes(range(256)) * 16
EMPTY: dict[str, Any] = Manifest(0, 1, (), {}, None).to_body()
COMMIT = commit_id(1)
OTHERS = (
    keys.intent_key(COMMIT),
    keys.lease_key("main"),
    keys.receipt_key("main", COMMIT, 1),
    keys.verdict_key("main", COMMIT),
    keys.hello_key("x"),
    keys.mark_key(COMMIT, "dropped"),
    keys.mark_key(COMMIT, "damaged"),
    keys.signature_key(COMMIT, "0" * 16),
)


def loaded(data: bytes) -> Any:
    """Return the value of a JSON text; a text that is none is the end of it."""
    try:
        return canonical.loads(data)
    except (ValueError, RecursionError):
        raise Uninteresting from None


class Uninteresting(Exception):
    """The input does not reach the decoder."""


def sealed(data: bytes) -> bytes:
    return b'{"body":' + data + b',"seal":"' + canonical.digest_of(data).encode() + b'"}\n'


def unseal(data: bytes) -> None:
    for kind in ("commit", "manifest"):
        canonical.unseal(data, key="fuzz", kind=kind)


def unseal_sealed(data: bytes) -> None:
    unseal(sealed(data))


def read_document(data: bytes) -> None:
    store = MemoryStore()
    store.create("fuzz", data)
    documents.read(store, "fuzz", kind="locations")


def manifest(data: bytes) -> None:
    read = Manifest.from_body(loaded(data), where="fuzz")
    read.distinct()
    assert Manifest.from_body(json.loads(json.dumps(read.to_body())), where="fuzz") == read
    read.structures()
    everything = range(len(read.entries))
    for node in (*read.items.values(), read.rng):
        # What was checked when it was read is well formed: nothing here may raise.
        nodes.decode(node)
        assert entries_in([node]) <= set(everything)
        assert renumber(node, {index: index for index in everything}) == node
        assert len(list(nodes.walk(node))) >= 1
        list(nodes.plainer(node))
        nodes.children(node)


TEMPLATE = {"a": torch.zeros(3), "b": [np.zeros((2, 3)), 1, None], "c": {"state": {}, "param_groups": [{"lr": 0.1}]}}


def values(data: bytes) -> None:
    """What torch and numpy make of a manifest's nodes, and how they fit live values."""
    read = Manifest.from_body(loaded(data), where="fuzz")

    def tensor(index: int) -> torch.Tensor:
        entry = read.entries[index]
        if math.prod(max(1, size) for size in entry.shape) > 4096:
            raise Uninteresting
        return torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype, torch.uint8))

    works: list[Callable[[Any], Any]] = [
        lambda node: unflatten(node, tensor),
        lambda node: plain(node, tensor, path=("m",)),
        lambda node: fit(node, None, path=("m",), entries=read.entries).build(tensor),
        lambda node: fit(node, TEMPLATE, path=("m",), entries=read.entries).problems,
        lambda node: fit(node, TEMPLATE, path=("m",), entries=read.entries, options=Options(cast=True, as_saved=True)).build(tensor),
    ]
    for node in (*read.items.values(), read.rng):
        for work in works:
            try:
                work(node)
            except (SyckptError, Uninteresting):
                continue


ONE = Manifest(0, 2, (Entry(("m",), "uint8", (4,), None, b"x" * 32),), {"m": {"tensor": 0}}, None)


def alike(data: bytes) -> None:
    """A manifest's text behind another one: what is taken over from that is what the text says."""

    def outcome(read: Callable[[bytes], Any]) -> Any:
        try:
            return canonical.dumps(read(data))
        except (ValueError, RecursionError):
            return None

    known = Alike()
    Manifest.from_body(known.parse(canonical.dumps(ONE.to_body())), where="fuzz", alike=known)
    assert outcome(known.parse) == outcome(canonical.loads_canonical)


def sharding(data: bytes) -> None:
    read = Manifest.from_body({**EMPTY, "sharding": {"m": loaded(data)}}, where="fuzz")
    decode_sharding(read.sharding["m"], where="fuzz")


def locations(data: bytes) -> None:
    read = Locations.from_body(loaded(data), where="fuzz")
    assert Locations.from_body(json.loads(json.dumps(read.to_body())), where="fuzz") == read


def commit(data: bytes) -> None:
    read = Commit.from_body(loaded(data), seal="", where="fuzz")
    read.to_body()
    HyperConfig(read.config)


def records(data: bytes) -> None:
    body = loaded(data)
    for kind in (RefRecord, Intent, Lease, Owner):
        try:
            kind.from_body(body, where="fuzz")
        except SyckptError:
            continue


def block(data: bytes) -> None:
    width = (1, 2, 4, 8)[data[0] & 3] if data else 1
    nbytes = (0, 8, 64, 4096)[data[0] >> 2 & 3] if data else 0
    base = BASE[:nbytes] if data and data[0] & 16 else None
    codecs.decode_block(data[1:], out=bytearray(nbytes), width=width, base=base)


def frame(data: bytes) -> None:
    for nbytes in (0, 1, 4096, 1 << 20):
        try:
            zstd.decompress(data, nbytes=nbytes)
        except SyckptError:
            continue
    assert len(zstd.decompress_document(data, limit=1 << 20)) <= 1 << 20


def node(data: bytes) -> None:
    nodes.decode(loaded(data))


def repository(data: bytes) -> None:
    """HEAD and a ref record, as they are read for any revision."""
    store = MemoryStore()
    documents.write(
        store, "format.json", {"kind": "repository", "version": 1, "id": "x", "digest": "blake3", "required": [], "optional": []}
    )
    store.create("HEAD", data[:64])
    store.create("logs/refs/heads/main/000000000001.json", sealed(data[64:]))
    found = Repository(store, "x")
    found.refs.names("heads")
    found.refs.head(f"heads/{found.head_branch()}")


@functools.cache
def small() -> tuple[tuple[str, bytes], ...]:
    """Return the keys and bytes of a repository of one commit."""
    with tempfile.TemporaryDirectory() as directory:
        store = make_repository(directory, commits=1).store
        return tuple((key, store.get(key)) for key in store.list())


def others(data: bytes) -> None:
    """Documents beside commits and records, the first byte says which, as they are read and verified."""
    if not data:
        return
    store = MemoryStore()
    for key, there in small():
        store.create(key, there)
    store.create(OTHERS[data[0] % len(OTHERS)], sealed(data[1:]))
    found = Repository(store, "x")
    check_documents(found, VerifyReport())
    looks: tuple[Callable[[], Any], ...] = (
        lambda: list(read_intents(found)),
        lambda: leases.read(found, "main"),
        lambda: Survey(found).settled([COMMIT]),
        lambda: found.why(COMMIT, "damaged"),
        lambda: Desk(found, "main", COMMIT, timeout_s=0).collect([1]),
        lambda: Desk(found, "main", COMMIT, timeout_s=0).await_intent(),
    )
    for look in looks:
        try:
            look()
        except SyckptError:
            continue


def verification_log(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(sealed(data))
        file.flush()
        VerificationLog(Repository(MemoryStore(), "x"), file.name, of="everything").knows(COMMIT, "")


def blob_header(data: bytes) -> None:
    store = MemoryStore()
    head = len(data).to_bytes(8, "little") + data
    store.create("objects/x/blob", head)
    repacking._names(Repository(store, "x"), BlobRecord("objects/x/blob", len(head), len(head), address.leaf(head)))


@dataclasses.dataclass
class Inner:
    size: int = 0


@dataclasses.dataclass
class Outer:
    name: str = ""
    inner: Inner = dataclasses.field(default_factory=Inner)


FORMATS = (TorchSerialization(), JsonSerialization(), JsonSerialization(Outer), RawSerialization(), SafetensorsSerialization())


def formats(data: bytes) -> None:
    """The file of a format; the first byte says which."""
    if data:
        FORMATS[data[0] % len(FORMATS)].decode(data[1:])


def file_header(data: bytes) -> None:
    header.parse(len(data).to_bytes(8, "little") + data, where="fuzz")


def file_content(data: bytes) -> None:
    """A header whose document is sealed, so that its content is looked at."""
    document = sealed(b'{"content":' + data + b',"kind":"file","signature":null,"version":1}')
    text = json.dumps({"__metadata__": {"syckpt": document.decode("latin-1")}}).encode()
    header.parse(len(text).to_bytes(8, "little") + text, where="fuzz")


def layouts(data: bytes) -> None:
    read = LayoutTable.from_body(loaded(data), where="fuzz")
    assert LayoutTable.from_body(json.loads(json.dumps(read.to_body())), where="fuzz") == read
    keeping = Keeping(read, where="fuzz")
    for row in read.tensors[:3]:
        assert keeping.ranks(row.path, [Box((0,) * len(row.shape), tuple(min(1, size) for size in row.shape))]) <= set(
            range(read.world_size)
        )


DECODERS: tuple[Callable[[bytes], None], ...] = (
    unseal,
    unseal_sealed,
    read_document,
    manifest,
    values,
    alike,
    sharding,
    locations,
    commit,
    records,
    others,
    verification_log,
    blob_header,
    formats,
    block,
    frame,
    node,
    repository,
    file_header,
    file_content,
    layouts,
)


def run_one(data: bytes) -> None:
    """Give an input to its decoder; anything but an error of ours comes out."""
    if not data:
        return
    try:
        DECODERS[data[0] % len(DECODERS)](data[1:])
    except (SyckptError, Uninteresting):
        return


def seeds() -> Iterator[tuple[Callable[[bytes], None], bytes]]:
    """Yield real inputs of each decoder."""
    with tempfile.TemporaryDirectory() as directory:
        store = make_repository(directory, commits=2).store
        for key in store.list():
            data = store.get(key)
            if key.endswith(".safetensors"):
                continue
            if key in ("HEAD", "refs/heads/main"):
                yield repository, data
                continue
            yield unseal, data
            yield read_document, data
            text = zstd.decompress_document(data, limit=1 << 20) if data[:4] == b"\x28\xb5\x2f\xfd" else data
            body = canonical.dumps(json.loads(text)["body"])
            yield unseal_sealed, body
            for decoder in (manifest, values, locations, commit, records, node):
                yield decoder, body
    rows = (
        TensorLayout(("m", "w"), "int8", (8, 3), 1, 1),
        TensorLayout(("m", "v"), "int8", (3,), None, 5),
        TensorLayout(("m", "u"), "int8", (3,), 2, 0),
    )
    parts = Parts(((6, Box((0,), (2,))), (2, Box((2,), (1,)))))
    meshes = (((2, 4), (7, 5, 3, 1, 0, 2, 4, 6)),)
    table = LayoutTable(8, {"m": ((0, 2, 4), (1, 7))}, meshes, ((0, ((0, 4), (0,))), (0, (None, (1,))), parts), rows)
    yield layouts, canonical.dumps(table.to_body())
    yield from more_seeds()
    records_of = [("a", "float32", (3, 4), 48), ("b", "bfloat16", (2**20,), 2**21), ("c", "bits8", (0,), 0)]
    made, begin = [], 0
    for name, kind, shape, nbytes in records_of:
        leaves = [address.leaf(bytes(min(nbytes - at, 1 << 20))) for at in range(0, nbytes, 1 << 20)]
        digest = address.address(kind, shape, b"".join(leaves))
        made.append(header.Record(name, kind, shape, digest, b"".join(leaves) if len(leaves) > 1 else b"", begin))
        begin += nbytes
    contents = header.Contents(tuple(made), (("d", "a"),))
    yield file_header, header.render(contents)[8:]
    yield file_content, canonical.dumps(contents.to_body())
    workspace = codecs.Workspace()
    for width, code in ((1, 0), (2, 1), (4, 2), (8, 3)):
        for raw in (BASE, bytes(4096), os.urandom(4096), BASE[:4000] + bytes(96)):
            for base, flag in ((None, 0), (BASE, 16)):
                pieces = codecs.encode_block(raw, width=width, base=base, workspace=workspace)
                yield block, bytes([code | 12 | flag]) + b"".join(map(bytes, pieces))
    for frames in (zstd.frame(BASE), zstd.entropy(BASE), zstd.fast(BASE), zstd.frame(b"")):
        yield frame, frames
    for value in (None, {"a": [1, (2, {3}), b"x", 1j, float("nan"), 2**70]}, range(3), slice(1, 2), "\ud800", frozenset({1})):
        yield node, canonical.dumps(nodes.encode(value))


def more_seeds() -> Iterator[tuple[Callable[[bytes], None], bytes]]:
    """Yield a state with every kind of value, what surrounds a save, and a file of each format."""
    state = {
        "m": {"w": torch.ones(3), "n": [np.asfortranarray(np.ones((2, 3))), np.float32(3)], "size": torch.Size([1, 2])},
        "o": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "g": [torch.Generator(), np.random.default_rng(3), np.random.RandomState(1), torch.float32, torch.device("cpu")],
    }
    flat = flatten(state)
    made = {
        "path": [list(leaf.path) for leaf in flat.leaves],
        "dtype": [leaf.dtype for leaf in flat.leaves],
        "shape": [list(leaf.shape) for leaf in flat.leaves],
        "box": [None] * len(flat.leaves),
        "address": [None] * len(flat.leaves),
    }
    body = canonical.dumps({**EMPTY, "items": flat.nodes, "tensors": made})
    yield manifest, body
    yield values, body
    yield (
        alike,
        canonical.dumps(dataclasses.replace(ONE, rank=1, entries=(ONE.entries[0]._replace(dtype="int8", address=b"y" * 32),)).to_body()),
    )
    declared = ShardingMetadata((8, 3), torch.float32, (Box((2, 0), (2, 3)),), {"more": [1]})
    yield sharding, canonical.dumps(encode_sharding("m", {("rows", 3): declared}))
    owner = {"host": "h", "boot": "b", "pidns": "n", "pid": 1, "start": 2}
    error = to_wire(ValueError("x"))
    about: dict[str, dict[str, Any]] = {
        "intent": {"commit": COMMIT, "branch": "main", "generation": 1, "run": "r", "uses": [COMMIT], "owner": owner},
        "lease": {"branch": "main", "run": "r", "generation": 1, "token": "t", "trainer": owner, "writer": None, "expires_ns": "17"},
        "receipt": {"commit": COMMIT, "rank": 1, "manifest": "ab" * 32, "stats": {}, "blobs": {"x": 1}, "items": {}, "error": None},
        "verdict": {"commit": COMMIT, "rank": 0, "seal": None, "error": error},
        "hello": {},
        "mark": {"why": "x", "owner": owner},
        "signature": {"commit": COMMIT, "seal": "ab" * 32, "key": "0" * 16, "signature": "A" * 86},
    }
    for number, kind in enumerate(("intent", "lease", "receipt", "verdict", "hello", "mark", "mark", "signature")):
        yield others, bytes([number]) + canonical.dumps({"kind": kind, "version": 1, **about[kind]})
    yield others, bytes([2]) + canonical.dumps({"kind": "receipt", "version": 1, **about["receipt"], "error": error})
    where = f"x {MemoryStore().describe()}"
    log = {"kind": "verification", "version": 1, "repository": where, "of": "everything", "begun_s": 1_700_000_000, "whole": {COMMIT: "ab"}}
    log["part"] = ["", "", 0]
    yield verification_log, canonical.dumps(log)
    yield blob_header, b'{"m/w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}  '
    tensors = {"a": torch.ones(2), "b": torch.zeros(1, dtype=torch.bfloat16)}
    for number, value in enumerate(({"w": torch.ones(2), "n": [1, "x"]}, {"a": [1, 2.5, None]}, Outer(), b"abc", tensors)):
        yield formats, bytes([number]) + FORMATS[number].encode(value)


def main(arguments: list[str]) -> None:
    logging.disable()
    if os.path.isfile(arguments[0]):
        run_one(Path(arguments[0]).read_bytes())
        return
    with tempfile.TemporaryDirectory() as corpus:
        for number, (decoder, data) in enumerate(seeds()):
            Path(corpus, str(number)).write_bytes(bytes([DECODERS.index(decoder)]) + data)
        options = [f"-max_total_time={arguments[0]}", "-max_len=16384", "-timeout=20", "-rss_limit_mb=1500", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *options, *arguments[1:], corpus], run_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
