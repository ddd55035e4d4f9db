"""EngineClient: an ingress's side of all engines; each request goes to one, and stays there."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from cluster.engine_link import CALL_TIMEOUT, EngineLink
from cluster.engine_load import least_loaded
from cluster.generation import resolve_seed
from protocol.errors import DrainingError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from cluster.engine_link import EngineHandle
    from protocol.profile import ModelProfile
    from protocol.sampling import SamplingParams
    from scheduler.output import RequestOutput

logger = logging.getLogger(__name__)

WATCH_INTERVAL = 0.5
"""Seconds between two looks at which engines there are."""
ATTEMPTS = 3
"""Engines that a request is sent to before its loss is told, while none has given an output."""


class EngineDirectory(Protocol):
    """Which engines there are. Owner: EngineClient, which asks again and again."""

    async def engines(self) -> Mapping[str, EngineHandle]:
        """The engines that run now, by a name that no other engine ever has."""


class EngineClient:
    """Owner: one ingress. Mutated only by: its methods and its watch, on the ingress's event loop.

    One EngineLink an engine. Engines come and go: a new one gets a link when the directory names
    it, one that is gone loses it, and one that drains gets no new requests.
    """

    def __init__(self, directory: EngineDirectory, lease: float) -> None:
        self._directory = directory
        self._lease = lease
        self._name = f"ingress-{uuid.uuid4().hex[:12]}"
        self._links: dict[str, EngineLink] = {}
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to look for engines."""
        # Ray Serve cancels what inherits a request's context; this outlives the request.
        self._watch = asyncio.get_running_loop().create_task(
            self._follow(), context=contextvars.Context()
        )

    async def close(self) -> None:
        """Leave every engine; requests still open end with WorkerLostError. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close("the ingress shuts down") for link in links))

    @property
    def serving(self) -> tuple[str, ...]:
        """The requests that are open, on any engine."""
        return tuple(request for link in self._links.values() for request in link.serving)

    @property
    def links(self) -> tuple[EngineLink, ...]:
        """The engines that are known, attached or not."""
        return tuple(self._links.values())

    def trouble(self) -> str | None:
        """Why no engine could run a request now; None when one could."""
        ready = [link for link in self._links.values() if link.takes_requests]
        if not ready:
            return "no engine is ready; try again"
        loads = [link.load for link in ready]
        if all(load is None for load in loads):
            return "no engine answers"
        if not any(load.workers for load in loads if load is not None):
            return "no worker is left"
        return None

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, tenant: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request of a tenant, all its choices; closing the generator early aborts it.

        It goes to the least loaded engine, to another when that one drains, for which it waits, or
        is lost before its first output, if there is one. Raises RequestError, CapacityError or
        OverloadedError before the first output when the engine does not take it, WorkerLostError
        when the engine itself is gone.
        """
        seed = resolve_seed(params.seed)
        tried: list[EngineLink] = []
        losses = 0
        while True:
            link = await self._choose(tried)
            tried.append(link)
            delivered = False
            try:
                async with aclosing(link.generate(prompt, params, seed, tenant=tenant)) as outputs:
                    async for output in outputs:
                        delivered = True
                        yield output
                return
            except WorkerLostError as error:
                if not isinstance(error, DrainingError):
                    losses += 1
                    if delivered or losses == ATTEMPTS or not self._candidates(tried):
                        raise
                logger.info("a request leaves %s before its first output: %s", link.name, error)

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        """End a choice whose text is complete; one that is not open is ignored."""
        for link in self._links.values():
            if request_id in link.serving:
                await link.finish(request_id, at_output_index, choice)
                return

    async def model(self, patience: float) -> ModelProfile:
        """The model that the engines serve, once one is up, at most `patience` seconds from now.

        Raises WorkerLostError when none is by then.
        """
        link = await self._choose([], patience)
        assert link.model is not None  # a link attaches after it has asked
        return link.model

    async def _choose(self, tried: list[EngineLink], patience: float = CALL_TIMEOUT) -> EngineLink:
        try:
            async with asyncio.timeout(patience):
                while (link := least_loaded(self._candidates(tried))) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return link
        except TimeoutError as error:
            raise WorkerLostError("no engine is ready; try again") from error

    def _candidates(self, tried: list[EngineLink]) -> list[EngineLink]:
        links = self._links.values()
        return [link for link in links if link.takes_requests and link not in tried]

    async def _follow(self) -> None:
        while True:
            try:
                # Not asyncio.wait_for, as in cluster/engine_link.py.
                async with asyncio.timeout(CALL_TIMEOUT):
                    engines = await self._directory.engines()
            except Exception as error:  # the directory is asked across processes
                logger.warning("cannot look for engines: %s: %s", type(error).__name__, error)
            else:
                await self._meet(engines)
            await asyncio.sleep(WATCH_INTERVAL)

    async def _meet(self, engines: Mapping[str, EngineHandle]) -> None:
        for name, engine in engines.items():
            if name not in self._links:
                link = EngineLink(name, engine, self._name, self._lease, self._changed.set)
                self._links[name] = link
                link.start()
        # A stream that stands says more than a list that lacks its engine.
        gone = [link for link in self.links if link.name not in engines and not link.attached]
        for link in gone:
            del self._links[link.name]
            await link.close("the engine is gone; send it again")
