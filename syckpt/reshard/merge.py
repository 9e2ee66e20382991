"""One structure out of those that several ranks saved. Pure.

Ranks of a job mostly save the same structure. Where they do not, keys of mappings are united (pipeline and expert parallelism), and what
differs at one place was kept per rank: a reader takes one rank's, or all of them as a `PerRank` mapping. Nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from syckpt.objects import canonical, nodes
from syckpt.objects.entries import entries_in
from syckpt.objects.nodes import KeyPath, Node

__all__ = ["merge", "named_parameters", "own_paths", "swap_tensors", "unite_groups", "without_parameters"]


def swap_tensors(node: Node, swap: Callable[[KeyPath, int], int], path: KeyPath = ()) -> Node:
    """Return a node whose tensors are counted by `swap(path, old)`; other arrays, and what is inside of leaves, stay as they are."""
    kind, payload = nodes.split(node)
    if kind == "tensor":
        return {"tensor": swap(path, payload)}
    if kind in nodes.MAPPING_KINDS:
        return {kind: [[key, swap_tensors(child, swap, (*path, nodes.node_key(key)))] for key, child in payload]}
    if kind in ("namedtuple", "dataclass"):
        return {kind: [payload[0], [[name, swap_tensors(child, swap, (*path, name))] for name, child in payload[1]]]}
    if kind in ("list", "tuple"):
        return {kind: [swap_tensors(child, swap, (*path, index)) for index, child in enumerate(payload)]}
    if kind == "deque":
        return {kind: [payload[0], [swap_tensors(child, swap, (*path, index)) for index, child in enumerate(payload[1])]]}
    return node


def merge(parts: Mapping[int, Node], *, choose: int | None, path: KeyPath = ()) -> tuple[Node, list[KeyPath]]:
    """Return the common node of what each rank saved, and the paths at which they differ.

    There, the node of rank `choose` is taken (the lowest rank's, if that one has none); with None all are kept, as a per-rank node.
    Entries must be counted alike on all ranks (`renumber`).
    """
    differing: list[KeyPath] = []
    return _merge(list(parts.items()), choose, path, differing), differing


def _merge(parts: list[tuple[int, Node]], choose: int | None, path: KeyPath, differing: list[KeyPath]) -> Node:
    first = parts[0][1]
    # Compared as texts: to Python, 1, 1.0 and True are equal.
    if len({canonical.dumps(node) for _, node in parts}) == 1:
        return first
    kinds = {nodes.split(node)[0] for _, node in parts}
    kind = next(iter(kinds))
    if len(kinds) == 1 and kind in nodes.MAPPING_KINDS:
        return {kind: _merge_pairs([(rank, node[kind]) for rank, node in parts], choose, path, differing)}
    if len(kinds) == 1 and kind in ("list", "tuple") and len({len(node[kind]) for _, node in parts}) == 1:
        columns = zip(*([(rank, child) for child in node[kind]] for rank, node in parts), strict=True)
        return {kind: [_merge(list(column), choose, (*path, index), differing) for index, column in enumerate(columns)]}
    differing.append(path)
    if choose is None:
        return {nodes.PER_RANK: [[rank, node] for rank, node in parts]}
    return dict(parts).get(choose, first)


def _merge_pairs(parts: list[tuple[int, list[Any]]], choose: int | None, path: KeyPath, differing: list[KeyPath]) -> list[Any]:
    """Unite pairs of key and value, in the order in which the ranks first have the keys."""
    united: dict[bytes, tuple[Node, list[tuple[int, Node]]]] = {}
    for rank, pairs in parts:
        for key, value in pairs:
            united.setdefault(canonical.dumps(key), (key, []))[1].append((rank, value))
    return [[key, _merge(values, choose, (*path, nodes.node_key(key)), differing)] for key, values in united.values()]


def own_paths(node: Node, local: Collection[int], path: KeyPath = ()) -> list[KeyPath]:
    """Return the paths at which `merge` finds that ranks with equal structure differ: entries that each rank kept for itself are there."""
    if not local:
        return []
    kind, payload = nodes.split(node)
    below: list[tuple[Any, Node]] = []
    if kind in nodes.MAPPING_KINDS:
        below = [(nodes.node_key(key), child) for key, child in payload]
    elif kind in ("list", "tuple"):
        below = list(enumerate(payload))
    elif not entries_in([node]).isdisjoint(local):
        return [path]
    return [found for key, child in below for found in own_paths(child, local, (*path, key))]


# --- optimizers whose parameters differ between ranks --------------------------------------------------------------------------


def named_parameters(node: Node) -> list[str] | None:
    """Return the parameters of an optimizer's state that is keyed by their names, in order; None for any other state."""
    try:
        names = [name for group in _groups(node) for name in _params(group)]
    except (KeyError, ValueError, TypeError):
        return None
    return names if names and all(isinstance(name, str) for name in names) else None


def unite_groups(parts: Mapping[int, Node]) -> Mapping[int, Node]:
    """Return the nodes of an optimizer, keyed by parameter names, with the groups of all ranks in each of them.

    A rank of a pipeline lists its own stage's parameters: groups that differ in nothing else are one. Other nodes are returned as they are.
    """
    if any(named_parameters(node) is None for node in parts.values()):
        return parts
    united: dict[tuple[int, bytes], tuple[list[Any], dict[str, None]]] = {}
    for node in parts.values():
        for number, group in enumerate(_groups(node)):
            hyper = sorted(([key, value] for key, value in group["dict"] if key != "params"), key=canonical.dumps)
            _, names = united.setdefault((number, canonical.dumps(hyper)), (group["dict"], {}))
            names.update(dict.fromkeys(_params(group)))
    made = [
        {"dict": [[key, {"list": list(names)} if key == "params" else value] for key, value in pairs]} for pairs, names in united.values()
    ]
    groups = {"list": made}
    return {
        rank: {"dict": [[key, groups if key == "param_groups" else value] for key, value in node["dict"]]} for rank, node in parts.items()
    }


def without_parameters(node: Node, names: Collection[str]) -> Node:
    """Return an optimizer's node, keyed by parameter names, without these parameters and their state."""
    groups = [
        {
            "dict": [
                [key, {"list": [name for name in value["list"] if name not in names]} if key == "params" else value] for key, value in pairs
            ]
        }
        for pairs in (group["dict"] for group in _groups(node))
    ]
    kept: list[Any] = []
    for key, value in node["dict"]:
        if key == "param_groups":
            kept.append([key, {"list": groups}])
        elif key == "state":
            kept.append(
                [
                    key,
                    {
                        kind: [pair for pair in pairs if not isinstance(pair[0], str) or pair[0] not in names]
                        for kind, pairs in value.items()
                    },
                ]
            )
        else:
            kept.append([key, value])
    return {"dict": kept}


def _groups(node: Node) -> list[Node]:
    (groups,) = (value for key, value in node["dict"] if key == "param_groups")
    found: list[Node] = groups["list"]
    return found


def _params(group: Node) -> list[Any]:
    (names,) = (value for key, value in group["dict"] if key == "params")
    found: list[Any] = names["list"]
    return found
