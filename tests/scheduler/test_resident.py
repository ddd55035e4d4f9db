"""Requests that decode on their worker, tick by tick: what is planned and what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from protocol.exit_rule import NEVER, FinishReason, round_to_float32
from protocol.layout import Layout
from protocol.resident import ResidentBatch, ResidentTerms, RowState
from protocol.result import FailedRow, PlanResult, PrefillResult, ResidentResult, TokenLogprobs
from protocol.snapshot import SnapshotRoom
from tests.scheduler.bench import EOS, Bench, exit_after, fixed, make_profile, reasons, texts

if TYPE_CHECKING:
    from protocol.result import StepResult
    from scheduler.output import RequestOutput

DEPTHS = {5: 2, 6: 3, 7: 1, 8: 4}


def bench_of(
    max_ticks: int = 8, *, profile: dict[str, Any] | None = None, **settings: object
) -> Bench:
    """An engine over one worker that runs resident ticks."""
    sizes = make_profile(max_ticks=max_ticks, **(profile or {}))
    wish: dict[str, Any] = settings
    return Bench(sizes, **wish)


def test_one_request_in_many_ticks() -> None:
    bench = bench_of(hazard=exit_after(DEPTHS), chunk=4)
    bench.add("a", prompt=5, max_tokens=5)
    bench.finish()
    assert bench.traces() == [
        "+a | PREFILL a[0:4)",
        "PREFILL a[4:5) | TICKS a x8",
        "TICKS a x8",
        "-a",
    ]
    assert texts(bench.outputs) == {"a": ([1, 2, 3, 4, 5], [4, 2, 3, 1, 4])}
    # Each answer brings all outputs of its ticks at once.
    assert [output.tokens for output in bench.outputs] == [(1, 2, 3, 4), (5,)]
    stats = bench.engine.stats()
    assert (stats.tokens, stats.loops, stats.free_blocks) == (5, 14, stats.total_blocks)


def test_rows_that_tick_take_nothing_of_a_step_from_prompts() -> None:
    bench = bench_of(2, profile={"max_step_tokens": 4}, chunk=8, prefill=100)
    bench.add("a", max_tokens=3)
    bench.step()
    bench.add("b", prompt=8, max_tokens=1)
    bench.finish()
    prompts = [text for text in bench.traces() if "PREFILL b" in text]
    assert prompts == ["+b | PREFILL b[0:4) | TICKS a x1", "PREFILL b[4:8) | TICKS a b x2"]


def test_it_says_what_loop_by_loop_says() -> None:
    wishes: list[dict[str, Any]] = [
        {"exit_threshold": 0.5, "min_loops": 2},
        {"exit_threshold": 1.0},
        {"exit_threshold": 0.0, "max_loops": 3},
        {"forced_depths": (4, 1, 3, 2, 4, 1, 1, 2), "max_tokens": 8},
        {"stop_token_ids": (9, 21, 33, 40, 12, 55)},
    ]
    found = []
    for max_ticks in (0, 1, 3, 8):
        for plans_in_flight in (1, 2):
            bench = bench_of(
                max_ticks, hazard=None, token=None, plans_in_flight=plans_in_flight, chunk=2
            )
            for index, wish in enumerate(wishes):
                bench.add(f"r{index}", prompt=index + 1, **({"max_tokens": 8} | wish))
            bench.finish()
            ticks = any("TICKS" in text for text in bench.traces())
            assert ticks is (max_ticks > 0)
            assert ("LOOP" in " ".join(bench.traces())) is (max_ticks == 0)
            found.append((texts(bench.outputs), reasons(bench.outputs)))
            assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks
    assert all(each == found[0] for each in found)


def test_the_admission_says_how_exits_and_the_end_are_decided() -> None:
    bench = bench_of()
    bench.add(
        "gate", max_tokens=7, min_loops=2, max_loops=3, exit_threshold=0.75, stop_token_ids=(9, 4)
    )
    bench.add("full", max_tokens=3, exit_threshold=1.0, ignore_eos=True)
    bench.add("forced", max_tokens=3, forced_depths=(4, 2, 3))
    ((_, plan),) = bench.plan()
    assert [item.resident for item in plan.admits] == [
        ResidentTerms(2, 3, round_to_float32(0.25), 7, (EOS, 4, 9)),
        ResidentTerms(1, 4, NEVER, 3),
        ResidentTerms(2, 4, 0.0, 3, (EOS,), (4, 2, 3)),
    ]


@pytest.mark.parametrize(
    ("wish", "settings"),
    [
        ({}, {"resident": False}),
        ({}, {"exit_policy": "ouro_delayed"}),
        ({}, {"mode": "no_refill"}),
        ({}, {"min_coda_batch": 2}),
        ({"stop_token_ids": tuple(range(1, 17))}, {}),
    ],
)
def test_what_needs_the_scheduler_is_planned_loop_by_loop(
    wish: dict[str, Any], settings: dict[str, Any]
) -> None:
    bench = bench_of(**settings)
    bench.add("a", max_tokens=1, **wish)
    ((_, plan),) = bench.plan()
    assert plan.admits[0].resident is None
    assert [type(step).__name__ for step in plan.steps] == ["PrefillBatch"]
    # One stop token less, and the worker has room for all that end it.
    bench = bench_of()
    bench.add("a", stop_token_ids=tuple(range(1, 16)))
    ((_, plan),) = bench.plan()
    assert plan.admits[0].resident is not None


def test_prompts_and_single_loops_beside_it_get_on_with_every_plan() -> None:
    bench = bench_of(chunk=2)
    bench.add("a", max_tokens=9)
    bench.step()
    bench.add("prompt", prompt=5, max_tokens=1)
    bench.add("single", prompt=1, max_tokens=2, stop_token_ids=tuple(range(10, 40)))
    for _ in range(4):
        bench.step()
    assert bench.traces()[:5] == [
        "+a | PREFILL a[0:1) | TICKS a x8",
        "+prompt | +single | PREFILL prompt[0:2) single[0:1) | TICKS a x1",
        "CODA single@0x4#0 | PRELUDE single@1 | PREFILL prompt[2:4) | LOOP single@1d0 | TICKS a x1",
        "PREFILL prompt[4:5) | LOOP single@1d1 | TICKS a prompt x1",
        "-prompt | LOOP single@1d2 | TICKS a x1",
    ]


def test_ticks_end_with_a_request_while_somebody_waits() -> None:
    bench = bench_of(profile={"num_slots": 1}, hazard=exit_after({1: 1, 2: 1}), max_ticks=32)
    bench.add("a", max_tokens=3)
    bench.add("b", max_tokens=2)
    bench.finish()
    assert bench.traces() == [
        "+a | PREFILL a[0:1) | TICKS a x16 yields",
        "-a",
        "+b | PREFILL b[0:1) | TICKS b x16",
        "-b",
    ]


def test_an_arrival_does_not_wait_for_all_ticks_in_flight() -> None:
    bench = bench_of(plans_in_flight=2)
    bench.add("a", max_tokens=50)
    assert len(bench.send_plans()) == 2
    assert bench.send_plans() == []
    bench.add("b", max_tokens=20)
    # One plan more than usual, which ends the ticks ahead of it; then that is enough.
    assert bench.send_plans() == ["+b | PREFILL b[0:1) | TICKS a b x8"]
    bench.add("c", max_tokens=2)
    assert bench.send_plans() == []
    bench.engine.abort("c")
    bench.land()
    bench.land()
    bench.engine.abort("a")
    assert [text for text in bench.send_plans() if text.startswith("-a")] == ["-a | TICKS b x8"]
    bench.finish()
    assert reasons(bench.outputs) == {"b": FinishReason.LENGTH}


def test_blocks_come_before_the_ticks_that_reach_them() -> None:
    bench = bench_of(3, profile={"block_size": 2}, reservation="incremental", plans_in_flight=2)
    bench.add("a", prompt=3, max_tokens=9, exit_threshold=0.0, min_loops=2)
    bench.send_plans()
    first, second = bench.plans
    # Two blocks a plane hold the prompt and one token; 3 ticks give at most 1 + 1 outputs, 6 ticks
    # 1 + 3, and outputs need room from position 3 on.
    assert [len(item.tables[0]) for item in first.admits] == [2]
    assert [len(grant.tables[0]) for grant in first.grants] == [1]
    assert [len(grant.tables[0]) for grant in second.grants] == [1]
    bench.finish()
    assert len(texts(bench.outputs)["a"][0]) == 9
    assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks


def test_a_plan_has_as_many_ticks_as_its_interval_has_time_for() -> None:
    bench = bench_of(16, tick_interval=0.05)
    bench.add("a", max_tokens=60, exit_threshold=1.0)
    found = []
    for tick_us in (0, 2_000, 10_000, 10_000, 500_000, 500_000, 1, 1):
        ((lane, plan),) = bench.plan()
        batch = plan.steps[-1]
        assert isinstance(batch, ResidentBatch)
        found.append(batch.max_ticks)
        result = bench.run(lane, plan)
        times = (0,) * (len(plan.steps) - 1) + (tick_us * batch.max_ticks,)
        bench.apply(lane, replace(result, device_us=times))
    # Unknown twice; then 2 ms, and with half of what is new 6, 8, 254, 377 and 189 ms.
    assert found == [16, 16, 16, 8, 6, 1, 1, 1]


def test_prompts_are_cut_where_a_pass_of_them_would_take_too_long_for_rows_that_tick() -> None:
    bench = bench_of(1, profile={"max_step_tokens": 1000}, chunk=None, prefill=None)
    bench.add("a", prompt=10, max_tokens=9, exit_threshold=1.0)
    ((lane, plan),) = bench.plan()
    # 2 ms a token, and 10 ms a tick: 4 passes of 40 ms hold 80 tokens.
    bench.apply(lane, replace(bench.run(lane, plan), device_us=(20_000, 10_000)))
    for name in "bc":
        bench.add(name, prompt=50, max_tokens=2)
    bench.finish()
    assert "PREFILL b[8:50) c[8:46)" in bench.traces()[1]  # the rest is cached
    assert "PREFILL c[46:50)" in bench.traces()[2]


def test_an_end_that_comes_late_leaves_inert_rows_behind() -> None:
    bench = bench_of(4, token=fixed([5, 9]), hazard=exit_after({1: 1}), plans_in_flight=2)
    bench.add("a", max_tokens=30, stop_token_ids=(9,))
    bench.finish()
    assert texts(bench.outputs)["a"] == ([5, 9], [4, 1])
    stats = bench.engine.stats()
    assert (stats.finished, stats.discarded_rows) == ({FinishReason.STOP: 1}, 1)


def test_no_plan_is_made_for_what_the_ticks_in_flight_end_anyway() -> None:
    bench = bench_of(8, plans_in_flight=4)
    bench.add("a", max_tokens=3, exit_threshold=1.0)
    assert bench.send_plans() == ["+a | PREFILL a[0:1) | TICKS a x8"]
    bench.finish()
    assert bench.traces() == ["+a | PREFILL a[0:1) | TICKS a x8", "-a"]


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("layout", list(Layout))
def test_a_victim_leaves_between_two_plans_and_says_the_same(steps: int, layout: Layout) -> None:
    room = SnapshotRoom(10_000, 10, 1, 2)
    bench = bench_of(
        2,
        profile={"num_slots": 1, "snapshots": room, "layout": layout},
        hazard=exit_after({1: 2, 2: 1, 3: 3}),
        policy="priority",
        preemption=True,
        reservation="incremental",
        plans_in_flight=2,
    )
    bench.add("low", max_tokens=5, priority=9)
    for _ in range(steps):
        bench.step()
    bench.send_plans()
    bench.add("high", max_tokens=3, priority=1)
    bench.finish()
    assert texts(bench.outputs) == {
        "low": ([1, 2, 3, 4, 5], [4, 2, 1, 3, 4]),
        "high": ([1, 2, 3], [4, 2, 1]),
    }
    stats = bench.engine.stats()
    assert stats.preemptions == stats.resumptions == (steps < 3)
    assert (stats.suspended, stats.free_blocks) == (0, stats.total_blocks)


class Answered:
    """One resident row in flight, and what its worker would say of it. Owner: one test."""

    def __init__(self, **params: object) -> None:
        self.bench = bench_of(4, token=fixed([5, 6, 7, 8, 9, 10, 11, 12]))
        wish: dict[str, Any] = {"max_tokens": 8, "exit_threshold": 0.0, **params}
        self.key = self.bench.add("a", **wish)
        ((_, self.plan),) = self.bench.plan()
        self.result = self.bench.run("lane-0", self.plan)
        prefill, row = self.result.steps
        assert isinstance(row, ResidentResult)
        self.prefill, self.row = prefill, row

    def apply(self, row: StepResult | None, *failed: FailedRow) -> RequestOutput:
        """The one output that comes of this answer."""
        steps = (self.prefill,) if row is None else (self.prefill, row)
        result = PlanResult(1, 1, steps, failed, (0,) * len(steps))
        (output,) = self.bench.apply("lane-0", result)
        return output


def test_rows_that_cannot_be_are_dropped_and_end_their_request() -> None:
    deep, foreign = ((4, 5, 1, 1, 1),), ((5, 64, 7, 8, 9),)
    row = Answered().row
    wrong: tuple[StepResult | None, ...] = (
        replace(row, tokens=foreign),
        replace(row, exit_depths=deep),
        replace(row, logprobs=(TokenLogprobs(-1.0),) * 5),
        PrefillResult(row.keys, (1,)),
        None,
    )
    for step in wrong:
        answered = Answered()
        end = answered.apply(step)
        assert "lacks its Resident row" in (end.error or "")
        answered.bench.finish()


def test_a_row_that_failed_keeps_what_it_gave_before() -> None:
    answered = Answered()
    end = answered.apply(answered.row, FailedRow(answered.key, "not a number"))
    assert (end.tokens, end.error) == ((5, 6, 7, 8, 9), "not a number")


def test_an_end_that_no_output_explains_is_an_error() -> None:
    answered = Answered()
    end = answered.apply(replace(answered.row, states=(RowState.FINISHED,)))
    assert "ended it after an output that is no end" in (end.error or "")


def test_what_is_behind_an_end_is_no_part_of_it() -> None:
    answered = Answered(stop_token_ids=(7,))
    assert answered.row.tokens == ((5, 6, 7),)
    longer = replace(answered.row, tokens=((5, 6, 7, 8),), exit_depths=((4, 1, 1, 1),))
    end = answered.apply(longer)
    assert (end.tokens, end.finish_reason) == ((5, 6, 7), FinishReason.STOP)


def test_log_probabilities_come_with_every_output() -> None:
    answered = Answered(logprobs=2)
    output = answered.apply(answered.row)
    assert len(output.logprobs) == len(output.tokens) == 5
    lacking = Answered(logprobs=2)
    row = replace(lacking.row, logprobs=(*lacking.row.logprobs[:4], None))
    end = lacking.apply(row)
    assert "lacks its Resident row" in (end.error or "")


def test_rows_of_others_beside_a_wrong_one_count() -> None:
    bench = bench_of(4)
    keys = [bench.add(name, max_tokens=9) for name in "ab"]
    ((_, plan),) = bench.plan()
    result = bench.run("lane-0", plan)
    prefill, ticks = result.steps
    assert isinstance(ticks, ResidentResult)
    wrong = replace(ticks, exit_depths=(ticks.exit_depths[0], (9, *ticks.exit_depths[1][1:])))
    answer = PlanResult(1, 1, (prefill, wrong), (), (0, 0))
    outputs = {output.key: output for output in bench.apply("lane-0", answer)}
    assert outputs[keys[0]].tokens == (1, 2)
    assert outputs[keys[1]].finish_reason is FinishReason.ERROR
    assert bench.engine.stats().stale_rows == 1
    assert isinstance(plan.steps[-1], ResidentBatch)
