"""Random adds, aborts, results, losses and lies: what must hold of the engine whatever happens."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.config import SchedulerSettings
from protocol.errors import LoopmeshError
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from protocol.resident import RowState
from protocol.result import ResidentResult
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from scheduler.engine import Engine
from scheduler.output import RequestOutput
from tests.scheduler.bench import make_profile
from tests.scheduler.lives import MODEL, Life, Storage, hazard, known, token

if TYPE_CHECKING:
    from protocol.plan import ExecutionPlan
    from protocol.profile import WorkerProfile
    from protocol.result import PlanResult, StepResult

PROFILES = {
    "lane-0": make_profile(num_slots=2, num_blocks=28),
    "lane-1": make_profile(num_slots=3, num_blocks=24, block_size=2),
}
THRESHOLDS = (None, 0.0, 0.5, 0.9, 1.0)
IDS = ("a", "b", "c", "d", "e")
TENANTS = ("", "other")
STEMS = ((1,) * 12, (1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2), (3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3, 1))
"""Prompts start with one of these: the first two share a block of 4, or two of 2."""


class EngineMachine(RuleBasedStateMachine):
    """An engine over two scripted workers, and a world that is not kind to it."""

    scheduler: ClassVar[dict[str, object]] = {}
    profiles: ClassVar[dict[str, WorkerProfile]] = PROFILES
    parks: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        limits = {
            "prefill_chunk_size": 3,
            "max_prefill_tokens": 5,
            "max_waiting": 4,
            "affinity_window": 20,
        }
        self.engine = Engine(SchedulerSettings.model_validate(limits | self.scheduler))
        self.now = 0.0
        self.epoch = 0
        self.lives: dict[RequestKey, Life] = {}
        self.executors: dict[str, ScriptedExecutor] = {}
        self.flying: dict[str, deque[tuple[ExecutionPlan, PlanResult]]] = {}
        self.storage: dict[str, Storage] = {}
        self.old: list[tuple[str, PlanResult]] = []
        for lane in self.profiles:
            self.open(lane)

    def open(self, lane: str) -> None:
        self.epoch += 1
        profile = self.profiles[lane]
        self.executors[lane] = ScriptedExecutor(profile, self.epoch, hazard=hazard, token=token)
        self.engine.add_lane(lane, self.epoch, profile)
        self.storage[lane] = Storage(profile.block_size)
        self.flying[lane] = deque()

    def next_results(self) -> dict[str, PlanResult]:
        """The oldest answer in flight of each lane that has one."""
        return {lane: flights[0][1] for lane, flights in self.flying.items() if flights}

    def see(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.lives[output.key].see(output)

    @rule(
        request_id=st.sampled_from(IDS),
        stem=st.sampled_from(STEMS),
        num_prompt=st.sampled_from((12, 11, 9, 8, 5, 4, 1)),
        tenant=st.sampled_from(TENANTS),
        max_tokens=st.integers(1, 8),
        loops=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
        threshold=st.sampled_from(THRESHOLDS),
        stops=st.sets(st.integers(1, 63), max_size=18),
        priority=st.integers(0, 2),
        forced=st.none() | st.lists(st.integers(1, 4), min_size=7, max_size=7),
        n=st.sampled_from((1, 1, 2, 3)),
    )
    def add(
        self,
        request_id: str,
        stem: tuple[int, ...],
        num_prompt: int,
        tenant: str,
        max_tokens: int,
        loops: list[int],
        threshold: float | None,
        stops: set[int],
        priority: int,
        forced: list[int] | None,
        n: int = 1,
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_loops=loops[0],
            max_loops=loops[1],
            exit_threshold=threshold,
            stop_token_ids=tuple(stops),
            priority=priority,
            forced_depths=None if forced is None else (MODEL.max_loops, *forced),
            n=n,
        )
        before = self.engine.stats()
        try:
            key = self.engine.add(request_id, stem[:num_prompt], params, 7, tenant=tenant)
        except LoopmeshError:
            assert self.engine.stats() == before
            return
        assert all(key.generation > other.generation for other in self.lives)
        delayed = self.scheduler.get("exit_policy") == "ouro_delayed"
        for choice in range(n):
            own = RequestKey(request_id, key.generation + choice)
            self.lives[own] = Life(own, stem[:num_prompt], tenant, params, delayed, choice=choice)

    @rule(request_id=st.sampled_from(IDS))
    def abort(self, request_id: str) -> None:
        live = [k for k, v in self.lives.items() if k.request_id == request_id and not v.reason]
        outputs = self.engine.abort(request_id)
        self.see(outputs)
        assert [output.key for output in outputs] == live

    def speaking(self) -> list[Life]:
        """The live requests that have given an output."""
        return [life for life in self.lives.values() if life.count and not life.reason]

    @precondition(lambda self: self.speaking())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(self.speaking()))
        request_id, choice = life.key.request_id, life.choice
        assert self.engine.finish(request_id, life.count, choice) == []
        index = data.draw(st.integers(0, life.count - 1))
        end = RequestOutput(life.key, index + 1, (), (), FinishReason.STOP, None, choice=choice)
        assert self.engine.finish(request_id, index, choice) == [end]
        assert self.engine.finish(request_id, index, choice) == []
        life.reason = FinishReason.STOP

    @rule()
    def plan(self) -> None:
        self.now += 1.0
        for lane, plan in self.engine.plan(self.now):
            limit = SchedulerSettings.model_validate(self.scheduler).plans_in_flight or 1
            # Resident ticks in flight make way for an arrival or an end in one plan more.
            assert len(self.flying[lane]) < limit + (self.profiles[lane].max_ticks > 1)
            storage = self.storage[lane]
            assert set(plan.releases) <= {*storage.admitted, *storage.asleep}
            assert set(plan.suspends) <= set(storage.admitted)
            self.check_victims(plan.suspends)
            submission = self.executors[lane].submit(plan)
            result = submission.collect(0.0)
            storage.run(plan, result, self.lives)
            assert result.failed == (), "the worker refused a row"
            assert result.lost == (), "no room for a snapshot"
            for step in result.steps:
                if isinstance(step, ResidentResult):
                    assert self.parks or RowState.PARKED not in step.states, "no block for ticks"
            submission.retire()
            self.flying[lane].append((plan, result))

    def check_victims(self, victims: tuple[RequestKey, ...]) -> None:
        """Somebody of strictly higher priority waits, and none of them has ended."""
        placed = {key for storage in self.storage.values() for key in storage.admitted}
        live = [life for life in self.lives.values() if life.reason is None]
        waiting = [life for life in live if placed.isdisjoint((life.key, life.first))]
        for key in victims:
            assert self.lives[key].reason is None
            priority = self.lives[key].params.priority
            assert any(life.params.priority < priority for life in waiting)

    @rule(plans=st.integers(1, 8))
    def go_on(self, plans: int) -> None:
        """What happens most of the time, so that requests end and leave their prompts cached."""
        for _ in range(plans):
            for lane, result in self.next_results().items():
                self.answer(lane, result)
            self.plan()

    @precondition(lambda self: self.next_results())
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        results = self.next_results()
        lane = data.draw(st.sampled_from(sorted(results)))
        self.answer(lane, results[lane])

    def answer(self, lane: str, result: PlanResult) -> None:
        plan, told = self.flying[lane].popleft()
        self.old.append((lane, told))
        self.see(self.engine.apply(lane, result, self.now))
        self.storage[lane].drop(plan.releases)
        self.storage[lane].suspend(key for key in plan.suspends if self.lives[key].reason is None)

    @precondition(lambda self: any(len(flights) > 1 for flights in self.flying.values()))
    @rule(data=st.data())
    def apply_out_of_turn(self, data: st.DataObject) -> None:
        lanes = sorted(lane for lane, flights in self.flying.items() if len(flights) > 1)
        lane = data.draw(st.sampled_from(lanes))
        index = data.draw(st.integers(1, len(self.flying[lane]) - 1))
        self.is_dropped(lane, self.flying[lane][index][1])

    @precondition(lambda self: any(result.steps for result in self.next_results().values()))
    @rule(data=st.data())
    def apply_without_a_row(self, data: st.DataObject) -> None:
        results = {lane: result for lane, result in self.next_results().items() if result.steps}
        lane = data.draw(st.sampled_from(sorted(results)))
        result = results[lane]
        index = data.draw(st.integers(0, len(result.steps) - 1))
        row = data.draw(st.integers(0, len(result.steps[index].keys) - 1))
        key = result.steps[index].keys[row]
        steps = list(result.steps)
        steps[index] = without(steps[index], row)
        self.answer(lane, replace(result, steps=tuple(steps)))
        assert self.lives[key].reason is not None

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def apply_again(self, data: st.DataObject) -> None:
        self.is_dropped(*data.draw(st.sampled_from(self.old)))

    def is_dropped(self, lane: str, result: PlanResult) -> None:
        before = self.engine.stats()
        assert self.engine.apply(lane, result, self.now) == []
        assert self.engine.stats() == replace(before, stale_results=before.stale_results + 1)

    @precondition(lambda self: self.engine.lanes)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.engine.lanes))
        self.see(self.engine.close_lane(lane, "lost"))
        del self.storage[lane]
        self.old += [(lane, result) for _, result in self.flying.pop(lane)]

    @precondition(lambda self: len(self.engine.lanes) < len(self.profiles))
    @rule()
    def reopen(self) -> None:
        self.open(next(lane for lane in self.profiles if lane not in self.engine.lanes))

    @invariant()
    def blocks_are_conserved_and_shared_by_equal_prompts_alone(self) -> None:
        for lane in self.engine.stats().lanes:
            storage = self.storage[lane.name]
            holders = storage.holders()
            assert all(block < lane.kv.total_blocks for block in holders)
            # Every other request has been placed and not sent, so the worker knows no table of it.
            used = lane.kv.total_blocks - lane.kv.free_blocks
            assert len(holders) <= used
            if len(storage.admitted) == lane.kv.tables:
                assert len(holders) == used
            assert 0 <= lane.kv.promised_blocks <= lane.kv.free_blocks
            assert lane.kv.cached_blocks <= lane.kv.total_blocks
            for block, keys in holders.items():
                shared = {self.common(storage, key, block) for key in keys}
                assert len(keys) == 1 or (len(shared) == 1 and None not in shared)
            if lane.running + lane.releasing == 0:
                assert lane.kv.free_blocks == lane.kv.total_blocks
            if lane.running == 0:
                assert lane.load == 0
                assert lane.kv.promised_blocks == 0

    def common(self, storage: Storage, key: RequestKey, block: int) -> object:
        """The plane, page and KV of a complete prompt block; None for any other."""
        life = self.lives[key]
        for plane, table in enumerate(storage.admitted[key].tables):
            if block in table:
                page = table.index(block)
                end = (page + 1) * storage.block_size
                if end > len(life.prompt):
                    return None
                # The last token is run anew for each request, but its choices have it in common.
                owner = life.first if end == len(life.prompt) else None
                return plane, page, known(life, end - 1), owner
        raise AssertionError("not in its table")

    @invariant()
    def counts_agree(self) -> None:
        stats = self.engine.stats()
        live = sum(life.reason is None for life in self.lives.values())
        assert live == stats.waiting + stats.running
        held = {key for s in self.storage.values() for key in (*s.admitted, *s.asleep)}
        held |= {key for key, life in self.lives.items() if life.reason is None}
        assert stats.rng_keys == len({key.request_id for key in held})
        assert stats.prefix_hit_tokens <= sum(len(life.prompt) for life in self.lives.values())
        assert stats.suspended <= min(stats.waiting, stats.preemptions)
        assert stats.tokens == sum(life.count for life in self.lives.values())
        assert sum(stats.finished.values()) == len(self.lives) - live

    def teardown(self) -> None:
        for _ in range(1000):
            if not self.engine.has_work():
                break
            self.go_on(1)
        assert not self.engine.has_work()
        assert all(life.reason is not None for life in self.lives.values())
        for lane in self.engine.lanes:
            assert self.executors[lane].held_keys() == ()
            assert self.executors[lane].suspended_keys() == ()
        self.blocks_are_conserved_and_shared_by_equal_prompts_alone()
        self.counts_agree()


def without(step: StepResult, row: int) -> StepResult:
    """The step's result with one row less."""
    columns: dict[str, Any] = {}
    for item in fields(step):
        column = getattr(step, item.name)
        columns[item.name] = column[:row] + column[row + 1 :]
    return replace(step, **columns)


class PipelinedMachine(EngineMachine):
    """The same with two plans in flight."""

    scheduler: ClassVar[dict[str, object]] = {
        "plans_in_flight": 2,
        "exit_policy": "ouro_delayed",
        "reservation": "incremental",
    }


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPipelined = PipelinedMachine.TestCase
TestPipelined.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
