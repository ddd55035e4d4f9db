"""ExecutionPlan: what one worker is to run, as an immutable snapshot.

Rows are columns: every field of a batch is a tuple with one entry a row, in the same order.
Positions are token indices in the request, depths are 0-based, exit depths are 1-based.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from protocol.checks import require_distinct, require_equal_lengths, require_non_negative
from protocol.resident import ResidentBatch
from protocol.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.resident import ResidentTerms
    from protocol.rng import RngKey

BlockTable: TypeAlias = tuple[tuple[int, ...], ...]
"""Block numbers, [planes][blocks]: entry [d][i] holds tokens i*block_size.. of depth d."""


NO_LOGPROBS = -1
"""In Admission.logprobs: tell no log probability."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request, sent whole once: later plans carry only what changes.

    `prompt` all prompt token ids; `tables` the blocks granted so far, the same number in every
    plane; `top_k` -1 keeps every token. `logit_bias` has (token id, bias) pairs; the `banned_ids`
    are not sampled among the first `min_tokens` outputs. `logprobs` is how many alternatives are
    told beside each token's log probability. `prefilled` counts the prompt tokens whose KV is in
    the first of these blocks already, at every depth: prefill starts there, and nothing writes
    before it. `resident` is set for a request whose exits and end the worker decides by itself.
    """

    key: RequestKey
    prompt: tuple[int, ...]
    tables: BlockTable
    rng: RngKey
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    banned_ids: tuple[int, ...] = ()
    logprobs: int = NO_LOGPROBS
    prefilled: int = 0
    resident: ResidentTerms | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"admission of {self.key}: the prompt is empty")
        biased = tuple(token for token, _ in self.logit_bias)
        columns = (self.prompt, biased, self.banned_ids, (self.min_tokens, self.prefilled))
        require_non_negative(f"admission of {self.key}", *columns, *self.tables)
        if self.repetition_penalty <= 0.0:
            raise ValueError(f"admission of {self.key}: a repetition penalty is above 0")
        if not NO_LOGPROBS <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"admission of {self.key}: {self.logprobs} logprobs")
        require_equal_lengths(f"tables of {self.key}", *self.tables)


@dataclass(frozen=True, slots=True)
class Grant:
    """More blocks for an admitted request, appended to each plane of its table."""

    key: RequestKey
    tables: BlockTable

    def __post_init__(self) -> None:
        require_non_negative(f"grant to {self.key}", *self.tables)
        require_equal_lengths(f"grant to {self.key}", *self.tables)


@dataclass(frozen=True, slots=True)
class Resume:
    """A suspended request goes on over these blocks, in whatever slot is free.

    Its KV is written into them anew, so no other request may read them.
    """

    key: RequestKey
    tables: BlockTable

    def __post_init__(self) -> None:
        require_non_negative(f"resume of {self.key}", *self.tables)
        require_equal_lengths(f"resume of {self.key}", *self.tables)


@dataclass(frozen=True, slots=True)
class Fork:
    """A request that starts as a copy of `parent`, but for its table and what it draws.

    The prompt of `parent` is through every depth, and nothing was sampled of it yet. `tables` is
    the whole table of `key`. Its first blocks may be the parent's complete prompt blocks, the same
    in every plane, which nobody writes to again; the others are its own, and the worker copies the
    KV of the prompt tokens that belong there.

    Example: block size 4, a prompt of 10 in (3, 5, 8) of one plane -> (3, 5, 9, 2) shares 3 and 5;
    tokens 8 and 9 are copied from block 8 to block 9.
    """

    key: RequestKey
    parent: RequestKey
    tables: BlockTable
    rng: RngKey

    def __post_init__(self) -> None:
        if self.key == self.parent:
            raise ValueError(f"fork of {self.key}: a request is no copy of itself")
        require_non_negative(f"fork of {self.key}", *self.tables)
        require_equal_lengths(f"fork of {self.key}", *self.tables)


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Prompt chunks [start, start + count) through every depth; ids come from the admission."""

    keys: tuple[RequestKey, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        require_equal_lengths("prefill", self.keys, self.starts, self.counts)
        require_non_negative("prefill", self.starts)
        require_distinct("prefill", self.keys)
        if self.counts and min(self.counts) < 1:
            raise ValueError("prefill: a chunk has at least one token")


SLOT_TOKEN = -1
"""In PreludeBatch.tokens: embed the token that CODA left in the slot."""


@dataclass(frozen=True, slots=True)
class PreludeBatch:
    """Embed one token a row at `positions`; SLOT_TOKEN takes the one already on the device."""

    keys: tuple[RequestKey, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        require_equal_lengths("prelude", self.keys, self.positions, self.tokens)
        require_non_negative("prelude", self.positions)
        require_distinct("prelude", self.keys)
        if self.tokens and min(self.tokens) < SLOT_TOKEN:
            raise ValueError(f"prelude: token {min(self.tokens)} is no token id")


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """One loop a row, each at its own 0-based depth; rows of every depth share the batch."""

    keys: tuple[RequestKey, ...]
    positions: tuple[int, ...]
    depths: tuple[int, ...]

    def __post_init__(self) -> None:
        require_equal_lengths("recurrent", self.keys, self.positions, self.depths)
        require_non_negative("recurrent", self.positions, self.depths)
        require_distinct("recurrent", self.keys)


@dataclass(frozen=True, slots=True)
class CodaBatch:
    """Finalize the KV of `positions` at `exit_depths` (1-based), then sample output i of each."""

    keys: tuple[RequestKey, ...]
    positions: tuple[int, ...]
    exit_depths: tuple[int, ...]
    output_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        require_equal_lengths(
            "coda", self.keys, self.positions, self.exit_depths, self.output_indices
        )
        require_non_negative("coda", self.positions, self.output_indices)
        require_distinct("coda", self.keys)
        if self.exit_depths and min(self.exit_depths) < 1:
            raise ValueError("coda: an exit depth is at least 1")


StagedStep: TypeAlias = PrefillBatch | PreludeBatch | RecurrentBatch | CodaBatch
Step: TypeAlias = StagedStep | ResidentBatch


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """One frame of a worker's ordered stream.

    `seq` counts the frames of an epoch from 1. A worker applies releases, then suspends, resumes,
    admits, forks and grants, then runs the steps in order. A plan without steps is legal and is
    answered.

    A suspended request leaves its slot and its blocks, which may go to others once the plan's
    result is applied; its snapshot stays on the worker until it is resumed or released.
    """

    epoch: int
    seq: int
    releases: tuple[RequestKey, ...] = ()
    admits: tuple[Admission, ...] = ()
    grants: tuple[Grant, ...] = ()
    steps: tuple[Step, ...] = ()
    suspends: tuple[RequestKey, ...] = ()
    resumes: tuple[Resume, ...] = ()
    forks: tuple[Fork, ...] = ()

    @property
    def changes_slots(self) -> bool:
        """Whether it does more than go on with what is there."""
        return self.interrupts or bool(self.grants)

    @property
    def interrupts(self) -> bool:
        """Whether ticks make way for it: somebody comes or goes.

        Grants alone do not: most plans bring the next blocks of rows that have room left.
        """
        return bool(self.releases or self.suspends or self.resumes or self.admits or self.forks)

    def __post_init__(self) -> None:
        if self.epoch < 1 or self.seq < 1:
            raise ValueError(f"epoch {self.epoch} and seq {self.seq} count from 1")
