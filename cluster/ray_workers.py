"""Workers on Ray: placed, started, connected, and taken down together."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement_group import await_place, reserve_place
from cluster.ray_executor import RayExecutor
from cluster.ray_session import connect_ray
from cluster.worker_actor import WorkerActor, new_secret
from protocol.errors import DeadlineError, LoopmeshError, WorkerLostError

if TYPE_CHECKING:
    from types import TracebackType

    from ray.actor import ActorClass, ActorHandle
    from ray.util.placement_group import PlacementGroup

    from protocol.config import Configuration

logger = logging.getLogger(__name__)

REMOVE_TIMEOUT = 10.0


@dataclass(slots=True)
class _Placed:
    """One worker's place and process. Owner: RayWorkers."""

    lane: str
    place: PlacementGroup
    secret: str
    actor: ActorHandle[Any] | None = None
    pid: int | None = None


class RayWorkers:
    """Workers of one engine. Owner: whoever opened them. Mutated only by: open and close.

    `executors` maps lane names to connected executors. Closing shuts the executors down, ends the
    actors and removes their placement groups, and ends Ray too where open started it.
    """

    def __init__(self, configuration: Configuration, engine: str, *, owns_ray: bool) -> None:
        self._configuration = configuration
        self._engine = engine
        self._owns_ray = owns_ray
        self._placed: list[_Placed] = []
        self.executors: dict[str, RayExecutor] = {}

    @classmethod
    def open(cls, configuration: Configuration, count: int, engine: str = "") -> Self:
        """Place and start `count` workers at once and open epoch 1 of each.

        `engine` names whom they work for in the cluster; without it a fresh name does.

        Uses the Ray this process is connected to; else the cluster that RAY_ADDRESS names, or one
        of its own that ends with close. Raises ConfigError, ModelError, StartError, DeadlineError
        or WorkerLostError; whatever was started by then is taken down.
        """
        # Several engines may share a cluster.
        name = engine or uuid.uuid4().hex[:8]
        workers = cls(configuration, name, owns_ray=connect_ray())
        try:
            workers._start(count)
        except BaseException:
            workers.close()
            raise
        return workers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each lane's worker."""
        return {item.lane: item.pid for item in self._placed if item.pid is not None}

    def close(self) -> None:
        """Take everything down; idempotent, and complete even where a worker is already gone."""
        for executor in self.executors.values():
            executor.shutdown(self._configuration.cluster.shutdown_timeout)
        self.executors.clear()
        for item in self._placed:
            if item.actor is not None:
                ray.kill(item.actor)
            remove_placement_group(item.place)
        self._await_removal()
        self._placed.clear()
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()

    def _start(self, count: int) -> None:
        settings = self._configuration.cluster
        for index in range(count):
            lane = f"lane-{index}"
            place = reserve_place(settings, self._engine, lane)
            self._placed.append(_Placed(lane, place, new_secret()))
        for item in self._placed:
            await_place(item.place, settings)
        starting: list[Any] = []
        for item in self._placed:
            item.actor = self._create(item)
            starting.append(item.actor.start.remote(None))
        for item, started in zip(self._placed, starting, strict=True):
            host, port, item.pid = self._await_start(started)
            self.executors[item.lane] = RayExecutor.connect(
                f"{host}:{port}", item.secret, 1, settings, settings.start_timeout
            )

    def _create(self, item: _Placed) -> ActorHandle[Any]:
        settings = self._configuration.cluster
        remote: ActorClass[WorkerActor] = ray.remote(WorkerActor).options(
            num_cpus=settings.num_cpus,
            num_gpus=settings.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=item.place),
        )
        worker = self._configuration.worker.model_dump_json()
        actor = remote.remote(worker, settings.model_dump_json(), item.secret)
        # Methods of a plain class have no `.remote` for a type checker; Ray adds it.
        return cast("ActorHandle[Any]", actor)

    def _await_start(self, started: Any) -> tuple[str, int, int]:  # noqa: ANN401 (an ObjectRef)
        timeout = self._configuration.cluster.start_timeout
        try:
            answer: tuple[str, int, int] = ray.get(started, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"a worker did not start within {timeout:g} s") from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LoopmeshError):
                raise type(cause)(str(cause)) from error
            raise WorkerLostError(f"a worker failed to start: {cause!r}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerLostError(f"a worker died while starting: {error}") from error
        return answer

    def _await_removal(self) -> None:
        """Wait, bounded, until Ray has really removed the places: the next engine may need them."""
        deadline = time.monotonic() + REMOVE_TIMEOUT
        for item in self._placed:
            for _ in itertools.count():
                state = ray.util.placement_group_table(item.place).get("state")
                if state in (None, "REMOVED"):
                    break
                if time.monotonic() > deadline:
                    logger.warning("placement group of %s is still %s", item.lane, state)
                    break
                time.sleep(0.02)
