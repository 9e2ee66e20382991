"""Which ranks of a commit store what a reader needs, out of its table of layouts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from syckpt.errors import IntegrityError
from syckpt.objects.box import Box
from syckpt.objects.layouts import LayoutTable, Split, TensorLayout
from syckpt.objects.manifest import Entry, Manifest
from syckpt.objects.nodes import KeyPath, format_path
from syckpt.reshard.layout import Layout, Placement, Replicate, Shard, StridedShard, keepers

__all__ = ["Keeping", "split_of"]

_MAX_EFFORT = 1 << 20  # a second or two


class Keeping:
    """A commit's table of layouts. `where` names it in errors."""

    def __init__(self, table: LayoutTable, *, where: str) -> None:
        self.items = table.items
        """All names, and whether all ranks have the same structure there."""
        self._table = table
        self._where = where
        self._rows = {format_path(row.path): row for row in table.tensors}
        self._layouts: dict[tuple[int, tuple[int, ...]], Layout] = {}
        self._ranks: dict[tuple[int, tuple[int, ...], int, tuple[Box, ...]], set[int]] = {}

    def check_items(self, manifest: Manifest) -> None:
        """Raises: IntegrityError for a manifest that has other items than the table says."""
        wrong = manifest.items.keys() - self.items.keys() or {name for name, same in self.items.items() if same} - manifest.items.keys()
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
            layout = self._layout(row)
            self._ranks[key] = keepers(layout, row.copy, boxes) if layout.effort <= _MAX_EFFORT else set()
        return self._ranks[key]

    def _layout(self, row: TensorLayout) -> Layout:
        assert row.layout is not None
        key = (row.layout, row.shape)
        if key not in self._layouts:
            mesh, splits = self._table.layouts[row.layout]
            self._layouts[key] = Layout(row.shape, *self._table.meshes[mesh], tuple(map(_placement, splits)))
        return self._layouts[key]


def split_of(placement: Placement) -> Split:
    """Return a placement as a table has it."""
    if isinstance(placement, Replicate):
        return None
    return (placement.dim, placement.split_factor) if isinstance(placement, StridedShard) else (placement.dim,)


def _placement(split: Split) -> Placement:
    if split is None:
        return Replicate()
    return Shard(*split) if len(split) == 1 else StridedShard(*split)
