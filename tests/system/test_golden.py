"""The main path against the published reference outputs of the shipped checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cluster.llm import LLM
from protocol.config import Configuration, ModelSettings, WorkerSettings
from protocol.sampling import SamplingParams
from worker.models.registry import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    configuration = Configuration(worker=WorkerSettings(device="cpu", num_threads=1))
    with LLM("ouro-tiny", configuration=configuration) as opened:
        yield opened


def golden(name: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(
        (resolve_model(ModelSettings()) / name).read_text(encoding="utf-8")
    )["items"]
    return items


def test_fixed_depth_gives_the_same_32_greedy_tokens(llm: LLM) -> None:
    items = golden("golden.json")
    params = SamplingParams(max_tokens=32, ignore_eos=True, exit_threshold=1.0)
    found = llm.generate([item["ids"] for item in items], params)
    assert len(items) == 8
    assert [list(done.token_ids) for done in found] == [item["greedy32_depth4"] for item in items]
    assert all(set(done.exit_depths) == {4} for done in found)


def test_the_tokenizer_gives_the_same_prompt_ids(llm: LLM) -> None:
    for item in golden("golden.json"):
        assert llm.tokenizer.encode(item["prompt"]) == item["ids"]


def test_adaptive_exits_give_the_same_tokens_and_depths(llm: LLM) -> None:
    prompts, params, runs = [], [], []
    for item in golden("golden_last_exited.json"):
        for run in item["runs"]:
            prompts.append(item["ids"])
            runs.append(run)
            params.append(
                SamplingParams(
                    max_tokens=len(run["ids"]),
                    ignore_eos=True,
                    exit_threshold=run["threshold"],
                    min_loops=run["min_loops"],
                    max_loops=run["max_loops"],
                )
            )
    assert len(runs) == 24
    found = llm.generate(prompts, params)
    assert [list(done.token_ids) for done in found] == [run["ids"] for run in runs]
    assert [list(done.exit_depths) for done in found] == [run["depths"] for run in runs]
