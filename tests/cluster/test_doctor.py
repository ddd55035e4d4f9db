from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from cluster.doctor import (
    Check,
    check_dependencies,
    check_devices,
    check_http_port,
    check_import_roots,
    check_model,
    check_plan_ports,
    check_python,
    check_ray_auth,
    check_ray_cluster,
    check_shared_memory,
    declared_requirements,
    package_roots,
    render,
    run_checks,
)
from protocol.config import ClusterSettings, Configuration, ModelSettings

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def assert_failed(check: Check, detail: str) -> None:
    assert not check.ok
    assert detail in check.detail
    assert check.mend


def test_this_checkout_can_run() -> None:
    checks = run_checks(
        Configuration(), {"HOME": "/nonexistent", "RAY_AUTH_MODE": ""}, "127.0.0.1", free_port()
    )
    failed = [check for check in checks if not check.ok and check.name != "shared memory"]
    assert failed == []
    assert len({check.name for check in checks}) == len(checks)


def test_the_four_packages_come_from_this_checkout() -> None:
    assert set(package_roots().values()) == {str(ROOT)}
    assert check_import_roots(package_roots()).ok


@pytest.mark.parametrize("other", ["/elsewhere", ""])
def test_a_package_from_elsewhere_is_found(other: str) -> None:
    roots = package_roots() | {"worker": other}
    assert_failed(check_import_roots(roots), f"worker from {other or 'nowhere'}")
    assert_failed(check_import_roots(dict.fromkeys(roots, "")), "protocol from nowhere")


def test_python_must_be_new_enough() -> None:
    assert check_python().ok
    assert check_python((3, 11, 0)).ok
    assert check_python((4, 0, 0)).ok
    assert_failed(check_python((3, 10, 9)), "3.10.9")


def test_dependencies_are_those_of_the_project() -> None:
    requirements = declared_requirements()
    assert any(text.startswith("torch") for text in requirements)
    checks = check_dependencies(requirements)
    assert len(checks) == len(requirements)
    assert all(check.ok for check in checks)


def test_a_missing_or_old_dependency_says_what_to_install() -> None:
    old, missing, skipped = "numpy>=999", "no-such-distribution-here>=1", "nothing; extra == 'x'"
    first, second = check_dependencies([old, missing, skipped])
    assert_failed(first, "needed is numpy>=999")
    assert_failed(second, "missing")
    assert Path(sys.executable).name in first.mend
    assert f"'{old}'" in first.mend


def test_devices_are_named() -> None:
    assert check_devices().ok
    assert "CUDA" in check_devices().detail


def test_the_models_files_are_checked(tmp_path: Path) -> None:
    assert "4096 tokens" in check_model(ModelSettings()).detail
    assert check_model(ModelSettings(model="owner/not-fetched")).ok
    assert_failed(check_model(ModelSettings(model=str(tmp_path))), "config.json")


def test_a_port_in_use_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert_failed(check_http_port("127.0.0.1", port), "in use")
        assert_failed(check_plan_ports(port, port), f"none of {port} to {port}")
    assert check_http_port("127.0.0.1", port).ok
    assert check_plan_ports(port, port).ok
    assert_failed(check_http_port("127.0.0.1", 70_000), "70000")
    assert_failed(check_http_port("192.0.2.1", port), "192.0.2.1")


def test_the_next_plan_port_is_taken_when_one_is_in_use() -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        first, last = (port, port + 20) if port < 65_000 else (port - 20, port)
        assert check_plan_ports(first, last).ok


def test_shared_memory_is_measured(tmp_path: Path) -> None:
    assert "MiB free" in check_shared_memory(tmp_path).detail
    assert_failed(check_shared_memory(tmp_path / "missing"), "No such file")


def test_ray_authentication(tmp_path: Path) -> None:
    token = tmp_path / "token"
    named = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    assert check_ray_auth({"RAY_AUTH_MODE": "disabled"}).ok
    assert check_ray_auth({"HOME": str(tmp_path)}).ok
    assert check_ray_auth({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}).ok
    assert_failed(check_ray_auth({"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}), "auth_token")
    assert_failed(check_ray_auth(named), "No such file")
    token.write_text(" \n")
    assert_failed(check_ray_auth(named), "empty")
    token.write_text("secret")
    found = check_ray_auth(named)
    assert found.ok
    assert "secret" not in found.detail


def test_a_running_cluster_must_answer() -> None:
    for unchecked in ("", "auto", "local"):
        assert check_ray_cluster(unchecked).ok
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert check_ray_cluster(address).ok
        assert check_ray_cluster(f"ray://{address}").ok
    assert_failed(check_ray_cluster(address), "refused")
    assert_failed(check_ray_cluster("nonsense"), "no host:port")


def test_findings_are_lines_with_their_mend() -> None:
    fine, wrong = Check("a", True, "good"), Check("b", False, "bad", "mend it")
    assert render([fine]) == "ok    a: good\neverything is ready"
    assert render([fine, wrong]).splitlines() == [
        "ok    a: good",
        "FAIL  b: bad",
        "      -> mend it",
        "1 of 2 checks failed",
    ]


def test_the_configured_ports_are_the_checked_ones() -> None:
    port = free_port()
    configuration = Configuration(cluster=ClusterSettings(plan_port_range=(port, port)))
    checks = run_checks(configuration, {}, "127.0.0.1", port)
    details = {check.name: check.detail for check in checks}
    assert str(port) in details["plan ports"]
    assert str(port) in details["http port"]
