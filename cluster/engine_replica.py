"""The engine under Ray Serve: a replica that hosts an actor, and the actor that is the engine.

Ingresses call the actor, not the replica (docs/decisions/0029): Serve picks a replica by itself
for each call, forgets a replica that drains, and a request's calls must reach its own engine.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.engine_directory import NAMESPACE, RayEngine, engine_name, engine_names, is_engine_name
from cluster.metrics import EngineMetrics, start_reports
from cluster.placement_group import list_places, remove_places
from cluster.scheduler_actor import SchedulerActor
from protocol.config import Configuration
from protocol.errors import LoopmeshError, WorkerLostError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from cluster.engine_load import EngineLoad
    from scheduler.stats import EngineStats

logger = logging.getLogger(__name__)

CALL_TIMEOUT = 10.0
MAX_CALLS = 10_000
"""Calls and streams that an engine's actor serves at once; its own limits are far below."""


class EngineActor(SchedulerActor):
    """SchedulerActor as a Ray actor, which exports its metrics while it is open."""

    def __init__(self, configuration: str, name: str) -> None:
        settings = Configuration.model_validate_json(configuration)
        super().__init__(settings, name=name)
        self._metrics = EngineMetrics(settings.model_name, settings.cluster.num_workers)
        self._interval = settings.cluster.metrics_interval
        self._reports: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """See SchedulerActor."""
        await super().open()
        self._reports = start_reports(self, self._metrics.update, self._interval)

    async def close(self) -> None:
        """See SchedulerActor."""
        if self._reports is not None:
            self._reports.cancel()
        await super().close()


class Engine:
    """One engine replica: keeps one EngineActor, reports its load, drains it when Serve scales.

    Owner: Ray Serve. Mutated only by: its methods, on the replica's event loop.
    """

    async def __init__(self, configuration: str) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = Configuration.model_validate_json(configuration)
        context = serve.get_replica_context()
        self._name = engine_name(context.app_name, context.replica_tag)
        await asyncio.to_thread(remove_orphans)
        here = ray.get_runtime_context().get_node_id()
        remote: Any = ray.remote(EngineActor)
        self._actor = remote.options(
            name=self._name,
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        ).remote(configuration, self._name)
        self._engine = RayEngine(self._actor)
        self._healthy = True
        try:
            await self._actor.open.remote()
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (type(cause)(str(cause)) if isinstance(cause, LoopmeshError) else error) from None

    async def check_health(self) -> None:
        """Raise when the engine is gone, does not answer, or says that it cannot go on."""
        self._healthy = False
        try:
            await asyncio.wait_for(self._actor.check_health.remote(), CALL_TIMEOUT)
        except ray.exceptions.RayTaskError as error:
            raise WorkerLostError(str(error.cause)) from None
        self._healthy = True

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What cluster/autoscaling.py reads; nothing at all from an engine that does not answer."""
        try:
            load: EngineLoad = await asyncio.wait_for(self._actor.load.remote(), CALL_TIMEOUT)
        except (TimeoutError, ray.exceptions.RayError):
            return {}
        return {
            "loop_debt": float(load.debt),
            "loops_per_second": load.loops_per_second or 0.0,
            "loops_now": load.loops_now,
            "waiting": float(load.waiting),
            "free_kv": load.free_kv,
        }

    async def stats(self) -> EngineStats:
        """The engine's own counters."""
        return await self._engine.stats()

    async def worker_pids(self) -> dict[str, int]:
        """The process id of each lane's worker."""
        pids: dict[str, int] = await self._actor.worker_pids.remote()
        return pids

    async def __del__(self) -> None:
        actor = getattr(self, "_actor", None)
        if actor is None:
            return
        # Who waits for one that cannot go on waits in vain, and so does the one in its place.
        settings = self._settings.cluster
        patience = settings.drain_timeout if self._healthy else 0.0
        await end_engine(actor, patience, settings.shutdown_timeout)
        # An engine that died could not give its places back.
        await asyncio.to_thread(remove_orphans, self._name)


async def end_engine(actor: ActorHandle[Any], patience: float, shutdown: float) -> None:
    """Drain an engine for `patience` seconds, close it within twice `shutdown`, and end its actor.

    Its actor ends whatever it answers, or if it never does.
    """
    try:
        await asyncio.wait_for(actor.drain.remote(patience), patience + 2 * shutdown)
    except (TimeoutError, ray.exceptions.RayError) as error:
        logger.warning("an engine did not end by itself: %s", type(error).__name__)
    ray.kill(actor)


def remove_orphans(dead: str = "") -> None:
    """Give back the places of engines that died, and of `dead`; those of batch jobs are theirs."""
    places = [place for place in list_places() if is_engine_name(place.engine)]
    # Asked for second: who has a place has had a name before.
    alive = {*engine_names()} - {dead}
    remove_places([place for place in places if place.engine not in alive])
