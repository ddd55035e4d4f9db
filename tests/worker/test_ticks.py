"""Ticks of fixed size leave every tensor as ticks of exactly the rows that take part do."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import ModelSettings
from protocol.exit_rule import survival_bound
from protocol.identity import RequestKey
from protocol.plan import ExecutionPlan, PrefillBatch
from protocol.resident import ResidentBatch, ResidentTerms
from tests.plans import admission
from worker.attention.torch_backend import TorchAttention
from worker.kv_storage import KVStorage
from worker.model_runner import ModelRunner
from worker.models.registry import load_model, resolve_model
from worker.padded_boundary import FULL, padded_boundary, variant_of
from worker.readback import ReadbackPool
from worker.resident import ResidentTicks
from worker.slot_table import SlotTable
from worker.stages import Device, loop_seats
from worker.tick_lines import TickLines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from protocol.plan import Step
    from worker.models.base import LoopedModel

CPU = torch.device("cpu")
BLOCK_SIZE, WIDTH, SLOTS, PLANES, LONGEST = 4, 6, 5, 4, 24
PROMPTS = ((1648, 1424, 261, 658, 14), (900, 31, 7), (12, 3000, 55, 8), (2,), (77, 1, 5, 9, 9, 9))
WISHES: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.7},
    {"logprobs": 4},
    {"logit_bias": ((5, 3.0), (900, -4.0)), "logprobs": 0},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"presence_penalty": 1.5, "top_k": 40, "top_p": 0.9, "logprobs": 20},
    {"min_tokens": 3, "banned_ids": (1, 2, 261)},
)
"""What a row may ask for beyond its temperature."""


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return load_model(resolve_model(ModelSettings()), torch.float32, CPU, "ouro-tiny")


class World:
    """Some requests on one device, some ticks on. Owner: one test."""

    def __init__(self, model: LoopedModel, rows: Sequence[Row], started: int) -> None:
        blocks = SLOTS * PLANES * WIDTH
        shape = (model.num_layers, model.kv_heads, BLOCK_SIZE, model.head_dim, torch.float32)
        self.storage = KVStorage(blocks, *shape, CPU)
        self.slots = SlotTable(
            num_slots=SLOTS,
            hidden_size=model.hidden_size,
            planes=PLANES,
            max_loops=PLANES,
            max_positions=LONGEST,
            block_size=BLOCK_SIZE,
            scratch_block=blocks,
            vocab_size=model.profile.vocab_size,
            dtype=torch.float32,
            device=CPU,
        )
        self.on = Device(model, self.slots, self.storage, TorchAttention(), CPU)
        self.keys = tuple(RequestKey(f"r{index}", index + 1) for index in range(len(rows)))
        lease = ReadbackPool(1, 64, CPU).lease()
        runner = ModelRunner(self.on)
        admits = []
        for index, (key, row) in enumerate(zip(self.keys, rows, strict=True)):
            first = index * PLANES * WIDTH
            tables = tuple(
                tuple(range(first + p * WIDTH, first + p * WIDTH + row.blocks))
                for p in range(PLANES)
            )
            item = admission(key, PROMPTS[index], tables, row.temperature)
            admits.append(replace(item, resident=row.terms, **row.wish))
        counts = tuple(len(PROMPTS[index]) for index in range(len(rows)))
        prompts = PrefillBatch(self.keys, (0,) * len(rows), counts)
        steps: tuple[Step, ...] = (prompts,)
        if started:
            steps += (ResidentBatch(self.keys, started),)
        plan = ExecutionPlan(1, 1, admits=tuple(admits), steps=steps)
        assert runner.execute(plan, lease).read().failed == ()

    @property
    def rows(self) -> list[int]:
        return [self.slots.slot(key).index for key in self.keys]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a tick may change, but for the trash slot and the scratch block."""
        names = ("hidden", "token", "survival", "position", "loops")
        found = {name: getattr(self.slots, name)[:-1] for name in names}
        found |= {name: getattr(self.slots.resident, name)[:-1] for name in ("state", "outputs")}
        return found | {"pages": self.storage.pages[:-1], "counts": self.slots.counts[:-1]}


