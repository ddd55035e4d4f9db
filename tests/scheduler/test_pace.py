"""How long a plan of ticks is made, in ticks."""

from __future__ import annotations

from math import inf

import pytest

from protocol.plan import ExecutionPlan, PrefillBatch
from protocol.resident import ResidentBatch, RowState
from protocol.result import PlanResult, PrefillResult, ResidentResult
from scheduler.pace import SMALLEST_PROMPT, TickPace
from tests.scheduler.test_results import STRANGER


def told(pace: TickPace, ticks: int, device_us: int, prompt_us: int = 0) -> None:
    """A chunk of ten tokens and so many ticks, which took that long."""
    steps = (PrefillBatch((STRANGER,), (0,), (10,)), ResidentBatch((STRANGER,), max(ticks, 1)))
    row = ResidentResult(
        (STRANGER,), ((),), ((),), (0,), (RowState.READY,), (1,) * ticks, (0,) * ticks, (0,) * ticks
    )
    result = PlanResult(1, 1, (PrefillResult((), ()), row), (), (prompt_us, device_us))
    pace.note(ExecutionPlan(1, 1, steps=steps), result)


def test_a_plan_is_as_long_as_its_interval() -> None:
    pace = TickPace(0.05, 16, 4)
    assert (pace.ticks, repr(pace)) == (16, "<TickPace 16 ticks of 0 us>")
    told(pace, 0, 5_000)
    told(pace, 4, 0)
    assert pace.ticks == 16
    told(pace, 2, 24_000)
    assert (pace.ticks, repr(pace)) == (4, "<TickPace 4 ticks of 12000 us>")
    told(pace, 1, 2_000)
    assert pace.ticks == 7
    told(pace, 1, 10_000_000)
    assert pace.ticks == 1


def test_a_worker_without_ticks_has_none() -> None:
    assert TickPace(0.05, 0, 4).ticks == 0


def test_prompts_are_cut_so_that_ticks_keep_their_interval() -> None:
    pace = TickPace(0.05, 16, 4)
    assert pace.ticks_beside(1000) == 1
    told(pace, 1, 10_000, prompt_us=10_000)  # a token takes 1 ms
    assert [pace.ticks_beside(tokens) for tokens in (0, 40, 41, 80, 81, 900)] == [1, 1, 2, 2, 3, 4]
    told(pace, 1, 190_000, prompt_us=30_000)  # 100 ms a tick, 2 ms a token
    assert [pace.ticks_beside(tokens) for tokens in (0, 1)] == [1, 4]
    assert TickPace(0.05, 0, 4).ticks_beside(5) == 1


def test_no_more_parts_than_ticks() -> None:
    pace = TickPace(0.001, 3, 4)
    told(pace, 1, 900, prompt_us=100_000)
    assert pace.ticks_beside(100) == 3


def test_a_pass_of_prompts_keeps_the_interval_or_takes_no_longer_than_a_tick() -> None:
    pace = TickPace(0.05, 16, 4)
    assert pace.prompt_tokens == inf
    told(pace, 1, 10_000, prompt_us=1_000)  # a token takes 0.1 ms
    assert pace.prompt_tokens == pytest.approx(40 * 4 / 0.1)
    told(pace, 1, 110_000, prompt_us=1_000)  # 60 ms a tick
    assert pace.prompt_tokens == pytest.approx(60 * 4 / 0.1)
    told(pace, 1, 60_000, prompt_us=1_000_000)
    assert pace.prompt_tokens == SMALLEST_PROMPT
