"""Abort in every state and with a plan in flight; reuse of an id with late results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.exit_rule import FinishReason
from protocol.result import CodaResult
from scheduler.output import RequestOutput
from tests.scheduler.bench import Bench, exit_after, fixed, make_profile, reasons, texts, trace


def check_idle(bench: Bench) -> None:
    """Nothing is held any more, on either side."""
    stats = bench.engine.stats()
    assert not bench.engine.has_work()
    assert stats.free_blocks == stats.total_blocks
    assert (stats.waiting, stats.running, stats.releasing, stats.rng_keys) == (0, 0, 0, 0)
    assert all(lane.load == 0 for lane in stats.lanes)
    assert all(executor.held_keys() == () for executor in bench.executors.values())


def test_an_unknown_id_is_none() -> None:
    assert Bench().engine.abort("nobody") == []


def test_waiting() -> None:
    bench = Bench(make_profile(num_slots=1))
    bench.add("a")
    key = bench.add("b")
    bench.step()
    end = RequestOutput(key, 0, (), (), FinishReason.ABORT, None)
    assert bench.engine.abort("b") == [end]
    assert bench.engine.abort("b") == []
    assert bench.add("b").generation == 3
    bench.engine.abort("b")
    bench.engine.abort("a")
    bench.finish()
    check_idle(bench)


def test_placed_but_never_sent() -> None:
    bench = Bench()
    bench.add("a", max_tokens=2)
    ((_, first),) = bench.plan()
    bench.add("b")
    assert bench.plan() == []
    assert bench.engine.stats().running == 2
    (end,) = bench.engine.abort("b")
    assert end.finish_reason is FinishReason.ABORT
    assert bench.engine.stats().running == 1
    bench.apply("lane-0", bench.run("lane-0", first))
    bench.finish()
    assert not any("b" in text for text in bench.traces())
    check_idle(bench)


# A prompt of 3 in chunks of 2, then output 0 at depth 4 and output 1 at depth 2.
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("plans", range(1, 7))
def test_at_every_stage(plans: int, in_flight: bool) -> None:
    bench = Bench(hazard=exit_after({3: 2, 4: 2}), chunk=2)
    bench.add("a", prompt=3, max_tokens=3)
    bench.add("mate", prompt=3, max_tokens=3)
    for _ in range(plans):
        bench.step()
    before = texts(bench.outputs).get("a", ([], []))[0]
    flying = bench.plan() if in_flight else []
    (end,) = bench.engine.abort("a")
    assert (end.start_index, end.tokens) == (len(before), ())
    assert end.finish_reason is FinishReason.ABORT
    assert bench.engine.abort("a") == []
    for lane, plan in flying:
        assert all(o.key.request_id != "a" for o in bench.apply(lane, bench.run(lane, plan)))
    ((_, release),) = bench.plan()
    assert trace(release).startswith("-a | ")
    assert " a" not in trace(release)
    bench.apply("lane-0", bench.run("lane-0", release))
    bench.finish()
    assert texts(bench.outputs)["mate"] == ([1, 2, 3], [4, 2, 2])
    stats = bench.engine.stats()
    assert (stats.stale_rows, stats.stale_results) == (0, 0)
    assert stats.finished == {FinishReason.ABORT: 1, FinishReason.LENGTH: 1}
    assert (stats.discarded_rows > 0) is in_flight
    check_idle(bench)


def test_releasing() -> None:
    bench = Bench(token=fixed([9]))
    bench.add("a", stop_token_ids=(9,))
    bench.step()
    bench.step()
    assert reasons(bench.outputs) == {"a": FinishReason.STOP}
    assert bench.engine.abort("a") == []
    bench.finish()
    assert bench.traces()[-1] == "-a"
    check_idle(bench)


def test_a_plan_of_releases_alone_is_sent() -> None:
    bench = Bench()
    bench.add("a")
    bench.step()
    bench.engine.abort("a")
    assert bench.engine.has_work()
    bench.finish()
    assert bench.traces() == ["+a | PREFILL a[0:1)", "-a"]
    check_idle(bench)


def test_a_late_result_of_an_earlier_life_does_not_touch_the_next() -> None:
    bench = Bench()
    bench.add("a", max_tokens=4)
    ((_, old_plan),) = bench.plan()
    old = bench.run("lane-0", old_plan)
    bench.apply("lane-0", old)
    bench.engine.abort("a")
    bench.finish()
    new = bench.add("a", max_tokens=4)
    ((_, plan),) = bench.plan()
    assert bench.apply("lane-0", old) == []
    assert bench.engine.stats().stale_results == 1
    bench.apply("lane-0", bench.run("lane-0", plan))
    bench.outputs.clear()
    bench.finish()
    assert {output.key for output in bench.outputs} == {new}
    assert texts(bench.outputs) == {"a": ([1, 2, 3, 4], [4, 4, 4, 4])}
    check_idle(bench)


def test_rows_of_an_earlier_life_in_the_answer_to_a_later_one_are_stale() -> None:
    bench = Bench()
    old = bench.add("a", max_tokens=4)
    bench.step()
    bench.engine.abort("a")
    bench.finish()
    new = bench.add("a", max_tokens=4)
    bench.step()
    ((lane, plan),) = bench.plan()
    result = bench.run(lane, plan)
    coda = result.steps[0]
    assert isinstance(coda, CodaResult)
    mixed = CodaResult((old, new), (0, 0), (63, *coda.tokens))
    (output,) = bench.apply(lane, replace(result, steps=(mixed, *result.steps[1:])))
    assert (output.key, output.tokens) == (new, (1,))
    assert bench.engine.stats().stale_rows == 1
    bench.finish()
    assert texts(bench.outputs) == {"a": ([1, 2, 3, 4], [4, 4, 4, 4])}
    check_idle(bench)
