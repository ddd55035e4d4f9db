"""Preemption on the real model: whoever is suspended, wherever it stands, says the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.config import CacheSettings, SchedulerSettings, WorkerSettings
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from tests.scheduler.bench import reasons, texts
from worker.local_executor import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.plan import ExecutionPlan
    from scheduler.output import RequestOutput

LOW = {"low0": (1648, 1424, 261, 658, 14), "low1": (900, 31, 7)}
HIGH = {"high0": (12, 3000, 55, 8), "high1": (2, 3)}
TIMEOUT = 30.0
WORKER = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=2, num_threads=1
)


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    """One worker for all runs."""
    with LocalExecutor.open(WORKER) as executor:
        yield executor


class Run:
    """One engine over the next epoch of a worker. Owner: one test."""

    epochs = 1

    def __init__(self, executor: LocalExecutor, temperature: float, mode: str) -> None:
        Run.epochs += 1
        executor.begin_epoch(Run.epochs, TIMEOUT)
        self.executor = executor
        self.temperature = temperature
        self.plans: list[ExecutionPlan] = []
        self.outputs: list[RequestOutput] = []
        settings = {"policy": "priority", "preemption": True, "prefill_chunk_size": 2}
        settings |= {"mode": mode, "reservation": "incremental", "resident": False}
        self.engine = Engine(SchedulerSettings.model_validate(settings))
        self.engine.add_lane("lane-0", Run.epochs, executor.profile())

    def add(self, prompts: dict[str, tuple[int, ...]], priority: int) -> None:
        """A few outputs each, with a threshold that the gates reach at several depths."""
        for request_id, prompt in prompts.items():
            params = SamplingParams(
                max_tokens=5,
                exit_threshold=0.5,
                temperature=self.temperature,
                ignore_eos=True,
                priority=priority,
            )
            self.engine.add(request_id, prompt, params, 7)

    def step(self) -> None:
        """Plan, run and apply once."""
        for lane, plan in self.engine.plan(0.0):
            self.plans.append(plan)
            submission = self.executor.submit(plan)
            result = submission.collect(TIMEOUT)
            submission.retire()
            assert (result.failed, result.lost) == ((), ())
            self.outputs += self.engine.apply(lane, result, 0.0)

    def finish(self) -> dict[str, tuple[list[int], list[int]]]:
        """Step until there is no work; the tokens and depths of each request."""
        for _ in range(200):
            if not self.engine.has_work():
                return texts(self.outputs)
            self.step()
        raise AssertionError("work is left")

    def suspended_after(self) -> set[str]:
        """The steps that victims had behind them when they were suspended."""
        last: dict[object, str] = {}
        found = set()
        for plan in self.plans:
            found |= {last[key] for key in plan.suspends}
            last |= {key: type(step).__name__ for step in plan.steps for key in step.keys}
        return found


@pytest.mark.parametrize("mode", ["refill", "no_refill"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nothing_is_lost_wherever_a_request_is_suspended(
    executor: LocalExecutor, temperature: float, mode: str
) -> None:
    undisturbed = Run(executor, temperature, mode)
    undisturbed.add(LOW, priority=9)
    expected = undisturbed.finish()
    num_plans = len(undisturbed.plans)
    assert len({depth for _, depths in expected.values() for depth in depths}) >= 2
    alone = Run(executor, temperature, mode)
    alone.add(HIGH, priority=1)
    expected |= alone.finish()
    stages, preemptions = set(), 0
    for cut in range(1, num_plans):
        run = Run(executor, temperature, mode)
        run.add(LOW, priority=9)
        for _ in range(cut):
            run.step()
        ended = set(reasons(run.outputs))
        run.add(HIGH, priority=1)
        assert run.finish() == expected, f"suspended after {cut} plans"
        order = [request_id for request_id in reasons(run.outputs) if request_id not in ended]
        stats = run.engine.stats()
        assert stats.preemptions == stats.resumptions
        assert stats.free_blocks == stats.total_blocks
        if stats.preemptions == len(LOW):
            # The second may end after one that went on beside it.
            assert order[0] in HIGH
        preemptions += stats.preemptions
        stages |= run.suspended_after()
    assert stages == {"PrefillBatch", "RecurrentBatch"}
    assert preemptions > num_plans
