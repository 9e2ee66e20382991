"""Nodes name entries of a manifest by number: which ones, and the same nodes with other numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ENTRY_AT", "entries_in", "renumber"]

ENTRY_AT = {"tensor": None, "ndarray": 0, "encoded": 1}
"""Where a node names an entry: its payload, or a place in it."""


def entries_in(roots: Iterable[Any]) -> set[int]:
    """Return the entries that well-formed nodes name."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            for kind, payload in node.items():
                if kind in ENTRY_AT:
                    at = ENTRY_AT[kind]
                    found.add(payload if at is None else payload[at])
                elif isinstance(payload, dict | list):
                    waiting.append(payload)
    return found


def renumber(node: Any, numbers: Mapping[int, int]) -> Any:
    """Return a well-formed node whose entries are counted by `numbers[old]` instead."""
    if isinstance(node, dict):
        if "tensor" in node:
            return {"tensor": numbers[node["tensor"]]}
        if "ndarray" in node:
            index, *rest = node["ndarray"]
            return {"ndarray": [numbers[index], *rest]}
        if "encoded" in node:
            form, index = node["encoded"]
            return {"encoded": [form, numbers[index]]}
        return {kind: renumber(payload, numbers) for kind, payload in node.items()}
    if isinstance(node, list):
        return [renumber(child, numbers) for child in node]
    return node
