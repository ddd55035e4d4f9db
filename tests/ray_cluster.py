"""A Ray cluster of a test's own: small, private, and gone without a trace afterwards."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray

from tests.ray_sessions import BEGUN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 20.0
NUM_CPUS = 8
ATTEMPTS = 3
"""To start Ray."""


def one_node(folder: Path) -> None:
    """Start Ray on one node and join it.

    More CPUs are declared than there may be, so that a test of two workers runs on any machine.
    """
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
    )


@contextmanager
def local_ray(start: Callable[[Path], None] = one_node) -> Iterator[None]:
    """Start a local cluster; on leaving, assert that no process of it is left.

    `start` starts and joins it, given a folder for its files.
    Home, authentication and the session folder are set on purpose: Ray would write to the user's.
    """
    others = _children()
    session = Path(tempfile.mkdtemp(prefix="loopmesh-"))  # sockets need a short path
    BEGUN.append(str(session))
    values = {
        "HOME": str(session),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # others may fill the memory of this machine
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_gcs_server_port_wait_time_s": "120",
        "OMP_NUM_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    attempt = 1
    try:
        try:
            while not _starts(start, session / f"ray{attempt}", last=attempt == ATTEMPTS):
                _end(others)
                attempt += 1
            yield
        finally:
            alive = _end(others)
        assert not alive, f"processes left behind: {alive}"
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(session, ignore_errors=True)


def _starts(start: Callable[[Path], None], folder: Path, *, last: bool) -> bool:
    """Whether Ray came up; on a busy machine it gives up after 30 seconds, whatever it is told."""
    with _handles_dropped():
        try:
            start(folder)
        except Exception as error:
            if last or "timed out during startup" not in str(error):
                raise
            return False
        return True


def _end(others: set[psutil.Process]) -> list[psutil.Process]:
    """Leave the cluster and end what is left of it, which is returned."""
    processes = _children() - others
    ray.shutdown()
    _, left = psutil.wait_procs(processes, timeout=PATIENCE)
    # What is dead and waits for its parent to ask for it holds nothing.
    alive = [process for process in left if _is_running(process)]
    for process in alive:
        process.kill()
    with _handles_dropped():
        psutil.wait_procs(alive, timeout=PATIENCE)
    return alive


@contextmanager
def _handles_dropped() -> Iterator[None]:
    """Collect handles of ended processes now: later they would warn in the midst of some test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def live_placement_groups() -> list[str]:
    """Placement groups that Ray has not removed."""
    table = ray.util.placement_group_table()
    return [entry["name"] for entry in table.values() if entry["state"] != "REMOVED"]


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether a condition comes true before patience runs out; for what other processes do."""
    waiter = psutil.Process()
    deadline = _now() + PATIENCE
    while not holds():
        if _now() > deadline:
            return False
        waiter.cpu_percent(interval=0.05)
    return True


def _now() -> float:
    return float(os.times().elapsed)
