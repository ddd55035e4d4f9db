"""Engines as named Ray actors: where an ingress or a person finds them, and how they are called."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    from ray.actor import ActorHandle

    from cluster.engine_load import EngineLoad
    from cluster.scheduler_actor import Refusal
    from protocol.profile import ModelProfile
    from protocol.sampling import SamplingParams
    from scheduler.output import RequestOutput
    from scheduler.stats import EngineStats

NAMESPACE = "loopmesh"
"""Ray's namespace of all engines."""


def engine_name(application: str, replica: str) -> str:
    """The name of the engine that a replica of an application hosts; no other ever has it."""
    return f"{application}#{replica}"


def is_engine_name(name: str) -> bool:
    """Whether a name is one of engine_name's."""
    return "#" in name


def engine_names(application: str | None = None) -> list[str]:
    """The engines that run now, of one Serve application or of all; one call to Ray."""
    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    names = sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    return [name for name in names if application in (None, name.rpartition("#")[0])]


def engine_actor(name: str) -> ActorHandle[Any]:
    """The actor of a name. Raises ValueError when it is gone."""
    return ray.get_actor(name, namespace=NAMESPACE)


class RayEngine:
    """An engine behind its actor handle; the methods are SchedulerActor's."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor = actor

    async def model(self) -> ModelProfile:
        profile: ModelProfile = await self._actor.model.remote()
        return profile

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._actor.stats.remote()
        return stats

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
        refusal: Refusal | None = await self._actor.submit.remote(
            consumer, request_id, prompt, params, seed, tenant=tenant
        )
        return refusal

    async def abort(self, request_id: str) -> None:
        await self._actor.abort.remote(request_id)

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        await self._actor.finish.remote(request_id, at_output_index, choice)

    async def renew(self, consumer: str, serving: Collection[str]) -> EngineLoad:
        load: EngineLoad = await self._actor.renew.remote(consumer, serving)
        return load

    async def outputs(self, consumer: str) -> AsyncGenerator[list[RequestOutput], None]:
        frames: Any = self._actor.outputs.options(num_returns="streaming").remote(consumer)
        try:
            async for frame in frames:
                yield await frame
        finally:
            # Else the engine's end stays open until the lease runs out.
            ray.cancel(frames)


class RayDirectory:
    """The engines of one Serve application. Owner: an ingress. Mutated only by: engines."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._known: dict[str, RayEngine] = {}

    async def engines(self) -> dict[str, RayEngine]:
        """See EngineDirectory."""
        # Both calls block for a moment, and Ray forbids blocking its actors' event loop.
        names = await asyncio.to_thread(engine_names, self._application)
        self._known = {name: self._known[name] for name in names if name in self._known}
        for name in names:
            if name not in self._known:
                try:
                    actor = await asyncio.to_thread(engine_actor, name)
                except ValueError:  # it went between the two calls
                    continue
                self._known[name] = RayEngine(actor)
        return dict(self._known)
