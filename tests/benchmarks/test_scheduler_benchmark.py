"""The scheduler's benchmark runs, reports what it says it does, and repeats its simulation."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.host_cost import host_costs
from benchmarks.placement import compare_placements
from benchmarks.report import Figure, machine, table, write_json
from benchmarks.scheduler import main
from benchmarks.simulation import (
    LONG_CONTEXT,
    LOOPS,
    OUTPUTS,
    SHORT_CONTEXT,
    SLOTS,
    Case,
    Outcome,
    Simulation,
    answer,
    arrivals,
    looped_rows,
)
from protocol.identity import RequestKey
from protocol.plan import CodaBatch, ExecutionPlan, PrefillBatch, PreludeBatch, RecurrentBatch

if TYPE_CHECKING:
    from protocol.config import PlacementName

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
    assert len(results) == 3 * 4 * 3 + (4 + 1) * 3 * 3
    assert all(result["value"] > 0 for result in results)
    goals = [result for result in results if result["goal"] is not None]
    assert [(goal["name"], goal["goal"]) for goal in goals] == [
        ("loop, 256 running: plan + apply", 300.0),
        ("ticks, 256 running: plan + apply, a row and tick", 1.0),
    ]
    assert all(goal["met"] is (goal["value"] < goal["goal"]) for goal in goals)
    shown = capsys.readouterr()
    assert all(result["name"] in shown.out for result in results)
    assert "30 requests on 3 workers" in shown.err
    assert "1k context, load 0.95, loop_debt" in shown.err


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


@pytest.mark.parametrize("placement", ["loop_debt", "least_requests", "round_robin"])
def test_a_simulation_ends_every_request_and_repeats_itself(placement: PlacementName) -> None:
    case = Case(placement, 0.9, 3, requests=60, workers=2)
    outcome = Simulation(case).run()
    assert len(outcome.latencies) == 60
    assert max(outcome.latencies) <= outcome.makespan
    # Alone, an easy request of few outputs takes its prompt, a loop for each other output, a coda.
    step = SHORT_CONTEXT.step_ms
    least = step(LOOPS) + (min(OUTPUTS) - 1) * step(1) + step(0)
    assert min(outcome.latencies) >= least
    assert outcome == Simulation(case).run()


def test_one_request_takes_what_its_loops_take() -> None:
    for seed, cost in product(range(8), (SHORT_CONTEXT, LONG_CONTEXT)):
        case = Case("loop_debt", 0.5, seed, requests=1, workers=2, cost=cost)
        (request,) = arrivals(case)
        depth = LOOPS if request.request_id == "hard-0" else 1
        loops = depth * (request.outputs - 1)
        expected = cost.step_ms(LOOPS) + loops * cost.step_ms(1) + cost.step_ms(0)
        (took,) = Simulation(case).run().latencies
        assert took == pytest.approx(expected)


def test_offered_load_is_a_share_of_what_full_workers_do() -> None:
    case = Case("round_robin", 0.5, 1, requests=20_000, workers=10)
    came = list(arrivals(case))
    assert came == list(arrivals(Case("loop_debt", 0.5, 1, requests=20_000, workers=10)))
    loops = sum(request.outputs * (4 if "hard" in request.request_id else 1) for request in came)
    most = 10 * SLOTS / SHORT_CONTEXT.step_ms(SLOTS) * came[-1].at
    assert loops / most == pytest.approx(0.5, rel=0.03)


def test_a_plan_takes_time_for_its_looped_rows_alone() -> None:
    keys = (RequestKey("easy-1", 1), RequestKey("hard-2", 2))
    steps = (
        CodaBatch(keys, (3, 4), (4, 4), (0, 1)),
        PreludeBatch(keys, (4, 5), (-1, -1)),
        PrefillBatch((RequestKey("easy-3", 3),), (2,), (5,)),
        RecurrentBatch(keys, (4, 5), (0, 0)),
    )
    plan = ExecutionPlan(1, 1, steps=steps)
    assert looped_rows(plan) == 5 * LOOPS + 2
    assert SHORT_CONTEXT.step_ms(32) == pytest.approx(2.718)
    coda, prelude, prefill, loop = answer(plan).steps
    assert (coda.tokens, prelude.positions) == ((1, 1), (4, 5))  # type: ignore[union-attr]
    assert (prefill.ends, loop.survivals) == ((7,), (0.0, 1.0))  # type: ignore[union-attr]


def test_latencies_are_summed_up() -> None:
    outcome = Outcome(300.0, tuple(map(float, range(200))))
    assert (outcome.mean, outcome.p99) == (99.5, 198.0)


def test_figures_are_medians_by_load_and_policy() -> None:
    found = compare_placements(20, 2, loads=(0.5, 0.9), seeds=(1, 2, 3))
    assert [figure.name for figure in found[:4]] == [
        "1k context, load 0.5, loop_debt: all done",
        "1k context, load 0.5, loop_debt: mean request",
        "1k context, load 0.5, loop_debt: p99 request",
        "1k context, load 0.5, least_requests: all done",
    ]
    runs = [Simulation(Case("loop_debt", 0.5, seed, 20, 2)).run() for seed in (1, 2, 3)]
    assert found[0].value == sorted(run.makespan for run in runs)[1]
    assert found[2].value == sorted(run.p99 for run in runs)[1]
    assert found == compare_placements(20, 2, loads=(0.5, 0.9), seeds=(1, 2, 3), processes=2)


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
