"""One concurrency: the engine at several exit depths beside its baselines, in turns."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.closed_loop import TIMEOUT, ClosedLoop, Outcome
from benchmarks.model_clock import ModelClock
from benchmarks.report import Figure, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.workload import Ask
    from protocol.config import SchedulerSettings
    from worker.local_executor import LocalExecutor

    Baseline = Callable[[Sequence[Ask], int], list[list[int]]]
    """Runs requests in batches of a size, and gives the outputs of each."""

GOAL_DEPTH = 2.5
"""The mean depth that goals of ratios hold at; a deeper workload has to be as much less faster."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The requests with one way to leave early."""

    name: str
    asks: Sequence[Ask]
    threshold: float = 1.0
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a run's time, in percent: all but layers, final norm, gate and head; and KV moved."""

    outside: float
    pages: float


class Comparison:
    """All that runs with so many requests at once. Owner: throughput. Mutated only by: turn.

    `floor_ms` is the floor of a tick, None where there is none; `on_cpu` takes shares of time as
    well, in runs of their own, since that costs some.
    """

    def __init__(
        self,
        concurrency: int,
        variants: Sequence[Variant],
        baselines: Mapping[str, Baseline],
        *,
        on_cpu: bool,
        floor_ms: float | None = None,
    ) -> None:
        self._concurrency = concurrency
        self._variants = variants
        self._baselines = baselines
        self._on_cpu = on_cpu
        self._floor_ms = floor_ms
        self._outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self._shares: dict[str, list[Shares]] = defaultdict(list)
        self._rates: dict[str, list[float]] = defaultdict(list)

    def turn(self, executor: LocalExecutor, settings: SchedulerSettings) -> None:
        """Run everything once."""
        for variant in self._variants:
            self._outcomes[variant.name].append(self._run(variant, executor, settings))
        for name, baseline in self._baselines.items():
            progress(f"  {name}")
            asks = self._variants[0].asks
            started = time.perf_counter()
            outputs = sum(map(len, baseline(asks, self._concurrency)))
            self._rates[name].append(outputs / (time.perf_counter() - started))
        for variant in self._variants if self._on_cpu else ():
            clock = ModelClock()
            with clock.running():
                seconds = self._run(variant, executor, settings).seconds
            shares = Shares(100 * (1 - clock.model / seconds), 100 * clock.pages / seconds)
            self._shares[variant.name].append(shares)

    def _run(
        self, variant: Variant, executor: LocalExecutor, settings: SchedulerSettings
    ) -> Outcome:
        progress(f"  {variant.name}")
        executor.begin_epoch(executor.epoch + 1, TIMEOUT)
        loop = ClosedLoop({"lane-0": executor}, settings)
        return loop.run(variant.asks, self._concurrency, variant.threshold)

    def figures(
        self, outside_goal: float | None = None, ratio_goals: Mapping[tuple[str, str], float] = {}
    ) -> list[Figure]:
        """Medians over all turns. `ratio_goals` are by the names of variant and baseline."""
        found = []
        for variant in self._variants:
            found += self._variant_figures(variant, outside_goal)
        for name, rates in self._rates.items():
            found.append(Figure(f"{self._at} {name}: output", median(rates), "tok/s"))
        for variant in self._variants:
            outcomes = self._outcomes[variant.name]
            depth = median(outcome.depth for outcome in outcomes)
            for name, rates in self._rates.items():
                ratios = [one.rate / rate for one, rate in zip(outcomes, rates, strict=True)]
                goal = ratio_goals.get((variant.name, name))
                if goal is not None:
                    goal *= min(1.0, GOAL_DEPTH / depth)
                figure = f"{self._at} {variant.name}: engine / {name}"
                found.append(Figure(figure, median(ratios), "times", goal, at_least=True))
        return found

    @property
    def _at(self) -> str:
        return f"{self._concurrency} at once,"

    def _variant_figures(self, variant: Variant, outside_goal: float | None) -> list[Figure]:
        outcomes = self._outcomes[variant.name]
        name = f"{self._at} {variant.name}"

        def middle(of: Callable[[Outcome], float]) -> float:
            return median(map(of, outcomes))

        found = [
            Figure(f"{name}: output", middle(_rate), "tok/s"),
            Figure(f"{name}: prompts", middle(lambda o: o.prompt_tokens / o.seconds), "tok/s"),
            Figure(f"{name}: loops", middle(lambda o: o.loops / o.seconds), "loops/s"),
            Figure(f"{name}: mean depth", middle(lambda o: o.depth), "loops"),
            Figure(f"{name}: first output", middle(lambda o: o.first_ms), "ms"),
            Figure(f"{name}: a tick", middle(lambda o: o.tick_ms), "ms"),
        ]
        if not self._on_cpu:
            steady = middle(_steady)
            found.append(Figure(f"{name}: steady", steady, "tok/s", variant.goal, at_least=True))
        if self._floor_ms is not None:
            found.append(Figure(f"{name}: its floor", self._floor_ms, "ms"))
        idle = middle(lambda o: 100 * max(1 - o.device_us / 1e6 / o.seconds, 0.0))
        found.append(Figure(f"{name}: no step runs", idle, "%"))
        if shares := self._shares[variant.name]:
            outside = median(share.outside for share in shares)
            found += [
                Figure(f"{name}: outside the model", outside, "%", outside_goal),
                Figure(f"{name}: moving KV", median(share.pages for share in shares), "%"),
            ]
        return found


def _rate(outcome: Outcome) -> float:
    return outcome.rate


def _steady(outcome: Outcome) -> float:
    return outcome.steady
