"""Literal plans: what is planned, when, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.plan import SLOT_TOKEN, Admission, PreludeBatch
from protocol.rng import RngKey
from tests.scheduler.bench import EOS, Bench, exit_after, fixed, make_profile, texts

if TYPE_CHECKING:
    from protocol.identity import RequestKey


def test_one_request_with_exits_at_scripted_depths() -> None:
    bench = Bench(hazard=exit_after({5: 2, 6: 3}), chunk=4)
    bench.add("a", prompt=5, max_tokens=3)
    outputs = bench.finish()
    assert bench.traces() == [
        "+a | PREFILL a[0:4)",
        "PREFILL a[4:5)",
        "CODA a@4x4#0 | PRELUDE a@5 | LOOP a@5d0",
        "LOOP a@5d1",
        "CODA a@5x2#1 | PRELUDE a@6 | LOOP a@6d0",
        "LOOP a@6d1",
        "LOOP a@6d2",
        "CODA a@6x3#2",
        "-a",
    ]
    assert texts(outputs) == {"a": ([1, 2, 3], [4, 2, 3])}
    stats = bench.engine.stats()
    assert (stats.tokens, stats.loops, stats.loops_saved) == (3, 9, 3)


def test_a_stop_token_ends_with_what_ran_after_it_discarded() -> None:
    bench = Bench(token=fixed([5, 9]), hazard=exit_after({2: 1}))
    bench.add("a", prompt=2, max_tokens=8, stop_token_ids=(9,))
    bench.finish()
    assert bench.traces() == [
        "+a | PREFILL a[0:2)",
        "CODA a@1x4#0 | PRELUDE a@2 | LOOP a@2d0",
        "CODA a@2x1#1 | PRELUDE a@3 | LOOP a@3d0",
        "-a",
    ]
    assert bench.engine.stats().discarded_rows == 2


def test_an_end_of_sequence_at_once_costs_one_loop_and_no_further_plan() -> None:
    bench = Bench(token=fixed([EOS]))
    bench.add("a", prompt=2, max_tokens=8)
    assert texts(bench.finish()) == {"a": ([EOS], [4])}
    assert bench.traces() == [
        "+a | PREFILL a[0:2)",
        "CODA a@1x4#0 | PRELUDE a@2 | LOOP a@2d0",
        "-a",
    ]
    assert bench.engine.stats().discarded_rows == 2


def test_one_output_needs_no_loop() -> None:
    bench = Bench()
    bench.add("a", prompt=3, max_tokens=1)
    bench.finish()
    assert bench.traces() == ["+a | PREFILL a[0:3)", "CODA a@2x4#0", "-a"]


def test_rows_that_exited_refill_the_batch_of_those_still_looping() -> None:
    bench = Bench(hazard=None)
    bench.add("fast", max_tokens=4, exit_threshold=0.0)
    bench.add("slow", max_tokens=2, exit_threshold=1.0)
    bench.finish()
    assert bench.traces() == [
        "+fast | +slow | PREFILL fast[0:1) slow[0:1)",
        "CODA fast@0x4#0 slow@0x4#0 | PRELUDE fast@1 slow@1 | LOOP fast@1d0 slow@1d0",
        "CODA fast@1x1#1 | PRELUDE fast@2 | LOOP fast@2d0 slow@1d1",
        "CODA fast@2x1#2 | PRELUDE fast@3 | LOOP fast@3d0 slow@1d2",
        "CODA fast@3x1#3 | LOOP slow@1d3",
        "-fast | CODA slow@1x4#1",
        "-slow",
    ]


def test_loop_bounds_of_a_request() -> None:
    bench = Bench(hazard=lambda key, position, depth: 0.4)
    bench.add("least", max_tokens=2, exit_threshold=0.0, min_loops=3)
    bench.add("most", max_tokens=2, exit_threshold=1.0, max_loops=2)
    bench.add("model", max_tokens=2)
    bench.add("mid", max_tokens=2, exit_threshold=0.6)
    outputs = texts(bench.finish())
    # A hazard of 0.4 leaves survivals 0.6, 0.36, 0.216, 0.1296.
    depths = {request_id: found[1] for request_id, found in outputs.items()}
    assert depths == {"least": [4, 3], "most": [4, 2], "model": [4, 4], "mid": [4, 2]}


def test_chunks_share_the_budget_in_the_order_of_arrival() -> None:
    bench = Bench(chunk=4, prefill=6)
    bench.add("a", prompt=10, max_tokens=1)
    bench.add("b", prompt=3, max_tokens=1)
    bench.add("c", prompt=2, max_tokens=1)
    bench.finish()
    assert bench.traces() == [
        "+a | +b | PREFILL a[0:4) b[0:2)",
        "+c | PREFILL a[4:8) b[2:3) c[0:1)",
        "CODA b@2x4#0 | PREFILL a[8:10) c[1:2)",
        "-b | CODA a@9x4#0 c@1x4#0",
        "-a | -c",
    ]


def test_prefill_stays_within_the_largest_step() -> None:
    bench = Bench(make_profile(max_step_tokens=4), chunk=8, prefill=100)
    bench.add("a", prompt=9, max_tokens=1)
    bench.finish()
    assert bench.traces()[:3] == ["+a | PREFILL a[0:4)", "PREFILL a[4:8)", "PREFILL a[8:9)"]


def test_slots_beyond_the_largest_step_are_not_used() -> None:
    bench = Bench(make_profile(num_slots=4, max_step_tokens=2))
    for request_id in "abc":
        bench.add(request_id, max_tokens=2)
    ((_, plan),) = bench.plan()
    assert [item.key.request_id for item in plan.admits] == ["a", "b"]
    assert bench.engine.stats().lanes[0].free_slots == 0


def test_prompts_never_hold_up_a_decoding_row() -> None:
    bench = Bench(chunk=2, prefill=2)
    bench.add("old", max_tokens=9)
    bench.step()
    for index in range(3):
        bench.add(f"new{index}", prompt=20, max_tokens=1)
    for _ in range(20):
        ((lane, plan),) = bench.plan()
        assert any(key.request_id == "old" for step in plan.steps for key in step.keys)
        bench.apply(lane, bench.run(lane, plan))


def test_the_admission_holds_the_whole_request_once() -> None:
    bench = Bench()
    key: RequestKey = bench.add("a", prompt=3, max_tokens=7, temperature=0.5, top_p=0.9, top_k=3)
    ((_, plan),) = bench.plan()
    tables = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    assert plan.admits == (Admission(key, (1, 2, 3), tables, RngKey(7, 0), 0.5, 0.9, 3),)
    assert bench.plan() == []
    bench.apply("lane-0", bench.run("lane-0", plan))
    ((_, plan),) = bench.plan()
    assert plan.admits == ()
    assert PreludeBatch((key,), (3,), (SLOT_TOKEN,)) in plan.steps


def test_the_admission_holds_what_changes_logits() -> None:
    bench = Bench()
    wish: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -1.0,
        "logit_bias": {9: 2.0},
    }
    bench.add("a", **wish, stop_token_ids=(7,))
    bench.add("b", min_tokens=3, stop_token_ids=(7, 5))
    bench.add("c", min_tokens=3, stop_token_ids=(7, 5), ignore_eos=True)
    ((_, plan),) = bench.plan()
    a, b, c = plan.admits
    assert (a.repetition_penalty, a.presence_penalty, a.frequency_penalty) == (1.5, 0.5, -1.0)
    assert (a.logit_bias, a.min_tokens, a.banned_ids) == (((9, 2.0),), 0, ())
    assert (b.min_tokens, b.banned_ids) == (3, (EOS, 5, 7))
    assert (c.min_tokens, c.banned_ids) == (3, (5, 7))


def test_plans_count_up_from_one_in_each_lane() -> None:
    bench = Bench(make_profile(), make_profile())
    bench.add("a", max_tokens=2)
    bench.add("b", max_tokens=2)
    plans = bench.plan()
    assert [(lane, plan.epoch, plan.seq) for lane, plan in plans] == [
        ("lane-0", 1, 1),
        ("lane-1", 1, 1),
    ]
    bench.apply("lane-1", bench.run("lane-1", plans[1][1]))
    ((lane, plan),) = bench.plan()
    assert (lane, plan.seq) == ("lane-1", 2)


def test_prompts_fill_the_largest_step_and_one_of_them_half_of_it_unless_they_are_limited() -> None:
    bench = Bench(make_profile(max_step_tokens=8), chunk=None, prefill=None)
    bench.add("a", prompt=6, max_tokens=1)
    bench.add("b", prompt=9, max_tokens=1)
    bench.finish()
    assert bench.traces()[0] == "+a | +b | PREFILL a[0:4) b[0:4)"
