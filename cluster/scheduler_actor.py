"""SchedulerActor: the engine, its workers and the consumers of its outputs, on one event loop.

A plain class: a Ray Serve replica, a bare Ray actor and tests host the same one. Consumers are
ingress replicas; each holds one output stream, renews its lease, and names the requests that it
still serves. What nobody serves any more is aborted.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.drivers import AsyncDriver
from cluster.engine_load import EngineLoad, LoopRate, load_of
from cluster.output_stream import OutputStream
from cluster.workers import open_workers
from protocol import errors
from protocol.errors import DrainingError, ExecutorClosedError, LoopmeshError, WorkerLostError
from scheduler.engine import Engine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from cluster.workers import ExecutorKind, Workers
    from protocol.config import Configuration
    from protocol.profile import ModelProfile
    from protocol.sampling import SamplingParams
    from scheduler.output import RequestOutput
    from scheduler.stats import EngineStats

logger = logging.getLogger(__name__)

NO_WORKER = "no worker is left; the engine is started anew"
RATE_INTERVAL = 0.5
"""Seconds between two measurements of the engine's rate of loops."""
POLL_INTERVAL = 0.05
READ_TIMEOUT = 2.0
"""Seconds that consumers of a closed engine may take to read their last outputs."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not taken; crosses process borders as plain text, without a traceback."""

    kind: str
    message: str

    def error(self) -> LoopmeshError:
        """The exception it stands for."""
        cls = getattr(errors, self.kind, None)
        if isinstance(cls, type) and issubclass(cls, LoopmeshError):
            return cls(self.message)
        return LoopmeshError(self.message)


@dataclass(slots=True)
class _Consumer:
    """One ingress. Owner: SchedulerActor, which alone mutates it.

    `requests` has the time at which each came.
    """

    stream: OutputStream
    seen: float
    requests: dict[str, float] = field(default_factory=dict)


