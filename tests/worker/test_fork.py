"""Forks on a real worker: what is copied and shared, and that choices equal single requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from protocol.config import CacheSettings, WorkerSettings
from protocol.identity import RequestKey
from protocol.layout import Layout
from protocol.plan import Admission, CodaBatch, ExecutionPlan, Fork, PreludeBatch, RecurrentBatch
from protocol.result import CodaResult
from protocol.rng import RngKey
from tests.plans import block_table, prefill
from worker.row_record import COLUMNS
from worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.plan import BlockTable, Step
    from protocol.result import PlanResult

KEYS = tuple(RequestKey("a", generation) for generation in (1, 2, 3))
A, B, C = KEYS
PROMPT = (1648, 1424, 261, 658, 14, 900, 31, 7, 12)
ROOM, OUTPUTS = 16, 5
DEPTHS = (4, 2, 1, 3, 4)
SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=3, num_threads=1
)


class Bench:
    """A real worker without its thread, plan by plan. Owner: one test, which alone uses it."""

    def __init__(self, layout: Layout) -> None:
        cache = SETTINGS.cache.model_copy(update={"layout": layout})
        self.worker = Worker.open(SETTINGS.model_copy(update={"cache": cache}))
        self.profile = self.worker.profile
        self.area = self.profile.planes * ROOM // self.profile.block_size
        self.seq = 0

    def run(
        self,
        *steps: Step,
        admits: tuple[Admission, ...] = (),
        forks: tuple[Fork, ...] = (),
        releases: tuple[RequestKey, ...] = (),
        suspends: tuple[RequestKey, ...] = (),
    ) -> PlanResult:
        self.seq += 1
        plan = ExecutionPlan(
            1,
            self.seq,
            releases=releases,
            admits=admits,
            steps=steps,
            suspends=suspends,
            forks=forks,
        )
        lease = self.worker.readback.lease()
        result = self.worker.runner.execute(plan, lease).read()
        self.worker.readback.give_back(lease)
        assert not result.failed
        return result

    def table(self, area: int) -> BlockTable:
        return block_table(self.profile, ROOM, first=area * self.area)

    def admit(self, key: RequestKey, length: int, stream: int, area: int) -> Admission:
        return Admission(
            key,
            PROMPT[:length],
            self.table(area),
            RngKey(11, stream),
            0.9,
            0.9,
            300,
            repetition_penalty=1.4,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            logit_bias=((55, 4.0),),
            min_tokens=3,
            banned_ids=(0, 1),
            logprobs=3,
        )

    def fork(self, key: RequestKey, stream: int, shared: int, area: int) -> Fork:
        tables = zip(self.table(0), self.table(area), strict=True)
        joined = tuple(theirs[:shared] + own[shared:] for theirs, own in tables)
        return Fork(key, A, joined, RngKey(11, stream))

    def decode(self, length: int, forks: tuple[Fork, ...] = ()) -> list[CodaResult]:
        """All outputs of three choices side by side; the forks ride with the first CODA."""
        sampled, depth = [], self.profile.model.max_loops
        for output in range(OUTPUTS):
            position = length - 1 + output
            steps: list[Step] = [
                CodaBatch(KEYS, (position,) * 3, (depth,) * 3, (output,) * 3),
                PreludeBatch(KEYS, (position + 1,) * 3, (-1,) * 3),
            ]
            depth = DEPTHS[output]
            steps += [
                RecurrentBatch(KEYS, (position + 1,) * 3, (loop,) * 3) for loop in range(depth)
            ]
            first = self.run(*steps, forks=forks if output == 0 else ()).steps[0]
            assert isinstance(first, CodaResult)
            sampled.append(first)
        return sampled


@pytest.fixture(params=Layout)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    opened = Bench(request.param)
    yield opened
    opened.worker.close()


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_forked_choices_equal_the_same_prompt_admitted_three_times(
    bench: Bench, length: int
) -> None:
    bench.run(
        *(prefill(key, 0, length) for key in KEYS),
        admits=tuple(bench.admit(key, length, stream, stream) for stream, key in enumerate(KEYS)),
    )
    expected = bench.decode(length)
    assert len({result.tokens for result in expected}) > 1
    assert any(len(set(result.tokens)) > 1 for result in expected)
    bench.run(releases=KEYS)
    bench.worker.storage.pages.fill_(7.0)
    bench.run(prefill(A, 0, length), admits=(bench.admit(A, length, 0, 0),))
    shared = length // 4
    forks = (bench.fork(B, 1, shared, area=1), bench.fork(C, 2, shared, area=2))
    assert bench.decode(length, forks) == expected


@pytest.mark.parametrize(("length", "shared"), [(3, 0), (8, 2), (9, 2), (9, 1), (9, 0)])
def test_only_prompt_tokens_of_own_blocks_are_written(
    bench: Bench, length: int, shared: int
) -> None:
    bench.run(prefill(A, 0, length), admits=(bench.admit(A, length, 0, 0),))
    before = bench.worker.storage.pages.clone()
    expected = before.clone()
    for theirs, own in zip(bench.table(0), bench.table(1), strict=True):
        for token in range(shared * 4, length):
            page, offset = token // 4, token % 4
            expected[own[page], :, :, :, offset] = before[theirs[page], :, :, :, offset]
    bench.run(forks=(bench.fork(B, 1, shared, area=1),))
    assert torch.equal(bench.worker.storage.pages, expected)
    assert torch.equal(expected, before) == (shared * 4 == length)


def test_the_whole_row_is_copied_but_for_the_stream(bench: Bench) -> None:
    bench.run(prefill(A, 0, 9), admits=(bench.admit(A, 9, 0, 0),))
    bench.run(forks=(bench.fork(B, 5, 2, area=1),))
    bench.run(suspends=(A, B))
    parent, child = (bench.worker.runner.suspended.store.get(key) for key in (A, B))
    assert parent is not None
    assert child is not None
    assert torch.equal(child.kv, parent.kv)
    assert child.record.progress == replace(parent.record.progress, key=B)
    assert child.record.sampling == parent.record.sampling
    for name in COLUMNS:
        same = torch.equal(getattr(child.record, name), getattr(parent.record, name))
        assert same == (name != "rng_words"), name
    assert child.record.rng_words.tolist() == [11, 0, 5]
