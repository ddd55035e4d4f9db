"""What the engine counts: running totals and the frozen snapshots that others read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from protocol.exit_rule import FinishReason
    from scheduler.kv_cost import KVStats
    from scheduler.output import RequestOutput


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane now.

    `running` requests may still give outputs, `releasing` ones have ended and hold a slot until
    the worker has answered; `load` is the loop debt in loops; `plans` counts the plans so far;
    `in_flight` of them are not answered, the first since `in_flight_since`.
    """

    name: str
    epoch: int
    running: int
    releasing: int
    free_slots: int
    kv: KVStats
    load: int
    plans: int
    in_flight_since: float | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine now, and its totals since it was made.

    `loops` sums the exit depths of all tokens; `loops_saved` sums what they stayed below a full
    pass, which is nothing for the first token of a request, since it always costs one. `finished`
    counts ends by reason. `stale_results` and `stale_rows` were unexpected and dropped,
    `discarded_rows` ran for a request that had ended meanwhile. `last_applied` is the time of the
    last result. `prefix_queries` counts the placements that asked for a cached prefix, and
    `prefix_hit_tokens` the prompt tokens that were found and not run again; `cached_blocks` and
    `evicted_blocks` are those of the open lanes. `suspended` requests are among those waiting;
    `preemptions` counts the snapshots taken, `resumptions` the requests that were given a slot
    again. `pressure_preemptions` are those of the preemptions that were for want of blocks; the
    others made room for a higher priority.
    """

    waiting: int
    running: int
    releasing: int
    free_blocks: int
    total_blocks: int
    rng_keys: int
    tokens: int
    loops: int
    loops_saved: int
    finished: Mapping[FinishReason, int]
    stale_results: int
    stale_rows: int
    discarded_rows: int
    last_applied: float | None
    lanes: tuple[LaneStats, ...]
    prefix_queries: int
    prefix_hit_tokens: int
    cached_blocks: int
    evicted_blocks: int
    preemptions: int
    resumptions: int
    suspended: int
    pressure_preemptions: int = 0


@dataclass(slots=True)
class Totals:
    """Running counts. Owner: Engine. Mutated only by: Engine and the applier it calls."""

    tokens: int = 0
    loops: int = 0
    loops_saved: int = 0
    stale_results: int = 0
    stale_rows: int = 0
    discarded_rows: int = 0
    preemptions: int = 0
    resumptions: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    prefix_queries: int = 0
    prefix_hit_tokens: int = 0
    pressure_preemptions: int = 0

    def count(self, outputs: Iterable[RequestOutput], full_depth: int) -> None:
        """Add what has just left the engine; a full pass takes `full_depth` loops.

        Example: full_depth 4, output 0 at depth 4 and output 1 at depth 3 -> 7 loops, 1 saved.
        """
        for output in outputs:
            tokens, loops = len(output.tokens), sum(output.exit_depths)
            self.tokens += tokens
            self.loops += loops
            self.loops_saved += full_depth * tokens - loops
            if output.finish_reason is not None:
                self.finished[output.finish_reason] += 1
