"""Resident ticks over the slot table, in eager torch: what any faster tick must equal.

Half L: the rows that are ready run one loop, and their exits are tested. Half B: those whose exit
fired are finalized and sampled; unless they ended or have no block, their token is embedded. All
rows of a half are one batch, whatever their depth, and a row that does not exit costs B nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from protocol.plan import NO_LOGPROBS
from worker.batch import column
from worker.boundary import boundary, embed, leaves
from worker.outcome import read_logprobs
from worker.pending_ticks import PendingTicks, TickValues
from worker.prompt_passes import no_passes
from worker.resident_table import PARKED, PENDING, READY
from worker.sampling.adjustments import AdjustmentNeeds
from worker.sampling.logprobs import Logprobs, token_logprobs
from worker.stages import loop_seats
from worker.streams import PASSED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from protocol.resident import ResidentBatch
    from protocol.result import FailedRow, ResidentResult, TokenLogprobs
    from worker.prompt_passes import PromptPasses
    from worker.slot_table import Slot
    from worker.stages import Device

_NONE = -1


@dataclass(slots=True)
class TickRecord:
    """What the ticks of one plan leave. Owner: ResidentTicks, which alone mutates it.

    `samples` has of each sampled batch its line, its rows int64 [n], and of these tokens and exit
    depths int64 and whether their logits were not numbers, bool [n]; line 0 is what was sampled
    before the first tick. live, exits and finished count rows, one entry a tick. `logprobs` has for
    each sampled batch that asked for any its rows int64 [n] and theirs.
    """

    samples: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    finished: list[Tensor] = field(default_factory=list)
    logprobs: list[tuple[Tensor, Logprobs]] = field(default_factory=list)

    def columns(self, lines: int, rows: int, device: torch.device) -> tuple[Tensor, ...]:
        """Tokens and exit depths int64 [lines, rows], -1 where there is none, and failed [rows].

        Put together once: a few small steps a tick would be a hundredth of its time on a CPU.
        """
        tokens = torch.full((lines * rows,), _NONE, device=device)
        exit_depths, failed = tokens.clone(), torch.zeros(rows, dtype=torch.int64, device=device)
        if self.samples:
            places = torch.cat([line * rows + which for line, which, *_ in self.samples])
            _, _, *sampled = zip(*self.samples, strict=True)
            new, depths, broken = map(torch.cat, sampled)
            tokens[places] = new.masked_fill(broken, _NONE)
            exit_depths[places] = depths.masked_fill(broken, _NONE)
            failed.index_add_(0, places % rows, broken.long())
        shape = (lines, rows)
        return tokens.view(shape), exit_depths.view(shape), failed > 0


class ResidentTicks:
    """One batch of resident rows on the device. Owner: one ModelRunner step. Used once."""

    def __init__(self, on: Device, batch: ResidentBatch, rows: Sequence[Slot]) -> None:
        self._on = on
        self._batch = batch
        self._hosts = rows
        kinds = [row.sampling for row in rows]
        self._kinds = kinds
        self._needs = AdjustmentNeeds.of([kind.adjusts for kind in kinds])
        self._seats = column([row.index for row in rows], on.device)
        self._row_of = torch.full((on.slots.trash + 1,), _NONE, device=on.device)
        self._row_of[self._seats] = torch.arange(len(rows), device=on.device)
        self._lines = 1
        self._record = TickRecord()

    def run(self, yields: Callable[[], bool], prompts: PromptPasses | None = None) -> None:
        """Run up to max_ticks ticks; stop earlier as ResidentBatch says, or when `yields()`."""
        prompts = prompts or no_passes()
        slots, resident = self._on.slots, self._on.slots.resident
        seats, width = self._seats, self._width()
        state = resident.state[seats]
        has_room = slots.position[seats] < resident.granted[seats]
        going_on = seats[(state == PARKED) & has_room]
        embed(self._on, going_on)
        resident.state[going_on] = READY
        self._sample(seats[state == PENDING], line=0)
        for tick in range(self._batch.max_ticks):
            prompts.before_tick(tick)
            state = resident.state[seats]
            live, pending = seats[state == READY], seats[:0]
            if tick < self._batch.prompt_ticks:  # later on no prompt comes to its end
                pending = seats[state == PENDING]
            if not len(live) and tick + 1 >= self._batch.prompt_ticks and not len(pending):
                break
            leaving = self._loop(live, width) if len(live) else live
            if len(pending):
                leaving = torch.cat((leaving, pending))
            finished = self._sample(leaving, line=1 + tick)
            self._lines += 1
            self._record.live.append(len(live))
            self._record.exits.append(len(leaving))
            self._record.finished.append(finished)
            if yields() or (self._batch.yields and int(finished) > 0):
                break
        if prompts.rest():
            self._sample(seats[resident.state[seats] == PENDING], line=self._lines)
            self._record.live.append(0)
            self._record.exits.append(0)
            self._record.finished.append(torch.tensor(0))

    def pending(self) -> PendingTicks:
        """What came of them, copied to the host."""
        record, slots, seats = self._record, self._on.slots, self._seats
        ticks = zip(record.live, record.exits, map(int, record.finished), strict=True)
        headers = [(0, 0, 0), *ticks]
        tokens, exit_depths, failed = record.columns(len(headers), len(seats), self._on.device)
        values = TickValues(
            tokens=tokens.cpu(),
            exit_depths=exit_depths.cpu(),
            header=torch.tensor(headers),
            broken=failed.cpu(),
            loops=slots.loops[seats].cpu(),
            states=slots.resident.state[seats].cpu(),
        )
        told = partial(self._read_logprobs, values.broken)
        return PendingTicks(self._batch, self._hosts, values, PASSED, told)

    def read(self, failed: list[FailedRow]) -> ResidentResult:
        """The result; moves each request's progress on."""
        pending = self.pending()
        pending.settle()
        return pending.read(failed)

    def _width(self) -> int:
        """Blocks of a table that hold every position which this plan can reach."""
        reach = [
            min(row.progress.position + 1 + self._batch.max_ticks, row.progress.capacity - 1)
            for row in self._hosts
        ]
        return max(reach) // self._on.slots.block_size + 1

    def _loop(self, seats: Tensor, width: int) -> Tensor:
        """One loop of these slots; those whose token leaves after it."""
        if self._on.loop_graphs is not None and self._on.loop_graphs.fits(len(seats)):
            self._on.loop_graphs.replay_seats(seats)
        else:
            loop_seats(self._on, seats, width)
        return seats[leaves(self._on, seats)]

    def _sample(self, seats: Tensor, line: int) -> Tensor:
        """Half B of these slots; how many of their requests ended, int64 []."""
        if not len(seats):
            return torch.zeros((), dtype=torch.int64)
        found = boundary(self._on, seats, self._kinds, self._needs)
        rows = self._row_of[seats]
        sampled = (found.tokens, found.exit_depths, found.broken)
        self._record.samples.append((line, rows, *sampled))
        self._tell_logprobs(found.logits, found.tokens, rows)
        return found.ends.sum()

    def _tell_logprobs(self, logits: Tensor, tokens: Tensor, rows: Tensor) -> None:
        counts = [kind.logprobs for kind in self._kinds]
        if max(counts) == NO_LOGPROBS:
            return
        told = token_logprobs(logits, tokens, alternatives=max(counts) > 0)
        self._record.logprobs.append((rows, told))

    def _read_logprobs(self, broken: Tensor) -> tuple[TokenLogprobs | None, ...]:
        """One entry an output, row after row; none at all when no row asked for any."""
        if not self._record.logprobs:
            return ()
        by_row: list[list[TokenLogprobs | None]] = [[] for _ in self._hosts]
        for rows, told in self._record.logprobs:
            order = rows.tolist()
            counts = [self._kinds[row].logprobs for row in order]
            asked = [index for index, count in enumerate(counts) if count != NO_LOGPROBS]
            picked = Logprobs(told.sampled[asked], told.top_ids[asked], told.top[asked])
            for row, one in zip(order, read_logprobs(picked, counts), strict=True):
                by_row[row].append(one)
        for row, is_broken in enumerate(broken.tolist()):
            if is_broken:  # its last output is none
                by_row[row].pop()
        return tuple(one for row in by_row for one in row)
