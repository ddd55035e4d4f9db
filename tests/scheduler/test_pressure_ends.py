"""Every way a request can end while blocks are short, and that all others end as they would."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.exit_rule import FinishReason
from protocol.layout import Layout
from protocol.snapshot import LossReason, SnapshotLoss, SnapshotRoom
from tests.scheduler.bench import Bench, make_profile, reasons, texts
from tests.scheduler.test_pressure import check_idle, pressed, suspended

if TYPE_CHECKING:
    from protocol.identity import RequestKey

STATES = ("suspending", "suspended", "resumed")


def stage(state: str) -> Bench:
    """Bring "b" so far that its suspend or resume is in flight, or it is suspended.

    "a", which came before it, needs the page that it leaves, and stands still until then.
    """
    bench = pressed(8)
    bench.add("a", prompt=2, max_tokens=5)
    bench.add("b", prompt=1, max_tokens=8)
    for _ in range(3):
        bench.step()
    assert bench.send_plans() == ["~b"]
    if state != "suspending":
        bench.land()
    while state == "resumed" and not any(plan.resumes for plan in bench.plans):
        bench.land()
        bench.send_plans()
    return bench


def check_over(bench: Bench, left: set[str]) -> None:
    """Those that are left reach their length, and nothing is held any more."""
    bench.land()
    bench.finish()
    length = {name for name, why in reasons(bench.outputs).items() if why is FinishReason.LENGTH}
    assert length == left
    check_idle(bench)


@pytest.mark.parametrize("state", STATES)
def test_nothing_happens(state: str) -> None:
    bench = stage(state)
    check_over(bench, {"a", "b"})
    assert suspended(bench) == ["b"]


@pytest.mark.parametrize("state", STATES)
def test_abort_of_the_one_that_leaves(state: str) -> None:
    bench = stage(state)
    (end,) = bench.engine.abort("b")
    assert end.finish_reason is FinishReason.ABORT
    check_over(bench, {"a"})


@pytest.mark.parametrize("state", ["suspending", "suspended"])
def test_abort_of_the_one_that_stands_still(state: str) -> None:
    bench = stage(state)
    (end,) = bench.engine.abort("a")
    assert end.finish_reason is FinishReason.ABORT
    check_over(bench, {"b"})
    assert suspended(bench) == ["b"]


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("state", ["suspending", "suspended"])
def test_an_end_that_its_text_tells(state: str, name: str) -> None:
    bench = stage(state)
    (end,) = bench.engine.finish(name, 0)
    assert (end.start_index, end.finish_reason) == (1, FinishReason.STOP)
    check_over(bench, {"a", "b"} - {name})


@pytest.mark.parametrize("state", STATES)
def test_a_closed_lane_ends_all_of_it(state: str) -> None:
    bench = stage(state)
    ended = set(reasons(bench.outputs))
    ends = bench.engine.close_lane("lane-0", "gone")
    assert {end.key.request_id for end in ends} == {"a", "b"} - ended
    assert all(end.worker_lost for end in ends)
    assert not bench.engine.has_work()
    assert bench.engine.stats().rng_keys == 0
    bench.engine.add_lane("lane-0", 2, make_profile(num_blocks=8, snapshots=SnapshotRoom(999, 1)))
    bench.add("b", prompt=1, max_tokens=8)
    ((_, plan),) = bench.plan()
    assert len(plan.admits) == 1


@pytest.mark.parametrize("told", [True, False])
def test_a_snapshot_that_is_lost_ends_its_request_alone(told: bool) -> None:
    bench = stage("suspending")
    result = bench.flying["lane-0"].popleft()
    (key,) = [handle.key for handle in result.suspended]
    lost = (SnapshotLoss(key, LossReason.OVER_BOUND, "full"),) if told else ()
    bench.apply("lane-0", replace(result, suspended=(), lost=lost))
    stats = bench.engine.stats()
    assert (stats.preemptions, stats.pressure_preemptions) == (0, 0)
    check_over(bench, {"a"})
    assert reasons(bench.outputs)["b"] is FinishReason.ERROR


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_abort_at_any_time_gives_everything_back(name: str, steps: int) -> None:
    bench = pressed(20, exit_policy="ouro_delayed", plans_in_flight=2)
    bench.add("a", prompt=3, max_tokens=8)
    bench.add("b", prompt=2, max_tokens=9)
    bench.add("c", prompt=3, max_tokens=6)
    for _ in range(steps):
        bench.step()
    bench.send_plans()
    gone = {end.key.request_id for end in bench.engine.abort(name)}
    for _ in range(2):
        bench.land()
    check_over(bench, {"a", "b", "c"} - gone)


def check_leaving(bench: Bench, keys: list[RequestKey], new_plans: int) -> None:
    """Nobody leaves twice, and nobody who is the first of those that never left.

    One that came back is sure of its blocks: it is none of those that hold each other up.
    """
    over = {output.key for output in bench.outputs if output.finish_reason}
    left: set[RequestKey] = set()
    for index, plan in enumerate(bench.plans):
        assert not left.intersection(plan.suspends)
        if index >= len(bench.plans) - new_plans:
            stayed = [key for key in keys if key not in left | over]
            assert not set(plan.suspends).intersection(stayed[:1])
        left.update(plan.suspends)


# Prompt tokens and outputs, at most 8 tokens with KV, so that 4 blocks of 2 hold each alone.
REQUESTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 8)).map(lambda r: (r[0], min(r[1], 9 - r[0]))),
    min_size=2,
    max_size=10,
)


@settings(max_examples=300, deadline=None)
@given(
    requests=REQUESTS,
    blocks=st.integers(4, 12),
    slots=st.integers(1, 5),
    room=st.sampled_from((0, 20, 40, 10_000)),
    layout=st.sampled_from(Layout),
    plans_in_flight=st.integers(1, 4),
    max_ticks=st.sampled_from((0, 0, 1, 5)),
    turns=st.lists(st.booleans(), max_size=40),
    scheduler=st.fixed_dictionaries(
        {
            "mode": st.sampled_from(("refill", "no_refill")),
            "min_coda_batch": st.integers(1, 3),
            "exit_policy": st.sampled_from(("ouro", "ouro_delayed")),
            "max_admission_bypasses": st.integers(0, 2),
            "chunk": st.integers(1, 4),
            "prefill": st.integers(1, 6),
            "kv_watermark": st.sampled_from((0.0, 0.3)),
        }
    ),
)
def test_every_request_ends_and_the_first_never_leaves(
    requests: list[tuple[int, int]],
    blocks: int,
    slots: int,
    room: int,
    layout: Layout,
    plans_in_flight: int,
    max_ticks: int,
    turns: list[bool],
    scheduler: dict[str, object],
) -> None:
    profile = make_profile(
        num_slots=slots,
        num_blocks=blocks * layout.planes(4),
        block_size=2,
        layout=layout,
        snapshots=SnapshotRoom(room, 1, 1, 1),
        max_ticks=max_ticks,
    )
    scheduler |= {"reservation": "overcommit", "plans_in_flight": plans_in_flight}
    bench = Bench(profile, hazard=None, token=None, **scheduler)
    keys = [
        bench.add(f"r{index}", prompt=prompt, max_tokens=outputs, ignore_eos=True)
        for index, (prompt, outputs) in enumerate(requests)
    ]
    waits = iter(turns)
    for _ in range(3000):
        if not bench.engine.has_work():
            break
        planned = bench.send_plans()
        assert planned or bench.flying["lane-0"], "nothing is left to happen"
        check_leaving(bench, keys, len(planned))
        kv = bench.engine.stats().lanes[0].kv
        assert 0 <= kv.promised_blocks <= kv.free_blocks
        if next(waits, True) or not planned:
            for result in bench.flying["lane-0"]:
                assert (result.failed, result.lost) == ((), ())
            bench.land()
    assert set(reasons(bench.outputs)) == {key.request_id for key in keys}
    assert all(why is FinishReason.LENGTH for why in reasons(bench.outputs).values())
    assert bench.engine.stats().pressure_preemptions == len(suspended(bench))
    assert {name: len(tokens) for name, (tokens, _) in texts(bench.outputs).items()} == {
        f"r{index}": outputs for index, (_, outputs) in enumerate(requests)
    }
    check_idle(bench)
