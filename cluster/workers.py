"""The workers behind an LLM: one in this process, or several on Ray."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, Protocol

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.config import Configuration, WorkerSettings
    from protocol.executor import Executor

ExecutorKind = Literal["local", "ray"]


class Workers(Protocol):
    """Open workers by lane name, and how to give back what carries them."""

    @property
    def executors(self) -> Mapping[str, Executor]:
        """One executor a lane."""

    @property
    def pids(self) -> Mapping[str, int]:
        """The process that each lane's worker runs in."""

    def close(self) -> None:
        """Give everything back; idempotent."""


class LocalWorker:
    """The one worker of this process. Owner: whoever opened it. Mutated only by: close."""

    def __init__(self, settings: WorkerSettings, shutdown_timeout: float) -> None:
        # Imported late, here and for Ray: an engine whose workers are elsewhere needs no torch.
        from worker.local_executor import LocalExecutor

        self._executor = LocalExecutor.open(settings)
        self._shutdown_timeout = shutdown_timeout

    @property
    def executors(self) -> Mapping[str, Executor]:
        """The one lane."""
        return {"lane-0": self._executor}

    @property
    def pids(self) -> Mapping[str, int]:
        """This process."""
        return {"lane-0": os.getpid()}

    def close(self) -> None:
        """Shut the worker down; idempotent."""
        self._executor.shutdown(self._shutdown_timeout)


def open_workers(
    configuration: Configuration, kind: ExecutorKind, count: int, engine: str = ""
) -> Workers:
    """`count` workers, ready to run plans; on Ray, `engine` names whom they work for.

    Raises ConfigError for a number of workers that `kind` cannot have, ModelError for a model that
    cannot be served, and what Ray's workers raise; nothing is left open then.
    """
    if kind == "local":
        if count != 1:
            raise ConfigError(f"{count} workers in one process: use executor='ray', or 1 worker")
        return LocalWorker(configuration.worker, configuration.cluster.shutdown_timeout)
    if count < 1:
        raise ConfigError(f"{count} workers cannot run anything: ask for at least 1")
    # Imported late: a local worker starts fast, and without Ray.
    from cluster.ray_workers import RayWorkers

    return RayWorkers.open(configuration, count, engine)
