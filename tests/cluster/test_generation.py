from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.generation import Completion, TextAssembler, TextDelta, resolve_seed
from cluster.tokenizer import load_tokenizer
from protocol.config import ModelSettings
from protocol.errors import LoopmeshError, ProtocolError
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from protocol.result import TokenLogprobs
from protocol.rng import MAX_SEED
from scheduler.output import RequestOutput
from worker.models.registry import resolve_model

TOKENIZER = load_tokenizer(resolve_model(ModelSettings()))
EMOJI = TOKENIZER.encode("🎉")


def assembler(*stop: str) -> TextAssembler:
    return TextAssembler(TOKENIZER, prompt_tokens=5, max_loops=4, seed=11, stop=stop)


def output(
    start: int, tokens: list[int], finish: FinishReason | None = None, error: str | None = None
) -> RequestOutput:
    depths = tuple(1 + (start + i) % 4 for i in range(len(tokens)))
    return RequestOutput(RequestKey("a", 1), start, tuple(tokens), depths, finish, error)


def completion(*exit_depths: int) -> Completion:
    return Completion(
        text="",
        token_ids=(9,) * len(exit_depths),
        exit_depths=exit_depths,
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=3,
        max_loops=4,
        seed=0,
    )


def test_outputs_become_deltas_and_one_completion() -> None:
    ids = TOKENIZER.encode("Hello 🎉 world")
    builder = assembler()
    deltas = [builder.push(output(i, [token])) for i, token in enumerate(ids)]
    assert not builder.finished
    last = builder.push(output(len(ids), [0], FinishReason.STOP))
    assert builder.finished
    depths = (1 + len(ids) % 4,)
    assert last == TextDelta("", (0,), depths, FinishReason.STOP, text_offsets=(13,))
    assert "".join(delta.text for delta in deltas) == "Hello 🎉 world"
    answer = builder.completion()
    assert answer.text == "Hello 🎉 world"
    assert answer.token_ids == (*ids, 0)
    assert answer.exit_depths == tuple(1 + i % 4 for i in range(len(ids) + 1))
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.prompt_tokens, answer.max_loops, answer.seed) == (5, 4, 11)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_logprobs_and_offsets_follow_their_tokens(size: int) -> None:
    ids = TOKENIZER.encode("Hello 🎉 wörld")
    logprobs = tuple(TokenLogprobs(-float(i), (i,), (-1.0,)) for i in range(len(ids)))
    builder = assembler()
    deltas = []
    for start in range(0, len(ids), size):
        some = output(start, ids[start : start + size])
        deltas.append(builder.push(replace(some, logprobs=logprobs[start : start + size])))
    builder.push(output(len(ids), [], FinishReason.LENGTH))
    assert [entry for delta in deltas for entry in delta.logprobs] == list(logprobs)
    answer = builder.completion()
    assert answer.logprobs == logprobs
    assert answer.text_offsets == tuple(o for delta in deltas for o in delta.text_offsets)
    held = TOKENIZER.detokenizer()
    lengths = [0]
    for token in ids:
        lengths.append(lengths[-1] + len(held.push((token,))))
    assert answer.text_offsets == tuple(lengths[:-1])


def test_the_end_flushes_held_bytes() -> None:
    builder = assembler()
    assert builder.push(output(0, EMOJI[:1])).text == ""
    last = builder.push(output(1, [], FinishReason.LENGTH))
    assert last.text == "\N{REPLACEMENT CHARACTER}"
    assert builder.completion().text == "\N{REPLACEMENT CHARACTER}"


def test_a_failed_request_raises_its_reason() -> None:
    builder = assembler()
    builder.push(output(0, [5]))
    with pytest.raises(LoopmeshError, match="lane-0 was closed"):
        builder.push(output(1, [], FinishReason.ERROR, "lane-0 was closed"))
    assert builder.finished


