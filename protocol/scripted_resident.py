"""Resident ticks of a scripted worker, row by row: the rule in its plainest form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from protocol.exit_rule import exits, round_to_float32
from protocol.resident import RowState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.identity import RequestKey
    from protocol.resident import ResidentBatch, ResidentTerms
    from protocol.row_progress import RowProgress


Hazard: TypeAlias = "Callable[[RequestKey, int, int], float]"
"""The gate, in [0, 1], of (key, position, 0-based depth)."""

Token: TypeAlias = "Callable[[RequestKey, int], int]"
"""The sampled token of (key, output index)."""


@dataclass(slots=True)
class TickingRow:
    """One row of one batch. Owner: run_ticks, which alone mutates it and, once, its progress."""

    progress: RowProgress
    terms: ResidentTerms
    survival: float
    position: int
    loops: int
    state: RowState
    tokens: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, progress: RowProgress, terms: ResidentTerms, survival: float) -> TickingRow:
        """A row as its last plan, with a grant since perhaps, has left it."""
        state = RowState.FINISHED if progress.finished else RowState.READY
        row = cls(progress, terms, survival, progress.position, progress.loops, state)
        if state is RowState.READY and progress.outputs:
            row.make_ready()
        return row

    @property
    def outputs(self) -> int:
        """Outputs of the request so far."""
        return self.progress.outputs + len(self.tokens)

    def make_ready(self) -> None:
        """READY if there is a block for its position, else PARKED."""
        has_room = self.position < self.progress.capacity
        self.state = RowState.READY if has_room else RowState.PARKED

    def loop(self, hazard: Hazard) -> bool:
        """One loop; whether the token leaves after it."""
        keeps = round_to_float32(1.0 - hazard(self.progress.key, self.position, self.loops))
        self.survival = round_to_float32(self.survival * keeps)
        self.loops += 1
        if self.terms.forced_depths:
            return self.loops >= self.terms.forced_depths[self.outputs]
        return exits(
            self.loops,
            self.survival,
            min_loops=self.terms.min_loops,
            max_loops=self.terms.max_loops,
            bound=self.terms.bound,
        )

    def sample(self, token: Token) -> None:
        """The next output, and what becomes of the row with it."""
        sampled = token(self.progress.key, self.outputs)
        self.tokens.append(sampled)
        self.exit_depths.append(self.loops)
        self.position, self.loops, self.survival = self.position + 1, 0, 1.0
        if sampled in self.terms.ending_ids or self.outputs >= self.terms.max_tokens:
            self.state = RowState.FINISHED
        else:
            self.make_ready()

    def settle(self) -> None:
        """Tell the request's progress what was run."""
        finished = self.state is RowState.FINISHED
        self.progress.ran(len(self.tokens), self.loops, finished=finished)


def run_ticks(
    rows: Sequence[TickingRow], batch: ResidentBatch, hazard: Hazard, token: Token
) -> tuple[list[int], list[int], list[int]]:
    """Run a batch; for each tick the rows that looped, whose token left, and that ended."""
    for row in rows:
        if row.outputs == 0:
            row.sample(token)
    live: list[int] = []
    exited: list[int] = []
    finished: list[int] = []
    while len(live) < batch.max_ticks:
        ready = [row for row in rows if row.state is RowState.READY]
        if not ready:
            break
        leaving = [row for row in ready if row.loop(hazard)]
        for row in leaving:
            row.sample(token)
        ended = sum(row.state is RowState.FINISHED for row in leaving)
        for column, count in ((live, len(ready)), (exited, len(leaving)), (finished, ended)):
            column.append(count)
        if batch.yields and ended:
            break
    for row in rows:
        row.settle()
    return live, exited, finished
