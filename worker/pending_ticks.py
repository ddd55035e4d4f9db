"""Ticks that were enqueued: what of them is on its way to the host, and what it will say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from protocol.resident import RowState
from protocol.result import FailedRow, ResidentResult
from worker.outcome import NOT_A_NUMBER
from worker.resident_table import EMPTY, FINISHED, PARKED, READY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from protocol.resident import ResidentBatch
    from protocol.result import TokenLogprobs
    from worker.slot_table import Slot
    from worker.streams import Mark

_NONE = -1
_STATES = {
    READY: RowState.READY,
    PARKED: RowState.PARKED,
    FINISHED: RowState.FINISHED,
    EMPTY: RowState.READY,  # a row whose prompt has failed, which is told beside
}


@dataclass(frozen=True, slots=True)
class TickValues:
    """What ticks leave, in host memory; line 0 is what was sampled before the first tick.

    tokens and exit_depths int64 [lines, >= rows], -1 where nothing was sampled; header int64
    [lines, 3]: rows that looped, left and ended; broken bool [>= rows]: its logits were not
    numbers; loops int64 and states uint8 [>= rows] at the end.
    """

    tokens: Tensor
    exit_depths: Tensor
    header: Tensor
    broken: Tensor
    loops: Tensor
    states: Tensor

    @classmethod
    def zeros(cls, lines: int, seats: int, *, pinned: bool) -> Self:
        """Room for so many lines of so many seats."""

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=pinned)

        return cls(
            tokens=room(lines, seats),
            exit_depths=room(lines, seats),
            header=room(lines, 3),
            broken=room(seats, dtype=torch.bool),
            loops=room(seats),
            states=room(seats, dtype=torch.uint8),
        )

    def holds(self, lines: int, seats: int) -> bool:
        """Whether there is room for so many."""
        fits = lines <= len(self.header) and seats <= len(self.broken)
        return fits and lines * seats <= self.tokens.numel()

    def part(self, lines: int, seats: int) -> TickValues:
        """So many of its lines and seats, in the same memory: the first ones, without a gap."""
        return TickValues(
            tokens=self.tokens.view(-1)[: lines * seats].view(lines, seats),
            exit_depths=self.exit_depths.view(-1)[: lines * seats].view(lines, seats),
            header=self.header[:lines],
            broken=self.broken[:seats],
            loops=self.loops[:seats],
            states=self.states[:seats],
        )


def no_logprobs() -> tuple[TokenLogprobs | None, ...]:
    """Those of rows that asked for none."""
    return ()


class PendingTicks:
    """One resident step. Owner: ModelRunner, whose device thread alone settles it.

    Whoever holds the plan's ticket may read it, on any thread.
    """

    def __init__(
        self,
        batch: ResidentBatch,
        rows: Sequence[Slot],
        values: TickValues,
        end: Mark,
        logprobs: Callable[[], tuple[TokenLogprobs | None, ...]] = no_logprobs,
    ) -> None:
        """`values` are there once the device has come to `end`."""
        self._batch = batch
        self._rows = rows
        self._values = values
        self._end = end
        self._logprobs = logprobs

    def is_over(self) -> bool:
        """Whether the values are there."""
        return self._end.passed()

    def settle(self) -> None:
        """Wait for the values, and move each request's progress on. Once, before it is needed."""
        self._end.wait()
        rows = zip(self._rows, self._outputs(), self._loops(), self._states(), strict=True)
        for row, outputs, loops, state in rows:
            row.progress.ran(len(outputs), loops, finished=state == FINISHED)

    def read(self, failed: list[FailedRow]) -> ResidentResult:
        """The result; a row whose logits were not numbers goes to `failed` as well."""
        self._end.wait()
        broken = self._values.broken[: len(self._rows)].tolist()
        failed += [
            FailedRow(self._batch.keys[row], NOT_A_NUMBER)
            for row, is_broken in enumerate(broken)
            if is_broken
        ]
        # Ticks that were enqueued behind the last row's end have run for nobody.
        lines = [line for line in self._values.header[1:].tolist() if line[0]]
        live, exits, finished = zip(*lines, strict=True) if lines else ((), (), ())
        return ResidentResult(
            keys=self._batch.keys,
            tokens=self._outputs(),
            exit_depths=_columns(self._values.exit_depths, len(self._rows)),
            loops=tuple(self._loops()),
            states=tuple(_STATES[state] for state in self._states()),
            live=live,
            exits=exits,
            finished=finished,
            logprobs=self._logprobs(),
        )

    def _outputs(self) -> tuple[tuple[int, ...], ...]:
        return _columns(self._values.tokens, len(self._rows))

    def _loops(self) -> list[int]:
        return self._values.loops[: len(self._rows)].tolist()

    def _states(self) -> list[int]:
        return self._values.states[: len(self._rows)].tolist()


def _columns(lines: Tensor, rows: int) -> tuple[tuple[int, ...], ...]:
    """The values of each row, one after the other, without the lines that have none."""
    columns = lines[:, :rows].T.tolist()
    return tuple(tuple(value for value in column if value != _NONE) for column in columns)