class Row:
    """What one request asks for, and the blocks a plane that it has."""

    def __init__(
        self,
        terms: ResidentTerms,
        temperature: float,
        blocks: int,
        wish: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.terms = terms
        self.temperature = temperature
        self.blocks = blocks
        self.wish = wish


@st.composite
def requests(draw: st.DrawFn, wishes: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Up to five requests with exits early and late, ends near and far, blocks few and enough."""
    rows = []
    for index in range(draw(st.integers(1, len(PROMPTS)))):
        loops = sorted((draw(st.integers(1, 4)), draw(st.integers(1, 4))))
        max_tokens = draw(st.integers(1, 10))
        forced = draw(st.just(()) | st.tuples(*[st.integers(1, 4)] * max_tokens))
        bound = survival_bound(draw(st.sampled_from((0.0, 0.3, 0.5, 0.9, 1.0))))
        terms = ResidentTerms(loops[0], loops[1], bound, max_tokens, (), forced)
        least = -(-len(PROMPTS[index]) // BLOCK_SIZE)
        blocks = draw(st.integers(least, 4))
        wish = draw(st.sampled_from(wishes))
        rows.append(Row(terms, draw(st.sampled_from((0.0, 0.8))), blocks, wish))
    return rows


@pytest.mark.parametrize("wishes", [({},), ({}, *WISHES)], ids=["plain", "full"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 5), st.integers(1, 6), st.integers(0, 3))
def test_padding_changes_nothing(
    model: LoopedModel,
    wishes: tuple[dict[str, Any], ...],
    data: st.DataObject,
    started: int,
    ticks: int,
    padding: int,
) -> None:
    rows = data.draw(requests(wishes))
    eager, padded = (World(model, rows, started) for _ in range(2))
    batch = ResidentBatch(eager.keys, ticks)
    live = [eager.slots.slot(key) for key in eager.keys]
    kinds = [slot.sampling for slot in live]
    # What serves more than anybody asks for changes nothing, either.
    variant = data.draw(st.sampled_from((variant_of(kinds), FULL)))
    with torch.inference_mode():
        picked = ResidentTicks(eager.on, batch, live)
        picked.run(lambda: False)
        found = picked.read([])
        seats = torch.full((len(rows) + padding,), SLOTS)
        lines = TickLines.of(len(seats), ticks, seats, SLOTS)
        lines.begin(padded.rows, SLOTS)
        padded_boundary(padded.on, lines, variant)
        for _ in range(ticks):
            loop_seats(padded.on, lines.seats, WIDTH)
            padded_boundary(padded.on, lines, variant)
    for name, value in eager.tensors().items():
        torch.testing.assert_close(padded.tensors()[name], value, atol=1e-4, rtol=0, msg=name)
    tokens = lines.tokens.T.tolist()[: len(rows)]
    depths = lines.exit_depths.T.tolist()[: len(rows)]
    assert tuple(tuple(t for t in row if t >= 0) for row in tokens) == found.tokens
    assert tuple(tuple(d for d in row if d >= 0) for row in depths) == found.exit_depths
    headers = [tuple(line) for line in lines.header.tolist()[1:] if line[0]]
    assert headers == list(zip(found.live, found.exits, found.finished, strict=True))
    told = lines.leave_logprobs(lines.tokens, [kind.logprobs for kind in kinds])()
    assert len(told) == len(found.logprobs)
    for ours, theirs in zip(told, found.logprobs, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.top_ids == theirs.top_ids
            values = ([each.logprob, *each.top_logprobs] for each in (ours, theirs))
            torch.testing.assert_close(*map(torch.tensor, values), atol=1e-4, rtol=0)
    trash = padded.slots.trash
    assert not padded.slots.counts[trash].any()
    assert int(padded.slots.position[trash]) == int(padded.slots.resident.outputs[trash]) == 0
    assert bool(padded.slots.hidden[trash].isfinite().all())


@pytest.mark.parametrize("after", [1, 3])
def test_ticks_end_with_the_one_in_which_they_are_told_to(model: LoopedModel, after: int) -> None:
    world = World(model, [Row(ResidentTerms(1, 4, -1.0, 6), 0.0, 4)], 0)
    told = iter([False] * (after - 1) + [True])
    ticks = ResidentTicks(
        world.on, ResidentBatch(world.keys, 64), [world.slots.slot(world.keys[0])]
    )
    with torch.inference_mode():
        ticks.run(lambda: next(told))
        assert ticks.read([]).ticks == after


@pytest.mark.parametrize(
    ("wishes", "temperature", "name"),
    [
        (({}, {}), 0.0, "greedy"),
        (({"top_p": 0.5}, {}), 0.0, "greedy"),  # nobody draws
        (({}, {}), 0.8, "sampled"),
        *((({}, wish), 0.8, "full") for wish in WISHES),
        (({}, {"logprobs": 0}), 0.0, "full"),
    ],
)
def test_the_smallest_variant_that_serves_all_rows_is_taken(
    model: LoopedModel, wishes: Sequence[Mapping[str, Any]], temperature: float, name: str
) -> None:
    terms = ResidentTerms(1, 4, -1.0, 6)
    world = World(model, [Row(terms, temperature, 4, wish) for wish in wishes], 0)
    assert variant_of(world.slots.slot(key).sampling for key in world.keys).name == name
