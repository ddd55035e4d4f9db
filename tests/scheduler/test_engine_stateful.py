"""Random adds, aborts, results, losses and lies: what must hold of the engine whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.config import SchedulerSettings
from protocol.errors import LoopmeshError
from protocol.exit_rule import FinishReason, exits, round_to_float32, survival_bound
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor, scripted_hazard, scripted_token
from scheduler.engine import Engine
from scheduler.output import RequestOutput
from tests.scheduler.bench import make_model, make_profile

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import BlockTable
    from protocol.result import PlanResult, StepResult

MODEL = make_model()
PROFILES = {
    "lane-0": make_profile(num_slots=2, num_blocks=40),
    "lane-1": make_profile(num_slots=3, num_blocks=24, block_size=2),
}
TOKEN = scripted_token(MODEL)
THRESHOLDS = (None, 0.0, 0.5, 0.9, 1.0)
IDS = ("a", "b", "c", "d", "e")


@dataclass(slots=True)
class Life:
    """What one request has shown so far. Owner: the machine. Mutated only by: its `see`."""

    key: RequestKey
    num_prompt: int
    params: SamplingParams
    delayed: bool = False
    count: int = 0
    reason: FinishReason | None = None

    def see(self, output: RequestOutput) -> None:
        """Check an output against the script and the exit rule."""
        assert self.reason is None, "an output after the end"
        assert output.start_index == self.count, "a gap"
        assert output.tokens or output.finish_reason
        for token, depth in zip(output.tokens, output.exit_depths, strict=True):
            assert token == TOKEN(self.key, self.count)
            assert depth == self.exit_depth(self.count)
            self.count += 1
        self.reason = output.finish_reason
        assert (output.error is not None) is (self.reason is FinishReason.ERROR)
        assert self.count <= self.params.max_tokens
        if self.reason is FinishReason.LENGTH:
            assert self.count == self.params.max_tokens
        stopped = bool(output.tokens) and output.tokens[-1] in self.params.stop_token_ids
        assert stopped is (self.reason is FinishReason.STOP)

    def exit_depth(self, output_index: int) -> int:
        """The exit depth of an output, one loop after the other."""
        if output_index == 0:
            return MODEL.max_loops
        threshold = self.params.exit_threshold
        bound = survival_bound(MODEL.exit_threshold if threshold is None else threshold)
        max_loops = self.params.max_loops or MODEL.max_loops
        position, survival = self.num_prompt + output_index - 1, 1.0
        if self.params.forced_depths is not None:
            return self.params.forced_depths[output_index]
        due = False
        for loops in range(1, max_loops + 1):
            keeps = round_to_float32(1.0 - scripted_hazard(self.key, position, loops - 1))
            survival = round_to_float32(survival * keeps)
            least = self.params.min_loops
            leaves = exits(loops, survival, min_loops=least, max_loops=max_loops, bound=bound)
            if due or (leaves and not (self.delayed and loops < max_loops)):
                return loops
            due = leaves
        raise AssertionError("no exit")


class EngineMachine(RuleBasedStateMachine):
    """An engine over two scripted workers, and a world that is not kind to it."""

    scheduler: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        super().__init__()
        limits = {"prefill_chunk_size": 3, "max_prefill_tokens": 5, "max_waiting": 4}
        self.engine = Engine(SchedulerSettings.model_validate(limits | self.scheduler))
        self.now = 0.0
        self.epoch = 0
        self.lives: dict[RequestKey, Life] = {}
        self.executors: dict[str, ScriptedExecutor] = {}
        self.flying: dict[str, PlanResult] = {}
        self.releasing: dict[str, tuple[RequestKey, ...]] = {}
        self.tables: dict[str, dict[RequestKey, BlockTable]] = {}
        self.old: list[tuple[str, PlanResult]] = []
        for lane in PROFILES:
            self.open(lane)

    def open(self, lane: str) -> None:
        self.epoch += 1
        self.executors[lane] = ScriptedExecutor(PROFILES[lane], self.epoch)
        self.engine.add_lane(lane, self.epoch, PROFILES[lane])
        self.tables[lane] = {}

    def see(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.lives[output.key].see(output)

    @rule(
        request_id=st.sampled_from(IDS),
        num_prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 8),
        loops=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
        threshold=st.sampled_from(THRESHOLDS),
        stops=st.sets(st.integers(1, 63), max_size=12),
        priority=st.integers(0, 2),
        forced=st.none() | st.lists(st.integers(1, 4), min_size=7, max_size=7),
    )
    def add(
        self,
        request_id: str,
        num_prompt: int,
        max_tokens: int,
        loops: list[int],
        threshold: float | None,
        stops: set[int],
        priority: int,
        forced: list[int] | None,
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_loops=loops[0],
            max_loops=loops[1],
            exit_threshold=threshold,
            stop_token_ids=tuple(stops),
            priority=priority,
            forced_depths=None if forced is None else (MODEL.max_loops, *forced),
        )
        before = self.engine.stats()
        try:
            key = self.engine.add(request_id, [1] * num_prompt, params, 7)
        except LoopmeshError:
            assert self.engine.stats() == before
            return
        assert all(key.generation > other.generation for other in self.lives)
        delayed = self.scheduler.get("exit_policy") == "ouro_delayed"
        self.lives[key] = Life(key, num_prompt, params, delayed)

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
        request_id = life.key.request_id
        assert self.engine.finish(request_id, life.count) == []
        index = data.draw(st.integers(0, life.count - 1))
        end = RequestOutput(life.key, index + 1, (), (), FinishReason.STOP, None)
        assert self.engine.finish(request_id, index) == [end]
        assert self.engine.finish(request_id, index) == []
        life.reason = FinishReason.STOP

    @rule()
    def plan(self) -> None:
        self.now += 1.0
        for lane, plan in self.engine.plan(self.now):
            assert lane not in self.flying, "two plans in flight"
            tables = self.tables[lane]
            tables.update((item.key, item.tables) for item in plan.admits)
            for grant in plan.grants:
                tables[grant.key] = tuple(map(add, tables[grant.key], grant.tables))
            assert set(plan.releases) <= set(tables)
            self.releasing[lane] = plan.releases
            submission = self.executors[lane].submit(plan)
            self.flying[lane] = submission.collect(0.0)
            assert self.flying[lane].failed == (), "the worker refused a row"
            submission.retire()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.flying)))
        self.answer(lane, self.flying[lane])

    def answer(self, lane: str, result: PlanResult) -> None:
        self.old.append((lane, self.flying.pop(lane)))
        self.see(self.engine.apply(lane, result, self.now))
        for key in self.releasing.pop(lane):
            del self.tables[lane][key]

    @precondition(lambda self: any(result.steps for result in self.flying.values()))
    @rule(data=st.data())
    def apply_without_a_row(self, data: st.DataObject) -> None:
        lanes = sorted(lane for lane, result in self.flying.items() if result.steps)
        lane = data.draw(st.sampled_from(lanes))
        result = self.flying[lane]
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
        lane, result = data.draw(st.sampled_from(self.old))
        before = self.engine.stats()
        assert self.engine.apply(lane, result, self.now) == []
        assert self.engine.stats() == replace(before, stale_results=before.stale_results + 1)

    @precondition(lambda self: self.engine.lanes)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.engine.lanes))
        self.see(self.engine.close_lane(lane, "lost"))
        del self.tables[lane]
        if lane in self.flying:
            self.old.append((lane, self.flying.pop(lane)))
            del self.releasing[lane]

    @precondition(lambda self: len(self.engine.lanes) < len(PROFILES))
    @rule()
    def reopen(self) -> None:
        self.open(next(lane for lane in PROFILES if lane not in self.engine.lanes))

    @invariant()
    def blocks_are_conserved_and_never_shared(self) -> None:
        for lane in self.engine.stats().lanes:
            tables = self.tables[lane.name].values()
            held = [block for table in tables for plane in table for block in plane]
            assert len(set(held)) == len(held), "a block in two live tables"
            assert all(block < lane.kv.total_blocks for block in held)
            assert len(held) <= lane.kv.total_blocks - lane.kv.free_blocks
            assert 0 <= lane.kv.promised_blocks <= lane.kv.free_blocks
            if lane.running + lane.releasing == 0:
                assert lane.kv.free_blocks == lane.kv.total_blocks
            if lane.running == 0:
                assert lane.load == 0
                assert lane.kv.promised_blocks == 0

    @invariant()
    def counts_agree(self) -> None:
        stats = self.engine.stats()
        live = sum(life.reason is None for life in self.lives.values())
        assert live == stats.waiting + stats.running
        assert stats.rng_keys == live + stats.releasing
        assert stats.tokens == sum(life.count for life in self.lives.values())
        assert sum(stats.finished.values()) == len(self.lives) - live

    def teardown(self) -> None:
        for _ in range(1000):
            if not self.engine.has_work():
                break
            self.plan()
            for lane in tuple(self.flying):
                self.answer(lane, self.flying[lane])
        assert not self.engine.has_work()
        assert all(life.reason is not None for life in self.lives.values())
        for lane in self.engine.lanes:
            assert self.executors[lane].held_keys() == ()
        self.blocks_are_conserved_and_never_shared()
        self.counts_agree()


def without(step: StepResult, row: int) -> StepResult:
    """The step's result with one row less."""
    columns: dict[str, Any] = {}
    for field in fields(step):
        column = getattr(step, field.name)
        columns[field.name] = column[:row] + column[row + 1 :]
    return replace(step, **columns)


class GrowingMachine(EngineMachine):
    """The same with blocks that come one by one, and other rules of admission."""

    scheduler: ClassVar[dict[str, object]] = {
        "reservation": "incremental",
        "policy": "priority",
        "kv_watermark": 0.2,
        "max_admission_bypasses": 2,
    }


class CohortMachine(EngineMachine):
    """The same in cohorts, with a tight budget."""

    scheduler: ClassVar[dict[str, object]] = {"mode": "no_refill", "max_step_tokens": 3}


class PatientMachine(EngineMachine):
    """The same with tokens that wait for each other."""

    scheduler: ClassVar[dict[str, object]] = {
        "min_coda_batch": 2,
        "reservation": "incremental",
        "exit_policy": "ouro_delayed",
    }


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestGrowing = GrowingMachine.TestCase
TestGrowing.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestCohort = CohortMachine.TestCase
TestCohort.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
TestPatient = PatientMachine.TestCase
TestPatient.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
