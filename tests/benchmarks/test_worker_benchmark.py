"""The worker's benchmark runs without CUDA too, and its counts of work are right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.device_times import milliseconds
from benchmarks.loop_batch import OURO_1_4B, LoopBatch, random_model
from benchmarks.worker import main
from tests.checkpoints import config_values
from worker.models.config import OuroConfig

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def test_the_report_holds_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "worker.json"
    main(["--device", "cpu", "--json", str(file)])
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["benchmark"] == "worker"
    values = {result["name"]: result["value"] for result in report["results"]}
    for rows in (1, 4):
        for part in ("eager", "best", "floor", "attention", "products"):
            assert values[f"loop, {rows} rows: {part}"] > 0
    assert values["prefill, 64 tokens: eager"] > 0
    assert values["ceiling: read-only bandwidth"] > 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in values)


def test_a_part_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--device", "cpu", "--part", "prefill"])
    shown = capsys.readouterr().out
    assert "prefill, 64 tokens: eager" in shown
    assert not any(other in shown for other in ("ceiling", "start", "loop"))


@pytest.mark.parametrize("read_planes", [False, True])
def test_a_batch_counts_its_work_and_can_be_run_again(read_planes: bool) -> None:
    config = OuroConfig.model_validate(config_values())
    with torch.inference_mode():
        model = random_model(config, torch.float32, CPU)
        batch = LoopBatch(config, model, 4, 20, 8, read_planes=read_planes)
        first = batch.loop().clone()
        assert batch.slots.loops[:4].tolist() == [1, 2, 3, 1]
        batch.rewind()
        batch.slots.survival.fill_(1.0)
        assert torch.equal(batch.loop(), first)
    layer = 24 * 64 + 32 * 24 + 3 * 40 * 24 + 4 * 24
    assert batch.loop_parameters == 2 * layer
    assert batch.num_bytes == 4 * 2 * layer + 4 * 20 * (2 * 2 * 2 * 8 * 4)
    assert batch.flops == 4 * (2 * 2 * layer + 4 * 2 * 4 * 8 * 20)
    blocks = 4 * 3 * (1 if read_planes else 3)
    assert batch.storage.num_blocks == blocks


def test_the_shapes_are_those_of_the_published_model() -> None:
    assert (OURO_1_4B.num_hidden_layers, OURO_1_4B.hidden_size) == (24, 2048)
    assert OURO_1_4B.total_ut_steps == 4


def test_what_happens_between_rounds_is_not_timed() -> None:
    order: list[str] = []
    time = milliseconds(lambda: order.append("work"), CPU, 3, lambda: order.append("between"))
    assert order == ["work", "between"] * 5
    assert time >= 0.0
