"""The shipped model against outputs of an independent dense implementation, float32 on CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.model_driver import ModelDriver
from worker.models.registry import EMBEDDED_DIRECTORY, load_model

ITEMS: list[dict[str, Any]] = json.loads((EMBEDDED_DIRECTORY / "golden.json").read_text())["items"]
PLANES = 4


@pytest.fixture(scope="module")
def driver() -> ModelDriver:
    model = load_model(EMBEDDED_DIRECTORY, torch.float32, torch.device("cpu"), "ouro-tiny")
    return ModelDriver(model, sequences=len(ITEMS), max_tokens=96)


@pytest.fixture(scope="module")
def prompt_states(driver: ModelDriver) -> list[list[torch.Tensor]]:
    """Hidden states [tokens, H] of each prompt after each loop, all prompts in one batch."""
    chunks = [(index, 0, item["ids"]) for index, item in enumerate(ITEMS)]
    states = driver.prefill(chunks)
    sizes = [len(item["ids"]) for item in ITEMS]
    by_depth = [torch.split(state, sizes) for state in states]
    return [[by_depth[depth][index] for depth in range(PLANES)] for index in range(len(ITEMS))]


def test_there_are_eight_prompts_of_different_length() -> None:
    assert len(ITEMS) == 8
    assert len({len(item["ids"]) for item in ITEMS}) > 1


@pytest.mark.parametrize("index", range(8))
def test_hazards_match_at_every_depth_and_position(
    index: int, driver: ModelDriver, prompt_states: list[list[torch.Tensor]]
) -> None:
    hazards = torch.stack([driver.model.hazards(state) for state in prompt_states[index]])
    assert hazards.dtype == torch.float32
    last = torch.tensor(ITEMS[index]["hazards"])
    everywhere = torch.tensor(ITEMS[index]["hazards_all_positions"])
    torch.testing.assert_close(hazards[:, -1], last, atol=1e-4, rtol=0)
    torch.testing.assert_close(hazards, everywhere, atol=1e-4, rtol=0)


@pytest.mark.parametrize("depth", range(PLANES))
@pytest.mark.parametrize("index", range(8))
def test_top_logits_match_at_every_depth(
    index: int, depth: int, driver: ModelDriver, prompt_states: list[list[torch.Tensor]]
) -> None:
    expected = ITEMS[index][f"top5_depth{depth + 1}"]
    top = driver.model.logits(prompt_states[index][depth][-1:])[0].topk(5)
    assert top.indices.tolist() == expected["ids"]
    torch.testing.assert_close(top.values, torch.tensor(expected["logits"]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("index", range(8))
def test_the_whole_logit_row_matches(
    index: int, driver: ModelDriver, prompt_states: list[list[torch.Tensor]]
) -> None:
    logits = driver.model.logits(prompt_states[index][-1][-1:])[0]
    assert logits.mean().item() == pytest.approx(ITEMS[index]["logits_depth4_mean"], abs=1e-3)
    assert logits.norm().item() == pytest.approx(ITEMS[index]["logits_depth4_l2"], abs=1e-2)


def test_greedy_continuations_match_for_all_prompts(driver: ModelDriver) -> None:
    tokens, margins = driver.greedy([item["ids"] for item in ITEMS], count=32)
    assert tokens.tolist() == [item["greedy32_depth4"] for item in ITEMS]
    expected = torch.tensor([item["greedy32_margin"] for item in ITEMS])
    torch.testing.assert_close(margins, expected, atol=1e-3, rtol=0)


def test_bfloat16_stays_near_float32(prompt_states: list[list[torch.Tensor]]) -> None:
    model = load_model(EMBEDDED_DIRECTORY, torch.bfloat16, torch.device("cpu"), "ouro-tiny")
    states = ModelDriver(model, max_tokens=96).prefill([(0, 0, ITEMS[0]["ids"])])
    assert {state.dtype for state in states} == {torch.bfloat16}
    assert model.logits(states[0]).dtype == torch.float32
    hazards = torch.stack([model.hazards(state)[-1] for state in states])
    torch.testing.assert_close(hazards, torch.tensor(ITEMS[0]["hazards"]), atol=0.05, rtol=0)
    for ours, exact in zip(states, prompt_states[0], strict=True):
        torch.testing.assert_close(ours.float(), exact, atol=0.1, rtol=0.1)
