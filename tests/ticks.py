"""Small worlds of resident requests, whose ticks are run in several ways and compared."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from protocol.exit_rule import survival_bound
from protocol.identity import RequestKey
from protocol.plan import ExecutionPlan, PrefillBatch
from protocol.resident import ResidentBatch, ResidentTerms
from tests.plans import admission
from worker.attention.choice import choose_attention
from worker.kv_storage import KVStorage
from worker.model_runner import ModelRunner
from worker.readback import ReadbackPool
from worker.slot_table import SlotTable
from worker.stages import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from protocol.plan import Step
    from worker.models.base import LoopedModel
    from worker.slot_table import Slot

BLOCK_SIZE, WIDTH, SLOTS, PLANES, LONGEST = 4, 6, 5, 4, 24
PROMPTS = ((1648, 1424, 261, 658, 14), (900, 31, 7), (12, 3000, 55, 8), (2,), (77, 1, 5, 9, 9, 9))
WISHES: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.3},
    {"logprobs": 4},
    {"logit_bias": ((5, 9.0), (900, -4.0)), "logprobs": 0},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"presence_penalty": 1.5, "top_k": 40, "top_p": 0.9, "logprobs": 20},
    {"min_tokens": 3, "banned_ids": (1, 2, 261)},
)
"""What a row may ask for beyond its temperature."""


class World:
    """Some requests on the device of a model, some ticks on. Owner: one test."""

    def __init__(self, model: LoopedModel, rows: Sequence[Row], started: int) -> None:
        device = model.device
        blocks = SLOTS * PLANES * WIDTH
        shape = (model.num_layers, model.kv_heads, BLOCK_SIZE, model.head_dim, torch.float32)
        self.storage = KVStorage(blocks, *shape, device)
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
            device=device,
        )
        attention = choose_attention("auto", model, SLOTS, device)
        self.on = Device(model, self.slots, self.storage, attention, device)
        self.keys: tuple[RequestKey, ...] = ()
        self._generation = 0
        self.start(rows, started)

    def start(self, rows: Sequence[Row], started: int) -> None:
        """These requests in place of those before, their prompts and some ticks through."""
        self.slots.clear()
        self._generation += 1
        self.keys = tuple(RequestKey(f"r{row}", self._generation) for row in range(len(rows)))
        lease = ReadbackPool(1, 64, self.on.device).lease()
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
    def live(self) -> list[Slot]:
        """The host halves of the requests, in order."""
        return [self.slots.slot(key) for key in self.keys]

    @property
    def rows(self) -> list[int]:
        """Their slots."""
        return [slot.index for slot in self.live]

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
