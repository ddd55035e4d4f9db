"""One plan at a time, pipelined, preempted, on two lanes: the same answers, in both layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cluster.drivers import SyncDriver
from protocol.config import CacheSettings, ModelSettings, SchedulerSettings, WorkerSettings
from protocol.layout import Layout
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from tests.reference import reference_run
from tests.scheduler.bench import texts
from tests.workload import MARGIN
from worker.local_executor import LocalExecutor
from worker.models.registry import load_model, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from scheduler.output import RequestOutput

TIMEOUT = 60.0
Case = tuple[str, tuple[int, ...], dict[str, object]]
PLAIN: tuple[Case, ...] = (
    ("short", (900, 31, 7), {"exit_threshold": 0.5, "seed": 3}),
    ("greedy", (1648, 1424, 261, 658, 14, 3), {"exit_threshold": 0.9, "seed": 1}),
    ("sampled", (12, 3000, 55, 8), {"exit_threshold": 0.5, "seed": 123, "temperature": 0.8}),
    ("full", (2, 3), {"exit_threshold": 1.0, "seed": 3, "temperature": 0.7, "top_k": 20}),
)
URGENT: tuple[Case, ...] = (
    ("urgent", (77, 1, 5), {"exit_threshold": 0.5, "seed": 60, "temperature": 0.9}),
)
CASES = PLAIN + URGENT
"""(id, prompt, parameters); each has 10 outputs."""

Answers = dict[str, tuple[list[int], list[int]]]


def params_of(wish: Mapping[str, object], priority: int = 0) -> SamplingParams:
    shared = {"max_tokens": 10, "ignore_eos": True, "priority": priority}
    return SamplingParams.model_validate(shared | dict(wish))


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the workers run."""
    return str(request.param)


@pytest.fixture(scope="module", params=list(Layout), ids=lambda layout: layout.value)
def workers(
    request: pytest.FixtureRequest, device: str
) -> Iterator[tuple[LocalExecutor, LocalExecutor]]:
    """Two workers with KV in one layout."""
    cache = CacheSettings(block_size=4, num_blocks=96, layout=request.param)
    settings = WorkerSettings(cache=cache, device=device, num_slots=4, num_threads=1)
    with LocalExecutor.open(settings) as first, LocalExecutor.open(settings) as second:
        yield first, second


@pytest.fixture(scope="module")
def expected(workers: tuple[LocalExecutor, LocalExecutor]) -> dict[str, Answers]:
    """The answers by exit policy, from the definition; no decision in them is a close one."""
    settings = ModelSettings()
    directory = resolve_model(settings)
    model = load_model(directory, torch.float32, torch.device("cpu"), settings.model)
    answers: dict[str, Answers] = {}
    for policy in ("ouro", "ouro_delayed"):
        answers[policy] = {}
        for name, prompt, wish in CASES:
            params = params_of(wish)
            assert params.seed is not None
            layout = workers[0].profile().layout
            run = reference_run(
                model, prompt, params, params.seed, layout, delayed=policy == "ouro_delayed"
            )
            assert run.margin > MARGIN, f"{name}, {policy}: margin {run.margin}: choose another"
            answers[policy][name] = (run.tokens, run.exit_depths)
    return answers


class Run:
    """An engine over the next epoch of one worker or two. Owner: one test."""

    epochs = 1

    def __init__(self, *workers: LocalExecutor, **settings: object) -> None:
        Run.epochs += 1
        for worker in workers:
            worker.begin_epoch(Run.epochs, TIMEOUT)
        # Two ticks a plan, however long they take.
        limits: dict[str, object] = {"prefill_chunk_size": 3, "reservation": "incremental"}
        limits |= {"max_ticks": 2, "tick_interval": 1000.0}
        self.engine = Engine(SchedulerSettings.model_validate(limits | settings))
        executors = {f"lane-{index}": worker for index, worker in enumerate(workers)}
        self.driver = SyncDriver(self.engine, executors, TIMEOUT)
        self.outputs: list[RequestOutput] = []
        self.left_in_flight = 0

    def add(self, cases: Iterable[Case], priority: int = 0) -> None:
        for name, prompt, wish in cases:
            params = params_of(wish, priority)
            assert params.seed is not None
            self.engine.add(name, prompt, params, params.seed)

    def step(self) -> None:
        """One step of the driver, which applies whatever is ready."""
        self.outputs += self.driver.step()
        lanes = self.engine.stats().lanes
        self.left_in_flight = max(self.left_in_flight, *(lane.in_flight for lane in lanes))

    def finish(self) -> Answers:
        for _ in range(1000):
            if not self.engine.has_work():
                stats = self.engine.stats()
                assert stats.free_blocks == stats.total_blocks
                assert stats.stale_rows == stats.stale_results == 0
                return texts(self.outputs)
            self.step()
        raise AssertionError("work is left")


Workers = tuple[LocalExecutor, LocalExecutor]


WAYS = pytest.mark.parametrize(
    ("policy", "resident"), [("ouro", True), ("ouro", False), ("ouro_delayed", False)]
)
"""Exits decided by the worker tick by tick, by the scheduler loop by loop, and a loop later."""


@WAYS
@pytest.mark.parametrize("plans_in_flight", [1, 2, 4])
def test_plans_in_flight_change_nothing(
    workers: Workers,
    expected: dict[str, Answers],
    policy: str,
    resident: bool,
    plans_in_flight: int,
) -> None:
    run = Run(workers[0], exit_policy=policy, resident=resident, plans_in_flight=plans_in_flight)
    run.add(CASES[:4])
    assert run.finish() == {name: expected[policy][name] for name, _, _ in CASES[:4]}
    assert (run.left_in_flight > 0) is (plans_in_flight > 1)


@WAYS
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_nor_does_making_room(
    workers: Workers,
    expected: dict[str, Answers],
    policy: str,
    resident: bool,
    plans_in_flight: int,
) -> None:
    preempted = 0
    for steps in (1, 3, 6, 10, 15):
        run = Run(
            workers[0],
            exit_policy=policy,
            resident=resident,
            plans_in_flight=plans_in_flight,
            policy="priority",
            preemption=True,
            max_running=2,
        )
        run.add(PLAIN, priority=5)
        for _ in range(steps):
            run.step()
        run.add(URGENT)
        assert run.finish() == expected[policy], f"urgent after {steps} steps"
        preempted += run.engine.stats().preemptions
    assert preempted >= 3


@WAYS
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_nor_do_two_lanes(
    workers: Workers,
    expected: dict[str, Answers],
    policy: str,
    resident: bool,
    plans_in_flight: int,
) -> None:
    run = Run(*workers, exit_policy=policy, resident=resident, plans_in_flight=plans_in_flight)
    run.add(CASES)
    assert run.finish() == expected[policy]
    assert all(lane.plans > 5 for lane in run.engine.stats().lanes)


def test_the_cases_are_mixed(expected: dict[str, Answers]) -> None:
    depths = {depth for _, exit_depths in expected["ouro"].values() for depth in exit_depths}
    assert len(depths) >= 3
    assert expected["ouro"] != expected["ouro_delayed"]
