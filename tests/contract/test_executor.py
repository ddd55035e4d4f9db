"""The contract of protocol.executor.Executor, one suite for every home of a worker."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protocol.config import CacheSettings, WorkerSettings
from protocol.errors import (
    DeadlineError,
    ExecutorClosedError,
    ProtocolError,
)
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.identity import RequestKey
from protocol.plan import CodaBatch, ExecutionPlan, Grant, RecurrentBatch
from protocol.result import CodaResult, PrefillResult, PreludeResult, RecurrentResult
from tests.homes import HOMES, open_home
from tests.plans import (
    TIMEOUT,
    PlanSender,
    admission,
    block_table,
    coda,
    prefill,
    prelude,
    recurrent,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protocol.executor import Executor

A, B, C = RequestKey("a", 1), RequestKey("b", 2), RequestKey("c", 3)
PROMPT = (1648, 1424, 261, 658, 14)
SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=4, num_threads=1
)


@pytest.fixture(scope="module", params=HOMES)
def opener(request: pytest.FixtureRequest) -> Iterator[Callable[[], Executor]]:
    """Opens executors of one home; each is shut down, and what carries them taken down."""
    with open_home(request.param) as open_executor:
        yield lambda: open_executor(SETTINGS)


@pytest.fixture(scope="module")
def shared(opener: Callable[[], Executor]) -> PlanSender:
    """One executor for all tests that leave nothing on it."""
    return PlanSender(opener())


@pytest.fixture
def sender(shared: PlanSender) -> Iterator[PlanSender]:
    """The shared executor, cleared afterwards."""
    yield shared
    assert not shared.run(releases=(A, B, C)).failed


def test_a_request_passes_all_stages_with_typed_results(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    last, depth = len(PROMPT) - 1, profile.model.max_loops
    first = sender.run(prefill(A, 0, 3), admits=(admission(A, PROMPT, block_table(profile, 8)),))
    assert first.steps == (PrefillResult((A,), (3,)),)
    then = sender.run(
        prefill(A, 3, 2), coda(A, last, depth, 0), prelude(A, last + 1), recurrent(A, last + 1, 0)
    )
    prefilled, sampled, embedded, looped = then.steps
    assert prefilled == PrefillResult((A,), (5,))
    assert isinstance(sampled, CodaResult)
    assert (sampled.keys, sampled.output_indices) == ((A,), (0,))
    assert 0 <= sampled.tokens[0] < profile.model.vocab_size
    assert embedded == PreludeResult((A,), (last + 1,))
    assert isinstance(looped, RecurrentResult)
    assert (looped.keys, looped.positions, looped.depths) == ((A,), (last + 1,), (0,))
    assert 0.0 <= looped.survivals[0] <= 1.0
    assert not then.failed
    assert (then.epoch, then.seq, len(then.device_us)) == (sender.executor.epoch, sender.seq, 4)


def test_log_probabilities_come_for_those_who_asked(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    asked = replace(admission(A, PROMPT, block_table(profile, 8)), logprobs=3)
    plain = admission(B, PROMPT, block_table(profile, 8, first=8))
    both = CodaBatch((A, B), (4, 4), (4, 4), (0, 0))
    coda_of_both = sender.run(prefill(A, 0, 5), prefill(B, 0, 5), both, admits=(asked, plain))
    sampled = coda_of_both.steps[2]
    assert isinstance(sampled, CodaResult)
    told, nothing = sampled.logprobs
    assert nothing is None
    assert told is not None
    assert len(set(told.top_ids)) == 3
    assert list(told.top_logprobs) == sorted(told.top_logprobs, reverse=True)
    assert told.logprob <= 0.0
    sender.run(releases=(A,))
    none = sender.run(prelude(B, 5), recurrent(B, 5, 0), coda(B, 5, 1, 1)).steps[2]
    assert isinstance(none, CodaResult)
    assert none.logprobs == ()


@pytest.mark.parametrize("banned", [False, True])
def test_a_token_that_the_model_does_not_have_fails_its_request_alone(
    sender: PlanSender, banned: bool
) -> None:
    profile = sender.executor.profile()
    beyond = profile.model.vocab_size
    plain = admission(A, PROMPT, block_table(profile, 8))
    wrong = replace(plain, logit_bias=((beyond, 1.0),))
    if banned:
        wrong = replace(plain, min_tokens=1, banned_ids=(beyond,))
    right = admission(B, PROMPT, block_table(profile, 8, first=8))
    result = sender.run(prefill(A, 0, 5), prefill(B, 0, 5), admits=(wrong, right))
    assert [row.key for row in result.failed] == [A]
    assert f"token {beyond} is not in" in result.failed[0].message
    assert result.steps[1] == PrefillResult((B,), (5,))


def test_survival_falls_with_each_loop_and_starts_again(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    sender.run(
        prefill(A, 0, 5),
        coda(A, 4, profile.model.max_loops, 0),
        admits=(admission(A, PROMPT, block_table(profile, 8)),),
    )
    loops = [recurrent(A, 5, depth) for depth in range(3)]
    _, *results = sender.run(prelude(A, 5), *loops).steps
    survivals = [step.survivals[0] for step in results if isinstance(step, RecurrentResult)]
    assert len(survivals) == 3
    assert survivals == sorted(survivals, reverse=True)
    sender.run(coda(A, 5, 3, 1), prelude(A, 6))
    (again,) = sender.run(recurrent(A, 6, 0)).steps
    assert isinstance(again, RecurrentResult)
    assert again.survivals[0] >= survivals[-1]


def test_rows_of_every_depth_share_a_batch(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    full = profile.model.max_loops
    sender.run(
        prefill(A, 0, 5),
        prefill(B, 0, 2),
        coda(A, 4, full, 0),
        coda(B, 1, full, 0),
        prelude(A, 5),
        prelude(B, 2),
        recurrent(A, 5, 0),
        admits=(
            admission(A, PROMPT, block_table(profile, 8)),
            admission(B, PROMPT[:2], block_table(profile, 4, first=32)),
        ),
    )
    mixed = sender.run(RecurrentBatch((B, A), (2, 5), (0, 1)))
    (result,) = mixed.steps
    assert isinstance(result, RecurrentResult)
    assert (result.keys, result.depths) == ((B, A), (0, 1))


def test_a_plan_without_steps_is_answered(sender: PlanSender) -> None:
    result = sender.run()
    assert (result.seq, result.steps, result.failed) == (sender.seq, (), ())


def test_results_keep_the_order_of_plans_in_flight(sender: PlanSender) -> None:
    submissions = [sender.submit() for _ in range(MAX_PLANS_IN_FLIGHT)]
    with pytest.raises(ProtocolError, match="in flight"):
        sender.submit()
    sender.seq -= 1
    assert [s.collect(TIMEOUT).seq for s in submissions] == [s.seq for s in submissions]
    for submission in submissions:
        submission.retire()
    assert sender.run().seq == sender.seq


def test_a_ticket_can_be_collected_again_until_it_is_retired(sender: PlanSender) -> None:
    submission = sender.submit()
    assert submission.collect(TIMEOUT) == submission.collect(TIMEOUT)
    assert submission.ready()
    submission.retire()
    submission.retire()
    with pytest.raises(ExecutorClosedError, match="retired"):
        submission.collect(TIMEOUT)


def test_a_ticket_retired_unread_frees_its_place(sender: PlanSender) -> None:
    for _ in range(3 * MAX_PLANS_IN_FLIGHT):
        submission = sender.submit()
        submission.retire()
        sender.executor.synchronize(TIMEOUT)
    assert sender.run().seq == sender.seq


def test_a_done_callback_runs_once_also_when_added_late(sender: PlanSender) -> None:
    done = threading.Event()
    submission = sender.submit()
    submission.add_done_callback(done.set)
    assert done.wait(TIMEOUT)
    late: list[int] = []
    submission.add_done_callback(lambda: late.append(submission.seq))
    assert late == [submission.seq]
    submission.retire()


def test_synchronize_returns_after_everything_submitted(sender: PlanSender) -> None:
    submissions = [sender.submit() for _ in range(3)]
    sender.executor.synchronize(TIMEOUT)
    assert [submission.collect(TIMEOUT).seq for submission in submissions] == [
        sender.seq - 2,
        sender.seq - 1,
        sender.seq,
    ]
    for submission in submissions:
        submission.retire()


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_seq_out_of_order_is_refused_and_changes_nothing(sender: PlanSender, offset: int) -> None:
    wrong = ExecutionPlan(sender.executor.epoch, sender.seq + 1 + offset)
    with pytest.raises(ProtocolError):
        sender.executor.submit(wrong)
    assert sender.run().seq == sender.seq


def test_a_plan_of_another_epoch_is_refused(sender: PlanSender) -> None:
    with pytest.raises(ProtocolError, match="epoch"):
        sender.executor.submit(ExecutionPlan(sender.executor.epoch + 1, sender.seq + 1))


@pytest.mark.parametrize(
    "step",
    [
        prefill(A, 1, 2),
        prefill(A, 0, 6),
        prelude(A, 5),
        recurrent(A, 4, 0),
        coda(A, 4, 4, 0),
        recurrent(B, 0, 0),
    ],
    ids=["gap", "beyond prompt", "early prelude", "early loop", "early coda", "never admitted"],
)
def test_a_row_that_does_not_follow_fails_its_request_alone(
    sender: PlanSender, step: RecurrentBatch | CodaBatch
) -> None:
    profile = sender.executor.profile()
    sender.run(admits=(admission(A, PROMPT, block_table(profile, 8)),))
    bad = sender.run(step, admits=(admission(C, PROMPT, block_table(profile, 8, first=32)),))
    assert [row.key for row in bad.failed] == [step.keys[0]]
    assert bad.failed[0].message
    assert bad.steps[0].keys == ()
    good = sender.run(prefill(C, 0, 5))
    assert good.steps == (PrefillResult((C,), (5,)),)


def test_a_failed_request_is_skipped_and_reported_until_released(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    admit = admission(A, PROMPT, block_table(profile, 8))
    sender.run(prelude(A, 9), admits=(admit,))
    again = sender.run(prefill(A, 0, 5))
    assert [row.key for row in again.failed] == [A]
    assert again.steps[0].keys == ()
    fresh = sender.run(prefill(A, 0, 5), releases=(A,), admits=(admit,))
    assert not fresh.failed
    assert fresh.steps == (PrefillResult((A,), (5,)),)


def test_a_position_beyond_the_granted_blocks_fails_until_a_grant(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    full = profile.model.max_loops
    small = tuple(plane[:1] for plane in block_table(profile, 4))
    more = block_table(profile, 4, first=32)
    sender.run(
        prefill(A, 0, 4),
        coda(A, 3, full, 0),
        prefill(B, 0, 4),
        coda(B, 3, full, 0),
        admits=(
            admission(A, PROMPT[:4], small),
            admission(B, PROMPT[:4], block_table(profile, 4, first=16)),
        ),
    )
    assert [row.key for row in sender.run(prelude(A, 4)).failed] == [A]
    granted = sender.run(prelude(B, 4), recurrent(B, 4, 0), grants=(Grant(B, more),))
    assert not granted.failed
    assert granted.steps[1].keys == (B,)


def test_a_request_admitted_with_prefilled_tokens_starts_behind_them(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    table = block_table(profile, 8)
    own = block_table(profile, 4, first=32)
    shared = tuple((mine[0], new[0]) for mine, new in zip(table, own, strict=True))
    sender.run(prefill(A, 0, 5), admits=(admission(A, PROMPT, table),))
    admits = (
        admission(B, PROMPT, shared, prefilled=4),
        admission(C, PROMPT, block_table(profile, 8, first=40), prefilled=4),
    )
    result = sender.run(prefill(B, 4, 1), coda(B, 4, 4, 0), prefill(C, 3, 2), admits=admits)
    first, sampled, again = result.steps
    assert first == PrefillResult((B,), (5,))
    assert isinstance(sampled, CodaResult)
    assert sampled.keys == (B,)
    assert [row.key for row in result.failed] == [C]
    assert again.keys == ()


@pytest.mark.parametrize(
    ("prefilled", "blocks", "message"),
    [(5, 2, "5 of 5 tokens"), (9, 3, "9 of 5 tokens"), (4, 0, "room for 0 tokens")],
    ids=["all of it", "more", "no room"],
)
def test_prefilled_tokens_that_cannot_be_fail_their_request_alone(
    sender: PlanSender, prefilled: int, blocks: int, message: str
) -> None:
    profile = sender.executor.profile()
    table = tuple(plane[:blocks] for plane in block_table(profile, 12))
    good = admission(B, PROMPT, block_table(profile, 8, first=48), prefilled=4)
    bad = sender.run(prefill(B, 4, 1), admits=(admission(A, PROMPT, table, 0.0, prefilled), good))
    assert [row.key for row in bad.failed] == [A]
    assert message in bad.failed[0].message
    assert bad.steps == (PrefillResult((B,), (5,)),)
    assert [row.key for row in sender.run(prefill(A, 0, 5)).failed] == [A]
    fresh = admission(A, PROMPT, block_table(profile, 8))
    assert not sender.run(prefill(A, 0, 5), releases=(A,), admits=(fresh,)).failed


def test_admission_twice_and_beyond_the_slots_fail_only_those(sender: PlanSender) -> None:
    profile = sender.executor.profile()
    table = block_table(profile, 8)
    twice = sender.run(admits=(admission(A, PROMPT, table), admission(A, PROMPT, table)))
    assert [row.key for row in twice.failed] == [A]
    others = [RequestKey(f"other-{number}", 9) for number in range(profile.num_slots)]
    full = sender.run(releases=(A,), admits=tuple(admission(key, PROMPT, table) for key in others))
    assert not full.failed
    late = sender.run(admits=(admission(B, PROMPT, table),))
    assert [row.key for row in late.failed] == [B]
    assert not sender.run(releases=tuple(others)).failed


def test_releasing_what_was_never_admitted_is_no_error(sender: PlanSender) -> None:
    assert not sender.run(releases=(RequestKey("nobody", 77),)).failed


def test_a_deadline_is_an_error_and_the_ticket_stays_good(sender: PlanSender) -> None:
    submission = sender.submit()
    with contextlib.suppress(DeadlineError):  # a result or the error, and no wait
        assert submission.collect(0.0).seq == sender.seq
    assert submission.collect(TIMEOUT).seq == sender.seq
    submission.retire()


def test_a_healthy_worker_is_not_lost(sender: PlanSender) -> None:
    assert sender.executor.lost() is None
    assert repr(sender.executor)


def test_a_plan_larger_than_the_worker_takes_is_refused_and_changes_nothing(
    sender: PlanSender,
) -> None:
    limit = sender.executor.profile().max_step_tokens
    with pytest.raises(ProtocolError, match="split"):
        sender.submit(prefill(A, 0, limit + 1))
    sender.seq -= 1
    assert sender.run().seq == sender.seq


def test_shutdown_ends_what_is_in_flight_and_refuses_more(
    opener: Callable[[], Executor],
) -> None:
    executor = opener()
    sender = PlanSender(executor)
    sender.run()
    submission = sender.submit()
    executor.shutdown(TIMEOUT)
    executor.shutdown(TIMEOUT)
    assert submission.ready()
    submission.retire()
    with pytest.raises(ExecutorClosedError):
        executor.submit(ExecutionPlan(executor.epoch, sender.seq + 1))
    with pytest.raises(ExecutorClosedError):
        executor.synchronize(TIMEOUT)
