from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.metric_table import ENGINE_METRICS, INGRESS_METRICS, Kind, Metric

ROOT = Path(__file__).parents[2]
ALL = (*ENGINE_METRICS, *INGRESS_METRICS)


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Each metric of the page: its kind and its labels."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `ray_")]
    return {
        name.strip(" `"): (kind.strip(), tuple(re.findall(r"`(\w+)`:", labels)))
        for name, kind, labels, _ in rows
    }


def test_the_page_has_the_metrics_of_the_table_and_no_other() -> None:
    table = {metric.exported: (metric.kind.value, metric.labels) for metric in ALL}
    assert documented() == table
    assert len({metric.name for metric in ALL}) == len(ALL) > 20


def test_names_as_prometheus_has_them() -> None:
    assert Metric("loopmesh_x", Kind.COUNTER, "x").series == ("ray_loopmesh_x_total",)
    assert Metric("loopmesh_x", Kind.GAUGE, "x").series == ("ray_loopmesh_x",)
    told = Metric("loopmesh_x", Kind.HISTOGRAM, "x", (), (1.0,)).series
    assert told == ("ray_loopmesh_x_bucket", "ray_loopmesh_x_count", "ray_loopmesh_x_sum")


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_histogram_has_rising_buckets_and_a_unit_and_nothing_else_has(metric: Metric) -> None:
    histogram = metric.kind is Kind.HISTOGRAM
    assert bool(metric.buckets) == histogram
    assert metric.name.endswith("_seconds") or not histogram
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help.endswith(".")


def test_an_engine_of_this_process_loads_neither_ray_nor_metrics() -> None:
    code = (
        "import sys, cluster.llm, cluster.scheduler_actor, cluster.metric_table;"
        "print({'ray', 'cluster.metrics'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert found.stdout.strip() == "set()"
