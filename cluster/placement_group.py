"""One placement group a worker: its place in the cluster, visible as demand, removed with it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from protocol.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocol.config import ClusterSettings

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.25
TELL_INTERVAL = 10.0
"""Seconds between two lines of the log about a place that is waited for."""
MARK = "loopmesh"


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's place, as Ray knows it.

    `asked` is when it was asked for, in seconds of the wall clock; `state` is Ray's: PENDING,
    CREATED or RESCHEDULING. `infeasible` says that no node that there is could ever hold it.
    """

    engine: str
    lane: str
    asked: int
    bundle: dict[str, float]
    state: str
    infeasible: bool

    @property
    def name(self) -> str:
        """The name of its placement group, which carries what Ray does not keep.

        Example: "loopmesh|3f2a9c01|lane-0|1767225600".
        """
        return f"{MARK}|{self.engine}|{self.lane}|{self.asked}"

    @property
    def waits(self) -> bool:
        """Whether it is still to be granted."""
        return self.state in ("PENDING", "PREPARED", "RESCHEDULING")


def worker_bundle(settings: ClusterSettings) -> dict[str, float]:
    """What one worker asks of Ray, zero amounts left out."""
    wanted = {"CPU": settings.num_cpus, "GPU": settings.num_gpus}
    bundle = {name: amount for name, amount in wanted.items() if amount}
    if not bundle:
        raise ConfigError("a worker asks for neither CPU nor GPU; set cluster.num_cpus or num_gpus")
    return bundle


def reserve_place(settings: ClusterSettings, engine: str, lane: str) -> PlacementGroup:
    """Ask for one worker's place; returns at once, before it is granted."""
    bundle = worker_bundle(settings)
    name = Place(engine, lane, int(time.time()), bundle, "PENDING", infeasible=False).name
    place: PlacementGroup = placement_group([bundle], strategy="PACK", name=name)
    return place


def await_place(place: PlacementGroup, settings: ClusterSettings) -> None:
    """Wait until a place is granted.

    Raises ConfigError for one that is infeasible on the nodes that there are: at once, or, where
    the cluster grows, after place_timeout; DeadlineError for one that is not free by then. Both
    name what was asked and what the cluster has, as `shortage` does, and so does the log meanwhile.
    """
    started = told = time.monotonic()
    while not place.wait(POLL_INTERVAL):
        state = placement_group_table(place)["stats"]["scheduling_state"]
        infeasible = state == "INFEASIBLE"
        now = time.monotonic()
        late = now - started > settings.place_timeout
        if infeasible and (late or not settings.grows):
            text = shortage(place.bundle_specs[0], infeasible=True)
            waited = f" (waited {settings.place_timeout:g} s for one)" if late else ""
            raise ConfigError(
                f"{text}: lower cluster.num_cpus or num_gpus, or add such a node{waited}"
            )
        if late or now - told > TELL_INTERVAL:
            told = now
            text = shortage(place.bundle_specs[0], infeasible=infeasible)
            if late:
                patience = f"{settings.place_timeout:g} s"
                raise DeadlineError(f"{text}, and did not come free within {patience}")
            logger.warning("waiting since %.0f s: %s", now - started, text)


def shortage(bundle: dict[str, float], *, infeasible: bool) -> str:
    """What a worker that waits asked for, and what the cluster has; one line."""
    if infeasible:
        return (
            f"no node can hold a worker that needs {bundle}; the cluster has "
            f"{_describe(ray.cluster_resources)}"
        )
    return (
        f"no place for a worker that needs {bundle}; free now: "
        f"{_describe(ray.available_resources)} of {_describe(ray.cluster_resources)}"
    )


def list_places() -> list[Place]:
    """The places of all our workers in the cluster, in the order they were asked for."""
    places = []
    for entry in placement_group_table().values():
        mark, _, rest = entry["name"].partition("|")
        parts = rest.rsplit("|", 2)
        if mark == MARK and len(parts) == 3 and entry["state"] != "REMOVED":
            places.append(
                Place(
                    engine=parts[0],
                    lane=parts[1],
                    asked=int(parts[2]),
                    bundle=dict(entry["bundles"][0]),
                    state=entry["state"],
                    infeasible=entry["stats"]["scheduling_state"] == "INFEASIBLE",
                )
            )
    return sorted(places, key=lambda place: (place.asked, place.engine, place.lane))


def remove_places(places: Iterable[Place]) -> None:
    """Give places back whose owner cannot; for those of this process's Ray namespace."""
    for place in places:
        try:
            remove_placement_group(get_placement_group(place.name))
        except ValueError:  # it went meanwhile
            continue
        logger.warning("gave back the place of %s of engine %s", place.lane, place.engine)


def _describe(resources: Callable[[], Any]) -> dict[str, float]:
    amounts = resources()
    return {name: amounts.get(name, 0.0) for name in ("CPU", "GPU")}
