"""Both ends of a loop over seats: from the slots into a batch, and back into the slots.

The formulas stand here in torch; on CUDA, and for float32 on a CPU, each end is one kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.attention.backend import PagedRows
from worker.batch import decode_rows

if TYPE_CHECKING:
    from torch import Tensor

    from worker.slot_table import SlotTable


def gather_seats(slots: SlotTable, seats: Tensor, width: int) -> tuple[Tensor, PagedRows]:
    """Hidden states [N, H] and addresses of the slots int64 [N] that sit in a batch.

    `width` blocks of a table hold the longest of these rows.
    """
    # Imported late: Triton is there only where CUDA is, and Numba need not be there.
    if seats.is_cuda:
        from worker.kernels.seats import gather
    elif slots.compiled:
        from worker.cpu_kernels.slots import gather
    else:
        rows = decode_rows(slots, seats, slots.position[seats], slots.loops[seats], width)
        return slots.hidden[seats], rows
    columns = (slots.hidden, slots.position, slots.loops)
    hidden, positions, lengths, table_rows = gather(seats, *columns, slots.planes, slots.trash)
    tables = slots.plane_tables[:, :width]
    return hidden, PagedRows(positions, tables, table_rows, slots.block_size, lengths)


def commit_seats(slots: SlotTable, seats: Tensor, hidden: Tensor, hazards: Tensor) -> Tensor:
    """Put what a loop has computed into the slots; returns survivals float32 [N].

    s <- f32(s * f32(1 - hazard)), as protocol/exit_rule.py states it; padding seats have 1.
    """
    columns = (slots.hidden, slots.survival, slots.loops)
    if seats.is_cuda:
        from worker.kernels.seats import commit

        return commit(seats, hidden, hazards, *columns, slots.trash)
    if slots.compiled:
        from worker.cpu_kernels.slots import commit_loop

        return commit_loop(seats, hidden, hazards, *columns, slots.trash)
    padding = seats == slots.trash
    survivals = (slots.survival[seats] * (1.0 - hazards)).masked_fill(padding, 1.0)
    slots.hidden[seats] = hidden
    slots.survival[seats] = survivals
    slots.loops[seats] += 1
    return survivals
