"""A delayed exit that is due: kept over a suspend, and gone with its request."""

from __future__ import annotations

import pytest

from protocol.exit_rule import FinishReason
from protocol.snapshot import SnapshotRoom
from tests.scheduler.bench import Bench, make_profile, texts

ROOM = SnapshotRoom(10_000, 100, 1, 10)


def fires_once(key: object, position: int, depth: int) -> float:
    """Gates that fire after the first loop of a token and would take it back after the second."""
    return float(depth == 0)


def bench_of(*, preemption: bool = False) -> Bench:
    return Bench(
        make_profile(num_slots=1, snapshots=ROOM),
        hazard=fires_once,
        exit_policy="ouro_delayed",
        policy="priority",
        preemption=preemption,
    )


def test_a_signal_that_came_back_is_kept_over_a_suspend() -> None:
    alone = bench_of()
    alone.add("low", prompt=2, max_tokens=4, exit_threshold=0.5)
    expected = texts(alone.finish())
    assert expected == {"low": ([1, 2, 3, 4], [4, 2, 2, 2])}
    preemptions = 0
    for cut in range(1, len(alone.plans)):
        bench = bench_of(preemption=True)
        low = bench.add("low", prompt=2, max_tokens=4, exit_threshold=0.5, priority=9, logprobs=1)
        for _ in range(cut):
            bench.step()
        bench.add("high", max_tokens=1, priority=1)
        bench.finish()
        ours = [output for output in bench.outputs if output.key.request_id == "low"]
        assert texts(ours) == expected, f"suspended after {cut} plans"
        assert {output.key for output in ours} == {low}
        assert all(len(output.logprobs) == len(output.tokens) for output in ours)
        stats = bench.engine.stats()
        assert stats.preemptions == stats.resumptions
        preemptions += stats.preemptions
    assert preemptions >= 5


def test_a_token_suspended_between_its_loops_leaves_where_its_signal_said() -> None:
    bench = bench_of(preemption=True)
    bench.add("low", prompt=2, max_tokens=4, exit_threshold=0.5, priority=9)
    bench.step()
    bench.step()
    bench.add("high", max_tokens=1, priority=1)
    bench.finish()
    assert bench.traces()[1:6] == [
        "CODA low@1x4#0 | PRELUDE low@2 | LOOP low@2d0",
        "~low",
        "+high | PREFILL high[0:1)",
        "CODA high@0x4#0",
        "-high",
    ]
    assert bench.traces()[6] == "^low | LOOP low@2d1"


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_signal_goes_with_its_request_and_the_next_life_starts_fresh(in_flight: bool) -> None:
    bench = bench_of()
    bench.add("a", max_tokens=4, exit_threshold=0.5)
    bench.step()
    bench.step()  # the signal of loop 1 is there, and due after loop 2
    flying = bench.plan() if in_flight else []
    (end,) = bench.engine.abort("a")
    assert end.finish_reason is FinishReason.ABORT
    for lane, plan in flying:
        assert bench.apply(lane, bench.run(lane, plan)) == []
    bench.step()
    bench.outputs.clear()
    again = bench.add("a", max_tokens=3, exit_threshold=1.0)
    bench.finish()
    assert {output.key for output in bench.outputs} == {again}
    assert texts(bench.outputs) == {"a": ([1, 2, 3], [4, 4, 4])}
