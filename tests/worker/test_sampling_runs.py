"""What sampling adds, over whole requests of the shipped model, against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cluster.drivers import SyncDriver
from protocol.config import CacheSettings, SchedulerSettings, WorkerSettings
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from tests.plans import TIMEOUT
from tests.reference import reference_run
from worker.local_executor import LocalExecutor
from worker.models.registry import EMBEDDED_DIRECTORY, load_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scheduler.output import RequestOutput
    from worker.models.base import LoopedModel

PROMPT = [14, 439, 266, 1066, 1648, 1424, 261, 658, 14, 439]
MARGIN = 2e-5
"""No decision below is closer than this; kernels differ by about 1e-6."""

SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=1024), device="cpu", num_slots=3, num_threads=1
)


def params(**fields: object) -> SamplingParams:
    return SamplingParams.model_validate({"max_tokens": 40, "ignore_eos": True} | fields)


CASES = [
    params(repetition_penalty=1.3, exit_threshold=0.9),
    params(presence_penalty=1.5, frequency_penalty=0.5, exit_threshold=0.5),
    params(),
    params(frequency_penalty=-1.0, repetition_penalty=0.9, max_tokens=12),
    params(logit_bias={261: 6.0, 14: -100.0}, temperature=0.8, exit_threshold=0.9),
    params(presence_penalty=2.0, repetition_penalty=1.5, temperature=1.0, top_k=20),
    params(ignore_eos=False, stop_token_ids=(14, 261, 18), min_tokens=9, max_tokens=60),
]


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return load_model(EMBEDDED_DIRECTORY, torch.float32, torch.device("cpu"), "ouro-tiny")


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    with LocalExecutor.open(SETTINGS) as opened:
        yield opened


def run(executor: LocalExecutor, cases: Sequence[SamplingParams]) -> list[list[RequestOutput]]:
    """All cases at once, prompts in chunks of 3; more requests than slots, so slots are reused."""
    executor.begin_epoch(executor.epoch + 1, TIMEOUT)
    engine = Engine(SchedulerSettings(prefill_chunk_size=3, max_prefill_tokens=8))
    driver = SyncDriver(engine, {"lane-0": executor}, TIMEOUT)
    for index, case in enumerate(cases):
        engine.add(str(index), PROMPT[: 4 + index], case, seed=index)
    outputs = driver.drain(TIMEOUT)
    return [[o for o in outputs if o.key.request_id == str(i)] for i in range(len(cases))]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def test_a_long_run_equals_a_host_recomputation_from_the_delivered_ids(
    model: LoopedModel, executor: LocalExecutor
) -> None:
    together = run(executor, CASES)
    for index, (case, outputs) in enumerate(zip(CASES, together, strict=True)):
        expected = reference_run(model, PROMPT[: 4 + index], case, seed=index)
        assert expected.margin > MARGIN, index
        assert tokens_of(outputs) == expected.tokens, index
        depths = [depth for output in outputs for depth in output.exit_depths]
        assert depths == expected.exit_depths


def test_each_of_them_changes_what_comes_out(executor: LocalExecutor) -> None:
    plain = tokens_of(run(executor, [params()])[0])
    assert len(set(plain)) < len(plain)
    (fresh,) = run(executor, [params(presence_penalty=2.0, logit_bias={plain[0]: -100.0})])
    assert plain[0] not in tokens_of(fresh)
    (repeated,) = run(executor, [params(repetition_penalty=1e6)])
    assert len(set(tokens_of(repeated))) == 40
    (ended,) = run(executor, [params(stop_token_ids=(plain[0],))])
    assert tokens_of(ended) == plain[:1]
    (later,) = run(executor, [params(stop_token_ids=(plain[0],), min_tokens=5)])
    assert len(tokens_of(later)) > 5
    assert plain[0] not in tokens_of(later)[:5]


def test_logprobs_of_a_long_run_equal_a_dense_log_softmax(
    model: LoopedModel, executor: LocalExecutor
) -> None:
    asked = (0, None, 20, 3, 1, 7, None)
    cases = [c.model_copy(update={"logprobs": k}) for c, k in zip(CASES, asked, strict=True)]
    plain, together = run(executor, CASES), run(executor, cases)
    for index, (case, outputs) in enumerate(zip(cases, together, strict=True)):
        tokens = tokens_of(outputs)
        assert tokens == tokens_of(plain[index])
        told = [entry for output in outputs for entry in output.logprobs]
        if case.logprobs is None:
            assert told == []
            continue
        expected = reference_run(model, PROMPT[: 4 + index], case, seed=index).logprobs
        assert len(told) == len(tokens) == len(expected)
        for token, entry, dense in zip(tokens, told, expected, strict=True):
            assert entry.logprob == pytest.approx(float(dense[token]), abs=1e-4)
            assert len(entry.top_ids) == case.logprobs
            top = dense[list(entry.top_ids)]
            torch.testing.assert_close(
                torch.tensor(entry.top_logprobs, dtype=torch.float64), top, atol=1e-4, rtol=0
            )
            best = dense.topk(case.logprobs).values
            torch.testing.assert_close(top, best, atol=1e-4, rtol=0)


def test_a_row_is_told_the_same_in_any_batch(executor: LocalExecutor) -> None:
    case = params(logprobs=4, max_tokens=6, presence_penalty=0.5)
    alone = run(executor, [case])[0]
    with_others = run(executor, [case, params(logprobs=20), params()])[0]
    flat, again = ([e for o in some for e in o.logprobs] for some in (alone, with_others))
    assert [entry.top_ids for entry in flat] == [entry.top_ids for entry in again]
    for one, other in zip(flat, again, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
