"""The homes of a worker: opens executors of each kind, and takes down what carries them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from cluster.ray_workers import RayWorkers
from protocol.config import ClusterSettings, Configuration, WorkerSettings
from protocol.scripted_executor import ScriptedExecutor
from tests.plans import TIMEOUT
from tests.ray_cluster import local_ray
from worker.local_executor import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protocol.executor import Executor

HOMES = ("scripted", "local", pytest.param("ray", marks=pytest.mark.ray))
"""Parameters of a fixture that runs a suite against every executor."""


@contextmanager
def open_home(home: str) -> Iterator[Callable[[WorkerSettings], Executor]]:
    """A function that opens executors of one home; all are shut down at the end."""
    with ExitStack() as stack:
        if home == "ray":
            stack.enter_context(local_ray())

        def open_executor(settings: WorkerSettings) -> Executor:
            if home == "ray":
                configuration = Configuration(
                    worker=settings, cluster=ClusterSettings(beat_interval=0.05)
                )
                workers = stack.enter_context(RayWorkers.open(configuration, 1))
                return workers.executors["lane-0"]
            local = LocalExecutor.open(settings)
            stack.callback(local.shutdown, TIMEOUT)
            return local if home == "local" else ScriptedExecutor(local.profile())

        yield open_executor
