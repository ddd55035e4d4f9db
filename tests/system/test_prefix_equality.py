"""A cached prefix changes no token and no exit depth, in either layout: the real worker on CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from cluster.llm import LLM
from protocol.config import CacheSettings, Configuration, SchedulerSettings, WorkerSettings
from protocol.layout import Layout
from protocol.sampling import SamplingParams
from tests.reference import reference_run
from tests.workload import MARGIN, STORY
from worker.models.registry import load_model, resolve_model

if TYPE_CHECKING:
    from cluster.generation import Completion

ENDINGS = ("Pip", "The rabbit said", "Then they", "", STORY[:30], "He", "The mill", "Hazel")
PROMPTS = [STORY * 2 + ending for ending in ENDINGS]
PARAMS = [
    SamplingParams(max_tokens=16, exit_threshold=0.9, seed=1),
    SamplingParams(max_tokens=16, exit_threshold=0.5, seed=12, temperature=0.8),
    SamplingParams(max_tokens=16, exit_threshold=1.0, seed=3, logprobs=2),
    SamplingParams(max_tokens=16, exit_threshold=0.9, seed=4, temperature=1.0, top_k=20),
    SamplingParams(max_tokens=16, exit_threshold=0.5, seed=7, temperature=0.7, top_p=0.9),
    SamplingParams(
        max_tokens=16,
        exit_threshold=0.9,
        seed=6,
        repetition_penalty=1.3,
        min_tokens=10,
        logit_bias=((14, -3.0), (261, 1.5)),
        logprobs=3,
    ),
    SamplingParams(
        max_tokens=16,
        exit_threshold=0.5,
        seed=11,
        temperature=0.9,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logprobs=0,
    ),
    SamplingParams(
        max_tokens=16,
        exit_threshold=0.9,
        seed=28,
        temperature=0.6,
        repetition_penalty=0.9,
        frequency_penalty=-0.3,
        stop_token_ids=(14, 261),
        min_tokens=12,
    ),
]

Answers = list[tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True)
class Cold:
    """What the reference says of PROMPTS in one layout, each alone."""

    layout: Layout
    answers: Answers
    logprobs: list[list[float]]


def configuration(
    layout: Layout, chunk: int = 128, *, blocks: int = 2048, caching: bool = True
) -> Configuration:
    cache = CacheSettings(block_size=4, num_blocks=blocks, layout=layout)
    return Configuration(
        worker=WorkerSettings(cache=cache, device="cpu", num_slots=8, num_threads=1),
        scheduler=SchedulerSettings(prefill_chunk_size=chunk, prefix_caching=caching),
    )


def answers_of(completions: list[Completion]) -> Answers:
    return [(list(done.token_ids), list(done.exit_depths)) for done in completions]


def check(found: list[Completion], cold: Cold) -> None:
    """Tokens and depths are equal; log probabilities are there if asked for, and close."""
    assert answers_of(found) == cold.answers
    for completion, params, expected in zip(found, PARAMS, cold.logprobs, strict=True):
        told = [entry.logprob for entry in completion.logprobs]
        assert told == pytest.approx([] if params.logprobs is None else expected, abs=1e-4)
        counts = {len(entry.top_ids) for entry in completion.logprobs}
        assert counts == (set() if params.logprobs is None else {params.logprobs})


@pytest.fixture(scope="module", params=list(Layout), ids=lambda layout: layout.value)
def cold(request: pytest.FixtureRequest) -> Cold:
    """By the reference, each alone, and no decision of it is a close one."""
    layout: Layout = request.param
    settings = configuration(layout).worker.model
    model = load_model(resolve_model(settings), torch.float32, torch.device("cpu"), settings.model)
    found = Cold(layout, [], [])
    with LLM(configuration=configuration(layout, caching=False)) as llm:
        tokenizer = llm.tokenizer
        engine = llm.generate(PROMPTS, PARAMS)
        assert llm.stats().prefix_hit_tokens == 0
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        assert params.seed is not None
        run = reference_run(model, tokenizer.encode(prompt), params, params.seed, layout)
        assert run.margin > MARGIN, f"{prompt[-20:]!r}: margin {run.margin}: choose another"
        found.answers.append((run.tokens, run.exit_depths))
        sampled = zip(run.logprobs, run.tokens, strict=True)
        found.logprobs.append([float(row[token]) for row, token in sampled])
    check(engine, found)
    assert {depth for _, depths in found.answers for depth in depths} == {1, 2, 3, 4}
    return found


@pytest.mark.parametrize("chunk", [3, 7, 32, 128])
def test_a_warm_run_equals_the_cold_one(cold: Cold, chunk: int) -> None:
    with LLM(configuration=configuration(cold.layout, chunk)) as llm:
        lengths = [len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
        check([llm.generate(p, s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)], cold)
        before = llm.stats().prefix_hit_tokens
        check(llm.generate(PROMPTS, PARAMS), cold)
        hit = llm.stats().prefix_hit_tokens - before
        # Every complete block of each prompt, whose last token is always run.
        assert hit == sum((length - 1) // 4 * 4 for length in lengths)


def test_a_burst_and_evictions_change_nothing(cold: Cold) -> None:
    longest = 130 + 16
    blocks = cold.layout.planes(4) * (longest // 4) * 2
    with LLM(configuration=configuration(cold.layout, 16, blocks=blocks)) as llm:
        for _ in range(2):
            check(llm.generate(PROMPTS, PARAMS), cold)
        other = [[5 + index] * 120 for index in range(3)]
        llm.generate(other, SamplingParams(max_tokens=2))
        assert llm.stats().evicted_blocks > 0
        check(llm.generate(PROMPTS, PARAMS), cold)
        assert llm.stats().prefix_hit_tokens > 0
        assert llm.stats().free_blocks == llm.stats().total_blocks


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("length", [5, 4, 8, 9])
def test_prefill_starts_at_the_first_token_that_is_not_cached(length: int, layout: Layout) -> None:
    prompt = [1648, 1424, 261, 658, 14, 300, 301, 302, 303][:length]
    with LLM(configuration=configuration(layout)) as llm:
        first = answers_of(llm.generate(prompt))
        assert answers_of(llm.generate(prompt)) == first
        # 4 of 5 tokens with blocks of 4; of 4 and of 8 the last block is not complete without the
        # last token.
        assert llm.stats().prefix_hit_tokens == {5: 4, 4: 0, 8: 4, 9: 8}[length]
