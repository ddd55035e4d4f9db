"""The random walk over lanes that promise more blocks than they have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from protocol.snapshot import SnapshotRoom
from tests.scheduler.bench import make_profile
from tests.scheduler.test_engine_stateful import STEMS, TENANTS, EngineMachine

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.profile import WorkerProfile

TIGHT = {
    "lane-0": make_profile(num_slots=4, num_blocks=24, snapshots=SnapshotRoom(1000, 10, 1, 2)),
    "lane-1": make_profile(
        num_slots=3, num_blocks=40, block_size=2, snapshots=SnapshotRoom(90, 10, 1, 2)
    ),
}
"""The second keeps one or two of the largest snapshots: most of its requests are firm."""


class PressureMachine(EngineMachine):
    """The same with requests that leave when blocks run out, and snapshots that get lost."""

    scheduler: ClassVar[dict[str, object]] = {
        "reservation": "overcommit",
        "max_admission_bypasses": 2,
    }
    profiles: ClassVar[dict[str, WorkerProfile]] = TIGHT

    def __init__(self) -> None:
        super().__init__()
        self.left: set[RequestKey] = set()

    def check_victims(self, victims: tuple[RequestKey, ...]) -> None:
        """Each leaves once, and none is the first of all those that never left."""
        stayed = [k for k, v in self.lives.items() if v.reason is None and k not in self.left]
        for key in victims:
            assert self.lives[key].reason is None
            assert key in stayed, "suspended for want of blocks twice"
            assert key != self.first(stayed)
        self.left.update(victims)

    def first(self, keys: list[RequestKey]) -> RequestKey:
        return keys[0]

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(2, 8)), min_size=3, max_size=4),
        stem=st.sampled_from(STEMS),
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(0, 2),
        then=st.integers(4, 14),
    )
    def crowd(
        self,
        sizes: list[tuple[int, int]],
        stem: tuple[int, ...],
        tenant: str,
        priority: int,
        then: int,
    ) -> None:
        """Several at once, that grow together."""
        for request_id, (prompt, outputs) in zip("abcd", sizes, strict=False):
            loops = [1, 2]
            self.add(request_id, stem, prompt, tenant, outputs, loops, None, set(), priority, None)
        self.go_on(then)


class PipelinedPressureMachine(PressureMachine):
    """The same with several plans in flight, which victims still have rows in, by priority."""

    scheduler: ClassVar[dict[str, object]] = {
        "reservation": "overcommit",
        "policy": "priority",
        "exit_policy": "ouro_delayed",
        "plans_in_flight": 3,
        "kv_watermark": 0.2,
    }

    def first(self, keys: list[RequestKey]) -> RequestKey:
        return min(keys, key=lambda key: (self.lives[key].params.priority, key.generation))


class CrowdedPressureMachine(PressureMachine):
    """The same in cohorts, with requests that also leave for others of higher priority."""

    scheduler: ClassVar[dict[str, object]] = {
        "reservation": "overcommit",
        "policy": "priority",
        "preemption": True,
        "mode": "no_refill",
        "plans_in_flight": 2,
    }

    def check_victims(self, victims: tuple[RequestKey, ...]) -> None:
        """None of them has ended; who leaves for a higher priority may do so again."""
        assert all(self.lives[key].reason is None for key in victims)


class TickingPressureMachine(PressureMachine):
    """The same with rows that decode on their worker, and park where their blocks end."""

    profiles: ClassVar[dict[str, WorkerProfile]] = {
        lane: replace(profile, max_ticks=ticks)
        for (lane, profile), ticks in zip(TIGHT.items(), (3, 9), strict=True)
    }
    parks: ClassVar[bool] = True
    scheduler: ClassVar[dict[str, object]] = {"reservation": "overcommit", "plans_in_flight": 2}


TestPressure = PressureMachine.TestCase
TestPressure.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPipelined = PipelinedPressureMachine.TestCase
TestPipelined.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestCrowded = CrowdedPressureMachine.TestCase
TestCrowded.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestTicking = TickingPressureMachine.TestCase
TestTicking.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
