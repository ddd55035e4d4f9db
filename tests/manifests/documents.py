"""The manifests as data, for the tests beside this file."""

from __future__ import annotations

import json
import os
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
SCHEMAS = Path(os.environ.get("LOOPMESH_CRDS", Path(__file__).parent / "crds"))
KUBERAY_KINDS = ("RayCluster", "RayService", "RayJob")

Document = dict[str, Any]


@cache
def documents(path: Path) -> tuple[Document, ...]:
    """All documents of a YAML file."""
    return tuple(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def of_kind(*kinds: str) -> list[Document]:
    """All Kubernetes documents of these kinds, by file name."""
    files = sorted((MANIFESTS / "kubernetes").glob("*.yaml"))
    return [document for file in files for document in documents(file) if document["kind"] in kinds]


def name_of(document: Document) -> str:
    """A document's name, as an id of a test."""
    return f"{document['kind']}-{document['metadata']['name']}"


def cluster_of(document: Document) -> Document:
    """The cluster's specification within any of KubeRay's kinds."""
    spec: Document = document["spec"]
    field = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}.get(document["kind"])
    return spec if field is None else spec[field]


def pods_of(document: Document) -> list[Document]:
    """The pod templates: the head's, then those of the worker groups."""
    cluster = cluster_of(document)
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def all_pods(document: Document) -> list[Document]:
    """Every pod template of a document, the submitter's and a StatefulSet's as well."""
    if document["kind"] == "StatefulSet":
        return [document["spec"]["template"]]
    submitter = document["spec"].get("submitterPodTemplate")
    return pods_of(document) + ([submitter] if submitter else [])


@cache
def schema_of(kind: str) -> Document:
    """The strict schema of one of KubeRay's kinds."""
    path = SCHEMAS / f"{kind}.v1.strict.schema.json"
    loaded: Document = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@cache
def pins() -> dict[str, str]:
    """The version of each package that constraints.txt pins, by its normal name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pairs = (line.split("==") for line in lines)
    return {normal(name): version for name, version in pairs}


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def project() -> Document:
    """What pyproject.toml says of the project."""
    loaded: Document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return loaded
