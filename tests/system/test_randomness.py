"""Who draws what: nobody touches the process's generators, and an id used again starts fresh."""

from __future__ import annotations

import random

import pytest
import torch

from cluster.llm import LLM
from protocol.config import CacheSettings, Configuration, SchedulerSettings, WorkerSettings
from protocol.exit_rule import FinishReason
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from tests.scheduler.bench import reasons, texts
from worker.local_executor import LocalExecutor

WORKER = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=128), device="cpu", num_slots=2, num_threads=1
)
TIMEOUT = 30.0


def test_the_generators_of_the_process_are_left_alone() -> None:
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state()
    with LLM(configuration=Configuration(worker=WORKER)) as llm:
        drawn = SamplingParams(max_tokens=6, temperature=1.0)
        first, second = llm.generate(["Once upon a time"] * 2, drawn)
        again = llm.generate("Once upon a time", drawn.model_copy(update={"seed": first.seed}))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert first.seed != second.seed
    assert again[0].token_ids == first.token_ids


def test_a_request_does_not_depend_on_the_generators_of_the_process() -> None:
    answers = []
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        with LLM(configuration=Configuration(worker=WORKER)) as llm:
            answers += llm.generate("Once", SamplingParams(max_tokens=8, temperature=1.0, seed=9))
    assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_ids_and_slots_used_again_give_what_a_fresh_worker_gives(plans_in_flight: int) -> None:
    """Three rounds of the same two ids, given up at another point in each of them."""
    prompts = {"a": (1648, 1424, 261, 658, 14), "b": (900, 31, 7)}
    params = SamplingParams(max_tokens=6, exit_threshold=0.5, temperature=0.9, ignore_eos=True)
    with LocalExecutor.open(WORKER) as executor:
        settings = {"exit_policy": "ouro_delayed", "plans_in_flight": plans_in_flight}
        engine = Engine(SchedulerSettings.model_validate(settings | {"prefill_chunk_size": 3}))
        engine.add_lane("lane-0", executor.epoch, executor.profile())
        answers, generations = [], []
        for plans in (200, 1, 2, 4, 200):
            outputs = []
            keys = [engine.add(name, prompt, params, 7) for name, prompt in prompts.items()]
            generations += [key.generation for key in keys]
            for turn in range(plans):
                for lane, plan in engine.plan(0.0):
                    submission = executor.submit(plan)
                    if turn == plans - 1:  # a CODA or a loop of theirs may be on its way
                        outputs += [*engine.abort("a"), *engine.abort("b")]
                    outputs += engine.apply(lane, submission.collect(TIMEOUT), 0.0)
                    submission.retire()
            while engine.has_work():
                for lane, plan in engine.plan(0.0):
                    submission = executor.submit(plan)
                    assert engine.apply(lane, submission.collect(TIMEOUT), 0.0) == []
                    submission.retire()
            answers.append(texts(outputs))
            assert {output.key for output in outputs} <= set(keys)
            ended = FinishReason.LENGTH if plans == 200 else FinishReason.ABORT
            assert set(reasons(outputs).values()) == {ended}
            stats = engine.stats()
            assert (stats.free_blocks, stats.rng_keys) == (stats.total_blocks, 0)
    assert answers[-1] == answers[0]
    for cut_short in answers[1:-1]:
        for name, (tokens, depths) in cut_short.items():
            whole_tokens, whole_depths = answers[0][name]
            assert (tokens, depths) == (whole_tokens[: len(tokens)], whole_depths[: len(depths)])
    assert generations == sorted(set(generations))
