"""The batch benchmark runs on a CPU, and reports what it says it does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.batch import main

if TYPE_CHECKING:
    from pathlib import Path


def test_the_report_has_the_ratio_of_each_round(tmp_path: Path) -> None:
    file = tmp_path / "batch.json"
    main(["--json", str(file), "--device", "cpu", "--quick", "--rounds", "2"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    assert len(values) == len(results) == 5
    assert all(value > 0 for value in values.values())
    goals = [result["name"] for result in results if result["goal"] is not None]
    assert goals == ["batch job of the engine's speed"]
    least, most = values["least of the rounds"], values["most of the rounds"]
    assert least <= values[goals[0]] <= most
