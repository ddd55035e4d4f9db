"""EngineClient: an ingress's side of one engine: one output stream, many requests."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from cluster.generation import resolve_seed
from protocol.errors import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Collection, Coroutine

    from cluster.scheduler_actor import Refusal
    from protocol.profile import ModelProfile
    from protocol.sampling import SamplingParams
    from scheduler.output import RequestOutput
    from scheduler.stats import EngineStats

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT = 10.0
RECONNECT_DELAY = 0.5


class EngineHandle(Protocol):
    """A SchedulerActor, here or behind a Ray Serve handle; see there."""

    async def model(self) -> ModelProfile: ...

    async def stats(self) -> EngineStats: ...

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

    async def renew(self, consumer: str, serving: Collection[str]) -> None: ...

    def outputs(self, consumer: str) -> AsyncGenerator[list[RequestOutput], None]: ...


class EngineClient:
    """Owner: one ingress. Mutated only by: its methods and pumps, on the ingress's event loop."""

    def __init__(self, engine: EngineHandle, lease: float) -> None:
        self._engine = engine
        self._lease = lease
        self._name = f"ingress-{uuid.uuid4().hex[:12]}"
        self._queues: dict[str, asyncio.Queue[RequestOutput | WorkerLostError]] = {}
        self._attached = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the pumps: outputs in, lease renewals out."""
        self._spawn(self._pump())
        self._spawn(self._renew())

    async def close(self) -> None:
        """Stop the pumps; requests still open end with WorkerLostError."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all("the ingress shuts down")

    @property
    def serving(self) -> tuple[str, ...]:
        """The requests that are open."""
        return tuple(self._queues)

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, tenant: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request of a tenant, all its choices; closing the generator early aborts it.

        Raises RequestError, CapacityError or OverloadedError before the first output when the
        engine does not take it, WorkerLostError when the engine itself is gone.
        """
        try:
            await asyncio.wait_for(self._attached.wait(), CALL_TIMEOUT)
        except TimeoutError as error:
            raise WorkerLostError("the engine is not ready; try again") from error
        request_id = f"{self._name}-{uuid.uuid4().hex}"
        outputs = self._queues[request_id] = asyncio.Queue()
        running = params.n
        try:
            refusal = await answered(
                self._engine.submit(
                    self._name,
                    request_id,
                    prompt,
                    params,
                    resolve_seed(params.seed),
                    tenant=tenant,
                )
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

    async def model(self, patience: float) -> ModelProfile:
        """The model that the engine serves, once it is up, at most `patience` seconds from now."""
        return await answered(self._engine.model(), patience)

    async def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        return await answered(self._engine.stats())

    async def _abort(self, request_id: str) -> None:
        try:
            await answered(self._engine.abort(request_id))
        except WorkerLostError:
            logger.warning("abort of %s got lost; its lease will end it", request_id)

    async def _pump(self) -> None:
        while True:
            reason = "its output stream ended"
            try:
                async with aclosing(self._engine.outputs(self._name)) as frames:
                    async for frame in frames:
                        self._attached.set()
                        self._route(frame)
            except Exception as error:  # the engine's process may end in any way
                reason = f"{type(error).__name__}: {error}"
            self._attached.clear()
            self._fail_all(f"the engine is gone ({reason.splitlines()[0]}); send it again")
            await asyncio.sleep(RECONNECT_DELAY)

    def _route(self, frame: list[RequestOutput]) -> None:
        for output in frame:
            queue = self._queues.get(output.key.request_id)
            if queue is not None:
                queue.put_nowait(output)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 4)
            try:
                await answered(self._engine.renew(self._name, self.serving), self._lease / 4)
            except WorkerLostError as error:
                logger.warning("lease renewal failed: %s", error)

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
        return await asyncio.wait_for(call, patience)
    except TimeoutError as error:
        raise WorkerLostError(f"the engine gave no answer within {patience:g} s") from error
    except Exception as error:  # the call crosses processes, and the other one may end in any way
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise WorkerLostError(f"the engine is gone ({reason[-1]}); try again") from error
