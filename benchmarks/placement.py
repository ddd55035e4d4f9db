"""Placement policies compared: many workers, many requests, a virtual clock.

The engine is the real one. A worker takes `BASE_MS + ROW_MS * rows` for a plan, so a lane with
fewer rows is faster for each of them. Half of the requests leave after one loop a token, half
after all four, which nobody is told; they arrive at random, at about LOAD of what the workers do.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from benchmarks.report import Figure, progress
from protocol.config import PlacementName, SchedulerSettings
from protocol.profile import ModelProfile, WorkerProfile
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from scheduler.engine import Engine

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan
    from protocol.result import PlanResult

BASE_MS = 1.0
ROW_MS = 0.05
SLOTS = 16
LOOPS = 4
OUTPUTS = (4, 8, 16, 32, 64)
LOAD = 0.85
SEED = 11

PROFILE = WorkerProfile(
    ModelProfile("bench", "bench", 49152, 4096, LOOPS, (0,), 0.5),
    "none",
    "float32",
    SLOTS,
    num_blocks=SLOTS * LOOPS * 8,
    block_size=16,
    planes=LOOPS,
    max_step_tokens=512,
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the millisecond at which it comes."""

    at: float
    request_id: str
    params: SamplingParams


def arrivals(count: int, workers: int) -> list[Arrival]:
    """`count` requests at about LOAD of the rate at which `workers` workers end them."""
    chance = random.Random(SEED)
    mean_loops = (1 + LOOPS) / 2 * sum(OUTPUTS) / len(OUTPUTS)
    most_per_ms = workers * SLOTS / (BASE_MS + ROW_MS * SLOTS) / mean_loops
    found, now = [], 0.0
    for index in range(count):
        now += chance.expovariate(LOAD * most_per_ms)
        kind = chance.choice(("easy", "hard"))
        params = SamplingParams(max_tokens=chance.choice(OUTPUTS))
        found.append(Arrival(now, f"{kind}-{index}", params))
    return found


def gate(key: RequestKey, position: int, depth: int) -> float:
    """Sure at once for easy requests, never for hard ones."""
    return float(key.request_id.startswith("easy"))


class Simulation:
    """One run on a virtual clock, in milliseconds. Owner: simulate. Mutated only by: run."""

    def __init__(self, placement: PlacementName, requests: int, workers: int) -> None:
        self._placement = placement
        self._arrivals = arrivals(requests, workers)
        self._came: dict[str, float] = {}
        self._took: list[float] = []
        self._engine = Engine(SchedulerSettings(placement=placement, max_waiting=requests))
        self._executors: dict[str, ScriptedExecutor] = {}
        for index in range(workers):
            self._engine.add_lane(f"lane-{index}", 1, PROFILE)
            self._executors[f"lane-{index}"] = ScriptedExecutor(PROFILE, hazard=gate)
        self._results: list[tuple[float, str, PlanResult]] = []
        self.now = 0.0

    def run(self) -> list[float]:
        """How long each request took, in the order of their ends."""
        coming = iter(self._arrivals)
        next_one = next(coming, None)
        shown = 0
        while next_one is not None or self._results:
            if next_one is not None and (not self._results or next_one.at <= self._results[0][0]):
                self.now = next_one.at
                self._came[next_one.request_id] = self.now
                self._engine.add(next_one.request_id, [1, 2], next_one.params, 7)
                next_one = next(coming, None)
            else:
                self.now, lane, result = heapq.heappop(self._results)
                for output in self._engine.apply(lane, result, self.now):
                    if output.finish_reason is not None:
                        self._took.append(self.now - self._came[output.key.request_id])
            for lane, plan in self._engine.plan(self.now):
                self._start(lane, plan)
            if len(self._took) * 10 // len(self._arrivals) > shown:
                shown = len(self._took) * 10 // len(self._arrivals)
                progress(f"  {self._placement}: {shown * 10} % of {len(self._arrivals)} requests")
        return self._took

    def _start(self, lane: str, plan: ExecutionPlan) -> None:
        submission = self._executors[lane].submit(plan)
        result = submission.collect(0.0)
        submission.retire()
        rows = sum(len(step.keys) for step in plan.steps)
        heapq.heappush(self._results, (self.now + BASE_MS + ROW_MS * rows, lane, result))


def compare_placements(requests: int, workers: int) -> list[Figure]:
    """Completion time of the run, and median and 99th percentile of a request, by policy."""
    figures = []
    for placement in get_args(PlacementName):
        progress(f"{placement}: {requests} requests on {workers} workers, virtual clock")
        simulation = Simulation(placement, requests, workers)
        took = sorted(simulation.run())
        figures += [
            Figure(f"{placement}: all requests done", simulation.now, "ms (virtual)"),
            Figure(f"{placement}: median request", took[len(took) // 2], "ms (virtual)"),
            Figure(f"{placement}: p99 request", took[len(took) * 99 // 100], "ms (virtual)"),
        ]
    return figures
