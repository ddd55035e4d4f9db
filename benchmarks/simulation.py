"""A cluster on a virtual clock: the real engine, and workers that only take time.

A plan takes a fixed time for reading the weights and one for each row that is looped, whatever its
depth. With SHORT_CONTEXT that is 1.2 ms at 1 row, 2.7 at 32, 7.4 at 128, which is what a model of
1.4 billion parameters is to take for a loop on a large GPU at 1,024 tokens of context: a lane with
fewer rows is faster for each of them, but a row more costs little. LONG_CONTEXT is an estimate for
16 times the context, where reading KV is nearly all. A prompt token is a row in each of its loops.

Half of the requests leave after one loop a token, half after all four: nobody is told, but the
exit depths of a request show it. Half ask for few outputs and half for many.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.config import SchedulerSettings
from protocol.plan import CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.profile import ModelProfile, WorkerProfile
from protocol.resident import ResidentBatch
from protocol.result import CodaResult, PlanResult, PrefillResult, PreludeResult, RecurrentResult
from protocol.sampling import SamplingParams
from scheduler.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from protocol.config import PlacementName
    from protocol.plan import ExecutionPlan, Step
    from protocol.result import StepResult

SLOTS = 16
LOOPS = 4
EASY, HARD = "easy", "hard"
DEPTHS = {EASY: 1, HARD: LOOPS}
OUTPUTS = (4, 32)

PROFILE = WorkerProfile(
    ModelProfile("bench", "bench", 49152, 4096, LOOPS, (0,), 0.5),
    "none",
    "float32",
    SLOTS,
    num_blocks=SLOTS * LOOPS * 3,
    block_size=16,
    planes=LOOPS,
    max_step_tokens=512,
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one loop takes on a worker, in milliseconds."""

    name: str
    fixed_ms: float
    row_ms: float

    def step_ms(self, rows: int) -> float:
        """The time of one loop of `rows` rows. Example: 1.15 + 32 * 0.049 = 2.72."""
        return self.fixed_ms + self.row_ms * rows


SHORT_CONTEXT = StepCost("1k context", 1.15, 0.049)
LONG_CONTEXT = StepCost("16k context", 1.15, 0.75)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: `load` is the share of the requests that the workers, all slots busy, could end."""

    placement: PlacementName
    load: float
    seed: int
    requests: int
    workers: int
    cost: StepCost = SHORT_CONTEXT


@dataclass(frozen=True, slots=True)
class Outcome:
    """When the last request ended, and how long each took from its arrival, in milliseconds."""

    makespan: float
    latencies: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean latency."""
        return sum(self.latencies) / len(self.latencies)

    @property
    def p99(self) -> float:
        """The latency that one request in a hundred exceeds."""
        return sorted(self.latencies)[len(self.latencies) * 99 // 100]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the millisecond at which it comes."""

    at: float
    request_id: str
    outputs: int


def arrivals(case: Case) -> Iterator[Arrival]:
    """The requests of a case, the same for every placement: a Poisson stream."""
    chance = random.Random(case.seed)
    loops = sum(DEPTHS.values()) / len(DEPTHS) * sum(OUTPUTS) / len(OUTPUTS)
    rows_per_ms = case.workers * SLOTS / case.cost.step_ms(SLOTS)
    now = 0.0
    for index in range(case.requests):
        now += chance.expovariate(case.load * rows_per_ms / loops)
        kind = chance.choice((EASY, HARD))
        yield Arrival(now, f"{kind}-{index}", chance.choice(OUTPUTS))


def looped_rows(plan: ExecutionPlan) -> int:
    """Rows of a plan that are looped; a prompt token is one for each of its loops."""
    rows = 0
    for step in plan.steps:
        match step:
            case RecurrentBatch(keys):
                rows += len(keys)
            case PrefillBatch(_, _, counts):
                rows += LOOPS * sum(counts)
            case _:
                continue
    return rows


def answer(plan: ExecutionPlan) -> PlanResult:
    """The result of a plan: easy requests survive no loop, hard ones every one; all sample 1."""
    steps = tuple(map(_answer, plan.steps))
    return PlanResult(plan.epoch, plan.seq, steps, device_us=(0,) * len(steps))


def _answer(step: Step) -> StepResult:
    match step:
        case PrefillBatch(keys, starts, counts):
            ends = tuple(start + count for start, count in zip(starts, counts, strict=True))
            return PrefillResult(keys, ends)
        case PreludeBatch(keys, positions, _):
            return PreludeResult(keys, positions)
        case RecurrentBatch(keys, positions, depths):
            survivals = tuple([float(key.request_id.startswith(HARD)) for key in keys])
            return RecurrentResult(keys, positions, depths, survivals)
        case CodaBatch(keys, _, _, output_indices):
            return CodaResult(keys, output_indices, (1,) * len(keys))
        case ResidentBatch():
            raise ValueError("the simulated workers run no ticks")


class Simulation:
    """One case, in virtual milliseconds. Owner: whoever runs it. Mutated only by: run."""

    def __init__(self, case: Case) -> None:
        self._cost = case.cost
        self._arrivals: Sequence[Arrival] = tuple(arrivals(case))
        # Prompts of one token have nothing to share.
        settings = SchedulerSettings(
            placement=case.placement, max_waiting=case.requests, prefix_caching=False
        )
        self._engine = Engine(settings)
        for index in range(case.workers):
            self._engine.add_lane(f"lane-{index}", 1, PROFILE)
        # Until when each worker is at work; and results to come, first to come first.
        self._busy = dict.fromkeys(self._engine.lanes, 0.0)
        self._results: list[tuple[float, str, int, PlanResult]] = []
        self._came: dict[str, float] = {}
        self._took: list[float] = []

    def run(self) -> Outcome:
        """Every request to its end."""
        now, coming = 0.0, 0
        while coming < len(self._arrivals) or self._results:
            arrives = self._arrivals[coming].at if coming < len(self._arrivals) else float("inf")
            if not self._results or arrives <= self._results[0][0]:
                now = arrives
                self._add(self._arrivals[coming])
                coming += 1
            else:
                now = self._apply()
            for lane, plan in self._engine.plan(now):
                self._start(now, lane, plan)
        return Outcome(now, tuple(self._took))

    def _add(self, request: Arrival) -> None:
        self._came[request.request_id] = request.at
        params = SamplingParams(max_tokens=request.outputs)
        self._engine.add(request.request_id, [1], params, 7)

    def _apply(self) -> float:
        """Apply the next result; the time at which it comes."""
        now, lane, _, result = heapq.heappop(self._results)
        for output in self._engine.apply(lane, result, now):
            if output.finish_reason is not None:
                self._took.append(now - self._came[output.key.request_id])
        return now

    def _start(self, now: float, lane: str, plan: ExecutionPlan) -> None:
        ends = max(now, self._busy[lane]) + self._cost.step_ms(looped_rows(plan))
        self._busy[lane] = ends
        heapq.heappush(self._results, (ends, lane, plan.seq, answer(plan)))
