"""One structure out of those that several ranks saved. Pure.

Ranks of a job mostly save the same structure. Where they do not, keys of mappings are united (pipeline and expert parallelism), and what
differs at one place was kept per rank: a reader takes one rank's, or all of them as a `PerRank` mapping. Nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from syckpt.objects import canonical, nodes
from syckpt.objects.nodes import KeyPath, Node

__all__ = ["merge", "renumber"]


def renumber(node: Node, numbers: Mapping[int, int]) -> Node:
    """Return a node whose entries are counted by `numbers[old]` instead."""
    if isinstance(node, dict):
        if "tensor" in node:
            return {"tensor": numbers[node["tensor"]]}
        if "ndarray" in node:
            index, *rest = node["ndarray"]
            return {"ndarray": [numbers[index], *rest]}
        return {kind: renumber(payload, numbers) for kind, payload in node.items()}
    if isinstance(node, list):
        return [renumber(child, numbers) for child in node]
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
