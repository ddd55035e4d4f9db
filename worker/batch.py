"""The one batch builder: from a plan's rows to the tensors that a stage reads.

Only plan columns travel to the device; block addresses are looked up there, in the slot table, so
nothing is ever read back to build a batch.

Example: block_size 16, position 37, depth 2 -> block tables[slot, 2, 2], offset 5, length 38.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from worker.attention.backend import PackedChunks, PagedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from protocol.plan import PrefillBatch
    from worker.slot_table import SlotTable


def column(values: Sequence[int], device: torch.device) -> Tensor:
    """An int64 [n] tensor of host values on the device."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def decode_rows(
    table: SlotTable, slots: Tensor, positions: Tensor, depths: Tensor, width: int
) -> PagedRows:
    """Addresses of one query a row, each in its own plane.

    slots, positions, depths int64 [N]; `width` blocks hold the longest row's positions. A table of
    one plane serves every depth. The trash slot's rows are padding: they see nothing, and write
    to the scratch block.
    """
    depths = depths.clamp(max=table.planes - 1)
    return PagedRows(
        positions=positions,
        tables=table.plane_tables[:, :width],
        table_rows=slots * table.planes + depths,
        block_size=table.block_size,
        lengths=(positions + 1).masked_fill(slots == table.trash, 0),
    )


def table_width(table: SlotTable, positions: Sequence[int]) -> int:
    """Blocks a plane needs for the longest of these positions: position 37 of 16 -> 3."""
    return max(positions) // table.block_size + 1


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """A prefill batch on the device: N prompt tokens of C chunks, packed.

    tokens, positions, row_slots int64 [N], the last being each token's slot; chunk_slots and
    lengths int64 [C]; edges int64 [C + 1] and `bounds`, the same on the host, the rows of each
    chunk; `width` blocks of a table row.
    """

    tokens: Tensor
    positions: Tensor
    row_slots: Tensor
    chunk_slots: Tensor
    lengths: Tensor
    edges: Tensor
    bounds: tuple[int, ...]
    width: int

    def at_depth(self, table: SlotTable, depth: int) -> PackedChunks:
        """The addresses of these rows in the plane of one 0-based depth."""
        return PackedChunks(
            positions=self.positions,
            tables=table.plane_tables[:, : self.width],
            table_rows=self.row_slots * table.planes + depth,
            block_size=table.block_size,
            chunk_rows=self.chunk_slots * table.planes + depth,
            lengths=self.lengths,
            edges=self.edges,
            bounds=self.bounds,
        )


def prefill_rows(
    table: SlotTable, batch: PrefillBatch, slots: Sequence[int], device: torch.device
) -> PrefillRows:
    """Pack the chunks of a prefill batch; everything but the planes is built once a chunk."""
    positions: list[int] = []
    row_slots: list[int] = []
    bounds = [0]
    for slot, start, count in zip(slots, batch.starts, batch.counts, strict=True):
        positions.extend(range(start, start + count))
        row_slots.extend([slot] * count)
        bounds.append(bounds[-1] + count)
    ends = [start + count for start, count in zip(batch.starts, batch.counts, strict=True)]
    row_slot_column = column(row_slots, device)
    position_column = column(positions, device)
    return PrefillRows(
        tokens=table.prompt[row_slot_column, position_column],
        positions=position_column,
        row_slots=row_slot_column,
        chunk_slots=column(slots, device),
        lengths=column(ends, device),
        edges=column(bounds, device),
        bounds=tuple(bounds),
        width=table_width(table, positions),
    )
