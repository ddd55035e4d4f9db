"""EngineLink: an ingress's side of one engine: one output stream, many requests, one lease."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from protocol.errors import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine

    from cluster.engine_load import EngineLoad
    from cluster.scheduler_actor import Refusal
    from protocol.profile import ModelProfile
    from protocol.sampling import SamplingParams
    from scheduler.output import RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT = 10.0
RECONNECT_DELAY = 0.5
LOAD_INTERVAL = 0.5
"""Seconds between two reports of an engine's load, which come with the renewal of the lease."""
FRESH = 4
"""Intervals after which a report says nothing any more."""


class EngineHandle(Protocol):
    """A SchedulerActor, in this process or behind a Ray actor handle; see there."""

    async def model(self) -> ModelProfile: ...

    async def submit(
        self,
        consumer: str,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        *,
        tenant: str = "",
    ) -> Refusal | None: ...

    async def abort(self, request_id: str) -> None: ...

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None: ...

    async def renew(self, consumer: str, serving: Collection[str]) -> EngineLoad: ...

    def outputs(self, consumer: str) -> AsyncGenerator[list[RequestOutput], None]: ...


class EngineLink:
    """Owner: EngineClient. Mutated only by: its methods and pumps, on the ingress's event loop.

    `changed` is called when it may have become able to take requests.
    """

    def __init__(
        self,
        name: str,
        engine: EngineHandle,
        consumer: str,
        lease: float,
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self._engine = engine
        self._consumer = consumer
        self._interval = min(LOAD_INTERVAL, lease / 4)
        self._changed = changed
        self._queues: dict[str, asyncio.Queue[RequestOutput | WorkerLostError]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._attached = False
        self._report: tuple[float, EngineLoad] | None = None
        self.model: ModelProfile | None = None
        self.unreported = 0

    def __repr__(self) -> str:
        state = "attached" if self._attached else "cut"
        return f"<EngineLink {self.name} {state}, {len(self._queues)} requests, {self.load}>"

    def start(self) -> None:
        """Start the pumps: outputs in, lease renewals out."""
        self._spawn(self._pump())
        self._spawn(self._renew())

    async def close(self, reason: str) -> None:
        """Stop the pumps; requests still open end with WorkerLostError. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._attached = False
        self._fail_all(reason)

    @property
    def serving(self) -> tuple[str, ...]:
        """The requests that are open on it."""
        return tuple(self._queues)

    @property
    def attached(self) -> bool:
        """Whether its output stream stands."""
        return self._attached

    @property
    def takes_requests(self) -> bool:
        """Whether a new request may go to it."""
        return self._attached and not (self.load is not None and self.load.draining)

    @property
    def load(self) -> EngineLoad | None:
        """Its last report, None once that is too old."""
        if self._report is None:
            return None
        at, load = self._report
        return load if _now() - at <= FRESH * self._interval else None

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, *, tenant: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request, all its choices; closing the generator early aborts it.

        Raises RequestError, CapacityError or OverloadedError before the first output when the
        engine does not take it, WorkerLostError when the engine itself is gone or goes.
        """
        request_id = f"{self._consumer}-{uuid.uuid4().hex}"
        outputs = self._queues[request_id] = asyncio.Queue()
        loops = params.max_loops or (self.model.max_loops if self.model is not None else 1)
        self.unreported += params.n * params.max_tokens * loops
        running = params.n
        try:
            refusal = await answered(
                self._engine.submit(self._consumer, request_id, prompt, params, seed, tenant=tenant)
            )
            if refusal is not None:
                running = 0
                raise refusal.error()
            while running:
                output = await outputs.get()
                if isinstance(output, WorkerLostError):
                    running = 0
                    raise output
                running -= output.finish_reason is not None
                yield output
        finally:
            del self._queues[request_id]
            if running:
                # The caller may be cancelled: the abort must outlive it. The lease stands behind
                # it, should the call get lost.
                self._spawn(self._abort(request_id))

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        """End a choice whose text is complete; one that has ended is ignored.

        Should the call get lost, closing the generator of the request ends it too.
        """
        try:
            await answered(self._engine.finish(request_id, at_output_index, choice))
        except WorkerLostError:
            logger.warning("the end of %s got lost; it is aborted", request_id)

    async def _abort(self, request_id: str) -> None:
        try:
            await answered(self._engine.abort(request_id))
        except WorkerLostError:
            logger.warning("abort of %s got lost; its lease will end it", request_id)

    async def _pump(self) -> None:
        while True:
            reason = "its output stream ended"
            try:
                self.model = await answered(self._engine.model())
                async with aclosing(self._engine.outputs(self._consumer)) as frames:
                    async for frame in frames:
                        if not self._attached:
                            self._attached = True
                            self._spawn(self._renew_once())
                            self._changed()
                        self._route(frame)
            except Exception as error:  # the engine's process may end in any way
                reason = f"{type(error).__name__}: {error}"
            self._attached = False
            self._fail_all(f"the engine is gone ({reason.splitlines()[0]}); send it again")
            await asyncio.sleep(RECONNECT_DELAY)

    def _route(self, frame: list[RequestOutput]) -> None:
        for output in frame:
            queue = self._queues.get(output.key.request_id)
            if queue is not None:
                queue.put_nowait(output)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if self._attached:
                await self._renew_once()

    async def _renew_once(self) -> None:
        sent = self.unreported
        renewed = self._engine.renew(self._consumer, self.serving)
        try:
            load = await answered(renewed, 8 * self._interval)
        except WorkerLostError as error:
            logger.warning("lease renewal at %s failed: %s", self.name, error)
            return
        self.unreported = max(self.unreported - sent, 0)
        self._report = (_now(), load)
        self._changed()

    def _fail_all(self, reason: str) -> None:
        for queue in self._queues.values():
            queue.put_nowait(WorkerLostError(reason))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        # Ray Serve cancels what inherits a request's context; these outlive the request.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def answered(call: Awaitable[T], patience: float = CALL_TIMEOUT) -> T:
    """The engine's answer. Raises WorkerLostError when it gives none, whatever the cause."""
    try:
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that meets an answer.
        async with asyncio.timeout(patience):
            return await call
    except TimeoutError as error:
        raise WorkerLostError(f"the engine gave no answer within {patience:g} s") from error
    except Exception as error:  # the call crosses processes, and the other one may end in any way
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise WorkerLostError(f"the engine is gone ({reason[-1]}); try again") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
