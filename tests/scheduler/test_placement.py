"""Loop debt, and which lane takes a request."""

from __future__ import annotations

import pytest

from protocol.config import SchedulerSettings
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from protocol.rng import RngKey
from protocol.sampling import SamplingParams
from scheduler.lane import Lane
from scheduler.placement import LoadLedger, loop_debt
from scheduler.request import Request
from scheduler.states import Event
from tests.scheduler.bench import Bench, make_model, make_profile, reasons


def make(**params: object) -> Request:
    checked = SamplingParams.model_validate(params)
    request = Request.create(RequestKey("a", 1), (1, 2), checked, make_model())
    request.place("lane-0")
    request.prefill_to(2)
    return request


def test_debt_follows_the_mean_exit_depth() -> None:
    request = make(max_tokens=10)
    assert loop_debt(request) == 40
    request.append(1)
    request.embed()
    assert loop_debt(request) == 36
    for depth in (2, 3):
        for loop in range(depth):
            request.loop(1.0)
            assert request.loops_done == loop + 1
        request.append(1)
        request.embed()
    assert request.exit_depths == [4, 2, 3]
    assert loop_debt(request) == 3 * 7
    request.loop(1.0)
    assert loop_debt(request) == 3 * 7 - 1
    request.end(Event.ABORT, FinishReason.ABORT)
    assert loop_debt(request) == 0


def test_the_figure_of_a_lane_follows_its_requests() -> None:
    profile = make_profile()
    lane = Lane("lane-0", 1, profile, SchedulerSettings())
    ledger = LoadLedger()
    first, second = (
        Request.create(RequestKey(name, 1), (1, 2), SamplingParams(max_tokens=3), profile.model)
        for name in "ab"
    )
    lane.admit(first, RngKey(7))
    assert (ledger.load(lane), repr(ledger)) == (12, "<LoadLedger {'lane-0': 12}>")
    lane.admit(second, RngKey(7))
    ledger.place(second, "lane-0")
    ledger.place(second, "elsewhere")
    assert ledger.load(lane) == 24
    first.end(Event.ABORT, FinishReason.ABORT)
    ledger.forget("lane-0")
    assert ledger.load(lane) == 12
    ledger.forget("lane-0")
    ledger.forget("lane-0")
    assert repr(ledger) == "<LoadLedger {}>"


def placed(bench: Bench) -> dict[str, list[str]]:
    """Admitted request ids by lane, from the plans of one call."""
    return {lane: [item.key.request_id for item in plan.admits] for lane, plan in bench.plan()}


def test_the_least_loaded_lane_takes_the_head_and_the_first_of_equals() -> None:
    bench = Bench(make_profile(), make_profile())
    bench.add("long", max_tokens=20)
    bench.add("short", max_tokens=2)
    bench.add("other", max_tokens=2)
    bench.add("last", max_tokens=30)
    assert placed(bench) == {"lane-0": ["long"], "lane-1": ["short", "other", "last"]}
    assert [lane.load for lane in bench.engine.stats().lanes] == [80, 136]


def test_a_lane_without_a_slot_or_blocks_is_passed_over() -> None:
    small = make_profile(num_blocks=8)
    single = make_profile(num_slots=1)
    bench = Bench(small, single)
    bench.add("big", prompt=9)
    bench.add("small", max_tokens=1)
    bench.add("next", max_tokens=4)
    assert placed(bench) == {"lane-0": ["small", "next"], "lane-1": ["big"]}


def test_nobody_passes_a_head_that_fits_nowhere_now_where_that_is_forbidden() -> None:
    bench = Bench(make_profile(num_blocks=16), max_admission_bypasses=0)
    bench.add("first", max_tokens=9)
    bench.add("head", max_tokens=16)
    bench.add("tiny", max_tokens=1)
    assert placed(bench) == {"lane-0": ["first"]}
    assert bench.engine.stats().waiting == 2
    bench.engine.abort("first")
    bench.apply("lane-0", bench.run("lane-0", bench.plans[0]))
    bench.finish()
    admitted = [item.key.request_id for plan in bench.plans for item in plan.admits]
    assert admitted == ["first", "head", "tiny"]


@pytest.mark.parametrize(
    ("placement", "lanes"),
    [
        ("loop_debt", {"fourth": "lane-1", "fifth": "lane-2"}),
        ("least_requests", {"fourth": "lane-1", "fifth": "lane-0"}),
        ("round_robin", {"fourth": "lane-0", "fifth": "lane-1"}),
    ],
)
def test_placement_policies(placement: str, lanes: dict[str, str]) -> None:
    bench = Bench(make_profile(), make_profile(), make_profile(), placement=placement)
    for name, tokens in [("long", 20), ("short", 1), ("middle", 9)]:
        bench.add(name, max_tokens=tokens)
    assert placed(bench) == {"lane-0": ["long"], "lane-1": ["short"], "lane-2": ["middle"]}
    for lane, plan in zip(bench.engine.lanes, bench.plans, strict=True):
        bench.apply(lane, bench.run(lane, plan))
    for _ in range(2):
        bench.step()
    assert set(reasons(bench.outputs)) == {"short"}
    bench.add("fourth", max_tokens=30)
    bench.add("fifth", max_tokens=2)
    found = {name: lane for lane, names in placed(bench).items() for name in names}
    assert found == lanes


def test_load_returns_to_zero() -> None:
    bench = Bench(make_profile(), make_profile(), hazard=None, token=None)
    for index in range(12):
        bench.add(f"r{index}", prompt=1 + index, max_tokens=1 + index % 5)
    bench.finish()
    assert [lane.load for lane in bench.engine.stats().lanes] == [0, 0]
