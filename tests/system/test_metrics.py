"""Metrics of a real endpoint, scraped from Ray's port: what is documented is what comes out."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from cluster.metric_table import ENGINE_METRICS, INGRESS_METRICS
from cluster.ports import free_port
from cluster.server import APPLICATION, serving
from protocol.config import (
    ApiSettings,
    CacheSettings,
    ClusterSettings,
    Configuration,
    SchedulerSettings,
    WorkerSettings,
)
from tests.ray_cluster import eventually, local_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler.stats import EngineStats

pytestmark = pytest.mark.ray

NAME = "tiny"
CONFIGURATION = Configuration(
    worker=WorkerSettings(
        cache=CacheSettings(num_blocks=768), device="cpu", num_slots=1, num_threads=1
    ),
    scheduler=SchedulerSettings(policy="priority", preemption=True),
    cluster=ClusterSettings(metrics_interval=0.2),
    api=ApiSettings(served_model_name=NAME),
)
PROMPT = "Once upon a time there was a small fox who lived by the river and had a friend"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "500")
        with local_ray(), serving(CONFIGURATION, "127.0.0.1", free_port(), ray_ends=True) as base:
            yield base


class Scrape:
    """What Ray's port says of ours: each series' name, and values summed over all else."""

    def __init__(self) -> None:
        (node,) = ray.nodes()  # type: ignore[no-untyped-call]
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        self.names: set[str] = set()
        self.values: Counter[tuple[str, ...]] = Counter()
        self.models: set[str] = set()
        for family in text_string_to_metric_families(httpx.get(address, timeout=20).text):
            for sample in family.samples:
                if sample.name.startswith("ray_loopmesh_") and "_created" not in sample.name:
                    self.names.add(sample.name)
                    self.models.add(sample.labels["model_name"])
                    own = [
                        sample.labels[label]
                        for label in ("finished_reason", "reason", "route", "code")
                        if label in sample.labels
                    ]
                    self.values[sample.name.removeprefix("ray_loopmesh_"), *own] += int(
                        sample.value
                    )


def ask(url: str, **fields: Any) -> httpx.Response:  # noqa: ANN401
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


async def press(url: str) -> list[int]:
    """A long request, and one of higher priority that takes its slot; both come through."""
    handle = serve.get_deployment_handle("engine", APPLICATION)
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": NAME, "prompt": "Once", "ignore_eos": True}

        async def post(tokens: int, priority: int) -> int:
            wish = body | {"max_tokens": tokens, "priority": priority}
            return (await http.post(f"{url}/v1/completions", json=wish)).status_code

        first = asyncio.ensure_future(post(600, 5))
        while not (await asyncio.to_thread(engine_stats, handle)).running:
            assert not first.done()
        return [await post(4, 0), await first]


def engine_stats(handle: Any) -> EngineStats:  # noqa: ANN401
    stats: EngineStats = handle.stats.remote().result(timeout_s=20)
    return stats


def test_what_is_documented_is_exported_and_counts_what_happened(url: str) -> None:
    assert eventually(lambda: httpx.get(f"{url}/health", timeout=20).status_code == 200)
    for _ in range(2):
        assert ask(url, exit_threshold=0.9).status_code == 200
    choices = ask(url, n=1, stop=["fox"], prompt=PROMPT.partition("fox")[0]).json()["choices"]
    assert len(choices) == 1
    assert asyncio.run(press(url)) == [200, 200]
    assert ask(url, prompt=[5] * 4000).status_code == 400
    assert ask(url, model="other").status_code == 404
    assert httpx.get(f"{url}/surprise", timeout=20).status_code == 404
    stats = engine_stats(serve.get_deployment_handle("engine", APPLICATION))

    wanted = {name for metric in (*ENGINE_METRICS, *INGRESS_METRICS) for name in metric.series}
    expected: dict[tuple[str, ...], int] = {
        ("generation_tokens_total",): stats.tokens,
        ("loops_total",): stats.loops,
        ("loops_saved_total",): stats.loops_saved,
        ("num_preemptions_total", "priority"): stats.preemptions,
        ("prefix_cache_queries_total",): stats.prefix_queries,
        ("prefix_cache_hit_tokens_total",): stats.prefix_hit_tokens,
        ("admission_rejections_total", "invalid"): 1,
        ("http_requests_total", "/v1/completions", "200"): 5,
        ("http_requests_total", "/v1/completions", "400"): 1,
        ("http_requests_total", "other", "404"): 1,
        ("time_to_first_token_seconds_count",): 5,
        ("e2e_request_latency_seconds_count",): 5,
        ("num_lanes",): 1,
        ("num_lanes_wanted",): 1,
        ("num_requests_running",): 0,
        ("num_requests_waiting",): 0,
    }
    expected |= {("request_success_total", r.value): n for r, n in stats.finished.items()}
    assert min(stats.loops_saved, stats.preemptions, stats.prefix_hit_tokens) > 0

    def difference() -> dict[tuple[str, ...], int]:
        values = Scrape().values
        return {key: values[key] for key, value in expected.items() if values[key] != value}

    # Each process exports at a time of its own.
    assert eventually(lambda: wanted <= Scrape().names), wanted - Scrape().names
    assert eventually(lambda: not difference()), difference()
    scrape = Scrape()
    assert scrape.names == wanted
    assert scrape.models == {NAME}
    assert scrape.values["request_time_per_output_token_seconds_count",] >= 4
