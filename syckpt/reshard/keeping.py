"""Which ranks of a commit store what a reader needs, out of its table of layouts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from syckpt.errors import IntegrityError
from syckpt.objects.box import Box
from syckpt.objects.layouts import LayoutTable, Parts, Split, Splits, TensorLayout
from syckpt.objects.manifest import Entry, Manifest
from syckpt.objects.nodes import KeyPath, format_path
from syckpt.reshard.layout import Layout, Placement, Replicate, Shard, StridedShard, keepers

__all__ = ["Keeping", "layout_of_row", "split_of"]

_MAX_EFFORT = 1 << 20  # a second or two


class Keeping:
    """A commit's table of layouts. `where` names it in errors. Raises: IntegrityError for two tensors of one path."""

    def __init__(self, table: LayoutTable, *, where: str) -> None:
        self.groups = table.items
        """Of each item, the groups of ranks that have the same structure there."""
        self._table = table
        self._where = where
        self._having = {name: frozenset(rank for group in groups for rank in group) for name, groups in table.items.items()}
        self._rows = {format_path(row.path): row for row in table.tensors}
        if len(self._rows) != len(table.tensors):
            raise IntegrityError(f"{where}: several tensors at one path")
        self._layouts: dict[tuple[int, tuple[int, ...]], Layout] = {}
        self._ranks: dict[tuple[int, tuple[int, ...], int, tuple[Box, ...]], set[int]] = {}

    def check_items(self, manifest: Manifest) -> None:
        """Raises: IntegrityError for a manifest that has other items than the table says."""
        wrong = manifest.items.keys() ^ {name for name, ranks in self._having.items() if manifest.rank in ranks}
        if wrong:
            raise IntegrityError(f"{self._where}: disagrees with the manifest of rank {manifest.rank} on item {min(wrong)!r}")

    def check_entry(self, path: str, entry: Entry, rank: int) -> None:
        """Raises: IntegrityError for an entry, under that path text, of another tensor than the table says."""
        row = self._rows.get(path)
        if row is not None and (row.dtype, row.shape) != (entry.dtype, entry.shape):
            raise IntegrityError(
                f"{self._where}: {path} is {row.dtype} {list(row.shape)}, in the manifest of rank {rank} {entry.dtype} {list(entry.shape)}"
            )

    def ranks(self, path: KeyPath, boxes: Sequence[Box]) -> set[int]:
        """Return the ranks that store elements of these boxes of a tensor; none where the table does not tell, or not within seconds."""
        row = self._rows.get(format_path(path))
        if row is None:
            return set()
        if row.layout is None:
            return {row.copy}
        # Thousands of tensors have a few dozen shapes.
        key = (row.layout, row.shape, row.copy, tuple(boxes))
        if key not in self._ranks:
            self._ranks[key] = self._find(row.layout, row, boxes)
        return self._ranks[key]

    def _find(self, number: int, row: TensorLayout, boxes: Sequence[Box]) -> set[int]:
        lies = self._table.layouts[number]
        if isinstance(lies, Parts):
            return {rank for rank, box in lies.boxes if any(box == wanted or box.meets(wanted) for wanted in boxes)}
        if (number, row.shape) not in self._layouts:
            self._layouts[number, row.shape] = _layout(self._table, lies, row.shape)
        layout = self._layouts[number, row.shape]
        return keepers(layout, row.copy, boxes) if layout.effort <= _MAX_EFFORT else set()


def layout_of_row(table: LayoutTable, row: TensorLayout) -> Layout | None:
    """Return how a tensor of a table lies on a mesh; None where it lies on none."""
    lies = None if row.layout is None else table.layouts[row.layout]
    return None if lies is None or isinstance(lies, Parts) else _layout(table, lies, row.shape)


def _layout(table: LayoutTable, lies: Splits, shape: tuple[int, ...]) -> Layout:
    mesh, splits = lies
    return Layout(shape, *table.meshes[mesh], tuple(map(_placement, splits)))


def split_of(placement: Placement) -> Split:
    """Return a placement as a table has it."""
    if isinstance(placement, Replicate):
        return None
    return (placement.dim, placement.split_factor) if isinstance(placement, StridedShard) else (placement.dim,)


def _placement(split: Split) -> Placement:
    if split is None:
        return Replicate()
    return Shard(*split) if len(split) == 1 else StridedShard(*split)
