"""How many engines there should be: a pure function of what they report, and Serve's way to it.

Ray Serve pickles this module by value and runs it in its controller, which may not have this
project: so it imports nothing but the standard library while it runs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ray.serve.config import AutoscalingContext

SCARCE_KV = 0.05
"""Free share of an engine's KV blocks below which requests that wait there wait for blocks."""


@dataclass(frozen=True)
class ScalingRules:
    """What protocol/config.py says in AutoscalingSettings; seconds, and a share for `slack`."""

    target_debt: float
    slack: float
    up_delay: float
    down_delay: float
    stale_after: float


@dataclass(frozen=True)
class EngineReport:
    """One engine at time `at`, in seconds of the clock that `decide` is asked by.

    `loop_debt` loops of work at `loops_per_second`, 0 where that is not known yet; it runs
    `loops_now` a second; `waiting` requests are without a slot; `free_kv` is the free share of its
    KV blocks.
    """

    at: float
    loop_debt: float
    loops_per_second: float
    loops_now: float
    waiting: float
    free_kv: float


@dataclass(frozen=True)
class ScalingState:
    """What a decision remembers for the next one.

    `more_since` and `fewer_since` are when it began to be so that more, or fewer, engines are
    wanted without a break; `most` is the most that were wanted since `fewer_since`.
    """

    more_since: float | None = None
    fewer_since: float | None = None
    most: int = 0


def decide(
    rules: ScalingRules,
    now: float,
    target: int,
    running: Iterable[str],
    reports: Mapping[str, EngineReport],
    bounds: tuple[int, int],
    state: ScalingState,
) -> tuple[int, ScalingState]:
    """How many engines there should be, and the state for the next decision.

    `target` is what there should be so far, `running` the engines that run; of a target above them
    the rest is still starting. More are wanted when the seconds of work of all engines together
    exceed target * target_debt, or when every engine has requests waiting for want of KV; fewer
    when fewer could do that work at (1 - slack) * target_debt each and nobody waits everywhere.
    What is wanted for `up_delay`, or `down_delay`, comes true. Debt alone would flap, since what
    keeps up with its work owes little: so the loops that all run now must be (1 - slack) of what
    fewer can run. An engine without a fresh report owes nothing that would ask for more, and keeps
    any from leaving.

    Example: target_debt 10, slack 0.3, target 2, engines of 100 loops/s. 24 s of work -> 3 wanted;
    15 s -> neither, since one engine would owe 15 > 7; 6 s -> 1 wanted if both run at most 70
    loops/s together, else neither.
    """
    least, most = bounds
    names = list(running)
    fresh = [
        reports[name]
        for name in names
        if name in reports and now - reports[name].at <= rules.stale_after
    ]
    debt, busy = _work(fresh)
    waits = bool(fresh) and all(report.waiting > 0 for report in fresh)
    more = math.ceil(debt / rules.target_debt)
    if waits and len(names) >= target and all(report.free_kv < SCARCE_KV for report in fresh):
        more = max(more, target + 1)
    if min(more, most) > target:
        since = now if state.more_since is None else state.more_since
        if now - since < rules.up_delay:
            return _within(target, bounds), ScalingState(more_since=since)
        return min(more, most), ScalingState()
    share = 1 - rules.slack
    fewer = max(math.ceil(debt / (rules.target_debt * share)), math.ceil(busy / share), least)
    if fewer < target and len(fresh) == len(names) > 0 and not waits:
        since = now if state.fewer_since is None else state.fewer_since
        wanted = max(fewer, state.most)
        if now - since < rules.down_delay:
            return _within(target, bounds), ScalingState(fewer_since=since, most=wanted)
        return _within(wanted, bounds), ScalingState()
    return _within(target, bounds), ScalingState()


def _work(reports: list[EngineReport]) -> tuple[float, float]:
    """Seconds of work that all engines owe together, and how many of them the present work keeps.

    One whose rate is not known yet is as fast as the others on average. Where none is, nothing has
    run yet: nobody can say how long what is owed takes, and all are kept that owe something.
    """
    rates = [report.loops_per_second for report in reports if report.loops_per_second > 0]
    if not rates:
        return 0.0, sum(report.loop_debt > 0 for report in reports)
    usual = sum(rates) / len(rates)
    debt = sum(report.loop_debt / (report.loops_per_second or usual) for report in reports)
    return debt, sum(report.loops_now for report in reports) / usual


def _within(count: int, bounds: tuple[int, int]) -> int:
    least, most = bounds
    return min(max(count, least), most)


class EnginePolicy:
    """Serve's autoscaling policy of the engines: its context in, `decide`'s answer out.

    Owner: Ray Serve's controller. It keeps nothing: what is remembered goes through Serve.
    """

    def __init__(self, **rules: float) -> None:
        self._rules = ScalingRules(**rules)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas and the policy's state."""
        state = ScalingState(**(context.policy_state or {}).get("loopmesh", {}))
        count, after = decide(
            self._rules,
            float(context.current_time or 0.0),
            context.target_num_replicas,
            [str(replica) for replica in context.running_replicas],
            reports_of(context.raw_metrics or {}),
            (context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas),
            state,
        )
        return count, {"loopmesh": dataclasses.asdict(after)}


def reports_of(metrics: Mapping[str, Mapping[Any, Any]]) -> dict[str, EngineReport]:
    """The last report of each replica in Serve's raw metrics: name -> replica -> time series.

    A replica of which a figure is missing has none.
    """
    fields = [field.name for field in dataclasses.fields(EngineReport) if field.name != "at"]
    latest: dict[str, dict[str, Any]] = {}
    for name in fields:
        for replica, series in metrics.get(name, {}).items():
            if series:
                latest.setdefault(str(replica), {})[name] = series[-1]
    return {
        replica: EngineReport(
            at=min(point.timestamp for point in points.values()),
            **{name: point.value for name, point in points.items()},
        )
        for replica, points in latest.items()
        if len(points) == len(fields)
    }
