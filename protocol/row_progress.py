"""RowProgress: how far a worker has come with a request, and what it may be asked to do next.

Pure host arithmetic, shared by every worker. A method either raises ProtocolError, which fails
that request alone, or moves the row on, so that a later step of the same plan is judged by what
the earlier ones will have done.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Self

from protocol.errors import ProtocolError
from protocol.plan import SLOT_TOKEN, CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.resident import ResidentBatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.identity import RequestKey
    from protocol.plan import Admission, BlockTable, Fork, Step
    from protocol.resident import ResidentTerms


@dataclass(slots=True)
class RowProgress:
    """One request on one worker. Owner: its slot. Mutated only by: advance, ran and grant.

    `capacity` counts the tokens that its blocks hold, in every plane. `position` is the token in
    work, -1 until the prompt is through, and `loops` the loops that it has run; `outputs` counts
    sampled tokens, `sampled` says that the last of them waits for its PRELUDE. A request with
    `terms` decodes in resident batches alone, and `finished` once it has ended. `tables` are its
    blocks, which say where it is and not how far it has come.
    """

    key: RequestKey
    prompt_length: int
    max_loops: int
    capacity: int = 0
    prefilled: int = 0
    position: int = -1
    loops: int = 0
    outputs: int = 0
    sampled: bool = False
    terms: ResidentTerms | None = None
    finished: bool = False
    tables: BlockTable = field(default=(), repr=False, compare=False)

    @classmethod
    def begin(cls, admission: Admission, max_loops: int) -> Self:
        """A request that is admitted, without its blocks; what they hold is as good as prefilled.

        Raises ProtocolError unless the last prompt token is left: its hidden state, which is not
        KV, is what CODA samples from.
        """
        length, prefilled = len(admission.prompt), admission.prefilled
        terms = admission.resident
        progress = cls(admission.key, length, max_loops, prefilled=prefilled, terms=terms)
        progress._require(prefilled < length, f"{prefilled} of {length} tokens are prefilled")
        return progress

    @property
    def written(self) -> int:
        """Tokens [0, written) have KV: every plane's, or for the one in work that of its loops."""
        return self.prefilled if self.position < 0 else self.position + (self.loops > 0)

    def moved(self, tables: BlockTable, block_size: int) -> Self:
        """The same progress over these blocks alone; they must hold what is written."""
        progress = replace(self, capacity=0, tables=())
        progress.grant(tables, block_size)
        self._require(
            self.written <= progress.capacity,
            f"room for {progress.capacity} tokens, {self.written} are written",
        )
        return progress

    def forked(self, fork: Fork, block_size: int) -> Self:
        """The progress of a copy of this request, over the blocks of the fork.

        Raises ProtocolError unless the prompt is through and nothing was sampled, the blocks hold
        the prompt, and none of this request's is among them but its first complete ones.
        """
        _require(
            fork.key, self.position >= 0, f"the prompt of its parent {self.key} is not through"
        )
        _require(
            fork.key,
            self.outputs == 0 and self.position == self.prompt_length - 1,
            f"its parent {self.key} has sampled already",
        )
        shared = self.shared_blocks(fork.tables, block_size)
        held = {block for plane in self.tables for block in plane}
        _require(
            fork.key,
            held.isdisjoint(block for plane in fork.tables for block in plane[shared:]),
            f"it shares blocks of {self.key} beyond the first {shared} of each plane",
        )
        return replace(self, key=fork.key).moved(fork.tables, block_size)

    def shared_blocks(self, tables: BlockTable, block_size: int) -> int:
        """How many blocks of each plane, from the first on, are this request's prompt blocks."""
        columns = zip(zip(*self.tables, strict=True), zip(*tables, strict=True), strict=False)
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], columns))
        return min(equal, self.prompt_length // block_size)

    def grant(self, tables: BlockTable, block_size: int) -> None:
        """The request now also has these blocks."""
        old = self.tables or ((),) * len(tables)
        self.tables = tuple(plane + more for plane, more in zip(old, tables, strict=True))
        self.capacity += len(tables[0]) * block_size

    def advance(self, step: Step, row: int) -> None:
        """Take one row of a step. Raises ProtocolError when it does not follow."""
        match step:
            case PrefillBatch(_, starts, counts):
                self._prefill(starts[row], starts[row] + counts[row])
            case PreludeBatch(_, positions, tokens):
                self._prelude(positions[row], tokens[row])
            case RecurrentBatch(_, positions, depths):
                self._recurrent(positions[row], depths[row])
            case CodaBatch(_, positions, exit_depths, output_indices):
                self._coda(positions[row], exit_depths[row], output_indices[row])
            case ResidentBatch():
                self._require(self.terms is not None, "a resident row without its terms")
                self._require(self.position >= 0, "a resident row before the end of its prompt")

    def ran(self, outputs: int, loops: int, *, finished: bool) -> None:
        """Resident ticks have given so many outputs; the token in work has run `loops` loops."""
        self.outputs += outputs
        self.position += outputs
        self.loops = loops
        self.finished = finished

    def _prefill(self, start: int, end: int) -> None:
        self._require(start == self.prefilled, f"prefill from {start}, {self.prefilled} are done")
        self._require(end <= self.prompt_length, f"prefill to {end} of {self.prompt_length} tokens")
        self._require(end <= self.capacity, f"prefill to {end}, room for {self.capacity}")
        self.prefilled = end
        if end == self.prompt_length:
            self.position, self.loops = end - 1, self.max_loops

    def _prelude(self, position: int, token: int) -> None:
        self._require(self.terms is None, "a prelude of a resident request")
        self._require(self.sampled or token != SLOT_TOKEN, "prelude without a sampled token")
        self._require(self.position >= 0, "prelude before the end of its prompt")
        self._require(position == self.position + 1, f"prelude at {position} after {self.position}")
        self._require(position < self.capacity, f"position {position}, room for {self.capacity}")
        self.position, self.loops, self.sampled = position, 0, False

    def _recurrent(self, position: int, depth: int) -> None:
        self._require(self.terms is None, "a single loop of a resident request")
        self._require(not self.sampled, "a loop before the prelude of the sampled token")
        self._require(position == self.position, f"loop at {position}, in work is {self.position}")
        self._require(depth == self.loops, f"loop at depth {depth} after {self.loops} loops")
        self._require(depth < self.max_loops, f"depth {depth} of {self.max_loops} loops")
        self.loops += 1

    def _coda(self, position: int, exit_depth: int, output_index: int) -> None:
        self._require(self.terms is None, "a coda of a resident request")
        self._require(not self.sampled, "a second coda of the same token")
        self._require(position == self.position, f"coda at {position}, in work is {self.position}")
        self._require(exit_depth == self.loops, f"exit depth {exit_depth} after {self.loops} loops")
        self._require(output_index == self.outputs, f"output {output_index} after {self.outputs}")
        self.outputs += 1
        self.sampled = True

    def _require(self, holds: bool, what: str) -> None:
        _require(self.key, holds, what)


def _require(key: RequestKey, holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(f"request {key}: {what}")


def check_table(key: RequestKey, tables: BlockTable, planes: int, num_blocks: int) -> None:
    """Raise ProtocolError unless a table has every plane and only blocks of the pool."""
    if len(tables) != planes:
        raise ProtocolError(f"request {key}: table of {len(tables)} planes, not {planes}")
    if any(block >= num_blocks for plane in tables for block in plane):
        raise ProtocolError(f"request {key}: a block is beyond the {num_blocks} of the pool")


def check_vocabulary(admission: Admission, vocab_size: int) -> None:
    """Raise ProtocolError unless every token that an admission names is one of the model's."""
    biased = (token for token, _ in admission.logit_bias)
    ending = admission.resident.ending_ids if admission.resident else ()
    largest = max((*admission.prompt, *biased, *admission.banned_ids, *ending))
    if largest >= vocab_size:
        raise ProtocolError(f"request {admission.key}: token {largest} is not in [0, {vocab_size})")


def check_parent(fork: Fork, failed: Mapping[RequestKey, str]) -> None:
    """Raise ProtocolError if the parent of a fork has failed: its KV may be anything."""
    if fork.parent in failed:
        raise ProtocolError(
            f"request {fork.key}: its parent {fork.parent} has failed: {failed[fork.parent]}"
        )
