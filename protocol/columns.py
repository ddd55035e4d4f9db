"""What every frame is made of: number columns, key tables and type-strict scalars.

A column is the raw little-endian bytes of its entries, four bytes each. Readers raise
ProtocolError, or an exception that the codec turns into one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from protocol.errors import ProtocolError
from protocol.identity import RequestKey
from protocol.result import TokenLogprobs

if TYPE_CHECKING:
    from protocol.plan import BlockTable

Packed: TypeAlias = Sequence[Any]
"""An array as msgpack gives it back: nothing about its entries is known yet."""


class KeyTable:
    """The keys of one frame, each once. Owner: one encode. Mutated only by: index, column."""

    def __init__(self) -> None:
        self._order: dict[RequestKey, int] = {}

    def index(self, key: RequestKey) -> int:
        """The index of a key, which is added when it is new."""
        return self._order.setdefault(key, len(self._order))

    def column(self, keys: Sequence[RequestKey]) -> bytes:
        """The indices of keys as a column."""
        return pack_column("i", [self.index(key) for key in keys])

    def fields(self) -> list[tuple[str, int]]:
        """The table as it goes on the wire."""
        return [(key.request_id, key.generation) for key in self._order]


def pack_column(code: str, values: Sequence[float]) -> bytes:
    """Entries as bytes; `code` is i (int32) or f (float32)."""
    return struct.pack(f"<{len(values)}{code}", *values)


def unpack_column(code: str, data: bytes) -> tuple[Any, ...]:
    """The entries of a column."""
    if not isinstance(data, bytes) or len(data) % 4:
        raise ProtocolError("a column is not a whole number of 4-byte entries")
    return struct.unpack(f"<{len(data) // 4}{code}", data)


def pack_logprobs(rows: Sequence[TokenLogprobs | None]) -> tuple[bytes, ...]:
    """Ragged rows as four columns: alternatives a row, -1 for none asked, then all values."""
    asked = [row for row in rows if row is not None]
    return (
        pack_column("i", [-1 if row is None else len(row.top_ids) for row in rows]),
        pack_column("f", [row.logprob for row in asked]),
        pack_column("i", [token for row in asked for token in row.top_ids]),
        pack_column("f", [value for row in asked for value in row.top_logprobs]),
    )


def unpack_logprobs(
    counts: bytes, logprobs: bytes, ids: bytes, tops: bytes
) -> tuple[TokenLogprobs | None, ...]:
    """The rows of pack_logprobs."""
    sizes = unpack_column("i", counts)
    values = unpack_column("f", logprobs)
    top_ids, top_logprobs = unpack_column("i", ids), unpack_column("f", tops)
    told = [size for size in sizes if size >= 0]
    if len(told) != len(values) or not sum(told) == len(top_ids) == len(top_logprobs):
        raise ProtocolError("log probabilities do not fit their rows")
    rows: list[TokenLogprobs | None] = []
    row = end = 0
    for size in sizes:
        if size < 0:
            rows.append(None)
            continue
        start, end = end, end + size
        rows.append(TokenLogprobs(values[row], top_ids[start:end], top_logprobs[start:end]))
        row += 1
    return tuple(rows)


def read_keys(table: Sequence[RequestKey], column: bytes) -> tuple[RequestKey, ...]:
    """The keys that a column of indices names."""
    indices = unpack_column("i", column)
    if indices and min(indices) < 0:
        raise ProtocolError("a key index is negative")
    return tuple(table[index] for index in indices)


def read_key_table(fields: Sequence[tuple[str, int]]) -> list[RequestKey]:
    """The keys of a frame."""
    return [RequestKey(read_text(request_id), read_int(gen)) for request_id, gen in fields]


def read_int(value: object) -> int:
    """An integer; a bool is none."""
    if type(value) is not int:
        raise ProtocolError(f"expected an integer, found {type(value).__name__}")
    return value


def read_float(value: object) -> float:
    """A float."""
    if type(value) is not float:
        raise ProtocolError(f"expected a float, found {type(value).__name__}")
    return value


def read_text(value: object) -> str:
    """Text."""
    if type(value) is not str:
        raise ProtocolError(f"expected text, found {type(value).__name__}")
    return value


def pack_table(table: BlockTable) -> list[bytes]:
    """A block table, one column a plane."""
    return [pack_column("i", plane) for plane in table]


def unpack_table(planes: Sequence[bytes]) -> BlockTable:
    """A block table."""
    return tuple(unpack_column("i", plane) for plane in planes)


def read_index(number: object, items: Sequence[object]) -> int:
    """An index into `items`; Python would take a negative one."""
    if not 0 <= read_int(number) < len(items):
        raise ProtocolError(f"index {number} is beyond {len(items)} entries")
    return read_int(number)
