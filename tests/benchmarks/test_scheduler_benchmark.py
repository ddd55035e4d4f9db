"""The scheduler's benchmark runs, reports what it says it does, and repeats its simulation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.host_cost import host_costs
from benchmarks.placement import Simulation, compare_placements
from benchmarks.report import Figure, machine, table, write_json
from benchmarks.scheduler import main

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def test_the_report_holds_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scheduler.json"
    main(["--json", str(file), "--rounds", "12", "--requests", "30", "--workers", "3"])
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["benchmark"], report["machine"]) == ("scheduler", machine())
    results = report["results"]
    assert {frozenset(result) for result in results} == {
        frozenset({"name", "value", "unit", "goal", "met"})
    }
    assert len(results) == 3 * 4 * 3 + 3 * 3
    assert all(result["value"] > 0 for result in results)
    goals = [result for result in results if result["goal"] is not None]
    assert [(goal["name"], goal["goal"]) for goal in goals] == [
        ("loop, 256 running: plan + apply", 300.0),
        ("ticks, 256 running: plan + apply, a row and tick", 1.0),
    ]
    assert all(goal["met"] is (goal["value"] < goal["goal"]) for goal in goals)
    shown = capsys.readouterr()
    assert all(result["name"] in shown.out for result in results)
    assert "loop_debt: 30 requests on 3 workers" in shown.err


def test_goals_are_told() -> None:
    figures = [Figure("a", 2.0, "us", 3.0), Figure("long", 3.0, "us", 3.0), Figure("b", 1.0, "s")]
    assert [figure.met for figure in figures] == [True, False, None]
    assert table(figures).splitlines() == [
        "a            2.0 us  goal < 3: met",
        "long         3.0 us  goal < 3: MISSED",
        "b            1.0 s",
    ]
    assert table([]) == ""


def test_an_empty_report(tmp_path: Path) -> None:
    write_json(tmp_path / "empty.json", "nothing", [])
    assert json.loads((tmp_path / "empty.json").read_text(encoding="utf-8"))["results"] == []


def test_costs_are_measured_for_each_size() -> None:
    names = [figure.name for figure in host_costs(8, sizes=(1, 3))]
    assert names[0] == "loop, 1 running: plan"
    assert names[-1] == "mixed, 3 running: plan + apply"
    assert len(names) == 12


def test_a_simulation_ends_every_request_and_repeats_itself() -> None:
    took = Simulation("loop_debt", 60, 2).run()
    assert len(took) == 60
    assert took == Simulation("loop_debt", 60, 2).run()
    assert compare_placements(20, 2) == compare_placements(20, 2)


def test_it_needs_no_torch() -> None:
    code = "import sys, benchmarks.scheduler; print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == "set()"
