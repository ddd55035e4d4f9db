"""Too few blocks on the real model: whoever leaves for them says the same, in both layouts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest
import torch

from protocol.config import CacheSettings, ModelSettings, SchedulerSettings, WorkerSettings
from protocol.layout import Layout
from scheduler.engine import Engine
from tests.reference import reference_run
from tests.scheduler.bench import texts
from tests.system.test_execution_paths import PLAIN, Case, params_of
from tests.workload import MARGIN
from worker.local_executor import LocalExecutor
from worker.models.registry import load_model, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from protocol.executor import Submission
    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan
    from scheduler.output import RequestOutput

Workers = tuple[LocalExecutor, LocalExecutor]
Answers = dict[str, tuple[list[int], list[int]]]

TIMEOUT = 60.0
CROWD: tuple[Case, ...] = (
    ("first", (1648, 1424, 261, 658, 14, 3), {"exit_threshold": 1.0, "seed": 1}),
    ("second", (12, 3000, 55, 8, 900, 31), {"exit_threshold": 0.9, "seed": 7, "temperature": 0.8}),
    ("third", (2, 3), {"exit_threshold": 1.0, "seed": 1, "temperature": 0.7, "max_tokens": 7}),
    ("fourth", (900, 31, 7), {"exit_threshold": 0.5, "seed": 3}),
)
"""With 6 pages: the first two come to hold 4 each, the third 2."""

PAGES = 4
"""Of 4 tokens; the requests of PLAIN come to hold 3 or 4 of them, and start with 1 or 2."""


def open_worker(layout: Layout, num_slots: int, pages: int) -> LocalExecutor:
    cache = CacheSettings(block_size=4, num_blocks=pages * layout.planes(4), layout=layout)
    settings = WorkerSettings(cache=cache, device="cpu", num_slots=num_slots, num_threads=1)
    return LocalExecutor.open(settings)


@pytest.fixture(scope="module", params=list(Layout), ids=lambda layout: layout.value)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """A worker with room for everybody, and one with two slots and too few blocks for two."""
    with open_worker(request.param, 4, 24) as wide, open_worker(request.param, 2, PAGES) as tight:
        yield wide, tight


class Run:
    """The plain cases on the next epoch of a worker. Owner: one test."""

    epochs = 1

    def __init__(self, worker: LocalExecutor, cases: Iterable[Case], **settings: object) -> None:
        Run.epochs += 1
        worker.begin_epoch(Run.epochs, TIMEOUT)
        # One tick a plan: who needs a block when must not depend on how fast the worker is.
        limits = {"prefill_chunk_size": 3, "reservation": "overcommit", "max_ticks": 1}
        self.engine = Engine(SchedulerSettings.model_validate(limits | settings))
        self.engine.add_lane("lane-0", Run.epochs, worker.profile())
        self.worker = worker
        self.plans: list[ExecutionPlan] = []
        self.outputs: list[RequestOutput] = []
        for name, prompt, wish in cases:
            params = params_of(wish)
            assert params.seed is not None
            self.engine.add(name, prompt, params, params.seed)

    def finish(self) -> Answers:
        """Run to the end with as many plans in flight as there may be; the answers."""
        flying: deque[Submission] = deque()
        for _ in range(1000):
            for _, plan in self.engine.plan(0.0):
                self.plans.append(plan)
                flying.append(self.worker.submit(plan))
            if not flying:
                break
            submission = flying.popleft()
            result = submission.collect(TIMEOUT)
            submission.retire()
            assert (result.failed, result.lost) == ((), ())
            self.outputs += self.engine.apply("lane-0", result, 0.0)
        stats = self.engine.stats()
        assert not self.engine.has_work()
        assert (stats.free_blocks, stats.suspended) == (stats.total_blocks, 0)
        assert stats.stale_rows == stats.stale_results == 0
        return texts(self.outputs)

    def moved(self) -> set[str]:
        """Who was suspended in one slot and came back in the other; the last freed goes first."""
        free = [1, 0]
        slots: dict[RequestKey, int] = {}
        left: dict[RequestKey, int] = {}
        moved: set[str] = set()
        for plan in self.plans:
            left |= {key: slots[key] for key in plan.suspends}
            free += [slots.pop(key) for key in (*plan.releases, *plan.suspends) if key in slots]
            keys = [item.key for item in plan.resumes] + [item.key for item in plan.admits]
            slots |= {key: free.pop() for key in keys}
            moved |= {r.key.request_id for r in plan.resumes if slots[r.key] != left[r.key]}
        return moved


@pytest.mark.parametrize("mode", ["refill", "no_refill"])
@pytest.mark.parametrize("policy", ["ouro", "ouro_delayed"])
@pytest.mark.parametrize("plans_in_flight", [1, 3])
def test_pressure_changes_no_answer(
    workers: Workers, mode: str, policy: str, plans_in_flight: int
) -> None:
    wide, tight = workers
    settings: dict[str, object] = {"mode": mode, "exit_policy": policy}
    settings["plans_in_flight"] = plans_in_flight
    undisturbed = Run(wide, PLAIN, reservation="full", **settings)
    expected = undisturbed.finish()
    assert undisturbed.engine.stats().preemptions == 0
    run = Run(tight, PLAIN, **settings)
    assert run.finish() == expected
    stats = run.engine.stats()
    assert stats.preemptions == stats.pressure_preemptions == stats.resumptions >= 2
    left = {key.request_id for plan in run.plans for key in plan.suspends}
    assert {"greedy", "sampled"} <= left


def test_a_token_moves_to_another_slot_with_its_request(workers: Workers) -> None:
    """Four requests, two slots: the second is suspended, and the third takes its slot."""
    layout = workers[0].profile().layout
    expected = answers_by_definition(layout)
    with open_worker(layout, 2, 6) as worker:
        run = Run(worker, CROWD)
        assert run.finish() == expected
    stats = run.engine.stats()
    assert stats.preemptions == stats.pressure_preemptions == stats.resumptions
    assert run.moved() == {"second"}


def answers_by_definition(layout: Layout) -> Answers:
    """What the four say; no decision in it is a close one."""
    settings = ModelSettings()
    directory = resolve_model(settings)
    model = load_model(directory, torch.float32, torch.device("cpu"), settings.model)
    answers = {}
    for name, prompt, wish in CROWD:
        params = params_of(wish)
        assert params.seed is not None
        reference = reference_run(model, prompt, params, params.seed, layout)
        assert reference.margin > MARGIN, f"{name}: margin {reference.margin}: choose another"
        answers[name] = reference.tokens, reference.exit_depths
    return answers
