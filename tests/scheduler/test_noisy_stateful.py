"""The random walk with answers that say something twice, of a stranger, or of somewhere else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from protocol.identity import RequestKey
from protocol.result import CodaResult, FailedRow, PrefillResult, PreludeResult, RecurrentResult
from tests.scheduler.test_engine_stateful import EngineMachine

if TYPE_CHECKING:
    from protocol.result import StepResult

STRANGER = RequestKey("stranger", 2**40)


class NoisyMachine(EngineMachine):
    """The same with workers that repeat themselves and speak of what they were not asked."""

    def noisy_step(self, data: st.DataObject) -> tuple[str, int]:
        lanes = sorted(lane for lane, result in self.flying.items() if result.steps)
        lane = data.draw(st.sampled_from(lanes))
        return lane, data.draw(st.integers(0, len(self.flying[lane].steps) - 1))

    @precondition(lambda self: any(result.steps for result in self.flying.values()))
    @rule(data=st.data(), strange=st.booleans())
    def apply_with_a_row_too_many(self, data: st.DataObject, strange: bool) -> None:
        lane, index = self.noisy_step(data)
        result = self.flying[lane]
        row = data.draw(st.integers(0, len(result.steps[index].keys) - 1))
        steps = list(result.steps)
        steps[index] = with_a_copy(steps[index], row, STRANGER if strange else None)
        failed = (FailedRow(STRANGER, "who?"),) if strange else ()
        before = self.engine.stats().stale_rows
        live = {key for key, life in self.lives.items() if life.reason is None}
        self.answer(lane, replace(result, steps=tuple(steps), failed=failed))
        assert self.engine.stats().stale_rows == before + 1 + len(failed)
        ended = [self.lives[key].reason for key in live]
        assert all(reason is None or reason.value != "error" for reason in ended)

    @precondition(lambda self: any(result.steps for result in self.flying.values()))
    @rule(data=st.data())
    def apply_with_a_row_from_elsewhere(self, data: st.DataObject) -> None:
        lane, index = self.noisy_step(data)
        result = self.flying[lane]
        row = data.draw(st.integers(0, len(result.steps[index].keys) - 1))
        key = result.steps[index].keys[row]
        steps = list(result.steps)
        steps[index] = moved(steps[index], row)
        self.answer(lane, replace(result, steps=tuple(steps)))
        assert self.lives[key].reason is not None


class NoisyCohortMachine(NoisyMachine):
    """The same in cohorts, with exits that are due a loop later."""

    scheduler: ClassVar[dict[str, object]] = {"mode": "no_refill", "exit_policy": "ouro_delayed"}


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
TestNoisyCohort = NoisyCohortMachine.TestCase
TestNoisyCohort.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
