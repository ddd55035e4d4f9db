"""Resident decode: ticks whose exits and ends the worker decides, without asking the scheduler.

A tick has two halves. In the first every ready row runs one loop, whatever its depth, and its exit
is tested. In the second the rows whose exit fired are finalized and sampled, and, unless they
ended or lack room, their new token is embedded. Rows that wait for their first output are sampled
before the first tick, so no plan ends with an exit that is not sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from protocol.checks import require_distinct, require_non_negative

if TYPE_CHECKING:
    from protocol.identity import RequestKey

MAX_ENDING_IDS = 16
"""Tokens that may end one resident request; a slot has room for so many."""


class RowState(IntEnum):
    """Where a resident row stands between two plans.

    READY     its token is embedded, and has run so many loops
    PARKED    its token is sampled, and there is no block for it; it goes on after a grant
    FINISHED  it has ended; nothing is run of it until it is released
    """

    READY = 0
    PARKED = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True)
class ResidentTerms:
    """What a worker must know to decide a request's exits and its end.

    A token leaves as protocol.exit_rule.exits says of `min_loops`, `max_loops` and `bound`, or
    output i after `forced_depths[i]` loops if there are any. The request ends with one of
    `ending_ids`, or with its `max_tokens`-th output.
    """

    min_loops: int
    max_loops: int
    bound: float
    max_tokens: int
    ending_ids: tuple[int, ...] = ()
    forced_depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.min_loops <= self.max_loops or self.max_tokens < 1:
            raise ValueError("resident terms: loops and tokens count from 1, min before max")
        require_non_negative("resident terms", self.ending_ids)
        if len(self.ending_ids) > MAX_ENDING_IDS:
            raise ValueError(f"resident terms: more than {MAX_ENDING_IDS} ending ids")
        if self.forced_depths and (
            len(self.forced_depths) < self.max_tokens or min(self.forced_depths) < 1
        ):
            raise ValueError("resident terms: a forced depth for each output, at least 1")


@dataclass(frozen=True, slots=True)
class ResidentBatch:
    """Up to `max_ticks` ticks over these rows, whose prompts are through.

    The worker stops at the end of a tick when no row is ready any more, when a newer plan that
    brings or takes away requests waits, or, if the plan `yields`, when a row has ended.

    With `prompt_ticks` above 1 the chunks of a PrefillBatch right before it may run in as many
    parts, each before one of the first ticks. Rows whose prompts that completes join once it has.
    """

    keys: tuple[RequestKey, ...]
    max_ticks: int
    yields: bool = False
    prompt_ticks: int = 1

    def __post_init__(self) -> None:
        require_distinct("resident", self.keys)
        if not 1 <= self.prompt_ticks <= self.max_ticks:
            raise ValueError(
                f"resident: {self.max_ticks} ticks, {self.prompt_ticks} of them with prompts"
            )
