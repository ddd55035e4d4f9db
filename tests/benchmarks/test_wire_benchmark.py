"""The wire benchmark measures plans and results in which every request decodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.wire import ROWS, WAYS, decoding, main
from protocol.codec import encode
from protocol.plan import CodaBatch, RecurrentBatch
from protocol.resident import ResidentBatch

ROOT = Path(__file__).parents[2]


def test_the_report_holds_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "wire.json"
    main(["--json", str(file), "--quick"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    assert len(values) == len(results) == len(WAYS) * len(ROWS) * 2 * 3
    assert min(values.values()) > 0
    for way in WAYS:
        for kind in ("plan", "result"):
            sizes = [values[f"{way}, {rows} rows: {kind} size"] for rows in ROWS]
            assert sizes == sorted(sizes)
            # A row takes fewer bytes among others, since what all share is written once.
            assert sizes[2] < 256 * sizes[0]


@pytest.mark.parametrize("way", WAYS)
def test_every_request_is_in_every_plan(way: str) -> None:
    pairs = decoding(32, WAYS[way], 6)
    assert len(pairs) == 6
    kinds = set()
    for plan, result in pairs:
        assert not plan.admits
        assert not result.failed
        assert len({key for step in plan.steps for key in step.keys}) == 32
        kinds |= {type(step) for step in plan.steps}
        assert (plan.epoch, plan.seq) == (result.epoch, result.seq)
    staged = {CodaBatch, RecurrentBatch}
    assert staged <= kinds if not WAYS[way] else kinds == {ResidentBatch}
    assert [encode(plan) for plan, _ in decoding(32, WAYS[way], 6)] == [
        encode(plan) for plan, _ in pairs
    ]


def test_it_needs_no_torch() -> None:
    code = "import sys, benchmarks.wire; print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == "set()"
