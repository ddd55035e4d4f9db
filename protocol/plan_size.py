"""How large a plan's frame can get: plain arithmetic, which may say too much and never too little.

msgpack takes at most 5 bytes for the head of a text, a column or an array, and 9 for a number; a
column takes 4 for each entry. The fields are those of protocol/codec.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.identity import MAX_REQUEST_ID_LENGTH
from protocol.plan import Admission

if TYPE_CHECKING:
    from protocol.plan import Resume

FRAME_LIMIT = 64 * 2**20
"""Largest frame in bytes; both ends of a stream set it."""

PLAN_LIMIT = FRAME_LIMIT // 2
"""Largest plan that a scheduler makes, in bytes."""

_HEAD, _NUMBER, _ENTRY = 5, 9, 4

_KEY = 2 * _HEAD + 4 * MAX_REQUEST_ID_LENGTH + _NUMBER
"""A key in the frame's table, all of whose characters take 4 bytes."""

_ROW = 16 * _ENTRY
"""One request in every column there is: released 1, suspended 1, PREFILL 3, PRELUDE 3, RECURRENT 3,
CODA 4, RESIDENT 1."""

_FRAME = 1 + 3 * _NUMBER + 9 * _HEAD + 5 * (_NUMBER + 5 * _HEAD)
"""A plan of all steps without a row: version, kind, epoch, seq, and the heads of all arrays."""


def table_size(planes: int, width: int) -> int:
    """Bytes of a block table at most. Example: 4 planes of 10 blocks -> 5 + 4 * 45 = 185."""
    return _HEAD + planes * (_HEAD + _ENTRY * width)


def admission_size(
    prompt: int,
    planes: int,
    width: int,
    *,
    biased: int = 0,
    banned: int = 0,
    ending: int = 0,
    forced: int = 0,
) -> int:
    """Bytes that an admission adds to a plan at most, but for its key.

    `prompt`, `biased`, `banned` and `ending` count tokens, `forced` depths, and `width` blocks a
    plane. Example: 100 tokens in 4 planes of 7 -> 16 numbers, 9 heads and 400 bytes, 189 + 400, and
    a table of 137: 726.
    """
    columns = _ENTRY * (prompt + biased + banned + ending + forced) + _NUMBER * biased
    return 16 * _NUMBER + 9 * _HEAD + columns + table_size(planes, width)


def fork_size(planes: int, width: int) -> int:
    """Bytes that a fork adds to a plan at most, but for its keys.

    Example: 4 planes of 10 blocks -> a head, 4 numbers and a table of 185: 226.
    """
    return _HEAD + 4 * _NUMBER + table_size(planes, width)


def opening_size(item: Admission | Resume) -> int:
    """Bytes that an admission or a resume adds to a plan at most, but for its key."""
    planes, width = len(item.tables), len(item.tables[0])
    if isinstance(item, Admission):
        terms = item.resident
        return admission_size(
            len(item.prompt),
            planes,
            width,
            biased=len(item.logit_bias),
            banned=len(item.banned_ids),
            ending=0 if terms is None else len(terms.ending_ids),
            forced=0 if terms is None else len(terms.forced_depths),
        )
    return _HEAD + _NUMBER + table_size(planes, width)


def rows_size(slots: int, planes: int, granted: int) -> int:
    """Bytes of all else in a plan at most: keys, releases, suspends, grants and the steps' rows.

    Of up to `slots` requests with rows and as many that are released, with `granted` blocks a plane
    granted to all of them together. Example: 32 slots, 4 planes, 64 blocks -> 243 + 64 * 1,043 +
    32 * 64 + 32 * 39 + 4 * 4 * 64 = 71,315.
    """
    keys = 2 * slots * _KEY
    grants = slots * (_HEAD + _NUMBER + table_size(planes, 0)) + planes * _ENTRY * granted
    return _FRAME + keys + slots * _ROW + grants
