"""What is particular to the scripted executor: its script, its row checks, its manual mode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protocol.errors import DeadlineError, ExecutorClosedError, ProtocolError, WorkerLostError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.identity import RequestKey
from protocol.plan import (
    SLOT_TOKEN,
    Admission,
    CodaBatch,
    ExecutionPlan,
    Grant,
    PrefillBatch,
    PreludeBatch,
    RecurrentBatch,
    Step,
)
from protocol.profile import ModelProfile, WorkerProfile
from protocol.result import CodaResult, PlanResult, RecurrentResult
from protocol.rng import RngKey
from protocol.scripted_executor import ScriptedExecutor, scripted_hazard, scripted_token

if TYPE_CHECKING:
    from protocol.scripted_resident import Hazard, Token

MODEL = ModelProfile("toy", "toy", 64, 64, 4, (0,), 0.9)
PROFILE = WorkerProfile(MODEL, "cpu", "float32", 2, 32, 4, 4, 6)
A, B, C = RequestKey("a", 1), RequestKey("b", 2), RequestKey("c", 3)


def admission(key: RequestKey, prompt: int = 2, width: int = 1, planes: int = 4) -> Admission:
    tables = tuple(tuple(range(p * width, (p + 1) * width)) for p in range(planes))
    return Admission(key, (1,) * prompt, tables, RngKey(7), 0.0, 1.0, -1)


def run(
    executor: ScriptedExecutor,
    *steps: Step,
    releases: tuple[RequestKey, ...] = (),
    admits: tuple[Admission, ...] = (),
    grants: tuple[Grant, ...] = (),
) -> PlanResult:
    """Submit the next plan, collect and retire it."""
    plan = ExecutionPlan(1, executor.last_seq + 1, releases, admits, grants, steps)
    submission = executor.submit(plan)
    result = submission.collect(1.0)
    submission.retire()
    return result


def prefilled(hazard: Hazard | None = None, token: Token | None = None) -> ScriptedExecutor:
    """A worker on which request a, with 2 prompt tokens and room for 4, is through its prompt."""
    executor = ScriptedExecutor(PROFILE, hazard=hazard, token=token)
    assert run(executor, PrefillBatch((A,), (0,), (2,)), admits=(admission(A),)).failed == ()
    return executor


FIRST = (CodaBatch((A,), (1,), (4,), (0,)), PreludeBatch((A,), (2,), (SLOT_TOKEN,)))


def loops(position: int, *depths: int) -> list[Step]:
    return [RecurrentBatch((A,), (position,), (depth,)) for depth in depths]


def test_survival_is_a_float32_product() -> None:
    executor = prefilled(hazard=lambda key, position, depth: 0.3, token=lambda key, index: 9)
    coda, _, *rest = run(executor, *FIRST, *loops(2, 0, 1)).steps
    assert coda == CodaResult((A,), (0,), (9,))
    survivals = [step.survivals[0] for step in rest if isinstance(step, RecurrentResult)]
    assert survivals == [0.699999988079071, 0.4899999797344208]


def test_default_scripts_depend_on_the_public_id_alone() -> None:
    again = RequestKey("a", 5)
    token = scripted_token(MODEL)
    assert scripted_hazard(A, 3, 1) == scripted_hazard(again, 3, 1) != scripted_hazard(B, 3, 1)
    assert [token(A, i) for i in range(50)] == [token(again, i) for i in range(50)]
    assert {token(A, i) for i in range(2000)} == set(range(1, 64))
    all_eos = replace(MODEL, vocab_size=2, eos_ids=(0, 1))
    assert scripted_token(all_eos)(A, 0) in (0, 1)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([PrefillBatch((A,), (0,), (1,))], "prefill from 0, 2 are done"),
        ([PrefillBatch((A,), (2,), (1,))], "prefill to 3 of 2 tokens"),
        ([PreludeBatch((A,), (2,), (SLOT_TOKEN,))], "prelude without a sampled token"),
        ([FIRST[0], PreludeBatch((A,), (3,), (SLOT_TOKEN,))], "prelude at 3 after 1"),
        ([FIRST[0], FIRST[0]], "a second coda of the same token"),
        ([FIRST[0], *loops(1, 3)], "a loop before the prelude"),
        ([CodaBatch((A,), (2,), (4,), (0,))], "coda at 2, in work is 1"),
        ([CodaBatch((A,), (1,), (2,), (0,))], "exit depth 2 after 4 loops"),
        ([CodaBatch((A,), (1,), (4,), (1,))], "output 1 after 0"),
        ([*FIRST, *loops(3, 0)], "loop at 3, in work is 2"),
        ([*FIRST, *loops(2, 1)], "loop at depth 1 after 0 loops"),
        ([*FIRST, *loops(2, 0, 1, 2, 3, 4)], "depth 4 of 4 loops"),
    ],
)
def test_a_row_out_of_turn_fails_its_request_until_released(
    steps: list[Step], message: str
) -> None:
    executor = prefilled()
    (failed,) = run(executor, *steps).failed
    assert (failed.key, message in failed.message) == (A, True)
    (still,) = run(executor, RecurrentBatch((A,), (1,), (0,))).failed
    assert still == failed
    again = run(executor, PrefillBatch((A,), (0,), (2,)), releases=(A,), admits=(admission(A),))
    assert again.failed == ()


def test_a_position_needs_a_granted_block() -> None:
    executor = ScriptedExecutor(PROFILE)
    admits = (admission(A, prompt=6, width=1),)
    (failed,) = run(executor, PrefillBatch((A,), (0,), (5,)), admits=admits).failed
    assert "prefill to 5, room for 4" in failed.message
    more = Grant(A, ((9,), (10,), (11,), (12,)))
    result = run(
        executor, PrefillBatch((A,), (0,), (6,)), releases=(A,), admits=admits, grants=(more,)
    )
    assert result.failed == ()
    full = ScriptedExecutor(PROFILE)
    run(full, PrefillBatch((A,), (0,), (4,)), admits=(admission(A, prompt=4),))
    prelude = PreludeBatch((A,), (4,), (SLOT_TOKEN,))
    (failed,) = run(full, CodaBatch((A,), (3,), (4,), (0,)), prelude).failed
    assert "position 4, room for 4" in failed.message


def test_admissions_are_checked() -> None:
    executor = prefilled()
    (twice,) = run(executor, admits=(admission(A),)).failed
    assert "admitted twice" in twice.message
    result = run(executor, admits=(admission(B), admission(C)))
    assert [(row.key, "slots are taken" in row.message) for row in result.failed] == [(C, True)]
    assert executor.held_keys() == (A, B)
    other = ScriptedExecutor(PROFILE)
    (failed,) = run(other, admits=(admission(A, planes=3),)).failed
    assert "table of 3 planes, not 4" in failed.message
    (failed,) = run(other, admits=(admission(B, width=9),)).failed
    assert "beyond the 32" in failed.message
    (failed,) = run(other, RecurrentBatch((C,), (0,), (0,))).failed
    assert "never admitted" in failed.message


@pytest.mark.parametrize(
    "step",
    [PrefillBatch((A, B), (0, 0), (4, 3)), RecurrentBatch((A, B, C), (0, 0, 0), (0, 0, 0))],
)
def test_a_step_that_is_too_large_is_refused_and_changes_nothing(step: Step) -> None:
    executor = ScriptedExecutor(PROFILE)
    with pytest.raises(ProtocolError, match="at most 2 and 6"):
        executor.submit(ExecutionPlan(1, 1, admits=(admission(A),), steps=(step,)))
    assert executor.held_keys() == ()
    assert run(executor, admits=(admission(A),)).seq == 1


def test_manual_results_wait_for_the_word() -> None:
    executor = ScriptedExecutor(PROFILE, manual=True)
    first, second = (executor.submit(ExecutionPlan(1, seq)) for seq in (1, 2))
    called: list[int] = []
    first.add_done_callback(lambda: called.append(1))
    assert not first.ready()
    with pytest.raises(DeadlineError):
        first.collect(0.0)
    with pytest.raises(DeadlineError):
        executor.synchronize(0.0)
    executor.complete(1)
    executor.complete(1)
    assert (first.ready(), second.ready(), called) == (True, False, [1])
    assert repr(executor) == "<ScriptedExecutor epoch 1: plan 2, 2 in flight, 1 held back>"
    executor.complete(2)
    executor.synchronize(0.0)
    assert second.collect(0.0).seq == 2


def test_a_lost_worker_ends_what_has_no_result() -> None:
    executor = ScriptedExecutor(PROFILE, manual=True)
    done, pending = (executor.submit(ExecutionPlan(1, seq)) for seq in (1, 2))
    executor.complete(1)
    executor.lose("the process died")
    executor.lose("again")
    assert executor.lost() == "the process died"
    assert done.collect(0.0).seq == 1
    with pytest.raises(WorkerLostError, match="the process died"):
        pending.collect(0.0)
    with pytest.raises(WorkerLostError):
        executor.submit(ExecutionPlan(1, 3))
    with pytest.raises(WorkerLostError):
        executor.synchronize(0.0)


def test_shutdown_ends_everything() -> None:
    executor = ScriptedExecutor(PROFILE, manual=True)
    done, pending = (executor.submit(ExecutionPlan(1, seq)) for seq in (1, 2))
    executor.complete(1)
    executor.shutdown(1.0)
    executor.shutdown(1.0)
    assert done.collect(1.0).seq == 1
    with pytest.raises(ExecutorClosedError):
        pending.collect(0.0)
    with pytest.raises(ExecutorClosedError):
        executor.submit(ExecutionPlan(1, 3))
    assert executor.lost() is None


@pytest.mark.parametrize(
    ("epoch", "seq", "message"),
    [(2, 1, "plan of epoch 2"), (1, 2, "plan 2 follows plan 0"), (1, 1, "4 plans in flight")],
)
def test_plans_come_in_order(epoch: int, seq: int, message: str) -> None:
    executor = ScriptedExecutor(PROFILE, manual=True)
    if "in flight" in message:
        for earlier in range(1, 5):
            executor.submit(ExecutionPlan(1, earlier))
        seq = 5
    with pytest.raises(ProtocolError, match=message):
        executor.submit(ExecutionPlan(epoch, seq))


def test_it_tells_whose_snapshots_it_keeps() -> None:
    executor = prefilled()
    executor.submit(ExecutionPlan(1, 2, suspends=(A,))).retire()
    assert (executor.held_keys(), executor.suspended_keys()) == ((), (A,))
    executor.shutdown(1.0)
    assert executor.suspended_keys() == ()


def test_a_dropped_ticket_keeps_its_place_until_its_plan_has_run() -> None:
    executor = ScriptedExecutor(PROFILE, manual=True)
    for seq in range(1, MAX_PLANS_IN_FLIGHT + 1):
        executor.submit(ExecutionPlan(1, seq))
    following = ExecutionPlan(1, MAX_PLANS_IN_FLIGHT + 1)
    with pytest.raises(ProtocolError, match="retire submissions first"):
        executor.submit(following)
    executor.complete(1)
    executor.submit(following).retire()
    assert f"{MAX_PLANS_IN_FLIGHT} in flight" in repr(executor)
