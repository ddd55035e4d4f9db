"""The image: no builder runs here, so its steps are read; install.sh is what it installs by."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

from tests.manifests.documents import MANIFESTS, ROOT, normal, pins, project

SCRIPT = MANIFESTS / "install.sh"
OPTIONAL = {"gpu"}


@cache
def stages() -> dict[str, list[str]]:
    """The instructions of each stage, its parents' first, continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (MANIFESTS / "Dockerfile").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            current = found[match[2]] = [*found.get(match[1], []), line]
        elif line.strip() and found:
            current.append(" ".join(line.split()))
    return found


def arguments(stage: str, instruction: str) -> list[str]:
    prefix = instruction + " "
    return [line.removeprefix(prefix) for line in stages()[stage] if line.startswith(prefix)]


def test_both_targets_end_as_somebody_who_is_not_root_with_a_health_check() -> None:
    for target in ("cpu", "gpu"):
        assert arguments(target, "USER") == ["1000:1000"]
        (check,) = arguments(target, "HEALTHCHECK")
        assert "http://127.0.0.1:8000/health" in check
        assert arguments(target, "ENTRYPOINT") == ['["tini", "--"]']
        (command,) = arguments(target, "CMD")
        assert command.startswith('["loopmesh", "serve"')
        *_, last = (line for line in stages()[target] if line.startswith(("RUN", "USER", "COPY")))
        assert last.startswith("USER")


def test_the_base_is_pinned_and_nothing_is_fetched_past_pip_and_apt() -> None:
    text = (MANIFESTS / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"ARG PYTHON_IMAGE=python:3\.11\.\d+-slim-bookworm\n", text)
    assert not re.search(r"(?m)^ADD |:latest|curl |pip install|sudo", text)
    for run in arguments("gpu", "RUN"):
        if "apt-get install" in run:
            assert "--no-install-recommends" in run
            assert "rm -rf /var/lib/apt/lists/*" in run


def test_both_targets_install_by_the_script_and_differ_in_torch_alone() -> None:
    steps = {
        target: [run for run in arguments(target, "RUN") if "install.sh" in run]
        for target in ("cpu", "gpu")
    }
    dependencies, project_step = steps["gpu"]
    assert dependencies == "sh manifests/install.sh dependencies"
    assert steps["cpu"] == [
        f"TORCH_INDEX=https://download.pytorch.org/whl/cpu {dependencies}",
        project_step,
    ]
    assert "gcc" in " ".join(arguments("gpu", "RUN"))


def test_what_is_installed_reaches_the_builder() -> None:
    lines = (MANIFESTS / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    kept = {line[1:] for line in lines if line.startswith("!")}
    packages = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {name.rstrip("*") for name in packages} | {"LICENSE", "manifests/install.sh"}
    needed |= {"pyproject.toml", "constraints.txt", project()["project"]["readme"]}
    assert kept == needed
    assert [name for name in kept if not (ROOT / name).exists()] == []


def test_the_script_says_how_it_is_used() -> None:
    for wrong in ([], ["everything"]):
        found = subprocess.run(
            ["sh", str(SCRIPT), *wrong], capture_output=True, text=True, timeout=20, check=False
        )
        assert (found.returncode, found.stdout) == (2, "")
        assert found.stderr == "usage: install.sh dependencies | project\n"


def test_every_package_that_the_image_needs_is_pinned() -> None:
    """However deep; torch itself pins what its CUDA builds add."""
    left = [Requirement(text) for text in project()["project"]["dependencies"]]
    seen: set[tuple[str, frozenset[str]]] = set()
    needed: set[str] = set()
    while left:
        wanted = left.pop()
        key = normal(wanted.name), frozenset(wanted.extras)
        if key in seen:
            continue
        seen.add(key)
        needed.add(key[0])
        try:
            texts = importlib.metadata.requires(wanted.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # one that this platform has no use for, or that is only pinned
        for text in texts:
            inner = Requirement(text)
            extras = wanted.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                left.append(inner)
    assert len(needed) > 60
    built_with_torch = re.compile(r"triton|nvidia-.*|cuda-.*")
    missing = {name for name in needed - set(pins()) if not built_with_torch.fullmatch(name)}
    assert missing - {"setuptools"} == set()


def test_the_interpreter_of_the_image_is_one_that_the_project_takes() -> None:
    assert project()["project"]["requires-python"] == ">=3.11"
    assert sys.version_info >= (3, 11)
    assert Path(SCRIPT).read_text(encoding="utf-8").startswith("#!/bin/sh\n")
