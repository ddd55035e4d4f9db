"""No stage and no captured tick waits for a value that the device has computed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from protocol.config import ModelSettings
from protocol.exit_rule import survival_bound
from protocol.identity import RequestKey
from protocol.plan import (
    SLOT_TOKEN,
    CodaBatch,
    ExecutionPlan,
    Grant,
    PrefillBatch,
    PreludeBatch,
    RecurrentBatch,
)
from protocol.resident import ResidentBatch, ResidentTerms
from protocol.result import PlanResult, ResidentResult
from tests.plans import admission, prefill
from tests.readback_guard import OperationCounter, ReadbackError, no_readback
from worker.attention.choice import choose_attention
from worker.kv_storage import KVStorage
from worker.model_runner import ModelRunner
from worker.models.registry import load_model, resolve_model
from worker.padded_boundary import GREEDY, VARIANTS, TickVariant, padded_boundary
from worker.readback import ReadbackPool
from worker.slot_table import SlotTable
from worker.stages import Device, loop_seats
from worker.tick_lines import TickLines
from worker.worker import open_tick_graphs, with_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from protocol.plan import Admission, Step

BLOCK_SIZE, WIDTH, SLOTS, LOOPS, LONGEST = 4, 4, 3, 4, 16
KEYS = tuple(RequestKey(name, number + 1) for number, name in enumerate("abc"))
PROMPT = (1648, 1424, 261, 658, 14)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


class World:
    """A runner on one device, plan by plan. Owner: one test, which alone uses it."""

    def __init__(self, name: str, planes: int = LOOPS, ticks: int = 0) -> None:
        device = torch.device(name)
        model = load_model(resolve_model(ModelSettings()), torch.float32, device, "ouro-tiny")
        blocks = SLOTS * planes * WIDTH
        shape = (model.num_layers, model.kv_heads, BLOCK_SIZE, model.head_dim, torch.float32)
        slots = SlotTable(
            num_slots=SLOTS,
            hidden_size=model.hidden_size,
            planes=planes,
            max_loops=LOOPS,
            max_positions=LONGEST,
            block_size=BLOCK_SIZE,
            scratch_block=blocks,
            vocab_size=model.profile.vocab_size,
            dtype=torch.float32,
            device=device,
        )
        attention = choose_attention("auto", model, SLOTS, device)
        eager = Device(model, slots, KVStorage(blocks, *shape, device), attention, device)
        self.on = with_graphs(eager, SLOTS, 64)
        self.planes = planes
        self.runner = ModelRunner(self.on, tick_graphs=open_tick_graphs(self.on, SLOTS, ticks))
        self.pool = ReadbackPool(2, 64, device, 1 + ticks, 4)
        self.seq = 0

    def admit(self, row: int) -> Admission:
        """A greedy request; one that draws and asks for all there is; one of penalties."""
        first = row * self.planes * WIDTH
        planes = (range(first + p * WIDTH, first + (p + 1) * WIDTH) for p in range(self.planes))
        plain = admission(KEYS[row], PROMPT, tuple(map(tuple, planes)), temperature=0.8 * (row > 0))
        if row == 1:
            wish = replace(plain, top_p=0.9, top_k=20, logprobs=3)
            return replace(wish, logit_bias=((5, 1.5),))
        return (
            replace(plain, repetition_penalty=1.5, min_tokens=2, banned_ids=(2,)) if row else plain
        )

    def run(
        self, *steps: Step, admits: Sequence[Admission] = (), guarded: bool = True
    ) -> PlanResult:
        """One plan that may not wait for the device."""
        lease = self.pool.lease()
        self.seq += 1
        plan = ExecutionPlan(1, self.seq, admits=tuple(admits), steps=steps)
        if guarded:
            with forbidden(self.on.device):
                outcome = self.runner.execute(plan, lease)
        else:
            outcome = self.runner.execute(plan, lease)
        result = outcome.read()
        self.pool.give_back(lease)
        assert result.failed == ()
        return result


@contextmanager
def forbidden(device: torch.device) -> Iterator[None]:
    """No readback; on CUDA no other wait that torch knows of, either."""
    if device.type == "cpu":
        with no_readback():
            yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with no_readback():
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def staged(world: World, rows: int, guarded: bool = True) -> list[PlanResult]:
    """Prompts in two chunks, then two tokens of each request, at depths of their own."""
    keys, all_of = KEYS[:rows], (1,) * rows
    course: list[tuple[Step, ...]] = [
        (PrefillBatch(keys, (0,) * rows, (3,) * rows),),
        (PrefillBatch(keys, (3,) * rows, (2,) * rows),),
        (
            CodaBatch(keys, (4,) * rows, (LOOPS,) * rows, (0,) * rows),
            PreludeBatch(keys, (5,) * rows, (SLOT_TOKEN, 7, SLOT_TOKEN)[:rows]),
            RecurrentBatch(keys, (5,) * rows, (0,) * rows),
        ),
        (RecurrentBatch(keys[:1], (5,), (1,)),),
        (RecurrentBatch(keys, (5,) * rows, (2, 1, 1)[:rows]),),
        (CodaBatch(keys, (5,) * rows, (3, 2, 2)[:rows], all_of),),
    ]
    admits = [world.admit(row) for row in range(rows)]
    first = world.run(*course[0], admits=admits, guarded=guarded)
    return [first, *(world.run(*steps, guarded=guarded) for steps in course[1:])]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("planes", [LOOPS, 1])
@pytest.mark.parametrize("name", DEVICES)
def test_no_stage_reads_a_value_back(name: str, planes: int) -> None:
    plain = World(name, planes)
    expected = staged(plain, SLOTS, guarded=False)  # compiles what a device compiles at first
    guarded = staged(World(name, planes), SLOTS)
    assert [plan.steps for plan in guarded] == [plan.steps for plan in expected]
    assert len(guarded[-1].steps[0].keys) == SLOTS


def captured_boundary(name: str) -> Callable[[Device, TickLines, TickVariant], Tensor]:
    """What is captured where that can be done, and else what it equals."""
    if name == "cpu":
        return padded_boundary
    from worker.fused_boundary import fused_boundary

    return fused_boundary


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("name", DEVICES)
def test_no_captured_tick_reads_a_value_back(name: str, variant: TickVariant) -> None:
    world = World(name)
    on, trash = world.on, world.on.slots.trash
    terms = ResidentTerms(1, LOOPS, survival_bound(0.5), max_tokens=6)
    for row, key in enumerate(KEYS):
        temperature = 0.8 * (variant is not GREEDY)
        plain = admission(key, PROMPT, world.admit(row).tables, temperature)
        world.run(prefill(key, 0, 5), admits=(replace(plain, resident=terms),), guarded=False)
    seats = torch.full((SLOTS + 2,), trash, device=on.device)
    lines = TickLines.of(len(seats), 4, seats, trash)
    half_b = partial(captured_boundary(name), on, lines, variant)
    with torch.inference_mode():
        # Compiles what a device compiles at first, over padding alone.
        loop_seats(on, lines.seats, WIDTH)
        half_b()
        with forbidden(on.device):
            lines.begin([on.slots.slot(key).index for key in KEYS], trash)
            half_b()
            for _ in range(4):
                loop_seats(on, lines.seats, WIDTH)
                half_b()
    assert lines.header[0].tolist() == [0, SLOTS, 0]
    assert min(lines.tokens[0, :SLOTS].tolist()) >= 0
    assert lines.tokens[0, SLOTS:].tolist() == [-1, -1]
    assert lines.header[1:, 0].tolist()[0] == SLOTS


def enqueue_two(name: str, random: bool) -> list[PlanResult]:
    """Two plans of ticks, the second with more blocks, before either is read."""
    world = World(name, ticks=2)
    terms = ResidentTerms(1, LOOPS, survival_bound(0.5), max_tokens=6)
    tables = [world.admit(row).tables for row in range(SLOTS)]
    for key, table in zip(KEYS, tables, strict=True):
        few = tuple(plane[:2] for plane in table)
        item = admission(key, PROMPT, few, temperature=0.8 * random)
        world.run(prefill(key, 0, 5), admits=(replace(item, resident=terms),), guarded=False)
    grants = tuple(
        Grant(key, tuple(plane[2:] for plane in table))
        for key, table in zip(KEYS, tables, strict=True)
    )
    step = ResidentBatch(KEYS, 2)
    plans = (
        ExecutionPlan(1, world.seq + 1, steps=(step, step)),
        ExecutionPlan(1, world.seq + 2, grants=grants, steps=(step,)),
    )
    if name == "cuda":  # what is over may be read meanwhile, but nothing is waited for
        torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = [world.runner.execute(plan, world.pool.lease()) for plan in plans]
    finally:
        if name == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return [outcome.read() for outcome in outcomes]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("random", [False, True])
def test_plans_of_ticks_follow_each_other_without_a_wait(random: bool) -> None:
    found, expected = (enqueue_two(name, random) for name in ("cuda", "cpu"))
    assert [plan.steps for plan in found] == [plan.steps for plan in expected]
    ticked = [step for plan in found for step in plan.steps if isinstance(step, ResidentResult)]
    assert len(ticked) == 3
    assert all(any(step.tokens) for step in ticked)


MASK = torch.tensor([True, False, True])
READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to the device cpu": lambda x: x.to(device=torch.device("cpu")),
    "numpy": lambda x: x.numpy(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "index": lambda x: [5, 6, 7][x[0].long()],
    "nonzero": lambda x: x.nonzero(),
    "nonzero by torch": lambda x: torch.nonzero(x, as_tuple=True),
    "where": lambda x: torch.where(x > 1),
    "a mask": lambda x: x[MASK],
    "a mask assigned": lambda x: x.__setitem__(MASK, x[:2] + 1),
    "a number assigned by index": lambda x: x.__setitem__(torch.tensor([0]), 1.0),
    "masked_select": lambda x: x.masked_select(MASK),
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x + 1),
    "in": lambda x: 1.0 in x,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("inference", [False, True])
def test_the_guard_refuses(read: str, inference: bool) -> None:
    value = torch.tensor([1.0, 0.0, 2.0])
    with torch.inference_mode(inference), no_readback(), pytest.raises(ReadbackError):
        READS[read](value)


def test_the_guard_lets_pass_what_stays_on_the_device() -> None:
    value, rows = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([2, 0])
    with torch.inference_mode(), no_readback():
        value[rows] += torch.tensor([1.0, 2.0])
        picked = value[rows].to(torch.float64).where(rows > 0, 0.5).masked_fill(rows == 0, 9.0)
        held = torch.zeros(2, dtype=torch.float64).copy_(picked, non_blocking=True)
    assert held.tolist() == [3.0, 9.0]


def test_three_rows_take_as_many_operations_as_two() -> None:
    counts = []
    for rows in (2, SLOTS):
        world, keys = World("cpu"), KEYS[:rows]
        for key in keys:
            item = admission(key, PROMPT, world.admit(KEYS.index(key)).tables)
            world.run(prefill(key, 0, 5), admits=(item,))
        with OperationCounter() as counted:
            world.run(
                CodaBatch(keys, (4,) * rows, (LOOPS,) * rows, (0,) * rows),
                PreludeBatch(keys, (5,) * rows, (SLOT_TOKEN,) * rows),
                RecurrentBatch(keys, (5,) * rows, (0,) * rows),
                guarded=False,
            )
        counts.append(counted.operations)
    assert counts[0] == counts[1] > 0
