"""Ends that only the text tells: at every stage, with a plan in flight, and for nobody."""

from __future__ import annotations

import pytest

from protocol.exit_rule import FinishReason
from scheduler.output import RequestOutput
from tests.scheduler.bench import Bench, texts, trace


def test_nobody_and_outputs_that_are_not_there_are_none() -> None:
    bench = Bench()
    assert bench.engine.finish("nobody", 0) == []
    bench.add("a", max_tokens=2)
    assert bench.engine.finish("a", 0) == []
    bench.step()
    bench.step()
    for index in (-1, 1, 7):
        assert bench.engine.finish("a", index) == []
    bench.finish()
    assert bench.engine.finish("a", 0) == []
    assert texts(bench.outputs)["a"][0] == [1, 2]


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("plans", range(6, 14))
@pytest.mark.parametrize("index", [0, 1])
def test_at_every_stage(plans: int, in_flight: bool, index: int) -> None:
    bench = Bench()
    key = bench.add("a", max_tokens=9, logprobs=1)
    bench.add("mate", max_tokens=5)
    for _ in range(plans):
        bench.step()
    flying = bench.plan() if in_flight else []
    outputs = bench.engine.finish("a", index)
    assert outputs == [RequestOutput(key, index + 1, (), (), FinishReason.STOP, None)]
    assert bench.engine.finish("a", index) == []
    assert bench.engine.abort("a") == []
    for lane, plan in flying:
        assert all(o.key != key for o in bench.apply(lane, bench.run(lane, plan)))
    ((_, release),) = bench.plan()
    assert trace(release).startswith("-a")
    assert "a@" not in trace(release)
    bench.apply("lane-0", bench.run("lane-0", release))
    bench.finish()
    stats = bench.engine.stats()
    assert stats.free_blocks == stats.total_blocks
    assert (stats.running, stats.releasing, stats.rng_keys) == (0, 0, 0)
    assert stats.finished == {FinishReason.STOP: 1, FinishReason.LENGTH: 1}
    assert all(lane.load == 0 for lane in stats.lanes)
    assert texts(bench.outputs)["mate"][0] == [1, 2, 3, 4, 5]
    assert bench.add("a").generation > key.generation
