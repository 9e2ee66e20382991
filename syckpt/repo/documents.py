"""Sealed documents in a store: the one place where JSON of the repository is read and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syckpt.errors import IntegrityError
from syckpt.objects import canonical
from syckpt.stores.base import Store

__all__ = ["read", "write"]

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_COMPRESS_ABOVE_NBYTES = 4096


def read(
    store: Store, key: str, *, kind: str, seal: str | None = None, parse: Callable[[bytes], Any] = canonical.loads_canonical
) -> tuple[dict[str, Any], str]:
    """Return the body and the seal of a document; `parse` does as `canonical.loads_canonical`.

    Raises: NotFoundError, IntegrityError (damaged, or not the document with the given `seal`), FormatError.
    """
    data = store.get(key, limit=canonical.MAX_DOCUMENT_NBYTES)
    if data[:4] == _ZSTD_MAGIC:
        from syckpt.codecs import zstd  # Brings numpy, which most documents do not need.

        try:
            data = zstd.decompress_document(data, limit=canonical.MAX_DOCUMENT_NBYTES)
        except IntegrityError as exc:
            raise IntegrityError(f"{key}: damaged: {exc}") from exc
    return canonical.unseal(data, key=key, kind=kind, seal=seal, parse=parse)


def write(store: Store, key: str, body: dict[str, Any], *, replace: bool = False) -> str:
    """Create (or replace) a document, durably, and return its seal.

    Raises: ConflictError when the key exists and `replace` is false; StoreError.
    """
    data, seal = canonical.seal(body)
    if len(data) > _COMPRESS_ABOVE_NBYTES:
        from syckpt.codecs import zstd

        data = zstd.frame(data)
    if replace:
        store.replace(key, data)
    else:
        store.create(key, data)
    return seal
