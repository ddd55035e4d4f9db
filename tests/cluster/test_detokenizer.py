from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.tokenizer import load_tokenizer
from protocol.config import ModelSettings
from worker.models.registry import resolve_model

TOKENIZER = load_tokenizer(resolve_model(ModelSettings()))

# Tokens of one byte each, found by text whose bytes the vocabulary does not merge.
EMOJI = TOKENIZER.encode("🎉")
ACCENT = TOKENIZER.encode("é")

token_ids = st.integers(0, TOKENIZER.vocab_size - 1)
pieces = st.one_of(
    token_ids.map(lambda token: [token]),
    st.sampled_from([*EMOJI, *ACCENT, 0, 1, 2]).map(lambda token: [token]),
    st.text(max_size=6).map(TOKENIZER.encode),
)
outputs = st.lists(pieces, max_size=30).map(lambda parts: [*chain(*parts)])


@settings(deadline=None)
@given(outputs, st.data())
def test_pieces_add_up_to_the_decoded_whole(ids: list[int], data: st.DataObject) -> None:
    detokenizer = TOKENIZER.detokenizer()
    text, rest = "", list(ids)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
        assert TOKENIZER.decode(ids).startswith(text)
    assert text + detokenizer.finish() == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_valid_text_leaves_nothing_to_flush(text: str) -> None:
    detokenizer = TOKENIZER.detokenizer()
    ids = TOKENIZER.encode(text)
    pushed = "".join(detokenizer.push([token]) for token in ids)
    assert pushed + detokenizer.finish() == TOKENIZER.decode(ids)


def test_a_character_appears_only_when_it_is_whole() -> None:
    assert len(EMOJI) > 1
    detokenizer = TOKENIZER.detokenizer()
    assert [detokenizer.push([token]) for token in EMOJI[:-1]] == [""] * (len(EMOJI) - 1)
    assert detokenizer.push(EMOJI[-1:]) == "🎉"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("held", [1, len(EMOJI) - 1])
def test_incomplete_bytes_are_flushed_as_a_replacement_character(held: int) -> None:
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.push(EMOJI[:held]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.finish() == ""


def test_a_broken_character_does_not_eat_the_next_one() -> None:
    detokenizer = TOKENIZER.detokenizer()
    text = detokenizer.push(EMOJI[:1]) + detokenizer.push(TOKENIZER.encode("ab"))
    assert text + detokenizer.finish() == "\N{REPLACEMENT CHARACTER}ab"


def test_special_tokens_are_silent() -> None:
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.push([1, *TOKENIZER.encode("ab"), 2, 0]) == "ab"
    assert detokenizer.finish() == ""


def test_two_outputs_do_not_touch_each_other() -> None:
    one, other = TOKENIZER.detokenizer(), TOKENIZER.detokenizer()
    one.push(EMOJI[:1])
    assert other.push(TOKENIZER.encode("ab")) == "ab"
    assert one.push(EMOJI[1:]) == "🎉"
