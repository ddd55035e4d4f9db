"""Whether a worker's answer is to what a plan asked, row by row."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, TypeAlias

from protocol.plan import CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.resident import ResidentBatch
from protocol.result import (
    CodaResult,
    PrefillResult,
    PreludeResult,
    RecurrentResult,
    ResidentResult,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from protocol.identity import RequestKey
    from protocol.plan import Step
    from protocol.profile import ModelProfile
    from protocol.result import StepResult, TokenLogprobs
    from scheduler.request import Request

Place: TypeAlias = tuple[int, ...]
"""Where a row stands in its request, as plan and result both name it: the prefilled end, the
position, (position, depth), or the output index. A resident row has no place but its batch."""

_RESIDENT: Place = (-1,)


class AnswerCheck:
    """What a model and its requests allow an answer to say. Owner: one ResultApplier. Immutable."""

    def __init__(self, requests: Mapping[RequestKey, Request], model: ModelProfile) -> None:
        self._requests = requests
        self._model = model

    def matches(self, step: Step, answer: StepResult) -> bool:
        """Whether an answer has the rows of the step, all of them, in its order."""
        match step, answer:
            case RecurrentBatch(), RecurrentResult(_, positions, depths, _):
                same = positions == step.positions and depths == step.depths
            case CodaBatch(), CodaResult(keys, output_indices, tokens, _):
                same = output_indices == step.output_indices and self._knows(tokens)
                same = same and all(map(self._told_as_asked, keys, _told(answer)))
            case ResidentBatch(), ResidentResult(keys, tokens, exit_depths):
                same = all(map(self._knows, tokens)) and all(map(self._reaches, exit_depths))
                same = same and all(map(self._told_as_asked, keys, answer.logprobs_by_row()))
            case PreludeBatch(), PreludeResult(_, positions):
                same = positions == step.positions
            case PrefillBatch(), PrefillResult(_, ends):
                same = ends == tuple(map(add, step.starts, step.counts))
            case _:
                same = False
        return same and answer.keys == step.keys

    def is_possible(self, answer: StepResult, row: int) -> bool:
        """False for a token or depth that the model does not have, or logprobs not asked for."""
        match answer:
            case CodaResult(keys, _, tokens, _):
                known = self._knows(tokens[row : row + 1])
                return known and self._told_as_asked(keys[row], _told(answer)[row])
            case ResidentResult(keys, tokens, exit_depths):
                told = answer.logprobs_by_row()[row]
                known = self._knows(tokens[row]) and self._reaches(exit_depths[row])
                return known and self._told_as_asked(keys[row], told)
            case _:
                return True

    def _knows(self, tokens: Iterable[int]) -> bool:
        return max(tokens, default=0) < self._model.vocab_size

    def _reaches(self, exit_depths: Iterable[int]) -> bool:
        return max(exit_depths, default=0) <= self._model.max_loops

    def _told_as_asked(self, key: RequestKey, told: Sequence[TokenLogprobs | None]) -> bool:
        """Whether outputs have the log probabilities that their request asks for, and no others."""
        request = self._requests.get(key)
        asked = None if request is None else request.params.logprobs
        if asked is None:
            return not any(told)
        count = min(asked, self._model.vocab_size)
        return all(
            one is not None and len(one.top_ids) == count and self._knows(one.top_ids)
            for one in told
        )


def planned(step: Step) -> dict[RequestKey, Place]:
    """The rows of a step, each with its place."""
    match step:
        case PrefillBatch(keys, starts, counts):
            ends = (start + count for start, count in zip(starts, counts, strict=True))
            return dict(zip(keys, zip(ends), strict=True))
        case PreludeBatch(keys, positions, _):
            return dict(zip(keys, zip(positions), strict=True))
        case RecurrentBatch(keys, positions, depths):
            return dict(zip(keys, zip(positions, depths, strict=True), strict=True))
        case CodaBatch(keys, _, _, output_indices):
            return dict(zip(keys, zip(output_indices), strict=True))
        case ResidentBatch(keys):
            return dict.fromkeys(keys, _RESIDENT)


def answered(step: Step, answer: StepResult) -> list[tuple[RequestKey, Place]]:
    """The rows of an answer, each with its place; a place of another stage's answer is ()."""
    match step, answer:
        case PrefillBatch(), PrefillResult(keys, ends):
            return list(zip(keys, zip(ends), strict=True))
        case PreludeBatch(), PreludeResult(keys, positions):
            return list(zip(keys, zip(positions), strict=True))
        case RecurrentBatch(), RecurrentResult(keys, positions, depths, _):
            return list(zip(keys, zip(positions, depths, strict=True), strict=True))
        case CodaBatch(), CodaResult(keys, output_indices, _):
            return list(zip(keys, zip(output_indices), strict=True))
        case ResidentBatch(), ResidentResult(keys):
            return [(key, _RESIDENT) for key in keys]
        case _:
            return [(key, ()) for key in answer.keys]


def _told(answer: CodaResult) -> tuple[tuple[TokenLogprobs | None], ...]:
    """What each row tells of its one output."""
    return tuple(zip(answer.logprobs)) if answer.logprobs else ((None,),) * len(answer.keys)
