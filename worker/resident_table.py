"""ResidentTable: what the device must know of a request to decide its exits and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from protocol.resident import MAX_ENDING_IDS
from worker.upload import fill

if TYPE_CHECKING:
    from protocol.row_progress import RowProgress

EMPTY, PENDING, READY, PARKED, FINISHED = range(5)
"""States of a slot: its request is not resident, or in its prompt; its token waits for a sample; is
embedded and loops; is sampled and has no block for its position; its request has ended."""

_NONE = -1


class ResidentTable:
    """Device columns beside those of the slot table, one row a slot. Owner: SlotTable.

    Mutated only by: it when a request takes a slot, its grants, and the ticks. Everything here
    follows from a request's progress and its terms, so a snapshot need not hold it.

    state uint8; outputs, max_tokens, granted (tokens that its blocks hold), min_loops, max_loops
    and min_tokens int64; bound float32; ending int64 [rows, MAX_ENDING_IDS], -1 for none; forced
    uint8 [rows, max_positions], the exit depth of each output, 0 where the gate decides.
    """

    def __init__(self, rows: int, max_positions: int, device: torch.device) -> None:
        def column(value: int = 0) -> torch.Tensor:
            return torch.full((rows,), value, dtype=torch.int64, device=device)

        self.state = torch.zeros(rows, dtype=torch.uint8, device=device)
        self.outputs, self.max_tokens, self.granted = column(), column(), column()
        self.min_loops, self.max_loops, self.min_tokens = column(1), column(1), column()
        self.bound = torch.zeros(rows, dtype=torch.float32, device=device)
        shape = (rows, MAX_ENDING_IDS)
        self.ending = torch.full(shape, _NONE, dtype=torch.int64, device=device)
        self.forced = torch.zeros(rows, max_positions, dtype=torch.uint8, device=device)

    def enter(self, index: int, progress: RowProgress, min_tokens: int) -> None:
        """A request has taken a slot, as far as it has come."""
        terms = progress.terms
        self.state[index].fill_(_state(progress))
        self.granted[index].fill_(progress.capacity)
        if terms is None:
            return
        self.outputs[index].fill_(progress.outputs)
        self.max_tokens[index].fill_(terms.max_tokens)
        self.min_loops[index].fill_(terms.min_loops)
        self.max_loops[index].fill_(terms.max_loops)
        self.min_tokens[index].fill_(min_tokens)
        self.bound[index].fill_(terms.bound)
        ending = [*terms.ending_ids, *[_NONE] * (MAX_ENDING_IDS - len(terms.ending_ids))]
        fill(self.ending[index], torch.tensor(ending))
        depths = terms.forced_depths[: terms.max_tokens]
        self.forced[index].fill_(0)
        if depths:
            fill(self.forced[index, : len(depths)], torch.tensor(depths, dtype=torch.uint8))


def _state(progress: RowProgress) -> int:
    """Where a row starts the next plan.

    One that has run no loop is PARKED: its token is embedded at the start of a plan, if there is a
    block for it.
    """
    if progress.terms is None or progress.position < 0:
        return EMPTY
    if progress.finished:
        return FINISHED
    if progress.outputs == 0:
        return PENDING
    return READY if progress.loops else PARKED
