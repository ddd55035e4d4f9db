"""The SHARED layout: one plane for all depths, the same answers however they are batched."""

from __future__ import annotations

import logging

import pytest
import torch

from cluster.llm import LLM
from protocol.config import CacheSettings, Configuration, SchedulerSettings, WorkerSettings
from protocol.layout import Layout
from protocol.sampling import SamplingParams
from tests.reference import reference_run
from tests.workload import MARGIN
from worker.models.registry import load_model, resolve_model

PROMPTS = ("Once upon a time", "One day, a little fox named Pip found a red ball. " * 3, "She said")
PARAMS = (
    SamplingParams(max_tokens=12, seed=1, exit_threshold=0.9),
    SamplingParams(max_tokens=10, seed=2, exit_threshold=1.0, temperature=0.8, top_k=40),
    SamplingParams(max_tokens=14, seed=3, exit_threshold=0.5, ignore_eos=True),
)


def configuration(*, slots: int = 8, chunk: int = 128, **settings: object) -> Configuration:
    cache = CacheSettings(block_size=8, num_blocks=96, layout=Layout.SHARED)
    return Configuration(
        worker=WorkerSettings(cache=cache, device="cpu", num_slots=slots, num_threads=1),
        scheduler=SchedulerSettings.model_validate({"prefill_chunk_size": chunk} | settings),
    )


@pytest.mark.parametrize(
    ("slots", "chunk", "others"),
    [
        (8, 128, {}),
        (8, 5, {}),
        (1, 128, {}),
        (2, 1, {}),
        (2, 5, {"mode": "no_refill", "reservation": "incremental"}),
        (8, 5, {"min_coda_batch": 3}),
    ],
)
def test_answers_are_those_of_the_definition(
    slots: int, chunk: int, others: dict[str, object]
) -> None:
    settings = configuration().worker.model
    directory = resolve_model(settings)
    model = load_model(directory, torch.float32, torch.device("cpu"), settings.model)
    with LLM(configuration=configuration(slots=slots, chunk=chunk, **others)) as llm:
        found = llm.generate(list(PROMPTS), list(PARAMS))
        for prompt, params, answer in zip(PROMPTS, PARAMS, found, strict=True):
            assert params.seed is not None
            ids = llm.tokenizer.encode(prompt)
            run = reference_run(model, ids, params, params.seed, Layout.SHARED)
            assert run.margin > MARGIN, f"{prompt[:20]!r}: margin {run.margin}: choose another"
            assert list(answer.token_ids) == run.tokens
            assert list(answer.exit_depths) == run.exit_depths
        stats = llm.stats()
        assert (stats.running, stats.free_blocks) == (0, stats.total_blocks)


def test_a_request_costs_one_plane() -> None:
    with LLM(configuration=configuration()) as llm:
        assert (llm.profile.planes, llm.profile.layout) == (1, Layout.SHARED)
        # 96 blocks of 8 tokens hold 768 tokens in one plane, and 192 in four.
        (answer,) = llm.generate("Once", SamplingParams(max_tokens=700, max_loops=1, seed=1))
        assert len(answer.token_ids) >= 1


def test_it_is_another_function_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(configuration=Configuration(worker=WorkerSettings(device="cpu"))) as llm:
        trained = llm.generate(PROMPTS[1], params)[0].token_ids
    assert not caplog.records
    with caplog.at_level(logging.WARNING), LLM(configuration=configuration()) as llm:
        shared = llm.generate(PROMPTS[1], params)[0].token_ids
    assert shared != trained
    assert "layout shared" in caplog.text
