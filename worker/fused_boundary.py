"""The boundary of a bucket on CUDA: its two ends, and the largest logit, are one kernel each.

worker/padded_boundary.py says in torch what this does. Needs Triton: import it late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.boundary import pick
from worker.kernels.boundary import commit_kernel, select_kernel
from worker.kernels.launch import dependent_launches, power_of_two
from worker.kernels.sampler import greedy
from worker.padded_boundary import GREEDY
from worker.resident_table import FINISHED, PARKED, PENDING, READY
from worker.sampling.logprobs import token_logprobs
from worker.stages import finalize

if TYPE_CHECKING:
    from torch import Tensor

    from worker.padded_boundary import TickVariant
    from worker.slot_table import SlotTable
    from worker.stages import Device
    from worker.tick_lines import TickLines


def fused_boundary(on: Device, lines: TickLines, variant: TickVariant) -> Tensor:
    """Half B of all rows of a bucket; returns the line that it wrote, int64 [1]."""
    seats, wanted, now = _select(on.slots, lines)
    finalize(on, seats)
    logits = on.model.logits(on.slots.hidden[seats], wanted)
    tokens, _, broken = greedy(logits)
    if variant is not GREEDY:
        logits, tokens = pick(on, logits, seats, [variant.kind], variant.needs)
    if variant.tells:
        lines.tell(token_logprobs(logits, tokens, alternatives=True), now)
    _commit(on.slots, lines, seats, now, tokens, broken, on.model.embed(tokens))
    return now


def _select(slots: SlotTable, lines: TickLines) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows leave or wait for their first sample, and a new line that says how many.

    Returns seats int64 [bucket], the trash slot for all others; how many of them leave, int32 [1];
    and the line that this boundary writes, int64 [1].
    """
    resident, rows = slots.resident, lines.rows
    seats, now = torch.empty_like(rows), torch.empty_like(lines.line)
    wanted = torch.empty(1, dtype=torch.int32, device=rows.device)
    select_kernel[(1,)](
        rows, resident.state, slots.loops, slots.survival, resident.outputs, resident.bound,
        resident.min_loops, resident.max_loops, resident.forced,
        seats, wanted, now, lines.line, lines.header, slots.trash, len(rows),
        resident.forced.shape[1], len(lines.header), READY, PENDING, power_of_two(len(rows)),
        num_warps=4, **dependent_launches(),
    )  # fmt: skip
    return seats, wanted, now


def _commit(
    slots: SlotTable,
    lines: TickLines,
    seats: Tensor,
    now: Tensor,
    tokens: Tensor,
    broken: Tensor,
    embedded: Tensor,
) -> None:
    """Put the tokens int64 [bucket] of these seats and their embeddings [bucket, H] into the slots.

    broken bool [bucket]: no token could be sampled. Writes the line `now` int64 [1], and the seats
    of the next loop.
    """
    resident, width = slots.resident, slots.hidden.shape[1]
    commit_kernel[(len(seats),)](
        lines.rows, seats, tokens, broken, embedded, now,
        slots.hidden, slots.token, slots.survival, slots.position, slots.loops,
        resident.state, resident.outputs, resident.max_tokens, resident.granted, resident.ending,
        lines.tokens, lines.exit_depths, lines.header, lines.failed, lines.seats, slots.trash,
        len(seats), READY, PARKED, FINISHED, resident.ending.shape[1], width, power_of_two(width),
        num_warps=4, **dependent_launches(),
    )  # fmt: skip
