"""Leases: who writes a branch, as a hint. It decides how long a newcomer waits and whom an error names; records decide who may publish."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace

from syckpt.errors import ConflictError, IntegrityError, NotFoundError
from syckpt.objects.refs import Lease
from syckpt.repo import documents
from syckpt.repo.keys import lease_key
from syckpt.repo.owner import is_dead, wait_for_exit
from syckpt.repo.repository import Repository

__all__ = ["LEASE_S", "RENEW_S", "await_drain", "await_holder", "expiring", "read", "release", "write"]

LEASE_S = 30.0
RENEW_S = 10.0
_log = logging.getLogger("syckpt")


def read(repository: Repository, branch: str) -> Lease | None:
    """Return the lease on a branch, or None. A damaged one is as good as none: it is only a hint."""
    key = lease_key(branch)
    try:
        body, _ = documents.read(repository.store, key, kind="lease")
        return Lease.from_body(body, where=key)
    except NotFoundError:
        return None
    except IntegrityError as exc:
        _log.warning("%s; going on without it, since a lease is only a hint", exc)
        return None


def expiring(lease: Lease) -> Lease:
    """Return a lease that is valid for its whole time from now on."""
    return replace(lease, expires_ns=time.time_ns() + int(LEASE_S * 1e9))


def write(repository: Repository, lease: Lease) -> None:
    """Take or renew a lease."""
    documents.write(repository.store, lease_key(lease.branch), lease.to_body(), replace=True)


def release(repository: Repository, branch: str, *, token: str) -> None:
    """Give a lease back, if it is still the one with that token."""
    lease = read(repository, branch)
    if lease is not None and lease.token == token:
        repository.store.delete(lease_key(branch))


def await_drain(repository: Repository, branch: str, *, timeout_s: float = LEASE_S) -> None:
    """Wait for the writer of a trainer that has died: a save that was handed over completes."""
    lease = read(repository, branch)
    if lease is None or lease.writer is None or is_dead(lease.trainer) is not True or is_dead(lease.writer) is not False:
        return
    _log.info("waiting for %s, which completes the last save of a trainer that has ended", lease.writer)
    if not wait_for_exit(lease.writer, timeout_s=timeout_s):
        _log.warning("%s is still at work after %g s; it will be fenced and its save given up", lease.writer, timeout_s)


def await_holder(repository: Repository, branch: str, *, run: str, token: str) -> None:
    """Return once the branch may be opened: nobody holds it, its holder is dead or of this run's older incarnation, or its lease ran out.

    Raises: ConflictError naming a holder that lives.
    """
    await_drain(repository, branch)
    lease = read(repository, branch)
    if lease is None or lease.token == token:
        return
    dead = is_dead(lease.trainer)
    same_process = dead is False and lease.trainer.pid == os.getpid()
    if dead is True or (lease.run == run and not same_process):
        return
    if dead is None:
        lease = _await_expiry(repository, lease)
        if lease is None:
            return
    raise ConflictError(
        f"branch {branch!r} is being written by {'another manager of this process' if same_process else lease.trainer} (run {lease.run},"
        f" generation {lease.generation}): stop it, or give this run a branch of its own: branch=..., or run_mode='new_branch'"
    )


def _await_expiry(repository: Repository, lease: Lease) -> Lease | None:
    """Wait until a lease from elsewhere runs out (None), or its holder renews it."""
    deadline = time.monotonic() + LEASE_S
    while (left_s := (lease.expires_ns - time.time_ns()) / 1e9) > 0 and time.monotonic() < deadline:
        time.sleep(min(1.0, left_s))
        now = read(repository, lease.branch)
        if now is None:
            return None
        if now.expires_ns != lease.expires_ns:
            return now
    return None
