"""Loading: a commit -> live targets in place, or new CPU tensors. Everything is checked before the first tensor is touched.

What is checked up front: keys, shapes, dtypes, and that every tensor has a place. Damage in the bytes is found while they are read: it
raises, and a target then holds old or exact values, never wrong ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from syckpt.checkpoint.source import Source
from syckpt.errors import StateError
from syckpt.objects.commit import Commit
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.state.fit import Fitted, Options, fit, matching
from syckpt.stores.base import StoreSpec, parse_root

__all__ = ["LoadReport", "load", "read"]


@dataclass
class LoadReport:
    """What a load did, and what it did not do. Paths are texts such as `model/net.0.weight`."""

    commit: str | None = None
    missing: list[str] = field(default_factory=list)
    """In the target, not in the commit."""
    unexpected: list[str] = field(default_factory=list)
    """In the commit, not in the target."""
    mismatched: list[str] = field(default_factory=list)
    """In both, of another shape, dtype or kind; each with what was expected and found."""
    skipped: list[str] = field(default_factory=list)
    """Left alone because they did not fit (`strict=False`), never part-filled."""
    cast: list[str] = field(default_factory=list)
    """Converted to the target's dtype (`cast=True`)."""
    resharded: list[str] = field(default_factory=list)
    per_rank: list[str] = field(default_factory=list)
    bytes_read: int = 0
    """Stored bytes read from the repository."""
    rng_exact: bool = True
    """Whether the random streams are those of the commit."""
    notes: list[str] = field(default_factory=list)


def read(
    source: Source,
    into: Mapping[str, Any] | None,
    *,
    items: Sequence[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    partial: Sequence[str] | None = None,
    map_location: Any = None,
    dry_run: bool = False,
) -> tuple[dict[str, Any], LoadReport]:
    """Read items of a commit; see `load`. Returns the mapping and the report."""
    if isinstance(partial, str):
        raise StateError(f"partial={partial!r}: expected a sequence of patterns, such as [{partial!r}]")
    report = LoadReport(commit=source.commit.id)
    templates: Mapping[str, Any] = dict.fromkeys(sorted(source.names) if items is None else items) if into is None else into
    _refuse_objects(templates)
    chosen = _Chosen(partial)
    fitted = _fit_all(source, templates, report, Options(cast=cast, select=None if partial is None else chosen))
    if partial is not None and into is None:
        fitted = {name: plan for name, plan in fitted.items() if name in chosen.items}
    if strict and partial is not None and not chosen.items:
        raise StateError(f"partial={list(partial)!r} takes nothing of commit {source.commit.id}; paths begin with {', '.join(templates)}")
    if not strict:
        report.skipped = sorted(report.mismatched)
    if strict and (report.missing or report.mismatched or (report.unexpected and partial is None)):
        raise StateError(_problems(source.commit, report))
    if dry_run:
        return {}, report
    report.per_rank = list(source.per_rank)
    before = source.bytes_read
    targets: dict[int, list[torch.Tensor]] = {index: [] for plan in fitted.values() for index in plan.fresh}
    for plan in fitted.values():
        for index, target in plan.fills:
            targets.setdefault(index, []).append(target)
    wanted = {index: _read_into(found, source.entries[index].dtype) for index, found in targets.items()}
    more = [(index, target) for index, found in targets.items() for target in found if target is not wanted[index]]
    tensors = source.fetch(wanted)
    with torch.no_grad():
        for index, target in more:
            target.detach().copy_(tensors[index])
    report.bytes_read = source.bytes_read - before
    report.resharded = sorted(set(source.resharded))
    moved: dict[int, torch.Tensor] = {}

    def tensor(index: int) -> torch.Tensor:
        if map_location is None or wanted[index] is not None:
            return tensors[index]
        if index not in moved:
            moved[index] = tensors[index].to(map_location)
        return moved[index]

    return {name: plan.build(tensor) for name, plan in fitted.items()}, report


def _read_into(targets: Sequence[torch.Tensor], dtype: str) -> torch.Tensor | None:
    """Return the target that bytes are read into; others that share the value are copied from it, so it must not be a converted one."""
    exact = next((target for target in targets if str(target.dtype) == f"torch.{dtype}"), None)
    return targets[0] if exact is None and len(targets) == 1 else exact


class _Chosen:
    """The selection of `partial`, and the items of which it took something."""

    def __init__(self, partial: Sequence[str] | None) -> None:
        self._select = matching(partial or ())
        self.items: set[str] = set()

    def __call__(self, path: str) -> bool:
        found = self._select(path)
        if found:
            self.items.add(path.partition("/")[0].strip('"'))
        return found


def _refuse_objects(templates: Mapping[str, Any]) -> None:
    """A module given where its state is asked for would stay as it is, without a word."""
    for name, template in templates.items():
        if callable(getattr(template, "state_dict", None)):
            raise StateError(f"into[{name!r}] is a {type(template).__name__}: pass its state_dict(), whose tensors are filled in place")


def _fit_all(source: Source, templates: Mapping[str, Any], report: LoadReport, options: Options) -> dict[str, Fitted]:
    """Plan every item and gather all problems."""
    plans: dict[str, Fitted] = {}
    for name, template in templates.items():
        if name not in source.names:
            report.missing.append(name)
            continue
        plan = plans[name] = fit(source.node(name), template, path=(name,), entries=source.entries, options=options)
        report.missing += plan.missing
        report.unexpected += plan.unexpected
        report.mismatched += plan.mismatched
        report.cast += plan.cast
    return plans


def _problems(commit: Commit, report: LoadReport) -> str:
    groups = (
        ("missing from the commit", report.missing),
        ("unexpected in the commit", report.unexpected),
        ("do not fit", report.mismatched),
    )
    lines = [f"commit {commit.id} does not fit its target; nothing was changed:"]
    for title, paths in groups:
        if paths:
            lines.append(f"  {len(paths)} {title}: " + "; ".join(paths[:20]) + (f"; and {len(paths) - 20} more" if len(paths) > 20 else ""))
    lines.append(
        "  ckpt.load(rev, into=..., strict=False) takes what fits, cast=True converts dtypes; to start afresh make the manager with"
        " auto_resume=False or run_mode='overwrite', or give it another directory"
    )
    return "\n".join(lines)


def load(
    root: Any,
    rev: str = "HEAD",
    items: Sequence[str] | None = None,
    into: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    partial: Sequence[str] | None = None,
    map_location: Any = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Read a commit of the repository at `root` without a manager; takes no lease and writes nothing.

    `into`: live targets by item; their tensors are filled in place, the rest comes back in the mapping. Without it, every item (or those
    named by `items`) comes back as new CPU tensors. `partial` are patterns such as "model.encoder.*"; `strict=False` skips what does not
    fit; `cast=True` converts dtypes; `dry_run=True` checks everything, reads nothing and returns {}.
    Raises: NotFoundError, StateError listing everything that does not fit, IntegrityError.
    """
    spec: StoreSpec = parse_root(root)
    repository = Repository.open(spec)
    commit = history.resolve(repository, rev)
    source = Source(Reader(repository), commit)
    values, _ = read(source, into, items=items, strict=strict, cast=cast, partial=partial, map_location=map_location, dry_run=dry_run)
    return values
