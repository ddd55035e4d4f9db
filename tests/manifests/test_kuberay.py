"""The manifests for Kubernetes: shape by KubeRay's schemas, and by hand what those cannot know."""

from __future__ import annotations

import copy
import itertools
import json
import re
from importlib.util import find_spec
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.cli import build_parser
from protocol.config import Configuration, parse_configuration
from tests.manifests.documents import (
    KUBERAY_KINDS,
    MANIFESTS,
    ROOT,
    Document,
    all_pods,
    cluster_of,
    documents,
    name_of,
    of_kind,
    pins,
    pods_of,
    project,
    schema_of,
)

KUBERAY = of_kind(*KUBERAY_KINDS)
each = pytest.mark.parametrize("document", KUBERAY, ids=name_of)
each_with_pods = pytest.mark.parametrize(
    "document", [*KUBERAY, *of_kind("StatefulSet")], ids=name_of
)


def errors_of(document: Document) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema_of(document["kind"]))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def configuration_of(document: Document) -> Configuration:
    """What the engine of a manifest is told."""
    if document["kind"] == "RayService":
        serve = yaml.safe_load(document["spec"]["serveConfigV2"])
        return parse_configuration(serve["applications"][0]["args"])
    if document["kind"] == "RayJob":
        path = document["spec"]["entrypoint"].split("--config ")[1].split()[0]
        (told,) = [item for item in of_kind("ConfigMap") if path.rsplit("/", 1)[1] in item["data"]]
        return parse_configuration(json.loads(told["data"][path.rsplit("/", 1)[1]]))
    return Configuration()


def test_there_is_one_of_each_kind() -> None:
    assert {document["kind"] for document in KUBERAY} == set(KUBERAY_KINDS)
    assert {document["apiVersion"] for document in KUBERAY} == {"ray.io/v1"}


@each
def test_it_fits_the_strict_schema(document: Document) -> None:
    assert errors_of(document) == []


@each
def test_the_schema_catches_a_misspelt_field_at_any_depth(document: Document) -> None:
    for place in (cluster_of, lambda whole: pods_of(whole)[0]["spec"]["containers"][0]):
        broken = copy.deepcopy(document)
        place(broken)["enableInTreeAutoscalng"] = True
        assert len(errors_of(broken)) == 1


@each
def test_the_head_does_no_work_and_versions_are_those_of_the_project(document: Document) -> None:
    cluster = cluster_of(document)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["rayVersion"] == pins()["ray"]
    images = [box["image"] for pod in all_pods(document) for box in pod["spec"]["containers"]]
    version = project()["project"]["version"]
    assert set(images) <= {f"loopmesh:{version}-cpu", f"loopmesh:{version}-gpu"}


@each
def test_nobody_joins_without_the_token_and_a_new_head_remembers(document: Document) -> None:
    cluster = cluster_of(document)
    assert cluster["authOptions"] == {"mode": "token", "secretName": "loopmesh-ray-token"}
    storage = cluster["gcsFaultToleranceOptions"]
    host, port = storage["redisAddress"].split(":")
    (service,) = of_kind("Service")
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == (host, int(port))
    secret = storage["redisPassword"]["valueFrom"]["secretKeyRef"]
    (redis,) = of_kind("StatefulSet")
    (box,) = redis["spec"]["template"]["spec"]["containers"]
    assert secret == box["env"][0]["valueFrom"]["secretKeyRef"]


def test_secrets_are_made_as_the_readme_says_and_never_kept_here() -> None:
    assert of_kind("Secret") == []
    readme = (MANIFESTS / "README.md").read_text(encoding="utf-8")
    made = re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", readme)
    assert sorted(made) == [("loopmesh-ray-token", "auth_token"), ("loopmesh-redis", "password")]


@each_with_pods
def test_no_pod_is_root_or_unbounded(document: Document) -> None:
    for pod in all_pods(document):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for box in pod["spec"]["containers"]:
            assert box["securityContext"]["allowPrivilegeEscalation"] is False
            assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert set(box["resources"]) == {"requests", "limits"}
            assert not box["image"].endswith(":latest")
            assert ":" in box["image"]


