"""Choices on the real model: choice i is the request that draws from stream i, however it ran."""

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
from tests.workload import MARGIN
from worker.local_executor import LocalExecutor
from worker.models.registry import load_model, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler.output import RequestOutput

TIMEOUT = 60.0
CHOICES = 3
PROMPT = (1648, 1424, 261, 658, 14, 900, 31, 7, 12)
LENGTHS = (3, 7, 8, 9)
"""Below, beside and at the end of a block of 4."""

URGENT = SamplingParams(max_tokens=3, ignore_eos=True)
Answers = dict[int, tuple[list[int], list[int]]]
Case = tuple[int, Answers]
"""A seed, and what each choice says with it."""


def params(priority: int = 1) -> SamplingParams:
    """Everything that a choice has of its own counts: the draw, output counts, exit depths."""
    return SamplingParams(
        n=CHOICES,
        max_tokens=8,
        ignore_eos=True,
        temperature=0.9,
        exit_threshold=0.5,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        logit_bias=((55, 1.5),),
        priority=priority,
    )


@pytest.fixture(scope="module", params=list(Layout), ids=lambda layout: layout.value)
def worker(request: pytest.FixtureRequest) -> Iterator[LocalExecutor]:
    cache = CacheSettings(block_size=4, num_blocks=96, layout=request.param)
    settings = WorkerSettings(cache=cache, device="cpu", num_slots=4, num_threads=1)
    with LocalExecutor.open(settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(worker: LocalExecutor) -> dict[int, Case]:
    """By prompt length, from the definition; the seeds are such that no decision is a close one."""
    settings = ModelSettings()
    model = load_model(resolve_model(settings), torch.float32, torch.device("cpu"), settings.model)
    layout = worker.profile().layout

    def case(length: int, seed: int) -> Case | None:
        answers: Answers = {}
        for stream in range(CHOICES):
            run = reference_run(model, PROMPT[:length], params(), seed, layout, stream=stream)
            if run.margin <= MARGIN:
                return None
            answers[stream] = run.tokens, run.exit_depths
        return seed, answers

    found = {length: next(filter(None, (case(length, s) for s in range(99)))) for length in LENGTHS}
    for _, answers in found.values():
        assert len({tuple(tokens) for tokens, _ in answers.values()}) == CHOICES
    return found


def run(
    worker: LocalExecutor,
    length: int,
    seed: int,
    options: dict[str, object],
    urgent_after: int | None = None,
) -> tuple[Answers, Engine]:
    """What each choice says on a fresh engine; an urgent request comes in after some steps."""
    engine = Engine(SchedulerSettings.model_validate(options))
    worker.begin_epoch(worker.epoch + 1, TIMEOUT)
    engine.add_lane("lane-0", worker.epoch, worker.profile())
    driver = SyncDriver(engine, {"lane-0": worker}, TIMEOUT)
    engine.add("a", PROMPT[:length], params(), seed)
    outputs: list[RequestOutput] = []
    for _ in range(urgent_after or 0):
        outputs += driver.step()
    if urgent_after is not None:
        for name in ("first", "second"):
            engine.add(name, (77, 1, 5), URGENT, 1)
    outputs += driver.drain(TIMEOUT)
    answers: Answers = {choice: ([], []) for choice in range(CHOICES)}
    for output in outputs:
        if output.key.request_id == "a":
            answers[output.choice][0].extend(output.tokens)
            answers[output.choice][1].extend(output.exit_depths)
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks
    return answers, engine


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 2, "reservation": "incremental"},
        {"mode": "no_refill", "max_step_tokens": 3, "plans_in_flight": 2},
        {"min_coda_batch": 3, "max_running": 3},
    ],
    ids=["plain", "chunked", "cohort", "patient"],
)
def test_choices_equal_single_requests_with_their_streams(
    worker: LocalExecutor,
    expected: dict[int, Case],
    length: int,
    options: dict[str, object],
) -> None:
    seed, alone = expected[length]
    answers, _ = run(worker, length, seed, options)
    assert answers == alone


@pytest.mark.parametrize("urgent_after", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("reservation", ["full", "incremental"])
def test_choices_that_make_room_say_the_same(
    worker: LocalExecutor, expected: dict[int, Case], urgent_after: int, reservation: str
) -> None:
    options = {
        "policy": "priority",
        "preemption": True,
        "max_running": 3,
        "reservation": reservation,
        "prefill_chunk_size": 4,
        "max_ticks": 1,
    }
    seed, alone = expected[7]
    answers, engine = run(worker, 7, seed, options, urgent_after)
    assert answers == alone
    assert engine.stats().preemptions >= 1
