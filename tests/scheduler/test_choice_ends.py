"""The ends of choices: of all before they are forked, of each on its own afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import DuplicateRequestError
from protocol.exit_rule import FinishReason
from protocol.result import FailedRow
from tests.scheduler.bench import Bench, make_profile
from tests.scheduler.test_choices import by_choice, check_idle, own_tokens

ABORT, ERROR, STOP = FinishReason.ABORT, FinishReason.ERROR, FinishReason.STOP


def ends(bench: Bench) -> list[tuple[str, int, FinishReason]]:
    """Every end so far, in order."""
    return [
        (output.key.request_id, output.choice, output.finish_reason)
        for output in bench.outputs
        if output.finish_reason is not None
    ]


def choices(reason: FinishReason, count: int = 3) -> list[tuple[str, int, FinishReason]]:
    """All choices of request a, ended with one reason."""
    return [("a", choice, reason) for choice in range(count)]


def test_an_abort_while_waiting_ends_all() -> None:
    bench = Bench()
    bench.add("a", n=3)
    bench.outputs += bench.engine.abort("a")
    assert ends(bench) == choices(ABORT)
    assert bench.engine.abort("a") == []
    check_idle(bench)
    assert bench.add("a", n=2).generation == 4


def test_an_abort_after_placement_leaves_nothing() -> None:
    bench = Bench(chunk=8, prefill=8)
    bench.add("b", prompt=8)
    bench.add("a", n=3)
    bench.plan()
    assert bench.engine.stats().lanes[0].free_slots == 0
    bench.outputs += bench.engine.abort("a")
    assert ends(bench) == choices(ABORT)
    stats = bench.engine.stats()
    assert (stats.lanes[0].free_slots, stats.lanes[0].kv.tables, stats.rng_keys) == (3, 1, 1)
    assert bench.add("a").generation == 5


def test_an_abort_before_the_fork_gives_the_other_slots_back_at_once() -> None:
    bench = Bench(caching=False)
    bench.add("a", prompt=10, n=3)
    bench.step()
    bench.outputs += bench.engine.abort("a")
    assert ends(bench) == choices(ABORT)
    stats = bench.engine.stats()
    assert (stats.lanes[0].free_slots, stats.releasing, stats.rng_keys) == (3, 1, 1)
    # Only choice 0 holds blocks until its release is acknowledged: 25 tokens, 7 columns.
    assert (stats.free_blocks, stats.lanes[0].kv.promised_blocks) == (256 - 28, 0)
    with pytest.raises(DuplicateRequestError):
        bench.add("a")
    bench.finish()
    assert bench.traces()[-1] == "-a"
    check_idle(bench)


def test_an_abort_after_the_fork_releases_each() -> None:
    bench = Bench()
    bench.add("a", prompt=9, n=3, max_tokens=5)
    for _ in range(4):
        bench.step()
    bench.outputs += bench.engine.abort("a")
    assert ends(bench) == choices(ABORT)
    bench.finish()
    assert bench.traces()[-1] == "-a | -a | -a"
    check_idle(bench)


def test_choices_stop_each_at_its_own_token() -> None:
    bench = Bench(token=own_tokens)
    bench.add("a", prompt=5, n=3, max_tokens=4, stop_token_ids=[21, 30])
    bench.finish()
    assert by_choice(bench.outputs) == {
        ("a", 0): [10, 11, 12, 13],
        ("a", 1): [20, 21],
        ("a", 2): [30],
    }
    assert ends(bench) == [("a", 2, STOP), ("a", 1, STOP), ("a", 0, FinishReason.LENGTH)]
    check_idle(bench)


def test_one_choice_is_finished_by_its_index() -> None:
    bench = Bench(token=own_tokens)
    bench.add("a", prompt=5, n=3, max_tokens=4)
    for _ in range(7):
        bench.step()
    assert bench.engine.finish("a", 5, 1) == []
    assert bench.engine.finish("a", 0, 3) == []
    assert bench.engine.finish("a", 0, -1) == []
    (end,) = bench.engine.finish("a", 0, 1)
    assert (end.choice, end.start_index, end.tokens, end.finish_reason) == (1, 1, (), STOP)
    assert bench.engine.finish("a", 0, 1) == []
    bench.outputs.append(end)
    bench.finish()
    assert [choice for _, choice, _ in ends(bench)] == [1, 0, 2]
    check_idle(bench)


def test_a_prompt_that_fails_before_the_fork_fails_all() -> None:
    bench = Bench()
    bench.add("a", prompt=10, n=3)
    ((lane, plan),) = bench.plan()
    key = plan.admits[0].key
    result = bench.run(lane, plan)
    bench.apply(lane, replace(result, failed=(FailedRow(key, "hot"),)))
    assert ends(bench) == choices(ERROR)
    assert {output.error for output in bench.outputs} == {"hot"}
    assert bench.engine.stats().lanes[0].free_slots == 3
    bench.finish()
    assert bench.traces()[-1] == "-a"
    check_idle(bench)


def test_a_prompt_that_fails_with_the_forks_in_flight_fails_them_on_the_worker() -> None:
    bench = Bench(plans_in_flight=2, hazard=lambda key, position, depth: 0.0)
    bench.add("a", prompt=3, n=3, forced_depths=[4, 1], max_tokens=2)
    plans = [plan for _, plan in bench.plan()]
    assert [len(plan.forks) for plan in plans] == [0, 2]
    # A worker that knows nothing of the parent: its admission has failed there.
    broken = replace(plans[0], admits=(replace(plans[0].admits[0], tables=((0,),)),))
    for plan in (broken, plans[1]):
        bench.apply("lane-0", bench.run("lane-0", plan))
    assert sorted(ends(bench), key=lambda end: end[1]) == choices(ERROR)
    errors = {output.choice: output.error for output in bench.outputs}
    assert "its parent a#1 has failed" in (errors[2] or "")
    assert bench.engine.stats().stale_rows == 0
    bench.finish()
    check_idle(bench)


def test_a_fork_that_fails_fails_its_choice_alone() -> None:
    bench = Bench(mode="no_refill", token=own_tokens)
    bench.add("b", max_tokens=3)
    bench.step()
    bench.add("a", prompt=1, n=2, max_tokens=2)
    bench.step()
    ((lane, plan),) = bench.plan()
    # The forks of a cohort's choices have no row in their plan yet.
    (fork,) = plan.forks
    assert all(fork.key not in step.keys for step in plan.steps)
    bad = replace(plan, forks=(replace(fork, tables=fork.tables[:1]),))
    bench.apply(lane, bench.run(lane, bad))
    assert ends(bench) == [("a", 1, ERROR)]
    bench.finish()
    assert by_choice(bench.outputs)["a", 0] == [20, 21]
    check_idle(bench)


def test_a_failed_choice_makes_its_cached_prompt_forgotten() -> None:
    bench = Bench(make_profile(num_slots=2))
    bench.add("a", prompt=9, n=2, max_tokens=3)
    bench.step()
    bench.step()
    assert bench.engine.stats().cached_blocks == 8
    ((lane, plan),) = bench.plan()
    result = bench.run(lane, plan)
    bench.apply(lane, replace(result, failed=(FailedRow(plan.forks[0].key, "hot"),)))
    assert bench.engine.stats().cached_blocks == 0
    bench.finish()
    assert [choice for _, choice, _ in ends(bench)] == [1, 0]
    check_idle(bench)


@pytest.mark.parametrize("steps", range(4))
def test_a_lost_lane_ends_all_choices(steps: int) -> None:
    bench = Bench(make_profile(num_slots=3), make_profile(num_slots=1))
    bench.add("a", prompt=9, n=3)
    for _ in range(steps):
        bench.step()
    bench.outputs += bench.engine.close_lane("lane-0", "gone")
    assert ends(bench) == choices(ERROR)
    assert all(output.worker_lost for output in bench.outputs if output.finish_reason)
    assert (bench.engine.stats().waiting, bench.engine.stats().rng_keys) == (0, 0)
    assert not bench.engine.has_work()
