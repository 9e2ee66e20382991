"""Which file of a commit's tree holds which item. Pure.

An item with a layout is the file that the layout names, once a rank where it says `{rank}`. Any other item is `<item>.json`, and
`<item>.safetensors` if it holds tensors. What is no item stands under names that no item's file has by default: `syckpt.commit.json`,
`syckpt.rng.<rank>.json` and `syckpt.rng.<rank>.safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from blake3 import blake3

from syckpt.errors import StateError
from syckpt.objects import canonical, nodes
from syckpt.objects.nodes import KeyPath, Node, format_path

__all__ = ["COMMIT", "DOCUMENT", "TENSORS", "claim", "of_item", "refuse_collisions", "refuse_differing", "rng_of"]

COMMIT = "syckpt.commit.json"
DOCUMENT, TENSORS = ".json", ".safetensors"


def of_item(name: str, layout: list[Any] | None, ranks: Iterable[int]) -> list[tuple[str, int | None]]:
    """Return the paths that an item may have, each with the rank whose file it is, or None for one that is no rank's own."""
    if layout is None:
        return [(name + DOCUMENT, None), (name + TENSORS, None)]
    path = layout[0]
    return [(path.replace("{rank}", str(rank)), rank) for rank in ranks] if "{rank}" in path else [(path, None)]


def rng_of(rank: int) -> tuple[str, str]:
    """Return the paths of a rank's random streams."""
    return f"syckpt.rng.{rank}{DOCUMENT}", f"syckpt.rng.{rank}{TENSORS}"


def refuse_collisions(names: Iterable[str], layouts: Mapping[str, list[Any]], *, world_size: int) -> None:
    """Check that each file is one item's, and no file is a directory of another. Raises: StateError naming both."""
    if not layouts:
        return  # Names of items are distinct, and so are their default files.
    taken: dict[str, str] = {COMMIT: "the commit's own facts"}
    for rank in range(world_size):
        taken.update(dict.fromkeys(rng_of(rank), "the random streams"))
    folders: dict[str, str] = {}
    for name in names:
        for path, _ in of_item(name, layouts.get(name), range(world_size)):
            parts = path.split("/")
            above = ["/".join(parts[:count]) for count in range(1, len(parts))]
            other = taken.get(path) or folders.get(path) or next((taken[folder] for folder in above if folder in taken), None)
            if other is not None:
                raise StateError(f"item {name!r} cannot be the file {path}: {other} stands there; give one of them another path")
            taken[path] = f"item {name!r}"
            folders.update(dict.fromkeys(above, f"item {name!r}"))


def claim(items: Mapping[str, Node], one_file: Callable[[str], str | None]) -> dict[str, Any]:
    """Return what has to be the same on all ranks that claim one file: by path, the item and digests of its values that are no tensors."""
    found: dict[str, Any] = {}
    for name, node in items.items():
        path = one_file(name)
        if path is not None:
            found[path] = [name, {format_path(below): _digest(leaf) for below, leaf in _values(node, (name,))}]
    return found


def _values(node: Node, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield what stands at each place beside the numbers of entries, which need not be the same on two ranks."""
    for below, leaf in nodes.walk(node, path):
        kind, payload = nodes.split(leaf)
        if kind == "generator":
            yield below, payload[0]
            yield from _values(payload[1], below)
        elif kind == "ndarray":
            yield below, payload[1:]
        elif kind == "encoded":
            yield below, payload[0]
        elif kind != "tensor":
            yield below, leaf


def _digest(value: Any) -> str:
    return blake3(canonical.dumps(value)).hexdigest(length=8)


def refuse_differing(claims: Sequence[Mapping[str, Any]], tensors: Sequence[Mapping[str, str]]) -> None:
    """Check that ranks which claim one file have one content for it; ranks may have different keys, whose union it then holds.

    `claims[rank]` is what `claim` returned there, `tensors[rank]` digests of whole tensors by path text.
    Raises: StateError naming file, place and both ranks.
    """
    files = {path: content[0] for mine in claims for path, content in mine.items()}
    for path, name in files.items():
        seen: dict[str, tuple[int, str]] = {}
        for rank, mine in enumerate(claims):
            values = mine[path][1] if path in mine else {}
            below = {text: digest for text, digest in tensors[rank].items() if text == name or text.startswith(f"{name}/")}
            for text, digest in {**values, **below}.items():
                other, known = seen.setdefault(text, (rank, digest))
                if known != digest:
                    raise StateError(
                        f"ranks {other} and {rank} both claim the file {path}, with values of {text} that differ: put {{rank}} into the"
                        " path of its LayoutInfo, or make the values equal"
                    )
