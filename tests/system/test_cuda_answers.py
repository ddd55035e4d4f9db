"""Whole answers on CUDA, token for token and depth for depth those of the CPU."""

from __future__ import annotations

import pytest

from cluster.llm import LLM
from protocol.config import CacheSettings, Configuration, SchedulerSettings, WorkerSettings
from protocol.layout import Layout
from tests.workload import WORKLOAD

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
