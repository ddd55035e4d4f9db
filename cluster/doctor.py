"""Doctor: whether this machine can run Loopmesh, and what to do where it cannot.

Nothing here starts Ray, opens a lasting port or loads weights; every wait is bounded. What may
be missing is imported only inside its check.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from cluster.ports import bind_problem, connect_problem
from protocol.config import DEFAULT_MODEL, ModelSettings
from protocol.errors import LoopmeshError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from protocol.config import Configuration

PACKAGES = ("protocol", "worker", "scheduler", "cluster")
MINIMUM_PYTHON = (3, 11)
MINIMUM_SHARED_MEMORY = 256 * 2**20
"""Bytes that Ray's object store should find free in /dev/shm."""
PORTS_TRIED = 50
REINSTALL = "install the dependencies that are listed as missing, or make the environment anew"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `mend` says what to do, and is empty when all is well."""

    name: str
    ok: bool
    detail: str
    mend: str = ""


def run_checks(
    configuration: Configuration, environment: Mapping[str, str], host: str, port: int
) -> list[Check]:
    """All checks, in the order in which a failing one should be mended.

    `environment` holds the variables that Ray reads; `host` and `port` are the endpoint's.
    """
    return [
        check_python(),
        *check_dependencies(declared_requirements()),
        check_import_roots(package_roots()),
        check_devices(),
        check_model(configuration.worker.model),
        check_http_port(host, port),
        check_plan_ports(*configuration.cluster.plan_port_range),
        check_shared_memory(Path("/dev/shm")),
        check_ray_auth(environment),
        check_ray_cluster(environment.get("RAY_ADDRESS", "")),
    ]


def render(checks: Sequence[Check]) -> str:
    """The findings as lines for a person."""
    lines = []
    for check in checks:
        lines.append(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
        if not check.ok:
            lines.append(f"      -> {check.mend}")
    failed = sum(not check.ok for check in checks)
    lines.append(f"{failed} of {len(checks)} checks failed" if failed else "everything is ready")
    return "\n".join(lines)


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """The interpreter is new enough."""
    found = ".".join(str(part) for part in version)
    wanted = ".".join(str(part) for part in MINIMUM_PYTHON)
    ok = version[:2] >= MINIMUM_PYTHON
    mend = "" if ok else f"create the virtual environment with Python {wanted} or newer"
    return Check("python", ok, f"{found} on {platform.system()} {platform.machine()}", mend)


def declared_requirements() -> list[str]:
    """What the project says it needs: from its pyproject.toml, or the installed metadata."""
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if path.exists():
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        return [str(requirement) for requirement in project["dependencies"]]
    try:
        return importlib.metadata.requires("loopmesh") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check_dependencies(requirements: Sequence[str]) -> list[Check]:
    """Every required distribution is installed in a version that fits."""
    checks = []
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        mend = f"run: {Path(sys.executable).name} -m pip install '{text}'"
        try:
            found = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(wanted.name, False, f"missing, needed is {text}", mend))
            continue
        ok = wanted.specifier.contains(found, prereleases=True)
        detail = found if ok else f"{found}, needed is {text}"
        checks.append(Check(wanted.name, ok, detail, "" if ok else mend))
    return checks


def package_roots() -> dict[str, str]:
    """The folder that each of the four packages is imported from; "" for one not found."""
    specs = {name: importlib.util.find_spec(name) for name in PACKAGES}
    return {
        name: str(Path(spec.origin).resolve().parent.parent) if spec and spec.origin else ""
        for name, spec in specs.items()
    }


def check_import_roots(roots: Mapping[str, str]) -> Check:
    """The packages, whose names are common words, are all ours and of one version."""
    distinct = sorted(set(roots.values()))
    if len(distinct) == 1 and distinct[0]:
        return Check("import roots", True, f"all four packages come from {distinct[0]}")
    detail = ", ".join(f"{name} from {root or 'nowhere'}" for name, root in roots.items())
    mend = (
        "start Python from the checkout, and uninstall whatever else provides a package named "
        + ", ".join(PACKAGES)
    )
    return Check("import roots", False, detail, mend)


def check_devices() -> Check:
    """What torch can compute on."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("devices", False, f"torch: {error}", REINSTALL)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Check("devices", True, f"{len(names)} CUDA: {', '.join(names)}")
    threads = f"{torch.get_num_threads()} threads, {os.cpu_count()} cores"
    return Check("devices", True, f"no CUDA device; CPU with {threads}")


