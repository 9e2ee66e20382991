"""The conformance suite of stores: what `syckpt.stores.base` promises, as pytest tests. Needs pytest.

A plug-in subclasses `StoreSuite` in its own tests and overrides the `store` fixture with one that yields an empty store:

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore(...)
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Barrier
from time import time

import pytest

from syckpt.errors import ConflictError, FormatError, IntegrityError, NotFoundError, StoreError
from syckpt.stores.base import Store, unobserved

__all__ = ["MALFORMED_KEYS", "StoreSuite"]

MALFORMED_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\\b", "a\0b", "a\nb", "\u00e4", "staging", "staging/a"]
THREADS = 20


class StoreSuite:
    """Subclass it, and override `store`."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("override the `store` fixture with one that yields an empty store")

    def test_get_returns_what_create_stored(self, store: Store) -> None:
        store.create("a/b", b"content")
        assert store.get("a/b") == b"content"

    def test_create_takes_any_contiguous_buffer(self, store: Store) -> None:
        store.create("a", memoryview(bytearray(16)).cast("B", (2, 8)))
        assert store.get("a") == bytes(16)

    def test_an_empty_value_is_present(self, store: Store) -> None:
        store.create("a", b"")
        assert (store.size("a"), store.get("a"), store.list()) == (0, b"", ["a"])

    def test_get_returns_a_range(self, store: Store) -> None:
        store.create("a", b"0123456789")
        assert store.get("a", offset=2, length=3) == b"234"

    def test_get_from_an_offset_returns_the_rest(self, store: Store) -> None:
        store.create("a", b"0123456789")
        assert (store.get("a", offset=7), store.get("a", offset=10)) == (b"789", b"")

    def test_get_of_a_range_beyond_the_end_names_key_and_sizes(self, store: Store) -> None:
        store.create("a/b", b"0123456789")
        with pytest.raises(IntegrityError, match=r"a/b.*expected at least 14 bytes, found 10"):
            store.get("a/b", offset=8, length=6)

    def test_get_from_an_offset_beyond_the_end_is_refused(self, store: Store) -> None:
        store.create("a", b"0123456789")
        with pytest.raises(IntegrityError, match="expected at least 11 bytes, found 10"):
            store.get("a", offset=11)

    def test_get_refuses_more_bytes_than_the_limit(self, store: Store) -> None:
        store.create("a/b", b"0123456789")
        assert (store.get("a/b", limit=10), store.get("a/b", offset=4, limit=6)) == (b"0123456789", b"456789")
        with pytest.raises(IntegrityError, match=r"a/b.*expected at most 9 bytes, found 10"):
            store.get("a/b", limit=9)
        with pytest.raises(IntegrityError, match=r"a/b.*expected at most 2 bytes, found 3"):
            store.get("a/b", offset=1, length=3, limit=2)

    def test_get_of_an_absent_key_names_it(self, store: Store) -> None:
        with pytest.raises(NotFoundError, match="no/such"):
            store.get("no/such")

    def test_readinto_fills_the_buffer_from_the_offset(self, store: Store) -> None:
        store.create("a", b"0123456789")
        buffer = bytearray(b"....")
        store.readinto("a", memoryview(buffer)[1:], offset=5)
        assert buffer == b".567"

    def test_readinto_an_empty_buffer_reads_nothing(self, store: Store) -> None:
        store.create("a", b"0123")
        store.readinto("a", bytearray(), offset=4)

    def test_readinto_beyond_the_end_names_key_and_sizes(self, store: Store) -> None:
        store.create("a/b", b"0123456789")
        with pytest.raises(IntegrityError, match=r"a/b.*expected at least 12 bytes, found 10"):
            store.readinto("a/b", bytearray(4), offset=8)

    def test_readinto_of_an_absent_key_names_it(self, store: Store) -> None:
        with pytest.raises(NotFoundError, match="no/such"):
            store.readinto("no/such", bytearray(1))

    def test_readinto_after_a_delete_finds_nothing(self, store: Store) -> None:
        store.create("a", b"0123")
        store.readinto("a", bytearray(4))
        store.delete("a")
        with pytest.raises(NotFoundError):
            store.readinto("a", bytearray(4))

    def test_readinto_after_a_replace_reads_the_new_bytes(self, store: Store) -> None:
        store.replace("a", b"old")
        buffer = bytearray(3)
        store.readinto("a", buffer)
        store.replace("a", b"new")
        store.readinto("a", buffer)
        assert buffer == b"new"

    def test_concurrent_readinto_of_many_keys_reads_each_its_own(self, store: Store) -> None:
        keys = [f"k{n}" for n in range(100)]
        for n, key in enumerate(keys):
            store.create(key, bytes([n]) * 1000)

        def read(n: int) -> bool:
            buffer = bytearray(900)
            store.readinto(keys[n % 100], buffer, offset=100)
            return buffer == bytes([n % 100]) * 900

        with ThreadPoolExecutor(THREADS) as pool:
            assert all(pool.map(read, range(1000)))

    def test_a_flat_listing_stops_at_directories(self, store: Store) -> None:
        for key in ("a/b/c", "a/d", "a.e", "f"):
            store.create(key, b"1")
        assert store.list(deep=False) == ["a.e", "f"]
        assert store.list("a", deep=False) == store.list("a/", deep=False) == ["a/d"]
        assert store.list("a") == ["a/b/c", "a/d"]
        assert store.list("none", deep=False) == []

    def test_a_key_knows_when_it_was_written(self, store: Store) -> None:
        before = time()
        store.create("a/b", b"12")
        store.replace("c", b"3")
        for key in ("a/b", "c"):
            written = store.modified_s(key)
            assert written is not None
            assert before - 60 < written < time() + 60  # file systems round, and servers have clocks of their own
        assert (store.modified_s("a"), store.modified_s("d"), store.modified_s("a/b/c")) == (None, None, None)

    def test_size_of_an_absent_key_is_none(self, store: Store) -> None:
        store.create("a/b", b"12")
        assert (store.size("a/b"), store.size("a"), store.size("c"), store.size("a/b/c")) == (2, None, None, None)

    def test_create_of_a_present_key_is_a_conflict_and_keeps_its_bytes(self, store: Store) -> None:
        store.create("a/b", b"first")
        with pytest.raises(ConflictError, match="a/b"):
            store.create("a/b", b"second")
        assert store.get("a/b") == b"first"

    def test_a_sink_whose_key_was_taken_meanwhile_is_a_conflict(self, store: Store) -> None:
        sink = store.sink("a")
        sink.write([b"second"])
        store.create("a", b"first")
        with pytest.raises(ConflictError):
            sink.close()
        assert store.get("a") == b"first"

    def test_of_racing_creators_exactly_one_wins(self, store: Store) -> None:
        barrier = Barrier(THREADS)

        def create(n: int) -> bool:
            barrier.wait()
            try:
                store.create("new/directory/key", b"%02d" % n)
            except ConflictError:
                return False
            return True

        with ThreadPoolExecutor(THREADS) as pool:
            won = list(pool.map(create, range(THREADS)))
        assert won.count(True) == 1
        assert store.get("new/directory/key") == b"%02d" % won.index(True)

    def test_replace_makes_and_overwrites(self, store: Store) -> None:
        store.replace("a/b", b"first, longer")
        store.replace("a/b", b"second")
        assert (store.get("a/b"), store.list()) == (b"second", ["a/b"])

    def test_a_sink_is_invisible_until_closed(self, store: Store) -> None:
        with store.sink("a/b") as sink:
            sink.write([b"content"])
            sink.flush()
            assert (store.size("a/b"), store.list()) == (None, [])
        assert (store.get("a/b"), store.list()) == (b"content", ["a/b"])

    def test_a_sink_joins_its_buffers_in_order(self, store: Store) -> None:
        with store.sink("a") as sink:
            sink.write([b"one ", bytearray(b"two "), memoryview(b"three ")])
            sink.write([])
            sink.write([b"", b"four"])
            assert sink.tell() == 18
            assert sink.close() == 18
        assert store.get("a") == b"one two three four"

    def test_a_sink_joins_large_and_small_buffers_across_write_boundaries(self, store: Store) -> None:
        pieces = [bytes([n]) * size for n, size in enumerate([1, 5_000_000, 7, 5000, 20_000_000, 3, 4096, 4095, 8_388_608, 1])]
        with store.sink("a") as sink:
            sink.write(pieces[:4])
            sink.flush()
            for piece in pieces[4:]:
                sink.write([piece])
        assert store.get("a") == b"".join(pieces)

    def test_a_sink_takes_thousands_of_buffers_at_once(self, store: Store) -> None:
        pieces = [bytes([n % 251]) * 4100 for n in range(3000)]
        with store.sink("a") as sink:
            sink.write(pieces)
        assert store.get("a") == b"".join(pieces)

    def test_a_buffer_may_be_reused_after_flush(self, store: Store) -> None:
        buffer = bytearray(b"x" * 10_000)
        with store.sink("a") as sink:
            sink.write([buffer])
            sink.flush()
            buffer[:] = b"y" * 10_000
            sink.write([buffer])
        assert store.get("a") == b"x" * 10_000 + b"y" * 10_000

    def test_patch_rewrites_earlier_bytes_and_moves_nothing(self, store: Store) -> None:
        with store.sink("a") as sink:
            sink.write([b"........", b"body"])
            sink.patch(0, b"head")
            sink.write([b" tail"])
            sink.patch(6, b"::")
            assert sink.tell() == 17
        assert store.get("a") == b"head..::body tail"

    def test_patch_beyond_what_was_written_is_refused(self, store: Store) -> None:
        with store.sink("a") as sink:
            sink.write([b"1234"])
            with pytest.raises(ValueError, match="only 4 were written"):
                sink.patch(2, b"xyz")

    def test_an_aborted_sink_leaves_nothing(self, store: Store) -> None:
        sink = store.sink("a")
        sink.write([b"content"])
        sink.abort()
        sink.abort()
        assert store.list() == []
        with pytest.raises(ValueError, match="aborted"):
            sink.close()

    def test_an_exception_in_its_block_aborts_a_sink(self, store: Store) -> None:
        with suppress(ZeroDivisionError), store.sink("a") as sink:
            sink.write([b"content"])
            raise ZeroDivisionError
        assert (store.size("a"), store.list()) == (None, [])

    def test_a_closed_sink_says_its_size_again_and_takes_no_more(self, store: Store) -> None:
        with store.sink("a") as sink:
            sink.write([b"1234"])
        sink.abort()
        assert (sink.close(), store.get("a")) == (4, b"1234")
        with pytest.raises(ValueError, match="closed"):
            sink.write([b"5"])

    def test_list_is_sorted_and_holds_what_lies_below_the_directory(self, store: Store) -> None:
        for key in ["b/2", "b/10", "b/c/d", "b.json", "bb/1", "a"]:
            store.create(key, b"")
        assert store.list() == ["a", "b.json", "b/10", "b/2", "b/c/d", "bb/1"]
        assert store.list("b") == store.list("b/") == ["b/10", "b/2", "b/c/d"]

    def test_list_of_nothing_is_empty(self, store: Store) -> None:
        store.create("a", b"")
        assert (store.list("b"), store.list("a"), store.list("a/b/c")) == ([], [], [])

    def test_list_excludes_unfinished_sinks(self, store: Store) -> None:
        with store.sink("a") as sink:
            sink.write([b"content"])
            sink.flush()
            assert store.list() == []
            sink.abort()

    def test_delete_removes_the_key_alone(self, store: Store) -> None:
        for key in ["objects/x.json", "objects/x/1", "objects/x/2"]:
            store.create(key, b"")
        store.delete("objects/x/1")
        assert store.list() == ["objects/x.json", "objects/x/2"]

    def test_delete_of_an_absent_key_is_fine(self, store: Store) -> None:
        store.delete("a")
        store.delete("objects/b/c")
        assert store.list() == []

    def test_a_deleted_key_can_be_created_again(self, store: Store) -> None:
        store.create("objects/x/1", b"old")
        store.delete("objects/x/1")
        store.create("objects/x/1", b"new")
        assert store.get("objects/x/1") == b"new"

    def test_creates_and_deletes_that_share_a_directory_do_not_disturb_each_other(self, store: Store) -> None:
        def churn(n: int) -> None:
            for _ in range(10):
                store.create(f"objects/x/{n}", b"")
                store.delete(f"objects/x/{n}")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(churn, range(8)))
        assert store.list() == []

    def test_a_living_sink_is_neither_listed_nor_collected(self, store: Store) -> None:
        with store.sink("a") as sink:
            sink.write([b"content"])
            sink.flush()
            assert (store.staging(), store.collect_staging()) == ({}, {})
        assert store.get("a") == b"content"

    @pytest.mark.parametrize("key", MALFORMED_KEYS)
    def test_malformed_keys_are_refused(self, store: Store, key: str) -> None:
        operations: list[Callable[[], object]] = [
            lambda: store.get(key),
            lambda: store.readinto(key, bytearray(1)),
            lambda: store.size(key),
            lambda: store.create(key, b""),
            lambda: store.replace(key, b""),
            lambda: store.sink(key),
            lambda: store.delete(key),
        ]
        for operation in operations:
            with pytest.raises(FormatError, match="not a store key"):
                operation()

    def test_free_nbytes_is_positive_or_unknown(self, store: Store) -> None:
        free = store.free_nbytes()
        assert free is None or free > 0

    def test_describe_says_something(self, store: Store) -> None:
        assert store.describe()

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    def test_create_that_fails_at_any_mutation_leaves_the_key_absent(self, store: Store, code: int) -> None:
        self._fail_at_each_mutation(store, code, lambda key: store.create(key, b"content"))

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    def test_a_sink_that_fails_at_any_mutation_leaves_the_key_absent(self, store: Store, code: int) -> None:
        def write(key: str) -> None:
            with store.sink(key) as sink:
                sink.write([b"...."])
                sink.flush()
                sink.write([b"ent"])
                sink.patch(0, b"cont")

        self._fail_at_each_mutation(store, code, write)

    def test_replace_that_fails_at_any_mutation_leaves_old_bytes_or_new_ones(self, store: Store) -> None:
        store.replace("a", b"old")
        failed = 0
        for number in range(1, 100):
            with _failing(store, number, errno.EIO) as failures:
                try:
                    store.replace("a", b"new")
                except StoreError:
                    failed += 1
            assert store.get("a") in (b"old", b"new")
            assert store.list() == ["a"]
            if not failures:
                break
            store.replace("a", b"old")
        assert failed
        assert store.get("a") == b"new"

    def _fail_at_each_mutation(self, store: Store, code: int, create: Callable[[str], None]) -> None:
        """Each time a new key in a new directory; the last run meets no fault."""
        failed = 0
        for number in range(1, 100):
            key = f"objects/{number}/key"
            with _failing(store, number, code) as failures:
                try:
                    create(key)
                    found: bytes | None = b"content"
                except StoreError:
                    failed += 1
                    found = None
            assert store.list() == ([] if found is None else [key])
            if found is not None:
                assert store.get(key) == found
                store.delete(key)
            if not failures:
                break
        assert failed


@contextmanager
def _failing(store: Store, number: int, code: int) -> Iterator[list[str]]:
    """Fail the mutation of that number; yields the list that holds its operation afterwards."""
    seen = 0
    failures: list[str] = []

    def fail(operation: str, key: str) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            failures.append(operation)
            raise OSError(code, "injected")

    store.before_mutation = fail
    try:
        yield failures
    finally:
        store.before_mutation = unobserved
