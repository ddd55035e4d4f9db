"""The applier: turns one plan's result into signals heard and outputs in order."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from protocol.exit_rule import FinishReason, finish_reason
from protocol.plan import CodaBatch, RecurrentBatch
from protocol.resident import ResidentBatch, RowState
from protocol.result import CodaResult, RecurrentResult, ResidentResult
from scheduler.answers import AnswerCheck, answered, planned
from scheduler.output import output_since
from scheduler.states import Event, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan, Step
    from protocol.profile import ModelProfile
    from protocol.result import PlanResult, StepResult, TokenLogprobs
    from scheduler.answers import Place
    from scheduler.output import RequestOutput
    from scheduler.request import Request
    from scheduler.stats import Totals

Output: TypeAlias = "tuple[int, int, TokenLogprobs | None]"
"""A token, its exit depth, and its log probabilities if it was asked for any."""

Ticked: TypeAlias = (
    "tuple[int, Sequence[int], Sequence[int], Sequence[TokenLogprobs | None], int, RowState]"
)
"""The most ticks of a plan; tokens, exit depths and log probabilities; loops and state now."""


class ResultApplier:
    """Applies the result of one plan. Owner: Engine.apply. Mutated only by: run.

    A row counts only if the plan asked for exactly it and its request is still live. Rows of
    requests that ended meanwhile are discarded; all others are stale. Neither is ever raised: what
    a worker sends late or wrong must not disturb the other requests.
    """

    def __init__(
        self,
        requests: Mapping[RequestKey, Request],
        plan: ExecutionPlan,
        model: ModelProfile,
        totals: Totals,
    ) -> None:
        self._requests = requests
        self._plan = plan
        self._model = model
        self._totals = totals
        self._check = AnswerCheck(requests, model)
        self._starts: dict[RequestKey, int] = {}
        forked = (fork.key for fork in plan.forks)
        self._moved = {*plan.suspends, *(resume.key for resume in plan.resumes), *forked}

    def run(self, result: PlanResult) -> list[RequestOutput]:
        """Apply every row, in the plan's order; the new tokens and ends of each request."""
        messages = {loss.key: f"its snapshot is lost: {loss.message}" for loss in result.lost}
        messages |= {row.key: row.message for row in result.failed if row.key not in messages}
        for index, step in enumerate(self._plan.steps):
            answer = result.steps[index] if index < len(result.steps) else None
            self._apply_step(step, answer, messages)
        for answer in result.steps[len(self._plan.steps) :]:
            self._totals.stale_rows += len(answer.keys)
        # What is left failed after all its rows were answered, or is no request of this plan.
        for key, message in messages.items():
            if key in self._moved or any(key in step.keys for step in self._plan.steps):
                self._fail(key, message)
            else:
                self._totals.stale_rows += 1
        self._take_snapshots(result)
        return [output_since(self._requests[key], start) for key, start in self._starts.items()]

    def _apply_step(
        self, step: Step, answer: StepResult | None, messages: dict[RequestKey, str]
    ) -> None:
        if answer is not None and self._check.matches(step, answer):
            take, values = self._taking(step, answer)
            for request, value in zip(map(self._requests.get, answer.keys), values, strict=True):
                if request is None or not request.is_live:
                    self._totals.discarded_rows += 1
                else:
                    take(request, value)
        else:
            self._apply_rows(step, answer, messages)

    def _apply_rows(
        self, step: Step, answer: StepResult | None, messages: dict[RequestKey, str]
    ) -> None:
        """Row by row, for an answer that is not what the plan asked for."""
        due = planned(step)
        if answer is not None:
            self._apply_due(step, answer, due)
        stage = type(step).__name__.removesuffix("Batch")
        for key in due:
            message = f"the answer to plan {self._plan.seq} lacks its {stage} row"
            self._fail(key, messages.pop(key, message))

    def _apply_due(self, step: Step, answer: StepResult, due: dict[RequestKey, Place]) -> None:
        """Apply the rows that are due, and take them out of `due`."""
        take, values = self._taking(step, answer)
        for row, (key, place) in enumerate(answered(step, answer)):
            if due.get(key) != place:
                self._totals.stale_rows += 1
                continue
            request = self._requests.get(key)
            if request is None or not request.is_live:
                self._totals.discarded_rows += 1
            elif not self._check.is_possible(answer, row):
                self._totals.stale_rows += 1
                continue
            else:
                take(request, values[row])
            del due[key]

    def _taking(
        self, step: Step, answer: StepResult
    ) -> tuple[Callable[[Request, Any], None], Sequence[Any]]:
        """What a request takes from a row of this answer, and the value of each row."""
        match step, answer:
            case RecurrentBatch(), RecurrentResult(_, positions, depths, survivals):
                return _hear, tuple(zip(positions, depths, survivals, strict=True))
            case CodaBatch(planned, _, exit_depths, _), CodaResult(keys, _, tokens, logprobs):
                depth_of = dict(zip(planned, exit_depths, strict=True))
                exits = (depth_of.get(key, 0) for key in keys)
                rows = zip(tokens, exits, logprobs or repeat(None), strict=False)
                return self._append, tuple(rows)
            case ResidentBatch(_, ticks, _), ResidentResult(_, tokens, depths, loops, states):
                columns = (tokens, depths, answer.logprobs_by_row(), loops, states)
                return self._take_ticks, tuple(zip(repeat(ticks), *columns, strict=False))
            case _:
                return _nothing, answer.keys

    def _append(self, request: Request, output: Output) -> None:
        token, exit_depth, logprobs = output
        self._starts.setdefault(request.key, len(request.tokens))
        request.append(token, exit_depth, logprobs)
        reason = finish_reason(
            token,
            len(request.tokens),
            stop_ids=request.stop_ids,
            eos_ids=self._model.eos_ids,
            ignore_eos=request.params.ignore_eos,
            max_tokens=request.params.max_tokens,
        )
        if reason is not None:
            request.end(Event.FINISH, reason)

    def _take_ticks(self, request: Request, row: Ticked) -> None:
        """The outputs of a resident row; whatever is behind its end is not part of it."""
        ticks, tokens, exit_depths, logprobs, loops, state = row
        request.ticked(ticks, loops)
        for output in zip(tokens, exit_depths, logprobs, strict=True):
            if request.is_live:
                self._append(request, output)
        if request.is_live and state is RowState.FINISHED:
            self._fail(request.key, "its worker ended it after an output that is no end")

    def _take_snapshots(self, result: PlanResult) -> None:
        """Suspend what the plan suspends; a request without an answer to that fails."""
        kept = {handle.key for handle in result.suspended}
        self._totals.stale_rows += len(kept.difference(self._plan.suspends))
        for key in self._plan.suspends:
            request = self._requests.get(key)
            if request is None or request.state is not State.SUSPENDING:
                continue
            if key in kept:
                request.keep()
                self._totals.preemptions += 1
            else:
                self._fail(key, f"the answer to plan {self._plan.seq} lacks its snapshot")

    def _fail(self, key: RequestKey, message: str) -> None:
        request = self._requests.get(key)
        if request is not None and request.is_live:
            for choice in request.together:
                self._starts.setdefault(choice.key, len(choice.tokens))
                choice.end(Event.FAIL, FinishReason.ERROR, message)


def _hear(request: Request, signal: tuple[int, int, float]) -> None:
    position, depth, survival = signal
    request.hear(position, depth + 1, survival)


def _nothing(_request: Request, _key: RequestKey) -> None:
    """The row has run; that it was planned has moved the request on already."""