def check_model(settings: ModelSettings) -> Check:
    """The model's files are complete and of the right shapes; headers only.

    A hub id is not fetched here: the shipped model is checked instead.
    """
    if settings.model != DEFAULT_MODEL and not Path(settings.model).expanduser().exists():
        settings = ModelSettings()
    try:
        from cluster.tokenizer import load_tokenizer
        from worker.models.config import read_config
        from worker.models.loader import verify_checkpoint
        from worker.models.ouro import tensor_shapes
        from worker.models.registry import resolve_model

        directory = resolve_model(settings)
        config = read_config(directory)
        tensors = verify_checkpoint(directory, tensor_shapes(config))
        tokenizer = load_tokenizer(directory)
    except (ImportError, OSError) as error:
        return Check("model", False, f"cannot import its reader: {error}", REINSTALL)
    except LoopmeshError as error:
        mend = "check out the project again" if settings.model == DEFAULT_MODEL else "fix the files"
        return Check("model", False, str(error), f"{mend}, or choose another --model")
    detail = f"{settings.model}: {len(tensors)} tensors, {tokenizer.vocab_size} tokens"
    return Check("model", True, detail)


def check_http_port(host: str, port: int) -> Check:
    """The endpoint's address can be bound."""
    problem = bind_problem(host, port)
    if problem is None:
        return Check("http port", True, f"{host}:{port} is free")
    mend = "stop what uses it, or pass another --host or --port"
    return Check("http port", False, f"{host}:{port}: {problem}", mend)


def check_plan_ports(first: int, last: int) -> Check:
    """A worker finds a port for its plan stream."""
    tried = range(first, min(last + 1, first + PORTS_TRIED))
    for port in tried:
        if bind_problem("", port) is None:
            return Check("plan ports", True, f"{port} is free, of {first} to {last}")
    mend = "set cluster.plan_port_range to a range that is free on every node"
    return Check("plan ports", False, f"none of {tried[0]} to {tried[-1]} is free", mend)


def check_shared_memory(path: Path) -> Check:
    """Ray's object store has room; with too little it falls back to slow files."""
    mend = "give the container more shared memory, such as docker run --shm-size=1g"
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Check("shared memory", False, f"{path}: {error.strerror}", mend)
    ok = free >= MINIMUM_SHARED_MEMORY
    detail = f"{free // 2**20} MiB free in {path}"
    return Check("shared memory", ok, detail, "" if ok else mend)


def check_ray_auth(environment: Mapping[str, str]) -> Check:
    """Ray's authentication is chosen on purpose, and its token can be read."""
    mode = environment.get("RAY_AUTH_MODE", "")
    if mode == "disabled":
        return Check("ray auth", True, "RAY_AUTH_MODE=disabled")
    shown = f"RAY_AUTH_MODE={mode}" if mode else "RAY_AUTH_MODE is unset (Ray uses a token file)"
    if environment.get("RAY_AUTH_TOKEN"):
        return Check("ray auth", True, f"{shown}, token from RAY_AUTH_TOKEN")
    home = environment.get("HOME", "/")
    given = environment.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(given) if given else Path(home) / ".ray" / "auth_token"
    if not path.exists() and not mode and not given:
        return Check("ray auth", True, f"{shown}; a local cluster will write {path}")
    try:
        ok = bool(path.read_text(encoding="utf-8").strip())
        detail = f"{shown}, token file {path}" + ("" if ok else " is empty")
    except (OSError, UnicodeDecodeError) as error:
        ok, detail = False, f"{shown}, token file {path}: {error}"
    mend = "point RAY_AUTH_TOKEN_PATH at the cluster's token, or set RAY_AUTH_MODE=disabled"
    return Check("ray auth", ok, detail, "" if ok else mend)


def check_ray_cluster(address: str) -> Check:
    """The cluster that RAY_ADDRESS names answers; without one, a local cluster is started."""
    if address in ("", "auto", "local"):
        return Check("ray cluster", True, f"RAY_ADDRESS is {address or 'unset'}: not checked")
    problem = connect_problem(address)
    if problem is None:
        return Check("ray cluster", True, f"{address} answers")
    mend = "start the cluster, or unset RAY_ADDRESS to start a local one"
    return Check("ray cluster", False, f"RAY_ADDRESS={address}: {problem}", mend)
