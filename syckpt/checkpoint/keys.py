"""The keys that a manager was given: what its writer signs with, and whom it trusts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from syckpt.errors import SyckptError
from syckpt.repo.signing import KeyFile, Signer, Trusted, load_trusted

__all__ = ["Keys"]

_log = logging.getLogger("syckpt")


@dataclass(frozen=True)
class Keys:
    """`signer`: absolute path of a private key that can be used, on rank 0; `trusted`: None trusts everybody.

    `error` is what was wrong with the arguments: for the first agreement, so that the other ranks hear of it.
    """

    signer: str | None = None
    trusted: Trusted | None = None
    error: SyckptError | None = None

    @staticmethod
    def read(signer: KeyFile | None, trusted_keys: KeyFile | Sequence[KeyFile] | None, *, rank: int) -> Keys:
        """Read what a manager was given; only rank 0 needs the private key."""
        try:
            own = Signer.open(signer) if signer is not None and rank == 0 else None
            trusted = None if trusted_keys is None else load_trusted(trusted_keys)
        except SyckptError as exc:
            return Keys(error=exc)
        if trusted is not None and rank == 0 and (own is None or own.key_id not in trusted.keys):
            how = "sign with no key" if own is None else f"sign with key {own.key_id}"
            _log.warning("this manager would %s, and trusts %s: what it saves, the next start with these keys refuses", how, trusted)
        return Keys(None if own is None else own.path, trusted)
