"""Loading: a commit -> live targets in place, or new CPU tensors. Everything is checked before the first tensor is touched.

What is checked up front: keys, shapes, dtypes, and that every tensor has a place. Damage in the bytes is found while they are read: it
raises, and a target then holds old or exact values, never wrong ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial as partial_
from typing import Any, TypeAlias

import torch

from syckpt.checkpoint.moments import filled_up, of_targets
from syckpt.checkpoint.resharding import Resharded, prepare, settle
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.specs import Config, ItemSpec
from syckpt.checkpoint.torn import filling
from syckpt.errors import IntegrityError, StateError
from syckpt.objects import nodes
from syckpt.repo import history, signing
from syckpt.repo.reader import Place, Reader
from syckpt.repo.repository import Repository
from syckpt.reshard.resharder import ReshardingInfo, is_custom
from syckpt.state.bits import copy_tensor
from syckpt.state.fit import Fitted, Options, fit, kept, matching
from syckpt.state.formats import BYTES, PICKLED, JsonSerialization, SerializationFormat, known_format, rebuild, require_trust, unpickle
from syckpt.state.overlaps import conflict, overlapping
from syckpt.stores.base import StoreSpec, parse_root

__all__ = ["Fetch", "LoadReport", "load", "read", "reshard", "reshards"]

_log = logging.getLogger("syckpt")

Fetch: TypeAlias = Callable[[Mapping[int, "torch.Tensor | None"]], "dict[int, torch.Tensor]"]
"""Brings tensors of an open commit by number, as `Source.fetch`."""


@dataclass
class LoadReport:
    """What a load did, and what it did not do. Paths are texts such as `model/net.0.weight`."""

    commit: str | None = None
    missing: list[str] = field(default_factory=list)
    """In the target, not in the commit."""
    unexpected: list[str] = field(default_factory=list)
    """In the commit, not in this rank's target; an error where no rank takes it."""
    mismatched: list[str] = field(default_factory=list)
    """In both, of another shape, dtype or kind; each with what was expected and found."""
    skipped: list[str] = field(default_factory=list)
    """Left alone because they did not fit (`strict=False`, or items that are not required), never part-filled."""
    cast: list[str] = field(default_factory=list)
    """Converted to the target's dtype (`cast=True`)."""
    resharded: list[str] = field(default_factory=list)
    """Tensors that were not stored in this rank's boxes."""
    resharding: ReshardingInfo = field(default_factory=ReshardingInfo, compare=False, repr=False)
    """Where the parts of those come from, and what resharders of the caller's handled; also after a `dry_run`."""
    per_rank: list[str] = field(default_factory=list)
    """Values that differed between the ranks that saved them, on another number of ranks."""
    bytes_read: int = 0
    """Stored bytes read from the repository."""
    rng_exact: bool = True
    """Whether the random streams are those of the commit."""
    notes: list[str] = field(default_factory=list)
    """What else is worth knowing, such as values that were read as plainer ones since no target showed their type."""

    def begin(self, commit: str) -> None:
        """Forget what was reported before: a load of a commit begins."""
        vars(self).update(vars(LoadReport(commit=commit)))


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
    as_saved: bool = False,
    report: LoadReport | None = None,
    done: Mapping[str, Resharded | None] | None = None,
    fetch: Fetch | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """Read items of a commit; see `load`. Returns the mapping and the report.

    `done`: what `reshard` returned; without it, that is done here. `fetch`: how tensors are read, in place of `source.fetch`.

    `as_saved`: `into` shows types only (see `state.fit`). `report` is filled afresh, also when the load fails; without one, it is new.
    """
    report = report or LoadReport()
    report.begin(source.commit.id)
    if isinstance(partial, str):
        raise StateError(f"partial={partial!r}: expected a sequence of patterns, such as [{partial!r}]")
    templates: Mapping[str, Any] = dict.fromkeys(sorted(source.names) if items is None else items) if into is None else into
    _refuse_objects(templates)
    for name in into or ():
        source.config.spec(name)
    chosen = _Chosen(partial)
    if done is None:
        done = reshard(source, templates, report.notes, partial=partial, dry_run=dry_run)
    ready = {name: found for name, found in (done or {}).items() if found is not None}
    templates = {name: ready[name].target if name in ready else template for name, template in templates.items()}
    fitted = _fit_all(source, templates, report, Options(cast, None if partial is None else chosen, as_saved), ready, keep=into is not None)
    if partial is not None and into is None:
        fitted = {name: plan for name, plan in fitted.items() if name in chosen.items}
    if strict and partial is not None and not chosen.items:
        raise StateError(f"partial={list(partial)!r} takes nothing of commit {source.commit.id}; paths begin with {', '.join(templates)}")
    if not strict:
        report.skipped = sorted(report.skipped + report.mismatched)
    # What is another rank's (a stage, an expert) is that of ranks together to say: see `taking`.
    is_unexpected = bool(report.unexpected) and partial is None and not source.has_others
    if strict and (report.missing or report.mismatched or is_unexpected):
        raise StateError(_problems(source, report, [] if partial is not None else report.unexpected))
    report.per_rank = list(source.per_rank)
    before = source.bytes_read
    targets: dict[int, list[torch.Tensor]] = {index: [] for plan in fitted.values() for index in plan.fresh}
    for plan in fitted.values():
        for index, target in plan.fills:
            targets.setdefault(index, []).append(target)
    wanted = {index: _read_into(found, source.entries[index].dtype) for index, found in targets.items()}
    more = [(index, target) for index, found in targets.items() for target in found if target is not wanted[index]]
    source.locate(wanted)
    _require_blobs(source, wanted)
    if dry_run:
        source.plan(wanted)
        for name, handled in ready.items():
            # What the default would read, if the resharder leaves it all to it.
            default = fit(source.node(name), handled.target, path=(name,), entries=source.entries)
            source.plan(dict(default.fills), check=False)
        report.resharded, report.resharding = sorted(source.resharded), source.resharding()
        return {}, report
    _refuse_conflicts(source, [fill for plan in fitted.values() for fill in plan.fills])
    with filling(target for plan in fitted.values() for _, target in plan.fills):
        tensors = (fetch or source.fetch)(wanted)
        with torch.no_grad():
            for index, target in more:
                copy_tensor(target.detach(), tensors[index])
    report.bytes_read = source.bytes_read - before
    report.resharded, report.resharding = sorted(source.resharded), source.resharding()
    moved: dict[int, torch.Tensor] = {}

    def tensor(index: int) -> torch.Tensor:
        if map_location is None or wanted[index] is not None:
            return tensors[index]
        if index not in moved:
            moved[index] = tensors[index].to(map_location)
        return moved[index]

    built = {name: rebuild(_format(source, name), plan.build(tensor), (name,)) for name, plan in fitted.items()}
    return {name: ready[name].put_into(value) if name in ready else value for name, value in built.items()}, report


