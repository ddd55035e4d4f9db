"""The Ray Serve application, for `serve run cluster.app:app` and Serve config files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.deployment import build_application
from protocol.config import parse_configuration

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """Build the application from Serve arguments: Configuration's fields, all optional.

    In a Serve config file they stand under `args`, e.g. `args: {cluster: {num_workers: 2}}`.
    """
    return build_application(parse_configuration(args))
