"""How busy an engine is: what it reports, how fast it was seen to be, and who takes a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler.stats import EngineStats

RATE_WEIGHT = 0.3
"""Weight of one measurement in the rates of loops."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine now.

    `debt` is what its live and waiting requests are expected to cost, in loops of one row;
    `loops_per_second` what it was seen to run when it was full, None before it has run any;
    `loops_now` what it runs a second at present.
    `free_blocks` of `total_blocks` KV blocks are free; `workers` counts the lanes. An engine that
    is `draining` takes no more requests.
    """

    debt: int
    loops_per_second: float | None
    loops_now: float
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    workers: int
    draining: bool = False

    @property
    def free_kv(self) -> float:
        """The free share of its KV blocks; 1 without any."""
        return self.free_blocks / self.total_blocks if self.total_blocks else 1.0


class LoopRate:
    """Loops a second that an engine can run, and runs. Owner: SchedulerActor.

    Mutated only by: sample. `per_second` is what it can run, `now` a mean of the last seconds. An
    engine that is not full runs as many loops as it was asked for, which says little of what it
    could do; so such a measurement may raise the rate and never lowers it.
    """

    def __init__(self) -> None:
        self._at: float | None = None
        self._loops = 0
        self.per_second: float | None = None
        self.now = 0.0

    def sample(self, now: float, loops: int, *, full: bool) -> None:
        """Tell it the engine's total of loops at `now`; `full`: no slot was free, or some waited.

        Example: 0 loops at 0 s, 100 at 1 s -> 100; 300 at 2 s -> 200; 400 at 3 s, not full -> 200;
        500 at 4 s, full -> 200 + 0.3 * (100 - 200) = 170.
        """
        before, self._at = self._at, now
        run, self._loops = loops - self._loops, loops
        if before is None or now <= before:
            return
        seen = run / (now - before)
        self.now += RATE_WEIGHT * (seen - self.now)
        if not run:
            return
        if self.per_second is None or seen > self.per_second:
            self.per_second = seen
        elif full:
            self.per_second += RATE_WEIGHT * (seen - self.per_second)


def load_of(stats: EngineStats, queued: int, rate: LoopRate, *, draining: bool) -> EngineLoad:
    """An engine's load from its counters; `queued` loops are the debt of its queue."""
    return EngineLoad(
        debt=sum(lane.load for lane in stats.lanes) + queued,
        loops_per_second=rate.per_second,
        loops_now=rate.now,
        running=stats.running,
        waiting=stats.waiting,
        free_blocks=stats.free_blocks,
        total_blocks=stats.total_blocks,
        workers=len(stats.lanes),
        draining=draining,
    )


class Candidate(Protocol):
    """An engine that could take a request, as far as is known here."""

    @property
    def load(self) -> EngineLoad | None:
        """Its last report; None when there is none, or none that is fresh."""

    @property
    def unreported(self) -> int:
        """Loops of requests that it was sent since."""


C = TypeVar("C", bound=Candidate)


def least_loaded(candidates: Iterable[C]) -> C | None:
    """The engine that a new request should go to; the first of equals, None without any.

    First those with a fresh report, of these first those where nobody waits, then the one with the
    fewest seconds of work, then the one with more free KV. An engine whose rate is not known yet is
    taken to be as fast as the others are on average.
    """
    known = list(candidates)
    rates = [
        item.load.loops_per_second
        for item in known
        if item.load is not None and item.load.loops_per_second
    ]
    usual = sum(rates) / len(rates) if rates else 1.0

    def rank(item: C) -> tuple[bool, bool, float, float]:
        load = item.load
        if load is None:
            return True, False, item.unreported / usual, 0.0
        seconds = (load.debt + item.unreported) / (load.loops_per_second or usual)
        return False, load.waiting > 0, seconds, -load.free_kv

    return min(known, key=rank, default=None)
