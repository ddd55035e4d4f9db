"""TickLines: what the captured ticks of one bucket read, and what they leave for the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from protocol.plan import NO_LOGPROBS
from protocol.result import TokenLogprobs
from protocol.sampling import MAX_LOGPROBS
from worker.batch import column
from worker.device_memory import tensor_bytes
from worker.pending_ticks import no_logprobs
from worker.sampling.logprobs import Logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from worker.pending_ticks import TickValues
    from worker.slot_table import SlotTable

LogprobReader: TypeAlias = "Callable[[], tuple[TokenLogprobs | None, ...]]"
"""One entry an output, row after row; none at all when no row asked for any."""

NONE = -1
"""Stands where nothing was sampled."""


@dataclass(frozen=True, slots=True)
class TickLines:
    """What the ticks of one bucket read and leave, on the device.

    rows int64 [bucket], slots, padded with the trash slot; seats int64 [bucket], those that loop
    next; tokens and exit_depths int64 [1 + max_ticks, bucket], -1 for none; header int64
    [1 + max_ticks, 3]: rows that looped, left and ended; failed bool [bucket]; line int64 [1], the
    line that the next boundary writes. Of the tokens of ticks that tell log probabilities: sampled
    float32 [1 + max_ticks, bucket], and top_ids int64 and top float32 [.., .., alternatives].
    """

    rows: Tensor
    seats: Tensor
    tokens: Tensor
    exit_depths: Tensor
    header: Tensor
    failed: Tensor
    line: Tensor
    sampled: Tensor
    top_ids: Tensor
    top: Tensor

    @classmethod
    def of(
        cls,
        bucket: int,
        max_ticks: int,
        seats: Tensor,
        trash: int,
        alternatives: int = MAX_LOGPROBS,
    ) -> TickLines:
        """Lines of a bucket that loops the slots in `seats`."""
        device, lines = seats.device, 1 + max_ticks

        def filled(*shape: int, value: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        return cls(
            rows=filled(bucket, value=trash),
            seats=seats,
            tokens=filled(lines, bucket, value=NONE),
            exit_depths=filled(lines, bucket, value=NONE),
            header=filled(lines, 3, value=0),
            failed=torch.zeros(bucket, dtype=torch.bool, device=device),
            line=filled(1, value=0),
            sampled=torch.zeros(lines, bucket, device=device),
            top_ids=filled(lines, bucket, alternatives, value=0),
            top=torch.zeros(lines, bucket, alternatives, device=device),
        )

    def begin(self, rows: Sequence[int], trash: int) -> None:
        """A new plan over these slots."""
        self.rows.fill_(trash)[: len(rows)] = column(rows, self.rows.device)
        self.tokens.fill_(NONE)
        self.exit_depths.fill_(NONE)
        self.failed.zero_()
        self.line.zero_()

    def tell(self, logprobs: Logprobs, line: Tensor) -> None:
        """Write the log probabilities of all rows in a line, int64 [1]."""
        self.sampled.index_copy_(0, line, logprobs.sampled[None])
        self.top_ids.index_copy_(0, line, logprobs.top_ids[None])
        self.top.index_copy_(0, line, logprobs.top[None])

    def leave(self, values: TickValues, slots: SlotTable) -> None:
        """Enqueue the copies of all but the header, and of where the rows of the plan stand."""
        count = len(values.tokens)
        values.tokens.copy_(self.tokens[:count], non_blocking=True)
        values.exit_depths.copy_(self.exit_depths[:count], non_blocking=True)
        values.broken.copy_(self.failed, non_blocking=True)
        values.loops.copy_(slots.loops[self.rows], non_blocking=True)
        values.states.copy_(slots.resident.state[self.rows], non_blocking=True)

    def leave_logprobs(self, tokens: Tensor, counts: Sequence[int]) -> LogprobReader:
        """Enqueue the copies of what the rows that asked are told; how to read it once it is there.

        `tokens` int64 [lines, >= rows] is where those of the ticks will be on the host. `counts`
        says how many alternatives each row asked for, NO_LOGPROBS for none.
        """
        asked = [row for row, count in enumerate(counts) if count != NO_LOGPROBS]
        if not asked:
            return no_logprobs
        lines, width = len(tokens), max(counts)
        rows = column(asked, self.rows.device)
        told = Logprobs(
            sampled=_to_host(self.sampled[:lines].index_select(1, rows)),
            top_ids=_to_host(self.top_ids[:lines, :, :width].index_select(1, rows)),
            top=_to_host(self.top[:lines, :, :width].index_select(1, rows)),
        )
        return partial(_read_logprobs, told, tokens, tuple(counts))


def _to_host(values: Tensor) -> Tensor:
    """A copy on the host, which is there once the device has come to it."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _read_logprobs(
    told: Logprobs, tokens: Tensor, counts: Sequence[int]
) -> tuple[TokenLogprobs | None, ...]:
    """One entry an output, row after row; `told` has one column a row that asked."""
    columns = tokens[:, : len(counts)].T.tolist()
    sampled, ids, tops = (
        x.transpose(0, 1).tolist() for x in (told.sampled, told.top_ids, told.top)
    )
    entries: list[TokenLogprobs | None] = []
    at = 0
    for column_of_row, count in zip(columns, counts, strict=True):
        lines = [line for line, token in enumerate(column_of_row) if token != NONE]
        if count == NO_LOGPROBS:
            entries += [None] * len(lines)
            continue
        entries += [
            TokenLogprobs(
                sampled[at][line], tuple(ids[at][line][:count]), tuple(tops[at][line][:count])
            )
            for line in lines
        ]
        at += 1
    return tuple(entries)


def tick_bytes(buckets: Sequence[int], max_ticks: int) -> int:
    """Device memory of the lines of these buckets; none without ticks."""
    if not max_ticks:
        return 0
    seats = [torch.empty(bucket, dtype=torch.int64, device="meta") for bucket in buckets]
    return sum(tensor_bytes(TickLines.of(len(each), max_ticks, each, 0)) for each in seats)
