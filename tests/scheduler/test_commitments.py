"""Who is loose and who is firm, and what that means beside priorities."""

from __future__ import annotations

from protocol.config import SchedulerSettings
from protocol.identity import RequestKey
from protocol.sampling import SamplingParams
from protocol.snapshot import SnapshotRoom
from scheduler.commitments import Commitments
from scheduler.kv_manager import KVManager
from scheduler.request import Request
from scheduler.suspended import SuspendedRequests
from tests.scheduler.bench import exit_after, make_model, make_profile, never, reasons
from tests.scheduler.test_pressure import ROOMY, check_idle, pressed, suspended


def request_of(blocks: int) -> Request:
    """A request of as many blocks of 4 tokens over all 4 planes."""
    key, params = RequestKey(f"r{blocks}", 1), SamplingParams(max_tokens=blocks)
    return Request.create(key, (1,), params, make_model())


def test_what_may_be_loose_and_what_may_be_firm() -> None:
    suspended = SuspendedRequests(ROOMY)
    kv = KVManager(make_profile(num_blocks=32))
    commitments = Commitments(kv, suspended, SchedulerSettings(reservation="overcommit"))
    firm, small, large = request_of(8), request_of(12), request_of(16)
    assert commitments.allow_firm(
        request_of(36)
    )  # with nobody loose the blocks themselves are asked
    commitments.add(firm, loose=False)
    assert commitments.takes_loosely(request_of(24))
    assert not commitments.takes_loosely(request_of(28))
    assert commitments.takes_loosely(request_of(32), [firm])
    commitments.add(small, loose=True)
    commitments.add(large, loose=True)
    assert suspended.free_bytes == 10_000 - (101 + 120) - (101 + 160)
    assert commitments.allow_firm(request_of(8))
    assert not commitments.allow_firm(request_of(12))
    assert commitments.allow_firm(request_of(12), [large])
    assert commitments.allow_firm(request_of(16), [firm, request_of(4)])
    assert repr(commitments) == "<Commitments 1 firm, 2 loose>"
    for gone in (firm, small, large, request_of(4)):
        commitments.drop(gone.key)
    assert commitments.takes_loosely(request_of(32))
    assert repr(commitments) == "<Commitments 0 firm, 0 loose>"


def test_what_is_set_aside_is_cut_to_what_is_taken() -> None:
    memory, request = SuspendedRequests(ROOMY), request_of(12)
    assert (memory.takes(request), memory.size_at_most(request)) == (101, 221)
    memory.set_aside(request)
    assert (memory.free_bytes, memory.takes(request)) == (10_000 - 221, 0)
    memory.reserve(request)
    assert (memory.free_bytes, memory.takes(request)) == (10_000 - 101, 0)
    memory.forget(request.key)
    assert memory.free_bytes == 10_000


def test_without_room_for_snapshots_everything_is_promised() -> None:
    traces = []
    for reservation in ("overcommit", "incremental"):
        bench = pressed(20, snapshots=SnapshotRoom(0, 100, 1, 10), reservation=reservation)
        for name in "abcd":
            bench.add(name, prompt=3, max_tokens=7)
        bench.step()
        assert bench.engine.stats().lanes[0].kv.promised_blocks == 8
        bench.finish()
        traces.append(bench.traces())
    assert traces[0] == traces[1]


def test_as_many_are_loose_as_there_is_room_for_their_largest_snapshots() -> None:
    # The largest one of each takes 100 + 3 + 90 bytes: there is room for two, and c is firm.
    bench = pressed(32, snapshots=SnapshotRoom(386, 100, 1, 10))
    for name in "abc":
        bench.add(name, prompt=3, max_tokens=7)
    bench.step()
    kv = bench.engine.stats().lanes[0].kv
    assert (kv.free_blocks, kv.promised_blocks) == (20, 8)
    bench.finish()
    # No other byte is free, and b can leave all the same.
    assert suspended(bench) == ["b"]
    check_idle(bench)


def test_priority_takes_the_room_of_loose_requests_too() -> None:
    bench = pressed(16, policy="priority", preemption=True, num_slots=2)
    bench.add("low", prompt=3, max_tokens=12, priority=9)
    bench.add("mid", prompt=3, max_tokens=12, priority=5)
    bench.step()
    bench.add("high", prompt=3, max_tokens=12, priority=1)
    bench.finish()
    stats = bench.engine.stats()
    assert suspended(bench) == ["low", "mid"]
    assert (stats.preemptions, stats.pressure_preemptions) == (2, 1)
    assert list(reasons(bench.outputs)) == ["high", "mid", "low"]
    check_idle(bench)


def test_what_is_set_aside_for_a_loose_request_is_there_when_a_priority_takes_its_room() -> None:
    bench = pressed(
        16, policy="priority", preemption=True, num_slots=1, snapshots=SnapshotRoom(133, 100, 1, 4)
    )
    bench.add("low", prompt=1, max_tokens=8, priority=9)
    bench.step()
    bench.add("high", prompt=1, max_tokens=8, priority=1)
    bench.finish()
    assert suspended(bench) == ["low"]
    assert list(reasons(bench.outputs)) == ["high", "low"]
    check_idle(bench)