class SchedulerActor:
    """Owner: its host. Mutated only by: its methods, all on one event loop.

    `name` is what its workers' places in the cluster are called by.
    """

    def __init__(
        self, configuration: Configuration, executor: ExecutorKind = "ray", *, name: str = ""
    ) -> None:
        self._configuration = configuration
        self._name = name
        self._executor = executor
        self._engine = Engine(configuration.scheduler)
        self._consumers: dict[str, _Consumer] = {}
        self._consumer_of: dict[str, str] = {}
        self._open_choices: dict[str, int] = {}
        self._workers: Workers | None = None
        self._driver: AsyncDriver | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = self._draining = False
        self._readers = 0
        self._rate = LoopRate()
        self._model: ModelProfile | None = None
        self._last_result = self._moved = 0.0

    async def open(self) -> None:
        """Start the workers and the driver.

        Raises what open_workers raises, ExecutorClosedError when it was closed meanwhile.
        """
        settings = self._configuration.cluster
        # Starting workers blocks for seconds, and Ray forbids blocking its actors' event loop.
        opening = asyncio.get_running_loop().run_in_executor(
            None,
            open_workers,
            self._configuration,
            self._executor,
            settings.num_workers,
            self._name,
        )
        try:
            workers = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        if self._closed:
            await asyncio.to_thread(workers.close)
            raise ExecutorClosedError("the engine was closed while it started")
        self._workers = workers
        self._model = next(iter(self._workers.executors.values())).profile().model
        self._driver = AsyncDriver(
            self._engine, self._workers.executors, settings.plan_timeout, self._deliver
        )
        self._driver.start()
        # A task inherits the context of the request that starts it and is cancelled with it;
        # these belong to the actor.
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(work, context=contextvars.Context())
            for work in (self._reap(), self._measure())
        ]

    async def close(self) -> None:
        """End every request, then the workers; idempotent, safe half-opened."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if self._driver is not None:
            await self._driver.close(self._configuration.cluster.shutdown_timeout)
            self._driver = None
        if self._workers is not None:
            await asyncio.to_thread(self._workers.close)
            self._workers = None
        self._end_streams()

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - a deadline, not a cancellation
        """Take no more requests, let those there are end, at most `timeout` seconds, then close.

        Returns once consumers have read their last outputs, or READ_TIMEOUT later.
        """
        self._draining = True
        await self._until(lambda: not self._engine.has_work(), timeout)
        await self.close()
        await self._until(lambda: not self._readers, READ_TIMEOUT)

    async def _until(self, holds: Callable[[], bool], timeout: float) -> None:  # noqa: ASYNC109
        deadline = self._now() + timeout
        while not holds() and self._now() < deadline:  # noqa: ASYNC110 (nobody has an event for it)
            await asyncio.sleep(POLL_INTERVAL)

    async def check_health(self) -> None:
        """Raise WorkerLostError when the driver stands still or no worker is left.

        Streams end then, so that ingresses look for the engine that takes this one's place.
        """
        reason = self._trouble()
        if reason is not None:
            self._end_streams()
            raise WorkerLostError(reason)

    def _trouble(self) -> str | None:
        if self._driver is None:
            return "the engine is not open"
        progress = self._driver.progress
        if progress.error is not None:
            return progress.error
        if not progress.outstanding or progress.last_result != self._last_result:
            self._last_result, self._moved = progress.last_result, self._now()
        # A plan that takes longer than plan_timeout costs its lane, which is progress too.
        elif self._now() - self._moved > 2 * self._configuration.cluster.plan_timeout:
            return f"no result since {self._now() - self._moved:.0f} s"
        return None if self._engine.lanes else NO_WORKER

    async def model(self) -> ModelProfile:
        """The model that the workers serve. Raises WorkerLostError before they have started."""
        if self._model is None:
            raise WorkerLostError("the engine is not open yet; try again")
        return self._model

    async def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        return self._engine.stats()

    async def load(self) -> EngineLoad:
        """How busy the engine is."""
        ends = self._draining or self._closed
        queued = self._engine.queued_debt()
        return load_of(self._engine.stats(), queued, self._rate, draining=ends)

    async def worker_pids(self) -> dict[str, int]:
        """The process id of each lane's worker."""
        return dict(self._workers.pids) if self._workers is not None else {}

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
        """Take a request whose outputs go to `consumer`; a Refusal says why it was not taken."""
        try:
            if self._draining:
                raise DrainingError("the engine is shutting down; try again")
            holder = self._consumers.get(consumer)
            if holder is None or self._driver is None:
                raise WorkerLostError("the engine has just started and is not ready; try again")
            self._driver.add(request_id, prompt, params, seed, tenant=tenant)
        except LoopmeshError as error:
            return Refusal(type(error).__name__, str(error))
        holder.requests[request_id] = self._now()
        self._consumer_of[request_id] = consumer
        self._open_choices[request_id] = params.n
        return None

    async def abort(self, request_id: str) -> None:
        """End a request that nobody waits for; an unknown one is ignored."""
        if self._driver is not None:
            self._driver.abort(request_id)

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        """End a choice whose text is complete after one of its outputs; see Engine.finish."""
        if self._driver is not None:
            self._driver.finish(request_id, at_output_index, choice)

    async def renew(self, consumer: str, serving: Collection[str]) -> EngineLoad:
        """Prolong a consumer's lease; its requests that are not in `serving` are aborted.

        A request younger than half a lease is left alone: its submit may have overtaken this call.
        The answer is the engine's load, by which consumers choose among engines.
        """
        holder = self._consumers.get(consumer)
        if holder is not None:
            await self._keep(holder, serving)
        return await self.load()

    async def _keep(self, holder: _Consumer, serving: Collection[str]) -> None:
        now = holder.seen = self._now()
        young = self._configuration.api.consumer_lease / 2
        for request_id, since in list(holder.requests.items()):
            if request_id not in serving and now - since > young:
                logger.info("aborting %s: its ingress serves it no more", request_id)
                await self.abort(request_id)

    async def outputs(self, consumer: str) -> AsyncGenerator[list[RequestOutput], None]:
        """The consumer's output stream; the first, empty frame says that it stands.

        A consumer that opens one anew has told its clients that the requests of the last one
        failed: they are aborted, as are those of one that closes it. Ends when no more output can
        come. Raises WorkerLostError from an engine without a worker.
        """
        if not self._engine.lanes:
            raise WorkerLostError(NO_WORKER)
        await self._drop(consumer)
        stream = OutputStream()
        holder = self._consumers[consumer] = _Consumer(stream, self._now())
        self._readers += 1
        try:
            yield []
            while frame := await stream.take():
                yield frame
        finally:
            self._readers -= 1
            if self._consumers.get(consumer) is holder:
                await self._drop(consumer)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            request_id = output.key.request_id
            holder = self._consumers.get(self._consumer_of.get(request_id, ""))
            if holder is not None:
                holder.stream.put(output)
            if output.finish_reason is not None and request_id in self._open_choices:
                self._open_choices[request_id] -= 1
                if not self._open_choices[request_id]:
                    self._forget(request_id, holder)

    def _forget(self, request_id: str, holder: _Consumer | None) -> None:
        """All choices of a request have ended."""
        del self._open_choices[request_id], self._consumer_of[request_id]
        if holder is not None:
            del holder.requests[request_id]

    async def _reap(self) -> None:
        """Abort the requests of consumers whose lease ran out: a lost cancel, a dead ingress."""
        lease = self._configuration.api.consumer_lease
        while True:
            await asyncio.sleep(lease / 4)
            for name, holder in list(self._consumers.items()):
                if self._now() - holder.seen > lease:
                    logger.info("ingress %s is gone", name)
                    await self._drop(name)

    async def _measure(self) -> None:
        """Measure how many loops a second the engine runs."""
        while True:
            stats = self._engine.stats()
            full = bool(stats.waiting) or not any(lane.free_slots for lane in stats.lanes)
            self._rate.sample(self._now(), stats.loops, full=full)
            await asyncio.sleep(RATE_INTERVAL)

    async def _drop(self, consumer: str) -> None:
        """Forget a consumer: its requests are aborted, its stream ends."""
        holder = self._consumers.get(consumer)
        if holder is not None:
            for request_id in list(holder.requests):
                await self.abort(request_id)
            holder.stream.end()
            del self._consumers[consumer]

    def _end_streams(self) -> None:
        for holder in self._consumers.values():
            holder.stream.end()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _close_opened(opening: asyncio.Future[Workers]) -> None:
    """Close workers that came up after whoever wanted them had gone."""
    if opening.exception() is None:
        opening.result().close()
