"""The random walk over an engine whose requests make room for others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from protocol.snapshot import LossReason, SnapshotLoss, SnapshotRoom
from tests.scheduler.bench import make_profile
from tests.scheduler.test_engine_stateful import IDS, STEMS, TENANTS, EngineMachine

if TYPE_CHECKING:
    from protocol.profile import WorkerProfile

SMALL = {
    "lane-0": make_profile(num_slots=1, num_blocks=40, snapshots=SnapshotRoom(1000, 10, 1, 2)),
    "lane-1": make_profile(
        num_slots=2, num_blocks=40, block_size=2, snapshots=SnapshotRoom(50, 10, 1, 2)
    ),
}
"""The second keeps one or two snapshots."""


class PreemptingMachine(EngineMachine):
    """The same with requests that make room for others, and snapshots that get lost."""

    scheduler: ClassVar[dict[str, object]] = {"policy": "priority", "preemption": True}
    profiles: ClassVar[dict[str, WorkerProfile]] = SMALL

    @rule(
        priorities=st.lists(st.integers(1, 4), min_size=2, max_size=4),
        stem=st.sampled_from(STEMS),
        num_prompt=st.integers(1, 9),
        tenant=st.sampled_from(TENANTS),
        first=st.integers(1, 9),
        then=st.integers(0, 6),
    )
    def rush(
        self,
        priorities: list[int],
        stem: tuple[int, ...],
        num_prompt: int,
        tenant: str,
        first: int,
        then: int,
    ) -> None:
        """Requests get on for a while, then one comes before all of them."""
        for request_id, priority in zip(IDS, priorities, strict=False):
            self.add(request_id, stem, num_prompt, tenant, 8, [1, 4], 0.9, set(), priority, None)
        self.go_on(first)
        self.add("e", stem, 6, tenant, 3, [1, 4], None, set(), 0, None)
        self.go_on(then)

    @precondition(lambda self: any(result.suspended for result in self.next_results().values()))
    @rule(told=st.booleans())
    def apply_without_a_snapshot(self, told: bool) -> None:
        results = self.next_results()
        lane = next(lane for lane, result in results.items() if result.suspended)
        result = results[lane]
        key = result.suspended[0].key
        lost = (SnapshotLoss(key, LossReason.OVER_BOUND, "full"),) if told else ()
        self.answer(lane, replace(result, suspended=result.suspended[1:], lost=lost))
        assert self.lives[key].reason is not None


class CrowdedMachine(PreemptingMachine):
    """The same with little room, in cohorts, and blocks that come one by one."""

    scheduler: ClassVar[dict[str, object]] = {
        "policy": "priority",
        "preemption": True,
        "reservation": "incremental",
        "mode": "no_refill",
        "kv_watermark": 0.2,
        "max_admission_bypasses": 1,
    }


class PipelinedMachine(PreemptingMachine):
    """The same with several plans in flight, which victims still have rows in."""

    scheduler: ClassVar[dict[str, object]] = {
        "policy": "priority",
        "preemption": True,
        "exit_policy": "ouro_delayed",
        "plans_in_flight": 3,
    }


class ResidentMachine(PreemptingMachine):
    """The same with victims that decode on their worker."""

    profiles: ClassVar[dict[str, WorkerProfile]] = {
        lane: replace(profile, max_ticks=3) for lane, profile in SMALL.items()
    }
    scheduler: ClassVar[dict[str, object]] = {
        "policy": "priority",
        "preemption": True,
        "reservation": "incremental",
        "plans_in_flight": 2,
    }


TestPreempting = PreemptingMachine.TestCase
TestPreempting.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestCrowded = CrowdedMachine.TestCase
TestCrowded.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestPipelined = PipelinedMachine.TestCase
TestPipelined.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestResident = ResidentMachine.TestCase
TestResident.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
