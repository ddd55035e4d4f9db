"""The quality benchmark scores a text as serving would run it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from benchmarks.quality import THRESHOLDS, main
from benchmarks.teacher_forcing import score
from benchmarks.workload import held_out
from cluster.llm import LLM
from protocol.config import WorkerSettings
from protocol.sampling import SamplingParams
from worker.worker import load_settings

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def test_the_report_holds_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    main(["--json", str(file), "--device", "cpu", "--quick"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    assert len(values) == len(results) == len(THRESHOLDS) * (3 + 5)
    assert values["threshold 1: mean depth"] == 4.0
    assert values["threshold 1: above full depth"] == 0.0
    depths = [values[f"threshold {threshold:g}: mean depth"] for threshold in THRESHOLDS]
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] < 2.5
    for threshold in THRESHOLDS:
        name = f"threshold {threshold:g}"
        sources = [values[f"{name}: {source}"] for source in held_out()]
        assert abs(sum(sources) / 5 - values[f"{name}: loss"]) < 1e-9
        above = values[f"{name}: loss"] - values["threshold 1: loss"]
        assert abs(above - values[f"{name}: above full depth"]) < 1e-9


def test_a_text_is_scored_as_it_was_decoded() -> None:
    prompt = list(held_out()["stories"][:24])
    params = SamplingParams(max_tokens=40, exit_threshold=0.8, ignore_eos=True)
    with LLM() as llm:
        (answer,) = llm.generate(prompt, params)
    model = load_settings(WorkerSettings(), CPU)
    tokens = torch.tensor([*prompt, *answer.token_ids])
    scored = score(model, tokens, 0.8, prompt=len(prompt))
    # Output i leaves at the depth of the token before it.
    outputs = slice(len(prompt) - 1, -1)
    assert tuple(scored.depths[outputs].tolist()) == tuple(answer.exit_depths)
    assert len(set(answer.exit_depths)) > 2
    assert scored.logits[outputs].argmax(-1).tolist() == list(answer.token_ids)
    # A token that left early keeps the KV of its last loop, which changes what follows.
    full = score(model, tokens, 1.0)
    assert full.depths.tolist() == [4] * len(tokens)
    assert not torch.allclose(full.logits[-1], scored.logits[-1], atol=1e-3)


def test_losses_are_those_of_the_next_tokens() -> None:
    model = load_settings(WorkerSettings(), CPU)
    tokens = torch.tensor(held_out()["chat"][:6])
    scored = score(model, tokens, 0.9)
    chances = scored.logits.softmax(-1)
    expected = [-chances[place, tokens[place + 1]].log() for place in range(5)]
    assert torch.allclose(scored.losses(tokens), torch.stack(expected), atol=1e-5)
