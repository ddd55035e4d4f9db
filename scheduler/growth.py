"""The blocks that a plan's rows are the first to write to."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING

from protocol.plan import Grant, PrefillBatch, PreludeBatch
from protocol.resident import ResidentBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from protocol.identity import RequestKey
    from protocol.plan import Step
    from scheduler.commitments import Commitments
    from scheduler.kv_manager import KVManager
    from scheduler.request import Request


def grants_for(
    steps: Sequence[Step],
    requests: Mapping[RequestKey, Request],
    kv: KVManager,
    commitments: Commitments,
) -> Iterator[Grant]:
    """The grants of a plan with these steps, whose requests have moved on."""
    starting: set[RequestKey] = set()
    for step in steps:
        match step:
            case PrefillBatch(keys, starts, counts):
                starting.update(keys)
                frontiers: Iterable[int] = map(add, starts, counts)
            case PreludeBatch(keys, positions, _):
                frontiers = (position + 1 for position in positions)
            case ResidentBatch(keys):
                rows = [requests[key] for key in keys]
                frontiers = _reaches(rows, starting, kv, commitments)
            case _:
                continue
        for key, frontier in zip(keys, frontiers, strict=True):
            tables = kv.grow(key, frontier)
            if tables is not None:
                yield Grant(key, tables)


def _reaches(
    rows: Sequence[Request], starting: set[RequestKey], kv: KVManager, commitments: Commitments
) -> Iterator[int]:
    """How many tokens each resident row is to have room for, as far as there are blocks.

    A loose row without room for all its ticks is parked where its room ends. Blocks go first to
    those that were decoding, then to those whose prompt this plan completes, as many as they need
    to get on at all; what is left then is for the ticks that come after, in the order of the rows.
    """
    if not commitments.loose:
        yield from (row.reach for row in rows)
        return
    lacks = [commitments.lack(row) for row in rows]
    of_all = sum(lacks)
    of_decoding = of_all - sum(commitments.lack(row) for row in rows if row.key in starting)
    for row, lack in zip(rows, lacks, strict=True):
        of_all -= lack
        if row.key not in starting:
            of_decoding -= lack
        least = kv.affordable(row.key, commitments.need(row), of_decoding)
        yield max(least, kv.affordable(row.key, row.reach, of_all))
