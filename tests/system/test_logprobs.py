"""Log probabilities of whole answers: those of a dense pass, and kept by a hit and a suspend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cluster.llm import LLM
from protocol.config import CacheSettings, Configuration, SchedulerSettings, WorkerSettings
from protocol.layout import Layout
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from tests.model_driver import ModelDriver
from tests.workload import STORY
from worker.local_executor import LocalExecutor
from worker.models.registry import load_model, resolve_model

if TYPE_CHECKING:
    from cluster.generation import Completion
    from scheduler.output import RequestOutput

PROMPT = STORY + "Then they"
FULL = SamplingParams(
    max_tokens=24, exit_threshold=1.0, temperature=0.8, seed=5, ignore_eos=True, logprobs=0
)
TIMEOUT = 30.0


def worker(layout: Layout = Layout.LAST_EXITED, num_slots: int = 4) -> WorkerSettings:
    cache = CacheSettings(block_size=4, num_blocks=1024, layout=layout)
    return WorkerSettings(cache=cache, device="cpu", num_slots=num_slots, num_threads=1)


def told(answer: Completion) -> torch.Tensor:
    """The log probability of each token."""
    assert len(answer.logprobs) == len(answer.token_ids) == len(answer.exit_depths)
    return torch.tensor([entry.logprob for entry in answer.logprobs], dtype=torch.float64)


@torch.inference_mode()
def dense(prompt: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
    """The log probability of each token, by one full-depth pass over prompt and answer."""
    settings = worker().model
    model = load_model(resolve_model(settings), torch.float32, torch.device("cpu"), settings.model)
    driver = ModelDriver(model, max_tokens=len(prompt) + len(tokens))
    states = driver.prefill([(0, 0, [*prompt, *tokens[:-1]])])[-1]
    logprobs = model.logits(states[len(prompt) - 1 :]).double().log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_a_full_depth_answer_is_told_what_a_teacher_would_say() -> None:
    with LLM(configuration=Configuration(worker=worker())) as llm:
        (answer,) = llm.generate(PROMPT, FULL)
        ids = llm.tokenizer.encode(PROMPT)
    assert set(answer.exit_depths) == {4}
    expected = dense(ids, answer.token_ids)
    assert expected.min() < -1.0  # not a run of certainties
    torch.testing.assert_close(told(answer), expected, atol=2e-5, rtol=0)
    shared = Configuration(worker=worker(Layout.SHARED))
    with LLM(configuration=shared) as llm:
        (other,) = llm.generate(PROMPT, FULL)
    assert (told(other) - dense(ids, other.token_ids)).abs().max() > 1e-2


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_a_cached_prompt_changes_none(threshold: float) -> None:
    params = FULL.model_copy(update={"exit_threshold": threshold})
    with LLM(configuration=Configuration(worker=worker())) as llm:
        (cold,) = llm.generate(PROMPT, params)
        (warm,) = llm.generate(PROMPT, params)
        assert llm.stats().prefix_hit_tokens > 0
    assert (warm.token_ids, warm.exit_depths) == (cold.token_ids, cold.exit_depths)
    torch.testing.assert_close(told(warm), told(cold), atol=2e-5, rtol=0)


def run(executor: LocalExecutor, epoch: int, cut: int | None) -> list[RequestOutput]:
    """The pieces of one request that is suspended after `cut` plans, if there is a cut."""
    executor.begin_epoch(epoch, TIMEOUT)
    settings = {"policy": "priority", "preemption": True, "prefill_chunk_size": 3}
    settings |= {"resident": False}  # one output at most a plan
    engine = Engine(SchedulerSettings.model_validate(settings))
    engine.add_lane("lane-0", epoch, executor.profile())
    params = FULL.model_copy(
        update={"max_tokens": 5, "exit_threshold": 0.5, "priority": 9, "logprobs": 2}
    )
    low = engine.add("low", (1648, 1424, 261, 658, 14), params, 7)
    pieces: list[RequestOutput] = []
    for turn in range(100):
        if turn == cut:
            engine.add("high", (2, 3), SamplingParams(max_tokens=1, priority=1), 7)
        for lane, plan in engine.plan(0.0):
            submission = executor.submit(plan)
            pieces += engine.apply(lane, submission.collect(TIMEOUT), 0.0)
            submission.retire()
    assert not engine.has_work()
    assert cut is None or engine.stats().preemptions == engine.stats().resumptions == 1
    return [piece for piece in pieces if piece.key == low]


def test_a_suspend_changes_none() -> None:
    with LocalExecutor.open(worker(num_slots=1)) as executor:
        alone = run(executor, 2, None)
        assert sum(len(piece.logprobs) for piece in alone) == 5
        for cut in (1, 3, 4, 5):
            assert run(executor, cut + 2, cut) == alone, f"suspended after {cut} plans"
