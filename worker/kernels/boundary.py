"""Both ends of a boundary: which rows leave, and what becomes of the tokens sampled for them.

worker/padded_boundary.py states both in torch, worker/fused_boundary.py launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.launch import wait_for_inputs


@triton.jit
def select_kernel(
    rows, state, slot_loops, survival, outputs, bound, min_loops, max_loops, forced,
    seats, wanted, now, line, header, trash, count, positions, lines,
    IS_READY: tl.constexpr, IS_PENDING: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(rows + row, mask=inside, other=trash)
    stands = tl.load(state + slot, mask=inside, other=0)
    looped = inside & (stands == IS_READY)
    loops = tl.load(slot_loops + slot)
    fires = tl.load(survival + slot) <= tl.load(bound + slot)
    fires = fires & (loops >= tl.load(min_loops + slot))
    fires = fires | (loops >= tl.load(max_loops + slot))
    depth = tl.load(forced + slot * positions + tl.load(outputs + slot)).to(tl.int64)
    fires = ((depth > 0) & (loops >= depth)) | ((depth == 0) & fires)
    leaving = (looped & fires) | (inside & (stands == IS_PENDING))
    tl.store(seats + row, tl.where(leaving, slot, trash), mask=inside)
    leave = tl.sum(leaving.to(tl.int32), 0)
    at = tl.load(line)
    tl.store(wanted, leave)
    # A capture is warmed up beforehand, and must not write behind the last line.
    tl.store(now, at % lines)
    tl.store(line, at + 1)
    place = header + at % lines * 3
    tl.store(place, tl.sum(looped.to(tl.int32), 0).to(tl.int64))
    tl.store(place + 1, leave.to(tl.int64))
    tl.store(place + 2, leave.to(tl.int64) * 0)


@triton.jit
def commit_kernel(
    rows, seats, sampled, broken, embedded, now,
    slot_hidden, slot_token, slot_survival, slot_position, slot_loops,
    state, outputs, max_tokens, granted, ending,
    line_tokens, line_depths, header, failed, next_seats, trash, count,
    IS_READY: tl.constexpr, IS_PARKED: tl.constexpr, IS_FINISHED: tl.constexpr,
    ENDINGS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(seats + row)
    line = tl.load(now)
    place = line * count + row
    if slot == trash:  # takes no part
        own = tl.load(rows + row)
        goes_on = tl.load(state + own) == IS_READY
        tl.store(next_seats + row, tl.where(goes_on, own, trash))
        tl.store(line_tokens + place, -1)
        tl.store(line_depths + place, -1)
        return
    token = tl.load(sampled + row)
    is_broken = tl.load(broken + row) != 0
    depth = tl.load(slot_loops + slot)
    output = tl.load(outputs + slot) + 1
    position = tl.load(slot_position + slot) + 1
    ids = tl.load(ending + slot * ENDINGS + tl.arange(0, ENDINGS))
    ends = tl.max((ids == token).to(tl.int32), 0) > 0
    ends = ends | is_broken | (output >= tl.load(max_tokens + slot))
    stands = tl.where(position < tl.load(granted + slot), IS_READY, IS_PARKED)
    stands = tl.where(ends, IS_FINISHED, stands)
    h = tl.arange(0, BLOCK)
    value = tl.load(embedded + row * HIDDEN + h, mask=h < HIDDEN, other=0.0)
    tl.store(slot_hidden + slot * HIDDEN + h, value, mask=h < HIDDEN)
    tl.store(slot_token + slot, token)
    tl.store(slot_survival + slot, 1.0)
    tl.store(slot_position + slot, position)
    tl.store(slot_loops + slot, depth * 0)
    tl.store(outputs + slot, output)
    tl.store(state + slot, stands.to(tl.uint8))
    tl.store(line_tokens + place, tl.where(is_broken, -1, token))
    tl.store(line_depths + place, tl.where(is_broken, -1, depth))
    tl.store(failed + row, (tl.load(failed + row) != 0) | is_broken)
    tl.store(next_seats + row, tl.where(stands == IS_READY, slot, trash))
    tl.atomic_add(header + line * 3 + 2, ends.to(tl.int64))
