"""A small Ray cluster of a benchmark's own, gone without a trace afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.ray_session import ray_session

if TYPE_CHECKING:
    from collections.abc import Iterator

OBJECT_STORE_BYTES = 80 * 2**20


@contextmanager
def own_ray(num_cpus: int) -> Iterator[None]:
    """Ray while the block runs; the user's home and a cluster of theirs are left alone.

    `num_cpus` are declared, whatever the machine has.
    """
    folder = Path(tempfile.mkdtemp(prefix="loopmesh-"))  # sockets need a short path
    values = {"HOME": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        with ray_session(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder / "ray"),
        ):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
