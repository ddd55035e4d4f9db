"""The throughput benchmark runs on a CPU, and reports what it says it does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import hugging_face, throughput
from benchmarks.checkpoint import write_checkpoint
from benchmarks.closed_loop import ClosedLoop, rate_between
from benchmarks.comparison import Comparison, Variant
from benchmarks.decode import FLOORS, MIXED, floor_tick_ms
from benchmarks.loop_batch import OURO_1_4B
from benchmarks.model_clock import ModelClock
from benchmarks.static_batch import StaticBatches
from benchmarks.throughput import cases_of, main
from benchmarks.workload import Ask, held_out_asks, random_asks
from cluster.llm import LLM
from protocol.config import ModelSettings, WorkerSettings
from worker.kv_storage import KVStorage
from worker.local_executor import LocalExecutor
from worker.models.registry import EMBEDDED_DIRECTORY, load_model
from worker.worker import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CPU = torch.device("cpu")


def test_the_report_holds_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "is_available", lambda: False)
    file = tmp_path / "throughput.json"
    main(["--json", str(file), "--device", "cpu", "--quick"])
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    values = {result["name"]: result["value"] for result in results}
    # Ten figures of each way, one of the baseline, and a ratio to it for each way.
    assert len(values) == len(results) == 2 * (3 * 9 + 1 + 3)
    for size in (1, 4):
        full = f"{size} at once, threshold 1.0"
        assert values[f"{full}: mean depth"] == 4.0
        assert values[f"{full}: loops"] == pytest.approx(4 * values[f"{full}: output"])
        ratio = values[f"{full}: engine / static batches"]
        static = values[f"{size} at once, static batches: output"]
        assert ratio == pytest.approx(values[f"{full}: output"] / static)
        early = f"{size} at once, threshold 0.7"
        assert 1.0 <= values[f"{early}: mean depth"] < 4.0
        assert 0.0 < values[f"{early}: outside the model"] < 100.0
        assert values[f"{early}: moving KV"] == 0.0  # attention reads it where it lies
        assert values[f"{early}: a tick"] > 0.0
    assert all(result["goal"] is None for result in results)
    shown = capsys.readouterr()
    assert "4 at once, threshold 0.9" in shown.out
    assert "'.[baseline]'" in shown.err


def test_a_static_batch_gives_what_the_engine_does_at_full_depth() -> None:
    model = load_settings(WorkerSettings(model=ModelSettings()), CPU)
    asks = held_out_asks(5, (4, 20), (3, 9))
    found = StaticBatches(model).run(asks, 3)
    with LLM() as llm:
        prompts = [list(ask.prompt) for ask in asks]
        answers = llm.generate(prompts, [ask.params(1.0) for ask in asks])
    assert found == [list(answer.token_ids) for answer in answers]
    # [loops, layers, K and V, heads, head_dim] of float32, as long as the longest of each.
    length = max(len(ask.prompt) for ask in asks) + max(ask.outputs for ask in asks)
    assert StaticBatches(model).cache_bytes(asks) == 5 * length * 4 * 4 * 2 * 4 * 64 * 4


def test_a_llama_of_equal_work_runs_the_same_requests() -> None:
    pytest.importorskip("transformers")
    with torch.random.fork_rng():
        llama = hugging_face.LlamaBatches(OURO_1_4B.model_copy(update=_SMALL))
    assert llama.num_layers == 4
    asks = [Ask((1, 2, 3), 4), Ask((5,), 2), Ask((7, 8), 3)]
    alone = [llama.run([ask], 1)[0] for ask in asks]
    assert [len(outputs) for outputs in alone] == [4, 2, 3]
    assert llama.run(asks, 2) == alone


_SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 24,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def test_a_random_checkpoint_can_be_served(tmp_path: Path) -> None:
    write_checkpoint(OURO_1_4B.model_copy(update=_SMALL), tmp_path, CPU)
    model = load_model(tmp_path, torch.float32, CPU, "random")
    assert (model.num_layers, model.hidden_size, model.profile.max_loops) == (1, 32, 4)


def test_requests_are_seeded_and_of_mixed_lengths() -> None:
    asks = held_out_asks(40, (16, 128), (16, 128))
    assert asks == held_out_asks(40, (16, 128), (16, 128))
    assert asks != held_out_asks(40, (16, 128), (16, 128), seed=1)
    assert {len(ask.prompt) for ask in asks} < set(range(16, 129))
    assert len({ask.outputs for ask in asks}) > 10
    (traced,) = random_asks(1, 8, 21, MIXED, 100)
    together = random_asks(5, 8, 21, MIXED, 100, concurrency=3)
    assert [ask.outputs for ask in together] == [7, 14, 21, 21, 21]
    assert [len(ask.depths) for ask in together] == [7, 14, 21, 21, 21]
    assert traced.depths[0] == 4
    assert sum(traced.depths[1:]) == 20 * 2.5
    assert max(traced.prompt) < 100


def test_what_is_measured_on_cuda() -> None:
    cases = cases_of(torch.device("cuda"), quick=False)
    assert [case.concurrency for case in cases] == [1, 8, 32, 128]
    goals = [[variant.goal for variant in case.variants] for case in cases]
    assert goals == [[None, None], [None, None], [2500.0, None], [3200.0, None]]
    assert [len(case.asks) for case in cases] == [4, 32, 128, 512]


@pytest.mark.parametrize(("rows", "tokens"), FLOORS.items())
def test_the_floor_of_a_tick_is_that_of_decode(rows: int, tokens: float) -> None:
    tick_ms = floor_tick_ms(OURO_1_4B, torch.bfloat16, rows, 1024 + 64)
    assert rows / 2.5 / tick_ms * 1e3 == pytest.approx(tokens, rel=1e-3)


@pytest.mark.parametrize(("threshold", "goal"), [(1.0, 3.0 * 2.5 / 4), (0.0, 3.0)])
def test_a_ratio_s_goal_falls_with_the_depth(threshold: float, goal: float) -> None:
    asks = [Ask((1, 2, 3), 8)]

    def baseline(given: Sequence[Ask], size: int) -> list[list[int]]:
        assert (given, size) == (asks, 1)
        return [[1, 2, 3]]

    ways = [Variant("way", asks, threshold)]
    comparison = Comparison(1, ways, {"plain": baseline}, on_cpu=False)
    with LocalExecutor.open(WorkerSettings(device="cpu", num_slots=1)) as executor:
        comparison.turn(executor, throughput.SCHEDULER)
    figures = {one.name: one for one in comparison.figures(None, {("way", "plain"): 3.0})}
    ratio = figures["1 at once, way: engine / plain"]
    assert ratio.goal == pytest.approx(goal)
    output, plain = (figures[f"1 at once, {name}: output"].value for name in ("way", "plain"))
    assert ratio.value == pytest.approx(output / plain)
    assert 0.0 < figures["1 at once, way: no step runs"].value < 100.0


def test_a_clock_sees_the_model_alone_and_leaves_it_as_it_was() -> None:
    model = load_model(EMBEDDED_DIRECTORY, torch.float32, CPU, "ouro-tiny")
    before = type(model).loop, KVStorage.gather
    clock = ModelClock()
    with clock.running():
        StaticBatches(model).run([Ask((1, 2), 2)], 1)
    assert clock.pages == 0.0  # there are none in a dense cache
    assert clock.model > 0.0
    assert (type(model).loop, KVStorage.gather) == before
    counted = clock.model
    StaticBatches(model).run([Ask((1, 2), 2)], 1)
    assert clock.model == counted


def test_the_steady_rate_is_that_of_the_closed_loop_alone() -> None:
    asks = [Ask((1, 2, 3), outputs) for outputs in (2, 4, 6, 6, 6)]
    with LocalExecutor.open(WorkerSettings(device="cpu", num_slots=2)) as executor:
        executor.begin_epoch(2, 60.0)
        outcome = ClosedLoop({"lane-0": executor}, throughput.SCHEDULER).run(asks, 2, 1.0)
    assert outcome.outputs == 24
    assert outcome.steady > 0.0
    assert rate_between((1.0, 10), (3.0, 50)) == 20.0
    assert rate_between((0.0, 0), (0.0, 0)) == 0.0


@pytest.mark.parametrize("wrong", ["0", "-3", "many"])
def test_a_number_that_is_none_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--at-once", wrong])
    assert caught.value.code == 2
    assert f"'{wrong}' is no whole number of at least 1" in capsys.readouterr().err
