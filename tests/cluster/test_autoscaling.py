"""How many engines there should be, on a clock that the test turns."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.serve.config import AutoscalingContext

from cluster.autoscaling import (
    EnginePolicy,
    EngineReport,
    ScalingRules,
    ScalingState,
    decide,
    reports_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RATE = 100.0
RULES = ScalingRules(target_debt=10, slack=0.3, up_delay=10, down_delay=60, stale_after=20)
BOUNDS = (1, 4)


def report(at: float, seconds: float, busy: float = 0.0, **other: float) -> EngineReport:
    """An engine with that many seconds of work, which runs `busy` of what it can."""
    values = {"waiting": 0.0, "free_kv": 1.0} | other
    return EngineReport(at, RATE * seconds, RATE, RATE * busy, **values)


@dataclass
class Play:
    """Decisions every second. Owner: one test, which alone changes it."""

    target: int = 1
    now: float = 0.0
    state: ScalingState = field(default_factory=ScalingState)
    rules: ScalingRules = RULES
    bounds: tuple[int, int] = BOUNDS

    def decide(self, reports: Mapping[str, EngineReport], running: int | None = None) -> int:
        names = [f"e{i}" for i in range(self.target if running is None else running)]
        self.target, self.state = decide(
            self.rules, self.now, self.target, names, reports, self.bounds, self.state
        )
        self.now += 1.0
        return self.target

    def hold(self, seconds: int, make: Callable[[float], EngineReport]) -> list[int]:
        """The targets while every engine that should be there runs and reports the same."""
        return [
            self.decide({f"e{i}": make(self.now) for i in range(self.target)})
            for _ in range(seconds)
        ]


class Fluid:
    """Engines as tanks: work flows in evenly and out at RATE. Owner: one test."""

    def __init__(self, play: Play, start_time: float = 15.0) -> None:
        self.play, self.start_time = play, start_time
        self.owed = [0.0]
        self.ready_at = [0.0]

    def run(self, seconds: int, requests: float, loops: float) -> list[int]:
        """Let `requests` a second of `loops` each come for so long; the targets."""
        targets = []
        for _ in range(seconds):
            now = self.play.now
            running = [i for i, at in enumerate(self.ready_at) if at <= now]
            reports = {}
            for i in running:
                have = self.owed[i] + requests * loops / len(running)
                done = min(have, RATE)
                self.owed[i] = have - done
                reports[f"e{i}"] = EngineReport(now, self.owed[i], RATE, done, 0.0, 1.0)
            target = self.play.decide(reports, len(running))
            while len(self.ready_at) < target:
                self.ready_at.append(now + self.start_time)
                self.owed.append(0.0)
            del self.ready_at[target:], self.owed[target:]
            targets.append(target)
        return targets


def changes(targets: list[int]) -> int:
    return sum(first != then for first, then in pairwise(targets))


def test_engines_follow_prompts_that_turn_deeper_at_a_constant_rate_of_requests() -> None:
    fluid = Fluid(Play())
    shallow = fluid.run(600, requests=2.0, loops=30.0)
    deeper = fluid.run(1800, requests=2.0, loops=120.0)
    again = fluid.run(1800, requests=2.0, loops=30.0)
    assert set(shallow) == {1}
    assert 3 <= deeper[-1] <= 4  # 240 loops a second of 100 that an engine can run
    assert set(deeper[600:]) == {deeper[-1]}
    assert again[-1] == 1
    assert changes(again) <= 3


def test_an_even_load_never_makes_it_flap() -> None:
    for loops in (20.0, 45.0, 60.0, 69.0, 110.0, 130.0, 190.0):
        fluid = Fluid(Play())
        settled = fluid.run(7200, requests=2.0, loops=loops)[1200:]
        assert changes(settled) == 0, loops


def test_noise_around_a_target_changes_nothing() -> None:
    dice = random.Random(5)
    play = Play(target=2)
    noisy = play.hold(1000, lambda now: report(now, max(dice.gauss(8.0, 4.0), 0.0), busy=0.6))
    assert set(noisy) == {2}


def test_more_are_wanted_for_the_whole_delay_before_they_come() -> None:
    play = Play()
    assert play.hold(10, lambda now: report(now, 25.0)) == [1] * 10
    assert play.decide({"e0": report(play.now, 25.0)}) == 3
    # What has been ordered is not ordered again while it starts.
    for _ in range(30):
        assert play.decide({"e0": report(play.now, 29.0)}, running=1) == 3


def test_a_dip_starts_the_delay_anew() -> None:
    play = Play()
    play.hold(9, lambda now: report(now, 25.0))
    play.hold(1, lambda now: report(now, 9.0))
    assert play.hold(10, lambda now: report(now, 25.0)) == [1] * 10
    assert play.hold(1, lambda now: report(now, 25.0)) == [3]


def test_fewer_are_kept_after_the_delay_and_as_many_as_were_wanted_in_it() -> None:
    play = Play(target=4)
    assert play.hold(60, lambda now: report(now, 1.0)) == [4] * 60
    assert play.hold(1, lambda now: report(now, 1.0)) == [1]
    play = Play(target=4)
    play.hold(30, lambda now: report(now, 0.0))
    play.hold(1, lambda now: report(now, 3.5))  # 14 s of work keep two engines
    assert play.hold(30, lambda now: report(now, 0.0))[-1] == 2


@pytest.mark.parametrize(
    ("seconds", "busy", "wanted"),
    [(3.0, 0.0, 1), (3.6, 0.0, 2), (0.0, 0.35, 1), (0.0, 0.36, 2), (20.1, 0.0, 4), (12.0, 0.0, 3)],
)
def test_what_two_engines_owe_and_run_says_how_many_are_wanted(
    seconds: float, busy: float, wanted: int
) -> None:
    play = Play(target=2, rules=replace(RULES, up_delay=0.0, down_delay=0.0))
    first = play.decide({f"e{i}": report(0.0, seconds, busy) for i in range(2)})
    assert first == min(wanted, 4)


def test_bounds_hold_whatever_is_owed() -> None:
    play = Play(target=1, bounds=(2, 3))
    assert play.hold(1, lambda now: report(now, 0.0)) == [2]
    assert max(play.hold(100, lambda now: report(now, 1000.0))) == 3
    assert min(play.hold(300, lambda now: report(now, 0.0))) == 2
    play = Play(target=4, bounds=(1, 2))
    assert play.hold(1, lambda now: report(now, 1000.0)) == [2]


def test_a_report_that_is_missing_or_stale_keeps_every_engine() -> None:
    play = Play(target=2)
    for _ in range(200):
        assert play.decide({"e0": report(play.now, 0.0)}) == 2
    stale = report(play.now, 0.0)
    for _ in range(200):
        assert play.decide({"e0": report(play.now, 0.0), "e1": stale}) == 2
    for _ in range(200):
        assert play.decide({}) == 2
        assert play.decide({}, running=0) == 2
    # A report that comes back starts the delay.
    assert play.hold(60, lambda now: report(now, 0.0)) == [2] * 60
    assert play.hold(1, lambda now: report(now, 0.0)) == [1]


def test_a_silent_engine_does_not_hide_what_the_others_owe() -> None:
    play = Play(target=2)
    targets = [play.decide({"e0": report(play.now, 35.0)}) for _ in range(11)]
    assert targets[-1] == 4


def test_requests_that_wait_for_blocks_everywhere_ask_for_one_more() -> None:
    play = Play()
    assert play.hold(11, lambda now: report(now, 2.0, waiting=3.0, free_kv=0.01))[-1] == 2
    # The one that was ordered is waited for.
    for _ in range(30):
        starved = report(play.now, 2.0, waiting=3.0, free_kv=0.01)
        assert play.decide({"e0": starved}, running=1) == 2
    # Where nobody waits, or blocks are free, there is room.
    play = Play(target=2)
    for _ in range(30):
        one = report(play.now, 6.0, waiting=3.0, free_kv=0.01)
        assert play.decide({"e0": one, "e1": report(play.now, 6.0)}) == 2
    assert play.hold(30, lambda now: report(now, 6.0, waiting=3.0, free_kv=0.5))[-1] == 2


def test_an_engine_whose_rate_is_not_known_is_as_fast_as_the_others() -> None:
    new = EngineReport(0.0, 20 * RATE, 0.0, 0.0, 0.0, 1.0)
    play = Play(target=2, rules=replace(RULES, up_delay=0.0))
    assert play.decide({"e0": report(0.0, 5.0), "e1": new}) == 3
    # None has run: nobody knows how long it takes, and who owes something stays.
    play = Play(target=2, rules=replace(RULES, down_delay=0.0))
    assert play.decide({"e0": new, "e1": new}) == 2
    assert play.decide({"e0": new, "e1": replace(new, loop_debt=0.0)}, running=2) == 2
    nothing = replace(new, loop_debt=0.0)
    assert play.decide({"e0": nothing, "e1": nothing}) == 1


def metrics(at: float, **figures: float) -> dict[str, dict[str, list[SimpleNamespace]]]:
    """Serve's raw metrics of one replica, the last of two points a figure."""
    return {
        name: {
            "r1": [
                SimpleNamespace(timestamp=0.0, value=-1.0),
                SimpleNamespace(timestamp=at, value=v),
            ]
        }
        for name, v in figures.items()
    }


