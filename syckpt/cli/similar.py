"""`syckpt similar`: commits whose hyperparameters are near those of a commit, or of a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from syckpt.cli import commits as shown
from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation

if TYPE_CHECKING:
    from syckpt.objects.commit import Commit
    from syckpt.repo.labels import Labels
    from syckpt.repo.repository import Repository
    from syckpt.repo.similarity import Similar

__all__ = ["command"]

_SHOWN = 8
"""Differences that are listed below a commit."""


@click.command("similar", short_help="Commits with similar hyperparameters.")
@click.argument("what", metavar="REV|CONFIG.json")
@click.option("-k", "k", type=click.IntRange(min=1), default=5, show_default=True, metavar="N", help="Show at most N commits.")
@json_option
@pass_invocation
def command(invocation: Invocation, what: str, k: int) -> None:
    """Show the commits whose hyperparameters are the most similar to those of a commit, or to the object in a JSON file (a name that ends
    in .json). Each configuration counts once a branch, by its newest commit; that of REV itself is left out.

    "similarity" is the share of hyperparameters that agree, numbers by nearness on a logarithmic scale; "bits" is how many of the 32 bits
    of the fingerprints differ, by which the candidates were found. Below a commit stands what leads from the given configuration to
    its own.

    JSON: a list of objects of `syckpt log --json`, each with "similarity", "estimate", "distance" and "diff".

    \b
    Examples:
      syckpt similar HEAD              who else tried something like this?
      syckpt similar plan.json -k 10   has this been tried before it is run?
      syckpt similar HEAD --json | jq '.[] | [.similarity, .metric]'
    """
    from syckpt.repo.labels import Labels

    repository = invocation.repository()
    config, found = _search(repository, what, k)
    labels = Labels(repository)
    if invocation.as_json:
        output.echo_json([_record(one, config, labels) for one in found])
    elif found:
        output.echo(_lines(found, config, labels))
    else:
        output.note("no other commit has a configuration to compare with")


def _search(repository: Repository, what: str, k: int) -> tuple[Mapping[str, Any], list[Similar]]:
    from syckpt.hyperparams.config import HyperConfig
    from syckpt.repo import history
    from syckpt.repo.similarity import similar

    if what.endswith(".json"):
        config = _read(Path(what))
        return config, similar(repository, config, k)
    own = history.resolve(repository, what)
    hyper = HyperConfig(own.config)
    others = [one for one in similar(repository, own.config, k + 1) if not _is_own(one.commit, own, hyper)]
    return own.config, others[:k]


def _is_own(commit: Commit, own: Commit, config: Mapping[str, Any]) -> bool:
    return commit.branch == own.branch and config == commit.config


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise click.UsageError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise click.UsageError(f"{path} holds a {type(config).__name__}; expected an object of hyperparameters")
    return config


def _record(one: Similar, config: Mapping[str, Any], labels: Labels) -> dict[str, Any]:
    from syckpt.hyperparams.config import HyperConfig

    change = HyperConfig(config).diff(one.commit.config)
    return {
        **shown.record(one.commit, labels),
        "similarity": one.similarity,
        "estimate": one.estimate,
        "distance": one.distance,
        "diff": {"added": change.added, "removed": change.removed, "changed": change.changed},
    }


def _lines(found: list[Similar], config: Mapping[str, Any], labels: Labels) -> Iterator[str]:
    from syckpt.hyperparams.config import HyperConfig

    rows = [["similarity", "bits", "commit", "branch", "step", "metric"]]
    rows += [
        [
            f"{one.similarity:.3f}",
            str(one.distance),
            shown.short_id(one.commit.id),
            output.printable(one.commit.branch),
            str(one.commit.step),
            output.number(one.commit.metric),
        ]
        for one in found
    ]
    header, *table = output.aligned(rows, right=(0, 1, 4, 5))
    yield click.style("  ".join(header).rstrip(), bold=True)
    for one, (score, bits, commit, *rest) in zip(found, table, strict=True):
        tail = " ".join(filter(None, ("".join(f"[{mark}]" for mark in one.commit.marks), labels.text(one.commit))))
        yield "  ".join([score, bits, click.style(commit, fg="yellow"), *rest, tail]).rstrip()
        changes = str(HyperConfig(config).diff(one.commit.config)).split("\n")
        for line in filter(None, changes[:_SHOWN]):
            yield output.cut(f"    {output.printable(line)}", output.width())
        if len(changes) > _SHOWN:
            yield f"    ... {len(changes) - _SHOWN} more"
