"""OutputStream: what one consumer has not yet read, merged by request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from scheduler.output import RequestOutput

if TYPE_CHECKING:
    from protocol.identity import RequestKey


class OutputStream:
    """Owner: SchedulerActor. Mutated only by: put, take and end, on its event loop.

    A slow reader gets fewer, larger frames: outputs of one choice are merged while they wait, so
    at most one entry a live choice is held, of at most max_tokens tokens.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, RequestOutput] = {}
        self._arrived = asyncio.Event()
        self._ended = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, output: RequestOutput) -> None:
        """Add an output behind what waits for its request."""
        held = self._waiting.get(output.key)
        self._waiting[output.key] = output if held is None else merge(held, output)
        self._arrived.set()

    async def take(self) -> list[RequestOutput]:
        """Everything that waits, at least one output; nothing at all means the end."""
        await self._arrived.wait()
        if not self._ended:
            self._arrived.clear()
        outputs = list(self._waiting.values())
        self._waiting.clear()
        return outputs

    def end(self) -> None:
        """No output comes any more; what waits can still be taken."""
        self._ended = True
        self._arrived.set()


def merge(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two consecutive outputs of one request as one.

    Example: tokens 0..1 and token 2 with STOP -> tokens 0..2 with STOP; tokens 4..6 and an end at
    5 -> token 4 with that end.
    """
    kept = max(then.start_index - first.start_index, 0)
    return RequestOutput(
        key=first.key,
        start_index=min(first.start_index, then.start_index),
        tokens=first.tokens[:kept] + then.tokens,
        exit_depths=first.exit_depths[:kept] + then.exit_depths,
        finish_reason=then.finish_reason,
        error=then.error,
        worker_lost=then.worker_lost,
        logprobs=first.logprobs[:kept] + then.logprobs,
        choice=first.choice,
    )
