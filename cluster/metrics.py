"""Prometheus metrics through Ray: an engine's at a period, an ingress's as requests pass.

An observation takes Ray a microsecond. The engine's event loop does no more than read its own
statistics every `cluster.metrics_interval` seconds; what is timed is timed in the ingress.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from typing import TYPE_CHECKING, Protocol

from ray.util.metrics import Counter, Gauge, Histogram

from cluster import metric_table as table

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler.stats import EngineStats

logger = logging.getLogger(__name__)

GAUGE, COUNTER = table.Kind.GAUGE, table.Kind.COUNTER


def _gauge(metric: table.Metric, model: str) -> Gauge:
    made = Gauge(metric.name, metric.help, (table.MODEL_LABEL, *metric.labels))
    made.set_default_tags({table.MODEL_LABEL: model})
    return made


def counter(metric: table.Metric, model: str) -> Counter:
    """The counter of this process for a metric of the table."""
    made = Counter(metric.name, metric.help, (table.MODEL_LABEL, *metric.labels))
    made.set_default_tags({table.MODEL_LABEL: model})
    return made


def histogram(metric: table.Metric, model: str) -> Histogram:
    """The histogram of this process for a metric of the table."""
    labels = (table.MODEL_LABEL, *metric.labels)
    made = Histogram(metric.name, metric.help, list(metric.buckets), labels)
    made.set_default_tags({table.MODEL_LABEL: model})
    return made


class DeliveryRate:
    """What an engine delivers, in loops. Owner: EngineMetrics. Mutated only by: note.

    `loops_per_second` and `mean_exit_depth` are None until tokens were delivered between two
    reports; then half of what is remembered comes from the latest such report.
    """

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None
        self.loops_per_second: float | None = None
        self.mean_exit_depth: float | None = None

    def note(self, tokens: int, loops: int, now: float) -> None:
        """The totals of an engine at `now`, in seconds.

        Example: 10 tokens and 30 loops at 0 s, then 30 and 70 at 2 s -> 20 loops a second, mean
        exit depth 2.
        """
        last, self._last = self._last, (now, tokens, loops)
        if last is None or tokens == last[1] or now <= last[0]:
            return
        rate, depth = (loops - last[2]) / (now - last[0]), (loops - last[2]) / (tokens - last[1])
        self.loops_per_second = _halfway(self.loops_per_second, rate)
        self.mean_exit_depth = _halfway(self.mean_exit_depth, depth)


class EngineMetrics:
    """One engine's. Owner: whoever hosts the engine. Mutated only by: update.

    `lanes_wanted` is the number of workers that it was started with.
    """

    def __init__(self, model: str, lanes_wanted: int) -> None:
        self._gauges = {m: _gauge(m, model) for m in table.ENGINE_METRICS if m.kind is GAUGE}
        self._counters = {m: counter(m, model) for m in table.ENGINE_METRICS if m.kind is COUNTER}
        self._told: dict[tuple[table.Metric, str], int] = {}
        self._rate = DeliveryRate()
        self._lanes_wanted = lanes_wanted

    def update(self, stats: EngineStats, now: float) -> None:
        """Report what the engine holds, and what it has done since the last time."""
        debt = sum(lane.load for lane in stats.lanes)
        self._rate.note(stats.tokens, stats.loops, now)
        rate = self._rate.loops_per_second
        self._set(table.REQUESTS_RUNNING, stats.running)
        self._set(table.REQUESTS_WAITING, stats.waiting)
        self._set(table.REQUESTS_SUSPENDED, stats.suspended)
        used = stats.total_blocks - stats.free_blocks
        self._set(table.KV_USAGE, used / stats.total_blocks if stats.total_blocks else 0.0)
        self._set(table.LANES, len(stats.lanes))
        self._set(table.LANES_WANTED, self._lanes_wanted)
        self._set(table.LOOP_DEBT, debt)
        self._set(table.LOOP_DEBT_SECONDS, debt / rate if rate else None)
        self._set(table.LOOPS_PER_SECOND, rate)
        self._set(table.MEAN_EXIT_DEPTH, self._rate.mean_exit_depth)
        self._count(table.GENERATION_TOKENS, stats.tokens)
        self._count(table.LOOPS, stats.loops)
        self._count(table.LOOPS_SAVED, stats.loops_saved)
        for reason, ended in stats.finished.items():
            self._count(table.FINISHED, ended, reason.value)
        self._count(table.PREEMPTIONS, stats.pressure_preemptions, "pressure")
        self._count(table.PREEMPTIONS, stats.preemptions - stats.pressure_preemptions, "priority")
        self._count(table.PREFIX_QUERIES, stats.prefix_queries)
        self._count(table.PREFIX_HIT_TOKENS, stats.prefix_hit_tokens)

    def _set(self, metric: table.Metric, value: float | None) -> None:
        """Every time: Ray forgets a gauge that it has exported and not been told again."""
        self._gauges[metric].set(value)

    def _count(self, metric: table.Metric, total: int, label: str = "") -> None:
        """Ray counts what is added: only what has come since the last report."""
        told = self._told.get((metric, label), 0)
        if total > told:
            self._told[metric, label] = total
            self._counters[metric].inc(total - told, dict.fromkeys(metric.labels, label))


class Reporting(Protocol):
    """An engine that says what it holds."""

    async def stats(self) -> EngineStats: ...


def start_reports(
    engine: Reporting, update: Callable[[EngineStats, float], None], interval: float
) -> asyncio.Task[None]:
    """Hand the engine's statistics to `update` every `interval` seconds until it is cancelled.

    A report that fails is logged: an engine serves on without.
    """

    async def report() -> None:
        while True:
            try:
                update(await engine.stats(), time.monotonic())
            except Exception:
                logger.exception("the engine's metrics were not updated")
            await asyncio.sleep(interval)

    # A context of its own: Ray Serve cancels tasks that carry the context of a request.
    return asyncio.get_running_loop().create_task(report(), context=contextvars.Context())


def _halfway(old: float | None, new: float) -> float:
    return new if old is None else (old + new) / 2
