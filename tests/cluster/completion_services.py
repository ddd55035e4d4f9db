"""Services behind the HTTP endpoint for tests, and a real server around one."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from cluster.drivers import AsyncDriver
from cluster.http_api import build_app
from cluster.tokenizer import load_tokenizer
from protocol.config import ApiSettings, ModelSettings, SchedulerSettings, WorkerSettings
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from scheduler.engine import Engine
from scheduler.output import RequestOutput
from worker.local_executor import LocalExecutor
from worker.models.registry import resolve_model

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Coroutine,
        Iterator,
        Sequence,
    )

    from protocol.executor import Executor
    from protocol.sampling import SamplingParams

TOKENIZER = load_tokenizer(resolve_model(ModelSettings()))
WAIT = 60.0
"""Seconds after which a test that waits for something fails."""


def output(
    start: int,
    tokens: Sequence[int] = (),
    finish: FinishReason | None = None,
    error: str | None = None,
    choice: int = 0,
) -> RequestOutput:
    """An output whose tokens left after 4, 2, 2, ... loops."""
    depths = tuple(4 if start + i == 0 else 2 for i in range(len(tokens)))
    key = RequestKey("r", 1 + choice)
    return RequestOutput(key, start, tuple(tokens), depths, finish, error, choice=choice)


class PlayedService:
    """Plays outputs, raises the exceptions among them, and then waits for `go_on`.

    Owner: one test. Mutated only by: it and its own generators.
    """

    model_name = "played"
    tokenizer = TOKENIZER
    max_loops = 4

    def __init__(self, *script: RequestOutput | Exception, **limits: Any) -> None:  # noqa: ANN401
        self.limits = ApiSettings(**limits)
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()
        self.closed = 0
        self.finished: list[tuple[str, int, int]] = []
        self.calls: list[tuple[list[int], SamplingParams]] = []
        self.tenants: list[str] = []
        self.reason: str | None = None
        self._script = script

    async def health(self) -> str | None:
        return self.reason

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, tenant: str
    ) -> AsyncGenerator[RequestOutput, None]:
        self.calls.append((prompt, params))
        self.tenants.append(tenant)
        try:
            for item in self._script:
                if isinstance(item, Exception):
                    raise item
                yield item
            self.started.set()
            await self.go_on.wait()
            yield output(len(self._script), (5,), FinishReason.LENGTH)
        finally:
            self.closed += 1

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        self.finished.append((request_id, at_output_index, choice))


class EngineService:
    """An engine in this process, as a service. Owner: one test. Lives on one event loop."""

    model_name = "ouro-tiny"
    tokenizer = TOKENIZER
    max_loops = 4

    def __init__(self, executor: Executor, **limits: Any) -> None:  # noqa: ANN401
        self.limits = ApiSettings(**limits)
        self.engine = Engine(SchedulerSettings())
        self.driver = AsyncDriver(self.engine, {"lane-0": executor}, WAIT, self._deliver)
        self.admitted = asyncio.Event()
        self.aborted = asyncio.Event()
        self._queues: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._ids = itertools.count()

    async def health(self) -> str | None:
        return self.driver.progress.error

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, tenant: str
    ) -> AsyncGenerator[RequestOutput, None]:
        request_id = str(next(self._ids))
        queue: asyncio.Queue[RequestOutput] = asyncio.Queue()
        assert params.seed is not None
        self.driver.add(request_id, prompt, params, params.seed, tenant=tenant)
        self._queues[request_id] = queue
        self.admitted.set()
        running = params.n
        try:
            while running:
                item = await queue.get()
                running -= item.finish_reason is not None
                yield item
        finally:
            if running:
                self.driver.abort(request_id)
                self.aborted.set()
            del self._queues[request_id]

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        self.driver.finish(request_id, at_output_index, choice)

    async def rest(self) -> None:
        """Return once the engine has nothing left to do."""
        async with asyncio.timeout(WAIT):
            while self.engine.has_work():  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for item in outputs:
            self._queues[item.key.request_id].put_nowait(item)


@asynccontextmanager
async def engine_service(**limits: Any) -> AsyncIterator[EngineService]:  # noqa: ANN401
    """A service over the shipped model; afterwards every block must be back."""
    executor = await asyncio.to_thread(LocalExecutor.open, WorkerSettings(device="cpu"))
    service = EngineService(executor, **limits)
    service.driver.start()
    try:
        yield service
        await service.rest()
        stats = service.engine.stats()
        assert (stats.waiting, stats.running, stats.releasing) == (0, 0, 0)
        assert stats.free_blocks == stats.total_blocks
    finally:
        await service.driver.close(WAIT)


class RunningServer:
    """A real HTTP server in a thread. Owner: `running_server`."""

    def __init__(self, port: int, service: EngineService, loop: asyncio.AbstractEventLoop) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.service = service
        self._loop = loop

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        """Run a coroutine on the server's loop and return what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT)


@contextmanager
def running_server(**limits: Any) -> Iterator[RunningServer]:  # noqa: ANN401
    """The endpoint over the shipped model, on a free port of this machine."""
    ready: list[RunningServer] = []
    failures: list[BaseException] = []
    started, stop = threading.Event(), threading.Event()

    async def serve(listener: socket.socket) -> None:
        async with engine_service(**limits) as service:
            config = uvicorn.Config(build_app(service), lifespan="off", log_level="error")
            server = uvicorn.Server(config)
            port = listener.getsockname()[1]
            ready.append(RunningServer(port, service, asyncio.get_running_loop()))
            started.set()
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await asyncio.wait_for(serving, WAIT)

    def run(listener: socket.socket) -> None:
        try:
            asyncio.run(serve(listener))
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, args=(listener,))
        thread.start()
        try:
            assert started.wait(WAIT)
            if ready:
                yield ready[0]
        finally:
            stop.set()
            thread.join(WAIT)
    if failures:
        raise failures[0]
