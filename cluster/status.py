"""loopmesh status: engines, lanes and what they owe, and workers that wait for a place and why."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.engine_directory import engine_actor, engine_names
from cluster.placement_group import list_places, shortage
from cluster.ports import connect_problem
from cluster.ray_session import ray_session
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cluster.engine_load import EngineLoad
    from cluster.placement_group import Place
    from scheduler.stats import EngineStats, LaneStats

ANSWER_TIMEOUT = 5.0
RESOURCES = ("CPU", "GPU")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine; `stats` and `load` are None when it does not answer, and `problem` says why."""

    name: str
    stats: EngineStats | None
    load: EngineLoad | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class WaitingWorker:
    """A worker that waits for a place, since when in seconds, and what it waits for."""

    place: Place
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What there is. `total` and `free` have the amount of each resource.

    `applications` names the state of each Serve application and its deployments' replicas.
    """

    nodes: int
    total: Mapping[str, float]
    free: Mapping[str, float]
    applications: tuple[str, ...]
    engines: tuple[EngineStatus, ...]
    waiting: tuple[WaitingWorker, ...]


@contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """Connected to a cluster that runs, while the block does; none is started.

    Raises ConfigError when nobody answers at `address`, StartError when Ray knows of none ("auto").
    """
    if address != "auto" and not ray.is_initialized():
        problem = connect_problem(address)  # Ray itself would wait for minutes
        if problem is not None:
            raise ConfigError(f"no cluster answers at {address} ({problem}): give its --address")
    with ray_session(address=address):
        yield


def read_status(now: float) -> ClusterStatus:
    """Ask the cluster that this process is connected to; `now` is the wall clock, in seconds."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return ClusterStatus(
        nodes=sum(bool(node["Alive"]) for node in ray.nodes()),  # type: ignore[no-untyped-call]
        total={name: total.get(name, 0.0) for name in RESOURCES},
        free={name: free.get(name, 0.0) for name in RESOURCES},
        applications=_applications(),
        engines=tuple(map(_ask, engine_names())),
        waiting=tuple(
            WaitingWorker(
                place,
                max(now - place.asked, 0.0),
                shortage(place.bundle, infeasible=place.infeasible),
            )
            for place in list_places()
            if place.waits
        ),
    )


def render(status: ClusterStatus) -> str:
    """The status as lines for a person."""
    amounts = ", ".join(
        f"{status.free[name]:g} of {status.total[name]:g} {name} free" for name in RESOURCES
    )
    lines = [f"cluster: {status.nodes} nodes, {amounts}", *status.applications]
    for engine in status.engines:
        lines.append(_engine_line(engine))
        if engine.stats is not None:
            lines += map(_lane_line, engine.stats.lanes)
    if not status.engines:
        lines.append("no engine of an endpoint runs")
    lines += [
        f"WAITING {item.seconds:.0f} s: {item.place.lane} of engine {item.place.engine}: "
        f"{item.reason}"
        for item in status.waiting
    ]
    if not status.waiting:
        lines.append("no worker waits for a place")
    return "\n".join(lines)


def _engine_line(engine: EngineStatus) -> str:
    stats, load = engine.stats, engine.load
    if stats is None or load is None:
        return f"engine {engine.name}: {engine.problem}"
    if not stats.lanes:
        return f"engine {engine.name}: starting, no lane yet"
    rate = load.loops_per_second
    seconds = f"{load.debt / rate:.1f} s at {rate:.0f} a second" if rate else "rate not known yet"
    return (
        f"engine {engine.name}: {stats.running} running, {stats.waiting} waiting, owes "
        f"{load.debt} loops ({seconds}), {100 * load.free_kv:.0f} % of KV free"
        + (", draining" if load.draining else "")
    )


def _lane_line(lane: LaneStats) -> str:
    return (
        f"  {lane.name}: epoch {lane.epoch}, {lane.running} running, {lane.free_slots} slots free, "
        f"owes {lane.load} loops, {lane.plans} plans, {lane.in_flight} in flight"
    )


def _ask(name: str) -> EngineStatus:
    try:
        actor = engine_actor(name)
        asked: list[Any] = [actor.stats.remote(), actor.load.remote()]
        stats, load = ray.get(asked, timeout=ANSWER_TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        return EngineStatus(name, None, None, f"does not answer within {ANSWER_TIMEOUT:g} s")
    except (ray.exceptions.RayError, ValueError) as error:
        return EngineStatus(name, None, None, f"is gone ({type(error).__name__})")
    return EngineStatus(name, stats, load)


def _applications() -> tuple[str, ...]:
    lines = []
    for name, application in serve.status().applications.items():
        lines.append(f"application {name}: {application.status}")
        for deployment, state in application.deployments.items():
            counts = ", ".join(
                f"{count} {kind!s}" for kind, count in state.replica_states.items() if count
            )
            told = state.message.strip().splitlines()
            # A deployment that is well has nothing to say.
            message = f": {told[-1]}" if told and str(state.status) != "HEALTHY" else ""
            lines.append(f"  {deployment}: {state.status}, {counts or 'no replica'}{message}")
    return tuple(lines)
