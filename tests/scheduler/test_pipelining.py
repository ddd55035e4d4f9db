"""Several plans in flight: what is sent before an answer is read, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.exit_rule import FinishReason
from protocol.result import PrefillResult
from protocol.snapshot import SnapshotRoom
from tests.scheduler.bench import Bench, counting, exit_after, fixed, make_profile, reasons, texts

ROOM = SnapshotRoom(10_000, 10, 1, 2)


def test_a_loop_is_sent_before_the_signal_of_the_one_before_it_is_read() -> None:
    bench = Bench(hazard=exit_after({1: 2}), exit_policy="ouro_delayed", plans_in_flight=2)
    bench.add("a", max_tokens=3)
    assert bench.send_plans() == [
        "+a | PREFILL a[0:1)",
        "CODA a@0x4#0 | PRELUDE a@1 | LOOP a@1d0",
    ]
    bench.land()
    assert bench.send_plans() == ["LOOP a@1d1"]
    bench.land()
    # The signal of the second loop is not read, and the third follows in any case.
    assert bench.send_plans() == ["LOOP a@1d2"]
    bench.land()
    # It said that the token leaves after the third loop.
    assert bench.send_plans() == ["CODA a@1x3#1 | PRELUDE a@2 | LOOP a@2d0"]
    bench.finish()
    assert texts(bench.outputs)["a"] == ([1, 2, 3], [4, 3, 4])


def test_no_more_plans_than_the_policy_allows() -> None:
    # Delayed exits allow two, whatever the setting says: the third loop hangs on the first signal.
    bench = Bench(exit_policy="ouro_delayed", plans_in_flight=4)
    bench.add("a", max_tokens=3)
    bench.send_plans()
    assert bench.traces() == [
        "+a | PREFILL a[0:1)",
        "CODA a@0x4#0 | PRELUDE a@1 | LOOP a@1d0",
        "LOOP a@1d1",
    ]
    # Forced depths need no signal at all.
    bench = Bench(plans_in_flight=4)
    bench.add("a", max_tokens=3, forced_depths=(4, 3, 3))
    assert len(bench.send_plans()) == 4
    assert bench.send_plans() == []


@pytest.mark.parametrize(("device", "plans"), [("cpu", 1), ("cuda", 2), ("cuda:1", 2)])
def test_a_gpu_has_two_plans_where_nobody_says_how_many(device: str, plans: int) -> None:
    bench = Bench(replace(make_profile(), device=device))
    bench.add("a", max_tokens=3, forced_depths=(4, 3, 3))
    assert len(bench.send_plans()) == plans
    assert bench.send_plans() == []


def test_an_exit_at_once_is_waited_for_and_what_is_known_is_not() -> None:
    bench = Bench(hazard=exit_after({2: 3}), chunk=1, plans_in_flight=3)
    bench.add("a", prompt=2, max_tokens=2, min_loops=3)
    assert bench.send_plans() == [
        "+a | PREFILL a[0:1)",
        "PREFILL a[1:2)",
        "CODA a@1x4#0 | PRELUDE a@2 | LOOP a@2d0",
    ]
    bench.land()
    # Nobody leaves before loop 3, and after it only its own signal says so.
    assert bench.send_plans() == ["LOOP a@2d1"]
    bench.land()
    assert bench.send_plans() == ["LOOP a@2d2"]
    for _ in range(2):
        bench.land()
        assert bench.send_plans() == []
    bench.land()
    assert bench.send_plans() == ["CODA a@2x3#1"]
    bench.finish()
    assert texts(bench.outputs)["a"] == ([1, 2], [4, 3])


def test_nothing_is_planned_beside_a_token_whose_signal_is_on_its_way() -> None:
    bench = Bench(plans_in_flight=4)
    bench.add("old", max_tokens=4)
    bench.send_plans()
    bench.add("new", max_tokens=4)
    # A plan for "new" alone would make "old" miss it, and split every batch after it.
    assert bench.send_plans() == []
    bench.land()
    bench.land()
    assert bench.send_plans() == ["+new | PREFILL new[0:1) | LOOP old@1d1"]


def test_plans_are_those_of_one_at_a_time() -> None:
    hazard = exit_after({3: 1, 4: 3, 5: 2, 6: 4})
    single = Bench(hazard=hazard, exit_policy="ouro_delayed", chunk=2)
    double = Bench(hazard=hazard, exit_policy="ouro_delayed", chunk=2, plans_in_flight=2)
    for bench in (single, double):
        bench.add("a", prompt=3, max_tokens=5)
        bench.add("b", prompt=2, max_tokens=3, exit_threshold=1.0)
        bench.finish()
    assert double.outputs == single.outputs
    # A release waits one plan longer; the work is the same, in the same batches.
    worked = [[t for t in b.traces() if t.strip("-ab |")] for b in (single, double)]
    stripped = [[trace.replace("-a | ", "").replace("-b | ", "") for trace in w] for w in worked]
    assert stripped[0] == stripped[1]


def test_an_end_that_comes_late_discards_what_ran_after_it_and_samples_nothing_more() -> None:
    bench = Bench(token=fixed([5, 9]), plans_in_flight=4)
    bench.add("a", max_tokens=5, forced_depths=(4, 1, 1, 1, 1), stop_token_ids=(9,))
    bench.finish()
    assert bench.traces() == [
        "+a | PREFILL a[0:1)",
        "CODA a@0x4#0 | PRELUDE a@1 | LOOP a@1d0",
        # Output 1 is sampled once output 0 has come back.
        "CODA a@1x1#1 | PRELUDE a@2 | LOOP a@2d0",
        "-a",
    ]
    assert texts(bench.outputs)["a"] == ([5, 9], [4, 1])
    assert bench.engine.stats().discarded_rows == 2


def test_an_output_on_its_way_holds_up_nobody_else() -> None:
    bench = Bench(plans_in_flight=2)
    bench.add("fast", max_tokens=3, forced_depths=(4, 1, 1))
    bench.add("slow", max_tokens=2, forced_depths=(4, 4))
    bench.send_plans()
    bench.land()
    # Output 0 of "fast" has not come back; "slow" goes on without it.
    assert bench.send_plans() == ["LOOP slow@1d1"]
    bench.land()
    assert bench.send_plans() == ["CODA fast@1x1#1 | PRELUDE fast@2 | LOOP fast@2d0 slow@1d2"]
    bench.finish()
    assert texts(bench.outputs) == {"fast": ([1, 2, 3], [4, 1, 1]), "slow": ([1, 2], [4, 4])}


def test_an_abort_with_plans_in_flight_is_released_once_and_its_id_comes_back() -> None:
    bench = Bench(plans_in_flight=3)
    old = bench.add("a", max_tokens=8, forced_depths=(4,) * 8)
    bench.send_plans()
    (end,) = bench.engine.abort("a")
    assert (end.tokens, end.finish_reason) == ((), FinishReason.ABORT)
    bench.land()
    assert bench.send_plans() == ["-a"]
    bench.add("b", max_tokens=1)
    for _ in range(3):
        assert all("-a" not in text for text in bench.send_plans())
        assert [key for key in bench.executors["lane-0"].held_keys() if key == old] == []
        bench.land()
    new = bench.add("a", max_tokens=2, forced_depths=(4, 2))
    assert new.generation > old.generation
    bench.finish()
    assert texts([o for o in bench.outputs if o.key == new]) == {"a": ([1, 2], [4, 2])}
    stats = bench.engine.stats()
    assert (stats.discarded_rows, stats.free_blocks) == (5, stats.total_blocks)


def test_answers_count_in_the_order_of_their_plans_alone() -> None:
    bench = Bench(plans_in_flight=2)
    bench.add("a", max_tokens=2, forced_depths=(4, 2))
    bench.send_plans()
    first, second = bench.flying["lane-0"]
    assert bench.apply("lane-0", second) == []
    assert bench.engine.stats().stale_results == 1
    bench.land()
    assert bench.apply("lane-0", first) == []
    assert bench.engine.stats().stale_results == 2
    (output,) = bench.land()
    assert output.tokens == (1,)
    bench.finish()
    assert texts(bench.outputs)["a"] == ([1, 2], [4, 2])


def test_a_lost_lane_ends_what_its_plans_in_flight_were_for() -> None:
    bench = Bench(plans_in_flight=3)
    bench.add("a", max_tokens=4, forced_depths=(4,) * 4)
    bench.send_plans()
    (end,) = bench.engine.close_lane("lane-0", "gone")
    assert (end.finish_reason, end.worker_lost) == (FinishReason.ERROR, True)
    assert bench.land() == []
    assert bench.engine.stats().stale_results == 1
    assert not bench.engine.has_work()


def test_a_request_that_fails_skips_the_plans_that_are_behind() -> None:
    bench = Bench(plans_in_flight=3)
    bench.add("a", max_tokens=4, forced_depths=(4,) * 4)
    bench.add("b", max_tokens=4, forced_depths=(4,) * 4)
    bench.send_plans()
    first = bench.flying["lane-0"].popleft()
    (prefill,) = first.steps
    assert isinstance(prefill, PrefillResult)
    without_b = PrefillResult(prefill.keys[:1], prefill.ends[:1])
    (failed,) = bench.apply("lane-0", replace(first, steps=(without_b,)))
    assert failed.key.request_id == "b"
    assert failed.finish_reason is FinishReason.ERROR
    bench.finish()
    assert reasons(bench.outputs)["a"] is FinishReason.LENGTH
    assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_victim_leaves_with_its_plans_in_flight(steps: int) -> None:
    bench = Bench(
        make_profile(num_slots=1, snapshots=ROOM),
        hazard=exit_after({1: 2, 2: 1, 3: 3}),
        policy="priority",
        preemption=True,
        exit_policy="ouro_delayed",
        plans_in_flight=2,
    )
    bench.add("low", max_tokens=5, priority=9)
    for _ in range(steps):
        bench.step()
    bench.send_plans()
    bench.add("high", max_tokens=3, priority=1)
    # Asked to leave while its rows are in flight, in the plan behind them, once.
    bench.finish()
    assert sum("~low" in text for text in bench.traces()) == 1
    assert texts(bench.outputs) == {
        "low": ([1, 2, 3, 4, 5], [4, 3, 2, 4, 4]),
        "high": ([1, 2, 3], [4, 3, 2]),
    }
    order = [o.key.request_id for o in bench.outputs if o.finish_reason]
    assert order == ["high", "low"]
    stats = bench.engine.stats()
    assert (stats.preemptions, stats.resumptions) == (1, 1)
    assert (stats.suspended, stats.free_blocks) == (0, stats.total_blocks)


def test_prompts_are_cached_once_the_plan_that_filled_them_is_answered() -> None:
    bench = Bench(chunk=4, plans_in_flight=3, token=counting)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    bench.send("a", prompt, max_tokens=1)
    bench.send_plans()
    bench.land()
    assert bench.engine.stats().cached_blocks == 4
    bench.land()
    assert bench.engine.stats().cached_blocks == 8
    bench.finish()
