"""Running the endpoint: Ray, Ray Serve and the application, up together and down together."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from cluster.deployment import build_application
from cluster.ports import bind_problem, connect_problem
from cluster.ray_session import ray_session
from cluster.terminal import progress
from protocol.errors import ConfigError, LoopmeshError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.config import Configuration

logger = logging.getLogger(__name__)

APPLICATION = "loopmesh"


@contextmanager
def serving(
    configuration: Configuration, host: str, port: int, *, ray_ends: bool = False
) -> Iterator[str]:
    """The endpoint while the block runs; yields its base URL once it answers.

    Needs Ray; `ray_ends` says that Ray itself, and Serve with it, ends right after. Another
    application of the same Ray Serve stays. Raises ConfigError when the port is taken, or is not
    that of a Serve which runs already, StartError with the replica's own error when the engine
    cannot start.
    """
    shared = _serve_runs()
    _require_port(host, port, shared=shared)
    if not shared:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(
            http_options=HTTPOptions(host=host, port=port),
            logging_config={"log_level": "WARNING"},
        )
    try:
        _deploy(configuration)
        yield f"http://{host}:{port}"
    finally:
        try:
            serve.delete(APPLICATION)
        except TimeoutError:
            # Requests that run may keep replicas longer than this waits; they end all the same.
            logger.warning("the application still drains")
        if not shared and not ray_ends:
            serve.shutdown()  # type: ignore[no-untyped-call]


def _deploy(configuration: Configuration) -> None:
    try:
        serve.run(build_application(configuration), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        status = serve.status().applications.get(APPLICATION)
        deployments = status.deployments.values() if status is not None else ()
        causes = [line for item in deployments for line in _own_errors(item.message)]
        reason = causes[-1] if causes else str(error)
        raise StartError(f"the endpoint did not start: {reason}") from error


def _own_errors(message: str) -> list[str]:
    """What our exceptions say in a replica's traceback, without the traceback."""
    marked = (line.partition(f"{LoopmeshError.__module__}.") for line in message.splitlines())
    return [name.partition(": ")[2] for _, mark, name in marked if mark]


def run_server(configuration: Configuration, host: str, port: int) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    stop = threading.Event()
    progress("starting Ray and the engine", sys.stderr)
    with (
        ray_session() as owned,
        serving(configuration, host, port, ray_ends=owned) as url,
    ):
        # Ray has set handlers of its own by now, and its SIGTERM aborts the process.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        name = configuration.model_name
        progress(f"ready: {url}/v1 serves {name} (pid {os.getpid()}); Ctrl-C stops it", sys.stderr)
        stop.wait()
        progress("stopping", sys.stderr)
    return 0


def _require_port(host: str, port: int, *, shared: bool) -> None:
    """Raise ConfigError unless the endpoint can be at (host, port): free, or that of Serve."""
    if shared:
        if connect_problem(f"{host}:{port}") is not None:
            raise ConfigError(
                f"Ray Serve already runs on this cluster, and not on {host}:{port}: give the "
                "--host and --port that it was started with, or end it with `serve shutdown`"
            )
    elif problem := bind_problem(host, port):
        raise ConfigError(
            f"cannot listen on {host}:{port} ({problem}): choose another --port or --host"
        )


def _serve_runs() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True
