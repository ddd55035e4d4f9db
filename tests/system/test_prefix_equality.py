"""A cached prefix changes no token and no exit depth: the real worker, float32 on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cluster.llm import LLM
from protocol.config import CacheSettings, Configuration, SchedulerSettings, WorkerSettings
from protocol.sampling import SamplingParams
from tests.reference import reference_run
from tests.workload import MARGIN, STORY
from worker.models.registry import load_model, resolve_model

if TYPE_CHECKING:
    from cluster.generation import Completion

WORKER = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=2048), device="cpu", num_slots=8, num_threads=1
)
ENDINGS = ("Pip", "The rabbit said", "Then they", "", STORY[:30])
PROMPTS = [STORY * 2 + ending for ending in ENDINGS]
PARAMS = [
    SamplingParams(max_tokens=16, exit_threshold=0.9, seed=1),
    SamplingParams(max_tokens=16, exit_threshold=0.5, seed=2, temperature=0.8),
    SamplingParams(max_tokens=16, exit_threshold=1.0, seed=3),
    SamplingParams(max_tokens=16, exit_threshold=0.9, seed=4, temperature=1.0, top_k=20),
    SamplingParams(max_tokens=16, exit_threshold=0.5, seed=5, temperature=0.7, top_p=0.9),
]

Answers = list[tuple[list[int], list[int]]]


def configuration(chunk: int = 128, *, caching: bool = True) -> Configuration:
    return Configuration(
        worker=WORKER,
        scheduler=SchedulerSettings(prefill_chunk_size=chunk, prefix_caching=caching),
    )


def answers_of(completions: list[Completion]) -> Answers:
    return [(list(done.token_ids), list(done.exit_depths)) for done in completions]


@pytest.fixture(scope="module")
def cold() -> Answers:
    """By the reference, each alone, and no decision of it is a close one."""
    settings = WORKER.model
    model = load_model(resolve_model(settings), torch.float32, torch.device("cpu"), settings.model)
    answers: Answers = []
    with LLM(configuration=configuration(caching=False)) as llm:
        tokenizer = llm.tokenizer
        engine = answers_of(llm.generate(PROMPTS, PARAMS))
        assert llm.stats().prefix_hit_tokens == 0
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        assert params.seed is not None
        run = reference_run(model, tokenizer.encode(prompt), params, params.seed)
        assert run.margin > MARGIN, f"{prompt[-20:]!r}: margin {run.margin}: choose another"
        answers.append((run.tokens, run.exit_depths))
    assert engine == answers
    assert {depth for _, depths in answers for depth in depths} == {1, 2, 3, 4}
    return answers


@pytest.mark.parametrize("chunk", [3, 7, 32, 128])
def test_a_warm_run_equals_the_cold_one(cold: Answers, chunk: int) -> None:
    with LLM(configuration=configuration(chunk)) as llm:
        lengths = [len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
        warming = answers_of([llm.generate(p, s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)])
        assert warming == cold
        before = llm.stats().prefix_hit_tokens
        assert answers_of(llm.generate(PROMPTS, PARAMS)) == cold
        hit = llm.stats().prefix_hit_tokens - before
        # Every complete block of each prompt, whose last token is always run.
        assert hit == sum((length - 1) // 4 * 4 for length in lengths)


def test_a_burst_and_evictions_change_nothing(cold: Answers) -> None:
    longest = 130 + 16
    tight = WORKER.model_copy(
        update={"cache": CacheSettings(block_size=4, num_blocks=4 * (longest // 4) * 2)}
    )
    with LLM(configuration=configuration(16).model_copy(update={"worker": tight})) as llm:
        for _ in range(2):
            assert answers_of(llm.generate(PROMPTS, PARAMS)) == cold
        other = [[5 + index] * 120 for index in range(3)]
        llm.generate(other, SamplingParams(max_tokens=2))
        assert llm.stats().evicted_blocks > 0
        assert answers_of(llm.generate(PROMPTS, PARAMS)) == cold
        assert llm.stats().prefix_hit_tokens > 0
        assert llm.stats().free_blocks == llm.stats().total_blocks


@pytest.mark.parametrize("length", [5, 4, 8, 9])
def test_prefill_starts_at_the_first_token_that_is_not_cached(length: int) -> None:
    prompt = [1648, 1424, 261, 658, 14, 300, 301, 302, 303][:length]
    with LLM(configuration=configuration()) as llm:
        first = answers_of(llm.generate(prompt))
        assert answers_of(llm.generate(prompt)) == first
        # 4 of 5 tokens with blocks of 4; of 4 and of 8 the last block is not complete without the
        # last token.
        assert llm.stats().prefix_hit_tokens == {5: 4, 4: 0, 8: 4, 9: 8}[length]
