"""`syckpt keygen`: a pair of keys to sign commits with."""

from __future__ import annotations

import click

from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

__all__ = ["command"]


@click.command("keygen", short_help="Make a pair of keys to sign with.")
@click.argument("path")
@json_option
@pass_invocation
def command(invocation: Invocation, path: str) -> None:
    """Make PATH, a private Ed25519 key that nobody but you may read, and PATH.pub, the public key that others check with.

    Give PATH to `CheckpointManager(signer=...)` or `syckpt sign`, and PATH.pub to `trusted_keys=` or `syckpt verify --trusted-key`. Keep
    PATH out of the experiment's directory: who can write there must not be able to sign. Nothing is overwritten (exit status 4).

    JSON: {"key", "private", "public"}; "key" is the key id that signatures name.

    \b
    Examples:
      syckpt keygen ~/.keys/team
      syckpt -C runs/exp1 sign HEAD --key ~/.keys/team
    """
    from syckpt.repo.signing import keygen

    key = keygen(path)
    if invocation.as_json:
        output.echo_json({"key": key, "private": path, "public": f"{path}.pub"})
    else:
        output.echo([f"{key}: private key {output.printable(path)}, public key {output.printable(path)}.pub"])
