"""Joining Ray: an address where nobody answers is told at once, before Ray waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.ports import bind_problem, connect_problem, free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_dead_ray_address_is_one_clear_line(scheme: str) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    found = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "generate", "hi", "--executor", "ray"],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 2
    *progress, last = found.stderr.splitlines()
    assert last.startswith(f"loopmesh: error: nobody answers at RAY_ADDRESS={address}")
    assert progress == ["loopmesh: loading ouro-tiny"]


def test_ports_are_told_apart() -> None:
    port = free_port()
    assert bind_problem("127.0.0.1", port) is None
    assert connect_problem(f"127.0.0.1:{port}") is not None
    assert connect_problem("nonsense") == "no host:port"
    assert bind_problem("127.0.0.1", 70_000) is not None
