"""The batch builder: addresses from the slot table, whatever depths share a batch."""

from __future__ import annotations

import torch

from protocol.identity import RequestKey
from protocol.plan import PrefillBatch
from tests.plans import admission
from worker.batch import decode_rows, prefill_rows
from worker.slot_table import SlotTable

CPU = torch.device("cpu")
PLANES, WIDTH, BLOCK_SIZE, SCRATCH = 4, 3, 16, 90
A, B = RequestKey("a", 1), RequestKey("b", 2)
TABLES = {
    key: tuple(tuple(range(first + p * WIDTH, first + (p + 1) * WIDTH)) for p in range(PLANES))
    for key, first in ((A, 10), (B, 40))
}


def table() -> SlotTable:
    slots = SlotTable(
        num_slots=2,
        hidden_size=8,
        planes=PLANES,
        max_loops=PLANES,
        max_positions=WIDTH * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        scratch_block=SCRATCH,
        vocab_size=64,
        dtype=torch.float32,
        device=CPU,
    )
    for key in (A, B):
        slots.admit(admission(key, tuple(range(20)), TABLES[key]))
    return slots


def test_rows_of_any_depth_have_the_addresses_of_their_own_plane() -> None:
    slots = table()
    seats = torch.tensor([slots.slot(A).index, slots.slot(B).index, slots.trash])
    rows = decode_rows(slots, seats, torch.tensor([37, 5, 0]), torch.tensor([2, 0, 0]), WIDTH)
    assert rows.blocks.tolist() == [TABLES[A][2][2], TABLES[B][0][0], SCRATCH]
    assert rows.offsets.tolist() == [5, 5, 0]
    assert rows.lengths.tolist() == [38, 6, 0]
    first = TABLES[B][0][0]  # of what lies behind the 6 tokens that B sees
    assert rows.seen_tables.tolist() == [list(TABLES[A][2]), [first] * WIDTH, [SCRATCH] * WIDTH]


def test_all_depths_of_a_prompt_chunk_come_from_one_upload() -> None:
    slots = table()
    indices = [slots.slot(key).index for key in (A, B)]
    rows = prefill_rows(slots, PrefillBatch((A, B), (15, 0), (3, 2)), indices, CPU)
    assert rows.tokens.tolist() == [15, 16, 17, 0, 1]
    depths = [rows.at_depth(slots, depth) for depth in range(PLANES)]
    for depth, chunks in enumerate(depths):
        for name in ("positions", "lengths", "edges", "bounds"):
            assert getattr(chunks, name) is getattr(depths[0], name), name
        own, other = TABLES[A][depth], TABLES[B][depth]
        assert chunks.blocks.tolist() == [own[0], own[1], own[1], other[0], other[0]]
        assert chunks.tables[chunks.chunk_rows].tolist() == [list(own[:2]), list(other[:2])]
