"""The decode benchmark runs on a CPU, and reports what it says it does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.decode import main
from benchmarks.report import Figure

if TYPE_CHECKING:
    from pathlib import Path


def test_the_report_holds_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    main(["--json", str(file), "--device", "cpu"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    assert values["1 rows, depth 2.5: mean depth"] > 2.0
    assert values["4 rows, depth 4: mean depth"] == 4.0
    for rows in (1, 4):
        full = f"{rows} rows, depth 4"
        loops, tick = values[f"{full}: loops"], values[f"{full}: a tick"]
        # Every row loops in every tick, and gives a token each fourth time.
        assert abs(loops * tick / 1e3 - rows) < 1e-6
        assert abs(values[f"{full}: decode"] - loops / 4) < 1e-6
    assert all(result["goal"] is None for result in results)


def test_a_goal_may_be_a_least_value() -> None:
    assert [Figure("a", value, "tok/s", 2.0, at_least=True).met for value in (1, 2, 3)] == [
        False,
        True,
        True,
    ]