def _read_into(targets: Sequence[torch.Tensor], dtype: str) -> torch.Tensor | None:
    """Return the target that bytes are read into; others that share the value are copied from it, so it must not be a converted one."""
    exact = next((target for target in targets if str(target.dtype) == f"torch.{dtype}"), None)
    return targets[0] if exact is None and len(targets) == 1 else exact


def _require_blobs(source: Source, numbers: Iterable[int]) -> None:
    """See to it that the blobs of tensors that were located are there, in their sizes. Raises: IntegrityError naming all that are not."""
    reader = source.content.reader

    def lost(places: Iterable[Place]) -> Container[str]:
        """Return the keys of those blobs that places need and that are not there."""
        needed: set[tuple[str, int]] = set()
        for place in places:
            needed.add((place.blob.key, place.blob.size))
            if place.base is not None:
                needed.add((place.base.blob.key, place.base.blob.size))
        return reader.repository.absent_blobs(needed)

    def needs(place: Place, keys: Container[str]) -> bool:
        return place.blob.key in keys or (place.base is not None and place.base.blob.key in keys)

    entries = [source.entries[number] for number in numbers]
    absent = lost(place for stored in entries for _, _, place in stored.near)
    if not absent:
        return
    near = [(stored.path, place) for stored in entries for _, _, place in stored.near if needs(place, absent)]
    # Repack may have moved the bytes, and deleted the blob, since the locations were read.
    for place in {place.owner: place for _, place in near}.values():
        reader.moved(place)
    moved = [reader.place_of(place.owner, place.number) for _, place in near]
    absent = lost(moved)
    wrong: dict[str, str] = {}
    for (path, place), newer in zip(near, moved, strict=True):
        if needs(newer, absent):
            wrong.setdefault(place.blob.key, nodes.format_path(path))
    if wrong:
        found = "; ".join(f"{key} (of {path})" for key, path in wrong.items())
        raise IntegrityError(f"commit {source.commit.id}: missing or of another size: {found}; nothing was changed; run `syckpt verify`")


