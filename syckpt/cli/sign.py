"""`syckpt sign`: vouch for a commit with a private key."""

from __future__ import annotations

import click

from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

__all__ = ["command"]


@click.command("sign", short_help="Sign a commit.")
@click.argument("rev")
@click.option("--key", "path", metavar="PATH", required=True, help="The private key, as `syckpt keygen PATH` makes it.")
@json_option
@pass_invocation
def command(invocation: Invocation, rev: str, path: str) -> None:
    """Sign a commit: its content, all that is below it, and its parents.

    You vouch for what is there now: run `syckpt verify REV` before, and compare the id and `syckpt show REV` with what the training
    said. A commit may have signatures by several keys. Signing it twice with one key changes nothing.

    JSON: {"id", "key", "signed"}; "signed" is false if the signature was there already.

    \b
    Examples:
      syckpt sign HEAD --key ~/.keys/team
      syckpt sign best --key ~/.keys/release
    """
    from syckpt.repo import history, signing

    repository = invocation.repository()
    signer = signing.Signer.open(path)
    commit = history.resolve(repository, rev)
    repository.check_whole(commit)
    signed = signing.sign(repository, commit, signer)
    if invocation.as_json:
        output.echo_json({"id": commit.id, "key": signer.key_id, "signed": signed})
    else:
        output.echo([f"{commit.id} {'signed' if signed else 'was signed already'} by key {signer.key_id}"])
