"""Which stages a plan runs: refill and no refill, minimum coda batch, token budget, fairness."""

from __future__ import annotations

import pytest

from protocol.exit_rule import FinishReason
from protocol.plan import PrefillBatch, RecurrentBatch
from tests.scheduler.bench import Bench, make_profile, reasons, texts

MODES = ("refill", "no_refill")


def fast_and_slow(mode: str) -> Bench:
    """A request whose gate always fires after two loops beside one whose gate never does."""
    bench = Bench(hazard=None, mode=mode)
    bench.add("fast", max_tokens=3, exit_threshold=0.0, min_loops=2)
    bench.add("slow", max_tokens=2, exit_threshold=1.0)
    bench.finish()
    assert texts(bench.outputs) == {"fast": ([1, 2, 3], [4, 2, 2]), "slow": ([1, 2], [4, 4])}
    return bench


def core_batches(bench: Bench) -> list[list[str]]:
    """The request ids of every RECURRENT step."""
    return [
        [key.request_id for key in step.keys]
        for plan in bench.plans
        for step in plan.steps
        if isinstance(step, RecurrentBatch)
    ]


def test_refill_lets_a_token_join_those_still_looping() -> None:
    bench = fast_and_slow("refill")
    assert core_batches(bench) == [["fast", "slow"]] * 4
    assert bench.traces() == [
        "+fast | +slow | PREFILL fast[0:1) slow[0:1)",
        "CODA fast@0x4#0 slow@0x4#0 | PRELUDE fast@1 slow@1 | LOOP fast@1d0 slow@1d0",
        "LOOP fast@1d1 slow@1d1",
        "CODA fast@1x2#1 | PRELUDE fast@2 | LOOP fast@2d0 slow@1d2",
        "LOOP fast@2d1 slow@1d3",
        "CODA fast@2x2#2 slow@1x4#1",
        "-fast | -slow",
    ]


def test_no_refill_runs_codas_when_the_whole_cohort_has_left_the_core() -> None:
    bench = fast_and_slow("no_refill")
    assert core_batches(bench) == [["fast", "slow"]] * 2 + [["slow"]] * 2 + [["fast"]] * 2
    assert bench.traces() == [
        "+fast | +slow | PREFILL fast[0:1) slow[0:1)",
        "CODA fast@0x4#0 slow@0x4#0 | PRELUDE fast@1 slow@1 | LOOP fast@1d0 slow@1d0",
        "LOOP fast@1d1 slow@1d1",
        "LOOP slow@1d2",
        "LOOP slow@1d3",
        "CODA fast@1x2#1 slow@1x4#1 | PRELUDE fast@2 | LOOP fast@2d0",
        "-slow | LOOP fast@2d1",
        "CODA fast@2x2#2",
        "-fast",
    ]


def test_without_refill_a_prompt_runs_beside_the_cohort_and_joins_the_next() -> None:
    bench = Bench(mode="no_refill")
    bench.add("old", max_tokens=3)
    bench.step()
    bench.step()
    bench.add("new", max_tokens=2)
    bench.finish()
    assert bench.traces()[2:7] == [
        "+new | PREFILL new[0:1) | LOOP old@1d1",
        "LOOP old@1d2",
        "LOOP old@1d3",
        "CODA old@1x4#1 new@0x4#0 | PRELUDE old@2 new@1 | LOOP old@2d0 new@1d0",
        "LOOP old@2d1 new@1d1",
    ]


def test_codas_wait_for_each_other() -> None:
    bench = Bench(hazard=None, min_coda_batch=2)
    bench.add("a", max_tokens=2, exit_threshold=0.0)
    bench.add("b", max_tokens=2, exit_threshold=0.0, min_loops=2)
    bench.add("slow", max_tokens=2, exit_threshold=1.0)
    bench.finish()
    assert bench.traces()[1:7] == [
        "CODA a@0x4#0 b@0x4#0 slow@0x4#0 | PRELUDE a@1 b@1 slow@1 | LOOP a@1d0 b@1d0 slow@1d0",
        "LOOP b@1d1 slow@1d1",
        "CODA a@1x1#1 b@1x2#1 | LOOP slow@1d2",
        "-a | -b | LOOP slow@1d3",
        "CODA slow@1x4#1",
        "-slow",
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_huge_minimum_never_deadlocks(mode: str) -> None:
    bench = Bench(hazard=None, min_coda_batch=1000, mode=mode)
    for index, threshold in enumerate((0.0, 0.5, 1.0)):
        bench.add(f"r{index}", prompt=2 + index, max_tokens=5, exit_threshold=threshold)
    for _ in range(3):
        bench.step()
    bench.add("late", max_tokens=3)
    assert set(reasons(bench.finish()).values()) == {FinishReason.LENGTH}
    assert len(reasons(bench.outputs)) == 4


@pytest.mark.parametrize("mode", MODES)
def test_arrivals_never_starve_a_decoding_request(mode: str) -> None:
    bench = Bench(make_profile(num_slots=3), mode=mode, chunk=4, prefill=4)
    bench.add("old", max_tokens=9)
    bench.step()
    loops = 0
    for index in range(12):
        bench.add(f"new{index}", prompt=4, max_tokens=1)
        ((lane, plan),) = bench.plan()
        loops += sum(
            key.request_id == "old"
            for step in plan.steps
            if isinstance(step, RecurrentBatch)
            for key in step.keys
        )
        bench.apply(lane, bench.run(lane, plan))
    assert loops >= 11
    assert sum(name.startswith("new") for name in reasons(bench.outputs)) >= 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [2, 4, 7])
def test_rows_and_prompt_tokens_stay_within_the_budget(mode: str, budget: int) -> None:
    bench = Bench(hazard=None, mode=mode, max_step_tokens=budget, prefill=100, chunk=5)
    for index in range(8):
        bench.add(f"r{index}", prompt=1 + 3 * index, max_tokens=4, exit_threshold=0.5)
    bench.finish()
    used = []
    for plan in bench.plans:
        rows = {
            key for step in plan.steps if not isinstance(step, PrefillBatch) for key in step.keys
        }
        prompt = [sum(step.counts) for step in plan.steps if isinstance(step, PrefillBatch)]
        used.append(len(rows) + sum(prompt))
    assert max(used) == budget
    assert len(reasons(bench.outputs)) == 8


@pytest.mark.parametrize("settings", [{"mode": "no_refill"}, {"min_coda_batch": 3}])
def test_no_mode_changes_a_token(settings: dict[str, object]) -> None:
    answers = []
    for wish in ({}, settings):
        bench = Bench(hazard=None, token=None, chunk=3, **wish)
        for index in range(12):
            bench.add(f"r{index}", prompt=1 + index, max_tokens=1 + index, exit_threshold=0.5)
        answers.append(texts(bench.finish()))
    assert answers[0] == answers[1]