@each_with_pods
def test_only_the_head_whose_autoscaler_asks_for_pods_may_speak_to_kubernetes(
    document: Document,
) -> None:
    pods = all_pods(document)
    scales = document in KUBERAY and cluster_of(document).get("enableInTreeAutoscaling", False)
    others = pods[1:] if scales else pods
    assert all(pod["spec"]["automountServiceAccountToken"] is False for pod in others)


@each
def test_every_node_is_asked_how_it_is(document: Document) -> None:
    for pod in pods_of(document):
        (box,) = pod["spec"]["containers"]
        alive, ready = box["livenessProbe"]["httpGet"], box["readinessProbe"]["httpGet"]
        assert alive == {"path": "/api/healthz", "port": 52365}
        serving = document["kind"] == "RayService" and box["name"] == "ray-worker"
        assert ready == ({"path": "/-/healthz", "port": 8000} if serving else alive)
        assert {"name": "metrics", "containerPort": 8080} in box["ports"]


@each
def test_a_pod_has_longer_to_end_than_an_engine_takes_to_drain(document: Document) -> None:
    settings = configuration_of(document)
    for pod in pods_of(document)[1:]:
        (box,) = pod["spec"]["containers"]
        *_, command = box["lifecycle"]["preStop"]["exec"]["command"]
        steps = [int(number) for number in re.findall(r"\d+", command)]
        stopping = steps[-1]
        assert "ray stop --grace-period" in command
        assert stopping > settings.cluster.shutdown_timeout
        assert pod["spec"]["terminationGracePeriodSeconds"] > sum(steps)
    if document["kind"] == "RayService":
        assert document["spec"]["upgradeStrategy"] == {"type": "NewCluster"}
        delay = document["spec"]["rayClusterDeletionDelaySeconds"]
        assert delay > settings.api.request_timeout


@each
def test_worker_groups_are_what_the_autoscaler_takes(document: Document) -> None:
    """Rules of the operator that a schema does not have."""
    cluster = cluster_of(document)
    scaling = cluster.get("enableInTreeAutoscaling", False)
    for group in cluster["workerGroupSpecs"]:
        low, high = group["minReplicas"], group["maxReplicas"]
        assert 0 <= low <= group.get("replicas", low) <= high
        assert scaling == (low < high)
        assert re.fullmatch(r"[a-z][a-z0-9-]*", group["groupName"])
    if scaling:
        assert cluster["autoscalerOptions"]["version"] == "v2"
        assert all("restartPolicy" not in pod["spec"] for pod in pods_of(document))
    assert len(document["metadata"]["name"]) < 40
    assert document["metadata"]["labels"] == pods_of(document)[0]["metadata"]["labels"]


def test_clusters_for_batches_are_empty_without_work() -> None:
    empty = [document for document in KUBERAY if document["kind"] != "RayService"]
    groups = [group for document in empty for group in cluster_of(document)["workerGroupSpecs"]]
    assert len(groups) == 2
    assert {group["minReplicas"] for group in groups} == {0}


