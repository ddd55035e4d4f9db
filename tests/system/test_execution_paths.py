"""One plan at a time, pipelined, preempted, on two lanes: the same answers, in both layouts."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import pytest
import torch

from cluster.drivers import SyncDriver
from protocol.config import CacheSettings, ModelSettings, SchedulerSettings, WorkerSettings
from protocol.layout import Layout
from protocol.resident import ResidentBatch
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from tests.reference import ReferenceRun, reference_run
from tests.scheduler.bench import texts
from tests.workload import MARGIN
from worker.local_executor import LocalExecutor
from worker.models.registry import load_model, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from protocol.plan import ExecutionPlan
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
WISHED: tuple[Case, ...] = (
    (
        "filtered",
        (900, 31, 7),
        {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "seed": 7, "logprobs": 3},
    ),
    (
        "penalized",
        (1648, 1424, 261, 658, 14, 3),
        {
            "exit_threshold": 0.9,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "seed": 1,
            "logprobs": 0,
        },
    ),
    (
        "biased",
        (12, 3000, 55, 8),
        {"temperature": 0.8, "seed": 6, "logit_bias": {261: 4.0, 14: -50.0}, "logprobs": 20},
    ),
    (
        "late",
        (2, 3),
        {"exit_threshold": 0.9, "seed": 1, "min_tokens": 3, "stop_token_ids": (2, 201)},
    ),
)
CASES = PLAIN + URGENT
"""(id, prompt, parameters); each has 10 outputs."""

Answers = dict[str, tuple[list[int], list[int]]]


def params_of(wish: Mapping[str, object], priority: int = 0) -> SamplingParams:
    shared = {"max_tokens": 10, "ignore_eos": True, "priority": priority, "exit_threshold": 0.5}
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


@contextmanager
def watched(engine: Engine) -> Iterator[list[ExecutionPlan]]:
    """The plans that are made within."""
    plans: list[ExecutionPlan] = []
    make = engine.plan

    def plan(now: float) -> list[tuple[str, ExecutionPlan]]:
        made = make(now)
        plans.extend(each for _, each in made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "plan", plan)
        yield plans


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
        self.prompt_ticks = 1

    def add(self, cases: Iterable[Case], priority: int = 0) -> None:
        for name, prompt, wish in cases:
            params = params_of(wish, priority)
            assert params.seed is not None
            self.engine.add(name, prompt, params, params.seed)

    def step(self) -> None:
        """One step of the driver, which applies whatever is ready."""
        with watched(self.engine) as plans:
            self.outputs += self.driver.step()
        for step in chain.from_iterable(plan.steps for plan in plans):
            if isinstance(step, ResidentBatch):
                self.prompt_ticks = max(self.prompt_ticks, step.prompt_ticks)
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
    assert preempted  # how often depends on how far a device has come after so many steps


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


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_nor_do_prompts_between_ticks(
    workers: Workers, expected: dict[str, Answers], plans_in_flight: int
) -> None:
    run = Run(
        workers[0],
        plans_in_flight=plans_in_flight,
        max_ticks=4,
        tick_interval=1e-6,
        prefill_chunk_size=2,
    )
    for case in CASES:
        run.add([case])
        for _ in range(3):
            run.step()
    assert run.finish() == expected["ouro"]
    assert run.prompt_ticks > 1


@pytest.fixture(scope="module")
def wished(workers: tuple[LocalExecutor, LocalExecutor]) -> dict[str, ReferenceRun]:
    """The answers of requests that ask for all that sampling can do."""
    settings = ModelSettings()
    directory = resolve_model(settings)
    model = load_model(directory, torch.float32, torch.device("cpu"), settings.model)
    runs = {}
    for name, prompt, wish in WISHED:
        params = params_of(wish)
        assert params.seed is not None
        run = reference_run(model, prompt, params, params.seed, workers[0].profile().layout)
        assert run.margin > MARGIN, f"{name}: margin {run.margin}: choose another"
        runs[name] = run
    return runs


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_nor_does_what_a_request_may_ask_for(
    workers: Workers, wished: dict[str, ReferenceRun], resident: bool, plans_in_flight: int
) -> None:
    run = Run(workers[0], resident=resident, plans_in_flight=plans_in_flight)
    run.add(WISHED)
    assert run.finish() == {name: (each.tokens, each.exit_depths) for name, each in wished.items()}
    for name, _, wish in WISHED:
        pieces = [output for output in run.outputs if output.key.request_id == name]
        told = [entry for piece in pieces for entry in piece.logprobs]
        count = params_of(wish).logprobs
        assert len(told) == (0 if count is None else len(wished[name].tokens))
        answers = zip(told, wished[name].tokens, wished[name].logprobs, strict=False)
        for entry, token, exact in answers:
            top = exact.topk(count or 0)
            assert entry.logprob == pytest.approx(float(exact[token]), abs=1e-4)
            assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
            assert exact[list(entry.top_ids)].tolist() == pytest.approx(
                top.values.tolist(), abs=1e-4
            )


def test_the_cases_are_mixed(expected: dict[str, Answers]) -> None:
    depths = {depth for _, exit_depths in expected["ouro"].values() for depth in exit_depths}
    assert len(depths) >= 3
    assert expected["ouro"] != expected["ouro_delayed"]
