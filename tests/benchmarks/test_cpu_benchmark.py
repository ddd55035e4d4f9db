"""The benchmark of a CPU's own kernels compares the same work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.cpu import CPU, ROWS, main, parts_of
from worker.models.config import read_config
from worker.models.loop_kernels import loop_kernels
from worker.models.registry import EMBEDDED_DIRECTORY

if TYPE_CHECKING:
    from pathlib import Path


def test_the_report_holds_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    main(["--json", str(file), "--quick"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    assert len(values) == len(results) == len(ROWS) * 3 * 3
    for rows in ROWS:
        for part in ("loop", "attention", "products"):
            plain, own, ratio = (
                values[f"{rows} rows, {part}: {column}"] for column in ("torch", "ours", "ratio")
            )
            assert ratio == pytest.approx(plain / own)


def test_every_part_can_run_again() -> None:
    kernels = loop_kernels(CPU, torch.float32)
    parts = parts_of(read_config(EMBEDDED_DIRECTORY), 2, "auto", kernels)
    assert set(parts) == {"loop", "attention", "products"}
    for part in parts.values():
        part()
        part()
