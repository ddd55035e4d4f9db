"""The two drivers of an engine: they wait, so that nobody inside the engine has to.

Both do the same in the same order: close lanes that are lost, plan and submit, wait for a result,
collect, retire, apply. The synchronous one is the specification of the other.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.lane_driver import LaneDriver
from protocol.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from protocol.executor import Executor
    from protocol.identity import RequestKey
    from protocol.sampling import SamplingParams
    from scheduler.engine import Engine
    from scheduler.output import RequestOutput

logger = logging.getLogger(__name__)


class SyncDriver:
    """Drives an engine on the calling thread. Owner: LLM or a test, which alone calls it.

    Mutated only by: its methods. Requests go to the engine directly, between two steps.
    """

    def __init__(
        self, engine: Engine, executors: Mapping[str, Executor], plan_timeout: float
    ) -> None:
        self._engine = engine
        self._woken = threading.Event()
        self._outputs: list[RequestOutput] = []
        self._lanes = LaneDriver(
            engine, executors, plan_timeout, wake=self._woken.set, emit=self._outputs.extend
        )

    def step(self) -> list[RequestOutput]:
        """Plan, submit, and apply at least one result if any is in flight.

        Waits until a worker has answered, is lost, or has let its plan wait for plan_timeout.
        """
        self._lanes.close_lost()
        self._lanes.submit_plans()
        while self._lanes.is_waiting():
            self._woken.wait(self._lanes.patience())
            self._woken.clear()
        self._lanes.collect()
        outputs = self._outputs.copy()
        self._outputs.clear()
        return outputs

    def drain(self, timeout: float) -> list[RequestOutput]:
        """Step until the engine has no work; after an abort, this brings its blocks back.

        Raises DeadlineError when there still is some after `timeout` seconds.
        """
        outputs = []
        deadline = time.monotonic() + timeout
        while self._engine.has_work():
            if time.monotonic() >= deadline:
                raise DeadlineError(f"the workers did not come to rest within {timeout:g} s")
            outputs += self.step()
        return outputs

    def close(self, timeout: float) -> None:
        """Shut every executor down, within `timeout` seconds; live requests are dropped."""
        self._lanes.close_all("the driver was closed", timeout)
        self._lanes.join(timeout)


@dataclass(frozen=True, slots=True)
class Progress:
    """Health of an AsyncDriver.

    `last_result` is the monotonic time of the last applied result, or, if later, of the moment at
    which there was something to wait for again; `outstanding` says whether there is now; `error`
    is why the pump gave up, and then nothing runs.
    """

    last_result: float
    outstanding: bool
    error: str | None


class AsyncDriver:
    """Drives an engine on an asyncio loop, which it never blocks. Owner: the scheduler actor.

    Mutated only by: the loop's thread; only a submission's callback comes from another one.
    `deliver` gets the outputs, on the loop, in order; it must not raise.
    """

    def __init__(
        self,
        engine: Engine,
        executors: Mapping[str, Executor],
        plan_timeout: float,
        deliver: Callable[[list[RequestOutput]], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._woken = asyncio.Event()
        self._lanes = LaneDriver(
            engine, executors, plan_timeout, wake=self._wake_from_any_thread, emit=self._emit
        )
        self._busy_since = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: asyncio.Task[None] | None = None
        self._closing = False
        self._error: str | None = None

    @property
    def progress(self) -> Progress:
        """Whether the driver gets on; for health checks."""
        last = self._engine.stats().last_applied
        return Progress(
            last_result=self._busy_since if last is None else max(last, self._busy_since),
            outstanding=self._engine.has_work(),
            error=self._error,
        )

    def start(self) -> None:
        """Start the pump on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._busy_since = time.monotonic()
        # A context of its own: Ray Serve cancels tasks that carry the context of a request.
        self._pump = self._loop.create_task(
            self._run(), name="loopmesh-driver", context=contextvars.Context()
        )

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        tenant: str = "",
    ) -> RequestKey:
        """Queue a request; raises as Engine.add does."""
        was_idle = not self._engine.has_work()
        key = self._engine.add(request_id, prompt, params, seed, tenant=tenant)
        if was_idle:
            self._busy_since = time.monotonic()
        self._woken.set()
        return key

    def abort(self, request_id: str) -> None:
        """Give a request up, all its choices; their ends are delivered at once."""
        self._emit(self._engine.abort(request_id))
        self._woken.set()

    def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        """End a choice whose text is complete; its end is delivered at once."""
        self._emit(self._engine.finish(request_id, at_output_index, choice))
        self._woken.set()

    async def close(self, timeout: float) -> None:  # noqa: ASYNC109 - clean-up is never cancelled
        """Stop the pump, end live requests with ERROR, shut every executor down; idempotent."""
        self._closing = True
        self._woken.set()
        if self._pump is not None:
            await asyncio.wait((self._pump,), timeout=timeout)
        self._lanes.close_all("the driver was closed", timeout)
        await asyncio.to_thread(self._lanes.join, timeout)

    async def _run(self) -> None:
        try:
            while not self._closing:
                self._lanes.close_lost()
                self._lanes.submit_plans()
                await self._wait()
                self._lanes.collect()
        except asyncio.CancelledError:
            self._give_up("the driver's task was cancelled")
            raise
        except Exception as error:
            logger.exception("the driver failed")
            self._give_up(f"the driver failed: {type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        """Nobody may wait for a pump that is gone: every live request ends with ERROR."""
        self._error = reason
        for lane in self._engine.lanes:
            try:
                self._lanes.close_lane(lane, reason)
            except Exception:
                logger.exception("closing %s failed", lane)

    async def _wait(self) -> None:
        """Until a result is ready, a request came or went, or it is time to look again."""
        try:
            async with asyncio.timeout(self._lanes.patience()):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    def _wake_from_any_thread(self) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:  # the loop was closed between the two lines
            logger.debug("a result came after the loop had ended")

    def _emit(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._deliver(outputs)
