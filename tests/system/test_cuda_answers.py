"""Whole answers on CUDA, token for token and depth for depth those of the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.llm import LLM
from protocol.config import CacheSettings, Configuration, SchedulerSettings, WorkerSettings
from protocol.layout import Layout
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from tests.scheduler.bench import texts
from tests.workload import WORKLOAD
from worker.local_executor import LocalExecutor

if TYPE_CHECKING:
    from scheduler.output import RequestOutput

pytestmark = pytest.mark.gpu

Answers = list[tuple[tuple[int, ...], tuple[int, ...]]]


def answers(scheduler: SchedulerSettings, worker: dict[str, object]) -> Answers:
    settings = WorkerSettings.model_validate(
        {"cache": CacheSettings(block_size=16, num_blocks=512), "num_slots": 5} | worker
    )
    with LLM(configuration=Configuration(worker=settings, scheduler=scheduler)) as llm:
        done = llm.generate([case.prompt for case in WORKLOAD], [case.params for case in WORKLOAD])
    return [(tuple(each.token_ids), tuple(each.exit_depths)) for each in done]


@pytest.fixture(scope="module")
def expected() -> Answers:
    return answers(SchedulerSettings(), {"device": "cpu"})


@pytest.mark.parametrize(
    "worker",
    [
        {"device": "cuda"},
        {"device": "cuda", "cuda_graphs": False},
        {"device": "cuda", "attention": "triton", "num_slots": 12},
        {"device": "cuda", "attention": "torch"},
        {"device": "cuda", "cache": CacheSettings(block_size=64, num_blocks=256)},
    ],
)
def test_float32_answers_equal_those_of_the_cpu(
    worker: dict[str, object], expected: Answers
) -> None:
    assert answers(SchedulerSettings(), worker) == expected


def test_the_shared_layout_gives_the_answers_of_the_cpu() -> None:
    cache = CacheSettings(block_size=16, num_blocks=512, layout=Layout.SHARED)
    ours = answers(SchedulerSettings(), {"device": "cuda", "cache": cache})
    assert ours == answers(SchedulerSettings(), {"device": "cpu", "cache": cache})


def test_rows_of_both_plans_in_flight_give_the_answers_of_the_cpu() -> None:
    scheduler = SchedulerSettings(exit_policy="ouro_delayed", plans_in_flight=2)
    assert answers(scheduler, {"device": "cuda"}) == answers(scheduler, {"device": "cpu"})


def test_small_chunks_change_no_answer(expected: Answers) -> None:
    scheduler = SchedulerSettings(prefill_chunk_size=7, max_prefill_tokens=20)
    assert answers(scheduler, {"device": "cuda"}) == expected


def outputs(
    worker: WorkerSettings, reservation: str
) -> tuple[dict[str, tuple[list[int], list[int]]], int]:
    """Tokens and exit depths of six requests, plan by plan, and how often one was suspended."""
    engine = Engine(SchedulerSettings.model_validate({"reservation": reservation}))
    done: list[RequestOutput] = []
    suspends = 0
    with LocalExecutor.open(worker) as executor:
        engine.add_lane("lane-0", executor.epoch, executor.profile())
        for index in range(6):
            prompt = [1648 + 7 * index, 1424, 261, 658, 14][: 5 - index % 3]
            params = SamplingParams(max_tokens=24, exit_threshold=0.7, ignore_eos=True)
            engine.add(f"request-{index}", prompt, params, index)
        while engine.has_work():
            for lane, plan in engine.plan(0.0):
                suspends += len(plan.suspends)
                submission = executor.submit(plan)
                result = submission.collect(60.0)
                submission.retire()
                assert (result.failed, result.lost) == ((), ())
                done += engine.apply(lane, result, 0.0)
    return texts(done), suspends


def test_requests_that_were_suspended_keep_their_answers() -> None:
    roomy, tight = (CacheSettings(block_size=4, num_blocks=count) for count in (256, 48))
    common = {"num_slots": 3, "num_threads": 1}
    cpu = WorkerSettings.model_validate(common | {"device": "cpu", "cache": roomy})
    cuda = WorkerSettings.model_validate(common | {"device": "cuda", "cache": tight})
    expected, none = outputs(cpu, "full")
    answers, some = outputs(cuda, "overcommit")
    assert answers == expected
    assert none == 0 < some
