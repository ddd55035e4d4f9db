"""What holds for every file: size, faces of packages, and that configuration files are good."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from protocol.config import parse_configuration

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "scheduler", "worker", "cluster", "benchmarks")
MAX_LINES = 350
FILES = sorted(path for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_fits_in_the_head(path: Path) -> None:
    limit = 2 * MAX_LINES if "tests" in path.relative_to(ROOT).parts else MAX_LINES
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_package_faces_hold_a_docstring_and_nothing_else() -> None:
    faces = [path for path in FILES if path.name == "__init__.py"]
    assert len(faces) >= len(PACKAGES)
    for path in faces:
        assert "tests" not in path.relative_to(ROOT).parts, "a face there would shadow a package"
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert [type(node) for node in body] == [ast.Expr], path


def test_no_module_lacks_its_docstring() -> None:
    code = [path for path in FILES if "tests" not in path.relative_to(ROOT).parts]
    missing = [path for path in code if not ast.get_docstring(ast.parse(path.read_text()))]
    assert missing == []


@pytest.mark.parametrize("path", sorted((ROOT / "manifests").glob("serve*.yaml")), ids=str)
def test_serve_configurations_fit_ray_s_schema_and_ours(path: Path) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    (application,) = config.applications
    assert application.import_path == "cluster.app:app"
    assert parse_configuration(application.args).cluster.num_workers >= 1


def test_every_file_that_the_readme_names_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    words = text.replace("`", " ").replace(":", " ").replace(",", " ").split()
    named = {
        word.rstrip(".")
        for word in words
        if word.startswith(tuple(f"{p}/" for p in (*PACKAGES, "docs", "manifests")))
    }
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def named_tests(page: str) -> tuple[dict[str, list[str]], list[str]]:
    """The first cell of each line of a page's tables with its tests, and all that do not exist."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    held = {row[0].strip(): re.findall(r"`([^`]*)`", row[-1]) for row in rows}
    named = {tuple(test.split("::")) for tests in held.values() for test in tests}
    return held, ["::".join(test) for test in sorted(named) if test[1:] not in names_in(test[0])]


def test_every_test_that_the_page_of_behaviour_names_is_there() -> None:
    held, missing = named_tests("behaviour.md")
    headings = [behaviour for behaviour, tests in held.items() if not tests]
    assert headings == ["behaviour"], "a behaviour that no test holds"
    assert len(held) > 50
    assert missing == []


def test_every_test_that_the_page_of_failures_names_is_there() -> None:
    held, missing = named_tests("decisions/0024-known-failures-of-worker-designs.md")
    assert missing == []
    findings = [f"F{number}" for number in range(1, 17)]
    assert [name for name in held if name in findings] == findings
    without = [name for name, tests in held.items() if not tests]
    assert without == ["name", "F16"], "nothing holds it"


@cache
def names_in(file: str) -> set[tuple[str, ...]]:
    """The tests of a file, the classes of its state machines among them."""
    path = ROOT / file
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    machines = [target.id for target in targets if isinstance(target, ast.Name)]
    return {(name,) for name in functions + machines if name.lower().startswith("test")}


def test_the_scheduler_and_the_wire_load_no_torch() -> None:
    modules = "scheduler.engine, protocol.codec, protocol.scripted_executor"
    assert loaded_by(modules) & {"torch", "ray", "grpc"} == set()


def test_an_engine_whose_workers_are_elsewhere_loads_no_torch() -> None:
    loaded = loaded_by("cluster.engine_replica, cluster.ray_workers, cluster.worker_actor")
    assert "torch" not in loaded
    assert "ray" in loaded


def loaded_by(modules: str) -> set[str]:
    """What a fresh interpreter has loaded once it has imported `modules`."""
    found = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(found.stdout.split())
