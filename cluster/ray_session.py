"""Ray for the length of a block: joined where there is one, else started and ended."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray

from cluster.ports import connect_problem
from protocol.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterator


def connect_ray(**options: object) -> bool:
    """Make sure that this process is connected to Ray; whether it was connected here.

    Without an `address`, Ray joins the cluster that RAY_ADDRESS names or that runs on this machine,
    and else starts one of its own. Raises ConfigError when nobody answers at RAY_ADDRESS,
    StartError when Ray does not come up.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "")
    if "address" not in options and address not in ("", "auto", "local"):
        problem = connect_problem(address)  # Ray itself would wait for minutes
        if problem is not None:
            raise ConfigError(
                f"nobody answers at RAY_ADDRESS={address} ({problem}): start the cluster, or unset "
                "RAY_ADDRESS to start a local one"
            )
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(**(quiet | options))  # type: ignore[arg-type]
    except (OSError, RuntimeError, ValueError) as error:
        raise StartError(f"Ray did not start: {error}; see `loopmesh doctor`") from error
    return True


@contextmanager
def ray_session(**options: object) -> Iterator[bool]:
    """Ray while the block runs; yields whether it was connected here, and so ends here."""
    owned = connect_ray(**options)
    try:
        yield owned
    finally:
        if owned:
            ray.shutdown()
