"""Blocks for one of three: who waits, what an abort frees and when, and that all come through."""

from __future__ import annotations

import pytest

from protocol.exit_rule import FinishReason
from protocol.snapshot import SnapshotRoom
from tests.scheduler.bench import Bench, exit_after, make_profile, reasons, texts

RESERVATIONS = ("full", "incremental")


def crowded(reservation: str) -> Bench:
    """Three requests of 7 tokens each over 8 blocks: 2 of 4 tokens in each of 4 planes."""
    bench = Bench(make_profile(num_blocks=8), reservation=reservation)
    for request_id in "abc":
        bench.add(request_id, prompt=3, max_tokens=5)
    return bench


@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_a_pool_for_one_serves_three_one_after_the_other(reservation: str) -> None:
    bench = crowded(reservation)
    running = []
    for _ in range(100):
        bench.step()
        running.append(bench.engine.stats().running)
    assert not bench.engine.has_work()
    assert max(running) == 1
    assert list(reasons(bench.outputs).items()) == [(name, FinishReason.LENGTH) for name in "abc"]
    assert texts(bench.outputs) == {name: ([1, 2, 3, 4, 5], [4] * 5) for name in "abc"}
    assert bench.engine.stats().free_blocks == 8


@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_an_abort_makes_room_for_the_next_and_for_nobody_before_its_release_is_answered(
    reservation: str,
) -> None:
    bench = crowded(reservation)
    for _ in range(3):
        bench.step()
    assert (bench.engine.stats().running, bench.engine.stats().waiting) == (1, 2)
    held = 8 - bench.engine.stats().free_blocks
    bench.engine.abort("b")  # waiting: it had nothing
    bench.engine.abort("a")
    ((lane, release),) = bench.plan()
    assert (release.releases[0].request_id, release.admits) == ("a", ())
    stats = bench.engine.stats()
    assert (stats.free_blocks, stats.waiting, stats.releasing) == (8 - held, 1, 1)
    bench.apply(lane, bench.run(lane, release))
    assert bench.engine.stats().free_blocks == 8
    bench.finish()
    assert reasons(bench.outputs) == {"c": FinishReason.LENGTH}
    assert texts(bench.outputs)["c"] == ([1, 2, 3, 4, 5], [4] * 5)
    stats = bench.engine.stats()
    assert stats.finished == {FinishReason.ABORT: 2, FinishReason.LENGTH: 1}
    assert (stats.free_blocks, stats.rng_keys) == (8, 0)


@pytest.mark.parametrize("ends_by", ["length", "stop"])
def test_what_an_ended_request_held_is_used_until_its_release_is_answered(ends_by: str) -> None:
    wish = {"stop_token_ids": (1,), "max_tokens": 5} if ends_by == "stop" else {"max_tokens": 1}
    bench = Bench(make_profile(num_slots=1, num_blocks=8))
    bench.add("a", prompt=3, **wish)
    bench.add("b", prompt=3, max_tokens=1)
    bench.step()
    bench.step()
    assert set(reasons(bench.outputs)) == {"a"}
    stats = bench.engine.stats()
    assert (stats.releasing, stats.lanes[0].free_slots, stats.waiting) == (1, 0, 1)
    assert stats.free_blocks < 8
    ((lane, plan),) = bench.plan()
    assert (len(plan.releases), plan.admits) == (1, ())
    bench.apply(lane, bench.run(lane, plan))
    stats = bench.engine.stats()
    assert (stats.releasing, stats.lanes[0].free_slots, stats.free_blocks) == (0, 1, 8)
    assert set(reasons(bench.finish())) == {"a", "b"}


@pytest.mark.parametrize("reservation", RESERVATIONS)
@pytest.mark.parametrize("mode", ["refill", "no_refill"])
def test_room_that_is_made_again_and_again_loses_nothing(mode: str, reservation: str) -> None:
    profile = make_profile(num_slots=3, num_blocks=16, snapshots=SnapshotRoom(10_000, 100, 1, 10))
    bench = Bench(
        profile,
        hazard=exit_after({3: 2, 4: 3, 5: 1, 6: 4}),
        mode=mode,
        reservation=reservation,
        policy="priority",
        preemption=True,
    )
    names = [f"low{index}" for index in range(3)]
    for name in names:
        bench.add(name, prompt=3, max_tokens=5, priority=9)
    for urgency in range(8, 3, -1):
        for _ in range(4):
            bench.step()
        names.append(f"urgent{urgency}")
        bench.add(names[-1], prompt=3, max_tokens=5, priority=urgency)
    bench.finish()
    assert texts(bench.outputs) == dict.fromkeys(names, ([1, 2, 3, 4, 5], [4, 2, 3, 1, 4]))
    assert reasons(bench.outputs) == dict.fromkeys(names, FinishReason.LENGTH)
    stats = bench.engine.stats()
    assert stats.preemptions == stats.resumptions >= 4
    assert (stats.suspended, stats.free_blocks, stats.rng_keys) == (0, 16, 0)
    executor = bench.executors["lane-0"]
    assert (executor.held_keys(), executor.suspended_keys()) == ((), ())
