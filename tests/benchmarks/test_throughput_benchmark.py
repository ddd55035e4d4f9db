"""The throughput benchmark runs on a CPU, and reports what it says it does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from benchmarks.loop_batch import OURO_1_4B
from benchmarks.throughput import main, write_checkpoint
from worker.models.registry import load_model

if TYPE_CHECKING:
    from pathlib import Path


def test_the_report_holds_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "throughput.json"
    main(["--json", str(file), "--device", "cpu", "--quick"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    assert len(values) == len(results) == 2 * 3 * 4
    assert values["1 at once, threshold 1.0: mean depth"] == 4.0
    assert values["4 at once, threshold 0.7: mean depth"] < 4.0
    output, prompts = (values[f"4 at once, threshold 0.9: {of}"] for of in ("output", "prompts"))
    assert abs(prompts / output - 48 / 8) < 1e-6
    assert all(result["value"] > 0 and result["goal"] is None for result in results)


def test_a_random_checkpoint_can_be_served(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 24, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    cpu = torch.device("cpu")
    write_checkpoint(OURO_1_4B.model_copy(update=small | heads), tmp_path, cpu)
    model = load_model(tmp_path, torch.float32, cpu, "random")
    assert (model.num_layers, model.hidden_size, model.profile.max_loops) == (1, 32, 4)
