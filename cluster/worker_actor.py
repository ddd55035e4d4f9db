"""WorkerActor: a LocalExecutor behind a plan stream, in a process that Ray placed."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import ray.util

from cluster.plan_stream import PlanStreamServer
from protocol.config import ClusterSettings, WorkerSettings

if TYPE_CHECKING:
    from worker.local_executor import LocalExecutor

NO_EPOCH = 0
"""A worker that no scheduler has opened a stream to yet."""


class WorkerActor:
    """Owner: the engine that created it. Mutated only by: start and close.

    A plain class, wrapped with ray.remote where it is started; Ray calls are for its life only,
    plans travel on the stream. Settings come as JSON, so both ends check them.
    """

    def __init__(self, worker: str, cluster: str, secret: str) -> None:
        self._worker_settings = WorkerSettings.model_validate_json(worker)
        self._settings = ClusterSettings.model_validate_json(cluster)
        self._secret = secret
        self._executor: LocalExecutor | None = None
        self._server: PlanStreamServer | None = None

    def start(self, host: str | None = None) -> tuple[str, int, int]:
        """Load the model and listen; returns host, port and process id.

        `host` None takes the address that Ray knows this node by. Raises ModelError or
        ConfigError when the worker cannot serve.
        """
        # Imported late: whoever creates workers needs no torch.
        from worker.local_executor import LocalExecutor

        if host is None:
            host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._executor = LocalExecutor.open(
            self._worker_settings, epoch=NO_EPOCH, timeout=self._settings.start_timeout
        )
        self._server = PlanStreamServer(self._executor, self._secret, self._settings)
        return host, self._server.start(host), os.getpid()

    def close(self) -> None:
        """End the stream, close the port and free the device; idempotent, safe half-started."""
        if self._server is not None:
            self._server.stop(self._settings.shutdown_timeout)
        if self._executor is not None:
            self._executor.shutdown(self._settings.shutdown_timeout)


def new_secret() -> str:
    """A worker's secret: 256 random bits."""
    return secrets.token_hex(32)
