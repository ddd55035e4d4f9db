"""What an engine's load is, how fast it is taken to be, and which engine takes a request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cluster.engine_load import EngineLoad, LoopRate, least_loaded


@dataclass(frozen=True)
class Offer:
    """One engine that could take a request."""

    name: str
    load: EngineLoad | None
    unreported: int = 0


def load(debt: int = 0, rate: float | None = 100.0, waiting: int = 0, free: int = 50) -> EngineLoad:
    return EngineLoad(debt, rate, 0.0, 1, waiting, free, 100, workers=1)


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (Offer("a", load(200)), Offer("b", load(100)), "b"),
        (Offer("a", load(100)), Offer("b", load(100)), "a"),
        # 200 loops at 400 a second end sooner than 100 at 100.
        (Offer("a", load(100)), Offer("b", load(200, rate=400.0)), "b"),
        # What it was sent since its report counts as well.
        (Offer("a", load(50), unreported=100), Offer("b", load(100)), "b"),
        # Where somebody waits, a request waits too, however little is owed.
        (Offer("a", load(10, waiting=1)), Offer("b", load(500)), "b"),
        (Offer("a", load(100, free=10)), Offer("b", load(100, free=11)), "b"),
        # One that has not run yet is as fast as the others.
        (Offer("a", load(150, rate=None)), Offer("b", load(200)), "a"),
        (Offer("a", load(150, rate=None)), Offer("b", load(100)), "b"),
        (Offer("a", load(2, rate=None)), Offer("b", load(1, rate=None)), "b"),
        # One that says nothing comes last.
        (Offer("a", None), Offer("b", load(10_000, waiting=9)), "b"),
        (Offer("a", None, unreported=5), Offer("b", None, unreported=4), "b"),
    ],
)
def test_the_least_loaded_engine_takes_a_request(first: Offer, second: Offer, chosen: str) -> None:
    taken = least_loaded([first, second])
    assert taken is not None
    assert taken.name == chosen


def test_without_an_engine_nobody_takes_it() -> None:
    assert least_loaded([]) is None


def test_the_rate_is_that_of_an_engine_with_enough_to_do() -> None:
    rate = LoopRate()
    rate.sample(0.0, 0, full=True)
    assert rate.per_second is None
    seen: list[float | None] = []
    for now, loops, full in (
        (1.0, 100, False),
        (2.0, 300, False),
        (3.0, 400, False),  # it was asked for less
        (4.0, 500, True),
        (4.0, 600, True),  # no time has passed
        (5.0, 600, True),  # prompts alone
    ):
        rate.sample(now, loops, full=full)
        seen.append(rate.per_second)
    last = pytest.approx(170.0)
    assert seen == [100.0, 200.0, 200.0, last, last, last]


def test_what_it_runs_now_follows_in_a_few_seconds() -> None:
    rate = LoopRate()
    for second in range(20):
        rate.sample(float(second), 100 * second, full=True)
    assert rate.now == pytest.approx(100.0, rel=0.01)
    for second in range(20, 40):
        rate.sample(float(second), 1900, full=False)
    assert rate.now == pytest.approx(0.0, abs=0.2)
    assert rate.per_second == 100.0


def test_the_free_share_of_kv() -> None:
    assert load(free=25).free_kv == 0.25
    assert EngineLoad(0, None, 0.0, 0, 0, 0, 0, workers=0).free_kv == 1.0
