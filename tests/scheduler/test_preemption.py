"""Preemption by priority: literal plans, who leaves, who gets the room, and every way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.config import SchedulerSettings
from protocol.exit_rule import FinishReason
from protocol.snapshot import SnapshotRoom
from scheduler.preemption import Preemption
from scheduler.suspended import SuspendedRequests
from tests.scheduler.bench import Bench, counting, exit_after, make_profile, never, reasons, trace

if TYPE_CHECKING:
    from protocol.scripted_resident import Hazard

ROOMY = SnapshotRoom(10_000, 100, 1, 10)


def preempting(
    *,
    snapshots: SnapshotRoom = ROOMY,
    lanes: int = 1,
    num_slots: int = 1,
    num_blocks: int = 256,
    hazard: Hazard = never,
    chunk: int = 4,
    **options: object,
) -> Bench:
    """A bench with preemption on, over lanes of one kind."""
    profile = make_profile(snapshots=snapshots, num_slots=num_slots, num_blocks=num_blocks)
    options |= {"policy": "priority", "preemption": True, "chunk": chunk}
    return Bench(*[profile] * lanes, hazard=hazard, token=counting, **options)


def check_idle(bench: Bench) -> None:
    """Nothing is held any more, on either side."""
    stats = bench.engine.stats()
    assert not bench.engine.has_work()
    assert stats.free_blocks == stats.total_blocks
    assert (stats.waiting, stats.running, stats.releasing, stats.suspended) == (0, 0, 0, 0)
    assert (stats.rng_keys, stats.stale_rows, stats.stale_results) == (0, 0, 0)
    for executor in bench.executors.values():
        assert (executor.held_keys(), executor.suspended_keys()) == ((), ())


def suspended(bench: Bench) -> list[str]:
    """Who was suspended so far, in order."""
    return [key.request_id for plan in bench.plans for key in plan.suspends]


def test_preemption_needs_the_order_of_priority() -> None:
    with pytest.raises(ValueError, match='set policy "priority" as well'):
        SchedulerSettings(preemption=True)


def test_a_request_leaves_its_prompt_and_comes_back_to_it() -> None:
    bench = preempting()
    bench.add("low", prompt=6, max_tokens=2, priority=5)
    bench.step()
    bench.add("high", prompt=1, max_tokens=1, priority=1)
    bench.finish()
    assert bench.traces() == [
        "+low | PREFILL low[0:4)",
        "~low",
        "+high | PREFILL high[0:1)",
        "CODA high@0x4#0",
        "-high",
        "^low | PREFILL low[4:6)",
        "CODA low@5x4#0 | PRELUDE low@6 | LOOP low@6d0",
        "LOOP low@6d1",
        "LOOP low@6d2",
        "LOOP low@6d3",
        "CODA low@6x4#1",
        "-low",
    ]
    stats = bench.engine.stats()
    assert (stats.preemptions, stats.resumptions) == (1, 1)
    assert list(reasons(bench.outputs)) == ["high", "low"]
    check_idle(bench)


def test_others_go_on_beside_a_suspend_and_a_resume() -> None:
    bench = preempting(num_slots=2, hazard=exit_after({1: 3, 2: 4}))
    bench.add("mate", max_tokens=4, priority=0)
    bench.add("low", max_tokens=2, priority=5)
    for _ in range(3):
        bench.step()
    bench.add("high", max_tokens=1, priority=1)
    bench.finish()
    assert bench.traces()[2:9] == [
        "LOOP mate@1d1 low@1d1",
        "~low | LOOP mate@1d2",
        "+high | CODA mate@1x3#1 | PRELUDE mate@2 | PREFILL high[0:1) | LOOP mate@2d0",
        "CODA high@0x4#0 | LOOP mate@2d1",
        "-high | LOOP mate@2d2",
        "^low | LOOP mate@2d3 low@1d2",
        "CODA mate@2x4#2 low@1x3#1 | PRELUDE mate@3 | LOOP mate@3d0",
    ]
    check_idle(bench)


def test_slot_and_blocks_return_with_the_answer_and_not_earlier() -> None:
    bench = preempting(num_blocks=16)
    bench.add("low", prompt=4, max_tokens=9, priority=5)
    bench.step()
    high = bench.add("high", prompt=4, max_tokens=9, priority=1)
    ((lane, plan),) = bench.plan()
    assert trace(plan) == "~low"
    assert bench.plan() == []
    stats = bench.engine.stats()
    assert (stats.waiting, stats.running, stats.suspended, stats.free_blocks) == (1, 1, 0, 4)
    assert stats.lanes[0].load == 0
    bench.apply(lane, bench.run(lane, plan))
    stats = bench.engine.stats()
    assert (stats.waiting, stats.running, stats.suspended, stats.free_blocks) == (2, 0, 1, 16)
    ((_, plan),) = bench.plan()
    assert [item.key for item in plan.admits] == [high]
    assert bench.engine.stats().lanes[0].load == 4 * 9


@pytest.mark.parametrize(("reservation", "widths"), [("full", 3), ("incremental", 1)])
def test_a_resume_has_the_blocks_of_its_reservation(reservation: str, widths: int) -> None:
    bench = preempting(num_blocks=12, reservation=reservation)
    bench.add("low", prompt=2, max_tokens=11, priority=5)
    for _ in range(2):
        bench.step()
    bench.add("high", max_tokens=1, priority=1)
    bench.finish()
    (resume,) = [item for plan in bench.plans for item in plan.resumes]
    assert [len(plane) for plane in resume.tables] == [widths] * 4
    assert reasons(bench.outputs)["low"] is FinishReason.LENGTH
    check_idle(bench)


def test_equal_priority_makes_no_room() -> None:
    bench = preempting()
    bench.add("a", max_tokens=2, priority=1)
    bench.step()
    bench.add("b", max_tokens=2, priority=1)
    bench.finish()
    assert suspended(bench) == []


def test_without_the_setting_nobody_leaves() -> None:
    bench = Bench(make_profile(num_slots=1, snapshots=ROOMY), policy="priority")
    bench.add("a", max_tokens=2, priority=9)
    bench.step()
    bench.add("b", max_tokens=2, priority=1)
    bench.finish()
    assert suspended(bench) == []


# Each request takes 4 blocks for every 4 tokens; 64 blocks are taken when the last one comes.
@pytest.mark.parametrize(
    ("others", "needs", "victims"),
    [
        ([(5, 16), (9, 16), (7, 16), (5, 16)], 16, ["b"]),  # the lowest priority
        ([(5, 24), (9, 8), (7, 16), (5, 16)], 24, ["a"]),  # one that is enough, not two
        ([(5, 8), (9, 8), (7, 16), (5, 32)], 40, ["d", "b"]),  # two; b first, then who completes it
        ([(9, 16), (9, 12), (9, 16), (9, 20)], 4, ["b"]),  # the fewest loops owed
        ([(9, 16), (9, 16), (9, 16), (9, 16)], 4, ["d"]),  # who came last
        ([(0, 48), (9, 4), (9, 4), (9, 8)], 20, []),  # all that may leave are not enough
    ],
)
def test_who_leaves(others: list[tuple[int, int]], needs: int, victims: list[str]) -> None:
    bench = preempting(num_slots=5, num_blocks=64, prefill=32)
    for name, (priority, tokens) in zip("abcd", others, strict=True):
        bench.add(name, max_tokens=tokens, priority=priority)
    bench.step()
    bench.add("new", max_tokens=needs, priority=1)
    bench.step()
    assert suspended(bench) == victims
    bench.finish()
    check_idle(bench)


def test_a_snapshot_that_does_not_fit_saves_its_request() -> None:
    # A snapshot takes 100 bytes, 1 a prompt token and 10 a token with KV.
    bench = preempting(num_slots=2, snapshots=SnapshotRoom(130, 100, 1, 10))
    bench.add("long", prompt=4, max_tokens=9, priority=9)
    bench.add("short", prompt=1, max_tokens=9, priority=5)
    bench.step()
    bench.add("high", max_tokens=1, priority=1)
    bench.add("next", max_tokens=1, priority=1)
    bench.finish()
    assert suspended(bench) == ["short"]
    assert list(reasons(bench.outputs))[:2] == ["high", "next"]
    check_idle(bench)


def test_nobody_leaves_who_is_not_needed_where_snapshots_are_scarce() -> None:
    # Two are enough: a and b, whose snapshots are too large together, or c and d. Beside a there is
    # no room for b, so that a, c and d are found, and a need not go.
    bench = preempting(
        num_slots=4, num_blocks=64, prefill=32, chunk=16, snapshots=SnapshotRoom(110, 0, 0, 10)
    )
    bench.add("a", prompt=8, max_tokens=5, priority=9)
    bench.add("b", prompt=8, max_tokens=13, priority=6)
    bench.add("c", prompt=1, max_tokens=16, priority=6)
    bench.add("d", prompt=1, max_tokens=16, priority=6)
    bench.step()
    bench.add("new", prompt=4, max_tokens=29, priority=1)
    bench.step()
    assert suspended(bench) == ["c", "d"]
    bench.finish()
    check_idle(bench)


def test_what_was_not_sent_yet_is_no_victim() -> None:
    bench = preempting(num_slots=2, prefill=4)
    bench.add("first", prompt=8, max_tokens=2, priority=2)
    bench.add("unsent", prompt=2, max_tokens=2, priority=9)
    bench.step()
    assert [key.request_id for key in bench.executors["lane-0"].held_keys()] == ["first"]
    bench.add("high", max_tokens=1, priority=1)
    bench.step()
    assert suspended(bench) == ["first"]
    bench.finish()
    check_idle(bench)


def test_a_release_that_is_enough_spares_the_others() -> None:
    bench = preempting(num_slots=2)
    bench.add("done", max_tokens=1, priority=3)
    bench.add("low", max_tokens=9, priority=9)
    bench.step()
    bench.step()
    bench.add("high", max_tokens=1, priority=1)
    bench.finish()
    assert suspended(bench) == []


def test_the_room_goes_to_whom_it_was_made_for() -> None:
    # 8 of 24 blocks are free, which "small" would fit into before "high" gets its 16.
    bench = preempting(num_slots=4, num_blocks=24)
    bench.add("low", max_tokens=16, priority=9)
    bench.step()
    bench.add("high", max_tokens=16, priority=1)
    bench.add("small", max_tokens=8, priority=2)
    ((lane, plan),) = bench.plan()
    assert trace(plan) == "~low"
    bench.add("tiny", max_tokens=1, priority=3)
    assert bench.plan() == []
    assert bench.engine.stats().lanes[0].running == 1
    bench.apply(lane, bench.run(lane, plan))
    ((_, plan),) = bench.plan()
    assert [item.key.request_id for item in plan.admits] == ["high", "small"]
    bench.apply(lane, bench.run(lane, plan))
    bench.finish()
    assert len(suspended(bench)) == 1
    check_idle(bench)


def test_a_higher_request_may_take_the_room_and_the_claim_is_made_anew() -> None:
    bench = preempting(num_slots=2)
    bench.add("low", max_tokens=3, priority=8)
    bench.add("lower", max_tokens=3, priority=9)
    bench.step()
    bench.add("high", max_tokens=1, priority=2)
    ((lane, plan),) = bench.plan()
    bench.add("higher", max_tokens=1, priority=1)
    assert bench.plan() == []
    bench.apply(lane, bench.run(lane, plan))
    bench.finish()
    assert suspended(bench) == ["lower", "low"]
    assert list(reasons(bench.outputs)) == ["higher", "high", "low", "lower"]
    check_idle(bench)


def test_what_preemption_and_snapshots_say_of_themselves() -> None:
    assert repr(Preemption()) == "<Preemption {}>"
    assert repr(SuspendedRequests(ROOMY)) == "<SuspendedRequests 0, 10000 bytes free>"


def test_two_requests_never_take_turns() -> None:
    bench = preempting()
    bench.add("low", max_tokens=3, priority=9)
    bench.step()
    for index in range(3):
        bench.add(f"high{index}", max_tokens=3, priority=1)
    bench.finish()
    assert suspended(bench) == ["low"]
    assert list(reasons(bench.outputs))[-1] == "low"
    check_idle(bench)


def test_a_suspended_request_goes_on_on_its_own_lane_at_its_own_place() -> None:
    bench = preempting(lanes=2)
    bench.add("a", max_tokens=4, priority=9)
    bench.add("b", max_tokens=9, priority=1)
    bench.step()
    bench.add("high", max_tokens=9, priority=1)
    bench.add("later", max_tokens=1, priority=9)
    bench.step()
    bench.step()
    bench.engine.abort("b")
    bench.finish()
    # lane-1 is free long before lane-0 is; a comes before its equal, but waits for its own.
    assert list(reasons(bench.outputs)) == ["later", "high", "a"]
    check_idle(bench)
