"""Half B of a tick, and the test before it: which tokens leave, and what becomes of them.

Every function takes seats: slots int64 [n], where the trash slot is padding. It may stand there any
number of times; nothing of a request is then read or written. So one function serves a batch of
exactly the rows that leave, and a captured one of fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from worker.resident_table import FINISHED, PARKED, READY
from worker.stages import draw, finalize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from worker.row_record import SamplingKind
    from worker.sampling.adjustments import AdjustmentNeeds
    from worker.stages import Device


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a boundary has sampled, one entry a seat.

    tokens and exit_depths int64; broken bool: its logits were not numbers; ends bool: its request
    has ended; logits float32 [n, V] after adjustments.
    """

    tokens: Tensor
    exit_depths: Tensor
    broken: Tensor
    ends: Tensor
    logits: Tensor


def leaves(on: Device, seats: Tensor) -> Tensor:
    """Whether the token of each seat leaves after the loops that it has run, bool [n].

    As protocol.exit_rule.exits says, or after its forced depth; never before its first loop, since
    every bound on loops is at least 1.
    """
    slots, resident = on.slots, on.slots.resident
    if slots.compiled:
        # Imported late: Numba need not be there.
        from worker.cpu_kernels.slots import leave

        columns = (slots.loops, resident.outputs, slots.survival, resident.bound)
        bounds = (resident.min_loops, resident.max_loops)
        return leave(seats, *columns, bounds, resident.forced)
    loops = slots.loops[seats]
    crosses = slots.survival[seats] <= resident.bound[seats]
    fires = (loops >= resident.min_loops[seats]) & crosses
    fires |= loops >= resident.max_loops[seats]
    forced = resident.forced[seats, resident.outputs[seats]]
    return torch.where(forced > 0, loops >= forced, fires)


def boundary(
    on: Device, seats: Tensor, kinds: Sequence[SamplingKind], needs: AdjustmentNeeds
) -> Outputs:
    """Finalize, sample, and embed what was sampled.

    `kinds` and `needs` are those of at least all these rows. A request that ends is FINISHED, one
    without a block for its next token PARKED, all others are READY.
    """
    slots = on.slots
    exit_depths = slots.loops[seats]
    finalize(on, seats)
    logits = on.model.logits(slots.hidden[seats])
    broken = logits.amax(dim=1).isnan() & (seats != slots.trash)
    logits, tokens = pick(on, logits, seats, kinds, needs)
    ends = commit(on, seats, tokens, broken)
    return Outputs(tokens, exit_depths, broken, ends, logits)


def pick(
    on: Device,
    logits: Tensor,
    seats: Tensor,
    kinds: Sequence[SamplingKind],
    needs: AdjustmentNeeds,
) -> tuple[Tensor, Tensor]:
    """Adjusted logits float32 [n, V], and the tokens int64 [n] that are sampled from them."""
    adjuster, resident = on.slots.adjuster, on.slots.resident
    outputs = resident.outputs[seats]
    if needs.any:
        early = outputs < resident.min_tokens[seats]
        logits = adjuster.adjust_seats(logits, seats, early, needs)
    tokens = draw(on, logits, seats, outputs, kinds)
    if needs.penalized:
        adjuster.count_seats(tokens, seats)
    return logits, tokens


def embed(on: Device, seats: Tensor) -> None:
    """These slots start the token that they have sampled at depth 0."""
    slots = on.slots
    slots.hidden[seats] = on.model.embed(slots.token[seats])
    # Filled, not assigned: an assigned number would be copied from the host, which no graph can.
    slots.survival.index_fill_(0, seats, 1.0)
    slots.loops.index_fill_(0, seats, 0)


def wake(on: Device, seats: Tensor) -> None:
    """Those of these slots that are PARKED and have room now go on with their token."""
    slots, resident = on.slots, on.slots.resident
    state = resident.state[seats]
    goes_on = (state == PARKED) & (slots.position[seats] < resident.granted[seats])
    embed(on, seats.where(goes_on, slots.trash))
    resident.state[seats] = state.masked_fill(goes_on, READY)


def commit(on: Device, seats: Tensor, tokens: Tensor, broken: Tensor) -> Tensor:
    """The token in work of these slots is the one just sampled; which requests have ended."""
    slots, resident = on.slots, on.slots.resident
    if slots.compiled:
        # Imported late: Numba need not be there.
        from worker.cpu_kernels.slots import commit_token

        of_slot = (slots.hidden, slots.token, slots.survival, slots.position, slots.loops)
        of_terms = (resident.outputs, resident.max_tokens, resident.granted, resident.ending)
        columns = (*of_slot, resident.state, *of_terms)
        states = (READY, PARKED, FINISHED)
        embedded = on.model.embed(tokens)
        return commit_token(seats, tokens, broken, embedded, columns, slots.trash, states)
    # Nothing moves in the trash slot, so that what stands there stays a legal address.
    one = (seats != slots.trash).long()
    outputs, position = resident.outputs[seats] + one, slots.position[seats] + one
    slots.token[seats] = tokens * one
    slots.position[seats] = position
    resident.outputs[seats] = outputs
    embed(on, seats)
    ends = (resident.ending[seats] == tokens[:, None]).any(dim=1) | broken
    ends |= outputs >= resident.max_tokens[seats]
    ends &= one.bool()
    state = torch.where(position < resident.granted[seats], READY, PARKED)
    state = state.masked_fill(ends, FINISHED) * one
    resident.state[seats] = state.to(torch.uint8)
    return ends
