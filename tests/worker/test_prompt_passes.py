"""Prompts between ticks: when their passes run, and that it changes no answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protocol.config import CacheSettings, WorkerSettings
from protocol.identity import RequestKey
from protocol.layout import Layout
from protocol.plan import ExecutionPlan
from protocol.resident import ResidentBatch, ResidentTerms, RowState
from protocol.result import PrefillResult, ResidentResult
from tests.plans import admission, block_table, prefill
from worker import stages
from worker.prompt_passes import PromptPasses, no_passes
from worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protocol.plan import Admission, Step
    from protocol.result import PlanResult

A, B = RequestKey("a", 1), RequestKey("b", 2)
LONG, SHORT = (1648, 1424, 261, 658, 14, 77, 1, 5, 9, 12), (900, 31, 7)
TERMS = ResidentTerms(min_loops=1, max_loops=4, bound=0.5, max_tokens=9)


def counted(count: int, ticks: int) -> tuple[PromptPasses, list[int]]:
    """Some passes that note their numbers as they run."""
    ran: list[int] = []

    def each() -> Iterator[None]:
        for number in range(count):
            ran.append(number)
            yield

    def run(work: Callable[[], None]) -> bool:
        work()
        return len(ran) < 6  # the sixth fails

    return PromptPasses(each(), count, ticks, run), ran


@pytest.mark.parametrize(
    ("count", "ticks", "expected"),
    [
        (4, 1, [4, 4, 4]),
        (4, 3, [2, 3, 4]),
        (4, 4, [1, 2, 3]),
        (2, 4, [1, 2, 2]),
        (0, 2, [0, 0, 0]),
    ],
)
def test_passes_are_spread_evenly_over_the_first_ticks(
    count: int, ticks: int, expected: list[int]
) -> None:
    passes, ran = counted(count, ticks)
    found = []
    for tick in range(3):
        passes.before_tick(tick)
        found.append(len(ran))
    assert found == expected
    assert passes.rest() is (expected[-1] < count)
    assert ran == list(range(count))


def test_after_one_that_failed_the_others_are_left_out() -> None:
    passes, ran = counted(9, 3)
    passes.before_tick(0)
    assert not passes.failed
    passes.before_tick(1)
    assert passes.failed
    assert not passes.rest()
    assert len(ran) == 6
    assert not no_passes().rest()


class Bench:
    """A worker, plan by plan. Owner: one test."""

    def __init__(self, layout: Layout = Layout.LAST_EXITED) -> None:
        cache = CacheSettings(block_size=4, num_blocks=64, layout=layout)
        settings = WorkerSettings(cache=cache, device="cpu", num_slots=2, num_threads=1)
        self.worker = Worker.open(settings)
        self.seq = 0

    def admit(self, key: RequestKey, prompt: tuple[int, ...], first: int) -> Admission:
        table = block_table(self.worker.profile, 20, first)
        return replace(admission(key, prompt, table), resident=TERMS)

    def run(
        self, *steps: Step, admits: tuple[Admission, ...] = (), ticks: int | None = None
    ) -> PlanResult:
        """One plan, whose ticks are told to end after so many."""
        self.seq += 1
        lease = self.worker.readback.lease()
        plan = ExecutionPlan(1, self.seq, admits=admits, steps=steps)
        told = iter([False] * (ticks - 1) + [True]) if ticks else iter(lambda: False, True)
        result = self.worker.runner.execute(plan, lease, lambda: next(told)).read()
        self.worker.give_back(lease)
        return result


def answers(bench: Bench, parts: int, ticks: int | None = None) -> dict[RequestKey, list[int]]:
    """Tokens of a request whose ticks run on while the prompt of another is read."""
    found: dict[RequestKey, list[int]] = {A: [], B: []}

    def tell(result: PlanResult) -> PlanResult:
        assert result.failed == ()
        for step in result.steps:
            if isinstance(step, ResidentResult):
                for key, tokens in zip(step.keys, step.tokens, strict=True):
                    found[key] += tokens
        return result

    tell(bench.run(prefill(A, 0, 3), admits=(bench.admit(A, SHORT, 0),)))
    tell(bench.run(ResidentBatch((A,), 2)))
    admit = bench.admit(B, LONG, 32)
    beside = ResidentBatch((A,), 4, prompt_ticks=parts)
    tell(bench.run(prefill(B, 0, 6), beside, admits=(admit,), ticks=ticks))
    both = ResidentBatch((A, B), 4, prompt_ticks=parts)
    last = tell(bench.run(prefill(B, 6, 4), both, ticks=ticks))
    assert isinstance(last.steps[0], PrefillResult)
    assert last.steps[0].ends == (10,)
    assert len(last.device_us) == 2
    assert len(found[B]) >= 1
    for _ in range(12):
        tell(bench.run(ResidentBatch((A, B), 4)))
    return found


@pytest.mark.parametrize("ticks", [None, 1, 2])
@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("layout", list(Layout))
def test_prompts_between_ticks_change_no_answer(
    layout: Layout, parts: int, ticks: int | None
) -> None:
    expected = answers(Bench(layout), 1)
    assert answers(Bench(layout), parts, ticks) == expected
    assert [len(tokens) for tokens in expected.values()] == [TERMS.max_tokens] * 2


def test_a_row_goes_on_while_a_prompt_is_read() -> None:
    bench = Bench()
    bench.run(prefill(A, 0, 3), admits=(bench.admit(A, SHORT, 0),))
    step = ResidentBatch((A,), 4, prompt_ticks=4)
    _, ticked = bench.run(prefill(B, 0, 10), step, admits=(bench.admit(B, LONG, 32),)).steps
    assert isinstance(ticked, ResidentResult)
    assert ticked.live == (1,) * 4


def test_with_nobody_else_at_work_the_first_token_comes_in_the_same_plan() -> None:
    bench = Bench()
    step = ResidentBatch((B,), 4, prompt_ticks=3)
    _, ticked = bench.run(prefill(B, 0, 10), step, admits=(bench.admit(B, LONG, 0),)).steps
    assert isinstance(ticked, ResidentResult)
    assert len(ticked.tokens[0]) >= 1
    assert ticked.live == (1,)


def test_a_prompt_that_fails_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.run(prefill(A, 0, 3), admits=(bench.admit(A, SHORT, 0),))
    loop, asked = stages.loop_chunks, []

    def breaks(*args: object) -> object:
        asked.append(args)
        if len(asked) == 2:
            raise RuntimeError("no more")
        return loop(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stages, "loop_chunks", breaks)
    step = ResidentBatch((A, B), 4, prompt_ticks=4)
    result = bench.run(prefill(B, 0, 10), step, admits=(bench.admit(B, LONG, 32),))
    assert [(row.key, "no more" in row.message) for row in result.failed] == [(B, True)]
    read, ticked = result.steps
    assert isinstance(ticked, ResidentResult)
    assert read.keys == ()
    assert ticked.live == (1,) * 4
    assert ticked.states == (RowState.READY,) * 2
    assert ticked.tokens[0]
    assert not ticked.tokens[1]
    assert len(asked) == 2
