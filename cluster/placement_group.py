"""One placement group a worker: its place in the cluster, visible as demand, removed with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from protocol.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.config import ClusterSettings

POLL_INTERVAL = 0.25


def worker_bundle(settings: ClusterSettings) -> dict[str, float]:
    """What one worker asks of Ray, zero amounts left out."""
    wanted = {"CPU": settings.num_cpus, "GPU": settings.num_gpus}
    bundle = {name: amount for name, amount in wanted.items() if amount}
    if not bundle:
        raise ConfigError("a worker asks for neither CPU nor GPU; set cluster.num_cpus or num_gpus")
    return bundle


def reserve_place(settings: ClusterSettings, name: str) -> PlacementGroup:
    """Ask for one worker's place; returns at once, before it is granted."""
    place: PlacementGroup = placement_group([worker_bundle(settings)], strategy="PACK", name=name)
    return place


def await_place(place: PlacementGroup, settings: ClusterSettings) -> None:
    """Wait until a place is granted.

    Raises ConfigError as soon as Ray calls it infeasible on the nodes that there are, DeadlineError
    after place_timeout; both name what was asked and what the cluster has.
    """
    deadline = time.monotonic() + settings.place_timeout
    while not place.wait(POLL_INTERVAL):
        state = placement_group_table(place)["stats"]["scheduling_state"]
        if state == "INFEASIBLE":
            raise ConfigError(
                f"no node can hold a worker that needs {place.bundle_specs[0]}; the cluster has "
                f"{_describe(ray.cluster_resources)}: lower cluster.num_cpus or num_gpus, or "
                "add such a node"
            )
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"no place for a worker that needs {place.bundle_specs[0]} within "
                f"{settings.place_timeout:g} s; free now: {_describe(ray.available_resources)}"
            )


def _describe(resources: Callable[[], Any]) -> dict[str, float]:
    amounts = resources()
    return {name: amounts.get(name, 0.0) for name in ("CPU", "GPU")}
