"""Choices of one request: placed together, prefilled once, then each a request of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protocol.errors import CapacityError, DuplicateRequestError
from protocol.exit_rule import FinishReason
from protocol.rng import RngKey
from protocol.snapshot import SnapshotRoom
from scheduler.choices import UnsentForks
from scheduler.kv_manager import KVManager
from tests.scheduler.bench import Bench, make_profile, trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.identity import RequestKey
    from protocol.scripted_resident import Hazard
    from scheduler.output import RequestOutput

ROOMY = SnapshotRoom(10_000, 100, 1, 10)


def by_choice(outputs: Iterable[RequestOutput]) -> dict[tuple[str, int], list[int]]:
    """All tokens of each choice; checks that they follow without a gap."""
    found: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        tokens = found.setdefault((output.key.request_id, output.choice), [])
        assert output.start_index == len(tokens)
        tokens += output.tokens
    return found


def own_tokens(key: RequestKey, output_index: int) -> int:
    """Tokens that tell the choices apart: generation * 10 + index."""
    return key.generation * 10 + output_index


def check_idle(bench: Bench) -> None:
    """Nothing is held any more, on either side."""
    stats = bench.engine.stats()
    assert not bench.engine.has_work()
    assert stats.free_blocks == stats.total_blocks
    assert (stats.waiting, stats.running, stats.releasing, stats.rng_keys) == (0, 0, 0, 0)
    assert sum(lane.kv.promised_blocks for lane in stats.lanes) == 0
    for executor in bench.executors.values():
        assert (executor.held_keys(), executor.suspended_keys()) == ((), ())


def test_one_prefill_then_one_plan_forks_and_samples_all() -> None:
    bench = Bench(token=own_tokens, caching=False)
    key = bench.add("a", prompt=10, n=3, max_tokens=2)
    assert key.generation == 1
    bench.finish()
    assert bench.traces() == [
        "+a | PREFILL a[0:8)",
        "PREFILL a[8:10)",
        "*a1 | *a2 | CODA a@9x4#0 a@9x4#0 a@9x4#0 | PRELUDE a@10 a@10 a@10"
        " | LOOP a@10d0 a@10d0 a@10d0",
        *[f"LOOP a@10d{d} a@10d{d} a@10d{d}" for d in (1, 2, 3)],
        "CODA a@10x4#1 a@10x4#1 a@10x4#1",
        "-a | -a | -a",
    ]
    first, second = bench.plans[2].forks
    (admission,) = bench.plans[0].admits
    assert (admission.rng, first.rng, second.rng) == (RngKey(7, 0), RngKey(7, 1), RngKey(7, 2))
    assert [fork.key.generation for fork in (first, second)] == [2, 3]
    assert {fork.parent for fork in (first, second)} == {key}
    for fork in (first, second):
        # Two complete prompt blocks are the parent's, one is its own: tokens 8 to 10.
        assert all(len(plane) == 3 for plane in fork.tables)
        shared = [plane[:2] for plane in fork.tables]
        assert shared == [plane[:2] for plane in admission.tables]
    own = [plane[2] for item in (admission, first, second) for plane in item.tables]
    assert len(set(own)) == 12
    assert by_choice(bench.outputs) == {
        ("a", 0): [10, 11],
        ("a", 1): [20, 21],
        ("a", 2): [30, 31],
    }
    check_idle(bench)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("reservation", ["full", "incremental"])
@pytest.mark.parametrize("prompt", [1, 4, 7, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_every_choice_says_what_it_has_to(
    prompt: int, max_tokens: int, reservation: str, caching: bool
) -> None:
    bench = Bench(token=own_tokens, reservation=reservation, caching=caching, chunk=3)
    for name in ("a", "b"):
        bench.add(name, prompt=prompt, n=2, max_tokens=max_tokens)
    said = by_choice(bench.finish())
    assert said == {
        (name, choice): [10 * generation + index for index in range(max_tokens)]
        for name, choice, generation in [("a", 0, 1), ("a", 1, 2), ("b", 0, 3), ("b", 1, 4)]
    }
    check_idle(bench)


def test_growing_choices_are_granted_what_they_write_to() -> None:
    bench = Bench(reservation="incremental", caching=False)
    bench.add("a", prompt=8, n=2, max_tokens=6)
    bench.step()
    kv = bench.engine.stats().lanes[0].kv
    # 13 tokens are 4 blocks a plane; the other choice needs the last two of them once more.
    assert (kv.free_blocks, kv.promised_blocks, kv.tables) == (256 - 8, 8 + 8, 2)
    bench.step()
    plan = bench.plans[-1]
    (fork,) = plan.forks
    assert all(len(plane) == 2 for plane in fork.tables)
    assert [grant.key.generation for grant in plan.grants] == [1, 2]
    assert all(len(plane) == 1 for grant in plan.grants for plane in grant.tables)
    kv = bench.engine.stats().lanes[0].kv
    assert (kv.free_blocks, kv.promised_blocks) == (256 - 16, 8)
    bench.finish()
    check_idle(bench)


def test_choices_are_placed_together_or_not_at_all() -> None:
    bench = Bench(make_profile(num_slots=3))
    bench.add("a", max_tokens=2)
    bench.add("b", n=3, max_tokens=1)
    bench.step()
    assert bench.engine.stats().waiting == 3
    assert bench.engine.stats().lanes[0].free_slots == 2
    while bench.engine.stats().waiting:
        bench.step()
    stats = bench.engine.stats()
    assert (stats.running, stats.lanes[0].free_slots) == (3, 0)
    assert trace(bench.plans[-2]) == "-a"
    assert len(by_choice(bench.finish())) == 4
    check_idle(bench)


@pytest.mark.parametrize(("num_blocks", "fits"), [(28, True), (27, False)])
def test_blocks_are_counted_with_what_is_shared(num_blocks: int, fits: bool) -> None:
    # 10 + 3 - 1 = 12 tokens: 3 blocks in each of 4 planes, of which 2 are shared by 5 choices.
    bench = Bench(make_profile(num_slots=5, num_blocks=num_blocks))
    if not fits:
        message = (
            r"10 prompt tokens and max_tokens 3, each of 5 choices, need 28 KV blocks, the largest "
            r"worker has 27"
        )
        with pytest.raises(CapacityError, match=message):
            bench.add("a", prompt=10, n=5, max_tokens=3)
        return
    bench.add("a", prompt=10, n=5, max_tokens=3)
    bench.plan()
    kv = bench.engine.stats().lanes[0].kv
    assert (kv.free_blocks, kv.promised_blocks) == (16, 16)
    bench = Bench(make_profile(num_slots=6, num_blocks=num_blocks))
    bench.add("a", prompt=10, n=5, max_tokens=3)
    bench.add("b", max_tokens=1)
    bench.step()
    assert bench.engine.stats().waiting == 1
    assert len(by_choice(bench.finish())) == 6
    check_idle(bench)


def test_more_choices_than_slots_are_refused_with_the_numbers() -> None:
    bench = Bench(make_profile(num_slots=2), make_profile(num_slots=3, num_blocks=8))
    with pytest.raises(CapacityError, match="n 4 takes as many slots, the largest worker has 3"):
        bench.add("a", n=4)
    # One worker has the slots, the other the blocks.
    with pytest.raises(CapacityError, match="need 12 KV blocks, the largest worker has 8"):
        bench.add("a", prompt=1, n=3, max_tokens=1)
    bench.add("a", prompt=4, n=3, max_tokens=1)
    assert len(by_choice(bench.finish())) == 3
    check_idle(bench)


def test_max_waiting_counts_requests_and_the_statistics_choices() -> None:
    bench = Bench(make_profile(num_slots=3), max_waiting=2)
    for name in ("a", "b"):
        bench.add(name, n=3, max_tokens=3)
    stats = bench.engine.stats()
    assert (stats.waiting, stats.rng_keys) == (6, 2)
    bench.plan()
    stats = bench.engine.stats()
    assert (stats.waiting, stats.running, stats.lanes[0].free_slots) == (3, 3, 0)
    # 3 tokens of 4 loops each for every choice.
    assert stats.lanes[0].load == 36


def test_the_load_counts_choices_also_when_it_was_asked_before() -> None:
    bench = Bench(make_profile(num_slots=4), make_profile(num_slots=4))
    for name in ("a", "b", "c"):
        bench.add(name, n=2 if name == "a" else 1, max_tokens=3)
    bench.plan()
    lanes = bench.engine.stats().lanes
    assert [(lane.running, lane.load) for lane in lanes] == [(2, 24), (2, 24)]


def test_choices_that_wait_for_a_cohort_are_forked_without_delay() -> None:
    bench = Bench(mode="no_refill", caching=False)
    bench.add("a", prompt=1, max_tokens=3)
    bench.step()
    bench.add("b", prompt=1, n=2, max_tokens=1)
    bench.step()
    bench.step()
    assert bench.traces()[-2:] == [
        "+b | CODA a@0x4#0 | PRELUDE a@1 | PREFILL b[0:1) | LOOP a@1d0",
        "*b1 | LOOP a@1d1",
    ]
    bench.finish()
    assert "CODA a@1x4#1 b@0x4#0 b@0x4#0 | PRELUDE a@2 | LOOP a@2d0" in bench.traces()
    check_idle(bench)


def test_plans_in_flight_carry_the_forks_before_the_prompt_is_answered() -> None:
    bench = Bench(token=own_tokens, plans_in_flight=3, caching=False)
    bench.add("a", prompt=10, n=2, forced_depths=[4, 1], max_tokens=2)
    plans = bench.plan()
    assert [trace(plan) for _, plan in plans] == [
        "+a | PREFILL a[0:8)",
        "PREFILL a[8:10)",
        "*a1 | CODA a@9x4#0 a@9x4#0 | PRELUDE a@10 a@10 | LOOP a@10d0 a@10d0",
    ]
    for lane, plan in plans:
        bench.apply(lane, bench.run(lane, plan))
    said = by_choice(bench.finish())
    assert said == {("a", 0): [10, 11], ("a", 1): [20, 21]}
    check_idle(bench)


@pytest.mark.parametrize("reservation", ["full", "incremental"])
def test_resident_choices_are_forked_before_the_first_of_them_samples(reservation: str) -> None:
    profile = replace(make_profile(), max_ticks=16)
    bench = Bench(profile, token=own_tokens, caching=False, reservation=reservation)
    bench.add("a", prompt=10, n=3, max_tokens=3)
    bench.finish()
    assert bench.traces() == [
        "+a | PREFILL a[0:8)",
        "PREFILL a[8:10)",
        "*a1 | *a2 | TICKS a a a x16",
        "-a | -a | -a",
    ]
    assert by_choice(bench.outputs) == {
        ("a", 0): [10, 11, 12],
        ("a", 1): [20, 21, 22],
        ("a", 2): [30, 31, 32],
    }
    check_idle(bench)


def test_a_cached_prompt_serves_all_choices() -> None:
    bench = Bench()
    bench.add("a", prompt=9, max_tokens=1)
    bench.finish()
    bench.add("b", prompt=9, n=2, max_tokens=2)
    bench.step()
    assert trace(bench.plans[-1]) == "+b | PREFILL b[8:9)"
    bench.step()
    (fork,) = bench.plans[-1].forks
    cached = [plane[:2] for plane in bench.plans[-2].admits[0].tables]
    assert [plane[:2] for plane in fork.tables] == cached
    stats = bench.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hit_tokens) == (2, 8)
    bench.finish()
    check_idle(bench)


def test_shared_blocks_come_back_with_the_last_choice_and_stay_cached() -> None:
    bench = Bench(token=own_tokens)
    bench.add("a", prompt=9, n=2, max_tokens=3, stop_token_ids=[10])
    while not any(plan.releases for plan in bench.plans):
        bench.step()
    stats = bench.engine.stats()
    # Choice 0 is gone; choice 1 has 2 shared columns and one of its own.
    assert (stats.running, stats.releasing, stats.rng_keys) == (1, 0, 1)
    assert (stats.free_blocks, stats.cached_blocks) == (256 - 12, 8)
    with pytest.raises(DuplicateRequestError):
        bench.add("a")
    bench.finish()
    ends = {o.choice: o.finish_reason for o in bench.outputs if o.finish_reason}
    assert ends == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
    check_idle(bench)
    # All that is cached can be evicted again.
    bench.add("b", prompt=2, max_tokens=62)
    bench.add("c", prompt=2, max_tokens=62)
    bench.add("d", prompt=2, max_tokens=62)
    bench.add("e", prompt=2, max_tokens=62)
    bench.plan()
    stats = bench.engine.stats()
    assert (stats.running, stats.free_blocks, stats.evicted_blocks) == (4, 0, 8)


def quick(generation: int) -> Hazard:
    """One choice leaves after every first loop, the others never early: it owes the least."""
    return lambda key, position, depth: float(key.generation == generation)


@pytest.mark.parametrize("after", range(3, 9))
@pytest.mark.parametrize("victim", [1, 2])
def test_each_choice_can_make_room_once_it_is_forked(after: int, victim: int) -> None:
    profile = make_profile(num_slots=2, snapshots=ROOMY)
    bench = Bench(
        profile, hazard=quick(victim), token=own_tokens, policy="priority", preemption=True
    )
    bench.add("a", prompt=7, n=2, max_tokens=9, priority=9)
    for _ in range(after):
        bench.step()
    bench.add("b", prompt=3, max_tokens=2)
    bench.finish()
    assert [key.generation for plan in bench.plans for key in plan.suspends] == [victim]
    assert by_choice(bench.outputs) == {
        ("a", 0): list(range(10, 19)),
        ("a", 1): list(range(20, 29)),
        ("b", 0): [30, 31],
    }
    check_idle(bench)


def test_before_the_fork_nobody_makes_room() -> None:
    profile = make_profile(num_slots=2, snapshots=ROOMY)
    bench = Bench(profile, policy="priority", preemption=True, chunk=2)
    bench.add("a", prompt=9, n=2, max_tokens=2, priority=9)
    bench.step()
    bench.add("b", max_tokens=1)
    bench.finish()
    forks = [index for index, plan in enumerate(bench.plans) if plan.forks]
    suspends = [index for index, plan in enumerate(bench.plans) if plan.suspends]
    assert (forks, suspends) == ([5], [6])
    check_idle(bench)


def test_a_request_of_several_choices_has_room_made_for_all_of_them() -> None:
    profile = make_profile(num_slots=2, snapshots=ROOMY)
    bench = Bench(profile, policy="priority", preemption=True)
    for name in ("a", "b"):
        bench.add(name, max_tokens=4, priority=9)
    bench.step()
    bench.add("c", n=2, max_tokens=2)
    bench.finish()
    assert [len(plan.suspends) for plan in bench.plans if plan.suspends] == [2]
    assert len(by_choice(bench.outputs)) == 4
    check_idle(bench)


def test_what_a_lane_knows_of_forks_in_one_line() -> None:
    forks = UnsentForks(KVManager(make_profile()), grows=False)
    assert repr(forks) == "<UnsentForks 0>"
