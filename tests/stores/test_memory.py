"""The memory store."""

import pytest

from syckpt.stores.memory import MemoryStore
from syckpt.testing.stores import StoreSuite


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
