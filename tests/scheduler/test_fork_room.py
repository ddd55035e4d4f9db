"""Forks within the size of a plan: as many as fit, and nobody samples before the last of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protocol.codec import encode
from protocol.config import SchedulerSettings
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.identity import RequestKey
from protocol.plan import CodaBatch, ExecutionPlan, Fork
from protocol.plan_size import admission_size, fork_size, rows_size
from protocol.resident import MAX_ENDING_IDS, ResidentBatch
from protocol.rng import MAX_SEED, RngKey
from protocol.sampling import MAX_BIASED_TOKENS, SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from scheduler.choices import create_choices
from scheduler.lane import Lane
from tests.scheduler.bench import make_profile

if TYPE_CHECKING:
    from protocol.profile import WorkerProfile

SLOTS, PREFILL = 24, 16
PROFILE = make_profile(num_slots=SLOTS, num_blocks=2048)
LARGEST = admission_size(
    64, 4, 16, biased=MAX_BIASED_TOKENS, banned=64, ending=MAX_ENDING_IDS, forced=1
)


def least_limit(ticks: int) -> int:
    """The least limit with which a lane can be opened: the largest admission beside all rows."""
    reach = 1 + 4 + ticks * MAX_PLANS_IN_FLIGHT
    return rows_size(SLOTS, 4, SLOTS * (1 + reach // 4) + PREFILL // 4) + LARGEST


@pytest.mark.parametrize("ticks", [0, 8])
def test_choices_are_forked_in_as_many_plans_as_it_takes(ticks: int) -> None:
    profile: WorkerProfile = replace(PROFILE, max_ticks=ticks)
    values = {"max_prefill_tokens": PREFILL, "prefill_chunk_size": 8, "max_ticks": 8}
    limit = least_limit(ticks)
    lane = Lane("lane-0", 1, profile, SchedulerSettings.model_validate(values), limit)
    params = SamplingParams(max_tokens=57, ignore_eos=True, n=SLOTS)
    choices = create_choices(RequestKey("a", 1), (5,) * 8, params, profile.model, "ouro", "")
    lane.admit(choices[0], *(RngKey(7, choice) for choice in range(SLOTS)))
    worker = ScriptedExecutor(profile, 1)
    plans: list[ExecutionPlan] = []
    while not plans or choices[0].unforked:
        plan = lane.next_plan(0.0)
        assert plan is not None
        assert len(encode(plan)) <= limit
        plans.append(plan)
        result = worker.submit(plan).collect(0.0)
        assert result.failed == ()
        assert lane.take_plan(result) is plan
    per_plan = LARGEST // fork_size(4, 16)
    assert [len(plan.forks) for plan in plans] == [0, per_plan, SLOTS - 1 - per_plan]
    sampling = [
        {
            key
            for step in plan.steps
            if isinstance(step, CodaBatch | ResidentBatch)
            for key in step.keys
        }
        for plan in plans
    ]
    assert choices[0].key not in sampling[1]
    assert choices[0].key in sampling[2]


def test_the_largest_fork_takes_no_more_than_is_said_and_little_less() -> None:
    keys = [RequestKey("a", 2**62 + number) for number in range(9)]
    table = ((2**31 - 1,) * 40,) * 4
    forks = tuple(Fork(key, keys[0], table, RngKey(MAX_SEED, 2**32 - 1)) for key in keys[1:])
    plain = ExecutionPlan(1, 1, releases=tuple(keys))
    extra = len(encode(replace(plain, forks=forks))) - len(encode(plain))
    bound = 8 * fork_size(4, 40)
    assert 0.9 * bound < extra <= bound
    assert fork_size(4, 10) == 226