def test_a_gap_and_an_output_after_the_end_are_refused() -> None:
    builder = assembler()
    with pytest.raises(ProtocolError, match="output 1 came, 0 is next"):
        builder.push(output(1, [5]))
    builder.push(output(0, [5], FinishReason.LENGTH))
    with pytest.raises(ProtocolError, match="after the end"):
        builder.push(output(1, [5]))


def test_there_is_no_completion_before_the_end() -> None:
    builder = assembler()
    builder.push(output(0, [5]))
    with pytest.raises(ProtocolError, match="not finished"):
        builder.completion()


@pytest.mark.parametrize(
    ("exit_depths", "run", "saved", "possible", "mean"),
    [
        ((4, 2, 3), 9, 3, 8, 2.5),
        ((4, 4, 4), 12, 0, 8, 4.0),
        ((4, 1, 1, 1, 1), 8, 12, 16, 1.0),
        ((4,), 4, 0, 0, None),
        ((), 0, 0, 0, None),
    ],
)
def test_loops_are_counted_as_documented(
    exit_depths: tuple[int, ...], run: int, saved: int, possible: int, mean: float | None
) -> None:
    answer = completion(*exit_depths)
    assert answer.loops_run == run
    assert answer.loops_saved == saved
    assert answer.loops_possible == possible
    assert answer.mean_depth == mean


def test_a_given_seed_is_kept_and_a_missing_one_is_drawn() -> None:
    assert resolve_seed(0) == 0
    assert resolve_seed(MAX_SEED) == MAX_SEED
    drawn = {resolve_seed(None) for _ in range(64)}
    assert len(drawn) == 64
    assert all(0 <= seed <= MAX_SEED for seed in drawn)
    assert max(drawn) > 2**53


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stop_string_ends_the_answer_before_it(size: int) -> None:
    ids = TOKENIZER.encode("Hello there, my friend. And more after it.")
    logprobs = tuple(TokenLogprobs(-float(i)) for i in range(len(ids)))
    builder = assembler("xyz", "iend. A", "friend. And more")
    deltas = []
    for start in range(0, len(ids), size):
        some = output(start, ids[start : start + size])
        deltas.append(builder.push(replace(some, logprobs=logprobs[start : start + size])))
        if builder.finished:
            break
        assert builder.stop_index is None
    answer = builder.completion()
    assert answer.text == "".join(delta.text for delta in deltas) == "Hello there, my fr"
    assert answer.finish_reason is deltas[-1].finish_reason is FinishReason.STOP
    held = TOKENIZER.detokenizer()
    kept, text = 0, ""
    while "iend. A" not in text:
        text += held.push((ids[kept],))
        kept += 1
    assert builder.stop_index == kept - 1
    assert answer.token_ids == tuple(ids[:kept])
    assert len(answer.exit_depths) == len(answer.text_offsets) == kept
    assert answer.logprobs == logprobs[:kept]
    with pytest.raises(ProtocolError, match="after the end"):
        builder.push(output(kept, [5]))


def test_text_that_did_not_become_a_stop_string_comes_out_at_the_end() -> None:
    ids = TOKENIZER.encode("the end")
    builder = assembler("the end of it")
    assert builder.push(output(0, ids)).text == ""
    last = builder.push(output(len(ids), [], FinishReason.LENGTH))
    assert (last.text, last.finish_reason) == ("the end", FinishReason.LENGTH)
    assert builder.stop_index is None


def test_a_stop_string_in_the_last_output_wins_over_its_end() -> None:
    ids = TOKENIZER.encode("the end of it")
    builder = assembler("end")
    last = builder.push(output(0, ids, FinishReason.LENGTH))
    assert (last.text, last.finish_reason) == ("the ", FinishReason.STOP)
    assert len(last.token_ids) < len(ids)
    flushed = assembler("\N{REPLACEMENT CHARACTER}")
    flushed.push(output(0, EMOJI[:1]))
    end = flushed.push(output(1, [], FinishReason.LENGTH))
    assert (end.text, end.finish_reason) == ("", FinishReason.STOP)
    assert flushed.completion().text == ""
