"""The pieces of a frame: what is no such piece is a ProtocolError that says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.columns import (
    pack_column,
    pack_logprobs,
    read_float,
    read_index,
    read_int,
    read_keys,
    read_text,
    unpack_column,
    unpack_logprobs,
)
from protocol.errors import ProtocolError
from protocol.identity import RequestKey
from protocol.result import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = [RequestKey("a", 1)]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: unpack_column("i", b"12345"), "whole number of 4-byte entries"),
        (lambda: read_keys(KEYS, b"\xff\xff\xff\xff"), "negative"),
        (lambda: read_int(True), "expected an integer, found bool"),
        (lambda: read_float(1), "expected a float, found int"),
        (lambda: read_text(b"x"), "expected text, found bytes"),
        (lambda: read_index(1, KEYS), "index 1 is beyond 1 entries"),
        (lambda: read_index(-1, KEYS), "index -1"),
    ],
)
def test_what_does_not_fit_is_named(read: Callable[[], object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read()


def test_log_probabilities_must_fit_their_rows() -> None:
    row = TokenLogprobs(-0.5, (3,), (-0.25,))
    counts, *columns = pack_logprobs([None, row])
    assert unpack_logprobs(counts, *columns) == (None, row)
    with pytest.raises(ProtocolError, match="do not fit their rows"):
        unpack_logprobs(pack_column("i", [-1, 2]), *columns)
