"""Coverage-guided fuzzing of every decoder: whatever the bytes, only our own errors, in bounded memory and time.

    python tests/hostile/fuzz.py SECONDS       fuzz, from the seeds of a small repository
    python tests/hostile/fuzz.py FILE          run one input, such as a `crash-...` file that was left behind

The first byte of an input chooses the decoder. Documents are sealed here, so that the checks behind the seals are reached.
Needs the package atheris, except for a FILE.
"""

from __future__ import annotations

import json
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
    from syckpt import codecs
    from syckpt.codecs import zstd
    from syckpt.errors import SyckptError
    from syckpt.files import header
    from syckpt.hyperparams.config import HyperConfig
    from syckpt.objects import address, canonical, nodes
    from syckpt.objects.box import Box
    from syckpt.objects.commit import Commit
    from syckpt.objects.layouts import LayoutTable, Parts, TensorLayout
    from syckpt.objects.locations import Locations
    from syckpt.objects.manifest import Manifest
    from syckpt.objects.refs import Intent, Lease, Owner, RefRecord
    from syckpt.repo import documents
    from syckpt.repo.repository import Repository
    from syckpt.reshard.keeping import Keeping
    from syckpt.stores.memory import MemoryStore
    from syckpt.testing.repositories import make_repository

BASE = bytes(range(256)) * 16


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
    for node in read.items.values():
        nodes.decode(node)


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
    locations,
    commit,
    records,
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
            for decoder in (manifest, locations, commit, records, node):
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


def main(arguments: list[str]) -> None:
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