@pytest.mark.parametrize("document", of_kind("RayService", "RayJob"), ids=name_of)
def test_an_engine_fits_into_the_pods(document: Document) -> None:
    """Its workers, itself and an ingress, a CPU each, within the pods that there may be."""
    cluster = configuration_of(document).cluster
    (group,) = cluster_of(document)["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    pods = group["minReplicas"] or group["maxReplicas"]
    cpus, gpus = int(limits["cpu"]) * pods, int(limits.get("nvidia.com/gpu", 0)) * pods
    assert cluster.num_workers * cluster.num_cpus + 2 <= cpus
    assert cluster.num_workers * cluster.num_gpus <= gpus
    assert cluster.num_gpus == (1.0 if "nvidia.com/gpu" in limits else 0.0)
    assert cluster.num_cpus <= int(limits["cpu"])


def test_the_batch_job_runs_our_module_on_a_worker() -> None:
    (job,) = of_kind("RayJob")
    words = job["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "cluster.batch_job"]
    assert [word for word in words if word.startswith("--")] == ["--input", "--output", "--config"]
    assert job["spec"]["entrypointNumCpus"] >= 1
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert job["spec"]["backoffLimit"] > 0


def test_the_batch_command_takes_what_the_job_gives_it() -> None:
    if find_spec("cluster.batch_job") is None:
        pytest.skip("this checkout has no batch command")
    (job,) = of_kind("RayJob")
    words = job["spec"]["entrypoint"].split()[3:]
    taken = build_parser().parse_args(["batch", *words])
    assert taken.input == "/batches/requests.jsonl"
    assert taken.config == "/etc/loopmesh/batch.json"


def selects(selector: Document, labels: Document) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())


def test_a_budget_keeps_some_workers_of_each_service() -> None:
    budgets = {item["metadata"]["name"]: item["spec"] for item in of_kind("PodDisruptionBudget")}
    services = of_kind("RayService")
    assert len(budgets) == len(services) == 2
    for service in services:
        spec = budgets[f"{service['metadata']['name']}-workers"]
        head, worker = (pod["metadata"]["labels"] for pod in pods_of(service))
        assert selects(spec["selector"], worker | {"ray.io/node-type": "worker"})
        assert not selects(spec["selector"], head | {"ray.io/node-type": "head"})
        # Kubernetes takes nothing else for pods of a kind that it cannot scale.
        assert set(spec) == {"minAvailable", "selector"}
        (group,) = cluster_of(service)["workerGroupSpecs"]
        assert 0 < spec["minAvailable"] < group["minReplicas"]


def test_the_network_is_open_to_the_cluster_itself_and_else_by_port() -> None:
    policies = {item["metadata"]["name"]: item["spec"] for item in of_kind("NetworkPolicy")}
    ours, redis = policies["loopmesh"], policies["loopmesh-redis"]
    for document in KUBERAY:
        for pod in all_pods(document):
            assert selects(ours["podSelector"], pod["metadata"]["labels"])
    (store,) = of_kind("StatefulSet")
    assert selects(redis["podSelector"], store["spec"]["template"]["metadata"]["labels"])
    for policy in (ours, redis):
        assert policy["policyTypes"] == ["Ingress", "Egress"]
    within, *others = ours["ingress"]
    assert within == {"from": [{"podSelector": ours["podSelector"]}]}
    for rule in (*others, *redis["ingress"]):
        assert rule["from"]
        assert all(port["port"] for port in rule["ports"])
    outside = [rule for rule in others if "loopmesh-client" in str(rule["from"])]
    assert [rule["ports"] for rule in outside] == [[{"protocol": "TCP", "port": 8000}]]
    assert redis["ingress"][0]["from"] == within["from"]


def test_every_claim_and_secret_that_a_pod_names_is_in_the_readme() -> None:
    text = (MANIFESTS / "README.md").read_text(encoding="utf-8")
    pods = list(itertools.chain.from_iterable(map(all_pods, KUBERAY)))
    volumes = [volume for pod in pods for volume in pod["spec"].get("volumes", [])]
    claims = {
        v["persistentVolumeClaim"]["claimName"]
        for v in volumes
        if len(v) == 2 and "persistentVolumeClaim" in v
    }
    assert claims == {"loopmesh-models", "loopmesh-batches"}
    assert all(f"`{claim}`" in text for claim in claims)


def test_the_readme_names_every_file() -> None:
    text = (MANIFESTS / "README.md").read_text(encoding="utf-8")
    files = [path for path in MANIFESTS.rglob("*") if path.is_file() and path.name != "README.md"]
    missing = [path.name for path in files if f"`{path.relative_to(MANIFESTS)}`" not in text]
    assert missing == []


def test_the_launcher_s_file_fits_ray_s_own_schema() -> None:
    import ray.autoscaler

    path = next(iter(ray.autoscaler.__path__)) + "/ray-schema.json"
    with open(path, encoding="utf-8") as file:
        schema = json.load(file)
    (config,) = documents(MANIFESTS / "cluster-launcher.yaml")
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError, match="max_wrkers"):
        jsonschema.validate(config | {"max_wrkers": 1}, schema)
    kinds: dict[str, Any] = config["available_node_types"]
    assert kinds[config["head_node_type"]]["resources"] == {"CPU": 0}
    assert kinds["gpu"]["min_workers"] == 0
    assert "--num-cpus=0" in config["head_start_ray_commands"][1]
    assert "~/.ray/auth_token" in config["file_mounts"].values()
    assert (ROOT / "manifests" / "Dockerfile").exists()
