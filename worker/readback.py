"""Readback leases: the host memory that a plan's values are copied into, and when it is free.

A plan takes one lease when it runs and gives it back when its ticket is retired, so there are as
many leases as plans may be in flight. The lease of a ticket that is dropped unretired comes back as
well, with a warning (protocol/submission.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from protocol.sampling import MAX_LOGPROBS
from worker.device_memory import tensor_bytes
from worker.pending_ticks import TickValues
from worker.sampling.logprobs import Logprobs

if TYPE_CHECKING:
    from torch import Tensor


class ReadbackLease:
    """Host buffers of one plan. Owner: the plan's ticket. Mutated only by: the device thread.

    survivals and logprobs float32 [rows], tokens int64 [rows], and of the most likely tokens ids
    int64 and logprobs float32 [rows, MAX_LOGPROBS]; pinned where the device is not the host. Beside
    them what resident ticks leave, `lines` of `seats` each.
    """

    def __init__(self, rows: int, device: torch.device, lines: int = 0, seats: int = 0) -> None:
        pinned = device.type != "cpu"
        self._survivals = torch.zeros(rows, dtype=torch.float32, pin_memory=pinned)
        self._tokens = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self._logprobs = Logprobs(
            sampled=torch.zeros(rows, dtype=torch.float32, pin_memory=pinned),
            top_ids=torch.zeros(rows, MAX_LOGPROBS, dtype=torch.int64, pin_memory=pinned),
            top=torch.zeros(rows, MAX_LOGPROBS, dtype=torch.float32, pin_memory=pinned),
        )
        self._pinned = pinned
        self._ticks = TickValues.zeros(lines, seats, pinned=pinned)
        self._used_survivals = 0
        self._used_tokens = 0
        self._used_logprobs = 0
        self._used_ticks = False

    @property
    def num_bytes(self) -> int:
        """Host memory of the buffers."""
        return tensor_bytes(self, self._logprobs, self._ticks)

    def clear(self) -> None:
        """Forget the previous plan."""
        self._used_survivals = self._used_tokens = self._used_logprobs = 0
        self._used_ticks = False

    def ticks(self, lines: int, seats: int) -> TickValues:
        """Where ticks may copy to: that many lines of that many seats.

        A plan's second batch of ticks, and one that is larger than any the worker tells of, gets
        memory of its own.
        """
        if self._used_ticks or not self._ticks.holds(lines, seats):
            return TickValues.zeros(lines, seats, pinned=self._pinned)
        self._used_ticks = True
        return self._ticks.part(lines, seats)

    def put_survivals(self, values: Tensor) -> Tensor:
        """Enqueue a copy of float32 [n] values; the view returned holds them once it is done."""
        start, self._used_survivals = self._used_survivals, self._used_survivals + len(values)
        view = self._survivals[start : self._used_survivals]
        return view.copy_(values, non_blocking=True)

    def put_tokens(self, values: Tensor) -> Tensor:
        """Enqueue a copy of int64 [n] values; the view returned holds them once it is done."""
        start, self._used_tokens = self._used_tokens, self._used_tokens + len(values)
        view = self._tokens[start : self._used_tokens]
        return view.copy_(values, non_blocking=True)

    def put_logprobs(self, values: Logprobs) -> Logprobs:
        """Enqueue a copy of the logprobs of n rows; the views returned hold them once it is done.

        A plan has at most as many of them as tokens.
        """
        start, self._used_logprobs = self._used_logprobs, self._used_logprobs + len(values.sampled)
        rows, width = slice(start, self._used_logprobs), values.top_ids.shape[1]
        held = self._logprobs
        return Logprobs(
            sampled=held.sampled[rows].copy_(values.sampled, non_blocking=True),
            top_ids=held.top_ids[rows, :width].copy_(values.top_ids, non_blocking=True),
            top=held.top[rows, :width].copy_(values.top, non_blocking=True),
        )


class ReadbackPool:
    """All leases of a worker. Owner: Worker. Mutated only by: LocalExecutor, under its lock."""

    def __init__(
        self, size: int, rows: int, device: torch.device, lines: int = 0, seats: int = 0
    ) -> None:
        self._free = [ReadbackLease(rows, device, lines, seats) for _ in range(size)]
        self.num_bytes = sum(lease.num_bytes for lease in self._free)
        self.size = size
        self.rows = rows

    def __repr__(self) -> str:
        return f"<ReadbackPool {len(self._free)} of {self.size} free>"

    @property
    def num_free(self) -> int:
        """Leases that nobody holds."""
        return len(self._free)

    def lease(self) -> ReadbackLease:
        """Take a lease. The caller bounds plans in flight by `size`, so there always is one."""
        lease = self._free.pop()
        lease.clear()
        return lease

    def give_back(self, lease: ReadbackLease) -> None:
        """Return a lease whose copies are complete and whose values were read or discarded."""
        self._free.append(lease)
