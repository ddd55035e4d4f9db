"""Loop debt, and which lane takes a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from protocol.profile import WorkerProfile


def make(**params: object) -> Request:
    checked = SamplingParams.model_validate(params)
    request = Request.create(RequestKey("a", 1), (1, 2), checked, make_model())
    request.place("lane-0")
    request.prefill_to(2)
    return request


def test_debt_follows_the_mean_exit_depth() -> None:
    request = make(max_tokens=10)
    assert loop_debt(request) == 40
    request.sample()
    request.append(1, 4)
    request.embed()
    assert loop_debt(request) == 36
    for depth in (2, 3):
        for loop in range(depth):
            request.loop()
            assert request.loops_done == loop + 1
        request.sample()
        request.append(1, depth)
        request.embed()
    assert request.exit_depths == [4, 2, 3]
    assert loop_debt(request) == 3 * 7
    request.loop()
    assert loop_debt(request) == 3 * 7 - 1
    request.end(Event.ABORT, FinishReason.ABORT)
    assert loop_debt(request) == 0


def test_debt_is_exact_where_depths_are_forced() -> None:
    # Of six depths the last two belong to outputs that are not allowed.
    request = make(max_tokens=4, forced_depths=(4, 2, 3, 1, 4, 4), max_loops=3)
    waiting = Request.create(request.key, (1, 2), request.params, make_model())
    assert loop_debt(waiting) == 4 + 2 + 3 + 1
    # The prompt has passed every loop of the first.
    assert loop_debt(request) == 2 + 3 + 1
    for left, before, depth in ((6, 4, 2), (4, 2, 3), (1, 3, 1)):
        request.sample()
        request.embed()
        assert loop_debt(request) == left
        # It makes no difference when the output before comes back.
        request.append(1, before)
        for loop in range(depth):
            request.loop()
            assert loop_debt(request) == left - loop - 1
    request.sample()
    assert loop_debt(request) == 0
    request.append(1, 1)
    request.end(Event.FINISH, FinishReason.LENGTH)
    assert loop_debt(request) == 0


def test_the_queue_owes_what_its_requests_are_expected_to_cost() -> None:
    bench = Bench(make_profile(num_slots=1))
    assert bench.engine.queued_debt() == 0
    bench.add("placed", max_tokens=3)
    bench.send_plans()
    assert bench.engine.queued_debt() == 0
    bench.add("waiting", max_tokens=5)
    bench.add("shallow", max_tokens=2, max_loops=1)
    assert bench.engine.queued_debt() == 4 * 5 + 2


def test_a_lane_with_little_forced_work_is_preferred() -> None:
    bench = Bench(make_profile(), make_profile())
    bench.add("long", max_tokens=8, forced_depths=(4,) + (1,) * 7)
    bench.add("short", max_tokens=4)
    bench.add("next", max_tokens=1)
    assert placed(bench) == {"lane-0": ["long", "next"], "lane-1": ["short"]}
    assert [lane.load for lane in bench.engine.stats().lanes] == [11 + 4, 16]


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


PROMPT = tuple(range(1, 18))


def lane_of(bench: Bench, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> str:
    """Which lane takes a request now, and its plan is answered."""
    bench.send(request_id, prompt, max_tokens=max_tokens)
    (found,) = [
        lane
        for lane, plan in bench.plan()
        for _ in [bench.apply(lane, bench.run(lane, plan))]
        if any(item.key.request_id == request_id for item in plan.admits)
    ]
    return found


def warm(*profiles: WorkerProfile, window: int, placement: str = "loop_debt") -> Bench:
    """Two lanes, the second of which has PROMPT cached; both owe nothing."""
    profiles = profiles or (make_profile(), make_profile())
    bench = Bench(*profiles, window=window, placement=placement)
    assert lane_of(bench, "busy", (60,), max_tokens=60) == "lane-0"
    assert lane_of(bench, "warm", PROMPT, max_tokens=1) == "lane-1"
    bench.engine.abort("busy")
    bench.finish()
    assert [lane.load for lane in bench.engine.stats().lanes] == [0, 0]
    return bench


def test_a_cached_prefix_draws_a_request_within_the_window() -> None:
    bench = warm(window=40)
    for request_id, max_tokens in (("hit", 10), ("edge", 1), ("far", 1)):
        bench.send(request_id, PROMPT, max_tokens=max_tokens)
    # The second lane owes 40 when "edge" comes, exactly the window, and 44 when "far" does.
    assert placed(bench) == {"lane-0": ["far"], "lane-1": ["hit", "edge"]}
    assert [lane.load for lane in bench.engine.stats().lanes] == [4, 44]


def test_without_a_window_the_least_loaded_takes_it_and_affinity_breaks_the_tie() -> None:
    bench = warm(window=0)
    assert lane_of(bench, "tie", PROMPT, max_tokens=2) == "lane-1"
    assert lane_of(bench, "next", PROMPT, max_tokens=2) == "lane-0"


def test_a_miss_goes_to_the_least_loaded_and_never_to_the_busiest() -> None:
    bench = warm(window=10_000)
    assert lane_of(bench, "hit", PROMPT, max_tokens=10) == "lane-1"
    assert lane_of(bench, "miss", PROMPT[::-1], max_tokens=2) == "lane-0"
    assert lane_of(bench, "again", (61,), max_tokens=2) == "lane-0"


@pytest.mark.parametrize("placement", ["least_requests", "round_robin"])
def test_every_policy_chooses_among_the_warmest(placement: str) -> None:
    bench = warm(window=40, placement=placement)
    assert [lane_of(bench, f"hit{index}", PROMPT, 1) for index in range(3)] == ["lane-1"] * 3
    assert lane_of(bench, "miss", PROMPT[::-1], max_tokens=1) == "lane-0"


def test_the_longest_prefix_wins_and_its_tokens_count_not_its_blocks() -> None:
    bench = Bench(make_profile(block_size=2, num_slots=1), make_profile(block_size=4))
    assert lane_of(bench, "short", PROMPT[:11], max_tokens=1) == "lane-0"  # 5 blocks of 2
    bench.finish()
    assert lane_of(bench, "busy", (60,), max_tokens=9) == "lane-0"
    assert lane_of(bench, "warm", PROMPT, max_tokens=1) == "lane-1"  # 4 blocks of 4
    bench.finish()
    assert lane_of(bench, "hit", PROMPT, max_tokens=1) == "lane-1"


def test_a_lane_without_room_draws_nobody_and_sets_no_window() -> None:
    bench = warm(make_profile(), make_profile(num_slots=1), window=0)
    assert lane_of(bench, "hit", PROMPT, max_tokens=1) == "lane-1"
    assert lane_of(bench, "long", PROMPT, max_tokens=9) == "lane-0"
    assert lane_of(bench, "next", PROMPT[:4], max_tokens=9) == "lane-0"


def test_load_returns_to_zero_with_hits() -> None:
    bench = Bench(make_profile(), make_profile(), hazard=None, token=None, window=20)
    for index in range(16):
        bench.send(f"r{index}", PROMPT[: 5 + index % 12], max_tokens=1 + index % 5)
        bench.step()
    bench.finish()
    assert bench.engine.stats().prefix_hit_tokens > 0
    assert [lane.load for lane in bench.engine.stats().lanes] == [0, 0]