def test_what_a_victim_of_priority_wants_is_not_kept_for_it() -> None:
    # "low" has come to the end of its page; "high" needs its next one as well as the one it has.
    bench = pressed(8, policy="priority", preemption=True)
    bench.add("low", prompt=4, max_tokens=2, priority=9)
    bench.step()
    bench.add("high", prompt=5, max_tokens=1, priority=1)
    bench.step()
    assert suspended(bench) == ["low"]
    bench.finish()
    assert list(reasons(bench.outputs)) == ["high", "low"]
    check_idle(bench)


def test_nobody_leaves_for_a_priority_that_could_not_be_loose_then() -> None:
    # A snapshot takes a byte a prompt token. While "brief" is there, none is left for "low".
    bench = pressed(
        16, policy="priority", preemption=True, snapshots=SnapshotRoom(10, 0, 1, 0), hazard=never
    )
    bench.add("long", prompt=1, max_tokens=12, priority=0)
    bench.add("brief", prompt=7, max_tokens=1, priority=0)
    bench.add("low", prompt=3, max_tokens=2, priority=9)
    for _ in range(3):
        bench.step()
    assert list(reasons(bench.outputs)) == ["brief"]
    # "high" needs all blocks in the end, so it can be but loose; beside a snapshot of "low" there
    # is no room for one of it.
    bench.add("high", prompt=7, max_tokens=10, priority=1)
    bench.step()
    assert suspended(bench) == []
    bench.finish()
    assert len(reasons(bench.outputs)) == 4
    check_idle(bench)


def test_a_last_output_keeps_no_block_from_others() -> None:
    bench = pressed(8)
    bench.add("a", prompt=4, max_tokens=1)
    bench.step()
    bench.add("b", prompt=1, max_tokens=1)
    assert bench.send_plans() == ["+b | CODA a@3x4#0 | PREFILL b[0:1)"]
    bench.finish()
    check_idle(bench)


def test_one_whose_last_output_is_on_its_way_spares_the_others() -> None:
    # The last output of b is in flight when a needs the page that b has.
    bench = pressed(12, plans_in_flight=2)
    bench.add("a", prompt=3, max_tokens=4, forced_depths=(4, 3, 1, 1))
    bench.add("b", prompt=1, max_tokens=2, forced_depths=(4, 1))
    bench.add("c", prompt=1, max_tokens=4, forced_depths=(4, 4, 4, 4))
    bench.finish()
    assert bench.traces()[3:5] == ["CODA b@1x1#1 | LOOP a@3d2 c@1d2", "LOOP c@1d3"]
    assert suspended(bench) == []
    check_idle(bench)


def test_a_victim_of_priority_is_no_mate_that_a_cohort_waits_for() -> None:
    # c was the last in the core; when it leaves, a is next, and there is no page for it yet.
    bench = pressed(
        12,
        policy="priority",
        preemption=True,
        num_slots=2,
        mode="no_refill",
        hazard=exit_after({3: 1}),
    )
    bench.add("a", prompt=3, max_tokens=4, priority=5)
    bench.add("c", prompt=5, max_tokens=3, priority=9)
    bench.step()
    bench.step()
    bench.add("high", prompt=1, max_tokens=1, priority=1)
    assert bench.send_plans() == ["~c"]
    bench.land()
    assert bench.send_plans()[0].startswith("+high | CODA a@3x1#1 | PRELUDE a@4")
    bench.land()
    bench.finish()
    assert suspended(bench) == ["c"]
    check_idle(bench)


def test_one_that_ends_anyway_is_not_suspended_beside_another_that_is() -> None:
    # a and b need a page each; d, at its last output, leaves one, and c has to leave the other.
    bench = pressed(16, hazard=exit_after(dict.fromkeys(range(64), 1)))
    bench.add("a", prompt=4, max_tokens=5)
    bench.add("b", prompt=4, max_tokens=5)
    bench.add("c", prompt=1, max_tokens=5)
    bench.add("d", prompt=1, max_tokens=1)
    bench.step()
    assert bench.send_plans() == ["~c | CODA d@0x4#0"]
    bench.finish()
    assert suspended(bench) == ["c"]
    check_idle(bench)


def test_nobody_leaves_while_what_is_in_flight_may_end_it() -> None:
    # In cohorts a waits for b, whose last signal is on its way: then b is at its last output.
    bench = pressed(8, mode="no_refill", hazard=exit_after({1: 1, 3: 1, 4: 1}))
    bench.add("a", prompt=2, max_tokens=4)
    bench.add("b", prompt=1, max_tokens=3)
    bench.finish()
    assert suspended(bench) == []
    check_idle(bench)
