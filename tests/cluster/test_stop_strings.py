"""Stop strings: the same end however the text comes, and nothing is ever taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.stop_strings import StopSearch, checked_stop
from protocol.errors import RequestError

texts = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4).map(tuple)


def first_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """What is before the stop string that is complete first, character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(entry) for entry in stop if text[:end].endswith(entry)]
        if starts:
            return text[: min(starts)]
    return None


@given(texts, stops)
def test_character_by_character_it_ends_where_the_definition_says(
    text: str, stop: tuple[str, ...]
) -> None:
    search, shown = StopSearch(stop), ""
    for index, character in enumerate(text):
        shown += search.push(character)
        expected = first_stop(text[: index + 1], stop)
        assert search.found is (expected is not None)
        if expected is not None:
            assert shown == expected
            return
        held = text[len(shown) : index + 1]
        assert not held or any(entry.startswith(held) for entry in stop), "held for no reason"
    assert shown + search.finish() == text


@given(st.lists(texts, max_size=5), stops)
def test_in_pieces_nothing_is_taken_back_and_no_stop_string_comes_out(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    search, shown = StopSearch(stop), ""
    for piece in pieces:
        shown += search.push(piece)
        if search.found:
            break
    else:
        shown += search.finish()
        assert shown == "".join(pieces)
    assert search.found is any(entry in "".join(pieces) for entry in stop)
    assert "".join(pieces).startswith(shown)
    assert not any(entry in shown for entry in stop)


def test_of_those_that_one_piece_completes_the_first_to_begin_wins() -> None:
    search = StopSearch(("bc", "abcd"))
    assert search.push("xabcde") == "x"
    search = StopSearch(("bc", "abcd"))
    assert search.push("xabc") == "xa"


def test_one_text_is_one_stop_string() -> None:
    assert checked_stop(None) == checked_stop([]) == ()
    assert checked_stop("ab") == checked_stop(["ab"]) == ("ab",)


@pytest.mark.parametrize("value", ["", [""], ["a"] * 5, [1], 5, {"a": 1}, b"a", [b"a"]])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="stop"):
        checked_stop(value)
