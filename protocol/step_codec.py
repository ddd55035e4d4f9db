"""Steps and their results as bytes, and what a resident request is admitted with."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from protocol.columns import (
    Packed,
    pack_column,
    pack_logprobs,
    read_float,
    read_index,
    read_int,
    read_keys,
    unpack_column,
    unpack_logprobs,
)
from protocol.errors import ProtocolError
from protocol.plan import CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.resident import ResidentBatch, ResidentTerms, RowState
from protocol.result import (
    CodaResult,
    PrefillResult,
    PreludeResult,
    RecurrentResult,
    ResidentResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.columns import KeyTable
    from protocol.identity import RequestKey

# Batches and results by wire number: the class and the format of each field after the keys
# (i: int32 column, f: float32 column, l: ragged log probabilities, r: a tuple of ints a row,
# s: row states, n: one integer, b: one bool). Field order in the class is that of the wire.
BATCHES: tuple[tuple[type, str], ...] = (
    (PrefillBatch, "ii"),
    (PreludeBatch, "ii"),
    (RecurrentBatch, "ii"),
    (CodaBatch, "iii"),
    (ResidentBatch, "nbn"),
)
RESULTS: tuple[tuple[type, str], ...] = (
    (PrefillResult, "i"),
    (PreludeResult, "i"),
    (RecurrentResult, "iif"),
    (CodaResult, "iil"),
    (ResidentResult, "rrisiiil"),
)


def pack_steps(
    kinds: tuple[tuple[type, str], ...], steps: Sequence[Any], keys: KeyTable
) -> list[tuple[object, ...]]:
    """Batches, or results, each as [kind, keys, fields...]."""
    numbers = {cls: number for number, (cls, _) in enumerate(kinds)}
    packed = []
    for step in steps:
        number = numbers[type(step)]
        cls, codes = kinds[number]
        names = cls.__slots__[1:]  # type: ignore[attr-defined]
        columns = (
            _pack(code, getattr(step, name)) for code, name in zip(codes, names, strict=True)
        )
        packed.append((number, keys.column(step.keys), *columns))
    return packed


def unpack_steps(
    kinds: tuple[tuple[type, str], ...],
    steps: Sequence[tuple[Any, ...]],
    table: Sequence[RequestKey],
) -> tuple[Any, ...]:
    """The batches, or results, of pack_steps."""
    unpacked = []
    for number, keys, *columns in steps:
        cls, codes = kinds[read_index(number, kinds)]
        values = (_unpack(code, column) for code, column in zip(codes, columns, strict=True))
        unpacked.append(cls(read_keys(table, keys), *values))
    return tuple(unpacked)


def pack_terms(terms: ResidentTerms | None) -> tuple[object, ...]:
    """What a resident request is admitted with; () for any other."""
    if terms is None:
        return ()
    return (
        terms.min_loops,
        terms.max_loops,
        float(terms.bound),
        terms.max_tokens,
        pack_column("i", terms.ending_ids),
        pack_column("i", terms.forced_depths),
    )


def unpack_terms(fields: Packed) -> ResidentTerms | None:
    """The terms of pack_terms."""
    if not fields:
        return None
    min_loops, max_loops, bound, max_tokens, ending_ids, forced_depths = fields
    return ResidentTerms(
        min_loops=read_int(min_loops),
        max_loops=read_int(max_loops),
        bound=read_float(bound),
        max_tokens=read_int(max_tokens),
        ending_ids=unpack_column("i", ending_ids),
        forced_depths=unpack_column("i", forced_depths),
    )


def _pack(code: str, value: Any) -> object:  # noqa: ANN401 - a field of any of the formats
    match code:
        case "l":
            return pack_logprobs(value)
        case "r":
            flat = [entry for row in value for entry in row]
            return pack_column("i", [len(row) for row in value]), pack_column("i", flat)
        case "s":
            return bytes(value)
        case "n" | "b":
            return value
        case _:
            return pack_column(code, value)


def _unpack(code: str, data: Any) -> Any:  # noqa: ANN401 - foreign bytes
    match code:
        case "l":
            return unpack_logprobs(*data)
        case "r":
            return _rows(*data)
        case "s":
            return tuple(RowState(number) for number in data)
        case "n":
            return read_int(data)
        case "b":
            if type(data) is not bool:
                raise ProtocolError(f"expected true or false, found {type(data).__name__}")
            return data
        case _:
            return unpack_column(code, data)


def _rows(counts: bytes, entries: bytes) -> tuple[tuple[int, ...], ...]:
    """Entries cut into rows of so many each."""
    sizes, flat = unpack_column("i", counts), unpack_column("i", entries)
    if sum(sizes) != len(flat) or min(sizes, default=0) < 0:
        raise ProtocolError("the entries of a ragged column do not fit its rows")
    return tuple(flat[start:end] for start, end in pairwise(accumulate(sizes, initial=0)))