def _refuse_conflicts(source: Source, fills: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Refuse values that cannot all be held by targets that overlap, such as two slices of one buffer. Reads those values once more."""
    targets = [target for _, target in fills]
    for group in overlapping(targets):
        values = source.fetch({fills[number][0]: None for number in group})
        found = conflict([targets[number] for number in group], [values[fills[number][0]] for number in group])
        if found is not None:
            path = nodes.format_path(source.entries[fills[group[found]][0]].path)
            raise StateError(f"{path}: its target overlaps another one in memory, where the commit has different values; clone one of them")


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


def reshard(
    source: Source, templates: Mapping[str, Any], notes: list[str], *, partial: Sequence[str] | None = None, dry_run: bool = False
) -> dict[str, Resharded | None]:
    """Run the resharders of the reader's, and settle what ranks had each for themselves; returns `done` for `read`.

    An item of which only a part is wanted goes the default way. Apart, so that ranks can agree on it before the first of them fills its
    targets. Raises: StateError; what a resharder raises.
    """
    found: dict[str, Resharded | None] = {}
    for name in [name for name in templates if name in source.names]:
        spec = _spec(source, name)
        resharder = spec.resharder
        wanted = templates[name] is not None and (partial is None or matching(partial)(name))
        if resharder is not None and is_custom(resharder) and wanted:
            found[name] = prepare(source, name, resharder, templates[name], notes, dry_run=dry_run)
        notes += settle(source, name, spec, found.get(name))
    return found


def reshards(config: Config) -> bool:
    """Whether any item may have a resharder of the user's."""
    return any(is_custom(spec.resharder) for spec in (*config.items.values(), config.default) if spec is not None)


def _without(handled: Resharded, options: Options) -> Options:
    """Leave alone what a resharder handled."""
    select = options.select
    return replace(options, select=lambda text: not handled.handles(text) and (select is None or select(text)))


def _fit_all(
    source: Source,
    templates: Mapping[str, Any],
    report: LoadReport,
    options: Options,
    done: Mapping[str, Resharded],
    *,
    keep: bool,
) -> dict[str, Fitted]:
    """Plan every item and gather all problems. One that is not required and does not fit is skipped whole; `keep`: it stays as it is."""
    plans: dict[str, Fitted] = {}
    for name, template in templates.items():
        found = report if _spec(source, name).required else LoadReport()
        if name not in source.names:
            found.missing.append(name)
        else:
            mine = _without(done[name], options) if name in done else options
            plans[name] = _fit_one(source, name, template, found, mine)
        if found is report:
            continue
        # Of several ranks, another one may take what this one does not.
        problems = [*found.missing, *([] if source.has_others else found.unexpected), *found.mismatched]
        if problems:
            report.skipped += [f"{problem} (not required)" for problem in problems]
            plans.pop(name, None)
            if keep:
                plans[name] = kept(template)
        else:
            report.cast += found.cast
            report.notes += found.notes
            if found.unexpected:
                paths = f"{len(found.unexpected)} paths of the commit are not in it (not required): {_some(found.unexpected)}"
                report.notes.append(f"{name}: {paths}")
    return plans


def _fit_one(source: Source, name: str, template: Any, report: LoadReport, options: Options) -> Fitted:
    """Plan an item that the commit has."""
    form = _format(source, name)
    node = source.node(name)
    unreadable = _unreadable(node, name, form, report, options)
    report.mismatched += unreadable
    options = replace(options, encoded=partial_(_decode, name=name, form=form))
    plan = fit(node, template, path=(name,), entries=source.entries, options=options)
    report.missing += plan.missing
    report.unexpected += plan.unexpected
    report.mismatched += plan.mismatched
    report.cast += plan.cast
    report.notes += _notes(plan)
    if isinstance(form, JsonSerialization) and form.cls is not None and not plan.problems:
        report.mismatched += _not_of_class(plan, form, name)
    # Where the load goes on without what cannot be read, all of it stays as it is.
    return kept(template) if unreadable else plan


def _spec(source: Source, name: str) -> ItemSpec:
    """Return an item's spec; without a default, what the caller did not name is read as if nothing were said of it."""
    return source.config.items.get(name) or source.config.default or ItemSpec()


def _format(source: Source, name: str) -> SerializationFormat | None:
    layout = _spec(source, name).layout
    return None if layout is None else layout.serialization_format


def _unreadable(node: nodes.Node, name: str, form: SerializationFormat | None, report: LoadReport, options: Options) -> list[str]:
    """Return what the caller's own spec does not let be read; note what is read as bytes, since it names no format for it."""
    problems: list[str] = []
    for path, leaf in nodes.walk(node, (name,)):
        kind, payload = nodes.split(leaf)
        if kind != "encoded" or (options.select is not None and not options.select(nodes.format_path(path))):
            continue
        if payload[0] == PICKLED:
            try:
                require_trust(form, path)
            except StateError as exc:
                problems.append(str(exc))
        elif payload[0] != BYTES and (form is None or form.name != payload[0]):
            report.notes.append(
                f"{nodes.format_path(path)}: saved in the format {payload[0]!r}, which the item's spec does not name: it is its bytes"
            )
    return problems


def _decode(form_name: str, data: bytes, *, name: str, form: SerializationFormat | None) -> Any:
    """Return what was encoded, by the caller's format. Raises: StateError naming the item, for whatever the format raises."""
    if form_name == PICKLED:
        return unpickle(data, form, (name,))
    if form is None or form.name != form_name or known_format(form):
        return data
    try:
        return form.decode(data)
    except Exception as exc:
        raise StateError(f"{name}: {type(form).__name__} cannot decode it: {exc}") from exc


def _not_of_class(plan: Fitted, form: JsonSerialization, name: str) -> list[str]:
    """Return what keeps an item from becoming an object of the caller's class; known before anything is touched."""
    if plan.fresh or plan.fills:
        return [f"{name}: holds tensors, and its spec says JsonSerialization"]
    try:
        rebuild(form, plan.build(lambda index: torch.empty(0)), (name,))
    except StateError as exc:
        return [str(exc)]
    return []


def _notes(plan: Fitted) -> list[str]:
    told = []
    for what, paths in plan.plainer.items():
        told.append(f"{_some(paths)}: {what}, since no target shows the type")
    if plan.renamed:
        pairs = [f"{saved} as {live}" for live, saved in plan.renamed]
        told.append(f"{len(pairs)} names differ only by what wrappers insert: {_some(pairs)}")
    return told


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def _problems(source: Source, report: LoadReport, unexpected: Sequence[str]) -> str:
    groups = (
        ("missing from the commit", report.missing),
        ("unexpected in the commit" + (" (no error if another rank takes them)" if source.has_others else ""), unexpected),
        ("do not fit", report.mismatched),
    )
    lines = [f"commit {source.commit.id} does not fit its target; nothing was changed:"]
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
    config: Config | None = None,
    trusted_keys: signing.KeyFile | Sequence[signing.KeyFile] | None = None,
) -> dict[str, Any]:
    """Read a commit of the repository at `root` without a manager; takes no lease and writes nothing.

    `into`: live targets by item; their tensors are filled in place, the rest comes back in the mapping. Without it, every item (or those
    named by `items`) comes back as new CPU tensors. `partial` are patterns such as "model.encoder.*"; `strict=False` skips what does not
    fit; `cast=True` converts dtypes; `dry_run=True` checks everything, reads nothing and returns {}. `config`: specs of the items, whose
    formats are read, and which of them may be missing.
    `trusted_keys` (paths of public keys): the commit must be signed by one of them, which is checked before anything else of it is read.
    Raises: NotFoundError, StateError listing everything that does not fit, IntegrityError.
    """
    spec: StoreSpec = parse_root(root)
    trusted = None if trusted_keys is None else signing.load_trusted(trusted_keys)
    repository = Repository.open(spec)
    commit = history.resolve(repository, rev)
    # A target takes one value, as in a job of one rank; without targets, what each rank kept for itself is there.
    source = Source(Reader(repository, trusted=trusted), commit, world_size=None if into is None else 1, config=config)
    how: dict[str, Any] = {"strict": strict, "cast": cast, "partial": partial, "map_location": map_location, "dry_run": dry_run}
    if into is None:
        return read(source, None, items=items, **how)[0]
    parameters = of_targets(into)
    templates = {name: filled_up(source, name, target, parameters, partial=partial) for name, target in into.items()}
    values, _ = read(source, templates, **how)
    unasked = [name for name in into if _spec(source, name).on_world_change is None and not source.handled.get(name)]
    if taken := [path for name in unasked for path in source.differing(name)]:
        _log.warning("commit %s: where its ranks kept values of their own, rank 0's are taken: %s", commit.id, _some(taken))
    # What was left alone altogether is the caller's own.
    return {name: into[name] if value is templates[name] else value for name, value in values.items()}
