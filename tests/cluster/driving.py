"""What the tests of both drivers share: scripted workers, a workload, and who takes outputs."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

from protocol.config import SchedulerSettings
from protocol.errors import ProtocolError
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from scheduler.engine import Engine
from tests.scheduler.bench import make_profile, reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.executor import Submission
    from protocol.plan import ExecutionPlan
    from scheduler.output import RequestOutput

LIMIT = 20.0
"""Seconds that a test waits at most for what must come."""


def executors(count: int = 1, *, manual: bool = False) -> dict[str, ScriptedExecutor]:
    profile = make_profile()
    return {f"lane-{index}": ScriptedExecutor(profile, manual=manual) for index in range(count)}


def bare_engine() -> Engine:
    """An engine without lanes: the driver brings them."""
    return Engine(SchedulerSettings(prefill_chunk_size=8, max_prefill_tokens=16))


class Recorder:
    """Takes what an AsyncDriver delivers. Owner: one test. Mutated only by: deliver."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.contexts: list[str] = []
        self._delivered = asyncio.Event()

    def deliver(self, outputs: list[RequestOutput]) -> None:
        assert outputs
        self.outputs += outputs
        self.contexts.append(CONTEXT.get())
        self._delivered.set()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, looked at after each delivery."""
        async with asyncio.timeout(LIMIT):
            while not done():
                self._delivered.clear()
                await self._delivered.wait()

    async def until_ended(self, *request_ids: str) -> None:
        await self.until(lambda: set(request_ids) <= set(reasons(self.outputs)))


CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("context", default="own")

WORKLOAD: list[tuple[str, int, dict[str, Any]]] = [
    (
        f"r{index}",
        1 + 3 * index % 13,
        {"max_tokens": 1 + 5 * index % 11, "exit_threshold": (0.0, 0.5, 0.9, 1.0)[index % 4]},
    )
    for index in range(24)
]


def add_all(add: Callable[..., object]) -> None:
    for request_id, length, params in WORKLOAD:
        add(request_id, [1] * length, SamplingParams(**params), 7)


class Refusing(ScriptedExecutor):
    """Raises instead of taking a plan. Owner: one test. Mutated only by: its methods."""

    error: Exception = ProtocolError("bad plan")

    def submit(self, plan: ExecutionPlan) -> Submission:
        raise self.error
