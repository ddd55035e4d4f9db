"""What a plan and an applied result cost the host, by the number of running requests."""

from __future__ import annotations

from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING

from benchmarks.report import Figure, progress
from protocol.config import SchedulerSettings
from protocol.profile import ModelProfile, WorkerProfile
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from scheduler.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SIZES = (1, 64, 256, 1024)
GOAL_SIZE = 256
GOAL_US = 300.0
GOAL_US_PER_ROW_AND_TICK = 1.0
TICKS = 16

THRESHOLDS: Mapping[str, float] = {"loop": 1.0, "mixed": 0.5}
"""Kinds of plans by exit threshold: `loop` plans, where nobody exits, have one stage and a row a
request; `mixed` ones have CODA, PRELUDE and RECURRENT, about two rows a request, and outputs."""


class Running:
    """An engine with one lane on which `size` requests decode. Owner: host_costs."""

    def __init__(self, size: int, threshold: float, max_ticks: int = 0) -> None:
        model = ModelProfile("bench", "bench", 49152, 2**20, 4, (0,), 1.0)
        profile = WorkerProfile(
            model,
            "none",
            "float32",
            size,
            size * 4 * 64,
            2**14,
            4,
            max(size, 16),
            max_ticks=max_ticks,
        )
        # All prompts in one plan: the rows stay in step where nobody exits early.
        settings = SchedulerSettings(
            max_waiting=size,
            max_prefill_tokens=size,
            admission_scan_limit=size,
            max_ticks=max(max_ticks, 1),
        )
        self._engine = Engine(settings)
        self._engine.add_lane("lane-0", 1, profile)
        self._executor = ScriptedExecutor(profile)
        params = SamplingParams(max_tokens=2**19, exit_threshold=threshold, ignore_eos=True)
        for index in range(size):
            self._engine.add(f"request-{index}", [1], params, index)
        self.plan_ns: list[int] = []
        self.apply_ns: list[int] = []
        while self._engine.stats().tokens < 2 * size:
            self.step()

    def step(self, stages: int | None = None) -> None:
        """One plan; its times count if it has this number of stages."""
        started = perf_counter_ns()
        ((lane, plan),) = self._engine.plan(0.0)
        planned = perf_counter_ns()
        submission = self._executor.submit(plan)
        result = submission.collect(0.0)
        submission.retire()
        answered = perf_counter_ns()
        self._engine.apply(lane, result, 0.0)
        applied = perf_counter_ns()
        if len(plan.steps) == stages:
            self.plan_ns.append(planned - started)
            self.apply_ns.append(applied - answered)


def host_costs(rounds: int, sizes: Sequence[int] = SIZES) -> list[Figure]:
    """Medians over at least `rounds` plans of each kind and size, measured in turns."""
    figures = []
    for kind, threshold in THRESHOLDS.items():
        stages = 1 if kind == "loop" else 3
        progress(f"{kind} plans: {', '.join(map(str, sizes))} running requests")
        engines = {size: Running(size, threshold) for size in sizes}
        while min(len(running.plan_ns) for running in engines.values()) < max(rounds, 1):
            for running in engines.values():
                running.step(stages)
        for size, running in engines.items():
            plan, apply = median(running.plan_ns) / 1e3, median(running.apply_ns) / 1e3
            goal = GOAL_US if (kind, size) == ("loop", GOAL_SIZE) else None
            figures += [
                Figure(f"{kind}, {size} running: plan", plan, "us"),
                Figure(f"{kind}, {size} running: apply", apply, "us"),
                Figure(f"{kind}, {size} running: plan + apply", plan + apply, "us", goal),
            ]
    return figures


def tick_costs(rounds: int, sizes: Sequence[int] = SIZES) -> list[Figure]:
    """The same for plans of resident ticks, divided by the rows and ticks of a plan."""
    progress(f"plans of {TICKS} ticks: {', '.join(map(str, sizes))} running requests")
    figures = []
    engines = {size: Running(size, THRESHOLDS["mixed"], TICKS) for size in sizes}
    for _ in range(max(rounds, 1)):
        for running in engines.values():
            running.step(1)
    for size, running in engines.items():
        work = 1e3 * size * TICKS
        plan, apply = median(running.plan_ns) / work, median(running.apply_ns) / work
        goal = GOAL_US_PER_ROW_AND_TICK if size == GOAL_SIZE else None
        figures += [
            Figure(f"ticks, {size} running: plan, a row and tick", plan, "us"),
            Figure(f"ticks, {size} running: apply, a row and tick", apply, "us"),
            Figure(
                f"ticks, {size} running: plan + apply, a row and tick", plan + apply, "us", goal
            ),
        ]
    return figures
