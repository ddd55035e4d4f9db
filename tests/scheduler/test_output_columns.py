"""However a request ends: as many exit depths and log probabilities as tokens, in every piece."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from protocol.exit_rule import FinishReason
from protocol.result import FailedRow
from scheduler.output import join
from tests.scheduler.bench import EOS, Bench, fixed

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from scheduler.output import RequestOutput

POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ouro": ({}, {}),
    "delayed": ({"exit_policy": "ouro_delayed"}, {}),
    "forced": ({}, {"forced_depths": (4, 1, 3, 2, 4, 1, 1, 1)}),
}
ENDS = {
    "length": FinishReason.LENGTH,
    "eos": FinishReason.STOP,
    "stop": FinishReason.STOP,
    "text": FinishReason.STOP,
    "abort": FinishReason.ABORT,
    "failed": FinishReason.ERROR,
    "lost": FinishReason.ERROR,
}
TOKENS = {"eos": [5, 6, EOS, 7, 8], "stop": [5, 6, 9, 7, 8]}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("asked", [None, 0, 2])
def test_every_column_is_as_long_as_the_tokens(policy: str, end: str, asked: int | None) -> None:
    engine_settings, wish = POLICIES[policy]
    bench = Bench(
        hazard=lambda key, position, depth: float(depth == 1),
        token=fixed(TOKENS.get(end, [5, 6, 7, 8, 10])),
        **engine_settings,
    )
    key = bench.add("a", prompt=3, max_tokens=5, stop_token_ids=(9,), logprobs=asked, **wish)
    bench.add("mate", prompt=3, max_tokens=5, ignore_eos=True)
    while end not in ("length", "eos", "stop") and len(told(bench, key)) < 3:
        bench.step()
    give_up(bench, key, end)
    bench.finish()
    pieces = [output for output in bench.outputs if output.key == key]
    assert pieces[-1].finish_reason is ENDS[end]
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    for piece in pieces:
        assert len(piece.exit_depths) == len(piece.tokens)
        assert len(piece.logprobs) == (0 if asked is None else len(piece.tokens))
        assert all(len(entry.top_ids) == asked for entry in piece.logprobs)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert tokens == TOKENS.get(end, [5, 6, 7, 8, 10])[: 5 if end == "length" else 3]


def told(bench: Bench, key: RequestKey) -> list[int]:
    outputs: list[RequestOutput] = bench.outputs
    return [token for output in outputs if output.key == key for token in output.tokens]


def give_up(bench: Bench, key: RequestKey, end: str) -> None:
    """End the request that has three outputs, in one of the ways that are no token of its own."""
    engine = bench.engine
    match end:
        case "text":
            bench.outputs += engine.finish("a", 2)
        case "abort":
            bench.outputs += engine.abort("a")
        case "failed":
            ((lane, plan),) = bench.plan()
            steps = bench.run(lane, plan)
            bench.apply(lane, replace(steps, failed=(FailedRow(key, "the device is broken"),)))
        case "lost":
            bench.outputs += engine.close_lane("lane-0", "gone")


@pytest.mark.parametrize("asked", [None, 2])
def test_joined_outputs_are_those_of_a_choice_in_one_piece(asked: int | None) -> None:
    bench = Bench(hazard=None)
    bench.add("a", max_tokens=7, logprobs=asked)
    bench.finish()
    pieces: list[RequestOutput] = bench.outputs
    whole, middle = join(pieces), join(pieces[2:5])
    assert len(pieces) > 5
    assert (whole.key, whole.finish_reason) == (pieces[0].key, FinishReason.LENGTH)
    assert (whole.start_index, len(whole.tokens), len(whole.exit_depths)) == (0, 7, 7)
    assert len(whole.logprobs) == (0 if asked is None else 7)
    assert (middle.start_index, middle.finish_reason) == (2, None)
    assert middle.tokens == whole.tokens[2:5]
