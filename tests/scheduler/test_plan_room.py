"""Plans stay within half the frame limit; what does not fit comes with the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.config import SchedulerSettings
from protocol.errors import ConfigError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.exit_rule import FinishReason
from protocol.identity import MAX_REQUEST_ID_LENGTH, RequestKey
from protocol.plan_size import PLAN_LIMIT, admission_size, opening_size, rows_size
from protocol.profile import ModelProfile, WorkerProfile
from protocol.resident import MAX_ENDING_IDS
from protocol.rng import RngKey
from protocol.sampling import MAX_BIASED_TOKENS, SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from protocol.snapshot import SnapshotRoom
from scheduler.applier import ResultApplier
from scheduler.lane import Lane
from scheduler.plan_room import PlanRoom
from scheduler.planner import StepLimits
from scheduler.request import Request
from scheduler.states import Event
from scheduler.stats import Totals
from tests.scheduler.bench import make_engine, make_profile

if TYPE_CHECKING:
    from protocol.plan import ExecutionPlan

SLOTS, PREFILL = 8, 16
TICKS = 8
PROFILE = make_profile(
    num_slots=SLOTS, num_blocks=1024, snapshots=SnapshotRoom(2**20, 1, 1, 1), max_ticks=TICKS
)
LARGEST = admission_size(
    64, 4, 16, biased=MAX_BIASED_TOKENS, banned=64, ending=MAX_ENDING_IDS, forced=1
)
REACH = 1 + 4 + TICKS * MAX_PLANS_IN_FLIGHT
LEAST = rows_size(SLOTS, 4, SLOTS * (1 + REACH // 4) + PREFILL // 4) + LARGEST


def make_lane(limit: int = LEAST, **wanted: object) -> Lane:
    values = {"prefill_chunk_size": 8, "max_prefill_tokens": PREFILL, "max_ticks": TICKS} | wanted
    return Lane("lane-0", 1, PROFILE, SchedulerSettings.model_validate(values), limit)


def make_request(number: int, prompt: int = 2, **params: object) -> Request:
    """A request whose id takes as many bytes as one can."""
    request_id = "\N{GRINNING FACE}" * (MAX_REQUEST_ID_LENGTH - 3) + f"{number:03}"
    checked = SamplingParams.model_validate({"max_tokens": 4, "ignore_eos": True} | params)
    tokens = tuple(1 + index % 60 for index in range(prompt))
    return Request.create(RequestKey(request_id, number + 1), tokens, checked, PROFILE.model)


class Run:
    """A lane and its scripted worker. Owner: one test."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.worker = ScriptedExecutor(PROFILE, 1)
        self.plans: list[ExecutionPlan] = []

    def step(self) -> ExecutionPlan:
        """The next plan, run and applied."""
        plan = self.lane.next_plan(0.0)
        assert plan is not None
        self.plans.append(plan)
        submission = self.worker.submit(plan)
        result = submission.collect(0.0)
        submission.retire()
        assert result.failed == ()
        assert self.lane.take_plan(result) is plan
        ResultApplier(self.lane.requests, plan, PROFILE.model, Totals()).run(result)
        self.lane.take_suspended(plan)
        for key in plan.releases:
            held = self.lane.requests.get(key)
            self.lane.release(held or self.lane.suspended.requests[key])
        return plan


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, object]:
    """A prompt and parameters of any size."""
    bias = tuple((token, 1.5) for token in range(draw(st.integers(0, 50))))
    stop = tuple(range(1, 1 + draw(st.integers(0, 40))))
    values: dict[str, object] = {
        "logit_bias": bias,
        "stop_token_ids": stop,
        "min_tokens": draw(st.integers(0, 3)),
    }
    if draw(st.booleans()):
        values["forced_depths"] = (4, 1, 2, *draw(st.lists(st.integers(1, 4), min_size=1)))
    return {"prompt": draw(st.integers(1, 60)), "max_tokens": draw(st.integers(3, 4))} | values