FIGURES = {
    "loop_debt": 9.0,
    "loops_per_second": 3.0,
    "loops_now": 2.0,
    "waiting": 1.0,
    "free_kv": 0.5,
}


def test_the_last_complete_report_counts() -> None:
    assert reports_of(metrics(5.0, **FIGURES)) == {"r1": EngineReport(5.0, 9.0, 3.0, 2.0, 1.0, 0.5)}
    assert reports_of(metrics(5.0, loop_debt=9.0)) == {}
    assert reports_of({name: {"r1": []} for name in FIGURES}) == {}


def context(now: float, target: int, state: dict[str, object]) -> AutoscalingContext:
    raw: Any = metrics(now, **(FIGURES | {"loop_debt": 75.0}))
    deployment: Any = "engine"
    replicas: Any = ["r1"]
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name="engine",
        app_name="loopmesh",
        current_num_replicas=1,
        target_num_replicas=target,
        running_replicas=replicas,
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={},
        raw_metrics=raw,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=None,
    )


def test_serve_s_context_becomes_a_decision_and_its_state_comes_back() -> None:
    policy = EnginePolicy(target_debt=10, slack=0.3, up_delay=5, down_delay=60, stale_after=20)
    count, state = policy(context(100.0, 1, {}))
    assert (count, state) == (
        1,
        {"loopmesh": {"more_since": 100.0, "fewer_since": None, "most": 0}},
    )
    assert policy(context(104.0, 1, state))[0] == 1
    assert policy(context(105.0, 1, state))[0] == 3


def test_the_policy_runs_where_the_project_is_not() -> None:
    code = (
        "import sys, ray.cloudpickle as cloudpickle, cluster.autoscaling as module;"
        "cloudpickle.register_pickle_by_value(module);"
        "sys.stdout.buffer.write(cloudpickle.dumps(module.EnginePolicy))"
    )
    pickled = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60
    )
    use = (
        "import pickle, sys; policy = pickle.load(sys.stdin.buffer)("
        "target_debt=1, slack=0.1, up_delay=0, down_delay=0, stale_after=9);"
        "from types import SimpleNamespace as N;"
        "print(policy(N(policy_state={}, current_time=1.0, target_num_replicas=2,"
        "running_replicas=['a'], raw_metrics={}, capacity_adjusted_min_replicas=1,"
        "capacity_adjusted_max_replicas=3))[0], 'cluster' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-I", "-c", use],
        input=pickled.stdout,
        capture_output=True,
        check=True,
        timeout=60,
        cwd="/",
    )
    assert told.stdout.split() == [b"2", b"False"]
