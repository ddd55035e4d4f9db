"""Incremental reservation: blocks come in the plan that first needs them, and always come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.exit_rule import FinishReason
from tests.scheduler.bench import (
    Bench,
    counting,
    exit_after,
    fixed,
    make_profile,
    never,
    reasons,
    texts,
)

if TYPE_CHECKING:
    from protocol.scripted_resident import Hazard, Token


def growing(
    num_blocks: int = 64,
    hazard: Hazard = never,
    token: Token = counting,
    chunk: int = 8,
    prefill: int = 16,
) -> Bench:
    profile = make_profile(num_blocks=num_blocks)
    settings = {"reservation": "incremental", "chunk": chunk, "prefill": prefill}
    return Bench(profile, hazard=hazard, token=token, **settings)


def widths(bench: Bench) -> list[str]:
    """The blocks a plane that each plan so far hands out, by request."""
    return [
        " ".join(
            [f"{item.key.request_id}:{len(item.tables[0])}" for item in plan.admits]
            + [f"{item.key.request_id}+{len(item.tables[0])}" for item in plan.grants]
        )
        for plan in bench.plans
    ]


def test_blocks_come_with_the_plan_that_first_needs_them() -> None:
    bench = growing(hazard=exit_after(dict.fromkeys(range(6, 10), 1)), chunk=3)
    bench.add("a", prompt=6, max_tokens=5)
    bench.finish()
    assert list(zip(bench.traces(), widths(bench), strict=True)) == [
        ("+a | PREFILL a[0:3)", "a:1"),
        ("PREFILL a[3:6)", "a+1"),
        ("CODA a@5x4#0 | PRELUDE a@6 | LOOP a@6d0", ""),
        ("CODA a@6x1#1 | PRELUDE a@7 | LOOP a@7d0", ""),
        ("CODA a@7x1#2 | PRELUDE a@8 | LOOP a@8d0", "a+1"),
        ("CODA a@8x1#3 | PRELUDE a@9 | LOOP a@9d0", ""),
        ("CODA a@9x1#4", ""),
        ("-a", ""),
    ]
    assert bench.engine.stats().free_blocks == 64


def test_full_reservation_grants_nothing() -> None:
    bench = Bench(chunk=3)
    bench.add("a", prompt=6, max_tokens=5)
    bench.finish()
    assert widths(bench)[0] == "a:3"
    assert not any(plan.grants for plan in bench.plans)


def test_growth_that_live_requests_may_need_counts_as_reserved() -> None:
    bench = growing(num_blocks=16)
    bench.add("a", max_tokens=12)
    bench.add("b", max_tokens=8)
    bench.step()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (1, 1, 12)
    assert stats.lanes[0].kv.promised_blocks == 8
    bench.finish()
    assert reasons(bench.outputs) == dict.fromkeys("ab", FinishReason.LENGTH)


def test_an_ended_request_keeps_no_promise() -> None:
    bench = growing(num_blocks=16, token=fixed([0] * 16))
    bench.add("a", max_tokens=13)
    bench.add("b", max_tokens=8)
    bench.step()
    bench.step()
    assert reasons(bench.outputs) == {"a": FinishReason.STOP}
    # a still holds its first block; 12 are free and none of them is promised to it any more.
    ((_, plan),) = bench.plan()
    assert [item.key.request_id for item in plan.admits] == ["b"]
    assert bench.engine.stats().lanes[0].kv.promised_blocks == 4


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_anywhere_gives_every_block_back(steps: int) -> None:
    bench = growing(chunk=2, prefill=3)
    bench.add("a", prompt=7, max_tokens=9)
    bench.add("b", prompt=3, max_tokens=4)
    for _ in range(steps):
        bench.step()
    plans = bench.plan()
    bench.engine.abort("a")
    assert bench.engine.stats().lanes[0].kv.promised_blocks <= 8
    for lane, plan in plans:
        bench.apply(lane, bench.run(lane, plan))
    bench.finish()
    stats = bench.engine.stats()
    assert (stats.free_blocks, stats.lanes[0].kv.promised_blocks) == (64, 0)
    assert stats.lanes[0].kv.tables == 0


def test_a_closed_lane_takes_its_promises_with_it() -> None:
    bench = growing(num_blocks=16)
    bench.add("a", max_tokens=12)
    bench.step()
    bench.engine.close_lane("lane-0", "gone")
    bench.engine.add_lane("lane-0", 2, make_profile(num_blocks=16))
    bench.add("a", max_tokens=16)
    ((_, plan),) = bench.plan()
    assert len(plan.admits) == 1


def test_reservation_changes_no_token() -> None:
    answers = []
    for reservation in ("full", "incremental"):
        bench = Bench(
            make_profile(num_blocks=72), hazard=None, token=None, chunk=3, reservation=reservation
        )
        for index in range(12):
            bench.add(f"r{index}", prompt=1 + index, max_tokens=1 + index, exit_threshold=0.5)
        answers.append(texts(bench.finish()))
    assert answers[0] == answers[1]