@settings(deadline=None, max_examples=60)
@given(
    st.lists(wishes(), min_size=1, max_size=SLOTS),
    st.integers(0, 2 * LARGEST),
    st.sampled_from(["full", "incremental"]),
    st.booleans(),
    st.sets(st.integers(0, SLOTS - 1)),
)
def test_no_plan_exceeds_its_limit_and_everybody_has_a_turn(
    wanted: list[dict[str, object]], more: int, reservation: str, resident: bool, leave: set[int]
) -> None:
    limit = LEAST + more
    run = Run(make_lane(limit, reservation=reservation, resident=resident))
    requests = []
    for number, wish in enumerate(wanted):
        requests.append(make_request(number, **wish))  # type: ignore[arg-type]
        run.lane.admit(requests[-1], RngKey(7))
    suspended = False
    while run.lane.is_busy:
        run.step()
        if not suspended and all(not run.lane.holds_unsent(request) for request in requests):
            suspended = True
            # All in one plan, and later back in one.
            for request in requests:
                if request.key.generation - 1 in leave and run.lane.can_suspend(request):
                    run.lane.suspend(request)
            if run.lane.suspended:
                run.step()
            for request in tuple(run.lane.suspended.requests.values()):
                run.lane.resume(request)
    for plan in run.plans:
        assert len(encode(plan)) <= limit
        openings = sum(map(opening_size, plan.admits)) + sum(map(opening_size, plan.resumes))
        assert openings <= LARGEST + more
        terms = [item.resident for item in plan.admits if item.resident is not None]
        assert all(len(each.forced_depths) in (0, each.max_tokens) for each in terms)
    admitted = [item.key for plan in run.plans for item in plan.admits]
    assert admitted == [request.key for request in requests]
    assert all(request.finish_reason is not None for request in requests)


def test_the_surplus_starts_in_the_next_plan() -> None:
    bias = tuple((token, 1.0) for token in range(64))
    size = admission_size(2, 4, 2, biased=64)
    run = Run(make_lane(LEAST - LARGEST + max(LARGEST, 3 * size - 1), resident=False))
    for number in range(5):
        run.lane.admit(make_request(number, logit_bias=bias), RngKey(7))
    per_plan = max(LARGEST, 3 * size - 1) // size
    plans = [run.step() for _ in range(2)]
    assert [len(plan.admits) for plan in plans] == [per_plan, 5 - per_plan]
    # Those that have started go on meanwhile.
    assert {type(step).__name__ for step in plans[1].steps} == {
        "CodaBatch",
        "PreludeBatch",
        "PrefillBatch",
        "RecurrentBatch",
    }


def test_releases_of_suspended_requests_are_spread_over_plans() -> None:
    limit = rows_size(1, 4, 1 + REACH // 4 + PREFILL // 4) + LARGEST
    run = Run(make_lane(limit, max_running=1, resident=False))
    asleep = []
    for number in range(3):
        asleep.append(make_request(number, max_tokens=9))
        run.lane.admit(asleep[-1], RngKey(7))
        run.step()
        run.lane.suspend(asleep[-1])
        run.step()
    assert run.lane.num_suspended == 3
    for request in asleep:
        request.end(Event.ABORT, FinishReason.ABORT)
    while run.lane.is_busy:
        assert len(encode(run.step())) <= limit
    assert [len(plan.releases) for plan in run.plans[-3:]] == [1, 1, 1]


def test_a_worker_that_is_too_large_for_its_plans_is_refused() -> None:
    wanted = SchedulerSettings(max_prefill_tokens=PREFILL, max_ticks=TICKS)
    limits = StepLimits.of(wanted, PROFILE)
    assert PlanRoom.of(PROFILE, limits, SLOTS, LEAST).bytes == LARGEST
    with pytest.raises(ConfigError, match=r"left beside 8 slots: lower worker\.num_slots"):
        PlanRoom.of(PROFILE, limits, SLOTS, LEAST - 1)
    huge = make_profile(num_slots=20_000, max_step_tokens=20_000)
    with pytest.raises(ConfigError, match="20000 slots"):
        make_engine(huge)


def test_long_prompts_that_are_placed_at_once_come_in_several_frames() -> None:
    length, count = 2**18, 36
    model = ModelProfile("toy", "toy", 64, 2**18, 4, (0,), 0.9)
    profile = WorkerProfile(model, "cpu", "float32", count, 4 * count, 2**18, 4, 512)
    engine = make_engine(profile, chunk=1, prefill=512, caching=False, admission_scan_limit=count)
    prompt = [1] * length
    for number in range(count):
        engine.add(f"r{number}", prompt, SamplingParams(max_tokens=1), 7)
    ((_, plan),) = engine.plan(0.0)
    assert 0 < len(plan.admits) < count
    assert PLAN_LIMIT - 2**21 < len(encode(plan)) <= PLAN_LIMIT
