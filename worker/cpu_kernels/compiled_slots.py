"""The code of slots that Numba compiles: what worker/seats, stages and boundary state in torch.

Exact: every operation as it is written. A cache is stale by the date of its file: none is split.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from worker.cpu_kernels.team import floats, integers, num_threads, octets, thread_number

_ONE = np.float32(1.0)


@njit
def copy(source, at, count, target, to):
    """target[to :] = source[at : at + count]."""
    for index in range(count):
        target[to + index] = source[at + index]


def gather(words):
    """See seats.gather_seats."""
    w = carray(words, (12,))
    count, size, planes, trash = w[0], w[1], w[2], w[3]
    seats, slot_hidden, position, loops = (
        integers(w[4]),
        floats(w[5]),
        integers(w[6]),
        integers(w[7]),
    )
    hidden, positions = floats(w[8]), integers(w[9])
    lengths, table_rows = integers(w[10]), integers(w[11])
    for row in range(count):
        slot = seats[row]
        copy(slot_hidden, slot * size, size, hidden, row * size)
        positions[row] = position[slot]
        lengths[row] = 0 if slot == trash else position[slot] + 1
        table_rows[row] = slot * planes + min(loops[slot], planes - 1)


def commit_loop(words):
    """See seats.commit_seats."""
    w = carray(words, (10,))
    count, size, trash = w[0], w[1], w[2]
    seats, hidden, hazards = integers(w[3]), floats(w[4]), floats(w[5])
    slot_hidden, survival, loops, survivals = (
        floats(w[6]),
        floats(w[7]),
        integers(w[8]),
        floats(w[9]),
    )
    for row in range(count):
        slot = seats[row]
        left = survival[slot] * (_ONE - hazards[row])
        survivals[row] = survival[slot] = _ONE if slot == trash else left
        copy(hidden, row * size, size, slot_hidden, slot * size)
        loops[slot] += 1


def leave(words):
    """See boundary.leaves."""
    w = carray(words, (11,))
    count, positions = w[0], w[1]
    seats, loops, outputs = integers(w[2]), integers(w[3]), integers(w[4])
    survival, bound = floats(w[5]), floats(w[6])
    least, most, forced, leaves = integers(w[7]), integers(w[8]), octets(w[9]), octets(w[10])
    for row in range(count):
        slot = seats[row]
        run = loops[slot]
        fires = run >= most[slot] or (run >= least[slot] and survival[slot] <= bound[slot])
        depth = np.int64(forced[slot * positions + outputs[slot]])
        leaves[row] = run >= depth if depth > 0 else fires


def finalize(words):
    """See stages.finalize."""
    w = carray(words, (13,))
    count, trash, planes, width, block_size, head_dim = w[0], w[1], w[2], w[3], w[4], w[5]
    block_stride, head_pages = w[6], w[7]
    seats, positions, loops = integers(w[8]), integers(w[9]), integers(w[10])
    tables, pages = integers(w[11]), floats(w[12])
    for row in range(count):
        slot = seats[row]
        if slot == trash:
            continue
        table = slot * planes * width + positions[slot] // block_size
        token = positions[slot] % block_size * head_dim
        source = tables[table + (loops[slot] - 1) * width] * block_stride + token
        for plane in range(loops[slot], planes):
            target = tables[table + plane * width] * block_stride + token
            # Pages are dealt out, so that a row that copies more makes nobody wait.
            for page in range(thread_number(), head_pages, num_threads()):
                offset = page * block_size * head_dim
                copy(pages, source + offset, head_dim, pages, target + offset)


def commit_token(words):
    """See boundary.commit."""
    w = carray(words, (22,))
    count, size, trash, endings = w[0], w[1], w[2], w[3]
    ready, parked, finished = w[4], w[5], w[6]
    seats, tokens, broken, embedded = integers(w[7]), integers(w[8]), octets(w[9]), floats(w[10])
    hidden, token, survival = floats(w[11]), integers(w[12]), floats(w[13])
    position, loops, state = integers(w[14]), integers(w[15]), octets(w[16])
    outputs, most, granted = integers(w[17]), integers(w[18]), integers(w[19])
    ending, ends = integers(w[20]), octets(w[21])
    for row in range(count):
        slot = seats[row]
        ends[row] = 0
        if slot == trash:
            continue
        found = tokens[row]
        outputs[slot] += 1
        position[slot] += 1
        over = broken[row] != 0 or outputs[slot] >= most[slot]
        for index in range(endings):
            over = over or ending[slot * endings + index] == found
        token[slot], survival[slot], loops[slot] = found, _ONE, 0
        copy(embedded, row * size, size, hidden, slot * size)
        stands = ready if position[slot] < granted[slot] else parked
        state[slot] = finished if over else stands
        ends[row] = over
