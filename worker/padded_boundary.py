"""The boundary of a whole bucket, as it is captured: rows that take no part are padding.

A captured boundary cannot ask what its rows need, so there are a few variants, each for all rows
that need no more. What a row did not ask for is neutral for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.plan import NO_LOGPROBS
from protocol.sampling import MAX_LOGPROBS
from worker.boundary import boundary, leaves
from worker.resident_table import PENDING, READY
from worker.row_record import SamplingKind
from worker.sampling.adjustments import AdjustmentNeeds, Adjustments
from worker.sampling.logprobs import token_logprobs
from worker.tick_lines import NONE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from worker.stages import Device
    from worker.tick_lines import TickLines

_NEUTRAL = Adjustments(biased=False, penalized=False, min_tokens=0)
_ANY = Adjustments(biased=True, penalized=True, min_tokens=1)


@dataclass(frozen=True, slots=True)
class TickVariant:
    """What a captured boundary does for all its rows."""

    name: str
    kind: SamplingKind
    needs: AdjustmentNeeds

    @property
    def tells(self) -> bool:
        """Whether it leaves log probabilities."""
        return self.kind.logprobs != NO_LOGPROBS


def _variant(name: str, kind: SamplingKind) -> TickVariant:
    return TickVariant(name, kind, AdjustmentNeeds.of([kind.adjusts]))


GREEDY = _variant("greedy", SamplingKind(False, False, False, _NEUTRAL, NO_LOGPROBS))
SAMPLED = _variant("sampled", SamplingKind(True, False, False, _NEUTRAL, NO_LOGPROBS))
FULL = _variant("full", SamplingKind(True, True, True, _ANY, MAX_LOGPROBS))
VARIANTS = (GREEDY, SAMPLED, FULL)
"""The largest logit; a draw by temperature alone; filters, adjustments and log probabilities."""


def variant_of(kinds: Iterable[SamplingKind]) -> TickVariant:
    """The variant that does the least among those that serve all these rows."""
    random = False
    for kind in kinds:
        random |= kind.random
        filters = kind.random and (kind.top_k or kind.top_p)
        if filters or kind.adjusts != _NEUTRAL or kind.logprobs != NO_LOGPROBS:
            return FULL
    return SAMPLED if random else GREEDY


def padded_boundary(on: Device, lines: TickLines, variant: TickVariant) -> Tensor:
    """Half B of all rows of a bucket; returns the header of its line, int64 [3].

    Rows that neither leave nor wait for their first sample take no part. Those of them that are
    READY were tested after their last loop already, and the test says the same again.
    """
    trash, resident = on.slots.trash, on.slots.resident
    rows, state = lines.rows, resident.state[lines.rows]
    looped = state == READY
    leaving = (looped & leaves(on, rows)) | (state == PENDING)
    found = boundary(on, rows.where(leaving, trash), [variant.kind], variant.needs)
    nothing = ~leaving | found.broken
    for held, value in ((lines.tokens, found.tokens), (lines.exit_depths, found.exit_depths)):
        held.index_copy_(0, lines.line, value.masked_fill(nothing, NONE)[None])
    if variant.tells:
        told = token_logprobs(found.logits, found.tokens, alternatives=True)
        lines.tell(told, lines.line)
    lines.failed.logical_or_(found.broken)
    header = torch.stack((looped.sum(), leaving.sum(), found.ends.sum()))
    lines.header.index_copy_(0, lines.line, header[None])
    lines.seats.copy_(rows.where(resident.state[rows] == READY, trash))
    lines.line.add_(1)
    return header
