"""Staging memory: what stands in its way is told in our own words."""

import resource

import pytest

from syckpt.errors import StoreError
from syckpt.state.staging import Slot


def test_a_limit_of_file_sizes_that_staging_memory_exceeds_is_a_store_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError, match=r"no staging memory of \d+ bytes: File too large; .*ulimit -f"):
            Slot(0, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
