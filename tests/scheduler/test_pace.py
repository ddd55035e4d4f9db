"""How long a plan of ticks is made, in ticks."""

from __future__ import annotations

from protocol.resident import RowState
from protocol.result import PlanResult, PrefillResult, ResidentResult
from scheduler.pace import TickPace
from tests.scheduler.test_results import STRANGER


def answer(ticks: int, device_us: int) -> PlanResult:
    """A prompt's chunk and so many ticks, which took that long."""
    row = ResidentResult(
        (STRANGER,), ((),), ((),), (0,), (RowState.READY,), (1,) * ticks, (0,) * ticks, (0,) * ticks
    )
    return PlanResult(1, 1, (PrefillResult((), ()), row), (), (999_999, device_us))


def test_a_plan_is_as_long_as_its_interval() -> None:
    pace = TickPace(0.05, 16)
    assert (pace.ticks, repr(pace)) == (16, "<TickPace 16 ticks of 0 us>")
    pace.note(answer(0, 5_000))
    pace.note(answer(4, 0))
    assert pace.ticks == 16
    pace.note(answer(2, 24_000))
    assert (pace.ticks, repr(pace)) == (4, "<TickPace 4 ticks of 12000 us>")
    pace.note(answer(1, 2_000))
    assert pace.ticks == 7
    pace.note(answer(1, 10_000_000))
    assert pace.ticks == 1


def test_a_worker_without_ticks_has_none() -> None:
    assert TickPace(0.05, 0).ticks == 0
