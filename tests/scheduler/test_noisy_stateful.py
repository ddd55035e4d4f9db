"""The random walk with answers that say something twice, of a stranger, or of somewhere else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from protocol.result import CodaResult, FailedRow, PrefillResult, PreludeResult, RecurrentResult
from tests.scheduler.test_engine_stateful import EngineMachine

if TYPE_CHECKING:
    from protocol.result import PlanResult, StepResult

STRANGER = RequestKey("stranger", 2**40)


class NoisyMachine(EngineMachine):
    """The same with workers that repeat themselves and speak of what they were not asked."""

    def some_row(self, data: st.DataObject) -> tuple[str, PlanResult, int, int]:
        """A lane, its next answer, and a step and a row of it."""
        results = {lane: result for lane, result in self.next_results().items() if result.steps}
        lane = data.draw(st.sampled_from(sorted(results)))
        index = data.draw(st.integers(0, len(results[lane].steps) - 1))
        row = data.draw(st.integers(0, len(results[lane].steps[index].keys) - 1))
        return lane, results[lane], index, row

    @precondition(lambda self: any(result.steps for result in self.next_results().values()))
    @rule(data=st.data(), strange=st.booleans())
    def apply_with_a_row_too_many(self, data: st.DataObject, strange: bool) -> None:
        lane, result, index, row = self.some_row(data)
        steps = list(result.steps)
        steps[index] = with_a_copy(steps[index], row, STRANGER if strange else None)
        failed = (FailedRow(STRANGER, "who?"),) if strange else ()
        before = self.engine.stats().stale_rows
        live = {key for key, life in self.lives.items() if life.reason is None}
        self.answer(lane, replace(result, steps=tuple(steps), failed=failed))
        assert self.engine.stats().stale_rows == before + 1 + len(failed)
        assert all(self.lives[key].reason is not FinishReason.ERROR for key in live)

    @precondition(lambda self: any(result.steps for result in self.next_results().values()))
    @rule(data=st.data())
    def apply_with_a_row_from_elsewhere(self, data: st.DataObject) -> None:
        lane, result, index, row = self.some_row(data)
        key = result.steps[index].keys[row]
        steps = list(result.steps)
        steps[index] = moved(steps[index], row)
        self.answer(lane, replace(result, steps=tuple(steps)))
        assert self.lives[key].reason is not None


class NoisyPipelinedMachine(NoisyMachine):
    """The same with two plans in flight, in cohorts."""

    scheduler: ClassVar[dict[str, object]] = {
        "mode": "no_refill",
        "exit_policy": "ouro_delayed",
        "plans_in_flight": 2,
    }


def with_a_copy(step: StepResult, row: int, key: RequestKey | None) -> StepResult:
    """The step with one of its rows once more at the end, said of `key` if there is one."""
    columns: dict[str, Any] = {}
    for item in fields(step):
        column = getattr(step, item.name)
        columns[item.name] = column + column[row : row + 1]
    if key is not None:
        columns["keys"] = (*step.keys, key)
    return replace(step, **columns)


def moved(step: StepResult, row: int) -> StepResult:
    """The step with one row that claims to stand further on."""
    names = {
        PrefillResult: "ends",
        PreludeResult: "positions",
        RecurrentResult: "depths",
        CodaResult: "output_indices",
    }
    name = names[type(step)]
    column = getattr(step, name)
    changed: dict[str, Any] = {name: (*column[:row], column[row] + 1, *column[row + 1 :])}
    return replace(step, **changed)


TestNoisy = NoisyMachine.TestCase
TestNoisy.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestNoisyPipelined = NoisyPipelinedMachine.TestCase
TestNoisyPipelined.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
