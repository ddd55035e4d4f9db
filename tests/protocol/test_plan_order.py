"""PlanOrder: one epoch, no gap, a bound in flight, and no plan larger than the worker."""

from __future__ import annotations

import pytest

from protocol.errors import ProtocolError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.identity import RequestKey
from protocol.plan import CodaBatch, ExecutionPlan, PrefillBatch, RecurrentBatch
from protocol.plan_order import PlanOrder
from tests.scheduler.bench import make_profile

PROFILE = make_profile(num_slots=4, max_step_tokens=8)
KEYS = tuple(RequestKey(f"r{number}", number + 1) for number in range(5))


def plan(seq: int, *steps: PrefillBatch | RecurrentBatch | CodaBatch) -> ExecutionPlan:
    return ExecutionPlan(1, seq, steps=steps)


def test_plans_are_counted_until_they_are_retired() -> None:
    order = PlanOrder(1)
    for seq in range(1, MAX_PLANS_IN_FLIGHT + 1):
        order.take(plan(seq), PROFILE)
    with pytest.raises(ProtocolError, match="4 plans in flight"):
        order.take(plan(5), PROFILE)
    order.retire()
    order.take(plan(5), PROFILE)
    assert (order.last_seq, order.in_flight) == (5, MAX_PLANS_IN_FLIGHT)


def test_a_new_epoch_counts_from_one_and_is_newer() -> None:
    order = PlanOrder(1)
    order.take(plan(1), PROFILE)
    with pytest.raises(ProtocolError, match="epoch 1 is not newer than 1"):
        order.begin(1)
    order.begin(7)
    with pytest.raises(ProtocolError, match="plan of epoch 1, this executor is 7"):
        order.take(plan(1), PROFILE)
    order.take(ExecutionPlan(7, 1), PROFILE)
    assert order.in_flight == 2


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((RecurrentBatch(KEYS, (0,) * 5, (0,) * 5),), "5 rows and 5 tokens, at most 4 and 8"),
        ((PrefillBatch(KEYS[:1], (0,), (9,)),), "1 rows and 9 tokens"),
        ((RecurrentBatch(KEYS[:4], (0,) * 4, (0,) * 4),) * 3, "more than 8 rows of Recurrent"),
        ((CodaBatch(KEYS[:4], (0,) * 4, (1,) * 4, (0,) * 4),) * 3, "more than 8 rows of Coda"),
    ],
)
def test_a_plan_larger_than_the_worker_is_refused_and_not_counted(
    steps: tuple[RecurrentBatch, ...], message: str
) -> None:
    order = PlanOrder(1)
    with pytest.raises(ProtocolError, match=message):
        order.take(plan(1, *steps), PROFILE)
    assert (order.last_seq, order.in_flight) == (0, 0)
