"""Overcommitted blocks: literal plans, who stands still, who is suspended, and who is sure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.exit_rule import FinishReason
from protocol.layout import Layout
from protocol.snapshot import SnapshotRoom
from tests.scheduler.bench import Bench, counting, exit_after, make_profile, reasons, texts

if TYPE_CHECKING:
    from protocol.scripted_resident import Hazard

ROOMY = SnapshotRoom(10_000, 100, 1, 10)
SOON = exit_after(dict.fromkeys(range(64), 1))
"""Gates that fire after the first loop: a token takes one plan."""


def pressed(
    num_blocks: int,
    *,
    snapshots: SnapshotRoom = ROOMY,
    num_slots: int = 4,
    hazard: Hazard = SOON,
    layout: Layout = Layout.LAST_EXITED,
    max_ticks: int = 0,
    **options: object,
) -> Bench:
    """A bench over one lane with too few blocks of 4 tokens; with `max_ticks` it runs ticks."""
    profile = make_profile(
        num_slots=num_slots,
        num_blocks=num_blocks,
        snapshots=snapshots,
        layout=layout,
        max_ticks=max_ticks,
    )
    options = {"reservation": "overcommit"} | options
    return Bench(profile, hazard=hazard, token=counting, **options)


def suspended(bench: Bench) -> list[str]:
    """Who was suspended so far, in order."""
    return [key.request_id for plan in bench.plans for key in plan.suspends]


def check_idle(bench: Bench) -> None:
    """Nothing is held any more, on either side."""
    stats = bench.engine.stats()
    assert not bench.engine.has_work()
    assert stats.free_blocks == stats.total_blocks
    assert (stats.waiting, stats.running, stats.releasing, stats.suspended) == (0, 0, 0, 0)
    assert (stats.rng_keys, stats.stale_rows, stats.stale_results) == (0, 0, 0)
    assert stats.lanes[0].kv.promised_blocks == 0
    for executor in bench.executors.values():
        assert (executor.held_keys(), executor.suspended_keys()) == ((), ())


def test_the_first_step_takes_far_fewer_blocks_and_the_answer_is_the_same() -> None:
    answers, used = [], []
    for reservation in ("overcommit", "full"):
        bench = pressed(64, hazard=exit_after({5: 3, 9: 2}), reservation=reservation)
        bench.add("a", prompt=3, max_tokens=25)
        bench.step()
        stats = bench.engine.stats()
        used.append(stats.total_blocks - stats.free_blocks)
        assert stats.lanes[0].kv.promised_blocks == 0
        answers.append(texts(bench.finish()))
    assert used == [4, 28]
    assert answers[0] == answers[1]


def test_who_stands_still_who_is_suspended_and_who_goes_on_where() -> None:
    bench = pressed(20)
    bench.add("a", prompt=3, max_tokens=8)
    bench.add("b", prompt=2, max_tokens=9)
    bench.add("c", prompt=3, max_tokens=6)
    bench.finish()
    assert bench.traces() == [
        "+a | +b | +c | PREFILL a[0:3) b[0:2) c[0:3)",
        "CODA a@2x4#0 b@1x4#0 c@2x4#0 | PRELUDE a@3 b@2 c@3 | LOOP a@3d0 b@2d0 c@3d0",
        # a and c take a second page, and nothing is free.
        "CODA a@3x1#1 b@2x1#1 c@3x1#1 | PRELUDE a@4 b@3 c@4 | LOOP a@4d0 b@3d0 c@4d0",
        # b needs one and stands still; c is the last, and leaves.
        "~c | CODA a@4x1#2 | PRELUDE a@5 | LOOP a@5d0",
        "CODA a@5x1#3 b@3x1#2 | PRELUDE a@6 b@4 | LOOP a@6d0 b@4d0",
        # c would need two pages to come back, and there is one.
        "CODA a@6x1#4 b@4x1#3 | PRELUDE a@7 b@5 | LOOP a@7d0 b@5d0",
        "CODA a@7x1#5 b@5x1#4 | PRELUDE a@8 b@6 | LOOP a@8d0 b@6d0",
        "CODA a@8x1#6 b@6x1#5 | PRELUDE a@9 b@7 | LOOP a@9d0 b@7d0",
        # b needs a third page, and stands still for what a, at its last output, will leave.
        "CODA a@9x1#7",
        "-a",
        "^c | CODA b@7x1#6 c@4x1#2 | PRELUDE b@8 c@5 | LOOP b@8d0 c@5d0",
        "CODA b@8x1#7 c@5x1#3 | PRELUDE b@9 c@6 | LOOP b@9d0 c@6d0",
        "CODA b@9x1#8 c@6x1#4 | PRELUDE c@7 | LOOP c@7d0",
        "-b | CODA c@7x1#5",
        "-c",
    ]
    stats = bench.engine.stats()
    assert (stats.preemptions, stats.pressure_preemptions, stats.resumptions) == (1, 1, 1)
    assert stats.lanes[0].load == 0
    check_idle(bench)


def test_a_row_that_is_served_is_not_evicted_for_one_that_is_not() -> None:
    # Both need a page at once, and one is free. b is behind a, so it leaves itself.
    bench = pressed(12)
    bench.add("a", prompt=3, max_tokens=6)
    bench.add("b", prompt=3, max_tokens=6)
    for _ in range(3):
        bench.step()
    assert bench.traces()[2] == "~b | CODA a@3x1#1 | PRELUDE a@4 | LOOP a@4d0"
    bench.finish()
    assert suspended(bench) == ["b"]
    check_idle(bench)


def test_the_order_is_that_of_the_queue() -> None:
    for policy, first in (("fcfs", "b"), ("priority", "a")):
        bench = pressed(12, policy=policy)
        bench.add("a", prompt=3, max_tokens=6, priority=5)
        bench.add("b", prompt=3, max_tokens=6, priority=1)
        bench.finish()
        assert suspended(bench) == [first]
        check_idle(bench)


def test_no_more_are_suspended_than_is_needed() -> None:
    # a needs a page; d, which came last, has two, and c and b may stay.
    bench = pressed(20, hazard=exit_after({4: 1}), num_slots=5, prefill=32)
    bench.add("a", prompt=4, max_tokens=8)
    bench.add("b", prompt=1, max_tokens=3)
    bench.add("c", prompt=1, max_tokens=3)
    bench.add("d", prompt=6, max_tokens=2)
    bench.step()
    assert bench.engine.stats().free_blocks == 0
    bench.step()
    assert suspended(bench) == ["d"]
    bench.finish()
    assert suspended(bench) == ["d"]
    check_idle(bench)


def test_room_that_comes_anyway_is_waited_for() -> None:
    # b ends with its first output; a stands still until it is released.
    bench = pressed(8)
    bench.add("a", prompt=4, max_tokens=4)
    bench.add("b", prompt=3, max_tokens=1)
    bench.finish()
    assert bench.traces()[1:4] == ["CODA b@2x4#0", "-b", "CODA a@3x4#0 | PRELUDE a@4 | LOOP a@4d0"]
    assert suspended(bench) == []
    check_idle(bench)


def test_an_aborted_one_makes_room_with_its_release() -> None:
    bench = pressed(8)
    bench.add("a", prompt=3, max_tokens=6)
    bench.add("b", prompt=1, max_tokens=8)
    bench.step()
    bench.step()
    bench.engine.abort("b")
    assert bench.send_plans() == ["-b"]
    bench.finish()
    assert suspended(bench) == []
    check_idle(bench)


def test_blocks_that_were_made_free_go_to_whom_they_were_made_free_for() -> None:
    # "late" would fit into the page that b left, before a has it.
    bench = pressed(8)
    bench.add("a", prompt=3, max_tokens=6)
    bench.add("b", prompt=1, max_tokens=8)
    bench.step()
    bench.step()
    assert bench.engine.stats().lanes[0].load == 19 + 27
    assert bench.send_plans() == ["~b"]
    assert bench.engine.stats().lanes[0].load == 19
    bench.add("late", prompt=1, max_tokens=1)
    bench.land()
    assert bench.send_plans() == ["CODA a@3x1#1 | PRELUDE a@4 | LOOP a@4d0"]
    bench.land()
    bench.finish()
    assert suspended(bench) == ["b"]
    check_idle(bench)


def test_one_whose_admission_is_on_its_way_is_waited_for_and_then_leaves() -> None:
    # The budget of prompt tokens lets b wait for its admission. It is behind a, so a stays.
    bench = pressed(8, chunk=4, prefill=4)
    bench.add("a", prompt=4, max_tokens=4)
    bench.add("b", prompt=4, max_tokens=4)
    bench.finish()
    assert bench.traces()[:5] == [
        "+a | PREFILL a[0:4)",
        "+b | PREFILL b[0:4)",
        "~b",
        "CODA a@3x4#0 | PRELUDE a@4 | LOOP a@4d0",
        "CODA a@4x1#1 | PRELUDE a@5 | LOOP a@5d0",
    ]
    check_idle(bench)


def test_who_waits_in_the_middle_of_a_prompt_gives_its_promise_at_once() -> None:
    # b has the first page of its prompt and is promised the second, which a needs.
    bench = pressed(16, chunk=4, prefill=8)
    bench.add("a", prompt=4, max_tokens=8)
    bench.add("b", prompt=12, max_tokens=2)
    bench.finish()
    assert bench.traces()[:3] == [
        "+a | +b | PREFILL a[0:4) b[0:4)",
        "~b | CODA a@3x4#0 | PRELUDE a@4 | LOOP a@4d0",
        "CODA a@4x1#1 | PRELUDE a@5 | LOOP a@5d0",
    ]
    assert "^b | PREFILL b[4:8)" in bench.traces()
    check_idle(bench)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", ["refill", "no_refill"])
@pytest.mark.parametrize("plans_in_flight", [1, 4])
def test_lasting_pressure_drains(mode: str, layout: Layout, plans_in_flight: int) -> None:
    answers = []
    for blocks in (6, 64):
        bench = pressed(
            blocks * layout.planes(4),
            layout=layout,
            hazard=exit_after({4: 2, 7: 1}),
            mode=mode,
            exit_policy="ouro_delayed",
            plans_in_flight=plans_in_flight,
        )
        for index in range(8):
            bench.add(f"r{index}", prompt=1 + index % 4, max_tokens=20 - index)
        answers.append(texts(bench.finish()))
        left = suspended(bench)
        assert len(left) == len(set(left))
        stats = bench.engine.stats()
        assert stats.preemptions == stats.pressure_preemptions == stats.resumptions == len(left)
        assert (len(left) > 1) is (blocks == 6)
        assert set(reasons(bench.outputs).values()) == {FinishReason.LENGTH}
        check_idle(bench)
    assert answers[0] == answers[1]


def test_a_used_id_is_not_protected() -> None:
    bench = pressed(12)
    for generation in range(2):
        bench.add("a", prompt=3, max_tokens=6)
        bench.add("b", prompt=3, max_tokens=6)
        bench.finish()
        assert suspended(bench) == ["b"] * (generation + 1)
        check_idle(bench)


def test_one_that_came_back_is_sure_of_its_blocks() -> None:
    bench = pressed(20)
    bench.add("a", prompt=3, max_tokens=8)
    bench.add("b", prompt=2, max_tokens=9)
    bench.add("c", prompt=3, max_tokens=6)
    while bench.engine.stats().resumptions == 0:
        bench.step()
    assert bench.engine.stats().lanes[0].kv.promised_blocks == 0
    bench.add("late", prompt=4, max_tokens=1)
    bench.finish()
    assert suspended(bench) == ["c"]
    check_idle(bench)


def test_who_comes_back_leaves_the_first_the_room_to_end() -> None:
    # a may come to hold 5 pages of 6. When d has ended, the 2 of b would be free for a while.
    bench = pressed(24, hazard=exit_after({1: 4, 2: 4, 3: 2} | dict.fromkeys(range(4, 20), 1)))
    bench.add("a", prompt=4, max_tokens=17)
    bench.add("d", prompt=1, max_tokens=4)
    for _ in range(7):
        bench.step()
    bench.add("b", prompt=5, max_tokens=4)
    while "d" not in reasons(bench.outputs):
        bench.step()
    assert suspended(bench) == ["b"]
    bench.step()
    assert bench.engine.stats().free_blocks == 8
    bench.finish()
    assert suspended(bench) == ["b"]
    assert list(reasons(bench.outputs)) == ["d", "a", "b"]
    check_idle(bench)


def test_nobody_is_loose_who_could_not_end_beside_the_firm_ones() -> None:
    # The prompt of "firm" is too long for a snapshot. It may come to hold 8 of 24, "long" 20.
    bench = pressed(24, snapshots=SnapshotRoom(5, 0, 1, 0))
    bench.add("firm", prompt=6, max_tokens=3)
    bench.add("long", prompt=1, max_tokens=17)
    bench.add("short", prompt=1, max_tokens=16)
    bench.step()
    assert bench.traces() == ["+firm | +short | PREFILL firm[0:6) short[0:1)"]
    assert bench.engine.stats().lanes[0].kv.promised_blocks == 0
    bench.finish()
    assert len(reasons(bench.outputs)) == 3
    check_idle(bench)
