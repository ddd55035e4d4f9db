"""A Ray cluster that adds and removes nodes by itself, all of them processes of this machine.

Ray's own helper for it ends every Ray process of the machine, so this one starts a head of its
own, at a port and in a folder of its own, and ends what it started by process id.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray

from cluster.ports import connect_problem, free_port
from tests.ray_cluster import local_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
IDLE_SECONDS = 6.0
OBJECT_STORE = 80 * 2**20
HEAD = "ray.head.default"
"""The type that Ray's provider of local nodes takes its head to be."""


@contextmanager
def growing_cluster(max_nodes: int, cpus: int) -> Iterator[str]:
    """A cluster of a head without CPUs and up to `max_nodes` nodes of `cpus` each; its address.

    This process is connected to it while the block runs. A node leaves after IDLE_SECONDS.
    """
    address = f"127.0.0.1:{free_port()}"
    heads: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> None:
        config = folder.with_name("cluster.json")
        config.write_text(json.dumps(_config(address, max_nodes, cpus)), encoding="utf-8")
        command = _command(address, config, folder)
        quiet = subprocess.DEVNULL
        heads.append(subprocess.Popen(command, env=_environment(), stdout=quiet, stderr=quiet))
        _await_head(heads[0], address)
        ray.init(address=address, log_to_driver=False)

    with local_ray(start):
        try:
            yield address
        finally:
            ray.shutdown()
            _stop(psutil.Process(heads[0].pid))
            heads[0].wait(STOP_TIMEOUT)


def _config(address: str, max_nodes: int, cpus: int) -> dict[str, object]:
    """The autoscaler's configuration, as a cluster launcher's YAML has it."""
    return {
        "cluster_name": "growing",
        "max_workers": max_nodes,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_SECONDS / 60,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "use_node_id_as_ip": True,  # all nodes have one address
        },
        "available_node_types": {
            HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": cpus, "object_store_memory": OBJECT_STORE},
                "node_config": {},
                "min_workers": 0,
                "max_workers": max_nodes,
            },
        },
        "head_node_type": HEAD,
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


def _command(address: str, config: Path, temp: Path) -> list[str]:
    host, _, port = address.partition(":")
    ray_command = str(Path(sys.executable).with_name("ray"))
    options = {
        "node-ip-address": host,
        "port": port,
        "num-cpus": 0,
        "num-gpus": 0,
        "object-store-memory": OBJECT_STORE,
        "include-dashboard": "false",
        "temp-dir": temp,
        "autoscaling-config": config,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [ray_command, "start", "--head", "--block", "--disable-usage-stats", *flags]


def _environment() -> dict[str, str]:
    return os.environ | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}


def _await_head(head: subprocess.Popen[bytes], address: str) -> None:
    waiter, waited = psutil.Process(), 0.0
    while connect_problem(address) is not None:
        assert head.poll() is None, f"ray start ended with {head.returncode}"
        assert waited < START_TIMEOUT, f"no head at {address} after {START_TIMEOUT:g} s"
        waiter.cpu_percent(interval=0.25)
        waited += 0.25


def _stop(head: psutil.Process) -> None:
    """End the head and all that came of it, the processes of its nodes among them."""
    processes = [head, *head.children(recursive=True)]
    for process in processes:
        if process.is_running():
            process.kill()  # a signal to drain would be obeyed for half a minute
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
