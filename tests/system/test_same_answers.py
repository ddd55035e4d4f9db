"""One workload, four ways to run it, the same tokens and exit depths in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cluster.llm import LLM
from protocol.config import (
    CacheSettings,
    ClusterSettings,
    Configuration,
    SchedulerSettings,
    WorkerSettings,
)
from tests.ray_cluster import live_placement_groups, local_ray
from tests.reference import reference_run
from tests.workload import MARGIN, WORKLOAD
from worker.models.registry import load_model, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.generation import Completion

CONFIGURATION = Configuration(
    worker=WorkerSettings(
        cache=CacheSettings(block_size=8, num_blocks=512), device="cpu", num_slots=8, num_threads=1
    ),
    cluster=ClusterSettings(beat_interval=0.1),
)
PROMPTS = [case.prompt for case in WORKLOAD]
PARAMS = [case.params for case in WORKLOAD]

Answers = list[tuple[tuple[int, ...], tuple[int, ...]]]


def answers_of(completions: list[Completion]) -> Answers:
    return [(tuple(done.token_ids), tuple(done.exit_depths)) for done in completions]


@pytest.fixture(scope="module")
def expected() -> Answers:
    """The workload by the reference, and a check that no decision of it is a close one."""
    settings = CONFIGURATION.worker.model
    directory = resolve_model(settings)
    model = load_model(directory, torch.float32, torch.device("cpu"), settings.model)
    answers: Answers = []
    with LLM(configuration=CONFIGURATION) as llm:
        tokenizer = llm.tokenizer
    for case in WORKLOAD:
        seed = case.params.seed
        assert seed is not None
        run = reference_run(model, tokenizer.encode(case.prompt), case.params, seed)
        assert run.margin > MARGIN, f"{case.prompt[:20]!r}: margin {run.margin}: choose another"
        answers.append((tuple(run.tokens), tuple(run.exit_depths)))
    return answers


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with local_ray():
        yield


def test_the_workload_is_mixed(expected: Answers) -> None:
    depths = {depth for _, exit_depths in expected for depth in exit_depths}
    lengths = [len(tokens) for tokens, _ in expected]
    assert depths == {1, 2, 3, 4}
    assert min(lengths) == 1
    assert max(lengths) == 28


def test_one_request_at_a_time_in_process(expected: Answers) -> None:
    with LLM(configuration=CONFIGURATION) as llm:
        found = [
            llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
    assert answers_of(found) == expected


def test_all_at_once_in_process(expected: Answers) -> None:
    with LLM(configuration=CONFIGURATION) as llm:
        assert answers_of(llm.generate(PROMPTS, PARAMS)) == expected


def test_two_slots_and_tiny_chunks_change_nothing(expected: Answers) -> None:
    worker = CONFIGURATION.worker.model_copy(update={"num_slots": 2})
    scheduler = CONFIGURATION.scheduler.model_copy(
        update={"prefill_chunk_size": 7, "max_prefill_tokens": 9}
    )
    tight = CONFIGURATION.model_copy(update={"worker": worker, "scheduler": scheduler})
    with LLM(configuration=tight) as llm:
        assert answers_of(llm.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"reservation": "incremental", "prefill_chunk_size": 20},
        {"mode": "no_refill", "max_step_tokens": 32},
        {"min_coda_batch": 4},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_no_setting_of_the_scheduler_changes_an_answer(
    expected: Answers, settings: dict[str, object]
) -> None:
    scheduler = SchedulerSettings.model_validate(settings)
    configuration = CONFIGURATION.model_copy(update={"scheduler": scheduler})
    with LLM(configuration=configuration) as llm:
        assert answers_of(llm.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("workers", [1, 2])
def test_on_ray_workers(expected: Answers, workers: int) -> None:
    with LLM(executor="ray", workers=workers, configuration=CONFIGURATION) as llm:
        assert answers_of(llm.generate(PROMPTS, PARAMS)) == expected
    assert live_placement_groups() == []
