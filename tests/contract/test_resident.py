"""Resident ticks on every home of a worker: what single steps say, and room for others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protocol.config import CacheSettings, WorkerSettings
from protocol.exit_rule import exits, survival_bound
from protocol.identity import RequestKey
from protocol.plan import NO_LOGPROBS, Grant, Resume
from protocol.resident import ResidentBatch, ResidentTerms, RowState
from protocol.result import CodaResult, RecurrentResult, ResidentResult
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
    from collections.abc import Iterator

    from protocol.plan import Admission, BlockTable
    from protocol.result import StepResult

A, B = RequestKey("a", 1), RequestKey("b", 2)
AGAIN = RequestKey("a", 3)
PROMPT = (1648, 1424, 261, 658, 14)
OUTPUTS = 8
SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=1024),
    device="cpu",
    num_slots=3,
    num_threads=1,
    max_ticks=512,
)
BOUND = survival_bound(0.5)
TERMS = ResidentTerms(min_loops=1, max_loops=4, bound=BOUND, max_tokens=OUTPUTS)


@pytest.fixture(scope="module", params=HOMES)
def shared(request: pytest.FixtureRequest) -> Iterator[PlanSender]:
    """One executor of each home."""
    with open_home(request.param) as open_executor:
        yield PlanSender(open_executor(SETTINGS))


@pytest.fixture
def sender(shared: PlanSender) -> Iterator[PlanSender]:
    """The shared executor, cleared afterwards."""
    yield shared
    assert not shared.run(releases=(A, B, AGAIN)).failed


def table(sender: PlanSender, tokens: int = 16, first: int = 0) -> BlockTable:
    return block_table(sender.executor.profile(), tokens, first)


def resident(
    sender: PlanSender, key: RequestKey = A, terms: ResidentTerms = TERMS, first: int = 0
) -> Admission:
    """A greedy request of the prompt that decodes by these terms."""
    return replace(admission(key, PROMPT, table(sender, 16, first)), resident=terms)


def ticks_of(step: StepResult) -> ResidentResult:
    assert isinstance(step, ResidentResult)
    return step


def loop_by_loop(
    sender: PlanSender, key: RequestKey, temperature: float = 0.0
) -> tuple[list[int], list[int]]:
    """The same request in single steps, its exits decided here."""
    item = admission(key, PROMPT, table(sender), temperature)
    sender.run(prefill(key, 0, len(PROMPT)), admits=(item,))
    tokens: list[int] = []
    depths: list[int] = []
    depth = TERMS.max_loops
    for output in range(OUTPUTS):
        position = len(PROMPT) + output - 1
        (sampled,) = sender.run(coda(key, position, depth, output)).steps
        assert isinstance(sampled, CodaResult)
        tokens += sampled.tokens
        depths.append(depth)
        sender.run(prelude(key, position + 1))
        for depth in range(1, TERMS.max_loops + 1):
            (looped,) = sender.run(recurrent(key, position + 1, depth - 1)).steps
            assert isinstance(looped, RecurrentResult)
            (survival,) = looped.survivals
            if exits(depth, survival, min_loops=1, max_loops=4, bound=BOUND):
                break
    sender.run(releases=(key,))
    return tokens, depths


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("ticks", [1, 3, 64])
def test_ticks_say_what_single_steps_say(
    sender: PlanSender, temperature: float, ticks: int
) -> None:
    expected = loop_by_loop(sender, AGAIN, temperature)
    item = replace(resident(sender), temperature=temperature)
    result = sender.run(prefill(A, 0, 5), ResidentBatch((A,), ticks), admits=(item,))
    steps = [ticks_of(result.steps[1])]
    while steps[-1].states != (RowState.FINISHED,):
        assert 1 <= steps[-1].ticks <= ticks
        steps.append(ticks_of(sender.run(ResidentBatch((A,), ticks)).steps[0]))
    tokens = [token for step in steps for token in step.tokens[0]]
    depths = [depth for step in steps for depth in step.exit_depths[0]]
    assert (tokens, depths) == expected
    # The first output takes no tick, and each other one as many as it is deep.
    assert sum(step.ticks for step in steps) == sum(depths[1:])
    assert sum(map(sum, (step.exits for step in steps))) == OUTPUTS - 1
    assert steps[-1].finished[-1] == 1


def test_rows_of_every_depth_tick_side_by_side(sender: PlanSender) -> None:
    expected = loop_by_loop(sender, AGAIN)
    forced = replace(TERMS, forced_depths=(4, 1, 3, 1, 2, 4, 1, 1))
    sender.run(
        prefill(A, 0, 5),
        prefill(B, 0, 5),
        admits=(resident(sender), resident(sender, B, forced, first=64)),
    )
    result = ticks_of(sender.run(ResidentBatch((B, A), 64)).steps[0])
    assert result.exit_depths[0] == forced.forced_depths
    assert (list(result.tokens[1]), list(result.exit_depths[1])) == expected
    assert result.live[0] == 2
    assert result.ticks == max(sum(forced.forced_depths[1:]), sum(expected[1][1:]))


def test_what_ends_a_request_ends_its_row(sender: PlanSender) -> None:
    tokens, _ = loop_by_loop(sender, AGAIN)
    ending = replace(TERMS, ending_ids=(tokens[2],))
    admits = (resident(sender, terms=ending),)
    result = sender.run(prefill(A, 0, 5), ResidentBatch((A,), 64), admits=admits).steps[1]
    first = tokens.index(tokens[2])
    assert ticks_of(result).tokens == (tuple(tokens[: first + 1]),)
    assert ticks_of(result).states == (RowState.FINISHED,)
    inert = ticks_of(sender.run(ResidentBatch((A,), 64)).steps[0])
    assert (inert.tokens, inert.ticks) == (((),), 0)


def test_a_row_parks_where_its_blocks_end_and_goes_on_after_a_grant(sender: PlanSender) -> None:
    expected = loop_by_loop(sender, AGAIN)
    short = replace(resident(sender), tables=table(sender, 8))
    steps = [sender.run(prefill(A, 0, 5), ResidentBatch((A,), 64), admits=(short,)).steps[1]]
    assert ticks_of(steps[0]).states == (RowState.PARKED,)
    # Eight tokens have room: the prompt and three outputs; the fourth waits outside.
    assert len(ticks_of(steps[0]).tokens[0]) == 4
    more = Grant(A, table(sender, 8, first=64))
    steps += sender.run(ResidentBatch((A,), 64), grants=(more,)).steps
    found = [token for step in steps for token in ticks_of(step).tokens[0]]
    assert found == expected[0]


@pytest.mark.parametrize("ticks", range(1, 9))
def test_a_suspended_row_goes_on_exactly_where_it_stood(sender: PlanSender, ticks: int) -> None:
    expected = loop_by_loop(sender, AGAIN)
    sender.run(prefill(A, 0, 5), admits=(resident(sender),))
    steps = list(sender.run(ResidentBatch((A,), ticks)).steps)
    (handle,) = sender.run(suspends=(A,)).suspended
    assert handle.key == A
    again = Resume(A, table(sender, 16, first=64))
    steps += sender.run(ResidentBatch((A,), 64), resumes=(again,)).steps
    rows = [ticks_of(step) for step in steps]
    assert [token for row in rows for token in row.tokens[0]] == expected[0]
    assert [depth for row in rows for depth in row.exit_depths[0]] == expected[1]


def test_log_probabilities_come_with_the_outputs_of_those_who_asked(sender: PlanSender) -> None:
    asked = replace(resident(sender), logprobs=2)
    plain = resident(sender, B, first=64)
    assert plain.logprobs == NO_LOGPROBS
    sender.run(prefill(A, 0, 5), prefill(B, 0, 5), admits=(asked, plain))
    result = ticks_of(sender.run(ResidentBatch((A, B), 64)).steps[0])
    told, nothing = result.logprobs_by_row()
    assert len(told) == len(result.tokens[0])
    assert all(one is not None and len(one.top_ids) == 2 for one in told)
    assert set(nothing) == {None}


def test_ticks_make_way_for_a_plan_that_changes_something(sender: PlanSender) -> None:
    long = replace(TERMS, bound=-1.0, max_tokens=400)
    wide = replace(resident(sender, terms=long), tables=table(sender, 405))
    sender.run(prefill(A, 0, 5), admits=(wide,))
    running = sender.submit(ResidentBatch((A,), 512))
    release = sender.submit(releases=(A,))
    result = running.collect(TIMEOUT)
    assert release.collect(TIMEOUT).failed == ()
    for submission in (running, release):
        submission.retire()
    (row,) = (ticks_of(step) for step in result.steps)
    if "Scripted" in repr(sender.executor):  # whatever it runs has ended when submit returns
        assert row.ticks == 512
    else:
        assert row.ticks < 512
