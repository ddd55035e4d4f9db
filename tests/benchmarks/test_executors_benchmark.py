"""The benchmark of executors runs on a CPU with a Ray session of its own, and ends it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import psutil
import pytest
import ray
import torch

from benchmarks.executors import configuration_of, main, measure, scale_of, scheduler_settings
from protocol.config import ModelSettings
from tests.ray_cluster import eventually

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.mark.ray
def test_the_report_holds_every_figure(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    home = os.environ.get("HOME")
    file = tmp_path / "executors.json"
    main(["--json", str(file), "--device", "cpu", "--quick"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    name = "16 ticks a plan"
    assert list(values) == [
        f"{name}: {column}"
        for column in ("local", "Ray", "Ray / local", "1 on Ray", "2 on Ray", "two / one")
    ]
    local, remote = values[f"{name}: local"], values[f"{name}: Ray"]
    assert values[f"{name}: Ray / local"] == pytest.approx(100 * remote / local)
    one, two = values[f"{name}: 1 on Ray"], values[f"{name}: 2 on Ray"]
    assert values[f"{name}: two / one"] == pytest.approx(two / one)
    assert all(result["value"] > 0 and result["goal"] is None for result in results)
    assert not ray.is_initialized()
    assert os.environ.get("HOME") == home
    assert eventually(lambda: _running(before) == [])


def _running(before: set[psutil.Process]) -> list[psutil.Process]:
    """Processes that have come since and live."""
    children = set(psutil.Process().children(recursive=True)) - before
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.ray
def test_one_worker_is_compared_at_every_number_of_ticks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scale = scale_of(CPU, quick=True)
    configuration = configuration_of(scale, ModelSettings(), CPU)
    figures = measure(configuration, scale, (1, 4), two=False)
    assert [figure.name for figure in figures if figure.unit == "%"] == [
        "1 ticks a plan: Ray / local",
        "4 ticks a plan: Ray / local",
    ]
    assert "two workers are left out" in capsys.readouterr().err


def test_goals_hold_where_they_are_meant_to() -> None:
    cuda = scale_of(torch.device("cuda"), quick=False)
    assert (cuda.ray_goal, cuda.two_goal) == (97.0, 1.9)
    whole = scale_of(CPU, quick=False)
    assert (whole.ray_goal, whole.two_goal) == (97.0, None)
    assert len(whole.half) * 2 == len(whole.asks)
    configuration = configuration_of(cuda, ModelSettings(), torch.device("cuda"))
    assert configuration.cluster.num_gpus == 1.0
    assert configuration.worker.num_slots == len(cuda.half) == 32
    assert configuration_of(whole, ModelSettings(), CPU).worker.num_threads == 1
    assert scheduler_settings(64).max_ticks == 64
