"""Rules and dashboard speak of metrics that there are, and of all of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from cluster.metric_table import ENGINE_METRICS, INGRESS_METRICS
from tests.manifests.documents import MANIFESTS, documents, of_kind, pods_of

METRICS = (*ENGINE_METRICS, *INGRESS_METRICS)
SERIES = {name: metric for metric in METRICS for name in metric.series}
(RULES,) = documents(MANIFESTS / "monitoring" / "rules.yaml")
DASHBOARD: dict[str, Any] = json.loads(
    (MANIFESTS / "monitoring" / "grafana-dashboard.json").read_text(encoding="utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
ALL_RULES = [rule for group in RULES["spec"]["groups"] for rule in group["rules"]]
EVERYWHERE = {"model_name", "WorkerId", "le"}


def recorded() -> set[str]:
    return {rule["record"] for rule in ALL_RULES if "record" in rule}


def expressions() -> list[str]:
    panels = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return [rule["expr"] for rule in ALL_RULES] + panels


@pytest.mark.parametrize("expression", expressions())
def test_it_asks_for_series_and_labels_that_exist(expression: str) -> None:
    names = re.findall(r"\bray_loopmesh_\w+", expression)
    rules = re.findall(r"\bloopmesh:[\w:]+", expression)
    assert names or rules
    assert set(names) <= set(SERIES)
    assert set(rules) <= recorded()
    labels = {label for name in names for label in SERIES[name].labels} | EVERYWHERE
    grouped = [part.split(",") for part in re.findall(r"by \(([^)]*)\)", expression)]
    matched = re.findall(r"[{,]\s*(\w+)\s*=", expression)
    assert {label.strip() for part in grouped for label in part} | set(matched) <= labels
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing)


def test_the_dashboard_shows_every_metric() -> None:
    shown = {
        SERIES[name].name
        for panel in PANELS
        for target in panel["targets"]
        for name in re.findall(r"\bray_loopmesh_\w+", target["expr"])
    }
    assert shown == {metric.name for metric in METRICS}


def test_panels_do_not_overlap_and_find_their_source() -> None:
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in PANELS]
    assert len(set(places)) == len(places) > 12
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
    variables = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert variables == ["datasource", "model"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_an_alert_says_how_bad_it_is_and_what_it_means() -> None:
    alerts = [rule for rule in ALL_RULES if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 8
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
    runs = (MANIFESTS.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in alerts if f"`{rule['alert']}`" not in runs] == []


def test_pods_are_scraped_on_the_ports_that_they_name() -> None:
    (monitor,) = documents(MANIFESTS / "monitoring" / "podmonitor.yaml")
    selector = monitor["spec"]["selector"]["matchLabels"]
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    for document in of_kind("RayService", "RayCluster", "RayJob"):
        head, worker = pods_of(document)
        for pod in (head, worker):
            assert selector.items() <= pod["metadata"]["labels"].items()
        assert {port["name"] for port in head["spec"]["containers"][0]["ports"]} >= scraped
        assert "metrics" in {port["name"] for port in worker["spec"]["containers"][0]["ports"]}


def test_plain_prometheus_reads_the_rules_that_its_file_names() -> None:
    (config,) = documents(MANIFESTS / "monitoring" / "prometheus.yaml")
    assert config["rule_files"] == ["loopmesh-rules.yaml"]
    assert yaml.safe_load(yaml.safe_dump(RULES["spec"])) == {"groups": RULES["spec"]["groups"]}
