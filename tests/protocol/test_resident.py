"""Resident ticks by the script: the rule that every worker has to follow, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.exit_rule import NEVER
from protocol.identity import RequestKey
from protocol.plan import (
    CodaBatch,
    ExecutionPlan,
    Grant,
    PrefillBatch,
    PreludeBatch,
    RecurrentBatch,
)
from protocol.profile import ModelProfile, WorkerProfile
from protocol.resident import MAX_ENDING_IDS, ResidentBatch, ResidentTerms, RowState
from protocol.result import PlanResult, ResidentResult, TokenLogprobs
from protocol.scripted_executor import ScriptedExecutor
from tests.plans import PlanSender, admission
from tests.strategies import admissions, resident_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.plan import Admission, Step

MODEL = ModelProfile("toy", "toy", 64, 64, 4, (0,), 0.9)
PROFILE = WorkerProfile(MODEL, "cpu", "float32", 2, 32, 4, 4, 6, max_ticks=8)
A, B = RequestKey("a", 1), RequestKey("b", 2)
TERMS = ResidentTerms(min_loops=1, max_loops=4, bound=0.5, max_tokens=6)
READY, PARKED, FINISHED = RowState


def sender(terms: ResidentTerms = TERMS, width: int = 2, prompt: int = 2) -> PlanSender:
    """A worker on which a has run its prompt; its gates leave survivals 0.7, 0.49, ..."""
    sender = PlanSender(
        ScriptedExecutor(PROFILE, hazard=lambda key, p, d: 0.3, token=lambda key, index: index + 5)
    )
    tables = tuple(tuple(range(p * width, (p + 1) * width)) for p in range(4))
    item = replace(admission(A, (1,) * prompt, tables), resident=terms)
    assert not sender.run(PrefillBatch((A,), (0,), (prompt,)), admits=(item,)).failed
    return sender


def ticks(of: PlanSender, count: int, *, yields: bool = False) -> ResidentResult:
    (result,) = of.run(ResidentBatch((A,), count, yields)).steps
    assert isinstance(result, ResidentResult)
    return result


def test_the_first_output_comes_before_the_first_tick() -> None:
    # Loops 1 and 2 of each token: survival 0.49 is within the bound.
    result = ticks(sender(), 3)
    assert result == ResidentResult(
        (A,), ((5, 6),), ((4, 2),), (1,), (READY,), (1, 1, 1), (0, 1, 0), (0, 0, 0)
    )
    assert result.ticks == 3


def test_ticks_go_on_where_the_last_plan_stopped_and_end_with_the_last_row() -> None:
    worker = sender()
    ticks(worker, 3)
    assert ticks(worker, 2) == ResidentResult(
        (A,), ((7,),), ((2,),), (1,), (READY,), (1, 1), (1, 0), (0, 0)
    )
    # Three outputs are left; the last comes with the sixth tick of eight.
    last = ticks(worker, 8)
    assert (last.tokens, last.states, last.ticks) == (((8, 9, 10),), (FINISHED,), 5)
    assert last.finished == (0, 0, 0, 0, 1)
    assert ticks(worker, 8) == ResidentResult((A,), ((),), ((),), (0,), (FINISHED,), (), (), ())


@pytest.mark.parametrize(
    ("terms", "depths"),
    [
        (replace(TERMS, min_loops=3), (4, 3, 3, 3)),
        (replace(TERMS, max_loops=1), (4, 1, 1, 1)),
        (replace(TERMS, bound=NEVER), (4, 4, 4)),
        (replace(TERMS, forced_depths=(4, 1, 3, 2, 2, 2)), (4, 1, 3, 2)),
    ],
)
def test_exits_are_those_of_the_terms(terms: ResidentTerms, depths: tuple[int, ...]) -> None:
    worker = sender(terms)
    found = ticks(worker, 8).exit_depths[0] + ticks(worker, 1).exit_depths[0]
    assert found[: len(depths)] == depths


def test_an_ending_id_ends_the_row_for_good() -> None:
    worker = sender(replace(TERMS, ending_ids=(40, 6)))
    result = ticks(worker, 8)
    assert (result.tokens, result.states, result.ticks) == (((5, 6),), (FINISHED,), 2)
    assert ticks(sender(replace(TERMS, ending_ids=(5,))), 8).ticks == 0


def test_a_row_without_a_block_parks_until_it_is_granted_one() -> None:
    worker = sender(width=1)
    result = ticks(worker, 8)
    # Four tokens have room: two of the prompt and two outputs; the third output waits outside.
    assert (result.tokens, result.states, result.ticks) == (((5, 6, 7),), (PARKED,), 4)
    assert ticks(worker, 8).ticks == 0
    more = Grant(A, tuple((8 + plane,) for plane in range(4)))
    (then,) = worker.run(ResidentBatch((A,), 8), grants=(more,)).steps
    assert isinstance(then, ResidentResult)
    assert (then.tokens, then.states) == (((8, 9, 10),), (FINISHED,))


def test_it_yields_to_who_waits_for_room() -> None:
    worker = sender(replace(TERMS, max_tokens=2))
    tables = tuple((16 + 2 * plane, 17 + 2 * plane) for plane in range(4))
    other = replace(admission(B, (1,), tables), resident=TERMS)
    worker.run(PrefillBatch((B,), (0,), (1,)), admits=(other,))
    (result,) = worker.run(ResidentBatch((A, B), 8, yields=True)).steps
    assert isinstance(result, ResidentResult)
    assert (result.states, result.live, result.finished) == ((FINISHED, READY), (2, 2), (0, 1))


@pytest.mark.parametrize(
    "step",
    [
        CodaBatch((A,), (1,), (4,), (0,)),
        PreludeBatch((A,), (2,), (5,)),
        RecurrentBatch((A,), (1,), (0,)),
    ],
)
def test_a_resident_request_has_no_single_steps(step: Step) -> None:
    (failed,) = sender().run(step).failed
    assert "of a resident request" in failed.message


def test_a_row_needs_its_terms_and_its_prompt() -> None:
    worker = PlanSender(ScriptedExecutor(PROFILE))
    tables = tuple((plane,) for plane in range(4))
    plain = admission(A, (1, 1), tables)
    half = replace(admission(B, (1, 1), tables), resident=TERMS)
    chunks = PrefillBatch((A, B), (0, 0), (2, 1))
    result = worker.run(chunks, ResidentBatch((A, B), 1), admits=(plain, half))
    messages = {row.key: row.message for row in result.failed}
    assert "without its terms" in messages[A]
    assert "before the end of its prompt" in messages[B]
    foreign = replace(plain, key=RequestKey("c", 3), resident=replace(TERMS, ending_ids=(64,)))
    (failed,) = worker.run(releases=(A, B), admits=(foreign,)).failed
    assert "token 64 is not in" in failed.message


def test_more_ticks_than_the_worker_runs_are_refused() -> None:
    worker = sender()
    with pytest.raises(ProtocolError, match="ResidentBatch of 9 ticks, at most 8"):
        worker.run(ResidentBatch((A,), 9))


def result(**changes: object) -> ResidentResult:
    fields: dict[str, object] = {
        "keys": (A,),
        "tokens": ((1,),),
        "exit_depths": ((2,),),
        "loops": (0,),
        "states": (READY,),
        "live": (1,),
        "exits": (1,),
        "finished": (0,),
    }
    return ResidentResult(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ResidentBatch((A, A), 1),
        lambda: ResidentBatch((A,), 0),
        lambda: replace(TERMS, min_loops=0),
        lambda: replace(TERMS, min_loops=5),
        lambda: replace(TERMS, max_tokens=0),
        lambda: replace(TERMS, ending_ids=(-1,)),
        lambda: replace(TERMS, ending_ids=tuple(range(MAX_ENDING_IDS + 1))),
        lambda: replace(TERMS, forced_depths=(4, 2)),
        lambda: replace(TERMS, forced_depths=(4, 2, 0, 1, 1, 1)),
        lambda: result(tokens=((1,), (2,))),
        lambda: result(tokens=((1, 2),)),
        lambda: result(tokens=((-1,),)),
        lambda: result(exit_depths=((0,),)),
        lambda: result(loops=(-1,)),
        lambda: result(live=(1, 1)),
        lambda: result(logprobs=(None, None)),
        lambda: replace(PROFILE, max_ticks=-1),
    ],
)
def test_nonsense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make()


def test_log_probabilities_by_row() -> None:
    told = tuple(TokenLogprobs(-float(index)) for index in range(3))
    two = result(
        keys=(A, B),
        tokens=((1,), (2, 3)),
        exit_depths=((1,), (2, 3)),
        loops=(0, 0),
        states=(READY, PARKED),
        logprobs=told,
    )
    assert two.logprobs_by_row() == (told[:1], told[1:])
    assert replace(two, logprobs=()).logprobs_by_row() == ((None,), (None, None))


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        # In the ragged column of tokens: one row of one entry becomes one of two, and of -1.
        (b"\xc4\x04\x01\x00\x00\x00\xc4\x04\x07\x00", b"\xc4\x04\x02\x00\x00\x00\xc4\x04\x07\x00"),
        (b"\xc4\x04\x01\x00\x00\x00\xc4\x04\x07\x00", b"\xc4\x04\xff\xff\xff\xff\xc4\x04\x07\x00"),
    ],
)
def test_ragged_columns_that_do_not_fit_are_refused(found: bytes, wrong: bytes) -> None:
    data = encode(PlanResult(1, 1, (result(tokens=((7,),)),), (), (0,)))
    assert data.count(found) == 1
    with pytest.raises(ProtocolError, match="ragged column do not fit"):
        decode(data.replace(found, wrong))


@given(resident_results())
def test_a_result_survives_the_wire(step: ResidentResult) -> None:
    answer = PlanResult(1, 1, (step,), (), (0,))
    assert decode(encode(answer)) == answer


@given(admissions)
def test_so_do_the_terms_of_an_admission(item: Admission) -> None:
    plan = ExecutionPlan(1, 1, admits=(item,))
    assert decode(encode(plan)) == plan


def test_only_a_bool_says_whether_it_yields() -> None:
    plan = ExecutionPlan(1, 1, steps=(ResidentBatch((A,), 77, yields=True),))
    data = encode(plan)
    assert decode(data) == plan
    with pytest.raises(ProtocolError, match="expected true or false"):
        decode(data.replace(b"\x4d\xc3", b"\x4d\x01"))
