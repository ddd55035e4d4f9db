"""The benchmark of streams runs workers that have no ticks of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.streams import STREAMS, cases_of, main, open_worker
from protocol.config import ModelSettings

if TYPE_CHECKING:
    from pathlib import Path


def test_the_report_holds_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "streams.json"
    main(["--json", str(file), "--device", "cpu", "--quick"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    assert set(values) == {
        f"{size} at once: {column}"
        for size in (1, 8)
        for column in ("one stream", "three streams", "three / one")
    }
    assert min(values.values()) > 0


@pytest.mark.parametrize("streams", STREAMS)
def test_every_loop_is_planned(streams: int) -> None:
    asks = cases_of(torch.device("cpu"), quick=True)[1]
    with open_worker(asks, 1, 3 if streams == 3 else 1, ModelSettings(), "cpu") as worker:
        assert worker.profile().max_ticks == 0


def test_what_is_measured_on_cuda() -> None:
    cases = cases_of(torch.device("cuda"), quick=False)
    assert {size: len(asks) for size, asks in cases.items()} == {1: 2, 8: 16, 32: 64}
    assert all(ask.depths for asks in cases.values() for ask in asks)
