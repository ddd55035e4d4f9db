"""Results as they should not be: stale, foreign, incomplete, failed. Nothing is raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import LoopmeshError, WorkerLostError
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from protocol.plan import ExecutionPlan, RecurrentBatch
from protocol.result import (
    CodaResult,
    FailedRow,
    PlanResult,
    PrefillResult,
    PreludeResult,
    RecurrentResult,
    ResidentResult,
    StepResult,
    TokenLogprobs,
)
from scheduler.output import RequestOutput
from tests.scheduler.bench import EOS, Bench, fixed, make_model, make_profile, reasons, texts

STRANGER = RequestKey("stranger", 99)


def answer(
    plan: ExecutionPlan, *steps: StepResult, failed: tuple[FailedRow, ...] = ()
) -> PlanResult:
    return PlanResult(plan.epoch, plan.seq, steps, failed, (0,) * len(steps))


def decoding(bench: Bench) -> tuple[RequestKey, ExecutionPlan]:
    """A request whose first CODA, PRELUDE and loop are in flight; its mate decodes too."""
    key = bench.add("a", max_tokens=4)
    bench.add("mate", max_tokens=4)
    bench.step()
    ((_, plan),) = bench.plan()
    return key, plan


@pytest.mark.parametrize(("epoch", "seq"), [(1, 1), (1, 3), (2, 2), (2, 1)])
def test_a_result_of_no_plan_in_flight_is_dropped(epoch: int, seq: int) -> None:
    bench = Bench()
    _, plan = decoding(bench)
    result = bench.run("lane-0", plan)
    assert bench.apply("lane-0", replace(result, epoch=epoch, seq=seq)) == []
    assert bench.engine.stats().stale_results == 1
    assert len(bench.apply("lane-0", result)) == 2
    assert bench.apply("lane-0", result) == []
    assert bench.engine.stats().stale_results == 2


def test_a_result_of_an_unknown_lane_is_dropped() -> None:
    bench = Bench()
    assert bench.apply("lane-9", PlanResult(1, 1)) == []
    assert bench.engine.stats().stale_results == 1


def test_foreign_and_double_rows_are_dropped_and_the_rest_counts() -> None:
    bench = Bench()
    _, plan = decoding(bench)
    result = bench.run("lane-0", plan)
    coda, prelude, loops = result.steps
    assert isinstance(coda, CodaResult)
    assert isinstance(loops, RecurrentResult)
    doubled = CodaResult(
        (*coda.keys, STRANGER, coda.keys[0]),
        (*coda.output_indices, 0, 0),
        (*coda.tokens, 5, 6),
    )
    extra = PrefillResult((STRANGER, coda.keys[0]), (1, 1))
    outputs = bench.apply(
        "lane-0",
        answer(plan, doubled, prelude, loops, extra, failed=(FailedRow(STRANGER, "never"),)),
    )
    assert texts(outputs) == {"a": ([1], [4]), "mate": ([1], [4])}
    assert bench.engine.stats().stale_rows == 5
    bench.finish()
    assert reasons(bench.outputs) == {"a": FinishReason.LENGTH, "mate": FinishReason.LENGTH}


def shifted(step: StepResult, row: int) -> StepResult:
    """The step with one row that claims to be somewhere else."""

    def bump(column: tuple[int, ...]) -> tuple[int, ...]:
        return (*column[:row], column[row] + 1, *column[row + 1 :])

    match step:
        case CodaResult(_, indices, _):
            return replace(step, output_indices=bump(indices))
        case PreludeResult(_, positions):
            return replace(step, positions=bump(positions))
        case RecurrentResult(_, _, depths, _):
            return replace(step, depths=bump(depths))
        case PrefillResult(_, ends):
            return replace(step, ends=bump(ends))
        case ResidentResult():
            raise AssertionError("a resident row is nowhere else")


@pytest.mark.parametrize(("index", "stage"), [(0, "Coda"), (1, "Prelude"), (2, "Recurrent")])
def test_a_row_that_is_somewhere_else_ends_its_request_alone(index: int, stage: str) -> None:
    bench = Bench()
    _, plan = decoding(bench)
    steps = list(bench.run("lane-0", plan).steps)
    steps[index] = shifted(steps[index], 0)
    bench.apply("lane-0", answer(plan, *steps))
    (end,) = [output for output in bench.outputs if output.finish_reason]
    assert (end.key.request_id, end.finish_reason) == ("a", FinishReason.ERROR)
    assert end.error == f"the answer to plan 2 lacks its {stage} row"
    assert end.tokens == (() if stage == "Coda" else (1,))
    assert bench.engine.stats().stale_rows == 1
    bench.finish()
    assert texts(bench.outputs)["mate"] == ([1, 2, 3, 4], [4] * 4)


def test_a_wrong_prefill_end_ends_the_request() -> None:
    bench = Bench()
    bench.add("a", prompt=3)
    ((_, plan),) = bench.plan()
    (step,) = bench.run("lane-0", plan).steps
    (end,) = bench.apply("lane-0", answer(plan, shifted(step, 0)))
    assert end.error == "the answer to plan 1 lacks its Prefill row"
    bench.finish()
    assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks


def test_a_missing_row_never_hangs() -> None:
    bench = Bench()
    _, plan = decoding(bench)
    bench.run("lane-0", plan)
    ends = bench.apply("lane-0", answer(plan))
    assert reasons(ends) == {"a": FinishReason.ERROR, "mate": FinishReason.ERROR}
    bench.finish()
    assert bench.engine.stats().stale_rows == 0


def test_an_answer_of_another_stage_is_stale() -> None:
    bench = Bench()
    key, plan = decoding(bench)
    ends = bench.apply("lane-0", answer(plan, PreludeResult((key,), (1,))))
    assert reasons(ends)["a"] is FinishReason.ERROR
    assert bench.engine.stats().stale_rows == 1


def test_a_token_outside_the_vocabulary_ends_the_request() -> None:
    bench = Bench(token=fixed([64]))
    bench.add("a")
    bench.step()
    (end,) = bench.step()
    assert (end.tokens, end.error) == ((), "the answer to plan 2 lacks its Coda row")
    # The token itself is stale; its prelude and loop ran for a request that had just ended.
    stats = bench.engine.stats()
    assert (stats.stale_rows, stats.discarded_rows) == (1, 2)


def test_a_failed_row_ends_its_request_with_the_workers_words() -> None:
    bench = Bench()
    key, plan = decoding(bench)
    coda, prelude, loops = bench.run("lane-0", plan).steps
    assert isinstance(loops, RecurrentResult)
    rest = RecurrentResult(
        loops.keys[1:], loops.positions[1:], loops.depths[1:], loops.survivals[1:]
    )
    failed = (FailedRow(key, "not a number"), FailedRow(key, "not a number"))
    bench.apply("lane-0", answer(plan, coda, prelude, rest, failed=failed))
    (end,) = [output for output in bench.outputs if output.finish_reason]
    # The token came before the failure, so it is delivered with it.
    assert (end.tokens, end.finish_reason, end.error) == ((1,), FinishReason.ERROR, "not a number")
    bench.finish()
    assert bench.traces()[2].startswith("-a | ")
    assert reasons(bench.outputs)["mate"] is FinishReason.LENGTH
    assert bench.engine.stats().stale_rows == 0


def test_a_failure_beside_a_complete_answer_ends_its_request() -> None:
    bench = Bench()
    key = bench.add("a")
    ((_, plan),) = bench.plan()
    result = replace(bench.run("lane-0", plan), failed=(FailedRow(key, "no slot"),))
    (end,) = bench.apply("lane-0", result)
    assert (end.key, end.error) == (key, "no slot")


def test_a_request_that_was_never_sent_cannot_fail() -> None:
    bench = Bench(prefill=1)
    bench.add("a", max_tokens=2)
    key = bench.add("late", max_tokens=2)
    ((_, plan),) = bench.plan()
    assert [item.key.request_id for item in plan.admits] == ["a"]
    result = replace(bench.run("lane-0", plan), failed=(FailedRow(key, "who?"),))
    assert bench.apply("lane-0", result) == []
    assert bench.engine.stats().stale_rows == 1
    assert reasons(bench.finish()) == dict.fromkeys(["a", "late"], FinishReason.LENGTH)


def test_a_failure_beyond_the_end_is_not_news() -> None:
    bench = Bench(token=fixed([EOS]))
    key = bench.add("a", max_tokens=4)
    bench.step()
    ((_, plan),) = bench.plan()
    coda, prelude, _ = bench.run("lane-0", plan).steps
    failed = (FailedRow(key, "beyond the stop"),)
    bench.apply(
        "lane-0", answer(plan, coda, prelude, RecurrentResult((), (), (), ()), failed=failed)
    )
    assert reasons(bench.outputs) == {"a": FinishReason.STOP}


@pytest.mark.parametrize(
    ("tokens", "params", "reason", "kept"),
    [
        ([5, EOS, 6], {}, FinishReason.STOP, [5, EOS]),
        ([5, EOS, 6], {"ignore_eos": True}, FinishReason.LENGTH, [5, EOS, 6]),
        ([5, 6, 7], {"stop_token_ids": (7,)}, FinishReason.STOP, [5, 6, 7]),
        ([5, 6, 7], {}, FinishReason.LENGTH, [5, 6, 7]),
        ([5, 9, 7], {}, FinishReason.STOP, [5, 9]),
    ],
)
def test_why_a_request_ends(
    tokens: list[int], params: dict[str, Any], reason: FinishReason, kept: list[int]
) -> None:
    profile = make_profile(model=make_model(eos_ids=(EOS, 9)))
    bench = Bench(profile, token=fixed(tokens))
    bench.add("a", max_tokens=3, **params)
    bench.finish()
    assert texts(bench.outputs)["a"][0] == kept
    assert reasons(bench.outputs) == {"a": reason}
    assert bench.engine.stats().finished == {reason: 1}


def test_a_second_loop_row_of_a_request_counts_once() -> None:
    bench = Bench()
    bench.add("a", max_tokens=2)
    bench.step()
    bench.step()
    ((_, plan),) = bench.plan()
    (batch,) = plan.steps
    assert isinstance(batch, RecurrentBatch)
    twice = RecurrentResult(batch.keys * 2, batch.positions * 2, batch.depths * 2, (1.0, 0.0))
    bench.apply("lane-0", answer(plan, twice))
    assert bench.engine.stats().stale_rows == 1
    ((_, plan),) = bench.plan()
    assert plan.steps == (RecurrentBatch(batch.keys, (1,), (2,)),)


def test_beside_a_wrong_row_those_of_an_aborted_request_are_discarded() -> None:
    bench = Bench()
    _, plan = decoding(bench)
    bench.engine.abort("mate")
    steps = list(bench.run("lane-0", plan).steps)
    steps[2] = shifted(steps[2], 0)
    bench.apply("lane-0", answer(plan, *steps))
    assert reasons(bench.outputs) == {"a": FinishReason.ERROR}
    stats = bench.engine.stats()
    assert (stats.stale_rows, stats.discarded_rows) == (1, 3)


def test_a_token_outside_the_vocabulary_costs_its_mate_nothing() -> None:
    bench = Bench(token=lambda key, output_index: 64 if key.request_id == "a" else 5)
    decoding(bench)
    bench.apply("lane-0", bench.run("lane-0", bench.plans[-1]))
    assert texts(bench.outputs) == {"a": ([], []), "mate": ([5], [4])}
    bench.finish()
    assert texts(bench.outputs)["mate"] == ([5] * 4, [4] * 4)


def test_logprobs_come_out_in_order_with_their_tokens() -> None:
    bench = Bench()
    bench.add("a", max_tokens=3, logprobs=2)
    bench.add("mate", max_tokens=2)
    outputs = bench.finish()
    told = [entry for o in outputs if o.key.request_id == "a" for entry in o.logprobs]
    assert told == [TokenLogprobs(-0.5, (0, 1), (-1.0, -2.0))] * 3
    assert all(len(o.logprobs) == len(o.tokens) for o in outputs if o.key.request_id == "a")
    assert all(o.logprobs == () for o in outputs if o.key.request_id == "mate")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (2, None),
        (2, TokenLogprobs(-0.5, (1,), (-1.0,))),
        (1, TokenLogprobs(-0.5, (64,), (-1.0,))),
        (None, TokenLogprobs(-0.5)),
    ],
)
def test_logprobs_other_than_asked_cost_their_request(
    asked: int | None, told: TokenLogprobs | None
) -> None:
    bench = Bench()
    bench.add("a", max_tokens=4, logprobs=asked)
    bench.add("mate", max_tokens=4)
    bench.step()
    ((_, plan),) = bench.plan()
    result = bench.run("lane-0", plan)
    coda = result.steps[0]
    assert isinstance(coda, CodaResult)
    wrong = replace(coda, logprobs=(told, None))
    outputs = bench.apply("lane-0", replace(result, steps=(wrong, *result.steps[1:])))
    assert reasons(outputs) == {"a": FinishReason.ERROR}
    assert bench.engine.stats().stale_rows == 1
    assert texts(bench.finish())["mate"][0] == [1, 2, 3, 4]


@pytest.mark.parametrize("lost", [True, False])
def test_an_output_raises_what_its_end_means(lost: bool) -> None:
    key = RequestKey("a", 1)
    RequestOutput(key, 0, (5,), (4,), FinishReason.STOP, None).raise_error()
    failed = RequestOutput(key, 0, (), (), FinishReason.ERROR, "gone", worker_lost=lost)
    with pytest.raises(LoopmeshError, match="the generation failed: gone") as caught:
        failed.raise_error()
    assert isinstance(caught.value, WorkerLostError) is lost
