"""Every way a request can end around a suspend: abort, loss, failure, a closed lane."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from protocol.exit_rule import FinishReason
from protocol.result import FailedRow
from protocol.snapshot import LossReason, SnapshotLoss, SnapshotRoom
from tests.scheduler.bench import Bench, make_profile, reasons, texts, trace

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan

ROOM = SnapshotRoom(10_000, 100, 1, 10)
STATES = ("suspending", "suspended", "resumed")


@dataclass(slots=True)
class Scene:
    """One lane of one slot, with "low" suspended by "high". Owner: one test."""

    bench: Bench
    low: RequestKey
    flying: list[tuple[str, ExecutionPlan]]

    def land(self) -> None:
        """Answer the plan in flight, if there is one."""
        for lane, plan in self.flying:
            self.bench.apply(lane, self.bench.run(lane, plan))
        self.flying = []

    def check_over(self) -> None:
        """Finish; nothing is held any more, on either side."""
        self.land()
        self.bench.finish()
        stats = self.bench.engine.stats()
        assert stats.free_blocks == stats.total_blocks
        assert (stats.waiting, stats.running, stats.releasing, stats.suspended) == (0, 0, 0, 0)
        assert (stats.rng_keys, stats.stale_results) == (0, 0)
        for executor in self.bench.executors.values():
            assert (executor.held_keys(), executor.suspended_keys()) == ((), ())


def stage(state: str, tokens: int = 0) -> Scene:
    """Bring "low" so far that its suspend or its resume is in flight, or it is suspended."""
    bench = Bench(
        make_profile(num_slots=2, snapshots=ROOM), policy="priority", preemption=True, prefill=4
    )
    bench.add("mate", prompt=1, max_tokens=9, priority=0)
    low = bench.add("low", prompt=4, max_tokens=3, priority=5)
    bench.step()
    bench.step()
    while len(texts(bench.outputs).get("low", ([], []))[0]) < tokens:
        bench.step()
    bench.add("high", max_tokens=1, priority=1)
    scene = Scene(bench, low, bench.plan())
    assert scene.flying[0][1].suspends == (low,)
    if state != "suspending":
        scene.land()
    if state == "resumed":
        for _ in range(3):
            bench.step()
        assert reasons(bench.outputs) == {"high": FinishReason.LENGTH}
        scene.flying = bench.plan()
    return scene


@pytest.mark.parametrize("state", STATES)
def test_abort(state: str) -> None:
    scene = stage(state)
    before = scene.bench.engine.stats()
    (end,) = scene.bench.engine.abort("low")
    assert (end.key, end.finish_reason) == (scene.low, FinishReason.ABORT)
    assert scene.bench.engine.abort("low") == []
    stats = scene.bench.engine.stats()
    assert (stats.suspended, stats.releasing) == (0, before.releasing + 1)
    assert stats.waiting == before.waiting - (state == "suspended")
    scene.land()
    scene.check_over()
    assert sum(scene.low in plan.releases for plan in scene.bench.plans) == 1


@pytest.mark.parametrize("state", STATES)
def test_an_end_that_its_text_tells(state: str) -> None:
    scene = stage(state, tokens=1)
    (end,) = scene.bench.engine.finish("low", 0)
    assert (end.key, end.start_index, end.finish_reason) == (scene.low, 1, FinishReason.STOP)
    assert scene.bench.engine.finish("low", 0) == []
    assert scene.bench.engine.stats().suspended == 0
    scene.check_over()
    assert sum(scene.low in plan.releases for plan in scene.bench.plans) == 1


@pytest.mark.parametrize("state", STATES)
def test_a_closed_lane_ends_it_and_its_id_is_free(state: str) -> None:
    scene = stage(state)
    ends = scene.bench.engine.close_lane("lane-0", "gone")
    (end,) = [end for end in ends if end.key == scene.low]
    assert end.worker_lost
    assert end.error is not None
    assert end.error.startswith("lane-0 was closed: gone")
    stats = scene.bench.engine.stats()
    assert (stats.waiting, stats.suspended, stats.rng_keys) == (0, 0, 0)
    assert not scene.bench.engine.has_work()
    scene.bench.engine.add_lane("lane-0", 2, make_profile())
    assert scene.bench.add("low").generation > scene.low.generation


@pytest.mark.parametrize("state", STATES)
def test_its_id_can_be_used_again_after_its_release(state: str) -> None:
    scene = stage(state)
    scene.bench.engine.abort("low")
    scene.land()
    while not any(scene.low in plan.releases for plan in scene.bench.plans):
        scene.bench.step()
    again = scene.bench.add("low", prompt=2, max_tokens=2, priority=9)
    assert again.generation > scene.low.generation
    scene.check_over()
    assert texts(o for o in scene.bench.outputs if o.key == again) == {"low": ([1, 2], [4, 4])}


@pytest.mark.parametrize("told", ["lost", "failed", "nothing"])
def test_a_suspend_that_left_no_snapshot(told: str) -> None:
    scene = stage("suspending")
    ((lane, plan),) = scene.flying
    scene.flying = []
    result = replace(scene.bench.run(lane, plan), suspended=())
    if told == "lost":
        loss = SnapshotLoss(scene.low, LossReason.OVER_BOUND, "the memory is full")
        result = replace(result, lost=(loss,))
    elif told == "failed":
        result = replace(result, failed=(FailedRow(scene.low, "no such request"),))
    scene.bench.apply(lane, result)
    message = {
        "lost": "its snapshot is lost: the memory is full",
        "failed": "no such request",
        "nothing": f"the answer to plan {plan.seq} lacks its snapshot",
    }[told]
    assert [(o.key, o.error) for o in scene.bench.outputs if o.error] == [(scene.low, message)]
    stats = scene.bench.engine.stats()
    assert (stats.suspended, stats.preemptions, stats.releasing) == (0, 0, 1)
    scene.check_over()
    assert stats.stale_rows == 0


def test_a_resume_without_a_snapshot() -> None:
    scene = stage("suspended")
    # Another plan of this worker has dropped it behind the engine's back.
    executor = scene.bench.executors["lane-0"]
    ((lane, plan),) = scene.bench.plan()
    scene.bench.apply(lane, scene.bench.run(lane, replace(plan, releases=(scene.low,))))
    assert executor.suspended_keys() == ()
    scene.check_over()
    (end,) = [output for output in scene.bench.outputs if output.error]
    assert end.key == scene.low
    assert "has no snapshot" in str(end.error)


def test_a_resume_that_failed() -> None:
    scene = stage("resumed")
    ((lane, plan),) = scene.flying
    scene.flying = []
    assert trace(plan).startswith("^low")
    result = scene.bench.run(lane, plan)
    scene.bench.apply(lane, replace(result, failed=(FailedRow(scene.low, "no slot is free"),)))
    errors = [output.error for output in scene.bench.outputs if output.error]
    assert errors == ["no slot is free"]
    scene.check_over()


def test_what_a_worker_says_of_others_is_stale() -> None:
    scene = stage("suspended")
    ((lane, plan),) = scene.bench.plan()
    result = scene.bench.run(lane, plan)
    ((_, suspend),) = [("lane-0", p) for p in scene.bench.plans if p.suspends]
    assert suspend.suspends == (scene.low,)
    loss = SnapshotLoss(scene.low, LossReason.CORRUPT, "?")
    scene.bench.apply(lane, replace(result, failed=(FailedRow(scene.low, "?"),), lost=(loss,)))
    assert scene.bench.engine.stats().stale_rows == 1
    scene.check_over()
    assert reasons(scene.bench.outputs)["low"] is FinishReason.LENGTH


def test_the_claim_of_an_aborted_request_holds_nobody_back() -> None:
    scene = stage("suspending")
    scene.bench.engine.abort("high")
    scene.land()
    ((_, plan),) = scene.bench.plan()
    assert [item.key for item in plan.resumes] == [scene.low]
    scene.flying = [("lane-0", plan)]
    scene.check_over()


def test_an_aborted_victim_gives_its_room_with_its_release() -> None:
    scene = stage("suspending")
    scene.bench.engine.abort("low")
    scene.bench.add("small", max_tokens=1, priority=2)
    scene.land()
    ((lane, plan),) = scene.bench.plan()
    assert (plan.releases, plan.admits) == ((scene.low,), ())
    scene.bench.apply(lane, scene.bench.run(lane, plan))
    ((lane, plan),) = scene.bench.plan()
    assert [item.key.request_id for item in plan.admits] == ["high"]
    scene.flying = [(lane, plan)]
    scene.check_over()
    assert sum(len(plan.suspends) for plan in scene.bench.plans) == 1


@pytest.mark.parametrize("aborted", [True, False])
def test_a_resume_that_was_not_sent_yet(aborted: bool) -> None:
    # One plan's budget is taken by the prompt of "long", so that the resume of "low" waits.
    bench = Bench(
        make_profile(num_slots=2, snapshots=ROOM), policy="priority", preemption=True, prefill=2
    )
    low = bench.add("low", prompt=8, max_tokens=1, priority=5)
    bench.step()
    bench.add("high", max_tokens=1, priority=1)
    bench.add("long", prompt=16, max_tokens=1, priority=1)
    for _ in range(6):
        bench.step()
    stats = bench.engine.stats()
    assert (stats.resumptions, stats.suspended, stats.running) == (1, 0, 2)
    assert not any(plan.resumes for plan in bench.plans)
    assert bench.executors["lane-0"].suspended_keys() == (low,)
    if aborted:
        bench.engine.abort("low")
    else:
        # What was not resumed yet cannot be suspended again, though its priority is the lowest.
        bench.add("urgent", max_tokens=1, priority=0)
        bench.step()
        assert [key.request_id for plan in bench.plans for key in plan.suspends] == ["low", "long"]
    Scene(bench, low, []).check_over()
    assert sum(item.key == low for plan in bench.plans for item in plan.resumes) == (
        0 if aborted else 2
    )
