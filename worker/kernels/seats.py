"""The ends of a loop over seats: what the slots say goes into the batch, and back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launches, power_of_two, wait_for_inputs


@triton.jit
def gather_kernel(
    seats, slot_hidden, slot_position, slot_loops,
    hidden, positions, lengths, table_rows, trash,
    PLANES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    seat = tl.program_id(0).to(tl.int64)
    slot = tl.load(seats + seat)
    position = tl.load(slot_position + slot)
    plane = tl.minimum(tl.load(slot_loops + slot), PLANES - 1)
    tl.store(positions + seat, position)
    tl.store(lengths + seat, tl.where(slot == trash, 0, position + 1))
    tl.store(table_rows + seat, slot * PLANES + plane)
    h = tl.arange(0, BLOCK)
    value = tl.load(slot_hidden + slot * HIDDEN + h, mask=h < HIDDEN, other=0.0)
    tl.store(hidden + seat * HIDDEN + h, value, mask=h < HIDDEN)


@triton.jit
def commit_kernel(
    seats, hidden, hazards, slot_hidden, slot_survival, slot_loops, survivals, trash,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    seat = tl.program_id(0).to(tl.int64)
    slot = tl.load(seats + seat)
    live = slot != trash
    survival = tl.load(slot_survival + slot) * (1.0 - tl.load(hazards + seat))
    survival = tl.where(live, survival, 1.0)
    loops = tl.load(slot_loops + slot) + 1
    h = tl.arange(0, BLOCK)
    value = tl.load(hidden + seat * HIDDEN + h, mask=h < HIDDEN, other=0.0)
    tl.store(slot_hidden + slot * HIDDEN + h, value, mask=(h < HIDDEN) & live)
    tl.store(slot_survival + slot, survival, mask=live)
    tl.store(slot_loops + slot, loops, mask=live)
    tl.store(survivals + seat, survival)


def gather(
    seats: torch.Tensor,
    hidden: torch.Tensor,
    position: torch.Tensor,
    loops: torch.Tensor,
    planes: int,
    trash: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [N, H], positions, lengths (0 for the trash slot) and table rows, int64 [N].

    hidden, position and loops are columns of the slots; row slot * planes + plane of the tables
    is a seat's own.
    """
    count, width = len(seats), hidden.shape[1]
    rows = torch.empty(count, width, dtype=hidden.dtype, device=hidden.device)
    positions, lengths, table_rows = (torch.empty_like(seats) for _ in range(3))
    block = power_of_two(width)
    gather_kernel[(count,)](
        seats, hidden, position, loops, rows, positions, lengths, table_rows, trash,
        planes, width, block, num_warps=4, **dependent_launches(),
    )  # fmt: skip
    return rows, positions, lengths, table_rows


def commit(
    seats: torch.Tensor,
    rows: torch.Tensor,
    hazards: torch.Tensor,
    hidden: torch.Tensor,
    survival: torch.Tensor,
    loops: torch.Tensor,
    trash: int,
) -> torch.Tensor:
    """Put rows [N, H] into their slots and count the loop; returns survivals float32 [N].

    The trash slot is left alone, and its seats' survivals are 1.
    """
    survivals = torch.empty_like(hazards)
    block = power_of_two(hidden.shape[1])
    commit_kernel[(len(seats),)](
        seats, rows, hazards, hidden, survival, loops, survivals, trash,
        hidden.shape[1], block, num_warps=4, **dependent_launches(),
    )  # fmt: skip
    return survivals
