"""RequestOutput: what leaves the engine, in order for each request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from protocol.errors import LoopmeshError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.exit_rule import FinishReason
    from protocol.identity import RequestKey
    from protocol.result import TokenLogprobs
    from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """New tokens of one choice of a request, in order, or its end, or both.

    `start_index` is the output index of `tokens[0]`; `exit_depths` has one 1-based entry a token.
    The outputs of a choice follow each other without a gap, and exactly one of them, the last,
    has a `finish_reason`. Only the end of one that was told to finish may start before the
    end of the ones before it: what they held from its `start_index` on is not part of the answer.
    `error` is set if and only if that is ERROR; `worker_lost` says that the
    request itself was fine and its worker went away, so that the same request may work again.
    `logprobs` has one entry a token, or none at all for a request that did not ask. `choice` is the
    index of the choice, and `key` its own: choices of one request differ in their generation.
    """

    key: RequestKey
    start_index: int
    tokens: tuple[int, ...]
    exit_depths: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None
    worker_lost: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0

    def raise_error(self) -> None:
        """Raise `error`, if there is one: WorkerLostError, else LoopmeshError."""
        if self.error is not None:
            kind = WorkerLostError if self.worker_lost else LoopmeshError
            raise kind(f"the generation failed: {self.error}")


def output_since(request: Request, start_index: int) -> RequestOutput:
    """The outputs of a request from `start_index` on, and its end if it has come."""
    return RequestOutput(
        key=request.key,
        start_index=start_index,
        tokens=tuple(request.tokens[start_index:]),
        exit_depths=tuple(request.exit_depths[start_index:]),
        finish_reason=request.finish_reason,
        error=request.error,
        worker_lost=request.worker_lost,
        logprobs=tuple(request.logprobs[start_index:]),
        choice=request.choice,
    )


def end_of(request: Request) -> RequestOutput:
    """The end of a request, without new tokens."""
    return output_since(request, len(request.tokens))


def join(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output in place of several of a choice that follow each other without a gap.

    Example: tokens (5, 6) from 0 and (7,) from 2, which is the last -> (5, 6, 7) from 0, the last.
    """
    return replace(
        outputs[-1],
        start_index=outputs[0].start_index,
        tokens=tuple(chain.from_iterable(output.tokens for output in outputs)),
        exit_depths=tuple(chain.from_iterable(output.exit_depths for output in outputs)),
        logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
    )
