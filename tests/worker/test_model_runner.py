"""ModelRunner: a request that goes wrong costs itself alone; finalize copies what it must."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from protocol.config import ModelSettings
from protocol.identity import RequestKey
from protocol.layout import Layout
from protocol.plan import (
    CodaBatch,
    ExecutionPlan,
    Grant,
    PrefillBatch,
    PreludeBatch,
    RecurrentBatch,
)
from protocol.profile import WorkerProfile
from protocol.result import CodaResult, RecurrentResult
from tests.plans import admission, block_table, coda, prefill, prelude, recurrent
from worker.attention.torch_backend import TorchAttention
from worker.kv_storage import KVStorage
from worker.model_runner import ModelRunner
from worker.models.registry import load_model, resolve_model
from worker.outcome import NOT_A_NUMBER
from worker.readback import ReadbackPool
from worker.slot_table import SlotTable
from worker.stages import Device, loop_seats, run_coda

if TYPE_CHECKING:
    from protocol.plan import Admission, Step
    from protocol.result import PlanResult
    from worker.models.base import LoopedModel

A, B = RequestKey("a", 1), RequestKey("b", 2)
PROMPT = (1648, 1424, 261, 658, 14)
CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 4, 48, 3


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return load_model(resolve_model(ModelSettings()), torch.float32, CPU, "ouro-tiny")


class Bench:
    """A runner over real parts, plan by plan. Owner: one test, which alone uses it."""

    def __init__(self, model: LoopedModel, layout: Layout = Layout.LAST_EXITED) -> None:
        shape = (model.num_layers, model.kv_heads, BLOCK_SIZE, model.head_dim, torch.float32)
        self.storage = KVStorage(NUM_BLOCKS, *shape, CPU)
        self.planes = layout.planes(model.profile.max_loops)
        self.slots = SlotTable(
            num_slots=NUM_SLOTS,
            hidden_size=model.hidden_size,
            planes=self.planes,
            max_loops=model.profile.max_loops,
            max_positions=64,
            block_size=BLOCK_SIZE,
            scratch_block=self.storage.scratch_block,
            vocab_size=model.profile.vocab_size,
            dtype=torch.float32,
            device=CPU,
        )
        self.profile = WorkerProfile(
            model.profile,
            "cpu",
            "float32",
            NUM_SLOTS,
            NUM_BLOCKS,
            BLOCK_SIZE,
            self.planes,
            64,
            layout,
        )
        self.device = Device(model, self.slots, self.storage, TorchAttention(), CPU)
        self.runner = ModelRunner(self.device)
        self.pool = ReadbackPool(1, 64, CPU)
        self.seq = 0

    def run(
        self, *steps: Step, admits: tuple[Admission, ...] = (), grants: tuple[Grant, ...] = ()
    ) -> PlanResult:
        self.seq += 1
        lease = self.pool.lease()
        plan = ExecutionPlan(1, self.seq, admits=admits, grants=grants, steps=steps)
        result = self.runner.execute(plan, lease).read()
        self.pool.give_back(lease)
        return result

    def admit(self, key: RequestKey, first: int = 0) -> Admission:
        return admission(key, PROMPT, block_table(self.profile, 8, first))


@pytest.fixture
def bench(model: LoopedModel) -> Bench:
    return Bench(model)


def test_finalize_copies_the_exit_plane_into_deeper_planes_of_one_token_only(
    bench: Bench,
) -> None:
    bench.run(
        prefill(A, 0, 5),
        coda(A, 4, 4, 0),
        prelude(A, 5),
        recurrent(A, 5, 0),
        recurrent(A, 5, 1),
        admits=(bench.admit(A),),
    )
    before = bench.storage.pages.clone()
    bench.run(coda(A, 5, 2, 1))
    table = block_table(bench.profile, 8)
    page, offset = 5 // BLOCK_SIZE, 5 % BLOCK_SIZE
    source = before[table[1][page], :, :, :, offset]
    assert source.abs().sum() > 0
    expected = before.clone()
    for plane in (2, 3):
        expected[table[plane][page], :, :, :, offset] = source
    assert torch.equal(bench.storage.pages, expected)


def test_an_exit_at_full_depth_copies_nothing(bench: Bench) -> None:
    bench.run(prefill(A, 0, 5), admits=(bench.admit(A),))
    before = bench.storage.pages.clone()
    bench.run(coda(A, 4, 4, 0))
    assert torch.equal(bench.storage.pages, before)


def test_with_one_plane_a_coda_checks_the_exit_and_copies_nothing(model: LoopedModel) -> None:
    bench = Bench(model, Layout.SHARED)
    admits = (bench.admit(A), bench.admit(B, first=16))
    start = (CodaBatch((A, B), (4, 4), (4, 4), (0, 0)), PreludeBatch((A, B), (5, 5), (-1, -1)))
    looped = RecurrentBatch((A, B), (5, 5), (0, 0))
    bench.run(PrefillBatch((A, B), (0, 0), (5, 5)), *start, looped, admits=admits)
    before = bench.storage.pages.clone()
    sampled = bench.run(CodaBatch((A, B), (5, 5), (1, 2), (1, 1)))
    assert [row.key for row in sampled.failed] == [B]
    assert sampled.steps[0].keys == (A,)
    assert torch.equal(bench.storage.pages, before)


def test_finalize_reaches_blocks_that_its_own_plan_has_granted(bench: Bench) -> None:
    whole = block_table(bench.profile, 8)
    short, more = (tuple(plane[cut] for plane in whole) for cut in (slice(1), slice(1, 2)))
    bench.run(prefill(A, 0, 4), coda(A, 3, 4, 0), admits=(admission(A, PROMPT[:4], short),))
    granted = bench.run(
        prelude(A, 4), recurrent(A, 4, 0), coda(A, 4, 1, 1), grants=(Grant(A, more),)
    )
    assert granted.failed == ()
    written = bench.storage.pages[:, :, :, :, 0]
    assert written[whole[0][1]].abs().sum() > 0
    for plane in (1, 2, 3):
        assert torch.equal(written[whole[plane][1]], written[whole[0][1]])


def test_no_stage_writes_outside_the_blocks_of_its_requests(bench: Bench) -> None:
    bench.storage.pages.fill_(7.0)
    bench.run(
        prefill(A, 0, 5),
        coda(A, 4, 4, 0),
        prelude(A, 5),
        recurrent(A, 5, 0),
        admits=(bench.admit(A, first=8),),
    )
    own = {block for plane in block_table(bench.profile, 8, 8) for block in plane}
    others = [block for block in range(NUM_BLOCKS + 1) if block not in own]
    assert bool((bench.storage.pages[others] == 7.0).all())


def test_a_prelude_takes_the_slot_s_token_or_the_host_s(bench: Bench) -> None:
    sampled = bench.run(
        prefill(A, 0, 5),
        prefill(B, 0, 5),
        CodaBatch((A, B), (4, 4), (4, 4), (0, 0)),
        admits=(bench.admit(A), bench.admit(B, first=16)),
    ).steps[2]
    assert isinstance(sampled, CodaResult)
    looped = bench.run(
        PreludeBatch((A, B), (5, 5), (-1, sampled.tokens[1])),
        RecurrentBatch((A, B), (5, 5), (0, 0)),
    ).steps[1]
    assert isinstance(looped, RecurrentResult)
    assert looped.survivals[0] == pytest.approx(looped.survivals[1], abs=1e-6)
    other = bench.run(
        CodaBatch((A, B), (5, 5), (1, 1), (1, 1)),
        PreludeBatch((A, B), (6, 6), (-1, 3)),
        RecurrentBatch((A, B), (6, 6), (0, 0)),
    ).steps[2]
    assert isinstance(other, RecurrentResult)
    assert abs(other.survivals[0] - other.survivals[1]) > 1e-4


def test_values_that_are_no_numbers_fail_their_request_alone(bench: Bench) -> None:
    bench.run(
        PrefillBatch((A, B), (0, 0), (5, 5)),
        CodaBatch((A, B), (4, 4), (4, 4), (0, 0)),
        PreludeBatch((A, B), (5, 5), (-1, -1)),
        admits=(bench.admit(A), bench.admit(B, first=16)),
    )
    bench.slots.hidden[bench.slots.slot(A).index] = float("nan")
    looped = bench.run(RecurrentBatch((A, B), (5, 5), (0, 0)))
    assert [(row.key, row.message) for row in looped.failed] == [(A, NOT_A_NUMBER)]
    assert looped.steps[0].keys == (B,)
    sampled = bench.run(CodaBatch((A, B), (5, 5), (1, 1), (1, 1)))
    assert [row.key for row in sampled.failed] == [A]
    assert sampled.steps[0].keys == (B,)


def test_a_step_that_raises_fails_its_rows_and_the_plan_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.run(prefill(A, 0, 5), admits=(bench.admit(A),))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("attention is out of order")

    monkeypatch.setattr(TorchAttention, "attend", fail)
    broken = bench.run(prefill(B, 0, 5), coda(A, 4, 4, 0), admits=(bench.admit(B, first=16),))
    assert [row.key for row in broken.failed] == [B]
    assert broken.failed[0].message.endswith("RuntimeError: attention is out of order")
    assert broken.steps[1].keys == (A,)


def test_log_probabilities_are_computed_for_the_rows_that_asked_alone(bench: Bench) -> None:
    asked = replace(bench.admit(B, first=16), logprobs=2)
    bench.run(PrefillBatch((A, B), (0, 0), (5, 5)), admits=(bench.admit(A), asked))
    slots = [bench.slots.slot(key) for key in (A, B)]
    both = CodaBatch((A, B), (4, 4), (4, 4), (0, 0))
    sampled = run_coda(bench.device, both, [s.index for s in slots], [s.sampling for s in slots])
    assert sampled.logprobs is not None
    assert sampled.logprobs.sampled.shape == (1,)
    nobody = run_coda(bench.device, coda(A, 4, 4, 0), [slots[0].index], [slots[0].sampling])
    assert nobody.logprobs is None


def test_the_slot_tells_position_and_loops_on_the_device(bench: Bench) -> None:
    def stands() -> tuple[int, int]:
        row = bench.slots.slot(A).index
        return int(bench.slots.position[row]), int(bench.slots.loops[row])

    bench.run(prefill(A, 0, 3), admits=(bench.admit(A),))
    assert stands() == (0, 0)
    bench.run(prefill(A, 3, 2))
    assert stands() == (4, bench.planes)
    bench.run(coda(A, 4, 4, 0), prelude(A, 5))
    assert stands() == (5, 0)
    bench.run(recurrent(A, 5, 0), recurrent(A, 5, 1))
    assert stands() == (5, 2)


def test_padding_seats_change_nobody_and_write_only_to_the_scratch_block(bench: Bench) -> None:
    bench.run(
        PrefillBatch((A, B), (0, 0), (5, 5)),
        CodaBatch((A, B), (4, 4), (4, 4), (0, 0)),
        PreludeBatch((A, B), (5, 5), (-1, -1)),
        recurrent(B, 5, 0),
        admits=(bench.admit(A), bench.admit(B, first=16)),
    )
    bench.storage.pages[bench.storage.scratch_block] = float("nan")
    on, rows = bench.device, [bench.slots.slot(key).index for key in (A, B)]
    before = bench.storage.pages.clone()
    state = [getattr(bench.slots, name).clone() for name in ("hidden", "survival", "loops")]
    with torch.inference_mode():
        alone = loop_seats(on, torch.tensor(rows), 2)
        expected = bench.storage.pages.clone()
        bench.storage.pages.copy_(before)
        for name, value in zip(("hidden", "survival", "loops"), state, strict=True):
            getattr(bench.slots, name).copy_(value)
        trash = bench.slots.trash
        padded = loop_seats(on, torch.tensor([rows[0], trash, rows[1], trash]), 2)
    torch.testing.assert_close(padded[[0, 2]], alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(bench.storage.pages[:-1], expected[:-1], atol=1e-5, rtol=0)
    assert bench.slots.loops[rows].tolist() == [1, 2]
    assert bool(bench.slots.hidden[trash].isfinite().all())
