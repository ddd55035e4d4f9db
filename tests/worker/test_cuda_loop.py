"""The loop on CUDA: golden tokens in float32, and graphs that equal eager runs bit for bit."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.loop_batch import LoopBatch, random_model, random_weights
from protocol.identity import RequestKey
from protocol.plan import PrefillBatch
from tests.model_driver import ModelDriver
from worker.attention.choice import choose_attention
from worker.graphs import Capture, LoopGraphs
from worker.models.config import OuroConfig
from worker.models.ouro import OuroModel
from worker.models.registry import EMBEDDED_DIRECTORY, load_model
from worker.models.torch_loop import TorchLoopKernels
from worker.stages import run_prefill
from worker.worker import with_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from protocol.config import AttentionName

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ITEMS: list[dict[str, Any]] = json.loads((EMBEDDED_DIRECTORY / "golden.json").read_text())["items"]
SHALLOW = OuroConfig(
    model_type="ouro",
    vocab_size=512,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    max_position_embeddings=4096,
    total_ut_steps=4,
    rope_theta=1_000_000.0,
)
"""Ouro-1.4B with three layers."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model() -> OuroModel:
    with torch.inference_mode():
        return random_model(SHALLOW, torch.bfloat16, CUDA)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_greedy_tokens_in_float32_are_the_golden_ones(name: AttentionName) -> None:
    tiny = load_model(EMBEDDED_DIRECTORY, torch.float32, CUDA, "ouro-tiny")
    backend = choose_attention(name, tiny, len(ITEMS), CUDA)
    driver = ModelDriver(tiny, sequences=len(ITEMS), max_tokens=96, backend=backend)
    tokens, margins = driver.greedy([item["ids"] for item in ITEMS], count=32)
    assert tokens.tolist() == [item["greedy32_depth4"] for item in ITEMS]
    expected = torch.tensor([item["greedy32_margin"] for item in ITEMS])
    torch.testing.assert_close(margins.cpu(), expected, atol=1e-3, rtol=0)


def test_states_in_float32_equal_those_of_the_cpu() -> None:
    chunks = [(index, 0, item["ids"]) for index, item in enumerate(ITEMS)]
    states = []
    for device in (torch.device("cpu"), CUDA):
        tiny = load_model(EMBEDDED_DIRECTORY, torch.float32, device, "ouro-tiny")
        backend = choose_attention("auto", tiny, len(ITEMS), device)
        driver = ModelDriver(tiny, sequences=len(ITEMS), max_tokens=96, backend=backend)
        states.append([state.cpu() for state in driver.prefill(chunks)])
    for ours, exact in zip(states[1], states[0], strict=True):
        torch.testing.assert_close(ours, exact, atol=5e-5, rtol=1e-4)


def test_bfloat16_stays_as_near_to_torch_as_its_rounding(model: OuroModel) -> None:
    plain = OuroModel(
        SHALLOW, random_weights(SHALLOW, torch.bfloat16, CUDA), "plain", "", TorchLoopKernels()
    )
    prompt = torch.randint(512, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    results = []
    for each in (model, plain):
        backend = choose_attention("triton" if each is model else "torch", each, 4, CUDA)
        driver = ModelDriver(each, max_tokens=256, backend=backend)
        hidden = driver.prefill([(0, 0, prompt)])[-1][-1:]
        results.append(driver.decode(hidden, [0], [200], [0])[0].float())
    difference = (results[0] - results[1]).norm() / results[1].norm()
    assert float(difference) < 0.02


def state(batch: LoopBatch) -> list[Tensor]:
    slots = batch.slots
    return [
        column.clone()
        for column in (slots.hidden, slots.survival, slots.loops, batch.storage.pages)
    ]


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 96, 128, 256])
def test_a_graph_equals_an_eager_loop_bit_for_bit(model: OuroModel, rows: int) -> None:
    batch = LoopBatch(SHALLOW, model, rows, 200, 16)
    graphs = LoopGraphs(Capture(CUDA), batch.loop, [rows], batch.slots.trash, CUDA)
    batch.rewind()
    batch.slots.survival.fill_(1.0)
    pages = batch.storage.pages.clone()
    runs = []
    for loop in (batch.loop, partial(graphs.replay, range(rows)), batch.loop):
        batch.rewind()
        batch.slots.survival.fill_(1.0)
        batch.storage.pages.copy_(pages)
        survivals = loop().clone()
        runs.append([survivals, *state(batch)])
        assert float(survivals.min()) > 0.0
        assert float(survivals.max()) < 1.0
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert not torch.equal(pages, runs[0][-1]), "nothing was written"


def test_a_padded_graph_touches_the_pages_of_its_rows_alone(model: OuroModel) -> None:
    batch = LoopBatch(SHALLOW, model, 8, 100, 16)
    graphs = LoopGraphs(Capture(CUDA), batch.loop, [8], batch.slots.trash, CUDA)
    batch.rewind()
    before = batch.storage.pages.clone()
    rest = batch.slots.hidden[[0, 1, 3, 4, 5, 6, 8]].clone()
    graphs.replay([2, 7])
    changed = (batch.storage.pages != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    depths = batch.slots.loops[[2, 7]] - 1
    own = batch.slots.tables[[2, 7], depths.tolist(), 99 // 16].tolist()
    assert sorted(changed) == sorted(own)
    assert torch.equal(batch.slots.hidden[[0, 1, 3, 4, 5, 6, 8]], rest)


@pytest.mark.parametrize("tokens", [64, 100, 256])
def test_a_prefill_graph_equals_an_eager_prefill(model: OuroModel, tokens: int) -> None:
    batch = LoopBatch(SHALLOW, model, 3, 300, 16)
    counts = (tokens - 30, 29, 1)
    starts = (3, 0, 17)
    prompt = PrefillBatch(tuple(RequestKey(str(i), i + 1) for i in range(3)), starts, counts)
    batch.slots.prompt.random_(512)
    graphed = with_graphs(batch.on, 1, 256)
    pages = batch.storage.pages.clone()
    runs = []
    for on in (batch.on, graphed):
        batch.storage.pages.copy_(pages)
        run_prefill(on, prompt, [0, 1, 2], [True, True, False])
        runs.append([batch.slots.hidden.clone(), batch.storage.pages[:-1].clone()])
    if tokens in (64, 256):  # no padding: the same shapes
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for ours, exact in zip(*runs, strict=True):
        torch.testing.assert_close(ours.float(), exact.float(), atol=0.1, rtol=0.1)
    assert batch.slots.position[:3].tolist() == [tokens - 28, 28, 299]
