"""Ticks in graphs, and the kernels of a boundary, against what they are in torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import ModelSettings
from protocol.resident import ResidentBatch, ResidentTerms
from tests.ticks import PLANES, SLOTS, WISHES, Row, World, requests
from worker.kv_storage import KVStorage
from worker.models.registry import load_model, resolve_model
from worker.padded_boundary import VARIANTS, padded_boundary
from worker.prompt_passes import no_passes
from worker.readback import ReadbackPool
from worker.resident import ResidentTicks
from worker.resident_table import FINISHED, PARKED, PENDING, READY
from worker.slot_table import SlotTable
from worker.stages import Device
from worker.tick_lines import NONE, TickLines
from worker.worker import open_tick_graphs, with_graphs

if TYPE_CHECKING:
    from torch import Tensor

    from worker.models.base import LoopedModel
    from worker.padded_boundary import TickVariant

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TICKS = 6


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return load_model(resolve_model(ModelSettings()), torch.float32, CUDA, "ouro-tiny")


def test_graphs_leave_what_eager_ticks_leave(model: LoopedModel) -> None:
    plain = [Row(ResidentTerms(1, 4, -1.0, 4), 0.0, 4)]
    eager, captured = (World(model, plain, 0) for _ in range(2))
    on = with_graphs(captured.on, SLOTS, 64)
    graphs = open_tick_graphs(on, SLOTS, TICKS)
    assert graphs is not None
    lease = ReadbackPool(1, 64, CUDA).lease()

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(requests(({}, *WISHES)), st.integers(0, 5), st.integers(1, TICKS))
    def compare(rows: list[Row], started: int, ticks: int) -> None:
        results = []
        for world in (eager, captured):
            world.start(rows, started)
            batch = ResidentBatch(world.keys, ticks)
            with torch.inference_mode():
                if world is captured:
                    assert graphs.fits(batch)
                    pending = graphs.run(batch, world.live, lambda: False, lease, no_passes())
                else:
                    one_by_one = ResidentTicks(world.on, batch, world.live)
                    one_by_one.run(lambda: False)
                    pending = one_by_one.pending()
            results.append(pending.read([]))
        assert (results[1].tokens, results[1].exit_depths) == (
            results[0].tokens,
            results[0].exit_depths,
        )
        for name in ("loops", "states", "live", "exits", "finished"):
            assert getattr(results[1], name) == getattr(results[0], name), name
        for ours, theirs in zip(results[1].logprobs, results[0].logprobs, strict=True):
            assert (ours is None) is (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.top_ids == theirs.top_ids
                values = ([each.logprob, *each.top_logprobs] for each in (ours, theirs))
                torch.testing.assert_close(*map(torch.tensor, values), atol=1e-4, rtol=0)
        used = captured.tensors()
        for name, value in eager.tensors().items():
            torch.testing.assert_close(used[name], value, atol=1e-4, rtol=0, msg=name)

    compare()


class RandomSlots:
    """Slots in any state, and a loop's hidden states in them. Owner: one test."""

    def __init__(self, model: LoopedModel, slots: int, seed: int) -> None:
        pick = torch.Generator().manual_seed(seed)
        width, block_size, longest = 3, 4, 12
        blocks = slots * PLANES * width
        shape = (model.num_layers, model.kv_heads, block_size, model.head_dim, torch.float32)
        storage = KVStorage(blocks, *shape, CUDA)
        table = SlotTable(
            num_slots=slots,
            hidden_size=model.hidden_size,
            planes=PLANES,
            max_loops=PLANES,
            max_positions=longest,
            block_size=block_size,
            scratch_block=blocks,
            vocab_size=model.profile.vocab_size,
            dtype=torch.float32,
            device=CUDA,
        )
        self.on = Device(model, table, storage, None, CUDA)  # type: ignore[arg-type]
        self.slots = table
        self.storage = storage

        def whole(low: int, high: int, *more: int) -> Tensor:
            return torch.randint(low, high, (slots, *more), generator=pick)

        def share(*more: int) -> Tensor:
            return torch.rand(slots, *more, generator=pick)

        def put(column: Tensor, values: Tensor) -> None:
            column[:slots] = values.to(column.dtype).to(CUDA)

        vocabulary, resident = model.profile.vocab_size, table.resident
        state = whole(0, 5)
        put(resident.state, state)
        put(table.loops, torch.where(state == PARKED, 0, whole(1, PLANES + 1)))
        put(table.position, whole(0, longest - 1))
        put(table.tables, torch.randperm(blocks, generator=pick).view(slots, PLANES, width))
        put(table.survival, share())
        put(table.token, whole(0, vocabulary))
        hidden = torch.randn(slots, model.hidden_size, generator=pick)
        hidden[share() < 0.25] = torch.nan
        put(table.hidden, hidden)
        put(resident.outputs, whole(0, 5))
        put(resident.max_tokens, whole(2, 9))
        put(resident.granted, whole(1, longest))
        put(resident.min_tokens, whole(0, 4))
        put(resident.min_loops, whole(1, 3))
        put(resident.max_loops, whole(2, PLANES + 1))
        put(resident.bound, share() * 1.2 - 0.1)
        put(resident.forced, whole(0, PLANES + 1, longest) * (share()[:, None] < 0.4))
        put(resident.ending, whole(-1, vocabulary, 16))
        put(table.temperature, share() * (share() < 0.7))
        put(table.top_p, torch.where(share() < 0.5, 1.0, share()))
        put(table.top_k, torch.where(share() < 0.5, -1, whole(1, 100)))
        put(table.rng_words, whole(0, 2**32, 3))
        put(table.bias, (share(vocabulary) - 0.5) * (share()[:, None] < 0.5))
        put(table.marks, whole(0, 4, vocabulary) * (share()[:, None] < 0.5))
        put(table.counts, whole(0, 3, vocabulary) * (share()[:, None] < 0.5))
        some = torch.tensor([1.3, 0.5, 0.25]).repeat(slots, 1)
        neutral = torch.tensor([1.0, 0.0, 0.0]).repeat(slots, 1)
        put(table.penalties, torch.where(share()[:, None] < 0.5, some, neutral))
        storage.pages[:] = torch.randn(storage.pages.shape, generator=pick).to(CUDA)

    def tensors(self) -> dict[str, Tensor]:
        """Every column of the slots, but for the trash slot; and the pages."""
        found = {
            f"{type(owner).__name__} {name}": value[: self.slots.trash]
            for owner in (self.slots, self.slots.resident)
            for name, value in vars(owner).items()
            if isinstance(value, torch.Tensor)
        }
        return found | {"pages": self.storage.pages[:-1]}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize(
    ("slots", "bucket"), [(1, 1), (3, 4), (8, 8), (40, 24), (64, 64), (256, 256)]
)
@pytest.mark.parametrize("leaving", ["some", "all", "none"])
def test_the_kernels_leave_every_bit_as_torch_does(
    model: LoopedModel, variant: TickVariant, slots: int, bucket: int, leaving: str
) -> None:
    from worker.fused_boundary import fused_boundary

    runs = []
    for run in (padded_boundary, fused_boundary):
        world = RandomSlots(model, slots, seed=slots)
        if leaving == "all":
            world.slots.resident.state[:slots] = PENDING
        if leaving == "none":
            world.slots.resident.state[:slots] = PARKED
        trash = world.slots.trash
        pick = torch.Generator().manual_seed(bucket)
        rows = torch.randperm(slots, generator=pick)[: max(bucket - 1, 1)].tolist()
        lines = TickLines.of(bucket, 4, torch.full((bucket,), trash, device=CUDA), trash)
        lines.begin(rows, trash)
        lines.line.fill_(2)
        with torch.inference_mode():
            run(world.on, lines, variant)
        runs.append((world.tensors(), lines))
    (expected, theirs), (found, ours) = runs
    assert len(expected) > 25
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=0, rtol=0, equal_nan=True, msg=f"{name} differs"
        )
    for name in ("rows", "seats", "tokens", "exit_depths", "header", "failed", "line"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    if variant.tells:
        sampled = theirs.tokens[2] != NONE
        for name in ("sampled", "top_ids", "top"):
            mine, exact = (getattr(each, name)[2][sampled] for each in (ours, theirs))
            assert torch.equal(mine, exact), name
    left = int(theirs.header[2, 1])
    assert leaving != "none" or left == 0
    assert leaving != "all" or left == len(rows)
    if leaving == "some" and slots > 20:
        states = set(expected["ResidentTable state"].tolist())
        assert {READY, PARKED, FINISHED} <= states
        assert bool(theirs.failed.any())
        assert 0 < left < len(rows)


def test_a_capture_never_writes_behind_the_last_line(model: LoopedModel) -> None:
    from worker.fused_boundary import fused_boundary

    world = RandomSlots(model, 4, seed=1)
    lines = TickLines.of(4, 1, torch.full((4,), 4, device=CUDA), 4)
    lines.begin(range(4), 4)
    with torch.inference_mode():
        run = partial(fused_boundary, world.on, lines, VARIANTS[0])
        assert [int(run()) for _ in range(5)] == [0, 1, 0, 1, 0]
