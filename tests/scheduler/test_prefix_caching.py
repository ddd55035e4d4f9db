"""What a cached prefix changes of plans, and what ends, failures and other tenants change of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protocol.errors import RequestError
from protocol.exit_rule import FinishReason
from protocol.layout import Layout
from protocol.result import FailedRow, PrefillResult
from tests.scheduler.bench import Bench, exit_after, make_profile, reasons, texts, trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan
    from protocol.result import PlanResult

LONG = tuple(range(1, 18))
"""17 tokens: 4 complete blocks of 4, and the last token."""


def admitted(plans: Iterable[ExecutionPlan]) -> dict[str, int]:
    """The prefilled tokens of each admission."""
    return {item.key.request_id: item.prefilled for plan in plans for item in plan.admits}


def fail(result: PlanResult, key: RequestKey) -> PlanResult:
    """The result of a plan whose only row was a prefill of `key`, had that row failed."""
    row = FailedRow(key, "the device is broken")
    return replace(result, steps=(PrefillResult((), ()),), failed=(row,))


def test_a_hit_starts_at_the_first_token_that_is_not_cached() -> None:
    bench = Bench(hazard=exit_after({5: 2}))
    bench.send("a", LONG[:5], max_tokens=2)
    bench.finish()
    bench.send("b", LONG[:5], max_tokens=2)
    bench.finish()
    assert bench.traces() == [
        "+a | PREFILL a[0:5)",
        "CODA a@4x4#0 | PRELUDE a@5 | LOOP a@5d0",
        "LOOP a@5d1",
        "CODA a@5x2#1",
        "-a",
        "+b | PREFILL b[4:5)",
        "CODA b@4x4#0 | PRELUDE b@5 | LOOP b@5d0",
        "LOOP b@5d1",
        "CODA b@5x2#1",
        "-b",
    ]
    assert admitted(bench.plans) == {"a": 0, "b": 4}
    first, second = (item for plan in bench.plans for item in plan.admits)
    assert [plane[0] for plane in first.tables] == [plane[0] for plane in second.tables]
    stats = bench.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hit_tokens) == (2, 4)
    assert (stats.cached_blocks, stats.evicted_blocks) == (4, 0)
    assert stats.free_blocks == stats.total_blocks


@pytest.mark.parametrize(
    ("prompt", "hit"),
    [
        (LONG, 16),
        (LONG[:16], 12),
        (LONG[:4], 0),
        ((*LONG, 60, 61, 62), 16),
        ((*LONG[:9], 60, 61, 62, 63), 8),
        ((60, *LONG), 0),
    ],
)
def test_the_longest_common_run_of_blocks_is_found(prompt: tuple[int, ...], hit: int) -> None:
    bench = Bench()
    bench.send("a", LONG, max_tokens=2)
    bench.finish()
    bench.send("b", prompt, max_tokens=2)
    bench.finish()
    assert admitted(bench.plans) == {"a": 0, "b": hit}


def test_generated_tokens_are_never_cached() -> None:
    bench = Bench()
    bench.send("a", LONG[:3], max_tokens=20)
    answer = texts(bench.finish())["a"][0]
    bench.send("b", (*LONG[:3], *answer), max_tokens=1)
    bench.finish()
    assert admitted(bench.plans) == {"a": 0, "b": 0}
    assert bench.engine.stats().cached_blocks == 4 * 5


def test_blocks_are_shared_once_the_result_is_applied_and_not_before() -> None:
    bench = Bench(chunk=8)
    bench.send("a", LONG, max_tokens=1)
    ((lane, plan),) = bench.plan()
    result = bench.run(lane, plan)
    bench.send("early", LONG, max_tokens=1)
    bench.plan()  # places it, while a plan is in flight
    bench.apply(lane, result)
    bench.send("later", LONG, max_tokens=1)
    bench.finish()
    assert admitted(bench.plans) == {"a": 0, "early": 0, "later": 8}


@pytest.mark.parametrize("layout", Layout)
def test_without_prefix_caching_nothing_is_kept(layout: Layout) -> None:
    bench = Bench(make_profile(layout=layout), caching=False)
    for request_id in "ab":
        bench.send(request_id, LONG, max_tokens=1)
        bench.finish()
    assert admitted(bench.plans) == {"a": 0, "b": 0}
    stats = bench.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hit_tokens, stats.cached_blocks) == (0, 0, 0)


def test_another_tenant_never_hits() -> None:
    bench = Bench()
    for request_id, tenant in (("a", "red"), ("b", "blue"), ("c", ""), ("d", "red")):
        bench.send(request_id, LONG, tenant, max_tokens=1)
        bench.finish()
    assert admitted(bench.plans) == {"a": 0, "b": 0, "c": 0, "d": 16}
    with pytest.raises(RequestError, match="tenant 7 is not a text"):
        bench.send("e", LONG, 7)  # type: ignore[arg-type]
    assert not bench.engine.has_work()


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_aborted_publisher_leaves_what_has_run(in_flight: bool) -> None:
    bench = Bench(chunk=6)
    bench.send("a", LONG, max_tokens=4)
    bench.step()
    flying = bench.plan() if in_flight else []
    bench.engine.abort("a")
    for lane, plan in flying:
        bench.apply(lane, bench.run(lane, plan))
    bench.finish()
    bench.send("b", LONG, max_tokens=1)
    bench.finish()
    # One or two chunks of 6 tokens have run: one complete block of 4, or three.
    assert admitted(bench.plans) == {"a": 0, "b": 12 if in_flight else 4}
    assert bench.engine.stats().free_blocks == 256


def test_an_aborted_sharer_leaves_the_prefix_to_the_others() -> None:
    bench = Bench()
    for request_id in "abc":
        bench.send(request_id, LONG, max_tokens=3)
        bench.step()
        bench.step()
        bench.step()
    bench.engine.abort("b")
    bench.finish()
    assert admitted(bench.plans) == {"a": 0, "b": 16, "c": 16}
    assert texts(bench.outputs)["c"] == ([1, 2, 3], [4, 4, 4])
    assert bench.engine.stats().cached_blocks == 16
    assert bench.engine.stats().free_blocks == 256


def test_a_sharer_that_was_placed_and_never_sent_gives_its_references_back() -> None:
    bench = Bench()
    bench.send("a", LONG, max_tokens=1)
    bench.finish()
    bench.send("other", (60,), max_tokens=9)
    ((lane, plan),) = bench.plan()
    bench.send("b", LONG, max_tokens=1)
    bench.plan()
    free = bench.engine.stats().free_blocks
    bench.engine.abort("b")
    assert bench.engine.stats().free_blocks == free + 4 * 5
    bench.apply(lane, bench.run(lane, plan))
    bench.finish()
    assert bench.engine.stats().free_blocks == 256


def test_a_failed_publisher_s_prefix_is_forgotten() -> None:
    bench = Bench(chunk=8)
    key = bench.send("a", LONG, max_tokens=1)
    bench.step()
    assert bench.engine.stats().cached_blocks == 4 * 2
    ((lane, plan),) = bench.plan()
    bench.apply(lane, fail(bench.run(lane, plan), key))
    assert reasons(bench.outputs) == {"a": FinishReason.ERROR}
    assert bench.engine.stats().cached_blocks == 0
    bench.finish()
    bench.send("a", LONG, max_tokens=1)
    bench.finish()
    admissions = [item for plan in bench.plans for item in plan.admits]
    assert [(item.key.generation, item.prefilled) for item in admissions] == [(1, 0), (2, 0)]
    assert bench.engine.stats().cached_blocks == 4 * 4


def test_a_request_that_fails_after_its_chunk_publishes_nothing() -> None:
    bench = Bench(chunk=8)
    key = bench.send("a", LONG, max_tokens=1)
    ((lane, plan),) = bench.plan()
    failed = (FailedRow(key, "the device is broken"),)
    bench.apply(lane, replace(bench.run(lane, plan), failed=failed))
    assert reasons(bench.outputs) == {"a": FinishReason.ERROR}
    assert bench.engine.stats().cached_blocks == 0


def test_a_failed_sharer_takes_nothing_from_those_that_run() -> None:
    bench = Bench()
    bench.send("a", LONG, max_tokens=9)
    bench.step()
    bench.step()
    bench.step()
    key = bench.send("b", LONG, max_tokens=9)
    ((lane, plan),) = bench.plan()
    assert trace(plan).startswith("+b | CODA a@16x4#0")
    result = bench.run(lane, plan)
    steps = tuple(
        PrefillResult((), ()) if isinstance(step, PrefillResult) else step for step in result.steps
    )
    failed = (FailedRow(key, "the device is broken"),)
    bench.apply(lane, replace(result, steps=steps, failed=failed))
    bench.finish()
    assert reasons(bench.outputs) == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR}
    assert texts(bench.outputs)["a"][0] == list(range(1, 10))
    stats = bench.engine.stats()
    assert (stats.cached_blocks, stats.free_blocks) == (0, 256)


def test_an_id_that_is_used_again_hits_its_own_earlier_prompt() -> None:
    bench = Bench()
    for _ in range(3):
        bench.send("a", LONG, max_tokens=2)
        bench.finish()
    admissions = [item for plan in bench.plans for item in plan.admits]
    assert [item.prefilled for item in admissions] == [0, 16, 16]
    assert [item.key.generation for item in admissions] == [1, 2, 3]
    assert bench.engine.stats().cached_blocks == 16


def test_a_cached_prefix_makes_room_for_one_more() -> None:
    # 5 blocks a plane for each of two requests; 4 of them shared.
    bench = Bench(make_profile(num_blocks=4 * 6))
    bench.send("a", LONG, max_tokens=3)
    for _ in range(3):
        bench.step()
    bench.send("b", LONG, max_tokens=3)
    bench.send("cold", tuple(reversed(LONG)), max_tokens=3)
    bench.step()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (2, 1, 0)
    bench.finish()
    stats = bench.engine.stats()
    assert reasons(bench.outputs) == dict.fromkeys(["a", "b", "cold"], FinishReason.LENGTH)
    assert admitted(bench.plans) == {"a": 0, "b": 16, "cold": 0}
    assert (stats.free_blocks, stats.cached_blocks) == (24, 24 - 4)
    assert stats.evicted_blocks == 4 * 3


def test_a_request_that_must_wait_costs_the_cache_nothing() -> None:
    bench = Bench(make_profile(num_blocks=4 * 6))
    bench.send("a", LONG[:9], max_tokens=1)
    bench.finish()
    bench.send("holder", (60,), max_tokens=12)
    bench.step()
    bench.send("big", (61,), max_tokens=16)
    for _ in range(4):
        bench.step()
        stats = bench.engine.stats()
        assert (stats.waiting, stats.cached_blocks, stats.evicted_blocks) == (1, 8, 0)
    bench.finish()


def test_under_incremental_reservation_the_first_chunk_comes_after_the_hit() -> None:
    bench = Bench(chunk=4, reservation="incremental")
    bench.send("a", LONG, max_tokens=4)
    bench.finish()
    bench.send("b", (*LONG[:16], *range(40, 50)), max_tokens=4)
    ((lane, plan),) = bench.plan()
    (admission,) = plan.admits
    assert (admission.prefilled, len(admission.tables[0])) == (16, 5)
    assert trace(plan) == "+b | PREFILL b[16:20)"
    bench.apply(lane, bench.run(lane, plan))
    bench.finish()
    assert texts(bench.outputs)["b"] == texts(bench.outputs)["a"]
    assert bench.engine.stats().free_blocks == 256


def test_a_closed_lane_takes_its_cache_along() -> None:
    bench = Bench()
    bench.send("a", LONG, max_tokens=1)
    bench.finish()
    bench.engine.close_lane("lane-0", "gone")
    bench.engine.add_lane("lane-0", 2, make_profile())
    assert bench.engine.stats().cached_blocks == 0
    bench.send("b", LONG, max_tokens=1)
    ((_, plan),) = bench.plan()
    assert admitted([plan]) == {"b": 0}
    assert bench.engine.stats().prefix_hit_tokens == 0


def test_statistics_stay_when_a_lane_goes() -> None:
    bench = Bench(make_profile(), make_profile())
    for request_id in "ab":
        bench.send(request_id, LONG, max_tokens=1)
        bench.finish()
    bench.engine.close_lane("lane-0", "gone")
    stats = bench.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hit_tokens, stats.cached_blocks) == (2, 16, 0)
