"""EngineSession: an engine, its workers and the driver that waits for them, opened as one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from cluster.drivers import SyncDriver
from cluster.tokenizer import load_tokenizer
from cluster.workers import open_workers
from scheduler.engine import Engine
from worker.models.registry import resolve_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.workers import ExecutorKind, Workers
    from protocol.config import Configuration
    from protocol.profile import WorkerProfile


class EngineSession:
    """Owner: one thread. Mutated only by: close, and by whoever uses engine and driver.

    Its queue has no limit: whoever drives it by hand bounds what is in work. It owns `workers`,
    and closes them when it cannot be made.
    """

    def __init__(self, configuration: Configuration, workers: Workers) -> None:
        self._cluster = configuration.cluster
        self._workers = workers
        try:
            self.tokenizer = load_tokenizer(resolve_model(configuration.worker.model))
            queue = configuration.scheduler.model_copy(update={"max_waiting": sys.maxsize})
            self.engine = Engine(queue)
            self.profiles = tuple(executor.profile() for executor in workers.executors.values())
            self.driver = SyncDriver(self.engine, workers.executors, self._cluster.plan_timeout)
        except BaseException:
            workers.close()
            raise

    @classmethod
    def open(cls, configuration: Configuration, executor: ExecutorKind, count: int) -> Self:
        """A session over `count` new workers; raises what open_workers and load_tokenizer raise."""
        return cls(configuration, open_workers(configuration, executor, count))

    @property
    def profile(self) -> WorkerProfile:
        """The model, and the room of one worker."""
        return self.profiles[0]

    @property
    def pids(self) -> Mapping[str, int]:
        """The process that each lane's worker runs in."""
        return self._workers.pids

    def close(self) -> None:
        """Shut the workers down; what is live is dropped."""
        try:
            self.driver.close(self._cluster.shutdown_timeout)
        finally:
            self._workers.close()
