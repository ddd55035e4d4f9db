"""The CPU demo's Serve configuration on a real cluster: a head without CPUs, and two pods."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from cluster.ports import free_port
from tests.manifests.documents import cluster_of, name_of, of_kind
from tests.ray_cluster import eventually, live_placement_groups, local_ray

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.ray

STORE = 80 * 2**20
PATIENCE = 150.0
(DEMO,) = (item for item in of_kind("RayService") if name_of(item).endswith("cpu-demo"))
(GROUP,) = cluster_of(DEMO)["workerGroupSpecs"]
CPUS = int(GROUP["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])


@pytest.fixture
def head() -> Iterator[str]:
    """The id of the head's node, in a cluster with the pods of the demo."""
    started: list[Cluster] = []

    def start(folder: Path) -> None:
        node = {"object_store_memory": STORE, "include_dashboard": False}
        cluster = Cluster(
            initialize_head=True, head_node_args=node | {"num_cpus": 0, "temp_dir": str(folder)}
        )
        started.append(cluster)
        for _ in range(GROUP["replicas"]):
            cluster.add_node(num_cpus=CPUS, object_store_memory=STORE)
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    with local_ray(start):
        try:
            node = started[0].head_node
            assert node is not None
            yield node.node_id
        finally:
            ray.shutdown()
            started[0].shutdown()  # type: ignore[no-untyped-call]


def deploy(config: dict[str, Any]) -> None:
    """Hand the configuration to Serve, as the operator does by HTTP, and wait until it runs."""
    serve.start(http_options=config["http_options"])
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate(config))

    def settled() -> bool:
        return serve.status().applications["loopmesh"].status is not ApplicationStatus.DEPLOYING

    deadline = time.monotonic() + PATIENCE
    while not eventually(settled):
        assert time.monotonic() < deadline, serve.status()
    assert serve.status().applications["loopmesh"].status is ApplicationStatus.RUNNING


def test_the_demo_s_application_runs_beside_a_head_that_does_no_work(head: str) -> None:
    config = yaml.safe_load(DEMO["spec"]["serveConfigV2"])
    port = free_port()
    # Several nodes share an address here, so that only one of them can have the port.
    config |= {"http_options": {"host": "127.0.0.1", "port": port}, "proxy_location": "HeadOnly"}
    deploy(config)
    body = {"model": "ouro-tiny", "prompt": "Once upon a time", "max_tokens": 8}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8
    table = ray.util.placement_group_table()
    nodes = {node for entry in table.values() for node in entry["bundles_to_node_id"].values()}
    assert len(live_placement_groups()) == 2
    assert head not in nodes
    free, whole = ray.available_resources(), ray.cluster_resources()  # type: ignore[no-untyped-call]
    assert whole["CPU"] == CPUS * GROUP["replicas"]
    # Two workers, the engine and an ingress have a CPU each, and the head has none to give.
    assert free["CPU"] == whole["CPU"] - 4
    serve.shutdown()  # type: ignore[no-untyped-call]
    assert eventually(lambda: live_placement_groups() == [])
