"""Sealed documents in a store, whole and hostile."""

from __future__ import annotations

import time

import pytest

from syckpt.codecs import zstd
from syckpt.errors import ConflictError, IntegrityError, NotFoundError
from syckpt.objects import canonical
from syckpt.repo import documents
from syckpt.stores.memory import MemoryStore


def body(nbytes: int) -> dict:
    return {"kind": "test", "version": 1, "text": "a" * nbytes}


@pytest.mark.parametrize(("nbytes", "compressed"), [(0, False), (3900, False), (4200, True), (1_000_000, True)])
def test_documents_come_back_and_long_ones_are_stored_as_one_zstd_frame(nbytes, compressed):
    store = MemoryStore()
    seal = documents.write(store, "a/b.json", body(nbytes))
    stored = store.get("a/b.json")
    assert stored.startswith(b"\x28\xb5\x2f\xfd") is compressed
    assert len(stored) < 4200
    assert documents.read(store, "a/b.json", kind="test") == (body(nbytes), seal)
    assert documents.read(store, "a/b.json", kind="test", seal=seal)[0] == body(nbytes)
    # The seal is of the uncompressed body.
    assert seal == canonical.digest_of(canonical.dumps(body(nbytes)))


def test_a_document_is_created_once_unless_it_may_be_replaced():
    store = MemoryStore()
    documents.write(store, "k", body(1))
    with pytest.raises(ConflictError):
        documents.write(store, "k", body(2))
    assert documents.read(store, "k", kind="test")[0] == body(1)
    documents.write(store, "k", body(2), replace=True)
    assert documents.read(store, "k", kind="test")[0] == body(2)
    with pytest.raises(NotFoundError, match="'absent'"):
        documents.read(store, "absent", kind="test")


@pytest.mark.parametrize("nbytes", [10, 6000])
def test_every_flipped_byte_and_every_cut_is_an_integrity_error_that_names_the_key(nbytes):
    store = MemoryStore()
    documents.write(store, "the/key", body(nbytes))
    good = store.get("the/key")
    for position in range(len(good)):
        for damaged in (good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :], good[:position]):
            store.replace("the/key", damaged)
            with pytest.raises(IntegrityError, match="the/key"):
                documents.read(store, "the/key", kind="test")
    for damaged in (good + b"x", good + good):
        store.replace("the/key", damaged)
        with pytest.raises(IntegrityError, match="the/key"):
            documents.read(store, "the/key", kind="test")


def test_a_bomb_is_refused_quickly_and_without_the_memory_that_it_asks_for():
    import tracemalloc

    store = MemoryStore()
    bomb = zstd.frame(b"\0" * (300 << 20))
    store.replace("bomb", bomb)
    store.replace("nested", zstd.frame(bomb))
    tracemalloc.start()
    started = time.process_time()
    for key in ("bomb", "nested"):
        with pytest.raises(IntegrityError, match=key):
            documents.read(store, key, kind="test")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 270 << 20
    assert time.process_time() - started < 5


def test_another_kind_or_another_document_is_refused():
    store = MemoryStore()
    seal = documents.write(store, "k", body(5))
    with pytest.raises(IntegrityError, match="expected a commit, found 'test'"):
        documents.read(store, "k", kind="commit")
    other = "0" * 64
    with pytest.raises(IntegrityError, match=f"seal {seal[:16]}.., expected {other[:16]}"):
        documents.read(store, "k", kind="test", seal=other)
