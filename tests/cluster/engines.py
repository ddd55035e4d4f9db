"""Engines for tests of those that call them: a directory that a test writes, and played engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.engine_load import EngineLoad
from protocol.identity import RequestKey
from protocol.profile import ModelProfile
from scheduler.output import RequestOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    from cluster.engine_link import EngineHandle
    from cluster.scheduler_actor import Refusal
    from protocol.exit_rule import FinishReason
    from protocol.sampling import SamplingParams

MODEL = ModelProfile("played", "f", 100, 512, 4, (1,), 0.9)
IDLE = EngineLoad(0, 100.0, 0.0, 0, 0, 64, 64, workers=1)


class Directory:
    """Engines by name. Owner: one test, which alone changes `listed`."""

    def __init__(self, **engines: EngineHandle) -> None:
        self.listed = engines

    async def engines(self) -> dict[str, EngineHandle]:
        return dict(self.listed)


class PlayedEngine:
    """Takes requests and answers only what it is told to. Owner: one test, which alone changes it.

    `refuses` is its answer to a submit; `load` that to a renewal.
    """

    def __init__(self, load: EngineLoad = IDLE, refuses: Refusal | None = None) -> None:
        self.load = load
        self.refuses = refuses
        self.taken: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.submitted = asyncio.Event()
        self.frames: asyncio.Queue[list[RequestOutput] | None] = asyncio.Queue()

    def say(self, request_id: str, token: int, finish: FinishReason | None = None) -> None:
        """Put an output of a request on the stream: its first, or that and its end."""
        key = RequestKey(request_id, 1)
        self.frames.put_nowait([RequestOutput(key, 0, (token,), (4,), finish, None)])

    def cut(self) -> None:
        """End the output stream that is open now."""
        self.frames.put_nowait(None)

    async def model(self) -> ModelProfile:
        return MODEL

    async def submit(
        self,
        consumer: str,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        *,
        tenant: str = "",
    ) -> Refusal | None:
        self.calls.append((consumer, f"{seed}{tenant}{prompt}{params.max_tokens}"))
        if self.refuses is None:
            self.taken.append(request_id)
        self.submitted.set()
        return self.refuses

    async def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        self.calls.append(("finish", f"{request_id} {at_output_index} {choice}"))

    async def renew(self, consumer: str, serving: Collection[str]) -> EngineLoad:
        self.calls.append(("renew", f"{consumer} {len(serving)}"))
        return self.load

    async def outputs(self, consumer: str) -> AsyncGenerator[list[RequestOutput], None]:
        self.calls.append(("outputs", consumer))
        yield []
        while (frame := await self.frames.get()) is not None:
            yield frame
